"""Settings read out of sources, in which dataclasses have their defaults and presets their calls.

To import them takes seconds, as they import jax.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.fields import TEXTS, flag

PACKAGE = Path(__file__).parents[1]

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

FIXED = {  # fields that are no options: an agent chooses them
  'Actor': ('core', 'core-size', 'deterministic'),
  'Critic': ('core', 'core-size', 'torso', 'critics', 'atoms'),
}
NO_OPTIONS = {f'--agent.{cls.lower()}.{name}' for cls, names in FIXED.items() for name in names}


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a dataclass: the fields that it sets."""

  cls: str
  fields: Mapping[str, Any]  # Calls where they are dataclasses

  def replace(self, **changes: Any) -> Call:
    """Returns it with these fields, as `dataclasses.replace`."""
    return Call(self.cls, {**self.fields, **changes})

  def set(self, path: str, value: Any) -> Call:
    """Returns it with one field changed, such as network.hidden."""
    name, _, inner = path.partition('.')
    if inner:
      value = self.fields.get(name, Call('', {})).set(inner, value)
    return self.replace(**{name: value})

  def flags(self, prefix: str = '--') -> Iterator[tuple[str, str]]:
    """Yields the option of each field that is set, and its value as help shows it."""
    for name, value in self.fields.items():
      if isinstance(value, Call):
        yield from value.flags(f'{prefix}{flag(name)}.')
      else:
        yield prefix + flag(name), shown(value)


def call_of(path: Path, function: str) -> Call:
  """The dataclass that a function of a file without arguments returns."""
  functions = {
    n.name: n
    for n in ast.parse(path.read_text(encoding='utf-8')).body
    if isinstance(n, ast.FunctionDef)
  }

  def returned(name: str) -> Any:
    scope: dict[str, Any] = {}
    for node in functions[name].body:
      if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        scope[node.targets[0].id] = value(node.value, scope)
      if isinstance(node, ast.Return) and node.value is not None:
        return value(node.value, scope)
    raise AssertionError(f'{name} returns nothing')

  def value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
      return scope[node.id]
    if isinstance(node, ast.Attribute):
      return value(node.value, scope).fields[node.attr]
    if not isinstance(node, ast.Call):
      return ast.literal_eval(node)
    changes = {k.arg: value(k.value, scope) for k in node.keywords if k.arg}
    if isinstance(node.func, ast.Attribute):  # dataclasses.replace
      return value(node.args[0], scope).replace(**changes)
    assert isinstance(node.func, ast.Name)
    if node.func.id in functions:
      return returned(node.func.id)
    places = dict(zip(_order(node.func.id) if node.args else (), node.args, strict=False))
    return Call(node.func.id, {n: value(x, scope) for n, x in places.items()} | changes)

  found = returned(function)
  assert isinstance(found, Call)
  return found


def agent_call(name: str) -> Call:
  """One of our agents with its defaults: the fields that are dataclasses, where its class sets fields of them."""
  module, cls = AGENTS[name]
  body = ast.parse(_file(module).read_text(encoding='utf-8')).body
  (node,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == cls)
  parts = {
    n.target.id: Call(
      ast.unparse(n.value.func),
      {k.arg: ast.literal_eval(k.value) for k in n.value.keywords if k.arg},
    )
    for n in node.body
    if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    if n.target.id in PARTS and isinstance(n.value, ast.Call)
  }
  return Call(cls, parts)


def _file(module: str) -> Path:
  return PACKAGE.parent / (module.replace('.', '/') + '.py')


def _order(cls: str) -> list[str]:
  """The names of the fields of a class that presets call with places."""
  files = {c: _file(module) for module, c in AGENTS.values()}
  files |= {c: PACKAGE / file for kinds in PARTS.values() for c, (file, _) in kinds.items()}
  files['ValueFunction'] = PACKAGE / 'architectures/discovery/objective.py'
  body = ast.parse(files[cls].read_text(encoding='utf-8')).body
  (node,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == cls)
  assert not node.bases, f'{cls} has fields of other classes'
  return [
    n.target.id
    for n in node.body
    if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
  ]


def shown(value: Any) -> str:
  """A value as an option takes it."""
  return ' '.join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _shown_node(default: ast.expr) -> str:
  with contextlib.suppress(ValueError):
    return shown(ast.literal_eval(default))
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
    plain = None if isinstance(node.value, ast.Call) else node.value
    if plain is not None and (text := _shown_node(plain)):  # else the comment explains it
      comment = f'{comment} (default {text})'.strip()
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
