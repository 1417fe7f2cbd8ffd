"""Numbers in the `info` of environments: summed by the workers, read for the log. Imports no JAX.

A worker adds to sums in the memory that it shares with the run. The run reads the sums when it
writes a line, without a message to the worker. A line has the mean of each number over the steps
since the line before.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

NAMES, SUMS, COUNTS = 'info_names', 'info_sums', 'info_counts'
MOST = 128  # names of a worker; later names are left out
BYTES = 8192  # size of a worker's names as JSON
FIELDS: list[tuple[str, str, list[int]]] = [
  (NAMES, '|u1', [BYTES]),
  (SUMS, '<f8', [MOST]),
  (COUNTS, '<f8', [MOST]),
]

# Arrays [num_envs, ...] of FIELDS. A worker uses one row.
Rows = Mapping[str, np.ndarray]


def no_rows(num_rows: int) -> dict[str, np.ndarray]:
  """Return empty rows."""
  return {name: np.zeros((num_rows, *shape), dtype) for name, dtype, shape in FIELDS}


InfoTotals = dict[str, tuple[float, float]]  # by name: sum, count


def numbers(info: Mapping[Any, Any], prefix: str = '') -> Iterator[tuple[str, float]]:
  """Yield the finite numbers of an info. Numbers in nested dicts are named OUTER/INNER."""
  for name, x in info.items():
    if isinstance(x, Mapping):
      yield from numbers(x, f'{prefix}{name}/')
    elif isinstance(x, bool | int | float | np.bool_ | np.number) and not isinstance(
      x, np.complexfloating
    ):
      with contextlib.suppress(OverflowError):  # of a whole number beyond 1e308
        if math.isfinite(value := float(x)):
          yield f'{prefix}{name}', value


class InfoAdder:
  """A worker's end: adds to a row, and to the sums that an earlier process left in it."""

  def __init__(self, rows: Rows, row: int) -> None:
    self._names, self._sums, self._counts = (rows[k][row] for k in (NAMES, SUMS, COUNTS))
    self._place = {name: i for i, name in enumerate(_names(self._names))}
    self._left_out: set[str] = set()

  def add(self, info: Mapping[Any, Any]) -> None:
    """Add the numbers of one step."""
    for name, value in numbers(info):
      place = self._place.get(name)
      if place is None and (place := self._new(name)) is None:
        continue
      self._sums[place] += value
      self._counts[place] += 1

  def _new(self, name: str) -> int | None:
    if name in self._left_out:
      return None
    text = json.dumps([*self._place, name]).encode()
    if len(self._place) == MOST or len(text) > BYTES:
      if len(self._left_out) < MOST:
        self._left_out.add(name)
      return None
    self._names[: len(text)] = np.frombuffer(text, np.uint8)
    self._place[name] = len(self._place)
    return self._place[name]


def _names(row: np.ndarray) -> list[str]:
  text = row.tobytes().rstrip(b'\0')
  try:
    return json.loads(text) if text else []
  except ValueError:  # the worker is writing it; the numbers are read the next time
    return []


class Infos:
  """The run's end: means over all pools of a kind of environment since the last read."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._open: list[Rows] = []
    self._closed: InfoTotals = {}
    self._before: InfoTotals = {}

  def open(self, rows: Rows) -> None:
    """Add a pool."""
    with self._lock:
      self._open.append(rows)

  def close(self, rows: Rows) -> None:
    """Remove a pool, and keep its sums."""
    with self._lock:
      if any(x is rows for x in self._open):
        self._open = [x for x in self._open if x is not rows]
        _add(self._closed, rows)

  def means(self) -> dict[str, float]:
    """Return the means since the last call, by their names in metrics.jsonl."""
    with self._lock:
      totals = dict(self._closed)
      for rows in self._open:
        _add(totals, rows)
      before, self._before = self._before, totals
    means = {}
    for name, (total, count) in totals.items():
      sum_before, count_before = before.get(name, (0.0, 0.0))
      if count > count_before:
        means[f'info_{name}'] = (total - sum_before) / (count - count_before)
    return means


def _add(totals: InfoTotals, rows: Rows) -> None:
  for row in np.flatnonzero(rows[COUNTS].any(1)):
    for i, name in enumerate(_names(rows[NAMES][row])):
      total, count = totals.get(name, (0.0, 0.0))
      totals[name] = total + float(rows[SUMS][row, i]), count + float(rows[COUNTS][row, i])
