"""Configurations: their record, their differences, and that every field of them is used."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import podrace
from podrace.agents import AGENTS, agents_for
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.muesli import Muesli
from podrace.agents.muzero import MuZero
from podrace.agents.population import Varied
from podrace.agents.ppo import PPO
from podrace.envs.own.catch import Catch
from podrace.errors import UsageError
from podrace.networks import ActorCritic, Network, QNetwork
from podrace.replay import Buffer
from podrace.run.directory import differences_of, load_config
from podrace.settings import agents, validation
from podrace.settings import config as configs
from podrace.settings.agents import bind, bind_run
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import (
  changes,
  complete,
  from_json,
  to_json,
  unrecorded_options,
  with_unrecorded,
)
from podrace.settings.resolved import resolve
from podrace.settings.validation import validate
from podrace.system.files import write_json

SOURCE = Path(configs.__file__).parents[1]


@pytest.mark.parametrize('preset', PRESETS)
def test_config_json_makes_the_config_again(preset: str) -> None:
  config = PRESETS[preset]()
  record = json.loads(json.dumps(to_json(config)))
  assert from_json(record) == config
  assert hash(from_json(record).agent)  # tuples are tuples again
  assert not list(changes(record, to_json(config)))


@pytest.mark.parametrize('preset', PRESETS)
def test_presets_are_valid_and_say_what_they_are(preset: str) -> None:
  validate(PRESETS[preset]())
  assert PRESETS[preset].__doc__


def test_differences() -> None:
  old = to_json(PRESETS['catch']())
  config = PRESETS['catch']()
  network = dataclasses.replace(config.agent.network, hidden=(32,), core='gru')
  new = to_json(
    dataclasses.replace(config, agent=dataclasses.replace(config.agent, network=network), seed=3)
  )
  assert sorted(map(str, changes(old, new))) == [
    'agent.network.core: "none" -> "gru"',
    'agent.network.hidden: [64, 64] -> [32]',
    'seed: 0 -> 3',
  ]


def test_any_field_of_a_config_shows_in_its_record() -> None:
  config = PRESETS['catch']()
  for field in dataclasses.fields(Config):
    if field.name == 'agent':
      continue
    value = getattr(config, field.name)
    other = dataclasses.replace(config, **{field.name: 'x' if isinstance(value, str) else 77})
    assert len(list(changes(to_json(config), to_json(other)))) == 1, field.name


def test_a_record_of_another_version_or_with_other_fields_is_refused() -> None:
  record = to_json(PRESETS['catch']())
  with pytest.raises(UsageError, match=r'version 0.*1'):
    from_json({**record, 'version': 0})
  with pytest.raises(UsageError, match=r"Config 'num_env'.*num_envs"):
    from_json({**record, 'num_env': 3})
  agent = {**record['agent'], 'learning_rat': 1.0}
  with pytest.raises(UsageError, match=r'Impala.*learning_rate'):
    from_json({**record, 'agent': agent})
  with pytest.raises(UsageError, match=r"'impalla'.*impala"):
    from_json({**record, 'agent': {'name': 'impalla'}})
  with pytest.raises(UsageError, match='no agent'):
    from_json({**record, 'agent': {'name': 'nowhere:Agent'}})
  for garbled in ({}, [], {'version': 1}, {'version': 1, 'agent': 3}):
    with pytest.raises(UsageError, match=r'config\.json'):
      from_json(garbled)


@dataclasses.dataclass(frozen=True)
class OwnAgent:
  """Somebody's own, with a field that JSON can't hold."""

  network: ActorCritic = ActorCritic()
  temperature: float = 1.0
  layers: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class OwnNetwork:
  """Likewise, where ours would be."""

  width: int = 3


def test_a_recorded_value_that_its_class_refuses(tmp_path: Path) -> None:
  """As after damage to a file: the file is named, and a run with the right value is compared."""
  config = Config(agent=Impala())
  record = to_json(config)
  record['agent']['discount'] = 9.99
  write_json(tmp_path / 'config.json', record)
  with pytest.raises(UsageError, match=re.escape(str(tmp_path / 'config.json'))) as e:
    load_config(tmp_path)
  assert '9.99' in str(e.value)
  assert [c.path for c in differences_of(config, tmp_path)] == ['agent.discount']


def test_somebody_elses_network_is_made_again() -> None:
  config = Config(agent=OwnAgent(network=OwnNetwork(5)))
  record = json.loads(json.dumps(to_json(config)))
  assert from_json(record) == config
  record['agent']['network']['class'] = 'nowhere:Network'
  with pytest.raises(UsageError, match='nowhere'):
    from_json(record)


@dataclasses.dataclass(frozen=True)
class OwnParts(OwnAgent):
  """Parts under types that do not tell their class, in tuples, and a field that is computed."""

  either: ActorCritic | OwnNetwork = OwnNetwork()
  maybe: ActorCritic | None = ActorCritic()
  protocol: Network = ActorCritic()
  anything: Any = QNetwork()
  pair: tuple[ActorCritic, OwnNetwork | None] = (ActorCritic(), None)
  untyped: tuple = (OwnNetwork(7), (QNetwork(), 1))  # type: ignore[type-arg]
  area: int = dataclasses.field(init=False, default=3)


@pytest.mark.parametrize(
  'changed',
  [
    {},
    {'either': ActorCritic(hidden=(3,)), 'maybe': None, 'protocol': OwnNetwork(2)},
    {'anything': OwnNetwork(4), 'pair': (ActorCritic(hidden=(5,)), OwnNetwork(6)), 'untyped': ()},
  ],
)
def test_parts_of_an_own_agent_are_made_again(changed: dict[str, Any]) -> None:
  config = Config(agent=OwnParts(**changed))
  record = json.loads(json.dumps(to_json(config)))
  assert from_json(record) == config
  assert not list(changes(record, to_json(config)))


def test_a_part_of_an_own_agent_has_the_declared_type() -> None:
  record = to_json(Config(agent=OwnParts()))
  record['agent']['either'] = {'class': 'podrace.networks:QNetwork'}
  with pytest.raises(UsageError, match=r'QNetwork.*OwnNetwork'):
    from_json(record)


@dataclasses.dataclass(frozen=True)
class Acting(OwnAgent):
  init = initial_state = act = learn = None


@dataclasses.dataclass(frozen=True)
class Named(Acting):
  name: str = 'mine'


class Untyped(Acting):
  temperature = 2.0


class UntypedNetwork(ActorCritic):
  hidden = (3,)


class Greedy(Acting):
  greedy = False


@pytest.mark.parametrize(
  ('agent', 'message'),
  [
    (Named(), 'Named.*`name`'),
    (Untyped(), 'Untyped: `temperature`'),
    (Acting(network=UntypedNetwork()), 'UntypedNetwork: `hidden`'),
    (Greedy(), 'Greedy: `greedy`.*`greedy: bool = False`'),
    (Varied(Greedy(), ('temperature',), (1.0,)), 'Greedy: `greedy`'),
  ],
)
def test_fields_that_would_be_lost_are_refused(agent: Any, message: str) -> None:
  with pytest.raises(UsageError, match=message):
    bind(agent, Catch())


def test_a_network_that_json_cannot_hold_is_told() -> None:
  record = to_json(Config(agent=OwnAgent(network=open)))
  with pytest.raises(UsageError, match='Python'):
    from_json(record)


def test_a_record_from_before_a_field_was_there_is_the_same_run() -> None:
  config = PRESETS['catch']()
  old = to_json(config)
  del old['replay'], old['agent']['network']['squash']
  assert list(changes(old, to_json(config)))
  assert not list(changes(complete(old), to_json(config)))


def test_a_network_recorded_before_its_scaling_was_has_the_older_one() -> None:
  config = PRESETS['catch']()
  old = to_json(config)
  assert from_json(old).agent.network.scaling == 'space'
  del old['agent']['network']['scaling']
  begun = from_json(old)
  assert begun.agent.network.scaling == 'plain'
  assert to_json(begun) == old  # so a run that goes on stays as it began
  assert (
    with_unrecorded(config, old) == begun and with_unrecorded(config, to_json(config)) is config
  )
  assert unrecorded_options(config, old) == ['--agent.network.scaling', 'plain']
  assert unrecorded_options(config, to_json(config)) == []
  assert to_json(begun, whole=True)['agent']['network']['scaling'] == 'plain'


def test_somebody_elses_agent_is_recorded_by_where_it_is() -> None:
  config = Config(agent=OwnAgent(temperature=0.5))
  record = json.loads(json.dumps(to_json(config)))
  assert record['agent']['name'] == f'{__name__}:OwnAgent'
  assert from_json(record) == config


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'num_envs': 0}, r'--num-envs.*1.*0'),
    ({'unroll_length': -4}, r'--unroll-length.*1.*-4'),
    ({'total_steps': 0}, r'--total-steps.*1.*0'),
    ({'seeds': 0}, r'--seeds.*1.*0'),
    ({'keep': 0}, r'--keep.*1.*0'),
    ({'log_every': -1}, r'--log-every.*-1'),
    ({'checkpoint_every': -1}, r'--checkpoint-every.*-1'),
    ({'seed': -1}, r'--seed.*-1'),
    ({'seed': 2**40}, '--seed'),
    ({'env': 'ale:pong'}, r'ale:pong.*--architecture sebulba'),
    ({'lag': '0'}, r'--lag.*--architecture sebulba'),
    ({'actor_devices': '0'}, r'--actor-devices.*--architecture sebulba'),
    ({'architecture': 'sebulba', 'seeds': 2}, r'--seeds 2.*sebulba'),
    ({'architecture': 'sebulba', 'actor_threads': 0}, r'--actor-threads.*1.*0'),
    ({'architecture': 'sebulba', 'max_lag': 0}, r'--max-lag.*1.*0'),
    ({'architecture': 'sebulba', 'max_lag': 3}, r'--max-lag 3.*--lag async'),
    ({'architecture': 'sebulba', 'max_wait_ms': 2.0}, r'--max-wait-ms 2.*--envs remote'),
    ({'architecture': 'sebulba', 'env_batch_size': -1}, '--env-batch-size'),
    ({'architecture': 'sebulba', 'env_threads': -1}, '--env-threads'),
    ({'architecture': 'sebulba', 'env_threads': 2, 'env': 'podrace:catch'}, '--env-threads 2'),
    ({'architecture': 'sebulba', 'env_deadline': -1.0}, r'--env-deadline.*0'),
  ],
)
def test_numbers_that_cannot_be_right(change: dict, message: str) -> None:
  with pytest.raises(UsageError, match=message):
    validate(dataclasses.replace(PRESETS['catch'](), **change))


@functools.cache
def attributes_read() -> set[tuple[str, str | None, str]]:
  """The names after a dot in podrace, where something is read: its file, owner and name."""
  return {
    (file.stem, getattr(node.value, 'attr', getattr(node.value, 'id', None)), node.attr)
    for file in SOURCE.rglob('*.py')
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
  }


@pytest.mark.parametrize('cls', ['config', 'network', *AGENTS])
def test_every_field_is_read(cls: str) -> None:
  known = {'config': Config, 'network': ActorCritic}
  fields = dataclasses.fields(known.get(cls) or agents.agent_class(cls))
  read = {
    name
    for file, owner, name in attributes_read()
    if cls != 'config' or owner == 'config' or (file, owner) == ('config', 'self')
  }
  assert [f.name for f in fields if f.name not in read] == []


@pytest.mark.parametrize(
  ('agent', 'message'),
  [
    (type('Half', (), {'init': 0, 'act': 0})(), r'Half.*initial_state'),
    (
      type('Plain', (), dict.fromkeys(('init', 'initial_state', 'act', 'learn'), 0))(),
      'Plain',
    ),
  ],
)  # fmt: skip
def test_what_is_no_agent(agent: Any, message: str) -> None:
  with pytest.raises(UsageError, match=message):
    bind(agent, None)


@pytest.mark.parametrize(
  'space',
  [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), spaces.Box(-1, 1, (2,)),
   spaces.Box(-np.inf, np.inf, (2,))],
  ids=str,
)  # fmt: skip
@pytest.mark.parametrize('name', AGENTS)
def test_agents_that_fit_a_space_are_those_that_can_be_bound(name: str, space: Any) -> None:
  env = SimpleNamespace(observation_space=spaces.Box(-1, 1, (4,)), action_space=space)
  agent = agents.agent_class(name)()
  if name in agents_for(space):
    assert bind_run(Config(agent), env)
    return
  with pytest.raises(ValueError, match='action space'):
    bind(agent, env)
  with pytest.raises(UsageError, match=f'{name} .*podrace:catch'):
    bind_run(Config(agent), env)


@pytest.mark.parametrize(
  ('agent', 'changes', 'message'),
  [
    ('dqn', {'epsilon_steps': 3 * 10**9}, '--agent.epsilon-steps'),
    ('dqn', {'target_period': 10**12}, '--agent.target-period'),
    ('ppo', {'epochs': 10**10}, '--agent.epochs'),
    ('sac', {'target_entropy': math.nan}, '--agent.target-entropy'),
    ('impala', {'value_cost': math.inf}, '--agent.value-cost'),
    ('impala', {'network': ActorCritic(hidden=(8, 2**31))}, '--agent.network.hidden must be less than 2^31'),
    ('dqn', {'network': QNetwork(v_min=math.nan)}, '--agent.network.v-min'),
    ('sac', {'initial_temperature': math.inf}, '--agent.initial-temperature'),
    ('d4pg', {'noise': math.inf}, '--agent.noise'),
  ],
)  # fmt: skip
def test_numbers_that_no_agent_can_have(agent: str, changes: dict[str, Any], message: str) -> None:
  config = Config(agents.agent_class(agent)(**changes))
  with pytest.raises(UsageError, match=re.escape(message)):
    validation.validate(config)


def test_infinity_may_be_no_limit() -> None:
  validation.validate(
    Config(agents.agent_class('impala')(max_grad_norm=math.inf, clip_rho=math.inf))
  )


def test_a_limit_that_a_device_takes_for_none_is_refused() -> None:
  with pytest.raises(ValueError, match='max_grad_norm'):
    agents.agent_class('impala')(max_grad_norm=1e-40)


@pytest.mark.parametrize('name', AGENTS)
@pytest.mark.parametrize('field', ['discount', 'learning_rate', 'target_rate', 'lambda_'])
@pytest.mark.parametrize('value', [-0.5, 99.0, float('nan')])
def test_settings_that_make_no_sense(name: str, field: str, value: float) -> None:
  cls = agents.agent_class(name)
  names = [
    f.name for f in dataclasses.fields(cls) if f.name.endswith(field) and 'anneal' not in f.name
  ]
  if value == 99 and field == 'learning_rate':
    return
  if name == 'muzero' and field == 'discount' and value < 0:
    value = -1.5  # of two players that take turns it is between -1 and 0
  for each in names:
    with pytest.raises(ValueError, match=f'{each.rstrip("_")} must be .*, not {value}'):
      cls(**{each: value})


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: PPO(learning_rate='1e-3'), r"learning_rate.*PPO.*'1e-3'"),
    (lambda: PPO(epochs=2.5), r'epochs.*PPO.*2.5'),
    (lambda: PPO(epochs=True), r'epochs.*PPO.*True'),
    (lambda: Impala(normalize_rewards='no'), r'normalize_rewards.*Impala.*True.*False'),
    (lambda: Buffer(capacity='many'), r"capacity.*Buffer.*'many'"),
    (lambda: validation.validate(Config(DQN(buffer=Buffer(100, 200, 50)))), r'batch-size 200.*--a'),
    (
      lambda: validation.validate(Config(Muesli(capacity=100, batch_size=200, min_size=50))),
      r'--agent\.batch-size 200.*--agent\.capacity 100',
    ),
    (lambda: ActorCritic(core_size='64'), r'core_size.*ActorCritic'),
    (lambda: agents.agent_class('sac')(discount=None), r'discount.*SAC.*None'),
    (lambda: validation.validate(Config(PPO)), r'agent.*PPO.*PPO\(\)'),
    (lambda: validation.validate(Config(PPO(), env=Catch())), r'env.*Catch'),
    (lambda: validation.validate(Config(PPO(), num_envs='64')), r'num_envs.*Config'),
  ],
)  # fmt: skip
def test_settings_of_another_type(make: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make()


def test_numbers_of_numpy_and_jax_are_numbers() -> None:
  PPO(learning_rate=np.float32(1e-3), epochs=np.int64(4))
  PPO(learning_rate=jnp.float32(1e-3), discount=1)


@pytest.mark.parametrize(('settings', 'named'), [
  (dict(agent={'optimizer': 'sgd'}), ('optimizer', 'adam', 'sgd')),
  (dict(agent={'network': {'core': 'rnn'}}), ('core', 'gru', 'rnn')),
  (dict(agent={'network': {'hidden': 64}}), ('hidden', '64')),
  (dict(agent={'network': None}), ('network', 'None')),
  (dict(agent={'popart': 3}), ('popart', '3')),
  (dict(agent={'discount': np.float32(1.5)}), ('discount', '1.5')),
  (dict(lag=0), ('lag', "'0'", '0')), (dict(architecture='Sebulba'), ('architecture', 'sebulba')),
  (dict(envs='x'), ('envs', 'remote')), (dict(seeds=np.bool_(True)), ('seeds', 'True')),
])  # fmt: skip
def test_values_from_python_are_held_to_their_types(
  settings: dict[str, Any], named: tuple[str, ...]
) -> None:
  with pytest.raises(UsageError) as refused:
    podrace.configure('catch', **settings)
  assert all(x in str(refused.value) for x in named), refused.value


@pytest.mark.parametrize('make', [
  lambda: MuZero(search='mcts'), lambda: QNetwork(head='c51'), lambda: QNetwork(torso='cnn'),
])  # fmt: skip
def test_choices_of_settings_are_checked_when_they_are_made(make: Any) -> None:
  with pytest.raises(ValueError, match='one of'):
    make()


def test_scalars_of_numpy_are_recorded_as_numbers() -> None:
  agent = {'learning_rate': np.float32(1e-3), 'network': {'hidden': [np.int64(8)]}}
  config = podrace.configure('catch', seed=np.arange(3)[1], agent=agent)
  record = to_json(config)
  assert from_json(record) == config and record['seed'] == 1
  assert config.agent.network.hidden == (8,)
  record = to_json(Config(Impala(discount=np.float32(0.5))))  # type: ignore[arg-type]
  assert from_json(record).agent.discount == 0.5


def test_arrays_become_numbers_at_configure() -> None:
  expected = podrace.configure(agent={'network': {'hidden': (32, 16)}})
  for hidden in (np.array([32, 16]), jnp.array([32, 16]), [np.int64(32), np.int32(16)]):
    config = podrace.configure(agent={'network': {'hidden': hidden}})
    own = podrace.configure('catch', agent=Impala(network=ActorCritic(hidden=hidden)))
    assert config == expected and from_json(to_json(config)) == config
    assert own.agent.network.hidden == (32, 16) and from_json(to_json(own)) == own


def rate(step: int) -> float:
  return 1 / step


def test_functions_and_classes_are_recorded_by_their_names() -> None:
  """And not by an address, which is another one in the next process."""

  def recorded(value: Any) -> str:
    return to_json(Config(agent=Scheduled(value)))['agent']['rate']['repr']

  module = __name__
  assert recorded(rate) == f'{module}:rate' and recorded(Scheduled) == f'{module}:Scheduled'
  assert recorded(np.mean) == 'numpy:mean'
  for value in (functools.partial(rate, 2), object(), lambda step: 1.0):
    assert '0x' not in recorded(value)


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """An agent with a value that is no number."""

  rate: Any = None


def test_a_discount_for_two_players_is_refused_on_the_host_too() -> None:
  for env in ('gymnasium:CartPole-v1', 'gymnax:CartPole-v1'):
    with pytest.raises((UsageError, ValueError), match='discount'):
      assert resolve(Config(MuZero(discount=-1.0), env=env, architecture='sebulba')).agent
