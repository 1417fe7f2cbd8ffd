"""A group of environments of an actor thread: its pool, and the actor that answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace.architectures.sebulba.any_order import AnyOrder
from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.lockstep import Lockstep
from podrace.architectures.sebulba.pipe import Closed, Pipe, Snapshot
from podrace.architectures.sebulba.saved_actors import ActorState, restore_pool, take_state
from podrace.architectures.sebulba.unrolls import Stopwatch, UnrollCounters
from podrace.envs.host.answer_timer import AnswerTimer
from podrace.envs.host.checker import Checker
from podrace.envs.host.timesteps import everyone
from podrace.topology import host_device
from podrace.types import Array, Arrival, HostEnvironment, TimeStep

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram


class ActorGroup:
  """Receives timesteps of its environments, and answers them with the actor's actions.

  Args:
    acting: the settings and programs of the groups.
    index: of this group, counted in this process.
    pool: its environments. The group's thread closes it.
    pipe: to the learner.
    unroll_key: from the number of an unroll to its PRNG key.
    number: of the first unroll.
    snapshot: the state that the group continues from; None if it begins anew.
    stopwatch: of the thread.
  """

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    pool: HostEnvironment,
    pipe: Pipe,
    unroll_key: Callable[[int], Array],
    number: int,
    snapshot: Snapshot | ActorState | None,
    stopwatch: Stopwatch,
  ) -> None:
    self.index, self.pool, self._pipe = index, pool, pipe
    self._snapshot = snapshot
    n = pool.num_envs
    self._ids, self._length, self._name = everyone(n), acting.unroll_length, acting.spec.name
    self._check = Checker(acting.spec, n, acting.agent)
    self._timer = AnswerTimer(n)
    self._inference = Inference(acting, index, acting.device_of(index), unroll_key, number)
    self.counters = UnrollCounters(index, n, number, stopwatch)
    self._answer: tuple[np.ndarray, Any] = self._ids[:0], None  # actions that are not sent yet
    channel = self._inference, pipe, self.counters
    take_snapshot = (
      self._take_snapshot if acting.saves_actors
      else self._take_state if acting.keeps_states
      else None
    )  # fmt: skip
    self.actor: Lockstep | AnyOrder = (
      Lockstep(*channel, take_snapshot) if acting.ordered else AnyOrder(*channel)
    )

  @property
  def silence(self) -> float:
    """Seconds since the oldest unanswered request to an environment."""
    return self._timer.silence

  @property
  def is_between(self) -> bool:
    """Whether its unrolls have ended, and the next ones have not begun."""
    return isinstance(self.actor, Lockstep) and self.actor.is_between

  def reset(self) -> None:
    """Reset the environments, unless the group continues from a snapshot."""
    if self._snapshot is None:
      with self._timer:
        self._timer.ask(self._ids)
        self.pool.reset()

  def begin(self) -> None:
    """Answer the first arrival: of reset environments, or the timestep of a snapshot."""
    arrival = self._first_arrival()
    self.actor.take_params()
    state = None if self._snapshot is None else self._snapshot.agent_state
    self._inference.begin(arrival.timestep, state)
    if isinstance(self._snapshot, ActorState):
      self._inference.go_on(self._snapshot.keys)
    self._answer = self.actor.answer(arrival.env_id, arrival.timestep)
    self.send()

  def turn(self) -> None:
    """Wait for environments and act for them. Between unrolls it returns rather than wait.

    `send` waits for the actions.
    """
    if not self.is_between:
      arrival = self._receive()
      self._answer = self.actor.answer(arrival.env_id, arrival.timestep)
    if isinstance(self.actor, Lockstep) and self.actor.is_between and self.actor.may_begin():
      self._answer = self.actor.begin()

  def send(self) -> None:
    """Wait for the actions of the last turn, and send them to the environments."""
    ids, action = self._answer
    if len(ids):
      self._answer = ids[:0], None
      action = np.asarray(action)
      self.counters.watch('inference')
      self._check.action(action)
      with self._timer:
        self._timer.ask(ids)
        self.pool.send(ids, action)

  def _first_arrival(self) -> Arrival:
    timestep: TimeStep | None = None
    if isinstance(self._snapshot, ActorState):
      timestep = self._restore_state(self._snapshot)
      if timestep is None:  # the environments do not return to it
        self._snapshot = None
        self.reset()
    elif self._snapshot is not None:
      timestep = self._restore_snapshot(self._snapshot)
    if timestep is None or self._snapshot is None:
      return self._receive()
    n, episodes = self.pool.num_envs, self.counters.episodes
    episodes.restore(self._snapshot.episodes)
    return Arrival(self._ids, timestep, np.zeros(n, np.float32), np.zeros(n, bool), episodes.run_id)

  def _restore_snapshot(self, snapshot: Snapshot) -> TimeStep:
    self.pool.restore(snapshot.env_state, self.counters.number * self._length)  # type: ignore[attr-defined]
    return jax.tree.map(np.asarray, snapshot.timestep)

  def _restore_state(self, state: ActorState) -> TimeStep | None:
    assert isinstance(self.actor, Lockstep), 'only lockstep is saved'
    steps = self.counters.number * self._length
    with self._timer:
      self._timer.ask(self._ids)
      timestep = restore_pool(
        self._name, self.pool, state, steps, lambda: self._timer.ask(self._ids)
      )
    self._timer.answered(self._ids)
    # With new environments a gap: their unrolls do not continue the last ones.
    self.actor.count_from(state.serial if timestep is not None else state.serial + 1)
    return timestep

  def _take_state(
    self, agent_state: Any, timestep: TimeStep, serial: np.ndarray
  ) -> ActorState | None:
    episodes, keys = self.counters.episodes, self._inference.used_keys
    return take_state(self.pool, agent_state, timestep, episodes, serial, keys)

  def _take_snapshot(self, agent_state: Any, timestep: TimeStep, serial: np.ndarray) -> Snapshot:
    env_state = self.pool.state  # type: ignore[attr-defined]
    episodes = jax.device_put(self.counters.episodes.state(), host_device())
    device = self._inference.device
    return Snapshot(agent_state, jax.device_put(timestep, device), env_state, episodes)

  def _receive(self) -> Arrival:
    if self._pipe.closed:
      raise Closed
    with self._timer:
      arrival = self.pool.recv()
    self._timer.answered(arrival.env_id)
    self._check(arrival)
    restarts = self.counters.episodes.add(arrival)
    if np.count_nonzero(restarts):
      self.counters.restarts += int(restarts.sum())
      self.actor.restart(arrival.env_id[restarts > 0])
    self.counters.watch('env')
    return arrival
