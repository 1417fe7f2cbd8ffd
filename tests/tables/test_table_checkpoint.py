"""Checkpoints of tables: what is read back is what was there, or is refused."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tables import in_thread

from podrace import tables
from podrace.system import files
from podrace.tables import checkpoint

SELECTORS = [
  tables.uniform(), tables.fifo(), tables.lifo(), tables.prioritized(0.6), tables.min_heap(),
  tables.max_heap(),
]  # fmt: skip


class Step(NamedTuple):
  observation: Any
  count: Any


def make(
  sampler: Any = SELECTORS[3], remover: Any = SELECTORS[1], error: float = 30.0
) -> tables.ChunkStore:
  """A store with two tables, one of them on a ratio of samples to inserts."""
  store = tables.ChunkStore()
  ratio = tables.sample_to_insert_ratio(2.0, 2, error)
  one = dict(sampler=sampler, remover=remover, rate_limiter=ratio, max_size=6, seed=3)
  two = dict(sampler=remover, remover=sampler, rate_limiter=tables.min_size(1), max_size=9, seed=4)
  tables.Table('one', store, **one)
  tables.Table('two', store, max_times_sampled=2, **two)
  return store


def use(store: tables.ChunkStore, seed: int, steps: int) -> list[Any]:
  """Writes, samples, changes and deletes at random; all that was seen."""
  rng, seen = np.random.default_rng(seed), []
  one, two = store.tables['one'], store.tables['two']
  writer = tables.Writer(store, history=5, rows_per_chunk=3, max_in_flight=99)
  for i in range(steps):
    observation = (
      rng.integers(0, 3, (8, 8)).astype(np.uint8) if i % 2 else np.ones((8, 8), np.uint8)
    )
    writer.append(Step(observation, np.int64(i * 1001)))
    for table, n in ((one, 3), (two, 2)):
      if i >= n:
        seen.append(writer.create_item(table, float(rng.integers(0, 4)), num_steps=n))
      try:
        sample = table.sample(int(rng.integers(1, 4)), at_least=1, timeout=0)
      except tables.RateLimited:
        seen.append(str(table.contents.counts))
        continue
      seen += [x.tolist() for x in sample if isinstance(x, np.ndarray)]
      seen += [sample.data.observation.tolist(), sample.data.count.tolist()]
      table.update_priorities(sample.key, sample.priority + 0.5)
      if rng.uniform() < 0.2:
        seen.append(table.delete(sample.key[:1]))
  seen += [
    (t.info().inserts, t.info().samples, t.info().deletes, t.info().size) for t in (one, two)
  ]
  return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  """A checkpoint in which each kind of chunk occurs."""
  store = make()
  use(store, 0, 20)
  tables.save(store, tmp_path / 'saved')
  return tmp_path / 'saved'


@pytest.mark.parametrize('sampler', SELECTORS, ids=lambda s: s.name)
@pytest.mark.parametrize('remover', SELECTORS, ids=lambda s: s.name)
@settings(max_examples=2, deadline=None)
@example(seed=0, steps=0)
@given(seed=st.integers(0, 99), steps=st.integers(0, 15))
def test_goes_on_as_if_nothing_had_happened(
  tmp_path_factory: Any, sampler: Any, remover: Any, seed: int, steps: int
) -> None:
  """The same keys, data, probabilities and counts as without the interruption."""
  path = tmp_path_factory.mktemp('tables') / 'saved'
  store = make(sampler, remover)
  use(store, seed, steps)
  tables.save(store, path)
  again = make(sampler, remover)
  tables.restore(again, path)
  for name in ('one', 'two'):
    before, after = store.tables[name].info(), again.tables[name].info()
    for field in ('inserts', 'samples', 'deletes', 'updates', 'size', 'chunks'):
      assert getattr(before, field) == getattr(after, field)
    assert store.tables[name].contents.slots == again.tables[name].contents.slots
  assert use(store, seed + 1, 9) == use(again, seed + 1, 9)
  emptied = make(sampler, remover)
  tables.restore(emptied, path)
  for table in emptied.tables.values():
    assert not len(table) or type(table.sample(1, peek=True).data).__name__ == 'Step'
    table.delete(list(table.contents.slots))
  assert (emptied.total.bytes, emptied.total.chunks) == (0, 0)


def flip(path: Path, at: float) -> None:
  data = bytearray(path.read_bytes())
  data[int(at * (len(data) - 1))] ^= 4
  path.write_bytes(data)


@pytest.mark.parametrize(
  'name', ['manifest.json', 'chunks.bin', 'chunks.npz', 'table-0.npz', 'table-1.npz']
)
@pytest.mark.parametrize(
  'damage',
  [
    lambda p: flip(p, 0.02),
    lambda p: flip(p, 0.5),
    lambda p: flip(p, 0.99),
    lambda p: p.write_bytes(p.read_bytes()[:-5]),
    lambda p: p.write_bytes(p.read_bytes() + b' 1'),
    lambda p: p.write_bytes(b''),
    lambda p: p.unlink(),
  ],
  ids=['begin', 'middle', 'end', 'shorter', 'longer', 'empty', 'gone'],
)
def test_damage_is_refused(folder: Path, name: str, damage: Callable[[Path], Any]) -> None:
  damage(folder / name)
  store = make()
  with pytest.raises(tables.CheckpointError, match=f'{folder.name}.*{name}'):
    tables.restore(store, folder)
  assert [len(table) for table in store.tables.values()] == [0, 0]
  assert store.total.chunks == 0


def test_other_versions_are_refused(folder: Path) -> None:
  manifest = json.loads((folder / 'manifest.json').read_text())
  (folder / 'manifest.json').write_text(json.dumps(dict(manifest, version=99)))
  with pytest.raises(tables.CheckpointError, match=r'99.*1'):
    tables.restore(make(), folder)


def test_other_tables_are_refused(folder: Path) -> None:
  used = make()
  use(used, 0, 5)
  for store, part in (
    (make(sampler=tables.fifo()), r"'one' .*sampler prioritized\(0.6\), now fifo"),
    (tables.ChunkStore(), r"\['one', 'two'\].*\[\]"),
    (used, "'one'.*used"),
  ):
    with pytest.raises(tables.CheckpointError, match=part):
      tables.restore(store, folder)


def test_a_limiter_is_compared_by_its_numbers(folder: Path) -> None:
  same = make(error=30)
  assert same.tables['one'].rate_limiter.name != make().tables['one'].rate_limiter.name
  tables.restore(same, folder)
  with pytest.raises(tables.CheckpointError, match=r"'one' .*limits \[2.0, 2.0, -26.0, 34.0\]"):
    tables.restore(make(error=31.0), folder)


def test_a_checkpoint_that_has_but_the_name_of_a_limiter(folder: Path) -> None:
  """As older ones do."""
  path = folder / 'manifest.json'
  manifest = json.loads(path.read_text())
  for table in manifest['tables']:
    del table['config']['limits']
  path.write_text(signed(manifest))
  with pytest.raises(tables.CheckpointError, match=r"'one' .*rate_limiter .*error=30.0\)"):
    tables.restore(make(error=31.0), folder)
  store = make()
  tables.restore(store, folder)
  assert len(store.tables['one'])


def signed(manifest: dict[str, Any]) -> str:
  """The text of a manifest, with the checksum that fits."""
  rest = {k: v for k, v in manifest.items() if k != 'sha256'}
  text = json.dumps(rest, sort_keys=True)
  return json.dumps(dict(rest, sha256=hashlib.sha256(text.encode()).hexdigest()))


def rewrite(folder: Path, name: str = 'chunks.npz', types: Any = None, **columns: Any) -> None:
  """Change a file's arrays, and the types of chunks, and make all sums fit."""
  path = folder / 'manifest.json'
  manifest = json.loads(path.read_text())
  with np.load(folder / name) as file:
    np.savez(folder / name, **{**file, **{k: np.full_like(file[k], x) for k, x in columns.items()}})
  data = (folder / name).read_bytes()
  manifest['files'][name] = dict(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
  manifest['chunk_types'] = types or manifest['chunk_types']
  path.write_text(signed(manifest))


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    ({'length': 2**62}, '2,147,483,648'),
    ({'length': -1}, ' -'),
    ({'nbytes': -1}, '-1 bytes'),
    ({'kind': 7}, 'kind 7'),
    ({'types': [['<f4', [2**40]]]}, '1099511627776'),
    ({'types': [['<f4', [-1]]]}, '-1'),
    ({'types': [['O', []]]}, 'object'),
    ({'name': 'table-0.npz', 'part_chunks': 9}, 'damaged'),
  ],
)
def test_a_checkpoint_whose_sums_fit_is_bounded(
  folder: Path, change: dict[str, Any], reason: str
) -> None:
  rewrite(folder, **change)
  store = make()
  with pytest.raises(tables.CheckpointError, match=reason):
    tables.restore(store, folder)
  assert store.total.chunks == 0


