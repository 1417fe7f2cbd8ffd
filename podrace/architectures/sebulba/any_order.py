"""An actor whose environments return in any order, or come and go."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.unrolls import Shipping
from podrace.types import TimeStep


class AnyOrder:
  """Acts for those that arrive, with the newest parameters.

  A trajectory is made of the N unrolls that were finished first. Each environment has several
  columns: its open unroll, and one that waits until there are N.

  Args:
    index: of the thread.
    first_env: the number of its first environment, over all.
    columns: of all environments together.
  """

  def __init__(
    self,
    index: int,
    first_env: int,
    length: int,
    columns: int,
    inference: Inference,
    shipping: Shipping,
  ) -> None:
    self._index, self._first_env, self._length = index, first_env, length
    self._inference, self._shipping = inference, shipping
    n = self._n = shipping.num_envs
    self._row = np.zeros(n, np.int32)
    self._column = np.arange(n, dtype=np.int32)
    self._serial = np.full(n, shipping.number, np.int64)  # of unrolls under way; see `Unroll`
    self._versions = np.zeros(columns, np.int64)  # of the parameters that columns began with
    self._member = np.resize(np.arange(n, dtype=np.int32), columns)  # the environment of a column
    self._serials = np.zeros(columns, np.int64)  # of finished unrolls
    self._free = collections.deque(range(n, columns))
    self._finished: collections.deque[int] = collections.deque()  # columns, oldest first

  def take_params(self) -> None:
    """Takes the newest parameters, and does not wait."""
    self._take_newest()
    self._versions[:] = self._inference.version

  def _take_newest(self) -> None:
    shipping, device = self._shipping, self._inference.device
    version, params = shipping.pipe.params(self._index, shipping.number, device)
    if version != self._inference.version:
      self._inference.use(version, params)
    shipping.watch('waiting')

  def restarted(self, ids: np.ndarray) -> None:
    """These environments begin anew; their steps since the unroll's beginning are lost."""
    self._shipping.dropped += int(self._row[ids].sum())
    self._row[ids] = 0
    self._serial[ids] += 1

  def answer(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Actions for all that arrived; an environment whose unroll ends begins another."""
    if not len(ids):
      return ids, None
    self._take_newest()
    over = self._row[ids] == self._length
    if over.any():
      done = ids[over]
      last = jax.tree.map(lambda x: x[over], timestep)
      self._inference.store(last, self._row[done], self._column[done])
      self._finished.extend(self._column[done].tolist())
      self._serials[self._column[done]] = self._serial[done]
      self._serial[done] += 1
      self._row[done] = 0
      while len(self._finished) >= self._n and not self._ship_finished():
        pass
      for env in done:
        self._column[env] = self._free.popleft()
        self._member[self._column[env]] = env
    self._versions[self._column[ids[self._row[ids] == 0]]] = self._inference.version
    action = self._inference.step_some(ids, timestep, self._row[ids], self._column[ids])
    self._row[ids] += 1
    return ids, action

  def _ship_finished(self) -> bool:
    """A trajectory of the N oldest finished unrolls; False if some had to be dropped."""
    shipping = self._shipping
    shipping.watch('inference')
    oldest = shipping.pipe.reserve(self._index)
    shipping.watch('waiting')
    late = [c for c in self._finished if self._versions[c] < oldest]
    if late:
      self._finished = collections.deque(c for c in self._finished if c not in late)
      self._free.extend(late)
      shipping.dropped += len(late) * self._length
      shipping.pipe.release(self._index)
      return False
    columns = np.array([self._finished.popleft() for _ in range(self._n)], np.int32)
    members = self._first_env + self._member[columns]
    parts = self._inference.take(columns, members.astype(np.int32))
    self._free.extend(columns.tolist())
    unroll = shipping.unroll(parts, self._versions[columns], self._serials[columns])
    shipping.pipe.put(unroll)
    shipping.watch('waiting')
    return True
