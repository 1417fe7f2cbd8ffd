"""PopArt: the same values whatever the statistics do, a slow reference, and rewards of any size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streams
from compiling import compile_quickly, jit  # noqa: F401 (a fixture)
from gymnasium import spaces
from shorthand import Patch, slow_after

import podrace
from podrace import cli, topology
from podrace.agents import impala, policy_gradient, popart, ppo
from podrace.agents.impala import Impala
from podrace.agents.popart import PopArt, Units
from podrace.agents.ppo import PPO
from podrace.architectures.agreement import Gossip
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.errors import RunError
from podrace.learner import learner
from podrace.networks import ActorCritic
from podrace.replay import on_policy
from podrace.types import Trajectory

T, B, FEATURES = 12, 8, 3
OBSERVATION = spaces.Box(-1, 1, (FEATURES,))


@dataclasses.dataclass(frozen=True)
class SteppingImpala(Impala):
  """IMPALA with plain gradient descent."""

  def optimiser(self) -> optax.GradientTransformation:
    return optax.sgd(self.learning_rate)


@dataclasses.dataclass(frozen=True)
class SteppingPPO(PPO):
  """PPO with plain gradient descent."""

  def optimiser(self) -> optax.GradientTransformation:
    return optax.sgd(self.learning_rate)


def network(**settings: Any) -> ActorCritic:
  return ActorCritic(**settings).bind(OBSERVATION, spaces.Discrete(3))


def trajectory(seed: int, scale: float = 1.0, shift: float = 0.0) -> Trajectory:
  """Random, by the uniform policy."""
  rng = np.random.default_rng(seed)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(FEATURES))
  steps = steps._replace(reward=(scale * (steps.reward + shift)).astype(np.float32))
  x = rng.integers(0, 3, (T, B)).astype(np.int32)
  log_prob = np.full((T, B), -np.log(3), np.float32)
  extras = policy_gradient.PolicyExtras(x, log_prob)
  return streams.trajectory(steps, x, extras, policy_gradient.PolicyState(()))


def updater(agent: Any) -> Any:
  """One update as a function of (state, trajectory, number), compiled once."""
  step = jit(learner(agent, on_policy(), topology.learner_mesh(1)))

  def update(train: Any, t: Trajectory, i: int = 0) -> tuple[Any, Any]:
    train, _, metrics, _ = step(train, (), t, jax.random.key(i), jnp.int32(i))
    return jax.device_get((train, metrics))

  return update


# --- the head and the statistics --------------------------------------------------------------


def valued(net: ActorCritic, t: Trajectory) -> Any:
  """The values of a trajectory as a function of parameters, compiled once."""
  unroll = jit(lambda params: net.unroll(params, (), t.timesteps)[0].value)
  return lambda params: np.asarray(unroll(params))


@pytest.mark.parametrize('old', [(0.0, 1.0), (300.0, 20.0), (-1e-3, 1e-4)])
def test_outputs_stay_when_the_statistics_move(old: tuple[float, float]) -> None:
  """1e-5 of the deviation, for normalized outputs near 1."""
  net, t = network(hidden=(16,)), trajectory(0)
  raw = jax.jit(net.init)(jax.random.key(0))
  before, after = Units(*map(jnp.float32, old)), Units(jnp.float32(310.0), jnp.float32(25.0))
  first = jit(popart.normalize_head)(raw, before)
  second = jit(lambda x: popart.normalize_head(popart.raw_head(x, before), after))(first)
  y, z = map(valued(net, t), (first, second))
  assert np.abs(y - z).max() > 0.1  # the normalized outputs do move
  one, other = np.float64(y) * old[1] + old[0], np.float64(z) * 25.0 + 310.0
  np.testing.assert_allclose(one, other, atol=25 * 1e-5)


@pytest.mark.parametrize('cls', slow_after(1, SteppingPPO, SteppingImpala))
def test_an_update_without_a_step_moves_the_statistics_only(cls: Any) -> None:
  agent = cls(network(hidden=(16,)), learning_rate=1e-30, normalize_values=True)
  train = begun = even(agent)
  update = updater(agent)
  for i in range(3):
    train, metrics = update(train, trajectory(i, 100.0, shift=1.0), i)
  assert metrics['value_std'] > 30 and metrics['value_mean'] > 30
  values = valued(agent.network, trajectory(5))
  one, other = (values(x.params.network) for x in (begun, train))
  np.testing.assert_allclose(one, other, atol=1e-5 * metrics['value_std'])


# --- a reference, written from the papers -----------------------------------------------------


class Reference:
  """A linear value by gradient descent, in the papers' form, in float64.

  The head (w, b) is in normalized units, nu is the second moment.
  """

  def __init__(self, agent: Any, params: Any):
    head = params['value_head']
    self.agent, self.mu, self.nu, self.weight = agent, 0.0, 1.0, 0.0
    self.w = np.float64(head['kernel'])[:, 0] / self.sigma
    self.b = float(head['bias'][0]) / self.sigma

  @property
  def sigma(self) -> float:
    p: PopArt = self.agent.popart
    return float(np.clip(np.sqrt(self.nu - self.mu**2), p.min_std, p.max_std))

  def value(self, x: np.ndarray) -> float:
    return self.sigma * float(np.float64(x) @ self.w + self.b) + self.mu

  def targets(self, t: Trajectory) -> dict[tuple[int, int], float]:
    """TD(lambda) targets of valid steps, one episode after the other, in raw units."""
    a, steps, targets = self.agent, t.timesteps, {}
    for b in range(B):
      for times in streams.episodes(steps.step_type[:, b]):
        v = [self.value(steps.observation[i, b]) for i in times]
        if steps.discount[times[-1], b] == 0:
          v[-1] = 0.0
        g = v[-1]
        for k in reversed(range(len(times) - 1)):
          r = float(steps.reward[times[k + 1], b])
          g = r + a.discount * (a.lambda_ * g + (1 - a.lambda_) * v[k + 1])
          targets[times[k], b] = g
    return targets

  def update(self, t: Trajectory) -> None:
    targets, a = self.targets(t), self.agent
    sigma, mu = self.sigma, self.mu
    dw, db = np.zeros_like(self.w), 0.0
    for (i, b), g in targets.items():
      x = np.float64(t.timesteps.observation[i, b])
      error = float(x @ self.w + self.b) - (g - mu) / sigma
      dw += a.value_cost * error * x / (T * B)
      db += a.value_cost * error / (T * B)
    self.w, self.b = self.w - a.learning_rate * dw, self.b - a.learning_rate * db
    if not self.weight:
      self.w, self.b = self.w + a.learning_rate * dw, self.b + a.learning_rate * db  # it measures
    every = np.array(list(targets.values()))
    self.weight += a.popart.rate * (1 - self.weight)
    rate = a.popart.rate / self.weight
    self.mu += rate * (every.mean() - self.mu)
    self.nu += rate * ((every**2).mean() - self.nu)
    self.b = (sigma * self.b + mu - self.mu) / self.sigma
    self.w = self.w * sigma / self.sigma


SETTINGS: dict[str, Any] = dict(
  learning_rate=0.3, entropy_cost=0.0, lambda_=0.8, normalize_values=True, popart=PopArt(rate=0.2)
)
LINEAR = {
  'impala': SteppingImpala(network(hidden=()), policy_cost=0.0, **SETTINGS),
  'ppo': SteppingPPO(network(hidden=()), epochs=1, minibatches=1, **SETTINGS),
}


def even(agent: Any) -> Any:
  """The agent's first state, with the uniform policy."""
  train = jax.device_get(jax.jit(agent.init)(jax.random.key(0)))
  net, rng = train.params.network, np.random.default_rng(0)
  head = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), net['value_head'])
  policy = jax.tree.map(np.zeros_like, net['policy_head'])
  net = {**net, 'value_head': head, 'policy_head': policy}
  return train._replace(params=train.params._replace(network=net))


