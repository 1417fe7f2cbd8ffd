"""The help of `podrace train` and `discover`: the options, with the defaults of the run that the other arguments are of."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.commands import configure
from podrace.commands.sources import (
  FIXED,
  NO_OPTIONS,
  PACKAGE,
  PARTS,
  Call,
  agent_call,
  call_of,
  fields_of,
  shown,
)  # fmt: skip
from podrace.errors import UsageError
from podrace.fields import flag
from podrace.hooks import BOUND
from podrace.settings import defaults, user_code
from podrace.settings.agents import agent_name, default_agent, unknown_agent
from podrace.settings.config import Config
from podrace.settings.discovery_presets import PRESETS as DISCOVERIES
from podrace.settings.presets import PRESETS
from podrace.settings.record import to_json
from podrace.settings.validation import needs_sebulba
from podrace.system.options import Option, row, value_of

MOST_USED = (  # of the options of a run; the others come after them
  '--run-dir', '--total-steps', '--seed', '--seeds', '--num-envs', '--unroll-length', '--env', '--agent', '--architecture',
)  # fmt: skip
SERVING = (
  '--listen',
  '--connect-replay',
  '--keys',
  '--insecure',
  '--peer-timeout',
  '--announce',
)  # of Sebulba
ALL = '--help-all'
DEFAULT = re.compile(
  r' *\(default [^()]*(?:\([^()]*\)[^()]*)*\)$'
)  # at the end of the help of a field

Values = Mapping[
  str, str
]  # option -> its default in a run, where the class of the field has another


# --- the settings of a run ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of a run before its flags."""

  agent: str
  call: Call
  kind: str = ''  # of environment, if the defaults of the agent there are among them

  @property
  def values(self) -> Values:
    return dict(self.call.flags())


def settings_of(preset: str | None, args: Sequence[str]) -> Settings:
  """Returns the settings that `podrace train` makes of a preset and arguments, without importing an agent of ours.

  Raises:
    UsageError: for a name that is none.
  """
  agent, env = _value('--agent', args), _value('--env', args)
  own = None
  if agent is not None and ':' in agent:
    user_code.look_here([user_code.of_agent(agent)])
    own = default_agent(agent)
    agent = agent_name(
      own
    )  # its module may have one of ours, whose defaults are those of its own name
  run_dir = _value('--run-dir', args)
  record = Path(run_dir, 'config.json') if run_dir is not None and preset is None else None
  if record is not None and record.is_file():
    settings = _recorded(record)
  elif preset is None and (agent or env):
    record, settings = None, Settings('', Call('Config', {}))
  else:
    record, call = (
      None,
      call_of(PACKAGE / 'settings' / 'presets.py', PRESETS[preset or 'catch'].__name__),
    )
    name = _name_of(call.fields['agent'])
    made = Call('', {**agent_call(name).fields, **call.fields['agent'].fields})
    config = Config(agent=None, **{k: v for k, v in call.fields.items() if k != 'agent'})
    call = call.replace(**defaults.meaningless(config, configure.settings_in(args)))
    settings = Settings(name, call.replace(agent=made))
  wanted = agent or settings.agent or 'impala'
  if wanted not in AGENTS and ':' not in wanted:
    raise unknown_agent(wanted)
  if wanted != settings.agent:
    made = agent_call(wanted) if own is None or wanted in AGENTS else _call_of_agent(own)
    settings = Settings(wanted, settings.call.replace(agent=made))
    if record is None:  # as configuration.is_open
      settings = _with_defaults(settings, env or settings.call.fields.get('env'))
  return _with_architecture(settings, args)


def _value(name: str, args: Sequence[str]) -> str | None:
  """The value of an option, if it has one."""
  value = value_of(name, args)
  return None if not value or value.startswith('--') else value


def _name_of(call: Call) -> str:
  return next(name for name, (_, cls) in AGENTS.items() if cls == call.cls)


def _with_defaults(settings: Settings, env: str | None) -> Settings:
  """The settings with the defaults of the agent in an environment, as `defaults.with_defaults`."""
  kinds = [kind for name, kind in defaults.TABLE if name == settings.agent]
  if not kinds:
    return settings
  # Without --env it is Catch, where agents for continuous actions alone are refused.
  kind = kinds[0] if env is None and kinds == ['continuous'] else None
  kind = kind or defaults.kind_named(env or 'podrace:catch')
  if kind is None:
    table, kind = defaults.entry(settings.agent, env or '')
  else:
    table = defaults.TABLE.get((settings.agent, kind))
  if table is None:
    return settings
  call = settings.call.replace(num_envs=table.num_envs, unroll_length=table.unroll_length)
  for path, value in table.agent.items():
    call = call.set(f'agent.{path}', value)
  return Settings(settings.agent, call, kind)


