"""Pools of environments on the host: the contract, worker processes, and what they survive."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from children import SUPPORT, alive, environment, until
from gymnasium import spaces
from shorthand import slow_after

from podrace.envs.host import answer_timer, checker, timesteps
from podrace.envs.host import base as host
from podrace.envs.host import gymnasium as gymnasium_envs
from podrace.envs.host.base import PoolArgs
from podrace.envs.host.episodes import EpisodeCounter
from podrace.envs.host.jax import JaxPool, JaxSteps
from podrace.envs.host.worker_pool import RESTARTS, Restarts
from podrace.errors import HostError, MissingExtra, UnknownName
from podrace.types import FIRST, LARGEST_REWARD, LAST, MID, Arrival


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('PYTHONPATH', str(SUPPORT))


def pool(
  name: str, n: int = 4, batch: int = 0, threads: int = 2, deadline: float = 30.0, seed: int = 0
) -> Any:
  spec, seeds = host.make(name), np.arange(seed, seed + n, dtype=np.uint32)
  if spec.jax is not None:
    return JaxPool(
      JaxSteps(spec.jax, n, 16), jax.random.key(seed), lambda k: jax.random.key(seed + 1000 + k)
    )
  return spec.make(PoolArgs(n, batch or n, seeds, threads, deadline))


def random_actions(space: Any, rng: np.random.Generator, n: int) -> np.ndarray:
  if isinstance(space, spaces.Discrete):
    return rng.integers(0, int(space.n), n).astype(np.int32)
  if isinstance(space, spaces.MultiDiscrete):
    return rng.integers(0, space.nvec, (n, len(space.nvec))).astype(np.int32)
  return rng.uniform(space.low, space.high, (n, *space.shape)).astype(space.dtype)


def arrivals(
  name: str, steps: int, seed: int = 0, contrary: bool = False, **args: Any
) -> Iterator[Arrival]:
  """What a pool gives for the same random actions; `contrary`: other ones after LAST."""
  spec, rng = host.make(name), np.random.default_rng(0)
  other = np.random.default_rng(1)
  with contextlib.closing(pool(name, seed=seed, **args)) as envs:
    check = checker.Checker(spec, envs.num_envs)
    envs.reset()
    for _ in range(steps):
      arrival = envs.recv()
      check(arrival)
      yield arrival
      action = random_actions(spec.action_space, rng, len(arrival.env_id))
      if contrary:
        last = arrival.timestep.step_type == LAST
        action[last] = random_actions(spec.action_space, other, len(action))[last]
      envs.send(arrival.env_id, action)


@functools.cache
def recorded(name: str, steps: int = 300, n: int = 4) -> list[Arrival]:
  """The stream of a pool, played once for all tests that look at it."""
  return list(arrivals(name, steps, n=n))


@pytest.fixture(autouse=True, scope='module')
def forget_streams() -> Iterator[None]:
  """Frees their memory when the module ends."""
  yield
  recorded.cache_clear()


CONTRACT = [
  pytest.param('ale:pong,max_frames=400', marks=pytest.mark.slow),
  'ale:breakout,episodic_life=true',
  'envpool:CartPole-v1',
  'envpool:Pendulum-v1,max_episode_steps=30',
  'envpool:HalfCheetah-v4,max_episode_steps=30',
  pytest.param('envpool:Breakout-v5,max_episode_steps=50', marks=pytest.mark.slow),
  'envpool:CartpoleBalance-v1,max_episode_steps=30',
  'gymnasium:CartPole-v1',
  pytest.param('gymnasium:Pendulum-v1,max_episode_steps=30', marks=pytest.mark.slow),
  'gymnasium:host_envs:Limited-v0',
  'c:cartpole',
  'c:breakout,max_steps=40',
  'c:grid,side=8,max_steps=30',
  pytest.param('c:breakout,max_steps=40,isolate=true', marks=pytest.mark.slow),
  'podrace:catch',
]


@pytest.mark.parametrize('name', CONTRACT)
def test_contract(name: str) -> None:
  """Types and order as declared; rewards and discounts what they may be."""
  spec = host.make(name)
  n = 2 if name.startswith('ale:breakout') else 4  # a stream that other tests look at, too
  before = np.full(n, LAST)
  kinds = set()
  for arrival in recorded(name, 900, 2) if n == 2 else recorded(name):
    t = arrival.timestep
    np.testing.assert_array_equal(arrival.env_id, np.arange(n))
    assert (t.reward.dtype, t.discount.dtype, t.step_type.dtype) == (
      np.float32,
      np.float32,
      np.int8,
    )
    np.testing.assert_array_equal(t.step_type == FIRST, before == LAST)
    assert np.all(t.reward[t.step_type == FIRST] == 0)
    assert np.all(arrival.score[t.step_type == FIRST] == 0)
    assert np.all(t.discount[t.step_type != LAST] == 1)
    assert np.all(np.isin(t.discount, (0, 1)))
    assert np.all(arrival.ended <= (t.step_type == LAST))
    rows = [jax.tree.map(lambda x, i=i: x[i], t.observation) for i in range(n)]
    assert all(spec.observation_space.contains(x) for x in rows)
    before = t.step_type
    kinds |= set(t.step_type.tolist())
  assert kinds == {FIRST, MID, LAST}


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=pytest.mark.slow) if n == 'ale:breakout,episodic_life=true' else n
    for n in CONTRACT
    if 'host_envs' not in str(n)
  ],
)
def test_same_seed_same_stream(name: str) -> None:
  one = [a.timestep for a in recorded(name)[:120]]
  same = [a.timestep for a in arrivals(name, 120, contrary=True)]
  other = [a.timestep for a in arrivals(name, 120, seed=100)]
  assert any((x.step_type == LAST).any() for x in one[:-1])
  for x, y in zip(one, same, strict=True):
    jax.tree.map(np.testing.assert_array_equal, x.observation, y.observation)
    np.testing.assert_array_equal(x.reward, y.reward)
  differs = [
    jax.tree.map(lambda a, b: bool(np.any(a != b)), x.observation, y.observation)
    for x, y in zip(one, other, strict=True)
  ]
  assert any(jax.tree.leaves(differs))


def test_arrivals_do_not_change_later() -> None:
  """Libraries reuse their buffers; what was handed out must stay as it was."""
  for name in ('ale:pong', 'envpool:CartPole-v1', 'gymnasium:CartPole-v1'):
    kept, copies = [], []
    for arrival in arrivals(name, 20):
      kept.append(arrival.timestep.observation)
      copies.append(arrival.timestep.observation.copy())
    for x, y in zip(kept, copies, strict=True):
      np.testing.assert_array_equal(x, y)


# --- how episodes end ------------------------------------------------------------------------------


def test_a_time_limit_is_a_truncation() -> None:
  """Limited-v0 stops after 5 steps, which is no termination."""
  seen = [a.timestep for a in arrivals('gymnasium:host_envs:Limited-v0', 14, n=2, threads=1)]
  for i in range(2):
    assert [int(t.step_type[i]) for t in seen[:7]] == [FIRST, MID, MID, MID, MID, LAST, FIRST]
    assert all(t.discount[i] == 1 for t in seen)


def test_termination_and_truncation_are_told_apart() -> None:
  seen = [a.timestep for a in arrivals('gymnasium:host_envs:Sequence-v0', 9, n=2, threads=1)]
  assert [int(t.step_type[0]) for t in seen] == [FIRST, *[MID] * 6, LAST, FIRST]
  np.testing.assert_array_equal(seen[7].discount, [0, 1])  # terminated; truncated


def test_atari_frames_limit_truncates() -> None:
  timesteps = [a.timestep for a in recorded('ale:pong,max_frames=400', 120, 2)]
  found = np.concatenate([t.discount[t.step_type == LAST] for t in timesteps])
  assert len(found) and np.all(found == 1)


def test_losing_a_life_does_not_end_the_game() -> None:
  lives = games = 0
  for arrival in recorded('ale:breakout,episodic_life=true', 900, 2):
    lives += int((arrival.timestep.step_type == LAST).sum())
    games += int(arrival.ended.sum())
  assert games >= 2
  assert lives >= 4 * games


def test_atari_has_the_actions_that_were_asked_for() -> None:
  name = 'ale:pong,full_actions=true'
  assert [int(host.make(x).action_space.n) for x in ('ale:pong', name)] == [6, 18]
  assert len(list(arrivals(name, 20, n=2))) == 20


@pytest.mark.slow
def test_frames_of_atari_have_the_size_that_was_asked_for() -> None:
  spec = host.make('ale:pong,size=42')
  assert spec.observation_space.shape == (4, 42, 42)
  small, large = (recorded(f'ale:pong,max_frames=400{x}')[0].timestep for x in (',size=42', ''))
  # Both are of one picture: a pixel of the small one has the mean of four.
  means = large.observation.reshape(-1, 4, 42, 2, 42, 2).mean((3, 5))
  assert abs(small.observation - means).mean() < 2


def test_sticky_actions_make_other_games() -> None:
  """Of the same seed and the same actions."""
  plain, sticky = (
    np.stack([a.timestep.observation for a in arrivals(f'ale:pong,sticky={p}', 30, n=2)])
    for p in (0.0, 0.9)
  )
  np.testing.assert_array_equal(plain[0], sticky[0])
  assert (plain != sticky).any()


def test_rewards_are_clipped_for_learning_only() -> None:
  """Ms Pac-Man's pills are worth 10."""
  learned, told = [], []
  for arrival in arrivals('ale:ms_pacman', 200, n=2):
    learned.append(arrival.timestep.reward)
    told.append(arrival.score)
  assert set(np.unique(learned)) <= {-1.0, 0.0, 1.0}
  assert np.max(told) >= 10
  np.testing.assert_array_equal(np.sign(told), learned)


