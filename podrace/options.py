"""The one reader of command-line options: a command declares which it takes, by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from podrace.config import UsageError, unknown


class Options:
  """What was given for the options that a command takes, and the arguments that are none."""

  def __init__(
    self, args: Sequence[str], takes: Mapping[str, str], others_pass: bool = False
  ) -> None:
    """Reads `args`.

    Args:
      takes: what follows each option, as its help calls it; '' if nothing does.
      others_pass: options that are not among them are arguments, for somebody else to read.

    Raises:
      UsageError: for an option that is not taken, or whose value is missing or is another option.
    """
    self._takes = takes
    self._given: dict[str, list[str]] = {}
    self.arguments: list[str] = []
    remaining = iter(args)
    for arg in remaining:
      name, equals, value = arg.partition('=')
      if name not in takes:
        if name.startswith('-') and not others_pass:
          raise unknown('option', name, takes) if takes else UsageError(f'no option {name!r} here')
        self.arguments.append(arg)
        continue
      if not takes[name]:
        if equals:
          raise UsageError(f'{name} takes no value, not {value!r}; leave it out for what it is not')
      else:
        value = value if equals else next(remaining, '')
        if not value or value.startswith('--'):
          came = f', not the option {value}' if value else ''
          raise UsageError(f'{name} needs a value, {takes[name]}{came}')
      self._given.setdefault(name, []).append(value)

  def __contains__(self, name: str) -> bool:
    return name in self._given

  @property
  def names(self) -> list[str]:
    """The options that were given."""
    return list(self._given)

  def every(self, name: str) -> list[str]:
    """What was given for an option, each time that it was."""
    assert name in self._takes, name
    return self._given.get(name, [])

  def text(self, name: str, default: str = '') -> str:
    """What was given last."""
    return (self.every(name) or [default])[-1]

  def needed(self, name: str, command: str) -> str:
    """Likewise, of an option that a command can't do without."""
    if name not in self:
      raise UsageError(f'{command} needs {name}: see podrace {command} --help')
    return self.text(name)

  def path(self, name: str) -> Path | None:
    return Path(self.text(name)) if name in self else None

  def whole(self, name: str, default: int) -> int:
    """A whole number, at least 0; 1e6 and 1_000 are as well."""
    if name not in self:
      return default
    text = whole_number(self.text(name))
    if not (text.isascii() and text.isdigit()):
      raise UsageError(f'{name} takes a whole number, not {self.text(name)!r}')
    return int(text)

  def number(self, name: str, default: float) -> float:
    """A number, at least 0."""
    if name not in self:
      return default
    try:
      value = float(self.text(name))
    except ValueError:
      raise UsageError(f'{name} takes a number, not {self.text(name)!r}') from None
    if not (math.isfinite(value) and value >= 0):
      raise UsageError(f'{name} takes a number of at least 0, not {self.text(name)!r}')
    return value


def whole_number(text: str) -> str:
  """1e7 and 1_000_000 as integers are written, where that is what they are."""
  with contextlib.suppress(ValueError, OverflowError):
    value = float(text)
    if value == int(value) and not text.lstrip('-').isdigit():
      return str(int(value))
  return text
