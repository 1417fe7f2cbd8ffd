"""Where steps are: columns of arrays, cut into chunks that are written once, compressed and shared.

A chunk belongs to all accounts (tables, writers) that hold it, and is gone when the last one lets go.
One lock guards all accounts of a store and its tables; packing, unpacking and copying are done outside of
it, which is safe as rows never change once they are written.

Which codec: measured in benchmarks/tables.py, and stated in docs/tables.md.
"""

from __future__ import annotations

import io
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

LEVEL = -1
LEAST = 128  # bytes; smaller chunks are not worth a compressor's call
MUST_SAVE = 0.875  # a chunk that stays larger than this is kept as it is
BYTES_PER_CHUNK = 2**18  # a column's chunks get this large, or ROWS_PER_CHUNK long
ROWS_PER_CHUNK = 256
WIDE = 1024  # bytes of a row, from which on differences are summed row by row
SMALL = 4096  # bytes of a part; smaller ones are gathered all at once

Part = tuple[tuple['Chunk', ...], int, int]  # chunks, offset in the first one, rows


class Account:
  """What somebody holds, in bytes as they are kept; a chunk held twice counts once."""

  __slots__ = ('bytes', 'chunks')

  def __init__(self) -> None:
    self.bytes = self.chunks = 0


class Lock:
  """A lock for short sections of Python by many threads: who finds it taken yields, and tries again.

  A plain lock is handed to a thread that waits for it, which then still waits for the interpreter, while
  the one that has the interpreter soon waits for the lock: once that begins, each section costs
  a switch of threads (with 4 writers it halved the rate of inserts). Here only a running thread
  ever gets it. Who has no luck so often waits as for any lock.
  """

  TRIES = 200

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self.release = self._lock.release

  def acquire(self, blocking: bool = True) -> bool:
    if self._lock.acquire(False):
      return True
    if not blocking:
      return False
    for _ in range(self.TRIES):
      time.sleep(0)  # lets go of the interpreter
      if self._lock.acquire(False):
        return True
    return self._lock.acquire()

  def __enter__(self) -> None:
    if not self._lock.acquire(False):
      self.acquire()

  def __exit__(self, *error: object) -> None:
    self._lock.release()


class Chunk:
  """Rows [length, ...] of one column; as an array, packed, or (while in the cache) both."""

  __slots__ = ('__weakref__', 'array', 'dtype', 'holders', 'key', 'length', 'nbytes', 'packed',
               'passed', 'shape', 'used')  # fmt: skip

  def __init__(self, key: int, array: np.ndarray, length: int) -> None:
    self.key = key
    self.dtype, self.shape = array.dtype, array.shape[1:]
    self.array: np.ndarray | None = array  # perhaps with room for further rows
    self.length = length  # rows that are written
    self.packed: tuple[bytes, bool] | None = None  # and whether it is differences
    self.holders: dict[Account, int] = {}
    self.nbytes = array.nbytes  # as accounted: without a copy in the cache
    self.used = False  # since the cache last looked
    self.passed: Any = None  # the check that its rows have passed


