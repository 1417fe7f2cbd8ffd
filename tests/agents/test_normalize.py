"""Running statistics: against numpy over everything that was seen, however it was divided."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax.sharding import PartitionSpec as P
from shorthand import slow_after

from podrace import topology
from podrace.agents import normalize, policy_gradient
from podrace.agents.impala import Impala
from podrace.agents.normalize import Statistics
from podrace.networks import ActorCritic
from podrace.types import TimeStep

RNG = np.random.default_rng(0)

# float32 means of some hundred numbers near 1: a few units in the last place
TOLERANCE = dict(rtol=2e-6, atol=2e-6)


def data(length: int = 24, batch: int = 8) -> dict[str, np.ndarray]:
  """[T, B, ...] of two kinds of observations, with means and scales of their own."""
  vector = RNG.normal([0.5, -1, 2], [1, 0.1, 3], (length, batch, 3)).astype(np.float32)
  return dict(vector=vector, scalar=RNG.uniform(0, 1, (length, batch)).astype(np.float32))


def example() -> dict[str, np.ndarray]:
  return dict(vector=np.zeros(3), scalar=np.zeros(()))


@jax.jit
def seen_once(statistics: Statistics, batch: Any) -> Statistics:
  return normalize.merge(statistics, normalize.moments(statistics, batch), num_devices=1)


def see(statistics: Statistics, *batches: Any) -> Statistics:
  for batch in batches:
    statistics = seen_once(statistics, batch)
  return jax.device_get(statistics)


standardize = jax.jit(normalize.standardize)


@functools.cache
def see_on_devices(devices: int) -> Any:
  """(statistics, batch) -> statistics, the batch split over devices as agents do it: one pmean."""

  def step(statistics: Statistics, batch: Any) -> Statistics:
    joined = jax.lax.pmean(normalize.moments(statistics, batch), topology.AXIS)
    return normalize.merge(statistics, joined, jax.lax.axis_size(topology.AXIS))

  mesh = topology.learner_mesh(devices)
  specs = (P(), P(None, topology.AXIS))
  return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))


def assert_numpys(statistics: Statistics, x: Any, **tolerance: float) -> None:
  """Mean and variance of all elements of `x`, in float64."""
  count = x['scalar'].size
  assert float(statistics.seen) == count
  for name, values in x.items():
    flat = values.astype(np.float64).reshape(count, -1)
    mean, var = (np.asarray(s[name]).reshape(-1) for s in (statistics.mean, statistics.var))
    np.testing.assert_allclose(mean, flat.mean(0), **tolerance)
    np.testing.assert_allclose(var, flat.var(0), **tolerance)


def test_one_batch() -> None:
  x = data()
  assert_numpys(see(normalize.init(example()), x), x, **TOLERANCE)


@pytest.mark.parametrize('cuts', [[12], [1, 2, 3], [23], list(range(1, 24))])
def test_however_it_is_divided_over_batches(cuts: list[int]) -> None:
  x = data()
  pieces = {k: np.split(v, cuts) for k, v in x.items()}
  batches = [{k: pieces[k][i] for k in x} for i in range(len(cuts) + 1)]
  # each merge rounds once more: up to 24 of them
  assert_numpys(see(normalize.init(example()), *batches), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('devices', [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_however_it_is_divided_over_devices(devices: int) -> None:
  first, second = data(), data()
  statistics = see_on_devices(devices)(normalize.init(example()), first)
  statistics = see_on_devices(devices)(statistics, second)
  x = {k: np.concatenate([first[k], second[k]]) for k in first}
  assert_numpys(statistics, x, **TOLERANCE)


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('batches', slow_after(1, 50, 1, 2))
def test_a_large_offset_keeps_its_precision(devices: int, batches: int) -> None:
  """Mean 1e4 and deviation 1: of E[x^2] - E[x]^2 no digit would be left in float32."""
  x = RNG.normal(1e4, 1, (batches, 64, 16)).astype(np.float32)
  statistics = normalize.init(np.float32(0))
  for batch in x:
    # One at a time: many programs on more devices than there are cores can starve each other.
    statistics = jax.block_until_ready(see_on_devices(devices)(statistics, batch))
  # neighbours in float32 are 1e-3 apart at 1e4, and a mean of a thousand such rounds a few times
  np.testing.assert_allclose(statistics.mean, x.mean(dtype=np.float64), atol=5e-3)
  # Of the first batch, `merge` takes the difference between the devices' means for rounding: of
  # 128 elements each that is 1/128 of the variance, give or take twice as much.
  rtol = 1e-3 if devices == 1 else 3 / 128
  np.testing.assert_allclose(statistics.var, x.var(dtype=np.float64), rtol=rtol)


def test_nothing_seen_yet_changes_nothing() -> None:
  x = {'vector': np.float32([1, 2, 3]), 'scalar': np.float32(-4)}
  y = standardize(normalize.init(example()), x)
  for name in x:
    np.testing.assert_allclose(y[name], x[name], rtol=1e-6)


def test_standardize() -> None:
  statistics = Statistics(jnp.float32(9), jnp.array([1.0, 2.0]), jnp.array([4.0, 0.25]))
  y = standardize(statistics, jnp.array([[3.0, 1.0], [1.0, 2.0], [999.0, -999.0]]))
  # (3 - 1) / 2, (1 - 2) / 0.5; nothing; clipped
  np.testing.assert_allclose(y, [[1, -2], [0, 0], [10, -10]], rtol=1e-6)


def test_scale_keeps_the_sign() -> None:
  statistics = Statistics(jnp.float32(9), jnp.float32(100), jnp.float32(4))
  y = normalize.scale(statistics, jnp.array([3.0, -1.0, 0.0, 999.0]))
  np.testing.assert_allclose(y, [1.5, -0.5, 0, 10], rtol=1e-6)


def test_a_constant_has_no_variance_and_no_nan() -> None:
  statistics = see(normalize.init(example()), {k: np.full_like(v, 7) for k, v in data().items()})
  assert float(statistics.var['scalar']) == 0
  y = standardize(statistics, {'vector': np.full(3, 7.0), 'scalar': np.float32(8)})
  assert y['vector'].tolist() == [0, 0, 0] and float(y['scalar']) == 10


# --- which parts of an observation ---------------------------------------------------------------


def agent_of(**parts: Any) -> Impala:
  network = ActorCritic(hidden=(4,)).bind(spaces.Dict(parts), spaces.Discrete(2))
  return Impala(network, normalize_observations=True)


def test_an_action_mask_of_floats_is_left_as_it_is() -> None:
  agent = agent_of(
    action_mask=spaces.Box(0, 1, (2,), np.float32), x=spaces.Box(-1, 1, (3,), np.float32)
  )
  params = jax.jit(agent.init)(jax.random.key(0)).params
  assert [x.shape for x in params.observation.mean] == [(3,)]
  params = params._replace(
    observation=Statistics(jnp.float32(9), [jnp.ones(3)], [jnp.full(3, 4.0)])
  )
  given = {'action_mask': jnp.array([[0.0, 1.0]]), 'x': jnp.array([[3.0, 1.0, -1.0]])}
  seen = policy_gradient.observe(params, TimeStep(given, *[jnp.zeros(1)] * 3)).observation
  assert seen['action_mask'].tolist() == [[0, 1]]
  np.testing.assert_allclose(seen['x'], [[1, 0, -1]], rtol=1e-6)


@pytest.mark.parametrize(
  'parts',
  [
    dict(x=spaces.Box(0, 255, (3,), np.uint8)),
    dict(x=spaces.Discrete(3), action_mask=spaces.Box(0, 1, (2,), np.float32)),
  ],
)
def test_where_there_is_nothing_to_normalize(parts: Any) -> None:
  with pytest.raises(ValueError, match='normalize_observations'):
    jax.eval_shape(agent_of(**parts).init, jax.random.key(0))


@pytest.mark.parametrize('share', [0.001, 0.02, 0.4])
@pytest.mark.parametrize('value', [1e20, -3.4e38, 1e9])
@pytest.mark.parametrize('first', [0, 3])
def test_outliers_do_not_blind_a_dimension(share: float, value: float, first: int) -> None:
  rng = np.random.default_rng(0)
  statistics = normalize.init(jnp.zeros(2))
  for i in range(10):
    x = rng.standard_normal((32, 64, 2)).astype(np.float32)
    if i >= first:
      x[..., 0] = np.where(rng.random((32, 64)) < share, np.float32(value), x[..., 0])
    statistics = see(statistics, x)
  np.testing.assert_allclose(statistics.mean, [0, 0], atol=0.03)
  assert 0.5 < float(statistics.var[0]) < 1.1 and 0.9 < float(statistics.var[1]) < 1.1
  seen = np.asarray(standardize(statistics, np.float32([[0.5, 0.5], [value, value]])))
  assert 0.4 < seen[0, 0] < 0.8 and abs(seen[1, 0]) == 10


def test_a_dimension_that_goes_far_is_followed() -> None:
  statistics = normalize.init(jnp.zeros(1))
  for offset in (0.0, 1e6, 1e6, 1e6):
    x = offset + np.random.default_rng(0).standard_normal((8, 8, 1)).astype(np.float32)
    statistics = see(statistics, x)
  np.testing.assert_allclose(statistics.mean, [0.75e6], rtol=1e-5)


@pytest.mark.parametrize('share', [0.1, 0.3])
def test_a_number_that_is_often_large_is_followed(share: float) -> None:
  rng = np.random.default_rng(0)
  statistics = normalize.init(jnp.zeros(1))
  for _ in range(10):
    x = np.where(rng.random((32, 64, 1)) < share, rng.uniform(1e4, 1e6, (32, 64, 1)), 0.0)
    statistics = see(statistics, x)
  np.testing.assert_allclose(statistics.mean, [share * 5.05e5], rtol=0.05)
  seen = np.asarray(standardize(statistics, np.float32([[0.0], [2e5], [4e5]])))
  assert seen[0, 0] < 0 and 0.3 < seen[2, 0] - seen[1, 0] < 2


@pytest.mark.parametrize('first', [0, 2])
def test_a_batch_of_nothing_but_outliers_does_not_blind_a_dimension(first: int) -> None:
  rng = np.random.default_rng(0)
  statistics = normalize.init(jnp.zeros(1))
  for i in range(20):
    x = rng.standard_normal((8, 8, 1)) if i != first else np.full((8, 8, 1), 1e20)
    statistics = see(statistics, np.float32(x))
  np.testing.assert_allclose(statistics.mean, [0], atol=0.1)
  np.testing.assert_allclose(statistics.var, [1], atol=0.1)


def test_statistics_of_the_largest_numbers_are_finite() -> None:
  statistics = normalize.init(jnp.zeros(1))
  for sign in (1, 1, -1, 1, -1, -1):
    x = np.full((8, 8, 1), sign * np.finfo(np.float32).max)
    statistics = see(statistics, x)
  assert np.isfinite(statistics.mean).all() and np.isfinite(statistics.var).all()
