"""One agent of a population: its meta-gradient against differences, its life, and its value function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import populations
import pytest

from podrace.architectures.discovery.members import Member
from podrace.architectures.discovery.objective import ValueFunction
from podrace.architectures.unroll import unroll
from podrace.envs.base import batch
from podrace.networks import ActorCritic
from podrace.types import FIRST, LAST, MID, ActorOutput, TimeStep, Trajectory

SLOW = pytest.mark.slow


def as_doubles(tree: Any) -> Any:
  return jax.tree.map(lambda x: np.float64(x) if x.dtype == jnp.float32 else x, tree)


def check_against_differences(kind: Any, rule: Any, h: float, rtol: float) -> None:
  """Along random directions of the rule's arrays, with double precision where learning is."""
  member = populations.member(kind, number=1)
  with jax.enable_x64(True):
    rule, train, value = as_doubles((dict(rule), member.train, member.value))
    member = member._replace(train=train, value=value)

    @jax.jit
    def outcome(rule: Any) -> Any:  # and its gradient, in one program to compile
      return jax.value_and_grad(lambda r: kind.outcome(r, member, jax.random.key(5))[0])(rule)

    gradient, rng = jax.device_get(outcome(rule)[1]), np.random.default_rng(0)
    for _ in range(2):
      along = {name: rng.normal(size=rule[name].shape) for name in sorted(rule)}
      forth, back = (
        float(outcome({k: rule[k] + s * h * along[k] for k in rule})[0]) for s in (1, -1)
      )
      expected = (forth - back) / (2 * h)
      found = sum(np.vdot(gradient[k], along[k]) for k in rule)
      assert abs(expected) > 1e-6, expected
      np.testing.assert_allclose(found, expected, rtol=rtol)


def test_the_meta_gradient_against_differences() -> None:
  """Through three updates of LPG, by gradient descent alone: Adam's denominator is data."""
  agent = dataclasses.replace(populations.LPG_AGENT, optimizer='sgd', learning_rate=0.5)
  kind = populations.kind(agent=agent, updates=3)
  check_against_differences(kind, populations.lpg_rule(), 1e-6, 1e-4)


@SLOW
def test_the_meta_gradient_of_disco_against_differences() -> None:
  """Through one update: in later ones the rule is given numbers that count as data, though it has moved them.

  The optimiser's denominator is data as well; with a large epsilon it is as good as constant.
  """
  agent = dataclasses.replace(populations.DISCO_AGENT, adam_epsilon=1e3, learning_rate=1e3)
  kind = populations.kind(agent=agent, updates=1)
  check_against_differences(kind, populations.disco_rule(), 1e-5, 1e-3)


def unrolling(kind: Any) -> Any:
  """The unroll of a member with a key."""
  env = batch(kind.env, kind.num_envs)

  @jax.jit
  def run(member: Member, key: Any) -> Trajectory:
    return unroll(kind.agent, env, member.train.params, member.actor, key, kind.unroll_length)[1]

  return run


def slow_entropies(kind: Any, rule: Any, member: Member, key: Any) -> dict[str, list[float]]:
  """Entropies of y, and of the chosen z, of each agent's newest parameters on what it learned from, in NumPy."""
  agent = kind.agent
  acted, update = unrolling(kind), jax.jit(kind.update)
  found: dict[str, list[float]] = {}
  for one in jax.random.split(jax.random.split(key)[0], kind.updates):
    window = acted(member, jax.random.split(one)[0])
    member = update(rule, member, one)[0]
    said, _ = agent.network.unroll(member.train.params, window.agent_state, window.timesteps)
    outputs = dict(y_entropy=np.asarray(said.y, np.float64)[:-1])
    if hasattr(said, 'z'):
      action = np.asarray(window.outputs.action)[..., None, None]
      z = np.asarray(said.z, np.float64)[:-1]
      outputs['z_entropy'] = np.take_along_axis(z, action, axis=2)[:, :, 0]
    valid = np.asarray(window.timesteps.step_type[:-1] != LAST)
    total = valid.size if isinstance(agent, type(populations.LPG_AGENT)) else valid.sum()
    for name, logits in outputs.items():
      p = np.exp(logits - logits.max(-1, keepdims=True))
      p /= p.sum(-1, keepdims=True)
      found.setdefault(name, []).append(-(p * np.log(p)).sum(-1)[valid].sum() / total)
  return found


@pytest.fixture
def keys_may_be_used_again() -> Iterator[None]:
  with jax.debug_key_reuse(False):
    yield


