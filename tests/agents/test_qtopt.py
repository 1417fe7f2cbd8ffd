"""QT-Opt against a slow reference in NumPy: targets, losses, both target networks, labels."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from shorthand import slow_after
from test_cem import reference_fit
from test_runs import called
from test_value_losses import (
  CONTINUOUS,
  VECTOR,
  B,
  act,
  assert_gradient,
  continuous,
  learn,
  learning,
  many,
  random_window,
)

from podrace import hooks
from podrace.agents.cem import CEM
from podrace.agents.qtopt import QTOpt, QTOptExtras, QTOptParams
from podrace.networks import ActionValue
from podrace.settings.agents import bind
from podrace.types import FIRST, LAST, MID, Sample, Trajectory

NETWORK = ActionValue(hidden=(5,), head_hidden=(6, 4), v_min=-40.0, v_max=40.0)
SMALL = CEM(iterations=3, samples=16, elites=4)
WEIGHT = np.linspace(0.1, 1, B).astype(np.float32)


def bound(action_space: Any = CONTINUOUS, **settings: Any) -> QTOpt:
  env = SimpleNamespace(observation_space=VECTOR, action_space=action_space)
  return bind(QTOpt(**(dict(network=NETWORK, cem=SMALL, discount=0.9) | settings)), env)


INIT: dict[str, Any] = {}  # of each network, compiled once


def parameters(agent: QTOpt, seed: int = 0) -> Any:
  init = INIT.setdefault(repr(agent.network), jax.jit(agent.network.init))
  return init(jax.random.key(seed))


def train_of(agent: QTOpt) -> Any:
  """Return a state of three unequal networks."""
  train = jax.jit(agent.init)(jax.random.key(0))
  return train._replace(params=QTOptParams(parameters(agent, 1), parameters(agent, 2)))


def sample_of(window: Trajectory) -> Sample:
  return Sample(window, WEIGHT, np.arange(B))


# --- the slow reference ---------------------------------------------------------------------------


def output_of(params: Any, observation: Any, action: Any) -> float:
  """The output of the network for one observation [3] and one action [n], layer by layer."""
  torso, mlp = params['torso']['Mlp_0']['Dense_0'], params['mlp']['Dense_0']

  def dense(x: Any, layer: Any) -> Any:
    return x @ np.asarray(layer['kernel']) + np.asarray(layer['bias'])

  x = np.maximum(dense(observation, torso), 0)
  x = np.maximum(dense(x, params['state']) + dense(action, params['action']), 0)
  return float(dense(np.maximum(dense(x, mlp), 0), params['output'])[0])


def best_of(params: Any, observation: Any, key: Any, settings: CEM) -> tuple[Any, Any]:
  """Actions [B, 2] by the cross-entropy method with the agent's random numbers, and outputs [B]."""
  batch = len(observation)
  mean, std = np.zeros((batch, 2)), np.ones((batch, 2))
  for step_key in jax.random.split(key, settings.iterations):
    (normal_key,) = jax.random.split(step_key, 1)
    noise = np.asarray(jax.random.normal(normal_key, (batch, settings.samples, 2)))
    actions = np.clip(mean[:, None] + std[:, None] * noise, -1, 1)
    scores = np.array(
      [[output_of(params, o, a) for a in row] for o, row in zip(observation, actions, strict=True)]
    )
    mean, std = reference_fit(actions, scores, settings)
  best = scores.argmax(1)
  return actions[np.arange(batch), best], scores.max(1)


def sigmoid_return(output: Any) -> Any:
  return -40 + 80 / (1 + np.exp(-np.asarray(output)))


def n_step(window: Trajectory, discount: float, b: int) -> tuple[float, float, int]:
  """The reward, the discount and the last index of one window's transition."""
  t = window.timesteps
  total, product = 0.0, 1.0
  for i in range(1, len(t.reward)):
    total += product * t.reward[i, b]
    product *= discount * t.discount[i, b]
    if t.step_type[i, b] == LAST:
      break
  return total, product, i


