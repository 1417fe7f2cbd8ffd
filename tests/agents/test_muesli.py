"""Muesli: its targets and its gradient against a slow reference, what replay gives it, and that it learns.

The reference takes one state at a time with Python loops, and is shown to differ where one rule or another is left
out. What it is compared with is the gradient that reaches the optimiser inside `learn`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streams
from gymnasium import spaces
from shorthand import slow_after
from test_muzero import (
  BINS,
  A,
  F,
  Matrices,
  difference,
  network_of,
  quick,
  recorder,
  shared,
  step_sizes,
  two_hot,
)
from test_value_agents import anakin, assert_learns
from test_value_agents import sebulba as sebulba_of

from podrace import topology
from podrace.agents.muesli import Muesli, MuesliExtras, cmpo, sampled_cmpo
from podrace.envs import make
from podrace.learner import sample_learner
from podrace.networks import LearnedModel
from podrace.settings.agents import bind
from podrace.types import LAST, Sample, TimeStep, TrainState, Trajectory

SLOW = pytest.mark.slow
BATCH, ROOTS, U = 8, 3, 3
L = ROOTS + U
VECTOR, THREE = spaces.Box(-1, 1, (F,)), spaces.Discrete(A)
MASKED = spaces.Dict(x=VECTOR, action_mask=spaces.MultiBinary(A))


@dataclasses.dataclass(frozen=True)
class Seeing(Matrices):
  """The same model, of observations with an action mask."""

  def step(self, params: Any, state: Any, timestep: TimeStep) -> Any:
    x = timestep.observation['x']
    return super().step(params, state, timestep._replace(observation=x))


@dataclasses.dataclass(frozen=True)
class Recording(Muesli):
  def optimiser(self) -> optax.GradientTransformation:
    return recorder()


SETTINGS: dict[str, Any] = dict(
  unroll=U, discount=0.9, lambda_=0.8, policy_cost=2.0, cmpo_cost=1.3, model_cost=0.8, value_cost=0.4,
  reward_cost=0.7, clip_advantage=0.5, entropy_cost=0.6,
)  # fmt: skip


def recording(bins: int = BINS, **settings: Any) -> Recording:
  return Recording(Seeing(bins).bind(MASKED, THREE), **(SETTINGS | settings))


def ends_in_every_way(steps: TimeStep) -> bool:
  last, over = steps.step_type == LAST, steps.discount == 0
  inside = slice(1, ROOTS)
  return bool(last[0].any() and (last & over)[inside].any() and (last & ~over)[inside].any())


@functools.cache
def window_of(batch: int = BATCH) -> Trajectory:
  """A random window in which episodes end in every way, some actions are forbidden, and the policy has moved."""

  def observation(rng: Any, leading: Any) -> Any:
    mask = (rng.random((*leading, A)) < 0.6).astype(np.int8)
    mask[..., 0] |= ~mask.any(-1)
    return dict(x=rng.normal(size=(*leading, F)).astype(np.float32), action_mask=mask)

  for seed in range(1000):
    rng = np.random.default_rng(seed)
    steps = streams.timesteps(rng, L + 1, batch, observation)
    if ends_in_every_way(steps):
      break
  mask = steps.observation['action_mask'][:-1]
  action = np.argmax(mask * rng.random(mask.shape), -1).astype(np.int32)
  log_prob = np.log(rng.uniform(0.2, 0.9, action.shape)).astype(np.float32)
  return streams.trajectory(steps, action, MuesliExtras(log_prob), ())


def networks(agent: Muesli) -> tuple[Any, Any]:
  """An online network and a target network, which differ."""
  return network_of(agent, 0), network_of(agent, 1)


def sample_of(batch: Any) -> Sample:
  """Of timesteps and outputs [B, ...]."""
  t, outputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), batch)
  size = outputs.action.shape[1]
  return Sample(Trajectory(t, outputs, (), jnp.arange(size)), jnp.ones(size), jnp.arange(size))


SQUARE, KNOWN = 0.8, 0.4  # of the moving average: a variance of 2


def learned(agent: Muesli, window: Trajectory, known: float = KNOWN, square: Any = SQUARE) -> Any:
  """The state after `learn`, whose `opt_state` is the gradient, and the metrics."""
  online, target = networks(agent)
  rest = shared('rest', agent, lambda: jax.jit(agent.init)(jax.random.key(0)).rest)
  square = jnp.float32(square if known else 0)
  rest = rest._replace(target=target, square=square, weight=jnp.float32(known))
  if isinstance(agent, Recording):
    rest = rest._replace(opt_state=jax.tree.map(jnp.zeros_like, online))
  flat = jax.tree.map(lambda x: np.moveaxis(x, 1, 0), (window.timesteps, window.outputs))
  step = shared(
    'learn', agent,
    lambda: jax.jit(
      sample_learner(agent, topology.learner_mesh(1), sample_of), compiler_options=quick
    ),
  )  # fmt: skip
  train, _, metrics = jax.device_get(step(TrainState(online, rest), flat, jax.random.key(1)))
  return train, metrics


# --- the slow reference ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Stream:
  """What the target network makes of stream b, with Python's numbers; `without` leaves a rule out."""

  agent: Muesli
  target: Any
  window: Trajectory
  b: int
  without: str = ''

  def __post_init__(self) -> None:
    w, b = self.window, self.b
    self.reward, self.discount = w.timesteps.reward[:, b], w.timesteps.discount[:, b]
    self.last = w.timesteps.step_type[:, b] == LAST
    self.x = w.timesteps.observation['x'][:, b]
    self.mask = w.timesteps.observation['action_mask'][:, b].astype(bool)
    if self.without == 'mask':
      self.mask = np.ones_like(self.mask)
    self.action = w.outputs.action[:, b]
    self.mu = np.exp(w.outputs.extras.log_prob[:, b].astype(np.float64))
    states = [self.judge(t) for t in range(L + 1)]
    self.pi, self.v, self.q = (np.array(x) for x in zip(*states, strict=True))
    self.expected = np.sum(self.pi * self.q, axis=1)

  def number(self, outputs: np.ndarray) -> float:
    if self.agent.network.bins == 1:
      return float(outputs[0])
    p = np.exp(outputs) / np.exp(outputs).sum()
    y = float(p @ np.linspace(-2.0, 2.0, len(p)))
    root = math.sqrt(1 + 4 * 1e-3 * (abs(y) + 1 + 1e-3))
    return math.copysign(((root - 1) / (2 * 1e-3)) ** 2 - 1, y)

  def judge(self, t: int) -> tuple[Any, float, list[float]]:
    """The prior, the value and the value of each action."""
    n = {k: np.asarray(x, np.float64) for k, x in self.target.items()}
    hidden = np.tanh(self.x[t] @ n['r'])
    p = np.where(self.mask[t], np.exp(hidden @ n['p']), 0.0)
    q = []
    for a in range(A):
      after = np.tanh(np.concatenate([hidden, np.eye(A)[a]]) @ n['d'])
      q.append(self.number(after @ n['w']) + self.agent.discount * self.number(after @ n['v']))
    return p / p.sum(), self.number(hidden @ n['v']), q

  def trace(self, t: int) -> float:
    if self.last[t] and self.without != 'cut':
      return 0.0
    ratio = self.pi[t, self.action[t]] / self.mu[t]
    lambda_ = 1.0 if self.without == 'lambda' else self.agent.lambda_
    return lambda_ * (ratio if self.without == 'trace' else min(1.0, ratio))

  def retrace(self, t: int) -> float:
    """Equation 4 of Munos et al. (2016), as a sum of corrections."""
    q = [self.q[i, self.action[i]] for i in range(L)]
    total, decay = q[t], 1.0
    for j in range(t, L):
      gamma = self.agent.discount * self.discount[j + 1]
      total += decay * (self.reward[j + 1] + gamma * self.expected[j + 1] - q[j])
      decay *= gamma * (self.trace(j + 1) if j + 1 < L else 0.0)
    return float(total)

  def value(self, t: int) -> float:
    if self.without == 'value':
      return self.retrace(t)
    correction = self.retrace(t) - self.q[t, self.action[t]]
    return float(self.expected[t] + self.trace(t) * correction)

  def policy(self, t: int) -> Any:
    """CMPO's, of advantages that have a variance of 2."""
    advantage = (self.q[t] - self.v[t]) / (1.0 if self.without == 'scale' else math.sqrt(2.0))
    limit = math.inf if self.without == 'clip' else self.agent.clip_advantage
    prior = self.mask[t] if self.without == 'prior' else self.pi[t]
    p = prior * np.exp(np.clip(advantage, -limit, limit))
    return p / p.sum()


