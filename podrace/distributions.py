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

from podrace.types import Array

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

  Samples are [..., n]; actions are the samples clipped to [low, high] and shaped as the space.
  """

  shape: tuple[int, ...]
  low: tuple[float, ...]
  high: tuple[float, ...]

  @property
  def size(self) -> int:
    return 2 * math.prod(self.shape)

  def mean_and_log_std(self, params: Array) -> tuple[Array, Array]:
    mean, log_std = jnp.split(params, 2, axis=-1)
    return mean, log_std

  def bounds(self, like: Array) -> tuple[Array, Array]:
    low, high = (jnp.asarray(b, jnp.float32) for b in (self.low, self.high))
    return jnp.broadcast_to(low, like.shape), jnp.broadcast_to(high, like.shape)

  def sample(self, params: Array, key: Array) -> Array:
    mean, log_std = self.mean_and_log_std(params)
    return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

  def mode(self, params: Array) -> Array:
    return self.mean_and_log_std(params)[0]

  def log_prob(self, params: Array, x: Array) -> Array:
    mean, log_std = self.mean_and_log_std(params)
    return jnp.sum(_normal_log_prob(mean, log_std, x), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    del key
    _, log_std = self.mean_and_log_std(params)
    return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

  def to_action(self, x: Array) -> Array:
    low, high = self.bounds(x)
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
    return jnp.sum(_normal_log_prob(mean, log_std, x) - self._log_det(x), axis=-1)

  def entropy(self, params: Array, key: Array) -> Array:
    """Estimated from one sample; there is no closed form."""
    return super().entropy(params, key) + jnp.sum(self._log_det(self.sample(params, key)), axis=-1)

  def to_action(self, x: Array) -> Array:
    return self.from_unit(jnp.tanh(x))

  def from_unit(self, x: Array) -> Array:
    """Actions [..., *shape] from [..., n], which is clipped to [-1, 1]."""
    low, high = self.bounds(x)
    action = low + 0.5 * (jnp.clip(x, -1.0, 1.0) + 1.0) * (high - low)
    action = jnp.clip(action, low, high)  # rounding may go beyond
    return action.reshape((*x.shape[:-1], *self.shape))

  def to_unit(self, action: Array) -> Array:
    """Actions [..., *shape] as [..., n] within [-1, 1]: tanh of their raw samples."""
    flat = action.reshape((*action.shape[: action.ndim - len(self.shape)], -1))
    low, high = self.bounds(flat)
    return 2.0 * (flat - low) / (high - low) - 1.0


def for_space(space: Any, squash: bool = False) -> Distribution:
  """The distribution for a gymnasium action space; `squash` takes TanhNormal for boxes.

  Raises:
    ValueError: if there is none, or if `squash` meets a space that has no bounds.
  """
  import numpy as np
  from gymnasium import spaces

  if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
    low, high = (tuple(float(v) for v in b.reshape(-1)) for b in (space.low, space.high))
    if squash and not np.all(space.bounded_below & space.bounded_above):
      raise ValueError(f'a tanh-Normal needs a bounded action space, not {space}')
    return (TanhNormal if squash else Normal)(space.shape, low, high)
  if squash:
    raise ValueError(f'a tanh-Normal needs a continuous action space, not {space}')
  if isinstance(space, spaces.Discrete) and space.start == 0:
    return Categorical(int(space.n))
  if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
    return MultiCategorical(tuple(int(n) for n in space.nvec))
  if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
    return MultiCategorical((2,) * space.shape[0])
  raise ValueError(
    f'no distribution for the action space {space}: expected Discrete (from 0), MultiDiscrete '
    '(one axis, from 0), MultiBinary (one axis) or a Box of floats'
  )


def squashed(space: Any) -> TanhNormal:
  """The tanh-Normal over a bounded box.

  Raises:
    ValueError: if the space is something else.
  """
  found = for_space(space, squash=True)
  assert isinstance(found, TanhNormal)
  return found
