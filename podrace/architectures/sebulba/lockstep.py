"""An actor whose environments step together, and wait for each other at the end of an unroll."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.unrolls import Shipping
from podrace.envs.host.timesteps import EVERY, everyone, rows_of
from podrace.errors import HostError
from podrace.types import TimeStep


class Lockstep:
  """All environments at the same row, but for those that were restarted.

  A restarted environment begins its unroll anew. The others wait at their unroll's end until it has
  come to its own; the next unrolls begin together.
  """

  def __init__(
    self, name: str, index: int, length: int, inference: Inference, shipping: Shipping
  ) -> None:
    self._name, self._index, self._length = name, index, length
    self._inference, self._shipping = inference, shipping
    self._n = shipping.num_envs
    self._ids = everyone(self._n)
    self._row = np.zeros(self._n, np.int32)
    self._serial = np.full(self._n, shipping.number, np.int64)  # see `Unroll`
    self._versions = np.zeros(self._n, np.int64)  # of the parameters that the unroll began with
    self._uneven = False  # environments may be at different rows
    self._parked: dict[int, Any] = {}  # environment -> its timestep, at the end of its unroll

  def take_params(self) -> None:
    """Waits for a place for the unroll, and for the parameters that it is to be acted with."""
    shipping, inference = self._shipping, self._inference
    shipping.pipe.reserve(self._index)
    inference.use(*shipping.pipe.params(self._index, shipping.number, inference.device))
    jax.block_until_ready(inference.params)  # published while the learner still computes them
    shipping.watch('waiting')
    self._versions[:] = inference.version

  def restarted(self, ids: np.ndarray) -> None:
    """These environments begin anew; their steps since the unroll's beginning are lost."""
    self._shipping.dropped += int(self._row[ids].sum())
    self._row[ids] = 0
    self._serial[ids] += 1
    self._uneven = True

  def answer(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Environments, and actions for them: of all that arrived, but for those that wait."""
    whole = rows_of(ids, self._n) is EVERY
    if not whole and len(ids) > 1 and (ids[1:] < ids[:-1]).any():
      raise HostError(f'{self._name} returned {ids} where order was expected')
    if whole and self._even():
      return ids, self._together(timestep)
    return self._each(ids, timestep)

  def _even(self) -> bool:
    if self._uneven:
      self._uneven = bool(self._parked) or bool((self._row != self._row[0]).any())
    return not self._uneven

  def _together(self, timestep: TimeStep) -> Any:
    observation, t = timestep.observation, int(self._row[0])
    if t == self._length:
      observation = jax.device_put(observation, self._inference.device)
      parts, state = self._inference.finish(timestep, observation)
      shipping = self._shipping
      versions, serial = self._versions.copy(), self._serial.copy()
      shipping.pipe.put(shipping.unroll(parts, versions, serial, state, timestep))
      shipping.watch('waiting')
      self._serial += 1
      self.take_params()
      self._inference.key_unroll(shipping.number)
      self._row[:] = t = 0
    action = self._inference.step(timestep, observation, t)
    self._row += 1
    return action

  def _each(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Acts at each one's own row; parks those whose unroll is at its end."""
    over = self._row[ids] == self._length
    if over.any():
      ended, last = ids[over], jax.tree.map(lambda x: x[over], timestep)
      self._inference.store(last, self._row[ended], self._ids[ended])
      for i in np.flatnonzero(over):
        self._parked[int(ids[i])] = jax.tree.map(lambda x, i=i: x[i], timestep)
      if len(self._parked) == self._n:
        return self._ids, self._together(self._unpark())
      ids, timestep = ids[~over], jax.tree.map(lambda x: x[~over], timestep)
    if not len(ids):
      return ids, None
    action = self._inference.step_some(ids, timestep, self._row[ids], self._ids[ids])
    self._row[ids] += 1
    return ids, action

  def _unpark(self) -> TimeStep:
    """The timesteps of all, some of which have waited a while."""
    rows = [self._parked[i] for i in range(self._n)]
    self._parked.clear()
    return jax.tree.map(lambda *xs: np.stack(xs), *rows)
