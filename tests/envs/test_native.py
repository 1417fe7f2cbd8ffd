"""Environments in C: their pool of threads, states, checks before a run, and crashes."""
# ruff: noqa: F401, F811 (a fixture of processes)

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from children import SUPPORT, until
from native_envs import TAGGED, write
from processes import Podrace, cache
from shorthand import Capture, Patch, slow_after
from test_runs import called

from podrace.envs.host import base as host
from podrace.envs.host.base import PoolArgs
from podrace.envs.native import build, pool, trial
from podrace.envs.native.library import ArraySpec
from podrace.envs.spaces import leaves, values
from podrace.errors import HostError, UnknownName, UsageError
from podrace.system.child import python
from podrace.types import FIRST, LAST, MID, Arrival


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.chdir(tmp_path)


@pytest.fixture
def tagged(tmp_path: Path) -> str:
  (tmp_path / 'tagged.c').write_text(TAGGED, encoding='utf-8')
  return 'c:tagged.c'


@contextlib.contextmanager
def opened(name: str, n: int = 8, batch: int = 0, threads: int = 1, seed: int = 0) -> Iterator[Any]:
  seeds = np.arange(seed, seed + n, dtype=np.uint32)
  args = PoolArgs(n, batch or n, seeds, threads, 60.0)
  with contextlib.closing(host.make(name).make(args)) as envs:
    yield envs


def fields(arrival: Arrival, space: Any) -> list[bytes]:
  t = arrival.timestep
  arrays = [t.reward, t.discount, t.step_type, arrival.score, *values(space, t.observation)]
  return [np.asarray(x).tobytes() for x in arrays]


def actions(space: Any, seed: int, n: int) -> np.ndarray:
  space.seed(seed)
  return np.stack([space.sample() for _ in range(n)])


def stream(name: str, steps: int, n: int = 8, **settings: Any) -> list[list[bytes]]:
  """The bytes of a pool's arrivals, of the same random actions."""
  spec = host.make(name)
  with opened(name, n, **settings) as envs:
    envs.reset()
    result = []
    for t in range(steps):
      arrival = envs.recv()
      result.append(fields(arrival, spec.observation_space))
      envs.send(arrival.env_id, actions(spec.action_space, t, n))
    envs.recv()
  return result


# --- timesteps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name', ['c:cartpole', 'c:breakout', 'c:grid,side=8,max_steps=30', 'tagged']
)
def test_equal_bytes_for_any_number_of_threads(name: str, tagged: str) -> None:
  name = tagged if name == 'tagged' else name
  one = stream(name, 120, 40)
  assert stream(name, 120, 40, threads=2) == one
  assert stream(name, 120, 40, threads=7) == one
  assert stream(name, 120, 40, seed=50) != one
  assert [x[0][: 4 * 10] for x in stream(name, 120, 10)] == [x[0][: 4 * 10] for x in one]


def test_equal_bytes_in_worker_processes(tagged: str) -> None:
  assert stream(f'{tagged},isolate=true', 80, 12, threads=2) == stream(tagged, 80, 12)


def check_tags(arrivals: Iterator[tuple[Arrival, np.ndarray | None]], n: int) -> int:
  """Checks each timestep against the one before of its environment; returns their number."""
  seed, step, length = np.full(n, -1), np.zeros(n, int), np.zeros(n, int)
  count, seeds = 0, []
  for arrival, action in arrivals:
    t, ids, o = arrival.timestep, arrival.env_id, arrival.timestep.observation
    tag = o['tag']
    opens = step[ids] == length[ids]
    np.testing.assert_array_equal(t.step_type == FIRST, opens)
    expected = np.where(opens, 0, step[ids] + 1)
    np.testing.assert_array_equal(tag[:, 1], expected)
    np.testing.assert_array_equal(tag[opens, 2], -1)
    if action is not None:
      answered = (7 * action[:, 0] + action[:, 1])[~opens]
      np.testing.assert_array_equal(tag[~opens, 2], answered)
    np.testing.assert_array_equal(tag[~opens, 0], seed[ids][~opens])
    np.testing.assert_array_equal(o['copy'], (10 * expected[:, None] + np.arange(3)))
    assert (o['more'] == (expected % 100)[:, None]).all()
    seed[ids], step[ids], length[ids] = tag[:, 0], tag[:, 1], tag[:, 3]
    last = step[ids] == length[ids]
    np.testing.assert_array_equal(t.step_type == LAST, last)
    terminated = last & ((tag[:, 3] - 3 + 60 * 0) >= 0) & (t.discount == 0)
    assert np.all((t.discount == 1) | terminated)
    np.testing.assert_array_equal(t.reward, expected)
    np.testing.assert_array_equal(arrival.score, -expected.astype(np.float32))
    seeds += tag[opens, 0].tolist()
    count += len(ids)
  assert len(set(seeds)) > 0.999 * len(seeds), 'each episode has a seed of its own'
  return count


