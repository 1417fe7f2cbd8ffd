"""Replay on the host holds what replay on the device holds, and does what it is told in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shorthand import slow_after
from test_windows import B, T, World, settings

from podrace import tables, topology
from podrace.errors import ReplayFailed, UsageError
from podrace.replay import host, host_tables, windows
from podrace.replay.host import HostReplay
from podrace.replay.layout import Layout
from podrace.replay.rings import read_windows
from podrace.types import FIRST, Trajectory


def first_priority(window: Trajectory) -> Any:
  """Something of everything that acting tells but observations, and of the state."""
  rows = window.timesteps.reward[:-1] * window.outputs.action + window.timesteps.discount[1:]
  return jnp.abs(jnp.sum(rows, axis=0)) + 0.1 + 0.01 * window.agent_state[:, 1]


class Both:
  """The same experience in replay on the device and on the host."""

  def __init__(self, world: World, length: int, buffer: Any = None, **given: Any) -> None:
    self.world = world
    buffer = buffer or settings(capacity=10_000)
    self.replay = windows(buffer, length, B, T, **given)
    self.w = self.replay.windows
    example = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, world_like(world).unroll()))
    self.layout = Layout(self.w, example)
    self.memory = self.replay.init(example)
    self.remember = jax.jit(self.replay.add)
    sizes = dict(length=length, period=self.w.period, stack=self.w.stack)
    self.window = jax.jit(functools.partial(read_windows, **sizes))
    self.decode = jax.jit(self.layout.sample)
    self.hosted = HostReplay(self.layout, topology.learner_mesh(1), seed=1)
    self.hosted.start()
    self.unrolls = 0

  def add(self, rng: np.random.Generator | None = None, times: int = 1) -> None:
    """To the host in any order, if there is an rng."""
    for _ in range(times):
      trajectory = self.world.unroll()
      self.memory = self.remember(self.memory, trajectory)
      serial = np.full(B, self.unrolls)
      order = np.arange(B) if rng is None else rng.permutation(B)
      for part in np.array_split(order, 2 if rng is not None else 1):
        timed = jax.tree.map(lambda x, part=part: x[:, part], trajectory[:2])
        rest = jax.tree.map(lambda x, part=part: x[part], tuple(trajectory[2:]))
        self.hosted.add([jax.tree.map(jnp.asarray, Trajectory(*timed, *rest))], serial[part])
      self.unrolls += 1
    self.hosted.wait()

  def sample(self) -> tuple[np.ndarray, Any]:
    (found,) = self.hosted.samples(1)
    return found.key, self.decode(found.data)

  def close(self) -> None:
    self.hosted.close()


def world_like(world: World) -> World:
  return World(0, stack=world.stack, kinds=world.kinds)


def starts_of(world: World, sample: Any) -> list[int]:
  """Where in their streams windows begin; no two rewards are the same."""
  found = []
  for i, b in enumerate(np.asarray(sample.trajectory.env_id)):
    reward = np.asarray(sample.trajectory.timesteps.reward)[0, i]
    (start,) = [s for s, row in enumerate(world.rows[b]) if row['reward'] == reward]
    found.append(start)
  return found


CASES = {
  'transitions': dict(length=1),
  'n-step': dict(length=3),
  'longer than unrolls': dict(length=9),
  'sequences': dict(length=6, keep_state=True),
  'sequences without overlap': dict(length=4, keep_state=True),
  'episodes': dict(length=6, at_first=True),
  'stacks of zeros': dict(length=3, stack=4, kinds=('zeros',)),
  'stacks of anything': dict(length=3, stack=4, kinds=('zeros', 'repeated', 'continued')),
  'stacked sequences': dict(length=6, stack=3, keep_state=True, kinds=('zeros', 'continued')),
}


SLOW = {'transitions', 'longer than unrolls', 'sequences without overlap', 'stacks of zeros'}


@pytest.mark.parametrize('order', slow_after(1, 'in any order', 'in order'))
@pytest.mark.parametrize(
  'case', [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]
)
def test_windows_are_those_of_the_device(case: str, order: str) -> None:
  """Leaf by leaf, and all that there are."""
  given: dict[str, Any] = dict(CASES[case])
  stack, kinds = given.get('stack', 0), given.pop('kinds', ('zeros',))
  world = World(7, stack=stack, kinds=kinds)
  for b in range(B):
    if stack:  # nothing is before the first episode, of which the device knows nothing
      world.rows[b][0]['observation'][:-1] = 0
      world.frames[b][:-1] = 0
  with contextlib.closing(Both(world, **given)) as both:
    rng = np.random.default_rng(0) if order == 'in any order' else None
    seen = set()
    for unroll in range(8):
      both.add(rng)
      for _ in range((12 if unroll == 7 else 2) if len(both.hosted.table) else 0):
        _, sample = both.sample()
        starts = starts_of(world, sample)
        stream = jnp.asarray(sample.trajectory.env_id)
        expected = both.window(both.memory, stream, jnp.asarray(starts, jnp.int32))
        for (path, x), y in zip(
          jax.tree_util.tree_leaves_with_path(sample.trajectory),
          jax.tree.leaves(expected),
          strict=True,
        ):
          assert x.dtype == y.dtype
          np.testing.assert_array_equal(x, y, err_msg=str(path))
        seen |= set(zip(stream.tolist(), starts, strict=True))
    head, period = 8 * T, both.w.period
    every = {(b, s) for b in range(B) for s in range(0, head - given['length'] + 1, period)}
    assert len(both.hosted.table) == len(every)
    if given.get('at_first'):
      every = {(b, s) for b, s in every if world.rows[b][s]['step_type'] == FIRST}
    assert seen == every


def test_weights_and_priorities_are_those_of_the_device() -> None:
  """First priorities by what acting told, then by what was learned; weights by the same formula."""
  buffer = settings(
    capacity=10_000, priority_exponent=0.7, importance_exponent=0.4, importance_steps=20 * T * B,
    batch_size=512,
  )  # fmt: skip
  with contextlib.closing(
    Both(World(3), 6, buffer, keep_state=True, initial_priority=first_priority)
  ) as both:
    both.add(times=10)
    both.hosted.times(9)  # the tenth update: half of the way to an exponent of 1
    tree = np.array(both.memory.tree[0]).reshape(-1)

    def compare() -> None:
      key, sample = both.sample()
      index = (
        np.asarray(sample.trajectory.env_id) * both.w.starts
        + np.array(starts_of(both.world, sample)) // both.w.period
      )
      count = len(both.hosted.table)
      weight = (count * tree[index] / tree.sum()) ** -0.7
      np.testing.assert_allclose(sample.weight, weight / weight.max(), rtol=1e-4)
      priority = (np.arange(len(key)) % 7 + 1.0).astype(np.float32)
      last = dict(zip(index.tolist(), priority.tolist(), strict=True))
      both.hosted.update(key, jnp.asarray(priority))
      tree[list(last)] = np.array(list(last.values())) ** 0.7

    for _ in range(3):
      compare()
    assert both.hosted.streams.highest == 7


def test_new_windows_have_the_highest_priority_so_far() -> None:
  buffer = settings(capacity=10_000, priority_exponent=1.0, batch_size=8)
  with contextlib.closing(Both(World(3), 2, buffer)) as both:
    both.add(times=2)
    key, _ = both.sample()
    both.hosted.update(key, jnp.full(8, 50.0))
    both.add()
    both.hosted.wait()
    snapshot = both.hosted.table.snapshot()
    newest = [
      i for i, item in enumerate(snapshot['items']) if item.key > snapshot['items'][0].key + 20
    ]
    assert newest and all(snapshot['priorities'][i] == 50 for i in newest[-B * T :])


def test_no_window_goes_over_a_gap() -> None:
  """Where an unroll was lost, a stream begins anew; nothing else is missing."""
  world = World(5)
  with contextlib.closing(Both(world, 3)) as both:
    both.add(times=2)
    world.unroll()
    both.unrolls += 1
    both.add(times=2)
    seen = set()
    for _ in range(12):
      _, sample = both.sample()
      starts = starts_of(world, sample)
      rewards = np.asarray(sample.trajectory.timesteps.reward)
      for i, (b, start) in enumerate(zip(sample.trajectory.env_id.tolist(), starts, strict=True)):
        seen.add(start)
        steps = [row['reward'] for row in world.rows[b][start : start + 4]]
        np.testing.assert_array_equal(rewards[:, i], steps)
    assert seen == {*range(2 * T - 2), *range(3 * T, 5 * T - 2)}


def test_memory_is_bounded() -> None:
  """Items, and the bytes of what they are slices of."""
  world = World(1)
  with contextlib.closing(Both(world, 3, settings(capacity=96))) as both:
    sizes = []
    for _ in range(120):
      world.rows = [rows[-1:] for rows in world.rows]
      both.add(times=1)
      assert len(both.hosted.table) <= 96
      sizes.append(both.hosted.table.store.total.bytes)
    assert max(sizes[80:]) <= 1.2 * max(sizes[40:80])


@pytest.mark.parametrize(
  ('ratio', 'min_size'),
  [
    *((0.3, 1), (1.5, 50), (7.77, 1)),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0.3, 50), (1.5, 1), (7.77, 50))),
  ],
)
def test_samples_per_insert_is_exact(ratio: float, min_size: int) -> None:
  buffer = settings(
    capacity=1000, batch_size=8, samples_per_insert=ratio, min_size=min_size, priority_exponent=0.5
  )
  with contextlib.closing(Both(World(2), 3, buffer)) as both:
    learned, expected = 0, 0
    for update in range(40):
      both.add()
      times = both.hosted.times(update)
      for found in both.hosted.samples(times):
        both.hosted.update(found.key, jnp.ones(8))
        learned += 1
      expected += int(both.replay.times(jnp.int32(update)))
      assert learned == expected
    both.hosted.wait()
    assert both.hosted.table.contents.counts.samples == 8 * learned
    ready = -(-max(min_size, 1) // (B * T)) - 1
    assert learned == int(Fraction(ratio).limit_denominator(10_000) * (40 - ready) * B * T / 8)


def test_of_two_processes_each_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
  """Half of the capacity and of each batch, drawn by numbers of its own, once both have windows."""
  for module in (host, host_tables):
    monkeypatch.setattr(module, 'share', lambda total: -(-total // 2))
  there, found = 0, []
  monkeypatch.setattr(
    host, 'everyones', lambda own: np.array([own, np.full(len(own), there)], np.float64)
  )
  for number in range(2):
    monkeypatch.setattr(jax, 'process_index', lambda number=number: number)
    with contextlib.closing(
      Both(World(2), 3, settings(capacity=101, batch_size=8, priority_exponent=0.5))
    ) as both:
      both.add(times=2)
      there = 0
      assert both.hosted.times(1) == 0  # the other has nothing yet
      there = 5
      assert both.hosted.times(2) > 0
      keys, _ = both.sample()
      assert both.hosted.metrics()['replay_samples'] == 4 + 5
      assert both.hosted.table.contents.max_size == 51
      found.append(keys.tolist())
  assert len(found[0]) == len(found[1]) == 4 and found[0] != found[1]


def drawn(both: Both, updates: range) -> list[Any]:
  """What is learned from, with priorities that depend on it."""
  found = []
  for update in updates:
    both.add()
    for one in both.hosted.samples(both.hosted.times(update)):
      both.hosted.update(one.key, jnp.abs(one.data['reward']).sum(1))
      found.append(jax.tree.map(np.asarray, (one.key, one.data)))
  return found


@pytest.mark.parametrize('case', slow_after(1, 'stacked sequences', 'n-step'))
def test_a_restored_replay_goes_on_as_if_nothing_had_happened(case: str, tmp_path: Path) -> None:
  given: dict[str, Any] = dict(CASES[case])
  stack, kinds = given.get('stack', 0), given.pop('kinds', ('zeros',))
  buffer = settings(capacity=120, batch_size=4, priority_exponent=0.6)
  world = World(4, stack=stack, kinds=kinds)
  with contextlib.closing(Both(world, buffer=buffer, **given)) as one:
    drawn(one, range(12))
    write = one.hosted.save(tmp_path / '12', streams=True)
    rows = [list(x) for x in world.rows]
    rng, frames, left = world.rng.bit_generator.state, list(world.frames), list(world.left)
    expected = drawn(one, range(12, 20))
    told = write()  # later, and in another thread than those that change it
  world.rows, world.frames, world.left = rows, frames, left
  world.rng.bit_generator.state = rng
  with contextlib.closing(Both(world, buffer=buffer, **given)) as other:
    other.unrolls = 12
    other.hosted.wait()
    other.hosted.restore(tmp_path / '12', told)
    found = drawn(other, range(12, 20))
  assert len(found) == len(expected) > 8
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_environments_that_begin_anew_continue_no_window(tmp_path: Path) -> None:
  with contextlib.closing(Both(World(4), 2)) as one:
    one.add()
    begun = len(one.hosted.table)
    one.add(times=2)
    told = one.hosted.save(tmp_path / '3', streams=True)()
  new = {}
  for streams in (True, False):
    with contextlib.closing(Both(World(4), 2)) as other:
      other.unrolls = 3
      other.hosted.wait()
      other.hosted.restore(tmp_path / '3', told, streams=streams)
      before = len(other.hosted.table)
      other.add()
      other.hosted.wait()
      new[streams] = len(other.hosted.table) - before
  assert new[True] > new[False] == begun


def test_a_saved_replay_outlives_a_power_cut(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Every file and directory is on the disk before it gets its name, and then the name."""
  synced: list[tuple[str, frozenset[str]]] = []  # what, and what it had in it

  def fsync(descriptor: int) -> None:
    path = Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    inside = frozenset(p.name for p in path.iterdir()) if path.is_dir() else frozenset()
    synced.append((str(path.relative_to(tmp_path)), inside))

  monkeypatch.setattr(os, 'fsync', fsync)
  with contextlib.closing(Both(World(4), 2)) as both:
    both.add(times=3)
    both.hosted.save(tmp_path / 'replay' / '3', streams=True)()
  partial = 'replay/.3.partial'
  last = {name: (i, inside) for i, (name, inside) in enumerate(synced)}
  assert last[partial][1] == {'tables', 'streams.npz'}
  assert last[f'{partial}/streams.npz'][0] < last[partial][0] < last['replay'][0]
  assert last['replay'][1] == {'3'} and last['.'][1] == {'replay'}


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
  with contextlib.closing(Both(World(4), 2)) as both:
    both.add(times=3)
    told = both.hosted.save(tmp_path / '3', streams=True)()
    np.savez(tmp_path / '3' / 'streams.npz')  # whole, and of another checkpoint
    for step, problem in (('3', told['sha256']), ('4', 'not there')):  # the fourth is not there
      with pytest.raises(tables.CheckpointError, match=problem):
        both.hosted.restore(tmp_path / step, told)
    told = both.hosted.save(tmp_path / '3', streams=False)()
    path = tmp_path / '3' / 'tables' / 'chunks.bin'
    path.write_bytes(path.read_bytes()[:-1])
    count = len(both.hosted.table)
    with pytest.raises(tables.CheckpointError, match=r'chunks\.bin'):
      both.hosted.restore(tmp_path / '3', told)
    assert len(both.hosted.table) == count > 0  # as before


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
  one, other = (Both(World(4), 2, settings(capacity=n)) for n in (10_000, 5_000))
  try:
    one.add(times=3)
    other.add(times=2)
    record = one.hosted.save(tmp_path / '3', streams=True)()
    count = len(other.hosted.table)
    with pytest.raises(UsageError, match='max_size'):
      other.hosted.restore(tmp_path / '3', record)
    assert len(other.hosted.table) == count > 0
    other.add()
    assert len(other.hosted.table) > count
  finally:
    one.close()
    other.close()


