"""Evaluation: each environment's first episode, by the newest checkpoint that is whole."""
# ruff: noqa: F401 (fixtures of processes)

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import as_users_have_it, cache, checkpoints, every_file
from shared_programs import shared_programs
from shorthand import Patch

from podrace import cli, errors
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.r2d2 import R2D2
from podrace.envs import make
from podrace.envs.base import NextStepReset, restart, transition
from podrace.envs.host import base as host
from podrace.errors import UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer
from podrace.run import directory, loop
from podrace.run.evaluate import (
  check_shapes,
  evaluate,
  format_result,
  make_evaluator,
  make_returns,
)
from podrace.run.evaluate_host import make_host_evaluator, spread_env_ids
from podrace.run.saved_params import restore_params
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.settings.resolved import Resolved, resolve
from podrace.system import files
from podrace.types import ActorOutput


class State(NamedTuple):
  time: Any
  length: Any


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Episodes of 1 to 8 steps, by chance; reward 1 a step."""

  observation_space = gymnasium.spaces.Box(0, 1, (1,), 'float32')
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, key: Any) -> Any:
    return State(jnp.int32(0), jax.random.randint(key, (), 1, 9)), restart(jnp.zeros([1]))

  def step(self, state: State, action: Any, key: Any) -> Any:
    state = State(state.time + 1, state.length)
    return state, transition(jnp.zeros([1]), 1.0, state.time >= state.length, False)


class Idle:
  """Does nothing, without parameters."""

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    return ActorOutput(jnp.zeros(timestep.reward.shape, jnp.int32)), state


def test_long_episodes_count_as_much_as_short_ones() -> None:
  returns = make_evaluator(Idle(), NextStepReset(Lengths()), 1200)((), jax.random.key(0))
  assert returns.shape == (1200,)
  counts = np.bincount(returns.astype(int), minlength=9)[1:]
  assert counts.min() > 100 and counts.max() < 200  # 150 expected of each length
  assert returns.mean() == pytest.approx(4.5, abs=0.25)


def test_an_episode_that_does_not_end() -> None:
  @dataclasses.dataclass(frozen=True)
  class Endless(Lengths):
    def step(self, state: State, action: Any, key: Any) -> Any:
      return state, transition(jnp.zeros([1]), 1.0, False, False)

  with pytest.raises(errors.RunError, match=r'3.*3 episodes.*2000 steps'):
    make_evaluator(Idle(), NextStepReset(Endless()), 3, max_steps=2000)((), jax.random.key(0))


@pytest.mark.slow
def test_the_limit_of_steps_is_exact() -> None:
  env, key = NextStepReset(Lengths()), jax.random.key(0)  # 8 steps at most
  assert make_evaluator(Idle(), env, 100, max_steps=8)((), key).max() == 8
  with pytest.raises(errors.RunError, match=r'100 episodes.*7 steps'):
    make_evaluator(Idle(), env, 100, max_steps=7)((), key)
  spec = host.make('gymnasium:host_envs:Truncated-v0')  # 4 steps
  assert (make_host_evaluator(Idle(), spec, 3, max_steps=4)((), 0) == 4).all()
  with pytest.raises(errors.RunError, match=r'3.*3 episodes.*3 steps'):
    make_host_evaluator(Idle(), spec, 3, max_steps=3)((), 0)


def test_it_is_compiled_once() -> None:
  traced: list[None] = []

  class Counted(Idle):
    def act(self, *args: Any) -> Any:
      traced.append(None)
      return super().act(*args)

  returns = make_evaluator(Counted(), NextStepReset(Lengths()), 1200)
  first, again, other = (returns((), jax.random.key(seed)) for seed in (0, 0, 1))
  once = len(traced)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()
  assert once <= 2  # for the shapes of the loop, and for the program


@pytest.mark.parametrize(
  ('episodes', 'num_envs', 'expected'),
  [(4, 4, [0, 1, 2, 3]), (2, 8, [2, 6]), (6, 3, [0, 0, 1, 1, 2, 2]), (1, 1, [0])],
)
def test_episodes_are_spread_over_the_environments_of_the_run(
  episodes: int, num_envs: int, expected: list[int]
) -> None:
  assert spread_env_ids(episodes, num_envs).tolist() == expected


@dataclasses.dataclass(frozen=True)
class Recorded(R2D2):
  """Keeps the epsilons that it acts with."""

  def initial_state(self, env_id: Any) -> Any:
    state = super().initial_state(env_id)
    jax.debug.callback(EPSILONS.append, state.epsilon)
    return state


EPSILONS: list[np.ndarray] = []


def test_sampled_episodes_explore_as_environments_of_the_run_do(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  """An epsilon each: four episodes of a run of eight environments have those of every other one."""
  config = Config(agent=Recorded(QNetwork(hidden=(4,))), num_envs=8)
  files.write_json(tmp_path / 'config.json', to_json(config))

  def params(resolved: Resolved, *_: Any) -> Any:
    return 0, jax.jit(resolved.agent.init)(jax.random.key(0)).params, []

  monkeypatch.setattr('podrace.run.evaluate.restore_params', params)
  EPSILONS.clear()
  evaluate(tmp_path, 4, acting=('sampled',), allow_code=['test_evaluate'])
  jax.effects_barrier()
  expected = 0.4 ** (1 + 7 * np.array([1, 3, 5, 7]) / 7)
  np.testing.assert_allclose(EPSILONS[-1], expected, rtol=1e-6)


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """On eight devices with two seeds, normalized and recurrent: evaluation needs one device."""
  network = ActorCritic(hidden=(16,), core='gru', core_size=8)
  agent = Impala(network, learning_rate=3e-3, normalize_observations=True, normalize_rewards=True)
  config = Config(agent=agent, num_envs=16, unroll_length=8, total_steps=2560, seeds=2,
                  checkpoint_every=1280)  # fmt: skip
  run_dir = tmp_path_factory.mktemp('trained') / 'run'
  loop.train(config, run_dir, quiet=True)
  return run_dir


def test_evaluate(trained: Path) -> None:
  result = evaluate(trained, 10)
  assert result == evaluate(trained, 10)
  assert result['episodes'] == 20 and result['step'] == 2560
  assert np.mean(result['episode_return_mean_by_seed']) == pytest.approx(
    result['episode_return_mean']
  )
  sampled = evaluate(trained, 200, acting=('sampled',))
  assert abs(sampled['episode_return_mean']) <= 1
  assert sampled != evaluate(trained, 200, seed=1, acting=('sampled',))


def test_greedy_and_sampled_are_both_said(trained: Path) -> None:
  """Each as if it were alone; the plain names are those of acting greedily."""
  both = evaluate(trained, 10)
  greedy, sampled = (evaluate(trained, 10, acting=(way,)) for way in ('greedy', 'sampled'))
  assert {k: x for k, x in both.items() if not k.startswith('sampled_')} == greedy
  of_sampled = {k.removeprefix('sampled_'): x for k, x in both.items() if k.startswith('sampled_')}
  assert {**of_sampled, 'step': both['step']} == sampled
  assert greedy['episode_return_mean'] != sampled['episode_return_mean']
  line = format_result(both)
  assert f'greedy {both["episode_return_mean"]:.2f} ± ' in line
  assert f'sampled {both["sampled_episode_return_mean"]:.2f} ± ' in line
  assert '\n' not in line and '20 episodes each, step 2,560' in line


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_left(trained: Path) -> None:
  before, newest = checkpoints(trained)
  file = max(
    every_file(trained / 'checkpoints' / str(newest) / 'params'), key=lambda p: p.stat().st_size
  )
  whole = file.read_bytes()
  try:
    file.write_bytes(whole[:-20])
    result = evaluate(trained, 2)
    assert result['step'] == before
    assert result['damaged_checkpoints_skipped'] == [newest]
    assert checkpoints(trained) == [before, newest]
  finally:
    file.write_bytes(whole)


def test_parameters_that_were_changed_on_disk_are_not_evaluated(
  trained: Path, tmp_path: Path
) -> None:
  """One bit of them, which orbax does not notice."""
  before, newest = checkpoints(trained)
  run_dir = tmp_path / 'run'
  shutil.copytree(trained, run_dir)
  folder = run_dir / 'checkpoints' / str(newest) / 'params'
  file = max(every_file(folder), key=lambda p: p.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  result = evaluate(run_dir, 2, acting=('greedy',))
  assert result['step'] == before
  assert result['damaged_checkpoints_skipped'] == [newest]


@pytest.mark.slow
def test_statistics_of_training_are_used(trained: Path) -> None:
  resolved = resolve(directory.load_config(trained))
  config, agent = resolved.config, resolved.agent
  _, params, _ = restore_params(resolved, trained)
  assert (params.observation.seen > 1000).all()

  def returns(params: Any) -> np.ndarray:
    return np.concatenate(make_returns(config, agent, make(config.env), 200, 100)(params, 0))

  assert (
    returns(params).mean() == evaluate(trained, 200, acting=('sampled',))['episode_return_mean']
  )
  spoilt = params._replace(observation=jax.tree.map(lambda x: 3 * x + 1, params.observation))
  assert (returns(params) != returns(spoilt)).any()


def test_what_cannot_be_evaluated(trained: Path, tmp_path: Path) -> None:
  with pytest.raises(UsageError, match='config'):
    evaluate(tmp_path, 1)
  with pytest.raises(UsageError, match=r'--episodes.*1.*0'):
    evaluate(trained, 0)
  with pytest.raises(UsageError, match=r'--episodes.*2147483647.*1000000000000'):
    evaluate(trained, 10**12)
  with pytest.raises(UsageError, match=r'--max-steps.*1.*0'):
    evaluate(trained, 1, max_steps=0)
  with pytest.raises(UsageError, match=r'--seed.*4294967295.*4294967296'):
    evaluate(trained, 1, seed=2**32)
  (tmp_path / 'config.json').write_bytes((trained / 'config.json').read_bytes())
  with pytest.raises(UsageError, match='checkpoint'):
    evaluate(tmp_path, 1)
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(UsageError, match='checkpoint'):
    evaluate(tmp_path, 1)


def test_another_network_than_the_runs_is_named(trained: Path) -> None:
  recorded = directory.load_config(trained)
  network = dataclasses.replace(recorded.agent.network, hidden=(7,))
  agent = dataclasses.replace(recorded.agent, network=network)
  with pytest.raises(UsageError, match=r'--agent\.network\.hidden 7'):
    check_shapes(trained, recorded, dataclasses.replace(recorded, agent=agent))


@pytest.mark.slow
def test_parameters_may_be_scalars(tmp_path: Path) -> None:
  """As DQN's epsilon is."""
  buffer = Buffer(capacity=512, batch_size=8, min_size=32, samples_per_insert=4.0)
  agent = DQN(QNetwork(hidden=(8,)), buffer)
  config = Config(agent=agent, num_envs=8, unroll_length=4, total_steps=64)
  loop.train(config, tmp_path / 'run', quiet=True)
  result = evaluate(tmp_path / 'run', 4)
  assert result['step'] == 64 and -1 <= result['episode_return_mean'] <= 1


