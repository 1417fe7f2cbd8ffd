"""The table of options that are fields of dataclasses, options.json, and its generator.

Help, completion and `podrace list` read the table, since importing the dataclasses imports jax and
takes seconds. After a change of a field, run `python -m podrace.commands.option_table`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podrace import hooks
from podrace.agents import AGENTS
from podrace.fields import TEXTS, flag, negate
from podrace.system.files import UTF8, write_whole

PATH = Path(__file__).with_name('options.json')
CHOSEN_BY_AGENTS = {  # fields of parts that agents set themselves, so they are no options
  'Actor': ('deterministic',),
  'Critic': ('torso', 'critics', 'atoms'),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A field of a dataclass as an option."""

  group: str  # run, sebulba, agent, the part of an agent, discover, rule, value function
  name: str  # --agent.network.hidden
  kind: str  # its type, or its choices: none|gru|lstm
  default: str  # of the field's class, as help shows it; '' if it is empty
  help: str
  agents: tuple[str, ...] = ()  # the agents that have it; (): all
  defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # ^ by agent, where an agent has another default than the class of its part

  @property
  def names(self) -> tuple[str, ...]:
    """The options: of a boolean --x and --no-x."""
    return (self.name, negate(self.name)) if self.kind == 'bool' else (self.name,)

  @property
  def head(self) -> str:
    """The options in one text: --agent.[no-]shared."""
    if self.kind != 'bool':
      return self.name
    last = self.name.rpartition('.')[2].removeprefix('--')
    return f'{self.name.removesuffix(last)}[no-]{last}'

  @property
  def value(self) -> str:
    """The type of the value, or its choices; '' for a boolean, which takes none."""
    return '' if self.kind == 'bool' else self.kind

  @property
  def choices(self) -> tuple[str, ...]:
    """All values, if they have names."""
    return tuple(self.kind.split('|')) if re.fullmatch(r'[\w-]+(\|[\w-]+)+', self.kind) else ()


@dataclasses.dataclass(frozen=True)
class Table:
  """All fields as options, and a line about each agent."""

  agents: Mapping[str, str]
  rows: tuple[Row, ...]

  def of(self, *groups: str, agent: str | None = None) -> list[Row]:
    """Return the rows of groups, of one agent or of all."""
    rows = (r for r in self.rows if r.group in groups)
    return [r for r in rows if agent is None or not r.agents or agent in r.agents]

  def of_agent(self, agent: str | None = None) -> list[Row]:
    """Return the rows of an agent and its parts; None: of all agents."""
    rows = [r for r in self.rows if r.name.startswith('--agent.')]
    return [r for r in rows if agent is None or agent in r.agents]

  def defaults_of(self, agent: str) -> dict[str, str]:
    """Return the options of parts for which the agent has another default than the part's class."""
    return {r.name: r.defaults[agent] for r in self.of_agent(agent) if agent in r.defaults}


@functools.cache
def table() -> Table:
  """Return the recorded table."""
  record = json.loads(PATH.read_text(encoding=UTF8))
  rows = [Row(**{**row, 'agents': tuple(row.get('agents', ()))}) for row in record['rows']]
  return Table(record['agents'], tuple(rows))


def show(value: Any) -> str:
  """Return a value as help shows it."""
  if isinstance(value, bool):
    return 'on' if value else 'off'
  return ' '.join(map(str, value)) if isinstance(value, tuple | list) else str(value)


# --- reading dataclasses --------------------------------------------------------------------------


def rows_of(settings: Any, prefix: str, group: str) -> Iterator[Row]:
  """Yield a row for each field of a dataclass, and of the dataclasses among its fields."""
  comments = comments_of(type(settings))
  for field in dataclasses.fields(settings):
    value, name = getattr(settings, field.name), prefix + flag(field.name)
    if prefix == '--agent.' and field.name in hooks.BOUND:
      continue
    if 'Suppress' in str(field.type) or field.name in CHOSEN_BY_AGENTS.get(
      type(settings).__name__, ()
    ):
      continue
    if dataclasses.is_dataclass(value):
      yield from rows_of(value, f'{name}.', group)
    else:
      help = comments.get(field.name, '')
      yield Row(group, name, _kind(field), show(value), help)


def _kind(field: dataclasses.Field[Any]) -> str:
  """Return the type of a field as help shows it."""
  declared = field.type if isinstance(field.type, str) else getattr(field.type, '__name__', '')
  declared = re.sub(rf'\b({"|".join(TEXTS)})\b', 'str', declared)
  kind = declared.removeprefix('Annotated[').partition(', tyro')[0]
  if kind.startswith('Literal['):
    kind = '|'.join(str(v) for v in ast.literal_eval(f'({kind[8:-1]},)'))
  return kind


