"""A hook of MkDocs: expands a line `<!-- settings: NAMES -->` into tables of options.

NAMES is an agent (`ppo`), a group of the option table (`run`, `sebulba`, `discover`), options
(`--lag --max-lag`), or options of an agent (`ppo --agent.clip --agent.epochs`). The tables read the option table, `podrace/commands/options.json`, and the
defaults by kind of environment in `podrace/settings/defaults.py`. So no page repeats a default.

`<!-- names: TABLE -->` becomes a table of `podrace/settings/foreign_names.toml`, and `<!-- checks -->` the table of
`podrace/run/diagnostics.py`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from podrace.agents import AGENTS
from podrace.commands.option_table import Row, show, table
from podrace.run import diagnostics
from podrace.settings import defaults, foreign_names
from podrace.settings.record import option

MARKER = re.compile(r'^<!-- settings: (.+) -->$', re.MULTILINE)
CHECKS = '<!-- checks -->'
OPTION = re.compile(r'--[a-z.-]+[a-z]')
NAMES = re.compile(r'^<!-- names: (.+) -->$', re.MULTILINE)
SIZES = ('--num-envs', '--unroll-length')  # settings of a run that depend on the agent
KINDS = {'vector': 'vectors', 'grid': 'grids', 'pixels': 'pixels', 'continuous': 'continuous'}


def on_page_markdown(markdown: str, **_: Any) -> str:
  """Return the text of a page with its tables."""
  markdown = NAMES.sub(lambda match: foreign_names.markdown(match.group(1)), markdown)
  if CHECKS in markdown:
    messages = {check.name: OPTION.sub(r'`\g<0>`', check.message) for check in diagnostics.CHECKS}
    rows = [f'| `{name}` | {message} |' for name, message in messages.items()]
    markdown = markdown.replace(CHECKS, '\n'.join(['| sign | message |', '|---|---|', *rows]))
  return MARKER.sub(lambda match: expand(match.group(1)), markdown)


def expand(names: str) -> str:
  """Return the tables for the names in a marker.

  Raises:
    ValueError: for an unknown name, or an option that differs between agents without an agent.
  """
  if names in AGENTS:
    return agent_tables(names)
  if '--' in names:
    agent, options = None, names.split()
    if options[0] in AGENTS:
      agent, *options = options
    return options_table((_row(name, agent) for name in options), agent)
  if not (group := table().of(names)):
    raise ValueError(f'<!-- settings: {names} -->: neither an agent, a group nor options')
  return options_table(group)


def _row(name: str, agent: str | None) -> Row:
  rows = [r for r in table().rows if r.name == name and (agent is None or agent in r.agents)]
  if len(rows) != 1:
    raise ValueError(f'{len(rows)} options of {agent or "all agents"} are named {name}, expected 1')
  return rows[0]


def agent_tables(agent: str) -> str:
  """Return a table of the agent's own options, and one for each of its parts."""
  by_group: dict[str, list[Row]] = {}
  for row in table().of_agent(agent):
    by_group.setdefault(row.group, []).append(row)
  by_group['agent'] += [row for row in table().of('run') if row.name in SIZES]
  tables = [options_table(by_group.pop('agent'), agent)]
  for part, rows in by_group.items():
    tables += [f'### Settings of the {part}', options_table(rows, agent)]
  return '\n\n'.join(tables)


def options_table(rows: Iterable[Row], agent: str | None = None) -> str:
  """Return a table in Markdown, with the defaults of an agent or of the classes."""
  lines = ['| option | values | default | meaning |', '|---|---|---|---|']
  for row in rows:
    values = ', '.join(row.choices) or row.kind
    cells = f'`{row.name}`', values, default_of(row, agent), row.help
    lines.append('| ' + ' | '.join(cell.replace('|', r'\|') for cell in cells) + ' |')
  return '\n'.join(lines)


def default_of(row: Row, agent: str | None = None) -> str:
  """Return the default of an option, and in brackets the kinds of environments with another."""
  plain = row.defaults.get(agent or '', row.default)
  by_kind = {
    kind: _values(entry).get(row.name, plain)
    for (name, kind), entry in defaults.TABLE.items()
    if name == agent
  }
  if not by_kind:
    return plain or 'none'
  ((usual, _),) = collections.Counter(by_kind.values()).most_common(1)
  differing = [f'{KINDS[k]} {v or "none"}' for k, v in by_kind.items() if v != usual]
  return (usual or 'none') + (f' ({", ".join(differing)})' if differing else '')


def _values(entry: defaults.Defaults) -> Mapping[str, str]:
  """Return the values of an entry by option."""
  return {option(path): show(value) for path, value in entry.paths.items()}