@pytest.mark.parametrize('n', [1, 3])
def test_targets(n: int) -> None:
  """r + discount min(Q1, Q2) of theta1's action, where the episode or the window ends."""
  agent = bound(n_step=n)
  train, window = train_of(agent), random_window(n, 15, continuous)
  computed = jax.jit(agent.label)(train.params, window, jax.random.key(7))
  steps = [n_step(window, 0.9, b) for b in range(B)]
  assert 0 in [d for _, d, _ in steps]  # an episode terminates
  after = np.stack([window.timesteps.observation[end, b] for b, (_, _, end) in enumerate(steps)])
  theta1, theta2 = jax.device_get(train.params)
  action, q1 = best_of(theta1, after, jax.random.key(7), SMALL)
  q2 = np.array([output_of(theta2, o, a) for o, a in zip(after, action, strict=True)])
  assert 0 < (q1 < q2).sum() < B  # each is the smaller one somewhere
  v = sigmoid_return(np.minimum(q1, q2))
  expected = [r + d * x for (r, d, _), x in zip(steps, v, strict=True)]
  np.testing.assert_allclose(computed, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('head', ['sigmoid', 'value'])
def test_losses_and_gradients(head: str) -> None:
  """Cross-entropy with the share of the range, or half the squared error; of theta, by weight."""
  agent = bound(network=dataclasses.replace(NETWORK, head=head), labels='stage')
  train = train_of(agent)
  label = np.random.default_rng(1).uniform(-58, 58, (1, B)).astype(np.float32)
  window = random_window(1, 5, continuous, extras=QTOptExtras(label))
  new, priority, metrics = learn(agent, train, sample_of(window))
  unit = (window.outputs.action[0] - [-2, 0]) / [4, 10] * 2 - 1
  theta = jax.device_get(train.rest.network)
  seen, live = window.timesteps.observation[0], window.timesteps.step_type[0] != LAST
  assert 0 < live.sum() < B
  out = np.array([output_of(theta, o, a) for o, a in zip(seen, unit, strict=True)])
  if head == 'sigmoid':
    p, y = 1 / (1 + np.exp(-out)), np.clip((label[0] + 40) / 80, 0, 1)
    each, value = -y * np.log(p) - (1 - y) * np.log(1 - p), sigmoid_return(out)
    outside = np.mean(live * (np.abs(label[0]) > 40))
    assert outside > 0
  else:
    each, value, outside = 0.5 * (out - label[0]) ** 2, out, None
  assert float(metrics['loss']) == pytest.approx(np.mean(WEIGHT * live * each), rel=1e-4)
  assert float(metrics['value']) == pytest.approx((live * value).sum() / live.sum(), rel=1e-4)
  assert metrics.get('outside_support') == (outside and pytest.approx(outside))
  np.testing.assert_allclose(priority, live * np.abs(label[0] - value), rtol=1e-3, atol=1e-3)

  def loss(theta: Any) -> Any:
    q = agent.network.value_of(theta, agent.network.embed(theta, seen), jnp.float32(unit)[:, None])
    if head == 'sigmoid':
      goal = jnp.float32(y)
      each = jnp.logaddexp(0.0, q[:, 0]) - goal * q[:, 0]
    else:
      each = 0.5 * jnp.square(q[:, 0] - label[0])
    return jnp.mean(WEIGHT * live * each)

  assert_gradient(new.rest.opt_state, jax.jit(jax.grad(loss))(train.rest.network))


def test_both_target_networks_follow() -> None:
  """theta1 averages theta, which takes the gradients; theta2 is theta1 of every third step."""
  agent = bound(target_rate=0.25, target_period=3)
  train = jax.jit(agent.init)(jax.random.key(0))
  learned = learning(agent, sample_of(random_window(1, 5, continuous)))
  average, copy = (jax.device_get(x) for x in train.params)
  for step in range(1, 8):
    train, _, _ = learned(train)
    network = jax.device_get(train.rest.network)
    average = jax.tree.map(lambda a, x: 0.75 * a + 0.25 * x, average, network)
    copy = average if step % 3 == 0 else copy
    for computed, expected in ((train.params.theta1, average), (train.params.theta2, copy)):
      jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), computed, expected
      )
    lags = [not np.allclose(x, y) for x, y in zip(*map(jax.tree.leaves, train.params), strict=True)]
    assert any(lags) == (step % 3 != 0)


