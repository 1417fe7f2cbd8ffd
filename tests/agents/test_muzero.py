"""MuZero: its losses against a slow reference, its search against value iteration, and that it learns.

The reference takes one state at a time with Python loops, and is shown to differ where one rule or another is left
out. What it is compared with is the gradient that reaches the optimiser inside `learn`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import unittest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pytest
import streams
from gymnasium import spaces
from jax.sharding import PartitionSpec as P
from shorthand import Capture, slow_after
from test_value_agents import TINY_MODEL, anakin, assert_learns
from test_value_agents import sebulba as sebulba_of

from podrace import cli, distributions, returns, topology
from podrace.agents import search as searching
from podrace.agents.muesli import Muesli
from podrace.agents.muzero import MuZero, MuZeroExtras
from podrace.agents.search import MuZeroParams, Plan
from podrace.errors import UsageError
from podrace.hooks import greedily
from podrace.networks import LearnedModel, Prediction
from podrace.networks.planning import decode, encode, features, scale_hidden
from podrace.networks.protocol import unroll_merged
from podrace.replay import Buffer
from podrace.run.loop import train
from podrace.settings.config import Config
from podrace.settings.record import from_json, to_json
from podrace.types import LAST, Sample, TimeStep, TrainState, Trajectory

SLOW = pytest.mark.slow
A, F, H, BINS = 3, 2, 4, 5
BATCH = 5
VECTOR = spaces.Box(-1, 1, (F,))
quick = {'xla_backend_optimization_level': 0}


# --- a model of one's own: matrices ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Matrices:
  """A `Model` by hand, so small that a reference can be written for it."""

  bins: int = BINS
  observation_space: Any = None
  action_space: Any = None

  def bind(self, observation_space: Any, action_space: Any) -> Matrices:
    return dataclasses.replace(self, observation_space=observation_space, action_space=action_space)

  @property
  def distribution(self) -> Any:
    return distributions.for_space(self.action_space)

  @property
  def support(self) -> Any:
    return None if self.bins == 1 else jnp.linspace(-2.0, 2.0, self.bins)

  def example(self) -> TimeStep:
    zero = jnp.zeros([1])
    return TimeStep(jnp.zeros([1, F]), zero, zero + 1, jnp.zeros([1], jnp.int8))

  def init(self, key: Any) -> Any:
    n, outputs = self.distribution.size, self.bins
    shapes = dict(r=(F, H), d=(H + n, H), w=(H, outputs), p=(H, n), v=(H, outputs))
    keys = jax.random.split(key, len(shapes))
    return {k: 0.7 * jax.random.normal(keys[i], s) for i, (k, s) in enumerate(shapes.items())}

  def initial_state(self, batch_size: int) -> Any:
    return ()

  def step(self, params: Any, state: Any, timestep: TimeStep) -> Any:
    return jnp.tanh(timestep.observation @ params['r']), state

  def represent(self, params: Any, state: Any, timesteps: TimeStep) -> Any:
    return unroll_merged(self, params, state, timesteps)  # type: ignore[arg-type]

  def dynamics(self, params: Any, hidden: Any, action: Any) -> Any:
    code = jax.nn.one_hot(action, self.distribution.size)
    hidden = jnp.tanh(jnp.concatenate([hidden, code], axis=-1) @ params['d'])
    return hidden, hidden @ params['w']

  def predict(self, params: Any, hidden: Any) -> Prediction:
    return Prediction(hidden @ params['p'], hidden @ params['v'])


# --- the gradient, against a slow reference ------------------------------------------------------------


def recorder() -> optax.GradientTransformation:
  """An optimiser that keeps the last gradient, and moves nothing."""
  return optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
  )


@dataclasses.dataclass(frozen=True)
class Recording(MuZero):
  def optimiser(self) -> optax.GradientTransformation:
    return recorder()


SETTINGS: dict[str, Any] = dict(
  unroll=3, n_step=2, discount=0.9, value_cost=0.4, reward_cost=0.7, entropy_cost=0.1
)


def recording(bins: int = BINS, **settings: Any) -> Recording:
  return Recording(Matrices(bins).bind(VECTOR, spaces.Discrete(A)), **(SETTINGS | settings))  # type: ignore[arg-type]


def window_of(agent: MuZero, batch: int = BATCH) -> Trajectory:
  """A random window in which episodes end in every way."""
  length, inside = agent.positions, slice(1, agent.unroll)
  for seed in range(1000):
    rng = np.random.default_rng(seed)
    steps = streams.timesteps(rng, length + 1, batch, streams.floats(F))
    last, over = steps.step_type == LAST, steps.discount == 0
    if last[0].any() and (last & over)[inside].any() and (last & ~over)[inside].any():
      break
  action = rng.integers(0, A, (length, batch)).astype(np.int32)
  weights = rng.dirichlet(np.ones(A), (length, batch)).astype(np.float32)
  value = rng.normal(size=(length, batch)).astype(np.float32)
  age = np.full((length, batch), 7, np.int32)
  plan = Plan(weights, (), value, age, np.zeros((length, batch), bool))
  return streams.trajectory(steps, action, MuZeroExtras(action, plan), ())


PROGRAMS: dict[Any, Any] = {}


def shared(name: str, agent: Any, make: Any) -> Any:
  """What is made once for all agents, or networks, that are the same."""
  key = name, type(agent), repr(agent)
  if key not in PROGRAMS:
    PROGRAMS[key] = make()
  return PROGRAMS[key]


def network_of(agent: Any, seed: int = 0) -> Any:
  init = shared('init', agent.network, lambda: jax.jit(agent.network.init))
  return jax.device_get(init(jax.random.key(seed)))


def learned(agent: MuZero, window: Trajectory, weight: np.ndarray) -> Any:
  """The gradient that `learn` gives its optimiser, the priorities, and the metrics."""
  network = network_of(agent)
  rest = shared('rest', agent, lambda: jax.jit(agent.init)(jax.random.key(0)).rest)
  rest = rest._replace(opt_state=jax.tree.map(np.zeros_like, network))
  train = TrainState(MuZeroParams(network, jnp.int32(10)), rest)
  sample = Sample(window, weight, np.arange(len(weight)))

  def compiled() -> Any:
    step = jax.shard_map(
      lambda *args: agent.learn(*args),
      mesh=topology.learner_mesh(1), in_specs=P(), out_specs=(P(), P(), P()), check_vma=False,
    )  # fmt: skip
    return jax.jit(step, compiler_options=quick)

  step = shared('learn', agent, compiled)
  train, priority, metrics = jax.device_get(step(train, sample, jax.random.key(1)))
  return train.rest.opt_state, priority, metrics, network


def n_step_target(agent: MuZero, w: Trajectory, t: int, b: int) -> float:
  """Equation by equation: rewards until n steps or the episode's end, then a search's value."""
  total, discount = 0.0, 1.0
  value = w.outputs.extras.plan.value
  for i in range(1, agent.n_step + 1):
    total += discount * float(w.timesteps.reward[t + i, b])
    discount *= agent.discount * float(w.timesteps.discount[t + i, b])
    if w.timesteps.step_type[t + i, b] == LAST or i == agent.n_step:
      return total + discount * float(value[t + i, b])
  raise AssertionError


def two_hot(x: float, bins: int) -> np.ndarray:
  support = np.linspace(-2.0, 2.0, bins)
  h = math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x
  h = min(max(h, support[0]), support[-1])
  below = min(int((h - support[0]) / (support[1] - support[0])), bins - 2)
  share = (h - support[below]) / (support[1] - support[0])
  found = np.zeros(bins)
  found[below], found[below + 1] = 1 - share, share
  return found


RULES = ('halved', 'share', 'absorbing', 'truncation', 'roots', 'weights')


def reference(
  agent: MuZero, network: Any, w: Trajectory, weight: np.ndarray, without: str = ''
) -> Any:
  """The loss of a batch, state by state and action by action; `without` leaves a rule out."""
  bins, total = agent.network.bins, 0.0

  def number(outputs: Any, x: float) -> Any:
    if bins == 1:
      return 0.5 * (outputs[0] - x) ** 2
    return -jnp.dot(jnp.asarray(two_hot(x, bins), jnp.float32), jax.nn.log_softmax(outputs))

  def policy(hidden: Any, t: int, b: int) -> Any:
    log_p = jax.nn.log_softmax(hidden @ network['p'])
    entropy = -jnp.dot(jnp.exp(log_p), log_p)
    return -jnp.dot(w.outputs.extras.plan.weights[t, b], log_p) - agent.entropy_cost * entropy

  for b in range(len(weight)):
    for s in range(agent.sequence):
      loss = 0.0
      if w.timesteps.step_type[s, b] == LAST and without != 'roots':
        continue
      hidden = jnp.tanh(w.timesteps.observation[s, b] @ network['r'])
      loss += policy(hidden, s, b)
      loss += agent.value_cost * number(hidden @ network['v'], n_step_target(agent, w, s, b))
      ended = False
      for k in range(1, agent.unroll + 1):
        share = 1.0 if without == 'share' else 1 / agent.unroll
        t = s + k
        if without != 'halved':
          hidden = hidden / 2 + jax.lax.stop_gradient(hidden) / 2
        code = jnp.eye(A)[int(w.outputs.action[t - 1, b])]
        hidden = jnp.tanh(jnp.concatenate([hidden, code]) @ network['d'])
        reward = 0.0 if ended else float(w.timesteps.reward[t, b])
        loss += share * agent.reward_cost * number(hidden @ network['w'], reward)
        if not ended and w.timesteps.step_type[t, b] == LAST:
          ended = True
          if w.timesteps.discount[t, b] > 0 and without != 'truncation':
            break  # nobody knows what would have come
        if ended and without == 'absorbing':
          break
        value = 0.0 if ended else n_step_target(agent, w, t, b)
        loss += share * agent.value_cost * number(hidden @ network['v'], value)
        if not ended:
          loss += share * policy(hidden, t, b)
      total += loss * (1.0 if without == 'weights' else float(weight[b]))
  return total / (len(weight) * agent.sequence)


def difference(one: Any, other: Any) -> float:
  found = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), one, other)
  return max(jax.tree.leaves(found))


WEIGHT = np.linspace(0.4, 1.0, BATCH).astype(np.float32)


@pytest.mark.parametrize(('bins', 'sequence'), slow_after(1, (BINS, 1), (1, 2)))
def test_gradients(bins: int, sequence: int) -> None:
  agent = recording(bins, sequence=sequence)
  window = window_of(agent)
  found, priority, metrics, network = learned(agent, window, WEIGHT)
  value_and_grad = jax.value_and_grad(lambda n: reference(agent, n, window, WEIGHT))
  loss, expected = jax.jit(value_and_grad, compiler_options=quick)(network)
  assert float(metrics['loss']) == pytest.approx(float(loss), rel=1e-5)
  assert difference(found, expected) < 2e-6
  assert float(metrics['target_age']) == 3.0
  hidden = np.tanh(window.timesteps.observation @ network['r'])
  value = np.asarray(jax.jit(decode)(hidden @ network['v'], agent.network.support))
  for b in range(BATCH):
    errors = []
    for s in range(sequence):
      valid = window.timesteps.step_type[s, b] != LAST
      errors.append(valid * abs(float(value[s, b]) - n_step_target(agent, window, s, b)))
    assert priority[b] == pytest.approx(np.mean(errors), abs=1e-4)


@functools.cache
def reference_gradient(without: str) -> Any:
  agent = recording()
  window = window_of(agent)
  loss = lambda n: reference(agent, n, window, WEIGHT, without)  # noqa: E731
  return jax.jit(jax.grad(loss), compiler_options=quick)(network_of(agent))


@pytest.mark.parametrize(
  'rule', [r if r in ('absorbing', 'truncation') else pytest.param(r, marks=SLOW) for r in RULES]
)
def test_the_reference_differs_without_a_rule(rule: str) -> None:
  """So that the test above can fail: by a hundred times its tolerance and more."""
  assert difference(reference_gradient(''), reference_gradient(rule)) > 2e-4


@dataclasses.dataclass(frozen=True)
class Projected(Matrices):
  projection: int = 1

  def project(self, params: Any, hidden: Any, online: bool) -> Any:
    return hidden @ params['p'] if online else hidden[..., :A]


def test_imagined_states_are_compared_up_to_the_end_of_an_episode() -> None:
  """Not with the episode that follows in the window."""
  network = Projected(BINS).bind(VECTOR, spaces.Discrete(A))
  agent = Recording(network, consistency=1.0, sequence=2, **SETTINGS)  # type: ignore[arg-type]
  window = window_of(agent)
  _, _, metrics, params = learned(agent, window, WEIGHT)
  total, last = 0.0, np.asarray(window.timesteps.step_type == LAST)
  seen = np.tanh(window.timesteps.observation @ params['r'])
  for b in range(BATCH):
    for s in range(agent.sequence):
      hidden = seen[s, b]
      for k in range(1, agent.unroll + 1):
        if last[s : s + k, b].any():
          break
        code = np.eye(A)[int(window.outputs.action[s + k - 1, b])]
        hidden = np.tanh(np.concatenate([hidden, code]) @ params['d'])
        x, y = hidden @ params['p'], seen[s + k, b, :A]
        total += (1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y)) / agent.unroll
  mean = total / (agent.sequence * BATCH)
  assert float(metrics['consistency_loss']) == pytest.approx(mean, rel=1e-3)


def test_first_priorities_are_by_the_searches() -> None:
  agent = recording()
  window = window_of(agent)
  window = window._replace(timesteps=window.timesteps._replace(observation=()))
  found = np.asarray(jax.jit(agent.initial_priority)(window))
  for b in range(BATCH):
    value = float(window.outputs.extras.plan.value[0, b])
    valid = window.timesteps.step_type[0, b] != LAST
    expected = valid * abs(value - n_step_target(agent, window, 0, b))
    assert float(found[b]) == pytest.approx(expected, abs=1e-4)


# --- numbers and hidden states --------------------------------------------------------------------------


def test_numbers_become_two_hot_and_come_back() -> None:
  support = np.linspace(
    *np.asarray(returns.rescale(jnp.array([-30.0, 30.0]))), 21, dtype=np.float32
  )
  x = np.float32([-30.0, -7.3, -0.2, 0.0, 0.4, 12.0, 30.0, 99.0])
  to_code, to_number = jax.jit(encode), jax.jit(decode)
  code = np.asarray(to_code(x, support))
  np.testing.assert_allclose(code.sum(-1), 1, rtol=1e-5)
  assert int((code > 1e-5).sum(-1).max()) == 2
  back = to_number(np.log(code + np.float32(1e-12)), support)
  np.testing.assert_allclose(back, np.clip(x, -30, 30), rtol=1e-3, atol=1e-3)
  there = np.asarray(to_code(x, None))
  assert to_number(x[:, None], None).tolist() == there[:, 0].tolist() == x.tolist()


@pytest.mark.parametrize('low, high, most', [(-300, 300, 1e-5), (-1, 110, 1e-5), (-400, 1, 1.0)])
def test_rewards_and_values_begin_at_0(low: float, high: float, most: float) -> None:
  """The middle of the supports is 0, 30 and -107."""
  model = LearnedModel(v_min=low, v_max=high).bind(VECTOR, spaces.Discrete(A))

  @jax.jit
  def said(key: Any) -> Any:
    params = model.init(key)
    hidden, _ = model.represent(params, (), jax.tree.map(lambda x: x[None], model.example()))
    hidden, reward = model.dynamics(params, hidden[0], jnp.zeros(1, jnp.int32))
    return [(x, decode(x, model.support)) for x in (reward, model.predict(params, hidden).value)]

  for outputs, number in jax.device_get(said(jax.random.key(0))):
    assert float(np.ptp(outputs)) <= 20.001
    assert float(number[0]) == pytest.approx(0, abs=most)


def test_hidden_states_are_scaled_each_by_itself() -> None:
  x = jnp.array(np.random.default_rng(0).normal(size=(3, 2, 2, 4)), jnp.float32)
  found = scale_hidden(x)
  assert found.min(axis=(1, 2, 3)).tolist() == [0, 0, 0]
  np.testing.assert_allclose(found.max(axis=(1, 2, 3)), 1, rtol=1e-6)
  assert np.isfinite(scale_hidden(jnp.ones((2, 3)))).all()


IMAGE = spaces.Box(0, 255, (64, 64, 3), np.uint8)
BOARD = spaces.Dict(
  board=spaces.Box(0, 1, (3, 4, 2), np.float32), action_mask=spaces.Box(0, 1, (5,), np.int8)
)


@pytest.mark.parametrize(
  ('settings', 'observation', 'hidden'),
  slow_after(3,
    (dict(), spaces.Box(-1, 1, (3,)), (64,)), (dict(blocks=1, channels=8), BOARD, (3, 4, 8)),
    (dict(core='gru', core_size=6, projection=5), spaces.Box(-1, 1, (3,)), (64,)),
    (dict(torso='grid', latent=7), spaces.Box(0, 1, (10, 10, 4)), (7,)),
    (dict(torso='impala'), IMAGE, (64,)), (dict(blocks=2, channels=8), IMAGE, (4, 4, 8)),
  ),
)  # fmt: skip
def test_models_of_all_sizes(settings: Any, observation: Any, hidden: tuple[int, ...]) -> None:
  model = LearnedModel(**settings).bind(observation, spaces.Discrete(5))

  def everything(key: Any) -> Any:
    params = model.init(key)
    one = jax.tree.map(lambda x: x[None], model.example())
    h, state = model.represent(params, model.initial_state(1), one)
    after, reward = model.dynamics(params, h[0], jnp.zeros(1, jnp.int32))
    return h, after, reward, model.predict(params, after), state

  h, after, reward, said, state = jax.eval_shape(everything, jax.random.key(0))
  assert h.shape == (1, 1, *hidden) and after.shape == (1, *hidden)
  assert reward.shape == said.value.shape == (1, 51) and said.policy.shape == (1, 5)
  assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(
    lambda x: x.shape, model.initial_state(1)
  )


def test_images_are_seen_place_by_place_and_as_a_whole() -> None:
  here, there = (jnp.zeros((1, 3, 4, 2)).at[0, y, x, 1].set(5.0) for y, x in ((0, 0), (2, 3)))
  for image in (here, there):
    assert features(image)[0, -2:].tolist() == [0, 5] and features(image).shape == (1, 26)
  assert not np.array_equal(features(here), features(there))
  assert features(jnp.ones((3, 7))).shape == (3, 7)


@pytest.mark.parametrize('normalize', [True, False])
def test_a_tower_is_normalised_if_asked_and_its_heads_see_the_whole(normalize: bool) -> None:
  model = LearnedModel(blocks=1, channels=8, normalize=normalize)
  params = jax.eval_shape(model.bind(BOARD, spaces.Discrete(5)).init, jax.random.key(0))
  for tower in (params['represent_observation']['Tower_0'], params['next_hidden']):
    assert ('scale' in tower['Convolution_0']) == normalize
  kernel = params['value_head']['layers_1']['Dense_0']['kernel']
  assert kernel.shape[0] == 3 * 4 * 8 + 8  # each place's channels, and the most of each


@pytest.mark.slow
def test_dynamics_of_an_image_add_to_it() -> None:
  model = LearnedModel(blocks=1, channels=8).bind(BOARD, spaces.Discrete(5))
  params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))  # so the tower says 0
  hidden = scale_hidden(jax.random.uniform(jax.random.key(1), (2, 3, 4, 8)))
  after, _ = model.dynamics(params, hidden, jnp.array([0, 4]))
  np.testing.assert_allclose(after, hidden, rtol=1e-5, atol=1e-6)


# --- search ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
  """A known MDP as a model: next states and rewards from tables; priors and values of `params`, if it has any."""

  next_state: tuple[tuple[int, ...], ...]
  reward: tuple[tuple[float, ...], ...]
  support = None
  action_space = spaces.Discrete(A)
  distribution = distributions.Categorical(A)

  def dynamics(self, params: Any, hidden: Any, action: Any) -> Any:
    reward = jnp.asarray(self.reward, jnp.float32)[hidden, action]
    return jnp.asarray(self.next_state)[hidden, action], reward[:, None]

  def predict(self, params: Any, hidden: Any) -> Prediction:
    if params:
      return Prediction(params['prior'][hidden], params['value'][hidden][:, None])
    n = hidden.shape[0]
    prior = jnp.broadcast_to(jnp.array([[0.0, 0.1, -0.1]]), (n, A))
    return Prediction(prior, jnp.zeros((n, 1)))


STATES, DISCOUNT = 5, 0.5


def table(seed: int = 0) -> tuple[Table, np.ndarray]:
  """A random deterministic MDP, and its optimal action values by value iteration."""
  rng = np.random.default_rng(seed)
  after, reward = rng.integers(0, STATES, (STATES, A)), rng.random((STATES, A)).round(2)
  q = np.zeros((STATES, A))
  for _ in range(200):
    q = reward + DISCOUNT * q.max(1)[after]
  return Table(tuple(map(tuple, after.tolist())), tuple(map(tuple, reward.tolist()))), q


def searched(agent: MuZero, simulations: int, hidden: Any, mask: Any = None, seed: int = 3) -> Any:
  def compiled() -> Any:
    params = MuZeroParams({}, jnp.int32(0))
    return jax.jit(
      lambda h, o, k: searching.plan(agent.search_settings, params, h, o, k, simulations),
      compiler_options=quick,
    )

  search = shared(f'{simulations} simulations', agent, compiled)
  observation = () if mask is None else {'action_mask': mask}
  return jax.device_get(search(hidden, observation, jax.random.key(seed)))


@pytest.mark.slow
def test_more_simulations_come_nearer_to_value_iteration() -> None:
  """PUCT visits every action of every state in the end; with no idea of values it has to."""
  model, q = table()
  agent = MuZero(model, search='puct', discount=DISCOUNT, greedy=True)  # type: ignore[arg-type]
  error = {}
  for simulations in (8, 400):
    action, plan = searched(agent, simulations, jnp.arange(STATES))
    error[simulations] = np.max(np.abs(plan.value - q.max(1)))
  assert error[400] < min(0.2, error[8] / 5), error
  np.testing.assert_allclose(q[np.arange(STATES), action], q.max(1), atol=1e-6)


def test_learning_from_searches_ends_where_value_iteration_ends() -> None:
  """Gumbel's search improves the policy that it is given: again and again, to the best one."""
  model, q = table()
  agent = MuZero(model, simulations=16, discount=DISCOUNT)  # type: ignore[arg-type]
  states, known = jnp.arange(STATES), dict(prior=jnp.zeros((STATES, A)), value=jnp.zeros(STATES))

  @jax.jit
  def search(known: Any, key: Any) -> Any:
    return searching.plan(
      agent.search_settings, MuZeroParams(known, jnp.int32(0)), states, None, key, 16
    )[1]

  for i in range(12):
    plan = search(known, jax.random.key(i))
    known = dict(prior=jnp.log(plan.weights + 1e-3), value=plan.value)
  np.testing.assert_allclose(known['value'], q.max(1), atol=0.01)
  best = q[np.arange(STATES), np.argmax(known['prior'], axis=1)]
  np.testing.assert_allclose(best, q.max(1), atol=1e-6)


