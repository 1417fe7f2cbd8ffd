"""What value-based agents learn from: targets and losses against rlax, numpy and hand-made numbers."""

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
from gymnasium import spaces
from jax import lax
from shorthand import slow_after

from podrace import returns, topology
from podrace.agents import value_based
from podrace.agents.d4pg import D4PG
from podrace.agents.dqn import DQN
from podrace.agents.r2d2 import R2D2
from podrace.agents.sac import SAC
from podrace.distributions import MASKED_VALUE
from podrace.learner import learner
from podrace.networks import LearnedModel, Predictor, QNetwork
from podrace.types import FIRST, LAST, MID, ActorOutput, Replay, Sample, TimeStep, Trajectory

T, B = 12, 7


def test_n_step_by_hand() -> None:
  r, d = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.5, 0.5, 0.5])

  def step(d: Any, last: list[bool]) -> tuple[float, ...]:
    return tuple(float(x) for x in returns.n_step(r, d, jnp.array(last)))

  assert step(d, [False, False, False]) == (1 + 1 + 1, 0.125, 3)
  assert step(d, [False, True, False]) == (1 + 1, 0.25, 2)  # truncated: bootstrapped from there
  assert step(d.at[0].set(0), [True, False, False]) == (1, 0, 1)  # terminated
  assert step(d, [False, False, True]) == (3, 0.125, 3)