def comments_of(cls: type) -> dict[str, str]:
  """Return the comment of each field of a dataclass: behind it, or in a `# ^` line below it."""
  comments: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    if dataclasses.is_dataclass(base):
      with contextlib.suppress(OSError, TypeError, SyntaxError):  # without source
        comments |= dict(_comments_in(inspect.getsource(base)))
  return comments


def _comments_in(source: str) -> Iterator[tuple[str, str]]:
  source = inspect.cleandoc(f'\n{source}')
  lines, (node, *_) = source.splitlines(), ast.parse(source).body
  assert isinstance(node, ast.ClassDef)
  for field in node.body:
    if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
      continue
    end = field.end_lineno or field.lineno
    comment = lines[end - 1].partition('  # ')[2]
    below = [line.strip() for line in lines[end:]]
    if below and below[0].startswith('# ^ '):
      rest = itertools.takewhile(lambda line: line.startswith('# '), below[1:])
      comment = ' '.join([below[0][4:], *(line[2:].strip() for line in rest)])
    if comment:
      yield field.target.id, comment


# --- the generator --------------------------------------------------------------------------------


def text() -> str:
  """Return the table as options.json has it, a line for each option. Imports all agents."""
  agents = ',\n'.join(f'  {json.dumps(k)}: {json.dumps(v)}' for k, v in _abouts().items())
  rows = ',\n'.join(f'  {json.dumps(_plain(r))}' for r in (*_run_rows(), *_agent_rows()))
  return f'{{"agents": {{\n{agents}\n}}, "rows": [\n{rows}\n]}}\n'


def _abouts() -> dict[str, str]:
  docs = {n: importlib.import_module(module).__doc__ for n, (module, _) in AGENTS.items()}
  return {name: (doc or '').splitlines()[0] for name, doc in docs.items()}


def _plain(row: Row) -> dict[str, Any]:
  return {k: v for k, v in dataclasses.asdict(row).items() if v not in ((), {})}


def _run_rows() -> Iterator[Row]:
  """Yield the options of runs and of meta-training."""
  from podrace.settings.agents import default_agent
  from podrace.settings.config import Common, Config
  from podrace.settings.discovery import RULES, Discovery, rules_of

  common = {flag(f.name) for f in dataclasses.fields(Common)}
  for row in _own_rows(Config(agent=None), '--', 'sebulba'):
    if row.name != '--agent':
      yield dataclasses.replace(row, group='run') if row.name[2:] in common else row
  rules = {name: rules_of(default_agent(name)).Sizes() for name in RULES}
  discovery = Discovery(agent=None, rule=None)
  for row in _own_rows(discovery, '--', 'discover'):
    if row.name not in ('--agent', '--rule'):
      yield row
  yield from rows_of(discovery.value, '--value.', 'value function')
  for name, sizes in rules.items():
    for row in rows_of(sizes, '--rule.', 'rule'):
      yield dataclasses.replace(row, agents=(name,))


def _own_rows(settings: Any, prefix: str, group: str) -> Iterator[Row]:
  """Yield the rows of all fields that are no dataclasses."""
  parts = tuple(f'{prefix}{flag(name)}.' for name in _parts(settings))
  yield from (r for r in rows_of(settings, prefix, group) if not r.name.startswith(parts or '\n'))


def _parts(settings: Any) -> dict[str, Any]:
  values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
  return {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}


def _agent_rows() -> Iterator[Row]:
  """Yield the options of agents, and then the options of their parts."""
  from podrace.settings.agents import default_agent

  agents = {name: default_agent(name) for name in AGENTS}
  parts: dict[tuple[str, type], dict[str, Any]] = {}  # name and class of a part -> agent -> value
  for name, agent in agents.items():
    for row in _own_rows(agent, '--agent.', 'agent'):
      yield dataclasses.replace(row, agents=(name,))
    for part, value in _parts(agent).items():
      parts.setdefault((part, type(value)), {})[name] = value
  order = list(dict.fromkeys(part for part, _ in parts))
  for (part, cls), owners in sorted(parts.items(), key=lambda x: order.index(x[0][0])):
    values = {
      name: {r.name: r.default for r in rows_of(value, f'--agent.{part}.', part)}
      for name, value in owners.items()
    }
    for row in rows_of(cls(), f'--agent.{part}.', part):
      others = {n: v[row.name] for n, v in values.items() if v[row.name] != row.default}
      yield dataclasses.replace(row, agents=tuple(owners), defaults=others)


if __name__ == '__main__':
  write_whole(PATH, text())
