"""Replay on the device: windows of the streams of experience of single environments.

The timesteps of an environment are a ring of rows, with each observation stored once. A window is a
slice of the ring. An n-step transition is a window of n steps, and a sequence with burn-in is a
longer window.

Replay: Lin 1992. Priorities: Schaul et al. 2016 (arXiv 1511.05952). Sequences: Kapturowski et al.
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
  """B streams in rings of C rows. Each device has its own memory."""

  timesteps: TimeStep  # [B, C, ...]; only the newest frame of a stack
  outputs: ActorOutput  # [B, C, ...]
  stacks: Any  # [B, C] i8 from `what_is_before`; () without stacks
  agent_state: Any  # [B, C / period, ...] before each possible start of a window
  env_id: Array  # [B] i32
  head: Array  # [1] i32 row of the newest timestep, counted from the beginning
  tree: Any  # priority**exponent of each window; () if sampling is uniform
  highest: Array  # [1] f32 the highest priority so far


@dataclasses.dataclass(frozen=True)
class Windows:
  """The functions of a Replay, with the sizes of its windows."""

  buffer: Buffer
  length: int  # L: steps per window, which has L + 1 timesteps
  num_envs: int  # environments of all devices
  unroll_length: int  # T: rows per call of `add`
  keep_state: bool  # windows start with unrolls and include the agent's state
  stack: int  # frames in an observation, along its first axis; 0: no stack
  initial_priority: Callable[[Trajectory], Array] | None

  @property
  def period(self) -> int:
    """Rows between possible starts of windows. It divides the row of each start."""
    return self.unroll_length if self.keep_state else 1

  @property
  def lookback(self) -> int:
    """Rows before a window that its first stack of frames needs."""
    return max(self.stack - 1, 0)

  @property
  def rows(self) -> int:
    """C, the rows of a ring, a multiple of T."""
    wanted = -(-self.buffer.capacity // self.num_envs) + self.lookback + 1
    least = self.length + self.unroll_length + self.lookback + 1
    return -(-max(wanted, least) // self.unroll_length) * self.unroll_length

  @property
  def starts(self) -> int:
    """Number of rows of a ring where windows may start."""
    return self.rows // self.period

  @property
  def schedule(self) -> Schedule:
    """The number of samples to learn from in each update."""
    return Schedule(self.buffer, self.length, self.num_envs, self.unroll_length)

  @property
  def prioritised(self) -> bool:
    """Whether windows are sampled by priority instead of uniformly."""
    return self.buffer.priority_exponent > 0

  def record(self) -> dict[str, float]:
    """Return the settings that the contents of a memory depend on, by their names in messages.

    A checkpoint includes them. A resumed run compares them, because a memory that was filled
    under different settings cannot be used.
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
    """Make an empty memory.

    Args:
      example: a trajectory of one device. Only its shapes and dtypes matter.

    Returns:
      A memory for one device.
    """
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
    """Return the agent's state if windows include it, else an empty tuple."""
    return agent_state if self.keep_state else ()

  def add(self, memory: Memory, trajectory: Trajectory) -> Memory:
    """Store T rows of each stream.

    The newest timestep goes to the row after them, which the next call overwrites.

    Args:
      memory: the memory to change.
      trajectory: an unroll [T+1, B].

    Returns:
      The new memory.
    """
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
    """Sample windows of this device's streams.

    Args:
      memory: a memory with at least one window.
      key: PRNG key.

    Returns:
      Windows [L+1, n, ...] with importance weights [n], and the indices [n] for `update`.
    """
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
      some = total > 0  # otherwise sampling is uniform, as in podrace.tables
      index = jnp.where(some, sum_tree.sample(memory.tree, tree_key, size), index)
      stream, start = index // self.starts, index % self.starts * self.period
      probability = sum_tree.get(memory.tree, index) / total
      steps = memory.head[0].astype(jnp.float32) * self.num_envs
      weight = jnp.where(some, self.buffer.weights(streams * count, probability, steps), 1.0)
      # Always true. The comparison makes XLA read the tree before `update` writes to it.
      # Without the comparison, XLA copies all leaves.
      index = jnp.where(weight >= 0, index, streams * self.starts)
    return Sample(self.read_window(memory, stream, start), weight, index)

  def update(self, memory: Memory, index: Array, priority: Array) -> Memory:
    """Set new priorities of sampled windows.

    Args:
      memory: the memory to change.
      index: [n] indices from `sample`.
      priority: [n] the new priorities, at least 0.

    Returns:
      The new memory.
    """
    if not self.prioritised:
      return memory
    return memory._replace(
      tree=sum_tree.assign(memory.tree, index, priority**self.buffer.priority_exponent),
      highest=jnp.maximum(memory.highest, jnp.max(priority)),
    )

  # --- the set of windows

  def _valid(self, head: Array) -> tuple[Array, Array]:
    """Return the oldest and the newest row where a window may start."""
    oldest = jnp.maximum(head - self.rows + 1 + self.lookback, 0)
    oldest = -(-oldest // self.period) * self.period
    return oldest, (head - self.length) // self.period * self.period

  def _admit(self, memory: Memory) -> Memory:
    """Set the priorities of complete new windows, and clear them for overwritten windows."""
    head, t = memory.head[0], self.unroll_length
    streams = jnp.arange(memory.env_id.shape[0], dtype=jnp.int32)[:, None]
    none = jnp.iinfo(jnp.int32).max
    steps = jnp.arange(t // self.period, dtype=jnp.int32) * self.period

    def run_from(first: Array) -> Array:
      """Return the starts of windows among the t rows from `first`."""
      return -(-first // self.period) * self.period + steps

    def index(rows: Array) -> Array:
      return streams * self.starts + (rows % self.rows // self.period)[None]

    gone = run_from(head - t - self.rows + 1 + self.lookback)
    new = run_from(head - t - self.length + 1)
    again = (gone + self.rows >= new[0]) & (gone + self.rows <= new[-1])  # reused by a new window
    gone_index = jnp.where(((gone >= 0) & ~again)[None], index(gone), none)
    new_index = jnp.where((new >= 0)[None], index(new), none)
    if self.initial_priority is None:
      priority = jnp.full(new_index.shape, memory.highest[0])
    else:
      stream, start = (
        jnp.broadcast_to(x, new_index.shape).reshape(-1) for x in (streams, new[None])
      )
      timesteps = memory.timesteps._replace(observation=())
      window = self.read_window(memory._replace(timesteps=timesteps, stacks=()), stream, start)
      priority = self.initial_priority(window).reshape(new_index.shape)
    priority = priority**self.buffer.priority_exponent
    # at least one index of each node
    some = sorted({*range(0, len(steps), sum_tree.FAN), len(steps) - 1})
    ends = jnp.array([0, self.rows - self.period], jnp.int32)  # runs may cross the seam of the ring
    refresh = index(jnp.concatenate([gone[jnp.array(some)], new[jnp.array(some)], ends]))
    tree = sum_tree.assign(
      memory.tree,
      jnp.concatenate([gone_index.reshape(-1), new_index.reshape(-1)]),
      jnp.concatenate([jnp.zeros(gone_index.size), priority.reshape(-1)]),
      refresh.reshape(-1),
    )
    return memory._replace(tree=tree)

  # --- the contents of windows

  def read_window(self, memory: Memory, stream: Array, start: Array) -> Trajectory:
    """Return the windows [L+1, n, ...] of `stream` [n] from the rows `start` [n]."""
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
    """Read consecutive rows of a ring.

    If windows start only at each period-th row, the gather reads whole periods. C is a multiple of
    the period, so no period crosses the seam. On CPU each row of a gather costs a call.

    Args:
      ring: [B, C, ...].
      stream: [n] streams to read.
      start: [n] first row to read.
      length: number of rows to read.

    Returns:
      The rows, [length, n, ...].
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
    """Restore the environment's stacks [L+1, n, stack, ...] from single frames [B, C, ...]."""
    back = self.lookback
    steps = jnp.arange(-back, self.length + 1, dtype=jnp.int32)[:, None]
    at, empty = unstacked(memory.stacks[stream, (start[None] + steps) % self.rows], self.stack)
    at = (start[None, :, None] - back + at) % self.rows
    found = frames[stream[..., None], at]
    return jnp.where(empty.reshape(empty.shape + (1,) * (found.ndim - 3)), 0, found)


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


def windows(
  buffer: Buffer,
  length: int,
  num_envs: int,
  unroll_length: int,
  keep_state: bool = False,
  stack: int = 0,
  initial_priority: Callable[[Trajectory], Array] | None = None,
) -> Replay:
  """Make a Replay of windows of `length` steps.

  Args:
    buffer: capacity, sampling rate and priorities.
    length: steps per window.
    num_envs: environments of all devices.
    unroll_length: steps per unroll.
    keep_state: whether windows start only at the starts of unrolls and include the agent's state
      there. They are then sequences for a recurrent agent, and overlap by `length - unroll_length`.
      Otherwise windows start at any step.
    stack: frames that an observation stacks along its first axis. Replay stores single frames.
      0: observations are not stacks.
    initial_priority: computes priorities [n] of new windows [L+1, n] without observations, from
      the extras of acting. Default: the highest priority so far.

  Returns:
    The replay, which has its `Windows` as `windows`.

  Raises:
    ValueError: the settings do not fit each other. The message has the numbers.
  """
  w = Windows(buffer, length, num_envs, unroll_length, keep_state, stack, initial_priority)
  if w.starts * num_envs >= 2**30:
    raise ValueError(
      f'a capacity of {buffer.capacity} for {num_envs} environments and windows '
      f'of {length} steps is too much: at most 2^30 windows'
    )
  if buffer.capacity < (least := num_envs * (length + unroll_length)):
    raise ValueError(
      f'a capacity of {buffer.capacity} is too little for {num_envs} environments: '
      f'each needs room for an unroll of {unroll_length} steps and a window of {length}; '
      f'give a capacity of {least} or more, or fewer environments'
    )
  w.schedule.times(jnp.int32(0))
  return Replay(w.init, w.add, w.sample, w.update, w.schedule.times, windows=w)
