"""The small arrays of a step, joined into one.

A loop writes each array of a step by a kernel of its own. On a GPU a kernel takes as long for the
rewards of 4,096 environments as for all their numbers together.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array

LIMIT = 8  # numbers of an environment in an array that is packed
WORDS = ('float32', 'int32', 'uint32')  # packed as they are
SMALL = ('int8', 'uint8', 'bool')  # packed as numbers

Packed = tuple[Array, list[Array]]
"""Words [N, B] u32 of the small arrays, and the other arrays."""


class Packing:
  """Packs the trees of arrays [B, ...] of a loop's steps, and unpacks the results of the loop.

  Packing changes no bit. Arrays with more than LIMIT numbers of an environment stay apart.
  """

  def pack(self, tree: Any) -> Packed:
    """Return the packed arrays of a tree, and remember its shapes and dtypes."""
    leaves, self._structure = jax.tree.flatten(tree)
    self._leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    words = [_to_words(x) for x in leaves if _is_small(x)]
    return jnp.concatenate(words), [x for x in leaves if not _is_small(x)]

  def unpack(self, packed: Packed) -> Any:
    """Return the tree [T, B, ...] of packed arrays with a leading axis of time."""
    words, others = packed
    rest, leaves, begin = iter(others), [], 0
    for x in self._leaves:
      if not _is_small(x):
        leaves.append(next(rest))
        continue
      end = begin + math.prod(x.shape[1:])
      leaves.append(_from_words(words[:, begin:end], x))
      begin = end
    return jax.tree.unflatten(self._structure, leaves)


def _is_small(x: Any) -> bool:
  is_number = not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
  known = is_number and x.dtype.name in WORDS + SMALL
  return known and x.ndim > 0 and 0 < math.prod(x.shape[1:]) <= LIMIT


def _to_words(x: Array) -> Array:
  """Return numbers [B, ...] as words [N, B] u32."""
  rows = x.reshape(x.shape[0], -1).T
  if x.dtype.name in SMALL:
    return rows.astype(jnp.int32).astype(jnp.uint32)
  return lax.bitcast_convert_type(rows, jnp.uint32)


def _from_words(words: Array, like: Any) -> Array:
  """Return words [T, N, B] as numbers [T, B, ...]."""
  rows = words.swapaxes(1, 2).reshape(words.shape[0], *like.shape)
  if like.dtype.name in SMALL:
    return rows.astype(jnp.int32).astype(like.dtype)
  return lax.bitcast_convert_type(rows, like.dtype)
