"""What replay and parameters say over the wire, byte by byte as in docs/protocol.md.

Here are the kinds of messages, and what is in their arrays.
Everything that comes in is somebody else's: what is not exactly as it should be is a WireError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import zstandard

from podrace import tables
from podrace.net import session
from podrace.net.frame import WireError, packed
from podrace.tables import trees
from podrace.tables.chunks import Chunk, ChunkStore, unpack_into
from podrace.tables.items import Draws, Leaf, Samples, Signature
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector

SERVICE = 'podrace replay'
# Of a client; requests begin with a number, which their ANSWER has.
TABLE = packed(16, 'TABLE', int, str, dict)  # name, settings
DECLARE = packed(17, 'DECLARE', dict)
INSERT = packed(
  18, 'INSERT', int, arrays=6
)  # number; chunks, items, parts, chunks' numbers, released, bytes
SAMPLE = packed(19, 'SAMPLE', int, str, int, int, bool, float, int)
CANCEL = packed(20, 'CANCEL', int)
UPDATE = packed(21, 'UPDATE', int, str, arrays=2)  # table; keys, priorities
DELETE = packed(22, 'DELETE', int, str, arrays=1)  # table; keys
INFO = packed(23, 'INFO', int, str)
SAVE = packed(24, 'SAVE', int)
# Of the service.
ACK = packed(
  80, 'ACK', int, str, arrays=3
)  # INSERT, why; items that are in, that wait, that are refused
SAMPLES = packed(
  81, 'SAMPLES', int, int, str, int, arrays=5
)  # SAMPLE, signature, why, size of the table
SIGNATURE = packed(82, 'SIGNATURE', int, list)
ANSWER = packed(83, 'ANSWER', int, bool, object)
OF_CLIENTS = session.of_clients(TABLE, DECLARE, INSERT, SAMPLE, CANCEL, UPDATE, DELETE, INFO, SAVE)
OF_SERVICES = session.of_listeners(ACK, SAMPLES, SIGNATURE, ANSWER)

KEY_BITS = 20  # of a key, below what the writer has drawn
MOST_ITEMS = 65536  # of a client, sent and not yet inserted; and of one sample
MOST_BYTES = 2**28  # of samples that a client is sent and has not said to have
MOST_UNREAD = 128  # messages of them
MESSAGE_ITEMS, MESSAGE_BYTES = 512, 2**20  # of an INSERT: it is sent with so many
MESSAGE_CHUNKS = 2**20  # new ones, or references to chunks, of an INSERT
MESSAGE_KEYS = 2**16  # of an UPDATE or DELETE
FRAME_BYTES = 2**30  # a larger frame closes the connection
UNPACKED_CHUNK_BYTES = 2**26  # of a packed chunk, if it has more than one row
UNPACKED_SAMPLE_BYTES = 2**32  # of all that one message of samples is unpacked to
DEPTH, LEAVES = 32, 1024  # of a signature
MOST_NUMBER = 1e15  # of a rate limiter's that is finite

AS_IS, PACKED, DIFFERENCES = 0, 1, 2  # how a chunk's bytes are to be read
CHUNK = np.dtype([('spec', '<u4'), ('rows', '<u4'), ('how', '<u4'), ('bytes', '<u4')])
ITEM = np.dtype(
  [
    ('number', '<u8'),
    ('key', '<i8'),
    ('priority', '<f8'),
    ('table', '<u4'),
    ('signature', '<u4'),
  ]
)
PART = np.dtype([('chunks', '<u4'), ('offset', '<u4'), ('rows', '<u4')])
DRAWN = np.dtype(
  [
    ('key', '<i8'),
    ('probability', '<f8'),
    ('table_size', '<i8'),
    ('priority', '<f8'),
    ('times_sampled', '<i8'),
  ]
)
INSERTED = CHUNK, ITEM, PART, '<u8', '<u8'  # of an INSERT's arrays, before the bytes
assert (CHUNK.itemsize, ITEM.itemsize, PART.itemsize, DRAWN.itemsize) == (16, 32, 12, 40)


def records(frame: Any, dtype: Any) -> np.ndarray:
  """A frame's records, which it must hold without rest."""
  dtype = np.dtype(dtype)
  if len(frame) % dtype.itemsize:
    raise WireError(f'a frame of {len(frame)} bytes, expected records of {dtype.itemsize}')
  return np.frombuffer(frame, dtype)


