"""Observation spaces as inputs of a network: floats, pixels, one-hot values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.spaces import is_bytes_of_image, is_grid_of_bytes, leaves, number_encoding, seen
from podrace.types import Array


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
  """The least height and width of the images in a space, which share a torso; () without any."""
  sides = [s.shape[1:] if channels_first(s) else s.shape[:2] for s in images_in(space)]
  return tuple(map(min, zip(*sides, strict=True)))


def as_floats(space: Any, x: Array, plain: bool = False) -> Array:
  """Return observations as floats, by the kind of their space; pixels as bytes, channels last.

  `plain` is the older way to encode integers, see `number_encoding`.
  """
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
    scale, log = number_encoding(space, plain)
    if not is_pixels(space, plain):
      x = _encoded(x.astype(jnp.float32), scale, log)
    return jnp.moveaxis(x, -3, -1) if channels_first(space) else x
  raise ValueError(
    f'no network input for the observation space {space}: expected Box, Discrete, MultiBinary or '
    'MultiDiscrete (one axis); declare one of these in a wrapper, as '
    'gymnasium.wrappers.TransformObservation'
  )


def _encoded(x: Array, scale: Any, log: Any) -> Array:
  if np.any(log):
    y = jnp.sign(x) * jnp.log1p(jnp.abs(x))
    x = y if np.all(log) else jnp.where(jnp.broadcast_to(log, x.shape), y, x)
  return x / (scale if isinstance(scale, float) else jnp.broadcast_to(scale, x.shape))


def channels_first(space: Any) -> bool:
  """Whether a box is of bytes [channels, height, width], as Atari's stacked frames are."""
  return is_bytes_of_image(space) and space.shape[0] < min(space.shape[1:])


def is_pixels(space: Any, plain: bool = False) -> bool:
  """Whether a box is a picture, which networks take as bytes; `plain`: also if it is small."""
  return is_bytes_of_image(space) and (plain or not is_grid_of_bytes(space))
