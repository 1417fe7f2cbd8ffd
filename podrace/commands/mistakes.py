"""Messages for mistakes in the options of a run: unknown names, and values that tyro refuses."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from podrace.errors import UsageError
from podrace.fields import flag, negate
from podrace.settings import foreign_names
from podrace.settings.agents import agent_name, untyped_attributes
from podrace.settings.validation import check_agent_options
from podrace.system.options import value_of

COLOUR = re.compile(r'\x1b\[[\d;]*m')
SIDES = ' │╭╰╮╯|+'  # of tyro's box
RULE = re.compile(r'[─-]{8,}')
BAD_VALUE = re.compile(r"Error parsing (--[\w.-]+): .*?(?:'([^']*)'|\[(.*)\])$")
BAD_CHOICE = re.compile(r"invalid choice '(.*)' for argument '([^']*)'. Expected one of \((.*)\)")
BAD_FIELD = re.compile(r'Error parsing (agent[\w.-]*): (\w+) (must .*)')
UNUSED = re.compile(r'Unrecognized options: (.*)')
NO_VALUE = re.compile(r"Missing value for argument '([^']*)'")
PYTHON = 'PYTHON'
KINDS = {
  'INT': 'a whole number',
  '{None}|INT': 'a whole number or None',
  '{None}|FLOAT': 'a number or None',
  'FLOAT': 'a number',
  '[INT [INT ...]]': 'whole numbers',
  '[FLOAT [FLOAT ...]]': 'numbers',
  **dict.fromkeys(
    (PYTHON, f'{{None}}|{PYTHON}', f'[{PYTHON} [{PYTHON} ...]]'),
    'only values of Python, as the default of its field',
  ),
}
PLAIN = (int, float, str, tuple, list, type(None), types.UnionType)  # and bool, which is an int


def options_of(settings: Any, prefix: str = '--') -> Iterator[tuple[str, Any]]:
  """Yield the options of a dataclass and of the dataclasses among its fields, with their values."""
  import tyro

  hints = typing.get_type_hints(type(settings), include_extras=True)
  for field in dataclasses.fields(settings):
    if tyro.conf.Suppress in getattr(hints[field.name], '__metadata__', ()):
      continue
    name = prefix + flag(field.name)
    value = getattr(settings, field.name)
    if dataclasses.is_dataclass(value):
      yield from options_of(value, f'{name}.')
    else:
      yield name, value


def python_values() -> Any:
  """Return tyro's registry for fields of own classes that no text of a command line describes.

  A function or an array is such a value, and so is an enum, which config.json cannot make again.
  The field keeps its default, and its option is refused.
  """
  from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

  def refuse(args: list[str]) -> Any:
    raise ValueError(f'a value of Python is expected, not {args[0]!r}')

  def spec(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind = typing.get_origin(info.type) or info.type
    plain = not isinstance(kind, type) or issubclass(kind, PLAIN) or dataclasses.is_dataclass(kind)
    if plain:
      return None
    return PrimitiveConstructorSpec(
      nargs=1,
      metavar=PYTHON,
      instance_from_str=refuse,
      is_instance=lambda value: not isinstance(value, PLAIN),
      str_from_instance=lambda value: [getattr(value, '__name__', repr(value))],
    )

  registry = ConstructorRegistry()
  registry.primitive_rule(spec)
  return registry


def check_names(config: Any, args: Sequence[str]) -> None:
  """Check the names of all options.

  Raises:
    UsageError: for an unknown option, with podrace's name for it if another library has the option.
  """
  names = {name for name, _ in options_of(config)}
  negated = {negate(name) for name, value in options_of(config) if isinstance(value, bool)}
  for arg in args:
    name = arg.partition('=')[0].replace('_', '-')
    if not name.startswith('--') or name in names or name in negated:
      continue
    raise _unknown(config.agent, arg, name, names)


def _unknown(agent: Any, arg: str, name: str, names: set[str]) -> UsageError:
  """Return the error for an unknown option."""
  head = f'unknown option {arg.partition("=")[0]!r}'
  if name.removeprefix('--agent.').replace('-', '_') in dict(untyped_attributes(agent)):
    check_agent_options(agent, [arg])
  ours = foreign_names.suggest(name)
  if ours.startswith('none'):
    return UsageError(f'{head}: there is {ours}')
  settings = re.findall(r'--agent\.[\w.-]+\w', ours)
  if ours and (not settings or names.intersection(settings)):
    return UsageError(f'{head}: use {ours}')
  if settings:  # of other agents; this one may have it in several parts, such as an actor's
    parts = sorted(n for n in names if n.endswith(settings[0].removeprefix('--agent.')))
    if parts:
      return UsageError(f'{head}: use {" or ".join(parts)}')
    return UsageError(f'{head}: {agent_name(agent)} has no such setting; other agents have {ours}')
  if (own := f'--agent.{name[2:]}') in names:
    return UsageError(f'{head}: use {own}, a setting of {agent_name(agent)}')
  last = name.rpartition('.')[2].lstrip('-')
  if same := sorted(n for n in names if n.endswith(f'.{last}')):
    return UsageError(f'{head}: use {" or ".join(same)}')
  check_agent_options(agent, [arg])
  near = difflib.get_close_matches(name, names, cutoff=0.6)
  hint = (
    f'did you mean {" or ".join(near)}?' if near else 'podrace train --help-all has all options'
  )
  return UsageError(f'{head}: {hint}')


def explain(output: str, prog: str, args: Sequence[str]) -> UsageError:
  """Return tyro's message about a bad value in podrace's form.

  Args:
    output: the text that tyro printed.
    prog: the command, for its help.
    args: the arguments, as the text is wrapped.
  """
  rows = [COLOUR.sub('', line).strip(SIDES) for line in output.splitlines()]
  rows = [row for row in rows if row][1:]  # without the title
  rows = rows[1:] if rows and RULE.fullmatch(rows[0]) else rows
  end = next((i for i, row in enumerate(rows) if RULE.fullmatch(row)), len(rows))
  text, details = ' '.join(rows[:end]), '\n'.join(rows[end:])
  see = f'see {prog} --help'
  if match := BAD_CHOICE.search(text):
    value, name, choices = match.groups()
    listed = re.findall(r"'([^']*)'", choices)
    return UsageError(f'{name} takes {" or ".join(listed)}, not {value!r}')
  if match := BAD_FIELD.search(text):
    return UsageError(f'--{match[1]}.{flag(match[2])} {match[3]}')
  if match := UNUSED.search(text):
    return UsageError(f'{match[1]} belongs to no option; a preset comes first: {see}')
  if match := NO_VALUE.search(text):
    return UsageError(f'{match[1]} needs a value: {see}')
  if match := BAD_VALUE.search(text):
    name = match[1]
    help_line = re.search(rf'{re.escape(name)} (\S.*)', details)
    kind = KINDS.get(help_line[1].strip(), help_line[1].strip()) if help_line else 'another value'
    single = value_of(name, args) or match[2]
    value = single if match[3] is None else ' '.join(re.findall(r"'([^']*)'", match[3]))
    hint = ', and 1e6 or 1_000_000 is a million' if re.fullmatch(r'[\d.]+[kKmM]', value) else ''
    return UsageError(f'{name} takes {kind}, not {value!r}{hint}: {see}')
  return UsageError(f'{text}: {see}')
