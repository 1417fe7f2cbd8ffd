"""The losses' gradients, against a reference that takes one episode at a time, in float64.

The reference is written from the papers with Python loops over episodes and steps, and is
differentiated by central differences. What it is compared with is the gradient that reaches the
optimiser inside `learn`, so all that an agent does to a trajectory lies between the two. At the
end, the comparison is shown to fail when one thing or another is done wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streams
from gymnasium import spaces
from jax.flatten_util import ravel_pytree

from podrace import distributions, returns, topology
from podrace.agents import policy_gradient, ppo
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.learner import learner
from podrace.networks import ActorCritic, body
from podrace.replay import on_policy
from podrace.types import LAST, TimeStep, TrainState, Trajectory

T, B = 12, 4
FEATURES, HIDDEN = 3, 4

SPACES = {'discrete': spaces.Discrete(3), 'continuous': spaces.Box(-1, 1, (2,))}

# Gradients of about 0.1 in float32 against differences of float64 losses near 1, whose own error
# is about 1e-10. What is left is rounding in a hundred float32 terms.
ATOL = 2e-6


# --- catching the gradient --------------------------------------------------------------------


def recorder(move: Any) -> optax.GradientTransformation:
  """An optimiser that keeps the last gradient, and moves the parameters by `move` at every step."""
  return optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params=None: (move, grads),
  )


@dataclasses.dataclass(frozen=True)
class RecordingPPO(PPO):
  move: Any = None

  def optimiser(self) -> optax.GradientTransformation:
    return recorder(ravel_pytree(self.move)[0])  # its parameters are a vector


@dataclasses.dataclass(frozen=True)
class RecordingImpala(Impala):
  move: Any = None

  def optimiser(self) -> optax.GradientTransformation:
    return recorder(self.move)


class Case(NamedTuple):
  """A network's parameters, a trajectory that another policy made, and a move of parameters."""

  network: ActorCritic
  params: Any
  trajectory: Trajectory
  move: Any


def case(space: str, seed: int = 0) -> Case:
  network = ActorCritic(hidden=(HIDDEN,), shared=False, initial_log_std=-0.3)
  network = network.bind(spaces.Box(-1, 1, (FEATURES,)), SPACES[space])
  rng = np.random.default_rng(seed)

  def like(scale: float) -> Callable[[Any], Any]:
    return lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32)

  shapes = jax.eval_shape(network.init, jax.random.key(0))
  params = jax.tree.map(like(0.7), shapes)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(FEATURES))
  kinds = [steps.step_type == LAST, steps.discount == 0]
  assert (kinds[0] & kinds[1])[:-1].any() and (kinds[0] & ~kinds[1])[:-1].any()
  if space == 'discrete':
    x = rng.integers(0, 3, (T, B)).astype(np.int32)
  else:
    x = rng.normal(size=(T, B, 2)).astype(np.float32)
  policy = Reference(params, space).policy
  now = np.array(
    [[policy(steps.observation[t, b], x[t, b])[0] for b in range(B)] for t in range(T)]
  )
  behind = (now + rng.normal(0, 0.4, (T, B))).astype(np.float32)  # another policy's
  extras = policy_gradient.PolicyExtras(x, behind)
  trajectory = streams.trajectory(steps, x, extras, policy_gradient.PolicyState(()))
  return Case(network, params, trajectory, jax.tree.map(like(0.1), shapes))


def recorded(agent: Any, c: Case) -> Any:
  """The last gradient that `learn` gives its optimiser, as {path: array}, and the metrics."""
  agent = dataclasses.replace(agent, network=c.network, move=c.move)
  gradient = jax.tree.map(np.zeros_like, c.params)
  to_tree = None
  if isinstance(agent, PPO):
    gradient, to_tree = ravel_pytree(gradient)
  train = TrainState(policy_gradient.PolicyParams(c.params), gradient)
  step = learner(agent, on_policy(), topology.learner_mesh(1))
  step = jax.jit(step, compiler_options={'xla_backend_optimization_level': 0})  # compiles faster
  train, _, metrics, _ = step(train, (), c.trajectory, jax.random.key(1), np.int32(0))
  gradient = to_tree(train.rest) if to_tree else train.rest
  return flatten(gradient), {k: float(v) for k, v in metrics.items()}


def flatten(tree: Any) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(k, simple=True, separator='/'): np.asarray(x) for k, x in leaves}


# --- the reference ----------------------------------------------------------------------------


