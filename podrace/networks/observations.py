"""What observation spaces mean to a network: floats, pixels, one-hot values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.spaces import leaves, seen
from podrace.types import Array

PIXELS = 36  # a side; smaller images are grids


def zeros_of(space: Any) -> Array:
  """Observations [1, ...] of zeros, in the shape of a space that holds arrays."""
  if space.shape is None:
    raise ValueError(f'no network input for the observation space {space}')
  return jnp.asarray(np.zeros((1, *space.shape), space.dtype))  # int64 becomes int32


def images_in(space: Any) -> list[Any]:
  """The boxes with three axes, as an action_mask and a state are not."""
  from gymnasium import spaces

  return [s for _, s in leaves(seen(space)) if isinstance(s, spaces.Box) and len(s.shape) == 3]


def image_sides(space: Any) -> tuple[int, ...]:
  """Height and width of the first image in an observation space; () if there is none."""
  images = images_in(space)
  if not images:
    return ()
  return tuple(images[0].shape[1:] if channels_first(images[0]) else images[0].shape[:2])


def as_floats(space: Any, x: Array) -> Array:
  """Observations as floats, by what their space says they are; pixels as bytes, channels last."""
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return jax.nn.one_hot(x - int(space.start), int(space.n))
  if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
    parts = [
      jax.nn.one_hot(x[..., i] - int(space.start[i]), int(n)) for i, n in enumerate(space.nvec)
    ]
    return jnp.concatenate(parts, axis=-1)
  if isinstance(space, spaces.MultiBinary):
    return x.astype(jnp.float32)
  if isinstance(space, spaces.Box):
    if channels_first(space):
      x = jnp.moveaxis(x, -3, -1)
    if is_pixels(space):
      return x
    return x.astype(jnp.float32) / _scale(space)
  raise ValueError(f'no network input for the observation space {space}')


def channels_first(space: Any) -> bool:
  """Whether a box is of pixels [channels, height, width], as Atari's stacked frames are."""
  return is_pixels(space) and space.shape[0] < min(space.shape[1:])


def is_pixels(space: Any) -> bool:
  return len(space.shape) == 3 and space.dtype == np.uint8 and np.max(space.high) == 255


def _scale(space: Any) -> float:
  """What integers are divided by so as to lie within [-1, 1]: 255 for pixels; 1 if unbounded."""
  if not np.issubdtype(space.dtype, np.integer):
    return 1.0
  largest = float(max(abs(np.max(space.high).item()), abs(np.min(space.low).item()), 1))
  return largest if largest < np.iinfo(np.int32).max else 1.0
