"""Disco: its update against numbers recorded of the released code, its rule's files, and that it learns by one."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import disco_inputs as inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_files
from gymnasium import spaces
from jax.flatten_util import ravel_pytree
from test_sebulba import keys
from test_value_agents import anakin

from podrace import distributions, topology
from podrace.agents.disco import Disco, DiscoExtras, divergence, inputs_of
from podrace.agents.rules import disco as rules
from podrace.agents.rules import storage as rule_formats
from podrace.agents.value_based import select_action
from podrace.envs import make
from podrace.errors import UsageError
from podrace.learner import sample_learner
from podrace.networks import Predictions, Predictor
from podrace.networks.planning import decode
from podrace.settings.agents import bind
from podrace.types import ActorOutput, Sample, TimeStep, TrainState, Trajectory

SLOW = pytest.mark.slow
REFERENCE = Path(__file__).parents[1] / 'data' / 'disco_reference.json'
SPACE = spaces.Box(-1, 1, (4,), np.float32)
SMALL: dict[str, Any] = dict(
  hidden=(16,), model_size=8, head_hidden=(8,), predictions=12, bins=21, max_value=4.0
)


def small(path: str = '', network: dict[str, Any] | None = None, **settings: Any) -> Disco:
  given = dict(lifetime=6, capacity=512, batch_size=24, min_size=64, replay_ratio=6.0) | settings
  return Disco(path or rule_files.small(), network=Predictor(**SMALL | (network or {})), **given)


# --- against the released code -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table(Predictor):
  """What is predicted in each timestep is a parameter."""

  def unroll(self, params: Any, state: Any, timesteps: Any, *args: Any) -> Any:
    return params, state

  def unroll_taken(self, params: Any, state: Any, timesteps: Any, action: Any) -> Any:
    taken = {k: select_action(getattr(params, k), action) for k in ('z', 'q', 'next_policy')}
    return params._replace(**taken)


def table() -> Predictions:
  return Predictions(*(jnp.asarray(x) for x in inputs.predictions().values()))


def window_of(update: int) -> Trajectory:
  t: Any = {k: jnp.asarray(x) for k, x in inputs.trajectory(update).items()}
  last, action = t['last'], t['action'][:-1]
  first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
  step_type = jnp.where(last, 2, jnp.where(first, 0, 1)).astype(jnp.int8)
  steps = TimeStep(
    jnp.zeros((*last.shape, 4)), t['reward'], 1 - last.astype(jnp.float32), step_type
  )
  extras = DiscoExtras(t['behaviour'][:-1])
  return Trajectory(steps, ActorOutput(action, extras), (), jnp.arange(inputs.B))


def by_stream(batch: Trajectory) -> Trajectory:
  """Time and batch change places, as the learner's batches have them."""
  t, outputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (batch.timesteps, batch.outputs))
  return Trajectory(t, outputs, batch.agent_state, batch.env_id)


def learning(agent: Disco, devices: int = 1) -> Any:
  def sample(batch: Trajectory) -> Sample:
    size = batch.env_id.shape[0]
    return Sample(by_stream(batch), jnp.ones(size), jnp.arange(size))

  return jax.jit(sample_learner(agent, topology.learner_mesh(devices), sample))


def close(found: Any, expected: list[float], what: str, scale: float = 1.0) -> None:
  """To 1e-5, of the largest number where they are larger than 1."""
  x = np.asarray(expected, np.float32)
  most = scale * max(1.0, float(np.abs(x).max()))
  np.testing.assert_allclose(np.ravel(found), x, rtol=0, atol=1e-5 * most, err_msg=what)


@functools.cache
def reference() -> dict[str, Any]:
  document: dict[str, Any] = json.loads(REFERENCE.read_text())
  return document


def released_agent() -> Disco:
  path = rule_files.released()
  network = Table(observation_space=SPACE, action_space=spaces.Discrete(inputs.A))
  return Disco(path, network=network, learning_rate=inputs.LEARNING_RATE)


