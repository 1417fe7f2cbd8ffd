"""Checkpoints in directories whose names libraries misread, and that of each checkpoint every array can be read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from processes import (  # noqa: F401 (two fixtures)
  as_users_have_it,
  cache,
  checkpoints,
  lines,
  podrace,
  signed,
  summary,
)
from shared_programs import shared_programs  # noqa: F401
from shorthand import Patch

from podrace.agents.impala import Impala
from podrace.errors import CheckpointError, RunError, UsageError
from podrace.networks import ActorCritic
from podrace.run import loop
from podrace.run.checkpoint import Checkpoints, arrays, library
from podrace.run.checkpoint.arrays import fingerprint
from podrace.settings.config import Config

NAMES = [
  'plain', 'a b', 'a ', ' a', 'a\nb', 'a\tb', 'a\x01b', '.a', '...', '-x', '~', '$HOME', '%d', 'a%20b', '100%',
  'a[1]', '[!a]', '[', 'a]', 'a?b', 'a*b', 'a**b', 'a{b}', 'a\\b', '\\', 'a|b', 'a&b', 'a;b', 'a#b', 'a@b', 'a+b',
  'a,b', 'a:b', 'gs:', 'file:', "a'b", 'a"b', '<a>', '日本', 'x' * 255, 'hidden=[64,64]',
  unicodedata.normalize('NFC', 'é'), unicodedata.normalize('NFD', 'é'), os.fsdecode(b'\xe9'),
]  # fmt: skip
NUMBER = 4096  # elements, so that orbax keeps them in files of their own
MERGED = '/jax/checkpoint/write/async/ocdbt_merge_duration_secs'  # orbax has indexed an item
CONFIG = Config(
  agent=Impala(network=ActorCritic(hidden=(16,), initializer='lecun')), num_envs=4,
  unroll_length=8, total_steps=3200, devices=1, checkpoint_every=1600,
)  # fmt: skip


def trees(seed: int) -> tuple[Any, Any]:
  key = jax.random.key(seed)
  params = {'w': jax.random.normal(jax.random.fold_in(key, 1), (NUMBER,)), 'b': jnp.int32(seed)}
  return params, (jax.random.split(jax.random.fold_in(key, 2), 2), ())


def shapes(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_restores(folder: Path, step: int, seed: int) -> None:
  params, rest = trees(seed)
  reader = Checkpoints(folder, writes=False)
  found = reader.restore(step, shapes(params), shapes(rest))
  assert fingerprint(found.params) == fingerprint(params)
  assert fingerprint(found.rest) == fingerprint(rest)
  assert jax.tree.structure((found.params, found.rest)) == jax.tree.structure((params, rest))
  alone = reader.restore(step, shapes(params))
  assert fingerprint(alone.params) == fingerprint(params)
  reader.close()


def write(folder: Path, *steps: int, keep: int = 3) -> None:
  writer = Checkpoints(folder, keep=keep)
  for step in steps:
    writer.save(step, *trees(step), {})
  writer.wait()
  writer.close()


FEW = (
  'plain',
  'a b',
  'a\nb',
  '.a',
  '~',
  '%d',
  'a[1]',
  'a*b',
  'a\\b',
  'a:b',
  'gs:',
  '日本',
  os.fsdecode(b'\xe9'),
)


@pytest.mark.parametrize(
  'name', [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in NAMES], ids=ascii
)
def test_a_checkpoint_can_be_read_in_a_directory_of_any_name(name: str, tmp_path: Path) -> None:
  folder = tmp_path / name / 'checkpoints'
  write(folder, 1, 2, keep=1)
  assert [p.name for p in folder.iterdir()] == ['2']
  assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing is written elsewhere
  assert_restores(folder, 2, 2)


def test_a_relative_path_and_a_link_lead_to_the_same_directory(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a[1]').mkdir()
  (tmp_path / 'b[2]').symlink_to('a[1]')
  write(Path('b[2]', 'checkpoints'), 1)
  assert_restores(Path('a[1]', 'checkpoints'), 1, 1)


def test_directories_leave_no_descriptors_open(tmp_path: Path) -> None:
  def descriptors() -> list[str]:
    """Those that lead into the directory: threads of other tests have some of their own."""
    targets = []
    for name in os.listdir('/proc/self/fd'):
      with contextlib.suppress(OSError):  # closed meanwhile
        targets.append(os.readlink(f'/proc/self/fd/{name}'))
    return [target for target in targets if target.startswith(str(tmp_path))]

  writer = Checkpoints(tmp_path / 'checkpoints')
  assert descriptors()
  writer.close()
  write(tmp_path / 'checkpoints', 1)
  for _ in range(3):
    assert_restores(tmp_path / 'checkpoints', 1, 1)
    write(tmp_path / 'checkpoints')
  assert descriptors() == []


def test_a_directory_that_was_made_again_gets_the_next_checkpoint(tmp_path: Path) -> None:
  folder = tmp_path / 'a[1]' / 'checkpoints'
  writer = Checkpoints(folder)
  writer.save(1, *trees(1), {})
  writer.wait()
  shutil.rmtree(folder)
  writer.save(2, *trees(2), {})
  writer.wait()
  writer.close()
  assert_restores(folder, 2, 2)


@pytest.fixture
def without_plain_paths(monkeypatch: Patch) -> None:
  """A system that has no /proc/self/fd."""
  monkeypatch.setattr(library, 'DESCRIPTORS', '/nonexistent')


@pytest.mark.usefixtures('without_plain_paths')
def test_a_system_without_plain_paths_refuses_what_would_be_misread(tmp_path: Path) -> None:
  write(tmp_path / 'a b' / 'checkpoints', 1)
  assert_restores(tmp_path / 'a b' / 'checkpoints', 1, 1)
  for name in ('a[1]', 'a\\b', 'a*b', 'a?b'):
    with pytest.raises(UsageError, match='--run-dir'):
      Checkpoints(tmp_path / name / 'checkpoints')


# --- checkpoints of before -------------------------------------------------------------------------


def write_as_before(folder: Path, step: int) -> None:
  """Write a checkpoint as podrace did when it gave orbax the path of the directory itself."""
  params, rest = trees(step)
  prints = {'params': fingerprint(params), 'rest': fingerprint(rest)}
  meta = signed({'step': step, 'fingerprints': prints, 'extra': None})
  with ocp.CheckpointManager(folder, item_names=('params', 'rest', 'meta')) as manager:
    items = {'params': ocp.args.StandardSave((params,)), 'rest': ocp.args.StandardSave((rest,))}
    manager.save(step, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)))
    manager.wait_until_finished()


@pytest.mark.parametrize('name', ['hidden=[64,64]', 'a\\b', 'x[1]\\y'])
def test_a_checkpoint_without_an_index_is_read(name: str, tmp_path: Path) -> None:
  folder = tmp_path / name / 'checkpoints'
  write_as_before(folder, 1)
  assert not (folder / '1' / 'params' / 'manifest.ocdbt').exists()
  before = sorted(tmp_path.rglob('*'))
  for _ in range(2):
    assert_restores(folder, 1, 1)
  assert sorted(tmp_path.rglob('*')) == before  # a reader writes nothing there
  write(folder, 2, keep=1)
  assert_restores(folder, 2, 2)


def test_a_name_that_is_a_pattern_takes_in_no_draft_of_another_run(tmp_path: Path) -> None:
  """Two runs of a sweep write the same step at once, and the name of one is a pattern that fits both."""
  folder, other = tmp_path / 'lr=*' / 'checkpoints', tmp_path / 'lr=1' / 'checkpoints'
  write(other, 2)
  draft = other / '1.orbax-checkpoint-tmp'
  for item in ('params', 'rest'):
    shutil.copytree(other / '2' / item, draft / f'{item}.orbax-checkpoint-tmp')
  write(folder, 1)
  assert_restores(folder, 1, 1)


# --- what was written is read back -----------------------------------------------------------------


def delete(file: Path) -> None:
  file.unlink()


def cut(file: Path) -> None:
  os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 16
  file.write_bytes(data)


def other_checksum(file: Path) -> None:
  meta = json.loads(file.read_bytes())
  prints = {name: x ^ 1 for name, x in meta['fingerprints'].items()}
  file.write_text(json.dumps(signed({**meta, 'fingerprints': prints})))


def empty(file: Path) -> None:
  file.write_text('{"tree_metadata": {}, "use_zarr3": false}')


@pytest.fixture
def at_next_checkpoint() -> Iterator[Callable[[Callable[[Path], None], Path, str], None]]:
  """Damages a checkpoint, once, when orbax has written all of it and it has no name yet."""
  state: dict[str, Any] = {'left': 0}

  def listen(event: str, duration: float, **_: Any) -> None:
    if event != MERGED or not state['left']:
      return
    files = [f for f in state['folder'].glob('*.orbax-checkpoint-tmp/**/*') if f.is_file()]
    chosen = [f for f in files if state['part'] in f.as_posix()]
    state['left'] -= bool(chosen)
    if chosen and not state['left']:
      state['damage'](max(chosen, key=lambda f: f.stat().st_size))

  def arm(damage: Callable[[Path], None], folder: Path, part: str) -> None:
    state.update(left=2, damage=damage, folder=folder, part=part)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield arm
  jax.monitoring.unregister_event_duration_listener(listen)


DAMAGES = [(delete, '/d/'), (cut, '/d/'), (flip, '/d/'), (delete, '_METADATA'), (empty, '_METADATA'),
           (cut, 'meta/'), (other_checksum, 'meta/'), (delete, 'tmp/manifest')]  # fmt: skip


@pytest.mark.parametrize('large', [False, True], ids=['', 'large'])
@pytest.mark.parametrize(('damage', 'part'), DAMAGES, ids=lambda x: getattr(x, '__name__', x))
def test_a_checkpoint_that_cannot_be_read_back_is_an_error_and_costs_no_other(
  damage: Callable[[Path], None],
  part: str,
  large: bool,
  tmp_path: Path,
  at_next_checkpoint: Any,
  monkeypatch: Patch,
) -> None:
  if large:
    if damage is flip:
      pytest.skip('only the ends of large arrays are read')
    monkeypatch.setattr(arrays, 'LARGE', 4 * NUMBER)
  folder = tmp_path / 'checkpoints'
  writer = Checkpoints(folder, keep=1)
  writer.save(1, *trees(1), {})
  writer.wait()
  at_next_checkpoint(damage, folder, part)
  writer.save(2, *trees(2), {})
  with pytest.raises(CheckpointError, match='checkpoint 2'):
    writer.wait()
  assert writer.steps() == [1] and checkpoints(tmp_path) == [1]
  assert_restores(folder, 1, 1)
  writer.save(3, *trees(3), {})
  writer.wait()
  assert writer.steps() == [3] and checkpoints(tmp_path) == [3]
  writer.close()
  assert_restores(folder, 3, 3)


@pytest.mark.parametrize('name', ['0.w', '0.b'])
def test_a_large_array_without_one_of_its_chunks_is_an_error(
  name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(arrays, 'LARGE', 1)
  write(tmp_path / 'checkpoints', 1)
  folder, expected = tmp_path / 'checkpoints' / '1' / 'params', arrays.described(trees(1)[0])
  assert arrays.StoredArrays(folder).check(expected) is None  # none of them is read whole
  arrays.open_store(folder, ts.Context()).write(f'{name}/0', None).result()
  with pytest.raises(ValueError, match=f'array {name} has 0 chunks, expected 1'):
    arrays.StoredArrays(folder).check(expected)


@pytest.mark.parametrize('times', [1, 2])
def test_a_run_ends_when_its_last_checkpoint_cannot_be_read_back_twice(
  times: int, tmp_path: Path, at_next_checkpoint: Any
) -> None:
  """It goes on from the one before."""
  left, run = [times], tmp_path / 'run'

  def damage(path: Path) -> None:
    cut(path)
    left[0] -= 1
    if left[0]:
      arm()

  def arm() -> None:
    at_next_checkpoint(damage, run / 'checkpoints', '3200.orbax-checkpoint-tmp/params')

  class Damage:
    def write(self, line: dict[str, Any]) -> None:
      if line['step'] == 3200:
        arm()

    def close(self) -> None: ...

  with pytest.raises(RunError, match='checkpoint') if times == 2 else contextlib.nullcontext():
    loop.train(CONFIG, run, sinks=(Damage(),), quiet=True)
  assert left == [0]
  assert checkpoints(run) == ([1600] if times == 2 else [1600, 3200])
  assert loop.train(CONFIG, run, quiet=True)['step'] == 3200


def test_the_checksum_of_the_host_is_that_of_the_devices(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  """What is read back is summed by the host, in pieces; `wait` raises if that differs."""
  monkeypatch.setattr(arrays, 'PIECE', 7)
  bits = jax.random.bits(jax.random.key(3), (5, 9), jnp.uint32)
  types = ('float32', 'bfloat16', 'float16', 'int8', 'uint8', 'int16', 'uint32', 'bool')
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, [bits.astype(x) for x in types], [bits] * 3, {})
  checkpoints.wait()
  monkeypatch.setattr(arrays, 'MIX', arrays.MIX + 2)  # on the host; the devices' is compiled
  checkpoints.save(2, [bits.astype(x) for x in types], [bits] * 3, {})
  with pytest.raises(CheckpointError, match='checkpoint 2'):
    checkpoints.wait()
  checkpoints.close()


def test_warnings_of_the_library_reach_the_log(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  folder = tmp_path / 'a[1]' / 'checkpoints'
  write(folder, 1)
  (folder / '1' / '_CHECKPOINT_METADATA').unlink()
  with caplog.at_level(logging.WARNING, 'podrace'):
    Checkpoints(folder, writes=False).close()
  warned = [r for r in caplog.records if r.name.startswith('podrace')]
  assert [r.levelname for r in warned] == ['WARNING']
  assert str(folder / '1' / '_CHECKPOINT_METADATA') in warned[0].getMessage()


# --- through the command line ----------------------------------------------------------------------


def test_a_run_in_a_directory_of_brackets_and_backslashes(tmp_path: Path, cache: Path) -> None:  # noqa: F811
  directory = tmp_path / 'hidden=[64,64] a\\b*'
  train = ['train', 'catch', '--num-envs', '8', '--run-dir', str(directory), '--total-steps']
  log = tmp_path / 'log.txt'
  commands = (
    [*train, '2_000'],
    [*train, '4_000', '--override'],
    ['eval', str(directory), '--episodes', '2'],
  )
  for args in commands:
    code, output = podrace(args, log, 1, cache)
    assert code == 0, output
  assert json.loads(output.splitlines()[-1])['step'] == summary(directory)['step']
  steps = [line['step'] for line in lines(directory)]
  assert steps == sorted(set(steps)) and checkpoints(directory)[0] < summary(directory)['step']
