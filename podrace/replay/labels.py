"""Labelled windows: the tables of an agent that gets its targets from a stage.

QT-Opt (Kalashnikov et al. 2018, arXiv 1806.10293) has Bellman updaters, which draw transitions from
an online and an offline buffer, compute the targets, and write the labelled transitions to a train
buffer. Here these are tables: TABLE has the windows of environments that act, OFFLINE those of a
log, TRAIN the labelled ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from podrace.replay.layout import Columns, Layout, is_single
from podrace.replay.windows import Windows

TABLE, OFFLINE, TRAIN = 'windows', 'offline', 'train'
# Further columns of TRAIN: the version of the parameters that labelled the window, and whether the
# window is of the log.
VERSION, LOGGED = 'version', 'logged'
LEAST = 100  # the limiter counts at least one of this number of draws of an online window


@dataclasses.dataclass(frozen=True)
class Mix:
  """The rows of a batch of labels that are from the online table, and from the offline table.

  Batches are numbered, so that whole rows make up the share exactly over many batches.
  """

  windows: Windows

  @property
  def acting(self) -> float:
    """The share of environments that act."""
    p, q = self.windows.logged
    return (q - p) / q

  def part(self, name: str) -> float:
    """Return the share of environments that a table has the windows of."""
    return self.acting if name == TABLE else 1 - self.acting

  @property
  def tables(self) -> tuple[str, ...]:
    """The tables that have windows."""
    return (TABLE,) * (self.acting > 0) + (OFFLINE,) * (self.acting < 1)

  def online(self, size: int, batch: int, steps: float) -> int:
    """Return the rows of a batch of `size` that are online, after `steps` environment steps."""
    if 0 < self.acting < 1:
      return _rows(self.share(steps), size, batch)
    return size if self.acting else 0

  def share(self, steps: float) -> float:
    """Return the share of online windows in labels, after `steps` environment steps."""
    if self.windows.buffer.online_share is None:
      return self.acting
    return float(self.windows.buffer.online(np.float64(steps)))

  @property
  def period(self) -> int:
    """The online draws for each of which the limiter of the online table counts one.

    The limiter keeps `samples_per_insert` by counting draws in proportion to the environments that
    act, whatever the share. It counts so few of them that no batch has fewer. The rest are peeks.
    """
    b = self.windows.buffer
    shares = [x for x in (b.online_share, b.online_share_end) if x is not None]
    least = min(shares, default=self.acting)
    return min(max(1, math.ceil(self.acting / max(least, 1e-9))), LEAST)

  def counted(self, size: int, batch: int) -> int:
    """Return the rows of a batch of `size` that the limiter of the online table counts."""
    return _rows(self.acting / self.period, size, batch)


def _rows(share: float, size: int, batch: int) -> int:
  """Return the whole rows of the batch-th batch, which add up to `share` over all batches."""
  return math.floor((batch + 1) * size * share) - math.floor(batch * size * share)


def is_timeless(name: str) -> bool:
  """Return whether a column of a labelled window has one value per window."""
  return is_single(name) or name in ('env_id', 'source', 'number', VERSION, LOGGED)


def without_ids(data: Columns) -> tuple[np.ndarray, Columns]:
  """Return the versions [n] that labelled windows, and their columns for the learner."""
  ids = ('source', 'number', VERSION, LOGGED)
  weight = np.ones(len(data[VERSION]), np.float32)
  return data[VERSION], {k: x for k, x in data.items() if k not in ids} | {'weight': weight}


class LabelWriter:
  """Writes labelled windows as items of TRAIN. For use by one thread.

  Args:
    layout: columns of the windows.
    table: the table TRAIN, or a client of it.
    batch_size: the largest number of windows of a call.
    make_writer: makes a writer for `table`. Its argument is the number of history rows to keep.
  """

  def __init__(
    self, layout: Layout, table: Any, batch_size: int, make_writer: Callable[[int], Any]
  ) -> None:
    w = layout.windows
    self._table, self._writer = table, make_writer(batch_size * (w.lookback + w.length + 1))

  def write(self, data: Columns) -> None:
    """Insert items of columns [n, ...], in order."""
    n = len(data[VERSION])
    rows = {k: 1 if is_timeless(k) else x.shape[1] for k, x in data.items()}
    self._writer.extend(
      {k: x if is_timeless(k) else x.reshape(-1, *x.shape[2:]) for k, x in data.items()}
    )
    history = self._writer.history
    for back in range(n, 0, -1):
      self._writer.create_item(
        self._table, 1.0,
        {
          k: column[-back] if is_timeless(k) else column[-back * r : (1 - back) * r or None]
          for (k, column), r in zip(history.items(), rows.values(), strict=True)
        },
      )  # fmt: skip