# --- environments on the host ----------------------------------------------------------------------


def test_games_on_the_host_count_whole_and_once() -> None:
  """More than are stepped together; 4 steps each, of which the fifth arrival is the last."""
  spec = host.make('gymnasium:host_envs:Truncated-v0')
  returns = make_host_evaluator(Idle(), spec, 40)((), 0)
  np.testing.assert_array_equal(returns, np.full(40, 4.0))


class Follow(Idle):
  """CartPole: pushes towards the side of the pole where its parameter is 1, else to the left."""

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    right = (params > 0) & (timestep.observation[:, 2] > 0)
    return ActorOutput(right.astype(jnp.int32)), state


def test_each_seed_of_a_run_plays_on_the_host() -> None:
  spec, config = host.make('gymnasium:CartPole-v1'), Config(agent=None, seeds=2, num_envs=4)
  both = make_returns(config, Follow(), spec, 4)(jnp.array([0.0, 1.0]), 0)
  assert [x.shape for x in both] == [(4,), (4,)] and both[0].max() < 13 < 25 < both[1].min()
  same = make_returns(config, Follow(), spec, 4)(jnp.ones(2), 0)
  assert (same[0] != same[1]).any()  # each plays its own episodes
  one = make_returns(dataclasses.replace(config, seeds=1), Follow(), spec, 4)(jnp.float32(0.0), 0)
  np.testing.assert_array_equal(one, both[:1])