@pytest.mark.parametrize('n', slow_after(3, 1, 5, 20, 2, 12))
def test_n_step_bootstrapped(n: int) -> None:
  rng = np.random.default_rng(n)
  r, v = (rng.normal(size=T).astype(np.float32) for _ in range(2))
  d = (0.9 * (rng.random(T) > 0.2)).astype(np.float32)
  ones = np.ones(T, np.float32)
  expected = jax.jit(lambda *x: rlax.n_step_bootstrapped_returns(*x, min(n, T)))(r, d, v)
  bootstrapped = jax.jit(lambda *x: returns.n_step_bootstrapped(*x, n))
  np.testing.assert_allclose(bootstrapped(r, d, ones, v), expected, rtol=1e-5, atol=1e-6)
  # by the transition's own rule, where episodes end
  last = rng.random(T) < 0.3
  found = np.asarray(bootstrapped(r, d, np.float32(1.0 - last), v))

  @jax.jit
  def by_transition(*x: Any) -> Any:
    return [returns.n_step(*(y[t : t + n] for y in x)) for t in range(T)]

  for t, one in enumerate(jax.device_get(by_transition(r, d, last))):
    expected = one.r_t + one.discount_t * v[t + int(one.end) - 1]
    assert float(found[t]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_steps_beyond_a_stream_are_not_compiled() -> None:
  def operations(n: int) -> int:
    x = jnp.ones(T)
    return len(jax.make_jaxpr(lambda: returns.n_step_bootstrapped(x, x, x, x, n))().eqns)

  assert operations(T + 50) == operations(T) > operations(2)


def test_rescaling() -> None:
  x = jnp.linspace(-300, 300, 1001)
  pair = rlax.SIGNED_HYPERBOLIC_PAIR
  np.testing.assert_allclose(returns.rescale(x), pair.apply(x), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(returns.unscale(returns.rescale(x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('epsilon', [1e-3, 3e-2])
def test_rescaling_loses_no_digits(epsilon: float) -> None:
  """Not to what is small either; against float64."""
  positive = np.float32(np.logspace(-6, 4, 200))
  x = np.concatenate([-positive, [0], positive]).astype(np.float32)
  np.testing.assert_allclose(returns.rescale(x, epsilon), h(x, epsilon), rtol=1e-6)
  np.testing.assert_allclose(returns.unscale(x, epsilon), inverse(x, epsilon), rtol=1e-5)


def h(x: Any, epsilon: float) -> Any:
  """Proposition A.2 of Pohlen et al., in float64."""
  x = np.float64(x)
  return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def inverse(x: Any, epsilon: float) -> Any:
  x = np.float64(x)
  root = np.sqrt(1 + 4 * epsilon * (np.abs(x) + 1 + epsilon))
  return np.sign(x) * (((root - 1) / (2 * epsilon)) ** 2 - 1)


def test_projection() -> None:
  rng = np.random.default_rng(0)
  support = jnp.linspace(-2, 3, 11)
  project, rlax_s = map(jax.jit, (returns.project, rlax.categorical_l2_project))
  for _ in range(20):
    atoms = np.sort(rng.uniform(-4, 5, 11)).astype(np.float32)
    p = rng.dirichlet(np.ones(11)).astype(np.float32)
    found = np.asarray(project(atoms, p, support))
    np.testing.assert_allclose(found, rlax_s(atoms, p, support), rtol=1e-4, atol=1e-5)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)


SUPPORTS = {  # of 2 bins up to the largest that a network has
  'of LearnedModel': LearnedModel().support,
  'of LearnedModel, 601 bins': LearnedModel(bins=601).support,
  'of Disco103': Predictor().support,
  'far from 0': jnp.linspace(1e4, 1e4 + 1, 21),
  'of both signs': jnp.linspace(-1, 1e4, 1001),
  'of both signs, many': jnp.linspace(-1, 1e4, 4001),
  'tiny': jnp.linspace(-1e-6, 3e-6, 7),
  'two': jnp.array([-1.0, 2.0]),
  'uneven': jnp.array([-3.0, -1.0, 0.5, 0.75, 9.0]),
}


@pytest.mark.parametrize(
  'name',
  [pytest.param(x, marks=pytest.mark.slow if x == 'of both signs, many' else ()) for x in SUPPORTS],
)
def test_a_projection_adds_up_and_keeps_the_mean(name: str) -> None:
  """Against two-hots by a search in double precision, of numbers within and beyond the support and on its atoms."""
  support: Any = SUPPORTS[name]
  s = np.asarray(support, np.float64)
  x = np.concatenate([np.linspace(s[0] - 1, s[-1] + 1, 1001), s, s[:-1] + np.diff(s) / 3])
  x = x.astype(np.float32)
  one = jax.vmap(lambda y: returns.project(y[None], jnp.ones(1), support))
  found = np.asarray(jax.jit(one)(x), np.float64)
  np.testing.assert_allclose(found.sum(-1), 1, atol=5e-7)
  assert (found >= 0).all() and ((found > 1e-6).sum(-1) <= 2).all()
  inside = np.clip(np.float64(x), s[0], s[-1])
  i = np.clip(np.searchsorted(s, inside, side='right') - 1, 0, len(s) - 2)
  expected, share = np.zeros((len(x), len(s))), (inside - s[i]) / (s[i + 1] - s[i])
  np.put_along_axis(expected, i[:, None], 1 - share[:, None], axis=1)
  np.put_along_axis(expected, i[:, None] + 1, share[:, None], axis=1)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  p = np.random.default_rng(0).dirichlet(np.ones(len(x))).astype(np.float32)
  many = np.asarray(jax.jit(returns.project)(x, p, support), np.float64)
  np.testing.assert_allclose(many, p.astype(np.float64) @ expected, atol=1e-6)


def test_the_share_of_targets_outside_of_the_support() -> None:
  support = np.linspace(0.0, 10.0, 11, dtype=np.float32)
  p = np.tile(np.eye(11, dtype=np.float32)[10], (5, 1))
  p[4] = 1 / 11
  r_t, discount_t = jnp.array([1.0, 2, -1, 5, 5]), jnp.array([0.9, 0.9, 0, 1, 0.9])
  mask = jnp.array([1.0, 1, 1, 0, 1])  # means 10, 11, -1, 15 (of no episode) and 9.5
  nothing: Any = ()
  step = value_based.NStepTransitions(r_t, discount_t, nothing, nothing, (), mask, nothing)
  targets, metrics = jax.device_get(jax.jit(value_based.project)(step, p, support))
  assert float(metrics['outside_support']) == pytest.approx(2 / 4)
  np.testing.assert_allclose(targets @ support, [10, 10, 0, 10, 8.5], atol=1e-5)
  np.testing.assert_allclose(targets.sum(-1), np.ones(5), atol=1e-6)


@pytest.mark.parametrize('threshold', [1.0, 0.4])
def test_quantile_loss(threshold: float) -> None:
  rng = np.random.default_rng(0)
  q, target = rng.normal(0, 2, size=(2, 3, 9)).astype(np.float32)  # [2, A, N]
  tau = (np.arange(9, dtype=np.float32) + 0.5) / 9
  loss = jax.jit(
    lambda q, target: rlax.quantile_q_learning(
      q, tau, 1, 0.0, 1.0, target, target, huber_param=threshold
    )
  )(q.T, target.T)
  best = int(np.argmax(target.mean(-1)))
  found = jax.jit(lambda q, target: returns.quantile_loss(q, target, threshold))(q[1], target[best])
  assert float(found) == pytest.approx(float(loss) / threshold, rel=1e-4)


def test_epsilon_ladder_is_ape_x_s() -> None:
  found = value_based.epsilon_ladder(jnp.arange(8), 8, 0.4, 7.0)
  np.testing.assert_allclose(found, [0.4 ** (1 + 7 * i / 7) for i in range(8)], rtol=1e-5)
  expected = [0.3 ** (1 + 5 * i / 3) for i in range(4)]
  r2d2 = R2D2(epsilon_base=0.3, epsilon_power=5.0, total_envs=4)
  r2d2 = dataclasses.replace(r2d2, network=r2d2.network.bind(VECTOR, spaces.Discrete(4)))
  dqn = DQN(epsilon_ladder=True, epsilon_base=0.3, epsilon_power=5.0, total_envs=4)
  np.testing.assert_allclose(r2d2.initial_state(jnp.arange(4)).epsilon, expected, rtol=1e-5)
  np.testing.assert_allclose(dqn.initial_state(jnp.arange(4)), expected, rtol=1e-5)


def test_epsilon_greedy() -> None:
  values = jnp.tile(jnp.array([[0.0, 2.0, MASKED_VALUE, 2.0, 1.0]]), (40_000, 1))
  epsilon = jnp.full(40_000, 0.2)
  action = value_based.epsilon_greedy(values, epsilon, jax.random.key(0))
  share = np.bincount(action, minlength=5) / 40_000
  np.testing.assert_allclose(share, [0.05, 0.45, 0, 0.45, 0.05], atol=0.01)
  assert share[2] == 0
  best = value_based.epsilon_greedy(values, 0 * epsilon, jax.random.key(1))
  assert set(np.asarray(best).tolist()) == {1, 3}


def test_target_networks_follow() -> None:
  def found(steps: int, period: int, rate: float) -> float:
    return float(value_based.follow(jnp.float32(1), jnp.float32(5), jnp.int32(steps), period, rate))

  assert [found(steps, 3, 1.0) for steps in range(1, 7)] == [1, 1, 5, 1, 1, 5]
  assert [found(steps, 1, 0.25) for steps in (1, 2)] == [2, 2]


def act(agent: Any, params: Any, state: Any, timestep: TimeStep, seed: int = 3) -> np.ndarray:
  output, _ = jax.jit(agent.act)(params, state, timestep, jax.random.key(seed))
  return np.asarray(output.action)


def many(network: Any, n: int = 400) -> TimeStep:
  """Timesteps [n] with random observations."""
  observation = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
  timestep = jax.tree.map(lambda x: np.repeat(np.asarray(x), n, axis=0), network.example())
  return timestep._replace(observation=observation)


def test_how_dqn_explores() -> None:
  """By the run's epsilon, or each environment's own, beside noise as well; greedy not at all."""
  network = QNetwork(hidden=(8,)).bind(VECTOR, spaces.Discrete(4))
  timestep = many(network)
  agent = DQN(network=network, total_envs=400)
  params = jax.jit(agent.init)(jax.random.key(0)).params  # their epsilon is 1
  mean = jax.jit(lambda p: network.mean(network.step(p, (), timestep)[0]))
  best = np.argmax(np.asarray(mean(params.network)), axis=-1)

  def best_share(agent: DQN, state: Any, epsilon: float) -> float:
    given = params._replace(epsilon=jnp.float32(epsilon))
    return float(np.mean(act(agent, given, state, timestep) == best))

  ladder = dataclasses.replace(agent, epsilon_ladder=True)
  assert best_share(agent, (), 0.0) == best_share(ladder, jnp.zeros(400), 1.0) == 1
  assert best_share(agent, (), 1.0) < 0.5 and best_share(ladder, jnp.ones(400), 0.0) < 0.5
  assert best_share(dataclasses.replace(agent, greedy=True), (), 1.0) == 1
  noisy = dataclasses.replace(network, noisy=True)
  agent = DQN(network=noisy)
  params = jax.jit(agent.init)(jax.random.key(0)).params
  noise_key, _ = jax.random.split(jax.random.key(3))
  step = jax.jit(lambda p, key: noisy.step(p, (), timestep, key, per_row=key is not None)[0])
  best = np.argmax(np.asarray(step(params.network, noise_key))[..., 0], axis=-1)
  np.testing.assert_array_equal(act(agent, params._replace(epsilon=0.0), (), timestep), best)
  assert (
    0.15 < np.mean(act(agent, params, (), timestep) == best) < 0.4
  )  # at random beside the noise
  q = np.asarray(step(params.network, None))
  greedy = act(dataclasses.replace(agent, greedy=True), params, (), timestep)
  np.testing.assert_array_equal(greedy, np.argmax(q[..., 0], axis=-1))


@pytest.mark.slow
def test_how_others_explore() -> None:
  network = QNetwork(hidden=(8,), core='gru', core_size=5).bind(VECTOR, spaces.Discrete(4))
  timestep = many(network)
  agent = R2D2(network=network, total_envs=400)
  params = jax.jit(agent.init)(jax.random.key(0)).params
  state = agent.initial_state(jnp.arange(400))._replace(epsilon=jnp.ones(400))
  q, _ = network.step(params, state.core, timestep)
  best = np.argmax(network.mean(q), axis=-1)
  assert np.mean(act(agent, params, state, timestep) == best) < 0.5
  greedy = dataclasses.replace(agent, greedy=True)
  np.testing.assert_array_equal(act(greedy, params, state, timestep), best)
  for agent, spread in ((bound(D4PG(noise=0.3)), 0.3), (bound(SAC()), None)):
    params = jax.jit(agent.init)(jax.random.key(0)).params
    mode = act(dataclasses.replace(agent, greedy=True), params, (), timestep)
    outputs, _ = agent.actor.step(params, (), timestep)
    mean = np.tanh(outputs[..., :2] if spread is None else outputs)
    np.testing.assert_allclose((mode - [0, 5]) / [2, 5], mean, atol=1e-5)
    found = (act(agent, params, (), timestep) - [0, 5]) / [2, 5] - mean
    inside = np.abs(mean) < 0.2  # where little is cut off
    assert (spread is None or abs(found[inside].std() - spread) < 0.05) and found.std() > 0.1


def test_squared_errors_of_dqn() -> None:
  loss, priority = DQN(huber=0.0).losses(jnp.array([[1.0], [5.0]]), jnp.array([[4.0], [3.0]]))
  assert loss.tolist() == [4.5, 2.0] and priority.tolist() == [3.0, 2.0]


def test_a_distribution_that_is_right_has_no_priority() -> None:
  """Though its loss is the target's entropy; that of a certain target is all of it."""
  target = jnp.array([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]])
  agent = DQN(network=QNetwork(head='categorical', num_atoms=3, v_min=-1, v_max=1))
  loss, priority = agent.losses(jnp.log(jnp.array([[0.2, 0.5, 0.3]] * 2)), target)
  np.testing.assert_allclose(loss, [1.0296530, 0.6931472], rtol=1e-5)
  np.testing.assert_allclose(priority, [0.0, 0.6931472], rtol=1e-5, atol=1e-6)


# --- whole losses ---------------------------------------------------------------------------------


def fixed(sample: Sample) -> Replay:
  """A replay that always gives this sample, as each device's own; its state adds up priorities."""

  def update(state: Any, index: Any, priority: Any) -> Any:
    return state + priority

  return Replay(
    lambda example: jnp.zeros(B),
    lambda state, trajectory: state,
    lambda state, key: lax.pcast(jax.tree.map(jnp.asarray, sample), topology.AXIS, to='varying'),
    update,
    lambda update: 1,
  )


def learning(agent: Any, sample: Sample) -> Any:
  """`learn` from one sample, compiled once: a function of the state."""
  step = jax.jit(learner(agent, fixed(sample), topology.learner_mesh(1)))

  def learned(train: Any) -> tuple[Any, Any, Any]:
    train, priority, metrics, _ = step(
      train, jnp.zeros(B), sample.trajectory, jax.random.key(1), jnp.int32(0)
    )
    return train, priority, metrics

  return learned


def learn(agent: Any, train: Any, sample: Sample) -> tuple[Any, Any, Any]:
  """(the new state, priorities, metrics) of one step on one device."""
  return learning(agent, sample)(train)


def random_window(length: int, seed: int, action: Any, state: Any = (), extras: Any = ()) -> Any:
  rng = np.random.default_rng(seed)
  steps = streams.timesteps(rng, length + 1, B, streams.floats(3))
  outputs = ActorOutput(action(rng, (length, B)), extras)
  return Trajectory(steps, outputs, state, np.arange(B, dtype=np.int32))


def discrete(rng: Any, shape: Any) -> Any:
  return rng.integers(0, 4, shape).astype(np.int32)


VECTOR = spaces.Box(-10, 10, (3,), np.float32)


def assert_gradient(opt_state: Any, gradient: Any, max_norm: float = np.inf) -> None:
  """Adam's first moment after one step is a tenth of the gradient, cut to its largest norm."""

  def is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)

  (adam,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
  flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])
  norm = np.linalg.norm(flat)
  assert norm > 1e-2
  found = 10 * np.asarray(adam.mu)
  np.testing.assert_allclose(found, flat * min(1, max_norm / norm), rtol=1e-2, atol=1e-3 * norm)


def assert_close(found: Any, expected: Any) -> None:
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def q_values(network: QNetwork, params: Any, timesteps: TimeStep, state: Any = ()) -> np.ndarray:
  return np.asarray(
    jax.jit(lambda *x: network.mean(network.unroll(*x)[0]))(params, state, timesteps)
  )


def moved(old: Any, new: Any, rate: float) -> Any:
  return jax.tree.map(lambda x, y: (1 - rate) * np.asarray(x) + rate * np.asarray(y), old, new)


@pytest.mark.parametrize('double', [True, False])
@pytest.mark.parametrize('dueling', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.slow), 3])
def test_dqn(n: int, dueling: bool, double: bool) -> None:
  """Errors, priorities and loss, written out for each window."""
  network = QNetwork(hidden=(8,), dueling=dueling).bind(VECTOR, spaces.Discrete(4))
  agent = DQN(
    network=network, n_step=n, double=double, huber=0.7, discount=0.9, learning_rate=0.01,
    max_grad_norm=0.1 if n == 1 else 10.0, target_period=n, target_rate=0.25, epsilon=0.25,
    epsilon_steps=10,
  )  # fmt: skip
  train = jax.jit(agent.init)(jax.random.key(0))
  target = jax.jit(agent.init)(jax.random.key(1)).params.network
  before = 0 if n == 1 else 30
  train = train._replace(rest=train.rest._replace(target=target, steps=jnp.int32(before)))
  window = random_window(n, 5, discrete)
  weight = np.linspace(0.1, 1, B).astype(np.float32)
  new, priority, metrics = learn(agent, train, Sample(window, weight, np.arange(B)))
  q, q_target = (q_values(network, p, window.timesteps) for p in (train.params.network, target))
  steps, losses, goals = window.timesteps, [], []
  for b in range(B):
    total, discount, t = 0.0, 1.0, 0
    while t < n:
      t += 1
      total += discount * steps.reward[t, b]
      discount *= 0.9 * steps.discount[t, b]
      if steps.step_type[t, b] == LAST:
        break
    best = np.argmax((q if double else q_target)[t, b])
    goals.append(total + discount * q_target[t, b, best])
    error = goals[b] - q[0, b, window.outputs.action[0, b]]
    if steps.step_type[0, b] == LAST:
      assert priority[b] == 0
      losses.append(0.0)
    else:
      assert float(priority[b]) == pytest.approx(abs(error) + 1e-6, rel=1e-4, abs=1e-6)
      small = abs(error) <= 0.7
      losses.append(0.5 * error**2 if small else 0.7 * (abs(error) - 0.35))
  assert float(metrics['loss']) == pytest.approx(np.mean(weight * losses), rel=1e-4)

  def loss(params: Any) -> Any:
    q = network.mean(network.unroll(params, (), steps)[0])[0]
    error = jnp.float32(goals) - q[np.arange(B), window.outputs.action[0]]
    return jnp.mean(weight * (steps.step_type[0] != LAST) * optax.huber_loss(error, delta=0.7))

  if n == 1:  # of an untouched Adam
    assert_gradient(
      new.rest.opt_state, jax.jit(jax.grad(loss))(train.params.network), agent.max_grad_norm
    )
  assert int(new.rest.steps) == before + 1
  assert float(new.params.epsilon) == pytest.approx(0.925 if n == 1 else 0.25)
  follows = moved(target, new.params.network, 0.25)
  assert_close(new.rest.target, follows if n == 1 else target)


