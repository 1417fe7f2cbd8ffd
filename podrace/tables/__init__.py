"""Replay tables on the host, after Reverb (Cassirer et al. 2021, arXiv 2102.04736). Imports no JAX.

Tables hold items over shared, compressed chunks of steps. Selectors choose the items to sample
and to remove. Rate limiters balance inserts against samples. Writers turn streams of steps into
items. docs/tables.md is the manual.
"""

from podrace.tables.blocking import Cancelled, Closed, RateLimited
from podrace.tables.checkpoint import (
  CheckpointError,
  OtherTables,
  Snapshot,
  restore,
  save,
  snapshot,
  write,
)
from podrace.tables.chunks import ChunkStore
from podrace.tables.items import Samples, TableInfo
from podrace.tables.limiters import RateLimiter, min_size, queue, sample_to_insert_ratio, stack
from podrace.tables.selectors import fifo, lifo, max_heap, min_heap, prioritized, uniform
from podrace.tables.table import Table
from podrace.tables.writer import Writer

__all__ = [
  'Cancelled',
  'CheckpointError',
  'ChunkStore',
  'Closed',
  'OtherTables',
  'RateLimited',
  'RateLimiter',
  'Samples',
  'Snapshot',
  'Table',
  'TableInfo',
  'Writer',
  'fifo',
  'lifo',
  'max_heap',
  'min_heap',
  'min_size',
  'prioritized',
  'queue',
  'restore',
  'sample_to_insert_ratio',
  'save',
  'snapshot',
  'stack',
  'uniform',
  'write',
]
