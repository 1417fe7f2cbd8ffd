"""The record of a configuration in config.json: writing, reading and comparing."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import json
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from podrace import hooks
from podrace.errors import UsageError, unknown
from podrace.fields import flag, item_types, mismatch, negate
from podrace.settings import user_code
from podrace.settings.agents import agent_class, agent_name
from podrace.settings.config import Basics
from podrace.settings.user_code import CLASS, KIND, KINDS, TRAIN, UNMADE

VERSION = 1  # of config.json


def to_json(config: Basics, whole: bool = False) -> dict[str, Any]:
  """Return the exact record of a config.

  Args:
    config: the settings of a run.
    whole: include the values that a record leaves out, see `with_unrecorded`.
  """
  record = _plain(config, whole=whole)
  agent = {k: v for k, v in record['agent'].items() if k != CLASS}
  record['agent'] = {'name': agent_name(config.agent), **agent}
  kind = next(name for name, (_, cls) in KINDS.items() if cls == type(config).__name__)
  return {'version': VERSION, **({} if kind == TRAIN else {KIND: kind}), **record}


def _plain(value: Any, declared: Any = None, whole: bool = False) -> Any:
  """Return `value` as JSON; `declared`: the type of its field, None if that tells the class."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    cls = type(value)
    ours = cls.__module__.startswith('podrace.')
    known = ours and hooks.lacks(value) and (declared is None or _dataclass_in(declared) is cls)
    class_path = {} if known else {CLASS: f'{cls.__module__}:{cls.__qualname__}'}
    unrecorded = {} if whole else getattr(value, 'UNRECORDED', {})
    fields = [
      f
      for f in dataclasses.fields(value)
      if _is_recorded(f)
      and (f.name not in unrecorded or getattr(value, f.name) != unrecorded[f.name])
    ]
    types = {f.name: Any if f.type == 'Any' else None for f in fields} if ours else _hints(cls)
    return class_path | {
      f.name: _plain(getattr(value, f.name), types.get(f.name, Any), whole) for f in fields
    }
  if isinstance(value, tuple | list):
    each = [None if declared is None else x or Any for x in item_types(declared, len(value))]
    return [_plain(v, x, whole) for v, x in zip(value, each, strict=True)]
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if getattr(value, 'shape', None) == ():  # a number of NumPy or JAX
    return value.item()
  # It can be compared, but not made again. A new process has the same name and another address.
  name = getattr(value, '__qualname__', '')
  text = f'{value.__module__}:{name}' if name else re.sub(r' at 0x[0-9a-f]+', '', repr(value))
  return {UNMADE: text}


def _hints(cls: type) -> dict[str, Any]:
  """Return the types of a class's fields; {} if its module lacks a name in one of them."""
  with contextlib.suppress(NameError):
    return typing.get_type_hints(cls, include_extras=True)
  return {}


def _dataclass_in(declared: Any) -> Any:
  """Return the only dataclass that a type declares, as in `X | None`; None if there is none."""
  if isinstance(declared, type):
    return declared if dataclasses.is_dataclass(declared) else None
  classes = [x for x in map(_dataclass_in, typing.get_args(declared)) if x is not None]
  return classes[0] if len(classes) == 1 else None


def _is_recorded(field: dataclasses.Field[Any]) -> bool:
  return field.name not in hooks.BOUND


def from_json(record: dict[str, Any]) -> Any:
  """Return the config that `to_json` recorded. Imports the modules that it names, see `check_code`.

  Raises:
    UsageError: if the record has another version, other fields than the classes, or a value that
      its class refuses.
  """
  version = record.get('version') if isinstance(record, dict) else None
  if version != VERSION:
    raise UsageError(f'config.json has version {version}, expected {VERSION}')
  record = user_code.update_paths(record)
  try:
    agent = dict(_typed('agent', record['agent'], dict, 'an object'))
    agent = _make(_class_named(agent.pop('name')), agent)
    module, name = KINDS[record.get(KIND, TRAIN)]
    settings = {k: v for k, v in record.items() if k not in ('version', KIND)}
    return _make(getattr(importlib.import_module(module), name), settings | {'agent': agent})
  except UsageError:
    raise
  except (KeyError, TypeError, AttributeError, OverflowError, NameError) as e:
    raise UsageError(f'config.json is not the record of a run: {e!r}') from e
  except ValueError as e:  # of a class that refuses a value
    raise UsageError(f'config.json: {e}') from e