@pytest.mark.parametrize('noisy', [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize('double', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('head', [pytest.param('categorical', marks=pytest.mark.slow), 'quantile'])
def test_dqn_of_distributions(head: Any, double: bool, noisy: bool) -> None:
  """Loss and priorities of C51 and of quantiles against rlax, each network with noise of its own."""
  network = QNetwork(
    hidden=(8,), head=head, num_atoms=7, v_min=-3.0, v_max=3.0, dueling=True, noisy=noisy
  ).bind(VECTOR, spaces.Discrete(4))
  agent = DQN(network=network, n_step=2, double=double, discount=0.9, huber=0.7)
  train = jax.jit(agent.init)(jax.random.key(0))
  target = jax.jit(agent.init)(jax.random.key(1)).params.network
  train = train._replace(rest=train.rest._replace(target=target))
  window = random_window(2, 5, discrete)
  weight = np.linspace(0.1, 1, B).astype(np.float32)
  _, priority, metrics = learn(agent, train, Sample(window, weight, np.arange(B)))

  def outputs(params: Any, timestep: Any, key: Any) -> Any:
    return network.step(params, (), timestep, key if noisy else None)[0]

  def loss_and_goal(q: Any, q_t: Any, select: Any, *given: Any) -> tuple[Any, Any]:
    """Of one window, and the distribution that is learned, where it has an entropy."""
    if head == 'quantile':
      tau = (jnp.arange(7) + 0.5) / 7
      loss = rlax.quantile_q_learning(q.T, tau, *given, select.T, q_t.T, huber_param=0.7)
      return loss / 0.7, jnp.ones(1)
    atoms = jnp.linspace(-3, 3, 7)
    best = jax.nn.softmax(select) @ atoms
    loss = rlax.categorical_double_q_learning(atoms, q, *given, atoms, q_t, best)
    goals = given[1] + given[2] * atoms
    p = jax.nn.softmax(q_t[jnp.argmax(best)])
    return loss, rlax.categorical_l2_project(goals, p, atoms)

  @jax.jit
  def reference(params: Any, window: Any) -> Any:
    step = value_based.transitions(window, 0.9)
    _, learn_key = jax.random.split(jax.random.key(1))
    first_device = jax.random.fold_in(learn_key, 0)
    key, select_key, target_key = jax.random.split(first_device, 3)
    q = outputs(params, step.before, key)  # [B, A, atoms]
    q_t = outputs(target, step.after, target_key)
    select = outputs(params, step.after, select_key) if double else q_t
    given = step.action, step.r_t, step.discount_t
    return jax.vmap(loss_and_goal)(q, q_t, select, *given), step.mask

  (each, goals), mask = jax.device_get(reference(train.params.network, window))
  p = np.float64(goals)
  entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)
  losses, errors = each * mask, (each - entropy) * mask
  np.testing.assert_allclose(priority, errors, rtol=1e-3, atol=1e-5)
  assert float(metrics['loss']) == pytest.approx(np.mean(weight * losses), rel=1e-3)


def test_noise_is_each_device_s_own() -> None:
  """With the same windows on both, outputs and so priorities would be the same."""
  network = QNetwork(hidden=(4,), noisy=True).bind(VECTOR, spaces.Discrete(4))
  agent = DQN(network=network)
  train = jax.jit(agent.init)(jax.random.key(0))
  sample = Sample(random_window(1, 5, discrete), np.ones(B, np.float32), np.arange(B))
  step = learner(agent, fixed(sample), topology.learner_mesh(2))
  twice = jax.tree.map(lambda x: jnp.concatenate([x, x], axis=1), sample.trajectory[:2])
  flat = jax.tree.map(lambda x: jnp.concatenate([x, x]), sample.trajectory[2:])
  _, priority, metrics, _ = jax.jit(step)(
    train, jnp.zeros(2 * B), Trajectory(*twice, *flat), jax.random.key(1), jnp.int32(0)
  )
  one, other = np.asarray(priority).reshape(2, B)
  assert np.abs(one - other).max() > 1e-3
  assert 0.99 < metrics['epsilon'] < 1  # acted by, beside the noise


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (dict(huber=-1.0), r'huber.*0.*-1.0'),
    (dict(huber=0.0, network=QNetwork(head='quantile')), r'huber.*0.*0.0'),
  ],
)
def test_huber_is_checked(settings: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    DQN(**settings)


def goals(agent: R2D2, steps: TimeStep, v: np.ndarray, end: int) -> np.ndarray:
  """What the values [end, B] should be, of which rescaled ones v are bootstrapped from until `end`."""
  goal = np.zeros((end, B), np.float32)
  for b in range(B):
    for t in range(end):
      total, discount, s = 0.0, 1.0, t
      while s < min(t + agent.n_step, end):
        s += 1
        total += discount * steps.reward[s, b]
        discount *= agent.discount * steps.discount[s, b]
        if steps.step_type[s, b] == LAST:
          break
      value = inverse(v[s, b], agent.rescale_epsilon)
      goal[t, b] = h(total + discount * value, agent.rescale_epsilon)
  return goal


def priority_of(agent: R2D2, error: np.ndarray) -> np.ndarray:
  """Of sequences with masked errors [T, B]."""
  size = np.abs(error)
  return agent.max_share * size.max(0) + (1 - agent.max_share) * size.mean(0)


@pytest.mark.parametrize('burn_in', [pytest.param(0, marks=pytest.mark.slow), 3])
def test_r2d2_against_numpy(burn_in: int) -> None:
  """Loss, priorities, and what the burn-in is for, with truncated and terminated episodes."""
  network = QNetwork(hidden=(8,), core='gru', core_size=5, dueling=True)
  network = network.bind(VECTOR, spaces.Discrete(4))
  agent = R2D2(
    network=network, sequence=T - burn_in, burn_in=burn_in, n_step=3, total_envs=B,
    max_grad_norm=0.1 if burn_in else 40.0, target_period=2 if burn_in else 1, learning_rate=0.01,
    max_share=0.6 if burn_in else 0.9, rescale_epsilon=0.05 if burn_in else 1e-3,
  )  # fmt: skip
  train = jax.jit(agent.init)(jax.random.key(0))
  target = jax.jit(agent.init)(jax.random.key(1)).params
  train = train._replace(rest=train.rest._replace(target=target))
  rng = np.random.default_rng(1)
  state = agent.initial_state(jnp.arange(B))
  state = state._replace(core=(rng.normal(size=(B, 5)).astype(np.float32),))
  window = random_window(T, 3, discrete, state)
  weight = np.linspace(0.1, 1, B).astype(np.float32)
  new, priority, metrics = learn(agent, train, Sample(window, weight, np.arange(B)))

  q, q_target = (q_values(network, p, window.timesteps, state.core) for p in (train.params, target))
  steps = window.timesteps
  v = np.take_along_axis(q_target, q.argmax(-1)[..., None], -1)[..., 0]
  taken = np.take_along_axis(q[:-1], window.outputs.action[..., None], -1)[..., 0]
  goal = goals(agent, steps, v, T)
  error = np.where(steps.step_type[:-1] == LAST, 0, goal - taken)[burn_in:]
  expected = priority_of(agent, error)
  np.testing.assert_allclose(priority, expected, rtol=5e-3, atol=1e-4)
  loss = np.mean(weight * (0.5 * error**2).sum(0))
  assert float(metrics['loss']) == pytest.approx(loss, rel=5e-3)
  assert_close(new.rest.target, target if burn_in else new.params)

  early, late = agent.split(steps)
  core = jax.jit(network.unroll)(train.params, state.core, early)[1] if burn_in else state.core
  action = window.outputs.action[burn_in:]

  def of_fixed_goals(params: Any) -> Any:
    q = network.mean(network.unroll(params, core, late)[0])[:-1]
    error = goal[burn_in:] - jnp.take_along_axis(q, action[..., None], -1)[..., 0]
    return jnp.mean(weight * jnp.sum((late.step_type[:-1] != LAST) * 0.5 * error**2, axis=0))

  assert_gradient(
    new.rest.opt_state, jax.jit(jax.grad(of_fixed_goals))(train.params), agent.max_grad_norm
  )


@pytest.mark.slow
def test_r2d2_s_burn_in_has_no_gradient() -> None:
  """It is that of the rest alone, from the state that the burn-in leads to."""
  network = QNetwork(hidden=(8,), core='gru', core_size=5).bind(VECTOR, spaces.Discrete(4))
  agent = R2D2(network=network, sequence=T - 4, burn_in=4, total_envs=B)
  params = jax.jit(agent.init)(jax.random.key(0)).params
  state = agent.initial_state(jnp.arange(B))
  window = jax.tree.map(jnp.asarray, random_window(T, 3, discrete, state))
  early, late = agent.split(window.timesteps)
  _, core = jax.jit(network.unroll)(params, state.core, early)
  rest = Trajectory(
    late, jax.tree.map(lambda x: x[4:], window.outputs), state._replace(core=core), window.env_id
  )

  def gradient(agent: R2D2, window: Trajectory) -> Any:
    return jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(agent.errors(p, params, window)[0]))))(
      params
    )

  found = gradient(agent, window)
  expected = gradient(dataclasses.replace(agent, burn_in=0), rest)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
  assert any(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(expected))


