"""The structure of gymnasium's spaces: Dicts and Tuples of spaces that hold arrays.

`number_encoding` scales observations to floats of magnitude about 1. The module reads only the
attributes of the spaces, so it imports neither gymnasium nor jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MASK = 'action_mask'  # an entry of observations: which choices are allowed
STATE = 'podrace_state'  # likewise: the environment's state
UNSEEN = (MASK, STATE)  # entries that are no input of a network's layers
PIXELS = 36  # a side; smaller images are grids
KERNEL = 3  # side of the convolutions of the torso `grid`, and of the smallest image for them
LOG_OF_BYTES = math.log(256)  # divides the logarithms of a grid's bytes


def seen(x: Any) -> Any:
  """Return the entries of a space, or of an observation, that layers take: all but UNSEEN."""
  return {k: v for k, v in x.items() if k not in UNSEEN} if isinstance(x, Mapping) else x


def _parts(space: Any) -> list[Any] | None:
  """Return the keys of a Dict, the indices of a Tuple, or None for a space that holds an array."""
  if isinstance(space, Mapping):
    return list(space)
  return list(range(len(space))) if isinstance(space, Sequence) else None


def leaves(space: Any, path: str = 'observation') -> Iterator[tuple[str, Any]]:
  """Yield (path, space) for each space that holds an array; a path is `observation/key/0`."""
  parts = _parts(space)
  if parts is None:
    yield path, space
  for part in parts or ():  # a `/` in a key is ~1, as in JSON pointers: paths are unique
    yield from leaves(space[part], f'{path}/{str(part).replace("~", "~0").replace("/", "~1")}')


def check_observation_space(space: Any) -> None:
  """Check the keys of Dicts, and the action mask.

  Raises:
    ValueError: if keys have no order, or the mask is a tree; the message begins with a verb.
  """
  if keys := unordered_keys(space):
    raise ValueError(f'has the keys {keys}, expected keys of one type, such as texts')
  mask = space.get(MASK) if isinstance(space, Mapping) else None
  if mask is not None and _parts(mask) is not None:
    raise ValueError(
      f'has an {MASK} of several arrays, {mask}, expected one array with an entry for each choice: '
      'join them in a wrapper'
    )


def unordered_keys(space: Any) -> list[Any]:
  """Return keys of a Dict within a space that have no order, which JAX needs; [] if none."""
  parts = _parts(space)
  try:
    sorted(parts or ())
  except TypeError:
    return parts or []
  return next((keys for part in parts or () if (keys := unordered_keys(space[part]))), [])


def values(space: Any, x: Any) -> Iterator[Any]:
  """Yield the arrays of a value of a space, in the order of `leaves`."""
  parts = _parts(space)
  if parts is None:
    yield x
  elif not isinstance(space, Mapping) and len(x) != len(parts):
    raise ValueError(f'{len(x)} parts, where {len(parts)} are declared: {space}')
  for part in parts or ():
    yield from values(space[part], x[part])


def tree(space: Any, arrays: Iterator[Any]) -> Any:
  """Build a value of a space from its arrays, in the order of `leaves`."""
  parts = _parts(space)
  if parts is None:
    return next(arrays)
  subtrees = [tree(space[part], arrays) for part in parts]
  return dict(zip(parts, subtrees, strict=True)) if isinstance(space, Mapping) else tuple(subtrees)


def bounds(space: Any) -> tuple[Any, Any] | None:
  """Return the lowest and the highest values of a space, or None for Dicts and Tuples."""
  if hasattr(space, 'low'):  # a Box
    return space.low, space.high
  if hasattr(space, 'nvec'):  # a MultiDiscrete
    return space.start, space.start + space.nvec - 1
  if _parts(space) is not None or not hasattr(space, 'n'):
    return None
  if not hasattr(space, 'start'):  # a MultiBinary
    return 0, 1
  return int(space.start), int(space.start) + int(space.n) - 1  # a Discrete


def action_dtype(space: Any) -> Any:
  """Return the type of the actions that agents give to environments in JAX."""
  return np.float32 if np.issubdtype(space.dtype, np.floating) else np.int32


def map_leaves(f: Callable[..., Any], space: Any, *trees: Any) -> Any:
  """Return the tree of f(space, *arrays) over the spaces that hold arrays."""
  spaces = (leaf for _, leaf in leaves(space))
  return tree(space, map(f, spaces, *(values(space, x) for x in trees)))


def convert(f: Callable[[Any], Any], space: Any) -> Any:
  """Replace each space that holds an array by f(space)."""
  parts = _parts(space)
  if parts is None:
    return f(space)
  converted: Any = [convert(f, space[part]) for part in parts]
  kind: Any = type(space)
  return kind(dict(zip(parts, converted, strict=True)) if isinstance(space, Mapping) else converted)


# --- observations ---------------------------------------------------------------------------------


class NumberEncoding(NamedTuple):
  """Map of numbers to floats of about 1: x / scale, or sign(x) * log(1 + |x|) / scale if `log`.

  Both fields are scalars, or arrays in the shape of the space.
  """

  scale: Any
  log: Any


def is_bytes_of_image(space: Any) -> bool:
  """Return whether a Box is an image of bytes from 0 to 255."""
  return len(space.shape) == 3 and space.dtype == np.uint8 and np.max(space.high, initial=0) == 255


def is_grid_of_bytes(space: Any) -> bool:
  """Return whether a Box of bytes is a grid of categories, as MiniGrid's, and not a picture."""
  if not is_bytes_of_image(space):
    return False
  channels_first = space.shape[0] < min(space.shape[1:])
  return min(space.shape[1:] if channels_first else space.shape[:2]) < PIXELS


def number_encoding(space: Any, plain: bool = False) -> NumberEncoding:
  """Return the map from numbers of a Box or MultiBinary to floats.

  Floats stay as they are. Integers are divided by the largest magnitude of their bounds. Without
  bounds, their logarithms are taken. `plain` is the older map: one divisor for the whole box, and 1
  without bounds.
  """
  if not (hasattr(space, 'low') and np.issubdtype(space.dtype, np.integer)):
    return NumberEncoding(1.0, False)
  if is_grid_of_bytes(space) and not plain:
    return NumberEncoding(LOG_OF_BYTES, True)
  low, high = space.low.astype(np.float64), space.high.astype(np.float64)
  largest = np.maximum(np.maximum(abs(low), abs(high)), 1.0)
  largest = np.max(largest, initial=1.0) if plain else largest
  unbounded = largest >= np.iinfo(np.int32).max
  scale = np.where(unbounded, 1.0, largest)
  log = unbounded & (not plain)
  if np.size(scale) and np.all(scale == scale.flat[0]) and np.all(log == log.flat[0]):
    return NumberEncoding(float(scale.flat[0]), bool(log.flat[0]))
  return NumberEncoding(scale.astype(np.float32), log)
