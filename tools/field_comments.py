"""An extension of griffe: what a comment behind a field says is its documentation on the site.

podrace documents the fields of dataclasses and named tuples so, and `podrace train --help` shows it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
  """Takes `x: int = 1  # what it is`, and a line `# ^ what it is` below."""

  def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
    """Gives an attribute of a class its comment, if it has no docstring."""
    if attr.docstring is None and isinstance(attr.parent, griffe.Class) and attr.endlineno:
      lines = attr.lines_collection[attr.filepath]
      text = comment(lines, attr.endlineno)
      if text or attr.parent.has_labels('dataclass'):  # every setting is shown
        attr.docstring = griffe.Docstring(text or ' ', parent=attr)


def comment(lines: list[str], end: int) -> str:
  """What is said of the statement that ends in line `end`, from 1."""
  following = lines[end].strip() if end < len(lines) else ''
  if following.startswith('# ^ '):
    return following[4:]
  text = lines[end - 1].partition('  # ')[2]
  return re.sub(r'^type: ignore\S*( +# )?', '', text).strip()
