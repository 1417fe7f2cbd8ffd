"""Checkpoints of all tables of a store, with their counters and random state.

A checkpoint is a directory. `chunks.bin` holds the chunks in their stored form, one after the
other. One .npz of plain arrays (never pickle) describes the chunks, and one each table.
`manifest.json` holds everything else, with a SHA-256 of each file and of itself. The directory
is written under a temporary name beside its destination, synced and then renamed.

Traffic is blocked only while references and a few arrays are copied: well below 0.1 s for each
million items. `save` returns the time, and benchmarks/tables.py measures it.

Steps that no item in a table refers to are not saved. That covers a writer's history, and items
that still wait for a limiter. Flush the writers first to keep such items.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from podrace.errors import CheckpointError, UnreadableFile
from podrace.system import files
from podrace.system.files import sync
from podrace.system.files.reading import open_regular, parse_json, read_bytes, read_npz
from podrace.system.files.schema import COUNT, Member, check_members, needed
from podrace.tables import trees
from podrace.tables.chunks import AS_IS, DIFFERENCES, PACKED, Chunk, ChunkStore, encode
from podrace.tables.items import Item, Leaf, Signature, held

VERSION = 1
MANIFEST_BYTES = 2**28  # largest manifest
MANIFEST_MEMBERS = {
  'next_key': needed(COUNT),
  'files': Member('an object', needed=True),
  'tables': Member('a list', needed=True, each=Member('an object')),
  'chunk_types': Member('a list', needed=True),
}
MANIFEST, CHUNKS, INDEX = 'manifest.json', 'chunks.bin', 'chunks.npz'
UNPACKED_BYTES = 2**31  # largest chunk; a writer ends a chunk at 2**18 bytes, or at one row

Spec = tuple[np.dtype, tuple[int, ...]]  # dtype and shape of a row


class OtherTables(CheckpointError):
  """The checkpoint is whole, and its tables have other names or settings than the store's."""


class Snapshot(NamedTuple):
  """Consistent state of all tables of a store, with the caller's `extra` data."""

  tables: dict[str, dict[str, Any]]
  next_key: int
  extra: Any  # JSON
  blocked_s: float  # seconds for which no table could be used


def snapshot(store: ChunkStore, extra: Any = None) -> Snapshot:
  """Capture the tables for `write`. Only this short step blocks traffic.

  Args:
    store: Store of the tables.
    extra: JSON value to keep with the tables. `extra_of` reads it.

  Returns:
    The snapshot, which `write` can save while traffic goes on.
  """
  with store.lock:
    locked = time.perf_counter()
    tables = {name: table.snapshot() for name, table in store.tables.items()}
    return Snapshot(tables, store.next_key, extra, time.perf_counter() - locked)


def save(store: ChunkStore, path: Path) -> dict[str, float]:
  """Write a checkpoint of all tables, as of one moment, to a new directory.

  Returns:
    `blocked_s`, seconds for which no table could be used; `seconds` in total; `bytes` written.

  Raises:
    CheckpointError: If `path` exists already or can't be written.
  """
  return write(snapshot(store), path)


def write(taken: Snapshot, path: Path) -> dict[str, float]:
  """Write a snapshot to a new directory. May run in a different thread from the traffic.

  Returns:
    As `save`.

  Raises:
    CheckpointError: If `path` exists already or can't be written.
  """
  path = Path(path)
  if os.path.lexists(path):
    raise CheckpointError(f'{path} is there already; a checkpoint is never written over')
  begun = time.perf_counter()
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  try:
    files.make_user_folder(path.parent)
    size = _write(files.new_folder(partial), taken)
    files.move(partial, path)
    sync(path.parent)
  except OSError as e:
    raise CheckpointError(f'checkpoint {path} could not be written: {e}') from e
  finally:
    files.remove(partial)
  seconds = time.perf_counter() - begun + taken.blocked_s
  return dict(blocked_s=taken.blocked_s, seconds=seconds, bytes=size)


def extra_of(path: Path) -> Any:
  """Read the `extra` value that was passed to `snapshot`.

  Raises:
    CheckpointError: If the checkpoint is damaged or has another version.
  """
  return _read_manifest(Path(path)).get('extra')


def restore(store: ChunkStore, path: Path) -> None:
  """Read a checkpoint into the store's tables, which must be newly made and unused.

  Sampling then continues as it would have without the interruption, except for removals due to
  `max_bytes`. A chunk that was being filled counted with its full capacity, and now counts with
  its packed size.

  Raises:
    CheckpointError: If the checkpoint is damaged, has another version or, as OtherTables, belongs
      to different tables. The store is unchanged then.
  """
  path = Path(path)
  manifest = _read_manifest(path)
  _compare(store, path, manifest)
  try:
    chunks = _read_chunks(store, path, manifest)
    states = [_read_table(path, i, x, chunks) for i, x in enumerate(manifest['tables'])]
  except Exception as e:  # a forged manifest with valid checksums may hold anything
    raise CheckpointError(f'checkpoint {path} is damaged: {type(e).__name__}: {e}') from e
  with store.lock:
    store.next_key = max(store.next_key, manifest['next_key'])
    for table, state in zip(manifest['tables'], states, strict=True):
      store.tables[table['name']].load(state)