@pytest.mark.slow
@pytest.mark.usefixtures('keys_may_be_used_again')
@pytest.mark.parametrize('name', ['lpg', pytest.param('disco', marks=SLOW)])
@pytest.mark.parametrize('updates', [1, pytest.param(3, marks=SLOW)])
def test_regularisers_are_of_the_parameters_after_each_update(name: str, updates: int) -> None:
  """So with one update their gradient is no 0: value by loops, gradient by differences in double precision."""
  agent: Any = dataclasses.replace(populations.LPG_AGENT, optimizer='sgd', learning_rate=0.5)
  rule = populations.lpg_rule()
  if (
    name == 'disco'
  ):  # of more updates the rule is given its own outcome as data, so differences are others
    agent = dataclasses.replace(populations.DISCO_AGENT, adam_epsilon=1e3, learning_rate=1e3)
    rule = populations.disco_rule()
  kind = dataclasses.replace(populations.kind(agent=agent, updates=updates), entropy_cost=0.0)
  member, key = populations.member(kind, number=1), jax.random.key(5)
  entropies = slow_entropies(kind, rule, member, key)
  weights = {metric: 10.0 * (i + 1) for i, metric in enumerate(entropies)}
  kinds = [dataclasses.replace(kind, regularisers=x) for x in (weights, {})]
  with jax.enable_x64(True):
    rule, train, value = as_doubles((dict(rule), member.train, member.value))
    member = member._replace(train=train, value=value)

    @jax.jit
    def regularisation(rule: Any) -> Any:
      def difference(rule: Any) -> Any:
        one, other = (k.outcome(rule, member, key)[0] for k in kinds)
        return one - other

      return jax.value_and_grad(difference)(rule)

    value, gradient = regularisation(rule)
    expected = sum(w * np.mean(entropies[metric]) for metric, w in weights.items())
    np.testing.assert_allclose(value, expected, rtol=1e-3)  # by the loops in float32
    assert max(jnp.abs(g).max() for g in gradient.values()) > 1e-6
    if name == 'disco' and updates > 1:
      return
    keys = jax.random.split(jax.random.key(0), len(rule))
    along = {k: jax.random.normal(x, rule[k].shape) for k, x in zip(rule, keys, strict=True)}
    forth, back = (
      regularisation({k: rule[k] + s * 1e-5 * along[k] for k in rule})[0] for s in (1, -1)
    )
    found = sum(jnp.vdot(gradient[k], along[k]) for k in rule)
    np.testing.assert_allclose(found, (forth - back) / 2e-5, rtol=1e-3)


# --- lives ----------------------------------------------------------------------------------------------


def group(kind: Any, ages: list[int]) -> Member:
  """Members in their first lives, in which everything has become something else."""
  members = populations.group(kind, ages, jax.random.key(3))

  def other(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    return ~x if x.dtype == bool else x + jnp.ones_like(x)

  kept = dict(age=members.age, lives=members.lives, number=members.number)
  changed: Member = jax.jit(lambda x: jax.tree.map(other, x))(members)
  return changed._replace(**kept)


@pytest.mark.parametrize('name', ['lpg', pytest.param('disco', marks=SLOW)])
def test_lives_end_one_by_one_and_wholly(name: str) -> None:
  """Environments, parameters, optimiser, the rule's memory, replay and values begin anew; nothing else does."""
  agent = {'lpg': populations.LPG_AGENT, 'disco': populations.DISCO_AGENT}[name]
  kind = populations.kind(agent=agent, lifetime=10, replayed=2 * (name == 'disco'))
  before, key = group(kind, [9, 10, 3]), jax.random.key(3)
  after = jax.jit(kind.renew)(before, key)
  fresh = jax.jit(kind.begin)(key, jnp.int32(1), jnp.int32(1), jnp.int32(0))
  each = jax.jit(lambda group: [jax.tree.map(lambda x, i=i: x[i], group) for i in range(3)])
  was, now = each(before), each(after)
  counted = dict(episodes=0, faults=0)  # of the run
  for i in (0, 2):
    jax.tree.map(np.testing.assert_array_equal, now[i], was[i])
  same, expected = (x._replace(actor=x.actor._replace(**counted)) for x in (now[1], fresh))
  assert same.lives == 1 and same.age == 0 and same.number == 1
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), same, expected)
  np.testing.assert_array_equal(after.actor.episodes.finished, before.actor.episodes.finished)
  if name == 'disco':
    assert not after.train.rest.memory.hidden[1].any() and after.memory.head[1] == 0


