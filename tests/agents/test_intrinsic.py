"""Intrinsic: what is relived is what was lived, policies against loops, and the gradient through their updates."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from shorthand import slow_after

from podrace import cli, topology
from podrace.agents.intrinsic import Intrinsic, IntrinsicParams
from podrace.architectures import unroll
from podrace.architectures.anakin import Anakin
from podrace.envs import contract, make
from podrace.envs.base import batch
from podrace.errors import UsageError
from podrace.learner import learner
from podrace.networks import LifetimeNetwork, Policy
from podrace.replay import on_policy
from podrace.settings.agents import bind
from podrace.types import FIRST, LAST, Trajectory

B, T = 3, 30
WORLD = 'podrace:empty_rooms,size=5,steps=3,episodes=2'  # a lifetime is of 8 timesteps at most
SMALL = LifetimeNetwork(hidden=(6,), core_size=5)


def agent(env: str = WORLD, **settings: Any) -> Intrinsic:
  given = dict(
    reward=SMALL, value=SMALL, period=4, policy_learning_rate=20.0, policy_entropy_cost=0.3
  )
  given |= settings
  found: Intrinsic = bind(Intrinsic(**given), make(env))  # type: ignore[arg-type]
  return found


def loud(params: IntrinsicParams) -> IntrinsicParams:
  """With rewards and values that are not almost 0, as they begin."""
  return jax.tree.map(lambda x: 3 * np.asarray(x), params)


@functools.cache
def lived(env: str = WORLD) -> tuple[Intrinsic, IntrinsicParams, list[Trajectory]]:
  """Two unrolls in a row."""
  learning, many = agent(env), batch(make(env), B)
  params = loud(contract.quick_jit(learning.init)(jax.random.key(1)).params)

  @contract.quick_jit
  def run(key: Any) -> Any:
    begin_key, *keys = jax.random.split(key, 3)
    state = unroll.begin(learning, many, jnp.arange(B, dtype=jnp.int32), begin_key)
    found = []
    for k in keys:
      state, trajectory = unroll.unroll(learning, many, params, state, k, T)
      found.append(trajectory)
    return found

  return learning, params, run(jax.random.key(0))


@functools.cache
def reliving(env: str = WORLD) -> Any:
  """`relive` of the agent that has `lived`."""
  return contract.quick_jit(lived(env)[0].relive)


def joined(first: Trajectory, second: Trajectory) -> Trajectory:
  def join(x: Any, y: Any) -> Any:
    return jnp.concatenate([x, y])

  timesteps = jax.tree.map(lambda x, y: join(x[:-1], y), first.timesteps, second.timesteps)
  outputs = jax.tree.map(join, first.outputs, second.outputs)
  return first._replace(timesteps=timesteps, outputs=outputs)


# --- lifetimes ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_relived_is_what_was_lived() -> None:
  """Of a second unroll: from the state that acting came to, and from the beginning of the first."""
  _, params, (first, second) = lived()
  relive = reliving()
  begins, *found = relive(params, second)
  whole, *all_of_it = relive(params, joined(first, second))
  assert begins.sum() >= 2 * B and whole[:T].sum() >= 2 * B
  np.testing.assert_array_equal(begins, whole[T:])
  for x, y in zip(found, all_of_it, strict=True):
    np.testing.assert_allclose(x, y[T:], rtol=1e-4, atol=1e-5)
  log_prob = np.asarray(all_of_it[2])
  assert np.ptp(log_prob) > 0.1  # the policies have moved


def test_a_reward_sees_the_newest_step_and_what_its_core_remembers() -> None:
  """Without memory it still differs from step to step, and is another one."""
  _, params, (first, _) = lived()
  raw = np.asarray(reliving()(params, first)[1])
  without = {
    k: jax.tree.map(jnp.zeros_like, v) if k.startswith('Core') else v
    for k, v in params.reward.items()
  }
  seen = np.asarray(reliving()(params._replace(reward=without), first)[1])
  assert np.ptp(seen) > 0.01 and np.abs(seen - raw).max() > 0.01


def test_a_lifetime_ends_with_its_last_episode() -> None:
  """Where the environment takes another goal, the agent takes another policy."""
  _, params, (first, second) = lived()
  whole = joined(first, second)
  begins = np.asarray(reliving()(params, whole)[0])
  for b in range(B):
    opens = np.flatnonzero(np.asarray(whole.timesteps.step_type)[:, b] == FIRST)
    np.testing.assert_array_equal(np.flatnonzero(begins[:, b]), opens[2::2])
    ends = np.asarray(first.timesteps.step_type)[:-1, b] == LAST
    since = np.flatnonzero(begins[:T, b])[-1]
    assert second.agent_state.episode[b] == ends[since:].sum()


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max())
  return e / e.sum()


def slow_log_probs(learning: Intrinsic, x: Trajectory, reward: np.ndarray, b: int) -> list[float]:
  """Of one lifetime after the other, by REINFORCE on a table, step by step."""
  beginning: Any = jax.tree.map(lambda y: np.asarray(y[b], np.float64), x.agent_state.beginning)
  weights = beginning['kernel']
  trace = gradient = np.zeros_like(weights)
  steps = episodes = count = 0
  mean = 0.0
  found = []
  for t in range(x.outputs.action.shape[0]):
    kind = int(x.timesteps.step_type[t, b])
    if kind == FIRST and episodes == 2:
      weights = beginning['kernel']
      trace = gradient = np.zeros_like(weights)
      steps = episodes = count = 0
      mean = 0.0
    if kind == FIRST:
      trace = np.zeros_like(weights)
    else:
      count += 1
      mean += max(learning.policy_mean_rate, 1 / count) * (reward[t, b] - mean)
      gradient = gradient + (reward[t, b] - mean) * trace
      trace = learning.policy_discount * trace
      steps += 1
    if steps == learning.period:
      weights = weights + learning.policy_learning_rate / learning.period * gradient
      gradient, steps = np.zeros_like(weights), 0
    observation = np.asarray(x.timesteps.observation[t, b], np.float64)
    pi = softmax(observation @ weights)
    action = int(x.outputs.action[t, b])
    found.append(float(np.log(pi[action])))
    if kind == LAST:
      episodes += 1
      continue
    d_log = np.eye(len(pi))[action] - pi
    d_entropy = -pi * (np.log(pi) + -np.sum(pi * np.log(pi)))
    trace = trace + np.outer(observation, d_log)
    gradient = gradient + learning.policy_entropy_cost * np.outer(observation, d_entropy)
  return found


def test_policies_learn_by_reinforce_on_the_intrinsic_reward_alone() -> None:
  learning, params, (first, second) = lived()
  whole = joined(first, second)
  relive = reliving()
  _, raw, _, log_prob, _ = relive(params, whole)
  reward = jnp.tanh(raw)
  assert np.abs(reward).max() > 0.05
  on_host = jax.device_get(whole)
  for b in range(B):
    expected = slow_log_probs(learning, on_host, np.asarray(reward, np.float64), b)
    np.testing.assert_allclose(log_prob[:, b], expected, rtol=1e-3, atol=2e-4)
  scaled = jax.tree.map(jnp.zeros_like, params.reward)
  still = relive(IntrinsicParams(scaled, params.value), whole)
  assert not np.any(still[1]) and not np.allclose(still[3], log_prob, atol=1e-3)


def test_the_reward_remembers_across_episodes_and_not_across_lifetimes() -> None:
  _, params, (first, second) = lived()
  whole = joined(first, second)
  begins, reward, value, *_ = reliving()(params, whole)
  b = 0
  opens = np.flatnonzero(np.asarray(whole.timesteps.step_type)[:, b] == FIRST)
  start = opens[2]  # of the second lifetime
  assert begins[start, b] and opens[3] < opens[4]
  changed = whole.timesteps.reward.at[start + 1, b].add(1.0)
  other = whole._replace(timesteps=whole.timesteps._replace(reward=changed))
  _, reward_2, value_2, *_ = reliving()(params, other)
  for one, two in ((reward, reward_2), (value, value_2)):
    differs = np.abs(np.asarray(one - two))[:, b] > 1e-7
    assert differs[opens[3] : opens[4]].all()  # the next episode
    assert not differs[:start].any() and not differs[opens[4] :].any()
    assert not np.any((one - two)[:, 1:])


# --- what is learned ------------------------------------------------------------------------------------


def slow_advantages(learning: Intrinsic, x: Trajectory, begins: Any, value: Any, b: int) -> Any:
  """Forward views: the mixture of n-step returns, each written out."""
  t, found = x.timesteps, []
  length = t.reward.shape[0] - 1
  kinds = np.asarray(t.step_type)[:, b]

  def discount(u: int) -> float:  # from timestep u to the next one
    if learning.objective == 'episode':
      return learning.discount * float(t.discount[u + 1, b])
    return 0.0 if begins[u + 1, b] else (1.0 if kinds[u] == LAST else learning.discount)

  for start in range(length):
    end = length
    if learning.objective == 'episode':
      end = next((u for u in range(start + 1, length) if kinds[u] == LAST), length)
    returns, total, factor = [], 0.0, 1.0
    for u in range(start, end):
      total += factor * float(t.reward[u + 1, b])
      factor *= discount(u)
      returns.append(total + factor * float(value[u + 1, b]))
    weights = [(1 - learning.lambda_) * learning.lambda_**n for n in range(len(returns) - 1)]
    weights.append(learning.lambda_ ** (len(returns) - 1))
    found.append(np.dot(weights, returns) - float(value[start, b]))
  return np.array(found)


@pytest.mark.parametrize('objective', slow_after(1, 'lifetime', 'episode'))
def test_returns_are_of_the_lifetime_or_of_the_episode(objective: Any) -> None:
  learning = agent(objective=objective, discount=0.8, lambda_=0.7)
  _, params, (first, _) = lived()
  begins, _, value, *_ = reliving()(params, first)
  noise = np.random.default_rng(0).normal(size=(T + 1, B)).astype(np.float32)
  first = jax.device_get(first)
  reward = np.where(first.timesteps.first, np.float32(0), noise)
  noisy = first._replace(timesteps=first.timesteps._replace(reward=reward))
  found = np.asarray(contract.quick_jit(learning.advantages)(noisy.timesteps, begins, value))
  mask = np.asarray(first.timesteps.step_type[:-1]) != LAST
  for b in range(B):
    expected = slow_advantages(learning, noisy, np.asarray(begins), np.asarray(value), b)
    counts = mask[:, b] if objective == 'episode' else slice(None)
    np.testing.assert_allclose(found[counts, b], expected[counts], rtol=1e-4, atol=1e-5)


def test_the_meta_gradient_against_differences() -> None:
  """Through all updates of an unroll, in float64, along random directions of the reward's parameters."""
  learning, params, (first, _) = lived()
  rng, first = np.random.default_rng(5), jax.device_get(first)
  noise = np.where(first.timesteps.first, 0, rng.normal(size=(T + 1, B))).astype(np.float32)
  first = first._replace(timesteps=first.timesteps._replace(reward=noise))
  with jax.enable_x64(True):
    params, first = jax.tree.map(
      lambda x: np.float64(x) if x.dtype == np.float32 else np.asarray(x), (params, first)
    )

    @jax.jit
    def outcome(reward: Any) -> Any:  # and its gradient, in one program to compile
      def of(reward: Any) -> Any:
        return learning.loss(IntrinsicParams(reward, params.value), first)[1]['policy_loss']

      return jax.value_and_grad(of)(reward)

    gradient = jax.device_get(outcome(params.reward)[1])
    for _ in range(3):
      along = jax.tree.map(lambda x: rng.normal(size=x.shape), params.reward)
      forth, back = (
        float(outcome(jax.tree.map(lambda x, d, h=h: x + h * d, params.reward, along))[0])
        for h in (1e-5, -1e-5)
      )
      found = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(along)))
      assert abs(found) > 1e-5
      np.testing.assert_allclose(found, (forth - back) / 2e-5, rtol=1e-4)


