"""Names of other libraries for podrace's settings, for hints and for docs/migration.md.

The data is `foreign_names.toml`. Importing this does not import jax.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import tomllib
from typing import Any

WORD = re.compile(r'`-*([A-Za-z_][\w.]*)(?:=[\w.]*)?`')  # a name alone, perhaps with a value
SETTINGS_OF = {'system', 'arch'}  # Stoix's groups of settings, which people leave out


@functools.cache
def tables() -> dict[str, dict[str, Any]]:
  """Return the tables by name: `library`, and `rows` of their names and ours, in Markdown."""
  file = importlib.resources.files('podrace.settings') / 'foreign_names.toml'
  text = file.read_text(encoding='utf-8')
  return {table['name']: table for table in tomllib.loads(text)['table']}


def markdown(name: str) -> str:
  """Return a table for the documentation."""
  table = tables()[name]
  rows = [(table['library'], 'podrace'), ('---', '---'), *table['rows']]
  return '\n'.join(f'| {theirs} | {ours} |' for theirs, ours in rows)


def _normalize(name: str) -> str:
  head, dot, rest = name.strip('-').lower().replace('-', '_').partition('.')
  return rest if dot and head in SETTINGS_OF | {'agent'} else f'{head}{dot}{rest}'


@functools.cache
def _hints() -> dict[str, str]:
  hints: dict[str, str] = {}
  for table in tables().values():
    for theirs, ours in table['rows']:
      names = WORD.findall(theirs)
      parts = ours.split(', ')
      values = parts if len(parts) == len(names) else [ours] * len(names)
      for name, value in zip(names, values, strict=True):
        hints.setdefault(_normalize(name), value.replace('`', ''))
  return hints


def suggest(name: str) -> str:
  """Return podrace's name for another library's option, such as --ent_coef; '' if it is unknown."""
  return _hints().get(_normalize(name), '')
