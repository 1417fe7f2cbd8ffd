"""LPG: its rule against loops in float64, a rule made by hand that is REINFORCE, and the gradient through updates."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_files
import streams
from gymnasium import spaces

from podrace import topology
from podrace.agents.lpg import LPG
from podrace.agents.rules import lpg as rules
from podrace.agents.rules import storage
from podrace.agents.rules.layers import entropy
from podrace.envs import make
from podrace.errors import UsageError
from podrace.learner import learner
from podrace.networks import PolicyPredictor
from podrace.replay import on_policy
from podrace.settings.agents import bind
from podrace.types import LAST, TrainState, Trajectory

T, B, A = 7, 6, 3
SPACE = spaces.Box(-1, 1, (4,), np.float32)
SIZES = rule_files.LPG


def agent(core: Any = 'none', **settings: Any) -> LPG:
  network = PolicyPredictor(hidden=(8,), predictions=SIZES.predictions, core=core, core_size=4)
  bound = network.bind(SPACE, spaces.Discrete(A))
  given = dict(optimizer='sgd', learning_rate=1.0, max_grad_norm=1e9) | settings
  return LPG(rule_files.small_lpg(), network=bound, **given)  # type: ignore[arg-type]


def window(seed: int = 0, core: Any = ()) -> Trajectory:
  rng = np.random.default_rng(seed)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(4))
  action = rng.integers(0, A, (T, B)).astype(np.int32)
  found: Trajectory = streams.trajectory(steps, action, (), core)
  return found


rule_targets = jax.jit(rules.targets)


@functools.cache
def params() -> dict[str, Any]:
  """Of a seed by which most units of the embedding are alive."""
  return jax.device_get(jax.jit(lambda key: rules.init(key, SIZES))(jax.random.key(4)))


def updater(agent: LPG) -> Any:
  """One update on one device: (rule, train, window) -> train."""

  def update(rule: Any, train: TrainState, x: Trajectory) -> TrainState:
    step = jax.vmap(lambda t: agent.learn_by(rule, t, x)[0], axis_name=topology.AXIS)
    found: TrainState = jax.tree.map(lambda x: x[0], step(jax.tree.map(lambda x: x[None], train)))
    return found

  return jax.jit(update)


# --- the rule -------------------------------------------------------------------------------------------


def inputs(seed: int = 0) -> rules.LPGInputs:
  rng, x = np.random.default_rng(seed), window(seed)
  t = x.timesteps
  probability, y = rng.random((T, B)), rng.normal(size=(T + 1, B, SIZES.predictions))
  given = t.reward[1:], t.discount[1:], t.last[1:], probability, y
  return rules.LPGInputs(*(np.asarray(x, np.float32) for x in given))._replace(last=t.last[1:])


def sigmoid(x: Any) -> Any:
  return 1 / (1 + np.exp(-x))


def slow_targets(p: Any, t: rules.LPGInputs, discount: float, b: int) -> tuple[Any, Any]:
  """Of one stream, step by step."""

  def phi(y: Any) -> float:
    e = np.exp(y - y.max())
    first = np.maximum(0, (e / e.sum()) @ p['embedding/~/linear_0/w'] + p['embedding/~/linear_0/b'])
    return float((first @ p['embedding/~/linear_1/w'] + p['embedding/~/linear_1/b']).item())

  hidden = cell = np.zeros(SIZES.trajectory)
  policy, y = [0.0] * T, [np.zeros(0)] * T
  for step in reversed(range(T)):
    if t.last[step, b]:
      hidden, cell = np.zeros(SIZES.trajectory), np.zeros(SIZES.trajectory)
    ended = float(t.discount[step, b]) == 0
    after = 0.0 if ended else phi(t.y[step + 1, b])
    row = [t.reward[step, b], ended, discount, t.probability[step, b], phi(t.y[step, b]), after]
    gates = np.concatenate([row, hidden]) @ p['lstm/linear/w'] + p['lstm/linear/b']
    i, g, f, o = np.split(gates, 4)
    cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    policy[step] = (hidden @ p['policy/linear/w'] + p['policy/linear/b']).item()
    y[step] = hidden @ p['y/linear/w'] + p['y/linear/b']
  return np.array(policy), np.array(y)


def test_the_rule_against_loops() -> None:
  t = inputs()
  ends = np.asarray(t.last)
  assert (ends & (t.discount == 0)).any() and (ends & (t.discount == 1)).any()
  found = rule_targets(params(), t, 0.9)
  exact: Any = jax.tree.map(lambda x: np.asarray(x, np.float64), (params(), t))
  for b in range(B):
    policy, y = slow_targets(exact[0], exact[1]._replace(last=ends), 0.9, b)
    np.testing.assert_allclose(found.policy[:, b], policy, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.y[:, b], y, rtol=1e-4, atol=1e-5)


def test_no_number_that_it_is_given_is_in_vain() -> None:
  t, p = inputs(), params()
  found = rule_targets(p, t, 0.9).policy
  others = dict(
    reward=t.reward + 1, discount=1 - t.discount, last=~t.last, probability=t.probability / 2, y=-t.y
  )  # fmt: skip
  for name, x in others.items():
    assert not np.allclose(found, rule_targets(p, t._replace(**{name: x}), 0.9).policy), name
  assert not np.allclose(found, rule_targets(p, t, 0.5).policy)


# --- the update ----------------------------------------------------------------------------------------


def reinforce(discount: float, scale: float = 1e-3) -> dict[str, Any]:
  """A rule of one LSTM cell that adds up discounted rewards: it works where the cell is nearly linear."""
  sizes = rules.Sizes(predictions=SIZES.predictions, trajectory=1, embedding=1)
  p = {name: np.zeros(shape, np.float32) for name, shape in sizes.shapes().items()}
  keeps = math.log(discount / (1 - discount)) - 1  # 1 is added to the forget gate
  p['lstm/linear/b'] = np.array([20, 0, keeps, 20], np.float32)
  p['lstm/linear/w'][0, 1] = scale
  p['policy/linear/w'][:] = 1 / scale
  return p


def returns_to_go(x: Trajectory, discount: float) -> np.ndarray:
  """[T, B] the discounted rewards until the episode or the trajectory ends; 0 for what is no transition."""
  found = np.zeros((T, B))
  for b in range(B):
    for episode in streams.episodes(np.asarray(x.timesteps.step_type[:, b])):
      for t in episode[:-1]:
        later = [u for u in episode if u > t]
        found[t, b] = sum(discount ** (u - t - 1) * float(x.timesteps.reward[u, b]) for u in later)
  return found


@pytest.mark.parametrize('core', ['none', pytest.param('lstm', marks=pytest.mark.slow)])
def test_a_rule_that_adds_up_rewards_is_reinforce(core: Any) -> None:
  """Williams 1992: the gradient of log pi(a|s) times the return to come."""
  learning = agent(core, y_cost=0.0)
  state = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.3), learning.network.initial_state(B))
  x = window(core=state)
  weight = np.float32(returns_to_go(x, 0.8))
  assert (weight[:-1][x.timesteps.step_type[:-2] == LAST] == 0).all()

  def objective(network: Any) -> Any:
    said, _ = learning.network.unroll(network, x.agent_state, x.timesteps)
    log_p = jax.nn.log_softmax(said.policy[:-1])
    chosen = jnp.take_along_axis(log_p, x.outputs.action[..., None], axis=-1)[..., 0]
    return jnp.sum(weight * chosen) / (T * B)

  train = jax.jit(learning.init)(jax.random.key(3))
  expected = jax.device_get(jax.jit(jax.grad(objective))(train.params))
  after = updater(learning)(reinforce(0.8), train, x)
  moved = jax.tree.map(lambda a, b: a - b, *jax.device_get((after.params, train.params)))
  found = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(moved)}
  for path, g in jax.tree_util.tree_leaves_with_path(expected):
    np.testing.assert_allclose(found[jax.tree_util.keystr(path)], g, rtol=1e-3, atol=2e-6)
  assert max(float(np.abs(g).max()) for g in jax.tree.leaves(expected)) > 0.01


def test_y_moves_to_its_target() -> None:
  """By steps along KL(y || target), the policy's share of the loss left out."""
  learning, x = agent(learning_rate=0.5, y_cost=2.0), window()
  update = updater(learning)
  zeros = np.zeros((8, 1), np.float32)
  rule = params() | {'policy/linear/w': zeros, 'y/linear/w': np.tile(zeros, 5)}
  rule['y/linear/b'] = np.float32([2.0, 0.0, -1.0, 1.0, 0.0])
  before = train = jax.jit(learning.init)(jax.random.key(0))
  for _ in range(300):
    train = update(rule, train, x)
  said, _ = jax.jit(learning.network.unroll)(train.params, (), x.timesteps)
  goal = np.exp(rule['y/linear/b']) / np.exp(rule['y/linear/b']).sum()
  learned = x.timesteps.step_type[:-1] != LAST
  y = np.exp(np.asarray(said.y))[:-1][learned]
  np.testing.assert_allclose(
    y / y.sum(-1, keepdims=True), np.broadcast_to(goal, (learned.sum(), 5)), atol=0.02
  )
  same = jax.tree.map(np.array_equal, train.params['policy_head'], before.params['policy_head'])
  assert all(jax.tree.leaves(same))
  halved = dataclasses.replace(learning, y_cost=1.0, learning_rate=1.0)
  scaled, other = updater(halved)(rule, before, x), update(rule, before, x)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), scaled.params, other.params
  )