@pytest.mark.parametrize('n_step', [pytest.param(1, marks=pytest.mark.slow), 5])
def test_r2d2_initial_priority_is_that_of_learning(n_step: int) -> None:
  """With the same parameters everywhere, but for the last step, whose value acting had not seen."""
  network = QNetwork(hidden=(8,), core='gru', core_size=5).bind(VECTOR, spaces.Discrete(4))
  agent = R2D2(network=network, sequence=T - 2, burn_in=2, n_step=n_step, total_envs=B)
  train = jax.jit(agent.init)(jax.random.key(0))
  state = agent.initial_state(jnp.arange(B))
  window = random_window(T, 3, discrete, state)
  q = q_values(network, train.params, window.timesteps, state.core)
  action = window.outputs.action
  from podrace.agents.value_based import ValueExtras

  taken = np.take_along_axis(q[:-1], action[..., None], -1)[..., 0]
  told = window._replace(outputs=ActorOutput(action, ValueExtras(taken, q[:-1].max(-1))))
  found = agent.initial_priority(told._replace(timesteps=told.timesteps._replace(observation=())))
  steps = window.timesteps
  error = goals(agent, steps, q.max(-1), T - 1) - taken[:-1]
  error = np.where(steps.step_type[: T - 1] == LAST, 0, error)[2:]
  np.testing.assert_allclose(found, priority_of(agent, error), rtol=1e-4, atol=1e-5)
  if n_step == 1:  # else what the last steps look ahead to is another
    error, mask, _ = agent.errors(train.params, train.params, window)
    np.testing.assert_allclose(found, agent.priority((mask * error)[:-1]), rtol=1e-4, atol=1e-5)


