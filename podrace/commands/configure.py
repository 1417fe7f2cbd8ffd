"""From a command's arguments to a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import typing
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeGuard

from podrace.agents import AGENTS
from podrace.commands import mistakes
from podrace.commands.option_table import table
from podrace.commands.shared_options import AGENT
from podrace.envs.env_names import suggest_names
from podrace.envs.libraries import HOST_LIBRARIES, LIBRARIES
from podrace.errors import UsageError, unknown
from podrace.fields import flag, negate, whole_number
from podrace.settings import defaults, foreign_names, user_code
from podrace.settings.agents import agent_class, agent_name, default_agent, unknown_agent
from podrace.settings.config import Basics, Config
from podrace.settings.presets import PRESETS
from podrace.settings.validation import needs_sebulba
from podrace.system.options import Command, Options
from podrace.system.output import tell

C = typing.TypeVar('C', bound=Basics)
TRAIN = Command('train', '', '', (AGENT,), others_pass=True)
NO_OPTIONS = Options((), TRAIN)


def take_preset(
  args: list[str], presets: Iterable[str] = PRESETS, kind: str = 'preset'
) -> str | None:
  """Remove the preset from the arguments and return it; it stands before all options."""
  preset = args.pop(0) if args and not args[0].startswith('-') else None
  if preset is not None and preset not in presets:
    raise unknown_preset(preset) if presets is PRESETS else unknown(kind, preset, presets)
  if preset is not None and args and not args[0].startswith('-'):
    raise UsageError(f'there is one preset, and then options: not {args[0]!r} after {preset}')
  return preset


def unknown_preset(name: str) -> UsageError:
  """Return the error for an unknown preset, which may name an agent or an environment."""
  if not name.strip():
    return UsageError('the preset is empty: podrace list names the presets')
  if name.lower() in AGENTS:
    return UsageError(f'unknown preset {name!r}: write --agent {name.lower()} --env LIB:NAME')
  if not name.islower() and (hint := suggest_names(name)):
    return UsageError(f'unknown preset {name!r}: an environment is --env LIB:NAME{hint}')
  setting, equals, _ = name.partition('=')
  if equals:
    ours = foreign_names.suggest(setting) or f'--{flag(setting)} VALUE'
    return UsageError(f'unknown preset {name!r}: a setting is an option, here {ours}')
  if ':' in name:
    library = name.partition(':')[0]
    option = '--env' if library in {*LIBRARIES, *HOST_LIBRARIES} else '--agent'
    return UsageError(f'unknown preset {name!r}: write {option} {name}')
  return unknown('preset', name, PRESETS)


def requested_agent(options: Options) -> str | None:
  """Return the agent of --agent: a name of AGENTS, or module:Class; None if it is not given."""
  agent = options.text('--agent') or None
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown_agent(agent)
  return agent


def needs_defaults(preset: str | None, run_dir: Path | None, options: Options) -> bool:
  """Return whether neither the preset nor the record of a run has all settings of the agent."""
  agent = requested_agent(options)
  if preset is not None:
    return agent not in (None, PRESETS[preset].agent)
  if _has_record(run_dir):
    return False
  return agent is not None or options.passed('--env') is not None


def tell_of_new_run(preset: str | None, run_dir: Path, options: Options) -> None:
  """Say that a directory holds no run, if nothing but the directory says which run is meant."""
  chosen = preset or options.passed('--log') or needs_defaults(preset, run_dir, options)
  if not chosen and not _has_record(run_dir):
    tell(f'{run_dir} holds no run yet: this is a new one, of the preset catch')


def _has_record(run_dir: Path | None) -> TypeGuard[Path]:
  return run_dir is not None and os.path.lexists(run_dir / 'config.json')


def allowed_modules(options: Options) -> list[str]:
  """Return the modules that the user's options name, and look for them here as well."""
  module = user_code.of_agent(requested_agent(options) or '')
  allowed = [] if module is None else [module]
  if '--allow-code' in options:
    allowed += options.every('--allow-code')
  in_words: list[str] = []
  for word in options.arguments:
    in_words += user_code.of_text(word.partition('=')[2] if word.startswith('--') else word)
  user_code.look_here([*allowed, *in_words])
  if module is not None:  # it may have the class from another one, which the record names
    allowed.append(agent_class(requested_agent(options) or '').__module__)
  user_code.allow(allowed)  # without the words, of which one may be a directory's name
  return [*allowed, *in_words]


