"""Groups of environments of an actor thread: the same data as with threads, and they overlap."""

from __future__ import annotations

import collections
import itertools
import os
import signal
import threading
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from shorthand import Patch, slow_after
from test_sebulba import (
  AGENTS,
  RECURRENT,
  SMALL,
  Running,
  Sick,
  assert_same,
  compiled,
  jittery,
  keys,
  lags,
  leaves,
  never,
  sebulba,
)
from test_sebulba_run import Shuffled, numbered, shuffled, watch

from podrace.agents.impala import Impala
from podrace.architectures.sebulba import ActorFailed, make_program
from podrace.architectures.sebulba.pipe import Closed, Pipe
from podrace.envs.host import base as host
from podrace.envs.host import envpool
from podrace.settings.agents import bind
from podrace.system.scheduling import cores

EPISODES = ('episodes', 'return_sum', 'return_deviation', 'length_sum')


def learned(updates: int, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
  """The parameters after some updates, and the episodes so far."""
  with Running(sebulba(**settings)) as run:
    summary, state = run.driver.read_log(run.advance(updates))
  return state.train.params, tuple(summary[k] for k in EPISODES)


# --- the same data ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('agent', 'lag'),
  slow_after(1, ('impala', '0'), ('impala, recurrent', '1'), ('ppo', '1'), ('impala', '1')),
)
def test_two_groups_learn_as_two_threads_do(agent: str, lag: str, monkeypatch: Patch) -> None:
  """To the bit, whatever the timing of the environments."""
  name, _, recurrent = agent.partition(', ')
  settings: dict[str, Any] = dict(agent=(RECURRENT if recurrent else AGENTS)[name], lag=lag)
  params, episodes = learned(10, **settings, threads=2)
  jittery(monkeypatch, 1)
  of_groups, counted = learned(10, **settings, groups=2)
  assert_same(params, of_groups)
  assert counted == episodes and episodes[0] > 0


@pytest.mark.slow
def test_four_groups_learn_as_four_threads_do() -> None:
  """Two are with the device at a time."""
  one, other = (learned(10, agent=AGENTS['impala'], **x) for x in (dict(threads=4), dict(groups=4)))
  assert_same(one[0], other[0])
  assert one[1] == other[1]


@pytest.mark.parametrize(
  'env', slow_after(1, 'envpool:CartPole-v1', 'gymnasium:CartPole-v1', 'ale:pong')
)
def test_groups_repeat_to_the_bit_with_any_number_of_threads(env: str) -> None:
  settings: dict[str, Any] = dict(agent=AGENTS['impala'], env=env, num_envs=4, lag='1')
  if env == 'ale:pong':
    settings['agent'] = Impala(network=Impala().network.__class__(torso='nature', hidden=(8,)))
  first, episodes = learned(8, **settings, groups=2, env_threads=1)
  for more in dict(groups=2, env_threads=8), dict(groups=2), dict(threads=2):
    again, counted = learned(8, **settings, **more)
    assert_same(first, again)
    assert counted == episodes
  alone, _ = learned(8, **settings)
  assert any((x != y).any() for x, y in zip(leaves(first), leaves(alone), strict=True))


def test_a_run_with_groups_resumes_to_the_bit() -> None:
  program = sebulba(RECURRENT['impala'], groups=2, lag='1')
  driver = compiled(program)
  with Running(program, driver=driver) as run:
    whole = run.advance(8).train.params
  with Running(program, driver=driver) as run:
    state = run.advance(4)
  assert len(state.actors) == 2
  resumed = compiled(sebulba(RECURRENT['impala'], groups=2, lag='1'))
  resumed.start(state, keys(0))
  try:
    state, done = resumed.advance(state, 4, never)
  finally:
    resumed.close()
  assert done == 4
  assert_same(whole, state.train.params)


def sequence(**settings: Any) -> Running:
  """A run in numbered environments: 2 groups of 2, each in a worker process of its own."""
  spec = host.make('gymnasium:host_envs:Sequence-v0')
  return Running(sebulba(
    Impala(network=SMALL), spec=spec, num_envs=4, unroll_length=4, groups=2, env_threads=4,
    **settings,
  ))  # fmt: skip