def check_recorded(config: Basics) -> None:
  """Raise UsageError if config.json cannot hold a config, so `eval` and a resumption would fail."""
  try:
    from_json(to_json(config))
  except UsageError as e:
    reason = str(e).removeprefix('config.json: ')
    raise UsageError(f'the run could not be evaluated or resumed by a command: {reason}') from e


def check_code(record: dict[str, Any], allowed: Iterable[str]) -> None:
  """Raise UsageError if a record names modules that are neither podrace's nor allowed."""
  if refused := user_code.refused_modules(record, allowed):
    names = ', '.join(f'{module} ({setting})' for module, setting in refused.items())
    raise UsageError(
      f"config.json names code that is not podrace's own: {names}. It would run with all your "
      f'rights. If you trust it, give {user_code.options(refused)}'
    )


def complete(record: dict[str, Any], allowed: Iterable[str] = ()) -> dict[str, Any]:
  """Return a record with the defaults of fields that are newer than the record."""
  try:
    check_code(record, allowed)
    return to_json(from_json(record))
  except UsageError:  # it cannot be made again
    return record


def with_unrecorded(settings: Any, record: dict[str, Any]) -> Any:
  """Return `settings` with the old behaviour of each field that is newer than `record`.

  A run continues with the network that it started with, so a record without the field decides.
  """
  values = {k: v for k, v in getattr(settings, 'UNRECORDED', {}).items() if k not in record}
  for f in dataclasses.fields(settings):
    value, part = getattr(settings, f.name), record.get(f.name)
    if dataclasses.is_dataclass(value) and isinstance(part, dict):
      changed = with_unrecorded(value, part)
      values |= {} if changed is value else {f.name: changed}
  return dataclasses.replace(settings, **values) if values else settings


def unrecorded_options(config: Basics, record: dict[str, Any]) -> list[str]:
  """Return the options by which a command without the record gets `with_unrecorded` of a config."""
  was, now = (to_json(c, whole=True) for c in (config, with_unrecorded(config, record)))
  return [word for path, _, value in changes(was, now) for word in words(path, value)]


def _make(cls: Any, record: dict[str, Any]) -> Any:
  """Return the dataclass that a record describes."""
  if record.keys() == {UNMADE}:
    raise UsageError(
      f'{record[UNMADE]} was made in Python and is no dataclass: config.json cannot make it again; '
      'make it the default of its field, with a name in a module, or train and evaluate from Python'
    )
  record = dict(record)
  if CLASS in record:
    cls = _class_named(record.pop(CLASS), cls)
  hints = _hints(cls)
  fields = {f.name: f for f in dataclasses.fields(cls) if _is_recorded(f)}
  for name in record.keys() - fields.keys():
    raise unknown(f'field of {cls.__name__}', name, fields)
  values = dict(getattr(cls, 'UNRECORDED', {}))  # a record leaves them out
  for name, value in record.items():
    declared = hints.get(name, Any)
    if (wrong := mismatch(value, declared)) and cls.__module__.startswith('podrace.'):
      raise UsageError(f'config.json: {name} of {cls.__name__} is {value!r:.200}, expected {wrong}')
    if fields[name].init and not _is_default(fields[name], value):
      values[name] = _value(value, declared)
  return cls(**values)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
  """Return whether a record's value, which cannot be made again, is the default of its field.

  A lambda or an object without its own equality may have the text of another one.
  """
  texts = value if isinstance(value, list) else [value]
  unmade = any(isinstance(x, dict) and x.keys() == {UNMADE} for x in texts)
  if not unmade or any(nameless_functions(value, field.name)):
    return False
  default = field.default
  if field.default_factory is not dataclasses.MISSING:
    default = field.default_factory()
  items = default if isinstance(default, tuple | list) else [default]
  return all(map(_has_exact_text, items)) and _plain(default) == value