def script(s: Stream, t: int) -> dict[str, Any]:
  """What the model should say after each action from state t, and how much each of it counts."""
  agent, without = s.agent, s.without
  policies, values, rewards = np.zeros((U + 1, A)), np.zeros((U + 1, 2)), np.zeros((U + 1, 2))
  ended = False
  for k in range(U + 1):
    i, share = t + k, 1.0 if without == 'share' or k == 0 else 1 / U
    if s.last[t] and without != 'roots':
      break
    if k:
      rewards[k] = share * agent.reward_cost, 0.0 if ended else s.reward[i]
    if k and not ended and s.last[i]:
      ended = True
      if s.discount[i] > 0 and without != 'truncation':
        break  # nobody knows what would have come
    if ended and without == 'absorbing':
      break
    values[k] = share * agent.value_cost, 0.0 if ended else s.value(i)
    if not ended:
      policies[k] = share * (agent.model_cost if k else agent.cmpo_cost) * s.policy(i)
  counts = not s.last[t] or without == 'roots'
  advantage = (s.retrace(t) - s.v[t]) / (1.0 if without == 'scale' else math.sqrt(2.0))
  return dict(
    x=s.x[t], mask=s.mask[t], action=s.action[t : t + U + 1], mu=s.mu[t], policies=policies, values=values,
    rewards=rewards, gradient=counts * agent.policy_cost * advantage, entropy=counts * agent.entropy_cost,
    halved=1.0 if without == 'halved' else 0.5, most=math.inf if without == 'ratio' else 1.0,
  )  # fmt: skip


