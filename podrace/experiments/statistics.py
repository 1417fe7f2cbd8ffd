"""Statistics over runs and tasks, as `rliable` defines them (Agarwal et al. 2021).

Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv 2108.13264). This uses
NumPy only.

`tasks` is a list of one algorithm's scores: an array [runs, ...] f64 for each task. Tasks may have
different numbers of runs. A statistic reduces the runs and the tasks, and keeps further axes, such
as positions on a learning curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Floats = np.ndarray
Tasks = Sequence[Floats]

RESAMPLES = 50_000  # of the bootstrap of an aggregate
CURVE_RESAMPLES = 2_000  # of the bootstrap of a profile or a curve
HELD = 2**22  # most numbers that a bootstrap holds at once


def trimmed_mean(x: Floats, axis: int = -1) -> Floats:
  """Return the interquartile mean: the mean without the lowest and the highest quarter.

  Like `scipy.stats.trim_mean(x, 0.25)`, it cuts n // 4 values at each end.
  """
  cut = x.shape[axis] // 4
  kept = np.take(np.sort(x, axis), np.arange(cut, x.shape[axis] - cut), axis)
  return np.mean(kept, axis)


# --- aggregates of one algorithm ------------------------------------------------------------------


def iqm(tasks: Tasks) -> Floats:
  """Return the interquartile mean over the runs of all tasks together (section 4.3)."""
  return trimmed_mean(np.concatenate(tasks), axis=0)


def mean(tasks: Tasks) -> Floats:
  """Return the mean of the tasks' mean scores."""
  return np.mean([np.mean(t, axis=0) for t in tasks], axis=0)


def median(tasks: Tasks) -> Floats:
  """Return the median of the tasks' mean scores."""
  return np.median([np.mean(t, axis=0) for t in tasks], axis=0)


def optimality_gap(tasks: Tasks, goal: float = 1.0) -> Floats:
  """Return the mean distance of the runs to `goal`. A run above the goal has none."""
  return goal - np.mean(np.minimum(np.concatenate(tasks), goal), axis=0)


AGGREGATES: Mapping[str, Callable[[Tasks], Floats]] = {
  'iqm': iqm, 'median': median, 'mean': mean, 'optimality_gap': optimality_gap,
}  # fmt: skip


def performance_profile(tasks: Tasks, thresholds: Floats) -> Floats:
  """Return the share of runs [..., thresholds] above each threshold, averaged over the tasks."""
  return np.mean([np.mean(t[..., None] > thresholds, axis=0) for t in tasks], axis=0)


# --- comparison of two algorithms -----------------------------------------------------------------


def probability_of_improvement(ours: Tasks, theirs: Tasks) -> Floats:
  """Return the probability that a run of `ours` beats one of `theirs`, averaged over the tasks.

  This is the Mann-Whitney statistic over the number of pairs. A tie counts as half.
  """
  each = []
  for a, b in zip(ours, theirs, strict=True):
    difference = a[:, None] - b[None]
    each.append(np.mean((difference > 0) + 0.5 * (difference == 0), axis=(0, 1)))
  return np.mean(each, axis=0)


# --- intervals ------------------------------------------------------------------------------------


def interval(
  statistic: Callable[..., Floats],
  *algorithms: Tasks,
  level: float = 0.95,
  resamples: int = RESAMPLES,
) -> tuple[Floats, Floats]:
  """Return the percentile interval of a statistic by stratified bootstrap.

  Runs are drawn with replacement within each task of each algorithm. Further axes of a task stay
  together. The draws are the same in each call.

  Args:
    statistic: function of as many algorithms as there are in `algorithms`.
    algorithms: tasks of each algorithm.
    level: level of the interval.
    resamples: number of bootstrap samples.

  Returns:
    The lower and the upper limit, each with the shape of the statistic.
  """
  rng = np.random.default_rng(0)
  held = sum(t.size for tasks in algorithms for t in tasks) * max(
    1, np.size(statistic(*algorithms)) // max(1, algorithms[0][0][0].size)
  )
  width = max(1, HELD // held)
  values = [
    statistic(*([_draw(t, size, rng) for t in tasks] for tasks in algorithms))
    for size in [width] * (resamples // width) + [resamples % width] * (resamples % width > 0)
  ]
  limits = [(1 - level) / 2, (1 + level) / 2]
  low, high = np.quantile(np.concatenate(values), limits, axis=0)
  return low, high


def _draw(task: Floats, size: int, rng: np.random.Generator) -> Floats:
  """Return `size` resamples [runs, size, ...] of a task's runs."""
  return task[rng.integers(len(task), size=(len(task), size))]