def compare(agent: Any) -> None:
  """Five updates, in which rewards grow from 1 to 1,000 and shrink again."""
  train = even(agent)
  reference, t = Reference(agent, train.params.network), trajectory(9)
  update, values = updater(agent), valued(agent.network, t)
  for i, scale in enumerate((1.0, 30.0, 1000.0, 1000.0, 1.0)):
    made = trajectory(i, scale, shift=2.0)
    if isinstance(agent, PPO):  # its policy learns: behaviour has no part in the targets
      net = train.params.network
      policy = jax.tree.map(np.zeros_like, net['policy_head'])
      train = train._replace(params=train.params._replace(network={**net, 'policy_head': policy}))
    train, metrics = update(train, made, i)
    reference.update(made)
    np.testing.assert_allclose(metrics['value_mean'], reference.mu, rtol=1e-4)
    np.testing.assert_allclose(metrics['value_std'], reference.sigma, rtol=1e-4)
    expected = [[reference.value(x) for x in row] for row in t.timesteps.observation]
    actual = values(train.params.network)
    np.testing.assert_allclose(actual, expected, atol=2e-5 * reference.sigma + 1e-4)


@pytest.mark.parametrize('name', slow_after(1, 'ppo', 'impala'))
def test_against_a_slow_reference(name: str) -> None:
  compare(LINEAR[name])


