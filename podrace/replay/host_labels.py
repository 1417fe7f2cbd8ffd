"""The stage of a run in one process: it labels windows of replay on the host, on a device.

The thread of replay serves its requests in their order, each with the parameters that it is given.
So labels do not depend on timing.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from podrace import tables
from podrace.replay.labels import LOGGED, OFFLINE, TABLE, TRAIN, VERSION, LabelWriter, Mix
from podrace.replay.labels import without_ids as plain
from podrace.replay.layout import Columns, Layout
from podrace.replay.refresh import Refresh
from podrace.topology import everyones, share


class LabelRequest(NamedTuple):
  """A request for a batch of labels."""

  params: Any
  version: int  # of the parameters: the update that they were made for
  key: Any  # for the choices of the agent
  steps: int  # environment steps so far, for the share of online windows


class Train(NamedTuple):
  """The table of labelled windows, and its writer."""

  table: tables.Table
  writer: LabelWriter


@dataclasses.dataclass
class Learned:
  """Sums over the labels that were learned from, since they were last read."""

  labels: int = 0
  online: int = 0
  age_sum: int = 0  # in updates
  age_max: int = 0


class HostLabels:
  """The table TRAIN of a process, and the stage that fills it. For the thread of replay.

  Args:
    agent: its `refresh` computes the labels.
    layout: columns of the windows.
    device: the device on which they are computed.
  """

  def __init__(self, agent: Any, layout: Layout, device: jax.Device) -> None:
    self._layout, self._device = layout, device
    self.size = share(layout.windows.buffer.batch_size)
    self._mix = Mix(layout.windows)
    self._refresh: Any = jax.jit(Refresh(agent, layout))
    self.learned = Learned()
    self._read = (time.monotonic(), 0)  # when, and the labels by then
    self.train: Any = None

  def make_table(self, store: tables.ChunkStore) -> Train:
    """Return the empty table in a store, to be used as `train`."""
    most = 2**30  # the requests bound it
    table = tables.Table(
      TRAIN,
      store,
      sampler=tables.fifo(),
      remover=tables.fifo(),
      rate_limiter=tables.queue(most),
      max_size=most,
      max_times_sampled=1,
    )
    make_writer = functools.partial(tables.Writer, store)
    return Train(table, LabelWriter(self._layout, table, self.size, make_writer))

  @property
  def batches(self) -> int:
    """The batches of labels that were not learned from."""
    return len(self.train.table) // self.size

  def label(self, sources: Mapping[str, tables.Table], request: LabelRequest) -> None:
    """Label a batch of windows of the sources, and insert it."""
    number = self.train.table.contents.counts.inserts // self.size
    online = self._mix.online(self.size, number, request.steps)
    rows = {TABLE: online, OFFLINE: self.size - online}
    drawn = [sources[name].sample(n).data for name, n in rows.items() if n]
    data = {k: np.concatenate([part[k] for part in drawn]) for k in drawn[0]}
    params, key = jax.device_put((local(request.params), request.key), self._device)
    fresh = self._refresh(params, data, key)
    ids = {
      VERSION: np.full(self.size, request.version),
      LOGGED: np.repeat([False, True], list(rows.values())),
    }
    self.train.writer.write(data | {k: np.asarray(x) for k, x in fresh.items()} | ids)

  def go_on(self, learned: Learned) -> None:
    """Count on from restored sums, with the table in `train`."""
    self.learned = learned
    self._read = time.monotonic(), self.train.table.contents.counts.inserts

  def draw(self, update: int) -> tuple[np.ndarray, Columns]:
    """Return the keys and the columns of the next batch, for an update."""
    samples = self.train.table.sample(self.size)
    version, rows = plain(samples.data)
    ages, sums = update - version, self.learned
    sums.labels += len(ages)
    sums.online += int((~samples.data[LOGGED]).sum())
    sums.age_sum += int(ages.sum())
    sums.age_max = max(sums.age_max, int(ages.max()))
    return samples.key, rows

  def metrics(self) -> dict[str, float]:
    """Return the rate, age and share of labels since the last call, over all processes."""
    sums, self.learned = self.learned, Learned()
    (before, had), counts = self._read, self.train.table.contents.counts
    self._read = time.monotonic(), counts.inserts
    made = max(counts.inserts - had, 0)
    rows = everyones([made, counts.inserts, counts.samples, *dataclasses.astuple(sums)])
    made, inserts, samples, learned, online, age_sum, _ = rows.sum(0).tolist()
    metrics = dict(
      labels_per_s=made / max(self._read[0] - before, 1e-3),
      labels_per_example=inserts / max(samples, 1),
    )
    if learned:
      metrics |= dict(
        labels_age_mean=age_sum / learned,
        labels_age_max=float(rows[:, -1].max()),
        labels_online=online / learned,
      )
    return metrics


def local(params: Any) -> Any:
  """Return this process's copy of parameters that all devices of a mesh have."""
  return jax.tree.map(lambda x: x.addressable_data(0), params)