class Reference:
  """Two tanh networks of one hidden layer, in float64."""

  def __init__(self, params: Any, space: str):
    self.p = {k: np.asarray(x, np.float64) for k, x in flatten(params).items()}
    self.space = space

  def _layer(self, name: str, x: np.ndarray) -> np.ndarray:
    return x @ self.p[f'{name}/kernel'] + self.p[f'{name}/bias']

  def value(self, observation: np.ndarray) -> float:
    hidden = np.tanh(self._layer('value_torso/Mlp_0/Dense_0', np.float64(observation)))
    return float(self._layer('value_head', hidden)[0])

  def policy(self, observation: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """The log-probability of x, and the entropy."""
    hidden = np.tanh(self._layer('torso/Mlp_0/Dense_0', np.float64(observation)))
    out = self._layer('policy_head', hidden)
    if self.space == 'discrete':
      p = np.exp(out) / np.sum(np.exp(out))
      return math.log(p[x]), -sum(q * math.log(q) for q in p)
    log_prob = entropy = 0.0
    for mean, log_std, y in zip(out, self.p['log_std'], x, strict=True):
      variance = math.exp(2 * log_std)
      log_prob -= (float(y) - mean) ** 2 / (2 * variance) + 0.5 * math.log(2 * math.pi * variance)
      entropy += 0.5 * math.log(2 * math.pi * math.e * variance)
    return log_prob, entropy


def differentiate(
  loss: Callable[[Any], float], params: Any, epsilon: float = 1e-5
) -> dict[str, Any]:
  """The gradient of `loss` by central differences, one parameter after the other."""
  params = jax.tree.map(lambda x: np.array(x, np.float64), params)
  gradient = {}
  for path, x in flatten(params).items():  # the arrays themselves, not copies
    g = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
      before = x[i]
      x[i] = before + epsilon
      above = loss(params)
      x[i] = before - epsilon
      below = loss(params)
      x[i] = before
      g[i] = (above - below) / (2 * epsilon)
    gradient[path] = g
  return gradient


class Episode(NamedTuple):
  """One episode of one environment, or what of it lies in the trajectory: n steps."""

  where: list[tuple[int, int]]  # [n+1] its timesteps, (t, b)
  rewards: list[float]  # [n]
  terminated: bool


def episodes(steps: TimeStep) -> list[Episode]:
  found = []
  for b in range(B):
    for times in streams.episodes(steps.step_type[:, b]):
      rewards = [float(steps.reward[t, b]) for t in times[1:]]
      over = bool(steps.discount[times[-1], b] == 0)
      found.append(Episode([(t, b) for t in times], rewards, over))
  return found


def values(net: Reference, c: Case, episode: Episode) -> list[float]:
  """[n+1]; nothing is to be had after a termination."""
  v = [net.value(c.trajectory.timesteps.observation[w]) for w in episode.where]
  if episode.terminated:
    v[-1] = 0.0
  return v


def ppo_loss(agent: PPO, c: Case, space: str, minibatch: set[tuple[int, int]]) -> Any:
  """The loss as a function of the parameters, after advantages from those before the update."""
  old = Reference(c.params, space)
  advantage, target, before = {}, {}, {}
  for episode in episodes(c.trajectory.timesteps):
    v, n = values(old, c, episode), len(episode.rewards)
    for k in range(n):
      a = 0.0
      for j in range(k, n):
        td = episode.rewards[j] + agent.discount * v[j + 1] - v[j]
        a += (agent.discount * agent.lambda_) ** (j - k) * td
      advantage[episode.where[k]], target[episode.where[k]] = a, a + v[k]
      before[episode.where[k]] = v[k]
  if agent.normalize_advantages:
    every = np.array(list(advantage.values()))
    advantage = {w: (a - every.mean()) / (every.std() + 1e-8) for w, a in advantage.items()}

  observation, extras = c.trajectory.timesteps.observation, c.trajectory.outputs.extras
  sides = set()

  def loss(params: Any) -> float:
    net, total = Reference(params, space), 0.0
    for w in minibatch:
      if w not in advantage:
        continue  # between two episodes
      log_prob, entropy = net.policy(observation[w], extras.sample[w])
      ratio = math.exp(log_prob - float(extras.log_prob[w]))
      sides.add((ratio > 1 + agent.clip) - (ratio < 1 - agent.clip))
      limited = min(max(ratio, 1 - agent.clip), 1 + agent.clip)
      total -= min(ratio * advantage[w], limited * advantage[w])
      value = net.value(observation[w])
      error = (value - target[w]) ** 2
      if agent.clip_value:
        change = min(max(value - before[w], -agent.clip_value), agent.clip_value)
        error = max(error, (before[w] + change - target[w]) ** 2)
      total += agent.value_cost * 0.5 * error - agent.entropy_cost * entropy
    return total / len(minibatch)

  return loss, sides


def impala_loss(agent: Impala, c: Case, space: str) -> Callable[[Any], float]:
  old = Reference(c.params, space)
  observation, extras = c.trajectory.timesteps.observation, c.trajectory.outputs.extras
  target, advantage = {}, {}

  def leaky(limit: float, ratio: float) -> float:
    return agent.clip_mix * min(limit, ratio) + (1 - agent.clip_mix) * ratio

  for episode in episodes(c.trajectory.timesteps):
    v, n = values(old, c, episode), len(episode.rewards)
    ratios = [
      math.exp(old.policy(observation[w], extras.sample[w])[0] - float(extras.log_prob[w]))
      for w in episode.where[:-1]
    ]
    corrected = list(v)
    for k in range(n):
      for j in range(k, n):
        c_product = math.prod(agent.lambda_ * leaky(1.0, ratios[i]) for i in range(k, j))
        td = leaky(agent.clip_rho, ratios[j]) * (
          episode.rewards[j] + agent.discount * v[j + 1] - v[j]
        )
        corrected[k] += agent.discount ** (j - k) * c_product * td
    for k in range(n):
      target[episode.where[k]] = corrected[k]
      behind = agent.lambda_ * corrected[k + 1] + (1 - agent.lambda_) * v[k + 1]
      q = episode.rewards[k] + agent.discount * behind
      advantage[episode.where[k]] = leaky(agent.clip_pg_rho, ratios[k]) * (q - v[k])

  def loss(params: Any) -> float:
    net, total = Reference(params, space), 0.0
    for w in target:
      log_prob, entropy = net.policy(observation[w], extras.sample[w])
      total -= agent.policy_cost * advantage[w] * log_prob + agent.entropy_cost * entropy
      total += agent.value_cost * 0.5 * (target[w] - net.value(observation[w])) ** 2
    return total / (T * B)

  return loss


# --- the comparisons --------------------------------------------------------------------------


def last_minibatch(agent: PPO, c: Case) -> set[tuple[int, int]]:
  """The steps (t, b) that the last gradient of the update is taken over."""
  shuffle_key, _ = jax.random.split(jax.random.split(jax.random.key(1))[1])
  agent = dataclasses.replace(agent, network=c.network)
  indices = np.asarray(jax.jit(agent.minibatch_indices)(shuffle_key, c.trajectory))
  assert len(indices) == agent.epochs * agent.minibatches
  return {divmod(int(i), B) for i in indices[-1]}


def moved(c: Case, steps: int) -> Any:
  return jax.tree.map(lambda x, m: np.float64(x) + steps * np.float64(m), c.params, c.move)


REFERENCES: dict[Any, Any] = {}  # gradients by central differences, which are slow


def compare_ppo(agent: RecordingPPO, space: str, truth: PPO | None = None) -> None:
  """Asserts that `agent`'s last gradient is the reference's with the settings of `truth`."""
  c, truth = case(space), truth or agent
  if (truth, space) not in REFERENCES:
    steps = truth.epochs * truth.minibatches - 1
    minibatch = last_minibatch(truth, c)
    assert len(minibatch) == T * B // truth.minibatches
    loss, sides = ppo_loss(truth, c, space, minibatch)
    params = moved(c, steps)
    REFERENCES[truth, space] = differentiate(loss, params), loss(params)
    assert sides == {-1, 0, 1}  # ratios below, within and above
  compare(recorded(agent, c)[0], REFERENCES[truth, space][0])


def compare_impala(agent: RecordingImpala, space: str, truth: Impala | None = None) -> None:
  c, truth = case(space), truth or agent
  if (truth, space) not in REFERENCES:
    loss = impala_loss(truth, c, space)
    REFERENCES[truth, space] = differentiate(loss, c.params), loss(c.params)
  gradient, metrics = recorded(agent, c)
  compare(gradient, REFERENCES[truth, space][0])
  np.testing.assert_allclose(metrics['loss'], REFERENCES[truth, space][1], rtol=1e-5)


def compare(gradient: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
  assert gradient.keys() == reference.keys()
  assert all(np.abs(x).max() > 1e-3 for x in reference.values())  # there is something to compare
  for path, expected in reference.items():
    np.testing.assert_allclose(gradient[path], expected, rtol=2e-5, atol=ATOL, err_msg=path)


def some_fast(cases: dict[str, Any], *fast: str) -> list[Any]:
  """Parameters by their names; those that are not `fast` run in `make test-all` only."""
  return [
    pytest.param(
      *(x if isinstance(x, tuple) else [x]), id=k, marks=() if k in fast else pytest.mark.slow
    )
    for k, x in cases.items()
  ]


PPOS = {
  'whole batch': dict(epochs=1, minibatches=1),
  'second minibatch': dict(epochs=1, minibatches=2),
  'second epoch': dict(epochs=2, minibatches=1),
  'second epoch, clipped value': dict(epochs=2, minibatches=1, clip_value=0.05),
  'advantages as they are': dict(epochs=2, minibatches=2, normalize_advantages=False),
}


@pytest.mark.parametrize('space', SPACES)
@pytest.mark.parametrize('settings', some_fast(PPOS, 'second epoch, clipped value'))
def test_ppo(settings: dict[str, Any], space: str) -> None:
  compare_ppo(RecordingPPO(**settings), space)


def test_ppo_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of 8 samples: the mean of six gradients."""
  monkeypatch.setattr(body, 'CPU_CHUNK', 8)
  compare_ppo(RecordingPPO(epochs=1, minibatches=1), 'discrete')


IMPALAS = {
  'default': dict(),
  'lambda': dict(lambda_=0.8),
  'clips': dict(clip_rho=1.3, clip_pg_rho=1.6, entropy_cost=0.1),
  'leaky': dict(clip_rho=1.3, clip_mix=0.4, policy_cost=0.7),
}


@pytest.mark.parametrize('space', SPACES)
@pytest.mark.parametrize('settings', some_fast(IMPALAS, 'clips'))
def test_impala(settings: dict[str, Any], space: str) -> None:
  compare_impala(RecordingImpala(**settings), space)


# --- mutations: each of these must be noticed -------------------------------------------------

TRANSITIONS, VTRACE = policy_gradient.transitions, returns.vtrace


def no_mask(*args: Any) -> policy_gradient.PolicyTransitions:
  step = TRANSITIONS(*args)
  return step._replace(mask=jnp.ones_like(step.mask))


def truncation_as_termination(
  trajectory: Trajectory, *args: Any
) -> policy_gradient.PolicyTransitions:
  step = TRANSITIONS(trajectory, *args)
  after = jax.tree.map(lambda x: x[1:], trajectory.timesteps)
  return step._replace(discount_t=jnp.where(after.last, 0.0, step.discount_t))


def termination_as_truncation(
  trajectory: Trajectory, params: Any, discount: float, lambda_: float
) -> Any:
  step = TRANSITIONS(trajectory, params, discount, lambda_)
  return step._replace(discount_t=jnp.full_like(step.discount_t, discount))


def leak_past_last(trajectory: Trajectory, params: Any, discount: float, lambda_: float) -> Any:
  step = TRANSITIONS(trajectory, params, discount, lambda_)
  return step._replace(lambda_t=jnp.full_like(step.lambda_t, lambda_))


def rewards_one_late(trajectory: Trajectory, *args: Any) -> policy_gradient.PolicyTransitions:
  return TRANSITIONS(trajectory, *args)._replace(reward_t=trajectory.timesteps.reward[:-1])


def mask_one_late(trajectory: Trajectory, *args: Any) -> policy_gradient.PolicyTransitions:
  after = jax.tree.map(lambda x: x[1:], trajectory.timesteps)
  return TRANSITIONS(trajectory, *args)._replace(mask=1.0 - after.last)


def minus_entropy(self: Any, params: Any, key: Any) -> Any:
  log_p = jax.nn.log_softmax(params)
  return jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def no_clip_of_rho(*args: Any, **clips: Any) -> Any:
  return VTRACE(*args, clip_rho=math.inf, clip_pg_rho=clips['clip_pg_rho'])


def no_clip_of_pg_rho(*args: Any, **clips: Any) -> Any:
  return VTRACE(*args, clip_rho=clips['clip_rho'], clip_pg_rho=math.inf)


def no_clip_of_c(
  r_t, discount_t, lambda_t, v_tm1, v_t, rho, clip_rho, clip_pg_rho, clip_mix
) -> Any:
  del clip_mix
  c = jnp.minimum(1.0, rho)
  estimate = VTRACE(r_t, discount_t, lambda_t * rho / c, v_tm1, v_t, rho, clip_rho, clip_pg_rho)
  behind = VTRACE(r_t, discount_t, lambda_t, v_tm1, v_t, rho, clip_rho, clip_pg_rho)
  return behind._replace(target=estimate.target)


def on_policy_ratios(r_t, discount_t, lambda_t, v_tm1, v_t, rho, **clips) -> Any:
  return VTRACE(r_t, discount_t, lambda_t, v_tm1, v_t, jnp.ones_like(rho), **clips)


OF_TRANSITIONS = {
  'mask dropped': (policy_gradient, 'transitions', no_mask),
  'mask one late': (policy_gradient, 'transitions', mask_one_late),
  'rewards one late': (policy_gradient, 'transitions', rewards_one_late),
  'truncation as termination': (policy_gradient, 'transitions', truncation_as_termination),
  'termination as truncation': (policy_gradient, 'transitions', termination_as_truncation),
  'leak past LAST': (policy_gradient, 'transitions', leak_past_last),
  'sign of the entropy': (distributions.Categorical, 'entropy', minus_entropy),
}

PPO_MUTATIONS = {
  **OF_TRANSITIONS,
  'advantage not normalized': (ppo, 'standardize', lambda advantage, mask: advantage),
  'normalized with masked steps': (
    ppo,
    'standardize',
    lambda a, mask: (a - jnp.mean(a)) / (jnp.std(a) + 1e-8),
  ),
}

IMPALA_MUTATIONS = {
  **OF_TRANSITIONS,
  'rho not clipped': (returns, 'vtrace', no_clip_of_rho),
  'rho of the policy gradient not clipped': (returns, 'vtrace', no_clip_of_pg_rho),
  'c not clipped': (returns, 'vtrace', no_clip_of_c),
  'ratios ignored': (returns, 'vtrace', on_policy_ratios),
}


@pytest.mark.parametrize(
  ('where', 'name', 'mutant'),
  some_fast(PPO_MUTATIONS, 'truncation as termination', 'advantage not normalized'),
)
def test_a_mutation_of_ppo_is_noticed(
  where: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  agent = RecordingPPO(epochs=1, minibatches=1)  # unchanged, it passes: see test_ppo
  monkeypatch.setattr(where, name, mutant)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare_ppo(agent, 'discrete')


@pytest.mark.parametrize(
  ('where', 'name', 'mutant'),
  some_fast(IMPALA_MUTATIONS, 'leak past LAST', 'ratios ignored'),
)
def test_a_mutation_of_impala_is_noticed(
  where: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  agent = RecordingImpala()  # unchanged, it passes: see test_impala
  monkeypatch.setattr(where, name, mutant)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare_impala(agent, 'discrete')


PPO_SETTINGS = {
  'not clipped above or below': dict(clip=10.0), 'value clipped': dict(clip_value=0.05),
  'discount': dict(discount=0.98), 'lambda': dict(lambda_=0.9),
  'cost of the value': dict(value_cost=1.0), 'cost of the entropy': dict(entropy_cost=0.02),
  'another minibatch': dict(minibatches=2),
}  # fmt: skip


@pytest.mark.parametrize('settings', some_fast(PPO_SETTINGS, 'value clipped', 'lambda'))
def test_another_setting_of_ppo_is_noticed(settings: dict[str, Any]) -> None:
  truth = RecordingPPO(epochs=2, minibatches=1)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare_ppo(dataclasses.replace(truth, **settings), 'discrete', truth)


IMPALA_SETTINGS = {
  'clip of rho': dict(clip_rho=1.1), 'clip of pg rho': dict(clip_pg_rho=1.1),
  'share of the clipped': dict(clip_mix=0.5), 'cost of the policy': dict(policy_cost=1.1),
  'cost of the entropy': dict(entropy_cost=0.02), 'lambda': dict(lambda_=0.95),
}  # fmt: skip


@pytest.mark.parametrize('settings', some_fast(IMPALA_SETTINGS, 'clip of rho', 'lambda'))
def test_another_setting_of_impala_is_noticed(settings: dict[str, Any]) -> None:
  truth = RecordingImpala()
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare_impala(dataclasses.replace(truth, **settings), 'discrete', truth)