@pytest.mark.slow
def test_each_transition_is_seen_once_in_order_in_its_group() -> None:
  steps: Any = collections.defaultdict(list)
  processes: Any = collections.defaultdict(set)

  def look(_: int, unrolls: Any) -> None:
    assert [u.group for u in unrolls] == [0, 1]
    for unroll in unrolls:
      (trajectory,) = unroll.parts
      np.testing.assert_array_equal(trajectory.env_id, 2 * unroll.group + np.arange(2))
      for env, piece in zip(np.asarray(trajectory.env_id), np.moveaxis(numbered(unroll), 1, 0), strict=True):  # fmt: skip
        steps[int(env)].append(piece[:, 2])
        processes[unroll.group].add(frozenset(piece[:, 0].astype(int).tolist()))

  with sequence(lag='1') as run:
    watch(run, look)
    run.advance(12)
    pids = [frozenset(pool.pids) for pool in run.actors.pools]
    told, _ = run.driver.read_log(run.state)
  for env in range(4):
    for before, after in itertools.pairwise(steps[env]):
      assert before[-1] == after[0]
    whole = np.concatenate([steps[env][0], *(x[1:] for x in steps[env][1:])])
    np.testing.assert_array_equal(whole, np.arange(12 * 4 + 1))
  for group in (0, 1):
    assert frozenset().union(*processes[group]) == pids[group]
  # episodes of 7 steps and a reset: 48 steps end the first six of each environment
  assert (told['episodes'], told['length_sum'], told['return_sum']) == (24, 168, 168.0)


@pytest.mark.parametrize('lag', ['0', pytest.param('1', marks=pytest.mark.slow)])
def test_a_death_in_one_group_costs_its_own_unroll_only(lag: str) -> None:
  """With lag 0 the other group ends its unroll and waits, while the thread serves this one."""
  serials: list[list[np.ndarray]] = []
  with sequence(lag=lag) as run:
    watch(run, lambda _, unrolls: serials.append([u.serial for u in unrolls]))
    run.advance(2)
    for group in (1, 0):
      os.kill(run.actors.pools[group].pids[0], signal.SIGKILL)
      run.advance(3)
    told, _ = run.driver.read_log(run.advance(1))
  lost = np.diff(np.array(serials).reshape(9, 4), axis=0) - 1
  assert told['host']['env_restarts'] == 2
  assert (lost >= 0).all() and lost.sum(0).tolist() in ([1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0])
  assert 0 <= told['host']['dropped_steps'] <= 2 * 4


# --- lag, waits and failures -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_lag_of_groups_is_exact() -> None:
  assert lags(sebulba(AGENTS['impala'], lag='0', groups=2), 10) == (0.0, 0)
  assert lags(sebulba(AGENTS['impala'], lag='1', groups=2), 10) == (0.9, 1)


@pytest.mark.slow
@pytest.mark.parametrize(('groups', 'max_lag'), slow_after(1, (2, 2), (4, 1), (4, 3)))
def test_the_lag_of_groups_is_bounded(groups: int, max_lag: int, monkeypatch: Patch) -> None:
  jittery(monkeypatch, max_lag)
  program = sebulba(AGENTS['impala'], lag='async', max_lag=max_lag, groups=groups, threads=2)
  _, longest = lags(program, 30)
  assert longest <= max_lag


def test_a_thread_goes_on_with_whichever_group_may_begin() -> None:
  pipe, device = Pipe(groups=2, lag='0', max_lag=4), jax.devices()[0]
  pipe.publish(3, {device: 'version 3'})
  pipe.wait_to_begin({0: 4, 1: 3})
  assert (pipe.may_begin(0, 4), pipe.may_begin(1, 3)) == (False, True)
  timer = threading.Timer(0.2, pipe.close)
  timer.start()
  with pytest.raises(Closed):
    pipe.wait_to_begin({0: 4, 1: 4})
  timer.join()


class InFlight(Shuffled):
  """Notes whether its environments step."""

  pools: list[InFlight] = []  # noqa: RUF012 (of one test)
  steps = False

  def reset(self) -> None:
    self.pools.append(self)
    super().reset()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    self.steps = True
    super().send(env_id, action)

  def recv(self) -> Any:
    self.steps = False
    return super().recv()


