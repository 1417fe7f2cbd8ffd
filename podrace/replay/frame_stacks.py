"""Stacks of frames, of which replay keeps the single ones: each frame once, not `stack` times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array, TimeStep

CONTINUED, ZEROS, REPEATED = 0, 1, 2  # what a stack of frames shows of the time before


def unstacked(kinds: Array, stack: int) -> tuple[Array, Array]:
  """Where stacks' frames are, among single ones: (rows [L+1, n, stack] of R, which are empty).

  `kinds` [R, n]: what a stack shows at each of R = stack - 1 + L + 1 rows, as `what_is_before` says.
  """
  back = stack - 1
  position = jnp.arange(kinds.shape[0], dtype=jnp.int32)[:, None]
  opened = lax.cummax(jnp.where(kinds != CONTINUED, position, -1), axis=0)  # a stack's beginning
  since = opened[back:]
  source, empty = [], []
  for depth in range(back, -1, -1):
    at = position[back:] - depth
    outside = at < since
    source.append(jnp.where(outside, since, at))
    kind_since = jnp.take_along_axis(kinds, jnp.maximum(since, 0), axis=0)
    empty.append(outside & (kind_since == ZEROS))
  return jnp.stack(source, axis=2), jnp.stack(empty, axis=2)


def what_is_before(timesteps: TimeStep) -> Array:
  """What the stacks [T, B, stack, ...] show before their newest frame: CONTINUED, ... [T, B] i8.

  A stack is empty before the episode, or shows its first frame again and again, or goes on from
  the frames before, as where only a life was lost.
  """
  (x,) = jax.tree.leaves(timesteps.observation)
  flat = x.reshape(*x.shape[:3], -1)
  empty = jnp.all(flat[:, :, :-1] == 0, axis=(2, 3))
  same = jnp.all(flat[:, :, :-1] == flat[:, :, -1:], axis=(2, 3))
  kind = jnp.where(empty, ZEROS, jnp.where(same, REPEATED, CONTINUED))
  return jnp.where(timesteps.first, kind, CONTINUED).astype(jnp.int8)


def newest_frames(timesteps: TimeStep, stack: int) -> TimeStep:
  """Of stacked frames [T+1, B, stack, ...] only the newest."""
  if not stack:
    return timesteps
  for x in jax.tree.leaves(timesteps.observation):
    if x.shape[2] != stack:
      raise ValueError(f'observations {x.shape[2:]} are not stacks of {stack} frames')
  newest = jax.tree.map(lambda x: x[:, :, -1], timesteps.observation)
  return timesteps._replace(observation=newest)
