"""PQN's presets with five seeds in one program, evaluated greedily and as they explore.

Writes benchmarks/results/pqn.json after each case; other cases keep their results. `greedy` has 100 episodes a seed, with
Student's 95% interval over the seeds; `training` the returns of the last tenth of the lines.
"""

from __future__ import annotations

import shutil
from typing import Any

import common
import numpy as np
from self_tuning import interval

SEEDS = 5
CASES = {  # case -> preset, options
  'pqn-cartpole': ('pqn-cartpole',),
  'pqn-minatar': ('pqn-minatar',),
}


def case(name: str) -> dict[str, Any]:
  """Trains the seeds 0 to 4 and evaluates each."""
  run_dir = common.ROOT / 'runs' / 'pqn' / name
  shutil.rmtree(run_dir, ignore_errors=True)
  common.podrace('train', *CASES[name], '--seeds', SEEDS, '--run-dir', run_dir)
  evaluated = common.evaluate_run(run_dir, '--episodes', 100)
  rows = [x['episode_return_by_seed'] for x in common.metrics(run_dir)]
  last = [x for x in rows[-max(len(rows) // 10, 1) :] if None not in x]
  summary = common.summary_of(run_dir)
  return dict(
    origin=common.origin(),
    greedy=interval(np.array(evaluated['episode_return_mean_by_seed'])),
    training=interval(np.mean(last, axis=0)),
    summary=summary,
  )


if __name__ == '__main__':
  args = common.arguments(__doc__, CASES)
  for name in args.cases:
    common.keep('pqn', name, case(name), CASES)