class Read(NamedTuple):
  """Actions that note, when they are waited for, how many pools step."""

  action: Any
  stepping: list[int]

  def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
    self.stepping.append(sum(pool.steps for pool in InFlight.pools))
    return np.asarray(self.action)


@pytest.mark.parametrize(('groups', 'free'), slow_after(1, (2, 1), (4, 2), (1, 0)))
def test_one_group_steps_while_another_is_acted_for(
  groups: int, free: int, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(InFlight, 'pools', [])
  stepping: list[int] = []
  program = shuffled(0, 0, pool=InFlight, groups=groups)
  step = program.programs.step

  def noted(*args: Any) -> Any:
    carry, action = step(*args)
    return carry, Read(action, stepping)

  with Running(program, driver=program.driver) as run:  # nothing is learned
    monkeypatch.setattr(program.programs, 'step', noted)
    for _ in range(12):
      run.actors.take(0, never)
  inside = stepping[20:40]  # the learner is never waited for
  assert inside == [free] * 20  # of four groups, two are with the device


def test_the_group_that_hangs_is_named(monkeypatch: Patch) -> None:
  from podrace.envs.host import jax as jax_pool

  plain, count, forever = jax_pool.JaxPool, itertools.count(), threading.Event()

  def hang(arrival: Any) -> Any:
    forever.wait(30)
    return arrival

  def second(*args: Any) -> Any:
    return Sick(plain(*args), 20 if next(count) == 1 else 0, hang)

  program = sebulba(RECURRENT['impala'], deadline=0.2, groups=2, lag='1')
  driver = compiled(program)
  monkeypatch.setattr(jax_pool, 'JaxPool', second)
  with Running(program, driver=driver) as run:
    with pytest.raises(ActorFailed, match='thread 0, group 1,'):
      run.advance(50)
    forever.set()


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (dict(num_envs=10, groups=4), r'--num-envs 10.*4, as 8 or 12.*4 groups.*--actor-groups'),
    (dict(batch_size=2, lag='async', groups=2), r'--actor-groups 2.*in order.*--env-batch-size 2'),
  ],
)
def test_groups_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    sebulba(AGENTS['impala'], spec=host.make('gymnasium:CartPole-v1'), **settings)


def test_groups_by_default() -> None:
  """Two where an accelerator acts in environments of the host, if they can be divided."""

  class Device(NamedTuple):
    platform: str

  def groups(env: str = 'envpool:CartPole-v1', device: str = 'gpu', num_envs: int = 8, **more: Any) -> int:  # fmt: skip
    spec = host.make(env)
    agent = bind(AGENTS['impala'], spec, 100)
    devices: Any = (Device(device),)
    made = make_program(agent, spec, devices, devices, num_envs, 4, lag='async', **more)
    return made.groups

  assert groups() == 2
  assert groups(groups=1) == 1
  assert groups(device='cpu') == 1
  assert groups(device='cpu', groups=4) == 4
  assert groups('podrace:catch') == 1
  assert groups(num_envs=6, threads=2) == 1
  assert groups(batch_size=2) == 1


def test_groups_share_the_threads_of_environments() -> None:
  def pool_threads(**settings: Any) -> int:
    made = sebulba(AGENTS['impala'], 'gymnasium:CartPole-v1', num_envs=64, **settings)
    return int(made.acting.pool_threads)

  assert pool_threads(env_threads=8) == 8
  assert pool_threads(env_threads=8, groups=2) == 4
  assert pool_threads(env_threads=8, groups=2, threads=2) == 2
  assert pool_threads(env_threads=1, groups=2) == 1
  assert pool_threads() == pool_threads(groups=2) == cores()  # one group is acted for


@pytest.mark.parametrize(
  ('name', 'tiny'),
  [('CartPole-v1', True), ('FrozenLake-v1', True), ('Pong-v5', False), ('HalfCheetah-v4', False)],
)
def test_tiny_environments_of_envpool_share_a_thread(name: str, tiny: bool) -> None:
  assert envpool.is_tiny(name) is tiny
