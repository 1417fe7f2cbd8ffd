"""From a command's arguments to a configuration, for train, act and bench."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.errors import UsageError, unknown
from podrace.fields import flag, whole_number
from podrace.settings import defaults, user_code
from podrace.settings.agents import agent_name, default_agent, unknown_agent
from podrace.settings.config import Basics, Config
from podrace.settings.presets import PRESETS
from podrace.settings.validation import check_agent_options, needs_sebulba
from podrace.system.options import Options, value_of
from podrace.system.output import printable, tell

C = typing.TypeVar('C', bound=Basics)


def take_preset(args: list[str]) -> str | None:
  """Takes the preset out of the arguments, where it stands before all options."""
  preset = args.pop(0) if args and not args[0].startswith('-') else None
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  if preset is not None and args and not args[0].startswith('-'):
    raise UsageError(f'there is one preset, and then options: not {args[0]!r} after {preset}')
  return preset


def agent_of(options: Options) -> str | None:
  """The agent of --agent, if it is given: one of ours, or module:Class."""
  agent = options.text('--agent') or None
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown_agent(agent)
  return agent


def is_open(
  preset: str | None, run_dir: Path | None, agent: str | None, args: Sequence[str]
) -> bool:
  """Whether neither a preset nor the record of a run says all settings of the agent: see `settled`."""
  if preset is not None:
    return agent not in (None, agent_name(PRESETS[preset]().agent))
  if run_dir is not None and os.path.lexists(run_dir / 'config.json'):
    return False
  return agent is not None or value_of('--env', args) is not None


def allowed_modules(options: Options) -> list[str]:
  """The modules of the user's options. They are looked for in the working directory as well."""
  module = user_code.of_agent(agent_of(options) or '')
  allowed = [] if module is None else [module]
  for word in options.arguments:
    allowed += user_code.of_text(word.partition('=')[2] if word.startswith('--') else word)
  if '--allow-code' in options:  # act does not take it
    allowed += options.every('--allow-code')
  user_code.look_here(allowed)
  return allowed


def base_config(
  preset: str | None,
  run_dir: Path | None,
  agent: str | None,
  args: Sequence[str] = (),
  allowed: Iterable[str] = (),
) -> Config:
  """The configuration before the flags: the preset's, else the record of the run, else Catch.

  With an agent or an environment and no preset, it has the defaults of Config and of the agent.
  """
  if preset is None and is_open(preset, run_dir, agent, args):
    config = Config(agent=default_agent(agent or 'impala'))
  elif preset is None and run_dir is not None and os.path.lexists(run_dir / 'config.json'):
    from podrace.run.directory import load_config

    config = load_config(run_dir, allowed)
  else:
    config = PRESETS[preset or 'catch']()
    config = dataclasses.replace(config, **defaults.meaningless(config, settings_in(args)))
  if agent is not None and agent != agent_name(config.agent):
    config = dataclasses.replace(config, agent=default_agent(agent))
  return config


def settled(base: Config, env: str, args: list[str], prog: str = 'podrace train') -> Config:
  """`base` with the defaults of its agent in that kind of environment, and then with the flags.

  It makes the environment, and that may ask JAX for devices. The processes of a run join before.
  """
  return parse(defaults.with_defaults(base, env), args, prog)


def configured(preset: str | None, options: Options, prog: str, sebulba: bool = False) -> Config:
  """The configuration of a command that keeps no run."""
  agent, rest = agent_of(options), options.arguments
  allowed_modules(options)
  base = base_config(preset, None, agent, rest)
  base = dataclasses.replace(base, architecture='sebulba') if sebulba else implied(base, rest)
  config = parse(base, rest, prog)
  return settled(base, config.env, rest, prog) if is_open(preset, None, agent, rest) else config


