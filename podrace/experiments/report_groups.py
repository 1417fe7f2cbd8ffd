"""The lines of a report: one for each configuration, over all its seeds, as in `podrace plot`.

A group is JSON for the page. A band is [x, center, low, high], lists of the same length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.agents.metrics import MOST_TELLING, meanings_of
from podrace.errors import UsageError
from podrace.experiments import curves, statistics
from podrace.experiments.curves import CurveGroup, LoggedRun, RunCurve
from podrace.experiments.labels import make_labels
from podrace.experiments.runs import agent_of
from podrace.experiments.scores import ATARI, atari_game, normalize_human
from podrace.experiments.sweep_members import take_seeds
from podrace.run import metrics
from podrace.run.directory import read_record

AXES: dict[str, curves.X] = {
  'step': 'steps',
  'wall_s': 'wall',
  'gradient_steps_total': 'gradient-steps',
}
POSITIONS = ('step', 'wall_s', 'gradient_steps')  # metrics that are axes
POINTS = 1000  # most points of a line; longer ones are thinned
DIGITS = 6  # significant digits of a number

Band = list[list[float | None]]
Evaluations = Mapping[Path, list[metrics.Line]]  # lines of eval.jsonl by run directory


def collect_groups(runs: Sequence[LoggedRun], evaluations: Evaluations) -> list[dict[str, Any]]:
  """Return a group of runs for each configuration, in the order of their first runs."""
  by_key: dict[str, list[LoggedRun]] = {}
  for run in runs:
    by_key.setdefault(run.group, []).append(run)
  members = list(by_key.values())
  groups = [CurveGroup(m[0].config, []) for m in members]
  several_envs = len({g.env for g in groups}) > 1
  return [
    _collect_group(f'{label} in {g.env}' if several_envs else label, label, g, runs, evaluations)
    for label, g, runs in zip(make_labels(groups), groups, members, strict=True)
  ]


def _collect_group(
  full_name: str,
  label: str,
  config: CurveGroup,
  runs: Sequence[LoggedRun],
  evaluations: Evaluations,
) -> dict[str, Any]:
  agent = agent_of((read_record(runs[0].path) or {}).get('agent') or {'name': ''})[0]
  returns = _curves(runs, 'episode_return', 'steps')
  final = [] if config.log else [curves.final_mean(c) for c in returns]
  pairs = (pair for run in runs for line in run.lines for pair in line.items())
  names = {n for n, x in pairs if not isinstance(x, list)}
  bands = {n: _bands(runs, n) for n in sorted(names.difference(POSITIONS))}
  evaluated = [
    dataclasses.replace(r, lines=take_seeds(lines, r.seeds))
    for r in runs
    if (lines := evaluations[r.path])
  ]
  evaluated_returns = _curves(evaluated, 'episode_return_mean', 'steps')
  return {
    'name': label,
    'full_name': full_name,
    'env': config.env,
    'log': config.log,
    'agent': agent,
    'n': len(returns) or len(runs),
    'paths': [str(run.path) for run in runs],
    'bands': {name: by_axis for name, by_axis in bands.items() if by_axis},
    'evaluations': _band(evaluated_returns) if evaluated_returns else None,
    'final': _interval(final),
    'evaluated': _interval([float(c.y[-1]) for c in evaluated_returns]),
    **_anchors(config.env, final),
    'telling': MOST_TELLING.get(agent, ''),
    'meanings': meanings_of(agent),
  }


def _curves(runs: Sequence[LoggedRun], metric: str, x: curves.X) -> list[RunCurve]:
  """Return the curves of all runs that have the metric."""
  result: list[RunCurve] = []
  for run in runs:
    try:
      result += curves.extract_curves(run, metric, x)
    except UsageError:  # no value, or no position on this axis
      continue
  return result


def _bands(runs: Sequence[LoggedRun], metric: str) -> dict[str, Band]:
  """Return the band of a metric over each axis that the runs have."""
  each = {name: _curves(runs, metric, x) for name, x in AXES.items()}
  return {name: _band(of_axis) for name, of_axis in each.items() if of_axis}


def _band(of_runs: Sequence[RunCurve]) -> Band:
  band = curves.make_band(of_runs)
  kept = np.arange(0, len(band.x), max(1, -(-len(band.x) // POINTS)))
  kept = np.union1d(kept, [len(band.x) - 1])
  return [[_rounded(v) for v in row[kept]] for row in (band.x, band.center, band.low, band.high)]


def _rounded(x: float) -> float | None:
  if not np.isfinite(x):
    return None
  return int(x) if float(x).is_integer() and abs(x) < 2**53 else float(f'{x:.{DIGITS}g}')


def _interval(values: Sequence[float]) -> dict[str, Any] | None:
  """Return the mean of a value of each seed, and its 95% bootstrap interval."""
  if not values:
    return None
  array = np.array(values)
  low, high = statistics.interval(statistics.mean, [array]) if len(values) > 1 else (None, None)
  return {'mean': float(array.mean()), 'low': low, 'high': high, 'n': len(values)}


def _anchors(env: str, values: Sequence[float]) -> dict[str, Any]:
  """Return the scores of random play and of humans, and the mean score on their scale."""
  game = atari_game(env)
  if game is None:
    return {'anchors': '', 'normalized': None}
  mean = float(np.mean(values)) if values else None
  return {
    'anchors': 'random play {:g}, human {:g}'.format(*ATARI[game]),
    'normalized': None if mean is None else normalize_human(game, mean),
  }


def index_runs(
  groups: Sequence[dict[str, Any]], reports: Sequence[dict[str, Any]]
) -> list[int | None]:
  """Return the index of the group of each run; None of a run in no group, or in several."""
  groups_of: dict[str, set[int]] = {}
  for i, group in enumerate(groups):
    for path in group['paths']:
      groups_of.setdefault(path, set()).add(i)
  indices = [groups_of.get(report['path'], set()) for report in reports]
  return [next(iter(i)) if len(i) == 1 else None for i in indices]
