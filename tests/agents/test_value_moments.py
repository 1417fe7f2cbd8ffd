"""Explained variance, and means over valid steps: equal to NumPy's, however steps are split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace.agents.value_moments import explained_variance, value_moments
from podrace.learner import means
from podrace.run.summary import summarize

RNG = np.random.default_rng(0)
TARGET = RNG.normal(3.0, 2.0, (8, 4)).astype(np.float32)
VALUE = (0.7 * TARGET + RNG.normal(0.0, 1.0, TARGET.shape)).astype(np.float32)
MASK = (RNG.random(TARGET.shape) < 0.8).astype(np.float32)
KEPT = MASK > 0
EXPECTED = 1 - np.mean(np.square(TARGET - VALUE)[KEPT]) / np.var(TARGET[KEPT])


def measure(*args: Any) -> Any:
  return means(**value_moments(*args))


def mean(parts: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
  return {name: sum(p[name] for p in parts) / len(parts) for name in parts[0]}


@pytest.mark.parametrize('parts', [1, 2, 4, 8])
def test_it_is_the_same_over_minibatches(parts: int) -> None:
  split = [np.split(x, parts) for x in (TARGET, VALUE, MASK)]
  averaged = mean([measure(*map(jnp.asarray, part)) for part in zip(*split, strict=True)])
  assert explained_variance(averaged) == pytest.approx(EXPECTED, abs=1e-5)


def test_it_is_1_for_perfect_values_0_for_the_mean_and_less_for_others() -> None:
  mask, of = jnp.ones_like(TARGET), lambda value: measure(TARGET, value, mask)
  assert explained_variance(of(TARGET)) == 1
  assert explained_variance(of(np.full_like(TARGET, TARGET.mean()))) == pytest.approx(0, abs=1e-5)
  assert explained_variance(of(-TARGET)) < -1


@pytest.mark.parametrize('offset', [0.0, 1e3])
def test_equal_targets_have_none(offset: float) -> None:
  target = np.full((4, 4), offset, np.float32) + np.float32(1e-3) * TARGET[:4] * (offset > 0)
  assert math.isnan(explained_variance(measure(target, 2 * target, jnp.ones((4, 4)))))


@pytest.mark.parametrize('parts', [1, 2, 8])
def test_metrics_of_a_line_are_means_over_the_steps_that_count(parts: int) -> None:
  entropy = RNG.random((2, *TARGET.shape)).astype(np.float32)  # of two seeds
  seeds = []
  for each in entropy:
    split = [np.split(x, parts) for x in (TARGET, VALUE, MASK, each)]
    averaged = mean(
      [
        means(entropy=x * mask, **value_moments(target, value, mask))
        for target, value, mask, x in zip(*split, strict=True)
      ]
    )
    seeds.append(averaged | {'loss': averaged['entropy']})
  line = line_of({name: np.stack([s[name] for s in seeds]) for name in seeds[0]})
  assert line['entropy'] == pytest.approx(entropy[:, KEPT].mean(), rel=1e-5)
  assert line['loss'] == pytest.approx((entropy * MASK).mean(), rel=1e-5)
  none = {name: np.zeros(2) for name in seeds[0]}
  assert line_of(none)['entropy'] is None and line_of({'entropy': np.ones(2)})['entropy'] == 1


def test_no_gradient_passes() -> None:
  def moments(target: jax.Array, value: jax.Array) -> jax.Array:
    return sum(measure(target, value, jnp.asarray(MASK)).values())

  grads = jax.grad(moments, argnums=(0, 1))(jnp.asarray(TARGET), jnp.asarray(VALUE))
  assert not any(np.any(g) for g in grads)


def line_of(metrics: dict[str, Any]) -> dict[str, Any]:
  """Two seeds without episodes, as a line of metrics."""
  zeros = np.zeros(2)
  counts = dict(episodes=zeros, return_sum=zeros, return_deviation=zeros, length_sum=zeros)
  return summarize(dict(gradient_steps=np.ones(2), metrics=metrics, **counts))


def test_a_line_has_it_in_place_of_the_moments() -> None:
  one = measure(TARGET, VALUE, MASK)
  no_values = measure(0 * TARGET, 0 * VALUE, MASK)
  seeds = {name: np.stack([one[name], no_values[name]]) for name in one}
  line = line_of(dict(loss=np.ones(2), **seeds))
  assert line['explained_variance'] == pytest.approx(EXPECTED, abs=1e-5)
  assert line['loss'] == 1 and not set(one) & set(line)
