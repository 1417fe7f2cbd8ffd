"""Windows of replay, against a plain list of everything that ever happened."""

from __future__ import annotations

import collections
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from shorthand import slow_after

from podrace.replay import Buffer, windows
from podrace.replay.frame_stacks import unstacked, what_is_before
from podrace.types import FIRST, LAST, MID, ActorOutput, TimeStep, Trajectory

B, T = 3, 4


class World:
  """Streams of numbered timesteps, with episodes of random lengths; all of it is kept."""

  def __init__(self, seed: int, stack: int = 0, kinds: tuple[str, ...] = ('zeros',)) -> None:
    self.rng = np.random.default_rng(seed)
    self.stack, self.kinds = stack, kinds
    self.rows: list[list[dict[str, Any]]] = [[] for _ in range(B)]
    self.frames = [np.zeros((stack, 2, 2), np.uint8) for _ in range(B)]
    self.left = [0] * B
    for b in range(B):
      self._next(b, FIRST)

  def _next(self, b: int, step_type: int) -> None:
    rng, n = self.rng, len(self.rows[b])
    frame = rng.integers(1, 255, (2, 2)).astype(np.uint8)
    frames = np.concatenate([self.frames[b][1:], frame[None]]) if self.stack else None
    if step_type == FIRST:
      self.left[b] = int(rng.integers(1, 7))
      kind = rng.choice(self.kinds)
      if self.stack and kind == 'zeros':
        frames = np.concatenate([np.zeros((self.stack - 1, 2, 2), np.uint8), frame[None]])
      elif self.stack and kind == 'repeated':
        frames = np.repeat(frame[None], self.stack, axis=0)
    if self.stack:
      self.frames[b] = frames
    self.rows[b].append(
      dict(
        observation=frames if self.stack else np.float32([b, n]),
        reward=np.float32(rng.normal()),
        discount=np.float32(step_type != LAST or rng.random() < 0.5),
        step_type=np.int8(step_type),
        action=np.int32(rng.integers(5)),
        state=np.float32([b, n, 7]),
      )
    )

  def step(self, b: int) -> None:
    if self.rows[b][-1]['step_type'] == LAST:
      return self._next(b, FIRST)
    self.left[b] -= 1
    return self._next(b, LAST if self.left[b] <= 0 else MID)

  def cut(self, b: int) -> None:
    """The newest timestep is lost, and an episode begins in its place."""
    self.rows[b].pop()
    self._next(b, FIRST)

  def unroll(self) -> Trajectory:
    for b in range(B):
      for _ in range(T):
        self.step(b)
    begin = len(self.rows[0]) - T - 1

    def stacked(name: str, rows: int) -> np.ndarray:
      return np.stack([[self.rows[b][begin + t][name] for b in range(B)] for t in range(rows)])

    fields = (stacked(n, T + 1) for n in TimeStep._fields)
    return Trajectory(
      TimeStep(*fields),
      ActorOutput(stacked('action', T)),
      stacked('state', 1)[0],
      np.arange(B, dtype=np.int32),
    )


def check(world: World, sample: Any, length: int) -> list[tuple[int, int]]:
  """Every window is a piece of one stream as it happened; returns (stream, first row) of each."""
  trajectory = jax.tree.map(np.asarray, sample.trajectory)
  starts = []
  for i, b in enumerate(trajectory.env_id):
    rewards = trajectory.timesteps.reward[:, i]
    rows = world.rows[b]
    (start,) = [
      s for s in range(len(rows) - length) if rows[s]['reward'] == rewards[0]
    ]  # no two rewards are the same
    for t in range(length + 1):
      row = rows[start + t]
      cut = t < length and row['step_type'] != LAST and rows[start + t + 1]['step_type'] == FIRST
      assert trajectory.timesteps.step_type[t, i] == (LAST if cut else row['step_type'])
      if t < length:
        assert trajectory.outputs.action[t, i] == row['action']
    lived = rows[start : start + length + 1]
    for name in ('observation', 'reward', 'discount'):
      of_sample = getattr(trajectory.timesteps, name)[: length + 1, i]
      np.testing.assert_array_equal(of_sample, np.stack([row[name] for row in lived]))
    starts.append((int(b), start))
  return starts