def test_episodes_are_counted_exactly() -> None:
  """Against the slow way, with games that outlast what is learned as an episode."""
  counter, returns, lengths = EpisodeCounter(2), [], []
  running: dict[int, list[float]] = {0: [], 1: []}
  opens = [True, True]
  for arrival in recorded('ale:breakout,episodic_life=true', 900, 2):
    counter.add(arrival)
    for i in range(2):
      if not opens[i] and arrival.timestep.step_type[i] != FIRST:
        running[i].append(float(arrival.score[i]))
      elif not opens[i]:
        running[i].append(float(arrival.score[i]) or 0.0)
        lengths_fix = running[i].pop()
        assert lengths_fix == 0  # the no-op after a lost life earns nothing here
      opens[i] = bool(arrival.ended[i])
      if opens[i]:
        returns.append(sum(running[i]))
        lengths.append(len(running[i]))
        running[i] = []
  totals = counter.take()
  assert totals.count == len(returns) >= 2
  assert totals.return_sum == sum(returns)
  assert totals.return_square == sum(r * r for r in returns)
  assert totals.length_sum == sum(lengths)
  assert counter.take().count == 0


def test_episodes_are_counted_alike_some_at_a_time() -> None:
  whole, parts = EpisodeCounter(4), EpisodeCounter(4)
  for arrival in recorded('envpool:CartPole-v1')[:150]:
    whole.add(arrival)
    for some in ([2, 0], [3, 1]):
      part = jax.tree.map(lambda x, some=some: x[some], arrival)
      parts.add(part)
  totals = whole.take()
  assert totals == parts.take() and totals.count > 4 and totals.return_sum > 5 * totals.count


