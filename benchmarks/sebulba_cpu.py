"""Where the cores' time goes when Sebulba plays Pong: CPU time of each kind of thread, in each stage and in the run.

Each stage of `podrace bench sebulba` alone, then the run, in one process; the kernel tells of each
thread how long it ran and how long it waited for a core. What the run needs for a step beyond the
sum of its stages is work of its own, or the same work made slower by what runs beside it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

SIZES = ['--num-envs', '32', '--unroll-length', '20']
SETTINGS = {
  'pong-impala': SIZES,
  'pong-nature': [*SIZES, '--agent.network.torso', 'nature', '--agent.network.hidden', '512'],
}
STAGES = ('environment', 'inference', 'learner', 'combined')
WATCHER = 'watcher'
Used = dict[int, tuple[str, int, int]]  # thread -> what it is, and the ns that it ran and waited


def used() -> Used:
  """Of this process's threads: ns that they ran, and that they waited for a core."""
  names = {t.native_id: t.name for t in threading.enumerate()}
  found: Used = {}
  for task in Path('/proc/self/task').iterdir():
    try:
      ran, waited, _ = map(int, (task / 'schedstat').read_text().split())
      comm = (task / 'comm').read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
      continue
    tid = int(task.name)
    if tid in names:
      kind = names[tid] if names[tid] in ('MainThread', WATCHER) else 'Python threads'
    else:
      kind = 'XLA' if comm.startswith('tf_') else 'native threads'
    found[tid] = (kind, ran, waited)
  return found


def watched(call: Callable[[], float], seconds: float) -> dict[str, Any]:
  """us a step, of each kind of thread, that it ran and that it waited, as `call` measures its rate at its end."""
  samples: list[tuple[float, Used]] = []
  over = threading.Event()

  def watch() -> None:
    while not over.wait(0.1):
      samples.append((time.perf_counter(), used()))

  watcher = threading.Thread(target=watch, name=WATCHER)
  watcher.start()
  try:
    rate = call()
  finally:
    end = time.perf_counter()
    over.set()
    watcher.join()
  begun, first = min(samples, key=lambda s: abs(s[0] - (end - 0.9 * seconds)))
  done, last = min(samples, key=lambda s: abs(s[0] - (end - 0.2 * seconds)))
  steps = rate * (done - begun)
  ran: dict[str, float] = collections.defaultdict(float)
  waited: dict[str, float] = collections.defaultdict(float)
  for tid, (kind, a, b) in last.items():
    if kind == WATCHER:
      continue
    _, c, d = first.get(tid, (kind, 0, 0))
    ran[kind] += (a - c) / 1e3 / steps
    waited[kind] += (b - d) / 1e3 / steps
  return dict(
    rate=rate,
    cores=sum(ran.values()) * rate / 1e6,
    ran={k: round(v, 1) for k, v in sorted(ran.items())},
    waited={k: round(v, 1) for k, v in sorted(waited.items())},
  )


def profile(args: list[str], seconds: float) -> dict[str, Any]:
  """Each stage's, and the run's."""
  import jax
  import numpy as np

  from podrace.commands.configure import base_config, parse
  from podrace.experiments import bench
  from podrace.run.build import build_sebulba

  base = dataclasses.replace(base_config('pong'), architecture='sebulba')
  config = parse(base, args)
  driver = build_sebulba(config)
  program = bench.acting_of(driver)
  driver.compile()
  keys = jax.vmap(jax.random.key)(np.array([config.seed], np.uint32))
  state = driver.init(jax.random.clone(keys))
  found = dict(
    environment=watched(lambda: bench.environment_rate(program, state, keys, seconds), seconds),
    inference=watched(lambda: bench.inference_rate(program, state, seconds), seconds),
    learner=watched(lambda: bench.learner_rate(driver, state, seconds), seconds),
  )
  state = driver.init(jax.random.clone(keys))
  found['combined'] = watched(
    lambda: bench.combined_rate(driver, state, keys, seconds / 2)[0], seconds
  )
  return found


def of_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
  """Medians of a stage's."""
  kinds = sorted({k for r in runs for k in r['ran']})
  medians = {
    what: {k: statistics.median(r[what].get(k, 0.0) for r in runs) for k in kinds}
    for what in ('ran', 'waited')
  }
  return dict(
    rate=common.summary([r['rate'] for r in runs]),
    cores=statistics.median(r['cores'] for r in runs),
    **medians,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('settings', nargs='*', help=f'of {[*SETTINGS]}; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=6.0)
  parser.add_argument('--cores', type=int, nargs='*', default=[2, 4], help='so many of them each')
  parser.add_argument('--one', metavar='SETTING', help='one profile, told as JSON')
  args = parser.parse_args()
  if args.one:
    print(json.dumps(profile(SETTINGS[args.one], args.seconds)))
    return
  if wrong := set(args.settings) - set(SETTINGS):
    parser.error(f'no setting is called {sorted(wrong)}; there are {[*SETTINGS]}')
  allowed = sorted(os.sched_getaffinity(0))
  path = common.RESULTS / 'sebulba_cpu.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  for name, cores in itertools.product(args.settings or SETTINGS, args.cores):
    if cores > len(allowed):
      print(f'left out: {cores} cores, where there are {len(allowed)}')
      continue
    command = [sys.executable, __file__, '--one', name, '--seconds', str(args.seconds)]
    os.sched_setaffinity(0, allowed[:cores])  # of the processes that begin here
    runs = [common.last_json(command) for _ in range(args.repeats)]
    os.sched_setaffinity(0, allowed)
    found = results[f'{name}, {cores} cores'] = {s: of_runs([r[s] for r in runs]) for s in STAGES}
    found['origin'] = common.origin()
    for stage in STAGES:
      print(name, cores, stage, json.dumps(found[stage]), flush=True)
    common.record('sebulba_cpu', results)


if __name__ == '__main__':
  main()
