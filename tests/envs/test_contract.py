"""What every environment keeps, whatever library it comes from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import podrace.envs
from podrace.envs import contract
from podrace.envs.adapters import navix
from podrace.envs.base import NextStepReset
from podrace.types import LAST, TimeStep

NUM_ENVS, STEPS = 8, 60

FAST = (  # one or two of each library
  'podrace:catch,rows=4,columns=3',
  'podrace:memory,length=3',
  'podrace:empty_rooms,size=5,steps=6,episodes=2',
  'gymnax:CartPole-v1,max_steps_in_episode=15',
  'gymnax:Acrobot-v1,hide=velocity,max_steps_in_episode=20',
  'brax:fast,episode_length=20',
  'jumanji:Snake-v1,time_limit=20',
  'navix:Navix-DoorKey-5x5-v0,max_steps=20',
  'pgx:tic_tac_toe',
)
LIMITS = {'brax': ',episode_length=20', 'navix': ',max_steps=20', 'craftax': ',max_timesteps=20'}
ENDLESS = (  # in 60 steps
  'jumanji:Game2048-v1',
  'jumanji:FlatPack-v0',
  'jumanji:MultiCVRP-v0',
  'podrace:autoencode',
  'pgx:chess',
  'pgx:go_19x19',
  'pgx:shogi',
)


def limited(library: str, name: str) -> str:
  """The name of an environment whose episodes are short, where there is an option for it."""
  if library == 'gymnax':
    return f'{library}:{name},max_steps_in_episode=20'
  if library == 'brax' and name != 'fast':
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
OTHERS = (  # with other options than in REST
  'podrace:grasp,distractors=2,slip=0.1',
  'podrace:memory,length=3,continuous=true',
  'podrace:maze,size=4',
  'gymnax:FrozenLake-misc',
  'gymnax:CartPole-v1,hide=velocity,noise=0.1,max_steps_in_episode=20',
)
OBSERVATIONS = tuple(
  f'navix:Navix-DoorKey-5x5-v0,max_steps=20,observation={kind}'
  for kind in navix.OBSERVATIONS
  if kind != 'symbolic'  # the default
)
CASES = [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in (*REST, *OTHERS, *OBSERVATIONS))]
DETERMINISTIC = ('brax:fast', 'gymnax:DiscountingChain-bsuite', 'gymnax:SimpleBandit-bsuite')


@pytest.fixture(scope='module', params=CASES)
def name(request: pytest.FixtureRequest) -> str:
  return request.param


@pytest.fixture(autouse=True, scope='module')
def forget_compiled(name: str):
  yield  # a process that kept the programs of all environments would run out of memory maps
  make.cache_clear()
  rollout.cache_clear()
  jax.clear_caches()


@functools.cache
def make(name: str) -> NextStepReset:
  return podrace.envs.make(name)


@functools.cache
def rollout(name: str, fresh_fraction: float) -> Any:
  env = make(name)
  if fresh_fraction < 1:
    env = dataclasses.replace(env, fresh_fraction=fresh_fraction)
  return contract.rollout(env, STEPS, NUM_ENVS)


FRACTIONS = [
  1.0,
  pytest.param(0.25, marks=pytest.mark.slow),
]  # tests/envs/test_envs.py has a pool of its own


@pytest.fixture(scope='module', params=FRACTIONS, ids=['every_step', 'pool'])
def fraction(request: pytest.FixtureRequest, name: str) -> float:
  if request.param < 1 and not isinstance(make(name), NextStepReset):
    pytest.skip('it makes its resets itself, so there is no pool of them')
  return request.param


@pytest.fixture(scope='module')
def stream(name: str, fraction: float) -> TimeStep:
  return jax.device_get(rollout(name, fraction)(jax.random.key(0), False))


def test_spaces_are_declared(name: str) -> None:
  contract.check_spaces(make(name))


def test_observations_are_in_the_space(name: str, stream: TimeStep) -> None:
  contract.check_observations(make(name), stream)


def test_timesteps_keep_the_rules(name: str, stream: TimeStep) -> None:
  contract.check_timesteps(stream, make(name).action_space)
  if not name.startswith(ENDLESS):
    assert np.any(stream.step_type == LAST)


def test_the_key_is_all_there_is(name: str, fraction: float, stream: TimeStep) -> None:
  run = rollout(name, fraction)
  again, other = (jax.device_get(run(jax.random.key(seed), False)) for seed in (0, 2))
  contract.check_equal(stream, again, 'the same key gives another stream')
  if not name.startswith(DETERMINISTIC):
    pairs = zip(jax.tree.leaves(stream), jax.tree.leaves(other), strict=True)
    assert any(np.any(x != y) for x, y in pairs)


def test_state_keeps_its_type(name: str) -> None:
  contract.check_types(make(name))


def test_action_after_last_is_ignored(name: str, fraction: float, stream: TimeStep) -> None:
  contrary = jax.device_get(rollout(name, fraction)(jax.random.key(0), True))
  contract.check_equal(stream, contrary, 'the action after LAST is not ignored')
