"""Action distributions: against distrax, by counting samples, and at the spaces' bounds."""

from __future__ import annotations

from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from podrace import distributions
from podrace.distributions import MASKED, Categorical, MultiCategorical, Normal, TanhNormal
from podrace.envs.host.spaces import in_jax
from podrace.envs.host.worker import actions_for
from podrace.networks import Actor

HUGE = float(np.finfo(np.float32).max)

# Sums of a few float32 terms of size about 10: some units in the last place.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)

BATCH = (6, 5)


def key(seed: int = 0) -> jax.Array:
  return jax.random.key(seed)


def random_params(size: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
  return np.float32(scale * np.random.default_rng(seed).normal(size=(*BATCH, size)))


def run(function: Any, *args: Any) -> Any:
  """The results in NumPy of a compiled function: many small operations cost more than one program."""
  return jax.device_get(jax.jit(function)(*args))


def numbers_of(ours: Any, params: Any, x: Any) -> Any:
  """Log-probabilities of x, entropies and modes."""
  return run(lambda p, x: (ours.log_prob(p, x), ours.entropy(p, key()), ours.mode(p)), params, x)


def parts(params: jax.Array) -> list[distrax.Categorical]:
  """The oracle of MultiCategorical((2, 3, 4))."""
  return [distrax.Categorical(p) for p in jnp.split(params, [2, 5], axis=-1)]


def box(n: int, low: float = -2.0, high: float = 3.0) -> tuple[tuple[int], tuple, tuple]:
  return (n,), (low,) * n, (high,) * n


# --- against distrax --------------------------------------------------------------------------


def test_categorical_is_distraxs() -> None:
  ours, params = Categorical(5), random_params(5)
  x = run(ours.sample, params, key())
  assert x.shape == BATCH and x.dtype == jnp.int32

  def theirs(params: jax.Array, x: jax.Array) -> Any:
    c = distrax.Categorical(params)
    return c.log_prob(x), c.entropy(), c.mode()

  assert_same(numbers_of(ours, params, x), run(theirs, params, x))


def assert_same(ours: Any, theirs: Any) -> None:
  """Log-probabilities and entropies to rounding, modes to the bit."""
  for one, other in zip(ours[:2], theirs[:2], strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)
  assert np.array_equal(ours[2], theirs[2])


def test_multi_categorical_is_a_product_of_distraxs() -> None:
  ours, params = MultiCategorical((2, 3, 4)), random_params(9)
  assert ours.size == 9
  x = run(ours.sample, params, key())
  assert x.shape == (*BATCH, 3) and x.dtype == jnp.int32

  def theirs(params: jax.Array, x: jax.Array) -> Any:
    log_prob = sum(c.log_prob(x[..., i]) for i, c in enumerate(parts(params)))
    entropy = sum(c.entropy() for c in parts(params))
    return log_prob, entropy, jnp.stack([c.mode() for c in parts(params)], axis=-1)

  assert_same(numbers_of(ours, params, x), run(theirs, params, x))


def test_normal_is_distraxs() -> None:
  ours, params = Normal(*box(3)), random_params(6)
  assert ours.size == 6
  x = run(ours.sample, params, key())
  assert x.shape == (*BATCH, 3)

  def theirs(params: jax.Array, x: jax.Array) -> Any:
    normal = distrax.MultivariateNormalDiag(params[..., :3], jnp.exp(params[..., 3:]))
    return normal.log_prob(x), normal.entropy(), normal.mode()

  assert_same(numbers_of(ours, params, x), run(theirs, params, x))


def test_tanh_normal_is_distraxs() -> None:
  ours, params = TanhNormal(*box(3)), random_params(6, scale=1.0)

  def theirs(params: jax.Array, y: jax.Array) -> Any:
    normal = distrax.Normal(params[..., :3], jnp.exp(jnp.clip(params[..., 3:], -5, 2)))
    return distrax.Independent(distrax.Transformed(normal, distrax.Tanh()), 1).log_prob(y)

  # distrax inverts its own sample where it can; the density at tanh(x) is what is compared.
  x = np.clip(run(ours.sample, params, key()), -3, 3)  # beyond, distrax's own atanh loses digits
  log_prob, _, mode = numbers_of(ours, params, x)
  # atanh(tanh(x)) at |x| = 3 keeps 1 - tanh^2 = 1e-2 to about 1e-5 of itself
  np.testing.assert_allclose(log_prob, run(theirs, params, np.tanh(x)), rtol=1e-4, atol=1e-3)
  assert np.array_equal(mode, params[..., :3])


@pytest.mark.parametrize('x', [-100.0, -20.0, 0.0, 20.0, 100.0])
def test_tanh_normal_is_finite_far_out(x: float) -> None:
  """log(1 - tanh(x)^2) is about 2 (log 2 - |x|), where 1 - tanh(x)^2 itself is 0."""
  ours, params = TanhNormal(*box(1)), jnp.array([x, 0.0])  # the mean is x: a standard normal there
  log_prob, grad = run(jax.value_and_grad(ours.log_prob), params, jnp.array([x]))
  correction = 0.0 if x == 0 else 2 * (np.log(2) - abs(x))
  np.testing.assert_allclose(log_prob, -0.5 * np.log(2 * np.pi) - correction, rtol=1e-5)
  assert np.all(np.isfinite(grad))


def test_tanh_normals_density_is_normalized() -> None:
  """On (-1, 1), by quadrature: an oracle that needs no other library."""
  ours, params = TanhNormal(*box(1)), jnp.array([0.3, -0.5])
  y = (np.arange(20_000) + 0.5) / 10_000 - 1
  log_prob = run(
    jax.vmap(lambda y: ours.log_prob(params, jnp.arctanh(y))), y[:, None].astype(np.float32)
  )
  # the midpoint rule of a smooth density that is 0 at both ends; float32 sums
  np.testing.assert_allclose(np.mean(np.exp(log_prob, dtype=np.float64)) * 2, 1, atol=1e-4)


def test_tanh_normals_entropy_is_right_on_average() -> None:
  """Its expectation is that of -log_prob; both are estimated, from different samples."""
  ours, n = TanhNormal(*box(2)), 100_000
  params = np.tile(np.float32([0.5, -1.0, -0.3, 0.2]), (n, 1))

  def both(params: jax.Array, key: jax.Array) -> Any:
    entropy_key, sample_key = jax.random.split(key)
    log_prob = ours.log_prob(params, ours.sample(params, sample_key))
    return ours.entropy(params, entropy_key), -log_prob

  estimates, surprise = (np.float64(x) for x in run(both, params, key()))
  error = np.sqrt((np.var(estimates) + np.var(surprise)) / n)
  assert abs(np.mean(estimates) - np.mean(surprise)) < 4 * error  # 4 standard errors, fixed seed
  assert error < 0.01  # so that it can fail


def test_tanh_normal_keeps_its_deviation_within_bounds() -> None:
  _, log_std = TanhNormal(*box(2)).mean_and_log_std(jnp.array([0.0, 0.0, -50.0, 50.0]))
  assert log_std.tolist() == [-5, 2]


# --- samples ----------------------------------------------------------------------------------


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> float:
  expected = probabilities * counts.sum()
  return float(np.sum((counts - expected) ** 2 / expected))


def softmax(logits: Any) -> np.ndarray:
  e = np.exp(np.float64(logits))
  return e / e.sum()


def sampled(ours: Any, params: Any, n: int, key: Any) -> np.ndarray:
  return run(lambda p, k: ours.sample(jnp.broadcast_to(p, (n, len(p))), k), params, key)


@pytest.mark.parametrize('seed', range(3))
def test_categorical_samples_have_their_probabilities(seed: int) -> None:
  logits = np.random.default_rng(seed).normal(size=6).astype(np.float32)
  x = sampled(Categorical(6), logits, 200_000, jax.random.key(seed + 100))
  counts = np.bincount(x, minlength=6)
  # chi-squared with 5 degrees of freedom is above 20.5 once in a thousand
  assert chi_squared(counts, softmax(logits)) < 20.5


def test_multi_categorical_samples_are_independent() -> None:
  ours = MultiCategorical((2, 3))
  params = np.float32([0.3, -0.2, 1.0, 0.0, -1.0])
  x = sampled(ours, params, 200_000, key())
  counts = np.bincount(x[:, 0] * 3 + x[:, 1], minlength=6)
  p, q = softmax(params[:2]), softmax(params[2:])
  assert chi_squared(counts, np.outer(p, q).reshape(-1)) < 20.5  # see above


def test_normal_samples_have_their_distribution() -> None:
  """Counted in ten slices of equal probability."""
  ours, params = Normal(*box(1)), jnp.array([1.5, -0.7])
  x = sampled(ours, params, 200_000, key())[:, 0]
  u = stats.norm.cdf((x - 1.5) / np.exp(-0.7))
  counts = np.bincount(np.clip(np.asarray(u) * 10, 0, 9).astype(int), minlength=10)
  # chi-squared with 9 degrees of freedom is above 27.9 once in a thousand
  assert chi_squared(counts, np.full(10, 0.1)) < 27.9


@jax.jit
def a_million(logits: jax.Array) -> jax.Array:
  return Categorical(5).sample(jnp.broadcast_to(logits, (1_000_000, 5)), key())


MASKS = {
  'first': [False, True, True, True, True],
  'last': [True, True, True, True, False],
  'both ends': [False, True, True, True, False],
  'all but the first': [True, False, False, False, False],
  'all but the last': [False, False, False, False, True],
  'all but one': [False, False, True, False, False],
}


@pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS)
def test_masked_actions_are_never_sampled(mask: list[bool]) -> None:
  logits = np.where(mask, [8.0, -8.0, 0.1, -8.0, 8.0], MASKED).astype(np.float32)
  counts = np.bincount(a_million(logits), minlength=5)
  assert counts.sum() == 1_000_000 and len(counts) == 5
  assert not counts[~np.array(mask)].any()
  assert mask[int(Categorical(5).mode(logits))]