def test_every_restart_counts() -> None:
  """Also those of a worker that is restarted again before it answers."""
  counter, n = EpisodeCounter(2), 2
  zeros: Any = np.zeros(n, np.float32)
  none = np.zeros(n, bool)
  timestep = timesteps.Stepper(n).timestep(np.arange(n), zeros, zeros, none, none)
  found = [
    counter.add(Arrival(np.arange(n), timestep, zeros, none, np.array([0, lives]))).tolist()
    for lives in (0, 5, 5, 6)
  ]
  assert found == [[0, 0], [0, 5], [0, 0], [0, 1]]


def test_episode_counts_are_saved_exactly() -> None:
  one = EpisodeCounter(3)
  one.episode_return[:] = [1 / 3, 1e7 + 0.1, -5]
  other = EpisodeCounter(3)
  other.restore(one.state())
  np.testing.assert_allclose(other.episode_return, one.episode_return, rtol=1e-14)


# --- any order -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name', ['ale:pong', 'envpool:CartPole-v1', 'gymnasium:host_envs:Sequence-v0']
)
def test_some_at_a_time(name: str) -> None:
  """With a batch of 2 of 4, each environment still has a stream of its own.

  How evenly is the library's affair: where a core is short, a thread may stand still for 100 batches.
  """
  opens = np.ones(4, bool)
  seen = np.zeros(4, int)
  for count, arrival in enumerate(arrivals(name, 100_000, batch=2, threads=4)):
    if count >= 100 and seen.min() > 0:
      break
    ids = arrival.env_id
    assert len(ids) == len(set(ids.tolist())) == 2
    np.testing.assert_array_equal(arrival.timestep.step_type == FIRST, opens[ids])
    opens[ids] = arrival.timestep.step_type == LAST
    seen[ids] += 1
  assert seen.min() > 0


