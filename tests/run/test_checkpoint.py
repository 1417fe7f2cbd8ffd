"""Checkpoints: what is read back is what was saved, or it is refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from children import until
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import every_file, signed
from shared_programs import shared_programs  # noqa: F401
from shorthand import Patch, slow_after

import podrace
from podrace.errors import CheckpointError, RunError, UsageError
from podrace.run import checkpoint
from podrace.run.checkpoint import Checkpoints
from podrace.run.checkpoint.arrays import MIX, PIECE, copy_and_sum, fingerprint, open_store
from podrace.run.checkpoint.stored import StoredCheckpoint
from podrace.system.files.reading import read_json

# No read of the checkpoint library goes on after it was closed, not even of a damaged checkpoint.
pytestmark = pytest.mark.filterwarnings('error::pytest.PytestUnraisableExceptionWarning')


class Rest(NamedTuple):
  keys: Any
  parts: Any


def state(seed: int = 0) -> tuple[Any, Any]:
  """Parameters and the rest, of every type that runs have."""
  key = jax.random.key(seed)
  params = {'w': jax.random.normal(jax.random.fold_in(key, 1), (5, 7)), 'b': jnp.arange(3.0)}
  flags = jax.random.bernoulli(jax.random.fold_in(key, 2), shape=(9,))
  parts = (flags, jnp.int8([-1, 2]), jnp.uint8([255]), jnp.bfloat16([1.5]), jnp.int32(7), ())
  return params, Rest(jax.random.split(jax.random.fold_in(key, 3), 2), parts)


def shapes(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(tree: Any) -> list[bytes]:
  return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree)]


def kinds(tree: Any) -> list[Any]:
  return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def raw(x: Any) -> Any:
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp('saved') / 'checkpoints'
  checkpoints = Checkpoints(folder)
  checkpoints.save(10, *state(), {'update': 1, 'wall_s': 0.1 + 0.2})
  checkpoints.wait()
  checkpoints.close()
  return folder


def test_round_trip(saved: Path) -> None:
  params, rest = state()
  checkpoints = Checkpoints(saved, writes=False)
  assert checkpoints.steps() == [10]
  found = checkpoints.restore(10, shapes(params), shapes(rest))
  assert bits((found.params, found.rest)) == bits((params, rest))
  assert jax.tree.structure((found.params, found.rest)) == jax.tree.structure((params, rest))
  assert found.meta['update'] == 1 and found.meta['wall_s'] == 0.1 + 0.2
  assert bits(checkpoints.restore(10, shapes(params)).params) == bits(params)


def damage(file: Path, kind: str, rng: random.Random) -> None:
  data = bytearray(file.read_bytes())
  if kind == 'delete':
    file.unlink()
  elif kind == 'truncate':
    file.write_bytes(data[: rng.randrange(len(data))] if data else data)
  elif data:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize(
  'kind', slow_after(2, 'delete', 'flip', 'truncate', 'flip again', 'flip elsewhere')
)
def test_damage_to_any_file_is_noticed_or_harmless(kind: str, saved: Path, tmp_path: Path) -> None:
  params, rest = state()
  files = [f.relative_to(saved) for f in every_file(saved)]
  assert len(files) > 10
  noticed = 0
  for i, name in enumerate(files):
    folder = tmp_path / str(i)
    shutil.copytree(saved, folder)
    damage(folder / name, kind, random.Random(f'{kind} {name.name}'))
    try:
      checkpoints = Checkpoints(folder, writes=False)
      if checkpoints.steps():
        found = checkpoints.restore(10, shapes(params), shapes(rest))
        assert bits((found.params, found.rest)) == bits((params, rest)), name
        assert kinds((found.params, found.rest)) == kinds((params, rest)), name
        assert found.meta['update'] == 1
      else:
        noticed += 1
    except CheckpointError as e:
      assert 'checkpoint 10 in' in str(e)
      noticed += 1
  gc.collect()  # a task that was left behind says so when it is collected
  assert noticed >= 5  # the arrays of params and of rest, and meta, at least


def test_a_checkpoint_of_before_is_told_from_a_damaged_one(saved: Path, tmp_path: Path) -> None:
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  file = folder / '10' / 'meta' / 'metadata'
  meta = json.loads(file.read_text())
  del meta['fingerprints']
  file.write_text(json.dumps(signed(meta)))
  params, rest = state()
  with pytest.raises(UsageError, match='made by an older podrace'):
    Checkpoints(folder, writes=False).restore(10, shapes(params), shapes(rest))


@pytest.mark.parametrize('wrong', ['[' * 200_000, '{"mesh": "x"}', '{"fingerprints": 3}', '3'])
def test_a_hostile_meta_is_damaged(wrong: str, saved: Path, tmp_path: Path) -> None:
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  file = folder / '10' / 'meta' / 'metadata'
  if wrong[0] == '{':
    wrong = json.dumps(signed(json.loads(file.read_text()) | json.loads(wrong)))
  file.write_text(wrong)
  params, rest = state()
  with pytest.raises(CheckpointError):
    Checkpoints(folder, writes=False).restore(10, shapes(params), shapes(rest))


@pytest.mark.parametrize('item', ['params', 'rest', 'meta'])
def test_a_checkpoint_that_lacks_an_item_is_damaged(item: str, saved: Path, tmp_path: Path) -> None:
  folder = tmp_path / 'checkpoints'
  shutil.copytree(saved, folder)
  shutil.rmtree(folder / '10' / item)
  params, rest = state()
  with pytest.raises(CheckpointError, match='checkpoint 10'):
    Checkpoints(folder, writes=False).restore(10, shapes(params), shapes(rest))


def test_parameters_alone_are_checked(saved: Path, tmp_path: Path) -> None:
  """A bit that was flipped in their file, of the many that orbax does not notice."""
  params, _ = state()
  noticed = 0
  files = [f.relative_to(saved) for f in every_file(saved) if '/params/' in str(f)]
  for i, name in enumerate(files):
    folder = tmp_path / str(i)
    shutil.copytree(saved, folder)
    damage(folder / name, 'flip', random.Random(f'alone {name.name}'))
    checkpoints = Checkpoints(folder, writes=False)
    try:
      assert bits(checkpoints.restore(10, shapes(params)).params) == bits(params), name
    except CheckpointError:
      noticed += 1
  assert noticed >= 1


def test_what_is_saved_is_the_state_when_save_was_called(tmp_path: Path) -> None:
  """Donating the state at once, as the next call does, doesn't tear what is still being written."""
  size = 1 << 20
  params, rest = {'w': jnp.arange(size, dtype=jnp.float32)}, jnp.zeros([size], jnp.int32)
  spoil = jax.jit(lambda x: jax.tree.map(lambda x: x * 0 - 1, x), donate_argnums=0)
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  like = shapes((params, rest))
  checkpoints.save(1, params, rest, {})
  for _ in range(20):
    params, rest = jax.block_until_ready(spoil((params, rest)))
  checkpoints.wait()
  found = checkpoints.restore(1, *like)
  np.testing.assert_array_equal(found.params['w'], np.arange(size, dtype=np.float32))
  np.testing.assert_array_equal(found.rest, np.zeros(size, np.int32))
  checkpoints.close()


