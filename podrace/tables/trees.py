"""Nested dicts, tuples, lists and named tuples of arrays, flattened and rebuilt. Imports no JAX.

A structure is a tuple (kind, names, children) that compares by value. The structure of a leaf is
`LEAF`. The kind of a named tuple is its type, or the text `named NAME` if it came from JSON. Its
type is then made only when a tree is built.
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


def flatten(tree: Any, into: list[Any]) -> tuple[Any, ...]:
  """Return the structure of a tree, and append its leaves in order to `into`.

  Raises:
    ValueError: If a dict has a key that is not a string.
  """
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


def match(structure: tuple[Any, ...], tree: Any, into: list[Any]) -> None:
  """Append the leaves of a tree to `into`, in the structure's order.

  A subtree that is None, or missing from a dict, appends None for each of its leaves.

  Raises:
    ValueError: If the tree has parts that the structure lacks, or a different nesting.
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
  """Return the number of leaves."""
  return 1 if structure[0] == 'leaf' else sum(size(child) for child in structure[2])


def build(structure: tuple[Any, ...], values: list[Any]) -> Any:
  """Build the tree of a structure from its leaves."""
  return _build(structure, iter(values))


def _build(structure: tuple[Any, ...], values: Any) -> Any:
  kind, names, children = structure
  if kind == 'leaf':
    return next(values)
  parts = [_build(child, values) for child in children]
  if kind == 'dict':
    return dict(zip(names, parts, strict=True))
  if kind == 'tuple' or kind == 'list':
    return tuple(parts) if kind == 'tuple' else parts
  return (named_type(kind, names) if isinstance(kind, str) else kind)(*parts)


@functools.lru_cache(256)
def named_type(label: str, fields: tuple[str, ...]) -> Any:
  """Return the type of a named tuple, of the last 256 that were made."""
  return namedtuple(label.removeprefix(NAMED), fields)


def names(structure: tuple[Any, ...], prefix: str = '') -> list[str]:
  """Return a name for each leaf, such as observation/image or 0/1."""
  kind, keys, children = structure
  if kind == 'leaf':
    return [prefix or 'step']
  keys = keys or range(len(children))
  join = f'{prefix}/' if prefix else ''
  return [x for k, c in zip(keys, children, strict=True) for x in names(c, f'{join}{k}')]


def to_json(structure: tuple[Any, ...]) -> list[Any]:
  """Convert a structure to JSON. A named tuple keeps its name and fields, but not its type."""
  kind, keys, children = structure
  label = kind if isinstance(kind, str) else f'{NAMED}{kind.__name__}'
  return [label, list(keys), [to_json(child) for child in children]]


def from_json(document: list[Any]) -> tuple[Any, ...]:
  """Convert JSON to a structure. Named tuples get new types with the same names and fields.

  Raises:
    ValueError: For a named tuple that Python cannot make.
  """
  label, keys, children = document
  if label == 'leaf':
    return LEAF
  if label.startswith(NAMED):
    _check_named(label.removeprefix(NAMED), keys)
  return (label, tuple(keys), tuple(from_json(child) for child in children))


def _check_named(name: str, fields: Sequence[str]) -> None:
  """Check a name and fields as `namedtuple` does. Making a type would take a hundred times as long.

  Raises:
    ValueError: If the name or the fields are not valid.
  """
  for word in (name, *fields):
    if not word.isidentifier() or keyword.iskeyword(word):
      raise ValueError(f'{word[:60]!r} is no name of a type or field')
  if len(set(fields)) < len(fields) or any(field.startswith('_') for field in fields):
    raise ValueError(f'fields of {name[:60]} that begin with an underscore, or are there twice')
