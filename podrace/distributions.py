"""Action distributions over a network's raw outputs [..., size], one for each kind of space.

`sample` gives a raw sample; `to_action` turns it into what the environment's space takes. Only
the raw sample has a probability here (a clipped action has none), so that is what agents keep.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from podrace.envs.spaces import UNBOUNDED, box_bounds
from podrace.types import Array

REBOUND = ': give it bounds in a wrapper, as gymnasium.wrappers.RescaleAction, or take a policy without squash'
MASKED = -1e9  # the logit of an action that the environment forbids


def allowed(mask: Array) -> Array:
  """Return which choices [B, n] a mask [B, ...] allows, bool; all of them where it allows none.

  A mask may allow nothing where nothing is done or learned. The numbers there must be finite all the same.
  """
  flat = mask.reshape(mask.shape[0], -1) != 0
  return flat | ~jnp.any(flat, axis=-1, keepdims=True)


class Distribution(Protocol):
  """A family of distributions; `params` is [..., size] f32, `x` a raw sample."""

  @property
  def size(self) -> int: ...
  def sample(self, params: Array, key: Array) -> Array: ...
  def mode(self, params: Array) -> Array: ...
  def log_prob(self, params: Array, x: Array) -> Array: ...
  def entropy(self, params: Array, key: Array) -> Array: ...
  def to_action(self, x: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Categorical:
  """One of `num_actions`; params are logits, samples i32."""

  num_actions: int

  @property
  def size(self) -> int:
    return self.num_actions

  def sample(self, params: Array, key: Array) -> Array:
    """By inverting the distribution function: one random number a sample instead of A.

    `u * total < total`, so an action of probability 0 is never taken, not even by rounding.
    """
    cdf = jnp.cumsum(jax.nn.softmax(params), axis=-1)
    u = jax.random.uniform(key, params.shape[:-1])
    return jnp.sum(cdf <= u[..., None] * cdf[..., -1:], axis=-1, dtype=jnp.int32)

  def mode(self, params: Array) -> Array:
    return jnp.argmax(params, axis=-1).astype(jnp.int32)

  def log_prob(self, params: Array, x: Array) -> Array:
    log_p = jax.nn.log_softmax(params)
    chosen = jax.nn.one_hot(x, self.num_actions, dtype=bool)  # no gather: its gradient is a scatter
    return jnp.sum(jnp.where(chosen, log_p, 0.0), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    del key
    log_p = jax.nn.log_softmax(params)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

  def to_action(self, x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class MultiCategorical:
  """Several independent choices; params are all their logits in a row, samples i32 [..., n]."""

  num_actions: tuple[int, ...]

  @property
  def size(self) -> int:
    return sum(self.num_actions)

  def _parts(self, params: Array) -> list[tuple[Categorical, Array]]:
    ends = [sum(self.num_actions[: i + 1]) for i in range(len(self.num_actions) - 1)]
    logits = jnp.split(params, ends, axis=-1)
    return [(Categorical(n), part) for n, part in zip(self.num_actions, logits, strict=True)]

  def sample(self, params: Array, key: Array) -> Array:
    parts = self._parts(params)
    keys = jax.random.split(key, len(parts))
    return jnp.stack([c.sample(p, keys[i]) for i, (c, p) in enumerate(parts)], axis=-1)

  def mode(self, params: Array) -> Array:
    return jnp.stack([c.mode(p) for c, p in self._parts(params)], axis=-1)

  def log_prob(self, params: Array, x: Array) -> Array:
    parts = [c.log_prob(p, x[..., i]) for i, (c, p) in enumerate(self._parts(params))]
    return jnp.sum(jnp.stack(parts), axis=0)

  def entropy(self, params: Array, key: Array) -> Array:
    return jnp.sum(jnp.stack([c.entropy(p, key) for c, p in self._parts(params)]), axis=0)

  def to_action(self, x: Array) -> Array:
    return x


def _normal_log_prob(mean: Array, log_std: Array, x: Array) -> Array:
  z = (x - mean) * jnp.exp(-log_std)
  return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Independent normals over a flat box; params are means, then log standard deviations.

  Samples are [..., n]. The action of a sample x is centre + scale * x, clipped to [low, high] and shaped as the space:
  between bounds, the unit of a policy is half the range. Numbers with `low == high` have no part in probabilities.
  """

  shape: tuple[int, ...]
  low: tuple[float, ...]
  high: tuple[float, ...]
  centre: tuple[float, ...] = ()  # none: 0
  scale: tuple[float, ...] = ()  # none: 1

  @property
  def size(self) -> int:
    return 2 * math.prod(self.shape)

  @property
  def free(self) -> tuple[bool, ...]:
    """Of each number of an action, whether there is anything to choose."""
    return tuple(low < high for low, high in zip(self.low, self.high, strict=True))

  def only_free(self, x: Array) -> Array:
    """`x` [..., n] with 0 where there is nothing to choose."""
    return x if all(self.free) else jnp.where(jnp.asarray(self.free), x, 0.0)

  def mean_and_log_std(self, params: Array) -> tuple[Array, Array]:
    mean, log_std = jnp.split(params, 2, axis=-1)
    return self.only_free(mean), self.only_free(log_std)

  def bounds(self, like: Array) -> tuple[Array, Array]:
    low, high = (jnp.asarray(b, jnp.float32) for b in (self.low, self.high))
    return jnp.broadcast_to(low, like.shape), jnp.broadcast_to(high, like.shape)

  def sample(self, params: Array, key: Array) -> Array:
    mean, log_std = self.mean_and_log_std(params)
    return mean + jnp.exp(log_std) * self.only_free(jax.random.normal(key, mean.shape))

  def mode(self, params: Array) -> Array:
    return self.mean_and_log_std(params)[0]

  def log_prob(self, params: Array, x: Array) -> Array:
    mean, log_std = self.mean_and_log_std(params)
    return jnp.sum(self.only_free(_normal_log_prob(mean, log_std, x)), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    del key
    _, log_std = self.mean_and_log_std(params)
    return jnp.sum(self.only_free(log_std + 0.5 * math.log(2 * math.pi * math.e)), axis=-1)

  def to_action(self, x: Array) -> Array:
    low, high = self.bounds(x)
    if any(s != 1 for s in self.scale):
      x = x * jnp.broadcast_to(jnp.asarray(self.scale, jnp.float32), x.shape)
    if any(self.centre):
      x = x + jnp.broadcast_to(jnp.asarray(self.centre, jnp.float32), x.shape)
    action = jnp.clip(x, low, high)
    return action.reshape((*x.shape[:-1], *self.shape))


@dataclasses.dataclass(frozen=True)
class TanhNormal(Normal):
  """A Normal squashed by tanh onto [low, high] (Haarnoja et al. 2018, arXiv 1801.01290, app. C).

  The raw sample is the one before tanh; `log_prob` is the density of tanh(x), on [-1, 1]. The
  log standard deviation is kept within [-5, 2].
  """

  def mean_and_log_std(self, params: Array) -> tuple[Array, Array]:
    mean, log_std = super().mean_and_log_std(params)
    return mean, jnp.clip(log_std, -5.0, 2.0)

  def _log_det(self, x: Array) -> Array:
    # log(1 - tanh(x)^2), without overflow
    return 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))

  def log_prob(self, params: Array, x: Array) -> Array:
    mean, log_std = self.mean_and_log_std(params)
    each = _normal_log_prob(mean, log_std, x) - self._log_det(x)
    return jnp.sum(self.only_free(each), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    """Estimated from one sample; there is no closed form."""
    log_det = self.only_free(self._log_det(self.sample(params, key)))
    return super().entropy(params, key) + jnp.sum(log_det, axis=-1)

  def to_action(self, x: Array) -> Array:
    return self.from_unit(jnp.tanh(x))

  def from_unit(self, x: Array) -> Array:
    """Actions [..., *shape] from [..., n], which is clipped to [-1, 1]."""
    low, high = self.bounds(x)
    half = 0.5 * high - 0.5 * low  # without overflow
    action = low + (jnp.clip(x, -1.0, 1.0) + 1.0) * half
    action = jnp.clip(action, low, high)  # rounding may go beyond
    return action.reshape((*x.shape[:-1], *self.shape))

  def to_unit(self, action: Array) -> Array:
    """Actions [..., *shape] as [..., n] within [-1, 1]: tanh of their raw samples."""
    flat = action.reshape((*action.shape[: action.ndim - len(self.shape)], -1))
    low, high = self.bounds(flat)
    if not all(self.free):
      high = jnp.where(low < high, high, low + 1.0)  # no 0 / 0
    share = (0.5 * flat - 0.5 * low) / (0.5 * high - 0.5 * low)
    return self.only_free(2.0 * share - 1.0)


def for_space(space: Any, squash: bool = False, scaled: bool = True) -> Distribution:
  """The distribution for a gymnasium action space.

  Args:
    squash: take TanhNormal for boxes.
    scaled: the unit of a Normal is half the range of a box, around its middle; else 1, around 0.

  Raises:
    ValueError: if there is none, or if `squash` meets a space that has no bounds. The message says what to do.
  """
  import numpy as np
  from gymnasium import spaces

  if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
    box = box_bounds(space)
    if squash and not np.all(space.bounded_below & space.bounded_above):
      raise ValueError(f'a tanh-Normal needs a bounded action space, not {space}{REBOUND}')
    low, high, centre, scale = (
      tuple(map(float, b)) for b in (box.low, box.high, box.centre, box.scale)
    )
    if squash:
      return TanhNormal(space.shape, low, high)
    return Normal(space.shape, low, high, *((centre, scale) if scaled else ()))
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
    '(one axis, from 0), MultiBinary (one axis) or a Box of floats; declare one of these in a wrapper, as '
    "gymnasium.wrappers.TransformAction, which makes the environment's own action of it"
  )


def squashed(space: Any) -> TanhNormal:
  """The tanh-Normal over a bounded box.

  Raises:
    ValueError: if the space is something else.
  """
  found = for_space(space, squash=True)
  assert isinstance(found, TanhNormal)
  return found


def check_range(space: Any, distribution: Distribution) -> None:
  """Raise ValueError if actions of a tanh-Normal are spread over bounds that stand for none."""
  if isinstance(distribution, TanhNormal) and not box_bounds(space).bounded.all():
    raise ValueError(
      f'a tanh-Normal spreads actions over all of {space}, whose bounds count as none from {UNBOUNDED:g} on, and at '
      f'the largest number of the type{REBOUND}'
    )
