"""An actor thread: its pool of environments, and the actor that answers them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace.architectures.sebulba.any_order import AnyOrder
from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.lockstep import Lockstep
from podrace.architectures.sebulba.pipe import ActorFailed, Closed, Pipe, Snapshot
from podrace.architectures.sebulba.saved_actors import ActorState, restore_pool, take_state
from podrace.architectures.sebulba.unrolls import UnrollCounters
from podrace.envs.host.answer_timer import AnswerTimer
from podrace.envs.host.checker import Checker
from podrace.envs.host.timesteps import everyone
from podrace.errors import HostError, RunError, UsageError
from podrace.system.threads import Worker
from podrace.topology import host_device
from podrace.types import Array, Arrival, HostEnvironment, TimeStep

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram


class ActorThread:
  """Receives timesteps, answers them with the actor's actions, and repeats until the run ends.

  Args:
    acting: the settings and programs of the threads.
    index: of this thread, counted in this process.
    device: on which it acts.
    pool: its environments. The thread closes it.
    unroll_key: from the number of an unroll to its PRNG key.
    number: of the first unroll.
    snapshot: the state that the thread continues from; None if it begins anew.

  Owner: `Actors`, which calls `close`.
  Ends when: the pipe is closed, or an exception is raised, which `check` raises again.
  """

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    device: jax.Device,
    pool: HostEnvironment,
    pipe: Pipe,
    unroll_key: Callable[[int], Array],
    number: int,
    snapshot: Snapshot | ActorState | None,
  ) -> None:
    self.index, self.device, self.pool, self._pipe = index, device, pool, pipe
    self._snapshot = snapshot
    n = pool.num_envs
    self._ids, self._length, self._name = everyone(n), acting.unroll_length, acting.spec.name
    self._check = Checker(acting.spec, n, acting.agent)
    self._timer = AnswerTimer(n)
    self._inference = Inference(acting, index, device, unroll_key, number)
    self._counters = UnrollCounters(index, n, number)
    channel = self._inference, pipe, self._counters
    take_snapshot = (
      self._take_snapshot if acting.saves_actors
      else self._take_state if acting.keeps_states
      else None
    )  # fmt: skip
    self.actor: Lockstep | AnyOrder = (
      Lockstep(*channel, take_snapshot) if acting.ordered else AnyOrder(*channel)
    )
    self.worker: Worker | None = None

  def start(self) -> None:
    """Begin to act."""
    self.worker = Worker(f'actor-{self.index}', self._main, at_end=self.pool.close)

  def close(self, timeout: float) -> None:
    """Wait for the thread's end. A pool that is stuck is killed."""
    if self.worker is not None and not self.worker.wait(timeout):
      self.pool.kill()

  def check(self) -> None:
    """Raise ActorFailed if the thread failed. Errors for the user have no traceback."""
    if self.worker is not None and self.worker.failed:
      raise ActorFailed(self.worker.message(HostError, RunError, UsageError))

  def _main(self) -> None:
    with contextlib.suppress(Closed), jax.default_device(self.device):
      self._act()

  def _act(self) -> None:
    arrival = self._begin()
    self.actor.take_params()
    state = None if self._snapshot is None else self._snapshot.agent_state
    self._inference.begin(arrival.timestep, state)
    if isinstance(self._snapshot, ActorState):
      self._inference.go_on(self._snapshot.keys)
    while True:
      ids, action = self.actor.answer(arrival.env_id, arrival.timestep)
      if len(ids):
        action = np.asarray(action)
        self._counters.watch('inference')
        self._check.action(action)
        with self._timer:
          self._timer.ask(ids)
          self.pool.send(ids, action)
      arrival = self._receive()

  def _begin(self) -> Arrival:
    """Return the first arrival: of reset environments, or the timestep of a snapshot."""
    s = self._snapshot
    if isinstance(s, ActorState):
      if (restored := self._restore(s)) is not None:
        return restored
      s = self._snapshot = None
    if s is None:
      with self._timer:
        self._timer.ask(self._ids)
        self.pool.reset()
      return self._receive()
    n, episodes = self.pool.num_envs, self._counters.episodes
    self.pool.restore(s.env_state, self._counters.number * self._length)  # type: ignore[attr-defined]
    episodes.restore(s.episodes)
    timestep = jax.tree.map(np.asarray, s.timestep)
    return Arrival(self._ids, timestep, np.zeros(n, np.float32), np.zeros(n, bool), episodes.run_id)

  def _restore(self, state: ActorState) -> Arrival | None:
    """Return the arrival of a saved state; None if the environments do not return to it."""
    assert isinstance(self.actor, Lockstep), 'only lockstep is saved'
    steps = self._counters.number * self._length
    timestep = restore_pool(self._name, self.pool, state, steps)
    if timestep is None:
      self.actor.count_from(state.serial + 1)  # a gap: these unrolls do not continue the last ones
      return None
    self.actor.count_from(state.serial)
    n, episodes = self.pool.num_envs, self._counters.episodes
    episodes.restore(state.episodes)
    return Arrival(self._ids, timestep, np.zeros(n, np.float32), np.zeros(n, bool), episodes.run_id)

  def _take_state(
    self, agent_state: Any, timestep: TimeStep, serial: np.ndarray
  ) -> ActorState | None:
    episodes, keys = self._counters.episodes, self._inference.used_keys
    return take_state(self.pool, agent_state, timestep, episodes, serial, keys)

  def _take_snapshot(self, agent_state: Any, timestep: TimeStep, serial: np.ndarray) -> Snapshot:
    env_state = self.pool.state  # type: ignore[attr-defined]
    episodes = jax.device_put(self._counters.episodes.state(), host_device())
    return Snapshot(agent_state, jax.device_put(timestep, self.device), env_state, episodes)

  @property
  def silence(self) -> float:
    """Seconds since the oldest unanswered request to an environment."""
    return self._timer.silence

  def _receive(self) -> Arrival:
    if self._pipe.closed:
      raise Closed
    with self._timer:
      arrival = self.pool.recv()
    self._timer.answered(arrival.env_id)
    self._check(arrival)
    restarts = self._counters.episodes.add(arrival)
    if np.count_nonzero(restarts):
      self._counters.restarts += int(restarts.sum())
      self.actor.restart(arrival.env_id[restarts > 0])
    self._counters.watch('env')
    return arrival