def test_the_deviation_has_bounds() -> None:
  agent = dataclasses.replace(LINEAR['impala'], popart=PopArt(rate=0.2, min_std=40.0, max_std=90.0))
  reference = Reference(agent, even(agent).params.network)
  train, t = even(agent), trajectory(9)
  update, values = updater(agent), valued(agent.network, t)
  for i, scale in enumerate((1.0, 1000.0, 1000.0)):
    made = trajectory(i, scale, shift=2.0)
    train, _ = update(train, made, i)
    reference.update(made)
    expected = [[reference.value(x) for x in row] for row in t.timesteps.observation]
    np.testing.assert_allclose(values(train.params.network), expected, rtol=1e-4, atol=1e-2)
  assert reference.sigma == 90.0


def test_statistics_of_observations_do_not_wait_for_targets_that_differ() -> None:
  agent = PPO(network(hidden=(16,)), normalize_values=True, normalize_observations=True)
  train, made = jax.jit(agent.init)(jax.random.key(0)), trajectory(0)
  steps = made.timesteps
  made = made._replace(timesteps=steps._replace(reward=np.zeros_like(steps.reward), observation=steps.observation + 50))  # fmt: skip
  train, _ = updater(agent)(train, made)
  assert float(train.rest.statistics.var) == 0
  assert train.params.observation.mean[0] == pytest.approx([50] * FEATURES, abs=2)


@pytest.mark.parametrize('target', [0.1, 1 / 3, 1e-3, 70.0])
def test_rounding_of_equal_targets_is_no_difference(target: float) -> None:
  first, square = np.float32(target), np.float32(target) * np.float32(target)
  moments = {'value_valid': 0.5, 'value_target': first / 2, 'value_target_square': square / 2}
  start = popart.Statistics(jnp.float32(0), jnp.float32(1), jnp.float32(0))
  sums = jax.tree.map(jnp.float32, moments)
  followed = PopArt().follow(start, Units(jnp.float32(0), jnp.float32(1)), sums)
  assert (float(followed.mean), float(followed.var)) == (pytest.approx(target), 0)
  sums['value_target_square'] = jnp.float32(square * 1.01 / 2)
  followed = PopArt().follow(start, Units(jnp.float32(0), jnp.float32(1)), sums)
  assert float(followed.var) == pytest.approx(0.01 * square, rel=1e-3)


def test_steps_between_episodes_move_nothing() -> None:
  """All steps are masked: there are no targets."""
  agent, made = LINEAR['impala'], trajectory(0)
  last = np.full_like(made.timesteps.step_type, 2)
  masked = made._replace(timesteps=made.timesteps._replace(step_type=last))
  train, _ = updater(agent)(even(agent), masked)
  assert (float(train.rest.statistics.mean), float(train.rest.statistics.var)) == (0.0, 1.0)


def of_normalized(x: Any, units: Any) -> Any:
  del units
  return x


def divided(network: Any, units: Units) -> Any:
  return popart.normalize_head(network, Units(-units.mean / units.std, units.std))


