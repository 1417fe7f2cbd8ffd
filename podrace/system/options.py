"""The options of a command: their declaration, parser and help."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podrace.errors import UsageError, unknown
from podrace.fields import SMALLEST, whole_number
from podrace.system.files.schema import STEPS

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Option:
  """An option of a command.

  Attributes:
    name: its name, with --.
    value: the name of its value in its help, '' for an option without a value.
    help: its help.
    default: its default.
    choices: all its values, if they have names.
    high: its largest whole number.
  """

  name: str
  value: str
  help: str
  default: Any = None
  choices: tuple[str, ...] = ()
  high: int = STEPS

  @property
  def text(self) -> str:
    """Its help, with its default unless the help has it."""
    shown = '' if self.default is None or '(default' in self.help else f' (default {self.default})'
    return self.help + shown


@dataclasses.dataclass(frozen=True)
class Command:
  """A command, its options and its help.

  Attributes:
    name: its name.
    usage: the arguments after its name, for the help.
    about: the first sentence of the help.
    options: its options.
    notes: the end of the help.
    others_pass: whether unknown options are arguments, which another parser reads.
    jax: whether it computes with JAX, in which case JAX's settings are checked first.
    foreign: hints with its options -> names that other libraries have for them, as words.
  """

  name: str
  usage: str
  about: str
  options: tuple[Option, ...] = ()
  notes: str = ''
  others_pass: bool = False
  jax: bool = False
  foreign: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def help(self, args: list[str]) -> str:
    """Return its help; `args` are the arguments without --help."""
    head = f'podrace {self.name} {self.usage}'.rstrip()
    parts = [textwrap.fill(f'{head}: {self.about}', WIDTH, break_on_hyphens=False)]
    if self.options:
      column = max(len(f'{o.name} {o.value}'.rstrip()) for o in self.options) + 4
      parts.append('\n'.join(row(o.name, o.value, o.text, column) for o in self.options))
    return '\n\n'.join([*parts, *([self.notes.strip()] if self.notes else [])])

  def suggest(self, name: str) -> str:
    """Return the hint for another library's option, such as --n_trials; '' if there is none."""
    dashes, word = name[:2], name[2:].lower().replace('_', '-')
    hints = (ours for ours, theirs in self.foreign.items() if word in theirs.split())
    return next(hints, '') if dashes == '--' else ''


def row(name: str, value: str, help: str, column: int = 46) -> str:
  """Return an entry of a help text, in which `help` begins at `column`."""
  head, indent = f'  {name} {value}'.rstrip(), ' ' * column
  begin = indent if len(head) > column - 2 else head.ljust(column)
  text = textwrap.fill(
    sentence(help), WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False
  )
  return f'{head}\n{text}' if begin == indent else text or head


def sentence(text: str) -> str:
  """Return a help text as a sentence: with a capital, unless it begins with code, and a period."""
  if not text:
    return ''
  begin = text[0] if '://' in text.partition(' ')[0] else text[0].upper()
  return begin + text[1:] + ('' if text.endswith(('.', ':')) else '.')


