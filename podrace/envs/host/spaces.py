"""Spaces of environments on the host, in the types that JAX has, and what lies within them."""

from __future__ import annotations

from typing import Any

import numpy as np

from podrace.envs.spaces import bounds
from podrace.errors import UnknownName
from podrace.types import round_inward

WRAPPER = 'a wrapper such as gymnasium.wrappers.TransformAction can'


def wide_bounds(space: Any) -> tuple[Any, Any] | None:
  """What is clearly outside of a Box is below the first or above the second; None if nothing can be.

  A hundredth of the range is left for what is rounded; where one side has no bound, a thousandth of the other.
  """
  if not hasattr(space, 'low'):
    return None
  low, high = space.low.astype(np.float64), space.high.astype(np.float64)
  if space.dtype.kind in 'iu':
    limits = np.iinfo(space.dtype)
    return None if np.all((low == limits.min) & (high == limits.max)) else (low, high)
  if not np.count_nonzero(np.isfinite(low) | np.isfinite(high)):
    return None
  with np.errstate(invalid='ignore'):
    both = np.isfinite(low) & np.isfinite(high)
    near_low, near_high = (
      np.where(both, (high - low) / 100, abs(x) / 1000 + 1e-6) for x in (low, high)
    )
    return low - near_low, high + near_high


def action_bounds(space: Any) -> tuple[Any, Any]:
  """The lowest and the highest action, or numbers in one."""
  found = bounds(space)
  if found is None:
    raise UnknownName(
      f'actions are Discrete, MultiDiscrete, MultiBinary or Box here, not {space}; {WRAPPER} make them of one of these'
    )
  return found


def i32(space: Any) -> Any:
  """Choices that are declared as i64, which is Gymnasium's default and JAX does not have, as i32."""
  from gymnasium import spaces

  if space.dtype != np.int64 or not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
    return space
  if isinstance(space, spaces.Discrete):
    return spaces.Discrete(int(space.n), start=int(space.start), dtype=np.int32)
  return spaces.MultiDiscrete(space.nvec, start=space.start, dtype=np.int32)


def in_jax(space: Any) -> Any:
  """Return a space that holds arrays in the types that JAX has: numbers of 64 bits in 32.

  Bounds of floats are rounded towards each other, so what is within them is within the space's own.

  Raises:
    UnknownName: if there is no such space; the message says what to do.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
    return choices(space)
  if not isinstance(space, spaces.Box):
    return space
  dtype = np.dtype(space.dtype)
  kind, size = dtype.kind, dtype.itemsize
  if size <= 4 or kind not in 'iuf':
    return space
  return narrow(
    space, space.low, space.high, {'i': np.int32, 'u': np.uint32, 'f': np.float32}[kind]
  )


def choices(space: Any) -> Any:
  """A Discrete or MultiDiscrete in a type that JAX has.

  Raises:
    UnknownName: if it does not start at 0, or has more choices than int32 counts.
  """
  from gymnasium import spaces

  if np.any(space.start):
    raise UnknownName(
      f'{space} does not start at 0; {WRAPPER} add {space.start} to actions, and '
      'gymnasium.wrappers.TransformObservation take it from observations'
    )
  is_one = isinstance(space, spaces.Discrete)
  most = int(space.n if is_one else np.max(space.nvec))
  if most > np.iinfo(np.int32).max:
    raise UnknownName(f'{space} has {most:,} choices, expected at most {np.iinfo(np.int32).max:,}')
  if is_one:
    return spaces.Discrete(most, dtype=np.int32)
  return spaces.MultiDiscrete(space.nvec, dtype=np.int32)


def narrow(box: Any, low: Any, high: Any, dtype: Any) -> Any:
  """A Box in a type that JAX has; bounds that it has not are its own."""
  from gymnasium import spaces

  if np.issubdtype(dtype, np.integer):
    limits = np.iinfo(dtype)
    low, high = (np.clip(x, limits.min, limits.max).astype(dtype) for x in (low, high))
  else:
    low, high = round_inward(low, high, dtype)
  return spaces.Box(low, high, box.shape, dtype)