def play(name: str, n: int, steps: int, **settings: Any) -> Iterator[tuple[Arrival, Any]]:
  """Yields each arrival with the actions that it answers."""
  sent: dict[int, np.ndarray] = {}
  rng = np.random.default_rng(0)
  with opened(name, n, **settings) as envs:
    envs.reset()
    for _ in range(steps):
      arrival = envs.recv()
      ids = arrival.env_id
      yield arrival, np.stack([sent[i] for i in ids.tolist()]) if len(sent) == n else None
      action = rng.integers(0, (5, 7), (len(ids), 2)).astype(np.int32)
      sent |= dict(zip(ids.tolist(), action, strict=True))
      envs.send(ids, action)


@pytest.mark.parametrize(('low', 'high'), [(-0.1, 0.1), (0.0, 0.3), (-0.7, 0.7), (-np.inf, 0.1)])
def test_floats_are_within_bounds_that_are_doubles(low: float, high: float) -> None:
  space = ArraySpec('', 'float32', (1,), low, high, ()).space()
  assert low <= float(space.low[0]) < float(space.high[0]) <= high


@pytest.mark.parametrize('steps', slow_after(1, 16_384, 262_144))
def test_a_million_steps_are_whole(steps: int, tagged: str) -> None:
  """Of four owners at once; their batches share eight threads."""
  counts: list[int] = []

  def own(batch: int) -> None:
    counts.append(check_tags(play(tagged, 512, steps // batch, batch=batch, threads=2), 512))

  owners = [threading.Thread(target=own, args=[b]) for b in (512, 512, 256, 512)]
  for owner in owners:
    owner.start()
  for owner in owners:
    owner.join()
  assert counts == [steps] * 4


def test_parts_come_back_in_the_order_they_were_sent(tagged: str) -> None:
  ids = [a.env_id.tolist() for a, _ in play(tagged, 6, 7, batch=2)]
  assert ids == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1]]
  with opened(tagged, 6, batch=3) as envs:
    envs.reset()
    envs.recv()
    for wrong in ([0, 6], [-1, 0], [1, 1], [0, 1, 2, 3], list(range(6))):
      with pytest.raises(HostError):
        envs.send(np.array(wrong), np.zeros((len(wrong), 2), np.int32))


def test_terminated_and_truncated_is_terminated(tagged: str) -> None:
  """The flags of an episode are a function of its seed."""
  flags: list[tuple[int, float]] = []
  for arrival, _ in play(tagged, 64, 400):
    t = arrival.timestep
    last = t.step_type == LAST
    assert (t.discount[~last] == 1).all()
    flags += zip(t.observation['tag'][last, 4].tolist(), t.discount[last].tolist(), strict=True)
  assert {(kind, discount) for kind, discount in flags} == {(1, 0.0), (2, 1.0), (3, 0.0)}


def test_an_arrival_does_not_change_while_it_is_referred_to(tagged: str) -> None:
  """Nor do views of it, nor arrays of JAX that may share its memory."""
  kept: list[tuple[Any, np.ndarray]] = []
  with opened('c:breakout', 64) as envs:
    envs.reset()
    for t in range(60):
      observation = envs.recv().timestep.observation
      keep = (observation, observation[3:5], jax.device_put(observation))[t % 3]
      kept.append((keep, np.array(keep)))
      envs.send(np.arange(64), np.full(64, t % 3, np.int32))
      del observation, keep
    envs.recv()
    assert len(envs._frames) > 20
  for came, copy in kept:
    np.testing.assert_array_equal(came, copy)


def test_memory_is_used_again() -> None:
  with opened('c:breakout', 64) as envs:
    envs.reset()
    for t in range(200):
      arrival = envs.recv()
      envs.send(arrival.env_id, np.full(64, t % 3, np.int32))
    envs.recv()
    assert len(envs._frames) == 2


def test_the_pool_has_as_many_threads_as_its_batches_may_use(tagged: str) -> None:
  workers = pool.shared_pool('test').podrace_pool_workers
  assert until(lambda: workers() == 0)
  with opened(tagged, threads=1):
    assert workers() == 0  # the thread that waits does all
    with opened(tagged, threads=3):
      assert workers() == 3
    assert until(lambda: workers() == 0)


def test_numbers_for_the_log(tagged: str) -> None:
  for name in (tagged, f'{tagged},isolate=true'):
    spec = host.make(name)
    assert spec.metrics is not None and spec.metrics() == {}
    lengths = []
    with contextlib.closing(
      spec.make(PoolArgs(6, 6, np.arange(6, dtype=np.uint32), 2, 60.0))
    ) as envs:
      envs.reset()
      for _ in range(150):
        arrival = envs.recv()
        tag = arrival.timestep.observation['tag']
        lengths += tag[arrival.ended, 3].tolist()
        envs.send(arrival.env_id, np.zeros((6, 2), np.int32))
      envs.recv()
      means = spec.metrics()
    assert lengths and means.keys() == {'info_length'}
    np.testing.assert_allclose(means['info_length'], np.mean(lengths), rtol=0.05)
    assert spec.metrics() == {}


def test_numbers_for_the_log_go_on_when_a_worker_is_replaced(tagged: str) -> None:
  spec = host.make(f'{tagged},isolate=true')
  assert spec.metrics is not None
  lengths = []
  with contextlib.closing(
    spec.make(PoolArgs(2, 2, np.arange(2, dtype=np.uint32), 2, 60.0))
  ) as envs:
    envs.reset()
    for t in range(300):
      arrival = envs.recv()
      if t == 200:  # both workers wait, so their sums are those of all episodes so far
        assert spec.metrics()['info_length'] == pytest.approx(np.mean(lengths), rel=0.05)
        os.kill(envs.pids[0], signal.SIGKILL)
        lengths = []
      lengths += arrival.timestep.observation['tag'][arrival.ended, 3].tolist()
      envs.send(arrival.env_id, np.zeros((2, 2), np.int32))
    envs.recv()
  assert arrival.run_id[0] == 1
  np.testing.assert_allclose(spec.metrics()['info_length'], np.mean(lengths), rtol=0.05)


def test_a_grid_has_a_crystal_and_counts_those_that_are_gathered() -> None:
  spec = host.make('c:grid,side=8,crystals=1,walls=0.5,max_steps=5')
  assert spec.metrics is not None
  with contextlib.closing(
    spec.make(PoolArgs(200, 200, np.arange(200, dtype=np.uint32), 1, 60.0))
  ) as envs:
    envs.reset()
    gathered, ends = 0.0, 0
    for t in range(30):
      arrival = envs.recv()
      first = arrival.timestep.first
      assert (arrival.timestep.observation['numbers'][first, 1] == 1).all()
      assert (arrival.timestep.observation['map'][first, ..., 1].sum((1, 2)) == 1).all()
      gathered, ends = gathered + arrival.timestep.reward.sum(), ends + arrival.ended.sum()
      if t < 29:
        envs.send(arrival.env_id, np.full(200, t % 4, np.int32))
    assert spec.metrics()['info_crystals_gathered'] == pytest.approx(gathered / ends) and gathered


def test_spaces(tagged: str) -> None:
  spec = host.make(tagged)
  assert spec.action_space == gymnasium.spaces.MultiDiscrete([5, 7], dtype=np.int32)
  declared = {k: (x.dtype.name, x.shape) for k, x in leaves(spec.observation_space)}
  assert declared == {
    'observation/tag': ('int32', (5,)), 'observation/copy': ('float32', (3,)),
    'observation/more': ('int8', (5,)),
  }  # fmt: skip
  grid = host.make('c:grid,side=9').observation_space
  assert grid['action_mask'] == gymnasium.spaces.MultiBinary(4)
  assert grid['map'] == gymnasium.spaces.Box(0, 1, (9, 9, 3), np.uint8)


# --- CartPole ---------------------------------------------------------------------------------------


def test_cartpole_is_gymnasiums() -> None:
  """From the same states, by the same actions: every observation, and the same ends."""
  n, rng = 32, np.random.default_rng(0)
  theirs = [gymnasium.make('CartPole-v1').unwrapped for _ in range(n)]
  with opened('c:cartpole', n) as envs:
    envs.reset()
    arrival = envs.recv()
    state = envs.state()
    physics = state['bytes'].view(np.float64)[:, :4]
    np.testing.assert_array_equal(arrival.timestep.observation, physics.astype(np.float32))
    assert abs(physics).max() <= 0.05 and physics.std() > 0.02
    physics[:] = rng.uniform(-0.05, 0.05, (n, 4))
    envs.restore(state)
    over, compared = np.zeros(n, bool), 0
    for env, x in zip(theirs, physics, strict=True):
      env.reset()
      env.state = x.copy()
    for _ in range(120):
      action = rng.integers(0, 2, n).astype(np.int32)
      envs.send(arrival.env_id, action)
      arrival = envs.recv()
      for i in np.flatnonzero(~over):
        expected, reward, terminated, _, _ = theirs[i].step(int(action[i]))
        np.testing.assert_allclose(arrival.timestep.observation[i], expected, rtol=1e-6, atol=1e-7)
        assert arrival.timestep.reward[i] == reward
        assert (arrival.timestep.discount[i] == 0) == terminated
        compared += 1
      over |= arrival.timestep.step_type == LAST
    assert over.all() and compared > 300


def test_cartpole_is_cut_after_500_steps() -> None:
  """By a policy that balances: the discount stays 1."""
  with opened('c:cartpole', 4) as envs:
    envs.reset()
    for t in range(501):
      arrival = envs.recv()
      x = arrival.timestep.observation
      expected = FIRST if t == 0 else LAST if t == 500 else MID
      assert (arrival.timestep.step_type == expected).all() and (
        arrival.timestep.discount == 1
      ).all()
      lean = x @ np.array([0.1, 0.3, 1.0, 0.6], np.float32)
      envs.send(arrival.env_id, (lean > 0).astype(np.int32))
    envs.recv()


# --- the state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['c:cartpole', 'c:breakout', 'c:grid,side=8,max_steps=30'])
def test_a_restored_pool_goes_on_to_the_bit(name: str) -> None:
  """Also the seeds of episodes to come, an end that waits for its reset, and on other threads."""
  spec, n = host.make(name), 24
  space = spec.observation_space

  def go_on(envs: Any, arrival: Arrival, first: int) -> list[list[bytes]]:
    result = [fields(arrival, space)]
    for t in range(first, first + 100):
      envs.send(arrival.env_id, actions(spec.action_space, t, n))
      arrival = envs.recv()
      result.append(fields(arrival, space))
    return result

  with opened(name, n, threads=2) as envs:
    envs.reset()
    arrival = envs.recv()
    for t in range(500):
      if t >= 40 and (arrival.timestep.step_type == LAST).any():
        break
      envs.send(arrival.env_id, actions(spec.action_space, t, n))
      arrival = envs.recv()
    assert (arrival.timestep.step_type == LAST).any()
    state = {k: x.copy() for k, x in envs.state().items()}
    assert {x.dtype.itemsize for x in state.values()} <= {1, 4}
    one = go_on(envs, arrival, 1000)
    assert go_on(envs, envs.restore(state), 1000) == one
  with opened(name, n, seed=7) as others:
    assert go_on(others, others.restore(state), 1000) == one


@pytest.mark.parametrize('name', ['c:cartpole', 'c:breakout', 'c:grid,side=8'])
def test_a_hostile_state_is_refused_or_harmless(name: str) -> None:
  """Each number of a state in turn is far out of range. The pool would crash, or write elsewhere."""
  spec = host.make(name)
  with opened(name, 1) as envs:
    envs.reset()
    envs.recv()
    state = {k: x.copy() for k, x in envs.state().items()}
    data = state['bytes'].view(np.int32).ravel()
    refused = 0
    for at in range(min(data.size, 64)):
      for value in (10_000_000, -10_000_000, 9):
        hostile = data.copy()
        hostile[at] = value
        bytes_ = hostile.view(state['bytes'].dtype).reshape(state['bytes'].shape)
        try:
          arrival = envs.restore({**state, 'bytes': bytes_})
        except HostError:
          refused += 1
          continue
        for t in range(10):
          envs.send(arrival.env_id, actions(spec.action_space, t, 1))
          arrival = envs.recv()
  assert refused >= 4


def test_environments_in_another_order_keep_their_rows() -> None:
  with opened('c:cartpole', 3) as envs, opened('c:cartpole', 3) as others:
    rows = []
    for pool, order in ((envs, [0, 1, 2]), (others, [2, 0, 1])):
      pool.reset()
      pool.recv()
      pool.send(np.array(order, np.int32), np.array([i % 2 for i in order], np.int32))
      arrival = pool.recv()
      assert arrival.env_id.tolist() == order
      rows.append(arrival.timestep.observation[np.argsort(arrival.env_id)])
  np.testing.assert_array_equal(*rows)


def test_states_of_other_environments_are_refused(tagged: str) -> None:
  with (
    opened('c:cartpole', 4) as envs,
    opened('c:cartpole', 5) as more,
    opened('c:breakout', 4) as b,
  ):
    with pytest.raises(HostError):
      envs.state()  # not begun
    for one in (envs, more, b):
      one.reset()
      one.recv()
    state = envs.state()
    for wrong in (more.state(), b.state(), {}, {**state, 'over': state['over'].astype(np.int8)}):
      with pytest.raises(HostError):
        envs.restore(wrong)
    with pytest.raises(HostError):
      envs.restore({**state, 'sizes': state['sizes'] + 1000})
    with pytest.raises(HostError):
      few = state['sizes'].copy()
      few[2] = 0
      envs.restore({**state, 'bytes': state['bytes'] + 1, 'sizes': few})  # podrace_load refuses
    np.testing.assert_array_equal(envs.state()['bytes'], state['bytes'])  # as before
    envs.send(np.arange(4), np.zeros(4, np.int32))
    with pytest.raises(HostError):
      envs.state()  # it steps


# --- checks before a run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('fault', 'words'),
  slow_after(
    5,
    ('compiler', ('error', 'bad.c')), ('symbol', ('podrace_close',)), ('abi', ('version 2', '1')),
    ('shape', ('obs[0]', '(0,)')), ('load_crash', ('podrace_spec_of', 'SIGSEGV')),
    ('load_exit_0', ('podrace_spec_of', 'exit')), ('obs_bytes', ('12', '16')),
    ('act_bytes', ('8', '4')), ('dtype', ('obs[0]', '9')), ('choices', ('act', '(0,)')),
    ('no_save', ('podrace_save',)), ('bounds', ('obs[0]', 'uint8', '-1')),
    ('names', ('info', '9004')), ('wide', ('obs[0]', 'float32', '-1e+300')),
    ('spec_exit_0', ('podrace_spec_of', 'exit')),
  ),
)  # fmt: skip
def test_a_library_that_does_not_fit_is_refused(
  fault: str, words: tuple[str, ...], tmp_path: Path
) -> None:
  for isolate in ('', ',isolate=true'):
    with pytest.raises(UsageError) as error:
      host.make(write(tmp_path / 'bad.c', fault) + isolate)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ('fault', 'words'),
  slow_after(
    5,
    ('rand', ('podrace_step', 'rand()')), ('global', ('podrace_step',)),
    ('unwritten', ('podrace_reset', 'every byte')), ('save_size', ('podrace_save', '96', '48')),
    ('exit_0', ('podrace_step', 'exit')), ('crash', ('podrace_step', 'SIGSEGV')),
    ('srand rand', ('podrace_step', 'rand()')), ('left_over', ('podrace_step',)),
    ('load', ('podrace_load', '3')), ('half_saved', ('podrace_save',)),
    ('exit', ('podrace_step', 'exit code 5')),
  ),
)  # fmt: skip
def test_a_trial_finds(fault: str, words: tuple[str, ...], tmp_path: Path) -> None:
  name = write(tmp_path / 'bad.c', *fault.split())
  if fault == 'left_over':  # after few steps, so that an episode begins where another has ended
    name += ',max_steps=20'
  spec = host.make(name)
  assert spec.try_out is not None
  with pytest.raises(UsageError) as error:
    spec.try_out(60.0)
  assert all(word in str(error.value) for word in words), error.value
  assert len(str(error.value).splitlines()) == 1


