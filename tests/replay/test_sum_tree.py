"""The sum tree: what is found, how often, and what is left of it after many changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podrace.replay import sum_tree


def filled(priorities: np.ndarray) -> sum_tree.Tree:
  return fill(np.asarray(priorities, np.float32))


@jax.jit
def fill(priorities: jax.Array) -> sum_tree.Tree:
  size = len(priorities)
  return sum_tree.assign(sum_tree.empty(size), jnp.arange(size), priorities)


@pytest.mark.parametrize(
  'size',
  [
    1,
    pytest.param(63, marks=pytest.mark.slow),
    pytest.param(64, marks=pytest.mark.slow),
    65,
    pytest.param(4096, marks=pytest.mark.slow),
    5000,
  ],
)
def test_finds_what_the_cumulated_priorities_say(size: int) -> None:
  rng = np.random.default_rng(size)
  priorities = rng.integers(0, 5, size).astype(np.float32)  # whole numbers: no rounding
  priorities[0] = 3
  tree = filled(priorities)
  assert float(sum_tree.total(tree)) == priorities.sum()
  positions = np.arange(int(priorities.sum())) + 0.5
  found = jax.jit(sum_tree.find)(tree, np.float32(positions / priorities.sum()))
  np.testing.assert_array_equal(found, np.searchsorted(np.cumsum(priorities), positions))


def test_a_priority_of_zero_is_never_found() -> None:
  """Not even where rounding says so: many sizes of priorities, few that are more than 0."""
  rng, find = np.random.default_rng(0), jax.jit(sum_tree.find)
  for seed in range(10):
    priorities = np.where(rng.random(3000) < 0.02, 10.0 ** rng.uniform(-12, 6, 3000), 0)
    tree = filled(priorities)
    u = np.asarray(jax.random.uniform(jax.random.key(seed), [20_000]))
    u = np.concatenate([u, np.float32([0.0, 1 - 2.0**-24, 0.9999999])])
    assert np.all(priorities[np.asarray(find(tree, u))] > 0)


@pytest.mark.slow
def test_a_million_priorities_are_found_in_proportion() -> None:
  """By chi-squared, in float32, over groups of about the same chance; after a million changes."""
  size, draws = 1_000_000, 2_000_000
  rng = np.random.default_rng(1)
  priorities = rng.uniform(0, 1, size).astype(np.float32) ** 4
  tree = filled(rng.uniform(0, 100, size))
  assign = jax.jit(sum_tree.assign, donate_argnums=0)
  for index in np.array_split(rng.permutation(size), 100):
    tree = assign(tree, jnp.asarray(index), jnp.asarray(priorities[index]))
  found = jax.jit(sum_tree.find)(tree, jax.random.uniform(jax.random.key(0), [draws]))
  exact = priorities.astype(np.float64)
  group = np.minimum(np.cumsum(exact) / exact.sum() * 1000, 999).astype(int)
  expected = np.bincount(group, exact, 1000) / exact.sum() * draws
  told = stats.chisquare(np.bincount(group[np.asarray(found)], minlength=1000), expected)
  assert told.pvalue > 1e-3
  # and within a group: small priorities as seldom as they should be
  order = np.argsort(exact)
  small = order[: size // 2]
  share = exact[small].sum() / exact.sum()
  hits = np.isin(np.asarray(found), small).sum()
  assert abs(hits - share * draws) < 5 * np.sqrt(share * draws)
  assert float(sum_tree.total(tree)) == pytest.approx(exact.sum(), rel=1e-5)


def test_draws_are_stratified() -> None:
  """Every batch has each item as often as its share says, to a draw or two; on average exactly so."""
  rng = np.random.default_rng(2)
  priorities = rng.uniform(0.2, 1, sum_tree.FAN)
  tree, n, keys = filled(priorities), 64, jax.random.split(jax.random.key(0), 2000)
  drawn = np.asarray(jax.jit(jax.vmap(lambda key: sum_tree.sample(tree, key, n)))(keys))
  counts = np.stack([np.sum(drawn == i, axis=1) for i in range(len(priorities))], axis=1)
  expected = n * priorities / priorities.sum()
  assert np.abs(counts - expected).max() < 2  # independent draws are 10 off
  np.testing.assert_allclose(counts.mean(axis=0), expected, atol=0.05)


@pytest.mark.slow
def test_each_of_a_million_small_priorities_can_be_found() -> None:
  """Half of the items have a hundredth of the others' priority; one float32 is too coarse for them."""
  size, draws, rounds = 2**20, 2**20, 8
  priorities = np.ones(size, np.float32)
  small = np.arange(size) % 2 == 1
  priorities[small] = 0.01
  tree = filled(priorities)
  sample = jax.jit(sum_tree.sample, static_argnums=2)
  found = np.zeros(size, int)
  for key in jax.random.split(jax.random.key(0), rounds):
    found += np.bincount(sample(tree, key, draws), minlength=size)
  hits = rounds * draws * 0.01 / 1.01
  assert found[small].sum() == pytest.approx(hits, rel=0.02)
  different = small.sum() * -np.expm1(-hits / small.sum())  # as many as when all have their chance
  assert (found[small] > 0).sum() == pytest.approx(different, rel=0.02)


def test_indices_beyond_the_tree_are_left_out() -> None:
  tree = filled(np.ones(100))
  beyond = jnp.array([jnp.iinfo(jnp.int32).max, 3])
  tree = jax.jit(sum_tree.assign)(tree, beyond, jnp.array([7.0, 5.0]))
  assert float(sum_tree.total(tree)) == 104
  np.testing.assert_array_equal(jax.jit(sum_tree.get)(tree, jnp.array([2, 3, 4])), [1, 5, 1])
