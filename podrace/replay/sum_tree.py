"""Sum tree in JAX, for sampling in proportion to priorities that change.

A node keeps the priorities of its FAN children side by side, so one gather reads all of them. A
million items need 7 levels, a binary tree needs 20. Each update recomputes a sum from all of its
terms, so float32 errors do not accumulate over the updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array

SMALL = 8  # a level with at most this many nodes per new priority is summed whole
FAN = 8  # the fastest of 8, 16, 32 and 64 on CPU: a node fills a vector register

Tree = tuple[Array, ...]  # levels [n, FAN] f32, from the leaves to the root [1, FAN]


def empty(size: int) -> Tree:
  """Make a tree of `size` priorities, all 0."""
  levels: list[Array] = []
  while not levels or size > 1:
    size = -(-size // FAN)
    levels.append(jnp.zeros([size, FAN]))
  return tuple(levels)


def assign(tree: Tree, index: Array, priority: Array, refresh: Array | None = None) -> Tree:
  """Set priorities.

  Args:
    tree: the tree to change.
    index: [n] i32. An index beyond the tree is ignored. An index may occur twice, and then gets one
      of its priorities.
    priority: [n] f32, at least 0.
    refresh: [m] indices that together cover every node above `index`. Neighbours share a node, so
      a short list avoids summing the same node repeatedly. Default: `index`.

  Returns:
    The new tree.
  """
  leaves = tree[0].at[index // FAN, index % FAN].set(priority, mode='drop')
  levels = [leaves]
  index = index if refresh is None else refresh
  for level in tree[1:]:
    below = levels[-1]
    if len(below) <= SMALL * index.size:
      sums = jnp.sum(below, axis=-1)
      levels.append(jnp.pad(sums, (0, level.size - sums.size)).reshape(level.shape))
      continue
    node = index // FAN
    sums = jnp.sum(below.at[node].get(mode='clip'), axis=-1)
    levels.append(level.at[node // FAN, node % FAN].set(sums, mode='drop'))
    index = node
  return tuple(levels)


def total(tree: Tree) -> Array:
  """Return the sum of all priorities, [] f32."""
  return jnp.sum(tree[-1])


def get(tree: Tree, index: Array) -> Array:
  """Return the priorities [n] at `index` [n]."""
  return tree[0][index // FAN, index % FAN]


def sample(tree: Tree, key: Array, n: int) -> Array:
  """Sample indices in proportion to their priorities.

  Sampling is stratified: one index from each of n equal parts of the sum of priorities. Schaul et
  al. 2016 (arXiv 1511.05952, appendix B.2.1). Returns [n] i32.
  """
  key, finer_key = jax.random.split(key)
  u = (jnp.arange(n) + jax.random.uniform(key, [n])) / n
  return find(tree, u, jax.random.uniform(finer_key, [n]))


def find(tree: Tree, u: Array, finer: Array | None = None) -> Array:
  """Find the indices at given fractions of the cumulative sum of priorities.

  An index with priority 0 is never returned, despite rounding, if any priority is positive.

  Args:
    tree: the priorities.
    u: [n] uniform in [0, 1), the fractions of the sum.
    finer: [n] uniform in [0, 1), the fractions within the node at half the depth. A float32 has
      2^23 places, too few to choose among a million unequal priorities. Default: `u` alone decides.

  Returns:
    The indices, [n] i32.
  """
  node = jnp.zeros(u.shape, jnp.int32)
  rest = u * total(tree)
  children = jnp.arange(FAN, dtype=jnp.int32)[None]
  for depth, level in enumerate(reversed(tree)):
    row = level[node]
    if finer is not None and len(tree) > 1 and depth == (len(tree) + 1) // 2:
      rest = finer * jnp.sum(row, axis=-1)
    positive = row > 0
    cumulated = lax.cumsum(row, axis=1)
    # Minimum and maximum, because XLA's argmax is much slower on CPU.
    first = jnp.min(jnp.where(positive & (cumulated > rest[:, None]), children, FAN), axis=-1)
    last = jnp.max(jnp.where(positive, children, 0), axis=-1)
    child = jnp.minimum(first, last)
    here = children == child[:, None]
    chosen = jnp.sum(jnp.where(here, row, 0.0), axis=-1)
    before = jnp.sum(jnp.where(here, cumulated, 0.0), axis=-1) - chosen
    rest = jnp.clip(rest - before, 0.0, chosen)
    node = node * FAN + child
  return node
