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
from podrace.distributed.net import reports, session_messages
from podrace.distributed.net.frame import NUMBER, Kind, WireError, check_fields, packed
from podrace.tables import trees
from podrace.tables.chunks import Chunk, ChunkStore
from podrace.tables.items import Leaf, Signature
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector

SERVICE = 'podrace replay'
# Of a client; requests begin with a number, which their ANSWER has.
TABLE = packed(16, 'TABLE', int, str, dict)  # name, settings
DECLARE = packed(17, 'DECLARE', dict)
# Chunks, items, parts, chunks' numbers, released, bytes.
INSERT = packed(18, 'INSERT', int, arrays=6)
SAMPLE = packed(19, 'SAMPLE', int, str, int, int, bool, float, int)
CANCEL = packed(20, 'CANCEL', int)
UPDATE = packed(21, 'UPDATE', int, str, arrays=2)  # table; keys, priorities
DELETE = packed(22, 'DELETE', int, str, arrays=1)  # table; keys
INFO = packed(23, 'INFO', int, str)
SAVE = packed(24, 'SAVE', int)
# Of the service.
ACK = packed(80, 'ACK', int, str, arrays=3)  # INSERT, why; items that are in, wait, are refused
# SAMPLE, signature, why, table's size.
SAMPLES = packed(81, 'SAMPLES', int, int, str, int, arrays=5)
SIGNATURE = packed(82, 'SIGNATURE', int, list)
ANSWER = packed(83, 'ANSWER', int, bool, object)
OF_CLIENTS = session_messages.of_clients(
  TABLE, DECLARE, INSERT, SAMPLE, CANCEL, UPDATE, DELETE, INFO, SAVE
)
OF_SERVICES = session_messages.of_listeners(ACK, SAMPLES, SIGNATURE, ANSWER)

KEY_BITS = 20  # of a key, below what the writer has drawn
MOST_ITEMS = 65536  # of a client, sent and not yet inserted; and of one sample
MOST_BYTES = 2**28  # of samples that a client is sent and has not said to have
MOST_UNREAD = 128  # messages of them
MESSAGE_ITEMS, MESSAGE_BYTES = 512, 2**20  # of an INSERT: it is sent with so many
MESSAGE_CHUNKS = 2**20  # new ones, or references to chunks, of an INSERT
MESSAGE_KEYS = 2**16  # of an UPDATE or DELETE
MESSAGE_PARTS = 2**19  # of a sample: items times leaves, and references to chunks
FRAME_BYTES = 2**30  # a larger frame closes the connection
ROWS = 2**20  # of a chunk whose rows have no bytes
UNPACKED_CHUNK_BYTES = 2**26  # of a packed chunk, if it has more than one row
UNPACKED_SAMPLE_BYTES = 2**32  # of all that one message of samples is unpacked to
DEPTH, LEAVES, NODES = 32, 1024, 4096  # of a signature; nodes are leaves and what has them
KEY_CHARACTERS, NAME_CHARACTERS = 200, 1000  # of a key in a structure, and of the name of a leaf
MOST_NUMBER = 1e15  # of a rate limiter's that is finite

AS_IS, PACKED, DIFFERENCES = 0, 1, 2  # how a chunk's bytes are to be read


def _layout(**fields: str) -> np.dtype:
  return np.dtype(list(fields.items()))


CHUNK = _layout(spec='<u4', rows='<u4', how='<u4', bytes='<u4')
ITEM = _layout(number='<u8', key='<i8', priority='<f8', table='<u4', signature='<u4')
PART = _layout(chunks='<u4', offset='<u4', rows='<u4')
DRAWN = _layout(key='<i8', probability='<f8', table_size='<i8', priority='<f8', times_sampled='<i8')
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
    count, nodes = _check_structure(document, DEPTH)
    if nodes > NODES:
      raise WireError(f'a structure of {nodes} nodes, at most {NODES}')
    if type(described) is not list:
      raise WireError('a signature without a list of leaves')
    if count != len(described) or not 1 <= count <= LEAVES:
      raise WireError(f'a signature of {count} leaves, of which {len(described)} are described')
    leaves = []
    for name, dtype, shape, single in described:
      if type(name) is not str or len(name) > NAME_CHARACTERS or type(single) is not bool:
        raise WireError(
          f'a leaf without a name of at most {NAME_CHARACTERS} characters, or that is neither single nor over time'
        )
      leaves.append(Leaf(name, *read_spec([dtype, shape]), single))
    return Signature(trees.from_json(document), tuple(leaves))
  except (TypeError, ValueError) as e:
    raise WireError(f'a signature that is none ({e})') from None


def _check_structure(document: Any, depth: int) -> tuple[int, int]:
  """How many leaves and how many nodes it has."""
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
  return dtype.itemsize * math.prod(shape)