def parse(config: C, args: list[str], prog: str = 'podrace train') -> C:
  """`config` with the flags' changes; tyro ends the program with code 2 on a bad one."""
  import tyro

  cls = type(config)
  types, values = typing.get_type_hints(cls), vars(config)
  names = [f.name for f in dataclasses.fields(cls)]
  types |= {n: type(values[n]) for n in names if types[n] is Any}
  fields = [(n, types[n], dataclasses.field(default=values[n])) for n in names]
  typed = dataclasses.make_dataclass('Options', fields, frozen=True)
  plain = [_whole(a) for a in said_plainly(args, set(booleans(config)))]
  check_agent_options(config.agent, plain)
  with _escaped(plain):
    found = tyro.cli(typed, args=plain, prog=prog, config=(tyro.conf.FlagConversionOff,))
  return cls(**{n: getattr(found, n) for n in names})


@contextlib.contextmanager
def _escaped(args: Sequence[str]) -> Iterator[None]:
  """Have `print_text` print tyro's errors, so that no argument reaches the terminal unescaped."""
  if all(printable(a) == a for a in args):
    yield
    return
  out = io.StringIO()
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
      yield
  finally:
    if out.getvalue():
      tell(out.getvalue())


SAID = dict.fromkeys(('true', 'yes', 'on', '1'), 'True')
SAID |= dict.fromkeys(('false', 'no', 'off', '0'), 'False')


def booleans(settings: Any, prefix: str = '--') -> Iterator[str]:
  """The options with True or False of a dataclass, and of the dataclasses among its fields."""
  for field in dataclasses.fields(settings):
    value, name = getattr(settings, field.name), prefix + flag(field.name)
    if isinstance(value, bool):
      yield name
    elif dataclasses.is_dataclass(value):
      yield from booleans(value, f'{name}.')


def said_plainly(args: list[str], names: set[str]) -> list[str]:
  """`args` as tyro takes them: `--x True`, where it says --x alone, --no-x, or another case or word."""
  negated = {f'{head}.no-{last}': n for n in names for head, _, last in [n.rpartition('.')]}
  negated |= {f'--no-{n[2:]}': n for n in names}
  found: list[str] = []
  rest = list(args)
  while rest:
    arg = rest.pop(0)
    name, equals, value = arg.partition('=')
    name = name.replace('_', '-')
    if name in negated and not equals:
      found += [negated[name], 'False']
    elif name not in names:
      found.append(arg)
    elif equals:
      found += [name, SAID.get(value.lower(), value)]
    elif rest and not rest[0].startswith('--'):
      value = rest.pop(0)
      found += [name, SAID.get(value.lower(), value)]
    else:
      found += [name, 'True']
  return found


def _whole(arg: str) -> str:
  """1e7 and 1_000_000 as integers, also after `--option=`."""
  name, equals, text = arg.partition('=') if arg.startswith('--') else ('', '', arg)
  return name + equals + whole_number(text)


def implied(base: Config, args: Sequence[str]) -> Config:
  """`base` under sebulba, if the flags name no architecture and no other one fits them."""
  if value_of('--architecture', args) is not None:
    return base
  asked = {
    name: value_of(f'--{name}', args) or getattr(base, name) for name in ('env', 'envs', 'replay')
  }
  return dataclasses.replace(base, architecture='sebulba') if needs_sebulba(**asked) else base


def settings_in(args: Sequence[str]) -> dict[str, str]:
  """The fields of Config that the arguments have options for, and the values as they are given."""
  values = {f.name: value_of(f'--{flag(f.name)}', args) for f in dataclasses.fields(Config)}
  return {name: value for name, value in values.items() if value is not None}


def agent_settings(args: Sequence[str]) -> tuple[list[str], list[str]]:
  """The options of an agent's fields, as --agent.simulations 0, and the other arguments."""
  found: list[str] = []
  others: list[str] = []
  rest = list(args)
  while rest:
    arg = rest.pop(0)
    if not arg.startswith('--agent.'):
      others.append(arg)
      continue
    found.append(arg)
    if '=' not in arg and rest and not rest[0].startswith('--'):
      found.append(rest.pop(0))
  return found, others
