"""Stacks of frames in replay, which stores each frame once instead of `stack` times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array, TimeStep

CONTINUED, ZEROS, REPEATED = 0, 1, 2  # the frames of a stack before its newest


def unstacked(kinds: Array, stack: int) -> tuple[Array, Array]:
  """Locate the frames of stacks among single frames.

  Args:
    kinds: [R, n] the result of `what_is_before` at each of R = stack - 1 + L + 1 rows.
    stack: frames in a stack.

  Returns:
    `(rows, empty)`, both [L+1, n, stack]. `rows` indexes the R rows. `empty` marks frames of zeros.
  """
  back = stack - 1
  position = jnp.arange(kinds.shape[0], dtype=jnp.int32)[:, None]
  opened = lax.cummax(jnp.where(kinds != CONTINUED, position, -1), axis=0)  # start of a stack
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
  """Classify the frames of each stack before its newest frame.

  At the first step of an episode, these frames are empty (ZEROS), copies of the first frame
  (REPEATED), or the frames of the previous steps (CONTINUED). An environment continues the stack,
  for example, if only a life was lost. At all later steps the kind is CONTINUED.

  Args:
    timesteps: T timesteps, with one observation array [T, B, stack, ...].

  Returns:
    ZEROS, REPEATED or CONTINUED, [T, B] i8.
  """
  (x,) = jax.tree.leaves(timesteps.observation)
  flat = x.reshape(*x.shape[:3], -1)
  empty = jnp.all(flat[:, :, :-1] == 0, axis=(2, 3))
  same = jnp.all(flat[:, :, :-1] == flat[:, :, -1:], axis=(2, 3))
  kind = jnp.where(empty, ZEROS, jnp.where(same, REPEATED, CONTINUED))
  return jnp.where(timesteps.first, kind, CONTINUED).astype(jnp.int8)


def newest_frames(timesteps: TimeStep, stack: int) -> TimeStep:
  """Reduce each stack of frames to its newest frame.

  Args:
    timesteps: timesteps with observations [T+1, B, stack, ...].
    stack: frames in a stack. 0: the observations are not stacks and stay as they are.

  Returns:
    The timesteps with observations [T+1, B, ...].

  Raises:
    ValueError: an observation is not a stack of `stack` frames.
  """
  if not stack:
    return timesteps
  for x in jax.tree.leaves(timesteps.observation):
    if x.shape[2] != stack:
      raise ValueError(f'observations {x.shape[2:]} are not stacks of {stack} frames')
  newest = jax.tree.map(lambda x: x[:, :, -1], timesteps.observation)
  return timesteps._replace(observation=newest)
