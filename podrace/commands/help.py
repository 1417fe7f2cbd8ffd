"""The help of `podrace train` and `discover`: options with the defaults of the run at hand."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.commands import configure
from podrace.commands.option_table import Row, rows_of, show, table
from podrace.errors import UnreadableFile, UsageError
from podrace.fields import negate
from podrace.settings import defaults, user_code
from podrace.settings.agents import agent_name, default_agent, unknown_agent
from podrace.settings.config import Config
from podrace.settings.discovery_presets import PRESETS as DISCOVERIES
from podrace.settings.presets import PRESETS
from podrace.settings.record import option, to_json, words
from podrace.settings.validation import needs_sebulba
from podrace.system.files.reading import read_json
from podrace.system.options import Option, Options, row

MOST_USED = ('--run-dir', '--total-steps', '--seed', '--num-envs', '--env')  # of discover
GROUPS = {  # heading -> options of `podrace train`
  'run': (
    '--run-dir', '--total-steps', '--seed', '--seeds', '--log-every', '--checkpoint-every',
    '--keep', '--config', '--save-config', '--override', '--sinks', '--quiet',
  ),
  'environment': ('--env', '--num-envs', '--unroll-length'),
  'agent': ('--agent', '--init-from', '--init-checkpoint', '--init-member'),
  'evaluation': ('--eval-every', '--eval-episodes', '--eval-env', '--eval-video'),
  'architecture': ('--architecture', '--devices'),
}  # fmt: skip
# Of Sebulba, and in --help-all.
SERVING = ('--listen', '--connect-replay', '--keys', '--insecure', '--peer-timeout', '--announce')
# In --help-all only: all other options.
OTHER = 'several devices and processes, metrics, caches'
ALL = '--help-all'
DISCOVER_DEFAULT = 'lpg-catch'

Values = Mapping[str, str]  # option -> its default in a run, if not that of the table


# --- the settings of a run ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of a run before its flags."""

  agent: str
  values: Values
  kind: str = ''  # of environment, if the agent's defaults for that kind are among the values


def settings_of(preset: str | None, options: Options) -> Settings:
  """Return the settings that `podrace train` makes, without importing an agent of podrace.

  Raises:
    UsageError: for an unknown name.
  """
  agent, env = options.text('--agent') or None, options.passed('--env') or None
  custom = None
  if agent is not None and ':' in agent:
    user_code.look_here([user_code.of_agent(agent)])
    custom = default_agent(agent)
    agent = agent_name(custom)  # the class may be one of podrace's, which has a short name
  record = _record_of(options) if preset is None else None
  if record is not None:
    settings = _recorded(record)
  elif preset is None and (agent or env):
    record, settings = None, Settings('', {})
  else:
    record, settings = None, _of_preset(preset or 'catch', options)
  wanted = agent or settings.agent or 'impala'
  if wanted not in AGENTS and ':' not in wanted:
    raise unknown_agent(wanted)
  if wanted != settings.agent:
    values = {n: x for n, x in settings.values.items() if not n.startswith('--agent.')}
    if custom is not None and wanted not in AGENTS:
      values |= {n: x for n, x in _values_of(custom).items() if n.startswith('--agent.')}
    settings = Settings(wanted, values)
    if record is None:  # as configure.needs_defaults
      settings = _with_defaults(settings, env or values.get('--env'))
  return _with_arguments(settings, options)


def _record_of(options: Options) -> Path | None:
  """Return the record of the run that begins with recorded settings, if there is one."""
  for name in ('--run-dir', '--config'):
    if (path := options.path(name)) is not None:
      record = path / 'config.json' if path.is_dir() else path
      if record.suffix == '.json' and record.is_file():
        return record
  return None


def _as_options(paths: Mapping[str, Any]) -> dict[str, str]:
  return {option(path): show(value) for path, value in paths.items()}


def _of_preset(name: str, options: Options) -> Settings:
  preset = PRESETS[name]
  config = Config(agent=None, **preset.settings)
  resets = defaults.reset_unused(config, configure.settings_in(options))
  resets = {n: x for n, x in resets.items() if n in preset.settings}
  return Settings(preset.agent, {**_as_options(preset.paths), **_as_options(resets)})


def _with_defaults(settings: Settings, env: str | None) -> Settings:
  """Return the settings with the agent's defaults in `env`, as `defaults.with_defaults` does."""
  kinds = [kind for name, kind in defaults.TABLE if name == settings.agent]
  if not kinds:
    return settings
  # Without --env the run is in Catch, which refuses agents for continuous actions alone.
  kind = kinds[0] if env is None and kinds == ['continuous'] else None
  kind = kind or defaults.kind_named(env or 'podrace:catch')
  if kind is None:
    entry, kind = defaults.entry(settings.agent, env or '')
  else:
    entry = defaults.TABLE.get((settings.agent, kind))
  if entry is None:
    return settings
  return Settings(settings.agent, {**settings.values, **_as_options(entry.paths)}, kind)


