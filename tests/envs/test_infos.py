"""Numbers that environments tell in `info` reach the log, as means."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from processes import as_users_have_it, lines  # noqa: F401 (a fixture)

from podrace import envs
from podrace.agents.impala import Impala
from podrace.envs.adapters.adapt import TimeLimit
from podrace.envs.base import NextStepReset, batch, restart, transition
from podrace.envs.check import check_environment
from podrace.envs.host import base as host
from podrace.envs.host.base import PoolArgs
from podrace.envs.host.infos import BYTES, FIELDS, MOST, InfoAdder, Infos, numbers
from podrace.errors import UsageError
from podrace.networks import ActorCritic
from podrace.run import loop
from podrace.settings.config import Config
from podrace.types import TimeStep

TELLING = 'gymnasium:host_envs:Telling-v0'


def rows(num_envs: int = 4) -> dict[str, np.ndarray]:
  return {name: np.zeros((num_envs, *shape), dtype) for name, dtype, shape in FIELDS}


def test_numbers_of_an_info() -> None:
  info: dict[Any, Any] = dict(a=1, b=True, c=np.float32(0.5), d=np.ones(2), e='1', f=float('inf'),
                              g=dict(h=np.int8(-2), i=None), j=1j, k=np.complex64(1))  # fmt: skip
  assert dict(numbers(info)) == {'a': 1.0, 'b': 1.0, 'c': 0.5, 'g/h': -2.0}


def test_means_are_over_all_workers_and_pools() -> None:
  infos, one, other = Infos(), rows(), rows()
  infos.open(one)
  infos.open(other)
  adders = [InfoAdder(one, 0), InfoAdder(one, 2), InfoAdder(other, 0)]
  for value, adder in enumerate(adders):
    adder.add({'a': value})
  adders[1].add({'b': 7, 'a': 5})
  assert infos.means() == {'info_a': 2.0, 'info_b': 7.0}
  assert infos.means() == {}
  adders[2].add({'a': 10})
  infos.close(other)
  infos.close(other)
  InfoAdder(one, 2).add({'a': 20})  # of a worker in place of another
  assert infos.means() == {'info_a': 15.0}


def test_there_is_room_for_so_many_names() -> None:
  infos, memory = Infos(), rows(1)
  infos.open(memory)
  adder = InfoAdder(memory, 0)
  for _ in range(2):
    adder.add({'x' * BYTES: 1.0, **{f'n{i}': i for i in range(2 * MOST)}})
  assert infos.means() == {f'info_n{i}': i for i in range(MOST)}


def test_workers_tell_them_and_a_killed_one_loses_none() -> None:
  spec = host.make(TELLING)
  assert spec.metrics is not None
  with contextlib.closing(
    spec.make(PoolArgs(4, 4, np.arange(4, dtype=np.uint32), 2, 60.0))
  ) as pool:
    steps = 0
    pool.reset()
    for t in range(30):
      arrival = pool.recv()
      steps += int((arrival.timestep.step_type != 0).sum())
      if t == 10:
        os.kill(pool.pids[1], signal.SIGKILL)
      pool.send(arrival.env_id, np.zeros(4, np.int32))
    pool.recv()
    found = spec.metrics()
  assert set(found) == {'info_speed', 'info_won', 'info_inner/lives'}
  assert found['info_inner/lives'] == 3.0 and 2.0 <= found['info_speed'] <= 20.0
  assert 0.0 < found['info_won'] < 1.0
  assert spec.metrics() == {}


def test_they_are_in_the_metrics_of_a_run(tmp_path: Path) -> None:
  network = ActorCritic(hidden=(16,), initializer='lecun')
  config = Config(agent=Impala(network=network), env=TELLING, architecture='sebulba', num_envs=4,
                  unroll_length=8, total_steps=640, devices=1, log_every=320)  # fmt: skip
  loop.train(config, tmp_path / 'run', quiet=True)
  for line in lines(tmp_path / 'run'):
    assert line['info_inner/lives'] == 3.0 and line['info_speed'] > 0


@dataclasses.dataclass(frozen=True)
class Saying:
  """Episodes of 5 steps, which says how they end: 3 x their number, and what the state has of them."""

  observation_space = spaces.Box(0, 9, (1,), np.float32)
  action_space = spaces.Discrete(2)

  def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
    return jnp.int32(0), restart(jnp.zeros(1))

  def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, TimeStep]:
    state = state + 1
    return state, transition(jnp.full(1, state, jnp.float32), 1.0, state >= 5, False)

  def infos(self, state: Any) -> dict[str, Any]:
    return {'time': state, 'inner/tripled': 3 * state}


def saying(fresh_fraction: float = 1.0, steps: int = 1_000) -> NextStepReset:
  return NextStepReset(TimeLimit(Saying(), steps), fresh_fraction)


@pytest.mark.parametrize(
  'architecture', ['anakin', pytest.param('sebulba', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('fresh', [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_environments_in_jax_tell_infos(architecture: str, fresh: float, tmp_path: Path) -> None:
  network = ActorCritic(hidden=(16,), initializer='lecun')
  config = Config(agent=Impala(network=network), env=f'python:test_infos.saying,fresh_fraction={fresh}',
                  architecture=architecture, num_envs=4, unroll_length=8, total_steps=640, devices=1,
                  log_every=320)  # fmt: skip
  loop.train(config, tmp_path / 'run', quiet=True)
  assert len(lines(tmp_path / 'run')) == 2
  for line in lines(tmp_path / 'run'):
    assert (line['info_time'], line['info_inner/tripled']) == (5.0, 15.0)


def test_a_truncated_episode_says_how_it_ends() -> None:
  env = saying(steps=3)
  state, timestep = env.reset(jax.random.key(0))
  for _ in range(3):
    state, timestep = env.step(state, jnp.int32(0), jax.random.key(1))
  assert timestep.last and env.infos(state) == {'time': 3.0, 'inner/tripled': 9.0}


class Wrong(Saying):
  said: Any

  def infos(self, state: Any) -> Any:
    return type(self).said


@pytest.mark.parametrize(
  ('said', 'message'),
  [
    ({'place': jnp.zeros(3)}, 'place of shape \\(3,\\)'),
    ({f'n{i}': 0.0 for i in range(MOST + 1)}, f'{MOST + 1} numbers'),
  ],
)
def test_infos_that_are_no_numbers_are_refused(said: Any, message: str) -> None:
  wrong = type('Wrong', (Wrong,), {'said': said})
  with pytest.raises(UsageError, match=f'infos.*{message}'):
    check_environment(NextStepReset(wrong()))


class Stateless(Saying):
  def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
    return (), restart(jnp.zeros(1))

  def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, TimeStep]:
    return (), transition(jnp.zeros(1), 1.0, True, False)

  def infos(self, state: Any) -> dict[str, Any]:
    return {'one': jnp.float32(1)}


@pytest.mark.parametrize('fresh', [1.0, 0.5])
def test_an_environment_without_state_says_something_too(fresh: float) -> None:
  many = batch(NextStepReset(Stateless(), fresh), 4)
  state, _ = many.reset(jax.random.key(0))
  assert many.infos(state)['one'].tolist() == [1.0] * 4


def test_the_warm_up_is_not_among_them() -> None:
  from podrace.envs.host.jax import JaxPool, JaxSteps

  steps = JaxSteps(saying(), 4, 8)
  pool = JaxPool(steps, jax.random.key(0), lambda number: jax.random.key(1))
  pool.reset()
  for _ in range(5):
    pool.send(np.arange(4), np.zeros(4, np.int32))
    pool.recv()
  assert steps.infos.means() == {'info_time': 5.0, 'info_inner/tripled': 15.0}
  steps.forget_infos()
  assert steps.infos.means() == {}


@pytest.mark.parametrize(
  'name',
  ['Craftax-Classic-Symbolic-v1', pytest.param('Craftax-Symbolic-v1', marks=pytest.mark.slow)],
)
def test_achievements(name: str) -> None:
  env = envs.make(f'craftax:{name}')
  state, _ = jax.eval_shape(env.reset, jax.random.key(0))
  found = jax.eval_shape(env.infos, state)
  assert 'Achievements/collect_wood' in found and 20 < len(found) <= MOST


@pytest.mark.parametrize('name', ['info_a', 'info_'])
def test_no_metric_of_an_agent_is_called_so(name: str) -> None:
  from podrace.learner import is_reserved

  assert is_reserved(name)
