"""Varied fields of a sweep and the settings it tries. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.fields import negate, whole_number

Setting = dict[str, Any]  # value of each varied field, by its option without dashes


@dataclasses.dataclass(frozen=True)
class ChoiceSpace:
  """A list of values, as text of the command line."""

  values: tuple[str, ...]

  def has(self, value: object) -> bool:
    """Return whether a value, as `parse_value` reads it, is one of the choices."""
    return any(type(value) is type(x) and value == x for x in map(parse_value, self.values))

  def __str__(self) -> str:
    return f'one of {", ".join(self.values)}'

  @property
  def bounds(self) -> tuple[float, float]:
    """The least and the largest choice, of numbers."""
    numbers = [float(x) for x in self.values]
    return min(numbers), max(numbers)


@dataclasses.dataclass(frozen=True)
class RangeSpace:
  """All numbers from `low` to `high`, both included."""

  low: float
  high: float
  log: bool = False  # whether it is drawn evenly in logarithms
  whole: bool = False

  def has(self, value: object) -> bool:
    """Return whether a value is a number of the range."""
    kinds = (int,) if self.whole else (int, float)
    return type(value) in kinds and self.low <= value <= self.high  # type: ignore[operator]

  def __str__(self) -> str:
    return f'a {"whole " if self.whole else ""}number from {self.low:g} to {self.high:g}'

  def at(self, u: float) -> float | int:
    """Return the number at position `u`, from 0 (low) to 1 (high)."""
    if self.log:
      value = math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
    else:
      value = self.low + u * (self.high - self.low)
    value = min(max(value, self.low), self.high)
    return round(value) if self.whole else value

  @property
  def bounds(self) -> tuple[float, float]:
    """The lowest and the highest value."""
    return self.low, self.high


Space = ChoiceSpace | RangeSpace
Spaces = dict[str, Space]


def describe(setting: Setting) -> str:
  """Return the values of a setting in words."""
  return ', '.join(f'{name} {format_value(value)}' for name, value in setting.items())


def at_ends(tried: Sequence[Setting]) -> list[str]:
  """Return the fields of the first, best setting with the least or largest of all values."""
  result = []
  for name, best in tried[0].items():
    values = {setting[name] for setting in tried}
    numbers = all(type(x) in (int, float) for x in values)
    if numbers and len(values) > 1 and best in (min(values), max(values)):
      result.append(name)
  return result


def format_value(value: Any) -> str:
  """Return a value as text, a number with a fraction by four digits."""
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def parse(texts: Sequence[str]) -> Spaces:
  """Parse the fields of --vary and their values.

  Raises:
    UsageError: if there is none, or one cannot be read.
  """
  if not texts:
    raise UsageError('a sweep needs --vary, as in --vary agent.learning-rate=1e-4,1e-3')
  spaces: Spaces = {}
  for text in texts:
    name, equals, values = text.partition('=')
    name = name.removeprefix('--').replace('_', '-')
    if not (name and equals and values):
      raise UsageError(f'--vary {text}: expected FIELD=VALUES, as agent.learning-rate=1e-4,1e-3')
    if name in spaces:
      raise UsageError(f'--vary {name} is given twice; give all its values at once')
    if name in ('agent', 'seed', 'seeds', 'run-dir', 'total-steps'):
      raise UsageError(f'--vary {name}: a sweep compares settings with the same one; give --{name}')
    spaces[name] = (
      _parse_range(text, values)
      if '..' in values and ',' not in values and '/' not in values
      else ChoiceSpace(_split(values))
    )
  return spaces


def with_fractions(spaces: Spaces, names: Container[str]) -> Spaces:
  """Return the spaces with ranges of all numbers for the fields `names`, as of 0..1.

  The texts of the two ends do not tell a whole number from a number that may have a fraction.
  """
  return {
    name: dataclasses.replace(space, whole=False)
    if isinstance(space, RangeSpace) and name in names
    else space
    for name, space in spaces.items()
  }


def _split(values: str) -> tuple[str, ...]:
  """Split a list of values. A part KEY=VALUE is an option of the environment before it."""
  return tuple(re.split(r',(?!\w+=)', values))


def _parse_range(text: str, values: str) -> RangeSpace:
  log = values.startswith('log:')
  low, _, high = values.removeprefix('log:').partition('..')
  try:
    a, b = float(low), float(high)
  except ValueError:
    raise UsageError(f'--vary {text}: expected two numbers, as 1e-4..1e-2') from None
  if not (math.isfinite(a) and math.isfinite(b) and a < b) or (log and a <= 0):
    more = ' of more than 0' if log else ''
    raise UsageError(f'--vary {text}: expected two numbers{more}, the lower one first')
  whole = all(whole_number(x).lstrip('-').isdigit() and '.' not in x for x in (low, high))
  return RangeSpace(a, b, log, whole)


def parse_value(text: str) -> Any:
  """Return a choice as a number or a boolean if it is one, else as text."""
  if text.lower() in ('true', 'false'):
    return text.lower() == 'true'
  text = whole_number(text)
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


def option_words(name: str, value: Any) -> list[str]:
  """Return a varied setting as words of a command line."""
  if isinstance(value, bool):
    return [f'--{name}' if value else negate(f'--{name}')]
  return [f'--{name}', *str(value).split()]


def sample_options(spaces: Spaces) -> list[list[str]]:
  """Return option lists of `podrace train` that cover each choice and both ends of numbers."""
  columns = [
    [option_words(name, parse_value(v)) for v in _extreme_values(s)] for name, s in spaces.items()
  ]
  count = max(map(len, columns))
  return [[x for column in columns for x in column[i % len(column)]] for i in range(count)]


def _extreme_values(space: Space) -> Sequence[str]:
  if isinstance(space, RangeSpace):
    return str(space.at(0.0)), str(space.at(1.0))
  numbers = [parse_value(v) for v in space.values]
  if not all(isinstance(x, int | float) for x in numbers):
    return space.values
  return min(space.values, key=parse_value), max(space.values, key=parse_value)


def make_grid(spaces: Spaces) -> list[Setting]:
  """Return all combinations of choices.

  Raises:
    UsageError: if a space is a range.
  """
  for name, space in spaces.items():
    if isinstance(space, RangeSpace):
      raise UsageError(
        f'--vary {name} is a range, of which there is no grid: name the values, or take --method '
        'random'
      )
  values = [
    [parse_value(v) for v in s.values] for s in spaces.values() if isinstance(s, ChoiceSpace)
  ]
  return [dict(zip(spaces, row, strict=True)) for row in itertools.product(*values)]


def draw_random(spaces: Spaces, trials: int, seed: int) -> list[Setting]:
  """Draw `trials` settings independently."""
  rng = np.random.default_rng(seed)

  def draw(space: Space) -> Any:
    if isinstance(space, RangeSpace):
      return space.at(float(rng.random()))
    return parse_value(space.values[rng.integers(len(space.values))])

  return [{name: draw(space) for name, space in spaces.items()} for _ in range(trials)]