def test_keeps_the_last(tmp_path: Path) -> None:
  checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)
  for step in (1, 2, 3):
    checkpoints.save(step, *state(step), {})
  checkpoints.wait()
  assert checkpoints.steps() == [3, 2]
  assert bits(checkpoints.restore(2, *map(shapes, state(2))).params) == bits(state(2)[0])
  checkpoints.close()


def test_other_shapes_are_refused(saved: Path) -> None:
  params, rest = state()
  with pytest.raises(CheckpointError, match='checkpoint 10'):
    Checkpoints(saved, writes=False).restore(10, shapes({'w': params['w'].T}), shapes(rest))


def test_set_aside_loses_nothing(saved: Path, tmp_path: Path) -> None:
  folder = tmp_path / 'run' / 'checkpoints'
  for _ in range(2):
    shutil.copytree(saved / '10', folder / '10')
    checkpoints = Checkpoints(folder)
    aside = checkpoints.set_aside(10)
    assert checkpoints.steps() == []
    assert len(list(every_file(aside))) == len(list(every_file(saved / '10')))
    checkpoints.close()
  assert {p.name for p in (tmp_path / 'run' / 'damaged').iterdir()} == {'10', '10-2'}


def test_sharded_state(tmp_path: Path) -> None:
  mesh = Mesh(np.array(jax.devices()[:4]), ('data',))
  rest = jax.device_put(jnp.arange(16), NamedSharding(mesh, P('data')))
  params = jax.device_put({'w': jnp.ones([3])}, NamedSharding(mesh, P()))
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  checkpoints.save(1, params, rest, {})
  checkpoints.wait()
  found = checkpoints.restore(1, shapes(params), shapes(rest))
  assert found.rest.sharding == rest.sharding
  assert bits(found.rest) == bits(rest)
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  alone = {'w': jax.ShapeDtypeStruct((3,), jnp.float32, sharding=one)}
  assert bits(checkpoints.restore(1, alone).params) == bits(params)
  checkpoints.close()


def test_what_is_beside_no_checkpoint_is_removed_but_what_is_a_service_s(tmp_path: Path) -> None:
  for name in ('7', '00000007', 'kept'):
    (tmp_path / 'replay' / name).mkdir(parents=True)
  Checkpoints(tmp_path / 'checkpoints').close()
  assert {p.name for p in (tmp_path / 'replay').iterdir()} == {'00000007', 'kept'}


