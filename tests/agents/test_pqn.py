"""PQN: targets and steps against a slow reference, exploration, and tasks that a broken loss fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
import streams
from collectives import collectives
from compiling import compile_quickly, jit  # noqa: F401 (a fixture)
from gymnasium import spaces
from shorthand import Patch, slow_after

from podrace import returns, topology
from podrace.agents import minibatch
from podrace.agents.pqn import PQN, PQNBatch
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.learner import learner
from podrace.networks import QNetwork
from podrace.replay import on_policy
from podrace.settings.agents import bind
from podrace.types import TimeStep, Trajectory

T, B, FEATURES, ACTIONS = 12, 8, 3, 3
SPACES = spaces.Box(-1, 1, (FEATURES,)), spaces.Discrete(ACTIONS)


@dataclasses.dataclass(frozen=True)
class Stepping(PQN):
  """PQN with plain gradient descent."""

  def optimiser(self) -> optax.GradientTransformation:
    return optax.sgd(self.learning_rate)


LINEAR = Stepping(
  QNetwork(hidden=()).bind(*SPACES), learning_rate=0.3, lambda_=0.7, epochs=2, minibatches=1
)


def trajectory(agent: Any, seed: int = 0) -> Trajectory:
  """Random; the values of acting are of no network."""
  rng = np.random.default_rng(seed)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(FEATURES))
  ends = steps.step_type[:-1] == 2
  assert (ends & (steps.discount[:-1] == 0)).any() and (ends & (steps.discount[:-1] == 1)).any()
  core = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), agent.initial_state(np.arange(B)))  # fmt: skip
  action = rng.integers(0, ACTIONS, (T, B)).astype(np.int32)
  best = rng.normal(size=(T, B)).astype(np.float32)
  return streams.trajectory(steps, action, best, core)


def update(agent: Any, t: Trajectory, devices: int = 1) -> tuple[Any, Any, Any]:
  train = jax.device_get(jax.jit(agent.init)(jax.random.key(0)))
  step = jit(learner(agent, on_policy(), topology.learner_mesh(devices)))
  after, _, metrics, _ = step(train, (), t, jax.random.key(1), jnp.int32(0))
  return train, jax.device_get(after), jax.device_get(metrics)


# --- targets ----------------------------------------------------------------------------------


def test_lambda_returns() -> None:
  rng = np.random.default_rng(0)
  r, v, lambda_ = (rng.random(T).astype(np.float32) for _ in range(3))
  d = (0.9 * (rng.random(T) > 0.2)).astype(np.float32)
  expected = jit(rlax.lambda_returns)(r, d, v, lambda_)
  np.testing.assert_allclose(jit(returns.lambda_returns)(r, d, lambda_, v), expected, rtol=1e-5)


def targets(agent: PQN, steps: TimeStep, best: np.ndarray) -> dict[tuple[int, int], float]:
  """Peng's Q(lambda) of valid steps, by its definition, one episode after the other.

  `best` [T+1, B] are the largest values of all timesteps. A target is a weighted sum of n-step
  returns; the longest, to the end of the episode or of the trajectory, has the rest of the weight.
  """
  actual = {}
  for b in range(B):
    for times in streams.episodes(steps.step_type[:, b]):
      v = [0.0 if steps.discount[t, b] == 0 else float(best[t, b]) for t in times]
      for k in range(len(times) - 1):
        longest = len(times) - 1 - k
        total = 0.0
        for n in range(1, longest + 1):
          rewards = [float(steps.reward[times[k + i], b]) for i in range(1, n + 1)]
          of_n = sum(agent.discount**i * r for i, r in enumerate(rewards))
          of_n += agent.discount**n * v[k + n]
          share = (1 - agent.lambda_) if n < longest else 1.0
          total += share * agent.lambda_ ** (n - 1) * of_n
        actual[times[k], b] = total
  return actual


def descended(agent: PQN, params: Any, t: Trajectory) -> tuple[np.ndarray, np.ndarray, float]:
  """The linear network after the epochs, by hand in float64, and the mean loss."""
  head = params.network['advantage_head']
  w, bias = np.float64(head['kernel']), np.float64(head['bias'])
  x = np.float64(t.timesteps.observation)
  best = np.concatenate([t.outputs.extras, (x[-1] @ w + bias).max(-1)[None]])
  goals, losses = targets(agent, t.timesteps, best), []
  for _ in range(agent.epochs):
    dw, db, loss = np.zeros_like(w), np.zeros_like(bias), 0.0
    for (i, b), goal in goals.items():
      a = t.outputs.action[i, b]
      error = x[i, b] @ w[:, a] + bias[a] - goal
      dw[:, a] += error * x[i, b] / (T * B)
      db[a] += error / (T * B)
      loss += 0.5 * error**2 / (T * B)
    w, bias = w - agent.learning_rate * dw, bias - agent.learning_rate * db
    losses.append(loss)
  return w, bias, float(np.mean(losses))


def compare(agent: PQN) -> None:
  t = trajectory(agent)
  before, after, metrics = update(agent, t)
  w, bias, loss = descended(agent, before.params, t)
  head = after.params.network['advantage_head']
  np.testing.assert_allclose(head['kernel'], w, atol=1e-5)
  np.testing.assert_allclose(head['bias'], bias, atol=1e-5)
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)


@pytest.mark.parametrize('lambda_', [0.0, 0.7, 1.0])
def test_two_epochs_against_a_slow_reference(lambda_: float) -> None:
  """The targets stay as acting made them; the second epoch has the same ones."""
  compare(dataclasses.replace(LINEAR, lambda_=lambda_))


TARGETS, BATCH, LOSS = PQN.targets, PQN.batch, PQN.loss


def changed(steps: TimeStep, **fields: Any) -> TimeStep:
  return steps._replace(**fields)


MUTANTS: dict[str, tuple[str, Any]] = {
  'a trace leaks past LAST': (
    'targets',
    lambda self, t, v: TARGETS(self, changed(t, step_type=jnp.ones_like(t.step_type)), v),
  ),
  'a truncation as a termination': (
    'targets',
    lambda self, t, v: TARGETS(self, changed(t, discount=jnp.where(t.last, 0.0, t.discount)), v),
  ),
  'a termination as a truncation': (
    'targets',
    lambda self, t, v: TARGETS(self, changed(t, discount=jnp.ones_like(t.discount)), v),
  ),
  'rewards one late': (
    'targets',
    lambda self, t, v: TARGETS(self, changed(t, reward=jnp.roll(t.reward, 1, 0)), v),
  ),
  'values one late': ('targets', lambda self, t, v: TARGETS(self, t, jnp.roll(v, 1, 0))),
  'no mask': (
    'batch',
    lambda self, p, t: (b := BATCH(self, p, t))._replace(mask=jnp.ones_like(b.mask)),
  ),
  'the sign of the target': (
    'loss',
    lambda self, n, s, b: LOSS(self, n, s, b._replace(target=-b.target)),
  ),
}


@pytest.mark.parametrize('name', MUTANTS)
def test_a_mutation_is_noticed(name: str, monkeypatch: Patch) -> None:
  monkeypatch.setattr(PQN, *MUTANTS[name])
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare(LINEAR)


# --- recurrent --------------------------------------------------------------------------------

RECURRENT = dataclasses.replace(
  LINEAR, network=QNetwork(hidden=(4,), core='gru', core_size=5).bind(*SPACES), epochs=1
)


def recurrent_loss(network: Any, t: Trajectory, goals: np.ndarray, mask: np.ndarray) -> Any:
  q, _ = RECURRENT.network.unroll(network, t.agent_state, t.timesteps)
  taken = jnp.take_along_axis(q[:-1, ..., 0], t.outputs.action[..., None], axis=-1)[..., 0]
  return jnp.mean(mask * 0.5 * (goals - taken) ** 2)


def test_recurrent_targets_are_made_in_the_loss_from_the_state_of_acting() -> None:
  """By the present parameters, without a gradient through them; the values of acting have no part."""
  t = trajectory(RECURRENT)
  before, after, metrics = update(RECURRENT, t)
  q, _ = jit(RECURRENT.network.unroll)(before.params.network, t.agent_state, t.timesteps)
  q = np.asarray(q)
  actual = targets(RECURRENT, t.timesteps, np.asarray(q[..., 0]).max(-1))
  goals, mask = np.zeros((T, B), np.float32), np.zeros((T, B), np.float32)
  for where, x in actual.items():
    goals[where], mask[where] = x, 1.0
  both = jit(jax.value_and_grad(recurrent_loss))(before.params.network, t, goals, mask)
  loss, gradient = jax.device_get(both)
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
  expected = jax.tree.map(lambda x, g: x - 0.3 * g, before.params.network, gradient)
  for x, y in zip(jax.tree.leaves(after.params.network), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)


def test_a_recurrent_minibatch_has_whole_unrolls() -> None:
  agent, t = dataclasses.replace(RECURRENT, minibatches=4, epochs=3), trajectory(RECURRENT)
  rows = np.asarray(minibatch.indices(agent, jax.random.key(0), t))
  assert rows.shape == (12, 2)
  for epoch in rows.reshape(3, -1):
    assert sorted(epoch) == list(range(B))
  part, core = minibatch.take(agent, agent.batch(None, t), t.agent_state, rows[0])
  assert isinstance(part, PQNBatch) and part.timesteps.reward.shape == (T + 1, 2)
  np.testing.assert_array_equal(core[0], t.agent_state[0][rows[0]])


# --- devices ----------------------------------------------------------------------------------

SHARED = {
  'feed-forward': PQN(QNetwork(hidden=(8,), layer_norm=True).bind(*SPACES), minibatches=3, total_updates=9, learning_rate=3e-3),
  'recurrent': PQN(QNetwork(hidden=(8,), core='lstm', core_size=4).bind(*SPACES), minibatches=1, total_updates=9, learning_rate=3e-3),
}  # fmt: skip


@pytest.mark.parametrize('name', slow_after(1, *SHARED))
def test_an_update_is_the_same_on_any_number_of_devices(name: str) -> None:
  t = trajectory(SHARED[name])
  (begun, one, metrics), (_, eight, of_eight) = (update(SHARED[name], t, n) for n in (1, 8))
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
  for key, x in metrics.items():
    np.testing.assert_allclose(x, of_eight[key], rtol=1e-4, atol=1e-5)
  moves = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), begun.params.network, one.params.network)
  assert min(jax.tree.leaves(moves)) > 1e-4


def test_there_is_one_all_reduce_for_each_gradient() -> None:
  agent = SHARED['feed-forward']
  step = jit(learner(agent, on_policy(), topology.learner_mesh(8)))
  train = jax.jit(agent.init)(jax.random.key(0))
  text = step.lower(train, (), trajectory(agent), jax.random.key(0), jnp.int32(0)).compile().as_text()  # fmt: skip
  assert [(c.kind, c.depth) for c in collectives(text)] == [('all-reduce', 1)]


# --- acting -----------------------------------------------------------------------------------


def test_epsilon_falls_over_a_share_of_the_run() -> None:
  agent = dataclasses.replace(LINEAR, epsilon_start=0.9, epsilon=0.1, epsilon_share=0.5, total_updates=40)  # fmt: skip
  actual = [float(agent.epsilon_after(jnp.int32(i))) for i in (0, 5, 10, 20, 40)]
  assert actual == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])
  train, after, metrics = update(agent, trajectory(agent))
  assert float(train.params.epsilon) == pytest.approx(0.9)
  assert float(after.params.epsilon) == pytest.approx(0.86) == float(metrics['epsilon'])
  never = dataclasses.replace(agent, epsilon_share=0.0)
  assert float(never.epsilon_after(jnp.int32(1))) == pytest.approx(0.1)


def test_a_warm_start_explores_from_the_beginning() -> None:
  agent = dataclasses.replace(LINEAR, epsilon_start=0.9)
  own, other = (jax.jit(agent.init)(jax.random.key(i)) for i in (0, 1))
  warm = agent.warm_start(own, other.params._replace(epsilon=jnp.float32(0.05)))
  assert float(warm.params.epsilon) == pytest.approx(0.9)
  for a, b in zip(*map(jax.tree.leaves, (warm.params.network, other.params.network)), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(('greedy', 'share'), [(True, 1.0), (False, 1 - 0.3 * 2 / 3)])
def test_all_environments_share_an_epsilon(greedy: bool, share: float) -> None:
  agent = dataclasses.replace(LINEAR, greedy=greedy)
  params = jax.jit(agent.init)(jax.random.key(0)).params._replace(epsilon=jnp.float32(0.3))
  rng, n = np.random.default_rng(0), 4000
  x = rng.normal(size=(n, FEATURES)).astype(np.float32)
  steps = TimeStep(x, np.zeros(n), np.ones(n), np.ones(n, np.int8))
  output, _ = jax.device_get(jit(agent.act)(params, (), steps, jax.random.key(1)))
  best = np.asarray(jit(agent.network.step)(params.network, (), steps)[0])[..., 0]
  np.testing.assert_array_equal(output.extras, best.max(-1))
  assert np.mean(output.action == best.argmax(-1)) == pytest.approx(share, abs=0.03)


# --- networks ---------------------------------------------------------------------------------


def test_layers_are_normalized_over_their_channels() -> None:
  """Not over the places of an image; against NumPy."""
  image = spaces.Box(0, 1, (5, 6, 2), np.float32)
  net = QNetwork(torso='grid', hidden=(7,), layer_norm=True).bind(image, SPACES[1])
  params = jax.device_get(jax.jit(net.init)(jax.random.key(0)))
  x = np.random.default_rng(0).random((4, 5, 6, 2)).astype(np.float32)
  steps = TimeStep(x, np.zeros(4), np.ones(4), np.ones(4, np.int8))
  q = np.asarray(jit(net.step)(params, (), steps)[0])

  def normal(y: np.ndarray) -> np.ndarray:
    centred = y - y.mean(-1, keepdims=True)
    return np.maximum(centred / np.sqrt(y.var(-1, keepdims=True) + 1e-6), 0)

  torso = params['torso']
  conv, dense = torso['Grid_0']['Conv_0'], torso['Mlp_0']['Dense_0']
  patches = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
  y = normal(np.einsum('bijchw,hwcf->bijf', patches, conv['kernel']) + conv['bias'])
  y = normal(y.reshape(4, -1) @ dense['kernel'] + dense['bias'])
  head = params['advantage_head']
  np.testing.assert_allclose(q[..., 0], y @ head['kernel'] + head['bias'], atol=1e-5)


def test_networks_that_pqn_refuses() -> None:
  with pytest.raises(ValueError, match='pqn learns values'):
    PQN(QNetwork(head='quantile'))
  with pytest.raises(ValueError, match='previous_action'):
    PQN(QNetwork(core='gru', previous_action=True))
  with pytest.raises(ValueError, match='layer_norm'):
    image = spaces.Box(0, 255, (48, 48, 3), np.uint8)
    QNetwork(torso='impala-deep', layer_norm=True).bind(image, SPACES[1])


# --- learning ---------------------------------------------------------------------------------

CATCH = PQN(
  QNetwork(hidden=(32,), layer_norm=True), learning_rate=1e-2, epochs=4, minibatches=5, lambda_=0.9,
  epsilon=0.02, epsilon_share=0.4,
)  # fmt: skip
MEMORY = PQN(
  QNetwork(hidden=(32,), core='gru', core_size=32), learning_rate=3e-3, epochs=4, minibatches=4,
  lambda_=0.9, epsilon=0.05, epsilon_share=0.4,
)  # fmt: skip


def score(agent: PQN, env: str, updates: int, length: int, devices: int = 1) -> float:
  """The mean return of greedy episodes after these updates."""
  world = make(env)
  bound = bind(agent, world, updates, 32)
  program = Anakin(bound, world, on_policy(), topology.learner_mesh(devices), 32, length)
  state = program.run(program.init(jax.random.split(jax.random.key(0), 1)), jnp.int32(updates))
  _, state = program.read_log(state)
  program = dataclasses.replace(program, agent=dataclasses.replace(bound, greedy=True))
  log, _ = program.read_log(program.run(state, jnp.int32(30)))
  assert log['episodes'] > 60
  return float(log['return_sum'] / log['episodes'])


@pytest.mark.parametrize('devices', slow_after(1, 1, 8))
def test_learns_catch(devices: int) -> None:
  """A random policy has -0.6, and so has one that learns without targets."""
  assert score(CATCH, 'podrace:catch', 120, 20, devices) > 0.9


@pytest.mark.slow
def test_a_loss_without_targets_does_not_learn_catch(monkeypatch: Patch) -> None:
  monkeypatch.setattr(PQN, 'targets', lambda self, t, v: jnp.zeros_like(v))
  assert score(CATCH, 'podrace:catch', 120, 20) < 0.3


@pytest.mark.parametrize(
  ('core', 'low', 'high'), slow_after(0, ('gru', 0.9, 1.0), ('none', -0.2, 0.2))
)
def test_recurrent_pqn_remembers(core: Any, low: float, high: float) -> None:
  """Without memory the expected return is 0."""
  agent = dataclasses.replace(MEMORY, network=dataclasses.replace(MEMORY.network, core=core))
  assert low <= score(agent, 'podrace:memory,length=5', 150, 16) <= high
