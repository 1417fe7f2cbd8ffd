"""What a run directory holds: its configuration, its summary, and the lock on it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from podrace.errors import RunError, Stopped, UnreadableFile, UsageError
from podrace.settings import user_code
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.record import (
  changes,
  check_code,
  complete,
  differences,
  from_json,
  to_json,
  with_unrecorded,
)
from podrace.settings.user_code import KIND, update_paths
from podrace.system.files import check_folder, create_folder, make_user_folder, write_whole
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
from podrace.system.process import NO_LOCKS, cores, is_locked, lock
from podrace.version import __version__

RUNNING, FINISHED, STOPPED, FAILED = 'running', 'finished', 'stopped', 'failed'
KILLED = 'killed'  # it ended without a word: SIGKILL, out of memory, a power cut
BROKEN = 'broken'  # one of its files can't be read
UNKNOWN = 'unknown'  # not finished, and its file system has no locks that say whether it is running
STATES = (RUNNING, FINISHED, STOPPED, FAILED, KILLED, BROKEN, UNKNOWN)
END = 'end.json'  # how the run's last life ended, where it did not finish
TAIL = 65_536  # bytes at the end of metrics.jsonl in which a finished episode is looked for
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

if TYPE_CHECKING:
  from podrace.settings.discovery import Discovery

NEVER = {'architecture', 'num_envs', 'unroll_length'}  # with these a run's state is another's


def machine() -> dict[str, Any]:
  """What bitwise equality of a resumed run depends on."""
  return {
    'device': jax.devices()[0].device_kind,
    'devices': len(jax.devices()),
    'cores': cores(),
    'jax': jax.__version__,
    'podrace': __version__,
  }


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], bool]]:
  """Keeps a second run out of the directory for as long as this one lives.

  Gives what says whether the directory is still the one: not removed, moved or replaced.
  """
  try:
    file = lock(run_dir)
  except BlockingIOError:
    raise UsageError(f'{run_dir} is in use by another run that is still going') from None
  except OSError as e:
    raise UsageError(f'--run-dir {run_dir} cannot be written to: {e.strerror}') from e
  with file:
    check_folder(run_dir, '--run-dir')
    yield functools.partial(is_locked, run_dir.absolute(), file)


def changes_of(config: Config | Discovery, run_dir: Path) -> list[str]:
  """What the run directory's record and this configuration differ in, a line each.

  Raises:
    UsageError: if it is something that never changes in a run, which has a checkpoint.
  """
  old = read_record(run_dir)
  if old is None:
    return []
  records = completed_record(old, config), to_json(config)
  changed = differences(*records)
  begun = any((run_dir / 'checkpoints').glob('*'))
  if begun and not NEVER.isdisjoint(path for path, _, _ in changes(*records)):
    raise UsageError(
      f'{run_dir} holds another run, which this one cannot be:\n  '
      + '\n  '.join(changed)
      + '\ngive another --run-dir'
    )
  return changed


def read_record(run_dir: Path) -> dict[str, Any] | None:
  """What config.json holds, or None if there is none.

  Raises:
    UnreadableFile: if it is not the record of a run.
  """
  return read_run_record(run_dir)


def read_summary(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
  """What summary.json holds; None if there is none, or if it is damaged: the run writes it again."""
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
    raise UsageError(f'{path} is not the summary of a run: it {e}') from e
  if lacking := needed - set(summary):
    raise UsageError(f'{path} is not the summary of a run: it lacks {", ".join(sorted(lacking))}')
  return summary


def completed_record(record: dict[str, Any], config: Config | Discovery) -> dict[str, Any]:
  """A run directory's record with later fields; of code, it may name what this configuration has."""
  return complete(record, user_code.named_modules(to_json(config)))


def continued(config: Any, run_dir: Path) -> Any:
  """Return the config with which the run in a directory goes on: fields that its record lacks are as it began."""
  record = read_record(run_dir)
  return config if record is None else with_unrecorded(config, record)


def load_config(run_dir: Path, allow_code: Iterable[str] = ()) -> Config:
  """The config that a run directory of `podrace train` records.

  Args:
    allow_code: modules that it may name, besides podrace's own; naming one runs it.

  Raises:
    UsageError: if there is none, or it names other modules; nothing is imported then.
  """
  config = load_any(run_dir, allow_code)
  if not isinstance(config, Config):
    raise UsageError(
      f'{run_dir} holds a rule that `podrace discover` trained, and no agent: train one by it, as in '
      f'podrace train --agent {agent_name(config.agent)} --agent.rule {run_dir / "rule.npz"}'
    )
  return config


def load_any(run_dir: Path, allow_code: Iterable[str] = ()) -> Config | Discovery:
  """As `load_config`, of any command."""
  record = read_record(run_dir)
  if record is None:
    raise UsageError(f'{run_dir} is not a run directory: it has no config.json')
  check_code(record, allow_code)
  config: Config | Discovery = from_json(record)
  return config


def saved_steps(path: Path) -> list[int]:
  """The steps of a run's checkpoints."""
  with contextlib.suppress(OSError):
    return [int(name) for name in os.listdir(path / 'checkpoints') if is_step(name)]
  return []


def read_run_record(path: Path) -> dict[str, Any] | None:
  """Return what config.json in a run directory records, None if there is none.

  Raises:
    UnreadableFile: if it is not the record of a run.
  """
  file = path / 'config.json'
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
  """The last line of a metrics.jsonl, and when it was written.

  If no episode ended in it, it has the return of the newest line that has one.

  Raises:
    UnreadableFile: if it is no regular file, or cannot be read.
  """
  last: dict[str, Any] = {}
  try:
    with open_regular(path) as file:
      end = file.seek(0, os.SEEK_END)
      file.seek(max(0, end - TAIL))
      *lines, _ = file.read(TAIL).split(b'\n')
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