def _with_arguments(settings: Settings, options: Options) -> Settings:
  """Return the settings of a run with the arguments, and the architecture that they need."""
  values, architecture = dict(settings.values), options.passed('--architecture') or None
  standard = {'env': 'podrace:catch', 'envs': 'local', 'replay': 'device'}
  needs = {
    n: options.passed(f'--{n}') or values.get(f'--{n}', default) for n, default in standard.items()
  }
  if architecture is None and needs_sebulba(**needs):
    architecture = 'sebulba'
  if architecture is not None:
    values['--architecture'] = architecture
  if needs['envs'] == 'remote':
    values['--lag'] = 'async'
  named = {r.name: options.passed(r.name) for r in table().of('run', 'sebulba')}
  values |= {name: text for name, text in named.items() if text is not None}
  return dataclasses.replace(settings, values=values)


def _recorded(path: Path) -> Settings:
  """Return the settings of a recorded run."""
  try:
    record = read_json(path)
    return Settings(record['agent']['name'], dict(_flat(record)))
  except (UnreadableFile, KeyError, TypeError, AttributeError, RecursionError) as e:
    raise UsageError(f'{path} is not the record of a run: {e!r}') from e


def _flat(record: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, str]]:
  """Yield each option of a record, and its value."""
  for name, value in record.items():
    if isinstance(value, dict):
      yield from _flat(value, f'{prefix}{name}.')
    elif name not in ('version', 'command', 'name', user_code.CLASS):
      yield option(prefix + name), _printable(value)


def _values_of(agent: Any) -> Values:
  return dict(_flat(to_json(Config(agent=agent), whole=True)))


def _printable(value: Any) -> str:
  """Return a value as a terminal may show it: the record may come from a stranger."""
  text = show(value)
  return text if text.isprintable() else repr(value)


# --- the help -------------------------------------------------------------------------------------


def discover_help(declared: Iterable[Option], preset: str | None, agent: str | None = None) -> str:
  """Return the help of `discover`: declared options, and the fields of Discovery and its parts."""
  chosen = DISCOVERIES[preset or DISCOVER_DEFAULT]
  name, paths = chosen.agent, chosen.paths
  if agent is not None and agent != name:
    name = agent
    paths = {path: x for path, x in paths.items() if not path.startswith(('agent.', 'rule.'))}
  values = _as_options(paths)
  rows = {r.name: _line(r, values) for r in table().of('discover')}
  rows |= {o.name: row(o.name, o.value, o.text) for o in declared}
  lines = [
    'podrace discover [PRESET] [OPTIONS]: train a rule of learning; default: LPG on Catch',
    '',
    f'presets: {", ".join(DISCOVERIES)}',
    *_preset_lines(preset or DISCOVER_DEFAULT, values),
    '',
    'options, with the defaults of this run:',
    *_most_used_first(rows),
  ]
  for each in (name,) if preset or agent else ('disco', 'lpg'):
    lines += ['', f'the rule of {each}:']
    own = values if each == name else {}
    lines += [_line(r, own) for r in table().of('rule', agent=each)]
  lines += ['', 'the value function of the meta-gradient:']
  lines += [_line(r, values) for r in table().of('value function')]
  return '\n'.join(
    [*lines, '', 'podrace train --agent disco --help, or lpg, has the options of agents']
  )


def train_help(
  declared: Iterable[Option], options: Options, preset: str | None, everything: bool = False
) -> str:
  """Return the help of `train`: its declared options, and the fields of Config and of its agent.

  The defaults depend on `preset` and `options`. Imports the user's agent.

  Args:
    declared: the options of the command itself.
    options: the arguments.
    preset: the preset, if one is named.
    everything: add the options of all agents, with the defaults of their classes.
  """
  settings = settings_of(preset, options)
  name, values = settings.agent, settings.values
  lines = [
    'podrace train [PRESET] [OPTIONS]: train an agent; without arguments, IMPALA on Catch',
    '',
    textwrap.fill(
      f'presets: {", ".join(PRESETS)} (see `podrace list`)', 100, break_on_hyphens=False
    ),
    *(_preset_lines(preset, values) if preset else []),
  ]
  sebulba = everything or values.get('--architecture') == 'sebulba'
  lines += _run_lines(tuple(declared), values, _printable(name), sebulba, everything)
  if everything:
    return '\n'.join([*lines, *_all_agents(), *_default_lines()])
  begins = any(options.text(name) for name in ('--agent', '--run-dir', '--config'))
  if preset is None and not begins and not options.passed('--env'):
    lines += ['', f'agents: {", ".join(AGENTS)}, or MODULE:CLASS']
    lines += ['podrace train PRESET --help, or --agent NAME --help, has the options of an agent']
  elif name not in AGENTS and not options.text('--agent'):  # a stranger may have recorded it
    lines += ['', f'the run has an agent of its own; --agent {_printable(name)} has its options']
  elif ':' in name:
    rows = list(rows_of(default_agent(name), '--agent.', 'agent'))
    rows.sort(key=lambda r: r.name.count('.'))  # parts come last
    lines += ['', f'agent {name}:', *(_line(r, values) for r in rows)]
  else:
    lines += [*_agent_lines(name, values, settings.kind), *_part_lines(name, values), '']
  more = '' if sebulba else "podrace train --architecture sebulba --help has Sebulba's options, "
  return '\n'.join([*lines, f'{more}podrace train {ALL} has every option'])