def test_a_library_that_hangs_when_it_is_loaded_is_refused(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(trial, 'SPEC_SECONDS', 5.0)  # the process must start within them
  with pytest.raises(UsageError, match='podrace_spec_of'):
    host.make(write(tmp_path / 'bad.c', 'load_hang'))


CHOICES = (
  ('int32_t tag[5]; float', 'int32_t tag[2]; float'), ('.ndim = 1, .shape = {5}},\n    {.name = "copy"', '.ndim = 1, .shape = {2}, .choices = choices},\n    {.name = "copy"'),
  ('int32_t tag[5] = {(int32_t)(t->seed & 0x7FFFFFFF), t->step, action, t->length, t->flags}', 'int32_t tag[2] = {0, t->step}'),
)  # fmt: skip
FLAGS = (('.dtype = PODRACE_I8, .ndim = 1', '.dtype = PODRACE_BOOL, .ndim = 1'),)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [(CHOICES, ('wrote 7 to tag', '0 to 6')), (FLAGS, ('wrote 2 to more', '0 to 1'))],
)
def test_a_trial_finds_choices_that_are_outside_of_their_space(
  changes: tuple[tuple[str, str], ...], words: tuple[str, ...], tmp_path: Path
) -> None:
  text = TAGGED
  for part, instead in changes:
    assert text.count(part) == 1
    text = text.replace(part, instead)
  (tmp_path / 'choices.c').write_text(text, encoding='utf-8')
  spec = host.make('c:choices.c')
  assert spec.try_out is not None
  with pytest.raises(UsageError) as error:
    spec.try_out(60.0)
  assert all(word in str(error.value) for word in ('podrace_step', *words)), error.value


