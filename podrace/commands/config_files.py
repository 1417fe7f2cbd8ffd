"""Settings of a run in files: --config reads them, --save-config writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.commands.mistakes import options_of
from podrace.errors import UnreadableFile, UsageError
from podrace.run.directory import load_config, load_config_file
from podrace.settings.agents import default_agent
from podrace.settings.config import Config
from podrace.settings.record import option, to_json, words
from podrace.settings.user_code import CLASS
from podrace.system.files import write_json, write_whole
from podrace.system.files.reading import parse_toml, read_bytes

BYTES = 2**20  # largest file
HEAD = '# Settings for `podrace train --config FILE`. Options on the command line change them.\n'


def read_run(path: Path, allowed: Iterable[str]) -> Config | None:
  """Return the settings of another run; None if `path` is a file of options.

  Args:
    path: a run directory, its config.json, or another .json file of --save-config.
    allowed: modules that the record may name.

  Raises:
    UsageError: if there is no such run, or its record names other modules.
  """
  if not is_run(path):
    return None
  return load_config(path, allowed) if path.is_dir() else load_config_file(path, allowed)


def is_run(path: Path) -> bool:
  """Return whether `path` is the directory or the record of a run, not a file of options."""
  return path.suffix == '.json' or path.is_dir()


def read_options(path: Path) -> list[str]:
  """Return the arguments that a TOML file stands for: a preset, if it names one, and options.

  Raises:
    UsageError: if the file cannot be read.
  """
  try:
    settings = parse_toml(read_bytes(path, BYTES, follow=True))
  except FileNotFoundError:
    raise UsageError(f'--config {path} does not exist') from None
  except (UnreadableFile, ValueError) as e:
    raise UsageError(
      f'--config {path} is no TOML, and no config.json of a run: {e}; --save-config writes one'
    ) from e
  for name in ('config', 'save_config', 'save-config'):
    if name in settings:
      raise UsageError(f'--config {path} has {name}, which only the command line takes: remove it')
  preset = settings.pop('preset', None)
  agent = settings.get('agent')
  if isinstance(agent, dict) and 'name' in agent:
    settings['agent'] = {k: v for k, v in agent.items() if k != 'name'}
    settings = {'agent.name': agent['name'], **settings}
  arguments = [] if preset is None else [str(preset)]
  for name, value in _leaves(settings):
    arguments += ['--agent', str(value)] if name == 'agent.name' else words(name, value)
  return arguments


def _leaves(settings: dict[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield the path and the value of each setting."""
  for name, value in settings.items():
    if isinstance(value, dict):
      yield from _leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def write(path: Path, config: Config) -> None:
  """Write all settings to a file, as TOML or, by its suffix, as the config.json of a run.

  Raises:
    UsageError: if the file exists, or TOML cannot name a class of the settings.
  """
  if path.exists():
    raise UsageError(f'--save-config {path} exists already: name a new file')
  record = to_json(config, whole=True)
  if path.suffix == '.json':
    write_json(path, record)
    return
  del record['version']
  usual = to_json(Config(agent=default_agent(record['agent']['name'])), whole=True)
  plain = _plain(record, usual, {'--agent.name', *(name for name, _ in options_of(config))}, path)
  write_whole(path, HEAD + '\n'.join(_table('', plain)) + '\n')


def _plain(
  record: dict[str, Any], usual: dict[str, Any], options: set[str], path: Path, prefix: str = ''
) -> dict[str, Any]:
  """Return the settings of a record that are options.

  Raises:
    UsageError: if the record names a class that its agent does not have by default.
  """
  plain: dict[str, Any] = {}
  for name, value in record.items():
    known = usual.get(name)
    if isinstance(value, dict):
      inner = known if isinstance(known, dict) else {}
      plain[name] = _plain(value, inner, options, path, f'{prefix}{name}.')
    elif name in (CLASS, 'repr'):
      if value != known:
        raise UsageError(f'--save-config {path}: TOML has no place for {value}: name a .json file')
    elif option(f'{prefix}{name}') in options:
      plain[name] = value
  return plain


def _table(prefix: str, record: dict[str, Any]) -> Iterator[str]:
  """Yield the lines of a table and of the tables within."""
  for name, value in record.items():
    if not isinstance(value, dict):
      yield f'{name} = {_text(value)}'
  for name, value in record.items():
    if isinstance(value, dict):
      yield f'\n[{prefix}{name}]'
      yield from _table(f'{prefix}{name}.', value)


def _text(value: Any) -> str:
  """Return a value as TOML has it. It has no null, so None is a string."""
  if isinstance(value, list):
    return f'[{", ".join(map(_text, value))}]'
  if isinstance(value, float):
    return repr(value)  # also inf and nan
  text = json.dumps('None' if value is None else value, ensure_ascii=False)
  return text.replace('\x7f', '\\u007f')
