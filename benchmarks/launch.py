"""`podrace launch`: what kills of its processes cost, and the time until the first update.

    python benchmarks/launch.py kills [--kills 34] [--on ray] [--programs seed impala learners]
    python benchmarks/launch.py first [--repeats 5]

`kills` ends a random process of a program with SIGKILL, again and again, 3 to 12 s after the run goes on: of SEED RL
(IMPALA on Gymnasium's CartPole, two processes of environments), of IMPALA with a queue (Catch, two acting processes),
and of two processes that learn as one (Catch, Anakin), whose parameters must in the end be those of a run in
which nothing was killed. Time lost is from a kill until the run has come further than it was. A program that is complete is followed
by another one, until there were so many kills. After each no process may be left, and the run must be whole. With
`--on ray` (pip install 'podrace[ray]') programs are on a cluster of four nodes on this machine, and the actors that
keep processes are killed as well.

`first` takes turns: `podrace train` with environments on the host, and `podrace launch --as seed` with the same, each
from its start to the first line of metrics.jsonl. Programs are compiled before.

Writes benchmarks/results/launch.json after each program; what is not run keeps what the file has of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

CARTPOLE = (
  '--agent', 'impala', '--env', 'gymnasium:CartPole-v1', '--num-envs', '16', '--actor-threads', '1',
)  # fmt: skip
OFTEN = ('--log-every', '512', '--checkpoint-every', '10000')
PROGRAMS = {
  'seed': (*CARTPOLE, '--as', 'seed', '--total-steps', '600000', *OFTEN),
  'impala': ('catch', '--as', 'impala', '--total-steps', '1500000', '--log-every', '2048', '--checkpoint-every', '50000'),
  'learners': (
    'catch', '--as', 'learners', '--architecture', 'anakin', '--total-steps', '1000000', '--log-every', '5000',
    '--checkpoint-every', '20000',
  ),
}  # fmt: skip
EXACT = ('learners',)  # on one machine only
MARK = uuid.uuid4().hex  # in the environment of all that is started here
KEEPER = 'podrace.launch.supervisor.remote_child'
PODRACE = (sys.executable, '-m', 'podrace')
WAITED = 120.0  # seconds for a run to go on, at most


class Launched:
  """A program that runs."""

  def __init__(self, *command: str) -> None:
    self.run_dir = Path(tempfile.mkdtemp(prefix='podrace-bench-')) / 'run'
    self.output = (self.run_dir.parent / 'said.txt').open('wb')
    self.began = time.perf_counter()
    self.process = subprocess.Popen(
      (*PODRACE, *command, '--run-dir', str(self.run_dir)), stdout=self.output, stderr=self.output,
      cwd=common.ROOT, env=os.environ,
    )  # fmt: skip

  @property
  def step(self) -> int:
    """The newest in metrics.jsonl; 0 before there is one."""
    path = self.run_dir / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [x for x in lines[-2:] if x.endswith('\n')]
    return json.loads(whole[-1])['step'] if whole else 0

  def reaches(self, step: int) -> float:
    """Seconds until the run has come further than that, or has ended."""
    began = time.perf_counter()
    while self.step <= step and self.process.poll() is None:
      if time.perf_counter() - began > WAITED:
        raise RuntimeError(f'no step after {step} within {WAITED} s: see {self.output.name}')
      time.sleep(0.02)
    return time.perf_counter() - began

  def nodes(self) -> dict[str, int]:
    """pid by a process's kind and pid: of those that the launcher, or an actor of Ray, has started."""
    found = {}
    for pid in self.left():
      words, parent = words_of(pid), parent_of(pid)
      kept = KEEPER in words_of(parent)
      if not (kept or parent == self.process.pid):
        continue
      if 'podrace' in words:
        kind = words[words.index('podrace') + 1]
        found[f'{kind} {pid}'] = pid
        if kept:
          found[f'{kind}-actor {pid}'] = parent_of(parent)
    return found

  def left(self) -> list[int]:
    """Pids of processes that were started for it and still are; those of Ray itself do not count."""
    found = []
    for path in Path('/proc').glob('[0-9]*/environ'):
      pid = int(path.parent.name)
      with contextlib.suppress(OSError):
        marked = f'PODRACE_BENCHMARK={MARK}'.encode() in path.read_bytes()
        if marked and not any('ray::' in x or '/ray/' in x for x in words_of(pid)):
          found.append(pid)
    return [pid for pid in found if pid != self.process.pid]


def words_of(pid: int) -> list[str]:
  """The command of a process; empty if there is none."""
  with contextlib.suppress(OSError):
    return Path(f'/proc/{pid}/cmdline').read_text().split('\0')
  return []


def parent_of(pid: int) -> int:
  """The pid of the process that has started it; 0 if there is none."""
  with contextlib.suppress(OSError):
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
  return 0