def numbers(every: Iterable[int]) -> bytes:
  """Numbers of items in their order, as `records` reads them."""
  return np.array(sorted(every), '<u8').tobytes()


# --- signatures -------------------------------------------------------------------------------------


def packed_signature(signature: Signature) -> list[Any]:
  """A signature as msgpack has it."""
  leaves = [[x.name, x.dtype.str, list(x.shape), x.single] for x in signature.leaves]
  return [trees.to_json(signature.structure), leaves]


_DTYPE = re.compile(r'[<>|][biufc]\d{1,2}')


def read_signature(details: Any) -> Signature:
  """What `packed_signature` made; raises WireError for anything else."""
  try:
    document, described = details
    count = _check_structure(document, DEPTH)
    if type(described) is not list:
      raise WireError('a signature without a list of leaves')
    if count != len(described) or not 1 <= count <= LEAVES:
      raise WireError(f'a signature of {count} leaves, of which {len(described)} are described')
    leaves = []
    for name, dtype, shape, single in described:
      if type(name) is not str or type(single) is not bool:
        raise WireError('a leaf without a name, or that is neither single nor over time')
      leaves.append(Leaf(name, *read_spec([dtype, shape]), single))
    return Signature(trees.from_json(document), tuple(leaves))
  except (TypeError, ValueError) as e:
    raise WireError(f'a signature that is none ({e})') from None


def _check_structure(document: Any, depth: int) -> int:
  """How many leaves it has."""
  label, keys, children = document
  if depth == 0 or type(label) is not str or len(label) > 200:
    raise WireError('a structure that is too deep, or without a label')
  if type(keys) is not list or type(children) is not list or any(type(k) is not str for k in keys):
    raise WireError(
      'a structure without lists of keys and children, or with a key that is no string'
    )
  if len(set(keys)) < len(keys):
    raise WireError('a structure with a key that is there twice')
  if label == 'leaf':
    if keys or children:
      raise WireError('a leaf with something in it')
    return 1
  named = label.startswith('named ')
  if not named and label not in ('dict', 'tuple', 'list'):
    raise WireError(f'a structure of kind {label!r}')
  if len(keys) != (len(children) if named or label == 'dict' else 0):
    raise WireError('a structure whose keys are not those of its children')
  return sum(_check_structure(child, depth - 1) for child in children)


def read_spec(details: Any) -> tuple[np.dtype, tuple[int, ...]]:
  """(dtype, shape) of one row."""
  try:
    name, shape = details
    dtype = np.dtype(name) if type(name) is str and _DTYPE.fullmatch(name) else None
  except (TypeError, ValueError):
    dtype = None
  if dtype is None or dtype.str != name:
    raise WireError(f'{str(details)[:60]}, expected [dtype, shape] of numbers')
  if type(shape) is not list or len(shape) > 16 or any(type(n) is not int or n < 0 for n in shape):
    raise WireError(f'a shape {str(shape)[:60]}, expected a list of up to 16 whole numbers')
  most = row_bytes(dtype, [max(n, 1) for n in shape])  # numpy wants the rest to be in bounds, too
  if most > FRAME_BYTES:
    raise WireError(f'rows of {shape}, which is {most} bytes, at most {FRAME_BYTES}')
  return dtype, tuple(shape)


def row_bytes(dtype: np.dtype, shape: Sequence[int]) -> int:
  """Bytes of one row."""
  n = dtype.itemsize
  for x in shape:
    n *= x
  return n


# --- tables' settings -------------------------------------------------------------------------------

RUN = 'run'  # the setting that says of which run a table is
CONTENTS = (
  'contents'  # the setting that says what its items must hold, see podrace.service.contents
)
_SELECTORS: dict[str, Any] = {
  'uniform': tables.uniform,
  'fifo': tables.fifo,
  'lifo': tables.lifo,
  'min_heap': tables.min_heap,
  'max_heap': tables.max_heap,
  'prioritized': tables.prioritized,
}


def selector(text: str) -> Selector:
  """Of a name such as fifo, prioritized:0.6 or prioritized(0.6).

  Raises:
    ValueError: for any other.
  """
  found = re.fullmatch(r'(\w+)(?::([^()]+)|\(([^()]+)\))?', text)
  name, number = (found[1], found[2] or found[3]) if found else ('', None)
  if name not in _SELECTORS or (number is None) == (name == 'prioritized'):
    names = ', '.join(x for x in _SELECTORS if x != 'prioritized')
    raise ValueError(f'a selector is {names} or prioritized:EXPONENT, not {text!r}')
  return _SELECTORS[name](float(number)) if number else _SELECTORS[name]()