@pytest.mark.parametrize('core', ['gru', pytest.param('none', marks=pytest.mark.slow)])
def test_nothing_passes_from_one_episode_to_another(core: Any) -> None:
  """What is done at LAST is ignored, and what comes after it changes nothing before it."""
  learning = agent(core)
  x = window(core=learning.network.initial_state(B))
  train = jax.jit(learning.init)(jax.random.key(0))
  last = x.timesteps.step_type[:-1] == LAST
  assert last[:-1].any()
  other = x._replace(
    outputs=x.outputs._replace(action=np.where(last, (x.outputs.action + 1) % A, x.outputs.action))
  )
  update = updater(learning)
  found, same = (update(params(), train, w).params for w in (x, other))
  jax.tree.map(np.testing.assert_array_equal, found, same)
  cut = np.ones((T + 1, B), np.int8)
  cut[0], cut[3], cut[4] = 0, LAST, 0
  discount = np.ones((T + 1, B), np.float32)
  two = x._replace(timesteps=x.timesteps._replace(step_type=cut, discount=discount))
  reward = two.timesteps.reward.copy()
  reward[5:] += 3
  later = two._replace(timesteps=two.timesteps._replace(reward=reward))

  @jax.jit
  def targets(w: Trajectory) -> Any:
    said, _ = learning.network.unroll(train.params, w.agent_state, w.timesteps)
    return rules.targets(params(), learning.inputs(said, w), 0.99)

  goals = jax.device_get([targets(two), targets(later)])
  np.testing.assert_array_equal(goals[0].policy[:3], goals[1].policy[:3])
  assert not np.allclose(goals[0].policy[4:], goals[1].policy[4:])


