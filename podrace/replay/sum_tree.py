"""A sum tree in JAX: sampling in proportion to priorities that change.

A node has FAN children and keeps their priorities side by side, so that one gather brings a whole
row: a million items are 4 rows deep, where a binary tree would be 20. Every sum is computed anew
from what it is a sum of, so float32 errors do not add up over the updates.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from podrace.types import Array

FAN = 64

Tree = tuple[Array, ...]  # [n, FAN] f32 each, leaves first; the last one is the root's [1, FAN]


def empty(size: int) -> Tree:
  """A tree of `size` priorities, all 0."""
  levels: list[Array] = []
  while not levels or size > 1:
    size = -(-size // FAN)
    levels.append(jnp.zeros([size, FAN]))
  return tuple(levels)


def assign(tree: Tree, index: Array, priority: Array) -> Tree:
  """Sets priorities [n] at index [n]; an index beyond the tree is left out.

  Of an index that comes twice, one of its priorities is kept.
  """
  levels = list(tree)
  for i, level in enumerate(levels):
    node, child = index // FAN, index % FAN
    levels[i] = level = level.at[node, child].set(priority, mode='drop')
    index, priority = node, jnp.sum(level.at[node].get(mode='clip'), axis=-1)
  return tuple(levels)


def total(tree: Tree) -> Array:
  """The sum of all priorities, []."""
  return jnp.sum(tree[-1])


def get(tree: Tree, index: Array) -> Array:
  """The priorities [n] at index [n]."""
  return tree[0][index // FAN, index % FAN]


def find(tree: Tree, u: Array) -> Array:
  """The indices [n] where u [n], uniform in [0, 1), falls in the cumulated priorities.

  A priority of 0 is never found, whatever is rounded, as long as any is more than 0.
  """
  node = jnp.zeros(u.shape, jnp.int32)
  rest = u * total(tree)
  for level in reversed(tree):
    row = level[node]
    cumulated = _cumulate(row)
    positive = row > 0
    beyond = positive & (cumulated > rest[:, None])
    last = FAN - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    child = jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last).astype(jnp.int32)
    chosen = jnp.take_along_axis(row, child[:, None], axis=-1)[:, 0]
    before = jnp.take_along_axis(cumulated, child[:, None], axis=-1)[:, 0] - chosen
    rest = jnp.clip(rest - before, 0.0, chosen)
    node = node * FAN + child
  return node


def _cumulate(row: Array) -> Array:
  return lax.cumsum(row, axis=1)
