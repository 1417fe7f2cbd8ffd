"""Sebulba: environments on the host; some devices act, others learn.

Hessel et al. 2021 (arXiv 2104.06272). Actor threads step pools of environments and ask the agent
for actions on an actor device, where the unroll is assembled; finished unrolls are split along the
batch and go device to device to the learners. One learner thread, the caller's, makes the updates
and publishes the parameters by version. Queues carry handles.

Which version an unroll is acted with is a setting, `lag`:
- '0': unroll k with version k; acting and learning alternate.
- '1': unroll k with version k - 1; they overlap, and still nothing depends on who is faster.
- 'async': with the newest there is, at most `max_lag` updates old when it is learned from.

Environments that return in any order, or come and go, are always 'async': a trajectory is made of
whichever unrolls are finished first, so that nobody waits for a straggler; an unroll that began
more than `max_lag` updates ago is dropped.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from podrace import topology as topology_
from podrace.envs.host.base import (
  EVERY,
  Checker,
  Deadline,
  EpisodeCounter,
  HostError,
  HostSpec,
  PoolArgs,
  Totals,
  everyone,
  rows_of,
)
from podrace.learner import (
  Log,
  add_to_log,
  all_finite,
  empty_log,
  init_memory,
  learner,
  sample_learner,
)
from podrace.networks import outside_loops
from podrace.replay.hosted import Layout
from podrace.topology import AXIS, TRAJECTORY_SPECS, Topology
from podrace.types import (
  ActorOutput,
  Agent,
  Array,
  Arrival,
  HostEnvironment,
  Replay,
  TimeStep,
  TrainState,
  Trajectory,
)

Lag = Literal['0', '1', 'async']
COLUMNS = 2  # of an environment that returns in any order: an open unroll, and a finished one
SIZES = 4  # of calls for environments that come and go: all of a thread, half of them, ...
CLOSE_SECONDS = 5.0  # that actor threads have to end
POLL = 0.1  # seconds between looks at whether a wait has lost its sense


class ActorFailed(Exception):
  """An actor thread ended with an exception; the message has its traceback."""


class Closed(Exception):
  """The run is over: what an actor thread's waits end with."""


# --- acting on a device -------------------------------------------------------------------------


class Carry(NamedTuple):
  """What a thread has on its device. N environments, C columns: some for each of them."""

  agent_state: Any  # [N, ...]
  start: Any  # [C, ...] the agent's state before row 0
  timesteps: TimeStep  # [T+1, C, ...]
  outputs: ActorOutput  # [T, C, ...]


@dataclasses.dataclass(frozen=True)
class Acting:
  """The compiled programs of one actor thread; each step is one call."""

  agent: Agent
  num_envs: int  # N, of this thread
  length: int  # T
  each: int  # columns for each environment
  parts: int  # learner devices that a trajectory is split over

  def begin(self, params: Any, env_id: Array, timestep: TimeStep, key: Array) -> Carry:
    """An empty Carry for environments env_id [N]; the rest is there for its shapes."""
    state = self.agent.initial_state(env_id)
    output, _ = jax.eval_shape(self.agent.act, params, state, timestep, key)
    columns = self.num_envs * self.each

    def rows(n: int, x: Any) -> Array:
      return jnp.zeros((n, columns, *x.shape[1:]), x.dtype)

    return Carry(
      agent_state=state,
      start=jax.tree.map(lambda x: jnp.zeros((columns, *x.shape[1:]), x.dtype), state),
      timesteps=jax.tree.map(functools.partial(rows, self.length + 1), timestep),
      outputs=jax.tree.map(functools.partial(rows, self.length), output),
    )

  def keys(self, key: Array) -> Array:
    """The acting keys [T] of an unroll, as numbers; from the key that `actor.unroll` is given."""
    act_key, _ = jax.random.split(key)
    return jax.random.key_data(jax.random.split(act_key, self.length))

  def step(
    self, params: Any, carry: Carry, keys: Array, call: Array, t: Array, timestep: TimeStep
  ) -> tuple[Carry, Any]:
    """All environments at row t, with the call-th of the keys: the new carry, the actions [N]."""
    with outside_loops():
      output, agent_state = self.agent.act(params, carry.agent_state, timestep, _key(keys, call))

    def put(rows: Array, x: Array) -> Array:
      return lax.dynamic_update_slice(rows, x[None].astype(rows.dtype), (t,) + (0,) * x.ndim)

    carry = Carry(
      agent_state=agent_state,
      start=jax.tree.map(lambda s, x: jnp.where(t == 0, x, s), carry.start, carry.agent_state),
      timesteps=jax.tree.map(put, carry.timesteps, timestep),
      outputs=jax.tree.map(put, carry.outputs, output),
    )
    return carry, output.action

  def step_some(
    self,
    params: Any,
    carry: Carry,
    keys: Array,
    call: Array,
    env_id: Array,
    row: Array,
    column: Array,
    timestep: TimeStep,
  ) -> tuple[Carry, Any]:
    """Environments env_id [b], each at its own row and column; out of range: padding."""
    before = jax.tree.map(lambda x: x.at[env_id].get(mode='clip'), carry.agent_state)
    with outside_loops():
      output, after = self.agent.act(params, before, timestep, _key(keys, call))
    opens = jnp.where(row == 0, column, self.num_envs * self.each)
    place = functools.partial(self._place, row, column)
    carry = Carry(
      agent_state=jax.tree.map(
        lambda s, x: s.at[env_id].set(x, mode='drop'), carry.agent_state, after
      ),
      start=jax.tree.map(lambda s, x: s.at[opens].set(x, mode='drop'), carry.start, before),
      timesteps=jax.tree.map(place, carry.timesteps, timestep),
      outputs=jax.tree.map(place, carry.outputs, output),
    )
    return carry, output.action

  @staticmethod
  def _place(row: Array, column: Array, rows: Array, x: Array) -> Array:
    return rows.at[row, column].set(x.astype(rows.dtype), mode='drop')

  def store(self, carry: Carry, row: Array, column: Array, timestep: TimeStep) -> Carry:
    """Timesteps that nobody acts on yet: the last of their unrolls."""
    place = functools.partial(self._place, row, column)
    return carry._replace(timesteps=jax.tree.map(place, carry.timesteps, timestep))

  def finish(self, carry: Carry, timestep: TimeStep, env_id: Array) -> tuple[Any, Any]:
    """The trajectory [T+1, N] that ends with `timestep`, in parts; and the agent's state [N]."""
    timesteps = jax.tree.map(
      lambda rows, x: rows.at[self.length].set(x.astype(rows.dtype)), carry.timesteps, timestep
    )
    trajectory = Trajectory(timesteps, carry.outputs, carry.start, env_id)
    return self._split(trajectory), jax.tree.map(jnp.copy, carry.agent_state)

  def take(self, carry: Carry, column: Array, env_id: Array) -> Any:
    """The trajectory in columns [N], in parts."""
    timesteps, outputs = jax.tree.map(
      lambda x: jnp.take(x, column, axis=1), (carry.timesteps, carry.outputs)
    )
    first = jax.tree.map(lambda x: jnp.take(x, column, axis=0), carry.start)
    return self._split(Trajectory(timesteps, outputs, first, env_id))

  def _split(self, trajectory: Trajectory) -> tuple[Trajectory, ...]:
    n = self.num_envs // self.parts

    def part(i: int) -> Trajectory:
      timed = jax.tree.map(lambda x: x[:, i * n : (i + 1) * n], trajectory[:2])
      return Trajectory(
        *timed, *jax.tree.map(lambda x: x[i * n : (i + 1) * n], tuple(trajectory[2:]))
      )

    return tuple(part(i) for i in range(self.parts))


