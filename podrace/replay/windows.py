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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrace.envs.logs.share import NO_LOG, Share, is_logged
from podrace.replay import sum_tree
from podrace.replay.buffer import Buffer, Schedule
from podrace.replay.frame_stacks import newest_frames, what_is_before
from podrace.replay.rings import Memory, read_windows
from podrace.types import FIRST, Array, Replay, Sample, Trajectory


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
  at_first: bool = False  # windows that do not begin with FIRST have priority 0
  logged: Share = NO_LOG  # p of every q environments replay a log, see `is_logged`

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

  @property
  def has_priorities(self) -> bool:
    """Whether windows have priorities, also if these only say where windows may begin."""
    return self.prioritised or self.at_first

  @property
  def exponent(self) -> float:
    """Exponent of the priorities."""
    return self.buffer.priority_exponent if self.prioritised else 1.0

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
      **({'windows at FIRST only': 1} if self.at_first else {}),
    }

  # --- init, add, sample, update

  def init(self, example: Trajectory) -> Memory:
    """Make the empty memory of one device. Only the shapes and dtypes of `example` matter."""
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
      tree=sum_tree.empty(streams * self.starts) if self.has_priorities else (),
      highest=jnp.ones(1),
    )

  def kept(self, agent_state: Any) -> Any:
    """Return the agent's state if windows include it, else an empty tuple."""
    return agent_state if self.keep_state else ()

  def add(self, memory: Memory, trajectory: Trajectory) -> Memory:
    """Store an unroll [T+1, B], T rows of each stream; returns the new memory.

    The newest timestep goes to the row after them, which the next call overwrites.
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
    return self._admit(memory) if self.has_priorities else memory

  def sample(self, memory: Memory, key: Array) -> Sample:
    """Sample windows [L+1, n, ...] with importance weights [n], and indices [n] for `update`.

    The memory must have at least one window.
    """
    streams = memory.env_id.shape[0]
    size = self.buffer.batch_per_device(self.num_envs // streams)
    stream_key, start_key, tree_key = jax.random.split(key, 3)
    stream = self._draw_streams(memory, stream_key, size)
    oldest, newest = self._valid(memory.head[0])
    count = (newest - oldest) // self.period + 1
    start = oldest + self.period * jax.random.randint(start_key, [size], 0, count)
    index = stream * self.starts + start % self.rows // self.period
    weight = jnp.ones([size])
    if self.has_priorities:
      total = sum_tree.total(memory.tree)
      some = total > 0  # otherwise sampling is uniform, as in podrace.tables
      index = jnp.where(some, sum_tree.sample(memory.tree, tree_key, size), index)
      stream, start = index // self.starts, index % self.starts * self.period
    if self.prioritised:
      probability = sum_tree.get(memory.tree, index) / total
      steps = memory.head[0].astype(jnp.float32) * self.num_envs
      weight = jnp.where(some, self.buffer.weights(streams * count, probability, steps), 1.0)
      # Always true. The comparison makes XLA read the tree before `update` writes to it.
      # Without the comparison, XLA copies all leaves.
      index = jnp.where(weight >= 0, index, streams * self.starts)
    return Sample(self._read(memory, stream, start), weight, index)

  def _draw_streams(self, memory: Memory, key: Array, size: int) -> Array:
    """Draw streams [size]: alike, or by the share of the streams that act.

    That many of the first samples are of streams that act. The fraction of a sample is drawn, so
    that the mean is exact.
    """
    streams = memory.env_id.shape[0]
    if self.buffer.online_share is None or self.logged[0] in (0, self.logged[1]):
      return jax.random.randint(key, [size], 0, streams)
    offset_key, logged_key, online_key = jax.random.split(key, 3)
    logged = is_logged(memory.env_id, self.logged)
    count = jnp.sum(logged)
    order = jnp.argsort(~logged)  # the streams of the log first
    share = self.buffer.online(memory.head[0].astype(jnp.float32) * self.num_envs)
    acts = jnp.arange(size) + jax.random.uniform(offset_key) < share * size
    of_log = jax.random.randint(logged_key, [size], 0, count)
    online = jax.random.randint(online_key, [size], count, streams)
    return order[jnp.where(acts, online, of_log)]

  def update(self, memory: Memory, index: Array, priority: Array) -> Memory:
    """Set priorities [n], at least 0, at indices [n] from `sample`; returns the new memory."""
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
    if not self.prioritised:
      priority = jnp.ones(new_index.shape)
    elif self.initial_priority is None:
      priority = jnp.full(new_index.shape, memory.highest[0])
    else:
      stream, start = (
        jnp.broadcast_to(x, new_index.shape).reshape(-1) for x in (streams, new[None])
      )
      timesteps = memory.timesteps._replace(observation=())
      window = self._read(memory._replace(timesteps=timesteps, stacks=()), stream, start)
      priority = self.initial_priority(window).reshape(new_index.shape)
    priority = priority**self.exponent
    if self.at_first:
      step_type = memory.timesteps.step_type[streams, (new % self.rows)[None]]
      priority = jnp.where(step_type == FIRST, priority, 0.0)
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

  def _read(self, memory: Memory, stream: Array, start: Array) -> Trajectory:
    return read_windows(memory, stream, start, self.length, self.period, self.stack)


def windows(
  buffer: Buffer,
  length: int,
  num_envs: int,
  unroll_length: int,
  keep_state: bool = False,
  stack: int = 0,
  initial_priority: Callable[[Trajectory], Array] | None = None,
  at_first: bool = False,
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
    at_first: only windows that begin with FIRST are sampled, if there are any. Not with
      `keep_state`.

  Returns:
    The replay, which has its `Windows` as `windows`.

  Raises:
    ValueError: the settings do not fit each other. The message has the numbers.
  """
  sizes = (length, num_envs, unroll_length)
  w = Windows(buffer, *sizes, keep_state, stack, initial_priority, at_first)
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
  return replay_of(w)


def replay_of(w: Windows) -> Replay:
  """Return the functions of `w` as a Replay."""
  return Replay(w.init, w.add, w.sample, w.update, w.schedule.times, windows=w)