def test_masked_actions_are_never_sampled_whatever_the_random_number() -> None:
  """At the ends of [0, 1), which a million samples need not reach."""
  ours, mask = Categorical(4), jnp.array([False, True, True, False])
  logits = jnp.where(mask, jnp.array([0.0, 0.3, 7.0, 0.0]), MASKED)
  for u in (0.0, np.float32(1) - np.float32(2) ** -24):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(jax.random, 'uniform', lambda key, shape, u=u: jnp.full(shape, u, jnp.float32))
      assert mask[int(ours.sample(logits, key()))]


def test_masked_actions_among_many_are_never_sampled() -> None:
  """Sums of a thousand probabilities rise by rounding at actions of probability 0."""
  rng = np.random.default_rng(0)
  mask = rng.random((400, 1000)) < 0.5
  logits = np.where(mask, rng.normal(size=mask.shape), MASKED).astype(np.float32)
  cdf = run(lambda x: jnp.cumsum(jax.nn.softmax(x), axis=-1), logits)
  rises = (np.diff(cdf, axis=-1) > 0) & ~mask[:, 1:]
  rows = np.flatnonzero(rises.any(-1))
  assert len(rows) > 20
  before = cdf[rows, rises[rows].argmax(-1)]
  for away in (-1, 0, 1):  # u * total is rounded
    u = before / cdf[rows, -1] * np.float32(1 + away * 2**-23)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(jax.random, 'uniform', lambda key, shape, u=u: jnp.asarray(u, jnp.float32))
      x = run(Categorical(1000).sample, logits[rows], key())
    assert mask[rows, x].all()


