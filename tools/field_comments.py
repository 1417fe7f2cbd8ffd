"""An extension of griffe: comments behind fields are their documentation on the site.

podrace documents the fields of dataclasses and named tuples by comments. `podrace train --help` shows
them by `podrace.commands.option_table`. Here each class gets a table of its fields.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
  """Documents `x: int = 1  # comment`, and a line `# ^ comment` below a field."""

  def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
    """Add the table to each class with fields, once all classes are loaded."""
    tables = [(cls, fields(cls)) for cls in classes(pkg)]
    for cls, members in tables:
      rows = [row(field) for field in members.values()]
      if rows:
        about = cls.docstring.value if cls.docstring else ''
        text = '\n'.join([about, '', 'Attributes:', *rows])
        cls.docstring = griffe.Docstring(text, lineno=cls.lineno, parent=cls, parser='google')
        for name in members.keys() & cls.members.keys():
          cls.del_member(name)  # the table has it


def classes(module: griffe.Module) -> Iterator[griffe.Class]:
  """Yield all public classes of a package."""
  for name, member in module.members.items():
    if name.startswith('_'):
      continue
    if isinstance(member, griffe.Module):
      yield from classes(member)
    elif isinstance(member, griffe.Class):
      yield member


def fields(cls: griffe.Class) -> dict[str, griffe.Attribute]:
  """Return the fields of a dataclass or named tuple by name, fields of base classes first."""
  bases = [b for b in cls.mro() if isinstance(b, griffe.Class)]
  if not any('dataclass' in str(d.value) for d in cls.decorators):
    if 'NamedTuple' not in [str(b) for b in cls.bases]:
      return {}
    bases = []
  members: dict[str, griffe.Attribute] = {}
  for each in [*reversed(bases), cls]:
    for name, member in each.members.items():
      if not isinstance(member, griffe.Attribute) or name.startswith('_'):
        continue
      if member.annotation is None or 'property' in member.labels:
        continue
      if 'Suppress' not in str(member.annotation):
        members[name] = member
  return members


def row(field: griffe.Attribute) -> str:
  """Return the line of a field in a Google docstring."""
  path = field.filepath
  assert isinstance(path, Path)  # not a namespace of several folders
  text = comment(field.lines_collection[path], field.endlineno or 0)
  kind = str(field.annotation).removeprefix('Annotated[').partition(', tyro')[0]
  default = '' if field.value is None else f' Default: `{field.value}`'
  return f'    {field.name} ({kind}): {text}{"." if text and default else ""}{default}'


def comment(lines: list[str], end: int) -> str:
  """Return the comment on the statement that ends in line `end`, counted from 1."""
  following = [line.strip() for line in lines[end:]]
  if following and following[0].startswith('# ^ '):
    more = itertools.takewhile(lambda line: line.startswith('#   '), following[1:])
    return ' '.join(line[4:] for line in (following[0], *more))
  text = lines[end - 1].partition('  # ')[2]
  return re.sub(r'^type: ignore\S*( +# )?', '', text).strip()