def _key(keys: Array, i: Array) -> Array:
  """One of many keys that are kept as numbers."""
  return jax.random.wrap_key_data(keys[i])


# --- between actors and the learner ---------------------------------------------------------------


class Snapshot(NamedTuple):
  """A thread between two unrolls, where its environments can give their state."""

  agent_state: Any  # [N, ...]
  timestep: TimeStep  # [N, ...] what is to be answered next
  env_state: Any
  episodes: dict[str, Any]  # EpisodeCounter.state()


class Unroll(NamedTuple):
  """One thread's trajectory, on its way."""

  parts: tuple[Trajectory, ...]  # on this process's learner devices
  version: int  # of the parameters that acted
  thread: int
  number: int  # the thread's how manieth
  totals: Totals  # episodes that ended in it
  snapshot: Snapshot | None
  seconds: dict[str, float]  # where the thread's time went
  restarts: int  # of environments, while it was made
  dropped: int  # steps that were lost with them
  serial: np.ndarray  # [N] which of its unrolls this is, of each environment; lost ones count


class Pipe:
  """Unrolls one way, versions of parameters the other way, and the end of the run both ways."""

  def __init__(
    self, threads: int, lag: Lag, max_lag: int, ordered: bool = True, in_turn: bool = False
  ) -> None:
    self._lag, self._max_lag, self._threads, self._ordered = lag, max_lag, threads, ordered
    self._in_turn = in_turn or lag != 'async'  # each batch has the next unroll of every thread
    self._places = threads  # in the queue, where threads reserve them
    # With up to c queued unrolls beside the one under way, and the oldest learned from first, each
    # is learned from at most c + 1 updates after its parameters were the newest.
    self._capacity = min(max_lag, 3) - 1
    self._changed = threading.Condition()
    self._unrolls: list[Unroll] = []  # in the order of their arrival
    self._params: dict[int, dict[jax.Device, Any]] = {}  # version -> on each actor device
    self._acting: list[tuple[int, int]] = []  # (thread, version) of the unrolls under way
    self._closed = False
    self.failure: str | None = None

  def publish(self, version: int, params: dict[jax.Device, Any]) -> None:
    """Makes a version the newest; the one before is kept."""
    with self._changed:
      self._params[version] = params
      for old in [v for v in self._params if v < version - 1]:
        del self._params[old]
      self._changed.notify_all()

  def params(self, thread: int, number: int, device: jax.Device) -> tuple[int, Any]:
    """(version, parameters) for a thread's `number`-th unroll; waits for them.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      while not self._closed:
        if self._lag == 'async':
          version = max(self._params, default=-1)
        else:
          version = max(number - int(self._lag), min(self._params, default=0))
        if version in self._params:
          self._acting.append((thread, version))
          return version, self._params[version][device]
        self._changed.wait(POLL)
    raise Closed

  def newest(self, device: jax.Device) -> tuple[int, Any]:
    """(version, parameters), for threads that `reserve`; nobody waits for what they act with."""
    with self._changed:
      version = max(self._params)
      return version, self._params[version][device]

  def reserve(self) -> int:
    """Waits for a place in the queue: the oldest version that may be put there.

    The queue holds one batch, which the update under way is followed by.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      while not self._places and not self._closed:
        self._changed.wait(POLL)
      if self._closed:
        raise Closed
      self._places -= 1
      return max(self._params) + 1 - self._max_lag

  def unreserve(self) -> None:
    """Gives the place back."""
    with self._changed:
      self._places += 1
      self._changed.notify_all()

  def put_reserved(self, unroll: Unroll) -> None:
    """Hands over an unroll whose place is reserved."""
    with self._changed:
      self._unrolls.append(unroll)
      self._changed.notify_all()

  def put(self, unroll: Unroll) -> None:
    """Hands over an unroll; waits while there are too many of this thread.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      self._unrolls.append(unroll)
      self._acting.remove((unroll.thread, unroll.version))
      self._changed.notify_all()
      # A thread with another unroll under way goes on with that: somebody may wait for it.
      alone = all(thread != unroll.thread for thread, _ in self._acting)
      while self._lag == 'async' and alone and not self._closed:
        if sum(u.thread == unroll.thread for u in self._unrolls) <= self._capacity:
          break
        self._changed.wait(POLL)
      if self._closed:
        raise Closed

  def take(self, update: int, give_up: Callable[[], bool]) -> list[Unroll] | None:
    """One batch for the learner at version `update`; None if `give_up` says so before.

    As many unrolls as there are threads: the next one of each, in the threads' order; 'async', if
    replay doesn't need them in turn, the oldest that there are.

    Raises:
      ActorFailed: if a thread has failed.
    """
    with self._changed:
      while True:
        stop = give_up()
        if self.failure and not stop:
          raise ActorFailed(self.failure)
        if (batch := self._ready(update)) is not None:
          break
        if stop:
          return None
        self._changed.wait(POLL)
      chosen = {id(u) for u in batch}
      self._unrolls = [u for u in self._unrolls if id(u) not in chosen]
      self._places += len(batch)
      self._changed.notify_all()
      return batch

  def _ready(self, update: int) -> list[Unroll] | None:
    if self._in_turn:
      next_of = {u.thread: u for u in reversed(self._unrolls)}
      return [next_of[t] for t in range(self._threads)] if len(next_of) == self._threads else None
    if len(self._unrolls) < self._threads:
      return None
    if not self._ordered:
      return self._unrolls[: self._threads]
    batch = sorted(self._unrolls, key=lambda u: u.version)[: self._threads]  # stable
    too_old = update - self._max_lag  # for any later update; it must be learned from now
    if any(version <= too_old for _, version in self._acting):
      return None
    return batch

  def fail(self, failure: str) -> None:
    with self._changed:
      self.failure = self.failure or failure
      self._changed.notify_all()

  @property
  def closed(self) -> bool:
    return self._closed

  def close(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()


# --- an actor thread ------------------------------------------------------------------------------


class Watch:
  """Seconds by what they were spent on."""

  def __init__(self) -> None:
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self._since = time.perf_counter()

  def __call__(self, what: str) -> None:
    """The time since the last call was spent on `what`."""
    now = time.perf_counter()
    self._seconds[what] += now - self._since
    self._since = now

  def take(self) -> dict[str, float]:
    seconds, self._seconds = dict(self._seconds), collections.defaultdict(float)
    return seconds


class Owed:
  """What a pool's environments owe the thread that is in the pool while this is entered."""

  def __init__(self, num_envs: int) -> None:
    self._asked_at = np.full(num_envs, np.inf)  # when each environment was; inf: it owes no answer
    self._inside, self._left = False, 0.0  # whether the thread is in its pool; when it left that

  def __enter__(self) -> None:
    # They may have answered while nobody was there to hear it: little of that time counts.
    if (away := time.monotonic() - self._left) > POLL:
      self._asked_at += away - POLL
    self._inside = True

  def __exit__(self, *exc: object) -> None:
    self._inside, self._left = False, time.monotonic()

  def ask(self, env_id: np.ndarray) -> None:
    """These owe an answer from now on."""
    self._asked_at[rows_of(env_id, len(self._asked_at))] = time.monotonic()

  def answered(self, env_id: np.ndarray) -> None:
    self._asked_at[rows_of(env_id, len(self._asked_at))] = np.inf

  @property
  def silence(self) -> float:
    """Seconds that some environment has owed an answer, if the thread waits for one."""
    return time.monotonic() - float(self._asked_at.min()) if self._inside else 0.0


