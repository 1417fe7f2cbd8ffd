"""Names of environments: parsing, options and suggestions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from podrace.envs import options as values
from podrace.envs.libraries import LIBRARIES
from podrace.envs.options import Value
from podrace.errors import UnknownName

SHOWN: dict[str, Value] = {'state': False}  # an option of all environments in JAX


def parse(name: str) -> tuple[str, str, dict[str, Value]]:
  """Split `LIB:NAME,key=value,...` into library, name and options, which are Python literals.

  Raises:
    UnknownName: if the name has another form, or the text of a value is ambiguous.
  """
  try:
    head, *pairs = values.split(name)
  except ValueError as error:
    raise UnknownName(f'{error}, in environment {name!r}') from error
  key, colon, env = head.partition(':')
  if not (key and colon and env):
    raise UnknownName(
      f'an environment is named LIB:NAME[,key=value...], not {name!r}{suggest_names(head)}'
    )
  options: dict[str, Value] = {}
  for pair in pairs:
    option, equals, text = (x.strip() for x in pair.partition('='))
    if not (option and equals and text):
      hint = '; a path cannot contain a comma' if key == 'c' else ''
      raise UnknownName(f'an option is key=value, not {pair!r}, in environment {name!r}{hint}')
    if option in options:
      raise UnknownName(f'option {option!r} comes twice in environment {name!r}')
    try:
      options[option] = values.read(text)
    except ValueError as error:
      raise UnknownName(f'option {option} of {key}:{env}: {error}') from error
  return key, env, options


VERSIONED = re.compile(r'(?P<ale>ALE/)?(?P<name>[A-Za-z]\w*)-v\d+')  # as Gymnasium names its own


def suggest_names(name: str) -> str:
  """Return a hint for a name without its library: similar names with one, or ''."""
  hints = [f'{key}:{n}' for key, lib in LIBRARIES.items() for n in lib.names if _alike(name, n)]
  if VERSIONED.fullmatch(name):
    hints += [atari(name) or f'gymnasium:{name}']
  elif not hints and name.islower() and name.isidentifier():
    hints = [f'ale:{name} if it is a game of Atari']
  return f'; did you mean {" or ".join(hints)}?' if hints else ''


def _alike(came: str, known: str) -> bool:
  return came.lower() in (known.lower(), known.lower().rpartition('-')[0])


def atari(name: str) -> str | None:
  """Return `ale:pong` for Gymnasium's names of it, such as ALE/Pong-v5 and PongNoFrameskip-v4."""
  versioned = VERSIONED.fullmatch(name)
  if not versioned or not (versioned['ale'] or 'NoFrameskip' in name):
    return None
  words = re.findall('[A-Z][a-z0-9]*', versioned['name'].replace('NoFrameskip', ''))
  return f'ale:{"_".join(words).lower()}'


def full_name(
  key: str, env: str, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> str:
  """Return the canonical name of an environment, without options that have their defaults."""
  texts = [
    f'{k}={values.text_of(v)}'
    for k, v in sorted(options.items())
    if k not in defaults or defaults[k] != v
  ]
  return ','.join([f'{key}:{env}', *texts])


def at_least(name: str, values: Mapping[str, Any], **least: int) -> None:
  """Raise UnknownName for an option that is less than its least value."""
  for key, bound in least.items():
    if not values[key] >= bound:
      raise UnknownName(f'{name}: {key} must be at least {bound}, not {values[key]}')


def options_error(name: str, options: Mapping[str, Value], error: Exception) -> UnknownName:
  """Return the error for options that a library refuses."""
  texts = ','.join(f'{k}={values.text_of(v)}' for k, v in options.items())
  return UnknownName(f'{name} cannot be made with {texts}: {type(error).__name__}: {error}')


def check_options(env: str, function: Callable[..., Any], options: Mapping[str, Value]) -> None:
  """Raise UnknownName for options that a function does not take by name, or not of their type."""
  if (signature := values.parameters(function)) is None:
    return
  named, others = signature
  takes = ', '.join(map(values.describe_parameter, named.values())) or 'no options'
  for option, value in options.items():
    if option in named and not values.takes(named[option], value):
      expected = values.describe_parameter(named[option])
      raise _not_of_type(env, option, value, expected, values.takes(named[option], 'x'))
    if option not in named and not others:
      raise UnknownName(f'{env} has no option {option!r}{nearest(option, named)}; it takes {takes}')


def _not_of_type(env: str, option: str, value: Value, expected: str, is_text: bool) -> UnknownName:
  hint = f'; for the text write {option}={str(value)!r}' if is_text else ''
  return UnknownName(
    f'option {option}={values.text_of(value)} of {env} is of type {type(value).__name__}, expected '
    f'{expected}{hint}'
  )


def read_options(
  env: str, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Any]:
  """Return `defaults` updated with `options` of the same types; an int may stand for a float.

  Raises:
    UnknownName: if an option is unknown, of another type, or an int that 32 bits do not hold.
  """
  takes = ', '.join(f'{k}={values.text_of(v)}' for k, v in sorted(defaults.items())) or 'no options'
  result: dict[str, Any] = dict(defaults)
  for option, value in options.items():
    if option not in defaults:
      raise UnknownName(
        f'{env} has no option {option!r}{nearest(option, defaults)}; it takes {takes}'
      )
    kind = type(defaults[option])
    if kind is float and type(value) is int and abs(value) < 2**1023:  # beyond, no float is near
      value = float(value)
    if type(value) is not kind:
      raise _not_of_type(env, option, value, f'{kind.__name__} ({takes})', kind is str)
    if kind is int and abs(value) >= 2**31:
      raise UnknownName(f'option {option}={value} of {env} is not within 32 bits')
    result[option] = value
  return result


def nearest(name: str, known: Iterable[str]) -> str:
  """Return a hint with the known names nearest to `name`, or ''."""
  by_lower = {k.lower(): k for k in known}
  near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
  return f' (nearest: {", ".join(by_lower[n] for n in near)})' if near else ''