CONTINUOUS = spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))


def continuous(rng: Any, shape: Any) -> Any:
  return (CONTINUOUS.low + rng.random((*shape, 2)) * [4, 10]).astype(np.float32)


def bound(agent: Any) -> Any:
  return dataclasses.replace(
    agent, actor=agent.actor.bind(VECTOR, CONTINUOUS), critic=agent.critic.bind(VECTOR, CONTINUOUS)
  )


def test_sac() -> None:
  """The critics' loss against their target, for each window; the temperature's direction."""
  assert bound(SAC()).entropy_goal == -2
  agent = bound(SAC(target_entropy=5.0, discount=0.9, target_rate=0.25))
  train = jax.jit(agent.init)(jax.random.key(0))
  target = jax.jit(agent.init)(jax.random.key(1)).rest.critic
  train = train._replace(rest=train.rest._replace(target=target, log_alpha=jnp.float32(-0.7)))
  window = random_window(1, 5, continuous)
  weight = np.linspace(0.1, 1, B).astype(np.float32)
  new, priority, metrics = learn(agent, train, Sample(window, weight, np.arange(B)))
  rest = train.rest
  unit = np.float32((window.outputs.action[0] - [-2, 0]) / [4, 10] * 2 - 1)

  @jax.jit
  def reference(train: Any, window: Any) -> Any:
    rest, step = train.rest, value_based.transitions(window, 0.9)
    _, learn_key = jax.random.split(jax.random.key(1))
    target_key, actor_key = jax.random.split(jax.random.fold_in(learn_key, 0))  # device 0's
    outputs, _ = agent.actor.step(train.params, (), step.after)
    x = agent.actor.distribution.sample(outputs, target_key)
    log_prob = agent.actor.distribution.log_prob(outputs, x)
    q = agent.critic.value(rest.target, step.after.observation, jnp.tanh(x))[..., 0]
    target = step.r_t + step.discount_t * (q.min(0) - jnp.exp(rest.log_alpha) * log_prob)

    def policy_loss(actor: Any) -> Any:
      """Equation 7 of the paper, where the critics are fixed."""
      outputs, _ = agent.actor.step(actor, (), step.before)
      x = agent.actor.distribution.sample(outputs, actor_key)
      q = agent.critic.value(rest.critic, step.before.observation, jnp.tanh(x))[..., 0].min(0)
      log_prob = agent.actor.distribution.log_prob(outputs, x)
      return jnp.mean(step.mask * (jnp.exp(rest.log_alpha) * log_prob - q)), log_prob

    def critic_loss(critic: Any) -> Any:
      """Equation 5, summed over the critics."""
      q = agent.critic.value(critic, step.before.observation, unit)[..., 0]
      each = jnp.sum(0.5 * jnp.square(target[None] - q), axis=0)
      return jnp.mean(weight * step.mask * each), q

    actor, log_prob = jax.grad(policy_loss, has_aux=True)(train.params)
    critic, q = jax.grad(critic_loss, has_aux=True)(rest.critic)
    return step.mask, target, q, actor, critic, log_prob

  mask, target, q, actor, critic, log_prob = jax.device_get(reference(train, window))
  error = mask * (target[None] - q)
  loss = 0.5 * np.mean(weight * (error**2).sum(0))
  assert float(metrics['loss']) == pytest.approx(loss, rel=1e-3)
  np.testing.assert_allclose(priority, np.abs(error).mean(0), rtol=1e-3, atol=1e-5)
  moments = new.rest.opt_state.inner_states
  assert_gradient(moments['actor'], actor)
  assert_gradient(moments['critic'], critic)
  surplus = -log_prob - 5.0
  assert_gradient(moments['log_alpha'], np.exp(-0.7) * np.mean(mask * surplus))  # equation 18
  assert float(new.rest.log_alpha) > float(rest.log_alpha)  # the entropy is less than 5
  assert_close(new.rest.target, moved(rest.target, new.rest.critic, 0.25))
  agent = dataclasses.replace(agent, learn_temperature=False)
  same, _, _ = learn(agent, train, Sample(window, weight, np.arange(B)))
  assert same.rest.log_alpha == rest.log_alpha
  assert_close((same.params, same.rest.critic), (new.params, new.rest.critic))