def test_values_that_are_nearly_alike() -> None:
  """They leave the prior as it was, unless they are rescaled first."""
  model, _ = table()
  alike = tuple(tuple(1e-3 * x for x in row) for row in model.reward)
  model, states = dataclasses.replace(model, reward=alike), jnp.arange(STATES)
  prior = jax.nn.softmax(jnp.array([[0.0, 0.1, -0.1]]))
  changed = {}
  for rescale in (False, True):
    agent = MuZero(model, rescale_values=rescale, greedy=True)  # type: ignore[arg-type]
    _, plan = searched(agent, 8, states)
    changed[rescale] = np.max(np.abs(plan.weights - prior), axis=1)
  assert changed[False].max() < 0.01
  assert changed[True].min() > 0.2


def test_depth_is_limited() -> None:
  """To one step: the value of the root is then the best reward, as nothing has values."""
  model, _ = table()
  agent = MuZero(model, max_depth=1, discount=DISCOUNT, greedy=True, value_scale=100.0)  # type: ignore[arg-type]
  _, plan = searched(agent, 12, jnp.arange(STATES))
  np.testing.assert_allclose(plan.value, np.max(model.reward, axis=1), atol=0.02)


def test_what_acts_and_what_is_learned_from() -> None:
  """The prior may act, and another tree may be learned from; what is not asked for stays as it was."""
  model, q = table()
  deep = MuZero(model, simulations=60, discount=DISCOUNT, greedy=True, value_scale=100.0)  # type: ignore[arg-type]
  found = {}
  for name, change in (
    ('both', {}),
    ('prior', {'acts': 'prior'}),
    ('shallow', {'target_depth': 1}),
  ):
    agent = dataclasses.replace(deep, **change)
    search = jax.jit(
      lambda h, k, agent=agent: agent.choose(MuZeroParams({}, jnp.int32(0)), h, None, k),
      compiler_options=quick,
    )
    found[name] = jax.device_get(search(jnp.arange(STATES), jax.random.key(3)))
  lost = {name: np.max(q.max(1) - q[np.arange(STATES), x]) for name, (x, _) in found.items()}
  assert lost['both'] == lost['shallow'] < 0.2 < lost['prior'], lost
  np.testing.assert_array_equal(found['prior'][0], np.full(STATES, 1))  # the prior's best
  jax.tree.map(np.testing.assert_array_equal, found['prior'][1], found['both'][1])
  np.testing.assert_allclose(found['shallow'][1].value, np.max(model.reward, axis=1), atol=0.02)
  assert np.abs(found['both'][1].value - np.max(model.reward, axis=1)).max() > 0.2


