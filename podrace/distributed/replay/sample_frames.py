"""The arrays of SAMPLES: what was drawn, and the rows of it as they are kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from podrace.distributed.net.frame import WireError
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.replay_messages import AS_IS, CHUNK, DRAWN, PART, records
from podrace.tables import trees
from podrace.tables.chunks import Account, Chunk, ChunkStore, Part, gather
from podrace.tables.items import Draws, Leaf, Samples, Signature


def sample_frames(draws: Draws) -> list[Any]:
  """The five arrays: what was drawn, parts, their chunks' numbers, chunks, bytes.

  Chunks are as they are kept: nothing is unpacked here. Of one that is kept as it is only the rows
  that are needed are sent, if they are few.

  Raises:
    ValueError: if that is more than a message may hold.
  """
  items = draws.items
  drawn = np.empty(len(items), DRAWN)
  for name, column in zip(DRAWN.names[1:], zip(*draws.columns, strict=True), strict=True):  # type: ignore[index]
    drawn[name] = np.concatenate(column)
  drawn['key'] = [item.key for item in items]
  size = 0
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
        size += data[-1].nbytes
      else:
        parts.append((len(needed), offset, rows))
        for chunk in needed:
          number = numbers.get(chunk.key)
          if number is None:
            number = numbers[chunk.key] = len(chunks)
            how, kept = replay_messages.kept(chunk)
            data.append(kept)
            chunks.append((0, chunk.length, how, chunk.nbytes))
            size += chunk.nbytes
          refs.append(number)
      if (
        size > replay_messages.FRAME_BYTES or len(refs) > replay_messages.MESSAGE_PARTS
      ):  # now: all of it may be far more
        raise ValueError(_too_large(len(items), size, len(refs)))
  return [drawn, *(np.array(x, '<u4') for x in (parts, refs, chunks)), b''.join(data)]


def _too_large(items: int, size: int, references: int) -> str:
  if size > replay_messages.FRAME_BYTES:
    what, most = f'{size:,} bytes or more', replay_messages.FRAME_BYTES
  else:
    what, most = f'{references:,} chunks or more', replay_messages.MESSAGE_PARTS
  return f'{items} items of {what}, of which a sample has at most {most:,}: ask for fewer at a time'


def read_samples(messages: Sequence[tuple[Signature, Sequence[Any]]]) -> Samples:
  """What the arrays of one or several SAMPLES hold, unpacked and stacked as `Table.sample` does.

  Raises:
    WireError: if they don't fit together.
  """
  (signature, _), room = messages[0], _Room()
  if any(s.leaves != signature.leaves for s, _ in messages):
    raise WireError(f'samples of {[s.leaves for s, _ in messages]}, expected of one kind')
  readers = [_Reader(signature.leaves, arrays, room) for _, arrays in messages]
  found, lengths = [], []
  for i, leaf in enumerate(signature.leaves):
    column = readers[0].as_it_is(i) if len(readers) == 1 else None
    rows, counts = column or _gathered(readers, i, room)
    found.append(rows[:, 0] if leaf.single else rows)
    lengths.append(counts)
  drawn = np.concatenate([reader.drawn for reader in readers])
  return Samples(
    data=trees.build(signature.structure, found),
    lengths=trees.build(signature.structure, lengths),
    **{k: drawn[k].copy() for k in DRAWN.names},  # type: ignore[union-attr]
  )


def _gathered(readers: Sequence[_Reader], i: int, room: _Room) -> Any:
  """(rows [n, L, ...], lengths [n]) of one leaf."""
  leaf, store = readers[0].leaves[i], room.store
  longest = max(int(reader.parts[i]['rows'].max()) for reader in readers)
  room.take(sum(len(reader.drawn) for reader in readers) * longest, leaf)
  try:
    parts = [part for reader in readers for part in reader.read(i)]
    return gather(store, parts, leaf.dtype, leaf.shape)
  except (zstandard.ZstdError, ValueError, TypeError) as e:
    raise WireError(f'a chunk that is damaged ({e})') from None


class _Room:
  """Refuses what a few bytes would be unpacked to, if that is more than anybody samples."""

  def __init__(self) -> None:
    self._left = replay_messages.UNPACKED_SAMPLE_BYTES
    self.store = ChunkStore(cache_bytes=self._left)
    self._account = Account()

  def take(self, rows: int, leaf: Leaf) -> None:
    self._left -= rows * max(replay_messages.row_bytes(leaf.dtype, leaf.shape), 1)
    if self._left < 0:
      most = replay_messages.UNPACKED_SAMPLE_BYTES
      raise WireError(f'samples of more than {most:,} bytes unpacked, in {leaf}')

  def keep(self, chunk: Chunk, leaf: Leaf) -> None:
    """Has a chunk unpacked once, for all who need it."""
    if chunk.packed is not None and not chunk.holders:
      self.take(chunk.length, leaf)
      self.store.hold(chunk, self._account)


class _Reader:
  """One message; `parts` and `_refs` are by leaf."""

  def __init__(self, leaves: Sequence[Leaf], arrays: Sequence[Any], room: _Room) -> None:
    self.leaves, self._room = leaves, room
    self.drawn, parts, refs, chunks = map(records, arrays, (DRAWN, PART, '<u4', CHUNK))
    self._chunks, self._data = chunks, memoryview(arrays[4]).cast('B')
    n = len(self.drawn)
    if n == 0 or len(parts) != n * len(leaves) or int(parts['chunks'].sum()) != len(refs):
      raise WireError(f'{len(parts)} parts over {len(refs)} chunks for {n} items')
    if int(chunks['bytes'].astype(np.int64).sum()) != len(self._data):
      raise WireError(f'{len(self._data)} bytes of chunks, which differ from what is said of them')
    if len(refs) and int(refs.max()) >= len(chunks):
      raise WireError('a part over a chunk that was not sent')
    self.parts = parts.reshape(len(leaves), n)
    self._refs = np.split(refs, np.cumsum(self.parts['chunks'].sum(1))[:-1])
    self._ends = np.cumsum(chunks['bytes'], dtype=np.int64)
    self._made: dict[int, Chunk] = {}

  @functools.cached_property
  def _listed(self) -> list[tuple[int, ...]]:
    """Of each chunk what the message has of it, where it ends, and how many parts need it."""
    times = np.bincount(np.concatenate(self._refs), minlength=len(self._chunks))
    columns = (self._chunks[name] for name in CHUNK.names)  # type: ignore[union-attr]
    return list(zip(*(x.tolist() for x in (*columns, self._ends, times)), strict=True))

  def read(self, i: int) -> Iterator[Part]:
    """The parts of one leaf."""
    leaf, numbers, made = self.leaves[i], iter(self._refs[i].tolist()), self._made
    for count, offset, rows in self.parts[i].tolist():
      if count == 1:  # as nearly all
        number = next(numbers)
        chunks: tuple[Chunk, ...] = (made.get(number) or self._chunk(number, leaf),)
      else:
        needed = [next(numbers) for _ in range(count)]
        chunks = tuple([made.get(number) or self._chunk(number, leaf) for number in needed])
      if rows < replay_messages.check_part(leaf, chunks, offset, rows):  # some are of no use
        self._room.keep(chunks[0], leaf)
        self._room.keep(chunks[-1], leaf)
      yield chunks, offset, rows

  def _chunk(self, number: int, leaf: Leaf) -> Chunk:
    """For the first part that needs it."""
    _, rows, how, size, end, times = self._listed[number]
    own = self._data[end - size : end]
    chunk = replay_messages.make_chunk(self._room.store, own, how, rows, leaf.dtype, leaf.shape)
    if times > 1:
      self._room.keep(chunk, leaf)
    self._made[number] = chunk
    return chunk

  def as_it_is(self, i: int) -> Any:
    """(rows, lengths) of a leaf without a loop, if each part is a chunk of its own, as it is, and all are as long."""
    leaf, parts, refs = self.leaves[i], self.parts[i], self._refs[i]
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
    size = rows * replay_messages.row_bytes(leaf.dtype, leaf.shape)
    if (own['bytes'] != size).any() or not rows:
      raise WireError(f'chunks that have not {rows} rows of {leaf}')
    end = int(self._ends[first + n - 1])
    array = np.frombuffer(self._data[end - n * size : end], leaf.dtype)
    return array.reshape(n, rows, *leaf.shape).copy(), np.full(n, rows)