def test_d4pg() -> None:
  agent = bound(D4PG(n_step=2, discount=0.9, v_min=-3, v_max=3, target_period=1, target_rate=0.25))
  train = jax.jit(agent.init)(jax.random.key(0))
  target = jax.jit(agent.init)(jax.random.key(1)).rest.target
  train = train._replace(rest=train.rest._replace(target=target))
  window = random_window(2, 5, continuous)
  weight = np.linspace(0.1, 1, B).astype(np.float32)
  new, priority, metrics = learn(agent, train, Sample(window, weight, np.arange(B)))
  unit = np.float32((window.outputs.action[0] - [-2, 0]) / [4, 10] * 2 - 1)

  @jax.jit
  def reference(train: Any, window: Any) -> Any:
    step = value_based.transitions(window, 0.9)
    action = jnp.tanh(agent.actor.step(target.actor, (), step.after)[0])
    support = np.linspace(-3, 3, 51).astype(np.float32)
    q_t = agent.critic.value(target.critic, step.after.observation, action)[0]

    @jax.vmap
    def goal(r_t: Any, discount_t: Any, q_t: Any) -> Any:
      return rlax.categorical_l2_project(r_t + discount_t * support, jax.nn.softmax(q_t), support)

    goals = goal(step.r_t, step.discount_t, q_t)

    def policy_loss(actor: Any) -> Any:
      action = jnp.tanh(agent.actor.step(actor, (), step.before)[0])
      logits = agent.critic.value(train.rest.critic, step.before.observation, action)[0]
      return -jnp.mean(step.mask * (jax.nn.softmax(logits) @ support))

    def critic_loss(critic: Any) -> Any:
      logits = agent.critic.value(critic, step.before.observation, unit)[0]
      each = -step.mask * jnp.sum(goals * jax.nn.log_softmax(logits), axis=-1)
      return jnp.mean(weight * each), each

    return jax.grad(policy_loss)(train.params), jax.grad(critic_loss, has_aux=True)(
      train.rest.critic
    )

  actor, (critic, losses) = jax.device_get(reference(train, window))
  assert float(metrics['loss']) == pytest.approx(np.mean(weight * losses), rel=1e-3)
  np.testing.assert_allclose(priority, losses, rtol=1e-3, atol=1e-4)
  moments = new.rest.opt_state.inner_states
  assert_gradient(moments['actor'], actor)
  assert_gradient(moments['critic'], critic)
  online = type(target)(new.params, new.rest.critic)
  assert_close(new.rest.target, moved(target, online, 0.25))