@pytest.mark.parametrize(
  'name',
  slow_after(
    2, 'envpool:CartPole-v1', 'gymnasium:CartPole-v1', 'ale:breakout,episodic_life=true', 'ale:pong'
  ),
)
def test_actions_reach_their_environments(name: str) -> None:
  """Whoever came back with whom, and in whichever order they are answered."""
  space: Any = host.make(name).action_space
  actions = np.random.default_rng(0).integers(0, int(space.n), (4, 1000)).astype(np.int32)

  def streams(batch: int) -> list[list[np.ndarray]]:
    threads = 1 if batch == 4 else 4  # in order, one is as good as four
    envs, found = pool(name, batch=batch, threads=threads), [[] for _ in range(4)]
    try:
      envs.reset()
      while min(map(len, found)) < 40:
        arrival = envs.recv()
        for i, x in zip(arrival.env_id, arrival.timestep.observation, strict=True):
          found[i].append(x)
        ids = arrival.env_id[::-1].copy()
        envs.send(ids, actions[ids, [len(found[i]) for i in ids]])
    finally:
      envs.close()
    return found

  for one, other in zip(streams(4), streams(2), strict=True):
    for x, y in zip(one, other, strict=False):
      np.testing.assert_array_equal(x, y)


# --- worker processes ------------------------------------------------------------------------------


def test_workers_import_no_jax() -> None:
  code = "import sys, podrace.envs.host.worker; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


def test_trees_of_observations() -> None:
  for t, arrival in enumerate(arrivals('gymnasium:host_envs:Trees-v0', 5)):
    board, (number, bits) = (arrival.timestep.observation[k] for k in ('board', 'rest'))
    assert board.shape == (4, 6, 6, 1)
    assert np.all(board == t)
    assert np.all(number == t % 4)
    np.testing.assert_array_equal(bits, [[1, 0, 1]] * 4)


@pytest.mark.parametrize(
  ('n', 'batch', 'threads', 'each'),
  slow_after(
    3,
    (5, 5, 3, [1, 2, 2]),
    (6, 2, 4, [2, 2, 2]),
    (6, 3, 1, [3, 3]),
    (2, 2, 8, [1, 1]),
    (6, 4, 4, [2, 2, 2]),
  ),
)
def test_environments_are_shared_by_workers(
  n: int, batch: int, threads: int, each: list[int]
) -> None:
  with contextlib.closing(
    pool('gymnasium:host_envs:Sequence-v0', n=n, batch=batch, threads=threads)
  ) as envs:
    envs.reset()
    arrival = envs.recv()
    assert len(arrival.env_id) == batch
    envs.send(arrival.env_id, np.zeros(batch, np.int32))
    seen = {}  # environment -> its process
    while len(seen) < n:
      arrival = envs.recv()
      seen |= zip(arrival.env_id.tolist(), arrival.timestep.observation[:, 0], strict=True)
      envs.send(arrival.env_id, np.zeros(len(arrival.env_id), np.int32))
    processes = [seen[i] for i in range(n)]
    assert [len(list(same)) for _, same in itertools.groupby(processes)] == each
    assert set(processes) == set(envs.pids)