def test_what_is_beside_a_checkpoint_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
  """A run that is killed meanwhile has nothing else to go on from."""
  folder = tmp_path / 'checkpoints'
  checkpoints = Checkpoints(folder, keep=1)
  rest = jnp.arange(1 << 21)  # which takes a while to write
  for step in (1, 2, 3):

    def write(step: int = step) -> dict[str, Any]:
      checkpoints.extra(step).mkdir(parents=True)
      return {}

    checkpoints.save(step, jnp.ones(3), rest, {}, write)
    until(checkpoints.extra(step).is_dir)
    checkpoints.tidy()  # as `save` does before it writes again
    while step not in (whole := whole_in(folder)):
      assert (
        all(checkpoints.extra(s).is_dir() for s in {*whole, step})
        and whole == [step - 1][: step > 1]
      )
    checkpoints.wait()
    assert checkpoints.steps() == [step]
    assert [p.name for p in (tmp_path / 'replay').iterdir()] == [str(step)]
  checkpoints.close()


def test_a_clock_that_jumps_ends_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
  """The wall's, by ten days each time that it is read; orbax measures by it how long it has waited."""
  now, jumps = time.time, itertools.count()
  monkeypatch.setattr(time, 'time', lambda: now() + 864_000 * next(jumps))
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  params, rest = state()
  for step in (10, 20):
    checkpoints.save(step, params, rest, {})
    checkpoints.wait()
  found = checkpoints.restore(20, shapes(params), shapes(rest))
  assert bits((found.params, found.rest)) == bits((params, rest))
  checkpoints.close()


def test_what_is_beside_is_written_in_the_background_and_first(tmp_path: Path) -> None:
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  go, params, rest = threading.Event(), *state()

  def write() -> dict[str, Any]:
    assert go.wait(60)
    checkpoints.extra(10).mkdir(parents=True)
    return {'sha256': 'of it'}

  checkpoints.save(10, params, rest, {}, write)
  assert not whole_in(tmp_path / 'checkpoints')
  go.set()
  checkpoints.wait()
  assert checkpoints.meta(10)['extra'] == {'sha256': 'of it'}
  assert checkpoints.extra(10).is_dir()
  checkpoints.close()


def test_what_fails_in_the_background_is_raised_at_the_next_save_and_at_the_end(
  tmp_path: Path,
) -> None:
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  params, rest = state()

  def fail() -> dict[str, Any]:
    raise OSError('the disk is full')

  checkpoints.save(10, params, rest, {})
  checkpoints.save(20, params, rest, {}, fail)
  with pytest.raises(CheckpointError, match='the disk is full'):
    checkpoints.save(30, params, rest, {})
  checkpoints.save(40, params, rest, {}, fail)
  with pytest.raises(CheckpointError, match='the disk is full'):
    checkpoints.wait()
  checkpoints.wait()
  assert checkpoints.steps() == [10]
  checkpoints.close()


@pytest.mark.parametrize(('failures', 'kept'), [(1, [960, 640, 320]), (2, [320])])
def test_a_run_ends_only_if_two_checkpoints_fail_in_a_row(
  failures: int, kept: list[int], tmp_path: Path, monkeypatch: Patch
) -> None:
  save, left = Checkpoints.save, [640] * failures

  def fail_at_first(self: Checkpoints, step: int, *args: Any) -> None:
    if step in left:
      left.remove(step)
      raise CheckpointError('no room')
    save(self, step, *args)

  monkeypatch.setattr(Checkpoints, 'save', fail_at_first)
  config = podrace.configure(
    'catch', num_envs=8, unroll_length=8, total_steps=960, checkpoint_every=320, devices=1
  )
  ends = contextlib.nullcontext() if failures == 1 else pytest.raises(RunError, match='no room')
  with ends:
    podrace.train(config, tmp_path / 'run', quiet=True)
  assert Checkpoints(tmp_path / 'run' / 'checkpoints', writes=False).steps() == kept