@pytest.mark.slow
def test_actions_by_chance() -> None:
  """A share of them, uniform over what is allowed; none in evaluation."""
  model, _ = table()
  agent = MuZero(model, simulations=4, discount=DISCOUNT, epsilon=0.4)  # type: ignore[arg-type]
  mask = jnp.tile(jnp.array([[True, False, True]]), (4000, 1))

  def actions(agent: MuZero) -> Any:
    choose = jax.jit(lambda h, m, k: agent.choose(MuZeroParams({}, jnp.int32(0)), h, m, k)[0])
    return np.asarray(choose(jnp.zeros(4000, jnp.int32), {'action_mask': mask}, jax.random.key(0)))

  greedy = actions(greedily(dataclasses.replace(agent, epsilon=0.0)))
  assert len(set(greedy.tolist())) == 1
  np.testing.assert_array_equal(actions(greedily(agent)), greedy)
  noisy = actions(
    dataclasses.replace(agent, value_scale=1e4)
  )  # the search itself is as good as sure
  assert not (noisy == 1).any()
  assert abs(np.mean(noisy != greedy) - 0.2) < 0.03


@pytest.mark.parametrize(
  ('search', 'simulations', 'sampled', 'greedy'),
  [('gumbel', 4, 0, True), ('puct', 4, 0, False), ('puct', 0, 0, False), ('gumbel', 4, 2, False)],
)
def test_forbidden_actions_are_never_taken(
  search: Any, simulations: int, sampled: int, greedy: bool
) -> None:
  model, _ = table()
  agent = MuZero(model, search=search, sampled_actions=sampled, greedy=greedy)  # type: ignore[arg-type]
  rng = np.random.default_rng(0)
  mask = rng.random((40, A)) < 0.5
  mask[np.arange(40), rng.integers(0, A, 40)] = True
  action, plan = searched(agent, simulations, jnp.asarray(rng.integers(0, STATES, 40)), mask)
  assert mask[np.arange(40), action].all()
  if not sampled:
    assert (plan.weights[~mask] < 1e-6).all()
  np.testing.assert_allclose(plan.weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize('search', ['gumbel', pytest.param('puct', marks=pytest.mark.slow)])
def test_greedy_search_has_no_noise(search: Any) -> None:
  """What it makes of a state is the same with any key; else the Gumbels or Dirichlet's noise differ."""
  model, _ = table()
  states = jnp.arange(20) % STATES

  def differ(agent: MuZero) -> bool:
    (one, plan), (other, second) = (searched(agent, 4, states, seed=s) for s in (0, 1))
    if search == 'puct':  # whose most visited action may be one of two
      return bool((plan.weights != second.weights).any())
    return bool((one != other).any())

  agent = MuZero(model, search=search)  # type: ignore[arg-type]
  assert differ(agent) and not differ(greedily(agent))


def test_the_priors_of_samples() -> None:
  """(beta_hat / beta) pi, with beta the policy at temperature 2."""
  model, _ = table()
  agent = MuZero(model, sampled_actions=8, sampled_temperature=2.0)  # type: ignore[arg-type]
  policy = np.random.default_rng(0).normal(size=(6, A)).astype(np.float32)
  draw = jax.jit(agent.search_settings.candidates.draw)
  x, logits = jax.device_get(draw(policy, jax.random.key(0)))
  pi, beta = (np.exp(y) / np.exp(y).sum(-1, keepdims=True) for y in (policy, policy / 2))
  for b in range(6):
    seen = set[int]()
    for k in range(8):
      a = int(x[b, k])
      if a in seen:
        assert logits[b, k] == distributions.MASKED
      else:
        share = np.mean(x[b] == a)
        expected = math.log(share / float(beta[b, a]) * float(pi[b, a]))
        assert logits[b, k] == pytest.approx(expected, rel=1e-3, abs=1e-4)
      seen.add(a)


@pytest.mark.parametrize(
  'space', slow_after(1, spaces.Box(-2, 3, (2,), np.float32), spaces.MultiDiscrete([3, 4]))
)
def test_actions_that_are_sampled(space: Any) -> None:
  agent = MuZero(LearnedModel(**TINY_MODEL), simulations=3)
  network = agent.network.bind(spaces.Box(-1, 1, (F,)), space)
  agent = dataclasses.replace(agent, network=network)
  timestep = jax.tree.map(lambda x: np.repeat(np.asarray(x), 6, axis=0), network.example())

  def act(key: Any) -> Any:
    params = agent.init(key).params
    return agent.act(params, agent.initial_state(jnp.arange(6)), timestep, jax.random.key(1))[0]

  with jax.debug_key_reuse(False):
    output = jax.device_get(jax.jit(act, compiler_options=quick)(jax.random.key(0)))
  assert all(space.contains(a.astype(space.dtype)) for a in output.action)
  sample, candidates = output.extras.sample, output.extras.plan.candidates
  assert candidates.shape[1] == 16 and (sample[:, None] == candidates).all(-1).any(-1).all()


@SLOW  # its trees take a minute to compile
def test_mctx_is_what_it_was_released_as(monkeypatch: pytest.MonkeyPatch) -> None:
  """Its golden trees, by its own test."""
  from mctx._src.tests import tree_test

  monkeypatch.chdir(Path(mctx.__file__).parent)
  suite = unittest.defaultTestLoader.loadTestsFromModule(tree_test)
  found = unittest.TestResult()
  with jax.numpy_rank_promotion('allow'), jax.debug_key_reuse(False):
    suite.run(found)
  assert found.testsRun > 0 and found.wasSuccessful(), found.failures + found.errors


# --- reanalyse ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_share_of_a_batch_is_searched_anew() -> None:
  agent = recording(simulations=3, reanalyse=0.6, target_period=4)
  window = window_of(agent)
  network = jax.jit(agent.network.init)(jax.random.key(0))
  refresh = jax.jit(lambda w, k: agent.renew_plans(network, jnp.int32(10), w, k))
  plans = jax.device_get(refresh(window, jax.random.key(2)))
  old = window.outputs.extras.plan
  fresh = (plans.value != old.value).all(0)
  assert fresh.sum() == 3  # of 5
  assert (plans.steps[:, fresh] == 8).all() and (plans.steps[:, ~fresh] == 7).all()
  assert (plans.weights[:, ~fresh] == old.weights[:, ~fresh]).all()
  np.testing.assert_allclose(plans.weights.sum(-1), 1, rtol=1e-5)
  _, _, metrics, _ = learned(agent, window, WEIGHT)
  assert float(metrics['reanalysed']) == pytest.approx(0.6)
  with pytest.raises(UsageError, match='reanalyse'):
    recording(reanalyse=0.1).renew_plans(network, jnp.int32(10), window, jax.random.key(2))


def test_values_of_the_target_network() -> None:
  agent = recording(bootstrap='target')
  window = window_of(agent)
  network = network_of(agent, 5)
  plans = jax.jit(agent.renew_plans)(network, jnp.int32(10), window, jax.random.key(2))
  hidden = np.tanh(window.timesteps.observation[:-1] @ network['r'])
  expected = jax.jit(decode)(hidden @ network['v'], agent.network.support)
  np.testing.assert_allclose(plans.value, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(plans.weights, window.outputs.extras.plan.weights)


def test_targets_outside_the_support_are_counted() -> None:
  agent = recording()
  window = window_of(agent)
  large = window.timesteps._replace(reward=100 * window.timesteps.reward)
  shares = [
    float(learned(agent, window._replace(timesteps=t), WEIGHT)[2]['outside_support'])
    for t in (window.timesteps, large)
  ]
  assert shares[0] == 0 < shares[1]


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('make_agent', 'message'),
  [
    (lambda: MuZero(simulations=-1), r'simulations.*0.*-1'),
    (lambda: MuZero(simulations=0).memory(8, 4), 'simulations 0'),
    (lambda: MuZero(simulations=0, reanalyse=1.0).memory(8, 4), 'simulations 0'),
    (lambda: MuZero(unroll=0), r'unroll.*1.*0'),
    (lambda: MuZero(sampled_actions=1), r'sampled_actions.*0.*1'),
    (lambda: MuZero(consistency=1.0), r'consistency 1.0.*network.projection.*0'),
    (lambda: MuZero(LearnedModel(core='gru')).memory(8, 4), r'4.*--agent.sequence 4'),
    (lambda: MuZero(burn_in=2).memory(8, 4), 'burn_in 2'),
    (lambda: LearnedModel(bins=2), r'bins.*1.*3'),
    (lambda: LearnedModel(blocks=1, core='gru'), 'image'),
    (
      lambda: LearnedModel(blocks=1).bind(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)),
      'image',
    ),
    (
      lambda: LearnedModel().bind(VECTOR, spaces.Box(-np.inf, np.inf, (2,))),
      'bounded',
    ),
  ],
)  # fmt: skip
def test_bad_input(make_agent: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make_agent()


def test_bad_input_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
  run = ['train', '--agent', 'muzero', '--run-dir', str(tmp_path / 'run')]
  with pytest.raises(SystemExit) as left:
    cli.main([*run, '--agent.simulations', '0'])
  assert left.value.code == 2
  assert 'simulations 0' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('is_muesli', [False, True])
def test_a_range_that_is_too_narrow_is_a_sign(is_muesli: bool, tmp_path: Path) -> None:
  network = LearnedModel(
    hidden=(8,), latent=4, dynamics_hidden=(8,), head_hidden=(8,), bins=5, v_min=-0.1, v_max=0.1
  )
  planner = MuZero(network, Buffer(1_000, 16, 200, 1.0), simulations=2, unroll=1)
  agent = Muesli(network, capacity=1_000, batch_size=16, min_size=200) if is_muesli else planner
  config = Config(
    agent=agent, env='podrace:catch', num_envs=8, unroll_length=4, total_steps=2_000, devices=1,
    log_every=200,
  )  # fmt: skip
  train(config, tmp_path / 'run', quiet=True)
  signs = json.loads((tmp_path / 'run/diagnostics.json').read_bytes())['diagnostics']
  assert 'values-outside-support' in [sign['name'] for sign in signs]


# --- it learns ---------------------------------------------------------------------------------------------

CATCH = MuZero(
  LearnedModel(hidden=(64,), latent=32, dynamics_hidden=(64,), head_hidden=(32,), bins=21, v_min=-2, v_max=2),
  Buffer(
    capacity=20_000, batch_size=64, min_size=1_000, samples_per_insert=8, priority_exponent=1.0,
    importance_exponent=1.0,
  ),
  simulations=8, unroll=3, n_step=10, learning_rate=2e-3,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, pytest.param(8, marks=SLOW)])