def test_metrics_are_what_they_are_called() -> None:
  logits = jnp.array([[0.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
  np.testing.assert_allclose(entropy(logits), [np.log(3), 0.0], atol=1e-6)
  learning, x = agent(), window()
  train = jax.jit(learning.init)(jax.random.key(0))

  @jax.jit
  def losses(x: Trajectory) -> Any:
    said, _ = learning.network.unroll(train.params, (), x.timesteps)
    goals = rules.targets(params(), learning.inputs(said, x), 0.99)
    return goals, *learning.losses(said, goals, x)

  goals, total, found = jax.device_get(losses(x))
  mask = x.timesteps.step_type[:-1] != LAST
  square = np.mean(mask * np.square(goals.policy))
  np.testing.assert_allclose(found['policy_target_square'], square, rtol=1e-5)
  np.testing.assert_allclose(found['entropy'], mask.mean() * np.log(3), rtol=1e-2)
  np.testing.assert_allclose(total, found['policy_loss'] + 0.5 * found['y_loss'], rtol=1e-5)


@pytest.mark.slow
def test_devices_learn_the_same_together() -> None:
  learning, found = agent('gru', optimizer='adam', learning_rate=1e-3), []
  x = window(core=learning.network.initial_state(B))
  for devices in (1, 2):
    step = jax.jit(learner(learning, on_policy(), topology.learner_mesh(devices)))
    train = jax.jit(learning.init)(jax.random.key(0))
    for i in range(3):
      train, _, metrics, _ = step(train, (), x, jax.random.key(i), jnp.int32(i))
    found.append((train, metrics))
  for one, other in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


# --- through updates -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gradient_through_updates_against_differences() -> None:
  """Of the policy's loss after three updates, along random directions of the rule's arrays.

  By SGD: the gradient leaves out Adam's denominator, which is no derivative then.
  """
  learning = agent(optimizer='sgd', learning_rate=0.3, max_grad_norm=0.5)
  train, windows = jax.jit(learning.init)(jax.random.key(0)), [window(seed) for seed in range(4)]
  update, first = updater(learning), params()  # in float64 another rule would be drawn

  @jax.jit
  def outcome(rule: Any) -> Any:
    after = train
    for x in windows[:3]:
      after = update(rule, after, x)
    said, _ = jax.jit(learning.network.unroll)(after.params, (), windows[3].timesteps)
    log_prob = learning.network.distribution.log_prob(said.policy[:-1], windows[3].outputs.action)
    return jnp.sum(windows[3].timesteps.reward[1:] * log_prob)

  with jax.enable_x64(True):
    rule = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), first)
    train, windows = jax.tree.map(
      lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, (train, windows)
    )
    gradient = jax.jit(jax.grad(outcome))(rule)
    for seed in range(3):
      keys = jax.random.split(jax.random.key(seed), len(rule))
      pairs = zip(sorted(rule), keys, strict=True)
      along = {name: jax.random.normal(key, rule[name].shape) for name, key in pairs}
      forth, back = (outcome({k: rule[k] + h * along[k] for k in rule}) for h in (1e-6, -1e-6))
      expected = (forth - back) / 2e-6
      found = sum(jnp.vdot(gradient[k], along[k]) for k in rule)
      np.testing.assert_allclose(found, expected, rtol=1e-4)
      assert abs(expected) > 1e-3
    assert all(jnp.abs(g).max() > 0 for g in gradient.values())


# --- files, actions -------------------------------------------------------------------------------------


def test_a_rule_is_written_as_it_is_read(tmp_path: Path) -> None:
  path, expected = tmp_path / 'rule.npz', rules.init(jax.random.key(7), SIZES)
  storage.save(path, expected)
  found = storage.load(str(path), storage.sha256(str(path)), rules.Sizes)
  assert rules.Sizes.of(found) == SIZES and found.keys() == expected.keys()
  jax.tree.map(np.testing.assert_array_equal, dict(expected), found)
  sizes = rules.Sizes()
  assert (sizes.predictions, sizes.trajectory, sizes.embedding) == (30, 256, 16)


def test_files_of_another_kind_or_content_are_refused(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'disco.*--agent disco'):
    LPG(rule_files.small()).params()
  other = tmp_path / 'other.npz'
  storage.save(other, {'lstm/w': np.ones((3, 1), np.float32)})
  with pytest.raises(UsageError, match=r'10.*lstm/'):
    LPG(str(other)).params()
  with pytest.raises(UsageError, match=r'--agent.network.predictions 5.*30'):
    LPG(rule_files.small_lpg()).params()
  with pytest.raises(UsageError, match=r'expected 00$'):
    dataclasses.replace(agent(), rule_sha256='00').params()
  path = tmp_path / 'rule.npz'
  storage.save(path, params() | {'policy/linear/w': np.ones((3, 1), np.float32)})
  with pytest.raises(UsageError, match=r'policy/linear/w.*float32\[3.*1\].*float32\[8'):
    dataclasses.replace(agent(), rule=str(path), rule_sha256='').params()
  assert 'not a released one' in agent().opening()


def test_acting_needs_no_file(tmp_path: Path) -> None:
  path = tmp_path / 'rule.npz'
  storage.save(path, params())
  learning = LPG(str(path), network=PolicyPredictor(predictions=SIZES.predictions))
  path.unlink()
  found = bind(dataclasses.replace(learning, greedy=True), make('podrace:catch'))
  train = jax.jit(found.init)(jax.random.key(0))
  timestep = jax.tree.map(lambda x: np.repeat(np.asarray(x), 5, axis=0), found.network.example())
  act = jax.jit(lambda key: found.act(train.params, (), timestep, key)[0].action)
  outputs = {tuple(act(jax.random.key(k)).tolist()) for k in (0, 1)}
  assert len(outputs) == 1 and len(set(outputs.pop())) == 1


def test_settings_that_cannot_be() -> None:
  with pytest.raises(ValueError, match=r'Discrete.*Box'):
    PolicyPredictor().bind(SPACE, SPACE)
  with pytest.raises(ValueError, match=r'predictions.*1'):
    PolicyPredictor(predictions=0)
  for settings in (dict(discount=1.1), dict(y_cost=-1.0), dict(learning_rate=-1.0)):
    with pytest.raises(ValueError, match='must be'):
      LPG(**settings)