def is_running(path: Path) -> bool | None:
  """Whether a process has the run's lock, or `podrace launch` that of its logs, as between two starts of a learner.

  None if the file system has no locks.

  Raises:
    UnreadableFile: if a lock is no regular file.
  """
  states = [has_lock(path), has_lock(path / 'logs')]
  return True if True in states else None if None in states else False


def has_lock(path: Path) -> bool | None:
  """Whether a process has the lock of a directory; None if the file system has no locks."""
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


@contextlib.contextmanager
def noting_end(
  path: Path, stopped: type[Exception], is_ours: Callable[[], bool] = lambda: True
) -> Iterator[None]:
  """Keeps how a life of a run ended, for those that look at it later; `stopped` is what a signal raises.

  A refusal (UsageError) changes nothing. Nothing is written where the directory is not the run's any more, as `is_ours` says.
  """
  try:
    before = read_end(path)
  except UnreadableFile:  # it is replaced below
    before = {}
  (path / END).unlink(missing_ok=True)

  def note(state: str, why: str) -> None:
    with contextlib.suppress(
      OSError
    ):  # the disk is full, or the directory is gone: what failed is what counts
      if is_ours():
        write_whole(path / END, json.dumps({'state': state, 'why': why}) + '\n')

  try:
    yield
  except stopped as e:
    note(STOPPED, str(e))
    raise
  except UsageError:
    if before:
      note(before.get('state', FAILED), before.get('why', ''))
    raise
  except KeyboardInterrupt:
    note(STOPPED, 'SIGINT: ended at once')
    raise
  except Exception as e:
    note(FAILED, reason(e))
    raise


def reason(error: Exception) -> str:
  """In a line why a run failed: the first cause, where one error led to another."""
  while error.__cause__ is not None and isinstance(error.__cause__, Exception):
    error = error.__cause__
  lines = [x for x in str(error).splitlines() if x.strip()]
  if not lines:
    return repr(error)
  text, kind = lines[-1].strip(), type(error).__name__
  return (
    text if isinstance(error, RunError | UsageError) or text.startswith(kind) else f'{kind}: {text}'
  )


def name_of(preset: str | None, env: str) -> str:
  """What a new run's directory is named after: a preset, or an environment without its options."""
  return preset or env.partition(',')[0].replace(':', '-').replace('/', '-')


def new_run_dir(name: str) -> Path:
  """A directory for a new run: runs/NAME-DATE-TIME."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  path = Path('runs') / f'{name}-{now}'
  n = 1
  while path.exists():
    n += 1
    path = Path('runs') / f'{name}-{now}-{n}'
  return path


@contextlib.contextmanager
def reserved(name: str) -> Iterator[Path]:
  """Makes a new run's directory, so that no other run takes it; removes it if no step of the run is in it."""
  with contextlib.ExitStack() as stack:
    runs = Path('runs')
    try:
      if not runs.exists():
        make_user_folder(runs)
        stack.callback(_remove_empty, runs)
      while True:
        path = new_run_dir(name)
        with contextlib.suppress(FileExistsError):  # another run was quicker
          create_folder(path)
          break
    except OSError as e:
      raise UsageError(f'{runs} cannot be written to: {e.strerror}; give --run-dir') from e
    stack.callback(_remove_empty, path)
    try:
      yield path
    except Stopped as e:
      e.kept = not _remove_unbegun(path)
      raise


@contextlib.contextmanager
def run_directory(given: Path | str | None, name: str) -> Iterator[Path]:
  """The directory of a run: the one that is given, or else a new one, named after a preset or an environment."""
  if given is not None:
    yield Path(given)
    return
  with reserved(name.replace(':', '-').replace('/', '-')) as path:
    yield path


def _remove_unbegun(path: Path) -> bool:
  """Removes the files of a run that was stopped before its first step; whether it was."""
  unbegun = {'config.json', END, 'lock', 'checkpoints'}
  with contextlib.suppress(OSError):
    if {p.name for p in path.iterdir()} <= unbegun and not saved_steps(path):
      shutil.rmtree(path)
      return True
  return False


def check_directory(path: Path, option: str = '--run-dir') -> None:
  """Checks that a run can be kept in a directory, which need not be there yet.

  Raises:
    UsageError: if it can't.
  """
  lacks = f'{option} {path} cannot be a directory'
  there = path
  while not os.path.lexists(there) and there != there.parent:
    there = there.parent
  try:
    if not there.is_dir():
      raise UsageError(f'{lacks}: {there} is none')
    writable = os.access(there, os.W_OK | os.X_OK)
  except OSError as e:
    raise UsageError(f'{lacks}: {e.strerror}') from e
  if not writable and there == path:
    raise UsageError(f'{option} {path} cannot be written to')
  if not writable:
    raise UsageError(f'{lacks}: {there} cannot be written to')


def _remove_empty(path: Path) -> None:
  with contextlib.suppress(OSError):  # it isn't
    path.rmdir()


def read_end(path: Path) -> dict[str, Any]:
  """Return how the run's last life ended, {} if that is not known."""
  end = read_object(path / END, {'state': TEXT, 'why': TEXT}) or {}
  if end.get('state', KILLED) not in (STOPPED, FAILED, KILLED):
    raise UnreadableFile(path / END, f'has a state other than {STOPPED}, {FAILED} or {KILLED}')
  return end