def test_masked_gradients_are_finite() -> None:
  ours, mask = Categorical(3), jnp.array([True, False, True])

  def f(logits: jax.Array) -> jax.Array:
    logits = jnp.where(mask, logits, MASKED)
    return ours.log_prob(logits, jnp.int32(2)) + ours.entropy(logits, key())

  value, grad = run(jax.value_and_grad(f), jnp.array([0.0, 5.0, 0.0]))
  # two equal choices: log 1/2, plus an entropy of log 2
  np.testing.assert_allclose(value, 0, atol=1e-6)
  np.testing.assert_allclose(grad, [-0.5, 0, 0.5], atol=1e-6)


# --- actions ----------------------------------------------------------------------------------


def space(dtype: Any = np.float32) -> spaces.Box:
  return spaces.Box(np.array([[-1, 0], [2, -5]], dtype), np.array([[1, 0.5], [3, 5]], dtype))


@pytest.mark.parametrize('squash', [False, True])
def test_actions_lie_within_the_space(squash: bool) -> None:
  ours = distributions.for_space(space(), squash)
  assert type(ours) is (TanhNormal if squash else Normal)
  x = jnp.array([[0.0, 0, 0, 0], [-99, -99, -99, -99], [99, 99, 99, 99]])
  actions = np.asarray(ours.to_action(x))
  assert actions.shape == (3, 2, 2)
  assert all(space().contains(a) for a in actions)
  assert np.array_equal(actions[1], space().low) and np.array_equal(actions[2], space().high)
  middle = (space().low + space().high) / 2
  np.testing.assert_allclose(actions[0], middle, rtol=1e-6)