def packed_settings(
  *,
  sampler: Selector,
  remover: Selector,
  rate_limiter: RateLimiter,
  max_size: int,
  max_bytes: int | None = None,
  max_times_sampled: int = 0,
  run: str = '',
  contents: list[Any] | None = None,
) -> dict[str, Any]:
  """A table's settings as msgpack and JSON have them; `run`, if it is of one, is the run's name."""
  details = dict(
    sampler=sampler.name,
    remover=remover.name,
    rate_limiter=[rate_limiter.name, *map(float, rate_limiter.numbers)],
    max_size=max_size,
    max_bytes=max_bytes,
    max_times_sampled=max_times_sampled,
  )
  return details | ({RUN: run} if run else {}) | ({CONTENTS: contents} if contents else {})


def make_table(name: str, store: ChunkStore, details: Any) -> tables.Table:
  """A table with the settings that `packed_settings` made.

  Raises:
    ValueError: if there can't be such a table.
  """
  try:
    limiter = _limiter(*details['rate_limiter'])
    sampler, remover = selector(details['sampler']), selector(details['remover'])
    sizes = {k: details[k] for k in ('max_size', 'max_bytes', 'max_times_sampled')}
  except (KeyError, TypeError) as e:
    raise ValueError(f'table {name!r}: settings without {e}') from None
  if more := details.keys() - sizes.keys() - {'rate_limiter', 'sampler', 'remover', RUN, CONTENTS}:
    raise ValueError(f'table {name!r}: settings {sorted(map(str, more))}, which there are not')
  if RUN in details and not (type(details[RUN]) is str and 0 < len(details[RUN]) <= 200):
    raise ValueError(f'table {name!r}: a run that is not a name of at most 200 characters')
  for k, v in sizes.items():
    if type(v) is not int and not (k == 'max_bytes' and v is None):
      raise ValueError(f'table {name!r}: {k}={v!r} must be a whole number')
  return tables.Table(name, store, sampler=sampler, remover=remover, rate_limiter=limiter, **sizes)


def _limiter(name: Any, spi: Any, least: Any, low: Any, high: Any) -> RateLimiter:
  """One with whose numbers nothing overflows; raises ValueError for any other."""
  if type(name) is not str or len(name) > 200:
    raise ValueError('a rate limiter without a name of at most 200 characters')
  if any(type(x) not in (int, float) for x in (spi, least, low, high)):
    raise ValueError(f'{name}: {[spi, least, low, high]}, expected four numbers')
  if not 1 / MOST_NUMBER <= spi <= MOST_NUMBER:
    raise ValueError(f'{name}: samples_per_insert must be positive and finite, not {spi}')
  if not 1 <= least <= MOST_NUMBER or least != int(least):
    raise ValueError(f'{name}: min_size must be a whole number of at least 1, not {least}')
  if not (low == -math.inf or abs(low) <= MOST_NUMBER):
    raise ValueError(f'{name}: min_diff must be -infinity or at most {MOST_NUMBER:g}, not {low}')
  if not (high == math.inf or abs(high) <= MOST_NUMBER):
    raise ValueError(f'{name}: max_diff must be infinity or at most {MOST_NUMBER:g}, not {high}')
  return RateLimiter(name, float(spi), int(least), float(low), float(high))


