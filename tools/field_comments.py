"""An extension of griffe: comments behind fields are their documentation on the site.

podrace documents the fields of dataclasses and named tuples so, and `podrace train --help` shows them.
A class gets a table of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
  """Takes `x: int = 1  # what it is`, and a line `# ^ what it is` below."""

  def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
    """Adds the table to each class with fields, once all classes are known."""
    tables = [(cls, fields(cls)) for cls in classes(pkg)]
    for cls, found in tables:
      rows = [row(a) for a in found.values()]
      if rows:
        about = cls.docstring.value if cls.docstring else ''
        text = '\n'.join([about, '', 'Attributes:', *rows])
        cls.docstring = griffe.Docstring(text, lineno=cls.lineno, parent=cls, parser='google')
        for name in found.keys() & cls.members.keys():
          cls.del_member(name)  # the table has it


def classes(module: griffe.Module) -> Iterator[griffe.Class]:
  """All public classes of a package."""
  for name, member in module.members.items():
    if name.startswith('_'):
      continue
    if isinstance(member, griffe.Module):
      yield from classes(member)
    elif isinstance(member, griffe.Class):
      yield member


def fields(cls: griffe.Class) -> dict[str, griffe.Attribute]:
  """The fields of a dataclass or named tuple, those of its bases first."""
  bases = [b for b in cls.mro() if isinstance(b, griffe.Class)]
  if not any('dataclass' in str(d.value) for d in cls.decorators):
    if 'NamedTuple' not in [str(b) for b in cls.bases]:
      return {}
    bases = []
  found: dict[str, griffe.Attribute] = {}
  for each in [*reversed(bases), cls]:
    for name, member in each.members.items():
      if not isinstance(member, griffe.Attribute) or name.startswith('_'):
        continue
      if member.annotation is None or 'property' in member.labels:
        continue
      if 'Suppress' not in str(member.annotation):
        found[name] = member
  return found


def row(field: griffe.Attribute) -> str:
  """Its line in a Google docstring."""
  path = field.filepath
  assert isinstance(path, Path)  # not a namespace of several folders
  text = comment(field.lines_collection[path], field.endlineno or 0)
  kind = str(field.annotation).removeprefix('Annotated[').partition(', tyro')[0]
  default = '' if field.value is None else f' Default: `{field.value}`'
  return f'    {field.name} ({kind}): {text}{"." if text and default else ""}{default}'


def comment(lines: list[str], end: int) -> str:
  """What is said of the statement that ends in line `end`, from 1."""
  following = lines[end].strip() if end < len(lines) else ''
  if following.startswith('# ^ '):
    return following[4:]
  text = lines[end - 1].partition('  # ')[2]
  return re.sub(r'^type: ignore\S*( +# )?', '', text).strip()