def test_the_update_is_that_of_the_released_code() -> None:
  """Over three updates: targets, losses, gradients, parameters, and all that the rule remembers."""
  agent, params = released_agent(), table()
  assert agent.rule_sha256 == reference()['weights_sha256']
  assert rule_formats.KNOWN[agent.rule_sha256] == 'Disco103' and 'Disco103' in agent.opening()
  rest = jax.jit(agent.init)(jax.random.key(0)).rest
  train = TrainState(params, rest._replace(target=params, opt_state=agent.optimiser().init(params)))
  step, seen = learning(agent), jax.jit(functools.partial(targets, agent))
  for update, expected in enumerate(reference()['updates']):
    window = window_of(update)
    check_targets(*seen(agent.params(), train, window), expected)
    train, _, metrics = step(train, by_stream(window), jax.random.key(0))
    close(metrics['loss'], expected['total_loss'], 'loss')
    memory, moments = train.rest.memory, train.rest.moments
    close(memory.hidden, expected['hidden'], 'hidden')
    close(memory.cell, expected['cell'], 'cell')
    close(jnp.stack(moments), expected['moments'], 'moments')
    mean = unflattened(agent, train)
    for name, tree in (
      ('params', train.params),
      ('target_params', train.rest.target),
      ('mean_gradient', mean),
    ):
      shown = inputs.shown(dict(zip(inputs.SHAPES, map(np.asarray, tree), strict=True)))
      for key, numbers in expected[name].items():
        close(shown[key], numbers, f'{name} {key}', 1e-2 if name == 'mean_gradient' else 1.0)


def unflattened(agent: Disco, train: TrainState) -> Predictions:
  """Adam's mean of the gradients, as a table."""
  (mean,) = (s.mu for s in train.rest.opt_state if hasattr(s, 'mu'))
  found: Predictions = ravel_pytree(train.params)[1](mean)
  return found


def targets(agent: Disco, rule: Any, train: TrainState, window: Trajectory) -> Any:
  """What the agent estimates, what its rule sees of that, and what the rule aims at."""
  found = agent.estimates(train.params, train.rest.target, window)
  first, second = jnp.mean(found.advantage), jnp.mean(found.advantage**2)
  moments = agent.update_moments(train.rest.moments, first, second)
  seen = inputs_of(train.params, train.rest.target, found, window, moments)
  return found, seen, rules.update(rule, train.rest.memory, seen)[0]


def check_targets(found: Any, seen: rules.DiscoInputs, aims: Any, expected: Any) -> None:
  close(found.q_target, expected['q_targets'], 'q')
  close(found.advantage, expected['advantage'], 'advantage')
  close(seen.scaled_advantage, expected['scaled_advantage'], 'scaled advantage')
  close(aims.policy, expected['pi_hat'], 'policy')
  close(aims.y[..., ::60], expected['y_hat'], 'y')
  close(aims.z[..., ::60], expected['z_hat'], 'z')


# --- what replay, devices and masks are to it -----------------------------------------------------------


def random_window(batch: int = 8, length: int = 6, mask: bool = False) -> Trajectory:
  rng = np.random.default_rng(3)
  shape = (length + 1, batch)
  step_type = rng.choice([1, 1, 1, 2], shape).astype(np.int8)
  step_type[1:][step_type[:-1] == 2] = 0
  step_type[2, :2] = 2  # more ends on one half of the streams than on the other
  step_type[3, :2] = 0
  observation: Any = rng.normal(size=(*shape, 4)).astype(np.float32)
  if mask:
    allowed = rng.random((*shape, 3)) < 0.5
    allowed[..., 0] |= ~allowed.any(-1)
    observation = dict(x=observation, action_mask=allowed.astype(np.int8))
  discount = np.where((step_type == 2) & (rng.random(shape) < 0.7), 0, 1).astype(np.float32)
  reward = rng.normal(size=shape).astype(np.float32)
  action = rng.integers(0, 3, shape)[:-1].astype(np.int32)
  behaviour = rng.normal(size=(length, batch, 3)).astype(np.float32)
  steps, outputs, env_id = jax.tree.map(
    jnp.asarray,
    (
      (observation, reward, discount, step_type),
      (action, behaviour),
      np.arange(batch, dtype=np.int32),
    ),
  )
  return Trajectory(TimeStep(*steps), ActorOutput(outputs[0], DiscoExtras(outputs[1])), (), env_id)


def bound(agent: Disco, space: Any = SPACE) -> Disco:
  network = agent.network.bind(space, spaces.Discrete(3))
  return dataclasses.replace(agent, network=network)


