"""Spaces of environments on the host: types that JAX has, and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from podrace.envs.spaces import MASK, bounds
from podrace.envs.timestep_rules import choices_of
from podrace.errors import UnknownName
from podrace.types import round_inward

WRAPPER = 'a wrapper such as gymnasium.wrappers.TransformAction can'


def wide_bounds(space: Any) -> tuple[Any, Any] | None:
  """Return bounds beyond which a value is clearly outside of a space; None if there are none.

  Beyond the bounds of a Box of floats there is a margin for rounding: a hundredth of the range, or
  of one bound a thousandth.
  """
  if not hasattr(space, 'low'):  # choices
    return bounds(space)
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
  """Return the lowest and the highest action, as arrays or scalars."""
  limits = bounds(space)
  if limits is None:
    raise UnknownName(
      f'actions are Discrete, MultiDiscrete, MultiBinary or Box here, not {space}; {WRAPPER} make '
      'them of one of these'
    )
  return limits


def allowed_choices(space: Any, observation: Any, n: int) -> np.ndarray | None:
  """Return which choices of actions n observations allow, bool [n, choices].

  None if the space has no choices, or the observation no mask of as many.
  """
  mask = observation.get(MASK) if isinstance(observation, dict) else None
  if mask is None or not (choices := sum(choices_of(space))) or np.size(mask) != n * choices:
    return None
  return np.reshape(mask, (n, choices)) != 0


def best_choices(space: Any, scores: np.ndarray) -> np.ndarray:
  """Return the actions [n, ...] with the highest scores [n, choices] in each part."""
  parts = np.split(scores, np.cumsum(choices_of(space))[:-1], axis=1)
  best = np.stack([x.argmax(1) for x in parts], 1).reshape(len(scores), *space.shape)
  return (best + getattr(space, 'start', 0)).astype(space.dtype)


def i32(space: Any) -> Any:
  """Return a space of int64 choices, Gymnasium's default, with int32 choices, which JAX has.

  Raises:
    UnknownName: if int32 does not hold one of its choices.
  """
  from gymnasium import spaces

  if space.dtype != np.int64 or not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
    return space
  limits, lowest, highest = np.iinfo(np.int32), *action_bounds(space)
  low, high = int(np.min(lowest)), int(np.max(highest))
  if low < limits.min or high > limits.max:
    raise UnknownName(
      f'{space} has choices from {low:,} to {high:,}, expected {limits.min:,} to {limits.max:,}, '
      f'which int32 holds; {WRAPPER} make actions smaller, and '
      'gymnasium.wrappers.TransformObservation observations'
    )
  if isinstance(space, spaces.Discrete):
    return spaces.Discrete(int(space.n), start=int(space.start), dtype=np.int32)
  return spaces.MultiDiscrete(space.nvec, start=space.start, dtype=np.int32)


def in_jax(space: Any) -> Any:
  """Return a space with the types that JAX has: numbers of 64 bits become numbers of 32.

  Bounds of floats are rounded towards each other, so that values stay within the original space.

  Raises:
    UnknownName: if there is no such space; the message says how to wrap the environment.
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
  """Return a Discrete or MultiDiscrete in int32.

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
  count = int(space.n if is_one else np.max(space.nvec))
  if count > np.iinfo(np.int32).max:
    raise UnknownName(f'{space} has {count:,} choices, expected at most {np.iinfo(np.int32).max:,}')
  if is_one:
    return spaces.Discrete(count, dtype=np.int32)
  return spaces.MultiDiscrete(space.nvec, dtype=np.int32)


def narrow(box: Any, low: Any, high: Any, dtype: Any) -> Any:
  """Return a Box in a narrower type. Bounds that the type cannot hold become the type's own."""
  from gymnasium import spaces

  if np.issubdtype(dtype, np.integer):
    limits = np.iinfo(dtype)
    low, high = (np.clip(x, limits.min, limits.max).astype(dtype) for x in (low, high))
  else:
    low, high = round_inward(low, high, dtype)
  return spaces.Box(low, high, box.shape, dtype)