def test_noise_is_drawn_and_can_be_left_out() -> None:
  network = QNetwork(hidden=(8,), noisy=True, dueling=True).bind(VECTOR, spaces.Discrete(4))
  params = jax.jit(network.init)(jax.random.key(0))
  timestep = network.example()._replace(observation=jnp.ones((1, 3)))
  step = jax.jit(lambda key: network.step(params, (), timestep, key)[0])

  def q(key: Any) -> np.ndarray:
    return np.asarray(step(key))

  assert np.abs(q(jax.random.key(1)) - q(jax.random.key(2))).max() > 1e-3
  np.testing.assert_array_equal(q(None), q(None))
  mean = np.mean(np.asarray(jax.vmap(step)(jax.random.split(jax.random.key(3), 400))), axis=0)
  np.testing.assert_allclose(mean, q(None), atol=0.1)


def test_environments_in_one_state_do_not_act_alike() -> None:
  """With noise alone, each of 64 environments explores by a sample of its own."""
  network = QNetwork(hidden=(8,), noisy=True).bind(VECTOR, spaces.Discrete(4))
  agent = DQN(network=network, epsilon=0.0)
  params = jax.jit(agent.init)(jax.random.key(0)).params._replace(epsilon=jnp.float32(0))
  timestep = jax.tree.map(lambda x: np.ones((64, *x.shape[1:]), x.dtype), network.example())
  acting = jax.jit(lambda key: agent.act(params, (), timestep, key)[0].action)
  taken = [set(np.asarray(acting(jax.random.key(i))).tolist()) for i in range(10)]
  assert np.mean([len(actions) for actions in taken]) > 2
  greedy = act(dataclasses.replace(agent, greedy=True), params, (), timestep)
  assert len(set(greedy.tolist())) == 1


