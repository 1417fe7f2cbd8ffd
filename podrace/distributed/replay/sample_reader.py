"""Reads the arrays of SAMPLES: unpacks and stacks the rows of the items that were drawn."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from podrace.distributed.net.frame import WireError
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.replay_messages import CHUNK, DRAWN, PART, read_records
from podrace.tables import trees
from podrace.tables.chunks import Account, Chunk, ChunkStore, Part, gather
from podrace.tables.items import Leaf, Samples, Signature


def read_samples(messages: Sequence[tuple[Signature, Sequence[Any]]]) -> Samples:
  """Unpack and stack the items of SAMPLES as podrace.tables.Table.sample does.

  Args:
    messages: (signature, arrays) of each message, one for each shard.

  Raises:
    WireError: the arrays are damaged or do not fit together.
  """
  (signature, _), budget = messages[0], _UnpackBudget()
  if any(s.leaves != signature.leaves for s, _ in messages):
    raise WireError(f'samples of {[s.leaves for s, _ in messages]}, expected of one kind')
  readers = [_SampleReader(signature.leaves, arrays, budget) for _, arrays in messages]
  columns, lengths = [], []
  for i, leaf in enumerate(signature.leaves):
    column = readers[0].stack_unpacked(i) if len(readers) == 1 else None
    rows, counts = column or _gather_column(readers, i, budget)
    columns.append(rows[:, 0] if leaf.single else rows)
    lengths.append(counts)
  drawn = np.concatenate([reader.drawn for reader in readers])
  return Samples(
    data=trees.build(signature.structure, columns),
    lengths=trees.build(signature.structure, lengths),
    **{k: drawn[k].copy() for k in DRAWN.names},  # type: ignore[union-attr]
  )


def _gather_column(readers: Sequence[_SampleReader], i: int, budget: _UnpackBudget) -> Any:
  """Return rows [n, L, ...] and lengths [n] of leaf i."""
  leaf, store = readers[0].leaves[i], budget.store
  longest = max(int(reader.parts[i]['rows'].max()) for reader in readers)
  budget.take(sum(len(reader.drawn) for reader in readers) * longest, leaf)
  try:
    parts = [part for reader in readers for part in reader.read(i)]
    return gather(store, parts, leaf.dtype, leaf.shape)
  except (zstandard.ZstdError, ValueError, TypeError) as e:
    raise WireError(f'a chunk that is damaged ({e})') from None


class _UnpackBudget:
  """Bounds the bytes to which the few bytes of a hostile message can be unpacked."""

  def __init__(self) -> None:
    self._left = replay_messages.UNPACKED_SAMPLE_BYTES
    self.store = ChunkStore(cache_bytes=self._left)
    self._account = Account()

  def take(self, rows: int, leaf: Leaf) -> None:
    """Take the bytes of rows from the budget; raise WireError if it is exceeded."""
    self._left -= rows * max(replay_messages.row_bytes(leaf.dtype, leaf.shape), 1)
    if self._left < 0:
      most = replay_messages.UNPACKED_SAMPLE_BYTES
      raise WireError(f'samples of more than {most:,} bytes unpacked, in {leaf}')

  def keep(self, chunk: Chunk, leaf: Leaf) -> None:
    """Keep a chunk, so that it is unpacked once for all its parts."""
    if chunk.packed is not None and not chunk.holders:
      self.take(chunk.length, leaf)
      self.store.hold(chunk, self._account)


class _SampleReader:
  """Reads the arrays of one message.

  Attributes:
    leaves: of the items.
    drawn: records of DRAWN [n].
    parts: records of PART [leaves, n].
  """

  def __init__(self, leaves: Sequence[Leaf], arrays: Sequence[Any], budget: _UnpackBudget) -> None:
    self.leaves, self._budget = leaves, budget
    self.drawn, parts, refs, chunks = map(read_records, arrays, (DRAWN, PART, '<u4', CHUNK))
    self._chunks, self._data = chunks, memoryview(arrays[4]).cast('B')
    n = len(self.drawn)
    if n == 0 or len(parts) != n * len(leaves) or int(parts['chunks'].sum()) != len(refs):
      raise WireError(f'{len(parts)} parts over {len(refs)} chunks for {n} items')
    if int(chunks['bytes'].astype(np.int64).sum()) != len(self._data):
      raise WireError(f'{len(self._data)} bytes of chunks, which differ from what is said of them')
    if len(refs) and int(refs.max()) >= len(chunks):
      raise WireError('a part over a chunk that was not sent')
    self.parts = parts.reshape(len(leaves), n)
    # By leaf.
    self._refs = np.split(refs, np.cumsum(self.parts['chunks'].sum(1))[:-1])
    self._ends = np.cumsum(chunks['bytes'], dtype=np.int64)
    self._known: dict[int, Chunk] = {}

  @functools.cached_property
  def _chunk_details(self) -> list[tuple[int, ...]]:
    """The record of CHUNK, the end in the bytes, and the number of parts of each chunk."""
    times = np.bincount(np.concatenate(self._refs), minlength=len(self._chunks))
    columns = (self._chunks[name] for name in CHUNK.names)  # type: ignore[union-attr]
    return list(zip(*(x.tolist() for x in (*columns, self._ends, times)), strict=True))

  def read(self, i: int) -> Iterator[Part]:
    """Yield the parts of leaf i."""
    leaf, numbers, known = self.leaves[i], iter(self._refs[i].tolist()), self._known
    for count, offset, rows in self.parts[i].tolist():
      if count == 1:  # the common case
        number = next(numbers)
        chunks: tuple[Chunk, ...] = (known.get(number) or self._make_chunk(number, leaf),)
      else:
        needed = [next(numbers) for _ in range(count)]
        chunks = tuple([known.get(number) or self._make_chunk(number, leaf) for number in needed])
      # A chunk with rows outside the part may be needed again.
      if rows < replay_messages.check_part(leaf, chunks, offset, rows):
        self._budget.keep(chunks[0], leaf)
        self._budget.keep(chunks[-1], leaf)
      yield chunks, offset, rows

  def _make_chunk(self, number: int, leaf: Leaf) -> Chunk:
    """Make a chunk when its first part needs it."""
    _, rows, how, size, end, times = self._chunk_details[number]
    data = self._data[end - size : end]
    chunk = replay_messages.make_chunk(self._budget.store, data, how, rows, leaf.dtype, leaf.shape)
    if times > 1:
      self._budget.keep(chunk, leaf)
    self._known[number] = chunk
    return chunk

  def stack_unpacked(self, i: int) -> Any:
    """Return rows [n, L, ...] and lengths [n] of leaf i without a loop, or None if it needs one.

    It needs none if each part is exactly one unpacked chunk, and all chunks have the same length.
    """
    leaf, parts, refs = self.leaves[i], self.parts[i], self._refs[i]
    first, n, rows = int(refs[0]) if len(refs) else 0, len(refs), int(parts['rows'][0])
    chunks = self._chunks[first : first + n]
    if (
      n != len(parts)
      or len(chunks) != n
      or (parts['chunks'] != 1).any()
      or parts['offset'].any()
      or (parts['rows'] != rows).any()
      or chunks['how'].any()
      or (chunks['rows'] != rows).any()
      or (refs != np.arange(first, first + n)).any()
    ):
      return None
    size = rows * replay_messages.row_bytes(leaf.dtype, leaf.shape)
    if (chunks['bytes'] != size).any() or not rows:
      raise WireError(f'chunks that have not {rows} rows of {leaf}')
    end = int(self._ends[first + n - 1])
    array = np.frombuffer(self._data[end - n * size : end], leaf.dtype)
    return array.reshape(n, rows, *leaf.shape).copy(), np.full(n, rows)