@pytest.mark.parametrize('squash', [False, True])
def test_no_rounding_leads_out_of_the_space(squash: bool) -> None:
  low, high = np.sort(np.random.default_rng(0).uniform(-5, 5, (2, 1000)), axis=0)
  box = spaces.Box(low.astype(np.float32), high.astype(np.float32))
  ours = distributions.for_space(box, squash)
  for x in (-20.0, 20.0):
    action = np.asarray(ours.to_action(jnp.full(1000, x)))
    assert (action >= box.low).all() and (action <= box.high).all()


def test_the_unit_of_a_normal_is_half_the_range() -> None:
  x = jnp.array([-1.5, 0.0, 0.5])
  cases = {
    (-1.0, 1.0): [-1.0, 0.0, 0.5], (-2.0, 2.0): [-2.0, 0.0, 1.0],
    (100.0, 200.0): [100.0, 150.0, 175.0], (5.0, np.inf): [5.0, 5.0, 5.5],
    (-np.inf, -5.0): [-6.5, -5.0, -5.0], (-np.inf, np.inf): [-1.5, 0.0, 0.5],
    (-HUGE, HUGE): [-1.5, 0.0, 0.5], (7.0, 7.0): [7.0, 7.0, 7.0],
  }  # fmt: skip
  for (low, high), expected in cases.items():
    box = spaces.Box(low, high, (3,))
    assert distributions.for_space(box).to_action(x).tolist() == expected, box
    older = distributions.for_space(box, scaled=False).to_action(x).tolist()
    assert older == np.clip([-1.5, 0.0, 0.5], low, high).tolist()


def test_a_normal_over_a_unit_box_computes_as_it_did() -> None:
  def program(scaled: bool) -> str:
    ours = distributions.for_space(spaces.Box(-1, 1, (3,)), scaled=scaled)
    return str(jax.make_jaxpr(ours.to_action)(jnp.zeros((2, 3))))

  assert program(True) == program(False)


BOUNDS = [(-0.1, 0.1), (0.0, 0.3), (-0.7, 0.7), (0.1, 0.1), (0.1, 0.1 + 1e-12), (1e300, 1e301)]


@pytest.mark.parametrize('bounds', [*BOUNDS, (-1e-50, 1e-50)])
@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.float16])
@pytest.mark.parametrize('squash', [False, True])
def test_an_environment_gets_actions_in_its_own_bounds(
  bounds: Any, dtype: Any, squash: bool
) -> None:
  if bounds[0] > 1e30:
    bounds = (-60_000.0, 60_000.0)
  own = spaces.Box(*bounds, (2,), dtype)
  ours = distributions.for_space(in_jax(own), squash)
  x = np.asarray(ours.to_action(jnp.array([[-99.0, 99.0], [99.0, -99.0], [0.0, 0.1]])))
  for action in actions_for(own, x):
    assert own.contains(action) and action.dtype == own.dtype, action