def _has_exact_text(value: Any) -> bool:
  """Return whether `_plain` describes a value completely."""
  if value is None or isinstance(value, bool | int | float | str | enum.Enum | PurePath):
    return True
  if isinstance(value, dict | set | frozenset | bytes):
    return all(map(_has_exact_text, [*value, *getattr(value, 'values', list)()]))
  return bool(getattr(value, '__qualname__', ''))


def _value(value: Any, declared: Any) -> Any:
  """Return a value of a record: JSON's objects as dataclasses, its lists as tuples."""
  if isinstance(value, dict):
    return _make(_dataclass_in(declared) or declared, value)
  if isinstance(value, list):
    types = item_types(declared, len(value))
    return tuple(_value(x, t or Any) for x, t in zip(value, types, strict=True))
  return value


def _typed(name: str, value: Any, kind: type, wanted: str) -> Any:
  """Return a value of a record; raise UsageError if it has another type."""
  if not isinstance(value, kind):
    raise UsageError(f'config.json: {name} is {value!r:.200}, expected {wanted}')
  return value


def _class_named(name: Any, declared: Any = Any) -> Any:
  """Return the class that a record names, for a field of a type `declared`.

  Raises:
    UsageError: if it is no dataclass, or a class of podrace that is no agent and not `declared`.
  """
  cls = agent_class(_typed('a class', name, str, 'a text, MODULE:CLASS'))
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise UsageError(f'config.json: {name} is no dataclass')
  if cls.__module__.startswith('podrace.') and hooks.lacks(cls) and not _permits(declared, cls):
    raise UsageError(f'config.json: {name} is no {getattr(declared, "__name__", declared)}')
  return cls


def _permits(declared: Any, cls: type) -> bool:
  """Return whether a field of this type may hold an object of a class."""
  if declared is Any or getattr(declared, '_is_protocol', False):
    return True
  if isinstance(declared, type):
    return issubclass(cls, declared)
  return any(_permits(x, cls) for x in typing.get_args(declared))


class Change(NamedTuple):
  """A setting that differs between two records, by its path; None for a missing value."""

  path: str
  old: Any
  new: Any

  def __str__(self) -> str:
    return f'{self.path}: {json.dumps(self.old)} -> {json.dumps(self.new)}'


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = '') -> Iterator[Change]:
  """Yield each setting in which two records differ."""
  for name in [*old, *(n for n in new if n not in old)]:
    a, b = old.get(name), new.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
      yield from changes(a, b, f'{prefix}{name}.')
    elif a != b:
      yield Change(f'{prefix}{name}', a, b)


def nameless_functions(record: Any, path: str = '') -> Iterator[str]:
  """Yield the paths of lambdas and inner functions in a record, all of which have equal names."""
  if isinstance(record, list):
    for item in record:
      yield from nameless_functions(item, path)
  elif isinstance(record, dict):
    if any(part in str(record.get(UNMADE, '')) for part in ('<lambda>', '<locals>')):
      yield path
    for name, value in record.items():
      yield from nameless_functions(value, f'{path}.{name}' if path else name)


def words(path: str, value: Any) -> list[str]:
  """Return a setting as words of a command line: ['--seed', '3'], or ['--agent.no-shared']."""
  if isinstance(value, bool):
    return [option(path) if value else negate(option(path))]
  return [option(path), *_flat(value)]


def _flat(value: Any) -> list[str]:
  """Return the texts of a value: of all items of a list, also of nested ones."""
  if isinstance(value, list | tuple):
    return [text for item in value for text in _flat(item)]
  return [str(value)]


def option(path: str) -> str:
  """Return the option for a path in a record: agent.lambda_ is --agent.lambda."""
  return '--' + '.'.join(map(flag, path.split('.')))


def argument(value: Any) -> str:
  """Return a record's value as an option takes it."""
  return ' '.join(map(argument, value)) if isinstance(value, list) else str(value)
