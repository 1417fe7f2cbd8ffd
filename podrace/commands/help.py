"""The help of `podrace train`. It is read out of sources: to import them takes seconds."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podrace import defaults, own_code
from podrace.agents import AGENTS
from podrace.commands.options import Option, row
from podrace.config import agent_class, flag
from podrace.discovery.presets import PRESETS as DISCOVERIES
from podrace.fields import TEXTS
from podrace.hooks import BOUND
from podrace.presets import PRESETS

PACKAGE = Path(__file__).parents[1]


MOST_USED = (  # of the options of a run; the others come after them
  '--run-dir', '--total-steps', '--seed', '--seeds', '--num-envs', '--unroll-length', '--env', '--agent', '--architecture',
)  # fmt: skip
SERVING = (
  '--listen',
  '--connect-replay',
  '--keys',
  '--insecure',
  '--peer-timeout',
  '--announce',
)  # of Sebulba
ALL = '--help-all'


def discover_help(options: Iterable[Option], preset: str | None) -> str:
  """The help of `discover`, which takes `options` and the fields of Discovery, its rule and its value function."""
  path = PACKAGE / 'discovery'
  rows = {f[0]: row(*f) for f in fields_of(path / 'config.py', 'Discovery', '--')}
  rows |= {o.name: row(o.name, o.value, o.text) for o in options}
  for part in ('--rule', '--value'):  # their fields are below
    rows.pop(part)
  order = [*(n for n in MOST_USED if n in rows), *(n for n in rows if n not in MOST_USED)]
  lines = [
    'podrace discover [PRESET] [OPTIONS]: train a rule of learning; without arguments, LPG on Catch',
    '',
    f'presets: {", ".join(DISCOVERIES)}',
    *(_preset_rows(DISCOVERIES[preset].__name__, preset, path / 'presets.py') if preset else []),
    '',
    'options (a preset has its own defaults):',
    *(rows[n] for n in order),
  ]
  for name in ('disco', 'lpg'):
    lines += ['', f'the rule of {name}:']
    lines += [row(*f) for f in fields_of(PACKAGE / 'rules' / f'{name}.py', 'Sizes', '--rule.')]
  lines += ['', 'the value function of the meta-gradient:']
  lines += [row(*f) for f in fields_of(path / 'objective.py', 'ValueFunction', '--value.')]
  return '\n'.join(
    [*lines, '', 'podrace train --agent disco --help, or lpg, has the options of agents']
  )


def train_help(
  options: Iterable[Option], agent: str | None, preset: str | None, everything: bool = False
) -> str:
  """The help of `train`, which takes `options` and the fields of Config and of its agent.

  Of a preset or an agent it has what that takes, most used first; without both, the names of agents. `everything`
  has the options of all. An agent of the user's own is imported for its options.
  """
  lines = [
    'podrace train [PRESET] [OPTIONS]: train an agent; without arguments, IMPALA on Catch',
    '',
    textwrap.fill(
      f'presets: {", ".join(PRESETS)} (see `podrace list`)', 100, break_on_hyphens=False
    ),
    *(_preset_rows(PRESETS[preset].__name__, preset) if preset else []),
  ]
  found, sebulba = _of_preset(preset) if preset else ('', False)
  name = agent or found
  lines += _run_rows(options, everything or sebulba)
  if ':' in name:
    own_code.look_here([own_code.of_agent(name)])
    return '\n'.join([*lines, '', f'agent {name}:', *_own_rows(agent_class(name), '--agent.')])
  if name and not everything:
    lines += [*_agent_rows(name), *_part_rows(name)]
  elif everything:
    for each in AGENTS:
      lines += _agent_rows(each)
    return '\n'.join([*lines, *_part_rows(None), *_default_rows()])
  more = [f'agents: {", ".join(AGENTS)}, or MODULE:CLASS'] if not name else []
  if not name:
    more += ['podrace train PRESET --help, or --agent NAME --help, has the options of an agent']
  return '\n'.join([*lines, '', *more, f'podrace train {ALL} has every option'])


def _of_preset(preset: str) -> tuple[str, bool]:
  """The agent of a preset, and whether it runs under Sebulba, by its source: to make it would import jax."""
  tree = ast.parse((PACKAGE / 'presets.py').read_text(encoding='utf-8'))
  functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
  classes = {cls: name for name, (_, cls) in AGENTS.items()}
  agent, sebulba, names = '', False, [PRESETS[preset].__name__]
  while names:
    for node in ast.walk(functions[names.pop()]):
      if isinstance(node, ast.keyword) and node.arg == 'architecture':
        sebulba = sebulba or ast.literal_eval(node.value) == 'sebulba'
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        agent = agent or classes.get(node.func.id, '')
        names += [node.func.id] * (node.func.id in functions)
  return agent, sebulba


def _run_rows(options: Iterable[Option], sebulba: bool) -> list[str]:
  """The options of a run, most used first; those that only Sebulba reads are left out unless `sebulba`."""
  config = 'Config' if sebulba else 'Common'
  shown = [o for o in options if sebulba or o.name not in SERVING]
  rows = {o.name: row(o.name, o.value, o.text) for o in shown}
  rows |= {f[0]: row(*f) for f in fields_of(PACKAGE / 'config.py', config, '--')}
  rows['--agent'] = next(row(o.name, o.value, o.text) for o in shown if o.name == '--agent')
  order = [*MOST_USED, *(n for n in rows if n not in MOST_USED)]
  return [
    '',
    'options (an --env or --agent has these defaults, a preset its own):',
    *(rows[n] for n in order),
  ]


def _agent_rows(name: str) -> list[str]:
  module, cls = AGENTS[name]
  path = PACKAGE.parent / (module.replace('.', '/') + '.py')
  fields = fields_of(path, cls, '--agent.')
  rows = [row(*f) for f in fields if f[0].rpartition('.')[2] not in PARTS]
  return ['', f'agent {name}:', *rows, *(row(*f) for f in own_defaults(path, cls))]


def _part_rows(agent: str | None) -> list[str]:
  """The options of the parts of an agent; None: of all agents."""
  lines = []
  for name, kinds in PARTS.items():
    for cls, (file, agents) in kinds.items():
      if agent is not None and agent not in agents.replace(',', ' ').split():
        continue
      lines += ['', f'the {name} of {agents} (defaults that an agent has of its own are above):']
      rows = fields_of(PACKAGE / file, cls, f'--agent.{name}.')
      lines += [row(*f) for f in rows if f[0].rpartition('.')[2] not in FIXED.get(cls, ())]
  return lines


def _default_rows() -> list[str]:
  """The settings of podrace.defaults, by agent and kind of environment."""
  lines = [
    '',
    'defaults in the place of those above, where no preset has others: of an agent in a kind of environment,',
    'which is',
    *(f'  {kind}: {text}' for kind, text in defaults.KINDS.items()),
  ]
  for name, text in defaults.rows():
    indent = ' ' * 6
    options = textwrap.fill(
      text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    lines += [f'  {name}:', options]
  return lines


def _preset_rows(name: str, preset: str, path: Path = PACKAGE / 'presets.py') -> list[str]:
  """The settings of a preset, as its source has them: the function of this name."""
  source = path.read_text(encoding='utf-8')
  found = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
  function = found[name]
  shown = [n for n in function.body[1:] if not isinstance(n, ast.Import | ast.ImportFrom)]
  segments = (ast.get_source_segment(source, n, padded=True) or '' for n in shown)
  code = '\n'.join(map(textwrap.dedent, segments))
  lines = [x.partition('  # fmt')[0] for x in code.splitlines()]
  text = 'its settings; the defaults below are those of the rest, a --flag overrides both:'
  return ['', f'preset {preset}: {text}', *textwrap.indent('\n'.join(lines), '  ').splitlines()]


def _own_rows(cls: Any, prefix: str) -> list[str]:
  """The options of any dataclass, and of those that are the defaults of its fields."""
  found: dict[str, tuple[str, str, str]] = {}
  bases: list[Any] = [c for c in cls.__mro__ if dataclasses.is_dataclass(c)]
  for base in reversed(bases):
    with contextlib.suppress(KeyError, OSError, TypeError):  # it has no source
      file = Path(inspect.getfile(base))
      found |= {f[0]: f for f in fields_of(file, base.__qualname__, prefix)}
  rows, parts = [], []
  for field in dataclasses.fields(cls):
    name = prefix + flag(field.name)
    if field.name in BOUND:
      continue
    if dataclasses.is_dataclass(field.default):
      parts += _own_rows(type(field.default), f'{name}.')
    elif name in found or 'Suppress' not in str(field.type):
      rows.append(row(*found.get(name, (name, str(field.type), ''))))
  return rows + parts


PARTS = {  # fields of agents that have fields of their own -> class -> where, and whose
  'network': {
    'ActorCritic': ('networks/actor_critic.py', 'impala and ppo'),
    'QNetwork': ('networks/q_network.py', 'dqn and r2d2'),
    'LearnedModel': ('networks/planning.py', 'muzero and muesli'),
    'Predictor': ('networks/predictor.py', 'disco'),
    'PolicyPredictor': ('networks/policy_predictor.py', 'lpg'),
  },
  'policy': {'Policy': ('networks/lifetime.py', 'intrinsic')},
  'reward': {'LifetimeNetwork': ('networks/lifetime.py', 'intrinsic')},
  'value': {'LifetimeNetwork': ('networks/lifetime.py', 'intrinsic')},
  'actor': {'Actor': ('networks/continuous.py', 'sac and d4pg')},
  'critic': {'Critic': ('networks/continuous.py', 'sac and d4pg')},
  'buffer': {'Buffer': ('replay/buffer.py', 'dqn, r2d2, sac, d4pg and muzero')},
  'tuning': {'Tuning': ('agents/metagradient.py', 'impala and ppo, with --agent.self-tuning')},
}

FIXED = {  # fields with one value always
  'Actor': ('core', 'core-size'),
  'Critic': ('core', 'core-size', 'torso'),
}


def own_defaults(path: Path, cls: str) -> list[tuple[str, str, str]]:
  """The defaults of an agent's parts, as `fields_of`, where they differ from their classes'."""
  classes = {
    n.name: n
    for n in ast.parse(path.read_text(encoding='utf-8')).body
    if isinstance(n, ast.ClassDef)
  }
  return [
    (f'--agent.{node.target.id}.{flag(k.arg or "")}', '', f'(default {_shown(k.value)})')
    for node in classes[cls].body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    if node.target.id in PARTS and isinstance(node.value, ast.Call)
    for k in node.value.keywords
  ]


def _shown(default: Any) -> str:
  with contextlib.suppress(ValueError):
    value = ast.literal_eval(default)
    return ' '.join(map(str, value)) if isinstance(value, tuple) else str(value)
  return ast.unparse(default)  # an expression: it is shown as it is


def fields_of(path: Path, cls: str, prefix: str) -> list[tuple[str, str, str]]:
  """Flag, value and help of a dataclass' fields, from its source: the comment is the help."""
  source = path.read_text(encoding='utf-8')
  lines, body = source.splitlines(), ast.parse(source).body
  classes = {n.name: n for n in body if isinstance(n, ast.ClassDef)}
  files = dict.fromkeys(classes, path) | _imported_from(body)
  bases = [b.id for b in classes[cls].bases if isinstance(b, ast.Name) and b.id in files]
  found = {f[0]: f for base in bases for f in fields_of(files[base], base, prefix)}
  for node in classes[cls].body:
    if not isinstance(node, ast.AnnAssign):
      continue
    if any(word in ast.unparse(node.annotation) for word in ('Suppress', 'ClassVar')):
      continue
    assert isinstance(node.target, ast.Name) and node.end_lineno is not None
    comment = lines[node.end_lineno - 1].partition('  # ')[2]
    following = lines[node.end_lineno].strip() if node.end_lineno < len(lines) else ''
    if following.startswith('# ^ '):
      comment = following[4:]
    annotation = re.sub('|'.join(TEXTS), 'str', ast.unparse(node.annotation))
    kind = annotation.removeprefix('Annotated[').partition(', tyro')[0]
    if kind.startswith('Literal['):
      kind = '|'.join(str(v) for v in ast.literal_eval(f'({kind[8:-1]},)'))
    name = prefix + flag(node.target.id)
    if kind in files and node.target.id not in PARTS:  # it has fields of its own
      found |= {f[0]: f for f in fields_of(files[kind], kind, f'{name}.')}
      continue
    plain = node.value is not None and not isinstance(node.value, ast.Call)
    if plain and (shown := _shown(node.value)):  # else the comment explains it
      comment = f'{comment} (default {shown})'.strip()
    inherited = found.get(name, ('', '', ''))[2].partition('(default')[0].strip()
    if inherited and (not comment or comment.startswith('(default')):
      comment = f'{inherited} {comment}'.strip()
    found[name] = (name, kind, comment)
  return list(found.values())


def _imported_from(body: list[ast.stmt]) -> dict[str, Path]:
  """The files of ours that names in a module come from."""
  return {
    alias.name: PACKAGE.parent / (node.module.replace('.', '/') + '.py')
    for node in body
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith('podrace.')
    for alias in node.names
  }
