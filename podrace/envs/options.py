"""Options of environments: from text to value and back, and the types that a function takes.

A value is a Python literal: `True`, `None`, `3`, `0.5`, `'text'`, `(1, 2)`, `[1, 2]`, `{'a': 1}`.
JSON's `true` and `false` are accepted too. Any other bare word is a text. A word that is nearly a
literal is refused. Importing this module imports neither jax nor a library.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import enum
import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

Value = Any  # None, bool, int, float or str; a tuple, list or dict of values

NEARLY = {  # words of other languages, and other spellings
  **dict.fromkeys(('true', 'yes', 'on'), 'True'),
  **dict.fromkeys(('false', 'no', 'off'), 'False'),
  **dict.fromkeys(('none', 'null', 'nil', 'undefined'), 'None'),
  **dict.fromkeys(('inf', '+inf', 'infinity', '+infinity'), '1e999'),
  **dict.fromkeys(('-inf', '-infinity'), '-1e999'),
  **dict.fromkeys(('nan', '+nan', '-nan'), ''),  # no option is that number
}
BRACKETS = {'(': ')', '[': ']', '{': '}'}
PREFIXED = re.compile(r"""[bruBRUfF]{1,2}(['"]).*\1""", re.DOTALL)
MINUS = '\u2212'  # as word processors write it
NUMBER = re.compile(r'[+-]?(0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?([eE][+-]?[0-9]+)?|[+-]?\.[0-9]+')


def split(text: str) -> list[str]:
  """Split at the commas that are in no quotes and in no brackets.

  Raises:
    ValueError: if a quote or a bracket is not closed.
  """
  parts: list[str] = []
  open_: list[str] = []  # closing brackets of the open ones
  start, quote, escaped = 0, '', False
  before = ''  # the last character of this part that is no space
  for i, c in enumerate(text):
    opens = open_ or before == '='  # within a bare word they are letters
    if escaped:
      escaped = False
    elif quote:
      escaped, quote = c == '\\', '' if c == quote else quote
    elif opens and c in '\'"':
      quote = c
    elif opens and c in BRACKETS:
      open_.append(BRACKETS[c])
    elif open_ and c == open_[-1]:
      open_.pop()
    elif c == ',' and not open_:
      parts.append(text[start:i])
      start, before = i + 1, ''
      continue
    if not c.isspace():
      before = c
  if quote or open_:
    raise ValueError(f'{quote or open_[-1]} is missing at the end of {text[start:]!r}')
  return [*parts, text[start:]]


def read(text: str) -> Value:
  """Return the value of an option's text.

  Raises:
    ValueError: if the text is ambiguous; the message has the spellings to choose from.
  """
  text = text.strip()
  if text in ('true', 'false', 'True', 'False', 'None'):
    return {'T': True, 'F': False, 'N': None}[text[0].upper()]
  if (meant := NEARLY.get(text.lower())) is not None:
    raise ValueError(_ambiguous(text, meant))
  if text[:1] in BRACKETS or text[:1] in '\'"':
    return _literal(text)
  if NUMBER.fullmatch(text):
    return _literal(text)
  if PREFIXED.fullmatch(text):
    raise ValueError(_ambiguous(text, ''))
  plain = text.replace(MINUS, '-')
  if _is_nearly_a_number(plain):
    raise ValueError(_ambiguous(text, re.sub(r'^([+-]?)[0_]+(?=[0-9])', r'\1', plain)))
  return text


def _ambiguous(text: str, meant: str) -> str:
  text = text if len(text) <= 40 else f'{text[:40]} ...'
  literal = f'write {meant} for the value of Python, or ' if meant and meant != text else ''
  return f'{text!r} is ambiguous: {literal}{text!r} in quotes for the text'


def _is_nearly_a_number(text: str) -> bool:
  """Return whether `int`, `float` or `complex` reads a text that is no decimal literal."""
  for kind in (float, lambda x: int(x, 0), complex):
    try:
      kind(text)
    except ValueError:
      continue
    return True
  return bool(re.fullmatch(r'[+-]?[0-9][0-9_]*', text))


def _literal(text: str) -> Value:
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
    raise ValueError(
      f'{text[:40]!r} is no literal of Python, in which texts are in quotes '
      f'({_named(text) or error})'
    ) from error
  if (key := _doubled(ast.parse(text.lstrip(' \t'), mode='eval'))) is not None:
    raise ValueError(f'the key {key!r} comes twice in {text[:40]!r}')
  if not _is_value(value):
    raise ValueError(
      f'{text[:40]!r} is a {type(value).__name__}; an option is made of None, True, False, '
      'numbers, texts, tuples, lists and dicts with texts as keys'
    )
  return value


def _named(text: str) -> str:
  """Return the remark on a name in a literal, '' if there is none."""
  with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
    for node in ast.walk(ast.parse(text, mode='eval')):
      if isinstance(node, ast.Name):
        known = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}
        return f'write {known.get(node.id.lower(), repr(node.id))} for {node.id}'
  return ''


def _doubled(literal: ast.AST) -> Any:
  """Return a key that comes twice in a dict of a literal, else None."""
  for node in ast.walk(literal):
    if isinstance(node, ast.Dict):
      keys = [ast.literal_eval(k) for k in node.keys if k is not None]
      for i, key in enumerate(keys):
        if key in keys[:i]:
          return key
  return None


def _is_value(x: Any) -> bool:
  if isinstance(x, dict):
    return all(isinstance(k, str) and _is_value(v) for k, v in x.items())
  if isinstance(x, tuple | list):
    return all(map(_is_value, x))
  return x is None or isinstance(x, bool | int | float | str)


def text_of(value: Value) -> str:
  """Return the text that `read` makes the same value of."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, str) and _is_bare(value):
    return value
  return _nested_text(value)


def _is_bare(text: str) -> bool:
  try:
    return read(text) == text and split(f'x={text}') == [f'x={text}']
  except ValueError:
    return False


def _nested_text(value: Value) -> str:
  if isinstance(value, dict):
    return '{' + ', '.join(f'{k!r}: {_nested_text(v)}' for k, v in value.items()) + '}'
  if isinstance(value, list):
    return '[' + ', '.join(map(_nested_text, value)) + ']'
  if isinstance(value, tuple):
    return '(' + ', '.join(map(_nested_text, value)) + (',)' if len(value) == 1 else ')')
  if isinstance(value, float) and math.isinf(value):
    return '1e999' if value > 0 else '-1e999'
  return repr(value)


# --- signatures -----------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool] | None:
  """Return the parameters that take an option by name, and whether any other name is taken too.

  Returns None where Python knows no signature. Annotations are types, or `Parameter.empty`.
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return None
  every = list(signature.parameters.values())
  by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  unnamed = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
  hides = all(p.kind in unnamed for p in every)  # as a __new__(cls, *args, **kwargs) does
  if hides and inspect.isclass(function) and function.__init__ is not object.__init__:
    every = list(inspect.signature(function.__init__).parameters.values())[1:]
  named = {
    p.name: p.replace(annotation=_resolve(function, p.annotation))
    for p in every
    if p.kind in by_name
  }
  return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in every)


