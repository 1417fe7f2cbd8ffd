"""What handing over from one core to another costs here, and what it does to a run of short steps.

Two processes wake each other through pipes, on one core and on two. Then `podrace bench sebulba` with
EnvPool's CartPole and one actor thread, on one core alone and on all, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import common

SIZES = (128, 1024)
ARGS = [
  '--env', 'envpool:CartPole-v1', '--agent', 'impala', '--agent.network.hidden', '64', '64',
  '--unroll-length', '20', '--actor-threads', '1', '--num-envs',
]  # fmt: skip
RATES = ('environment', 'inference', 'learner', 'combined', 'parallel')


def round_trip(mine: int, others: int, times: int = 20_000) -> float:
  """Microseconds of a byte to a process on core `others` and back."""
  (read, answer), (ask, write) = os.pipe(), os.pipe()
  child = os.fork()
  if not child:
    os.sched_setaffinity(0, {others})
    for _ in range(times):
      os.write(answer, os.read(ask, 1))
    os._exit(0)
  os.sched_setaffinity(0, {mine})
  start = time.perf_counter()
  for _ in range(times):
    os.write(write, b'x')
    os.read(read, 1)
  took = time.perf_counter() - start
  os.waitpid(child, 0)
  for end in (read, answer, ask, write):
    os.close(end)
  return took / times * 1e6


def round_trips(cores: list[int], repeats: int) -> dict[str, Any]:
  found: dict[str, list[float]] = {'one core': [], 'two cores': []}
  for _ in range(repeats):
    for name, others in (('one core', cores[0]), ('two cores', cores[-1])):
      found[name].append(round_trip(cores[0], others))
  os.sched_setaffinity(0, cores)
  for name, values in found.items():
    print(f'there and back, {name}: {statistics.median(values):.1f} us', flush=True)
  return {k: common.summary(v) for k, v in found.items()}


def benches(cores: list[int], num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """The rates on one core alone, and on all."""
  command = [sys.executable, '-m', 'podrace.cli', 'bench', 'sebulba', *ARGS, str(num_envs)]
  runs: dict[str, list[dict[str, Any]]] = {'one core': [], 'all cores': []}
  for _ in range(repeats):
    for name, allowed in (('one core', cores[:1]), ('all cores', cores)):
      os.sched_setaffinity(0, allowed)  # of the processes that begin here
      runs[name].append(common.last_json([*command, '--seconds', str(seconds)]))
      print(num_envs, name, {k: runs[name][-1][k] for k in RATES}, flush=True)
  os.sched_setaffinity(0, cores)
  return {
    name: {k: common.summary([r[k] for r in of]) for k in (*RATES, 'combined_over_parallel')}
    for name, of in runs.items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=4.0)
  args = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    sys.exit('this compares one core with several, and there is one')
  results = dict(round_trip_us=round_trips(cores, args.repeats), args=ARGS)
  for num_envs in SIZES:
    results[f'{num_envs} environments'] = benches(cores, num_envs, args.repeats, args.seconds)
    common.record('handovers', results)


if __name__ == '__main__':
  main()
