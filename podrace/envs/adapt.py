"""What the adapters share: arrays of exactly the declared types, and spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.types import Array


def strong(tree: Any) -> Any:
  """The same values as strongly typed arrays, so that a scan's carry keeps its type.

  Libraries start their states from Python literals (weakly typed) and return strong ones.
  """

  def leaf(x: Any) -> Array:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    return jnp.asarray(x, dtype=jnp.result_type(x))

  return jax.tree.map(leaf, tree)


def to_space(space: gymnasium.Space, observation: Any) -> Any:
  """`observation` in the types that `space` declares; dicts go by key, other shapes are refused."""
  if isinstance(space, gymnasium.spaces.Dict):
    return {key: to_space(sub, observation[key]) for key, sub in space.spaces.items()}
  if jnp.shape(observation) != space.shape:
    raise ValueError(f'observation of shape {jnp.shape(observation)}, declared {space.shape}')
  return jnp.asarray(observation, space.dtype)


def box(low: Any, high: Any, shape: tuple[int, ...], dtype: Any) -> gymnasium.spaces.Box:
  """A Box from bounds that broadcast; what a float's largest number bounds is unbounded."""
  dtype = np.dtype(dtype)
  if dtype == np.bool_:
    return gymnasium.spaces.Box(0, 1, shape, np.bool_)
  low, high = np.asarray(low), np.asarray(high)
  if np.issubdtype(dtype, np.floating):
    huge = np.finfo(np.float32).max
    low, high = low.astype(np.float64), high.astype(np.float64)
    low = np.where(low <= -huge, -np.inf, low)
    high = np.where(high >= huge, np.inf, high)
  return gymnasium.spaces.Box(
    np.broadcast_to(low, shape).astype(dtype), np.broadcast_to(high, shape).astype(dtype),
    shape, dtype.type,
  )


def discrete(n: int) -> gymnasium.spaces.Discrete:
  """The integers below n, as int32 (jax has no int64 by default)."""
  return gymnasium.spaces.Discrete(int(n), dtype=np.int32)