def settings(**changes: Any) -> Buffer:
  return Buffer(**{**dict(capacity=60, batch_size=96, min_size=1), **changes})


@pytest.mark.parametrize(
  ('length', 'keep_state', 'exponent'),
  [
    pytest.param(*case, marks=() if case == (4, True, 1.0) else pytest.mark.slow)
    for shape in ((1, False), (3, False), (6, True), (4, True))
    for case in ((*shape, 0.0), (*shape, 1.0))
  ],
)
def test_windows_are_those_of_a_plain_list(length: int, keep_state: bool, exponent: float) -> None:
  """Through several turns of the ring: all the windows that there are, and no others."""
  world = World(length)
  replay = windows(settings(priority_exponent=exponent), length, B, T, keep_state=keep_state)
  add, sample = jax.jit(replay.add), jax.jit(replay.sample)
  memory, rows = None, 0
  for unroll in range(20):
    if unroll == 9:
      world.cut(1)
    trajectory = world.unroll()
    if memory is None:
      memory = replay.init(trajectory)
      rows = memory.timesteps.reward.shape[1]
    memory = add(memory, trajectory)
    if T * (unroll + 1) < length:
      continue
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    for i in range(6):
      found = sample(memory, jax.random.key(100 * unroll + i))
      starts = check(world, found, length)
      seen.update(starts)
      if keep_state:
        expected = [world.rows[b][s]['state'] for b, s in starts]
        np.testing.assert_array_equal(found.trajectory.agent_state, expected)
    head = len(world.rows[0]) - 1
    period = T if keep_state else 1
    valid = {
      (b, s)
      for b in range(B)
      for s in range(max(head - rows + 1, 0), head - length + 1)
      if s % period == 0
    }
    assert set(seen) <= valid
    if unroll == 19:
      counts = [seen[v] for v in sorted(valid)]
      assert stats.chisquare(counts).pvalue > 1e-3
      assert len(valid) * period >= 60 - B * (length + 2 * T)


@pytest.mark.parametrize(
  'kinds',
  [
    pytest.param(('zeros',), marks=pytest.mark.slow),
    pytest.param(('repeated',), marks=pytest.mark.slow),
    ('zeros', 'repeated', 'continued'),
  ],
)
def test_stacks_of_frames_are_put_together_again(kinds: tuple[str, ...]) -> None:
  """Bit for bit, whatever an environment shows before an episode; each frame is kept once."""
  world = World(3, stack=4, kinds=kinds)
  world.rows[0][0]['observation'][:3] = 0  # nothing is before the first episode
  for b in range(B):
    world.rows[b][0]['observation'][:3] = 0
    world.frames[b][:3] = 0
  replay = windows(settings(), 3, B, T, stack=4)
  memory = replay.init(jax.eval_shape(lambda: World(3, stack=4, kinds=kinds).unroll()))
  assert memory.timesteps.observation.shape[2:] == (2, 2)
  add, sample = jax.jit(replay.add), jax.jit(replay.sample)
  for unroll in range(25):
    if unroll == 11:
      world.kinds = ('zeros',)
      world.cut(1)
      world.kinds = kinds
    memory = add(memory, world.unroll())
    check(world, sample(memory, jax.random.key(unroll)), 3)


@pytest.mark.parametrize('keep_state', [False, True])
def test_the_agents_state_is_kept_on_request(keep_state: bool) -> None:
  """Though all windows start where unrolls do, as those have one step."""
  whole = World(0).unroll()
  timesteps, outputs = (
    jax.tree.map(lambda x, n=n: x[:n], tree)
    for n, tree in ((2, whole.timesteps), (1, whole.outputs))
  )
  replay = windows(settings(), 3, B, 1, keep_state=keep_state)
  memory = replay.init(Trajectory(timesteps, outputs, whole.agent_state, whole.env_id))
  assert len(jax.tree.leaves(memory.agent_state)) == keep_state


