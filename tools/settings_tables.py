"""A hook of MkDocs: expands a line `<!-- settings: NAMES -->` into tables of options.

NAMES is an agent (`ppo`), a group of the option table (`run`, `sebulba`, `discover`), options
(`--lag --max-lag`), or options of an agent (`ppo --agent.clip --agent.epochs`). The tables read the option table, `podrace/commands/options.json`, and the
defaults by kind of environment in `podrace/settings/defaults.py`. So no page repeats a default.

`<!-- metrics: AGENT -->` becomes the metrics of an agent and their meaning, of `podrace/agents/metrics.py`, and
`<!-- presets -->` the settings of all presets of `podrace/settings/presets.py`.
`<!-- names: TABLE -->` becomes a table of `podrace/settings/foreign_names.toml`, and `<!-- checks -->` the table of
`podrace/run/diagnostics.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from podrace.agents import AGENTS, metrics
from podrace.commands.option_table import Row, show, table
from podrace.run import diagnostics
from podrace.settings import defaults, foreign_names
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import option, words
from podrace.system.options import sentence

MARKER = re.compile(r'^<!-- settings: (.+) -->$', re.MULTILINE)
CHECKS = '<!-- checks -->'
OPTION = re.compile(r'--[a-z.-]+[a-z]')
NAMES = re.compile(r'^<!-- names: (.+) -->$', re.MULTILINE)
METRICS = re.compile(r'^<!-- metrics: (.+) -->$', re.MULTILINE)
PRESETS_MARKER = '<!-- presets -->'
COLUMNS = {
  'env': 'environment',
  'total_steps': 'steps',
  'num_envs': 'environments',
  'unroll_length': 'unroll',
}
SIZES = ('--num-envs', '--unroll-length')  # settings of a run that depend on the agent
KINDS = {'vector': 'vectors', 'grid': 'grids', 'pixels': 'pixels', 'continuous': 'continuous'}


def on_page_markdown(markdown: str, **_: Any) -> str:
  """Return the text of a page with its tables."""
  markdown = NAMES.sub(lambda match: foreign_names.markdown(match.group(1)), markdown)
  if CHECKS in markdown:
    messages = {check.name: OPTION.sub(r'`\g<0>`', check.message) for check in diagnostics.CHECKS}
    rows = [f'| `{name}` | {message} |' for name, message in messages.items()]
    markdown = markdown.replace(CHECKS, '\n'.join(['| sign | message |', '|---|---|', *rows]))
  markdown = METRICS.sub(lambda match: metrics_table(match.group(1)), markdown)
  markdown = markdown.replace(PRESETS_MARKER, presets_table())
  return MARKER.sub(lambda match: expand(match.group(1)), markdown)


def metrics_table(agent: str) -> str:
  """Return the table of an agent's metrics.

  Raises:
    ValueError: for an unknown agent.
  """
  if agent not in AGENTS:
    raise ValueError(f'<!-- metrics: {agent} -->: no agent of this name')
  rows = [f'| `{row.name}` | {row.meaning} |' for row in metrics.rows_of(agent)]
  return '\n'.join(
    ['| metric | meaning (a run logs the mean over its gradient steps) |', '|---|---|', *rows]
  )


def presets_table() -> str:
  """Return the table of the settings of all presets that differ from the defaults."""
  lines = [f'| preset | agent | {" | ".join(COLUMNS.values())} | other settings |']
  lines.append('|---' * (len(COLUMNS) + 3) + '|')
  usual = {f.name: f.default for f in dataclasses.fields(Config)}
  for name, preset in PRESETS.items():
    of_run = [shown(preset.settings.get(field, usual[field])) for field in COLUMNS]
    other = [words(path, x) for path, x in preset.paths.items() if path not in COLUMNS]
    cells = f'`{name}`', preset.agent, *of_run, ' '.join(f'`{" ".join(w)}`' for w in other)
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def shown(value: Any) -> str:
  """Return a setting as the table has it."""
  return f'{value:,}' if isinstance(value, int) else f'`{value}`'


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
    values = ', '.join(row.choices) or row.value
    cells = f'`{row.head}`', values, default_of(row, agent), sentence(row.help)
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