def test_the_last_checkpoint_is_made_again_if_it_fails_in_the_background(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  verify, left = StoredCheckpoint.verify_draft, [960]

  def fail_at_first(self: StoredCheckpoint, meta: dict[str, Any], arrays: Any) -> None:
    verify(self, meta, arrays)
    if meta['step'] in left:
      left.remove(meta['step'])
      raise CheckpointError('no room')

  monkeypatch.setattr(StoredCheckpoint, 'verify_draft', fail_at_first)
  config = podrace.configure(
    'catch', num_envs=8, unroll_length=8, total_steps=960, checkpoint_every=320, devices=1
  )
  podrace.train(config, tmp_path / 'run', quiet=True)
  assert not left
  assert Checkpoints(tmp_path / 'run' / 'checkpoints', writes=False).steps() == [960, 640, 320]


def test_closing_waits_for_what_is_beside_no_longer_than_it_may(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(checkpoint, 'CLOSE_SECONDS', 0.01)
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  go, params, rest = threading.Event(), *state()
  threads: list[threading.Thread] = []

  def write() -> dict[str, Any]:
    threads.append(threading.current_thread())
    assert go.wait(60)
    return {}

  checkpoints.save(10, params, rest, {}, write)
  checkpoints.close()
  go.set()
  until(lambda: threads)
  threads[0].join(60)
  assert not threads[0].is_alive()
  assert not whole_in(tmp_path / 'checkpoints')


def whole_in(folder: Path) -> list[int]:
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


# --- the checksum -------------------------------------------------------------------------------

DTYPES = ('float32', 'bfloat16', 'int32', 'uint32', 'int8', 'uint8', 'int16')


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_fingerprint_tells_any_one_bit(data: st.DataObject) -> None:
  dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
  size = data.draw(st.sampled_from([1, 3, 8]))
  leaves = []
  for dtype in dtypes:
    width = jnp.dtype(dtype).itemsize * size
    content = data.draw(st.binary(min_size=width, max_size=width))
    leaves.append(np.frombuffer(content, jnp.dtype(dtype)))
  before = int(fingerprint([jnp.asarray(x) for x in leaves]))
  which = data.draw(st.integers(0, len(leaves) - 1))
  flipped = bytearray(leaves[which].tobytes())
  bit = data.draw(st.integers(0, 8 * len(flipped) - 1))
  flipped[bit // 8] ^= 1 << bit % 8
  leaves[which] = np.frombuffer(bytes(flipped), leaves[which].dtype)
  assert int(fingerprint([jnp.asarray(x) for x in leaves])) != before


def test_fingerprint_tells_bools_keys_and_places() -> None:
  flags = jnp.array([True, False, True])
  prints = [
    int(fingerprint(x)) for x in (flags, ~flags, flags.at[0].set(False), flags.at[2].set(False))
  ]
  assert len(set(prints)) == 4
  assert int(fingerprint(jax.random.key(0))) != int(fingerprint(jax.random.key(1)))
  a, b = jnp.float32([1, 2]), jnp.float32([2, 1])
  assert int(fingerprint((a, b))) != int(fingerprint((b, a)))


@pytest.mark.parametrize('spec', [P(), P('d'), P(None, 'd')])
def test_fingerprint_of_a_large_array_sums_all_places(spec: P) -> None:
  """It is summed in pieces, along an axis that is whole on each device."""
  x = np.random.default_rng(0).integers(0, 256, (8, PIECE // 2 + 8, 3)).astype(np.uint8)
  place = np.arange(x.size, dtype=np.uint32).reshape(x.shape) + np.uint32(1)
  expected = int(np.sum(x * (place * np.uint32(MIX) | np.uint32(1)), dtype=np.uint32))
  sharding = NamedSharding(Mesh(np.array(jax.devices()), ('d',)), spec)
  assert fingerprint(jax.device_put(x, sharding)) == expected


def test_a_large_array_is_stored_in_chunks(tmp_path: Path, monkeypatch: Patch) -> None:
  """Each is encoded for itself, so that writing needs little memory."""
  monkeypatch.setattr(checkpoint, 'CHUNK_BYTES', 2**16)
  frames = np.random.default_rng(0).integers(0, 256, (40, 84, 84)).astype(np.uint8)
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  checkpoints.save(1, {'w': jnp.ones(3)}, {'frames': jnp.asarray(frames)}, {})
  checkpoints.wait()
  store = open_store(tmp_path / 'checkpoints' / '1' / 'rest', ts.Context())
  chunks = [x for x in store.list().result() if x.startswith(b'0.frames/') and b'.z' not in x]
  assert len(chunks) >= frames.nbytes / 2**16
  shapes = jax.eval_shape(lambda: ({'w': jnp.ones(3)}, {'frames': jnp.asarray(frames)}))
  device = SingleDeviceSharding(jax.devices()[0])
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
  assert np.array_equal(checkpoints.restore(1, *shapes).rest['frames'], frames)
  checkpoints.close()


def test_a_copy_of_a_large_replay_needs_no_more_memory_than_itself() -> None:
  frames = jax.ShapeDtypeStruct((100_000, 16, 84, 84), jnp.uint8)
  program = copy_and_sum.lower([frames], (0,), (0,), True).compile()
  assert program.memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_read_json(tmp_path: Path) -> None:
  assert read_json(tmp_path / 'none.json') is None
  (tmp_path / 'some.json').write_text('{"a": ')
  with pytest.raises(UsageError, match=r'some\.json.*JSON'):
    read_json(tmp_path / 'some.json')