@pytest.mark.parametrize('exponent', [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(('length', 'keep_state'), [(3, False), (4, True)])
def test_the_smallest_ring_has_room_for_stacks(
  length: int, keep_state: bool, exponent: float
) -> None:
  """Of more frames than an unroll has steps."""
  world = World(5, stack=8)
  for b in range(B):
    world.rows[b][0]['observation'][:-1] = 0
    world.frames[b][:-1] = 0
  buffer = settings(capacity=B * (length + T), priority_exponent=exponent)
  replay = windows(buffer, length, B, T, keep_state=keep_state, stack=8)
  memory = replay.init(jax.eval_shape(lambda: World(5, stack=8).unroll()))
  add, sample = jax.jit(replay.add), jax.jit(replay.sample)
  for unroll in range(10):
    memory = add(memory, world.unroll())
    starts = check(world, sample(memory, jax.random.key(unroll)), length)
    assert len(starts) == 96


@pytest.mark.parametrize(
  ('name', 'actions'),
  [
    pytest.param('ale:pong', 6, marks=pytest.mark.slow),
    ('ale:breakout,episodic_life=true', 4),
    pytest.param('envpool:Breakout-v5', 4, marks=pytest.mark.slow),
  ],
)
def test_stacks_of_real_games_are_put_together_again(name: str, actions: int) -> None:
  from podrace.envs.host import base

  steps, n = 150, 2
  pool = base.make(name).make(base.PoolArgs(n, n, np.arange(n), 1, 60.0))
  rng, seen = np.random.default_rng(0), []
  pool.reset()
  for _ in range(steps):
    arrival = pool.recv()
    assert arrival.env_id.tolist() == list(range(n))
    seen.append(jax.tree.map(np.array, arrival.timestep))
    pool.send(arrival.env_id, rng.integers(0, actions, n).astype(np.int32))
  pool.recv()
  pool.close()
  timesteps = jax.tree.map(lambda *x: np.stack(x), *seen)
  if 'life' in name:
    assert int(timesteps.first.sum()) > n  # lives were lost: stacks that go on from before
  rebuild = jax.jit(lambda t: unstacked(what_is_before(t), 4))
  at, empty = jax.device_get(rebuild(timesteps))
  frames = timesteps.observation
  for t in range(3, steps):
    for b in range(n):
      again = np.where(empty[t - 3, b][:, None, None], 0, frames[at[t - 3, b], b, -1])
      np.testing.assert_array_equal(again, frames[t, b])


def test_bytes_of_an_atari_transition() -> None:
  """One frame, and little else."""
  n, steps = 4, 10_000
  replay = windows(Buffer(capacity=steps, priority_exponent=0.6), 3, n, 20, stack=4)
  timed = TimeStep(
    jax.ShapeDtypeStruct((21, n, 4, 84, 84), jnp.uint8),
    *(jax.ShapeDtypeStruct((21, n), d) for d in (jnp.float32, jnp.float32, jnp.int8)),
  )
  action = ActorOutput(jax.ShapeDtypeStruct((20, n), jnp.int32))
  example = Trajectory(timed, action, (), jax.ShapeDtypeStruct((n,), jnp.int32))
  memory = jax.eval_shape(replay.init, example)
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory))
  assert size / steps <= 7200