def number_loss(outputs: Any, cost_and_x: Any, bins: int) -> Any:
  cost, x = cost_and_x
  if bins == 1:
    return cost * 0.5 * (outputs[0] - x[0]) ** 2
  return -cost * jnp.dot(x, jax.nn.log_softmax(outputs))


def state_loss(network: Any, n: dict[str, Any], bins: int) -> Any:
  """Of one state and all that is imagined from it."""
  hidden = jnp.tanh(n['x'] @ network['r'])
  log_p = jax.nn.log_softmax(jnp.where(n['mask'], hidden @ network['p'], -1e9))
  a = n['action'][0]
  rho = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_p[a]) / n['mu'], n['most']))
  loss = -n['gradient'] * rho * log_p[a] - jnp.dot(n['policies'][0], log_p)
  loss += n['entropy'] * jnp.dot(jnp.exp(log_p), log_p)
  loss += number_loss(hidden @ network['v'], n['values'][0], bins)
  for k in range(1, U + 1):
    hidden = n['halved'] * hidden + (1 - n['halved']) * jax.lax.stop_gradient(hidden)
    code = jax.nn.one_hot(n['action'][k - 1], A)
    hidden = jnp.tanh(jnp.concatenate([hidden, code]) @ network['d'])
    loss += number_loss(hidden @ network['w'], n['rewards'][k], bins)
    loss += number_loss(hidden @ network['v'], n['values'][k], bins)
    loss -= jnp.dot(n['policies'][k], jax.nn.log_softmax(hidden @ network['p']))
  return loss


@functools.cache
def gradient_of(bins: int) -> Any:
  def loss(network: Any, scripts: Any) -> Any:
    return jnp.mean(jax.vmap(lambda n: state_loss(network, n, bins))(scripts))

  return jax.jit(jax.value_and_grad(loss), compiler_options=quick)


