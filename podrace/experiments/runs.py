"""Runs as their directories show them, to whoever did not start them. Importing this does not import jax."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.settings.config import KIND
from podrace.settings.user_code import CLASS, update_paths
from podrace.system.files import create_folder, make_user_folder, write_whole
from podrace.system.files.reading import open_regular, parse_json, read_object, size_of
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
from podrace.system.process import NO_LOCKS
from podrace.system.signals import Stopped

RUNNING, FINISHED, STOPPED, FAILED = 'running', 'finished', 'stopped', 'failed'
KILLED = 'killed'  # it ended without a word: SIGKILL, out of memory, a power cut
BROKEN = 'broken'  # one of its files can't be read
UNKNOWN = 'unknown'  # not finished, and its file system has no locks that say whether it is running
STATES = (RUNNING, FINISHED, STOPPED, FAILED, KILLED, BROKEN, UNKNOWN)
END = 'end.json'  # how the run's last life ended, where it did not finish
VARIED = 'podrace.agents.population:Varied'  # the agent of a sweep in one program
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


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run directory shows."""

  path: Path
  state: str
  why: str = ''  # it stopped or failed; '' if that is not known
  agent: str = ''  # of a sweep in one program, the agent that is varied
  sweep: bool = False  # it has several settings of its agent
  env: str = ''
  architecture: str = ''
  step: int = 0  # environment steps done, of each seed
  total_steps: int = 0
  episode_return: float | None = None  # the newest; of a finished run, its summary's
  steps_per_s: float | None = None
  age_s: float = 0.0  # seconds since the run last wrote
  size: int = 0  # bytes of all files

  def as_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {'path': str(self.path)}


def find(root: Path) -> list[Path]:
  """All run directories under a directory, or itself; by name.

  Raises:
    UsageError: if it is no directory.
  """
  if not os.path.isdir(root):  # Path.is_dir fails for a long name
    raise UsageError(f'{root} is no directory')
  return sorted(_found(str(root)))


def _found(root: str) -> Iterator[Path]:
  folders = [root]
  while folders:
    folder = folders.pop()
    if os.path.lexists(f'{folder}/config.json'):
      yield Path(folder)
      continue
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
      for entry in entries:
        with contextlib.suppress(OSError):
          if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)


def look(path: Path) -> Run:
  """What a run directory shows now; a damaged one is `BROKEN`, and `why` says how."""
  age, size = max(0.0, time.time() - _changed(path)), size_of(str(path))
  try:
    line, written = last_line(path / 'metrics.jsonl')
    age = max(0.0, time.time() - written) if written else age
    record = read_run_record(path)
    if record is None:
      raise UnreadableFile(path / 'config.json', 'is not there')  # any more
    running = is_running(path)
    summary = {} if running else read_object(path / 'summary.json', SUMMARY) or {}
    end = {} if running else _end(path)
  except UnreadableFile as e:
    reason = str(e).removeprefix(f'{path}/')
    return Run(path, BROKEN, reason, age_s=age, size=size)
  total = steps_of(record)
  state, why = FINISHED, ''
  if running:
    state = RUNNING
  elif 'ended' in summary and summary.get('step', 0) >= line.get('step', 0):  # by a callback
    why = summary['ended']
  elif summary.get('step', 0) < total:
    state, why = end.get('state', KILLED), end.get('why', '')
    if running is None:
      state, why = UNKNOWN, 'its file system has no locks (flock)'
  done = summary if state == FINISHED else line
  agent, sweep = agent_of(record['agent'])
  return Run(
    path,
    state,
    why,
    agent=agent,
    sweep=sweep,
    env=record['env'],
    architecture=record.get('architecture', record.get(KIND, '')),
    step=max(line.get('step', 0), summary.get('step', 0), *saved_steps(path), 0),
    total_steps=total,
    episode_return=done.get('episode_return'),
    steps_per_s=done.get('steps_per_s'),
    age_s=age,
    size=size,
  )


def steps_of(record: dict[str, Any]) -> int:
  """The steps that a run has, in whole updates."""
  update = record.get('num_envs', 1) * record.get('unroll_length', 1)
  if record.get(KIND) == 'discover':  # as `Discovery.steps_per_update`
    groups = len(record['env'].split()) * max(1, len(record['widths']))
    update *= groups * record['agents'] * (record['agent_updates'] + 1)
  total: int = -(-record['total_steps'] // update) * update
  return total


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


def _end(path: Path) -> dict[str, Any]:
  """Return how the run's last life ended, {} if that is not known."""
  end = read_object(path / END, {'state': TEXT, 'why': TEXT}) or {}
  if end.get('state', KILLED) not in (STOPPED, FAILED, KILLED):
    raise UnreadableFile(path / END, f'has a state other than {STOPPED}, {FAILED} or {KILLED}')
  return end


def agent_of(record: dict[str, Any]) -> tuple[str, bool]:
  """The name of a recorded agent, and whether it is a sweep of that one."""
  inner = record.get('agent')
  if record['name'] != VARIED or not isinstance(inner, dict):
    return record['name'], False
  where = str(inner.get(CLASS, ''))
  names = [name for name, known in AGENTS.items() if ':'.join(known) == where]
  return (names[0] if names else where or VARIED), True


def _changed(path: Path) -> float:
  with contextlib.suppress(OSError):
    return path.stat().st_mtime
  return time.time()


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


def check_stopped(path: Path) -> None:
  """Raises UsageError unless a directory is a run, and certainly not one that is still going."""
  if not os.path.lexists(path / 'config.json'):
    raise UsageError(f'{path} is not a run directory: it has no config.json')
  if (running := is_running(path)) is None:
    raise UsageError(
      f'{path} is on a file system without locks (flock), so it may be running: '
      'if it is not, delete it with rm -r'
    )
  if running:
    raise UsageError(f'{path} is still running: stop it first')


def remove(path: Path) -> None:
  """Deletes a run directory; a link in it is removed, and what it leads to stays.

  Raises:
    UsageError: if it is no run, or one that is still going.
  """
  if path.is_symlink():
    raise UsageError(f'{path} is a symbolic link: name the run that it leads to')
  check_stopped(path)
  try:
    shutil.rmtree(path)
  except RecursionError:
    raise UsageError(f'{path} has folders nested too deep: delete it with rm -r') from None
  except OSError as e:
    raise UsageError(f'{path} cannot be deleted: {e.filename}: {e.strerror}') from e


# --- for the run itself -------------------------------------------------------------------------


@contextlib.contextmanager
def noting_end(
  path: Path, stopped: type[Exception], is_ours: Callable[[], bool] = lambda: True
) -> Iterator[None]:
  """Keeps how a life of a run ended, for those that look at it later; `stopped` is what a signal raises.

  A refusal (UsageError) changes nothing. Nothing is written where the directory is not the run's any more, as `is_ours` says.
  """
  try:
    before = _end(path)
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