def base_config(
  preset: str | None,
  run_dir: Path | None = None,
  options: Options = NO_OPTIONS,
  allowed: Iterable[str] = (),
) -> Config:
  """Return the configuration before the flags: the preset's, else the run's, else that of Catch.

  With an agent or an environment and no preset, it has the defaults of Config and of the agent.

  Args:
    preset: the preset, if one is named.
    run_dir: a run directory, which may have a record.
    options: the arguments.
    allowed: modules that the record of the run may name.
  """
  agent = requested_agent(options)
  if preset is None and needs_defaults(preset, run_dir, options):
    config = Config(agent=default_agent(agent or 'impala'))
  elif preset is None and _has_record(run_dir):
    from podrace.run.directory import load_config

    config = load_config(run_dir, allowed)
  else:
    if preset is None and run_dir is not None:
      _check_no_checkpoints(run_dir)
    config = PRESETS[preset or 'catch']()
    config = dataclasses.replace(config, **defaults.reset_unused(config, settings_in(options)))
  if agent is not None and agent != agent_name(config.agent):
    config = dataclasses.replace(config, agent=default_agent(agent))
  if preset is None and options.passed('--log') and not _has_record(run_dir):
    config = dataclasses.replace(config, env='')  # the spaces are the log's
  return config


def _check_no_checkpoints(run_dir: Path) -> None:
  """Raise UsageError if a directory without a record has checkpoints, which are of another run."""
  from podrace.run.directory import saved_steps

  if saved_steps(run_dir):
    raise UsageError(
      f'{run_dir} has checkpoints and no config.json: restore it, or give the preset and the '
      'options of the run'
    )


def parse_with_defaults(
  base: Config, first: Config, args: list[str], prog: str = 'podrace train'
) -> Config:
  """Parse the flags over `base` with its agent's defaults in the kind of environment of `first`.

  It makes the environment, which may ask JAX for devices. The processes of a run join before.
  """
  return parse(defaults.with_defaults(base, first.env, first.log), args, prog)


def parse_config(
  preset: str | None, options: Options, prog: str, architecture: Literal['sebulba'] | None = None
) -> Config:
  """Return the configuration of a command that keeps no run."""
  rest = options.arguments
  allowed_modules(options)
  base = base_config(preset, None, options)
  if architecture is None:
    base = with_architecture(base, options)
  else:
    base = dataclasses.replace(base, architecture=architecture)
  config = parse(base, rest, prog)
  if needs_defaults(preset, None, options):
    config = parse_with_defaults(base, config, rest, prog)
  return config


def parse_words(words: Sequence[str], prog: str) -> Config:
  """Return the configuration of arguments of `podrace train`, which may begin with a preset."""
  args = list(words)
  return parse_config(take_preset(args), Options(args, TRAIN), prog)


def parse(config: C, args: list[str], prog: str = 'podrace train') -> C:
  """Return `config` with the changes of the flags; raises UsageError for a bad flag or value."""
  if not args:
    return config
  import tyro

  cls = type(config)
  types, values = typing.get_type_hints(cls), vars(config)
  names = [f.name for f in dataclasses.fields(cls)]
  types |= {n: type(values[n]) for n in names if types[n] is Any}
  fields = [(n, types[n], dataclasses.field(default=values[n])) for n in names]
  typed = dataclasses.make_dataclass('Options', fields, frozen=True)
  options = dict(mistakes.options_of(config))
  booleans, texts = ({n for n, x in options.items() if isinstance(x, kind)} for kind in (bool, str))
  plain = list(_whole_numbers(switch_booleans(args, booleans), texts))
  mistakes.check_names(config, plain)
  out = io.StringIO()
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _columns('80'):
      parsed = tyro.cli(
        typed,
        args=plain,
        prog=prog,
        config=(tyro.conf.FlagConversionOff,),
        registry=mistakes.python_values(),
      )
  except SystemExit:
    raise mistakes.explain(out.getvalue(), prog, args) from None
  return cls(**{n: getattr(parsed, n) for n in names})