class Actor:
  """One thread: its pool of environments, and its unrolls on one device."""

  def __init__(
    self,
    sebulba: Sebulba,
    index: int,
    device: jax.Device,
    pool: HostEnvironment,
    pipe: Pipe,
    unroll_key: Callable[[int], Array],
    number: int,
    snapshot: Snapshot | None,
  ) -> None:
    self._sebulba, self.index, self.device, self.pool, self._pipe = (
      sebulba, index, device, pool, pipe,
    )  # fmt: skip
    self._spec, self._n, self._length = sebulba.spec, pool.num_envs, sebulba.unroll_length
    self._unroll_key, self._number, self._snapshot = unroll_key, number, snapshot
    self._programs = sebulba.programs
    self._ids = everyone(self._n)
    self._env_id = jax.device_put(
      sebulba.first_env(index) + np.arange(self._n, dtype=np.int32), device
    )
    self._check = Checker(self._spec, self._n)
    self._episodes = EpisodeCounter(self._n)
    self._watch = Watch()
    self._version = -1  # of the parameters that it has; -1: none yet
    self._row = np.zeros(self._n, np.int32)
    self._serial = np.full(self._n, number, np.int64)  # of the unrolls under way; see `Unroll`
    self._uneven = False  # environments may be at different rows
    self._column = np.arange(self._n, dtype=np.int32)
    self._restarts = self._dropped = 0
    self._calls = 0  # of this unroll's keys
    self._keyed = number  # the unroll whose keys are used; ahead of `_number` after a restart
    self._parked: dict[int, Any] = {}  # environment -> its timestep, at the end of its unroll
    columns = self._n * sebulba.columns
    self._versions = np.zeros(columns, np.int64)  # of the parameters that columns began with
    self._member = np.resize(self._ids, columns)  # whose they are
    self._serials = np.zeros(columns, np.int64)  # of finished unrolls
    self._free = collections.deque(range(self._n, columns))
    self._finished: collections.deque[int] = collections.deque()  # columns, oldest first
    self._owed = Owed(self._n)
    self.thread = threading.Thread(target=self._main, name=f'actor-{index}', daemon=True)

  def _main(self) -> None:
    try:
      with jax.default_device(self.device):
        self._act()
    except Closed:
      pass
    except BaseException:
      self._pipe.fail(traceback.format_exc())
    finally:
      self.pool.close()

  def _act(self) -> None:
    arrival = self._begin()
    example = jax.tree.map(lambda x: np.zeros((self._n, *x.shape[1:]), x.dtype), arrival.timestep)
    if self._sebulba.ordered:
      self._take_params()
    else:
      self._take_newest()
    self._carry = self._programs.begin(
      self._params, self._env_id, example, self._unroll_key(self._number)
    )
    if self._snapshot is not None:
      state = jax.tree.map(jnp.copy, jax.device_put(self._snapshot.agent_state, self.device))
      self._carry = self._carry._replace(agent_state=state)
    self._versions[:] = self._version
    self._new_keys()
    while True:
      ids, action = self._answer(arrival)
      if len(ids):
        action = np.asarray(action)
        self._watch('inference')
        self._check.action(action)
        with self._owed:
          self._owed.ask(ids)
          self.pool.send(ids, action)
      arrival = self._receive()

  def _answer(self, arrival: Arrival) -> tuple[np.ndarray, Any]:
    """Environments, and actions for them; all that arrived, but for those that are parked."""
    ids = arrival.env_id
    if not self._sebulba.ordered:
      return ids, self._in_any_order(arrival) if len(ids) else None
    whole = rows_of(ids, self._n) is EVERY
    if not whole and len(ids) > 1 and (ids[1:] < ids[:-1]).any():
      raise HostError(f'{self._spec.name} returned {ids} where order was expected')
    if whole and self._in_step():
      return ids, self._together(arrival)
    return self._apart(arrival)

  def _begin(self) -> Arrival:
    """The first arrival: of fresh environments, or what a snapshot was about to answer."""
    if self._snapshot is None:
      with self._owed:
        self._owed.ask(self._ids)
        self.pool.reset()
      return self._receive()
    snapshot = self._snapshot
    self.pool.restore(snapshot.env_state, self._number * self._length)  # type: ignore[attr-defined]
    self._episodes.restore(snapshot.episodes)
    timestep = jax.tree.map(np.asarray, snapshot.timestep)
    none = np.zeros(self._n, bool)
    return Arrival(self._ids, timestep, np.zeros(self._n, np.float32), none, self._episodes.run_id)

  @property
  def silence(self) -> float:
    """Seconds that some environment has owed an answer, if the thread waits for one."""
    return self._owed.silence

  def _receive(self) -> Arrival:
    if self._pipe.closed:
      raise Closed
    with self._owed:
      arrival = self.pool.recv()
    self._owed.answered(arrival.env_id)
    self._check(arrival)
    restarted = self._episodes.add(arrival)
    if np.count_nonzero(restarted):
      ids = arrival.env_id[restarted]
      self._restarts += len(ids)
      self._dropped += int(self._row[ids].sum())
      self._row[ids] = 0
      self._serial[ids] += 1
      self._uneven = True
    self._watch('env')
    return arrival

  # --- all environments at the same row

  def _in_step(self) -> bool:
    if self._uneven:
      self._uneven = bool(self._parked) or bool((self._row != self._row[0]).any())
    return not self._uneven

  def _together(self, arrival: Arrival) -> Any:
    timestep, t = arrival.timestep, int(self._row[0])
    if t == self._length:
      timestep = jax.device_put(timestep, self.device)
      parts, agent_state = self._programs.finish(self._carry, timestep, self._env_id)
      self._ship(parts, self._versions[0], agent_state, timestep, self._serial.copy())
      self._serial += 1
      self._next_unroll()
      self._row[:] = t = 0
    self._carry, action = self._programs.step(
      self._params, self._carry, self._keys, self._next_call(), np.int32(t), timestep
    )
    self._row += 1
    return action

  def _next_unroll(self) -> None:
    self._take_params()
    self._versions[0] = self._version
    if self._keyed < self._number:
      self._keyed = self._number
      self._new_keys()

  def _take_params(self) -> None:
    self._version, self._params = self._pipe.params(self.index, self._number, self.device)
    jax.block_until_ready(self._params)  # published while the learner still computes them
    self._watch('waiting')

  def _take_newest(self) -> None:
    version, params = self._pipe.newest(self.device)
    if version != self._version:
      self._version, self._params = version, jax.block_until_ready(params)
    self._watch('waiting')

  def _new_keys(self) -> None:
    self._keys = self._programs.keys(self._unroll_key(self._keyed))
    self._calls = 0

  def _next_call(self) -> np.int32:
    """Which of the unroll's keys is next; after a restart an unroll takes more than it has."""
    if self._calls == self._length:
      self._keyed += 1
      self._new_keys()
    self._calls += 1
    return np.int32(self._calls - 1)

  # --- each environment at its own row, where some were restarted

  def _apart(self, arrival: Arrival) -> tuple[np.ndarray, Any]:
    """Acts for those that arrived, but for those that wait for the others' unroll to end."""
    ids, timestep = arrival.env_id, arrival.timestep
    over = self._row[ids] == self._length
    if over.any():
      self._store(ids[over], jax.tree.map(lambda x: x[over], timestep))
      for i in np.flatnonzero(over):
        self._parked[int(ids[i])] = jax.tree.map(lambda x, i=i: x[i], timestep)
      if len(self._parked) == self._n:
        return self._release()
      ids, timestep = ids[~over], jax.tree.map(lambda x: x[~over], timestep)
    return ids, self._step_some(ids, timestep) if len(ids) else None

  def _store(self, ids: np.ndarray, timestep: TimeStep) -> None:
    """The last timesteps of these environments' unrolls."""
    row, column, timestep = self._pad(timestep, self._row[ids], self._column[ids])
    self._carry = self._programs.store(self._carry, row, column, timestep)

  def _step_some(self, ids: np.ndarray, timestep: TimeStep) -> Any:
    row, column, timestep = self._pad(timestep, self._row[ids], self._column[ids])
    env_id = np.full(len(row), self._n, np.int32)
    env_id[: len(ids)] = ids
    self._carry, action = self._programs.step_some(
      self._params, self._carry, self._keys, self._next_call(), env_id, row, column, timestep
    )
    self._row[ids] += 1
    return np.asarray(action)[: len(ids)]

  def _pad(self, timestep: TimeStep, row: np.ndarray, column: np.ndarray) -> Any:
    """(row, column, timestep), as many as a program is for; what is added is out of range."""
    more = min(s for s in self._sebulba.sizes if s >= len(row)) - len(row)
    if not more:
      return row, column, timestep

    def fill(x: np.ndarray, value: int = 0) -> np.ndarray:
      return np.concatenate([x, np.full((more, *x.shape[1:]), value, x.dtype)])

    return (
      fill(row, self._length + 1),
      fill(column, self._n * self._sebulba.columns),
      jax.tree.map(fill, timestep),
    )

  def _release(self) -> tuple[np.ndarray, Any]:
    """All unrolls are at their end, some of them a while ago: the next ones begin together."""
    rows = [self._parked[i] for i in range(self._n)]
    timestep = jax.tree.map(lambda *xs: np.stack(xs), *rows)
    self._parked.clear()
    zeros = np.zeros(self._n, np.float32)
    arrival = Arrival(self._ids, timestep, zeros, zeros.astype(bool), self._episodes.run_id)
    return self._ids, self._together(arrival)

  # --- environments that return in any order, or come and go

  def _in_any_order(self, arrival: Arrival) -> Any:
    """Acts for all that arrived, with the newest parameters; whose unroll ends begins another."""
    ids, timestep = arrival.env_id, arrival.timestep
    self._take_newest()
    over = self._row[ids] == self._length
    if over.any():
      done = ids[over]
      self._store(done, jax.tree.map(lambda x: x[over], timestep))
      self._finished.extend(self._column[done].tolist())
      self._serials[self._column[done]] = self._serial[done]
      self._serial[done] += 1
      self._row[done] = 0
      while len(self._finished) >= self._n and not self._ship_finished():
        pass
      for env in done:
        self._column[env] = self._free.popleft()
        self._member[self._column[env]] = env
    self._versions[self._column[ids[self._row[ids] == 0]]] = self._version
    return self._step_some(ids, timestep)

  def _ship_finished(self) -> bool:
    """A trajectory of the N oldest finished unrolls; or not, if some had to be dropped."""
    self._watch('inference')
    oldest = self._pipe.reserve()
    self._watch('waiting')
    late = [c for c in self._finished if self._versions[c] < oldest]
    if late:
      self._finished = collections.deque(c for c in self._finished if c not in late)
      self._free.extend(late)
      self._dropped += len(late) * self._length
      self._pipe.unreserve()
      return False
    columns = np.array([self._finished.popleft() for _ in range(self._n)], np.int32)
    members = self._sebulba.first_env(self.index) + self._member[columns]
    parts = self._programs.take(self._carry, columns, members.astype(np.int32))
    self._free.extend(columns.tolist())
    version, serial = int(self._versions[columns].min()), self._serials[columns]
    self._ship(parts, version, None, None, serial)
    return True

  # --- to the learners

  def _ship(
    self, parts: Any, version: int, agent_state: Any, timestep: Any, serial: np.ndarray
  ) -> None:
    snapshot = None
    if self._sebulba.saves_actors:
      env_state = self.pool.state  # type: ignore[attr-defined]
      episodes = jax.device_put(self._episodes.state(), jax.local_devices(backend='cpu')[0])
      snapshot = Snapshot(agent_state, timestep, env_state, episodes)
    devices = self._sebulba.topology.local_learners
    parts = tuple(
      part if device == self.device else jax.device_put(part, device)
      for part, device in zip(parts, devices, strict=True)
    )
    self._watch('transfer')
    unroll = Unroll(
      parts, int(version), self.index, self._number, self._episodes.take(), snapshot,
      self._watch.take(), self._restarts, self._dropped, serial,
    )  # fmt: skip
    self._restarts = self._dropped = 0
    self._number += 1
    if self._sebulba.ordered:
      self._pipe.put(unroll)
    else:
      self._pipe.put_reserved(unroll)
    self._watch('waiting')


