"""Every hyper-parameter of every agent, and of its network, is read by something."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gymnasium import spaces

from podrace import topology
from podrace.agents import AGENTS
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.learner import learner
from podrace.networks import ActorCritic
from podrace.replay import on_policy
from podrace.types import TimeStep, Trajectory

T, B = 4, 2
VECTOR, IMAGE = spaces.Box(-1, 1, (3,)), spaces.Box(0, 1, (5, 5, 1))
DISCRETE, CONTINUOUS = spaces.Discrete(3), spaces.Box(-1, 1, (2,))


def recording(cls: type, read: set[str]) -> type:
  """A subclass that notes in `read` which attributes are asked for from outside of dataclasses."""

  def __getattribute__(self: Any, name: str) -> Any:
    read.add(name)
    return super(subclass, self).__getattribute__(name)

  # A dataclass's own comparison reads all fields, which would prove nothing.
  by_identity = dict(__eq__=lambda a, b: a is b, __hash__=lambda a: id(a), __repr__=lambda a: 'it')
  subclass = type(cls.__name__, (cls,), dict(by_identity, __getattribute__=__getattribute__))
  return subclass


def use(agent: Any) -> None:
  """All that is ever done with an agent, as shapes only: what is read is read in tracing."""
  step = learner(agent, on_policy(), topology.learner_mesh(1))

  def everything(key: Any) -> Any:
    init_key, act_key, learn_key = jax.random.split(key, 3)
    train = agent.init(init_key)
    state = agent.initial_state(jnp.arange(B))
    timestep = jax.tree.map(lambda x: jnp.repeat(x, B, axis=0), agent.network.example())
    output, _ = agent.act(train.params, state, timestep, act_key)

    def over_time(tree: Any, length: int) -> Any:
      return jax.tree.map(lambda x: jnp.repeat(x[None], length, axis=0), tree)

    timesteps = TimeStep(*over_time(timestep, T + 1))
    trajectory = Trajectory(timesteps, over_time(output, T), state, jnp.arange(B))
    return step(train, (), trajectory, learn_key, jnp.int32(0))

  jax.eval_shape(everything, jax.random.key(0))


def unread(agent_class: type, uses: list[tuple[dict[str, Any], dict[str, Any]]]) -> set[str]:
  """The fields that nothing reads in any of these uses: settings of the agent, of the network."""
  read_of_agent: set[str] = set()
  read_of_network: set[str] = set()
  agents, networks = recording(agent_class, read_of_agent), recording(ActorCritic, read_of_network)
  for settings, network in uses:
    spaces_of_it = dict(observation_space=VECTOR, action_space=DISCRETE)
    use(agents(network=networks(**(spaces_of_it | network)), **settings))
  missing = {f.name for f in dataclasses.fields(agent_class)} - read_of_agent
  return missing | {f'network.{f.name}' for f in dataclasses.fields(ActorCritic)} - {
    f'network.{name}' for name in read_of_network
  }


USES = {
  'ppo': [
    (dict(total_updates=10), dict(shared=False)),
    (dict(minibatches=1, normalize_observations=True, normalize_rewards=True), dict(core='gru')),
    (dict(anneal_learning_rate=False, clip_value=0.1), dict(action_space=CONTINUOUS)),
    (dict(greedy=True, total_updates=10), dict(action_space=CONTINUOUS, squash=True)),
    (dict(total_updates=10), dict(observation_space=IMAGE, torso='grid')),
  ],
  'impala': [
    (dict(), dict(shared=False)),
    (dict(optimizer='rmsprop', anneal_learning_rate=True, total_updates=10), dict(core='lstm')),
    (dict(normalize_observations=True, normalize_rewards=True), dict(action_space=CONTINUOUS)),
    (dict(greedy=True), dict(observation_space=IMAGE, torso='grid')),
  ],
}
CLASSES = {'ppo': PPO, 'impala': Impala}


def test_every_agent_is_here() -> None:
  assert AGENTS.keys() == USES.keys() == CLASSES.keys()


@pytest.mark.parametrize('name', USES)
def test_every_field_is_read(name: str) -> None:
  assert unread(CLASSES[name], USES[name]) == set()


def test_a_field_that_is_not_read_is_found() -> None:
  @dataclasses.dataclass(frozen=True)
  class Idle(Impala):
    idle: float = 1.0

  # with those that a feed-forward network of discrete actions and Adam have no use for
  assert unread(Idle, [(dict(), dict())]) == {
    'idle',
    'rmsprop_decay',
    'total_updates',
    'network.initial_log_std',
  }