@contextlib.contextmanager
def cluster(engine: str) -> Iterator[None]:
  """What an engine needs: for Ray a head and three nodes with two cores each."""
  if engine != 'ray':
    yield
    return
  from ray.cluster_utils import Cluster

  memory = 200 * 2**20
  head = dict(num_cpus=0, object_store_memory=memory, include_dashboard=False)
  nodes = Cluster(initialize_head=True, head_node_args=head)
  try:
    for _ in range(3):
      nodes.add_node(num_cpus=2, object_store_memory=memory)
    nodes.wait_for_nodes()
    os.environ['RAY_ADDRESS'] = nodes.address
    yield
  finally:
    nodes.shutdown()


def killed(name: str, kills: int, rng: random.Random, engine: str) -> dict[str, Any]:
  """Programs of one arrangement, until there were so many kills."""
  lost: list[tuple[str, float]] = []
  programs = 0
  whole = undisturbed(name) if name in EXACT else None
  while len(lost) < kills:
    launched = Launched('launch', *PROGRAMS[name], '--on', engine)
    launched.reaches(0)
    while launched.process.poll() is None and len(lost) < kills:
      try:
        launched.process.wait(rng.uniform(3, 12))
        break
      except subprocess.TimeoutExpired:
        pass
      if not (there := sorted(launched.nodes().items())):
        continue  # all of them are about to start
      kind, pid = rng.choice(there)
      step = launched.step
      os.kill(pid, signal.SIGKILL)
      lost.append((kind.split()[0], launched.reaches(step)))
      print(f'{name}: {lost[-1][0]} killed at step {step:,}: {lost[-1][1]:.1f} s', flush=True)
    code = launched.process.wait()
    summary = json.loads((launched.run_dir / 'summary.json').read_text())
    assert code == 0, f'ended with {code}: see {launched.output.name}'
    assert not launched.left(), f'processes are left: {launched.left()}'
    assert whole in (None, summary['params_sha256']), 'other parameters than without kills'
    programs += 1
    print(f'{name}: complete at step {summary["step"]:,}', flush=True)
  kinds = {k: [s for x, s in lost if x == k] for k in sorted({x for x, _ in lost})}
  return dict(
    program=' '.join(PROGRAMS[name]), programs=programs, lost_s=common.summary([s for _, s in lost]),
    by_kind={k: common.summary(v) for k, v in kinds.items()}, steps=summary['step'],
    params_sha256=whole,
  )  # fmt: skip


def undisturbed(name: str) -> str:
  """The sum of what a program learns in which nothing is killed."""
  launched = Launched('launch', *PROGRAMS[name])
  assert launched.process.wait() == 0, launched.output.name
  return str(json.loads((launched.run_dir / 'summary.json').read_text())['params_sha256'])


def first(repeats: int) -> dict[str, Any]:
  """Seconds to the first line of metrics."""
  commands = dict(
    train=('train', *CARTPOLE, *OFTEN), launch=('launch', *CARTPOLE, *OFTEN, '--as', 'seed')
  )
  found: dict[str, list[float]] = {k: [] for k in commands}
  for i in range(repeats + 1):
    for name, command in commands.items():
      launched = Launched(*command)
      launched.reaches(0)
      if i:  # the first compiles
        found[name].append(time.perf_counter() - launched.began)
      launched.process.send_signal(signal.SIGTERM)
      launched.process.wait()
  ratio = statistics.median(b / a for a, b in zip(found['train'], found['launch'], strict=True))
  print({k: round(statistics.median(v), 1) for k, v in found.items()}, f'{ratio:.2f}', flush=True)
  return {k: common.summary(v) for k, v in found.items()} | dict(launch_over_train=ratio)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('cases', nargs='*', help='kills, first; none: both')
  parser.add_argument('--kills', type=int, default=34, help='of each program')
  parser.add_argument('--programs', nargs='*', default=list(PROGRAMS), choices=PROGRAMS)
  parser.add_argument('--on', choices=('local', 'ray'), default='local', help='of kills')
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  path = common.RESULTS / 'launch.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  rng = random.Random(0)
  os.environ.update(PYTHONPATH=common.PATH, PODRACE_BENCHMARK=MARK)
  for case in args.cases or ('first', 'kills'):
    if case == 'first':
      results[case] = first(args.repeats) | common.origin()
    else:
      found = results.setdefault(case if args.on == 'local' else f'{case}_{args.on}', {})
      with cluster(args.on):
        for name in args.programs:
          if args.on == 'local' or name not in EXACT:
            found[name] = killed(name, args.kills, rng, args.on) | common.origin()
            common.record('launch', results)
    common.record('launch', results)


if __name__ == '__main__':
  main()
