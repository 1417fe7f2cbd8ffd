"""A sum tree in JAX: sampling in proportion to priorities that change.

A node has FAN children and keeps their priorities side by side, so that one gather brings a whole
row: a million items are 7 rows deep, where a binary tree would be 20. Every sum is computed anew
from what it is a sum of, so float32 errors do not add up over the updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array

SMALL = 8  # levels with fewer nodes than this for each priority that is set are summed whole
FAN = 8  # of 8, 16, 32 and 64 the fastest on CPU: a node fills a vector register

Tree = tuple[Array, ...]  # [n, FAN] f32 each, leaves first; the last one is the root's [1, FAN]


def empty(size: int) -> Tree:
  """A tree of `size` priorities, all 0."""
  levels: list[Array] = []
  while not levels or size > 1:
    size = -(-size // FAN)
    levels.append(jnp.zeros([size, FAN]))
  return tuple(levels)


def assign(tree: Tree, index: Array, priority: Array, refresh: Array | None = None) -> Tree:
  """Sets priorities [n] at index [n]; an index beyond the tree is left out.

  Of an index that comes twice, one of its priorities is kept. `refresh` [m] may name fewer indices
  whose nodes are all those that change: neighbours share one, which then is summed once.
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
  """The sum of all priorities, []."""
  return jnp.sum(tree[-1])


def get(tree: Tree, index: Array) -> Array:
  """The priorities [n] at index [n]."""
  return tree[0][index // FAN, index % FAN]


def sample(tree: Tree, key: Array, n: int) -> Array:
  """Indices [n] in proportion to the priorities, one from each of n equal parts of their sum.

  Stratified as in Schaul et al. 2016 (arXiv 1511.05952, appendix B.2.1).
  """
  key, finer_key = jax.random.split(key)
  u = (jnp.arange(n) + jax.random.uniform(key, [n])) / n
  return find(tree, u, jax.random.uniform(finer_key, [n]))


def find(tree: Tree, u: Array, finer: Array | None = None) -> Array:
  """The indices [n] where u [n], uniform in [0, 1), falls in the cumulated priorities.

  A priority of 0 is never found, whatever is rounded, as long as any is more than 0. A float32 has 2^23
  places, too few to choose among a million unequal priorities: `finer` [n], uniform as well, says
  where within the node that is reached half-way.
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
    # Minimum and maximum, since XLA's argmax is several times slower on CPU.
    first = jnp.min(jnp.where(positive & (cumulated > rest[:, None]), children, FAN), axis=-1)
    last = jnp.max(jnp.where(positive, children, 0), axis=-1)
    child = jnp.minimum(first, last)
    here = children == child[:, None]
    chosen = jnp.sum(jnp.where(here, row, 0.0), axis=-1)
    before = jnp.sum(jnp.where(here, cumulated, 0.0), axis=-1) - chosen
    rest = jnp.clip(rest - before, 0.0, chosen)
    node = node * FAN + child
  return node