# --- the whole ------------------------------------------------------------------------------------


class State(NamedTuple):
  """What a run has learned, and where its actors are if they can be saved."""

  train: TrainState  # the same on all learner devices
  memory: Any
  log: Log
  key: Array
  update: Array  # [] i32
  previous: Any  # with lag 1, the parameters before the last update: the next unroll's
  actors: tuple[Snapshot, ...]  # one for each thread, where environments can give their state


class Programs:
  """`Acting`, compiled."""

  def __init__(self, acting: Acting) -> None:
    self.begin = jax.jit(acting.begin)
    self.keys = jax.jit(acting.keys)
    self.step = jax.jit(acting.step, donate_argnums=1)
    self.step_some = jax.jit(acting.step_some, donate_argnums=1)
    self.store = jax.jit(acting.store, donate_argnums=0)
    self.finish = jax.jit(acting.finish)
    self.take = jax.jit(acting.take)


@dataclasses.dataclass(frozen=True)
class Sebulba:
  """One agent in pools of one kind of environment, on a topology.

  `num_envs` are divided over all processes' actor threads; with `batch_size` (of one thread) less
  than its share, environments come back in any order, as they are ready.
  """

  agent: Agent
  spec: HostSpec
  replay: Replay
  topology: Topology
  num_envs: int
  unroll_length: int
  threads: int = 2  # per actor device
  lag: Lag = '1'
  max_lag: int = 4
  batch_size: int = 0  # 0: all of a thread's environments, in order
  env_threads: int = 0  # C++ threads or worker processes of all pools together; 0: one per core
  deadline: float = 60.0  # seconds that an answer of the environments may take
  seed: int = 0
  hosted: bool = False  # replay is on the host: the `windows` of `replay`, and not its state
  first_thread: int = 0  # of this one's, where other runs of threads act for the same learner

  def __post_init__(self) -> None:
    for name in ('num_envs', 'unroll_length', 'threads', 'max_lag'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
    parts = self.total_threads * self.num_local_learners
    if self.num_envs % parts:
      raise ValueError(
        f'--num-envs {self.num_envs} does not divide over {self.total_threads} actor threads, '
        f'each with {self.num_local_learners} learner devices to send to'
      )
    if not 0 <= self.batch_size <= self.envs_per_thread or (
      self.batch_size and self.envs_per_thread % self.batch_size
    ):
      raise ValueError(
        f'--env-batch-size {self.batch_size} does not divide the {self.envs_per_thread} '
        'environments of a thread'
      )
    if not self.ordered and self.lag != 'async':
      why = f'--env-batch-size {self.batch_size}' if self.batch_size else self.spec.name
      raise ValueError(f'environments in any order ({why}) need --lag async, not {self.lag}')
    if self.hosted and self.replay.windows is None:
      raise ValueError(
        'this agent learns from the newest trajectory only: it has no replay to host'
      )
    if self.hosted and jax.process_count() > 1:
      raise ValueError('replay on the host is for runs of one process; leave out --replay host')
    if not self.ordered and self.in_turn:
      why = f'--env-batch-size {self.batch_size}' if self.batch_size else self.spec.name
      raise ValueError(
        f'environments in any order ({why}) need replay on the host: give --replay host'
      )
    if not self.ordered and self.spec.ordered_only:
      raise ValueError(f'{self.spec.name} comes in order only; leave out --env-batch-size')

  # --- sizes

  @property
  def mesh(self) -> Any:
    return self.topology.learners

  @property
  def local_threads(self) -> int:
    return self.threads * len(self.topology.actors)

  @property
  def total_threads(self) -> int:
    return self.local_threads * jax.process_count()

  @property
  def num_local_learners(self) -> int:
    return len(self.topology.local_learners)

  @property
  def envs_per_thread(self) -> int:
    return self.num_envs // self.total_threads

  @property
  def ordered(self) -> bool:
    return self.batch_size in (0, self.envs_per_thread) and not self.spec.comes_and_goes

  @property
  def in_turn(self) -> bool:
    """Replay needs each environment's unroll where the one before was."""
    return self.replay.windows is not None and not self.hosted

  @property
  def columns(self) -> int:
    """Of each environment."""
    return 1 if self.ordered else COLUMNS

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """How many environments the programs for some of a thread's are compiled for."""
    most = self.batch_size or self.envs_per_thread
    if not self.spec.comes_and_goes:
      return (most,)
    return tuple(sorted({-(-most // 2**i) for i in range(SIZES)}))

  @property
  def saves_actors(self) -> bool:
    return self.spec.jax is not None and self.lag != 'async' and jax.process_count() == 1

  def thread_index(self, local: int) -> int:
    """A thread of this process, counted over all processes."""
    return self.first_thread + jax.process_index() * self.local_threads + local

  def first_env(self, local: int) -> int:
    """The number of a thread's first environment, counted over all."""
    return self.thread_index(local) * self.envs_per_thread

  def device_of(self, local: int) -> jax.Device:
    return self.topology.actors[local // self.threads]

  # --- what is computed where

  @functools.cached_property
  def programs(self) -> Programs:
    """The actor threads'."""
    n, parts = self.envs_per_thread, self.num_local_learners
    return Programs(Acting(self.agent, n, self.unroll_length, self.columns, parts))

  @functools.cached_property
  def jax_steps(self) -> Any:
    """Those of environments in JAX."""
    from podrace.envs.host.jax import JaxSteps

    return JaxSteps(self.spec.jax, self.envs_per_thread, self.unroll_length)

  @functools.cached_property
  def example(self) -> TimeStep:
    """A timestep of one thread's environments, of zeros."""
    n = self.envs_per_thread
    observation = _zeros(self.spec.observation_space, n)
    zeros: Any = np.zeros(n, np.float32)
    return TimeStep(observation, zeros, zeros + 1, zeros.astype(np.int8))

  def _example_trajectory(self, params: Any) -> Trajectory:
    """A learner batch, in shapes only."""

    def make(params: Any, timestep: TimeStep, key: Array) -> Trajectory:
      env_id = jnp.zeros([self.envs_per_thread], jnp.int32)
      carry = Acting(self.agent, self.envs_per_thread, self.unroll_length, 1, 1).begin(
        params, env_id, timestep, key
      )
      one = Trajectory(carry.timesteps, carry.outputs, carry.start, env_id)
      return _concatenate([one] * self.total_threads)

    return jax.eval_shape(make, params, self.example, jax.random.key(0))

  def _init(self, keys: Array) -> State:
    train_key, _, run_key = jax.random.split(keys[0], 3)
    train = self.agent.init(train_key)
    memory: Any = ()
    if self.hosted:
      learn = sample_learner(self.agent, self.mesh, self.layout.sample)
      _, _, metrics = jax.eval_shape(learn, train, self.layout.batch(), run_key)
    else:
      example = self._example_trajectory(train.params)
      memory = init_memory(self.replay, self.mesh, example)
      learn = learner(self.agent, self.replay, self.mesh)
      _, _, metrics, _ = jax.eval_shape(learn, train, memory, example, run_key, jnp.int32(0))
    previous = jax.tree.map(jnp.copy, train.params) if self.lag == '1' else ()
    return State(train, memory, empty_log(metrics), run_key, jnp.int32(0), previous, ())

  @functools.cached_property
  def shapes(self) -> State:
    """A State of shapes, dtypes and shardings: what a checkpoint holds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(self._init, keys)
    split = NamedSharding(self.mesh, P(AXIS))
    same = topology_.replicated(self.mesh)

    def place(sharding: Any, tree: Any) -> Any:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    placed = State(
      *(place(split if f == 'memory' else same, x) for f, x in state._asdict().items())
    )
    if not self.saves_actors:
      return placed
    return placed._replace(actors=tuple(map(self._snapshot_shape, range(self.local_threads))))

  def _snapshot_shape(self, local: int) -> Snapshot:
    from podrace.envs.base import batch

    n = self.envs_per_thread
    env_state, timestep = jax.eval_shape(batch(self.spec.jax, n).reset, jax.random.key(0))
    agent_state = jax.eval_shape(self.agent.initial_state, jnp.zeros([n], jnp.int32))
    episodes = EpisodeCounter(n).state()
    on_device = SingleDeviceSharding(self.device_of(local))
    on_host = SingleDeviceSharding(jax.local_devices(backend='cpu')[0])

    def place(sharding: Any, tree: Any) -> Any:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    return Snapshot(
      place(on_device, agent_state),
      place(on_device, timestep),
      place(on_host, env_state),
      place(on_host, episodes),
    )

  @functools.cached_property
  def shardings(self) -> Any:
    return jax.tree.map(lambda x: x.sharding, self.shapes._replace(actors=()))

  @functools.cached_property
  def init(self) -> Any:
    """keys [1] -> State, placed on the learners' mesh."""
    return jax.jit(self._init, out_shardings=self.shardings)

  @functools.cached_property
  def learn(self) -> Any:
    """(params, rest, memory, log, key, update, trajectories) -> (train, memory, log, update).

    `trajectories` are those of all threads. The parameters are not donated: actors have them.
    """
    learn = learner(self.agent, self.replay, self.mesh)
    specs = (TRAJECTORY_SPECS,) * self.local_threads
    join = jax.shard_map(
      lambda *trajectories: _concatenate(trajectories),
      mesh=self.mesh,
      in_specs=specs,
      out_specs=TRAJECTORY_SPECS,
    )

    def update(
      params: Any, rest: Any, memory: Any, log: Log, key: Array, update: Array, trajectories: Any
    ) -> Any:
      _, learn_key = jax.random.split(jax.random.fold_in(key, update))  # as Anakin's
      train, memory, metrics, count = learn(
        TrainState(params, rest), memory, join(*trajectories), learn_key, update
      )
      return train, memory, add_to_log(log, metrics, count, update), update + 1

    s = self.shardings
    return jax.jit(
      update, donate_argnums=(1, 2, 3, 5), out_shardings=(s.train, s.memory, s.log, s.update)
    )

  @functools.cached_property
  def layout(self) -> Layout:
    """How replay on the host keeps trajectories."""
    params = jax.eval_shape(lambda key: self.agent.init(key).params, jax.random.key(0))
    return Layout(self.replay.windows, self._example_trajectory(params))

  @property
  def batch(self) -> dict[str, Any]:
    """The shapes of what `learn_sample` is given."""
    split = NamedSharding(self.mesh, P(AXIS))
    shapes = self.layout.batch()
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for k, x in shapes.items()}

  @functools.cached_property
  def batch_of_unrolls(self) -> Trajectory:
    """The shapes of what `learn` is given, where one thread acts."""
    params = jax.eval_shape(lambda key: self.agent.init(key).params, jax.random.key(0))

    def place(spec: Any, x: Any) -> Any:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    return Trajectory(*(
      jax.tree.map(functools.partial(place, spec), field)
      for spec, field in zip(TRAJECTORY_SPECS, self._example_trajectory(params), strict=True)
    ))  # fmt: skip

  @functools.cached_property
  def learn_sample(self) -> Any:
    """(params, rest, log, key, update, i, batch) -> (train, log, priority): the i-th of an update.

    As `learn` does with the samples of replay on the device.
    """
    learn = sample_learner(self.agent, self.mesh, self.layout.sample)

    def one(
      params: Any, rest: Any, log: Log, key: Array, update: Array, i: Array, batch: Any
    ) -> Any:
      _, update_key = jax.random.split(jax.random.fold_in(key, update))
      _, learn_key = jax.random.split(jax.random.fold_in(update_key, i))
      train, priority, metrics = learn(TrainState(params, rest), batch, learn_key)
      return train, add_to_log(log, metrics, jnp.int32(1), update), priority

    s = self.shardings
    split = NamedSharding(self.mesh, P(AXIS))
    return jax.jit(one, donate_argnums=(1, 2), out_shardings=(s.train, s.log, split))

  @functools.cached_property
  def health(self) -> Any:
    """State -> (the first update whose loss was not finite or -1, all parameters are finite)."""

    def check(params: Any, broken: Array) -> tuple[Array, Array]:
      return broken, all_finite(params)

    check = jax.jit(check, out_shardings=topology_.replicated(self.mesh))
    return lambda state: check(state.train.params, state.log.broken)

  def warm_up(self) -> tuple[Trajectory, ...]:
    """Compiles the actors' programs on all their devices; the shapes that `learn` is given."""
    for device in dict.fromkeys(self.topology.actors):
      with jax.default_device(device):
        params = jax.jit(lambda key: self.agent.init(key).params)(jax.random.key(0))
        params = jax.device_put(params, device)  # committed, as in a run: else it compiles anew
        env_id = jax.device_put(np.zeros(self.envs_per_thread, np.int32), device)
        carry = self.programs.begin(params, env_id, self.example, jax.random.key(1))
        keys = self.programs.keys(jax.random.key(2))
        if self.ordered:
          zero = np.int32(0)
          carry, action = self.programs.step(params, carry, keys, zero, zero, self.example)
          parts, _ = self.programs.finish(carry, jax.device_put(self.example, device), env_id)
          if self.spec.jax is not None:
            self._warm_up_pool(action)
        else:
          for size in self.sizes:
            ids = np.zeros(size, np.int32)
            example = jax.tree.map(lambda x, size=size: x[:size], self.example)
            carry, _ = self.programs.step_some(
              params, carry, keys, np.int32(0), ids, ids, ids, example
            )
            carry = self.programs.store(carry, ids, ids, example)
          ids = np.zeros(self.envs_per_thread, np.int32)
          parts = self.programs.take(carry, ids, ids)

    def whole(spec: Any, x: Array) -> Any:
      shape = list(x.shape)
      shape[1 if len(spec) > 1 else 0] *= self.mesh.size
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    fields = [
      jax.tree.map(functools.partial(whole, spec), field)
      for spec, field in zip(TRAJECTORY_SPECS, parts[0], strict=True)
    ]
    return (Trajectory(*fields),) * self.local_threads

  def _warm_up_pool(self, action: Any) -> None:
    """Compiles environments in JAX: what compiling takes is not theirs to answer for."""
    from podrace.envs.host.jax import JaxPool

    host = jax.local_devices(backend='cpu')[0]
    with jax.default_device(host):
      reset_key, unroll_key = jax.random.key(3), jax.random.key(4)
    pool = JaxPool(self.jax_steps, reset_key, lambda number: unroll_key)
    pool.reset()
    pool.send(np.arange(self.envs_per_thread), jax.tree.map(np.asarray, action))
    pool.recv()

  def join(self, unrolls: list[Unroll]) -> tuple[Trajectory, ...]:
    """Each unroll's parts, which are on the learner devices, as arrays over the mesh."""
    size = self.mesh.size

    def one(spec: Any, *parts: Array) -> Array:
      shape = list(parts[0].shape)
      shape[1 if len(spec) > 1 else 0] *= size
      return jax.make_array_from_single_device_arrays(
        tuple(shape), NamedSharding(self.mesh, spec), list(parts)
      )

    def whole(parts: tuple[Trajectory, ...]) -> Trajectory:
      fields = [
        jax.tree.map(functools.partial(one, spec), *(p[i] for p in parts))
        for i, spec in enumerate(TRAJECTORY_SPECS)
      ]
      return Trajectory(*fields)

    return tuple(whole(u.parts) for u in unrolls)


def _concatenate(trajectories: Any) -> Trajectory:
  """Trajectories side by side along the batch."""
  if len(trajectories) == 1:
    return trajectories[0]
  timed = [
    jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *(t[i] for t in trajectories))
    for i in range(2)
  ]
  flat = [
    jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=0), *(t[i] for t in trajectories))
    for i in range(2, 4)
  ]
  return Trajectory(*timed, *flat)


def _zeros(space: Any, n: int) -> Any:
  """Observations [n, ...] of zeros, as numpy arrays."""
  from gymnasium import spaces

  if isinstance(space, spaces.Dict):
    return {k: _zeros(s, n) for k, s in space.spaces.items()}
  if isinstance(space, spaces.Tuple):
    return tuple(_zeros(s, n) for s in space.spaces)
  return np.zeros((n, *space.shape), space.dtype)


class Actors:
  """The actor threads of this process while a run is under way, and what they have told."""

  def __init__(self, sebulba: Sebulba, state: State, actor_key: Array, start: bool = True) -> None:
    self._sebulba = sebulba
    s = sebulba
    self.pipe = Pipe(s.local_threads, s.lag, s.max_lag, s.ordered, s.in_turn)
    self._deadline = Deadline(s.deadline)
    update = int(jax.device_get(state.update))
    if sebulba.lag == '1' and update > 0:
      self.publish(update - 1, state.previous)
    self.publish(update, state.train.params)
    run_key = jax.device_get(jax.random.key_data(state.key))
    self._threads: list[Actor] = []
    try:
      for i in range(sebulba.local_threads):
        snapshot = state.actors[i] if state.actors else None
        self._threads.append(self._actor(i, update, run_key, actor_key, snapshot))
    except BaseException:
      for actor in self._threads:
        actor.pool.close()
      raise
    for actor in self._threads if start else ():
      actor.thread.start()

  @property
  def pools(self) -> list[HostEnvironment]:
    """The threads' environments."""
    return [actor.pool for actor in self._threads]

  def _actor(
    self, local: int, update: int, run_key: Any, actor_key: Array, snapshot: Snapshot | None
  ) -> Actor:
    s = self._sebulba
    index, device = s.thread_index(local), s.device_of(local)

    life = 0 if snapshot is not None else update  # who begins anew draws other numbers than before

    def unroll_key(number: int, on: jax.Device) -> Array:
      """What Anakin gives `actor.unroll` on the index-th device in the number-th update."""
      with jax.default_device(on):
        return _unroll_key(run_key, np.uint32(number), np.uint32(index), np.uint32(life))

    args = self._pool_args(index, update)
    if s.spec.jax is not None:
      from podrace.envs.host.jax import JaxPool

      host = jax.local_devices(backend='cpu')[0]
      pool: HostEnvironment = JaxPool(
        s.jax_steps,
        _life_key(jax.random.fold_in(actor_key, index), np.uint32(life)),
        lambda number: _env_key(unroll_key(number, host)),
      )
    else:
      pool = s.spec.make(args)
    return Actor(
      s, local, device, pool, self.pipe, lambda k: unroll_key(k, device), update, snapshot
    )

  def _pool_args(self, index: int, update: int) -> PoolArgs:
    s = self._sebulba
    n = s.envs_per_thread
    seeds = np.random.SeedSequence([s.seed, index, update]).generate_state(n, np.uint32)
    cores = s.env_threads or topology_.cores()
    threads = max(1, min(n, cores // s.local_threads))
    return PoolArgs(n, s.batch_size or n, seeds, threads, s.deadline)

  def publish(self, version: int, params: Any) -> None:
    """Gives the actors' devices a version of the parameters."""
    one = jax.tree.map(lambda x: x.addressable_data(0), params)
    devices = dict.fromkeys(self._sebulba.topology.actors)
    self.pipe.publish(version, {d: jax.device_put(one, d) for d in devices})

  def take(self, update: int, give_up: Callable[[], bool]) -> list[Unroll] | None:
    """As `Pipe.take`; also notices threads that are stuck in their environments."""
    return self.pipe.take(update, lambda: give_up() or self._look())

  def _look(self) -> bool:
    for actor in self._threads:
      if actor.pool.watches_itself:  # and replaces what hangs
        continue
      silence = actor.silence
      if self._deadline.passed(actor.index, silence):
        raise ActorFailed(
          f'{self._sebulba.spec.name}: environments of actor thread {actor.index} have not '
          f'answered for {silence:.0f} s'
        )
    return False

  def close(self) -> None:
    """Ends the threads; one that is stuck is left behind."""
    self.pipe.close()
    end = time.monotonic() + CLOSE_SECONDS
    for actor in self._threads:
      if actor.thread.ident is not None:
        actor.thread.join(max(end - time.monotonic(), 0))
      if actor.thread.is_alive():
        actor.pool.kill()


@jax.jit
def _unroll_key(run_key: Array, number: Array, index: Array, life: Array) -> Array:
  key = jax.random.wrap_key_data(run_key)
  act_key, _ = jax.random.split(jax.random.fold_in(key, number))
  return _life_key(jax.random.fold_in(act_key, index), life)


@jax.jit
def _life_key(key: Array, life: Array) -> Array:
  """The key itself in a run's first life, others in later ones."""
  numbers = jax.random.key_data(key)
  other = jax.random.key_data(jax.random.fold_in(jax.random.clone(key), life))
  return jax.random.wrap_key_data(jnp.where(life == 0, numbers, other))


@jax.jit
def _env_key(key: Array) -> Array:
  _, env_key = jax.random.split(key)
  return env_key