@pytest.mark.parametrize('squash', [False, True])
def test_fixed_numbers_have_no_part_in_a_policy(squash: bool) -> None:
  box = spaces.Box(np.float32([-1, 3, 0]), np.float32([1, 3, 2]))
  rest = spaces.Box(np.float32([-1, 0]), np.float32([1, 2]))
  ours, theirs = (distributions.for_space(s, squash) for s in (box, rest))
  params = np.float32([0.1, 5.0, 0.2, -1.0, 9.0, -2.0])
  x = run(ours.sample, params, jax.random.key(0))

  def numbers(p: jax.Array, x: jax.Array) -> Any:
    log_prob = lambda p: ours.log_prob(p, x) + ours.entropy(p, jax.random.key(0))  # noqa: E731
    action = ours.to_action(x)
    unit = ours.to_unit(action) if isinstance(ours, TanhNormal) else None
    mode = ours.to_action(ours.mode(p))
    return ours.log_prob(p, x), jax.grad(log_prob)(p), action, mode, unit

  log_prob, grads, action, mode, unit = run(numbers, params, x)
  expected = run(theirs.log_prob, params[[0, 2, 3, 5]], x[[0, 2]])
  np.testing.assert_allclose(log_prob, expected, rtol=1e-6)
  assert action[1] == 3 and mode[1] == 3
  assert np.isfinite(grads).all() and grads[1] == grads[4] == 0
  if unit is not None:
    np.testing.assert_allclose(unit, np.tanh(x), atol=1e-6)
    assert unit[1] == 0


def test_bounds_of_the_largest_numbers_do_not_overflow() -> None:
  ours = distributions.squashed(spaces.Box(-HUGE, HUGE, (1,)))
  action = ours.to_action(jnp.array([[-50.0], [0.0], [50.0]]))
  assert action.ravel().tolist() == [-HUGE, 0, HUGE]
  assert ours.to_unit(action).ravel().tolist() == [-1, 0, 1]


@pytest.mark.parametrize('high', [HUGE, 1e20, np.float16(65504)])
def test_a_squashed_policy_is_not_spread_over_bounds_that_stand_for_none(high: Any) -> None:
  dtype = np.asarray(high).dtype if isinstance(high, np.float16) else np.float32
  with pytest.raises(ValueError, match='RescaleAction'):
    Actor().bind(spaces.Box(-1, 1, (2,)), spaces.Box(-high, high, (1,), dtype))


@pytest.mark.parametrize('bounds', [(1e300, 1e301), (-1e301, -1e300), (1e39, np.inf)])
@pytest.mark.parametrize('squash', [False, True])
def test_bounds_that_float32_does_not_reach_are_refused(
  bounds: tuple[float, float], squash: bool
) -> None:
  space = spaces.Box(*bounds, (1,), np.float64)
  with pytest.raises(ValueError, match='float32'):
    distributions.for_space(space, squash)
  with pytest.raises(ValueError, match='float32'):
    distributions.for_space(in_jax(space), squash)


SUBNORMAL = float(np.nextafter(np.float32(0), np.float32(1)))  # devices flush it to 0


@pytest.mark.parametrize('squash', [False, True])
@pytest.mark.parametrize(
  ('low', 'high', 'is_free'),
  [(SUBNORMAL, 1, True), (-1, -SUBNORMAL, True), (-SUBNORMAL, 1, True), (0, 1e-40, False), (5e-324, 0.2, True), (2.0**-126, 1.5 * 2.0**-126, False)],
)  # fmt: skip
def test_bounds_that_devices_flush_to_0_are_none(
  low: float, high: float, is_free: bool, squash: bool
) -> None:
  space = spaces.Box(np.float64([low]), np.float64([high]), dtype=np.float64)
  policy: Any = distributions.for_space(space, squash=squash)
  assert policy.free == (is_free,)
  params = jnp.array([[-9.0, 0.0], [9.0, 0.0]])
  action = jax.jit(lambda x: policy.to_action(policy.mode(x)))(params)
  assert (np.float64(action) >= low).all() and (np.float64(action) <= high).all()
  assert np.isfinite(policy.to_unit(action) if squash else policy.from_action(action)).all()


def test_unbounded_boxes_are_not_clipped() -> None:
  ours = distributions.for_space(spaces.Box(-np.inf, np.inf, (2,)))
  assert ours.to_action(jnp.array([-1e6, 1e6])).tolist() == [-1e6, 1e6]


def test_for_space() -> None:
  assert distributions.for_space(spaces.Discrete(4)) == Categorical(4)
  assert distributions.for_space(spaces.MultiDiscrete([2, 3])) == MultiCategorical((2, 3))
  assert distributions.for_space(spaces.MultiBinary(3)) == MultiCategorical((2, 2, 2))
  box_space = spaces.Box(-1, 2, (2,))
  assert distributions.for_space(box_space) == Normal(
    (2,), (-1, -1), (2, 2), (0.5, 0.5), (1.5, 1.5)
  )
  assert distributions.for_space(box_space, squash=True) == TanhNormal((2,), (-1, -1), (2, 2))


