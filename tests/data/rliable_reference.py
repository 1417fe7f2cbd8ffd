"""Makes rliable_reference.json, the oracle of podrace.experiments.statistics.

rliable 1.2.0 needs arch < 8, which cannot be imported beside pandas 3, so it is no dependency of the tests:

    python -m venv rl && rl/bin/pip install rliable==1.2.0 'pandas<3'
    rl/bin/python tests/data/rliable_reference.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rliable import library, metrics

REPS = 20_000
THRESHOLDS = np.linspace(-0.2, 1.2, 8)
AGGREGATES = {
  'iqm': metrics.aggregate_iqm,
  'median': metrics.aggregate_median,
  'mean': metrics.aggregate_mean,
  'optimality_gap': metrics.aggregate_optimality_gap,
}


def main() -> None:
  rng = np.random.default_rng(0)
  np.random.seed(0)  # the bootstraps draw from it
  level = np.array([0.2, 0.9, 0.5, 0.7, 1.1])  # of each task
  ours, theirs = (level + shift + rng.normal(0, 0.25, (n, 5)) for n, shift in ((10, 0.1), (7, 0.0)))
  theirs[0] = ours[0]  # ties
  curves = np.cumsum(rng.normal(0.2, 0.3, (6, 3, 4)), axis=-1)  # [runs, tasks, points]
  reference = {'ours': ours.tolist(), 'theirs': theirs.tolist(), 'curves': curves.tolist()}
  reference['thresholds'] = THRESHOLDS.tolist()
  for name, statistic in AGGREGATES.items():
    each = {'x': ours}
    point, limits = library.get_interval_estimates(
      each, lambda x, f=statistic: np.array([f(x)]), reps=REPS
    )
    reference[name] = {'point': float(point['x'][0]), 'interval': limits['x'].ravel().tolist()}
  point, limits = library.get_interval_estimates(
    {'x': (ours, theirs)}, metrics.probability_of_improvement, reps=REPS // 4
  )
  reference['probability'] = {'point': float(point['x']), 'interval': limits['x'].ravel().tolist()}
  point, limits = library.create_performance_profile({'x': ours}, THRESHOLDS)
  reference['profile'] = {'point': point['x'].tolist(), 'interval': limits['x'].tolist()}
  point, limits = library.get_interval_estimates(
    {'x': curves},
    lambda x: np.array([metrics.aggregate_iqm(x[..., i]) for i in range(4)]),
    reps=REPS // 4,
  )
  reference['efficiency'] = {'point': point['x'].tolist(), 'interval': limits['x'].tolist()}
  Path(__file__).with_suffix('.json').write_text(json.dumps(reference) + '\n')


if __name__ == '__main__':
  main()