class ChunkStore:
  """What the tables on it share: chunks, the lock, keys, a cache of unpacked chunks.

  `cache_bytes` bounds the unpacked copies of packed chunks that are kept, of which some rows were asked for,
  or all while there was room; next to them there are, unpacked,
  the chunks that writers are filling and those that would not shrink.
  """

  def __init__(self, cache_bytes: int = 2**24) -> None:
    if cache_bytes < 0:
      raise ValueError(f'{cache_bytes=} must not be negative')
    self.lock = Lock()
    self.cache_bytes = cache_bytes
    self.total = Account()  # all that anybody holds
    self.cached = 0  # bytes in the cache
    self.tables: dict[str, Any] = {}  # by name
    self._cache: OrderedDict[int, Chunk] = OrderedDict()
    self.next_key = 1  # of an item
    self._chunk_keys = itertools.count(1)
    self._values: dict[Any, Any] = {}

  def chunk(self, array: np.ndarray, length: int) -> Chunk:
    """A chunk that nobody holds yet, of an array of which `length` rows are written."""
    return Chunk(next(self._chunk_keys), array, length)  # `next` is one call into C: no lock

  def packed_chunk(
    self, data: bytes, differences: bool, dtype: np.dtype, shape: tuple[int, ...], length: int
  ) -> Chunk:
    """A chunk that nobody holds yet, of what `pack` gave for rows [length, *shape]."""
    chunk = self.chunk(np.empty((0, *shape), dtype), length)
    chunk.packed, chunk.nbytes, chunk.array = (data, differences), len(data), None
    return chunk

  def same(self, value: Any) -> Any:
    """The first of all values given that was equal to this one, so that `is` compares them."""
    return self._values.setdefault(value, value)

  def hold(self, chunk: Chunk, account: Account) -> None:
    """Under the lock."""
    holders = chunk.holders
    times = holders.get(account)
    if times:
      holders[account] = times + 1
      return
    if not holders:
      self.total.bytes += chunk.nbytes
      self.total.chunks += 1
    holders[account] = 1
    account.bytes += chunk.nbytes
    account.chunks += 1

  def drop(self, chunk: Chunk, account: Account) -> None:
    """Under the lock."""
    holders = chunk.holders
    if holders[account] > 1:
      holders[account] -= 1
      return
    del holders[account]
    account.bytes -= chunk.nbytes
    account.chunks -= 1
    if not holders:
      self.total.bytes -= chunk.nbytes
      self.total.chunks -= 1
      if self._cache.pop(chunk.key, None):
        self.cached -= _unpacked_bytes(chunk)

  def seal(self, chunk: Chunk, differences: bool) -> None:
    """Packs a chunk to which no row will be added."""
    assert chunk.array is not None
    rows = chunk.array[: chunk.length]
    packed = pack(rows, differences)
    if packed is None and len(rows) < len(chunk.array):
      rows = rows.copy()
    with self.lock:
      self._resize(chunk, len(packed[0]) if packed else rows.nbytes)
      # Packed first: who finds no array must find that. The array isn't put into the cache, as it is
      # rarely sampled next, and the following chunk is faster in memory that the processor still has.
      chunk.packed = packed
      chunk.array = None if packed else rows

  def read(self, chunk: Chunk) -> np.ndarray:
    """A chunk's rows; not to be written to."""
    array = chunk.array
    if array is not None:
      chunk.used = True
      return array
    assert chunk.packed is not None
    array = unpack(chunk.packed, chunk.dtype, (chunk.length, *chunk.shape))
    with self.lock:
      if chunk.holders and chunk.array is None:
        chunk.array = array
        self._keep(chunk)
    return array

  def read_into(self, chunk: Chunk, offset: int, rows: np.ndarray) -> None:
    """Writes a chunk's rows from `offset` on to where there is room for just them, one after the other.

    A whole chunk for which the cache has no room, or that nobody holds, is unpacked to there and not cached: the
    way through memory that the processor has not would cost three times as much.
    """
    packed, size = chunk.packed, rows.nbytes
    if (
      chunk.array is None
      and packed is not None
      and len(rows) == chunk.length
      and (not chunk.holders or self.cached + size > self.cache_bytes)
    ):
      unpack_into(packed, rows)
    else:
      rows[...] = self.read(chunk)[offset : offset + len(rows)]

  def _resize(self, chunk: Chunk, nbytes: int) -> None:
    more = nbytes - chunk.nbytes
    chunk.nbytes = nbytes
    for account in chunk.holders:
      account.bytes += more
    if chunk.holders:
      self.total.bytes += more

  def _keep(self, chunk: Chunk) -> None:
    """Puts a chunk into the cache, for which others leave: the oldest not used since last asked."""
    if not chunk.holders or _unpacked_bytes(chunk) > self.cache_bytes:
      chunk.array = None
      return
    self._cache[chunk.key] = chunk
    self.cached += _unpacked_bytes(chunk)
    chunk.used = False  # only what is asked for again is spared
    while self.cached > self.cache_bytes:
      key, oldest = self._cache.popitem(last=False)
      if oldest.used:
        oldest.used = False
        self._cache[key] = oldest
      else:
        self.cached -= _unpacked_bytes(oldest)
        oldest.array = None


def _unpacked_bytes(chunk: Chunk) -> int:
  assert chunk.array is not None
  return chunk.array.nbytes


# --- packing ----------------------------------------------------------------------------------

_codecs = threading.local()  # a compressor serves one thread at a time


def _compressor() -> zstandard.ZstdCompressor:
  if not hasattr(_codecs, 'compressor'):
    _codecs.compressor = zstandard.ZstdCompressor(level=LEVEL)
    _codecs.decompressor = zstandard.ZstdDecompressor()
  return _codecs.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
  _compressor()
  return _codecs.decompressor


