"""Observations of a policy's user as arrays in the types of their space.

Importing this imports neither jax nor training code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def convert(x: np.ndarray, spec: dict[str, Any]) -> np.ndarray:
  """Return an array in the type of its space.

  Raises:
    ValueError: if it has floats where integers are declared, or numbers that the type or a choice
      does not have, or that are not finite.
  """
  expected = f'expected {spec["dtype"]} of shape {spec["shape"]}'
  if x.dtype.kind not in 'biuf' and x.dtype.name != 'bfloat16':
    raise ValueError(f'an observation of type {x.dtype} came, {expected}')
  with np.errstate(all='ignore'):
    y = x.astype(spec['dtype'], copy=False)
  if y.dtype.kind not in 'biu':
    wrong = ~np.isfinite(y)
    expected = f'{expected}, and finite numbers'
  elif x.dtype.kind not in 'biu':
    raise ValueError(
      f'an observation of type {x.dtype} came, {expected}: convert it, and mind the range'
    )
  else:
    wrong = np.asarray(x != y)
    if 'n' in spec:
      first = np.asarray(spec.get('start', 0))
      last = first + np.asarray(spec['n']) - 1
      wrong |= (y < first) | (y > last)
      expected = f'{expected}, and choices from {first.tolist()} to {last.tolist()}'
  if wrong.any():
    raise ValueError(f'an observation has {x[wrong][0]}, {expected}')
  return y


def flatten(space: Any, x: Any) -> Iterator[np.ndarray]:
  """Yield the arrays of an observation in the order of its space."""
  if 'dict' in space:
    if not isinstance(x, dict) or x.keys() != space['dict'].keys():
      came = sorted(x, key=str) if isinstance(x, dict) else type(x).__name__
      raise ValueError(f'an observation with {sorted(space["dict"])} was expected, not {came}')
    for key in sorted(space['dict']):
      yield from flatten(space['dict'][key], x[key])
  elif 'tuple' in space:
    count = len(space['tuple'])
    if not isinstance(x, tuple | list) or len(x) != count:
      came = f'{len(x)}' if isinstance(x, tuple | list) else type(x).__name__
      raise ValueError(f'an observation with {count} parts was expected, not {came}')
    for part, y in zip(space['tuple'], x, strict=True):
      yield from flatten(part, y)
  else:
    try:
      array = np.asarray(x)
    except ValueError:  # a ragged list
      array = np.asarray(None)
    if array.dtype == object:
      raise ValueError(f'an array of {space["shape"]} was expected, not {type(x).__name__}')
    yield array


def map_parts(f: Callable[[Any], Any], x: Any) -> Any:
  """Apply `f` to each array of an observation."""
  if isinstance(x, dict):
    return {k: map_parts(f, y) for k, y in x.items()}
  return tuple(map_parts(f, y) for y in x) if isinstance(x, tuple) else f(x)


def unflatten(space: Any, arrays: Iterator[np.ndarray]) -> Any:
  """Build an observation from its arrays: the inverse of `flatten`."""
  if 'dict' in space:
    return {k: unflatten(space['dict'][k], arrays) for k in sorted(space['dict'])}
  if 'tuple' in space:
    return tuple(unflatten(s, arrays) for s in space['tuple'])
  return next(arrays)