def test_lives_differ() -> None:
  kind, key = populations.kind(), jax.random.key(3)
  begin = jax.jit(lambda number, lives: kind.begin(key, number, lives, jnp.int32(0)).train.params)
  first, second, other = (begin(*map(jnp.int32, x)) for x in ((0, 0), (0, 1), (1, 0)))
  for one in (second, other):
    leaves = zip(*map(jax.tree.leaves, (first, one)), strict=True)
    assert any((x != y).any() for x, y in leaves)


def test_a_batch_has_the_newest_unrolls_and_windows_of_the_past() -> None:
  kind = populations.kind(agent=populations.DISCO_AGENT, replayed=5)
  member = populations.member(kind)
  length, envs = kind.unroll_length, kind.num_envs

  act = unrolling(kind)
  remember = jax.jit(kind._remember)

  def unrolled(at: float) -> Trajectory:
    t = act(member, jax.random.key(0))
    reward = np.full(t.timesteps.reward.shape, at, np.float32)
    return t._replace(timesteps=t.timesteps._replace(reward=reward))

  memory = member.memory
  for at in (1.0, 2.0):
    memory, window = remember(memory, unrolled(at), jax.random.key(int(at)))
  reward = np.asarray(window.timesteps.reward)
  assert reward.shape == (length + 1, envs + 5) and window.outputs.action.shape[1] == envs + 5
  assert (reward[:, :envs] == 2).all() and set(np.unique(reward[:-1, envs:])) == {1.0, 2.0}


# --- what is improved -----------------------------------------------------------------------------------


def one_stream(rewards: list[float], types: list[int], discounts: list[float]) -> Trajectory:
  """A stream of one environment whose observation is the time."""
  t = len(rewards)
  observation = np.zeros((t, 1, 3, 3), np.float32)
  observation[:, 0, 0, 0] = np.arange(t)
  reward, discount = (np.float32(x)[:, None] for x in (rewards, discounts))
  steps = TimeStep(observation, reward, discount, np.int8(types)[:, None])
  action = np.zeros((t - 1, 1), np.int32)
  return Trajectory(steps, ActorOutput(action), (), np.zeros(1, np.float32))


def values_of(numbers: list[float]) -> Any:
  """A value function that says these of the timesteps."""

  class Table(ValueFunction):
    def values(self, params: Any, unrolled: Trajectory) -> Any:
      return jnp.array(numbers)[:, None]

  return Table(discount=0.5, lambda_=0.5)


def test_advantages_by_hand() -> None:
  """Terminated, cut by a time limit, and unfinished; the step to FIRST counts for nothing."""
  types = [MID, LAST, FIRST, LAST, FIRST, MID]
  stream = one_stream([0, 1, 0, 4, 0, 2], types, [1, 0, 1, 1, 1, 1])
  function = values_of([1.0, 7.0, 2.0, 6.0, 8.0, 10.0])
  state = jax.jit(function.bind(*populations.spaces_of()).init)(jax.random.key(0))
  found = jax.device_get(jax.jit(function.estimate)(state, stream))
  np.testing.assert_array_equal(found.mask[:, 0], [1, 0, 1, 0, 1])
  advantage = np.asarray(found.advantage[:, 0])
  np.testing.assert_allclose(advantage[[0, 2, 4]], [1 - 1.0, 4 + 0.5 * 6 - 2, 2 + 0.5 * 10 - 8])
  np.testing.assert_allclose(found.target[0, 0], 1.0)


@pytest.mark.slow
def test_values_are_learned_and_advantages_scaled() -> None:
  network = ActorCritic(hidden=(8,), initializer='lecun')
  function = ValueFunction(network, learning_rate=0.05).bind(*populations.spaces_of())
  stream = one_stream([0, 0, 3], [FIRST, MID, LAST], [1, 1, 0])
  state, learn = function.init(jax.random.key(0)), jax.jit(function.learn)
  sizes = []
  for _ in range(150):
    sizes.append(float(jnp.mean(jnp.square(function.estimate(state, stream).advantage))))
    state = learn(state, stream)
  expected = [0.99 * 3, 3.0]
  np.testing.assert_allclose(function.values(state.params, stream)[:2, 0], expected, rtol=0.05)
  weights = 0.01 * 0.99 ** np.arange(150)[::-1]
  size = np.sqrt((weights * sizes).sum() / weights.sum())
  np.testing.assert_allclose(function.scale(state, jnp.ones((1, 1)))[0, 0], 1 / size, rtol=1e-3)
  with pytest.raises(ValueError, match='memory'):
    ValueFunction(ActorCritic(core='gru'))
