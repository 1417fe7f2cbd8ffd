"""The rings of a replay on the device, and the windows that they hold."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace.replay.frame_stacks import unstacked
from podrace.types import FIRST, LAST, ActorOutput, Array, TimeStep, Trajectory


class Memory(NamedTuple):
  """B streams in rings of C rows. Each device has its own memory."""

  timesteps: TimeStep  # [B, C, ...]; only the newest frame of a stack
  outputs: ActorOutput  # [B, C, ...]
  stacks: Any  # [B, C] i8 from `what_is_before`; () without stacks
  agent_state: Any  # [B, C / period, ...] before each possible start of a window
  env_id: Array  # [B] i32
  head: Array  # [1] i32 row of the newest timestep, counted from the beginning
  tree: Any  # priority**exponent of each window; () if sampling is uniform
  highest: Array  # [1] f32 the highest priority so far


def read_windows(
  memory: Memory, stream: Array, start: Array, length: int, period: int, stack: int
) -> Trajectory:
  """Read windows of `length` steps.

  Args:
    memory: the rings, of C rows each.
    stream: [n] the stream of each window.
    start: [n] the first row of each window, a multiple of `period`.
    length: L, the steps of a window.
    period: rows between possible starts of windows. It divides C.
    stack: frames in an observation. 0: no stack.

  Returns:
    The windows [L+1, n, ...].
  """
  read = functools.partial(_read_rows, stream=stream, start=start, period=period)
  timesteps = jax.tree.map(lambda x: read(x, length=length + 1), memory.timesteps)
  timesteps = timesteps._replace(step_type=end_what_is_cut(timesteps.step_type))
  if stack and jax.tree.leaves(timesteps.observation):
    observation = jax.tree.map(
      lambda x: _restack(x, memory.stacks, stream[None], start, length, stack),
      memory.timesteps.observation,
    )
    timesteps = timesteps._replace(observation=observation)
  rows = memory.timesteps.step_type.shape[1]
  return Trajectory(
    timesteps,
    jax.tree.map(lambda x: read(x, length=length), memory.outputs),
    jax.tree.map(lambda x: x[stream, start % rows // period], memory.agent_state),
    memory.env_id[stream],
  )


def _read_rows(ring: Array, stream: Array, start: Array, length: int, period: int) -> Array:
  """Read `length` consecutive rows [length, n, ...] of a ring [B, C, ...].

  If windows start only at each period-th row, the gather reads whole periods. No period crosses
  the seam. On CPU each row of a gather costs a call.
  """
  c = ring.shape[1]
  if period == 1:
    steps = jnp.arange(length, dtype=jnp.int32)[:, None]
    return ring[stream[None], (start[None] + steps) % c]
  blocks = ring.reshape(ring.shape[0], c // period, period, *ring.shape[2:])
  whole, rest = divmod(length, period)
  first = start // period
  steps = jnp.arange(whole, dtype=jnp.int32)[:, None]
  read = blocks[stream[None], (first[None] + steps) % (c // period)]  # [whole, n, period, ...]
  read = jnp.moveaxis(read, 2, 1).reshape(whole * period, *read.shape[1:2], *ring.shape[2:])
  if not rest:
    return read
  rows = (first + whole) % (c // period) * period
  return jnp.concatenate([read, ring[stream[None], rows[None] + jnp.arange(rest)[:, None]]])


def _restack(
  frames: Array, stacks: Array, stream: Array, start: Array, length: int, stack: int
) -> Array:
  """Restore the environment's stacks [L+1, n, stack, ...] from single frames [B, C, ...]."""
  back, c = stack - 1, frames.shape[1]
  steps = jnp.arange(-back, length + 1, dtype=jnp.int32)[:, None]
  at, empty = unstacked(stacks[stream, (start[None] + steps) % c], stack)
  at = (start[None, :, None] - back + at) % c
  read = frames[stream[..., None], at]
  return jnp.where(empty.reshape(empty.shape + (1,) * (read.ndim - 3)), 0, read)


def end_what_is_cut(step_type: Array) -> Array:
  """Mark the end of an interrupted episode as a truncation.

  The rest of an episode is lost if, for example, its environment was restarted. Then the step
  before FIRST is not LAST. Its discount is 1, so its value is bootstrapped from.

  Args:
    step_type: [T, n].

  Returns:
    The step types [T, n], with LAST before each FIRST.
  """
  cut = (step_type[:-1] != LAST) & (step_type[1:] == FIRST)
  return step_type.at[:-1].set(jnp.where(cut, LAST, step_type[:-1]).astype(step_type.dtype))
