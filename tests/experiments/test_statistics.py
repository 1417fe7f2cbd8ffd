"""The statistics over runs and tasks, against rliable's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from podrace.experiments import statistics

REFERENCE: dict[str, Any] = json.loads(
  (Path(__file__).parents[1] / 'data' / 'rliable_reference.json').read_text()
)


def tasks(name: str) -> list[np.ndarray]:
  """A matrix of the reference, [runs, tasks, ...], as scores of each task."""
  return list(np.moveaxis(np.array(REFERENCE[name]), 1, 0))


def check(expected: dict[str, Any], point: Any, limits: Any, atol: float) -> None:
  """The point is rliable's; its interval has the noise of two bootstraps."""
  np.testing.assert_allclose(point, expected['point'], rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(
    np.ravel(limits), np.ravel(expected['interval']), atol=atol, equal_nan=True
  )


@pytest.mark.parametrize('name', statistics.AGGREGATES)
def test_aggregates_are_those_of_rliable(name: str) -> None:
  statistic, ours = statistics.AGGREGATES[name], tasks('ours')
  check(REFERENCE[name], statistic(ours), statistics.interval(statistic, ours), atol=3e-3)


def test_the_probability_of_improvement_is_that_of_rliable() -> None:
  both = tasks('ours'), tasks('theirs')
  limits = statistics.interval(statistics.probability_of_improvement, *both)
  point = statistics.probability_of_improvement(*both)
  check(REFERENCE['probability'], point, limits, atol=8e-3)
  assert statistics.probability_of_improvement(*both[::-1]) == pytest.approx(1 - point)


def test_performance_profiles_are_those_of_rliable() -> None:
  thresholds = np.array(REFERENCE['thresholds'])

  def profile(each: Any) -> Any:
    return statistics.performance_profile(each, thresholds)

  limits = statistics.interval(profile, tasks('ours'), resamples=statistics.CURVE_RESAMPLES)
  check(REFERENCE['profile'], profile(tasks('ours')), limits, atol=2.1e-2)  # a run is 0.02


def test_sample_efficiency_curves_are_those_of_rliable() -> None:
  limits = statistics.interval(statistics.iqm, tasks('curves'))
  check(REFERENCE['efficiency'], statistics.iqm(tasks('curves')), limits, atol=1.5e-2)


def test_the_interquartile_mean_is_scipys() -> None:
  for n in range(1, 30):
    x = np.random.default_rng(n).normal(size=n)
    np.testing.assert_allclose(statistics.trimmed_mean(x), stats.trim_mean(x, 0.25))
    np.testing.assert_allclose(
      statistics.trimmed_mean(np.stack([x, 2 * x]), axis=1),
      stats.trim_mean([x, 2 * x], 0.25, axis=1),
    )


def test_intervals_have_the_truth_as_often_as_they_say() -> None:
  rng, hits = np.random.default_rng(0), 0
  for _ in range(300):
    tasks = [rng.normal(mean, 1.0, 20) for mean in (0.0, 10.0)]
    low, high = statistics.interval(statistics.mean, tasks, resamples=500)
    hits += low <= 5.0 <= high
  assert 0.90 <= hits / 300 <= 0.98
  # Not stratified it would be as wide as tasks differ.
  assert high - low < 1.5


def test_profiles_and_probabilities_weigh_tasks_alike() -> None:
  ours, theirs = (
    [np.array([1.0, 3.0]), np.array([5.0])],
    [np.array([2.0, 3.0]), np.array([5.0, 4.0])],
  )
  assert statistics.probability_of_improvement(ours, theirs) == pytest.approx(
    (1.5 / 4 + 1.5 / 2) / 2
  )
  assert statistics.probability_of_improvement(ours, ours) == 0.5
  thresholds = np.array([0.0, 2.0, 3.0, 4.0, 6.0])  # a run at the threshold is not above it
  assert statistics.performance_profile(ours, thresholds).tolist() == [1.0, 0.75, 0.5, 0.5, 0.0]