# --- tables' settings -------------------------------------------------------------------------------

RUN = 'run'  # the setting that says of which run a table is
CONTENTS = 'contents'  # the one that says what its items must hold, see podrace.distributed.replay.item_schema
_SELECTORS = 'uniform', 'fifo', 'lifo', 'min_heap', 'max_heap', 'prioritized'


def selector(text: str) -> Selector:
  """Of a name such as fifo, prioritized:0.6 or prioritized(0.6).

  Raises:
    ValueError: for any other.
  """
  found = re.fullmatch(r'(\w+)(?::([^()]+)|\(([^()]+)\))?', text)
  name, number = (found[1], found[2] or found[3]) if found else ('', None)
  if name not in _SELECTORS or (number is None) == (name == 'prioritized'):
    raise ValueError(
      f'a selector is {", ".join(_SELECTORS[:-1])} or prioritized:EXPONENT, not {text!r}'
    )
  return getattr(tables, name)(*([float(number)] if number else []))


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
    if not (type(v) is int and v < NUMBER) and not (k == 'max_bytes' and v is None):
      raise ValueError(f'table {name!r}: {k}={v!r} must be a whole number below 2^63')
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
  for which, bound, unlimited in (('min', low, -math.inf), ('max', high, math.inf)):
    if not (bound == unlimited or abs(bound) <= MOST_NUMBER):
      raise ValueError(
        f'{name}: {which}_diff must be {unlimited} or at most {MOST_NUMBER:g}, not {bound}'
      )
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


# --- chunks -----------------------------------------------------------------------------------------


def make_chunk(
  store: ChunkStore, data: Any, how: int, rows: int, dtype: np.dtype, shape: tuple[int, ...]
) -> Chunk:
  """A chunk as it came, over these bytes, which can be so many rows; nothing is unpacked."""
  size = rows * row_bytes(dtype, shape)
  if (
    not size and rows > ROWS
  ):  # they cost nothing here, and a number each for a client that samples them
    raise WireError(f'a chunk of {rows} rows without bytes, at most {ROWS}')
  if how > DIFFERENCES:
    raise WireError(f'a chunk of kind {how}, expected at most {DIFFERENCES}')
  try:
    found = len(data) if how == AS_IS else zstandard.frame_content_size(data)
  except zstandard.ZstdError as e:
    raise WireError(f'a chunk that is not zstandard ({e})') from None
  if found != size or size > FRAME_BYTES:
    raise WireError(f'a chunk with {found} bytes of rows, expected {size}')
  if how == AS_IS:
    return store.chunk(np.frombuffer(data, dtype).reshape(rows, *shape), rows)
  if rows > 1 and size > UNPACKED_CHUNK_BYTES:
    raise WireError(f'a packed chunk of {rows} rows with more than {UNPACKED_CHUNK_BYTES:,} bytes')
  return store.packed_chunk(data, how == DIFFERENCES, dtype, shape, rows)


OF_REPORT, OF_TABLE = reports.OF_SHARD, reports.OF_TABLE
OF_ANSWER: dict[Kind, Any] = {  # what the value of a good ANSWER is, by the kind of the question
  TABLE: dict(settings=dict, most=float),
  INFO: dict(OF_TABLE, chunks=int, deletes=int, updates=int, seconds=dict, why_no_sample=str, why_no_insert=str),
  UPDATE: int,
  DELETE: int,
  SAVE: str,
}  # fmt: skip


def check_answer(kind: Kind, value: Any) -> None:
  """Refuses the value of a good ANSWER to such a question if it is of another form."""
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


def read_report(details: dict[str, Any]) -> dict[str, Any]:
  """What a client keeps of a service's REPORT: the service and its tables."""
  found = read_map('report', details, OF_REPORT)
  if not math.isfinite(found['resident_mb']):
    raise WireError('a report with a memory that is not finite')
  return found | {'tables': [read_map('table of a report', t, OF_TABLE) for t in found['tables']]}


def read_map(what: str, details: Any, expected: dict[str, type]) -> dict[str, Any]:
  """What is expected of a map, by name; raises WireError for others."""
  if type(details) is not dict:
    raise WireError(f'a {what} that is no map')
  found = {name: details.get(name) for name in expected}
  check_fields(what, list(found.values()), tuple(expected.values()))
  return found


def kept(chunk: Chunk) -> tuple[int, Any]:
  """How a chunk that is full is kept, and as what."""
  if chunk.packed is None:
    return AS_IS, chunk.array
  data, differences = chunk.packed
  return DIFFERENCES if differences else PACKED, data


def check_part(leaf: Leaf, chunks: Sequence[Chunk], offset: int, rows: int) -> int:
  """Refuses rows that are not in these chunks, or need not all of them; how many rows the chunks have."""
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
