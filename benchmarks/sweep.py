"""64 settings of PPO on CartPole: one program against 64 processes, one after the other. Compilation counts in both."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common


def seconds(*args: str) -> float:
  """Of `podrace sweep` with these arguments, as a whole process."""
  began = time.perf_counter()
  subprocess.run([sys.executable, '-m', 'podrace', 'sweep', *args], check=True, capture_output=True)
  return time.perf_counter() - began


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--settings', type=int, default=64)
  parser.add_argument('--steps', type=int, default=100_000)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    shared = ['cartpole', '--vary', 'agent.learning-rate=log:1e-4..1e-2', '--method', 'random',
              '--trials', str(args.settings), '--total-steps', str(args.steps)]  # fmt: skip
    together = seconds(*shared, '--dir', f'{folder}/together')
    each = seconds(*shared, '--dir', f'{folder}/each', '--processes')
    scores = {
      name: {
        r['settings']['agent.learning-rate']: r['score']
        for r in json.loads(Path(folder, name, 'results.json').read_text())
      }
      for name in ('together', 'each')
    }
  steps = args.settings * args.steps
  different = [
    x for x in scores['each'] if abs((scores['each'][x] or 0) - (scores['together'][x] or 0)) > 1e-2
  ]
  found = {
    'settings': args.settings, 'steps': args.steps,
    'together': {'seconds': together, 'steps_per_s': steps / together},
    'each': {'seconds': each, 'steps_per_s': steps / each},
    'ratio': each / together, 'settings_whose_return_differs': len(different),
  }  # fmt: skip
  print(json.dumps(found, indent=2))
  common.record('sweep', found)


if __name__ == '__main__':
  main()
