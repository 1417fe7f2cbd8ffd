"""What a sweep varies, and the settings that it tries. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.fields import whole_number

Setting = dict[str, Any]  # of each varied field, by its option without dashes


@dataclasses.dataclass(frozen=True)
class ChoiceSpace:
  """These values, as the command line has them."""

  values: tuple[str, ...]

  def has(self, value: object) -> bool:
    """Whether a value, as `value_of` reads it, is one of these."""
    return any(type(value) is type(x) and value == x for x in map(parse_value, self.values))

  def __str__(self) -> str:
    return f'one of {", ".join(self.values)}'


@dataclasses.dataclass(frozen=True)
class RangeSpace:
  """All numbers between two, both of them among these."""

  low: float
  high: float
  log: bool = False  # drawn evenly in logarithms
  whole: bool = False

  def has(self, value: object) -> bool:
    """Whether a value is a number of this range."""
    kinds = (int,) if self.whole else (int, float)
    return type(value) in kinds and self.low <= value <= self.high  # type: ignore[operator]

  def __str__(self) -> str:
    return f'a {"whole " if self.whole else ""}number from {self.low:g} to {self.high:g}'

  def at(self, u: float) -> float | int:
    """The number at `u`, from 0 (low) to 1 (high)."""
    if self.log:
      value = math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
    else:
      value = self.low + u * (self.high - self.low)
    value = min(max(value, self.low), self.high)
    return round(value) if self.whole else value


Space = ChoiceSpace | RangeSpace
Spaces = dict[str, Space]


def parse(texts: Sequence[str]) -> Spaces:
  """The fields of --vary and their values.

  Raises:
    UsageError: if there are none, or one can't be read.
  """
  if not texts:
    raise UsageError('a sweep needs --vary, as in --vary agent.learning-rate=1e-4,1e-3')
  found: Spaces = {}
  for text in texts:
    name, equals, values = text.partition('=')
    name = name.removeprefix('--').replace('_', '-')
    if not (name and equals and values):
      raise UsageError(f'--vary {text}: expected FIELD=VALUES, as agent.learning-rate=1e-4,1e-3')
    if name in found:
      raise UsageError(f'--vary {name} is given twice; give all its values at once')
    if name in ('seed', 'seeds', 'run-dir', 'total-steps'):
      raise UsageError(f'--vary {name}: a sweep compares settings with the same one; give --{name}')
    found[name] = (
      _parse_range(text, values) if '..' in values else ChoiceSpace(tuple(values.split(',')))
    )
  return found


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
  """A choice as a number, if it is one."""
  text = whole_number(text)
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


def sample_options(spaces: Spaces) -> list[list[str]]:
  """Options of `podrace train` that have each value of each field at least once, and of numbers the least and the most."""
  columns = [[[f'--{name}', *v.split()] for v in _extreme_values(s)] for name, s in spaces.items()]
  most = max(map(len, columns))
  return [[x for column in columns for x in column[i % len(column)]] for i in range(most)]


def _extreme_values(space: Space) -> Sequence[str]:
  if isinstance(space, RangeSpace):
    return str(space.at(0.0)), str(space.at(1.0))
  numbers = [parse_value(v) for v in space.values]
  if not all(isinstance(x, int | float) for x in numbers):
    return space.values
  return min(space.values, key=parse_value), max(space.values, key=parse_value)


def make_grid(spaces: Spaces) -> list[Setting]:
  """All combinations of choices.

  Raises:
    UsageError: if there is a range, which has no end of values.
  """
  for name, space in spaces.items():
    if isinstance(space, RangeSpace):
      raise UsageError(
        f'--vary {name} is a range, of which there is no grid: name the values, or take --method random'
      )
  values = [
    [parse_value(v) for v in s.values] for s in spaces.values() if isinstance(s, ChoiceSpace)
  ]
  return [dict(zip(spaces, row, strict=True)) for row in itertools.product(*values)]


def draw_random(spaces: Spaces, trials: int, seed: int) -> list[Setting]:
  """So many settings, drawn independently."""
  rng = np.random.default_rng(seed)

  def draw(space: Space) -> Any:
    if isinstance(space, RangeSpace):
      return space.at(float(rng.random()))
    return parse_value(space.values[rng.integers(len(space.values))])

  return [{name: draw(space) for name, space in spaces.items()} for _ in range(trials)]
