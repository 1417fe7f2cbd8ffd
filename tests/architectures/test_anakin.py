"""Anakin: every agent learns on any number of devices; what it computes depends on nothing else."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compile_quickly  # noqa: F401 (a fixture)
from gymnasium import spaces
from shorthand import slow_after

from podrace import topology
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures import unroll as actor
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.envs.base import NextStepReset, batch, restart, transition
from podrace.networks import ActorCritic
from podrace.replay import on_policy
from podrace.run import summary
from podrace.types import FIRST, LAST, MID, TimeStep

SMALL = ActorCritic(hidden=(32,), initializer='lecun', activation='relu', core_size=32)
AGENTS = {
  'impala': Impala(SMALL, learning_rate=1e-2),
  'ppo': PPO(dataclasses.replace(SMALL, shared=False), learning_rate=5e-3),
  'impala, self-tuning': Impala(SMALL, learning_rate=1e-2, self_tuning=True),
}


def bound(agent: Any, env: Any, **settings: Any) -> Any:
  """The agent with its network for this environment."""
  network = dataclasses.replace(agent.network, **settings)
  return dataclasses.replace(agent, network=network.bind(env.observation_space, env.action_space))


class Budget(NamedTuple):
  num_envs: int
  unroll_length: int
  updates: int
  last: int  # of them, those whose episodes count


CATCH = {'impala': Budget(32, 10, 300, 50), 'ppo': Budget(32, 20, 60, 15)}
CATCH['impala, self-tuning'] = CATCH['impala']
MEMORY = {'impala': Budget(32, 24, 220, 40), 'ppo': Budget(32, 24, 60, 15)}


@functools.cache
def on_catch(name: str, devices: int) -> Anakin:
  budget, env = CATCH[name], make('podrace:catch')
  agent = dataclasses.replace(bound(AGENTS[name], env), total_updates=budget.updates)
  mesh = topology.learner_mesh(devices)
  return Anakin(agent, env, on_policy(), mesh, budget.num_envs, budget.unroll_length)


def begin(anakin: Anakin, seed: int = 0) -> Any:
  return anakin.init(jax.random.split(jax.random.key(seed), anakin.seeds))


def train(anakin: Anakin, budget: Budget) -> tuple[float, int]:
  """The mean return of the last episodes, and how many they were."""
  state = anakin.run(begin(anakin), jnp.int32(budget.updates - budget.last))
  _, state = anakin.read_log(state)
  log, _ = anakin.read_log(anakin.run(state, jnp.int32(budget.last)))
  return float(log['return_sum'] / log['episodes']), int(log['episodes'])


SLOW = pytest.mark.slow
MATRIX = [pytest.param(n, marks=SLOW if 'tuning' in n else ()) for n in AGENTS]

# --- learning ---------------------------------------------------------------------------------


@pytest.mark.parametrize('devices', slow_after(1, 1, 2, 8))
@pytest.mark.parametrize('name', MATRIX)
def test_learns_catch(name: str, devices: int) -> None:
  mean_return, episodes = train(on_catch(name, devices), CATCH[name])
  assert episodes >= 900  # a standard error of at most 0.033
  assert mean_return > 0.9


def on_memory(name: str, core: str) -> tuple[float, int]:
  env, budget = make('podrace:memory,length=10'), MEMORY[name]
  agent = bound(AGENTS[name], env, core=core)
  agent = dataclasses.replace(agent, total_updates=budget.updates)
  if name == 'ppo':
    agent = dataclasses.replace(agent, minibatches=1 if core != 'none' else 4)
  mesh = topology.learner_mesh(1)
  return train(Anakin(agent, env, on_policy(), mesh, budget.num_envs, budget.unroll_length), budget)


@pytest.mark.parametrize(
  ('name', 'core'),
  slow_after(1,
    ('impala', 'gru'), ('impala', 'lstm'), ('impala', 'transformer'),
    ('ppo', 'gru'), ('ppo', 'lstm'), ('ppo', 'transformer'),
  ),
)  # fmt: skip
def test_recurrent_agents_remember(name: str, core: str) -> None:
  mean_return, episodes = on_memory(name, core)
  assert episodes >= 900
  assert mean_return > 0.9


@pytest.mark.slow
@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_feed_forward_agents_cannot(name: str) -> None:
  """Their expected return is exactly 0; a mean of 900 has a standard error of 0.033."""
  mean_return, episodes = on_memory(name, 'none')
  assert episodes >= 900
  assert abs(mean_return) < 0.2


# --- what it depends on -----------------------------------------------------------------------


@pytest.mark.parametrize('devices', [1, pytest.param(8, marks=SLOW)])
@pytest.mark.parametrize('name', MATRIX)
def test_grouping_updates_into_calls_changes_nothing(name: str, devices: int) -> None:
  """10 updates, 3 + 7, and ten times 1: equal to the bit, in everything."""
  anakin, ends = on_catch(name, devices), []
  for groups in ([10], [3, 7], [1] * 10):
    state = begin(anakin)
    for updates in groups:
      state = anakin.run(state, jnp.int32(updates))
    ends.append(state)
  assert int(ends[0].update) == 10 and int(ends[0].log.samples) == 10
  for path, x in jax.tree_util.tree_leaves_with_path(ends[0]):
    for other in ends[1:]:
      y = functools.reduce(lambda tree, k: step_into(tree, k), path, other)
      assert np.array_equal(bits(x), bits(y)), jax.tree_util.keystr(path)


def step_into(tree: Any, key: Any) -> Any:
  if isinstance(key, jax.tree_util.GetAttrKey):
    return getattr(tree, key.name)
  return tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]


def bits(x: jax.Array) -> np.ndarray:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.asarray(x).reshape(-1).view(np.uint8)


def test_reading_the_log_changes_only_the_log() -> None:
  anakin = on_catch('impala', 1)
  _, state = anakin.read_log(anakin.run(begin(anakin), jnp.int32(3)))
  assert int(state.log.samples) == 0 and not np.asarray(state.actor.episodes.finished).any()
  read = anakin.run(state, jnp.int32(4))
  unread = anakin.run(begin(anakin), jnp.int32(7))
  for x, y in zip(jax.tree.leaves(read.train), jax.tree.leaves(unread.train), strict=True):
    assert np.array_equal(bits(x), bits(y))


def test_the_log_has_the_mean_of_the_metrics() -> None:
  anakin, losses = on_catch('impala', 1), []
  state = begin(anakin)
  for _ in range(4):
    log, state = anakin.read_log(anakin.run(state, jnp.int32(1)))
    losses.append(float(log['metrics']['loss']))
  log, _ = anakin.read_log(anakin.run(begin(anakin), jnp.int32(4)))
  np.testing.assert_allclose(log['metrics']['loss'], np.mean(losses), rtol=1e-5)
  assert np.std(losses) > 1e-3


@pytest.mark.parametrize('name', ['impala', pytest.param('ppo', marks=SLOW)])
def test_each_of_several_seeds_is_what_it_is_alone(name: str) -> None:
  alone = on_catch(name, 2)
  together = dataclasses.replace(alone, seeds=3)
  keys = jax.random.split(jax.random.key(0), 3)
  # JAX's check takes a scan over split keys for a reuse as soon as it is under vmap.
  with jax.debug_key_reuse(False):
    state = together.run(together.init(keys), jnp.int32(5))
    log, state = together.read_log(state)
  for i in range(3):
    one = alone.run(alone.init(keys[i : i + 1]), jnp.int32(5))
    one_log, one = alone.read_log(one)
    # rounding, passed five times through Adam
    for x, y in zip(jax.tree.leaves(state.train), jax.tree.leaves(one.train), strict=True):
      np.testing.assert_allclose(x[i], y, rtol=1e-3, atol=1e-5)
    assert np.array_equal(state.actor.timestep.observation[i], one.actor.timestep.observation)
    np.testing.assert_allclose(log['return_sum'][i], one_log['return_sum'], rtol=1e-5, atol=1e-4)
    assert int(log['episodes'][i]) == int(one_log['episodes'])
  kernels = jax.tree.leaves(state.train.params.network)
  assert all(not np.array_equal(k[0], k[1]) for k in kernels)


def test_the_first_loss_that_is_not_finite_is_noted() -> None:
  anakin = on_catch('impala', 1)
  state = anakin.run(begin(anakin), jnp.int32(2))
  assert [x.item() for x in anakin.health(state)[:2]] == [-1, True]
  params = jax.tree.map(lambda x: x * jnp.nan, state.train.params)
  state = state._replace(train=state.train._replace(params=params))
  assert [x.item() for x in anakin.health(state)[:2]] == [-1, False]
  state = anakin.run(state, jnp.int32(3))
  assert [x.item() for x in anakin.health(state)[:2]] == [2, False]  # updates 0 and 1 were good


# --- episodes ---------------------------------------------------------------------------------


class Dice:
  """Each step ends the episode with chance 0.3, half of the time by truncation; random rewards."""

  observation_space = spaces.Box(-1, 1, (2,), np.float32)
  action_space = spaces.Discrete(2)

  def reset(self, key: Any) -> tuple[Any, TimeStep]:
    del key
    return jnp.zeros([2]), restart(jnp.zeros([2]))

  def step(self, state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
    end_key, reward_key = jax.random.split(key)
    u = jax.random.uniform(end_key)
    reward = jax.random.randint(reward_key, (), -4, 5) + 0.5 * action
    return state + 1, transition(state + 1, reward, u < 0.15, (u > 0.5) & (u < 0.65))


def count(steps: TimeStep) -> dict[str, np.ndarray]:
  """Episodes that end in a stream [N, B] which begins with the first ones, for each environment."""
  n = steps.reward.shape[1]
  result = {k: np.zeros(n) for k in ('finished', 'return_sum', 'length_sum')}
  for b in range(n):
    length, total = 0, 0.0
    for kind, reward in zip(steps.step_type[:, b], steps.reward[:, b], strict=True):
      if kind == FIRST:
        length, total = 0, 0.0
        continue
      length, total = length + 1, total + float(reward)
      if kind == LAST:
        result['finished'][b] += 1
        result['return_sum'][b] += total
        result['length_sum'][b] += length
  return result


@pytest.mark.parametrize('length', [3, 25])
def test_every_episode_is_counted_once(length: int) -> None:
  """Whether unrolls are shorter or longer than episodes; rewards are halves, so sums are exact."""
  env, num_envs = NextStepReset(Dice()), 5
  agent = bound(AGENTS['impala'], env)
  unroll = jax.jit(functools.partial(actor.unroll, agent, batch(env, num_envs), length=length))
  params = jax.jit(agent.init)(jax.random.key(0)).params
  begin = jax.jit(functools.partial(actor.begin, agent, batch(env, num_envs)))
  state = begin(jnp.arange(num_envs), jax.random.key(1))
  stream = [jax.tree.map(lambda x: np.asarray(x)[None], state.timestep)]
  for i in range(75 // length):
    last = state.timestep
    state, trajectory = unroll(params, state, jax.random.key(2 + i))
    timesteps = jax.device_get(trajectory.timesteps)
    first = jax.tree.map(lambda x: x[0], timesteps)
    jax.tree.map(np.testing.assert_array_equal, first, last)  # they overlap in one timestep
    stream.append(jax.tree.map(lambda x: x[1:], timesteps))
  expected = count(jax.tree.map(lambda *xs: np.concatenate(xs), *stream))
  assert expected['finished'].sum() > 50
  e = state.episodes
  assert np.array_equal(e.finished, expected['finished'])
  assert np.array_equal(e.length_sum, expected['length_sum'])
  np.testing.assert_allclose(e.finished * e.return_mean, expected['return_sum'], atol=1e-4)


def test_every_episode_is_in_one_reading_of_the_log() -> None:
  env = NextStepReset(Dice())
  anakin = Anakin(bound(AGENTS['impala'], env), env, on_policy(), topology.learner_mesh(2), 4, 1)
  state, logs = begin(anakin), []
  stream = [jax.tree.map(np.array, state.actor.timestep)]  # copies: states are donated
  for i in range(60):
    state = anakin.run(state, jnp.int32(1))
    stream.append(jax.tree.map(np.array, state.actor.timestep))
    if i % 7 == 3 or i == 59:
      log, state = anakin.read_log(state)
      logs.append(log)
  expected = count(jax.tree.map(lambda *xs: np.stack(xs), *stream))
  assert expected['finished'].sum() > 30
  names = dict(episodes='finished', return_sum='return_sum', length_sum='length_sum')
  for name, field in names.items():
    found = sum(float(log[name]) for log in logs)
    assert found == pytest.approx(expected[field].sum(), abs=1e-4), name


@pytest.mark.parametrize(
  'returns', [500.0 + np.zeros(999), 1e6 + np.arange(999) % 7, [1e30, -1e30]]
)
def test_the_spread_of_returns_is_exact(returns: Any) -> None:
  """Of three environments, one of which finishes none; as numpy computes it in doubles."""
  returns = np.asarray(returns, np.float32)

  @jax.jit
  def counted(returns: Any) -> Any:
    def add(state: actor.ActorState, r: Any) -> Any:
      kind = jnp.array([LAST, LAST, MID], jnp.int8)
      state = state._replace(episode_return=jnp.zeros(3))
      step = TimeStep((), jnp.stack([r, -r, r]), jnp.zeros(3), kind)
      return actor.count_episodes(state, step), ()

    zeros = jnp.zeros(3)
    start = actor.ActorState(
      (), (), (), (), zeros, jnp.zeros(3, jnp.int32), actor.no_episodes(3), ()
    )
    state, _ = jax.lax.scan(add, start, returns)
    return actor.pooled(state.episodes), actor.pooled(jax.tree.map(lambda x: x[:1], state.episodes))

  for found, values in zip(counted(returns), ([returns, -returns], [returns]), strict=True):
    exact = np.concatenate(values).astype(np.float64)
    assert found['episodes'] == exact.size
    told = summary.mean_and_std(found['episodes'], found['return_sum'], found['return_deviation'])
    if np.abs(exact).max() > 1e20:  # its square is beyond float32
      assert told['episode_return_std'] is None
      continue
    assert told['episode_return'] == pytest.approx(exact.mean(), rel=1e-6, abs=0.1)
    assert told['episode_return_std'] == pytest.approx(exact.std(), rel=1e-4, abs=1e-3)


def test_the_spread_over_seeds() -> None:
  """Seed 1 has finished none."""
  told = summary.mean_and_std([2, 0, 3], [4.0, 0.0, 9.0], [2.0, 0.0, 8.0])
  first, last = np.array([1.0, 3.0]), np.array([1.0, 3.0, 5.0])
  alike = np.concatenate([first, first, first, last, last])  # as many episodes of each
  assert told == {
    'episode_return': pytest.approx(alike.mean()),
    'episode_return_std': pytest.approx(alike.std()),
  }
  assert set(summary.mean_and_std([0, 0], [0, 0], [0, 0]).values()) == {None}


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    (dict(num_envs=12), r'12.*8 devices'),
    (dict(num_envs=4), r'4.*8 devices'),
    (dict(num_envs=0), r'num_envs.*1.*0'),
    (dict(unroll_length=0), r'unroll_length.*1.*0'),
    (dict(seeds=0), r'seeds.*1.*0'),
  ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(on_catch('ppo', 8), **sizes)


def test_minibatches_that_do_not_divide() -> None:
  anakin = dataclasses.replace(on_catch('ppo', 1), unroll_length=10)
  with pytest.raises(ValueError, match=r'10 steps.*4 minibatches'):
    anakin.shapes  # noqa: B018
  env = make('podrace:catch')
  anakin = dataclasses.replace(
    on_catch('ppo', 8), agent=bound(AGENTS['ppo'], env, core='gru'), num_envs=48
  )
  with pytest.raises(ValueError, match=r'6 environments.*4 minibatches'):
    anakin.shapes  # noqa: B018


def test_an_agent_must_report_its_loss() -> None:
  @dataclasses.dataclass(frozen=True)
  class Silent(Impala):
    def learn(self, train: Any, sample: Any, key: Any) -> Any:
      train, priority, metrics = super().learn(train, sample, key)
      return train, priority, dict(other=metrics['loss'])

  env = make('podrace:catch')
  agent = Silent(bound(AGENTS['impala'], env).network)
  with pytest.raises(ValueError, match="'loss'"):
    dataclasses.replace(on_catch('impala', 1), agent=agent).shapes  # noqa: B018
