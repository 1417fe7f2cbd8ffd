"""The messages between a replay service and its clients, as in docs/protocol.md.

Here are the kinds of messages and the layout of their arrays. Input is not trusted: anything that
is not exactly as expected raises WireError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import zstandard

from podrace.distributed.net import reports, session_messages
from podrace.distributed.net.frame import DTYPE, Kind, WireError, check_fields, packed, read_map
from podrace.tables import trees
from podrace.tables.chunks import AS_IS, DIFFERENCES, Chunk, ChunkStore
from podrace.tables.items import Leaf, Signature

SERVICE = 'podrace replay'
# Of a client. Requests begin with a number, which their ANSWER repeats.
TABLE = packed(16, 'TABLE', int, str, dict, about='question, table, settings')
DECLARE = packed(17, 'DECLARE', dict, about='names')
INSERT = packed(
  18, 'INSERT', int, arrays=6,
  about='message; chunks, items, parts, references u64, released u64, bytes',
)  # fmt: skip
SAMPLE = packed(
  19, 'SAMPLE', int, str, int, int, bool, float, int,
  about='question, table, n, at_least, peek, seconds, received',
)  # fmt: skip
CANCEL = packed(20, 'CANCEL', int, about='question of a SAMPLE')
UPDATE = packed(21, 'UPDATE', int, str, arrays=2, about='question, table; keys i64, priorities f64')
DELETE = packed(22, 'DELETE', int, str, arrays=1, about='question, table; keys i64')
INFO = packed(23, 'INFO', int, str, about='question, table')
SAVE = packed(24, 'SAVE', int, about='question')
# Of the service.
ACK = packed(
  80, 'ACK', int, str, arrays=3,
  about='message, reason; numbers u64 of items that are in, that wait, that are refused',
)  # fmt: skip
SAMPLES = packed(
  81, 'SAMPLES', int, int, str, int, arrays=5,
  about='question, signature, reason, size of the table; '
  'items, parts, references u32, chunks, bytes',
)  # fmt: skip
SIGNATURE = packed(82, 'SIGNATURE', int, list, about='number, signature')
ANSWER = packed(83, 'ANSWER', int, bool, object, about='question, good, value')
OF_CLIENTS = session_messages.of_clients(
  TABLE, DECLARE, INSERT, SAMPLE, CANCEL, UPDATE, DELETE, INFO, SAVE
)
OF_SERVICES = session_messages.of_listeners(ACK, SAMPLES, SIGNATURE, ANSWER)

KEY_BITS = 20  # of a key that are counted; the writer draws the rest
MOST_ITEMS = 65536  # of a client, sent and not yet inserted; and of one sample
MOST_REQUESTS = 4096  # samples for which a client waits
MOST_BYTES = 2**28  # of samples that were sent to a client and not acknowledged
MOST_UNREAD = 128  # messages of such samples
MESSAGE_ITEMS, MESSAGE_BYTES = 512, 2**20  # at which an INSERT is full
MESSAGE_CHUNKS = 2**19  # new chunks, and references to chunks, of an INSERT or a sample
MESSAGE_KEYS = 2**16  # of an UPDATE or DELETE
MESSAGE_PARTS = 2**19  # of a sample: items times leaves
FRAME_BYTES = 2**30  # a larger frame closes the connection
ROWS = 2**20  # of a chunk without bytes
UNPACKED_CHUNK_BYTES = 2**26  # of a packed chunk, if it has more than one row
UNPACKED_SAMPLE_BYTES = 2**32  # of one message of samples
DEPTH, LEAVES, NODES = 32, 1024, 4096  # of a signature; nodes are leaves and their parents
KEY_CHARACTERS, NAME_CHARACTERS = 200, 1000  # of a key in a structure, and of the name of a leaf


def _layout(**fields: str) -> np.dtype:
  return np.dtype(list(fields.items()))


CHUNK = _layout(spec='<u4', rows='<u4', how='<u4', bytes='<u4')
ITEM = _layout(number='<u8', key='<i8', priority='<f8', table='<u4', signature='<u4')
PART = _layout(chunks='<u4', offset='<u4', rows='<u4')
DRAWN = _layout(key='<i8', probability='<f8', table_size='<i8', priority='<f8', times_sampled='<i8')
INSERTED = CHUNK, ITEM, PART, '<u8', '<u8'  # the arrays of an INSERT before the bytes
assert (CHUNK.itemsize, ITEM.itemsize, PART.itemsize, DRAWN.itemsize) == (16, 32, 12, 40)


def read_records(frame: Any, dtype: Any) -> np.ndarray:
  """Return the records in a frame; raise WireError if its size does not fit."""
  dtype = np.dtype(dtype)
  if len(frame) % dtype.itemsize:
    raise WireError(f'a frame of {len(frame)} bytes, expected records of {dtype.itemsize}')
  return np.frombuffer(frame, dtype)


def pack_numbers(numbers: Iterable[int]) -> bytes:
  """Return numbers of items in ascending order, as `read_records` reads them."""
  return np.array(sorted(numbers), '<u8').tobytes()


# --- signatures


def pack_signature(signature: Signature) -> list[Any]:
  """Return a signature as msgpack has it."""
  leaves = [[x.name, x.dtype.str, list(x.shape), x.single] for x in signature.leaves]
  return [trees.to_json(signature.structure), leaves]


def read_signature(details: Any) -> Signature:
  """Read a signature of `pack_signature`; raise WireError if it is malformed."""
  try:
    document, descriptions = details
    count, nodes = _check_structure(document, DEPTH)
    if nodes > NODES:
      raise WireError(f'a structure of {nodes} nodes, at most {NODES}')
    if type(descriptions) is not list:
      raise WireError('a signature without a list of leaves')
    if count != len(descriptions) or not 1 <= count <= LEAVES:
      raise WireError(f'a signature of {count} leaves, of which {len(descriptions)} are described')
    leaves = []
    for name, dtype, shape, single in descriptions:
      if type(name) is not str or len(name) > NAME_CHARACTERS or type(single) is not bool:
        raise WireError(
          f'a leaf without a name of at most {NAME_CHARACTERS} characters, or that is neither '
          'single nor over time'
        )
      leaves.append(Leaf(name, *read_spec([dtype, shape]), single))
    return Signature(trees.from_json(document), tuple(leaves))
  except (TypeError, ValueError) as e:
    raise WireError(f'a signature that is none ({e})') from None


def _check_structure(document: Any, depth: int) -> tuple[int, int]:
  """Check a structure and return its number of leaves and of nodes."""
  label, keys, children = document
  if depth == 0 or type(label) is not str or len(label) > 200:
    raise WireError('a structure that is too deep, or without a label')
  if (
    type(keys) is not list
    or type(children) is not list
    or any(type(k) is not str or len(k) > KEY_CHARACTERS for k in keys)
  ):
    raise WireError(
      'a structure without lists of keys and children, or with a key that is no string of at most '
      f'{KEY_CHARACTERS} characters'
    )
  if len(set(keys)) < len(keys):
    raise WireError('a structure with a key that is there twice')
  if label == 'leaf':
    if keys or children:
      raise WireError('a leaf with something in it')
    return 1, 1
  named = label.startswith('named ')
  if not named and label not in ('dict', 'tuple', 'list'):
    raise WireError(f'a structure of kind {label!r}')
  if len(keys) != (len(children) if named or label == 'dict' else 0):
    raise WireError('a structure whose keys are not those of its children')
  counts = [_check_structure(child, depth - 1) for child in children]
  return sum(leaves for leaves, _ in counts), 1 + sum(nodes for _, nodes in counts)


def read_spec(details: Any) -> tuple[np.dtype, tuple[int, ...]]:
  """Read the dtype and shape of a row; raise WireError if they are malformed."""
  try:
    name, shape = details
    dtype = np.dtype(name) if type(name) is str and DTYPE.fullmatch(name) else None
  except (TypeError, ValueError):
    dtype = None
  if dtype is None or dtype.str != name:
    raise WireError(f'{str(details)[:60]}, expected [dtype, shape] of numbers')
  if type(shape) is not list or len(shape) > 16 or any(type(n) is not int or n < 0 for n in shape):
    raise WireError(f'a shape {str(shape)[:60]}, expected a list of up to 16 whole numbers')
  # NumPy needs the other lengths to be in bounds even if one is 0.
  most = row_bytes(dtype, [max(n, 1) for n in shape])
  if most > FRAME_BYTES:
    raise WireError(f'rows of {shape}, which is {most} bytes, at most {FRAME_BYTES}')
  return dtype, tuple(shape)


def row_bytes(dtype: np.dtype, shape: Sequence[int]) -> int:
  """Return the bytes of one row."""
  return dtype.itemsize * math.prod(shape)


# --- chunks


def make_chunk(
  store: ChunkStore, data: Any, how: int, rows: int, dtype: np.dtype, shape: tuple[int, ...]
) -> Chunk:
  """Make a chunk over the bytes of a message, without unpacking them.

  Args:
    store: of the chunk.
    data: the bytes.
    how: AS_IS, PACKED or DIFFERENCES.
    rows: of the chunk.
    dtype: of a row.
    shape: of a row.

  Raises:
    WireError: the bytes cannot be as many rows.
  """
  size = rows * row_bytes(dtype, shape)
  # Rows without bytes cost nothing here, but a number each at a client that samples them.
  if not size and rows > ROWS:
    raise WireError(f'a chunk of {rows} rows without bytes, at most {ROWS}')
  if how > DIFFERENCES:
    raise WireError(f'a chunk of kind {how}, expected at most {DIFFERENCES}')
  try:
    unpacked = len(data) if how == AS_IS else zstandard.frame_content_size(data)
  except zstandard.ZstdError as e:
    raise WireError(f'a chunk that is not zstandard ({e})') from None
  if unpacked != size or size > FRAME_BYTES:
    raise WireError(f'a chunk with {unpacked} bytes of rows, expected {size}')
  if how != AS_IS and rows > 1 and size > UNPACKED_CHUNK_BYTES:
    raise WireError(f'a packed chunk of {rows} rows with more than {UNPACKED_CHUNK_BYTES:,} bytes')
  return store.stored_chunk(data, how, dtype, shape, rows)


# The type of an accepted request's ANSWER, or its fields and their types.
OF_ANSWER: dict[Kind, Any] = {
  TABLE: dict(settings=dict, most=float),
  INFO: dict(
    reports.OF_TABLE,
    chunks=int,
    deletes=int,
    updates=int,
    seconds=dict,
    why_no_sample=str,
    why_no_insert=str,
  ),
  UPDATE: int,
  DELETE: int,
  SAVE: str,
}


def check_answer(kind: Kind, value: Any) -> None:
  """Raise WireError if an accepted request's ANSWER has a value of the wrong form."""
  expected = OF_ANSWER.get(kind)
  what = f'good answer to {kind.name}'
  if isinstance(expected, dict):
    read_map(what, value, expected)
  elif expected is not None:
    check_fields(what, [value], (expected,))
  else:
    raise WireError(f'a {what}, which has none')
  if kind is INFO:
    check_fields(what, list(value['seconds'].values()), (float,) * len(value['seconds']))
    if value.get('max_bytes') is not None:
      check_fields(what, [value['max_bytes']], (int,))


def check_part(leaf: Leaf, chunks: Sequence[Chunk], offset: int, rows: int) -> int:
  """Check the rows of a part and return the number of rows of its chunks.

  Args:
    leaf: of the part.
    chunks: of the part, all of which it must need.
    offset: of its first row in the first chunk.
    rows: of the part.

  Raises:
    WireError: the chunks do not fit.
  """
  total = 0
  for chunk in chunks:
    if chunk.dtype != leaf.dtype or chunk.shape != leaf.shape:
      raise WireError(f'a chunk of {chunk.dtype}{list(chunk.shape)} in {leaf}')
    total += chunk.length
  if not chunks or not rows or offset + rows > total or offset >= chunks[0].length:
    raise WireError(f'rows {offset} to {offset + rows} of {total} in {leaf}')
  if offset + rows <= total - chunks[-1].length:
    raise WireError(
      f'rows {offset} to {offset + rows} of {total} in {leaf}, without the last chunk'
    )
  if leaf.single and rows != 1:
    raise WireError(f'{rows} rows in {leaf}, which is single')
  return total