# --- writing ----------------------------------------------------------------------------------


def _write(folder: Path, taken: Snapshot) -> int:
  tables = taken.tables
  items = [item for table in tables.values() for item in table['items']]
  chunks = held(items)
  number = {key: i for i, key in enumerate(chunks)}
  specs = _write_chunks(folder, list(chunks.values()))
  described = []
  for i, (name, table) in enumerate(tables.items()):
    files.write_arrays(folder / _table_file(i), _table_arrays(table, number))
    signature = table['signature']
    described.append(
      dict(
        {k: table[k] for k in ('config', 'counts', 'updates', 'rng')},
        name=name,
        structure=signature and trees.to_json(signature.structure),
        leaves=signature and [[x.name, x.dtype.str, x.shape, x.single] for x in signature.leaves],
      )
    )
  contents = {p.name: _described(p) for p in sorted(folder.iterdir())}
  manifest = dict(
    version=VERSION,
    next_key=taken.next_key,
    tables=described,
    chunk_types=specs,
    files=contents,
    extra=taken.extra,
  )
  text = json.dumps(dict(manifest, sha256=_sha256_of(manifest)), indent=1)
  with files.open_new(folder / MANIFEST) as file:
    file.write(text + '\n')
  for written in folder.iterdir():
    sync(written)
  sync(folder)
  return sum(x['bytes'] for x in contents.values()) + len(text) + 1


def _write_chunks(folder: Path, chunks: list[Chunk]) -> list[list[Any]]:
  """Write the chunks and their index. Return the (dtype, shape) pairs to which the index refers."""
  specs: dict[tuple[Any, ...], int] = {}
  rows = []
  with files.open_new(folder / CHUNKS, 'wb') as file:
    for chunk in chunks:
      spec = specs.setdefault((chunk.dtype.str, chunk.shape), len(specs))
      data, kind, length = _bytes_of(chunk)
      rows.append((len(data), kind, length, spec))
      file.write(data)
  columns = np.array(rows, np.int64).reshape(-1, 4)
  names = ('nbytes', 'kind', 'length', 'spec')
  files.write_arrays(folder / INDEX, {k: columns[:, i] for i, k in enumerate(names)})
  return [[dtype, list(shape)] for dtype, shape in specs]


def _bytes_of(chunk: Chunk) -> tuple[Any, int, int]:
  """Return (bytes, encoding, rows) of a chunk. Rows may be added to the chunk during the call."""
  length, array = chunk.length, chunk.array
  packed = chunk.packed  # after `array`: `seal` sets `packed` before it clears `array`
  if packed is not None:
    return *packed, chunk.length
  assert array is not None
  return *encode(array[:length], False), length


def _table_arrays(table: dict[str, Any], number: dict[int, int]) -> dict[str, np.ndarray]:
  items = table['items']
  parts = [part for item in items if item is not None for part in item.parts]
  arrays = dict(
    keys=np.array([0 if item is None else item.key for item in items], np.int64),
    there=np.array([item is not None for item in items], bool),
    part_chunks=np.array([len(part[0]) for part in parts], np.int64),
    part_offset=np.array([part[1] for part in parts], np.int64),
    part_length=np.array([part[2] for part in parts], np.int64),
    chunks=np.array([number[chunk.key] for part in parts for chunk in part[0]], np.int64),
    priorities=table['priorities'],
    times=table['times'],
    free=table['free'],
  )
  for role in ('sampling', 'removing'):
    arrays.update({f'{role}_{k}': v for k, v in table[role]().items()})
  return arrays


def _table_file(i: int) -> str:
  return f'table-{i}.npz'