def _line(r: Row, values: Values) -> str:
  """Return a line of help, with the default of the run."""
  default = (values[r.name] or 'none') if r.name in values else r.default
  return row(r.head, r.value, f'{r.help} (default {default})'.strip() if default else r.help)


def _most_used_first(rows: Mapping[str, str]) -> list[str]:
  first = [name for name in MOST_USED if name in rows]
  return [rows[name] for name in dict.fromkeys((*first, *rows))]


def _run_lines(
  declared: Iterable[Option], values: Values, agent: str, sebulba: bool, everything: bool
) -> list[str]:
  """Return the options of a run by group.

  Args:
    declared: the options of the command itself.
    values: the defaults of the run.
    agent: the default of --agent.
    sebulba: add the options that only Sebulba reads.
    everything: add all options.
  """
  rows = {o.name: row(o.name, o.value, o.text) for o in declared}
  rows |= {r.name: _line(r, values) for r in table().of('run')}
  agent_option = next(o for o in declared if o.name == '--agent')
  rows['--agent'] = row('--agent', agent_option.value, f'{agent_option.text} (default {agent})')
  groups = {heading: [rows.pop(name) for name in names] for heading, names in GROUPS.items()}
  serving = [rows.pop(name) for name in SERVING]
  if sebulba:
    groups['Sebulba'] = [_line(r, values) for r in table().of('sebulba')]
    groups['other machines'] = serving
  if everything:
    groups[OTHER] = list(rows.values())
  lines = ['', 'options, with the defaults of this run']
  for heading, texts in groups.items():
    lines += ['', f'{heading}:', *texts]
  return lines


def _all_agents() -> Iterator[str]:
  """Yield the options of all agents, and then of all parts."""
  for name in AGENTS:
    yield from _agent_lines(name, {})
    for part_option, default in table().defaults_of(name).items():
      yield row(part_option, '', f'(default {default})')
  yield from _part_lines(None, {})


def _agent_lines(name: str, values: Values, kind: str = '') -> list[str]:
  head = [f'agent {name}:']
  if kind:
    others = [k for n, k in defaults.TABLE if n == name and k != kind]
    hint = '' if '--env' in values else '; add --env'
    head = [f'agent {name}, with its defaults where {_kind_text(kind)}:']
    head += (
      [f'(where {"; ".join(map(_kind_text, others))}: other defaults{hint})'] if others else []
    )
  return ['', *head, *(_line(r, values) for r in table().of('agent', agent=name))]


def _kind_text(kind: str) -> str:
  text = defaults.KINDS[kind]  # type: ignore[index]
  return text if kind == 'continuous' else f'observations are {text}'


def _part_lines(agent: str | None, values: Values) -> list[str]:
  """Return the options of the parts of an agent; None: of all agents."""
  parts: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
  for r in table().of_agent(agent):
    if r.group != 'agent':
      parts.setdefault((r.group, r.agents), []).append(r)
  values = {**(table().defaults_of(agent) if agent else {}), **values}
  lines = []
  for (group, agents), rows in parts.items():
    lines += ['', f'the {group} of {agent or _listed(agents)}:', *(_line(r, values) for r in rows)]
  return lines


def _listed(names: Sequence[str]) -> str:
  *most, last = names
  return f'{", ".join(most)} and {last}' if most else last


def _default_lines() -> list[str]:
  """Return the settings of podrace.settings.defaults, by agent and kind of environment."""
  lines = [
    '',
    'defaults of an agent in a kind of environment, unless a preset is named; the kinds are',
    *(f'  {kind}: {text}' for kind, text in defaults.KINDS.items()),
  ]
  for (agent, kind), entry in defaults.TABLE.items():
    text = ' '.join(w for path, x in entry.paths.items() for w in words(path, x))
    lines += [f'  {agent}, {kind}:', _filled(text, 6)]
  return lines


def _filled(text: str, indent: int) -> str:
  space = ' ' * indent
  return textwrap.fill(
    text, 100, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
  )


def _preset_lines(preset: str, values: Values) -> list[str]:
  """Return the settings of a preset, as options."""
  booleans = {r.name for r in table().rows if r.kind == 'bool'}
  switches = {n: n if x == 'on' else negate(n) for n, x in values.items() if n in booleans}
  text = ' '.join(switches.get(n) or f'{n} {x}'.strip() for n, x in values.items())
  return ['', f'preset {preset}, which is:', _filled(text, 2)]