@pytest.mark.slow
def test_devices_learn_the_same_together() -> None:
  """Also where one has more steps that are masked than another, and over several updates."""
  agent, window = bound(small(learning_rate=1e-3)), random_window()
  found = []
  for devices in (1, 4):
    step, train = learning(agent, devices), jax.jit(agent.init)(jax.random.key(0))
    for i in range(3):
      train, _, metrics = step(train, by_stream(window), jax.random.key(i))
    found.append((metrics['loss'], train))
  for one, other in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)


def test_the_share_outside_of_the_atoms_is_of_valid_steps() -> None:
  """The values are near 0 and the atoms end at 24. The reward of FIRST stands for its wrong values."""
  agent, window = bound(small(lambda_=0.0)), random_window()
  t = window.timesteps
  high = jnp.where(t.step_type == 1, t.reward, 1e3)
  window = window._replace(timesteps=t._replace(reward=high))
  weight = 1.0 - t.last[:-1]

  @jax.jit
  def metrics(key: Any) -> Any:
    params = agent.network.init(key)
    said, _ = agent.network.unroll(params, (), window.timesteps)
    found, now = agent.estimates(said, said, window), agent.unroll_taken(params, window)
    aims = rules.DiscoTargets(said.policy[:-1], said.y[:-1], now.z[:-1])
    return agent.losses(now, aims, found.q_target, weight / weight.mean(), window)[1]

  expected = np.sum(weight * (high[1:] == 1e3)) / np.sum(weight)
  assert 0.1 < expected < 0.9
  assert float(metrics(jax.random.key(0))['outside_support']) == pytest.approx(expected)