@pytest.mark.slow
def test_prioritised_sampling() -> None:
  """In proportion to the exponent's power, with the paper's weights; new ones at the highest."""
  world = World(0)
  buffer = settings(
    priority_exponent=0.5, importance_exponent=0.4, importance_steps=20 * T * B, capacity=200
  )
  replay = windows(buffer, 2, B, T)
  memory = replay.init(world.unroll())
  world = World(0)
  for _ in range(10):
    memory = replay.add(memory, world.unroll())
  index = np.unique(
    np.concatenate([replay.sample(memory, jax.random.key(i)).index for i in range(40)])
  )
  assert len(index) == B * (10 * T - 1)  # a window of 2 steps needs 3 timesteps, 41 are there
  priority = np.linspace(0, 9, len(index)).astype(np.float32)  # the first never again
  memory = replay.update(memory, jnp.asarray(index), jnp.asarray(priority))
  chance = np.sqrt(priority) / np.sqrt(priority).sum()
  counts = collections.Counter()
  for i in range(60):
    sample = replay.sample(memory, jax.random.key(1000 + i))
    counts.update(np.asarray(sample.index).tolist())
    position = np.searchsorted(index, sample.index)
    weight = (len(index) * chance[position]) ** -0.7  # half of the way to 1 after 10 unrolls
    np.testing.assert_allclose(sample.weight, weight / weight.max(), rtol=1e-4)
  assert counts[int(index[0])] == 0
  total = sum(counts.values())
  told = stats.chisquare([counts[int(i)] for i in index[1:]], chance[1:] / chance.sum() * total)
  assert told.pvalue > 1e-3
  assert float(memory.highest[0]) == 9
  before = float(memory.tree[0].sum())
  memory = replay.add(memory, world.unroll())  # the ring isn't full, so nothing goes
  gained = float(memory.tree[0].sum()) - before
  assert gained == pytest.approx(B * T * 3.0, rel=1e-5)


def test_the_importance_exponent_rises_to_1() -> None:
  def found(steps: int, **changes: Any) -> float:
    w = windows(settings(importance_exponent=0.4, **changes), 2, B, T).windows
    return float(w.buffer.importance(np.float64(steps)))

  rising = [found(steps, importance_steps=200) for steps in (0, 50, 200, 1_000)]
  assert rising == pytest.approx([0.4, 0.55, 1.0, 1.0])
  assert found(1_000) == 0.4


def test_exponent_and_share_move_over_more_steps_than_i32_counts() -> None:
  """As on the device, where steps are f32."""
  steps, half = 10**10, jnp.float32(5e9)
  rising = settings(importance_exponent=0.4, importance_steps=steps)
  assert float(jax.jit(rising.importance)(half)) == pytest.approx(0.7)
  share = settings(online_share=0.2, online_share_end=0.4, online_share_steps=steps)
  assert float(jax.jit(share.online)(half)) == pytest.approx(0.3)


