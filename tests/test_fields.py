"""Every hyper-parameter of every agent, and of its network, is read by something."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import rule_files
from gymnasium import spaces

import podrace
from podrace import topology
from podrace.agents import AGENTS
from podrace.agents.bc import BC
from podrace.agents.cem import CEM
from podrace.agents.d4pg import D4PG
from podrace.agents.disco import Disco
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.intrinsic import Intrinsic
from podrace.agents.lpg import LPG
from podrace.agents.muesli import Muesli
from podrace.agents.muzero import MuZero
from podrace.agents.ppo import PPO
from podrace.agents.pqn import PQN
from podrace.agents.qtopt import QTOpt
from podrace.agents.r2d2 import R2D2
from podrace.agents.recurrent import Recurrence
from podrace.agents.sac import SAC
from podrace.learner import learner
from podrace.networks import (
  ActionValue,
  Actor,
  ActorCritic,
  Critic,
  LearnedModel,
  LifetimeNetwork,
  Policy,
  PolicyPredictor,
  Predictor,
  QNetwork,
)
from podrace.replay import Buffer, on_policy
from podrace.types import TimeStep, Trajectory

T, B = 4, 2
BROKEN = re.compile(r'^  (\w+): [^\n]*= \(\n', re.MULTILINE)
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


def read_for_a_model_axis(agent: Any) -> None:
  """As `podrace.hooks.sharding` does, which looks at all fields of an agent for that."""
  for name in ('network', 'actor', 'critic', 'policy', 'reward', 'value', 'lifetime_value'):
    getattr(getattr(agent, name, None), 'sharding_rules', None)


def use(agent: Any) -> None:
  """All that is ever done with an agent, as shapes only: what is read is read in tracing, or for a model axis."""
  read_for_a_model_axis(agent)
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
  for settings, network in uses:
    of_agent, of_network = set[str](), set[str]()
    agents, networks = recording(agent_class, of_agent), recording(ActorCritic, of_network)
    spaces_of_it = dict(observation_space=VECTOR, action_space=DISCRETE)
    agent = agents(network=networks(**(spaces_of_it | network)), **settings)
    of_agent.clear()  # what is only checked when it is made is of no use yet
    of_network.clear()
    use(agent)
    read_of_agent |= of_agent
    read_of_network |= of_network
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
    (dict(self_tuning=True, total_updates=10), dict()),
    (dict(normalize_values=True), dict()),
    (dict(total_updates=10), dict(observation_space=IMAGE, torso='grid')),
  ],
  'impala': [
    (dict(), dict(shared=False)),
    (dict(optimizer='rmsprop', anneal_learning_rate=True, total_updates=10), dict(core='lstm')),
    (dict(normalize_observations=True, normalize_rewards=True), dict(action_space=CONTINUOUS)),
    (dict(greedy=True), dict(observation_space=IMAGE, torso='grid')),
    (dict(self_tuning=True), dict()),
    (dict(normalize_values=True), dict()),
  ],
}
CLASSES = {'ppo': PPO, 'impala': Impala}


CORE: dict[str, Any] = dict(core='gru', core_size=4, previous_action=True)
SEQUENCE: dict[str, Any] = dict(recurrence=Recurrence(sequence=4, burn_in=1))
WITH_REPLAY = {  # settings of the agent, its parts' classes, and settings of those
  'dqn': [
    (dict(), dict(network=(QNetwork, dict()), buffer=(Buffer, dict()))),
    (
      dict(epsilon_ladder=True, double=False),
      dict(
        network=(QNetwork, dict(head='categorical', dueling=True, head_size=4)),
        buffer=(Buffer, dict(priority_exponent=0.5)),
      ),
    ),
    (dict(), dict(network=(QNetwork, dict(noisy=True)), buffer=(Buffer, dict()))),
    (SEQUENCE, dict(network=(QNetwork, dict(**CORE, shortcut=True)), buffer=(Buffer, dict()))),
  ],
  'r2d2': [
    (
      dict(sequence=4, burn_in=1),
      dict(
        network=(QNetwork, dict(core='gru', core_size=4, head_size=4)),
        buffer=(Buffer, dict(priority_exponent=0.5)),
      ),
    )
  ],
  'pqn': [  # without replay
    (
      dict(minibatches=1, total_updates=10),
      dict(network=(QNetwork, dict(core=core, core_size=4, head_size=4, dueling=True))),
    )
    for core in ('none', 'gru')
  ],
  'sac': [
    (
      dict(target_entropy=target),
      dict(actor=(Actor, {}), critic=(Critic, dict(critics=2)), buffer=(Buffer, {})),
    )
    for target in (None, -1.0)
  ]
  + [
    (
      SEQUENCE,
      dict(actor=(Actor, CORE), critic=(Critic, dict(critics=2, **CORE)), buffer=(Buffer, {})),
    )
  ],
  'd4pg': [
    (
      dict(),
      dict(
        actor=(Actor, dict(deterministic=True)), critic=(Critic, dict(atoms=5)), buffer=(Buffer, {})
      ),
    ),
    (
      SEQUENCE,
      dict(
        actor=(Actor, dict(deterministic=True, **CORE)),
        critic=(Critic, dict(atoms=5, **CORE)),
        buffer=(Buffer, {}),
      ),
    ),
  ],
  'qtopt': [
    (
      dict(),
      dict(network=(ActionValue, dict(head=head)), buffer=(Buffer, {}), cem=(CEM, {})),
    )
    for head in ('sigmoid', 'value')
  ]
  + [(SEQUENCE, dict(network=(ActionValue, CORE), buffer=(Buffer, {}), cem=(CEM, {})))],
  'bc': [
    (dict(), dict(network=(ActorCritic, dict()), buffer=(Buffer, {}))),
    (dict(), dict(network=(ActorCritic, dict(squash=True, shared=False)), buffer=(Buffer, {}))),
    (SEQUENCE, dict(network=(ActorCritic, dict(core='gru', core_size=4)), buffer=(Buffer, {}))),
  ],
  'muzero': [
    (
      dict(simulations=2, unroll=1, n_step=1, reanalyse=0.5, consistency=1.0),
      dict(
        network=(LearnedModel, dict(projection=4)), buffer=(Buffer, dict(priority_exponent=0.5))
      ),
    ),
    (
      dict(
        simulations=2, unroll=1, n_step=1, search='puct', sampled_actions=2, sequence=4, burn_in=1
      ),
      dict(network=(LearnedModel, dict(core='gru', core_size=4)), buffer=(Buffer, {})),
    ),
    (
      dict(simulations=2, unroll=1, n_step=1),
      dict(
        network=(LearnedModel, dict(blocks=1, channels=2, observation_space=IMAGE)),
        buffer=(Buffer, {}),
      ),
    ),
  ],
  'muesli': [
    (dict(unroll=1), dict(network=(LearnedModel, dict()))),
    (
      dict(unroll=1, sampled_actions=2, anneal_learning_rate=True),
      dict(network=(LearnedModel, dict(core='gru', core_size=4))),
    ),
    (
      dict(unroll=1),
      dict(network=(LearnedModel, dict(blocks=1, channels=2, observation_space=IMAGE))),
    ),
  ],
  'disco': [
    (
      dict(rule=rule_files.small(), lifetime=rule_files.SIZES.lifetime),
      dict(
        network=(Predictor, dict(core=core, core_size=4, predictions=rule_files.SIZES.predictions))
      ),
    )
    for core in ('none', 'gru')
  ],
  'lpg': [  # without replay, as the next one, and with a network of its own
    (
      dict(rule=rule_files.small_lpg(), optimizer=optimizer),
      dict(
        network=(
          PolicyPredictor,
          dict(core=core, core_size=4, predictions=rule_files.LPG.predictions),
        )
      ),
    )
    for core, optimizer in (('none', 'adam'), ('gru', 'sgd'))
  ],
  'intrinsic': [
    (
      dict(),
      dict(
        policy=(Policy, dict()), reward=(LifetimeNetwork, dict()), value=(LifetimeNetwork, dict())
      ),
    ),
    (
      dict(objective='episode'),
      dict(
        policy=(Policy, dict(hidden=(4,))),
        reward=(LifetimeNetwork, dict(core='none')),
        value=(LifetimeNetwork, dict(core='gru')),
      ),
    ),
  ],
}
REPLAY_CLASSES = {
  'dqn': DQN, 'r2d2': R2D2, 'pqn': PQN, 'sac': SAC, 'd4pg': D4PG, 'qtopt': QTOpt, 'bc': BC, 'muzero': MuZero, 'muesli': Muesli,
  'disco': Disco, 'lpg': LPG, 'intrinsic': Intrinsic,
}  # fmt: skip
RANKING = {'importance_exponent', 'importance_steps'}
LOGGED = {'online_share_end', 'online_share_steps'}  # with a log: tests/replay/test_logged.py
ONLY_ELSEWHERE = {  # fields that all networks and buffers have, and what uses them not
  'dqn': {'buffer': LOGGED},
  'r2d2': {
    'network': {'num_atoms', 'v_min', 'v_max'},
    'buffer': LOGGED,
  },  # one value, and no distribution
  'pqn': {'network': {'num_atoms', 'v_min', 'v_max'}},
  'sac': {'critic': {'torso', 'transformer'}, 'buffer': RANKING | LOGGED},
  'd4pg': {'critic': {'torso', 'transformer'}, 'buffer': RANKING | LOGGED},
  'bc': {'buffer': RANKING | LOGGED},
  'muzero': {'buffer': LOGGED},
  'qtopt': {'buffer': RANKING | LOGGED},
  'muesli': {},
  'disco': {},
  'lpg': {},
  'intrinsic': {},
}


@pytest.mark.parametrize(
  'name',
  [n if n == 'pqn' else pytest.param(n, marks=pytest.mark.slow) for n in WITH_REPLAY],
)
def test_every_field_is_read_with_replay(name: str) -> None:
  """As above, of an agent, its networks and its buffer, through the learner step."""
  cls = REPLAY_CLASSES[name]
  of_agent: set[str] = set()
  of_parts: dict[str, set[str]] = {}
  action_space = CONTINUOUS if name in ('sac', 'd4pg', 'qtopt', 'bc') else DISCRETE
  for settings, parts in WITH_REPLAY[name]:
    envs = {'total_envs': B} if name in ('dqn', 'r2d2') else {}
    for greedy in (False, True):
      read: dict[str, set[str]] = {part: set() for part in ('agent', *parts)}
      made = {}  # and not replaced: that would read all fields
      for part, (part_class, values) in parts.items():
        bound = dict(observation_space=VECTOR, action_space=action_space)
        made[part] = recording(part_class, read[part])(
          **(({} if part in ('buffer', 'cem') else bound) | values)
        )
      acts = {'greedy': greedy} if name != 'intrinsic' else {}
      agent = recording(cls, read['agent'])(**settings, **made, **envs, **acts)
      for names in read.values():
        names.clear()  # as above
      learn_with_replay(agent)
      of_agent |= read.pop('agent')
      for part, names in read.items():
        of_parts.setdefault(part, set()).update(names)
  searched = {'environment'}  # by the true rules alone: tests/agents/test_rules.py
  assert {f.name for f in dataclasses.fields(cls)} - of_agent - searched == set()
  for part, read in of_parts.items():
    part_class = WITH_REPLAY[name][0][1][part][0]
    missing = {f.name for f in dataclasses.fields(part_class)} - read
    assert missing == ONLY_ELSEWHERE[name].get(part, set()), part


def learn_with_replay(agent: Any) -> None:
  read_for_a_model_axis(agent)
  replay = agent.memory(B, T) if hasattr(agent, 'memory') else on_policy()
  step = learner(agent, replay, topology.learner_mesh(1))

  def everything(key: Any) -> Any:
    init_key, act_key, learn_key = jax.random.split(key, 3)
    train = agent.init(init_key)
    state = agent.initial_state(jnp.arange(B))
    network = next(getattr(agent, n) for n in ('network', 'actor', 'policy') if hasattr(agent, n))
    timestep = jax.tree.map(lambda x: jnp.repeat(x, B, axis=0), network.example())
    output, _ = agent.act(train.params, state, timestep, act_key)
    timesteps = jax.tree.map(lambda x: jnp.repeat(x[None], T + 1, axis=0), timestep)
    outputs = jax.tree.map(lambda x: jnp.repeat(x[None], T, axis=0), output)
    trajectory = Trajectory(TimeStep(*timesteps), outputs, state, jnp.arange(B))
    memory = replay.init(jax.eval_shape(lambda: trajectory))
    return step(train, memory, trajectory, learn_key, jnp.int32(0))

  jax.eval_shape(everything, jax.random.key(0))


def test_every_agent_is_here() -> None:
  assert AGENTS.keys() == USES.keys() | WITH_REPLAY.keys()
  assert CLASSES.keys() == USES.keys()


@pytest.mark.parametrize(
  'name', [n if n == 'impala' else pytest.param(n, marks=pytest.mark.slow) for n in USES]
)
def test_every_field_is_read(name: str) -> None:
  assert unread(CLASSES[name], USES[name]) == set()


def test_a_field_that_is_not_read_is_found() -> None:
  @dataclasses.dataclass(frozen=True)
  class Idle(Impala):
    idle: float = 1.0

    def __post_init__(self) -> None:
      super().__post_init__()
      assert self.idle > 0

  # with those that a feed-forward network of discrete actions and Adam have no use for
  assert unread(Idle, [(dict(), dict())]) == {
    'idle',
    'rmsprop_decay',
    'total_updates',
    'tuning',
    'popart',
    'network.initial_log_std',
  }


def test_every_comment_of_a_field_is_in_the_help() -> None:
  """It is looked for at the end of the field's line and below: a formatter may put it between brackets."""
  root = Path(podrace.__file__).parent
  lost = [f'{p.name}: {x}' for p in root.rglob('*.py') for x in BROKEN.findall(p.read_text())]
  assert not lost
  assert BROKEN.findall('  lambda_: float = (\n    1.0  # mixes\n  )\n') == ['lambda_']


@pytest.mark.parametrize(
  ('low', 'high', 'atoms'),
  [(-10, 10, 51), (0, 1e-6, 51), (1e6, 1e6 + 10, 51), (-1e7 - 100, -1e7, 51), (-1e38, 1e38, 601)],
)
def test_atoms_are_different_numbers(low: float, high: float, atoms: int) -> None:
  network = QNetwork(head='categorical', v_min=low, v_max=high, num_atoms=atoms)
  assert (jnp.diff(network.support) > 0).all()


@pytest.mark.parametrize(('low', 'high'), [(1e6, 1e6 + 1), (-1e6 - 1, -1e6), (0, 1e-37)])
def test_atoms_that_float32_cannot_tell_apart_are_refused(low: float, high: float) -> None:
  for make in (
    lambda: QNetwork(head='categorical', v_min=low, v_max=high),
    lambda: D4PG(v_min=low, v_max=high),
    lambda: LearnedModel(v_min=low, v_max=high),
  ):
    with pytest.raises(ValueError, match=r'v_min.* v_max'):
      make()
  assert QNetwork(v_min=low, v_max=high).head == 'value'  # without atoms