class Options:
  """The parsed options and arguments of a command.

  Attributes:
    arguments: the arguments other than options.
  """

  def __init__(self, args: Sequence[str], command: Command, lenient: bool = False) -> None:
    """Read `args`.

    Args:
      args: the words after the name of the command.
      command: declares the options.
      lenient: leaves out options without a value, for help and completion.

    Raises:
      UsageError: for an unknown option, an empty argument, or if a value is missing or is another
        option.
    """
    self._command = command
    self._takes = takes = {o.name: o for o in command.options}
    self._given: dict[str, list[str]] = {}
    self.arguments: list[str] = []
    remaining = list(args)
    while remaining:
      arg = remaining.pop(0)
      name, equals, value = arg.partition('=')
      if (plain := _with_hyphens(name)) in takes:
        name = plain
      else:
        if ours := command.suggest(name):
          raise UsageError(f'unknown option {name!r}: use {ours}')
        if name.startswith('-') and not command.others_pass:
          raise unknown('option', name, takes) if takes else UsageError(f'no option {name!r} here')
        if not arg and not command.others_pass:  # as a path it would be the working directory
          raise UsageError(f'an argument of {command.name} is empty')
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
    """The names of the options on the command line."""
    return list(self._given)

  def passed(self, name: str) -> str | None:
    """Return the last value of an option that is passed on among the arguments."""
    value = value_of(name, self.arguments)
    return None if value is None or value.startswith('--') else value

  def no_arguments(self) -> None:
    """Raise UsageError if there are arguments other than options."""
    if self.arguments:
      raise UsageError(f'{self._command.name} takes options only, not {" ".join(self.arguments)}')

  def one_argument(self, called: str) -> str:
    """Return the only argument; raises UsageError if there is none, or more."""
    if len(self.arguments) != 1:
      name, usage = self._command.name, self._command.usage
      raise UsageError(
        f'{name} takes one {called}, not {len(self.arguments)}: podrace {name} {usage}'
      )
    return self.arguments[0]

  def every(self, name: str) -> list[str]:
    """Return all values of an option, in order."""
    assert name in self._takes, name
    return self._given.get(name, [])

  def text(self, name: str) -> str:
    """Return the last value, else the default, else ''."""
    return (self.every(name) or [self._takes[name].default or ''])[-1]

  def needed(self, name: str) -> str:
    """Return the last value of a required option; raises UsageError without one."""
    if name not in self:
      command = self._command.name
      raise UsageError(f'{command} needs {name}: see podrace {command} --help')
    return self.text(name)

  def path(self, name: str) -> Path | None:
    """Return the last value as a path, None without the option."""
    return Path(self.text(name)) if name in self else None

  def whole(self, name: str) -> Any:
    """Return a whole number of at least 0, such as 1e6 or 1_000, else the default."""
    if name not in self:
      return self._takes[name].default
    return parse_whole(name, self.text(name), self._takes[name].high)

  def number(self, name: str) -> float:
    """Return a number of at least 0, else the default, else 0."""
    if name not in self:
      return float(self._takes[name].default or 0)
    value = parse_number(name, self.text(name))
    if 0 < value < SMALLEST:
      raise UsageError(f'{name} takes 0 or at least {SMALLEST:g}, not {self.text(name)!r}')
    if value > threading.TIMEOUT_MAX:
      raise UsageError(f'{name} takes at most {threading.TIMEOUT_MAX:g}, not {self.text(name)!r}')
    return value


def parse_whole(name: str, text: str, high: int = STEPS) -> int:
  """Return a whole number of 0 to `high`, such as 1e6 or 1_000; raises UsageError naming `name`."""
  digits = whole_number(text)
  if not (digits.isascii() and digits.isdigit()):
    raise UsageError(f'{name} takes a whole number of at least 0, not {text!r}')
  if len(digits) > len(str(STEPS)) or int(digits) > high:  # `int` refuses thousands of digits
    raise UsageError(f'{name} takes at most {high:,}, not {text:.30}')
  return int(digits)


def parse_number(name: str, text: str) -> float:
  """Return a number of at least 0; raises UsageError naming `name`."""
  try:
    value = float(text)
  except ValueError:
    raise UsageError(f'{name} takes a number, not {text!r}') from None
  if not (math.isfinite(value) and value >= 0):
    raise UsageError(f'{name} takes a number of at least 0, not {text!r}')
  return value


def _with_hyphens(name: str) -> str:
  """Return the name of an option, which may have underscores, as --run_dir."""
  return name.replace('_', '-') if name.startswith('--') else name


def value_of(flag: str, args: Sequence[str]) -> str | None:
  """Return the last value of a flag, None if it is not in `args`."""
  last = None
  for i, arg in enumerate(args):
    name, equals, value = arg.partition('=')
    if _with_hyphens(name) == flag:
      last = value if equals else next(iter(args[i + 1 : i + 2]), None)
  return last