def _with_architecture(settings: Settings, args: Sequence[str]) -> Settings:
  """The settings with the architecture that the arguments name or need."""
  call, named = settings.call, _value('--architecture', args)
  standard: dict[str, Any] = {'env': 'podrace:catch', 'envs': 'local', 'replay': 'device'}
  standard |= call.fields
  needs = {n: _value(f'--{n}', args) or standard[n] for n in ('env', 'envs', 'replay')}
  if named is None and needs_sebulba(**needs):
    named = 'sebulba'
  if named is not None:
    call = call.replace(architecture=named)
  if needs['envs'] == 'remote':
    call = call.replace(lag='async')
  return dataclasses.replace(settings, call=call)


def _recorded(path: Path) -> Settings:
  """The settings of a run that is there."""
  try:
    record = json.loads(path.read_text(encoding='utf-8'))
    agent = record['agent']['name']
    return Settings(agent, _call_of_record(record))
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
    raise UsageError(f'{path} is not the record of a run: {e!r}') from e


def _call_of_record(record: Mapping[str, Any]) -> Call:
  left_out = ('version', 'command', 'name', user_code.CLASS)
  return Call(
    '',
    {
      name: _call_of_record(value) if isinstance(value, dict) else _printable(value)
      for name, value in record.items()
      if name not in left_out
    },
  )


def _call_of_agent(agent: Any) -> Call:
  """The settings of an agent of the user's own."""
  settings: Call = _call_of_record(to_json(Config(agent=agent))).fields['agent']
  return settings


def _printable(value: Any) -> Any:
  """A value that a terminal shows: the record may be a stranger's."""
  return value if shown(value).isprintable() else repr(value)


# --- the help -------------------------------------------------------------------------------------


def discover_help(options: Iterable[Option], preset: str | None, agent: str | None = None) -> str:
  """The help of `discover`, which takes `options` and the fields of Discovery, its rule and its value function."""
  settings = PACKAGE / 'settings'
  call = call_of(settings / 'discovery_presets.py', DISCOVERIES[preset or 'lpg-catch'].__name__)
  if agent is not None and agent != _name_of(call.fields['agent']):
    call = call.replace(agent=agent_call(agent), rule=Call('Sizes', {}))
  name, values = _name_of(call.fields['agent']), dict(call.flags())
  rows = {f[0]: _row(f, values) for f in fields_of(settings / 'discovery.py', 'Discovery', '--')}
  rows |= {o.name: row(o.name, o.value, o.text) for o in options}
  for part in ('--rule', '--value'):  # their fields are below
    rows.pop(part)
  order = [*(n for n in MOST_USED if n in rows), *(n for n in rows if n not in MOST_USED)]
  lines = [
    'podrace discover [PRESET] [OPTIONS]: train a rule of learning; without arguments, LPG on Catch',
    '',
    f'presets: {", ".join(DISCOVERIES)}',
    *_preset_rows(preset or 'lpg-catch', values),
    '',
    'options, with the defaults of this run:',
    *(rows[n] for n in order),
  ]
  for each in (name,) if preset or agent else ('disco', 'lpg'):
    fields = fields_of(PACKAGE / 'agents' / 'rules' / f'{each}.py', 'Sizes', '--rule.')
    lines += ['', f'the rule of {each}:']
    lines += [_row(f, values if each == name else {}) for f in fields]
  lines += ['', 'the value function of the meta-gradient:']
  fields = fields_of(
    PACKAGE / 'architectures' / 'discovery' / 'objective.py', 'ValueFunction', '--value.'
  )
  lines += [_row(f, values) for f in fields]
  return '\n'.join(
    [*lines, '', 'podrace train --agent disco --help, or lpg, has the options of agents']
  )


def train_help(
  options: Iterable[Option], args: Sequence[str], preset: str | None, everything: bool = False
) -> str:
  """The help of `train`, which takes `options` and the fields of Config and of its agent.

  The defaults are those of the run that `preset` and `args` make. `everything` has the options of all agents, with
  the defaults of their classes. An agent of the user's own is imported for its options.
  """
  settings = settings_of(preset, args)
  name, values = settings.agent, settings.values
  lines = [
    'podrace train [PRESET] [OPTIONS]: train an agent; without arguments, IMPALA on Catch',
    '',
    textwrap.fill(
      f'presets: {", ".join(PRESETS)} (see `podrace list`)', 100, break_on_hyphens=False
    ),
    *(_preset_rows(preset, values) if preset else []),
  ]
  lines += _run_rows(
    options, values, _printable(name), everything or values.get('--architecture') == 'sebulba'
  )
  if everything:
    for each in AGENTS:
      own = dict(Call('', {'agent': agent_call(each)}).flags())
      lines += [
        *_agent_rows(each, own),
        *(row(n, '', f'(default {own[n]})') for n in own if n not in NO_OPTIONS),
      ]
    return '\n'.join([*lines, *_part_rows(None, {}), *_default_rows()])
  if preset is None and not any(_value(x, args) for x in ('--agent', '--env', '--run-dir')):
    lines += ['', f'agents: {", ".join(AGENTS)}, or MODULE:CLASS']
    lines += ['podrace train PRESET --help, or --agent NAME --help, has the options of an agent']
  elif (
    name not in AGENTS and _value('--agent', args) is None
  ):  # a record names it, and may be a stranger's
    lines += ['', f'the run has an agent of its own; --agent {_printable(name)} has its options']
  elif ':' in name:
    lines += ['', f'agent {name}:', *_own_rows(default_agent(name), '--agent.', values)]
  else:
    lines += [*_agent_rows(name, values, settings.kind), *_part_rows(name, values), '']
  return '\n'.join([*lines, f'podrace train {ALL} has every option'])