@pytest.mark.slow
def test_past_a_time_limit_a_value_is_bootstrapped_from() -> None:
  agent, window = bound(small()), random_window()
  params = jax.jit(agent.network.init)(jax.random.key(1))
  said, _ = agent.network.unroll(params, (), window.timesteps)
  found = agent.estimates(said, said, window)
  q = np.sum(jax.nn.softmax(said.policy) * value_of(agent, said.q), -1)
  last = window.timesteps.step_type[1:] == 2
  cut = last & (window.timesteps.discount[1:] == 1)
  over = last & (window.timesteps.discount[1:] == 0)
  assert cut[:-1].any() and over.any()
  expected = window.timesteps.reward[1:] + agent.discount * q[1:]
  np.testing.assert_allclose(found.q_target[cut], expected[cut], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(found.q_target[over], window.timesteps.reward[1:][over], rtol=1e-5)


def value_of(agent: Disco, logits: Any) -> Any:
  return decode(logits, agent.network.support)


@pytest.mark.slow
def test_forbidden_actions_are_not_aimed_at() -> None:
  """Nor does the loss grow by them, which would be by the size of the mask."""
  window = random_window(mask=True)
  space = spaces.Dict(x=SPACE, action_mask=spaces.MultiBinary(3))
  agent = bound(small(learning_rate=1e-2), space)
  train, step = jax.jit(agent.init)(jax.random.key(0)), learning(agent)
  for i in range(3):
    train, _, metrics = step(train, by_stream(window), jax.random.key(i))
    assert all(np.isfinite(x) and abs(x) < 100 for x in metrics.values())
  said, _ = agent.network.unroll(train.params, (), window.timesteps)
  forbidden = window.timesteps.observation['action_mask'] == 0
  assert (np.asarray(said.policy)[forbidden] == distributions.MASKED).all()


@pytest.mark.parametrize('core', ['lstm', pytest.param('none', marks=pytest.mark.slow)])
def test_what_is_said_of_taken_actions_is_what_is_said_of_all(core: Any) -> None:
  agent, window = bound(small(network=dict(core=core, core_size=5))), random_window()
  network = agent.network
  params = jax.jit(network.init)(jax.random.key(0))
  state = network.initial_state(8)
  action = np.concatenate([window.outputs.action, window.outputs.action[-1:]])
  taken = jax.jit(network.unroll_taken)(params, state, window.timesteps, jnp.asarray(action))
  said, _ = jax.jit(network.unroll)(params, state, window.timesteps)
  for name in ('z', 'q', 'next_policy'):
    expected = select_action(getattr(said, name), jnp.asarray(action))
    np.testing.assert_allclose(getattr(taken, name), expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(taken.policy, said.policy)


def test_divergence() -> None:
  p, q = jnp.array([0.0, 1.0, 2.0]), jnp.array([1.0, 0.0, 0.5])
  a, b = np.exp(p) / np.exp(p).sum(), np.exp(q) / np.exp(q).sum()
  np.testing.assert_allclose(divergence(p, q), np.sum(a * np.log(a / b)), rtol=1e-5)


def test_a_window_is_learned_from_as_often_as_it_says() -> None:
  replay = small(replay_ratio=6.0).memory(8, 4)
  times = [int(replay.times(jnp.int32(u))) for u in range(2, 202)]
  assert sum(times) * 24 == 6 * 8 * 200


# --- the rule -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rule_is_the_same_for_any_number_of_actions() -> None:
  """An order of the actions is an order of its targets, and it sees no further than the end of an episode."""
  params = rules.init(jax.random.key(0), rule_files.SIZES)
  state = rules.DiscoRuleState(jnp.ones(6), jnp.ones(6))
  t = some_inputs()
  found, _ = rules.update(params, state, t)
  turned, _ = rules.update(params, state, rotated(t))
  np.testing.assert_allclose(turned.policy, jnp.roll(found.policy, 1, -1), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(turned.y, found.y, rtol=1e-4, atol=1e-5)
  other, _ = rules.update(params, state, t._replace(reward=t.reward.at[3:].add(1.0)))
  assert not np.allclose(other.y[3:], found.y[3:])
  np.testing.assert_array_equal(other.y[:3], found.y[:3])  # the episode ends with step 2
  assert not np.allclose(rules.update(params, rules.initial_state(6), t)[0].y, found.y)


def some_inputs() -> rules.DiscoInputs:
  keys = iter(jax.random.split(jax.random.key(1), 20))

  def some(*shape: int) -> Any:
    return jax.random.normal(next(keys), shape)

  def predicted() -> rules.Predicted:
    return rules.Predicted(some(6, 2, 4), some(6, 2, 12), some(6, 2, 4, 12))

  last = jnp.zeros((5, 2), bool).at[2].set(True)
  action = jnp.array([[0, 1], [2, 3], [3, 3], [1, 0], [2, 2]])
  return rules.DiscoInputs(
    predicted(), predicted(), some(5, 2, 4), action, some(5, 2), last, some(6, 2), some(5, 2), some(5, 2),
    some(5, 2, 4), some(5, 2, 4), some(5, 2, 4),
  )  # fmt: skip


def rotated(t: rules.DiscoInputs) -> rules.DiscoInputs:
  """The same with each action one further."""

  def turn(x: Any) -> Any:
    return jnp.roll(x, 1, 2)

  online, target = (p._replace(policy=turn(p.policy), z=turn(p.z)) for p in t[:2])
  each = {k: turn(getattr(t, k)) for k in ('behaviour', 'q', 'advantages', 'scaled_advantages')}
  return t._replace(online=online, target=target, action=(t.action + 1) % 4, **each)


def test_a_rule_is_written_as_it_is_read(tmp_path: Path) -> None:
  path = str(rule_files.write(tmp_path / 'a.npz'))
  found = rule_formats.load(path, rule_formats.sha256(path), rules.Sizes)
  expected = rules.init(jax.random.key(0), rule_files.SIZES)
  assert rules.Sizes.of(found) == rule_files.SIZES and found.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(found[name], x)


def test_disco_103_has_the_sizes_that_are_the_defaults() -> None:
  path = rule_files.released()
  found = rule_formats.load(path, rule_formats.sha256(path), rules.Sizes)
  assert rules.Sizes.of(found) == rules.Sizes() and len(found) == 42
  assert sum(x.size for x in found.values()) == 754_778


def files(folder: Path) -> dict[str, tuple[str, str]]:
  """What is no rule, and what is said of it."""
  arrays = {k: np.asarray(x) for k, x in rules.init(jax.random.key(0), rule_files.SIZES).items()}
  one = 'lstm/linear_1/b'

  def saved(name: str, **changed: Any) -> str:
    path = folder / f'{name}.npz'
    with path.open('wb') as file:
      np.savez(file, **{k: v for k, v in (arrays | changed).items() if v is not None})
    return str(path)

  text, single = folder / 'text.npz', folder / 'single.npz'
  text.write_text('no rule')
  with single.open('wb') as file:
    np.save(file, np.ones(3))
  return {
    'missing': (str(folder / 'none.npz'), 'cannot read the rule .*none.npz: No such file'),
    'text': (str(text), 'text.npz is no rule: an .npz of arrays is expected'),
    'single': (str(single), 'single.npz is no rule: .*no intact .npz'),
    'lacks': (saved('lacks', **{one: None}), '42 arrays are expected; it lacks lstm/linear_1/b'),
    'more': (saved('more', other=np.ones(1)), '42 arrays are expected; it has other'),
    'shape': (
      saved('shape', **{one: np.ones(2, np.float32)}),
      r'lstm/linear_1/b is float32\[2\], expected float32\[1\]',
    ),
    'axes': (saved('axes', **{one: np.float32(1)}), r'b has shape \[\], expected 1 axes'),
    'type': (
      saved('type', **{one: np.ones(1)}),
      r'lstm/linear_1/b is float64\[1\], expected float32\[1\]',
    ),
    'objects': (
      saved('objects', **{one: np.array([{}])}),
      'is no rule: .*of object, expected numbers',
    ),
    'nan': (saved('nan', **{one: np.full(1, np.nan, np.float32)}), 'NaN or infinite'),
  }


KINDS = ['missing', 'text', 'single', 'lacks', 'more', 'shape', 'axes', 'type', 'objects', 'nan']


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_no_rule_is_refused(kind: str, tmp_path: Path) -> None:
  path, message = files(tmp_path)[kind]
  with pytest.raises(UsageError, match=message) as error:
    small(path).memory(8, 4)
  assert '\n' not in str(error.value)


def test_a_rule_of_another_size_or_content_is_refused(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'--agent.network.predictions 12.*30'):
    small(network=dict(predictions=30)).memory(8, 4)
  with pytest.raises(UsageError, match=r'--agent.lifetime 6.*7'):
    small(lifetime=7).memory(8, 4)
  with pytest.raises(UsageError, match=r'--agent.rule PATH.npz.*https://.*disco_103.npz'):
    Disco().memory(8, 4)
  with pytest.raises(UsageError, match=r'sha256.*[0-9a-f]{64}.*00$'):
    small(rule_sha256='00').memory(8, 4)
  path = rule_files.write(tmp_path / 'rule.npz')
  agent = small(str(path))
  agent.memory(8, 4)
  assert (
    agent.rule_sha256 == rule_formats.sha256(str(path)) and 'not a released one' in agent.opening()
  )
  rule_files.write(path, seed=1)
  rule_formats.load.cache_clear()
  with pytest.raises(UsageError, match='file'):
    agent.memory(8, 4)


def test_acting_needs_no_file(tmp_path: Path) -> None:
  path = rule_files.write(tmp_path / 'rule.npz')
  agent = small(str(path))
  path.unlink()
  agent = bind(dataclasses.replace(agent, greedy=True), make('podrace:catch'))
  jax.eval_shape(agent.init, jax.random.key(0))


def test_it_is_for_discrete_actions() -> None:
  with pytest.raises(ValueError, match=r'Discrete.*Box'):
    Predictor().bind(SPACE, SPACE)
  for settings in (dict(bins=2), dict(predictions=0), dict(max_value=0.0), dict(head_hidden=(0,))):
    with pytest.raises(ValueError, match=r'at least|more than 0'):
      Predictor(**settings)


# --- that it learns -------------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize('devices', [1, 8])
def test_disco_103_learns_catch(devices: int) -> None:
  """The setting of the released notebook, and the updates that its slowest seeds need.

  Fewer than 8 environments would not divide over 8 devices.
  """
  num_envs = max(2, devices)
  agent = Disco(
    rule_files.released(), learning_rate=1e-2, capacity=1024 * 29, min_size=64 * 29, replay_ratio=64 / num_envs
  )  # fmt: skip
  program = anakin(agent, 'podrace:catch,rows=8,columns=8', devices, num_envs, 29)
  state = program.run(program.init(keys(0)), jnp.int32(900))
  _, state = program.read_log(state)
  log, _ = program.read_log(program.run(state, jnp.int32(40)))
  assert float(log['return_sum'] / log['episodes']) > 0.95
