"""How long commands take that only read: `--help`, `list`, and `runs` on 1,000 runs. Whole processes, medians."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

COMMANDS = {
  'podrace --help': ['--help'],
  'podrace train --help': ['train', '--help'],
  'podrace train cartpole --help': ['train', 'cartpole', '--help'],
  'podrace list': ['list'],
  'podrace runs, of 1,000': ['runs'],
}


def make_runs(folder: Path, number: int, lines: int) -> None:
  """Run directories as a finished run of `lines` lines of metrics leaves them, without checkpoints."""
  config = {
    'agent': {'name': 'ppo'},
    'env': 'gymnax:CartPole-v1',
    'architecture': 'anakin',
    'total_steps': lines,
  }
  line = {
    'wall_s': 1.0,
    'steps_per_s': 1e5,
    'episode_return': 480.0,
    'episode_length': 480.0,
    'episodes': 12,
  }
  text = ''.join(json.dumps({'step': i + 1, **line}) + '\n' for i in range(lines))
  for i in range(number):
    run = folder / 'runs' / f'cartpole-{i:04d}'
    run.mkdir(parents=True)
    (run / 'config.json').write_text(json.dumps(config))
    (run / 'metrics.jsonl').write_text(text)
    (run / 'summary.json').write_text(json.dumps({'step': lines, **line}))


def seconds(args: list[str], folder: Path) -> float:
  """Of one process, from its start to its end."""
  began = time.perf_counter()
  subprocess.run(
    [sys.executable, '-m', 'podrace', *args], check=True, capture_output=True, cwd=folder
  )
  return time.perf_counter() - began


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--repeats', type=int, default=15)
  args = parser.parse_args()
  found = {}
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    make_runs(folder, 1_000, 100)
    for title, command in COMMANDS.items():
      seconds(command, folder)  # reads files into the system's cache
      all_s = [seconds(command, folder) for _ in range(args.repeats)]
      found[title] = {
        'median_s': statistics.median(all_s),
        'min_s': min(all_s),
        'max_s': max(all_s),
      }
      print(f'{title:32s} {found[title]["median_s"]:.3f} s', flush=True)
  common.record('commands', {'repeats': args.repeats, 'commands': found})


if __name__ == '__main__':
  main()