def _described(path: Path) -> dict[str, Any]:
  with open_regular(path) as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
    return dict(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def _sha256_of(manifest: dict[str, Any]) -> str:
  rest = {k: v for k, v in manifest.items() if k != 'sha256'}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# --- reading ----------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
  """Read the manifest and check the size and checksum of every file that it lists."""
  try:
    manifest = parse_json(read_bytes(path / MANIFEST, MANIFEST_BYTES))
  except FileNotFoundError as e:
    raise CheckpointError(f'{path} is no checkpoint of tables: it has no {MANIFEST}') from e
  except (OSError, ValueError) as e:
    raise CheckpointError(f'checkpoint {path} is damaged: {MANIFEST}: {e}') from e
  if not isinstance(manifest, dict) or 'version' not in manifest:
    raise CheckpointError(f'checkpoint {path} is damaged: {MANIFEST} does not tell its version')
  if manifest['version'] != VERSION:
    raise CheckpointError(
      f'checkpoint {path} has version {manifest["version"]}, this program reads {VERSION}'
    )
  if manifest.get('sha256') != _sha256_of(manifest):
    raise CheckpointError(f'checkpoint {path} is damaged: the checksum of {MANIFEST} is wrong')
  try:
    check_members(manifest, MANIFEST_MEMBERS)
  except ValueError as e:
    raise CheckpointError(f'checkpoint {path} is damaged: {MANIFEST} {e}') from e
  for name, expected in manifest['files'].items():
    try:
      found = _described(path / name)
    except (OSError, UnreadableFile) as e:
      raise CheckpointError(f'checkpoint {path} is damaged: {name}: {e}') from e
    if found != expected:
      key = 'bytes' if found['bytes'] != expected['bytes'] else 'sha256'
      raise CheckpointError(
        f'checkpoint {path} is damaged: {name} has {key} {found[key]}, expected {expected[key]}'
      )
  return manifest


def _compare(store: ChunkStore, path: Path, manifest: dict[str, Any]) -> None:
  saved = {table['name']: table['config'] for table in manifest['tables']}
  if set(saved) != set(store.tables):
    raise OtherTables(
      f'checkpoint {path} has tables {sorted(saved)}, the store has {sorted(store.tables)}'
    )
  for name, config in saved.items():
    table = store.tables[name]
    now = table.config()
    # The limiter's name is for messages only, but older checkpoints lack its limits.
    passed = 'rate_limiter' if 'limits' in config else 'limits'
    differ = [
      f'{k} {config.get(k)}, now {now[k]}' for k in now if k != passed and config.get(k) != now[k]
    ]
    if differ:
      raise OtherTables(f'checkpoint {path}: table {name!r} had {"; ".join(differ)}')
    if table.contents.counts.inserts:
      raise CheckpointError(f'table {name!r} has been used; a checkpoint is read into a fresh one')


def _read_chunks(store: ChunkStore, path: Path, manifest: dict[str, Any]) -> list[Chunk]:
  types = [(_dtype(dtype), tuple(map(_size, shape))) for dtype, shape in manifest['chunk_types']]
  with open_regular(path / INDEX) as file:
    index = read_npz(file)
  rows = zip(*(index[k].tolist() for k in ('nbytes', 'kind', 'length', 'spec')), strict=True)
  with open_regular(path / CHUNKS) as file:
    return [_read_chunk(store, file, n, kind, length, types[i]) for n, kind, length, i in rows]


def _read_chunk(
  store: ChunkStore, file: BinaryIO, n: int, kind: int, length: int, of: Spec
) -> Chunk:
  if n < 0 or kind not in (AS_IS, PACKED, DIFFERENCES):
    raise ValueError(f'{INDEX} has a chunk of {n:,} bytes, kind {kind}')
  if not 0 <= (size := length * math.prod(of[1]) * of[0].itemsize) <= UNPACKED_BYTES:
    raise ValueError(f'a chunk unpacks to {size:,} bytes, expected at most {UNPACKED_BYTES:,}')
  data = file.read(n)
  if len(data) != n:
    raise ValueError(f'{CHUNKS} ends too early')
  return store.stored_chunk(data, kind, *of, length)


def _dtype(text: str) -> np.dtype:
  dtype = np.dtype(text)
  if dtype.hasobject or dtype.names is not None:
    raise ValueError(f'a chunk is of {dtype}, expected numbers')
  return dtype


def _size(x: int) -> int:
  if not isinstance(x, int) or not 0 <= x <= UNPACKED_BYTES:
    raise ValueError(f'a chunk has an axis of size {x!r:.50}')
  return x


def _read_table(path: Path, i: int, described: dict[str, Any], chunks: list[Chunk]) -> Any:
  with open_regular(path / _table_file(i)) as file:
    arrays = read_npz(file)
  signature = None
  if described['structure']:
    leaves = [Leaf(n, np.dtype(d), tuple(s), single) for n, d, s, single in described['leaves']]
    signature = Signature(trees.from_json(described['structure']), tuple(leaves))
  state = {k: described[k] for k in ('counts', 'updates', 'rng')}
  for role in ('sampling', 'removing'):
    prefix = f'{role}_'
    state[role] = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
  items = list(_items(arrays, signature, chunks))
  return dict(state, signature=signature, items=items, **{
    k: arrays[k] for k in ('priorities', 'times', 'free')
  })  # fmt: skip


def _items(
  arrays: dict[str, np.ndarray], signature: Signature | None, chunks: list[Chunk]
) -> Iterator[Item | None]:
  needed = iter(arrays['chunks'].tolist())
  columns = (arrays[k].tolist() for k in ('part_chunks', 'part_offset', 'part_length'))
  parts = zip(*columns, strict=True)
  rows = zip(*(arrays[k].tolist() for k in ('keys', 'there', 'priorities')), strict=True)
  for key, there, priority in rows:
    if not there:
      yield None
      continue
    assert signature is not None
    own = []
    for _ in signature.leaves:
      n, offset, length = next(parts)
      own.append((tuple(chunks[next(needed)] for _ in range(n)), offset, length))
    yield Item(key, priority, signature, tuple(own))
