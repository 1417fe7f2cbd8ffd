"""What each environment goes through without a gap, and the windows made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from podrace.replay.layout import Columns, Layout, Rows
from podrace.types import Trajectory


class Stream:
  """What one environment has gone through without a gap."""

  def __init__(self, writer: Any) -> None:
    self.writer = writer
    self.serial = -2  # of its newest unroll; the next one goes on where that ended
    self.timesteps = 0


class Streams:
  """Writes unrolls, and makes items of all their windows; for one thread.

  Args:
    layout: of the trajectories.
    table: where the items go; of `podrace.tables`, or a client of a service's.
    make_writer: a writer for it that keeps so many rows of history.
  """

  def __init__(self, layout: Layout, table: Any, make_writer: Callable[[int], Any]) -> None:
    w = layout.windows
    self.highest = 1.0  # priority so far, which new windows get if acting leaves none
    self.by_env: dict[int, Stream] = {}
    self._layout, self._windows, self._table = layout, w, table
    history = w.length + w.unroll_length + w.lookback + 1
    self._make_writer = lambda: make_writer(history)
    self._rows = jax.jit(layout.rows)
    self._priority: Any = None
    if w.prioritised and w.initial_priority is not None:
      initial = w.initial_priority
      self._priority = jax.jit(lambda data: initial(layout.trajectory(data)))

  def stream(self, env: int) -> Stream:
    """The stream of an environment."""
    if env not in self.by_env:
      self.by_env[env] = Stream(self._make_writer())
    return self.by_env[env]

  def add(self, trajectory: Trajectory, serial: np.ndarray) -> None:
    """An unroll [T+1, B]; `serial` [B]: of each environment's unrolls, which one it is.

    Where one is missing, a stream begins anew, and no window goes over the gap.
    """
    rows: Rows = jax.tree.map(np.asarray, self._rows(trajectory))
    windows: list[tuple[Any, Columns]] = []  # writers, and what each new item is made of
    there: set[int] = set()
    for b, env in enumerate(rows.env_id.tolist()):
      if env in there:  # its history goes on, so what is to be made of it is made before
        self._create(windows)
        windows, there = [], set()
      there.add(env)
      stream = self.stream(env)
      for back in self._extend(stream, rows, b, int(serial[b])):
        windows.append((stream.writer, self._slices(stream, rows, back)))
    self._create(windows)

  def _extend(self, stream: Stream, rows: Rows, b: int, serial: int) -> range:
    """Appends column b; how many timesteps ago the new windows begin.

    Row r of a stream has timestep r and the output before it, which the first row has not. There
    are `lookback` more frames, in front.
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

  def _slices(self, stream: Stream, rows: Rows, back: int) -> Columns:
    """The window that begins `back` timesteps before the newest one, of a stream's columns."""
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

  def _create(self, windows: Sequence[tuple[Any, Columns]]) -> None:
    for (writer, slices), priority in zip(windows, self._priorities(windows), strict=True):
      writer.create_item(self._table, priority, slices)

  def _priorities(self, windows: Sequence[tuple[Any, Columns]]) -> Any:
    """Of new windows: by what acting has left, or else the highest so far."""
    if not windows or self._priority is None:
      return [self.highest] * len(windows)
    small = [
      writer.read({k: s for k, s in slices.items() if not k.startswith(('observation', 'stacks'))})
      for writer, slices in windows
    ]
    # To a power of two, so that few programs are compiled.
    small += [small[-1]] * ((1 << (len(small) - 1).bit_length()) - len(small))
    data = {k: np.stack([x[k] for x in small]) for k in small[0]}
    return np.asarray(self._priority(data), np.float64)[: len(windows)].tolist()