def test_a_killed_worker_is_replaced() -> None:
  with contextlib.closing(pool('gymnasium:host_envs:Sequence-v0', n=4, threads=2)) as envs:
    envs.reset()
    for step in range(40):
      arrival = envs.recv()
      if step == 10:
        victim = envs.pids[1]
        os.kill(victim, signal.SIGKILL)
      if step >= 12:
        np.testing.assert_array_equal(arrival.run_id, [0, 0, 1, 1])
      envs.send(arrival.env_id, np.zeros(4, np.int32))
    assert victim not in envs.pids


def until_failure(name: str, **args: Any) -> str:
  with pytest.raises(HostError) as told:
    for _ in arrivals(name, 400, n=2, threads=2, **args):
      pass
  return str(told.value).replace('environment 1', 'environment 0')  # whichever was first


def test_an_exception_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
  name = 'gymnasium:host_envs:Wrong-v0,what=raise'
  message = until_failure(name)
  assert 'ZeroDivisionError' in message and 'host_envs.py' in message
  assert message.startswith('host_envs.Wrong.step (') and 'worker.py' not in message
  monkeypatch.setenv('PODRACE_TRACEBACK', '1')
  message = until_failure(name)
  assert message.startswith(name) and 'worker.py' in message


def test_an_interrupt_within_an_environment_names_its_line() -> None:
  message = until_failure('gymnasium:host_envs:Wrong-v0,what=interrupt')
  assert message.startswith('host_envs.Wrong.step (') and 'worker.py' not in message


def test_choices_outside_of_their_spaces_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
  for _ in arrivals('gymnasium:host_envs:Choices-v0', 8, n=2):
    pass
  lines = [r.message for r in caplog.records if 'outside of' in r.message]
  assert len(lines) == 3 and all(' has -1,' in x or ' has 7,' in x or ' has 2,' in x for x in lines)


def test_a_mask_allows_a_choice_of_each_part() -> None:
  assert 'action_mask' in until_failure('gymnasium:host_envs:Masks-v0')


def test_keys_of_several_types_are_refused() -> None:
  with pytest.raises(UnknownName, match="0, 'a'"):
    host.make('gymnasium:host_envs:Keys-v0')
  with pytest.raises(UnknownName, match='action_mask of several arrays'):
    host.make('gymnasium:host_envs:Masks-v0,parts=True')
  host.make('gymnasium:host_envs:Keys-v0,mixed=False')