def test_games_on_the_host_that_do_not_end() -> None:
  spec = host.make('gymnasium:host_envs:Same-v0')
  with pytest.raises(errors.RunError, match=r'2.*2 episodes.*50 steps'):
    make_host_evaluator(Idle(), spec, 2, max_steps=50)((), 0)


def test_games_on_the_host_that_hang(monkeypatch: Patch) -> None:
  """In a library's own threads, which nobody but us has an eye on."""
  forever = threading.Event()
  spec = host.make('envpool:CartPole-v1')

  def make(args: Any) -> Any:
    pool: Any = spec.make(args)
    monkeypatch.setattr(pool, 'recv', lambda: forever.wait(60))
    return pool

  monkeypatch.setattr('podrace.run.evaluate_host.CLOSE_SECONDS', 0.1)
  told = 'envpool:CartPole-v1'
  with pytest.raises(errors.RunError, match=told):
    make_host_evaluator(Idle(), dataclasses.replace(spec, make=make), 2, deadline=0.2)((), 0)
  forever.set()


def test_atari_is_scored_unclipped() -> None:
  """A whole game with several rewards of 10 and more, as the game counts them."""
  spec = host.make('ale:ms_pacman')
  evaluated = make_host_evaluator(Idle(), spec, 2)
  returns = evaluated((), 0)
  assert (returns >= 60).all() and (returns % 10 == 0).all()
  np.testing.assert_array_equal(returns, evaluated((), 0))


