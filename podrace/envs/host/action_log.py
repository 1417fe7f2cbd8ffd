"""The actions of a pool since its environments were last seeded, from which it can be restored.

Most libraries cannot save an environment. One that is deterministic returns to its state if it is
seeded as before and takes the same actions. So a pool keeps its actions, and seeds each environment
anew now and then, which bounds the number of actions to replay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrace.envs.host.spaces import action_bounds
from podrace.envs.host.timesteps import EVERY, rows_of
from podrace.errors import HostError

log = logging.getLogger('podrace.envs')

BYTES = 1 << 26  # most memory of a pool's actions
LEAST_ROWS, MOST_ROWS = 256, 1 << 16  # of one array of actions
NUMBERS = ('seed', 'seeding', 'resets', 'start', 'count')  # arrays [N] of a state, i64


def nth_seed(seed: int, number: int) -> int:
  """Return the seed (31 bits) of an environment's `number`-th seeding, of which the 0th is `seed`.

  It is SplitMix64's output function (Steele et al. 2014, "Fast splittable pseudorandom number
  generators", figure 16) of both numbers.
  """
  if not number:
    return seed
  mask = 2**64 - 1
  x = ((seed << 32) + number) * 0x9E3779B97F4A7C15 & mask
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
  x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
  return (x ^ x >> 31) >> 33


@dataclasses.dataclass(frozen=True)
class ActionRows:
  """Consecutive actions of all environments."""

  first: int  # number of the first row
  actions: np.ndarray  # [R, N, ...]

  @property
  def end(self) -> int:
    """Number of the row after the last one."""
    return self.first + len(self.actions)


class ActionLog:
  """Actions [row, N, ...] of a pool, and the seeds that they follow. For use by one thread.

  Args:
    label: the environment's name, for the log.
    seeds: [N] of the first seeding.
    space: of one environment's actions.

  Attributes:
    seed: [N] i64, the seed of the pool's first life.
    seeding: [N] i64, number of the last seeding; see `nth_seed`.
    resets: [N] i64, resets between the last seeding and row `start`.
    start: [N] i64, the first row to replay.
    count: [N] i64, rows so far, of which those from `start` on are kept.
    is_kept: whether all actions since `start` are there. If they take more than BYTES, none are
      kept from then on.
  """

  def __init__(self, label: str, seeds: np.ndarray, space: Any) -> None:
    n = len(seeds)
    self._label, self._n, self._space = label, n, space
    self.seed = seeds.astype(np.int64) % 2**31
    self.seeding, self.resets, self.start, self.count = np.zeros((4, n), np.int64)
    choices = getattr(space, 'n', None)
    is_small = choices is not None and np.ndim(choices) == 0 and choices <= 256
    self._shape = (n, *space.shape)
    self._dtype = np.dtype(np.uint8 if is_small else space.dtype)
    self._rows: list[ActionRows] = []
    self._row: int | None = 0  # of all environments; None: they differ
    self.is_kept = True

  def seeds(self) -> np.ndarray:
    """Return the seeds [N] i64 of the last seedings."""
    pairs = zip(self.seed.tolist(), self.seeding.tolist(), strict=True)
    return np.array([nth_seed(*pair) for pair in pairs], np.int64)

  def append(self, env_id: np.ndarray, action: np.ndarray) -> None:
    """Keep actions [b, ...] that are sent to environments `env_id` [b]."""
    if not len(env_id):
      return
    rows = rows_of(env_id, self._n)
    if self.is_kept:
      if rows is EVERY and self._row is not None:
        self._append_together(action)
      else:
        self._append_each(env_id, action)
    self.count[rows] += 1

  def _append_together(self, action: np.ndarray) -> None:
    assert self._row is not None
    if not self._rows or self._row >= self._rows[-1].end:
      self._grow(self._row)
    if self.is_kept:
      newest = self._rows[-1]
      newest.actions[self._row - newest.first] = action
    self._row += 1

  def _append_each(self, env_id: np.ndarray, action: np.ndarray) -> None:
    """As `append`, of environments at different rows: some were restarted."""
    self._row, row = None, self.count[env_id]
    while not self._rows or row.max() >= self._rows[-1].end:
      self._grow(self._rows[-1].end if self._rows else int(row.min()))
      if not self.is_kept:
        return
    for part in self._rows:
      here = (row >= part.first) & (row < part.end)
      part.actions[row[here] - part.first, env_id[here]] = action[here]

  def _grow(self, row: int) -> None:
    """Forget rows that no replay needs, and make room for row `row`."""
    self._rows = [r for r in self._rows if r.end > self.start.min()]
    kept = row - self._rows[0].first if self._rows else 0
    count = min(max(LEAST_ROWS, kept), MOST_ROWS)
    width = int(np.prod(self._shape)) * self._dtype.itemsize
    if (kept + count) * width > BYTES:
      self._rows, self.is_kept = [], False
      log.warning(
        '%s: the actions since its environments were last seeded take more than %d MiB, and are '
        'not kept any longer: a resumed run begins its environments anew',
        *(self._label, BYTES >> 20),
      )
      return
    self._rows.append(ActionRows(row, np.zeros((count, *self._shape), self._dtype)))

  def seeded(self, env_id: np.ndarray) -> np.ndarray:
    """Note that environments are seeded before their next row; returns their seeds [b] i64."""
    self.seeding[env_id] += 1
    self.resets[env_id] = 0
    self.start[env_id] = self.count[env_id]
    pairs = zip(self.seed[env_id].tolist(), self.seeding[env_id].tolist(), strict=True)
    return np.array([nth_seed(*pair) for pair in pairs], np.int64)

  def reset(self, env_id: np.ndarray) -> None:
    """Note that environments were reset before their next row, to a state without a past."""
    self.resets[env_id] += 1
    self.start[env_id] = self.count[env_id]

  def state(self) -> dict[str, np.ndarray]:
    """Return the log as arrays. The actions are views, of which no row changes."""
    numbers = {k: getattr(self, k).copy() for k in NUMBERS}
    end, needed = int(self.count.max()), int(self.start.min())
    parts = [r for r in self._rows if needed < r.end and r.first < end]
    first = parts[0].first if parts else end
    actions = {f'actions{i}': r.actions[: end - r.first] for i, r in enumerate(parts)}
    return {**numbers, 'first': np.int64(first), **actions}

  def restore(self, state: Mapping[str, np.ndarray]) -> None:
    """Continue the log that `state` returned.

    Raises:
      HostError: if it is not one of this pool, or contradicts itself. The log is unchanged.
    """
    numbers = {k: self._number(state, k) for k in NUMBERS}
    first = int(self._number(state, 'first', ()))
    parts = [state[k] for k in sorted((k for k in state if k[:7] == 'actions'), key=_index)]
    for x in parts:
      if x.dtype != self._dtype or x.shape[1:] != self._shape:
        raise self._unfit(f'actions {x.dtype}{list(x.shape)}', f'{self._dtype}{[-1, *self._shape]}')
    actions = np.concatenate([np.zeros((0, *self._shape), self._dtype), *parts])
    if actions.dtype.kind in 'iu':  # a library may hang at an action outside of its space
      low, high = action_bounds(self._space)
      if ((actions < low) | (actions > high)).any():
        raise self._unfit(f'actions {actions.min()} to {actions.max()}', f'{self._space}')
    start, count = numbers['start'], numbers['count']
    end = first + len(actions)
    if ((start < first) | (count < start) | (count > end)).any():
      raise self._unfit(f'rows {start.min()} to {count.max()}', f'{first} to {end}')
    for name, value in numbers.items():
      setattr(self, name, value)
    self._rows, self.is_kept = [ActionRows(first, actions)], True
    self._row = int(count[0]) if (count == count[0]).all() else None

  def _number(
    self, state: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...] | None = None
  ) -> np.ndarray:
    shape = (self._n,) if shape is None else shape
    x = state.get(name, np.zeros(0))
    if x.dtype != np.int64 or x.shape != shape or (x < 0).any() or (x >= 2**31).any():
      raise self._unfit(f'{name} {x.dtype}{list(x.shape)}', f'int64{list(shape)} from 0 to 2**31')
    return np.array(x)

  def _unfit(self, came: str, expected: str) -> HostError:
    return HostError(f'{self._label}: its saved state has {came}, expected {expected}')

  def rows(self) -> ActionRows:
    """Return the actions from the first `start` on, after `restore`."""
    (part,) = self._rows
    base = int(self.start.min())
    return ActionRows(base, part.actions[base - part.first :])

  def is_due(self, env_id: np.ndarray, steps: int, resets: int = 1 << 30) -> np.ndarray:
    """Return whether environments [b] have `steps` actions or `resets` resets to replay."""
    past = self.count[env_id] - self.start[env_id]
    return (past >= steps) | (self.resets[env_id] >= resets)


def _index(name: str) -> int:
  return int(name[7:]) if name[7:].isdecimal() else -1
