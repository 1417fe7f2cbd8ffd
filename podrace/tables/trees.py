"""Nested dicts, tuples, lists and named tuples of arrays: to flat lists and back. Without JAX.

A structure is a tuple (kind, names, children) that compares by value; a leaf's is `LEAF`. The kind of a named tuple is its
type, or the text `named NAME` where it came as JSON: its type is made only if a tree is built.
"""

from __future__ import annotations

import functools
import keyword
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

LEAF: tuple[Any, ...] = ('leaf', (), ())
SEQUENCE = (tuple, list)
NAMED = 'named '  # before the name of a named tuple, in JSON


def structure_of(tree: Any) -> tuple[Any, ...]:
  """The nesting of a tree."""
  return flatten(tree, [])


def flatten(tree: Any, into: list[Any]) -> tuple[Any, ...]:
  """The nesting of a tree, whose leaves are appended in their order."""
  if isinstance(tree, dict):
    children = []
    for name, x in tree.items():
      if not isinstance(name, str):
        raise ValueError(f'names must be strings, not {list(tree)}')
      children.append(flatten(x, into))
    return ('dict', tuple(tree), tuple(children))
  if isinstance(tree, SEQUENCE):
    parts = tuple([flatten(x, into) for x in tree])
    fields = getattr(tree, '_fields', None)
    return (type(tree), fields, parts) if fields else (type(tree).__name__, (), parts)
  into.append(tree)
  return LEAF


def leaves(tree: Any) -> list[Any]:
  """All leaves, in the structure's order."""
  found: list[Any] = []
  flatten(tree, found)
  return found


def match(structure: tuple[Any, ...], tree: Any, into: list[Any]) -> None:
  """Appends the leaves of a tree in the structure's order; of what is None or lacks in a dict, Nones.

  Raises:
    ValueError: if the tree has what the structure lacks, or is nested otherwise.
  """
  kind, names, children = structure
  if tree is None:
    into.extend([None] * size(structure))
  elif kind == 'leaf':
    into.append(tree)
  elif kind == 'dict':
    if not isinstance(tree, dict) or not (tuple(tree) == names or tree.keys() <= set(names)):
      raise ValueError(f'expected a dict of {list(names)}, got {_brief(tree)}')
    for name, child in zip(names, children, strict=True):
      x = tree.get(name)
      if child is LEAF:
        into.append(x)
      else:
        match(child, x, into)
  else:
    if not isinstance(tree, tuple | list) or len(tree) != len(children):
      raise ValueError(f'expected {len(children)} parts {list(names)}, got {_brief(tree)}')
    for child, x in zip(children, tree, strict=True):
      match(child, x, into)


def _brief(tree: Any) -> str:
  return f'a dict of {list(tree)}' if isinstance(tree, dict) else repr(type(tree).__name__)


def size(structure: tuple[Any, ...]) -> int:
  """How many leaves there are."""
  return 1 if structure[0] == 'leaf' else sum(size(child) for child in structure[2])


def build(structure: tuple[Any, ...], values: list[Any]) -> Any:
  """The tree of this structure with these leaves."""
  rest = iter(values)
  return _build(structure, rest)


def _build(structure: tuple[Any, ...], values: Any) -> Any:
  kind, names, children = structure
  if kind == 'leaf':
    return next(values)
  parts = [_build(child, values) for child in children]
  if kind == 'dict':
    return dict(zip(names, parts, strict=True))
  if kind == 'tuple' or kind == 'list':
    return tuple(parts) if kind == 'tuple' else parts
  return (_named(kind, names) if isinstance(kind, str) else kind)(*parts)


@functools.lru_cache(256)
def _named(label: str, fields: tuple[str, ...]) -> Any:
  return namedtuple(label.removeprefix(NAMED), fields)


def names(structure: tuple[Any, ...], prefix: str = '') -> list[str]:
  """A name for each leaf, such as observation/image or 0/1."""
  kind, keys, children = structure
  if kind == 'leaf':
    return [prefix or 'step']
  keys = keys or range(len(children))
  join = f'{prefix}/' if prefix else ''
  return [x for k, c in zip(keys, children, strict=True) for x in names(c, f'{join}{k}')]


def to_json(structure: tuple[Any, ...]) -> list[Any]:
  """A structure as JSON; a named tuple's type is left behind, its name and fields are kept."""
  kind, keys, children = structure
  label = kind if isinstance(kind, str) else f'{NAMED}{kind.__name__}'
  return [label, list(keys), [to_json(child) for child in children]]


def from_json(document: list[Any]) -> tuple[Any, ...]:
  """The structure again; named tuples are of new types with the same names and fields.

  Raises:
    ValueError: for a named tuple that Python cannot make.
  """
  label, keys, children = document
  if label == 'leaf':
    return LEAF
  if label.startswith(NAMED):
    _check_named(label.removeprefix(NAMED), keys)
  return (label, tuple(keys), tuple(from_json(child) for child in children))


def _check_named(name: str, fields: Sequence[str]) -> None:
  """Refuses what `namedtuple` would refuse; to make a type takes a hundred times as long."""
  for word in (name, *fields):
    if not word.isidentifier() or keyword.iskeyword(word):
      raise ValueError(f'{word[:60]!r} is no name of a type or field')
  if len(set(fields)) < len(fields) or any(field.startswith('_') for field in fields):
    raise ValueError(f'fields of {name[:60]} that begin with an underscore, or are there twice')