def unchecked(low: float, high: float) -> spaces.Box:
  """A Box of bounds that gymnasium may refuse."""
  box = spaces.Box(-1, 1, (2,))
  box.low, box.high = np.float32([-1, low]), np.float32([1, high])
  return box


REFUSED = {
  'reversed': (unchecked(1, -1), False, 'number 1 of the space'),
  'nan': (unchecked(np.nan, 1), True, 'number 1 of the space'),
  'discrete from 1': (spaces.Discrete(3, start=1), False, 'from 0'),
  'multi-discrete from 1': (spaces.MultiDiscrete([3, 3], start=[0, 1]), False, 'from 0'),
  'two axes': (spaces.MultiDiscrete([[2, 2], [2, 2]]), False, 'one axis'),
  'integers': (spaces.Box(0, 5, (2,), np.int32), False, 'Box of floats'),
  'dict': (spaces.Dict(a=spaces.Discrete(2)), False, 'no distribution'),
  'squashed discrete': (spaces.Discrete(3), True, 'continuous'),
  'squashed unbounded': (spaces.Box(0, np.inf, (2,)), True, 'bounded'),
}


@pytest.mark.parametrize(('refused', 'squash', 'message'), REFUSED.values(), ids=REFUSED)
def test_for_space_refuses(refused: Any, squash: bool, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    distributions.for_space(refused, squash)


@pytest.mark.parametrize('squash', [False, True])
def test_saturation_is_the_share_at_the_ends_of_a_range(squash: bool) -> None:
  space = spaces.Box(np.float32([-1, 0, 3]), np.float32([1, 100, 3]))
  policy = distributions.for_space(space, squash)
  action = jnp.asarray([[-1.0, 50.0, 3.0], [0.985, 99.5, 3.0], [0.95, 1.5, 3.0]])
  assert distributions.saturation(policy, action)['saturation'] == 3 / 6  # one number is fixed


def test_numbers_without_two_bounds_are_not_saturated() -> None:
  space = spaces.Box(np.float32([-np.inf, 0, -1]), np.float32([0, np.inf, 1]))
  policy = distributions.for_space(space)
  assert distributions.saturation(policy, jnp.asarray([[0.0, 0.0, 1.0]]))['saturation'] == 1
  assert distributions.saturation(policy, jnp.asarray([[0.0, 0.0, 0.0]]))['saturation'] == 0
  for unbounded in (spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)):
    assert distributions.saturation(distributions.for_space(unbounded), jnp.zeros((1, 2))) == {}


@pytest.mark.parametrize('squash', [False, True])
def test_raw_samples_of_actions_are_found_again(squash: bool) -> None:
  """Also at the bounds, where a raw sample stays finite, and where a number has one value."""
  space = spaces.Box(np.float32([[-2, 1, 0.5]]), np.float32([[3, 1, 0.75]]))
  policy = distributions.for_space(space, squash)
  action = np.float32([[[-2, 1, 0.5]], [[3, 1, 0.75]], [[0.7, 1, 0.6]], [[2.9, 1, 0.51]]])

  def numbers(action: jax.Array) -> Any:
    x = policy.from_action(action)
    gradient = jax.grad(lambda p: policy.log_prob(p, x).sum())(jnp.zeros((4, 6)))
    return x, policy.to_action(x), gradient

  x, again, gradient = run(numbers, action)
  assert x.shape == (4, 3) and np.isfinite(x).all()
  np.testing.assert_allclose(again, action, rtol=1e-5)
  assert np.isfinite(gradient).all()


def test_choices_are_their_own_raw_samples() -> None:
  for policy, action in ((Categorical(3), [2, 0]), (MultiCategorical((2, 3)), [[1, 2], [0, 1]])):
    assert policy.from_action(jnp.array(action)).tolist() == action


def test_every_action_of_a_policy_in_bfloat16_is_drawn() -> None:
  """Sums of probabilities in bfloat16 skip half of a thousand actions."""
  policy = distributions.Categorical(1000)
  drawn = run(policy.sample, jnp.zeros((4000, 1000), jnp.bfloat16), jax.random.key(0))
  assert len(np.unique(drawn)) > 950
