"""Remote environments: training ale:pong.

`podrace train pong` with environments in the process, with `podrace envs` in another, with two of these, and with one over
TLS; in turn, on the same cores; the median of steps_per_s in the last three quarters of a run.
"""

from __future__ import annotations

import pathlib
import resource
import statistics
import subprocess
import tempfile
from typing import Any

import common

TRAINING = {'local': 0, 'remote': 1, 'two processes': 2, 'TLS': 1}  # processes of environments


def new_keys(directory: str) -> pathlib.Path:
  """Makes keys for a server and its clients."""
  from podrace.distributed.net import keys

  keys.new_keys(pathlib.Path(directory) / 'keys')
  return pathlib.Path(directory) / 'keys'


def train(name: str, steps: int, address: str = '') -> dict[str, Any]:
  """Makes a run of `TRAINING`; over a Unix socket if no address is given, but for TLS."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as directory:
    folder, keys = pathlib.Path(directory), ()
    if name == 'TLS':
      keys = ('--keys', new_keys(directory))
      address = f'tcp://127.0.0.1:{common.free_port()}'
    address, processes = address or f'unix:{directory}/socket', TRAINING[name]
    act = ('--connect', address, '--env', 'ale:pong', '--num-envs', 16 // max(processes, 1), *keys)
    environments: list[subprocess.Popen[bytes]] = [
      common.start_podrace(folder / f'envs{i}.txt', 'envs', *act) for i in range(processes)
    ]
    remote = ('--envs', 'remote', '--listen', address, *keys) if processes else ()
    common.podrace('train', 'pong', '--total-steps', steps, '--run-dir', folder / 'run', '--quiet', *remote)  # fmt: skip
    for one in environments:
      if one.wait(60):
        raise RuntimeError(f'the environments ended with {one.returncode}')
    lines, summary = common.metrics(folder / 'run'), common.summary_of(folder / 'run')
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return dict(
    cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,  # of all processes
    steps_per_s=summary['steps_per_s'],
    steady_steps_per_s=statistics.median(x['steps_per_s'] for x in lines[len(lines) // 4 :]),
    policy_lag_mean=statistics.mean(x['policy_lag_mean'] for x in lines),
    dropped_steps=sum(x['dropped_steps'] for x in lines),
    actor_time={k: v for k, v in lines[-1].items() if k.startswith('actor_')},
  )  # fmt: skip


def training(repeats: int, steps: int) -> dict[str, Any]:
  runs: dict[str, list[dict[str, Any]]] = {name: [] for name in TRAINING}
  for _ in range(repeats):
    for name, each in runs.items():
      each.append(train(name, steps))
      print(name, each[-1], flush=True)
  rates, cpu = ({k: common.summary([r[x] for r in v]) for k, v in runs.items()} for x in ('steady_steps_per_s', 'cpu_s'))  # fmt: skip
  over_local = {k: r['median'] / rates['local']['median'] for k, r in rates.items()}
  return dict(steps=steps, rates=rates, cpu_s=cpu, runs=runs, over_local=over_local)


def main() -> None:
  args = common.arguments(__doc__, repeats=3, steps=60_000)
  result = training(args.repeats, args.steps)
  common.keep('remote', 'training', result | dict(origin=common.origin()))


if __name__ == '__main__':
  main()
