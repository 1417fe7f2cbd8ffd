"""What every environment keeps, whatever library it comes from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrace.envs
from podrace.envs.base import NextStepReset, batch, select
from podrace.types import FIRST, LAST, MID, TimeStep

NUM_ENVS, STEPS = 8, 60
quick_jit = functools.partial(  # these programs run once: compiling them is all the cost
  jax.jit,
  compiler_options={
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
  },
)

FAST = (
  'podrace:catch',
  'podrace:catch,rows=4,columns=3',
  'podrace:memory,length=3',
  'gymnax:CartPole-v1,max_steps_in_episode=15',
  'gymnax:Pendulum-v1,max_steps_in_episode=20',
  'gymnax:MountainCar-v0,max_steps_in_episode=20',
  'gymnax:MountainCarContinuous-v0,max_steps_in_episode=20',
  'gymnax:Acrobot-v1,max_steps_in_episode=20',
  'gymnax:Asterix-MinAtar,max_steps_in_episode=20',
  'gymnax:Breakout-MinAtar,max_steps_in_episode=20',
  'gymnax:Freeway-MinAtar,max_steps_in_episode=20',
  'gymnax:Seaquest-MinAtar,max_steps_in_episode=20',
  'gymnax:SpaceInvaders-MinAtar,max_steps_in_episode=20',
  'gymnax:FrozenLake-misc',
  'brax:inverted_pendulum,backend=spring,episode_length=20',
  'jumanji:Snake-v1,time_limit=20',
  'navix:Navix-DoorKey-5x5-v0,max_steps=20',
)
LIMITS = {
  'brax': ',episode_length=20',
  'navix': ',max_steps=20',
  'craftax': ',max_timesteps=20',
}
ENDLESS = ('jumanji:Game2048-v1', 'jumanji:FlatPack-v0', 'jumanji:MultiCVRP-v0')  # in 60 steps


def limited(library: str, name: str) -> str:
  """The name of an environment whose episodes are short, where there is an option for it."""
  if library == 'gymnax' and name != 'BernoulliBandit-misc':
    return f'{library}:{name},max_steps_in_episode=20'
  if library == 'brax' and name not in ('fast', 'swimmer'):
    return f'{library}:{name},backend=spring{LIMITS[library]}'
  if library == 'jumanji':
    return f'{library}:{name}' + ',time_limit=20' * has_limit(name)
  return f'{library}:{name}{LIMITS.get(library, "")}'


def has_limit(name: str) -> bool:
  """Whether a jumanji environment has a time limit."""
  without = 'Game2048 GraphColoring Minesweeper Sudoku BinPack FlatPack JobShop Knapsack CVRP'
  return not name.startswith((*without.split(), 'MultiCVRP', 'TSP'))


REST = tuple(
  name
  for library, all_names in podrace.envs.names().items()
  for name in (limited(library, n) for n in all_names)
  if name not in FAST
)
OBSERVATIONS = tuple(
  f'navix:Navix-KeyCorridorS3R1-v0,max_steps=20,observation={kind}'
  for kind in ('symbolic_first_person', 'categorical', 'rgb', 'rgb_first_person')
)
CASES = [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in (*REST, *OBSERVATIONS))]
DETERMINISTIC = ('brax:fast', 'gymnax:DiscountingChain-bsuite', 'gymnax:SimpleBandit-bsuite')


@pytest.fixture(scope='module', params=CASES)
def name(request: pytest.FixtureRequest) -> str:
  return request.param


@pytest.fixture(autouse=True, scope='module')
def forget_compiled():
  yield
  make.cache_clear()
  rollout.cache_clear()
  jax.clear_caches()


@functools.cache
def make(name: str) -> NextStepReset:
  return podrace.envs.make(name)


def sample(space: gymnasium.Space, key: jax.Array, n: int) -> jax.Array:
  """[n, ...] actions, uniform over the space."""
  shape = (n, *space.shape)
  if isinstance(space, gymnasium.spaces.Discrete):
    return jax.random.randint(key, shape, 0, space.n)
  if isinstance(space, gymnasium.spaces.MultiDiscrete):
    with jax.numpy_rank_promotion('allow'):
      return jax.random.randint(key, shape, 0, jnp.asarray(space.nvec))
  return jax.random.uniform(key, shape, minval=space.low[None], maxval=space.high[None])


@functools.cache
def rollout(name: str, fresh_fraction: float) -> Any:
  """A compiled function from a seed to a stream of timesteps [T+1, B] under a random policy.

  With `contrary`, the actions after LAST, and only those, are others.
  """
  env = dataclasses.replace(make(name), fresh_fraction=fresh_fraction)
  many = batch(env, NUM_ENVS)

  @quick_jit
  def run(seed: int, contrary: bool) -> TimeStep:
    def step(carry: Any, key: jax.Array) -> tuple[Any, TimeStep]:
      state, last = carry
      act_key, other_key, env_key = jax.random.split(key, 3)
      action = sample(env.action_space, act_key, NUM_ENVS)
      other = sample(env.action_space, other_key, NUM_ENVS)
      action = select(last & contrary, other, action)
      state, timestep = many.step(state, action, env_key)
      return (state, timestep.last), timestep

    reset_key, steps_key = jax.random.split(jax.random.key(seed))
    state, first = many.reset(reset_key)
    _, rest = jax.lax.scan(step, (state, first.last), jax.random.split(steps_key, STEPS))
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)

  return run


def numpy(tree: Any) -> Any:
  return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope='module', params=[1.0, 0.25], ids=['every_step', 'pool'])
def stream(name: str, request: pytest.FixtureRequest) -> TimeStep:
  return numpy(rollout(name, request.param)(0, False))


def assert_inside(space: gymnasium.Space, x: Any, where: str = 'observation') -> None:
  """`x` [T, B, ...] has the type and the shape of `space`, and is within its bounds."""
  if isinstance(space, gymnasium.spaces.Dict):
    assert set(x) == set(space.spaces), where
    for key, sub in space.spaces.items():
      assert_inside(sub, x[key], f'{where}/{key}')
    return
  assert x.dtype == space.dtype and x.shape[2:] == space.shape, where
  assert np.all(np.isfinite(x)), where
  if isinstance(space, gymnasium.spaces.Discrete):
    low, high = 0, space.n - 1
  else:
    low, high = space.low, space.high
  assert np.all(x >= low) and np.all(x <= high), (where, x.min(), x.max())


def test_spaces_are_declared(name: str) -> None:
  env = make(name)
  assert isinstance(env.observation_space, gymnasium.Space)
  action = env.action_space
  assert action.dtype in (np.int32, np.float32)
  if isinstance(action, gymnasium.spaces.Discrete):
    assert action.start == 0


def test_observations_are_in_the_space(name: str, stream: TimeStep) -> None:
  assert_inside(make(name).observation_space, stream.observation)


def test_episodes_are_first_mid_last(name: str, stream: TimeStep) -> None:
  kind = stream.step_type
  assert kind.dtype == np.int8 and kind.shape == (STEPS + 1, NUM_ENVS)
  assert np.all(np.isin(kind, (FIRST, MID, LAST)))
  assert np.all(kind[0] == FIRST)
  np.testing.assert_array_equal(kind[1:] == FIRST, kind[:-1] == LAST)
  if not name.startswith(ENDLESS):
    assert np.any(kind == LAST)


def test_rewards_and_discounts(name: str, stream: TimeStep) -> None:
  assert stream.reward.dtype == stream.discount.dtype == np.float32
  assert stream.reward.shape == stream.discount.shape == stream.step_type.shape
  assert np.all(np.isfinite(stream.reward))
  assert np.all(stream.reward[stream.step_type == FIRST] == 0)
  assert np.all(np.isin(stream.discount, (0, 1)))
  assert np.all(stream.discount[stream.step_type != LAST] == 1)


def test_the_key_is_all_there_is(name: str) -> None:
  run = rollout(name, 0.25)
  once, again, other = (numpy(run(seed, False)) for seed in (1, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, once, again)
  if not name.startswith(DETERMINISTIC):
    pairs = zip(jax.tree.leaves(once), jax.tree.leaves(other), strict=True)
    assert any(np.any(x != y) for x, y in pairs)


def test_state_keeps_its_type(name: str) -> None:
  """A single environment, without vmap; a scan refuses what changes (also weak types)."""
  env = make(name)

  def run(key: jax.Array) -> Any:
    reset_key, step_key = jax.random.split(key)
    state, timestep = env.reset(reset_key)
    action = jnp.zeros(env.action_space.shape, env.action_space.dtype)
    step = lambda carry, key: (env.step(carry[0], action, key), ())  # noqa: E731
    return jax.lax.scan(step, (state, timestep), jax.random.split(step_key, 3))

  jax.eval_shape(run, jax.random.key(0))


@pytest.mark.parametrize('fresh_fraction', [1.0, 0.25], ids=['every_step', 'pool'])
def test_action_after_last_is_ignored(name: str, fresh_fraction: float) -> None:
  run = rollout(name, fresh_fraction)
  jax.tree.map(np.testing.assert_array_equal, numpy(run(3, False)), numpy(run(3, True)))
