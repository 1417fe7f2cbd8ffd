"""Helpers of small grid worlds: places, moves, walls, one-hot observations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrace.types import Array

MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])  # up, right, down, left


def move(walls: Array, place: Array, action: Array) -> Array:
  """Return the place [2] after a move. Moves into a wall or off the grid [H, W] have no effect."""
  edge = jnp.asarray(walls.shape, jnp.int32) - 1
  to = jnp.clip(place + jnp.asarray(MOVES, jnp.int32)[action], 0, edge)
  return jnp.where(walls[tuple(to)], place, to)


def draw_places(cells: Array, count: int, key: Array) -> Array:
  """Draw different places [count, 2] i32 from cells [H, W] bool; if these are too few, from all."""
  noise = jax.random.uniform(key, cells.shape)
  _, index = jax.lax.top_k(jnp.where(cells, noise, noise - 1).reshape(-1), count)
  return jnp.stack(jnp.unravel_index(index, cells.shape), axis=-1).astype(jnp.int32)


def one_hot(index: Array, size: int) -> Array:
  """Return a one-hot vector [size] f32."""
  return jax.nn.one_hot(index, size, dtype=jnp.float32)
