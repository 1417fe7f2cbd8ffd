"""Action distributions over a network's raw outputs [..., size], one for each kind of space.

`sample` gives a raw sample; `to_action` turns it into an action of the environment's space. Only
the raw sample has a probability here (a clipped action has none), so agents keep the raw sample.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podrace.types import Array, has_choice, round_inward

REBOUND = (
  ': give it bounds in a wrapper, as gymnasium.wrappers.RescaleAction, or a policy without squash'
)
UNBOUNDED = 1e18  # a bound beyond is none: float32 has no square of it
MASKED = -1e9  # the logit of an action that the environment forbids
MASKED_VALUE = -1e17  # likewise its value: returns of the largest rewards are within 1e16


def allowed(mask: Array, kind: Distribution | None = None) -> Array:
  """Return which choices [B, n] a mask [B, ...] allows, bool; all of them where it allows none.

  Where nothing is done, numbers must be finite too. Each part of a MultiCategorical counts alone.
  """
  ends = np.cumsum(kind.num_actions).tolist() if isinstance(kind, MultiCategorical) else []
  parts = jnp.split(mask.reshape(mask.shape[0], -1) != 0, ends[:-1], axis=-1)
  return jnp.concatenate([x | ~jnp.any(x, axis=-1, keepdims=True) for x in parts], axis=-1)


class Distribution(Protocol):
  """A family of distributions; `params` is [..., size] f32, `x` a raw sample."""

  @property
  def size(self) -> int:
    """Numbers of `params`."""
    ...

  def sample(self, params: Array, key: Array) -> Array:
    """Return raw samples."""
    ...

  def mode(self, params: Array) -> Array:
    """Return the most probable raw samples."""
    ...

  def log_prob(self, params: Array, x: Array) -> Array:
    """Return the log-probabilities of raw samples."""
    ...

  def entropy(self, params: Array, key: Array) -> Array:
    """Return the entropies, exact or estimated from samples."""
    ...

  def to_action(self, x: Array) -> Array:
    """Return the actions of raw samples."""
    ...

  def from_action(self, action: Array) -> Array:
    """Return raw samples of actions, so that `to_action` returns the actions."""
    ...


@dataclasses.dataclass(frozen=True)
class Categorical:
  """One of `num_actions`; params are logits, samples i32."""

  num_actions: int

  @property
  def size(self) -> int:
    """Numbers of `params`."""
    return self.num_actions

  def sample(self, params: Array, key: Array) -> Array:
    """By inverting the distribution function: one random number a sample instead of A.

    It is the first possible action with a sum beyond the number, else the last one: by rounding,
    sums of many numbers also rise at an action of probability 0, which is never taken.
    """
    p, n = jax.nn.softmax(params.astype(jnp.float32)), self.num_actions
    cdf, u = jnp.cumsum(p, axis=-1), jax.random.uniform(key, params.shape[:-1])
    index = jnp.arange(n, dtype=jnp.int32).reshape((1,) * (p.ndim - 1) + (n,))
    order = jnp.where(cdf > u[..., None] * cdf[..., -1:], index, 2 * n - 1 - index)
    first = jnp.min(jnp.where(p > 0, order, 2 * n - 1), axis=-1)
    return jnp.where(first < n, first, 2 * n - 1 - first)

  def mode(self, params: Array) -> Array:
    """Return the most probable raw samples."""
    return jnp.argmax(params, axis=-1).astype(jnp.int32)

  def log_prob(self, params: Array, x: Array) -> Array:
    """Return the log-probabilities of raw samples."""
    log_p = jax.nn.log_softmax(params)
    chosen = jax.nn.one_hot(x, self.num_actions, dtype=bool)  # no gather: its gradient is a scatter
    return jnp.sum(jnp.where(chosen, log_p, 0.0), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    """Return the entropies, exact or estimated from samples."""
    del key
    log_p = jax.nn.log_softmax(params)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

  def to_action(self, x: Array) -> Array:
    """Return the actions of raw samples."""
    return x

  from_action = to_action


@dataclasses.dataclass(frozen=True)
class MultiCategorical:
  """Several independent choices; params are all their logits in a row, samples i32 [..., n]."""

  num_actions: tuple[int, ...]

  @property
  def size(self) -> int:
    """Numbers of `params`."""
    return sum(self.num_actions)

  def _parts(self, params: Array) -> list[tuple[Categorical, Array]]:
    logits = jnp.split(params, np.cumsum(self.num_actions[:-1]).tolist(), axis=-1)
    return [(Categorical(n), part) for n, part in zip(self.num_actions, logits, strict=True)]

  def sample(self, params: Array, key: Array) -> Array:
    """Return raw samples."""
    parts = self._parts(params)
    keys = jax.random.split(key, len(parts))
    return jnp.stack([c.sample(p, keys[i]) for i, (c, p) in enumerate(parts)], axis=-1)

  def mode(self, params: Array) -> Array:
    """Return the most probable raw samples."""
    return jnp.stack([c.mode(p) for c, p in self._parts(params)], axis=-1)

  def log_prob(self, params: Array, x: Array) -> Array:
    """Return the log-probabilities of raw samples."""
    parts = [c.log_prob(p, x[..., i]) for i, (c, p) in enumerate(self._parts(params))]
    return jnp.sum(jnp.stack(parts), axis=0)

  def entropy(self, params: Array, key: Array) -> Array:
    """Return the entropies, exact or estimated from samples."""
    return jnp.sum(jnp.stack([c.entropy(p, key) for c, p in self._parts(params)]), axis=0)

  def to_action(self, x: Array) -> Array:
    """Return the actions of raw samples."""
    return x

  from_action = to_action


def _normal_log_prob(mean: Array, log_std: Array, x: Array) -> Array:
  z = (x - mean) * jnp.exp(-log_std)
  return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Independent normals over a flat box; params are means, then log standard deviations.

  Samples are [..., n]. The action of a sample x is centre + scale * x, clipped to [low, high] and
  shaped as the space: between bounds, the unit of a policy is half the range. Numbers with `low ==
  high` have no part in probabilities.
  """

  shape: tuple[int, ...]
  low: tuple[float, ...]
  high: tuple[float, ...]
  centre: tuple[float, ...] = ()  # none: 0
  scale: tuple[float, ...] = ()  # none: 1

  @property
  def size(self) -> int:
    """Numbers of `params`."""
    return 2 * math.prod(self.shape)

  @property
  def free(self) -> tuple[bool, ...]:
    """Of each number of an action, whether there is anything to choose."""
    return tuple(has_choice(low, high) for low, high in zip(self.low, self.high, strict=True))

  def only_free(self, x: Array) -> Array:
    """`x` [..., n] with 0 where there is nothing to choose."""
    return x if all(self.free) else jnp.where(jnp.asarray(self.free), x, 0.0)

  def mean_and_log_std(self, params: Array) -> tuple[Array, Array]:
    """Return means and log standard deviations [..., n]."""
    mean, log_std = jnp.split(params, 2, axis=-1)
    return self.only_free(mean), self.only_free(log_std)

  def bounds(self, like: Array) -> tuple[Array, Array]:
    """Return the bounds in the shape of `like`."""
    low, high = (jnp.asarray(b, jnp.float32) for b in (self.low, self.high))
    return jnp.broadcast_to(low, like.shape), jnp.broadcast_to(high, like.shape)

  def sample(self, params: Array, key: Array) -> Array:
    """Return raw samples."""
    mean, log_std = self.mean_and_log_std(params)
    return mean + jnp.exp(log_std) * self.only_free(jax.random.normal(key, mean.shape))

  def mode(self, params: Array) -> Array:
    """Return the most probable raw samples."""
    return self.mean_and_log_std(params)[0]

  def log_prob(self, params: Array, x: Array) -> Array:
    """Return the log-probabilities of raw samples."""
    mean, log_std = self.mean_and_log_std(params)
    return jnp.sum(self.only_free(_normal_log_prob(mean, log_std, x)), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    """Return the entropies, exact or estimated from samples."""
    del key
    _, log_std = self.mean_and_log_std(params)
    return jnp.sum(self.only_free(log_std + 0.5 * math.log(2 * math.pi * math.e)), axis=-1)

  def to_action(self, x: Array) -> Array:
    """Return the actions of raw samples."""
    low, high = self.bounds(x)
    if any(s != 1 for s in self.scale):
      x = x * jnp.broadcast_to(jnp.asarray(self.scale, jnp.float32), x.shape)
    if any(self.centre):
      x = x + jnp.broadcast_to(jnp.asarray(self.centre, jnp.float32), x.shape)
    return jnp.clip(x, low, high).reshape((*x.shape[:-1], *self.shape))

  def from_action(self, action: Array) -> Array:
    """Return the raw samples [..., n] of actions [..., *shape]."""
    x = action.reshape((*action.shape[: action.ndim - len(self.shape)], -1))
    ends = (jnp.asarray(b, jnp.float32) for b in (self.centre or (0.0,), self.scale or (1.0,)))
    centre, scale = (jnp.broadcast_to(b, x.shape) for b in ends)
    return (x - centre) / scale

  @property
  def bounded(self) -> tuple[int, ...]:
    """The numbers of an action that have a choice between two bounds."""
    ends = zip(self.low, self.high, strict=True)
    return tuple(i for i, (a, b) in enumerate(ends) if -UNBOUNDED < a < b < UNBOUNDED)

  def saturation(self, action: Array) -> Array:
    """Return the share of the `bounded` numbers of actions within 1% of an end, [] f32."""
    chosen = np.asarray(self.bounded, np.int32)
    flat = action.reshape((*action.shape[: action.ndim - len(self.shape)], -1))
    flat, low, high = (x[..., chosen] for x in (flat, *self.bounds(flat)))
    margin = 0.01 * high - 0.01 * low  # without overflow
    return jnp.mean((flat <= low + margin) | (flat >= high - margin), dtype=jnp.float32)


def saturation(distribution: Any, action: Array) -> dict[str, Array]:
  """Return the metric `saturation` of actions; {} if no number of an action has two bounds."""
  bounded = getattr(distribution, 'bounded', ())
  return {'saturation': distribution.saturation(action)} if bounded else {}


@dataclasses.dataclass(frozen=True)
class TanhNormal(Normal):
  """A Normal squashed by tanh onto [low, high] (Haarnoja et al. 2018, arXiv 1801.01290, app. C).

  The raw sample is the one before tanh; `log_prob` is the density of tanh(x), on [-1, 1]. The
  log standard deviation is kept within [-5, 2].
  """

  def mean_and_log_std(self, params: Array) -> tuple[Array, Array]:
    """Return means and log standard deviations [..., n]."""
    mean, log_std = super().mean_and_log_std(params)
    return mean, jnp.clip(log_std, -5.0, 2.0)

  def _log_det(self, x: Array) -> Array:
    # log(1 - tanh(x)^2), without overflow
    return 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))

  def log_prob(self, params: Array, x: Array) -> Array:
    """Return the log-probabilities of raw samples."""
    each = _normal_log_prob(*self.mean_and_log_std(params), x) - self._log_det(x)
    return jnp.sum(self.only_free(each), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    """Estimated from one sample; there is no closed form."""
    log_det = self.only_free(self._log_det(self.sample(params, key)))
    return super().entropy(params, key) + jnp.sum(log_det, axis=-1)

  def to_action(self, x: Array) -> Array:
    """Return the actions of raw samples."""
    return self.from_unit(jnp.tanh(x))

  def from_action(self, action: Array) -> Array:
    """Return the raw samples of actions, of a finite size also at the bounds."""
    return jnp.arctanh(self.to_unit(action).clip(1e-6 - 1, 1 - 1e-6))

  def from_unit(self, x: Array) -> Array:
    """Actions [..., *shape] from [..., n], which is clipped to [-1, 1]."""
    low, high = self.bounds(x)
    action = low + (jnp.clip(x, -1.0, 1.0) + 1.0) * (0.5 * high - 0.5 * low)  # without overflow
    return jnp.clip(action, low, high).reshape((*x.shape[:-1], *self.shape))  # against rounding

  def to_unit(self, action: Array) -> Array:
    """Actions [..., *shape] as [..., n] within [-1, 1]: tanh of their raw samples."""
    flat = action.reshape((*action.shape[: action.ndim - len(self.shape)], -1))
    low, high = self.bounds(flat)
    if not all(self.free):
      high = jnp.where(jnp.asarray(self.free), high, low + 1.0)  # no 0 / 0
    share = (0.5 * flat - 0.5 * low) / (0.5 * high - 0.5 * low)
    return self.only_free(2.0 * share - 1.0)


class BoxBounds(NamedTuple):
  """A box of actions in float32, [n] each. Raw sample x is the action centre + scale * x, clipped.

  Between two bounds, `centre` is the middle and `scale` half the range. With one bound, `centre` is
  the bound. Without bounds, and where there is nothing to choose, `scale` is 1.
  """

  low: np.ndarray  # within the space's own, however they are rounded
  high: np.ndarray
  bounded: np.ndarray  # bool, on both sides
  free: np.ndarray  # bool, `has_choice`
  centre: np.ndarray
  scale: np.ndarray


def box_bounds(space: Any) -> BoxBounds:
  """Return the bounds, centre and scale of a Box of float actions.

  Raises:
    ValueError: if a bound is NaN, low is above high, or float32 has no number between them.
  """
  low, high = (np.reshape(b, -1) for b in (space.low, space.high))
  if wrong := np.flatnonzero(~(low <= high)).tolist():
    i = wrong[0]
    raise ValueError(f'number {i} of the space {space} has no value: low {low[i]}, high {high[i]}')
  largest = min(float(np.finfo(space.dtype).max), UNBOUNDED)
  below, above = low > -largest, high < largest  # where there are bounds
  low, high = round_inward(low, high, np.float32)
  if wrong := np.flatnonzero((low == np.inf) | (high == -np.inf)).tolist():
    raise ValueError(
      f'number {wrong[0]} of the space {space} is beyond the numbers of float32: declare smaller '
      'bounds in a wrapper, as gymnasium.wrappers.RescaleAction'
    )
  half_low, half_high = low.astype(np.float64) / 2, high.astype(np.float64) / 2
  both, free = below & above, has_choice(low.astype(np.float64), high.astype(np.float64))
  centre = np.where(below, half_low, 0.0) + np.where(above, half_high, 0.0)
  centre = np.where(both, centre, 2 * centre)
  scale = np.where(both & free, half_high - half_low, 1.0)
  return BoxBounds(low, high, both, free, centre.astype(np.float32), scale.astype(np.float32))


def for_space(space: Any, squash: bool = False, scaled: bool = True) -> Distribution:
  """Return the distribution for a gymnasium action space.

  Args:
    space: the action space.
    squash: take TanhNormal for boxes.
    scaled: the unit of a Normal is half the range of a box, around its middle; else 1, around 0.

  Raises:
    ValueError: if there is none, or if `squash` meets a space without bounds, with the remedy.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
    box = box_bounds(space)
    if squash and not np.all(space.bounded_below & space.bounded_above):
      raise ValueError(f'a tanh-Normal needs a bounded action space, not {space}{REBOUND}')
    ends = [tuple(map(float, b)) for b in (box.low, box.high, box.centre, box.scale)]
    if squash:
      return TanhNormal(space.shape, *ends[:2])
    return Normal(space.shape, *(ends if scaled else ends[:2]))
  if squash:
    raise ValueError(f'a tanh-Normal needs a continuous action space, not {space}: a Box of floats')
  if isinstance(space, spaces.Discrete) and space.start == 0:
    return Categorical(int(space.n))
  if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
    return MultiCategorical(tuple(int(n) for n in space.nvec))
  if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
    return MultiCategorical((2,) * space.shape[0])
  raise ValueError(
    f'no distribution for the action space {space}: expected Discrete (from 0), MultiDiscrete '
    '(one axis, from 0), MultiBinary (one axis) or a Box of floats; declare one of these in a '
    "wrapper, as gymnasium.wrappers.TransformAction, which makes the environment's own action of it"
  )


def squashed(space: Any) -> TanhNormal:
  """Return the tanh-Normal over a bounded box; raises ValueError for another space."""
  distribution = for_space(space, squash=True)
  assert isinstance(distribution, TanhNormal)
  return distribution


def check_range(space: Any, distribution: Distribution) -> None:
  """Raise ValueError if actions of a tanh-Normal are spread over bounds that stand for none."""
  if isinstance(distribution, TanhNormal) and not box_bounds(space).bounded.all():
    raise ValueError(
      f'a tanh-Normal spreads actions over all of {space}, whose bounds count as none from '
      f'{UNBOUNDED:g} on, and at the largest number of the type{REBOUND}'
    )