def test_an_environment_that_cannot_be_closed_is_used(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  host.make('gymnasium:host_envs:Closes-v0')
  assert 'the window is gone' in caplog.text and 'not returned' not in caplog.text
  monkeypatch.setattr(gymnasium_envs, 'CLOSE_SECONDS', 0.1)
  host.make('gymnasium:host_envs:Closes-v0,seconds=1')
  assert 'not returned' in caplog.text


@pytest.mark.parametrize(
  ('what', 'message'),
  slow_after(
    3,
    ('shape', 'observation float64[3]'),
    ('missing', '[0, 1]'),
    ('reward', "reward 'much'"),
    ('integers', 'observation int64[4]'),
    ('dtype', 'observation complex64[4]'),
    ('end', 'terminated bool[2]'),
  ),
)
def test_what_is_wrong_is_named(what: str, message: str) -> None:
  assert message in until_failure(f'gymnasium:host_envs:Wrong-v0,what={what}')


def test_integers_that_do_not_fit_are_told() -> None:
  """JAX has 32 bits; what needs more is not cut off."""
  message = until_failure('gymnasium:host_envs:Counts-v0')
  assert f'observation {2**40 + 30}' in message and 'int32' in message
  space = host.make('gymnasium:host_envs:Counts-v0').observation_space
  assert (int(space.low), int(space.high)) == (0, 2**31 - 1)
  with pytest.raises(HostError, match=r'\[1099511627776\].* int32'):
    checker.cast_exactly('x', np.array([3, 2**40]), np.int32)


def test_envpools_casts_of_bounds_are_no_warnings() -> None:
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    seeds = np.arange(2, dtype=np.uint32)
    pool = host.make('envpool:CartPole-v1').make(PoolArgs(2, 2, seeds, 1, 60.0))
    pool.reset()
    assert pool.recv().timestep.observation.dtype == np.float32
    pool.close()


def test_rewards_that_are_clipped_are_checked_as_they_were() -> None:
  spec, n = host.make('envpool:CartPole-v1'), 2
  zeros: Any = np.zeros(n, np.float32)
  observation = np.zeros((n, 4), np.float32)
  timestep = timesteps.Stepper(n).timestep(
    np.arange(n), observation, zeros, zeros.astype(bool), zeros.astype(bool)
  )
  arrival = Arrival(np.arange(n), timestep, np.array([0, np.inf]), zeros.astype(bool), zeros)
  with pytest.raises(HostError, match=r'reward .*\[1\] .*NaN'):
    checker.Checker(spec, n)(arrival)
  for value in (3e38, -1.01 * LARGEST_REWARD):
    with pytest.raises(HostError, match=r'reward .*\[1\] .*1e\+12'):
      checker.Checker(spec, n)(arrival._replace(score=np.array([0, value])))
    reward: Any = np.array([0, value], np.float32)
    with pytest.raises(HostError, match=r'reward .*\[1\] .*1e\+12'):
      checker.Checker(spec, n)(
        arrival._replace(timestep=timestep._replace(reward=reward), score=zeros)
      )
  checker.Checker(spec, n)(arrival._replace(score=np.array([LARGEST_REWARD, -LARGEST_REWARD])))


def test_a_segmentation_fault_says_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  once = tmp_path / 'once'
  for _ in arrivals(f'gymnasium:host_envs:Wrong-v0,what=fault,once={once}', 40, n=2, threads=2):
    pass
  told = capfd.readouterr().err
  assert 'Segmentation' in told and 'host_envs.py' in told


@pytest.mark.slow
def test_a_worker_that_keeps_dying_ends_the_run() -> None:
  message = until_failure('gymnasium:host_envs:Wrong-v0,what=exit')
  assert f' {RESTARTS} times' in message and 'exit code 3' in message


@pytest.mark.timeout(120)
@pytest.mark.parametrize(('what', 'reason'), [('hang', '0.5 s'), ('deaf', 'SIGKILL')])
def test_a_silent_worker_is_replaced(
  what: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
  deadline = dict(hang=0.5, deaf=600.0)[what]
  runs = [a.run_id.max() for a in arrivals(f'gymnasium:host_envs:Wrong-v0,what={what}', 34, n=1,
                                           threads=1, deadline=deadline)]  # fmt: skip
  assert runs[0] == 0
  assert runs[-1] == 1
  assert '1 of at most 10' in caplog.text and reason in caplog.text


def test_time_that_workers_were_waited_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
  """Ten that hang for a minute each take up the whole window."""
  now = 0.0
  monkeypatch.setattr(time, 'monotonic', lambda: now)

  def restarts(every: float, waited: float) -> list[int]:
    nonlocal now
    found, told = Restarts(), []
    for _ in range(40):
      now += every
      told.append(found.add(waited))
    return told

  for hangs in restarts(every=61, waited=60), restarts(every=1, waited=60):  # several at once
    assert hangs.index(RESTARTS + 1) == RESTARTS
  assert max(restarts(every=61, waited=0.1)) <= RESTARTS


def test_descriptors_beyond_those_of_select() -> None:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
  held = [os.open(os.devnull, os.O_RDONLY)]
  try:
    while held[-1] < 1024:
      held.append(os.dup(held[0]))
    assert len(list(arrivals('gymnasium:host_envs:Sequence-v0', 3))) == 3
  finally:
    for fd in held:
      os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_only_time_that_somebody_was_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
  """Who was stopped and goes on looks twice at who seems to be late."""
  now = 0.0
  monkeypatch.setattr(time, 'monotonic', lambda: now)
  asked, deadline = 0.0, answer_timer.AnswerDeadline(60.0)
  for now in range(50):
    assert not deadline.passed(0, now - asked)
  now = 1000.0  # it was stopped
  assert not deadline.passed(0, now - asked)
  now, asked = 1001.0, 1001.0  # the others were stopped as well, and answer
  assert not deadline.passed(0, now - asked)
  late = []
  for now in range(1002, 1080):
    late.append(deadline.passed(0, now - asked))
  assert not any(late[:60])  # still in time
  assert late[-1]  # and never again


def test_workers_are_not_late_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
  with contextlib.closing(
    pool('gymnasium:host_envs:Sequence-v0,slow=0.2', n=2, deadline=60.0)
  ) as envs:
    monotonic, stopped = time.monotonic, 0.0
    monkeypatch.setattr(time, 'monotonic', lambda: monotonic() + stopped)
    envs.reset()
    pids = envs.pids
    envs.send(envs.recv().env_id, np.zeros(2, np.int32))
    stopped = 1000.0
    assert not envs.recv().run_id.any()
    assert envs.pids == pids


def test_helpers_of_an_environment_keep_nobody_waiting(tmp_path: Path) -> None:
  """Processes that it forks hold the worker's pipes open; they end with the worker."""
  log = tmp_path / 'helpers'
  message = until_failure(f'gymnasium:host_envs:Wrong-v0,what=raise,helper={log}', deadline=600.0)
  assert 'ZeroDivisionError' in message
  with contextlib.closing(
    pool(f'gymnasium:host_envs:Wrong-v0,what=exit,helper={log}', n=1, threads=1, deadline=600)
  ) as envs:
    envs.reset()
    while not (arrival := envs.recv()).run_id.any():
      envs.send(arrival.env_id, np.zeros(1, np.int32))
  helpers = [int(pid) for pid in log.read_text().split()]
  assert len(helpers) >= 2
  until(lambda: not any(alive(pid) for pid in helpers))


def test_signals_end_what_an_environment_starts_and_not_its_worker() -> None:
  """Which ignores them without having its helpers ignore them as well."""
  with contextlib.closing(pool('gymnasium:host_envs:Helped-v0', n=1, threads=1)) as envs:
    envs.reset()
    worker, *helpers = envs.recv().timestep.observation[0, :3].astype(int).tolist()
    assert worker == envs.pids[0]
    for signum in (signal.SIGINT, signal.SIGTERM):
      os.kill(worker, signum)
    for _ in range(3):
      envs.send(np.arange(1), np.zeros(1, np.int32))
      assert not envs.recv().run_id.any()
    for pid in helpers:
      os.kill(pid, signal.SIGTERM)
    until(lambda: not any(alive(pid) for pid in helpers), 10)


def alive_fd(fd: int) -> bool:
  """Whether it is open; the one that listed the folder is not any more."""
  try:
    return os.fstat(fd) is not None
  except OSError:
    return False


@pytest.mark.parametrize('linux', [True, False])
def test_shared_memory_has_no_holes(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  """Where there is no room the pool can't be made; the first write to a hole would be SIGBUS."""
  if not linux:
    monkeypatch.delattr(os, 'memfd_create', raising=False)
  elif not hasattr(os, 'memfd_create'):
    pytest.skip('files in memory are of Linux')
  before = set(os.listdir('/proc/self/fd'))
  with contextlib.closing(pool('gymnasium:host_envs:Trees-v0', n=1000)):
    new = {int(fd) for fd in set(os.listdir('/proc/self/fd')) - before if alive_fd(int(fd))}
    file = max(new, key=lambda fd: os.fstat(fd).st_size)
    assert os.fstat(file).st_blocks * 512 >= os.fstat(file).st_size > 36_000
    if linux:
      assert os.readlink(f'/proc/self/fd/{file}').startswith('/memfd:')


def test_a_killed_pool_starts_no_process_again() -> None:
  """As when a run ends while a worker hangs: the thread in the pool sees that it is dead."""
  with contextlib.closing(pool('gymnasium:host_envs:Sequence-v0,slow=1000', n=2)) as envs:
    pids: list[int] = []
    envs.reset()
    pids += envs.pids
    envs.send(envs.recv().env_id, np.zeros(2, np.int32))
    envs.kill()
    with pytest.raises(HostError, match='closed'):
      envs.recv()
    assert envs.pids == pids
  assert not any(alive(pid) for pid in pids)


HANGING = """
import os, signal, numpy as np
from test_host import pool

envs = pool('gymnasium:host_envs:Sequence-v0,slow=1000', n=2)
envs.reset()
envs.send(envs.recv().env_id, np.zeros(2, np.int32))
print(*envs.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='they are told by Linux')
def test_workers_that_hang_end_with_a_killed_run() -> None:
  path = os.pathsep.join(
    [*environment()['PYTHONPATH'].split(os.pathsep), os.path.dirname(__file__)]
  )
  done = subprocess.run(
    [sys.executable, '-c', HANGING], env={**environment(), 'PYTHONPATH': path},
    stdout=subprocess.PIPE, text=True, check=False,
  )  # fmt: skip
  pids = [int(pid) for pid in done.stdout.split()]
  assert (done.returncode, len(pids)) == (-signal.SIGKILL, 2)
  until(lambda: not any(alive(pid) for pid in pids), 30)


def test_closing_ends_the_processes() -> None:
  envs = pool('gymnasium:host_envs:Sequence-v0')
  envs.reset()
  pids = envs.pids
  envs.close()
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_a_worker_whose_run_is_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
  """As where the run was killed: its end of the pipe is closed before the worker is."""
  envs = pool('gymnasium:host_envs:Sequence-v0', n=1, threads=1)
  envs.reset()
  (worker,) = envs.workers
  null = os.open(os.devnull, os.O_RDONLY)
  os.dup2(null, worker.answer)
  os.close(null)
  envs.send(envs.recv().env_id, np.zeros(1, np.int32))
  assert worker.process.wait(30) == 1
  envs.close()
  assert not capfd.readouterr().err


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('ale:pongg', r"'pongg' \(nearest: pong"),
    ('ale:pong,stick=0.1', r"'stick' \(nearest: sticky"),
    ('ale:pong,sticky=1.5', 'sticky .*1.5'),
    ('ale:pong,stack=0', 'ale:pong: stack '),
    ('ale:pong,size=0', 'size '),
    ('ale:pong,size=211', 'size .* 210.* 211'),
    ('ale:pong,frame_skip=0', 'frame_skip '),
    ('ale:pong,max_frames=0', 'max_frames '),
    ('ale:pong,noop_max=-1', 'noop_max .* -1'),
    ('envpool:Pong-v5,stack_num=0', 'stack_num '),
    ('envpool:Pong-v5,frame_skip=0', 'frame_skip '),
    ('envpool:CartPole-v1,max_episode_steps=0', 'max_episode_steps '),
    ('gymnasium:FrozenLake-v1,map_name=9x9', "map_name=9x9: KeyError: '9x9'"),
    ('envpool:CartPol-v1', r"'CartPol-v1' \(nearest: CartPole-v1"),
    ('gymnasium:CartPole-v9', 'CartPole-v9'),
    ('gymnasium:nomodule:X-v0', 'nomodule'),
    ('gymnasium:host_envs:Sequenc-v0', 'nearest: host_envs:Sequence-v0'),
    ('gymnasium:host_envs:From1-v0', 'start'),
    ('envpool:TSP-v1', 'start'),
    ('alee:pong', "'alee'"),
  ],
)
def test_unknown_names(name: str, message: str) -> None:
  with pytest.raises(UnknownName, match=message):
    host.make(name)


def test_observations_of_envpool_are_in_the_types_declared() -> None:
  """Play2048's are bool, declared int8."""
  for arrival in arrivals('envpool:Play2048-v1', 3):
    assert arrival.timestep.observation.dtype == np.int8


def test_needs_of_a_library_are_no_extra_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
  """As EnvPool's Procgen, which needs Qt."""
  import envpool

  def make_spec(name: str) -> Any:
    raise ImportError('needs Qt 5')

  monkeypatch.setattr(envpool, 'make_spec', make_spec)
  with pytest.raises(UnknownName, match=r'CartPole-v1.* Qt 5'):
    host.make('envpool:CartPole-v1')


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, 'ale_py', None)
  monkeypatch.delitem(sys.modules, 'podrace.envs.host.ale', raising=False)
  with pytest.raises(MissingExtra, match=r"'podrace\[ale\]'"):
    host.make('ale:pong')