def without_the_mean(x: Any, units: Units) -> Any:
  return x / units.std


def scaled_by_mean_only(x: Any, units: Units) -> Any:
  return x - units.mean


MUTATIONS = {
  'the head is not rescaled': {popart: ('normalize_head', 'raw_head')},
  'sigma and sigma of after swapped': {popart: ('raw_head',)},
  'targets are raw': {impala: ('to_units',), ppo: ('to_units',)},
  'targets keep their mean': {impala: ('to_units',), ppo: ('to_units',)},
  'targets keep their deviation': {impala: ('to_units',), ppo: ('to_units',)},
  'values are not made raw': {impala: ('to_raw',), ppo: ('to_raw',)},
}
MUTANTS = {
  'sigma and sigma of after swapped': divided,
  'targets keep their mean': without_the_mean,
  'targets keep their deviation': scaled_by_mean_only,
}


@pytest.mark.parametrize('agent', slow_after(1, *LINEAR))
@pytest.mark.parametrize('name', MUTATIONS)
def test_a_mutation_is_noticed(agent: str, name: str, monkeypatch: Patch) -> None:
  for module, names in MUTATIONS[name].items():
    for function in names:
      monkeypatch.setattr(module, function, MUTANTS.get(name, of_normalized))
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    compare(LINEAR[agent])


# --- the policy -------------------------------------------------------------------------------

POLICIES = {
  'impala': Impala(network(hidden=(8,)), normalize_values=True),
  'ppo': PPO(
    network(hidden=(8,)), minibatches=2, total_updates=9, normalize_values=True,
    normalize_advantages=False,
  ),
}  # fmt: skip


def moved(train: Any, update: Any, scale: float) -> Any:
  """Four updates with rewards that are `scale` times as large; the first only measures."""
  for i in range(4):
    train, _ = update(train, trajectory(i, scale, shift=1.0), i)
  return train


@pytest.mark.parametrize('name', slow_after(1, 'ppo', 'impala'))
def test_the_unit_of_rewards_changes_nothing_but_the_values(name: str) -> None:
  """By a power of 2, so rounding is the same."""
  agent = POLICIES[name]
  train = jax.device_get(jax.jit(agent.init)(jax.random.key(0)))
  update = updater(agent)
  one, large = (moved(train, update, scale) for scale in (1.0, 2.0**10))
  for part in ('torso', 'policy_head'):
    for x, y in zip(*(jax.tree.leaves(t.params.network[part]) for t in (one, large)), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
  for x, y in zip(*(jax.tree.leaves(t.params.network['value_head']) for t in (one, large)), strict=True):  # fmt: skip
    np.testing.assert_allclose(1024 * x, y, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'module'), slow_after(1, ('ppo', ppo), ('impala', impala)))