def reference(agent: Muesli, window: Trajectory, without: str = '') -> tuple[Any, Any]:
  """The loss of a batch and its gradient, state by state."""
  network, target = networks(agent)
  bins = agent.network.bins
  all_streams = [Stream(agent, target, window, b, without) for b in range(BATCH)]
  scripts = [script(s, t) for s in all_streams for t in range(ROOTS)]
  for n in scripts:
    for name in ('values', 'rewards'):
      code = (lambda x: np.array([x])) if bins == 1 else (lambda x: two_hot(x, bins))
      n[name] = [(cost, code(x)) for cost, x in n[name]]
  stacked = jax.tree.map(lambda *x: np.stack(x), *scripts)
  stacked = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, stacked)
  return gradient_of(bins)(network, stacked)


@functools.cache
def whole_reference(bins: int = BINS) -> tuple[Any, Any]:
  return reference(recording(bins), window_of())


@pytest.mark.parametrize('bins', [BINS, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients(bins: int) -> None:
  train, metrics = learned(recording(bins), window_of())
  loss, expected = whole_reference(bins)
  assert float(metrics['loss']) == pytest.approx(float(loss), rel=1e-5)
  assert difference(train.rest.opt_state, expected) < 3e-6


RULES = (
  'mask', 'cut', 'lambda', 'trace', 'value', 'scale', 'clip', 'prior', 'ratio', 'roots', 'share', 'halved',
  'truncation', 'absorbing',
)  # fmt: skip


@pytest.mark.parametrize(
  'rule', [r if r in ('truncation', 'absorbing') else pytest.param(r, marks=SLOW) for r in RULES]
)
def test_the_reference_differs_without_a_rule(rule: str) -> None:
  """So that the test above can fail: by fifty times its tolerance and more."""
  assert difference(whole_reference()[1], reference(recording(), window_of(), rule)[1]) > 1.5e-4


# --- the parts of the loss ------------------------------------------------------------------------------


def test_cmpo_stays_close_to_the_prior() -> None:
  """Its total variation is at most tanh(c / 2), which a prior against all advantages reaches."""
  rng = np.random.default_rng(0)
  for limit in (0.3, 1.0, 2.0):
    prior = rng.normal(size=(500, 6)).astype(np.float32) * 2
    advantage = rng.normal(size=(500, 6)).astype(np.float32) * 5
    found = np.asarray(jax.jit(cmpo)(prior, advantage, limit))
    expected = np.exp(prior) * np.exp(np.clip(advantage, -limit, limit))
    np.testing.assert_allclose(found, expected / expected.sum(-1, keepdims=True), rtol=1e-5)
    distance = 0.5 * np.abs(found - jax.nn.softmax(prior)).sum(-1)
    assert float(distance.max()) <= math.tanh(limit / 2) + 1e-6
    against = cmpo(jnp.array([-limit / 2, limit / 2]), jnp.array([9.0, -9.0]), limit)
    assert float(against[0]) == pytest.approx(1 / (1 + math.exp(-limit)), rel=1e-5)
    assert float(against[0]) - 1 / (1 + math.exp(limit)) == pytest.approx(math.tanh(limit / 2))


def test_the_normaliser_leaves_one_out() -> None:
  advantage = [0.3, -4.0, 0.9, 2.5, -0.2]
  found = sampled_cmpo(jnp.array(advantage), 1.0)
  size = [math.exp(max(-1.0, min(1.0, x))) for x in advantage]
  for k in range(5):
    z = (1 + sum(size[i] for i in range(5) if i != k)) / 5
    assert float(found[k]) == pytest.approx(size[k] / z / 5, rel=1e-5)


def test_samples_make_the_same_policy_as_all_actions() -> None:
  """With many of them: values, the policy, and so the targets; and never a forbidden action."""
  agent = recording()
  many = dataclasses.replace(agent, sampled_actions=4000)
  _, target = networks(agent)

  def made(agent: Muesli) -> Any:
    make = jax.jit(agent.targets, compiler_options=quick)
    return jax.device_get(make(target, window_of(), jnp.float32(0.7), jax.random.key(0)))

  exact, sampled = made(agent), made(many)
  np.testing.assert_allclose(sampled.policy, exact.policy, atol=0.04)
  np.testing.assert_allclose(sampled.value, exact.value, atol=0.06)
  np.testing.assert_allclose(sampled.advantage, exact.advantage, atol=0.06)
  forbidden = window_of().timesteps.observation['action_mask'][:-1] == 0
  assert not exact.policy[forbidden].any() and not sampled.policy[forbidden].any()
  noisy = made(dataclasses.replace(agent, sampled_actions=2))
  assert np.isfinite(noisy.policy).all() and np.abs(noisy.policy - exact.policy).max() > 0.1


def test_advantages_have_a_moving_variance() -> None:
  """Of valid steps, with the share of its beginning taken out; and what a batch adds counts from the next one on."""
  agent, window = recording(), window_of()
  all_streams = [Stream(agent, networks(agent)[1], window, b) for b in range(BATCH)]
  valid = [(s.retrace(t) - s.v[t]) ** 2 for s in all_streams for t in range(ROOTS) if not s.last[t]]
  train, metrics = learned(agent, window)
  assert float(metrics['advantage_std']) == pytest.approx(math.sqrt(2.0))
  assert float(train.rest.square) == pytest.approx(0.99 * SQUARE + 0.01 * np.mean(valid), rel=1e-5)
  assert float(train.rest.weight) == pytest.approx(0.99 * KNOWN + 0.01, rel=1e-5)
  train, metrics = learned(agent, window, known=0.0)
  assert float(metrics['policy_loss']) == 0.0
  assert float(train.rest.square / train.rest.weight) == pytest.approx(np.mean(valid), rel=1e-5)


def test_the_first_rewards_are_not_divided_by_rounding() -> None:
  """After batches without advantages, the policy's gradient is by 1 / sqrt(1 - decay) of the advantages' size."""
  agent = Muesli()
  size = jnp.float32(0.3)
  scale = agent.limit_scale(jnp.float32(1e6), jnp.square(size))
  assert float(scale * size) == pytest.approx(10.0, rel=1e-4)
  assert float(agent.limit_scale(jnp.float32(0.7), jnp.square(size))) == pytest.approx(0.7)
  assert (
    float(agent.limit_scale(jnp.float32(0.0), jnp.square(size))) == 0.0
  )  # the first batch of all
  nothing = float(agent.limit_scale(jnp.float32(1e6), jnp.float32(0)))
  assert nothing == pytest.approx(1e6, rel=1e-4)
  only = recording(cmpo_cost=0.0, model_cost=0.0, reward_cost=0.0, value_cost=0.0)
  gradient = {
    square: learned(only, window_of(), square=square)[0].rest.opt_state
    for square in (SQUARE, 1e-12)
  }
  sizes = [float(optax.global_norm(x)) for x in gradient.values()]
  assert sizes[0] < sizes[1] < 30 * sizes[0]  # and not a million times as large


def test_the_target_network_follows() -> None:
  agent = Muesli(**vars(recording()))  # one that learns
  online, target = networks(agent)
  train, _ = learned(agent, window_of())
  moved = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, target, train.params)
  assert difference(train.rest.target, moved) < 1e-6
  assert difference(train.params, online) > 1e-4


def test_steps_are_clipped() -> None:
  """After a thousand gradients of 0, Adam would move more than twice as far as the learning rate."""
  params, moves = {'w': jnp.zeros(2)}, {}
  gradients = np.zeros((1001, 2), np.float32)
  gradients[-1] = 1e3, -1e3
  for limit in (1.0, 10.0):
    optimiser = Muesli(learning_rate=0.1, max_update=limit).optimiser()

    def step(state: Any, gradient: Any, optimiser: Any = optimiser) -> Any:
      updates, state = optimiser.update({'w': gradient}, state, params)
      return state, updates['w']

    _, updates = jax.lax.scan(step, optimiser.init(params), gradients)
    moves[limit] = updates[-1].tolist()
  assert moves[1.0] == pytest.approx([-0.1, 0.1])
  assert abs(moves[10.0][0]) == pytest.approx(0.25, rel=0.1)


def test_the_learning_rate_is_annealed_over_the_run() -> None:
  """As many gradients as the run has: 10 updates of 8 windows, each learned from 4 times, 16 at a time."""
  agent = Muesli(
    anneal_learning_rate=True, batch_size=16, total_updates=10, total_envs=8, learning_rate=1.0
  )
  np.testing.assert_allclose(step_sizes(agent, 21), 1 - np.arange(21) / 20, atol=1e-4)


def test_the_learning_rate_of_more_gradients_than_i32_counts() -> None:
  agent = Muesli(anneal_learning_rate=True, total_updates=2**27, total_envs=4096, learning_rate=0.5)
  assert step_sizes(agent, 1) == [pytest.approx(0.5, rel=1e-4)]


def test_forbidden_actions_are_never_taken() -> None:
  agent = recording()
  observation = jax.tree.map(lambda x: x[0], window_of(64).timesteps.observation)
  t = TimeStep(observation, *(np.zeros(64, np.float32) for _ in range(3)))
  for greedy in (False, True):
    actor = dataclasses.replace(agent, greedy=greedy)
    acted = jax.jit(actor.act)(networks(agent)[0], (), t, jax.random.key(0))
    output, _ = jax.device_get(acted)
    assert observation['action_mask'][np.arange(64), output.action].all()
    assert np.isfinite(output.extras.log_prob).all()


@pytest.mark.slow
def test_a_batch_is_learned_from_alike_on_several_devices() -> None:
  agent = Muesli(**vars(recording()))
  online, target = networks(agent)
  rest = jax.jit(agent.init)(jax.random.key(0)).rest._replace(
    target=target, square=jnp.float32(SQUARE), weight=jnp.float32(KNOWN)
  )
  window = window_of()
  flat = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (window.timesteps, window.outputs))

  def found(devices: int) -> Any:
    step = sample_learner(agent, topology.learner_mesh(devices), sample_of)
    return jax.device_get(
      jax.jit(step, compiler_options=quick)(TrainState(online, rest), flat, jax.random.key(1))
    )

  (one, _, metrics), (four, _, others) = found(1), found(4)
  assert difference(one.params, four.params) < 2e-6
  assert float(one.rest.square) == pytest.approx(float(four.rest.square), rel=1e-5)
  assert {k: float(x) for k, x in metrics.items()} == pytest.approx(
    {k: float(x) for k, x in others.items()}, rel=1e-4, abs=1e-5
  )