def test_the_value_is_learned_by_its_own_loss_and_the_reward_by_the_other() -> None:
  learning, params, (first, _) = lived()

  @contract.quick_jit
  def gradients(params: IntrinsicParams) -> Any:
    def losses(params: IntrinsicParams) -> Any:
      metrics = learning.loss(params, first)[1]
      return metrics['policy_loss'], metrics['value_loss']

    _, pull = jax.vjp(losses, params)
    return [pull(tuple(row))[0] for row in jnp.eye(2)]

  policy, value = jax.device_get(gradients(params))
  assert not any(np.any(x) for x in jax.tree.leaves((policy.value, value.reward)))
  assert all(np.any(x) for x in jax.tree.leaves(value.value))


def test_large_rewards_cost() -> None:
  learning, params, (first, _) = lived()
  raw = reliving()(params, first)[1]
  totals = [
    float(contract.quick_jit(dataclasses.replace(learning, reward_cost=c).loss)(params, first)[0])
    for c in (0.0, 0.5)
  ]
  np.testing.assert_allclose(totals[1] - totals[0], 0.5 * np.mean(np.square(raw)), rtol=1e-3)


def test_what_is_done_at_last_is_ignored() -> None:
  learning, params, (first, _) = lived()
  loss = contract.quick_jit(learning.loss)
  last = np.asarray(first.timesteps.step_type[:-1]) == LAST
  action = jnp.where(last, (first.outputs.action + 1) % 4, first.outputs.action)
  other = first._replace(outputs=first.outputs._replace(action=action))
  assert last.any()
  for x, y in zip(*(jax.tree.leaves(loss(params, w)) for w in (first, other)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_devices_learn_the_same_together() -> None:
  env = make(WORLD)
  learning, many = agent(), batch(env, 4)
  train = learning.init(jax.random.key(1))
  state = unroll.begin(learning, many, jnp.arange(4, dtype=jnp.int32), jax.random.key(0))
  _, x = contract.quick_jit(
    lambda s: unroll.unroll(learning, many, train.params, s, jax.random.key(2), T)
  )(state)
  found = []
  for devices in (1, 2):
    step = contract.quick_jit(learner(learning, on_policy(), topology.learner_mesh(devices)))
    after = train
    for i in range(2):
      after, _, metrics, _ = step(after, (), x, jax.random.key(i), jnp.int32(i))
    found.append((after, metrics))
  for one, two in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_one_all_reduce_and_nothing_else_between_devices() -> None:
  program = Anakin(agent(), make(WORLD), on_policy(), topology.learner_mesh(4), 4, T)
  text = program.run.lower(program.shapes, jnp.int32(1)).compile().as_text()
  assert text.count(' all-reduce(') + text.count(' all-reduce-start(') == 1
  for other in ('all-gather', 'collective-permute', 'all-to-all', 'reduce-scatter'):
    assert f' {other}(' not in text


@pytest.mark.slow
def test_a_reward_is_learned_that_makes_policies_find_the_best_object() -> None:
  """Policies that begin as nothing get 0.0 of an episode in Random ABC on average if they learn nothing."""
  env = make('podrace:random_abc,episodes=20')
  learning = bind(Intrinsic(learning_rate=3e-3), env)
  program = Anakin(learning, env, on_policy(), topology.learner_mesh(1), 64, 64)
  state = program.run(program.init(jax.random.split(jax.random.key(0), 1)), jnp.int32(150))
  _, state = program.read_log(state)
  log, _ = program.read_log(program.run(state, jnp.int32(50)))
  assert float(log['return_sum'] / log['episodes']) > 0.15


# --- bad input ------------------------------------------------------------------------------------------


def test_lengths_of_lifetimes_agree() -> None:
  assert agent().lifetime == 2 and agent(episodes=2).lifetime == 2
  assert agent('podrace:catch', episodes=7).lifetime == 7
  assert agent('podrace:catch').lifetime == 0
  with pytest.raises(UsageError, match=r'--agent.episodes 3.*2'):
    _ = agent(episodes=3).lifetime


@pytest.mark.slow
def test_lifetimes_without_end() -> None:
  env = 'podrace:empty_rooms,size=5,steps=3,episodes=0'
  _, params, (first, second) = lived(env)
  assert not reliving(env)(params, joined(first, second))[0].any()
  assert (np.asarray(second.agent_state.episode) >= 6).all()


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--env', 'gymnax:Pendulum-v1'], 'intrinsic .*gymnax:Pendulum-v1'),
    (['--env', WORLD, '--agent.episodes', '9'], '--agent.episodes 9'),
    (['--env', WORLD, '--agent.policy.core', 'gru'], 'memory'),
    (['--env', WORLD, '--agent.period', '0'], 'period .*1.*0'),
  ],
)
def test_what_cannot_be(args: list[str], message: str, tmp_path: Any, capsys: Any) -> None:
  with pytest.raises(SystemExit) as left:
    cli.main(['train', '--agent', 'intrinsic', '--run-dir', str(tmp_path / 'run'), *args])
  assert left.value.code == 2
  assert re.search(message, ' '.join(capsys.readouterr().err.split()))


def test_policies_are_for_discrete_actions() -> None:
  box = spaces.Box(-1, 1, (2,))
  with pytest.raises(ValueError, match='Discrete'):
    Policy().bind(box, box)
  hidden = dataclasses.replace(agent(), policy=Policy(hidden=(4,)).bind(box, spaces.Discrete(2)))
  assert len(jax.tree.leaves(hidden.policy.init(jax.random.key(0)))) == 3