@pytest.mark.parametrize(
  'core', ['none', *(pytest.param(core, marks=pytest.mark.slow) for core in ('gru', 'lstm'))]
)
def test_a_run_on_the_host_is_evaluated_and_environments_that_fail_are_told(
  core: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
  agent = Impala(network=ActorCritic(hidden=(8,), core=core, core_size=8))
  config = Config(agent=agent, env='gymnasium:host_envs:Terminated-v0', architecture='sebulba',
                  num_envs=4, unroll_length=4, total_steps=64, actor_threads=1, devices=1)  # fmt: skip
  loop.train(config, tmp_path / 'run', quiet=True)
  result = evaluate(tmp_path / 'run', 5, allow_code=['host_envs'])
  assert result == {
    'episode_return_mean': 4.0,
    'episode_return_std': 0.0,
    'episodes': 5,
    'sampled_episode_return_mean': 4.0,
    'sampled_episode_return_std': 0.0,
    'sampled_episodes': 5,
    'step': 64,
  }

  def fail(*args: Any) -> None:
    raise errors.HostError('failed in its worker:\nZeroDivisionError: the game broke')

  monkeypatch.setattr('podrace.envs.host.worker_pool.WorkerPool.recv', fail)
  with pytest.raises(SystemExit) as end:
    cli.main(['eval', str(tmp_path / 'run'), '--episodes', '2', '--allow-code', 'host_envs'])
  assert end.value.code == 1
  told = capfd.readouterr().err
  assert 'gymnasium:host_envs:Terminated-v0' in told
  assert 'the game broke' in told and 'Traceback' not in told


def long_catch() -> Any:
  env = make('podrace:catch')
  dynamics = type(env.dynamics)
  long = type('Long', (dynamics,), {'action_space': gymnasium.spaces.Discrete(3)})
  return dataclasses.replace(env, dynamics=long(**vars(env.dynamics)))


def test_choices_of_64_bits_are_those_of_32(trained: Path) -> None:
  """Gymnasium's default is int64, which JAX does not have."""
  env = 'python:test_evaluate.long_catch'
  result = evaluate(trained, 4, acting=('greedy',), env=env, allow_code=['test_evaluate'])
  assert result['episodes'] == 8


def test_a_run_in_jax_plays_on_the_host(tmp_path: Path) -> None:
  config = Config(agent=Impala(ActorCritic(hidden=(8,))), env='gymnax:CartPole-v1', num_envs=8, unroll_length=4,
                  total_steps=64, devices=1)  # fmt: skip
  loop.train(config, tmp_path / 'run', quiet=True)
  result = evaluate(tmp_path / 'run', 3, acting=('greedy',), env='gymnasium:CartPole-v1')
  assert result['episodes'] == 3 and result['episode_return_mean'] > 1