def test_it_learns_catch(devices: int) -> None:
  """A random player has -0.6; with any loss or target broken it stays below 0.5."""
  assert_learns(anakin(CATCH, 'podrace:catch', devices, 32, 4), 300, 50, least=500, above=0.9)


@SLOW
@pytest.mark.parametrize(
  'settings',
  [
    dict(search='puct', simulations=16),
    dict(sampled_actions=3),
    dict(reanalyse=0.8),
    dict(simulations=0, reanalyse=1.0, reanalyse_simulations=8),
    dict(network=dataclasses.replace(CATCH.network, projection=16), consistency=1.0),
    dict(network=dataclasses.replace(CATCH.network, bins=1)),
  ],
  ids=lambda s: ', '.join(s),
)
def test_its_settings_learn_catch(settings: Any) -> None:
  agent = dataclasses.replace(CATCH, **settings)
  assert_learns(anakin(agent, 'podrace:catch', 1, 32, 4), 400, 50, least=500, above=0.8)


@SLOW
@pytest.mark.parametrize(('lag', 'host_replay'), [('0', False), ('async', False), ('1', True)])
def test_it_learns_catch_under_sebulba(lag: str, host_replay: bool) -> None:
  program = sebulba_of(CATCH, 'podrace:catch', '0', '1', 2, 32, 4, lag=lag, host_replay=host_replay)
  assert_learns(program, 350, 50, least=500, above=0.9)


