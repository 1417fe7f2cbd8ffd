"""`podrace launch`: the time until the first update, against `podrace train`.

In turn: `podrace train` with environments on the host, and `podrace launch --as seed` with the same, each from its start
to the first line of metrics.jsonl. Programs are compiled before. Kills of a program's processes are in
tests/endurance/launch_kills.py, which writes other cases of the same file, benchmarks/results/launch.json.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import common

LONGEST = 300.0  # seconds until the first update
RUN = ('--agent', 'impala', '--env', 'gymnasium:CartPole-v1', '--num-envs', '16', '--actor-threads', '1',
       '--log-every', '512', '--checkpoint-every', '10000')  # fmt: skip
COMMANDS = {'train': ('train', *RUN), 'launch': ('launch', *RUN, '--as', 'seed')}


def seconds_to_first_line(*command: str) -> float:
  """Starts a run, waits for its first line of metrics, and stops it."""
  with tempfile.TemporaryDirectory(prefix='podrace-bench-') as folder:
    run_dir, log = Path(folder, 'run'), Path(folder, 'log.txt')
    began = time.perf_counter()
    process = common.start_podrace(log, *command, '--run-dir', run_dir)
    try:
      while not common.metrics(run_dir):
        if process.poll() is not None or time.perf_counter() > began + LONGEST:
          raise RuntimeError(f'{command} has no line of metrics:\n{log.read_text()[-2000:]}')
        time.sleep(0.02)
      return time.perf_counter() - began
    finally:
      common.stop(process)


def main() -> None:
  args = common.arguments(__doc__, repeats=5)
  seconds: dict[str, list[float]] = {k: [] for k in COMMANDS}
  for i in range(args.repeats + 1):
    for name, command in COMMANDS.items():
      took = seconds_to_first_line(*command)
      print(f'{name}: {took:.1f} s{"" if i else ", with compiling"}', flush=True)
      if i:  # the first compiles
        seconds[name].append(took)
  ratio = common.pair_ratio(seconds['launch'], seconds['train'])
  print(f'launch over train: {ratio:.2f}', flush=True)
  result = common.summaries(seconds) | dict(launch_over_train=ratio) | common.origin()
  common.keep('launch', 'first', result)


if __name__ == '__main__':
  main()