def pack(rows: np.ndarray, differences: bool) -> tuple[bytes, bool] | None:
  """Compressed rows, or None if that saves too little. `differences`: along time, as integers."""
  if rows.nbytes < LEAST:
    return None
  if differences:
    rows = difference(rows)
  packed = compress(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
  return (packed, differences) if len(packed) <= MUST_SAVE * rows.nbytes else None


def compress(data: memoryview) -> bytes:
  """As a new object of just its size.

  ZstdCompressor.compress makes one of the largest possible size and cuts off the rest. That leaves holes in
  the heap into which the next chunk does not fit: 100,000 Pong frames took 680 MB instead of 17.
  """
  into = io.BytesIO()
  with _compressor().stream_writer(into, size=len(data), closefd=False) as writer:
    writer.write(data)
  return into.getvalue()


def unpack(packed: tuple[bytes, bool], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
  """The rows again."""
  rows = np.empty(shape, dtype)
  unpack_into(packed, rows)
  return rows


def unpack_into(packed: tuple[bytes, bool], rows: np.ndarray) -> None:
  """Writes the rows again, to where there is room for just them, one after the other.

  Raises:
    ValueError: if they are fewer.
  """
  data, differences = packed
  into = rows.reshape(-1).view(np.uint8)
  done = _decompressor().stream_reader(data).readinto(into.data) if len(into) else 0
  if done != len(into):
    raise ValueError(f'{done} bytes were packed, expected {len(into)}')
  if differences:
    accumulate(rows)


def difference(rows: np.ndarray) -> np.ndarray:
  """Each row less the one before it, modulo the integers' range."""
  bits = rows.view(np.dtype(f'u{rows.dtype.itemsize}'))
  found = bits.copy()
  np.subtract(bits[1:], bits[:-1], out=found[1:])
  return found.view(rows.dtype)


def accumulate(rows: np.ndarray) -> None:
  """Makes differences into what they were made from."""
  bits = rows.view(np.dtype(f'u{rows.dtype.itemsize}'))
  if bits[:1].nbytes < WIDE:
    np.add.accumulate(bits, axis=0, dtype=bits.dtype, out=bits)
    return
  for before, row in itertools.pairwise(bits):  # ten times as fast on frames
    np.add(row, before, out=row)


def differences_help(rows: np.ndarray) -> bool:
  """Whether rows get smaller packed as differences; only integers can be."""
  if rows.dtype.kind not in 'iu' or rows.nbytes < LEAST:
    return False
  sizes = [len(packed[0]) if (packed := pack(rows, d)) else rows.nbytes for d in (False, True)]
  return sizes[1] < sizes[0]


# --- reading ----------------------------------------------------------------------------------


def gather(
  store: ChunkStore, parts: Sequence[Part], dtype: np.dtype, shape: tuple[int, ...]
) -> Any:
  """(rows [n, L, ...], lengths [n]): parts stacked, the shorter ones followed by zeros."""
  lengths = [part[2] for part in parts]
  longest = max(lengths)
  whole = min(lengths) == longest
  if whole and longest * math.prod(shape) * dtype.itemsize <= SMALL:
    pieces = [rows for part in parts for rows in _pieces(store, part)]
    rows = np.concatenate(pieces, dtype=dtype)  # else in the machine's order of bytes
    return rows.reshape(len(parts), longest, *shape), np.array(lengths)
  # Each piece is copied while the processor has it, and needn't be kept till the end.
  out = (np.empty if whole else np.zeros)((len(parts), longest, *shape), dtype)
  for into, (chunks, offset, length) in zip(out, parts, strict=True):
    done = 0
    for chunk in chunks:
      end = min(done + chunk.length - offset, length)
      store.read_into(chunk, offset, into[done:end])
      offset, done = 0, end
  return out, np.array(lengths)


def _pieces(store: ChunkStore, part: Part) -> Iterable[np.ndarray]:
  """The rows of a part, chunk by chunk."""
  chunks, offset, length = part
  if len(chunks) == 1:
    array = chunks[0].array
    if array is None:
      array = store.read(chunks[0])
    else:
      chunks[0].used = True
    return (array[offset : offset + length],)
  return _pieces_of_many(store, part)


def _pieces_of_many(store: ChunkStore, part: Part) -> Iterator[np.ndarray]:
  chunks, offset, left = part
  for chunk in chunks:
    n = min(chunk.length - offset, left)
    yield store.read(chunk)[offset : offset + n]
    offset, left = 0, left - n
