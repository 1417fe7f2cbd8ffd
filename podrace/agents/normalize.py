"""Running statistics for observations and rewards; the same on every device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace.types import Array

GAP = 100.0  # between outliers and the largest number that is none; else both are one distribution
OUTLIERS = ((1e4, 0.05), (1e8, 0.5))
# ^ distance in standard deviations of at least 1, and the largest share of a batch that may be as
#   far: beyond that share the numbers are no outliers
LARGEST = 1e15  # deviation with a square and sums that are finite in float32; beyond: an outlier


class Statistics(NamedTuple):
  """Mean and variance of all elements; `mean` and `var` are pytrees like one element."""

  seen: Array  # [] f32 elements
  mean: Any
  var: Any


class Moments(NamedTuple):
  """The contribution of one device's batch. All are means, so one `pmean` joins the devices'."""

  seen: Array  # [] f32 elements on this device
  shift: Any  # mean of x - statistics.mean
  square: Any  # that, squared; after `pmean` it has the distance between the devices' means
  within: Any  # variance of x on this device, around its own mean


def init(example: Any) -> Statistics:
  """Return the statistics of no elements: mean 0, variance 1. `example` has no batch axes."""
  zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), example)
  ones = jax.tree.map(jnp.ones_like, zeros)
  return Statistics(jnp.float32(0), zeros, ones)


def moments(statistics: Statistics, batch: Any, batch_axes: int = 2) -> Moments:
  """Return the contribution of a batch; its first `batch_axes` axes are elements.

  Outliers count as the mean, since a sentinel such as 1e20 would dominate the variance. The nearer
  outliers are, the rarer they must be (OUTLIERS): a number that is often 0 and often 1e5 has none.
  A dimension with all of its values moving far together is followed.
  """
  axes = tuple(range(batch_axes))

  def deviate(x: Array, mean: Array, var: Array) -> Array:
    d = x.astype(jnp.float32) - _under(x, mean)
    size, std = jnp.abs(d), _under(x, jnp.sqrt(jnp.maximum(var, 1.0)))
    is_outlier = size > LARGEST
    for distance, share in OUTLIERS:
      near = jnp.max(jnp.where(size > distance * std, 0.0, size), axes, keepdims=True)
      is_far = size > jnp.maximum(distance * std, GAP * near)
      is_outlier |= is_far & _under(x, jnp.mean(is_far, axes) < share)
    return jnp.where(is_outlier, 0.0, d)

  deviation = jax.tree.map(deviate, batch, statistics.mean, statistics.var)
  count = math.prod(jax.tree.leaves(batch)[0].shape[:batch_axes])
  shift = jax.tree.map(lambda d: jnp.mean(d, axes), deviation)
  return Moments(
    seen=jnp.float32(count),
    shift=shift,
    square=jax.tree.map(jnp.square, shift),
    within=jax.tree.map(
      lambda d, s: jnp.mean(jnp.square(d - _under(d, s)), axes), deviation, shift
    ),
  )


def merge(statistics: Statistics, joined: Moments, num_devices: int) -> Statistics:
  """Return the statistics after a batch (Chan et al. 1979), from moments averaged over devices."""
  added = joined.seen * num_devices
  total = statistics.seen + added
  share = added / total

  def variance(v: Array, s: Array, square: Array, within: Array) -> Array:
    # Of the first batch `s` is the mean itself. Where that is large, a difference of squares as
    # small as this is rounding and not a difference between devices.
    between = square - s * s
    between = jnp.where(between > 1e-6 * square, between, 0.0)
    return (1 - share) * v + share * (within + between + (1 - share) * s * s)

  mean = jax.tree.map(lambda m, s: m + share * s, statistics.mean, joined.shift)
  var = jax.tree.map(variance, statistics.var, joined.shift, joined.square, joined.within)
  return Statistics(total, mean, var)


def _under(x: Array, element: Array) -> Array:
  """`element` with leading axes of 1 for the batch axes of `x`."""
  return element.reshape((1,) * (jnp.ndim(x) - jnp.ndim(element)) + jnp.shape(element))


def standardize(statistics: Statistics, x: Any, clip: float = 10.0) -> Any:
  """Return (x - mean) / std, clipped to +-`clip` as in OpenAI's baselines."""
  return jax.tree.map(
    lambda x, m, v: jnp.clip((x - _under(x, m)) * jax.lax.rsqrt(_under(x, v) + 1e-8), -clip, clip),
    x,
    statistics.mean,
    statistics.var,
  )


def scale(statistics: Statistics, x: Array, clip: float = 10.0) -> Array:
  """Return x / std, clipped to +-`clip`; rewards keep their sign."""
  return jnp.clip(x * jax.lax.rsqrt(statistics.var + 1e-8), -clip, clip)