def test_a_checkpoint_of_other_columns_is_refused(tmp_path: Path) -> None:
  """It is not damaged: `Saves` would move it aside."""
  with contextlib.closing(Both(World(4), 2)) as one:
    one.add(times=3)
    record = one.hosted.save(tmp_path / '3', streams=True)()
    example = one.layout.example
    more = {'value': jax.ShapeDtypeStruct((T, B, 3), np.float32)}
    example = example._replace(outputs=example.outputs._replace(extras=more))
    layout = dataclasses.replace(one.layout, example=example)
  other = HostReplay(layout, topology.learner_mesh(1), seed=1)
  with pytest.raises(UsageError, match=r'extras/value: none -> float32\[3\]'):
    other.restore(tmp_path / '3', record)
  assert len(other.table) == 0
  other.close()


def test_a_failing_thread_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
  with contextlib.closing(Both(World(4), 2)) as both:
    both.add(times=3)

    def fail(*args: Any, **kwargs: Any) -> None:
      raise MemoryError

    monkeypatch.setattr(both.hosted.table, 'sample', fail)
    with pytest.raises(ReplayFailed, match='MemoryError'):
      list(both.hosted.samples(3))
    with pytest.raises(ReplayFailed, match='MemoryError'):
      both.add()


def test_a_closed_replay_raises_where_it_would_wait() -> None:
  both = Both(World(4), 2)
  both.add(times=3)
  both.close()
  for call in (both.add, both.hosted.wait, both.hosted.start, lambda: list(both.hosted.samples(1))):
    with pytest.raises(ReplayFailed):
      call()


def test_a_closed_table_ends_a_wait_for_samples() -> None:
  with contextlib.closing(Both(World(4), 2)) as both:
    both.add(times=3)
    both.hosted.table.close()
    with pytest.raises(ReplayFailed):
      list(both.hosted.samples(1))


def test_a_batch_that_does_not_divide_is_refused() -> None:
  both = Both(World(4), 2)
  both.close()
  buffer = dataclasses.replace(both.w.buffer, batch_size=3)
  layout = Layout(dataclasses.replace(both.w, buffer=buffer), both.layout.example)
  with pytest.raises(ValueError, match=r'batch_size 3 .* 2 '):
    HostReplay(layout, topology.learner_mesh(2), 0)


def test_an_output_in_bfloat16_is_refused_before_training() -> None:
  both = Both(World(4), 2)
  both.close()
  example = both.layout.example
  action = jax.ShapeDtypeStruct(example.outputs.action.shape, jnp.bfloat16)
  layout = Layout(both.w, example._replace(outputs=example.outputs._replace(action=action)))
  with pytest.raises(UsageError, match=r'action .*bfloat16.* --replay device'):
    layout.batch()
