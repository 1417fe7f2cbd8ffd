"""What small worlds on a grid share: places, moves, walls and observations that are tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrace.types import Array

MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])  # up, right, down, left


def move(walls: Array, place: Array, action: Array) -> Array:
  """The place [2] after a move; one into a wall or out of the grid [H, W] changes nothing."""
  edge = jnp.asarray(walls.shape, jnp.int32) - 1
  to = jnp.clip(place + jnp.asarray(MOVES, jnp.int32)[action], 0, edge)
  return jnp.where(walls[tuple(to)], place, to)


def draw_places(cells: Array, count: int, key: Array) -> Array:
  """[count, 2] i32 different places, drawn from cells [H, W] bool; of what is none if they are too few."""
  noise = jax.random.uniform(key, cells.shape)
  _, found = jax.lax.top_k(jnp.where(cells, noise, noise - 1).reshape(-1), count)
  return jnp.stack(jnp.unravel_index(found, cells.shape), axis=-1).astype(jnp.int32)


def one_hot(index: Array, size: int) -> Array:
  """A row of a table, [size] f32."""
  return jax.nn.one_hot(index, size, dtype=jnp.float32)
