"""Storage of steps: columns of arrays, cut into compressed and shared chunks.

Each chunk is written once. It belongs to all accounts (tables, writers) that hold it, and is
freed when the last account drops it. One lock guards all accounts of a store and its tables.
Packing, unpacking and copying happen outside the lock, which is safe because written rows never
change.

benchmarks/tables.py compares the codecs, and docs/tables.md states the choice.
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
LEAST = 128  # bytes; smaller chunks are not compressed
MUST_SAVE = 0.875  # largest ratio at which the packed form is kept
BYTES_PER_CHUNK = 2**18  # limit of a chunk, as is ROWS_PER_CHUNK
ROWS_PER_CHUNK = 256
WIDE = 1024  # bytes of a row from which differences are summed row by row
SMALL = 4096  # bytes of a part up to which parts are concatenated at once
AS_IS, PACKED, DIFFERENCES = 0, 1, 2  # encodings of rows, also in checkpoints and messages

Packed = tuple[bytes, int]  # rows and their encoding, PACKED or DIFFERENCES
Part = tuple[tuple['Chunk', ...], int, int]  # chunks, offset in the first one, rows


class Account:
  """Chunks of one holder and their stored size in bytes. A chunk held twice counts once."""

  __slots__ = ('bytes', 'chunks')

  def __init__(self) -> None:
    self.bytes = self.chunks = 0


class Lock:
  """Lock for short sections of Python that many threads enter. A thread that cannot get it yields.

  A plain lock is handed to a waiting thread, which then still waits for the interpreter. Meanwhile
  the thread that has the interpreter soon waits for the lock. Once that begins, each section costs
  a thread switch: with 4 writers it halved the rate of inserts. Here only a running thread gets the
  lock. After TRIES failures a thread blocks as on a plain lock.
  """

  TRIES = 200

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self.release = self._lock.release

  def acquire(self, blocking: bool = True) -> bool:
    """Acquire the lock and return whether it was acquired, as threading.Lock.acquire."""
    if self._lock.acquire(False):
      return True
    if not blocking:
      return False
    for _ in range(self.TRIES):
      time.sleep(0)  # releases the interpreter
      if self._lock.acquire(False):
        return True
    return self._lock.acquire()

  def __enter__(self) -> None:
    if not self._lock.acquire(False):
      self.acquire()

  def __exit__(self, *error: object) -> None:
    self._lock.release()


class Chunk:
  """Rows [length, ...] of one column: as an array, packed, or (while in the cache) both."""

  __slots__ = ('__weakref__', 'array', 'dtype', 'holders', 'key', 'length', 'nbytes', 'packed',
               'passed', 'shape', 'used')  # fmt: skip

  def __init__(self, key: int, array: np.ndarray, length: int) -> None:
    self.key = key
    self.dtype, self.shape = array.dtype, array.shape[1:]
    self.array: np.ndarray | None = array  # may have room for more rows
    self.length = length  # written rows
    self.packed: Packed | None = None
    self.holders: dict[Account, int] = {}
    self.nbytes = array.nbytes  # as accounted, without the cached copy
    self.used = False  # since the cache's last inspection
    self.passed: Any = None  # check that its rows have passed


class ChunkStore:
  """Shared state of its tables: chunks, the lock, item keys and a cache of unpacked chunks.

  Chunks that writers are filling, and chunks that would not shrink, stay unpacked outside the
  cache.

  Args:
    cache_bytes: Limit of the unpacked copies of packed chunks.
  """

  def __init__(self, cache_bytes: int = 2**24) -> None:
    if cache_bytes < 0:
      raise ValueError(f'{cache_bytes=} must not be negative')
    self.lock = Lock()
    self.cache_bytes = cache_bytes
    self.total = Account()  # over all holders
    self.cached = 0  # bytes in the cache
    self.tables: dict[str, Any] = {}  # by name
    self._cache: OrderedDict[int, Chunk] = OrderedDict()
    self.next_key = 1  # key of the next item
    self._chunk_keys = itertools.count(1)
    self._values: dict[Any, Any] = {}

  def chunk(self, array: np.ndarray, length: int) -> Chunk:
    """Make a chunk without holders from an array with `length` written rows."""
    return Chunk(next(self._chunk_keys), array, length)  # `next` is one call into C: no lock

  def stored_chunk(
    self, data: bytes, encoding: int, dtype: np.dtype, shape: tuple[int, ...], length: int
  ) -> Chunk:
    """Make a chunk without holders from the result of `encode` for rows [length, *shape]."""
    if encoding == AS_IS:
      return self.chunk(np.frombuffer(data, dtype).reshape(length, *shape), length)
    chunk = self.chunk(np.empty((0, *shape), dtype), length)
    chunk.packed, chunk.nbytes, chunk.array = (data, encoding), len(data), None
    return chunk

  def same(self, value: Any) -> Any:
    """Return the first value passed that equals `value`, so that `is` compares values."""
    return self._values.setdefault(value, value)

  def hold(self, chunk: Chunk, account: Account) -> None:
    """Hold a chunk for an account. Requires the lock."""
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
    """Drop an account's hold on a chunk. Requires the lock."""
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
    """Pack a chunk that is complete."""
    assert chunk.array is not None
    rows = chunk.array[: chunk.length]
    packed = pack(rows, differences)
    if packed is None and len(rows) < len(chunk.array):
      rows = rows.copy()
    with self.lock:
      self._resize(chunk, len(packed[0]) if packed else rows.nbytes)
      # `packed` is set first, as a reader that sees no array relies on it. The array is not
      # cached: it is rarely sampled next, and the next chunk is faster in warm memory.
      chunk.packed = packed
      chunk.array = None if packed else rows

  def read(self, chunk: Chunk) -> np.ndarray:
    """Return a chunk's rows, which must not be written to."""
    array = chunk.array
    if array is not None:
      chunk.used = True
      return array
    assert chunk.packed is not None
    array = unpack(chunk.packed, chunk.dtype, (chunk.length, *chunk.shape))
    with self.lock:
      if chunk.holders and chunk.array is None and array.nbytes <= self.cache_bytes:
        chunk.array = array
        self._keep(chunk)
    return array

  def read_into(self, chunk: Chunk, offset: int, rows: np.ndarray) -> None:
    """Copy a chunk's rows from `offset` into `rows`, a contiguous array.

    A whole chunk that has no holder, or does not fit into the cache, is unpacked directly into
    `rows`. Going through cold memory instead would cost three times as much.
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
    """Cache a chunk. Evict the oldest chunks that were not used since their last inspection."""
    self._cache[chunk.key] = chunk
    self.cached += _unpacked_bytes(chunk)
    chunk.used = False  # a chunk must be read again to survive
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


class _Codecs(threading.local):
  """Compressor and decompressor of each thread."""

  def __init__(self) -> None:
    self.compressor = zstandard.ZstdCompressor(level=LEVEL)
    self.decompressor = zstandard.ZstdDecompressor()


_codecs = _Codecs()


def encode(rows: np.ndarray, differences: bool) -> tuple[bytes, int]:
  """Return rows as bytes, and their encoding. Arguments as of `pack`."""
  return pack(rows, differences) or (rows.tobytes(), AS_IS)


def pack(rows: np.ndarray, differences: bool) -> Packed | None:
  """Compress rows. Return None if that saves too little.

  Args:
    rows: Array [n, ...].
    differences: Whether to compress differences along time. Integers only.
  """
  if rows.nbytes < LEAST:
    return None
  if differences:
    rows = difference(rows)
  packed = compress(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
  encoding = DIFFERENCES if differences else PACKED
  return (packed, encoding) if len(packed) <= MUST_SAVE * rows.nbytes else None


def compress(data: memoryview) -> bytes:
  """Compress data into a new object of exactly its size.

  ZstdCompressor.compress allocates the largest possible size and cuts off the rest. That leaves
  holes in the heap into which the next chunk does not fit: 100,000 Pong frames took 680 MB instead
  of 17.
  """
  into = io.BytesIO()
  with _codecs.compressor.stream_writer(into, size=len(data), closefd=False) as writer:
    writer.write(data)
  return into.getvalue()


def unpack(packed: Packed, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
  """Decompress rows into a new array."""
  rows = np.empty(shape, dtype)
  unpack_into(packed, rows)
  return rows


def unpack_into(packed: Packed, rows: np.ndarray) -> None:
  """Decompress rows into `rows`, a contiguous array.

  Raises:
    ValueError: If fewer bytes were packed.
  """
  data, encoding = packed
  into = rows.reshape(-1).view(np.uint8)
  done = _codecs.decompressor.stream_reader(data).readinto(into.data) if len(into) else 0
  if done != len(into):
    raise ValueError(f'{done} bytes were packed, expected {len(into)}')
  if encoding == DIFFERENCES:
    accumulate(rows)


def difference(rows: np.ndarray) -> np.ndarray:
  """Return each row minus the previous row, modulo the range of the integers."""
  bits = rows.view(np.dtype(f'u{rows.dtype.itemsize}'))
  found = bits.copy()
  np.subtract(bits[1:], bits[:-1], out=found[1:])
  return found.view(rows.dtype)


def accumulate(rows: np.ndarray) -> None:
  """Invert `difference` in place."""
  bits = rows.view(np.dtype(f'u{rows.dtype.itemsize}'))
  if bits[:1].nbytes < WIDE:
    np.add.accumulate(bits, axis=0, dtype=bits.dtype, out=bits)
    return
  for before, row in itertools.pairwise(bits):  # ten times as fast on frames
    np.add(row, before, out=row)


def differences_help(rows: np.ndarray) -> bool:
  """Return whether rows pack smaller as differences. Always false unless they are integers."""
  if rows.dtype.kind not in 'iu' or rows.nbytes < LEAST:
    return False
  plain, differences = (len(encode(rows, x)[0]) for x in (False, True))
  return differences < plain


# --- reading ----------------------------------------------------------------------------------


def gather(
  store: ChunkStore, parts: Sequence[Part], dtype: np.dtype, shape: tuple[int, ...]
) -> Any:
  """Stack parts, and pad the shorter ones with zeros.

  Returns:
    (rows [n, L, ...], lengths [n]), where L is the length of the longest part.
  """
  lengths = [part[2] for part in parts]
  longest = max(lengths)
  whole = min(lengths) == longest
  if whole and longest * math.prod(shape) * dtype.itemsize <= SMALL:
    pieces = [rows for part in parts for rows in _pieces(store, part)]
    rows = np.concatenate(pieces, dtype=dtype)  # without it, the byte order would become native
    return rows.reshape(len(parts), longest, *shape), np.array(lengths)
  # Each piece is copied while it is in the processor's cache, and is freed early.
  out = (np.empty if whole else np.zeros)((len(parts), longest, *shape), dtype)
  for into, (chunks, offset, length) in zip(out, parts, strict=True):
    done = 0
    for chunk in chunks:
      end = min(done + chunk.length - offset, length)
      store.read_into(chunk, offset, into[done:end])
      offset, done = 0, end
  return out, np.array(lengths)


def _pieces(store: ChunkStore, part: Part) -> Iterable[np.ndarray]:
  """Return the rows of a part, chunk by chunk."""
  chunks, offset, length = part
  if len(chunks) == 1:
    return (store.read(chunks[0])[offset : offset + length],)
  return _pieces_of_many(store, part)


def _pieces_of_many(store: ChunkStore, part: Part) -> Iterator[np.ndarray]:
  chunks, offset, left = part
  for chunk in chunks:
    n = min(chunk.length - offset, left)
    yield store.read(chunk)[offset : offset + n]
    offset, left = 0, left - n
