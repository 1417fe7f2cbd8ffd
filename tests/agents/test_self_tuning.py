"""Self-tuning: the metaparameters' gradient against differences, where they go, and what the plain agent keeps."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streams
from compiling import compile_quickly, jit  # noqa: F401 (a fixture)
from gymnasium import spaces
from shorthand import Patch

import podrace
from podrace import topology
from podrace.agents import metagradient, policy_gradient
from podrace.agents.impala import Impala
from podrace.agents.metagradient import Tuning
from podrace.agents.population import Varied, with_values
from podrace.agents.ppo import PPO
from podrace.architectures.anakin import Anakin
from podrace.envs.base import NextStepReset, restart, transition
from podrace.learner import learner
from podrace.networks import ActorCritic
from podrace.replay import on_policy
from podrace.types import Trajectory

T, B, FEATURES = 6, 8, 3


def network(**settings: Any) -> ActorCritic:
  made = ActorCritic(hidden=(4,), core_size=3, activation='tanh', **settings)
  return made.bind(spaces.Box(-10, 10, (FEATURES,)), spaces.Discrete(3))


IMPALA = dict(
  lambda_=0.9, clip_mix=0.7, clip_rho=1.1, entropy_cost=0.2, learning_rate=0.05, epsilon=0.01, self_tuning=True
)  # fmt: skip
SMALL_PPO = dict(
  epochs=2, minibatches=2, entropy_cost=0.2, learning_rate=0.05, anneal_learning_rate=False, self_tuning=True
)  # fmt: skip
AGENTS = {
  'impala': Impala(network(), **IMPALA),
  'impala, rmsprop, clipped': Impala(network(), **IMPALA, optimizer='rmsprop', max_grad_norm=0.01),
  'impala, recurrent': Impala(network(core='gru'), **IMPALA),
  'ppo': PPO(network(), **SMALL_PPO),
}
SHIFTS = dict(
  discount=-2.0, lambda_=0.3, clip_mix=0.5, policy_cost=-0.4, value_cost=0.2, entropy_cost=0.6
)


def trajectory(agent: Any, dtype: Any) -> Trajectory:
  """Random, from another policy; rewards, values and ratios are such that all settings matter."""
  rng = np.random.default_rng(1)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(FEATURES))
  x = rng.integers(0, 3, (T, B)).astype(np.int32)
  log_prob = -1.1 + rng.normal(0, 0.4, (T, B))
  core = jax.tree.map(lambda x: rng.normal(size=x.shape), agent.network.initial_state(B))
  made = streams.trajectory(
    steps, x, policy_gradient.PolicyExtras(x, log_prob), policy_gradient.PolicyState(core)
  )
  return jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == 'f' else x, made)


def inverse_sigmoid(y: float) -> float:
  return float(np.log(y / (1 - y)))


def value(agent: Any, name: str, shift: float) -> float:
  """A metaparameter, by the definition."""
  own = getattr(agent, name)
  top = 10 * own if name.endswith('_cost') else 1.0
  return float(top / (1 + np.exp(-inverse_sigmoid(own / top) - shift)))


# --- the gradient -----------------------------------------------------------------------------


def recorder() -> optax.GradientTransformation:
  """An optimiser that keeps the gradient as its state, and moves nothing."""
  zeros = functools.partial(jax.tree.map, jnp.zeros_like)
  return optax.GradientTransformation(
    zeros, lambda grads, state, params=None: (zeros(grads), grads)
  )


def metagradient_of(agent: Any, devices: int) -> tuple[dict[str, float], Any]:
  """The metaparameters' gradient at `SHIFTS`, in float64, and the agent's state before the update."""
  shift = {name.rstrip('_'): jnp.float64(x) for name, x in SHIFTS.items()}
  shift = {name: shift[name] for name in agent.tuning.fields}
  train = jax.tree.map(
    lambda x: np.float64(x) if x.dtype == jnp.float32 else x, jit(agent.init)(jax.random.key(0))
  )
  train = train._replace(rest=train.rest._replace(shift=shift, opt_state=recorder().init(shift)))
  step = learner(agent, on_policy(), topology.learner_mesh(devices))
  given = train, (), trajectory(agent, np.float64), jax.random.key(1), jnp.int32(0)
  after, *_ = jit(step)(*given)
  return {k: float(x) for k, x in after.rest.opt_state.items()}, jax.device_get(train)


@dataclasses.dataclass(frozen=True)
class Updating:
  """A self-tuning agent that only makes its own updates."""

  agent: Any

  def learn(self, *given: Any) -> Any:
    return type(self.agent).learn.__wrapped__(self.agent, *given)


def by_differences(agent: Any, train: Any, devices: int) -> dict[str, float]:
  """How the parameters after an update differ with each metaparameter, times the outer loss' gradient there.

  That loss can't be differenced: what V-trace's targets and ratios are made of is held fixed in it.
  """
  fields = {name: metagradient.field_of(name) for name in agent.tuning.fields}
  made = trajectory(agent, np.float64)
  plain = train._replace(rest=train.rest.rest)

  def update(values: Any) -> Any:
    updating = Updating(with_values(agent, values))
    step = learner(updating, on_policy(), topology.learner_mesh(devices))
    return step(plain, (), made, jax.random.key(1), jnp.int32(0))[0].params

  def outer(params: Any) -> Any:
    total, told = agent.outer_loss(params, made, jax.random.key(2))
    return total + agent.tuning.kl_cost * told['approx_kl']

  def on_one(params: Any) -> Any:
    split = topology.P()
    f = jax.shard_map(jax.grad(outer), mesh=topology.learner_mesh(1), in_specs=split, out_specs=split, check_vma=False)  # fmt: skip
    return f(params)

  update = jit(update)

  def at(changed: str, by: float) -> Any:
    shifts = {f: SHIFTS[f] + (by if name == changed else 0) for name, f in fields.items()}
    return update({f: jnp.float64(value(agent, f, x)) for f, x in shifts.items()})

  gradient = jit(on_one)(jax.device_get(at('', 0)))
  h = 1e-4

  def dot(name: str) -> float:
    moved = jax.tree.map(
      lambda x, y, g: np.sum((x - y) * g), *jax.device_get((at(name, h), at(name, -h), gradient))
    )
    return float(sum(jax.tree.leaves(moved))) / (2 * h)

  return {name: dot(name) for name in fields}


FAST = {('impala', 1)}


@pytest.mark.parametrize(
  ('name', 'devices'),
  [
    pytest.param(n, d, marks=() if (n, d) in FAST else pytest.mark.slow)
    for n in AGENTS
    for d in (1, 8)
  ],
)
def test_the_gradient_is_that_of_differences(name: str, devices: int, monkeypatch: Patch) -> None:
  """In float64, but for float32 in the losses' masks and observations, which both have."""
  agent = AGENTS[name]
  monkeypatch.setattr(metagradient, 'optimiser', lambda tuning: recorder())
  with jax.enable_x64(True):
    found, train = metagradient_of(agent, devices)
    expected = by_differences(agent, train, devices)
  assert found.keys() == expected.keys() == set(agent.tuning.fields)
  for key, x in expected.items():
    assert abs(x) > 1e-8, key  # there is something to compare
    assert found[key] == pytest.approx(x, rel=1e-5), key