def test_a_trial_accepts_what_is_right(tmp_path: Path, tagged: str) -> None:
  for name in (tagged, write(tmp_path / 'good.c')):
    spec = host.make(name)
    assert spec.try_out is not None
    spec.try_out(60.0)
  for example in ('c:breakout', 'c:grid'):  # good.c is a copy of the third
    file = Path(shutil.copy(build.HERE / 'examples' / f'{example[2:]}.c', tmp_path))
    library = build.compile_library(file, f'c:{file}')
    trial.run_trial(f'c:{file}', library, b'{}', 60.0)


def test_a_trial_that_hangs_ends(tmp_path: Path, monkeypatch: Patch) -> None:
  spec = host.make(write(tmp_path / 'bad.c', 'hang'))
  monkeypatch.setattr(trial, 'SPEC_SECONDS', 0.5)
  assert spec.try_out is not None
  with pytest.raises(UsageError, match='did not answer'):
    spec.try_out(0.5)


def test_a_trial_that_hangs_ends_with_the_processes_that_it_started(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(trial, 'SPEC_SECONDS', 2.0)
  spec = host.make(write(tmp_path / 'bad.c', 'fork'))
  assert spec.try_out is not None
  monkeypatch.setenv('STARTED_BY', str(tmp_path))
  with pytest.raises(UsageError, match='did not answer'):
    spec.try_out(1.0)
  until(lambda: not processes_with(f'STARTED_BY={tmp_path}'))


def processes_with(variable: str) -> list[str]:
  """Processes with a variable of the environment."""
  found = []
  for process in Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      if variable.encode() in (process / 'environ').read_bytes().split(b'\0'):
        found.append(process.name)
  return found


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('c:nothing.c', ('no file',)), ('c:cartpol', ('cartpole',)), ('c:data.txt', ('.c or .so',)),
    ('c:cartpole,gravity=3', ('no option gravity', 'max_steps')),
    ('c:cartpole,max_steps=0', ('max_steps', '1')), ("c:cartpole,max_steps='x'", ('max_steps',)),
    ('c:cartpole,max_steps=1e999', ('JSON',)), ('c:cartpole,isolate=3', ('isolate',)),
    ('c:broken.so', ('no library',)), ('c:~nosuch/x.c', ('nosuch',)), (f'c:{"x" * 300}.c', ('long',)),
    ('c:a,b.c', ('comma',)),
  ],
)  # fmt: skip
def test_names_and_options_that_are_refused(
  name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
  (tmp_path / 'data.txt').write_text('')
  (tmp_path / 'broken.so').write_text('no library')
  with pytest.raises((UnknownName, UsageError)) as error:
    host.make(name)
  assert all(word in str(error.value) for word in words), error.value


def test_a_compiler_that_is_missing(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
  monkeypatch.setenv('CC', 'no-such-compiler -x')
  code, _, err = called(capsys, 'train', '--env', 'c:cartpole', '--run-dir', str(tmp_path / 'run'))
  assert code == 2 and 'no-such-compiler' in err and len(err.splitlines()) == 1


def test_the_command_shows_the_compilers_message(tmp_path: Path, capsys: Capture) -> None:
  name = write(tmp_path / 'bad.c', 'compiler')
  code, _, err = called(capsys, 'train', '--env', name, '--run-dir', str(tmp_path / 'run'))
  assert code == 2 and 'bad.c:' in err and 'error' in err


def test_it_is_compiled_once_and_again_when_a_header_changes(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(build, '_cache_directory', build._cache_directory.__wrapped__)
  (tmp_path / 'more.h').write_text('#define MORE 1\n')
  file = tmp_path / 'mine.c'
  write(file)
  file.write_text('#include "more.h"\nint more = MORE;\n' + file.read_text())
  first = build.compile_library(file, 'c:mine.c')
  stamp = first.stat().st_mtime_ns
  assert build.compile_library(file, 'c:mine.c') == first and first.stat().st_mtime_ns == stamp
  assert first.parent == tmp_path / 'cache' / 'podrace' / 'native'
  assert first.parent.stat().st_mode & 0o077 == 0
  (tmp_path / 'more.h').write_text('#define MORE 2\n')
  assert build.compile_library(file, 'c:mine.c') != first
  first.parent.chmod(0o777)  # another user may write to it
  assert build.compile_library(file, 'c:mine.c').parent != first.parent


def test_a_damaged_library_in_the_cache_is_compiled_again(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(build, '_cache_directory', build._cache_directory.__wrapped__)
  file = tmp_path / 'mine.c'
  write(file)
  library = build.compile_library(file, 'c:mine.c')
  whole = library.read_bytes()
  for damage in (whole[:1000], b'', whole[:-1] + b'x'):
    library.write_bytes(damage)
    assert build.compile_library(file, 'c:mine.c').read_bytes() == whole
  assert len(list(library.parent.iterdir())) == 1


@pytest.mark.parametrize('name', slow_after(1, f'{"é" * 120}.c', '-dash.c', f'{"🚀" * 60}.c'))
def test_a_file_with_an_unusual_name_is_compiled(name: str, tmp_path: Path) -> None:
  write(tmp_path / name)
  assert stream(f'c:{name}', 3) == stream('c:cartpole', 3)


def test_an_open_quote_in_cc(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
  monkeypatch.setenv('CC', "gcc '")
  code, _, err = called(capsys, 'train', '--env', 'c:cartpole', '--run-dir', str(tmp_path / 'run'))
  assert code == 2 and 'CC' in err and len(err.splitlines()) == 1


def test_a_library_of_ones_own(tmp_path: Path) -> None:
  source = tmp_path / 'mine.c'
  write(source)
  shutil.copy(build.compile_library(source, 'c:mine.c'), tmp_path / 'mine.so')
  assert stream('c:mine.so', 30) == stream('c:mine.c', 30) == stream('c:cartpole', 30)


@pytest.mark.slow
def test_processes_of_an_environment_may_exit(tmp_path: Path) -> None:
  assert stream(write(tmp_path / 'forks.c', 'destructor', 'fork_exit'), 3, 2) == stream(
    'c:cartpole', 3, 2
  )


# --- faults during a run ---------------------------------------------------------------------------------


def test_a_crash_in_a_worker_is_told_and_does_not_hang(tmp_path: Path, monkeypatch: Patch) -> None:
  """Workers are replaced as often as Gymnasium's; then the owner raises the error."""
  monkeypatch.setattr('podrace.envs.host.worker_pool.RESTARTS', 4)
  name = write(tmp_path / 'bad.c', 'crash')
  with opened(f'{name},isolate=true', 4, threads=1) as envs:
    envs.reset()
    runs = set()
    with pytest.raises(HostError, match='SIGSEGV'):
      for _ in range(200):
        arrival = envs.recv()
        runs |= set(arrival.run_id.tolist())
        envs.send(arrival.env_id, np.zeros(4, np.int32))
    assert {0, 1, 2} < runs


RUN = (
  '--architecture', 'sebulba', '--num-envs', '16', '--unroll-length', '16', '--devices', '1',
  '--actor-threads', '1',
)  # fmt: skip


def command(*words: str) -> subprocess.CompletedProcess[str]:
  from children import environment

  return subprocess.run(
    [*python('-m', 'podrace'), *words],
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ('fault', 'word'),
  slow_after(
    1,
    ('late_exit_0', 'exit'),
    ('late_thread_exit_0', 'exit'),
    ('late_create', 'no licence is left'),
  ),
)
def test_a_late_fault_ends_the_run_with_exit_code_1(
  fault: str, word: str, tmp_path: Path, cache: Path
) -> None:
  name = write(tmp_path / 'bad.c', fault)
  done = Podrace(
    ['train', '--env', name, *RUN, '--env-threads', '1', '--total-steps', '100_000_000',
     '--run-dir', str(tmp_path / 'run')],
    tmp_path / 'log.txt', 1, cache,
  )  # fmt: skip
  assert done.wait() == 1 and word in done.output and 'Traceback' not in done.output, done.output


@pytest.mark.slow
def test_a_crash_ends_a_run_with_isolate_and_its_exit_code_is_1(tmp_path: Path) -> None:
  name = write(tmp_path / 'bad.c', 'late_crash')
  done = command(
    'train', '--env', f'{name},isolate=true', *RUN, '--env-threads', '1',
    '--total-steps', '100_000_000',
    '--run-dir', str(tmp_path / 'run'),
  )  # fmt: skip
  assert done.returncode == 1 and 'SIGSEGV' in done.stderr, done.stderr


@pytest.mark.parametrize(
  ('agent', 'env'), slow_after(1, ('impala', 'grid,side=10'), ('dqn', 'breakout'), ('ppo', 'cartpole'))
)  # fmt: skip
def test_agents_train_evaluate_and_are_filmed(
  agent: str, env: str, tmp_path: Path, capsys: Capture
) -> None:
  small = () if agent != 'dqn' else ('--agent.buffer.min-size', '256')
  run = str(tmp_path / 'run')
  code, _, err = called(
    capsys, 'train', '--env', f'c:{env}', '--agent', agent, *RUN, *small,
    '--total-steps', '2048', '--run-dir', run,
  )  # fmt: skip
  assert code == 0, err
  code, out, _ = called(capsys, 'eval', run, '--episodes', '2')
  assert code == 0 and '"episodes": 2' in out.splitlines()[-1]
  code, out, err = called(capsys, 'watch', run, '--episodes', '1', '--max-steps', '20')
  assert code == 0 and 'what the agent sees' not in err


def test_anakin_refuses_it(tmp_path: Path, capsys: Capture) -> None:
  code, _, err = called(
    capsys, 'train', '--env', 'c:cartpole', '--architecture', 'anakin', '--run-dir', str(tmp_path / 'x')
  )  # fmt: skip
  assert code == 2 and 'sebulba' in err


# --- sanitizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('sanitizers', ['thread', 'address,undefined'])
def test_the_pool_is_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
  program = tmp_path / 'check'
  flags = [
    f'-fsanitize={sanitizers}',
    '-fno-sanitize-recover=all',
    '-g',
    '-O1',
    '-Wall',
    '-Wextra',
    '-Werror',
  ]
  done = subprocess.run(
    [*build.compiler(), *flags, f'-I{build.HERE}', str(SUPPORT / 'native_pool_check.c'), '-o', str(program), '-pthread', '-lm'],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  if done.returncode and 'cannot find' in done.stderr:
    pytest.skip('the sanitizers are not installed')
  assert done.returncode == 0, done.stderr
  done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (0, '115200\n'), done.stderr


@pytest.mark.parametrize('file', ['examples/cartpole.c', 'examples/breakout.c', 'examples/grid.c'])
def test_the_header_and_the_examples_are_strict_c99(file: str) -> None:
  words = [
    *build.compiler(),
    '-std=c99',
    '-Wall',
    '-Wextra',
    '-Wpedantic',
    '-Werror',
    '-fsyntax-only',
  ]
  done = subprocess.run(
    [*words, f'-I{build.HERE}', str(build.HERE / file)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr


def test_processes_with_environments_need_no_jax() -> None:
  code = (
    'import sys, numpy as np; from podrace.envs.host import base\n'
    'envs = base.make("c:cartpole").make(base.PoolArgs(2, 2, np.zeros(2, np.uint32), 1, 9.0))\n'
    'envs.reset(); envs.recv(); envs.close(); assert "jax" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
