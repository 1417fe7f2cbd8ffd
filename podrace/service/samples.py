"""The arrays of SAMPLES: what was drawn, and the rows of it as they are kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from podrace.net.frame import WireError
from podrace.service import wire
from podrace.service.wire import AS_IS, CHUNK, DRAWN, PART, records
from podrace.tables import trees
from podrace.tables.chunks import Chunk, ChunkStore, Part, gather
from podrace.tables.items import Draws, Leaf, Samples, Signature


def sample_frames(draws: Draws) -> list[Any]:
  """The five arrays: what was drawn, parts, their chunks' numbers, chunks, bytes.

  Chunks are as they are kept: nothing is unpacked here. Of one that is kept as it is only the rows
  that are needed are sent, if they are few.

  Raises:
    ValueError: if that is more than a frame holds.
  """
  items = draws.items
  drawn = np.empty(len(items), DRAWN)
  for name, column in zip(DRAWN.names[1:], zip(*draws.columns, strict=True), strict=True):  # type: ignore[index]
    drawn[name] = np.concatenate(column)
  drawn['key'] = [item.key for item in items]
  numbers: dict[int, int] = {}  # by the chunk's key
  parts, refs, chunks, data = list[Any](), list[int](), list[Any](), list[Any]()
  for leaf in range(len(items[0].parts)):  # so that a column's rows are one after the other
    for item in items:
      needed, offset, rows = item.parts[leaf]
      array = needed[0].array
      if len(needed) == 1 and array is not None and 2 * rows <= needed[0].length:
        parts.append((1, 0, rows))
        refs.append(len(chunks))
        data.append(array[offset : offset + rows])
        chunks.append((0, rows, AS_IS, data[-1].nbytes))
        continue
      parts.append((len(needed), offset, rows))
      for chunk in needed:
        number = numbers.get(chunk.key)
        if number is None:
          number = numbers[chunk.key] = len(chunks)
          how, kept = wire.kept(chunk)
          data.append(kept)
          chunks.append((0, chunk.length, how, chunk.nbytes))
        refs.append(number)
  if (size := sum(chunk[3] for chunk in chunks)) > wire.FRAME_BYTES:
    raise ValueError(
      f'{len(items)} items of {size:,} bytes, of which a sample has at most {wire.FRAME_BYTES:,}: '
      'ask for fewer at a time'
    )
  return [drawn, *(np.array(x, '<u4') for x in (parts, refs, chunks)), b''.join(data)]


def read_samples(signature: Signature, frames: Sequence[Any]) -> Samples:
  """What SAMPLES' arrays hold, unpacked and stacked as `Table.sample` does.

  Raises:
    WireError: if they don't fit together.
  """
  drawn, parts, refs, chunks = map(records, frames, (DRAWN, PART, '<u4', CHUNK))
  data = memoryview(frames[4]).cast('B')
  n, leaves = len(drawn), signature.leaves
  if n == 0 or len(parts) != n * len(leaves) or int(parts['chunks'].sum()) != len(refs):
    raise WireError(f'{len(parts)} parts over {len(refs)} chunks for {n} items')
  if int(chunks['bytes'].astype(np.int64).sum()) != len(data):
    raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
  if len(refs) and int(refs.max()) >= len(chunks):
    raise WireError('a part over a chunk that was not sent')
  reader = _Reader(chunks, refs, data)
  found, lengths, at = [], [], 0
  for i, leaf in enumerate(leaves):
    own = parts[i * n : (i + 1) * n]
    count = int(own['chunks'].sum())
    rows, counts = reader.leaf(leaf, own, refs[at : at + count])
    at += count
    found.append(rows[:, 0] if leaf.single else rows)
    lengths.append(counts)
  return Samples(
    data=trees.build(signature.structure, found),
    lengths=trees.build(signature.structure, lengths),
    **{k: drawn[k].copy() for k in DRAWN.names},  # type: ignore[union-attr]
  )


class _Reader:
  """The chunks of one message, each unpacked once."""

  def __init__(self, chunks: np.ndarray, refs: np.ndarray, data: memoryview) -> None:
    self._chunks, self._data = chunks, data
    self._ends = np.cumsum(chunks['bytes'], dtype=np.int64)
    self._refs = refs
    self._made: dict[int, Chunk] = {}
    self._store = ChunkStore(cache_bytes=0)
    self._room = wire.UNPACKED_SAMPLE_BYTES

  @functools.cached_property
  def _listed(self) -> list[tuple[int, ...]]:
    """Of each chunk what the message has of it, where it ends, and how many parts need it."""
    times = np.bincount(self._refs, minlength=len(self._chunks))
    columns = (self._chunks[name] for name in CHUNK.names)  # type: ignore[union-attr]
    return list(zip(*(x.tolist() for x in (*columns, self._ends, times)), strict=True))

  def _take_room(self, rows: int, leaf: Leaf) -> None:
    """Refuses what a few bytes would be unpacked to, if that is more than anybody samples."""
    self._room -= rows * wire.row_bytes(leaf.dtype, leaf.shape)
    if self._room < 0:
      raise WireError(
        f'samples of more than {wire.UNPACKED_SAMPLE_BYTES:,} bytes unpacked, in {leaf}'
      )

  def leaf(self, leaf: Leaf, parts: np.ndarray, refs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows [n, L, ...], lengths [n]) of one leaf's parts."""
    if (direct := self._direct(leaf, parts, refs)) is not None:
      return direct
    self._take_room(len(parts) * int(parts['rows'].max()), leaf)
    try:
      return gather(self._store, [*self._parts(leaf, parts, refs)], leaf.dtype, leaf.shape)
    except (zstandard.ZstdError, ValueError, TypeError) as e:
      raise WireError(f'a chunk that is damaged ({e})') from None

  def _parts(self, leaf: Leaf, parts: np.ndarray, refs: np.ndarray) -> Iterator[Part]:
    numbers, made = iter(refs.tolist()), self._made
    for count, offset, rows in parts.tolist():
      needed = [next(numbers) for _ in range(count)]
      chunks = tuple([made.get(number) or self._chunk(number, leaf) for number in needed])
      if rows < wire.check_part(leaf, chunks, offset, rows):  # some are of no use
        self._unpack(chunks[0], leaf)
        self._unpack(chunks[-1], leaf)
      yield chunks, offset, rows

  def _chunk(self, number: int, leaf: Leaf) -> Chunk:
    """One of the message, for the first part that needs it; unpacked, if several do."""
    _, rows, how, size, end, times = self._listed[number]
    own = self._data[end - size : end]
    chunk = wire.make_chunk(self._store, own, how, rows, leaf.dtype, leaf.shape)
    if times > 1:
      self._unpack(chunk, leaf)
    self._made[number] = chunk
    return chunk

  def _unpack(self, chunk: Chunk, leaf: Leaf) -> None:
    if chunk.array is None:  # else it is as it is, or unpacked already
      self._take_room(chunk.length, leaf)
      chunk.array = self._store.read(chunk)

  def _direct(self, leaf: Leaf, parts: np.ndarray, refs: np.ndarray) -> Any:
    """Without a loop, if each part is a chunk of its own, as it is, and all are as long."""
    first, n, rows = int(refs[0]) if len(refs) else 0, len(refs), int(parts['rows'][0])
    own = self._chunks[first : first + n]
    if (
      n != len(parts)
      or len(own) != n
      or (parts['chunks'] != 1).any()
      or parts['offset'].any()
      or (parts['rows'] != rows).any()
      or own['how'].any()
      or (own['rows'] != rows).any()
      or (refs != np.arange(first, first + n)).any()
    ):
      return None
    size = rows * wire.row_bytes(leaf.dtype, leaf.shape)
    if (own['bytes'] != size).any() or not rows:
      raise WireError(f'chunks that have not {rows} rows of {leaf}')
    end = int(self._ends[first + n - 1])
    array = np.frombuffer(self._data[end - n * size : end], leaf.dtype)
    return array.reshape(n, rows, *leaf.shape).copy(), np.full(n, rows)
