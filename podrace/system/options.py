"""The options of a command: their declaration, parser and help."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.errors import UsageError, unknown
from podrace.fields import whole_number

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Option:
  """An option of a command."""

  name: str
  value: str  # follows it, as its help calls it; '' if nothing does
  help: str
  default: Any = None
  choices: tuple[str, ...] = ()  # all values that it takes, where they have names

  @property
  def text(self) -> str:
    """Its help with its default, unless the help explains that itself."""
    shown = '' if self.default is None or '(default' in self.help else f' (default {self.default})'
    return self.help + shown


@dataclasses.dataclass(frozen=True)
class Command:
  """A command: its options, and the words of its help before and after them."""

  name: str
  usage: str  # follows its name
  about: str
  options: tuple[Option, ...] = ()
  notes: str = ''
  others_pass: bool = False  # other options are arguments, for somebody else to read
  jax: bool = False  # it computes with JAX, whose settings are checked first

  def help(self, args: list[str]) -> str:
    """Its help; `args` are the arguments without --help."""
    head = f'podrace {self.name} {self.usage}'.rstrip()
    parts = [textwrap.fill(f'{head}: {self.about}', WIDTH, break_on_hyphens=False)]
    if self.options:
      column = max(len(f'{o.name} {o.value}'.rstrip()) for o in self.options) + 4
      parts.append('\n'.join(row(o.name, o.value, o.text, column) for o in self.options))
    return '\n\n'.join([*parts, *([self.notes.strip()] if self.notes else [])])


def row(name: str, value: str, help: str, column: int = 46) -> str:
  """A line of help or several; `help` begins at `column`."""
  head, indent = f'  {name} {value}'.rstrip(), ' ' * column
  begin = indent if len(head) > column - 2 else head.ljust(column)
  text = textwrap.fill(
    help, WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False
  )
  return f'{head}\n{text}' if begin == indent else text or head


class Options:
  """The options and the other arguments of a command, as they were given."""

  def __init__(self, args: Sequence[str], command: Command, lenient: bool = False) -> None:
    """Read `args`.

    Args:
      args: the words after the name of the command.
      command: declares the options.
      lenient: leaves out options without a value, for help and completion.

    Raises:
      UsageError: for an unknown option, or if its value is missing or is another option.
    """
    self._command = command
    self._takes = takes = {o.name: o for o in command.options}
    self._given: dict[str, list[str]] = {}
    self.arguments: list[str] = []
    remaining = list(args)
    while remaining:
      arg = remaining.pop(0)
      name, equals, value = arg.partition('=')
      if name not in takes:
        if name.startswith('-') and not command.others_pass:
          raise unknown('option', name, takes) if takes else UsageError(f'no option {name!r} here')
        self.arguments.append(arg)
        continue
      if not takes[name].value:
        if equals:
          raise UsageError(f'{name} takes no value, not {value!r}; leave it out for what it is not')
      else:
        if not equals and remaining and not (lenient and remaining[0].startswith('--')):
          value = remaining.pop(0)
        if not value or value.startswith('--'):
          if lenient:
            continue
          came = f', not the option {value}' if value else ''
          raise UsageError(f'{name} needs a value, {takes[name].value}{came}')
      self._given.setdefault(name, []).append(value)

  def __contains__(self, name: str) -> bool:
    return name in self._given

  @property
  def names(self) -> list[str]:
    """The names of the given options."""
    return list(self._given)

  def passed(self, name: str) -> str | None:
    """Return the last value of an option that is passed on among the arguments."""
    value = value_of(name, self.arguments)
    return None if value is None or value.startswith('--') else value

  def no_arguments(self) -> None:
    """Raises UsageError if there are arguments other than options."""
    if self.arguments:
      raise UsageError(f'{self._command.name} takes options only, not {" ".join(self.arguments)}')

  def one_argument(self, called: str) -> str:
    """The one argument; raises UsageError if there is none, or more."""
    if len(self.arguments) != 1:
      name, usage = self._command.name, self._command.usage
      raise UsageError(
        f'{name} takes one {called}, not {len(self.arguments)}: podrace {name} {usage}'
      )
    return self.arguments[0]

  def every(self, name: str) -> list[str]:
    """All values of an option, in their order."""
    assert name in self._takes, name
    return self._given.get(name, [])

  def text(self, name: str) -> str:
    """The last value, else the default, else ''."""
    return (self.every(name) or [self._takes[name].default or ''])[-1]

  def needed(self, name: str) -> str:
    """The last value of an option that the command can't do without."""
    if name not in self:
      command = self._command.name
      raise UsageError(f'{command} needs {name}: see podrace {command} --help')
    return self.text(name)

  def path(self, name: str) -> Path | None:
    return Path(self.text(name)) if name in self else None

  def whole(self, name: str) -> Any:
    """A whole number, at least 0, else the default; 1e6 and 1_000 are as well."""
    if name not in self:
      return self._takes[name].default
    text = whole_number(self.text(name))
    if not (text.isascii() and text.isdigit()):
      raise UsageError(f'{name} takes a whole number of at least 0, not {self.text(name)!r}')
    return int(text)

  def number(self, name: str) -> float:
    """A number, at least 0, else the default; an option without one has 0."""
    if name not in self:
      return float(self._takes[name].default or 0)
    try:
      value = float(self.text(name))
    except ValueError:
      raise UsageError(f'{name} takes a number, not {self.text(name)!r}') from None
    if not (math.isfinite(value) and value >= 0):
      raise UsageError(f'{name} takes a number of at least 0, not {self.text(name)!r}')
    return value


def value_of(flag: str, args: Sequence[str]) -> str | None:
  """The last value of a flag."""
  found = None
  for i, arg in enumerate(args):
    name, equals, value = arg.partition('=')
    if name == flag:
      found = value if equals else next(iter(args[i + 1 : i + 2]), None)
  return found