def test_noise_of_each_row_is_that_of_factorised_weights() -> None:
  """Row by row, the outputs have the mean and the spread that one sample for all rows has."""
  network = QNetwork(hidden=(), noisy=True).bind(VECTOR, spaces.Discrete(2))
  params = jax.jit(network.init)(jax.random.key(0))
  one = network.example()._replace(observation=np.float32([[1.0, -2.0, 0.5]]))
  rows = jax.tree.map(lambda x: np.repeat(np.asarray(x), 20_000, axis=0), one)
  by_row = jax.jit(lambda key: network.step(params, (), rows, key, per_row=True)[0][..., 0])
  q = np.asarray(by_row(jax.random.key(1)))
  draw = jax.jit(jax.vmap(lambda key: network.step(params, (), one, key)[0][0, :, 0]))
  q_one = np.asarray(draw(jax.random.split(jax.random.key(2), 20_000)))
  np.testing.assert_allclose(np.mean(q, 0), np.mean(q_one, 0), atol=0.02)
  np.testing.assert_allclose(np.cov(q.T), np.cov(q_one.T), rtol=0.1, atol=0.02)
  assert np.std(q, 0).min() > 0.1


def test_step_types_of_these_streams() -> None:
  """That the windows above have what they are to tell apart."""
  kinds = np.asarray(random_window(T, 3, discrete).timesteps.step_type)
  assert {FIRST, MID, LAST} <= set(kinds.ravel().tolist())
  first = np.asarray(random_window(3, 5, discrete).timesteps.step_type)
  assert (first[0] == LAST).any() and (first[1:3] == LAST).any()
