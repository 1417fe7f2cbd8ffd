"""The tables of replay on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from podrace import tables
from podrace.replay.host_labels import HostLabels, Train
from podrace.replay.labels import OFFLINE, TABLE, Mix
from podrace.replay.layout import Layout
from podrace.replay.streams import Streams
from podrace.replay.windows import Windows
from podrace.topology import share

CACHE_BYTES = 2**26  # of the cache of unpacked chunks


class HostTables(NamedTuple):
  """The tables of one process, in one store."""

  store: tables.ChunkStore
  sources: dict[str, tables.Table]  # of windows, by name
  streams: Streams  # which write to them
  train: Train | None  # of labelled windows


def selector(w: Windows) -> tables.selectors.Selector:
  """Return the table's sampler: prioritized, or uniform without priorities."""
  return tables.prioritized(w.exponent) if w.has_priorities else tables.uniform()


def make_tables(layout: Layout, seed: int, labels: HostLabels | None) -> HostTables:
  """Return empty tables: of windows and, if a stage computes `labels`, of labelled windows.

  Then the windows of a log have a table of their own.
  """
  w, store, mix = layout.windows, tables.ChunkStore(CACHE_BYTES), Mix(layout.windows)
  parts = {name: mix.part(name) for name in mix.tables} if labels else {TABLE: 1.0}
  sources = {
    name: tables.Table(
      name,
      store,
      sampler=selector(w),
      remover=tables.fifo(),
      rate_limiter=tables.min_size(1),  # `HostReplay.times` sets the rate of sampling
      max_size=-(-math.ceil(share(w.buffer.capacity) * part) // w.period),
      seed=(seed, jax.process_index()) + (name == OFFLINE) * (1,),
    )
    for name, part in parts.items()
  }
  streams = Streams(
    layout,
    sources.get(TABLE),
    lambda history: tables.Writer(store, history),
    sources.get(OFFLINE),
  )
  return HostTables(store, sources, streams, labels.make_table(store) if labels else None)
