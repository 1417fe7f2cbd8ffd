"""An actor thread: its pool of environments, and its unrolls on one device."""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.host.answers import AnswerTimer
from podrace.envs.host.base import EVERY, Checker, EpisodeCounter, HostError, everyone, rows_of
from podrace.sebulba.acting import pack
from podrace.sebulba.pipe import Closed, Pipe, Snapshot, Unroll
from podrace.topology import host_device
from podrace.types import Array, Arrival, HostEnvironment, TimeStep

if TYPE_CHECKING:
  from podrace.sebulba.acting_program import ActingProgram


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


class Actor:
  """One thread: its pool of environments, and its unrolls on one device."""

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    device: jax.Device,
    pool: HostEnvironment,
    pipe: Pipe,
    unroll_key: Callable[[int], Array],
    number: int,
    snapshot: Snapshot | None,
  ) -> None:
    self._acting, self.index, self.device, self.pool, self._pipe = (
      acting, index, device, pool, pipe,
    )  # fmt: skip
    self._spec, self._n, self._length = acting.spec, pool.num_envs, acting.unroll_length
    self._unroll_key, self._number, self._snapshot = unroll_key, number, snapshot
    self._programs = acting.programs
    self._ids = everyone(self._n)
    self._env_id = jax.device_put(
      acting.first_env(index) + np.arange(self._n, dtype=np.int32), device
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
    columns = self._n * acting.columns
    self._versions = np.zeros(columns, np.int64)  # of the parameters that columns began with
    self._member = np.resize(self._ids, columns)  # whose they are
    self._serials = np.zeros(columns, np.int64)  # of finished unrolls
    self._free = collections.deque(range(self._n, columns))
    self._finished: collections.deque[int] = collections.deque()  # columns, oldest first
    self._timer = AnswerTimer(self._n)
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
    if self._acting.ordered:
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
        with self._timer:
          self._timer.ask(ids)
          self.pool.send(ids, action)
      arrival = self._receive()

  def _answer(self, arrival: Arrival) -> tuple[np.ndarray, Any]:
    """Environments, and actions for them; all that arrived, but for those that are parked."""
    ids = arrival.env_id
    if not self._acting.ordered:
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
      with self._timer:
        self._timer.ask(self._ids)
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
    """Seconds that some environment has owed an answer."""
    return self._timer.silence

  def _receive(self) -> Arrival:
    if self._pipe.closed:
      raise Closed
    with self._timer:
      arrival = self.pool.recv()
    self._timer.answered(arrival.env_id)
    self._check(arrival)
    restarts = self._episodes.add(arrival)
    if np.count_nonzero(restarts):
      ids = arrival.env_id[restarts > 0]
      self._restarts += int(restarts.sum())
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
    observation = timestep.observation
    if t == self._length:
      observation = jax.device_put(observation, self.device)
      parts, agent_state = self._programs.finish(
        self._carry, pack(timestep), observation, self._env_id
      )
      self._ship(parts, self._versions.copy(), agent_state, timestep, self._serial.copy())
      self._serial += 1
      self._next_unroll()
      self._row[:] = t = 0
    call = self._next_call()
    self._carry, action = self._programs.step(
      self._params, self._carry, self._keys, pack(timestep, call, t), observation
    )
    self._row += 1
    return action

  def _next_unroll(self) -> None:
    self._take_params()
    self._versions[:] = self._version
    if self._keyed < self._number:
      self._keyed = self._number
      self._new_keys()

  def _take_params(self) -> None:
    self._version, self._params = self._pipe.params(self.index, self._number, self.device)
    jax.block_until_ready(self._params)  # lag 0 and 1: published while the learner computes them
    self._watch('waiting')

  def _take_newest(self) -> None:
    version, params = self._pipe.newest(self.device)
    if version != self._version:
      self._version, self._params = version, params
    self._watch('waiting')

  def _new_keys(self) -> None:
    self._keys = self._programs.keys(self._unroll_key(self._keyed))
    self._calls = 0

  def _next_call(self) -> int:
    """Which of the unroll's keys is next; after a restart an unroll takes more than it has."""
    if self._calls == self._length:
      self._keyed += 1
      self._new_keys()
    self._calls += 1
    return self._calls - 1

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
    numbers = pack(timestep, row, column)
    self._carry = self._programs.store(self._carry, numbers, timestep.observation)

  def _step_some(self, ids: np.ndarray, timestep: TimeStep) -> Any:
    row, column, timestep = self._pad(timestep, self._row[ids], self._column[ids])
    env_id = np.full(len(row), self._n, np.int32)
    env_id[: len(ids)] = ids
    numbers = pack(timestep, self._next_call(), env_id, row, column)
    self._carry, action = self._programs.step_some(
      self._params, self._carry, self._keys, numbers, timestep.observation
    )
    self._row[ids] += 1
    return np.asarray(action)[: len(ids)]

  def _pad(self, timestep: TimeStep, row: np.ndarray, column: np.ndarray) -> Any:
    """(row, column, timestep), as many as a program is for; what is added is out of range."""
    more = min(s for s in self._acting.sizes if s >= len(row)) - len(row)
    if not more:
      return row, column, timestep

    def fill(x: np.ndarray, value: int = 0) -> np.ndarray:
      return np.concatenate([x, np.full((more, *x.shape[1:]), value, x.dtype)])

    return (
      fill(row, self._length + 1),
      fill(column, self._n * self._acting.columns),
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
    members = self._acting.first_env(self.index) + self._member[columns]
    parts = self._programs.take(self._carry, columns, members.astype(np.int32))
    self._free.extend(columns.tolist())
    self._ship(parts, self._versions[columns], None, None, self._serials[columns])
    return True

  # --- to the learners

  def _ship(
    self, parts: Any, versions: np.ndarray, agent_state: Any, timestep: Any, serial: np.ndarray
  ) -> None:
    snapshot = None
    if self._acting.saves_actors:
      env_state = self.pool.state  # type: ignore[attr-defined]
      episodes = jax.device_put(self._episodes.state(), host_device())
      timestep = jax.device_put(timestep, self.device)
      snapshot = Snapshot(agent_state, timestep, env_state, episodes)
    devices = self._acting.destinations
    parts = tuple(
      part if device == self.device else jax.device_put(part, device)
      for part, device in zip(parts, devices, strict=True)
    )
    self._watch('transfer')
    unroll = Unroll(
      parts, versions, self.index, self._episodes.take(), snapshot, self._watch.take(),
      self._restarts, self._dropped, serial,
    )  # fmt: skip
    self._restarts = self._dropped = 0
    self._number += 1
    if self._acting.ordered:
      self._pipe.put(unroll)
    else:
      self._pipe.put_reserved(unroll)
    self._watch('waiting')
