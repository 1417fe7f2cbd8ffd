"""An actor for environments that return in any order, or connect and disconnect."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.pipe import Pipe
from podrace.architectures.sebulba.unrolls import UnrollCounters, move_parts
from podrace.types import TimeStep


class AnyOrder:
  """Acts for the environments that arrive, with the newest parameters.

  A trajectory consists of the N unrolls that were finished first. An environment has more than one
  column: its open unroll, and a finished one that waits until there are N.
  """

  def __init__(self, inference: Inference, pipe: Pipe, counters: UnrollCounters) -> None:
    self._inference, self._pipe, self._counters = inference, pipe, counters
    self._acting, self._index = inference.acting, inference.index  # of the group
    self._length = inference.length
    n, columns = inference.num_envs, inference.num_envs * inference.acting.columns
    self._n = n
    self._row = np.zeros(n, np.int32)
    self._column = np.arange(n, dtype=np.int32)
    self._serial = np.full(n, counters.number, np.int64)  # of unrolls under way; see `Unroll`
    self._versions = np.zeros(columns, np.int64)  # of the parameters at each column's first step
    self._member = np.resize(np.arange(n, dtype=np.int32), columns)  # the environment of a column
    self._serials = np.zeros(columns, np.int64)  # of finished unrolls
    self._free = collections.deque(range(n, columns))
    self._finished: collections.deque[int] = collections.deque()  # columns, oldest first

  def take_params(self) -> None:
    """Take the newest parameters, without waiting."""
    self._take_newest()
    self._versions[:] = self._inference.version

  def _take_newest(self) -> None:
    number, device = self._counters.number, self._inference.device
    version, params = self._pipe.params(self._index, number, device)
    if version != self._inference.version:
      self._inference.use(version, params)
    self._counters.watch('waiting')

  def restart(self, ids: np.ndarray) -> None:
    """Begin the unrolls of environments `ids` anew; their steps so far are lost."""
    self._counters.dropped += int(self._row[ids].sum())
    self._row[ids] = 0
    self._serial[ids] += 1

  def answer(self, ids: np.ndarray, timestep: TimeStep) -> tuple[np.ndarray, Any]:
    """Return actions for all that arrived. An environment at its unroll's end begins the next."""
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
      while len(self._finished) >= self._n and not self._put_finished():
        pass
      for env in done:
        self._column[env] = self._free.popleft()
        self._member[self._column[env]] = env
    self._versions[self._column[ids[self._row[ids] == 0]]] = self._inference.version
    action = self._inference.step_some(ids, timestep, self._row[ids], self._column[ids])
    self._row[ids] += 1
    return ids, action

  def _put_finished(self) -> bool:
    """Send a trajectory of the N oldest finished unrolls; returns False if some were too old."""
    counters = self._counters
    counters.watch('inference')
    oldest = self._pipe.reserve(self._index)
    counters.watch('waiting')
    late = [c for c in self._finished if self._versions[c] < oldest]
    if late:
      self._finished = collections.deque(c for c in self._finished if c not in late)
      self._free.extend(late)
      counters.dropped += len(late) * self._length
      self._pipe.release(self._index)
      return False
    columns = np.array([self._finished.popleft() for _ in range(self._n)], np.int32)
    members = self._acting.first_env(self._index) + self._member[columns]
    parts = self._inference.take(columns, members.astype(np.int32))
    self._free.extend(columns.tolist())
    parts = move_parts(parts, self._inference.device, self._acting.destinations)
    self._pipe.put(counters.finish(parts, self._versions[columns], self._serials[columns]))
    counters.watch('waiting')
    return True