def test_a_checkpoint_is_never_written_over(folder: Path) -> None:
  with pytest.raises(tables.CheckpointError, match=folder.name):
    tables.save(make(), folder)


def imports_of(path: Path) -> set[str]:
  nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import)]
  return {alias.name for node in nodes for alias in node.names}


def test_no_pickle(folder: Path) -> None:
  """No file, and no array in a file, is one or can hold one."""
  names = {path.name for path in folder.iterdir()}
  assert names == {'manifest.json', 'chunks.bin', 'chunks.npz', 'table-0.npz', 'table-1.npz'}
  for path in folder.glob('*.npz'):
    with np.load(path, allow_pickle=False) as file:
      assert all(not file[k].dtype.hasobject for k in file)
    with zipfile.ZipFile(path) as archive:
      members = [archive.read(n) for n in archive.namelist()]
    for data in [*members, (folder / 'chunks.bin').read_bytes()]:
      begins = data[:1] == b'\x80' and data[1:2] <= b'\x05'  # PROTO and its number; ends with STOP
      assert not (begins and data.endswith(b'.'))
  sources = Path(checkpoint.__file__).parent.glob('*.py')
  assert not [p.name for p in sources if 'pickle' in imports_of(p)]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def full(path: Path) -> None:
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(checkpoint, 'sync', full)
  with pytest.raises(tables.CheckpointError, match='No space left'):
    tables.save(make(), tmp_path / 'saved')
  assert list(tmp_path.iterdir()) == []


