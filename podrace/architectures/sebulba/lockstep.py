"""An actor for environments that step together and wait for each other after an unroll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.pipe import Pipe, Snapshot
from podrace.architectures.sebulba.saved_actors import ActorState
from podrace.architectures.sebulba.unrolls import UnrollCounters, move_parts
from podrace.envs.host.timesteps import EVERY, everyone, rows_of
from podrace.errors import HostError
from podrace.types import TimeStep

TakeSnapshot = Callable[[Any, TimeStep, np.ndarray], Snapshot | ActorState | None]


class Lockstep:
  """Acts in environments that are all at the same row, except after a restart.

  A restarted environment begins its unroll anew. The rest wait at the end of their unroll until the
  restarted environment reaches its own end. The next unrolls begin together, in two calls: `answer`
  ends the old ones, and `begin` may wait for parameters.

  Args:
    take_snapshot: from the agent's state, the timestep to answer next and the serials of the next
      unrolls to the group's snapshot; None if environments cannot give their state.
  """

  def __init__(
    self,
    inference: Inference,
    pipe: Pipe,
    counters: UnrollCounters,
    take_snapshot: TakeSnapshot | None,
  ) -> None:
    self._inference, self._pipe, self._counters = inference, pipe, counters
    self._acting, self._take_snapshot = inference.acting, take_snapshot
    self._n, self._length = inference.num_envs, inference.length
    self._ids = everyone(self._n)
    self._row = np.zeros(self._n, np.int32)
    self._serial = np.full(self._n, counters.number, np.int64)  # see `Unroll`
    self._versions = np.zeros(self._n, np.int64)  # of the parameters at each unroll's first step
    self._uneven = False  # environments may be at different rows
    self._parked: dict[int, Any] = {}  # environment -> its timestep at the end of its unroll
    self._last: tuple[TimeStep, Any] | None = None  # of the unrolls that ended, and its observation

  @property
  def is_between(self) -> bool:
    """Whether unrolls have ended and `begin` is due."""
    return self._last is not None

  def may_begin(self) -> bool:
    """Return whether `begin` would not wait."""
    return self._pipe.may_begin(self._inference.index, self._counters.number)

  def count_from(self, serial: np.ndarray) -> None:
    """Number the next unrolls of environments from `serial` [N] on."""
    self._serial = serial.copy()

  def take_params(self) -> None:
    """Wait for a place for the unroll and for the parameters that it is acted with."""
    inference = self._inference
    self._pipe.reserve(inference.index)
    inference.use(*self._pipe.params(inference.index, self._counters.number, inference.device))
    jax.block_until_ready(inference.params)  # published while the learner still computes them
    self._counters.watch('waiting')
    self._versions[:] = inference.version

  def restart(self, ids: np.ndarray) -> None:
    """Begin the unrolls of environments `ids` anew; their steps so far are lost."""
    self._counters.dropped += int(self._row[ids].sum())
    self._row[ids] = 0
    self._serial[ids] += 1
    self._uneven = True

  def answer(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Return environments and their actions: all arrivals except environments that wait.

    At the end of the unrolls all environments wait for `begin`.
    """
    whole = rows_of(ids, self._n) is EVERY
    if not whole and len(ids) > 1 and (ids[1:] < ids[:-1]).any():
      raise HostError(f'{self._acting.spec.name} returned {ids} where order was expected')
    if not (whole and self._is_even()):
      return self._act_each(ids, timestep)
    if self._row[0] == self._length:
      self._end(timestep)
      return self._ids[:0], None
    return ids, self._act_together(timestep, timestep.observation)

  def begin(self) -> tuple[np.ndarray, Any]:
    """Begin the next unrolls; returns all environments and their actions."""
    assert self._last is not None, 'begin within an unroll'
    timestep, observation = self._last
    self._last = None
    self._serial += 1
    self.take_params()
    self._inference.key_unroll(self._counters.number)
    self._row[:] = 0
    return self._ids, self._act_together(timestep, observation)

  def _is_even(self) -> bool:
    if self._uneven:
      self._uneven = bool(self._parked) or bool((self._row != self._row[0]).any())
    return not self._uneven

  def _act_together(self, timestep: TimeStep, observation: Any) -> Any:
    action = self._inference.step(timestep, observation, int(self._row[0]))
    self._row += 1
    return action

  def _end(self, timestep: TimeStep) -> None:
    """End the unrolls with this timestep, which also begins the next ones."""
    observation = jax.device_put(timestep.observation, self._inference.device)
    self._put(*self._inference.finish(timestep, observation), timestep)
    self._last = timestep, observation

  def _put(self, parts: Any, agent_state: Any, timestep: TimeStep) -> None:
    """Send a finished unroll to the learner."""
    take = self._take_snapshot
    snapshot = take(agent_state, timestep, self._serial + 1) if take else None
    parts = move_parts(parts, self._inference.device, self._acting.destinations)
    versions, serial = self._versions.copy(), self._serial.copy()
    self._pipe.put(self._counters.finish(parts, versions, serial, snapshot))
    self._counters.watch('waiting')

  def _act_each(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Act at each environment's own row; park environments that are at the end of their unroll."""
    over = self._row[ids] == self._length
    if over.any():
      ended, last = ids[over], jax.tree.map(lambda x: x[over], timestep)
      self._inference.store(last, self._row[ended], self._ids[ended])
      for i in np.flatnonzero(over):
        # A copy, as the pool may write to its memory when it has restarted an environment.
        self._parked[int(ids[i])] = jax.tree.map(lambda x, i=i: np.array(x[i]), timestep)
      if len(self._parked) == self._n:
        self._end(self._unpark())
        return self._ids[:0], None
      ids, timestep = ids[~over], jax.tree.map(lambda x: x[~over], timestep)
    if not len(ids):
      return ids, None
    action = self._inference.step_some(ids, timestep, self._row[ids], self._ids[ids])
    self._row[ids] += 1
    return ids, action

  def _unpark(self) -> TimeStep:
    """Return the timesteps of all environments, which are all parked."""
    rows = [self._parked[i] for i in range(self._n)]
    self._parked.clear()
    return jax.tree.map(lambda *xs: np.stack(xs), *rows)