def _row(field: tuple[str, str, str], values: Values) -> str:
  """A line of help, with the default of the run."""
  name, kind, comment = field
  if name in values:
    comment = f'{DEFAULT.sub("", comment)} (default {values[name] or "none"})'.strip()
  return row(name, kind, comment)


def _run_rows(options: Iterable[Option], values: Values, agent: str, sebulba: bool) -> list[str]:
  """The options of a run, most used first; those that only Sebulba reads are left out unless `sebulba`."""
  config = 'Config' if sebulba else 'Common'
  listed = [o for o in options if sebulba or o.name not in SERVING]
  rows = {o.name: row(o.name, o.value, o.text) for o in listed}
  rows |= {
    f[0]: _row(f, values) for f in fields_of(PACKAGE / 'settings' / 'config.py', config, '--')
  }
  option = next(o for o in listed if o.name == '--agent')
  rows['--agent'] = row(option.name, option.value, f'{option.text} (default {agent})')
  order = [*MOST_USED, *(n for n in rows if n not in MOST_USED)]
  return ['', 'options, with the defaults of this run:', *(rows[n] for n in order)]


def _agent_rows(name: str, values: Values, kind: str = '') -> list[str]:
  module, cls = AGENTS[name]
  path = PACKAGE.parent / (module.replace('.', '/') + '.py')
  fields = [
    f for f in fields_of(path, cls, '--agent.') if f[0].removeprefix('--agent.') not in PARTS
  ]
  head = [f'agent {name}:']
  if kind:
    others = [k for n, k in defaults.TABLE if n == name and k != kind]
    head = [f'agent {name}, with its defaults where {_kind_text(kind)}:']
    head += [f'(where {"; ".join(map(_kind_text, others))}: others; give --env)'] if others else []
  return ['', *head, *(_row(f, values) for f in fields)]


def _kind_text(kind: str) -> str:
  text = defaults.KINDS[kind]  # type: ignore[index]
  return text if kind == 'continuous' else f'observations are {text}'


def _part_rows(agent: str | None, values: Values) -> list[str]:
  """The options of the parts of an agent; None: of all agents."""
  lines = []
  for name, kinds in PARTS.items():
    for cls, (file, agents) in kinds.items():
      if agent is not None and agent not in agents.replace(',', ' ').split():
        continue
      lines += ['', f'the {name} of {agents if agent is None else agent}:']
      rows = fields_of(PACKAGE / file, cls, f'--agent.{name}.')
      lines += [_row(f, values) for f in rows if f[0].rpartition('.')[2] not in FIXED.get(cls, ())]
  return lines


def _default_rows() -> list[str]:
  """The settings of podrace.settings.defaults, by agent and kind of environment."""
  lines = [
    '',
    'defaults in the place of those above, where no preset has others: of an agent in a kind of environment,',
    'which is',
    *(f'  {kind}: {text}' for kind, text in defaults.KINDS.items()),
  ]
  for name, text in defaults.rows():
    lines += [f'  {name}:', _filled(text, 6)]
  return lines


def _filled(text: str, indent: int) -> str:
  space = ' ' * indent
  return textwrap.fill(
    text, 100, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
  )


def _preset_rows(preset: str, values: Values) -> list[str]:
  """The settings of a preset, as options."""
  text = ' '.join(f'{n} {x}'.strip() for n, x in values.items() if n not in NO_OPTIONS)
  return ['', f'preset {preset}, which is:', _filled(text, 2)]


def _own_rows(settings: Any, prefix: str, values: Values) -> list[str]:
  """The options of any dataclass with its defaults, and of the dataclasses among its fields."""
  found: dict[str, tuple[str, str, str]] = {}
  bases: list[Any] = [c for c in type(settings).__mro__ if dataclasses.is_dataclass(c)]
  for base in reversed(bases):
    with contextlib.suppress(KeyError, OSError, TypeError):  # it has no source
      file = Path(inspect.getfile(base))
      found |= {f[0]: f for f in fields_of(file, base.__qualname__, prefix)}
  rows, parts = [], []
  for field in dataclasses.fields(settings):
    name, value = prefix + flag(field.name), getattr(settings, field.name)
    if field.name in BOUND:
      continue
    if dataclasses.is_dataclass(value):
      parts += _own_rows(value, f'{name}.', values)
    elif name in found or 'Suppress' not in str(field.type):
      rows.append(_row(found.get(name, (name, str(field.type), '')), values))
  return rows + parts