def _resolve(function: Any, annotation: Any) -> Any:
  """Return the type of an annotation, of which the text is looked up where the function is."""
  if not isinstance(annotation, str):
    return annotation
  while isinstance(function, functools.partial):
    function = function.func
  code = inspect.getattr_static(function, '__init__') if inspect.isclass(function) else function
  code = code if inspect.isroutine(code) else type(code).__call__  # an object that is called
  code = inspect.unwrap(code)
  holder = types.SimpleNamespace(__annotations__={'x': annotation})
  try:
    return typing.get_type_hints(holder, _globals(code) or _globals(function))['x']
  except Exception:  # for example a name that only type checkers import
    return inspect.Parameter.empty


def _globals(x: Any) -> dict[str, Any]:
  """Return the names that a function sees, or else the names in the module of `x`."""
  module = sys.modules.get(getattr(x, '__module__', None) or '')
  return getattr(x, '__globals__', None) or vars(module or types.SimpleNamespace())


def takes(parameter: inspect.Parameter, value: Value) -> bool:
  """Return whether a parameter takes a value: by its annotation, else by its default's type."""
  if value is None and parameter.default is None:
    return True
  if parameter.annotation is not inspect.Parameter.empty:
    return _fits(value, parameter.annotation)
  default = parameter.default
  if isinstance(default, bool):
    return isinstance(value, bool)
  if isinstance(default, int | float):  # one without an annotation may be meant as either
    return _fits(value, float)
  if isinstance(default, tuple | list):
    return value is None or isinstance(value, tuple | list)
  return not isinstance(default, str) or _fits(value, str)


def _fits(value: Value, kind: Any) -> bool:
  """Return whether a value is of a type; True for types that no literal has."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, k) for k in arguments)
  if origin is typing.Literal:
    return any(type(value) is type(a) and value == a for a in arguments)
  if kind is None or kind is types.NoneType:
    return value is None
  if kind in (bool, int):
    return type(value) is kind
  if kind is float:
    return type(value) in (int, float)
  if kind is str:
    return value is None or isinstance(value, str)  # many makers have None for "none of them"
  if isinstance(kind, type) and issubclass(kind, enum.Enum):  # makers look it up, by either
    return any(value == m.name or (type(value) is type(m.value) and value == m.value) for m in kind)
  base = origin or kind
  if base in (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection):
    base = tuple | list
  elif base in (collections.abc.Mapping, collections.abc.MutableMapping):
    base = dict
  if base not in (tuple, list, dict, tuple | list):
    return True
  return value is None or (isinstance(value, base) and all(_elements_fit(value, arguments)))


def _elements_fit(value: Value, arguments: tuple[Any, ...]) -> Iterator[bool]:
  if not arguments:
    return
  if isinstance(value, dict):
    yield from (_fits(x, arguments[-1]) for x in value.values())
  elif isinstance(value, tuple) and len(arguments) > 1 and arguments[-1] is not Ellipsis:
    yield len(value) == len(arguments)
    yield from map(_fits, value, arguments)
  else:
    yield from (_fits(x, arguments[0]) for x in value)


def describe_parameter(parameter: inspect.Parameter) -> str:
  """Return a parameter as `name: type = default`, with long defaults left out."""
  text = str(parameter)
  return text if len(text) <= 80 else f'{text[:76]} ...'
