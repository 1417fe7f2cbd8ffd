"""Running statistics for observations and rewards; the same on every device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace.types import Array


class Statistics(NamedTuple):
  """Mean and variance of all that was seen; `mean` and `var` are pytrees like one element."""

  count: Array  # [] f32 elements
  mean: Any
  var: Any


class Moments(NamedTuple):
  """What one batch adds, relative to the mean so far; a mean, so `pmean` joins the devices'."""

  count: Array  # [] f32 elements on this device
  shift: Any  # mean of x - statistics.mean
  square: Any  # mean of (x - statistics.mean)^2


def init(example: Any) -> Statistics:
  """Statistics of nothing: mean 0, variance 1; `example` is one element, without batch axes."""
  zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), example)
  ones = jax.tree.map(jnp.ones_like, zeros)
  return Statistics(jnp.float32(0), zeros, ones)


def moments(statistics: Statistics, batch: Any, batch_axes: int = 2) -> Moments:
  """This device's part of a batch whose first `batch_axes` axes are elements."""
  axes = tuple(range(batch_axes))
  deviation = jax.tree.map(lambda x, m: x.astype(jnp.float32) - m, batch, statistics.mean)
  first = jax.tree.leaves(batch)[0]
  count = 1
  for size in first.shape[:batch_axes]:
    count *= size
  return Moments(
    count=jnp.float32(count),
    shift=jax.tree.map(lambda d: jnp.mean(d, axes), deviation),
    square=jax.tree.map(lambda d: jnp.mean(d * d, axes), deviation),
  )


def merge(statistics: Statistics, joined: Moments, num_devices: int) -> Statistics:
  """The statistics after a batch (Chan et al. 1979), from moments averaged over the devices."""
  added = joined.count * num_devices
  total = statistics.count + added
  share = added / total
  mean = jax.tree.map(lambda m, s: m + share * s, statistics.mean, joined.shift)
  var = jax.tree.map(
    lambda v, s, q: (1 - share) * v + share * q - jnp.square(share * s),
    statistics.var,
    joined.shift,
    joined.square,
  )
  return Statistics(total, mean, jax.tree.map(lambda v: jnp.maximum(v, 0.0), var))


def standardize(statistics: Statistics, x: Any, clip: float = 10.0) -> Any:
  """(x - mean) / std, clipped to +-`clip` as in OpenAI's baselines."""
  return jax.tree.map(
    lambda x, m, v: jnp.clip((x - m) * jax.lax.rsqrt(v + 1e-8), -clip, clip),
    x,
    statistics.mean,
    statistics.var,
  )


def scale(statistics: Statistics, x: Array, clip: float = 10.0) -> Array:
  """x / std, clipped to +-`clip`: rewards keep their sign."""
  return jnp.clip(x * jax.lax.rsqrt(statistics.var + 1e-8), -clip, clip)
