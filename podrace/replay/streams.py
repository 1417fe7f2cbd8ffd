"""Streams of experience, one per environment, and the windows made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podrace.envs.logs.share import is_logged
from podrace.replay.layout import Columns, Layout, Rows
from podrace.types import FIRST, Trajectory


class Stream:
  """The experience of one environment without gaps."""

  def __init__(self, writer: Any, table: Any) -> None:
    self.writer, self.table = writer, table
    self.serial = -2  # number of the newest unroll; the next unroll continues it
    self.timesteps = 0


class NewWindow(NamedTuple):
  """A window that becomes an item."""

  stream: Stream
  slices: Columns
  sampled: bool  # False: its priority is 0


class Streams:
  """Writer of unrolls, which makes a table item of each window. For use by one thread.

  Args:
    layout: columns of the trajectories.
    table: the table for the items, from `podrace.tables`, or a client of a remote table.
    make_writer: makes a writer for `table`. Its argument is the number of history rows to keep.
    offline: the table for the items of environments that replay a log. None: it is `table`.
  """

  def __init__(
    self, layout: Layout, table: Any, make_writer: Callable[[int], Any], offline: Any = None
  ) -> None:
    w = layout.windows
    self.highest = 1.0  # highest priority so far; new windows get it if acting computes none
    self._by_env: dict[int, Stream] = {}
    self._windows, self._table, self._offline = w, table, offline
    history = w.length + w.unroll_length + w.lookback + 1
    self._make_writer = lambda: make_writer(history)
    self._rows = jax.jit(layout.rows)
    self._priority: Any = None
    if w.prioritised and w.initial_priority is not None:
      initial = w.initial_priority
      self._priority = jax.jit(lambda data: initial(layout.trajectory(data)))

  def stream(self, env: int) -> Stream:
    """Return the stream of an environment, which is made if there is none."""
    if env not in self._by_env:
      is_offline = self._offline is not None and is_logged(env, self._windows.logged)
      table = self._offline if is_offline else self._table
      self._by_env[env] = Stream(self._make_writer(), table)
    return self._by_env[env]

  def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
    """Return a function for any thread that reads the rows that new windows may still include."""
    numbers, readers = {}, {}
    for env, stream in self._by_env.items():
      numbers[f'{env}'] = np.array([stream.serial, stream.timesteps])
      columns = stream.writer.history.items()
      readers[env] = stream.writer.reader({k: c[:] for k, c in columns})

    def rows() -> dict[str, np.ndarray]:
      return numbers | {f'{env}/{k}': x for env, read in readers.items() for k, x in read().items()}

    return rows

  def restore(self, saved: dict[str, np.ndarray]) -> None:
    """Continue the streams of a snapshot. There are none yet."""
    for name, numbers in saved.items():
      if '/' in name:
        continue
      stream = self.stream(int(name))
      stream.serial, stream.timesteps = numbers.tolist()
      prefix = f'{name}/'
      rows = {k.removeprefix(prefix): x for k, x in saved.items() if k.startswith(prefix)}
      stream.writer.extend(rows)

  def add(self, trajectory: Trajectory, serial: np.ndarray) -> None:
    """Store an unroll, and make items of the windows that it completes.

    If an unroll is missing, the stream begins again, so no window spans the gap.

    Args:
      trajectory: the unroll [T+1, B].
      serial: [B] number of the unroll among the unrolls of its environment.
    """
    rows: Rows = jax.tree.map(np.asarray, self._rows(trajectory))
    windows: list[NewWindow] = []
    there: set[int] = set()
    for b, env in enumerate(rows.env_id.tolist()):
      if env in there:  # make its items before its history moves on
        self._create(windows)
        windows, there = [], set()
      there.add(env)
      stream = self.stream(env)
      starts = self._extend(stream, rows, b, int(serial[b]))
      for back, sampled in zip(starts, self._sampled(stream, starts), strict=True):
        windows.append(NewWindow(stream, self._slices(stream, rows, back), sampled))
    self._create(windows)

  def _extend(self, stream: Stream, rows: Rows, b: int, serial: int) -> range:
    """Append the rows of environment `b` to its stream.

    Row r of a stream has timestep r and the output before it. The first row has no such output
    and repeats the next one. Columns of frames have `lookback` more rows in front.

    Args:
      stream: the stream of the environment.
      rows: the unroll of all environments.
      b: position of the environment in the unroll.
      serial: number of the unroll among the unrolls of the environment.

    Returns:
      The starts of the new windows, in timesteps before the newest timestep.
    """
    w, begins = self._windows, serial != stream.serial + 1
    if begins:
      stream.writer.end_episode()
      stream.timesteps = 1
    stream.serial = serial
    row, frame = (0, 0) if begins else (1, w.lookback + 1)
    acted = {k: x[:, b] for k, x in rows.acted.items()}
    if begins:
      acted = {k: np.concatenate([x[:1], x]) for k, x in acted.items()}
    stream.writer.extend(
      {k: x[row:, b] for k, x in rows.timed.items()}
      | acted
      | {k: x[frame:, b] for k, x in rows.frames.items()}
      | {'env_id': np.repeat(rows.env_id[b], w.unroll_length + begins)}
      | {k: x[b : b + 1] for k, x in rows.state.items()}
    )
    newest = stream.timesteps + w.unroll_length - 1
    first = max(stream.timesteps - w.length, 0)
    first = -(-first // w.period) * w.period
    stream.timesteps = newest + 1
    return range(newest - first, w.length - 1, -w.period)

  def _sampled(self, stream: Stream, starts: range) -> list[bool]:
    """Return whether the window at each start may be sampled."""
    if not self._windows.at_first or not starts:
      return [True] * len(starts)
    history = stream.writer.history['step_type'][-starts[0] - 1 :]
    step_type = stream.writer.read({'step_type': history})['step_type']
    return [bool(step_type[-back - 1] == FIRST) for back in starts]

  def _slices(self, stream: Stream, rows: Rows, back: int) -> Columns:
    """Return the column slices of the window that begins `back` timesteps before the newest."""
    w, h = self._windows, stream.writer.history
    end = w.length - back or None
    steps = stream.timesteps - 1
    unroll = (steps - back) // w.unroll_length - steps // w.unroll_length
    return {
      **{k: h[k][-back - 1 : end] for k in rows.timed},
      **{k: h[k][-back:end] for k in rows.acted},
      **{k: h[k][-back - 1 - w.lookback : end] for k in rows.frames},
      **{k: h[k][unroll] for k in rows.state},
      'env_id': h['env_id'][-1],
    }

  def _create(self, windows: Sequence[NewWindow]) -> None:
    for window, priority in zip(windows, self._priorities(windows), strict=True):
      stream = window.stream
      stream.writer.create_item(stream.table, priority if window.sampled else 0.0, window.slices)

  def _priorities(self, windows: Sequence[NewWindow]) -> Any:
    """Compute the priorities of new windows. The default is the highest priority so far."""
    if not windows or self._priority is None:
      return [self.highest] * len(windows)
    small = [
      w.stream.writer.read(
        {k: s for k, s in w.slices.items() if not k.startswith(('observation', 'stacks'))}
      )
      for w in windows
    ]
    # Padding to a power of two limits the number of compiled programs.
    small += [small[-1]] * ((1 << (len(small) - 1).bit_length()) - len(small))
    data = {k: np.stack([x[k] for x in small]) for k in small[0]}
    return np.asarray(self._priority(data), np.float64)[: len(windows)].tolist()
