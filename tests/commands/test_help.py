"""The help of `train` and `discover` tells the defaults that a run gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import DEADLINE, environment
from test_defaults import ENVS, settings

from podrace.agents import AGENTS
from podrace.commands import act, discover, label, option_table, reanalyse, train
from podrace.distributed.acting import HEEDED
from podrace.distributed.run_identity import COMMON, OF_LOG
from podrace.envs.libraries import LIBRARIES
from podrace.fields import flag
from podrace.settings import defaults
from podrace.settings.agents import default_agent
from podrace.settings.config import Config
from podrace.settings.discovery_presets import PRESETS as DISCOVERIES
from podrace.settings.presets import PRESETS
from podrace.settings.record import to_json

BOUND_BY_AGENTS = {  # settings of networks that an agent chooses, and that are no options
  '--agent.actor.deterministic', '--agent.critic.atoms', '--agent.critic.critics', '--agent.actor.core',
  '--agent.actor.core-size', '--agent.critic.core', '--agent.critic.core-size', '--agent.critic.torso',
}  # fmt: skip
OF_SEBULBA = {'--actor-threads', '--lag', '--max-lag', '--env-threads', '--replay', '--envs'}
ROW = re.compile(r'^  (--[a-z\[][][\w.-]*)(.*?)(?=^  --|^\S|^$|\Z)', re.MULTILINE | re.DOTALL)
DEFAULT = re.compile(r'\(default ([^()]*(?:\([^()]*\)[^()]*)*)\)\.$')


def shown_defaults(text: str) -> dict[str, str]:
  """Option -> the default that help tells of it, '' where there is none."""
  defaults = {}
  for name, rest in ROW.findall(text.partition('\noptions')[2]):
    default = DEFAULT.search(' '.join(rest.split()))
    defaults[name.replace('[no-]', '')] = default[1] if default else ''
  return defaults


def flat(record: dict[str, Any], prefix: str = '--') -> Iterator[tuple[str, str]]:
  for name, value in record.items():
    if isinstance(value, dict):
      yield from flat(value, f'{prefix}{flag(name)}.')
    elif isinstance(value, list):
      yield prefix + flag(name), ' '.join(map(str, value))
    else:
      yield (
        prefix + flag(name),
        {True: 'on', False: 'off'}.get(value, str(value))
        if isinstance(value, bool)
        else str(value),
      )


def compare(text: str, record: dict[str, Any], *given: str) -> None:
  """Each option that help tells of has the default of the record, but for those that were given."""
  shown, expected = shown_defaults(text), dict(flat(record))
  both = (shown.keys() & expected.keys()) - set(given)
  shown = {n: '' if told == 'none' and not expected.get(n) else told for n, told in shown.items()}
  assert {n: shown[n] for n in both} == {n: expected[n] for n in both}
  assert {'--total-steps', '--num-envs', '--unroll-length'} <= both | set(given)


def train_help(*args: str) -> str:
  return train.COMMAND.help(list(args))


@pytest.mark.parametrize(
  'args',
  [
    (),
    *((preset,) for preset in PRESETS),
    *(('--agent', agent) for agent in AGENTS if agent not in ('sac', 'd4pg', 'qtopt')),
    *(
      ('--env', ENVS['continuous'], '--agent', agent)
      for agent in ('sac', 'd4pg', 'qtopt', 'ppo', 'muzero')
    ),
    *(('--env', ENVS['grid'], '--agent', agent) for agent in ('ppo', 'dqn', 'pqn', 'muesli')),
    ('--env', ENVS['vector']),
    ('--env', 'gymnasium:CartPole-v1'),
    ('--env', 'podrace:maze,size=5'),
    ('pong', '--agent', 'ppo'),
    ('cartpole', '--agent', 'dqn'),
    ('cartpole', '--env', ENVS['grid']),
    ('sac-pendulum', '--agent', 'd4pg'),
    ('r2d2-memory', '--architecture', 'sebulba'),
  ],
  ids=' '.join,
)
def test_the_defaults_are_those_of_the_run(args: tuple[str, ...]) -> None:
  record = to_json(settings(*args))
  text = train_help(*args)
  compare(text, record, *args)
  assert shown_defaults(text).keys() >= OF_SEBULBA or record['architecture'] == 'anakin'
  if args and args[0] != '--env':  # all settings of its agent are there
    name = record['agent']['name']
    agent = {n for n, _ in flat(record['agent'], '--agent.')} - {'--agent.name'}
    missing = agent - shown_defaults(text).keys()
    assert not missing - BOUND_BY_AGENTS, name


def test_the_defaults_of_an_agent_for_numbers_are_those_where_it_acts() -> None:
  compare(train_help('--agent', 'sac'), to_json(settings('--env', ENVS['continuous'], '--agent', 'sac')), '--env')  # fmt: skip


def test_the_settings_of_a_preset_are_told_as_options() -> None:
  for preset, make in PRESETS.items():
    text = train_help(preset)
    told = text.partition(f'preset {preset}, which is:\n')[2].partition('\n\n')[0]
    assert f'--total-steps {make().total_steps}' in ' '.join(told.split())
    assert 'Config(' not in text
    assert '=' not in re.sub(',(length|state|opponent|size)=', '', told)


@pytest.mark.parametrize('preset', [None, *DISCOVERIES])
@pytest.mark.parametrize('agent', [None, 'lpg', 'disco'])
def test_the_defaults_are_those_of_meta_training(preset: str | None, agent: str | None) -> None:
  args = [*([preset] if preset else []), *(['--agent', agent] if agent else [])]
  record = to_json(discover.base_config(preset, None, agent, []))
  compare(discover.COMMAND.help(args), record)


def test_a_run_that_is_there_has_its_own(tmp_path: Path) -> None:
  record = to_json(settings('cartpole', '--seeds', '3', '--agent.network.hidden', '7', '9'))
  (tmp_path / 'config.json').write_text(json.dumps(record))
  compare(train_help('--run-dir', str(tmp_path)), record)
  record['agent']['name'] = 'this:Agent'  # is not imported
  record['env'] = '\x1b[31m'
  (tmp_path / 'config.json').write_text(json.dumps(record))
  text = train_help('--run-dir', str(tmp_path))
  assert 'this:Agent' in text and '\x1b' not in text
  for damaged in ('[]', '{', '{"agent": 1}', '[' * 100_000):
    (tmp_path / 'config.json').write_text(damaged)
    with pytest.raises(ValueError, match=r'config\.json'):
      train_help('--run-dir', str(tmp_path))


OWN = """
import dataclasses
from podrace.agents.ppo import PPO
from podrace.networks.actor_critic import ActorCritic
@dataclasses.dataclass(frozen=True)
class Inner(PPO):
  network: ActorCritic = ActorCritic(hidden=(9, 8))
  length: int = 3  # of it
