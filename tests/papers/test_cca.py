"""Counterfactual credit assignment: losses against NumPy, their stops, the effect, and runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cca
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streams
from resumes import assert_resumes_exactly

import podrace
from podrace.envs.contract import check
from podrace.learner import learner
from podrace.replay import on_policy
from podrace.topology import learner_mesh
from podrace.types import ActorOutput, TimeStep, Trajectory

T, B, N, ACTIONS = 7, 4, 3, 3
SPACES = gymnasium.spaces.Box(-9.0, 9.0, (N,)), gymnasium.spaces.Discrete(ACTIONS)
NETWORK = cca.CCA().network.bind(*SPACES)


def agent_of(**settings: Any) -> Any:
  return cca.CCA(network=NETWORK, size=8, entropy_cost=0.3, independence=2.0, **settings)


def learned(agent: Any) -> tuple[Any, Any]:
  """Returns parameters of the policy and of the models, without zeros."""
  train = jax.jit(agent.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: np.asarray(x) + rng.normal(0.0, 0.2, x.shape).astype('f'),
    (train.params, train.rest[0]),
  )


def random_trajectory() -> Trajectory:
  rng = np.random.default_rng(2)
  steps = TimeStep(*jax.tree.map(jnp.asarray, streams.timesteps(rng, T + 1, B, streams.floats(N))))
  action = jnp.asarray(rng.integers(0, ACTIONS, (T, B)))
  return Trajectory(steps, ActorOutput(action), (), jnp.arange(B))


TRAJECTORY = random_trajectory()


def log_softmax(logits: Any) -> np.ndarray:
  logits = np.asarray(logits, np.float64)
  return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def returns(agent: Any, steps: Any, t: int, b: int) -> float:
  """The sum of rewards to the end of the episode, or of the unroll."""
  total = 0.0
  for k in range(t + 1, T + 1):
    total += agent.discount ** (k - t - 1) * steps.reward[k, b]
    if steps.last[k, b]:
      break
  return total


def reference(agent: Any, policy: Any, models: Any) -> dict[str, float]:
  """The losses in NumPy, one transition after the other, from the outputs of the networks."""
  steps = jax.tree.map(np.asarray, TRAJECTORY.timesteps)
  action, x = np.asarray(TRAJECTORY.outputs.action), steps.observation
  output, _ = jax.jit(agent.network.unroll)(policy, (), TRAJECTORY.timesteps)
  log_pi, value = log_softmax(output.policy), np.asarray(output.value)
  losses = dict.fromkeys(('value', 'policy', 'classifier', 'hindsight', 'independence'), 0.0)
  weights = jax.tree.map(lambda x: np.asarray(x, np.float64), models['params'])
  phi = phi_of(weights, steps, action)
  v = pair(weights['baseline'], x[:-1], phi)[..., 0]
  for t, b in np.argwhere(~steps.last[:-1]):
    a, g, r, credit = (
      action[t, b],
      returns(agent, steps, t, b),
      steps.reward[t + 1, b],
      np.zeros(ACTIONS),
    )
    losses['value'] += ((r if agent.credit == 'hca' else g) - value[t, b]) ** 2
    losses['hindsight'] += (g - v[t, b]) ** 2
    if agent.credit == 'cca':
      log_h = log_softmax(log_pi[t, b] + pair(weights['classifier'], x[t, b], phi[t, b]))
      losses['classifier'] -= log_h[a]
      losses['independence'] += 2.0 * divergence(agent, log_pi[t, b], log_h, a)
    k = t
    while agent.credit == 'hca' and k + 1 < T and not steps.last[k + 1, b]:
      k += 1
      log_h = log_softmax(log_pi[t, b] + pair(weights['classifier'], x[t, b], x[k, b]))
      losses['classifier'] -= log_h[a] / T
      weight = agent.discount ** (k - t)
      credit += weight * (np.exp(log_h - log_pi[t, b]) - 1) * steps.reward[k + 1, b]
    baseline = dict(cca=v, advantage=value, hca=value, reinforce=np.zeros([T, B]))[agent.credit]
    advantage = (r if agent.credit == 'hca' else g) - baseline[t, b]
    pi = np.exp(log_pi[t, b])
    losses['policy'] -= log_pi[t, b, a] * advantage + np.sum(pi * (credit - 0.3 * log_pi[t, b]))
  return {name: loss / (T * B) for name, loss in losses.items()}


def divergence(agent: Any, log_pi: np.ndarray, log_h: np.ndarray, a: int) -> float:
  if agent.divergence == 'kl':
    return float(np.sum(np.exp(log_pi) * (log_pi - log_h)))
  return float(log_h[a] - log_pi[a])


def dense(p: Any, x: np.ndarray) -> np.ndarray:
  return x @ p['kernel'] + p.get('bias', 0.0)


def pair(p: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  hidden = np.maximum(dense(p['Dense_0'], x) + dense(p['Dense_1'], y), 0.0)
  return dense(p['Dense_3'], np.maximum(dense(p['Dense_2'], hidden), 0.0))


def phi_of(weights: Any, steps: Any, action: np.ndarray) -> np.ndarray:
  """Phi, for each transition from the end of its episode back to it."""
  p, phi = weights['cell'], np.zeros([T, B, 2])
  for t, b in np.argwhere(~steps.last[:-1]):
    end = t
    while end + 1 < T and not steps.last[end + 1, b]:
      end += 1
    h = np.zeros(8)
    for k in range(end, t - 1, -1):
      taken, reward = np.eye(ACTIONS)[action[k, b]], steps.reward[k + 1, b, None]
      x = np.concatenate([steps.observation[k, b], taken, reward, steps.observation[k + 1, b]])
      r, z = (1 / (1 + np.exp(-dense(p[f'i{g}'], x) - dense(p[f'h{g}'], h))) for g in 'rz')
      h = z * h + (1 - z) * np.tanh(dense(p['in'], x) + r * dense(p['hn'], h))
    phi[t, b] = dense(weights['head'], h)
  return phi


@pytest.mark.parametrize(
  'settings',
  [dict(credit=c) for c in ('cca', 'hca')]
  + [
    pytest.param(x, marks=pytest.mark.slow)
    for x in (
      *(dict(credit=c) for c in ('advantage', 'reinforce')),
      dict(divergence='kl'),
      *(dict(discount=0.8, credit=c) for c in ('cca', 'hca')),
    )
  ],
  ids=lambda x: '-'.join(map(str, x.values())),
)
def test_losses_against_numpy(settings: Any) -> None:
  agent = agent_of(**settings)
  policy, models = learned(agent)
  assert TRAJECTORY.timesteps.last[1:-1].any()
  actual = jax.jit(agent.losses)(policy, models, TRAJECTORY)
  expected = reference(agent, policy, models)
  assert actual.keys() >= {'value', 'policy'}
  for name, value in actual.items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, err_msg=name)


PARTS = ('policy_head', 'value_head', 'cell', 'head', 'baseline', 'classifier')


@pytest.mark.slow
def test_each_loss_trains_its_own_part() -> None:
  """The stop_gradients: a gradient is 0 in all other parts."""
  trains = dict(
    policy={'policy_head'}, value={'value_head'}, hindsight={'cell', 'head', 'baseline'},
    classifier={'classifier'}, independence={'cell', 'head'},
  )  # fmt: skip
  agent = agent_of()
  both = learned(agent)
  grads = jax.jit(jax.jacrev(lambda p: agent.losses(*p, TRAJECTORY)))(both)
  assert grads.keys() == trains.keys()
  for name, (policy, models) in grads.items():
    parts = policy | models['params']
    moved = {p for p in PARTS if any(np.any(g != 0) for g in jax.tree.leaves(parts[p]))}
    assert moved == trains[name], name


def test_the_entropy_cost_falls_until_half_of_a_run() -> None:
  agent = agent_of(credit='advantage', early_entropy_cost=0.4, total_updates=8)
  step = jax.jit(learner(agent, on_policy(), learner_mesh(1)))
  train = jax.jit(agent.init)(jax.random.key(0))
  policy_loss = jax.jit(lambda train, cost: dataclasses.replace(agent, entropy_cost=cost).losses(train.params, train.rest[0], TRAJECTORY)['policy'])  # fmt: skip
  for cost in (0.7, 0.6, 0.5, 0.4, 0.3, 0.3):
    expected = policy_loss(train, cost)
    train, _, metrics, _ = step(train, (), TRAJECTORY, jax.random.key(1), jnp.int32(0))
    assert float(metrics['policy']) == pytest.approx(float(expected), rel=1e-5)


def test_learning_rates_fall_to_0_over_a_run() -> None:
  agent = agent_of(credit='advantage', anneal=True, total_updates=2)
  step = jax.jit(learner(agent, on_policy(), learner_mesh(1)))
  train, moved = jax.jit(agent.init)(jax.random.key(0)), []
  for _ in range(3):
    before, (train, *_) = train, step(train, (), TRAJECTORY, jax.random.key(1), jnp.int32(0))
    change = jax.tree.map(
      lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), before.params, train.params
    )
    moved.append(max(map(float, jax.tree.leaves(change))))
  assert moved[0] == pytest.approx(3e-3, rel=0.1) and moved[2] == 0  # of the value
  assert 0 < moved[1] < 0.6 * moved[0]


@pytest.mark.parametrize('credit', ['advantage', 'hca'])
def test_advantages_do_not_train_values(credit: str) -> None:
  agent = agent_of(credit=credit)
  gradient = jax.jit(jax.grad(lambda p: agent.losses(*p, TRAJECTORY)['policy']))
  grads = jax.device_get(gradient(learned(agent)))
  untouched = grads[0]['value_head'], grads[0]['value_torso'], grads[1]
  assert all(not np.any(g) for g in jax.tree.leaves(untouched))
  assert np.any(grads[0]['policy_head']['kernel'])


@pytest.mark.slow
def test_the_gradient_of_a_bandit_has_less_variance_and_its_direction(monkeypatch: Any) -> None:
  """Without the independence loss, or with its sign swapped, the share is about 0."""
  env, sizes, _, settings = cca.TASKS['bandit']
  monkeypatch.setitem(cca.TASKS, 'bandit', (env, sizes, 300, settings))
  jax.config.update('jax_debug_key_reuse', False)  # of vmap's transpositions
  try:
    few = cca.partial(cca.gradient_moments, episodes=512)
    (moments,) = cca.run('bandit', range(100, 103), few, 1, policy_cost=0.0)
  finally:
    jax.config.update('jax_debug_key_reuse', True)
  variance, share = np.array(moments)[..., 0], np.array(moments)[..., 1]
  assert np.all(variance[:, 0] < 0.3 * variance[:, 1])
  assert np.mean(share[:, 0]) > 0.35 and np.mean(share[:, 1]) > 0.8


@pytest.mark.slow
def test_tasks_are_environments_with_exact_scores() -> None:
  for env, *_ in cca.TASKS.values():
    check(env, key=jax.random.key(0), steps=50)
  door = cca.key_to_door(6)
  state, timestep = door.reset(jax.random.key(1))
  actions = [2, 0, 0, 0, 3]  # the key, apples, the door
  for action in actions:
    assert not timestep.last
    state, timestep = door.step(state, action, jax.random.key(action))
  assert timestep.last and float(timestep.reward) == pytest.approx(0.2 * 23 / 6)
  assert float(door.infos(state)['treasure']) == 1.0
  assert float(door.dynamics.score(jnp.array([[0, 0, 0.5, 0.5], [0, 0, 0, 1.0]]))) == 0.5
  assert float(cca.bandit().dynamics.score(jnp.eye(5))) == 0.0


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path: Path) -> None:
  config = podrace.configure(
    env='python:cca.key_to_door,length=5', agent=cca.CCA(size=8), num_envs=4, unroll_length=5,
    total_steps=200, log_every=100, devices=1,
  )  # fmt: skip
  assert_resumes_exactly(config, 100, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('credit', ['cca', pytest.param('hca', marks=pytest.mark.slow)])
def test_two_devices_make_the_same_update(credit: str) -> None:
  agent, params = agent_of(credit=credit), []
  for devices in (1, 2):
    step = jax.jit(learner(agent, on_policy(), learner_mesh(devices)))
    train = jax.jit(agent.init)(jax.random.key(0))
    train, *_ = step(train, (), TRAJECTORY, jax.random.key(1), jnp.int32(0))
    params.append((train.params, train.rest[0]))
  assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-5), *params))
