"""Run directories: their configuration, summary, metrics and lock."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from podrace.errors import UnreadableFile, UsageError
from podrace.settings import user_code
from podrace.settings.agents import agent_name
from podrace.settings.config import Basics, Config
from podrace.settings.record import (
  Change,
  changes,
  check_code,
  complete,
  from_json,
  to_json,
  with_unrecorded,
)
from podrace.settings.user_code import KIND, update_paths
from podrace.system.files import NO_LOCKS, check_folder, path_error
from podrace.system.files.reading import open_regular, parse_json, read_json, read_object
from podrace.system.files.schema import (
  COUNT,
  LINE,
  POSITIVE,
  SUMMARY,
  TEXT,
  Member,
  check_members,
  is_step,
  needed,
)
from podrace.system.locks import is_locked, lock

TAIL = 65_536  # bytes at the end of metrics.jsonl in which a finished episode is looked for
LARGEST_TAIL = 2**25  # bytes in which a whole line is looked for
RECORD = {
  'env': needed(TEXT),
  'agent': Member('an object', needed=True),
  'total_steps': needed(POSITIVE),
  'num_envs': POSITIVE,
  'unroll_length': POSITIVE,
  'architecture': TEXT,
  KIND: TEXT,
}  # of config.json
DISCOVER_RECORD = {
  'widths': Member('a list', needed=True),
  'agents': needed(POSITIVE),
  'agent_updates': needed(COUNT),
}

# With other values a run's state is another's.
NEVER = {
  'architecture', 'num_envs', 'unroll_length', 'init_from', 'init_checkpoint', 'init_member',
}  # fmt: skip


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], bool]]:
  """Hold the lock of a run directory, so that no second run begins there.

  Yields:
    A function that returns whether the directory was neither removed, moved nor replaced.

  Raises:
    UsageError: if another run holds the lock, or if the directory cannot be written to.
    RunError: if the disk fails or is full.
  """
  try:
    file = lock(run_dir)
  except BlockingIOError:
    raise UsageError(f'{run_dir} is in use by another run that is still going') from None
  except OSError as e:
    raise path_error(f'--run-dir {run_dir} cannot be written to: {e.strerror}', e) from e
  with file:
    check_folder(run_dir, '--run-dir')
    yield functools.partial(is_locked, run_dir.absolute(), file)


def differences_of(config: Basics, run_dir: Path) -> list[Change]:
  """Return the settings in which a run directory's record differs from a configuration."""
  old = read_record(run_dir)
  return [] if old is None else list(changes(completed_record(old, config), to_json(config)))


def changes_of(config: Basics, run_dir: Path) -> list[Change]:
  """Return the settings of a run that a configuration changes.

  Raises:
    UsageError: if there are checkpoints, and a setting differs that cannot change in a run.
  """
  changed = differences_of(config, run_dir)
  if saved_steps(run_dir) and not NEVER.isdisjoint(change.path for change in changed):
    raise UsageError(
      f'{run_dir} holds another run, which this one cannot be:\n  '
      + '\n  '.join(map(str, changed))
      + '\ngive another --run-dir'
    )
  return changed