def test_acting_is_by_theta1() -> None:
  agent = dataclasses.replace(bound(), greedy=True)
  params, timestep = train_of(agent).params, many(agent.network, 40)
  compiled = jax.jit(agent.act)

  def taken(params: Any) -> np.ndarray:
    return np.asarray(compiled(params, (), timestep, jax.random.key(3))[0].action)

  actions, other = taken(params), parameters(agent, 9)
  np.testing.assert_array_equal(actions, taken(params._replace(theta2=other)))
  assert (taken(params._replace(theta1=other)) != actions).any()
  best_key, _, _ = jax.random.split(jax.random.key(3), 3)
  seen = np.asarray(timestep.observation)
  expected, _ = best_of(jax.device_get(params.theta1), seen, best_key, SMALL)
  np.testing.assert_allclose(actions, [0, 5] + [2, 5] * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('epsilon', slow_after(1, 0.3, 0.0, 1.0))
def test_a_share_of_actions_is_random(epsilon: float) -> None:
  agent = bound(epsilon=epsilon)
  params, timestep = train_of(agent).params, many(agent.network, 1000)
  greedy = act(dataclasses.replace(agent, greedy=True), params, (), timestep)
  differs = (act(agent, params, (), timestep) != greedy).any(-1)
  assert abs(differs.mean() - epsilon) < 0.05


def test_an_episodes_end_teaches_nothing() -> None:
  """From LAST to FIRST there is no transition: whatever the label, the update is the same."""
  agent = bound(labels='stage')
  train, updates = train_of(agent), []
  for label in (0.0, 1e6):
    window = random_window(1, 5, continuous, extras=QTOptExtras(np.full((1, B), 3.0, np.float32)))
    kinds = np.stack(
      [np.where(np.arange(B) < 2, LAST, MID), np.where(np.arange(B) < 2, FIRST, MID)]
    )
    window.outputs.extras.label[0, :2] = label
    window = window._replace(timesteps=window.timesteps._replace(step_type=kinds.astype(np.int8)))
    new, priority, metrics = learn(agent, train, sample_of(window))
    assert (
      np.isfinite(metrics['loss'])
      and (np.asarray(priority) > 0).tolist() == [False] * 2 + [True] * 5
    )
    updates.append(new)
  jax.tree.map(np.testing.assert_array_equal, *updates)


@pytest.mark.parametrize(
  ('label', 'finite'), slow_after(1, (61.0, False), (-59.0, True), (45.0, True), (-61.0, False))
)
def test_targets_far_outside_of_the_range_are_refused(label: float, finite: bool) -> None:
  """The loss is infinite, the parameters are not; the reason has the names of the settings."""
  agent = bound(labels='stage')
  window = random_window(1, 5, continuous, extras=QTOptExtras(np.zeros((1, B), np.float32)))
  live = int(np.flatnonzero(window.timesteps.step_type[0] != LAST)[0])
  window.outputs.extras.label[0, live] = label
  new, _, metrics = learn(agent, train_of(agent), sample_of(window))
  assert bool(np.isfinite(metrics['loss'])) == finite
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(new))
  reason = hooks.refusal(agent)
  assert '[-40, 40]' in reason and '--agent.network.v-min' in reason


@pytest.mark.slow
def test_a_run_with_returns_outside_of_the_range_ends_with_2(
  tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
  args = ['--agent', 'qtopt', '--env', 'gymnax:Pendulum-v1', '--agent.network.head', 'sigmoid']
  sizes = ['--total-steps', '2_048', '--agent.buffer.batch-size', '8', '--agent.cem.samples', '8']
  code, _, err = called(capsys, 'train', *args, *sizes, '--run-dir', str(tmp_path / 'run'))
  assert code == 2 and '--agent.network.v-min' in err, err
  assert json.loads((tmp_path / 'run' / 'end.json').read_text())['state'] == 'failed'


def test_labels_of_a_stage_at_no_lag_are_those_of_the_learner() -> None:
  learner, stage = (bound(labels=labels, n_step=2) for labels in ('learner', 'stage'))
  assert hooks.labels_elsewhere(stage) and not hooks.labels_elsewhere(learner)
  assert hooks.can_refresh(stage) and not hooks.can_refresh(learner)
  train, window = train_of(learner), random_window(2, 5, continuous)
  expected, _, learned = learn(learner, train, sample_of(window))
  _, learn_key = jax.random.split(jax.random.key(1))  # as the learner step splits its key
  empty = QTOptExtras(np.full((2, B), 9.0, np.float32))
  stored = window._replace(outputs=window.outputs._replace(extras=empty))
  fresh = jax.jit(stage.refresh)(train.params, stored, jax.random.fold_in(learn_key, 0))
  np.testing.assert_array_equal(fresh.outputs.extras.label[1], 9.0)
  computed, _, metrics = learn(stage, train, sample_of(jax.device_get(fresh)))
  assert float(metrics['loss']) == pytest.approx(float(learned['loss']), rel=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), computed, expected
  )