# --- what stays -------------------------------------------------------------------------------


def plain(agent: Any) -> Any:
  return dataclasses.replace(agent, self_tuning=False)


STEPS: dict[str, Any] = {}


def step_of(agent: Any) -> Any:
  """Its compiled learner step."""
  if repr(agent) not in STEPS:
    STEPS[repr(agent)] = jit(learner(agent, on_policy(), topology.learner_mesh(1)))
  return STEPS[repr(agent)]


def updates(agent: Any, count: int = 3) -> tuple[Any, Any]:
  """The state after some updates on one trajectory, and the metrics of the last."""
  train = jit(agent.init)(jax.random.key(0))
  for i in range(count):
    given = train, (), trajectory(agent, np.float32), jax.random.key(i), jnp.int32(i)
    train, _, metrics, _ = step_of(agent)(*given)
  return jax.device_get((train, metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [n if n == 'impala' else pytest.param(n, marks=pytest.mark.slow) for n in AGENTS]
)
def test_without_a_rate_it_is_the_plain_agent(name: str) -> None:
  """To rounding: the programs are others, and a constant under Adam's root is too small to be seen."""
  agent = dataclasses.replace(AGENTS[name], tuning=dataclasses.replace(AGENTS[name].tuning, learning_rate=0.0))  # fmt: skip
  (train, metrics), (expected, plain_metrics) = updates(agent), updates(plain(agent))
  mine = train.params, train.rest.rest
  for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(tuple(expected)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  for key, x in plain_metrics.items():
    assert metrics[key] == pytest.approx(x, rel=1e-5, abs=1e-6), key
  for setting in agent.tuning.fields:
    own = getattr(agent, metagradient.field_of(setting))
    assert metrics[f'tuned_{setting}'] == pytest.approx(own, rel=1e-6)
  moved, _ = updates(AGENTS[name])
  assert all(abs(x) > 1e-4 for x in moved.rest.shift.values())  # with a rate, all do move


def test_a_share_of_1_begins_at_099() -> None:
  agent = Impala(network(), self_tuning=True)
  _, metrics = updates(agent, 1)
  assert metrics['tuned_lambda'] == metrics['tuned_clip_mix'] == pytest.approx(0.99)
  assert metrics['tuned_discount'] == pytest.approx(agent.discount)
  near = dataclasses.replace(agent, lambda_=0.995)
  shift = {name: jnp.zeros([]) for name in agent.tuning.fields}
  assert float(
    metagradient.tuned_values(metagradient.user_values(near), shift)['lambda_']
  ) == pytest.approx(0.995)


@pytest.mark.parametrize('limit', [40.0, float('inf')])
def test_a_gradient_of_0_has_a_metagradient(limit: float) -> None:
  """All steps are between two episodes, so nothing is learned; roots and quotients of 0 have derivatives."""
  agent = dataclasses.replace(AGENTS['impala'], max_grad_norm=limit)
  made = trajectory(agent, np.float32)
  last = np.full_like(made.timesteps.step_type, 2)
  masked = made._replace(timesteps=made.timesteps._replace(step_type=last))
  train = jit(agent.init)(jax.random.key(0))
  after, *_ = step_of(agent)(train, (), masked, jax.random.key(0), jnp.int32(0))
  assert all(float(x) == 0 for x in after.rest.shift.values())
  after, *_ = step_of(agent)(train, (), made, jax.random.key(0), jnp.int32(0))
  assert all(np.isfinite(x) and x != 0 for x in after.rest.shift.values())


# --- where they go ----------------------------------------------------------------------------


class Chain(NamedTuple):
  """The state of `Delayed`."""

  time: Any  # [] i32
  first: Any  # [] i32 the first action


class Delayed:
  """Episodes of 8 steps. The first action decides the reward at the end, which is all that there is."""

  observation_space = spaces.Box(0, 1, (8,), np.float32)
  action_space = spaces.Discrete(2)

  def reset(self, key: Any) -> Any:
    del key
    return Chain(jnp.int32(0), jnp.int32(0)), restart(jax.nn.one_hot(0, 8))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    del key
    state = Chain(state.time + 1, jnp.where(state.time == 0, action, state.first))
    over = state.time == 7
    return state, transition(jax.nn.one_hot(state.time, 8), jnp.where(over, 2.0 * state.first - 1, 0.0), over, False)  # fmt: skip


def tuned(name: str, start: float, **settings: Any) -> float:
  """A metaparameter after 150 updates in `Delayed`, where it starts away from the user's setting."""
  env = NextStepReset(Delayed())
  tuning = Tuning(fields=(name,), learning_rate=0.03)
  agent = Impala(
    ActorCritic(hidden=(16,)), learning_rate=3e-3, self_tuning=True, tuning=tuning, **settings
  )
  bound = agent.network.bind(env.observation_space, env.action_space)
  agent = dataclasses.replace(agent, network=bound)
  anakin = Anakin(agent, env, on_policy(), topology.learner_mesh(1), 32, 9)
  state = anakin.init(jax.random.split(jax.random.key(0), 1))
  field = metagradient.field_of(name)
  top = 1 if name in metagradient.SHARES else 10 * getattr(agent, field)
  shift = {
    name: jnp.float32(inverse_sigmoid(start / top) - inverse_sigmoid(getattr(agent, field) / top))
  }
  rest = state.train.rest._replace(shift=shift)
  state = state._replace(train=state.train._replace(rest=rest))
  state = anakin.run(state, jnp.int32(150))
  user = metagradient.user_values(agent)
  return float(metagradient.tuned_values(user, state.train.rest.shift)[field])


@pytest.mark.slow
def test_a_discount_grows_where_rewards_come_late() -> None:
  """The first action's reward is discounted to 0.3^6, 0.0007, so nothing is learned; the outer loss has 0.99."""
  assert tuned('discount', 0.3, discount=0.99) > 0.8


@pytest.mark.slow
def test_an_entropy_cost_shrinks_that_keeps_the_policy_from_learning() -> None:
  """The outer loss has a thousandth of what it starts with."""
  assert tuned('entropy_cost', 0.5, entropy_cost=0.06, lambda_=0.95) < 0.3


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_metrics_have_their_trajectory(tmp_path: Path) -> None:
  agent = dict(self_tuning=True, learning_rate=3e-3, network=dict(hidden=(8,)))
  config = podrace.configure('catch', agent=agent, num_envs=16, total_steps=16 * 16 * 40, log_every=16 * 16 * 10)  # fmt: skip
  podrace.train(config, tmp_path / 'run', quiet=True)
  lines = [json.loads(x) for x in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert len(lines) == 4
  for name in config.agent.tuning.fields:
    course = [line[f'tuned_{name}'] for line in lines]
    own = min(getattr(config.agent, metagradient.field_of(name)), 0.99)
    own = config.agent.policy_cost if name == 'policy_cost' else own
    assert course[0] == pytest.approx(own, rel=0.05), name
    assert name == 'clip_mix' or len(set(course)) == 4, (
      name
    )  # on-policy ratios are 1, clipped or not
  assert all(np.isfinite(line['outer_loss']) for line in lines)


@pytest.mark.slow
def test_each_setting_of_a_sweep_is_what_it_is_alone() -> None:
  """Metaparameters begin as each member's own settings, and the outer loss has those."""
  agent, discounts = AGENTS['impala'], (0.9, 0.99)
  varied = Varied(agent, ('discount',), discounts)
  trains = varied.init_members(jax.random.split(jax.random.key(0), 2))
  step = learner(varied, on_policy(), topology.learner_mesh(1))
  made, key = trajectory(agent, np.float32), jax.random.key(1)
  together, *_ = jit(jax.vmap(lambda t: step(t, (), made, key, jnp.int32(0))))(trains)
  for i, discount in enumerate(discounts):
    alone = dataclasses.replace(agent, discount=discount)
    train = jax.tree.map(lambda x, i=i: x[i], trains)
    train = train._replace(rest=train.rest.rest)
    after, *_ = step_of(alone)(train, (), made, jax.random.key(1), jnp.int32(0))
    mine = jax.tree.map(lambda x, i=i: x[i], together)
    mine = mine._replace(rest=mine.rest.rest)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(after), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: Tuning(learning_rate=-1.0), r'learning_rate.*0.*-1'),
    (lambda: Tuning(kl_cost=-1.0), r'kl_cost.*0.*-1'),
    (lambda: Impala(self_tuning=True, discount=1.0), r'discount.*1.*1'),
    (lambda: Impala(self_tuning=True, entropy_cost=0.0), r'entropy_cost.*0.*0'),
    (lambda: Impala(self_tuning=True, lambda_=0.0), r'lambda.*0'),
    (lambda: Impala(self_tuning=True, tuning=Tuning()), r'tuning.fields'),
    (lambda: PPO(self_tuning=True, tuning=Tuning(fields=('clip_mix',))), r'PPO.*clip_mix'),
    (lambda: Impala(clip_mix=1.5), r'clip_mix.*\[0.*1\].*1.5'),
  ],
)  # fmt: skip
def test_what_is_refused(make: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make()


def test_what_is_not_tuned_may_be_anything() -> None:
  Impala(discount=1.0, entropy_cost=0.0)
  Impala(discount=1.0, self_tuning=True, tuning=Tuning(fields=('lambda',)))