@dataclasses.dataclass(frozen=True)
class Made(PPO):
  network: ActorCritic = dataclasses.field(default_factory=lambda: ActorCritic(hidden=(5,)))
  clip: float = dataclasses.field(default=0.3)
Ours = PPO
"""


@pytest.mark.parametrize('name', ['Inner', 'Made', 'Ours'])
def test_the_defaults_of_an_agent_of_ones_own(
  name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  module = f'own_{name.lower()}'
  (tmp_path / f'{module}.py').write_text(OWN)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  args = ('--env', ENVS['grid'], '--agent', f'{module}:{name}')
  record, text = to_json(settings(*args)), train_help(*args)
  compare(text, record, *args)
  expected = {'Inner': '9 8', 'Made': '5', 'Ours': '128'}[name]
  assert shown_defaults(text)['--agent.network.hidden'] == expected
  assert shown_defaults(text)['--agent.clip'] == str(record['agent']['clip'])


def test_the_kinds_that_are_written_down_are_those_of_the_environments() -> None:
  for name in (
    'podrace:catch',
    'podrace:maze',
    ENVS['grid'],
    ENVS['continuous'],
    'gymnax:Acrobot-v1',
  ):
    assert defaults.kind_named(name) == defaults.kind_of(*defaults.spaces_of(name))
  assert defaults.kind_named('podrace:maze,size=5') is None
  assert defaults.kind_named('gymnasium:CartPole-v1') is None


@pytest.mark.slow
@pytest.mark.parametrize('library', LIBRARIES)
def test_the_kinds_of_all_that_are_listed(library: str) -> None:
  for name in LIBRARIES[library].names:
    spaces = defaults.spaces_of(f'{library}:{name}')
    kind = defaults.kind_of(*spaces)
    assert defaults.kind_named(f'{library}:{name}') in (None, kind), name
    if kind == 'continuous':
      for agent in ('ppo', 'impala'):
        row, listed = defaults.entry(agent, f'{library}:{name}')[0], defaults.TABLE[agent, kind]
        whole = name != 'grasp'  # whose observations are no floats
        assert row is not None and row.paths.items() <= listed.paths.items()
        assert (row is listed) == whole == ('normalize_observations' in row.agent)


@pytest.mark.parametrize(
  'args',
  [
    'train --env gymnax:CartPole-v1 --help', 'train --help --seeds 4', 'train --architecture=sebulba -h',
    'train pong --agent=ppo --seeds=4 --help', 'train --env ale:pong --agent dqn --help', 'train --run-dir --help',
    'train --quiet --agent.learning-rate 1 --help', '--help train cartpole', 'discover --seed 3 --help',
    'train --help cartpole', 'eval run --help', 'train --listen tcp://127.0.0.1:1 --envs remote --help',
  ],
)  # fmt: skip
def test_help_is_told_wherever_it_is_asked_for(args: str) -> None:
  code = 'import sys; from podrace.cli import main\ntry: main()\nfinally: assert "jax" not in sys.modules'
  done = subprocess.run(
    [sys.executable, '-c', code, *args.split()], capture_output=True, text=True, check=False,
    timeout=DEADLINE, env=environment(),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('podrace ') and ('--lag ' in done.stdout) == (
    any(x in args for x in ('sebulba', 'pong', 'remote'))
  )


# --- the table of options ------------------------------------------------------------------------


def test_the_option_table_is_fresh() -> None:
  command = 'run python -m podrace.commands.option_table'
  assert option_table.PATH.read_text(encoding='utf-8') == option_table.text(), command


def test_each_option_has_a_sentence() -> None:
  assert [row.name for row in option_table.table().rows if len(row.help) < 10] == []


def test_each_agent_has_rows_for_all_its_settings() -> None:
  for name in AGENTS:
    settings = {n for n, _ in flat(to_json(Config(default_agent(name)))['agent'], '--agent.')}
    rows = {r.name for r in option_table.table().of_agent(name)}
    assert settings - {'--agent.name'} - BOUND_BY_AGENTS <= rows, name


@pytest.mark.parametrize('command', [act, label, reanalyse])
def test_help_of_a_worker_has_all_options_of_train_that_it_takes(command: Any) -> None:
  taken = HEEDED if command is act else (*COMMON, *OF_LOG)
  text = command.COMMAND.help([])
  assert [name for name in taken if f'--{flag(name)}' not in text] == []


def test_help_refuses_names_that_are_none() -> None:
  for args in (
    ['catsch'],
    ['--agent', 'ppoo'],
    ['--env', 'gymnax:CartPol-v1'],
    ['cartpole', 'pong'],
  ):
    with pytest.raises(ValueError, match=r'(unknown|there is|has no)'):
      train_help(*args)