def test_traffic_waits_for_references_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Nothing is packed, read, copied out of a chunk or written while the lock is taken."""
  store, done = make(), list[str]()
  use(store, 0, 20)

  def watch(where: Any, name: str) -> None:
    original = getattr(where, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
      done.append(name)
      assert in_thread(store.tables['one'].info)().size  # not while all traffic waits
      return original(*args, **kwargs)

    monkeypatch.setattr(where, name, watched)

  calls = ((checkpoint, 'encode'), (checkpoint, 'sync'), (np, 'savez'), (hashlib, 'file_digest'))
  for where, name in (*calls, (os, 'open')):
    watch(where, name)
  tables.save(store, tmp_path / 'saved')
  assert set(done) == {'encode', 'sync', 'savez', 'file_digest', 'open'}


@pytest.mark.parametrize('pixels', [1, 300])
def test_copies_under_the_lock_do_not_depend_on_steps(pixels: int) -> None:
  """A few numbers for each item; the items and their chunks are the table's own."""
  store = tables.ChunkStore()
  options = dict(sampler=SELECTORS[3], remover=SELECTORS[1], rate_limiter=tables.min_size(1))
  table = tables.Table('it', store, max_size=100, **options)
  writer = tables.Writer(store, history=5, rows_per_chunk=3)
  for i in range(20):
    writer.append(np.full((pixels, pixels), i, np.uint8))
    writer.create_item(table, 1.0, num_steps=1)
  (found,) = checkpoint.snapshot(store).tables.values()
  assert all(x is y for x, y in zip(found['items'], table.contents.items, strict=True))
  arrays = [found[k] for k in ('priorities', 'times', 'free')]
  arrays += [x for role in ('sampling', 'removing') for x in found[role]().values()]
  assert sum(x.nbytes for x in arrays) < 20 * 100


def test_saving_does_not_hold_up_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """While files are written everything works, and what is written is how it was at the beginning."""
  store, expected = make(), make()
  use(store, 0, 20)
  use(expected, 0, 20)
  writing, go_on, original = threading.Event(), threading.Event(), files.new_folder

  def held_up(path: Path) -> Path:
    writing.set()
    assert go_on.wait(60)
    return original(path)

  monkeypatch.setattr(files, 'new_folder', held_up)
  saved = in_thread(lambda: tables.save(store, tmp_path / 'saved'))
  assert writing.wait(60)
  before = store.tables['one'].info().inserts
  use(store, 1, 30)
  assert store.tables['one'].info().inserts > before
  go_on.set()
  assert saved()['bytes'] > 0
  again = make()
  tables.restore(again, tmp_path / 'saved')
  assert again.tables['one'].info().inserts == before
  a, b = (s.tables['two'].sample(5, at_least=1) for s in (expected, again))
  np.testing.assert_array_equal(a.data.observation, b.data.observation)
  np.testing.assert_array_equal(a.key, b.key)
