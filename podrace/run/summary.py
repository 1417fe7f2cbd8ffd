"""The summary of a run: final returns, their mean and deviation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from podrace.run import metrics
from podrace.system import files


def mean_and_std(episodes: Any, return_sum: Any, deviation: Any) -> dict[str, float | None]:
  """Return the mean return and its standard deviation over episodes, from each seed's sums.

  Seeds weigh alike: one that ends more episodes does not count for more. A value is None if no
  episode ended, or if it is not finite.
  """
  n, sums, deviations = (
    np.atleast_1d(x).astype(np.float64) for x in (episodes, return_sum, deviation)
  )
  n, sums, deviations = n[n > 0], sums[n > 0], deviations[n > 0]
  if not len(n):
    return {'episode_return': None, 'episode_return_std': None}
  with np.errstate(all='ignore'):
    mean = np.mean(sums / n)
    variance = np.mean(deviations / n + np.square(sums / n - mean))
    std = np.sqrt(np.maximum(variance, 0.0))
  return {'episode_return': files.number(mean), 'episode_return_std': files.number(std)}


def summarize(summary: dict[str, Any]) -> metrics.Line:
  """Return the part of a line of metrics that comes from a summary (see `Anakin.read_log`)."""
  episodes = np.atleast_1d(summary['episodes']).astype(np.int64)
  total = int(episodes.sum())
  line: metrics.Line = {
    **mean_and_std(episodes, summary['return_sum'], summary['return_deviation']),
    'episode_length': _mean_over_seeds(summary['length_sum'], episodes),
    'episodes': total,
    'gradient_steps': int(np.max(summary['gradient_steps'])),
  }
  if np.ndim(summary['episodes']):  # [seeds]
    sums = np.asarray(summary['return_sum'], np.float64)
    line['episode_return_by_seed'] = [
      files.number(s / n) if n else None for s, n in zip(sums, episodes, strict=True)
    ]
    line['episodes_by_seed'] = episodes.tolist()
  line |= {name: files.number(x) for name, x in _means(summary['metrics']).items()}
  if total:
    infos = summary.get('info_sums', {})
    line |= {f'info_{k}': _mean_over_seeds(x, episodes) for k, x in infos.items()}
  return line | summary.get('host', {})


def _mean_over_seeds(sums: Any, episodes: np.ndarray) -> float | None:
  """Return the mean over the seeds of their means over episodes; None if no episode ended."""
  ended = episodes > 0
  if not ended.any():
    return None
  return files.number(np.mean(np.atleast_1d(sums).astype(np.float64)[ended] / episodes[ended]))


def _means(by_seed: dict[str, Any]) -> dict[str, Any]:
  """Return the means of an agent's metrics over the seeds.

  `explained_variance`, and means over the valid steps, take the place of `value_moments`.
  """
  from podrace.agents import value_moments  # imports jax, which `podrace plot` does without

  if not all(name in by_seed for name in value_moments.NAMES):
    return {name: np.mean(x) for name, x in by_seed.items()}
  each = value_moments.explained_variance(by_seed)
  known = each[np.isfinite(each)]
  by_seed = by_seed | value_moments.means_of_valid(by_seed)
  means = {name: np.mean(x) for name, x in by_seed.items() if name not in value_moments.NAMES}
  return means | {'explained_variance': known.mean() if known.size else np.nan}


def final_return(path: Path) -> dict[str, Any]:
  """Return `final_return_of` the lines of a file."""
  return final_return_of(metrics.read(path))


def final_return_of(lines: list[metrics.Line]) -> dict[str, Any]:
  """Return the mean return of the episodes that ended in the last tenth of the run.

  With several seeds it is the mean over the seeds that have ended an episode, and
  `episode_return_by_seed` has a value for each seed, None if it has ended none.
  """
  start, seeds = (0.9 * lines[-1]['step'], _seeds(lines[-1])) if lines else (0, 0)
  lines = [
    line for line in lines if line.get('episode_return') is not None and line.get('episodes')
  ]  # null: not finite, or none
  tail = [line for line in lines if line['step'] > start] or lines[-1:]
  episodes = sum(line['episodes'] for line in tail)
  if not episodes:
    nothing: dict[str, Any] = {'episode_return': None, 'episodes': 0}
    return nothing | ({'episode_return_by_seed': [None] * seeds} if seeds else {})
  total = sum(line['episode_return'] * line['episodes'] for line in tail)
  result: dict[str, Any] = {'episode_return': total / episodes, 'episodes': episodes}
  if seeds := _seeds(tail[-1]):
    tail, lines = ([x for x in some if _seeds(x) == seeds] for some in (tail, lines))
    by_seed = [_final_of_seed(i, tail, lines) for i in range(seeds)]
    known = [x for x in by_seed if x is not None]
    result['episode_return'] = sum(known) / len(known) if known else None
    result['episode_return_by_seed'] = by_seed
  return result


def _seeds(line: metrics.Line) -> int:
  """Return the number of seeds in a line, 0 if it has one seed or contradicts itself."""
  counts = {len(line.get(name, ())) for name in ('episode_return_by_seed', 'episodes_by_seed')}
  return counts.pop() if len(counts) == 1 else 0


def _final_of_seed(i: int, tail: list[metrics.Line], lines: list[metrics.Line]) -> float | None:
  """Return the mean of a seed's episodes in `tail`, else that of the newest line with any."""

  def mean(subset: list[metrics.Line]) -> float | None:
    return _mean(
      [(line['episode_return_by_seed'][i], line['episodes_by_seed'][i]) for line in subset]
    )

  result = mean(tail)
  if result is None:
    result = next((x for line in reversed(lines) if (x := mean([line])) is not None), None)
  return result


def _mean(means: list[tuple[float | None, int]]) -> float | None:
  """Return the mean over (mean, count) pairs; None if all counts are 0."""
  known = [(mean, count) for mean, count in means if mean is not None]
  total = sum(count for _, count in known)
  return sum(mean * count for mean, count in known) / total if total else None