@contextlib.contextmanager
def _columns(count: str) -> Iterator[None]:
  """Have the messages of libraries broken into lines as on a terminal of `count` columns."""
  before = os.environ.get('COLUMNS')
  os.environ['COLUMNS'] = count
  try:
    yield
  finally:
    del os.environ['COLUMNS']
    if before is not None:
      os.environ['COLUMNS'] = before


def switch_booleans(args: list[str], names: set[str]) -> list[str]:
  """Return `args` with `--x True` for --x and `--x False` for --no-x, as tyro takes them.

  Args:
    args: the arguments.
    names: the options that are booleans.

  Raises:
    UsageError: for a boolean with a value.
  """
  values = {name: (name, 'True') for name in names}
  values |= {negate(name): (name, 'False') for name in names}
  switched: list[str] = []
  for arg, following in itertools.zip_longest(args, args[1:], fillvalue='--'):
    name, equals, value = arg.partition('=')
    name = name.replace('_', '-')
    if name not in values:
      switched.append(arg)
      continue
    value = value if equals else following
    if equals or not value.startswith('--'):
      on, off = values[name][0], negate(values[name][0])
      raise UsageError(f'{name} takes no value, not {value!r}: write {on} or {off}')
    switched += values[name]
  return switched


def _whole_numbers(args: Iterable[str], texts: Set[str]) -> Iterator[str]:
  """Yield the arguments, 1e7 and 1_000_000 as digits, except in the values of options `texts`."""
  option = ''
  for arg in args:
    name, equals, text = arg.partition('=') if arg.startswith('--') else ('', '', arg)
    option = name.replace('_', '-') or option
    yield name + equals + (text if option in texts else whole_number(text))


def with_architecture(base: Config, options: Options) -> Config:
  """Return `base` under sebulba, if no architecture is named and only sebulba fits the flags."""
  if options.passed('--architecture') is not None:
    return base
  settings = {
    name: options.passed(f'--{name}') or getattr(base, name) for name in ('env', 'envs', 'replay')
  }
  return dataclasses.replace(base, architecture='sebulba') if needs_sebulba(**settings) else base


def settings_in(options: Options) -> dict[str, str]:
  """Return the fields of Config that the arguments set, and their values as they are given."""
  values = {f.name: options.passed(f'--{flag(f.name)}') for f in dataclasses.fields(Config)}
  return {name: value for name, value in values.items() if value is not None}


def agent_settings(args: Sequence[str]) -> tuple[list[str], list[str]]:
  """Split `args` into options of the agent's fields, as --agent.simulations 0, and the rest."""
  settings: list[str] = []
  remaining: list[str] = []
  rest = list(args)
  while rest:
    arg = rest.pop(0)
    if not arg.startswith('--agent.'):
      remaining.append(arg)
      continue
    settings.append(arg)
    kinds = _kinds(arg)
    if '=' not in arg and kinds != {'bool'} and rest and not rest[0].startswith('--'):
      settings.append(rest.pop(0))
      several = not kinds or any(kind.startswith('tuple') for kind in kinds)
      while several and rest and _is_number(rest[0]):
        settings.append(rest.pop(0))
  return settings, remaining


def _kinds(option: str) -> set[str]:
  """Return the types that an option of an agent has; none of an unknown one, as of a user's."""
  name = option.replace('_', '-')
  return {row.kind for row in table().of_agent() if name in row.names}


def _is_number(text: str) -> bool:
  with contextlib.suppress(ValueError):
    return math.isfinite(float(text))
  return False