@pytest.mark.parametrize(
  ('unroll', 'length', 'keep'),
  [
    (100, 3, False),
    pytest.param(16, 1, False, marks=pytest.mark.slow),
    pytest.param(8, 20, True, marks=pytest.mark.slow),
  ],
)
def test_sums_of_priorities_stay_sums(unroll: int, length: int, keep: bool) -> None:
  """Each node of the tree, after several turns of a ring of many nodes."""
  replay = windows(
    settings(priority_exponent=1.0, capacity=3000), length, B, unroll, keep_state=keep
  )

  def trajectory(seed: int) -> Trajectory:
    timed = np.random.default_rng(seed).normal(size=(unroll + 1, B)).astype(np.float32)
    steps = TimeStep(timed, timed, timed, np.ones((unroll + 1, B), np.int8))
    return Trajectory(steps, ActorOutput(timed[1:]), timed[0], np.arange(B))

  memory = replay.init(trajectory(0))
  add, sample, update = map(jax.jit, (replay.add, replay.sample, replay.update))
  for i in range(3 * memory.timesteps.reward.shape[1] // unroll):
    memory = add(memory, trajectory(i))
    if i * unroll > length + unroll:
      index = sample(memory, jax.random.key(i)).index
      memory = update(memory, index, np.linspace(0.5, 2.0, len(index), dtype=np.float32))
  for below, above in zip(memory.tree, memory.tree[1:], strict=False):
    sums = np.asarray(below).sum(1)
    np.testing.assert_allclose(np.asarray(above).reshape(-1)[: len(sums)], sums, rtol=1e-5)
  rows = memory.timesteps.reward.shape[1]
  valid = (rows - length) // (unroll if keep else 1)
  there = int((np.asarray(memory.tree[0]) > 0).sum())
  assert B * valid * 0.9 < there <= B * (valid + 1)


@pytest.mark.parametrize(
  'ratio',
  [
    0.3,
    pytest.param(1.0, marks=pytest.mark.slow),
    pytest.param(1.5, marks=pytest.mark.slow),
    pytest.param(8.0, marks=pytest.mark.slow),
    7.77,
  ],
)
@pytest.mark.parametrize(
  'min_size',
  [1, pytest.param(12, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow), 100],
)
def test_samples_per_insert_is_exact(ratio: float, min_size: int) -> None:
  buffer = settings(batch_size=32, samples_per_insert=ratio, min_size=min_size, capacity=1000)
  replay = windows(buffer, 3, B, T)
  learned, ready = 0, None
  for update, times in enumerate(jax.jit(jax.vmap(replay.times))(np.arange(500)).tolist()):
    inserted = (update + 1) * B * T
    if inserted < min_size:
      assert times == 0
      continue
    ready = update if ready is None else ready
    learned += times
    due = Fraction(ratio).limit_denominator(10_000) * (update + 1 - ready) * B * T / 32
    assert learned == int(due)


def test_a_ratio_that_would_be_rounded_is_refused() -> None:
  windows(settings(samples_per_insert=1 / 3), 2, B, T)
  with pytest.raises(ValueError, match='samples_per_insert'):  # it would be rounded to 0
    windows(settings(samples_per_insert=1e-7), 2, B, T)


@pytest.mark.slow
def test_without_any_priority_all_windows_are_alike() -> None:
  world = World(0)
  replay = windows(settings(priority_exponent=0.5, capacity=200), 2, B, T)
  memory = replay.init(world.unroll())
  for _ in range(5):
    memory = replay.add(memory, world.unroll())
  seen = set()
  memory = memory._replace(tree=tuple(jnp.zeros_like(x) for x in memory.tree))
  for i in range(40):
    sample = replay.sample(memory, jax.random.key(i))
    np.testing.assert_array_equal(sample.weight, 1)
    seen |= set(np.asarray(sample.index).tolist())
  assert len(seen) == B * (5 * T - 1)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(capacity=0), 'capacity'),
    (dict(min_size=2000, capacity=1000), 'min_size 2000'),
    (dict(samples_per_insert=0.0), 'samples_per_insert'),
    (dict(importance_steps=-1), 'importance_steps'),
    (dict(priority_exponent=1.5), r'priority_exponent'),
  ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    settings(**changes)


@pytest.mark.parametrize('keep_state', [False, True])
def test_a_capacity_below_an_unroll_and_a_window_is_refused(keep_state: bool) -> None:
  """A smaller one would be rounded up on the device, and on the host keep some environments only."""
  message = (
    'capacity of 1000 is too little for 512 environments: each needs room for an unroll of 16 steps and a '
    'window of 3; give a capacity of 9728 or more'
  )
  with pytest.raises(ValueError, match=message):
    windows(settings(capacity=1000), 3, 512, 16, keep_state=keep_state)
  found = windows(settings(capacity=9728), 3, 512, 16, keep_state=keep_state).windows
  assert found.rows == 32  # whole unrolls


@pytest.mark.parametrize('exponent', slow_after(1, 0.5, 0.0))
def test_windows_at_first_begin_episodes(exponent: float) -> None:
  """All such windows, and no others, also once rows are overwritten."""
  world = World(5)
  replay = windows(settings(priority_exponent=exponent), 5, B, T, at_first=True)
  memory = replay.init(world.unroll())
  world = World(5)
  add, sample, update = map(jax.jit, (replay.add, replay.sample, replay.update))
  for i in range(12):
    memory = add(memory, world.unroll())
    if i < 2:
      continue
    drawn = sample(memory, jax.random.key(i))
    assert (np.asarray(drawn.trajectory.timesteps.step_type)[0] == FIRST).all()
    starts = check(world, drawn, 5)
    assert len(set(starts)) > 3
    memory = update(memory, drawn.index, np.full(drawn.index.shape, 2, np.float32))