def settings_differences(name: str, there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
  """A line for each setting in which a table is not what was asked for; of another run that one."""
  if RUN in asked and asked[RUN] != there.get(RUN):
    return [
      f'table {name!r} is of {_run(there.get(RUN))}, {_run(asked[RUN])} asks for it: each run needs a '
      '`podrace replay` of its own, with another --listen and --dir; or end all processes of the other '
      'run, and start this `podrace replay` anew, with another --dir or none'
    ]
  return [
    f'table {name!r}: {k} is {there[k]} at the server, {asked.get(k)} is asked for'
    for k in there
    if k not in (RUN, CONTENTS) and _compared(k, there[k]) != _compared(k, asked.get(k))
  ]


def _run(name: Any) -> str:
  return 'no run' if name is None else f'run {name!r}'


def _compared(setting: str, value: Any) -> Any:
  """What must be the same; of a limiter not its name, which is shown only."""
  return value[1:] if setting == 'rate_limiter' and isinstance(value, list) else value


# --- samples ----------------------------------------------------------------------------------------


def sample_frames(draws: Draws) -> list[Any]:
  """The five frames of SAMPLES: what was drawn, parts, their chunks' numbers, chunks, bytes.

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
  parts: list[Any] = []
  refs: list[int] = []
  chunks: list[Any] = []
  data: list[Any] = []
  for leaf in range(len(items[0].parts)):  # so that a column's rows are one after the other
    for item in items:
      needed, offset, rows = item.parts[leaf]
      if len(needed) == 1:
        chunk = needed[0]
        array = chunk.array
        if array is not None and 2 * rows <= chunk.length:
          array = array[offset : offset + rows]
          parts.append((1, 0, rows))
          refs.append(len(chunks))
          chunks.append((0, rows, AS_IS, array.nbytes))
          data.append(array)
          continue
      parts.append((len(needed), offset, rows))
      for chunk in needed:
        number = numbers.get(chunk.key)
        if number is None:
          number = numbers[chunk.key] = len(chunks)
          if chunk.packed is not None:
            packed, differences = chunk.packed
            data.append(packed)
            chunks.append((0, chunk.length, DIFFERENCES if differences else PACKED, len(packed)))
          else:
            data.append(chunk.array)
            chunks.append((0, chunk.length, AS_IS, chunk.nbytes))
        refs.append(number)
  if (size := sum(chunk[3] for chunk in chunks)) > FRAME_BYTES:
    raise ValueError(
      f'{len(items)} items of {size:,} bytes, of which a sample has at most {FRAME_BYTES:,}: '
      'ask for fewer at a time'
    )
  joined = b''.join(data)
  return [
    drawn,
    np.array(parts, '<u4'),
    np.array(refs, '<u4'),
    np.array(chunks, '<u4'),
    joined,
  ]


def read_samples(signature: Signature, frames: Sequence[Any]) -> Samples:
  """What SAMPLES' frames hold, unpacked and stacked as `Table.sample` does.

  Raises:
    WireError: if they don't fit together.
  """
  drawn, parts, refs = (
    records(frames[0], DRAWN),
    records(frames[1], PART),
    records(frames[2], '<u4'),
  )
  chunks, data = records(frames[3], CHUNK), memoryview(frames[4]).cast('B')
  n, leaves = len(drawn), signature.leaves
  if n == 0 or len(parts) != n * len(leaves) or int(parts['chunks'].sum()) != len(refs):
    raise WireError(f'{len(parts)} parts over {len(refs)} chunks for {n} items')
  if int(chunks['bytes'].astype(np.int64).sum()) != len(data):
    raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
  if len(refs) and int(refs.max()) >= len(chunks):
    raise WireError('a part over a chunk that was not sent')
  ends = np.cumsum(chunks['bytes'], dtype=np.int64)
  reader = _Reader(chunks, ends, data)
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

  def __init__(self, chunks: np.ndarray, ends: np.ndarray, data: memoryview) -> None:
    self._chunks, self._ends, self._data = chunks, ends, data
    self._made: dict[int, np.ndarray] = {}
    self._room = UNPACKED_SAMPLE_BYTES

  def _take_room(self, rows: int, leaf: Leaf) -> None:
    """Refuses what a few bytes would be unpacked to, if that is more than anybody samples."""
    self._room -= rows * row_bytes(leaf.dtype, leaf.shape)
    if self._room < 0:
      raise WireError(f'samples of more than {UNPACKED_SAMPLE_BYTES:,} bytes unpacked, in {leaf}')

  def leaf(self, leaf: Leaf, parts: np.ndarray, refs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows [n, L, ...], lengths [n]) of one leaf's parts."""
    if (direct := self._direct(leaf, parts, refs)) is not None:
      return direct
    times = np.bincount(refs)
    numbers, rows = iter(refs.tolist()), parts['rows'].astype(np.int64)
    if (rows == 0).any():
      raise WireError(f'a part without rows in {leaf}')
    longest = int(rows.max())
    self._take_room(len(parts) * longest, leaf)
    whole = (rows == longest).all()
    out = (np.empty if whole else np.zeros)((len(parts), longest, *leaf.shape), leaf.dtype)
    for into, (count, offset, length) in zip(out, parts.tolist(), strict=True):
      done = 0
      for _ in range(count):
        done += self._copy(next(numbers), leaf, offset, into[done:length], times)
        offset = 0
      if done != length:
        raise WireError(f'{length} rows, of which {done} are in their chunks')
    return out, rows

  def _copy(self, number: int, leaf: Leaf, offset: int, into: np.ndarray, times: np.ndarray) -> int:
    """Copies rows of a chunk from `offset` on, as many as there are or fit; how many."""
    _, rows, how, size = self._chunks[number].tolist()
    n = min(rows - offset, len(into))
    if n <= 0:
      raise WireError(f'row {offset} of {rows}, or one too many')
    if n == rows and times[number] == 1:  # nobody else needs it: straight to where it is needed
      end = int(self._ends[number])
      read_chunk(self._data[end - size : end], how, into[:n])
    else:
      into[:n] = self._chunk(number, leaf)[offset : offset + n]
    return n

  def _direct(self, leaf: Leaf, parts: np.ndarray, refs: np.ndarray) -> Any:
    """Without a loop, if each part is a chunk of its own, as it is, and all are as long."""
    first, n = int(refs[0]), len(refs)
    rows = int(parts['rows'][0])
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
    size = rows * row_bytes(leaf.dtype, leaf.shape)
    if (own['bytes'] != size).any() or not rows:
      raise WireError(f'chunks that have not {rows} rows of {leaf}')
    end = int(self._ends[first + n - 1])
    array = np.frombuffer(self._data[end - n * size : end], leaf.dtype)
    return array.reshape(n, rows, *leaf.shape).copy(), np.full(n, rows)

  def _chunk(self, number: int, leaf: Leaf) -> np.ndarray:
    array = self._made.get(number)
    if array is None:
      _, rows, how, size = self._chunks[number].tolist()
      if (
        how != AS_IS
        and rows > 1
        and rows * row_bytes(leaf.dtype, leaf.shape) > UNPACKED_CHUNK_BYTES
      ):
        raise WireError(f'a chunk of {rows} rows in {leaf}')
      self._take_room(rows, leaf)
      end = int(self._ends[number])
      array = self._made[number] = np.empty((rows, *leaf.shape), leaf.dtype)
      read_chunk(self._data[end - size : end], how, array)
    elif array.dtype != leaf.dtype or array.shape[1:] != leaf.shape:
      raise WireError(f'a chunk of {array.dtype}{list(array.shape[1:])} in {leaf}')
    return array


def check_chunk(data: Any, how: int, size: int) -> None:
  """Refuses a chunk whose bytes can't be `size` bytes of rows; nothing is unpacked."""
  if how > DIFFERENCES:
    raise WireError(f'a chunk of kind {how}, expected at most {DIFFERENCES}')
  try:
    found = len(data) if how == AS_IS else zstandard.frame_content_size(data)
  except zstandard.ZstdError as e:
    raise WireError(f'a chunk that is not zstandard ({e})') from None
  if found != size or size > FRAME_BYTES:
    raise WireError(f'a chunk with {found} bytes of rows, expected {size}')


def make_chunk(
  store: ChunkStore, data: Any, how: int, rows: int, dtype: np.dtype, shape: tuple[int, ...]
) -> Chunk:
  """A chunk as it is kept, of a copy of its bytes; nothing is unpacked."""
  size = rows * row_bytes(dtype, shape)
  check_chunk(data, how, size)
  if how == AS_IS:
    return store.chunk(np.frombuffer(bytes(data), dtype).reshape(rows, *shape), rows)
  if rows > 1 and size > UNPACKED_CHUNK_BYTES:
    raise WireError(f'a packed chunk of {rows} rows with more than {UNPACKED_CHUNK_BYTES:,} bytes')
  return store.packed_chunk(bytes(data), how == DIFFERENCES, dtype, shape, rows)


def read_chunk(data: Any, how: int, into: np.ndarray) -> None:
  """Writes a chunk's rows [rows, ...] to where they belong."""
  check_chunk(data, how, into.nbytes)
  if how == AS_IS:
    into[...] = np.frombuffer(data, into.dtype).reshape(into.shape)
    return
  try:
    unpack_into((data, how == DIFFERENCES), into)
  except (zstandard.ZstdError, ValueError) as e:
    raise WireError(f'a chunk that is damaged ({e})') from None
