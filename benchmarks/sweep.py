"""64 settings of PPO on CartPole: one program against 64 processes, one after the other. Compilation counts in both."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import common


def sweep(folder: str, settings: int, steps: int, *more: str) -> tuple[float, dict[float, float]]:
  """Returns the seconds of `podrace sweep` as a whole process, and the score of each learning rate."""
  began = time.perf_counter()
  common.podrace(
    'sweep', 'cartpole', '--vary', 'agent.learning-rate=log:1e-4..1e-2', '--method', 'random',
    '--trials', settings, '--total-steps', steps, '--dir', folder, *more,
  )  # fmt: skip
  seconds = time.perf_counter() - began
  rows = common.read_json(Path(folder) / 'results.json')
  return seconds, {r['settings']['agent.learning-rate']: r['score'] or 0.0 for r in rows}


def main() -> None:
  args = common.arguments(__doc__, settings=64, steps=100_000)
  sizes = (args.settings, args.steps)
  with tempfile.TemporaryDirectory() as folder:
    together, scores = sweep(f'{folder}/together', *sizes)
    each, single = sweep(f'{folder}/each', *sizes, '--processes')
  steps = args.settings * args.steps
  results = dict(
    settings=args.settings, steps=args.steps,
    together=dict(seconds=together, steps_per_s=steps / together), each=dict(seconds=each, steps_per_s=steps / each),
    ratio=each / together, settings_whose_return_differs=sum(abs(single[x] - scores[x]) > 1e-2 for x in single),
  )  # fmt: skip
  print(json.dumps(results, indent=2))
  common.record('sweep', results)


if __name__ == '__main__':
  main()