@pytest.mark.slow
def test_acting_leaves_room_for_labels() -> None:
  timestep = many(bound().network, 4)
  for labels, extras in (('learner', ()), ('stage', QTOptExtras(jnp.zeros(4)))):
    agent = bound(labels=labels)
    output, _ = agent.act(train_of(agent).params, (), timestep, jax.random.key(0))
    assert jax.tree.structure(output.extras) == jax.tree.structure(extras)
    jax.tree.map(np.testing.assert_array_equal, output.extras, extras)


@pytest.mark.slow
def test_one_hot_numbers_are_at_their_bounds() -> None:
  """Of three numbers at the end one is at its upper bound, also at random."""
  space = spaces.Box(np.float32([-2, 0, 0, 0]), np.float32([2, 1, 1, 1]))
  network = dataclasses.replace(NETWORK, one_hot=(3,))
  for epsilon in (0.0, 1.0):
    agent = bound(space, network=network, epsilon=epsilon)
    actions = act(agent, train_of(agent).params, (), many(agent.network, 50))
    assert set(np.unique(actions[:, 1:])) == {0, 1} and (actions[:, 1:].sum(1) == 1).all()
    assert len(np.unique(actions[:, 0])) > 5


@pytest.mark.slow
def test_numbers_without_a_choice_have_no_part() -> None:
  space = spaces.Box(np.float32([-2, 3]), np.float32([2, 3]))
  agent = bound(space)
  actions = act(agent, train_of(agent).params, (), many(agent.network, 50))
  assert (actions[:, 1] == 3).all()
  params = train_of(agent).params.theta1
  embedding = agent.network.embed(params, many(agent.network, 5).observation)
  unit, _ = agent.best(params, embedding, jax.random.key(0))
  assert (unit[:, 1] == 0).all()


# --- networks -------------------------------------------------------------------------------------


def test_the_papers_network() -> None:
  """1.2 million parameters, and one embedding of 27 x 27 for all actions of a state."""
  space = spaces.Dict(
    image=spaces.Box(0, 255, (472, 472, 3), np.uint8), gripper=spaces.Box(0, 1, (2,), np.float32)
  )
  network = ActionValue(size='paper').bind(space, spaces.Box(-1, 1, (8,), np.float32))
  params = jax.eval_shape(network.init, jax.random.key(0))
  assert 1.15e6 < sum(x.size for x in jax.tree.leaves(params)) < 1.3e6
  observation = network.example().observation
  image, numbers = jax.eval_shape(network.embed, params, observation)
  assert image.shape == (1, 27, 27, 64) and numbers.shape == (1, 2)
  values = jax.eval_shape(network.value_of, params, (image, numbers), jnp.zeros((1, 9, 8)))
  assert values.shape == (1, 9)
  with pytest.raises(ValueError, match='image'):
    ActionValue(size='paper').bind(VECTOR, CONTINUOUS)
  small = spaces.Box(0, 255, (217, 217, 3), np.uint8)
  assert ActionValue(size='paper').bind(small, CONTINUOUS)
  with pytest.raises(ValueError, match='217 pixels'):
    ActionValue(size='paper').bind(spaces.Box(0, 255, (216, 300, 3), np.uint8), CONTINUOUS)


@pytest.mark.parametrize(
  ('settings', 'name'),
  [
    (dict(head_hidden=()), 'head_hidden'),
    (dict(v_min=1.0), 'v_min 1.0'),
  ],
)
def test_impossible_networks_are_refused(settings: dict[str, Any], name: str) -> None:
  with pytest.raises(ValueError, match=name):
    ActionValue(**settings)


def test_one_hot_groups_fit_the_action() -> None:
  with pytest.raises(ValueError, match=r'one_hot \(3,\).*2'):
    bound(network=dataclasses.replace(NETWORK, one_hot=(3,)))