# --- what replay gives ------------------------------------------------------------------------------------


@pytest.mark.parametrize('share', slow_after(1, 0.75, 0.0, 0.5))
def test_a_share_of_a_batch_is_from_replay(share: float) -> None:
  """In the long run; every window is learned from as often, and nearly all while they are new."""
  envs, length, capacity = 8, 4, 2048
  agent = dataclasses.replace(
    recording(), replay_share=share, capacity=capacity, batch_size=8, min_size=envs * 8
  )
  replay = agent.memory(envs, length)
  steps = TimeStep(*(np.zeros((length + 1, envs), x) for x in (np.float32, 'f4', 'f4', np.int8)))
  action = np.zeros((length, envs), np.int32)
  example = streams.trajectory(steps, action, MuesliExtras(steps.reward[1:]), ())
  example = jax.tree.map(jnp.asarray, example)

  def update(memory: Any, i: Any) -> Any:
    serial = jnp.broadcast_to(i * envs + jnp.arange(envs)[None], (length + 1, envs))
    t = example.timesteps._replace(observation=serial.astype(jnp.float32))
    memory = replay.add(memory, example._replace(timesteps=t))

    def once(carry: Any, key: Any) -> Any:
      memory, _ = carry
      sample = replay.sample(memory, key)
      memory = replay.update(memory, sample.index, jnp.ones_like(sample.weight))
      return (memory, sample.weight), sample.trajectory.timesteps.observation[0]

    times = round(1 / (1 - share))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i), times)
    (memory, weight), found = jax.lax.scan(once, (memory, jnp.zeros(8)), keys)
    return memory, (found, weight, replay.times(i))

  run = jax.jit(lambda m: jax.lax.scan(update, m, jnp.arange(600)), compiler_options=quick)
  _, (found, weight, times) = jax.device_get(run(replay.init(example)))
  assert times[300] == round(1 / (1 - share)) and (weight == 1).all()
  seen, fresh = set[float](), []
  for batch in found[100:].reshape(-1, 8):
    fresh.append(np.mean([x not in seen for x in batch]))
    seen |= set(batch.tolist())
  assert np.mean(fresh[len(fresh) // 4 :]) == pytest.approx(1 - share, abs=0.1 if share else 0.4)
  later = [x for x in range(200 * envs, 500 * envs) if float(x) in seen]
  assert len(later) / (300 * envs) > (0.9 if share else 0.6)


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('make_agent', 'message'),
  [
    (lambda: Muesli(replay_share=1.0), r'replay_share.*0.*1.*1.0'),
    (lambda: Muesli(unroll=0), r'unroll.*1.*0'),
    (lambda: Muesli(sampled_actions=1), r'sampled_actions.*0.*1'),
    (lambda: Muesli(cmpo_cost=-1.0), r'cmpo_cost.*0.*-1'),
    (lambda: Muesli(lambda_=1.5), r'lambda.*\[0.*1\].*1.5'),
    (lambda: Muesli(capacity=100).memory(32, 8), r'min_size 1000.*100'),
    (lambda: Muesli(capacity=1000).memory(64, 32), r'1000.*64 env'),
    (
      lambda: bind(Muesli(), make('gymnax:Pendulum-v1')),
      r'muesli.*Discrete.*Box',
    ),
  ],
)  # fmt: skip
def test_bad_input(make_agent: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make_agent()


# --- it learns ---------------------------------------------------------------------------------------------

CATCH = Muesli(
  LearnedModel(
    hidden=(64,), latent=32, dynamics_hidden=(64,), head_hidden=(32,), bins=21, v_min=-2, v_max=2
  ),
  capacity=20_000,
  min_size=1_000,
  unroll=3,
  learning_rate=1e-3,
)


@SLOW
@pytest.mark.parametrize('devices', [1, 8])
def test_it_learns_catch(devices: int) -> None:
  """A random player has -0.6."""
  assert_learns(anakin(CATCH, 'podrace:catch', devices, 32, 8), 150, 40, least=500, above=0.9)


@SLOW
@pytest.mark.parametrize(
  'settings',
  [
    dict(sampled_actions=2),
    dict(replay_share=0.0),
    dict(cmpo_cost=0.0),
    dict(policy_cost=0.0),
    dict(model_cost=0.0),
    dict(network=dataclasses.replace(CATCH.network, bins=1)),
  ],
  ids=lambda s: ', '.join(s),
)
def test_its_settings_learn_catch(settings: Any) -> None:
  agent = dataclasses.replace(CATCH, **settings)
  updates = {'replay_share': 600, 'policy_cost': 900}.get(next(iter(settings)), 300)
  assert_learns(anakin(agent, 'podrace:catch', 1, 32, 8), updates, 40, least=500, above=0.8)


@SLOW
@pytest.mark.parametrize(('lag', 'host_replay'), [('0', False), ('async', False), ('1', True)])
def test_it_learns_catch_under_sebulba(lag: str, host_replay: bool) -> None:
  program = sebulba_of(CATCH, 'podrace:catch', '0', '1', 2, 32, 8, lag=lag, host_replay=host_replay)
  assert_learns(program, 250, 40, least=500, above=0.9)


@SLOW
@pytest.mark.parametrize('core', ['gru', 'lstm'])
def test_it_remembers_with_a_core(core: Any) -> None:
  network = dataclasses.replace(CATCH.network, hidden=(32,), core=core, core_size=32)
  agent = dataclasses.replace(CATCH, network=network)
  assert_learns(anakin(agent, 'podrace:memory,length=5', 1, 32, 14), 300, 40, least=500, above=0.85)