def test_advantages_that_are_not_normalized_are_noticed(
  name: str, module: Any, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(module, 'shrink', of_normalized)
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    test_the_unit_of_rewards_changes_nothing_but_the_values(name)


# --- learning ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaled:
  """An environment with rewards of another size."""

  env: Any
  scale: float

  def __getattr__(self, name: str) -> Any:
    return getattr(self.env, name)

  def reset(self, key: Any) -> Any:
    return self._scaled(self.env.reset(key))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    return self._scaled(self.env.step(state, action, key))

  def _scaled(self, result: Any) -> Any:
    state, timestep = result
    return state, timestep._replace(reward=self.scale * timestep.reward)


SMALL = ActorCritic(hidden=(32,), initializer='lecun', activation='relu')
LEARNERS = {
  'impala': (Impala(SMALL, learning_rate=1e-2), 32, 10, 300),
  'ppo': (PPO(SMALL, learning_rate=5e-3, normalize_advantages=False), 32, 20, 60),
}


def score(name: str, scale: float, **settings: Any) -> float:
  """The mean return of the last sixth of the episodes, as a share of the best."""
  agent, num_envs, length, updates = LEARNERS[name]
  env = Scaled(make('podrace:catch'), scale)
  bound = agent.network.bind(env.observation_space, env.action_space)
  agent = dataclasses.replace(agent, network=bound, total_updates=updates, **settings)
  anakin = Anakin(agent, env, on_policy(), topology.learner_mesh(1), num_envs, length)
  state = anakin.run(anakin.init(jax.random.split(jax.random.key(0), 1)), jnp.int32(updates * 5 // 6))  # fmt: skip
  _, state = anakin.read_log(state)
  log, _ = anakin.read_log(anakin.run(state, jnp.int32(updates // 6)))
  return float(log['return_sum'] / log['episodes']) / scale


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'scale'), slow_after(1, ('ppo', 1e3), ('impala', 1e-3), ('ppo', 1e-3))
)
def test_learns_with_rewards_of_any_size_where_the_plain_agent_does_not(
  name: str, scale: float
) -> None:
  assert score(name, scale, normalize_values=True) > 0.9
  assert score(name, scale) < 0.5


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
  """Its statistics are saved with it, and are in its lines of metrics."""
  size = dict(num_envs=8, unroll_length=8, log_every=640, checkpoint_every=640)
  agent = dict(normalize_values=True, network=dict(hidden=(8,)))
  whole = podrace.configure('catch', agent=agent, total_steps=2560, **size)
  podrace.train(whole, tmp_path / 'whole', quiet=True)

  def stop(line: Any) -> None:
    if line['step'] == 1280:
      raise RuntimeError('cut')

  with pytest.raises(RunError, match='cut'):
    podrace.train(whole, tmp_path / 'cut', quiet=True, callbacks=[stop])
  podrace.train(whole, tmp_path / 'cut', quiet=True, override=True)
  one, other = (json.loads((tmp_path / d / 'summary.json').read_text()) for d in ('whole', 'cut'))
  assert one['params_sha256'] == other['params_sha256']
  lines = [json.loads(x) for x in (tmp_path / 'cut' / 'metrics.jsonl').read_text().splitlines()]
  assert all(x['value_std'] > 0 for x in lines)


@pytest.mark.slow
def test_under_gossip_each_replica_has_statistics_of_its_own() -> None:
  env = Scaled(make('podrace:catch'), 100.0)
  agent = Impala(SMALL.bind(env.observation_space, env.action_space), normalize_values=True)
  anakin = Anakin(agent, env, on_policy(), topology.learner_mesh(2), 8, 9, 1, Gossip())
  state = anakin.run(anakin.init(jax.random.split(jax.random.key(0), 1)), jnp.int32(30))
  log, _ = anakin.read_log(state)
  assert 1 < float(log['metrics']['value_std']) < 200
  assert np.isfinite(float(log['metrics']['loss']))


def test_without_the_flag_the_state_is_as_before() -> None:
  plain = jax.eval_shape(
    Impala(SMALL.bind(OBSERVATION, spaces.Discrete(3))).init, jax.random.key(0)
  )
  assert not any(isinstance(x, popart.PopArtRest) for x in (plain.rest, *plain.rest))


REFUSED = {
  'normalize_rewards': ['--agent', 'ppo', '--agent.normalize-values', '--agent.normalize-rewards'],
  'self_tuning': ['--agent', 'impala', '--agent.normalize-values', '--agent.self-tuning'],
  'max_std': ['--agent.normalize-values', '--agent.popart.min-std', '2', '--agent.popart.max-std', '1'],
  'rate': ['--agent.popart.rate', '0'],
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_settings_that_exclude_each_other(name: str, capsys: Any, tmp_path: Path) -> None:
  args = ['train', 'catch', *REFUSED[name], '--run-dir', str(tmp_path / 'run')]
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  assert end.value.code == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert len(lines) <= 3 and name in ' '.join(lines).replace('-', '_')
  assert not (tmp_path / 'run').exists()


def test_a_network_without_the_head_is_refused() -> None:
  net = network(hidden=(4,))
  train = Impala(net, normalize_values=False).init(jax.random.key(0))
  other = {k: v for k, v in train.params.network.items() if k != 'value_head'}
  with pytest.raises(ValueError, match='value_head'):
    popart.begin(train._replace(params=train.params._replace(network=other)))