@SLOW
def test_it_remembers_with_a_core() -> None:
  network = LearnedModel(
    hidden=(32,), core='gru', core_size=32, latent=32, dynamics_hidden=(32,), head_hidden=(32,),
    bins=21, v_min=-2, v_max=2,
  )  # fmt: skip
  agent = dataclasses.replace(CATCH, network=network, sequence=7, unroll=2, n_step=3)
  assert_learns(anakin(agent, 'podrace:memory,length=5', 1, 32, 7), 250, 40, least=500, above=0.85)


def step_sizes(agent: Any, count: int) -> list[float]:
  """Sizes of the first steps that the agent's optimiser makes of gradients of 1."""
  optimiser, params = agent.optimiser(), {'w': jnp.zeros(1)}
  update = jax.jit(lambda state: optimiser.update({'w': jnp.ones(1)}, state, params))
  state, sizes = optimiser.init(params), []
  for _ in range(count):
    updates, state = update(state)
    sizes.append(-float(updates['w'][0]))
  return sizes


@pytest.mark.parametrize(('steps', 'last'), [(10, 0.01), (0, 1.0)])
def test_the_learning_rate_falls_to_a_tenth_in_decay_steps(steps: int, last: float) -> None:
  agent = MuZero(decay_steps=steps, learning_rate=1.0, weight_decay=0.0, max_grad_norm=0.0)
  np.testing.assert_allclose(step_sizes(agent, 21), np.geomspace(1, last, 21), rtol=1e-4)


@dataclasses.dataclass(frozen=True)
class Mine(MuZero):
  """As somebody writes it who has a model of their own."""

  network: Matrices = Matrices()  # type: ignore[assignment]


def test_a_record_names_ones_own_model() -> None:
  config = Config(agent=Mine(network=Matrices(bins=7)))
  record = to_json(config)
  assert record['agent']['network']['class'] == f'{__name__}:Matrices'
  assert from_json(record) == config