def read_summary(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
  """Return the content of summary.json; None if it is missing, or damaged and to be rewritten."""
  try:
    summary = read_json(path)
  except UnreadableFile as e:
    warn(f'damaged: {e}; it will be written again')
    return None
  if summary is None:
    return None
  needed = {'step', 'episode_return', 'steps_per_s'}
  try:
    check_members(summary, SUMMARY)
  except ValueError as e:
    raise _wrong_summary(path, str(e)) from e
  if lacking := needed - set(summary):
    raise _wrong_summary(path, f'lacks {", ".join(sorted(lacking))}')
  return summary


def _wrong_summary(path: Path, problem: str) -> UsageError:
  return UsageError(
    f'{path} is not the summary of a run: it {problem}; remove it, and the run writes it again'
  )


def completed_record(record: dict[str, Any], config: Basics) -> dict[str, Any]:
  """Return a run directory's record with defaults for later fields.

  The record may name the modules of a user that `config` names.
  """
  return complete(record, user_code.named_modules(to_json(config)))


def continued(config: Any, run_dir: Path) -> Any:
  """Return the config with which a run goes on: fields that its record lacks are as it began."""
  record = read_record(run_dir)
  return config if record is None else with_unrecorded(config, record)


def load_config(run_dir: Path, allow_code: Iterable[str] = ()) -> Config:
  """Return the config that a run directory of `podrace train` records.

  Args:
    run_dir: the run directory.
    allow_code: modules that the record may name, besides podrace's own. Loading runs them.

  Raises:
    UsageError: if there is no record, or if it names other modules. Nothing is imported then.
  """
  if is_policy(run_dir):
    raise not_a_run(run_dir)
  return load_config_file(run_dir / 'config.json', allow_code)


def load_config_file(file: Path, allow_code: Iterable[str] = ()) -> Config:
  """Return the config that a file records, as `load_config` does."""
  config, run_dir = _load(file, allow_code), file.parent
  if not isinstance(config, Config):
    rule = shlex.quote(str(run_dir / 'rule.npz'))
    raise UsageError(
      f'{run_dir} holds a rule that `podrace discover` trained, and no agent: train one by it, as '
      f'in podrace train --agent {agent_name(config.agent)} --agent.rule {rule}'
    )
  return config


def load_any(run_dir: Path, allow_code: Iterable[str] = ()) -> Basics:
  """Return the config of a run directory of any command, as `load_config` does."""
  if is_policy(run_dir):
    raise not_a_run(run_dir)
  return _load(run_dir / 'config.json', allow_code)


def is_policy(path: Path | str) -> bool:
  """Return whether a directory is an exported policy, which has a config.json as runs have."""
  return os.path.lexists(f'{path}/policy.json') and not os.path.lexists(f'{path}/checkpoints')


def not_a_run(path: Path) -> UsageError:
  """Return the error for a path that is no run directory."""
  if is_policy(path):
    return UsageError(f'{path} is not a run directory: it is an exported policy')
  if not os.path.lexists(path):
    return UsageError(f'{path} is not a run directory: it does not exist')
  if path.is_dir() and any(path.glob('*/config.json')):
    command = f'podrace runs {shlex.quote(str(path))}'
    return UsageError(f'{path} is not a run directory, but has some in it: {command}')
  return UsageError(f'{path} is not a run directory: it has no config.json')


def _load(file: Path, allow_code: Iterable[str]) -> Basics:
  record = _read_record_file(file)
  if record is None and file.name == 'config.json':
    raise not_a_run(file.parent)
  if record is None:
    raise UsageError(f'{file} does not exist')
  check_code(record, allow_code)
  try:
    config: Basics = from_json(record)
  except UsageError as e:
    text = str(e)
    reason = text.removeprefix('config.json')
    raise UsageError(f'{file}{reason}' if reason != text else f'{file}: {text}') from e
  return config


def saved_steps(path: Path) -> list[int]:
  """Return the steps of a run's checkpoints."""
  with contextlib.suppress(OSError):
    return [int(name) for name in os.listdir(path / 'checkpoints') if is_step(name)]
  return []


def read_record(path: Path) -> dict[str, Any] | None:
  """Return the record in config.json with today's class paths, None if there is none.

  Raises:
    UnreadableFile: if the file is not the record of a run.
  """
  return _read_record_file(path / 'config.json')


def _read_record_file(file: Path) -> dict[str, Any] | None:
  record = read_object(file, RECORD)
  if record is None:
    return None
  try:
    check_members(record, DISCOVER_RECORD if record.get(KIND) == 'discover' else {})
    check_members(record, {} if KIND in record else {'architecture': needed(TEXT)})
    check_members(record['agent'], {'name': needed(TEXT)})
  except ValueError as e:
    raise UnreadableFile(file, f'is not the record of a run: it {e}') from e
  return update_paths(record)


def last_line(path: Path) -> tuple[dict[str, Any], float]:
  """Return the last line of a metrics.jsonl and its time of writing.

  If no episode ended in that line, its return is that of the newest line with one.

  Raises:
    UnreadableFile: if the file is not regular or cannot be read.
  """
  last: dict[str, Any] = {}
  try:
    with open_regular(path) as file:
      end, size = file.seek(0, os.SEEK_END), TAIL
      lines = _lines_at_end(file, end, size)
      while len(lines) < 2 and size < min(end, LARGEST_TAIL):  # a line has numbers of each seed
        lines = _lines_at_end(file, end, size := 8 * size)
      written = os.fstat(file.fileno()).st_mtime
  except FileNotFoundError:
    return last, 0.0
  except OSError as e:
    raise UnreadableFile(path, f'cannot be read: {e.strerror}') from e
  for text in reversed(lines):
    with contextlib.suppress(ValueError):
      line = parse_json(text, finite=True)
      check_members(line, LINE)
      last = last or line
      if line.get('episode_return') is not None:
        return last | {'episode_return': line['episode_return']}, written
  return last, written


def _lines_at_end(file: IO[bytes], end: int, size: int) -> list[bytes]:
  """Return the lines in the last `size` bytes of a file, of which the first may be cut."""
  file.seek(max(0, end - size))
  *lines, _ = file.read(size).split(b'\n')
  return lines


def is_running(path: Path) -> bool | None:
  """Return whether a process holds the run's lock, None if the file system has no locks.

  `podrace launch` holds the lock of the run's logs, also between two starts of a learner.

  Raises:
    UnreadableFile: if a lock is no regular file.
  """
  states = [has_lock(path), has_lock(path / 'logs')]
  return True if True in states else None if None in states else False


def has_lock(path: Path) -> bool | None:
  """Return whether a process holds a directory's lock, None if the file system has no locks."""
  try:
    with open_regular(path / 'lock') as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except BlockingIOError:
    return True
  except OSError as e:
    if e.errno in NO_LOCKS:
      return None
    raise UnreadableFile(path / 'lock', f'cannot be locked: {e.strerror}') from e
  return False


def check_directory(path: Path, option: str = '--run-dir') -> None:
  """Check that a directory can hold a run. It need not exist.

  Raises:
    UsageError: if it cannot be made, cannot be written to, or is an exported policy.
  """
  lacks = f'{option} {path} cannot be a directory'
  there = path
  while not os.path.lexists(there) and there != there.parent:
    there = there.parent
  try:
    if not there.is_dir():
      raise UsageError(f'{lacks}: {there} is none')
    if is_policy(path):
      raise UsageError(f'{option} {path} is an exported policy: name another directory')
    writable = os.access(there, os.W_OK | os.X_OK)
  except OSError as e:
    raise UsageError(f'{lacks}: {e.strerror}') from e
  if not writable and there == path:
    raise UsageError(f'{option} {path} cannot be written to')
  if not writable:
    raise UsageError(f'{lacks}: {there} cannot be written to')
