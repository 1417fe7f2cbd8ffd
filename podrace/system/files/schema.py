"""Schemas of JSON objects, with the kind and the range of each member, and of a run's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

LARGEST = 1e100  # magnitude of a number in JSON, so that sums and squares stay finite
NEWEST, BEST = 'newest', 'best'  # ways to name a checkpoint, besides its step
STEPS = 2**63 - 1  # largest count
JSON_KINDS: dict[str, tuple[type, ...]] = {
  'a text': (str,),
  'a whole number': (int,),
  'a number': (int, float),
  'a list': (list,),
  'an object': (dict,),
  'true or false': (bool,),
}


@dataclasses.dataclass(frozen=True)
class Member:
  """The declaration of a member of a JSON object.

  Attributes:
    kind: a key of JSON_KINDS.
    low: the least number.
    high: the largest number.
    needed: it must be there.
    null: it may be null.
    each: the declaration of each element of a list.
    members: the declarations of an object's own members.
  """

  kind: str
  low: float = -LARGEST
  high: float = LARGEST
  needed: bool = False
  null: bool = False
  each: Member | None = None
  members: Mapping[str, Member] | None = None

  def difference(self, value: Any) -> str:
    """Return the expected kind or range if `value` is different, else ''."""
    if value is None and self.null:
      return ''
    if not isinstance(value, JSON_KINDS[self.kind]) or (
      isinstance(value, bool) and self.kind != 'true or false'
    ):
      return self.kind
    if isinstance(value, int | float) and not self.low <= value <= self.high:  # NaN is not
      return f'{self.kind} from {self.low:g} to {self.high:g}'
    if self.each is not None and isinstance(value, list):
      for element in value:
        if wrong := self.each.difference(element):
          return f'{self.kind}, each element {wrong}'
    if self.members is not None:
      try:
        check_members(value, self.members)
      except ValueError as e:
        return f'{self.kind} with its members, and it {e}'
    return ''


COUNT = Member('a whole number', 0, STEPS)
POSITIVE = Member('a whole number', 1, STEPS)
NUMBER = Member('a number', null=True)
TEXT = Member('a text')


def check_members(value: Any, schema: Mapping[str, Member]) -> None:
  """Check the declared members of an object. Undeclared members are ignored.

  Raises:
    ValueError: with the reason, but without the member's value, which may be long.
  """
  if not isinstance(value, dict):
    raise ValueError('is no object')
  for name, member in schema.items():
    if name not in value:
      if member.needed:
        raise ValueError(f'has no {name}')
    elif wrong := member.difference(value[name]):
      kind = type(value[name]).__name__
      shown = 'out of range' if wrong.startswith(f'{member.kind} from') else f'of type {kind}'
      raise ValueError(f'has a {name} {shown}, expected {wrong}')


def needed(member: Member) -> Member:
  """Return the declaration with the member required."""
  return dataclasses.replace(member, needed=True)


def is_step(name: str) -> bool:
  """Return whether a file's name is a number of steps, of which `int` takes more forms."""
  return name.isascii() and name.isdigit() and int(name) <= STEPS


def is_checkpoint(name: str) -> bool:
  """Return whether a text names a checkpoint: newest, best, or a step such as 1_000."""
  return name in (NEWEST, BEST) or is_step(name.replace('_', ''))


def is_number(x: Any) -> bool:
  """Return whether a JSON value is a number of bounded size, for means and plots."""
  return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST


# --- the files of a run directory ----------------------------------------------------------------

_RATE = Member('a number', 0, LARGEST, null=True)
_EACH = Member('a list', each=NUMBER)
DIAGNOSIS = {'name': needed(TEXT), 'step': needed(COUNT), 'message': needed(TEXT)}
DIAGNOSES = Member('a list', each=Member('an object', members=DIAGNOSIS))
SUMMARY = {
  'step': COUNT,
  'episode_return': NUMBER,
  'episode_return_by_seed': _EACH,
  'steps_per_s': _RATE,
  'compile_s': NUMBER,
  'ended': TEXT,
  'diagnostics': DIAGNOSES,
  'diverged': Member('a list', each=COUNT),
}
LINE = {
  'step': needed(COUNT),
  'wall_s': NUMBER,
  'steps_per_s': _RATE,
  'episode_return': NUMBER,
  'episode_return_mean': NUMBER,
  'episode_length': NUMBER,
  'episodes': _RATE,
  'gradient_steps': _RATE,
  'env_restarts': _RATE,
  'dropped_steps': _RATE,
  'episode_return_by_seed': _EACH,
  'episodes_by_seed': Member('a list', each=_RATE),
}  # of metrics.jsonl and eval.jsonl
