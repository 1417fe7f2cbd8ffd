"""Replay on the device: windows cut from the streams of experience of single environments.

Each environment's timesteps are a ring of rows, every observation stored once, and a window is a
slice of it. An n-step transition is a window of n steps; a sequence with burn-in is a longer one.
Lin 1992; with priorities, Schaul et al. 2016 (arXiv 1511.05952); of sequences, Kapturowski et al.
2019 (R2D2).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace.replay import sum_tree
from podrace.replay.buffer import Buffer, Schedule
from podrace.replay.frame_stacks import newest_frames, unstacked, what_is_before
from podrace.types import FIRST, LAST, ActorOutput, Array, Replay, Sample, TimeStep, Trajectory


class Memory(NamedTuple):
  """B streams in rings of C rows; on each device its own."""

  timesteps: TimeStep  # [B, C, ...]; of stacked frames only the newest
  outputs: ActorOutput  # [B, C, ...]
  stacks: Any  # [B, C] i8, what a stack of frames at FIRST shows; () without stacks
  agent_state: Any  # [B, C / period, ...] before each row where a window may start
  env_id: Array  # [B] i32
  head: Array  # [1] i32 the newest timestep's row, counted from the beginning
  tree: Any  # priorities to the power of the exponent, by window; () if all are alike
  highest: Array  # [1] f32 the highest priority so far


@dataclasses.dataclass(frozen=True)
class Windows:
  """The functions of a Replay, and the sizes they know."""

  buffer: Buffer
  length: int  # L: steps of a window, which has L + 1 timesteps
  num_envs: int  # of all devices
  unroll_length: int  # T: rows that come at a time
  keep_state: bool  # they start only where unrolls do, and have the agent's state there
  stack: int  # frames in an observation, along its first axis; 0: it is no stack
  initial_priority: Callable[[Trajectory], Array] | None

  @property
  def period(self) -> int:
    """Windows start at rows that this divides."""
    return self.unroll_length if self.keep_state else 1

  @property
  def lookback(self) -> int:
    return max(self.stack - 1, 0)

  @property
  def rows(self) -> int:
    """C: a multiple of T."""
    wanted = -(-self.buffer.capacity // self.num_envs) + self.lookback + 1
    least = self.length + self.unroll_length + self.lookback + 1
    return -(-max(wanted, least) // self.unroll_length) * self.unroll_length

  @property
  def starts(self) -> int:
    """Rows of a ring where windows may start."""
    return self.rows // self.period

  @property
  def schedule(self) -> Schedule:
    return Schedule(self.buffer, self.length, self.num_envs, self.unroll_length)

  @property
  def prioritised(self) -> bool:
    return self.buffer.priority_exponent > 0

  def record(self) -> dict[str, float]:
    """What a memory that was filled with other settings can't be gone on with under these.

    By the names that a user knows them by: a checkpoint keeps it, and a run that is resumed compares.
    """
    return {
      'capacity': self.buffer.capacity,
      'priority_exponent': self.buffer.priority_exponent,
      'steps of a window': self.length,
      'steps between windows': self.period,
      'frames of a stack': self.stack,
    }

  # --- init, add, sample, update

  def init(self, example: Trajectory) -> Memory:
    """An empty memory; `example` is one device's trajectory, of which the shapes matter."""
    streams = example.env_id.shape[0]

    def ring(rows: int, x: Any, skip: int) -> Array:
      return jnp.zeros((streams, rows, *x.shape[skip:]), x.dtype)

    timesteps = jax.eval_shape(lambda x: newest_frames(x, self.stack), example.timesteps)
    timesteps, outputs = jax.tree.map(
      functools.partial(ring, self.rows, skip=2), (timesteps, example.outputs)
    )
    return Memory(
      timesteps=timesteps,
      outputs=outputs,
      stacks=jnp.zeros((streams, self.rows), jnp.int8) if self.stack else (),
      agent_state=jax.tree.map(
        functools.partial(ring, self.starts, skip=1), self.kept(example.agent_state)
      ),
      env_id=jnp.zeros(streams, jnp.int32),
      head=jnp.zeros(1, jnp.int32),
      tree=sum_tree.empty(streams * self.starts) if self.prioritised else (),
      highest=jnp.ones(1),
    )

  def kept(self, agent_state: Any) -> Any:
    """The state, if it is kept."""
    return agent_state if self.keep_state else ()

  def add(self, memory: Memory, trajectory: Trajectory) -> Memory:
    """Stores T rows of each stream, the newest timestep for now in a row of its own."""
    head, rows, length = memory.head[0], self.rows, self.unroll_length
    slot = head % rows

    def put(ring: Array, x: Array, at: Array) -> Array:
      x = jnp.moveaxis(x, 0, 1).astype(ring.dtype)
      return lax.dynamic_update_slice(ring, x, (jnp.int32(0), at) + (jnp.int32(0),) * (x.ndim - 2))

    def put_all(ring: Array, x: Array) -> Array:
      ring = put(ring, x[:length], slot)
      return put(ring, x[length:], (slot + length) % rows)

    timesteps = newest_frames(trajectory.timesteps, self.stack)
    memory = memory._replace(
      timesteps=jax.tree.map(put_all, memory.timesteps, timesteps),
      outputs=jax.tree.map(lambda r, x: put(r, x, slot), memory.outputs, trajectory.outputs),
      agent_state=jax.tree.map(
        lambda r, x: put(r, x[None], slot // self.period),
        memory.agent_state,
        self.kept(trajectory.agent_state),
      ),
      env_id=trajectory.env_id,
      head=memory.head + length,
    )
    if self.stack:
      stacks = what_is_before(trajectory.timesteps)
      memory = memory._replace(stacks=put_all(memory.stacks, stacks))
    return self._admit(memory) if self.prioritised else memory

  def sample(self, memory: Memory, key: Array) -> Sample:
    """Windows of this device's streams, with importance weights."""
    streams = memory.env_id.shape[0]
    size = self.buffer.batch_per_device(streams, self.num_envs)
    stream_key, start_key, tree_key = jax.random.split(key, 3)
    stream = jax.random.randint(stream_key, [size], 0, streams)
    oldest, newest = self._valid(memory.head[0])
    count = (newest - oldest) // self.period + 1
    start = oldest + self.period * jax.random.randint(start_key, [size], 0, count)
    index = stream * self.starts + start % self.rows // self.period
    weight = jnp.ones([size])
    if self.prioritised:
      total = sum_tree.total(memory.tree)
      some = total > 0  # else, as for the tables of podrace.tables, all are alike
      index = jnp.where(some, sum_tree.sample(memory.tree, tree_key, size), index)
      stream, start = index // self.starts, index % self.starts * self.period
      probability = sum_tree.get(memory.tree, index) / total
      steps = memory.head[0].astype(jnp.float32) * self.num_envs
      weight = jnp.where(some, self.buffer.weights(streams * count, probability, steps), 1.0)
      # Always so; but asking makes XLA read the tree before `update` writes to it, else it copies all leaves.
      index = jnp.where(weight >= 0, index, streams * self.starts)
    return Sample(self._window(memory, stream, start), weight, index)

  def update(self, memory: Memory, index: Array, priority: Array) -> Memory:
    """Gives windows [n] that were sampled new priorities [n], at least 0."""
    if not self.prioritised:
      return memory
    return memory._replace(
      tree=sum_tree.assign(memory.tree, index, priority**self.buffer.priority_exponent),
      highest=jnp.maximum(memory.highest, jnp.max(priority)),
    )

  # --- which windows there are

  def _valid(self, head: Array) -> tuple[Array, Array]:
    """The oldest and the newest row where a window may start."""
    oldest = jnp.maximum(head - self.rows + 1 + self.lookback, 0)
    oldest = -(-oldest // self.period) * self.period
    return oldest, (head - self.length) // self.period * self.period

  def _admit(self, memory: Memory) -> Memory:
    """Windows that have become whole get a priority; those that are overwritten lose theirs."""
    head, t = memory.head[0], self.unroll_length
    streams = jnp.arange(memory.env_id.shape[0], dtype=jnp.int32)[:, None]
    none = jnp.iinfo(jnp.int32).max
    steps = jnp.arange(t // self.period, dtype=jnp.int32) * self.period

    def run_from(first: Array) -> Array:
      """The rows where windows start, of t rows from `first`."""
      return -(-first // self.period) * self.period + steps

    def index(rows: Array) -> Array:
      return streams * self.starts + (rows % self.rows // self.period)[None]

    gone = run_from(head - t - self.rows + 1 + self.lookback)
    new = run_from(head - t - self.length + 1)
    again = (gone + self.rows >= new[0]) & (gone + self.rows <= new[-1])  # a new one's place
    gone_index = jnp.where(((gone >= 0) & ~again)[None], index(gone), none)
    new_index = jnp.where((new >= 0)[None], index(new), none)
    if self.initial_priority is None:
      priority = jnp.full(new_index.shape, memory.highest[0])
    else:
      stream, start = (
        jnp.broadcast_to(x, new_index.shape).reshape(-1) for x in (streams, new[None])
      )
      timesteps = memory.timesteps._replace(observation=())
      window = self._window(memory._replace(timesteps=timesteps, stacks=()), stream, start)
      priority = self.initial_priority(window).reshape(new_index.shape)
    priority = priority**self.buffer.priority_exponent
    # one of each node at least
    some = sorted({*range(0, len(steps), sum_tree.FAN), len(steps) - 1})
    ends = jnp.array([0, self.rows - self.period], jnp.int32)  # runs may go over the seam
    refresh = index(jnp.concatenate([gone[jnp.array(some)], new[jnp.array(some)], ends]))
    tree = sum_tree.assign(
      memory.tree,
      jnp.concatenate([gone_index.reshape(-1), new_index.reshape(-1)]),
      jnp.concatenate([jnp.zeros(gone_index.size), priority.reshape(-1)]),
      refresh.reshape(-1),
    )
    return memory._replace(tree=tree)

  # --- what is in them

  def _window(self, memory: Memory, stream: Array, start: Array) -> Trajectory:
    """The windows [L+1, n, ...] of streams [n] from rows [n]."""
    read = functools.partial(self._read, stream=stream, start=start)
    timesteps = jax.tree.map(lambda x: read(x, length=self.length + 1), memory.timesteps)
    stream = stream[None]
    timesteps = timesteps._replace(step_type=end_what_is_cut(timesteps.step_type))
    if self.stack and jax.tree.leaves(timesteps.observation):
      observation = jax.tree.map(
        lambda x: self._restack(x, memory, stream, start), memory.timesteps.observation
      )
      timesteps = timesteps._replace(observation=observation)
    return Trajectory(
      timesteps,
      jax.tree.map(lambda x: read(x, length=self.length), memory.outputs),
      jax.tree.map(lambda x: x[stream[0], start % self.rows // self.period], memory.agent_state),
      memory.env_id[stream[0]],
    )

  def _read(self, ring: Array, stream: Array, start: Array, length: int) -> Array:
    """`length` rows of streams [n] of a ring [B, C, ...] from rows [n]: [length, n, ...].

    Where windows start at every period-th row only, whole periods are read at a time: C is a
    multiple of it, so none goes over the seam, and on CPU each row of a gather costs a call.
    """
    if self.period == 1:
      steps = jnp.arange(length, dtype=jnp.int32)[:, None]
      return ring[stream[None], (start[None] + steps) % self.rows]
    blocks = ring.reshape(ring.shape[0], self.starts, self.period, *ring.shape[2:])
    whole, rest = divmod(length, self.period)
    first = start // self.period
    steps = jnp.arange(whole, dtype=jnp.int32)[:, None]
    found = blocks[stream[None], (first[None] + steps) % self.starts]  # [whole, n, period, ...]
    found = jnp.moveaxis(found, 2, 1).reshape(
      whole * self.period, *found.shape[1:2], *ring.shape[2:]
    )
    if not rest:
      return found
    rows = (first + whole) % self.starts * self.period
    return jnp.concatenate([found, ring[stream[None], rows[None] + jnp.arange(rest)[:, None]]])

  def _restack(self, frames: Array, memory: Memory, stream: Array, start: Array) -> Array:
    """[L+1, n, stack, ...] from single frames [B, C, ...], as the environment had stacked them."""
    back = self.lookback
    steps = jnp.arange(-back, self.length + 1, dtype=jnp.int32)[:, None]
    at, empty = unstacked(memory.stacks[stream, (start[None] + steps) % self.rows], self.stack)
    at = (start[None, :, None] - back + at) % self.rows
    found = frames[stream[..., None], at]
    return jnp.where(empty.reshape(empty.shape + (1,) * (found.ndim - 3)), 0, found)


def end_what_is_cut(step_type: Array) -> Array:
  """A stream that breaks off, as when its environment was restarted, ends like a truncation.

  The step before a FIRST [T, n] is LAST, but for where the rest of an episode was lost. Its discount is
  1, so it is bootstrapped from.
  """
  cut = (step_type[:-1] != LAST) & (step_type[1:] == FIRST)
  return step_type.at[:-1].set(jnp.where(cut, LAST, step_type[:-1]).astype(step_type.dtype))


def windows(
  buffer: Buffer,
  length: int,
  num_envs: int,
  unroll_length: int,
  keep_state: bool = False,
  stack: int = 0,
  initial_priority: Callable[[Trajectory], Array] | None = None,
) -> Replay:
  """A Replay of windows of `length` steps.

  With `keep_state` they start only where unrolls do, and have the agent's state there: sequences
  of a recurrent agent, which overlap by `length - unroll_length`. Without, they start anywhere.

  `stack`: observations are stacks of so many frames along their first axis; single ones are kept.
  `initial_priority`: of windows [L+1, n] without observations, from what acting has left in its
  extras; without, new windows have the highest priority so far.

  Raises:
    ValueError: with the numbers, where they don't fit each other.
  """
  w = Windows(buffer, length, num_envs, unroll_length, keep_state, stack, initial_priority)
  if w.starts * num_envs >= 2**30:
    raise ValueError(
      f'a capacity of {buffer.capacity} for {num_envs} environments and windows of {length} steps is too much: '
      'at most 2^30 windows'
    )
  if buffer.capacity < (least := num_envs * (length + unroll_length)):
    raise ValueError(
      f'a capacity of {buffer.capacity} is too little for {num_envs} environments: each needs room for an '
      f'unroll of {unroll_length} steps and a window of {length}; give a capacity of {least} or more, or '
      'fewer environments'
    )
  w.schedule.times(jnp.int32(0))
  return Replay(w.init, w.add, w.sample, w.update, w.schedule.times, windows=w)
