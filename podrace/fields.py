"""Settings of the wrong type, refused where they are made; importing this imports nothing else."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

KINDS: dict[str, tuple[type, str]] = {
  'float': (numbers.Real, 'a number'),
  'int': (numbers.Integral, 'a whole number'),
  'bool': (bool, 'True or False'),
  'str': (str, 'a text'),
}


def check_types(settings: Any) -> None:
  """Raises ValueError for the first field whose value is of another type than it declares.

  Fields of other types than float, int, bool and str are not looked at, nor are arrays.
  """
  for field in dataclasses.fields(settings):
    declared = field.type if isinstance(field.type, str) else getattr(field.type, '__name__', '')
    kind = KINDS.get(declared.removeprefix('Annotated[').partition(',')[0])
    value = getattr(settings, field.name)
    if kind is None or hasattr(value, 'dtype'):
      continue
    if not isinstance(value, kind[0]) or (isinstance(value, bool) and kind[0] is not bool):
      raise ValueError(
        f'{field.name.rstrip("_")} of {type(settings).__name__} must be {kind[1]}, not {value!r}'
      )
