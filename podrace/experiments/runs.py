"""Runs as their directories show them. Importing this does not import jax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.envs.logs.share import parse_share
from podrace.errors import UnreadableFile, UsageError
from podrace.run.diagnostics import read_diagnostics
from podrace.run.directory import (
  is_policy,
  is_running,
  last_line,
  not_a_run,
  read_record,
  saved_steps,
)
from podrace.run.run_end import BROKEN, FINISHED, KILLED, RUNNING, UNKNOWN, read_end
from podrace.settings.user_code import CLASS, KIND
from podrace.system import files
from podrace.system.files.reading import read_object, size_of
from podrace.system.files.schema import (
  SUMMARY,
)

VARIED = 'podrace.agents.population:Varied'  # agent of a sweep in one program


@dataclasses.dataclass(frozen=True)
class Run:
  """State of a run, read from its directory."""

  path: Path
  state: str
  why: str = ''  # reason why the run stopped or failed, '' if unknown
  agent: str = ''  # for a sweep in one program, the varied agent
  sweep: bool = False  # whether the agent has many settings
  env: str = ''
  log: str = ''  # data set that all environments replay
  architecture: str = ''
  step: int = 0  # environment steps done, of each seed
  total_steps: int = 0
  # Newest value; of a finished run, its summary's. None for a sweep in one program, and if the
  # episodes are from a log.
  episode_return: float | None = None
  steps_per_s: float | None = None
  age_s: float = 0.0  # seconds since the run last wrote
  size: int = 0  # bytes of all files
  diagnostics: tuple[str, ...] = ()  # names of the signs that the run does not learn

  @property
  def source(self) -> str:
    """The environment, or the data set of a run without one."""
    return self.env or (f'log {self.log}' if self.log else '')

  def as_json(self) -> dict[str, Any]:
    """Return the fields as JSON."""
    return dataclasses.asdict(self) | {'path': str(self.path)}


def find(*roots: Path | str) -> list[Path]:
  """Return all run directories in directories, or the directories themselves, each once, by name.

  A link to a run directory is listed too, unless its target is.

  Raises:
    UsageError: if one is not a directory.
  """
  for root in roots:
    if not os.path.isdir(root):  # Path.is_dir fails for a long name
      raise UsageError(f'{root} is no directory')
  paths: dict[str, Path] = {}  # by where they lead: a link and its target are one directory
  for root in roots:
    for path in sorted(_walk(str(root)), key=lambda path: (path.is_symlink(), path)):
      paths.setdefault(os.path.realpath(path), path)
  return list(paths.values())


def _walk(root: str) -> Iterator[Path]:
  folders = [root]
  while folders:
    folder = folders.pop()
    if os.path.lexists(f'{folder}/config.json'):
      if not is_policy(folder):
        yield Path(folder)
      continue
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
      for entry in entries:
        with contextlib.suppress(OSError):
          # other links are not followed: they may lead back
          is_link_to_run = entry.is_symlink() and os.path.lexists(f'{entry.path}/config.json')
          if is_link_to_run or entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)


def inspect_run(path: Path) -> Run:
  """Return the current state of a run. A damaged run is `BROKEN`, and `why` says how."""
  age, size = max(0.0, time.time() - _modified_at(path)), size_of(str(path))
  try:
    line, written = last_line(path / 'metrics.jsonl')
    age = max(0.0, time.time() - written) if written else age
    record = read_record(path)
    if record is None:
      raise UnreadableFile(path / 'config.json', 'is not there')  # deleted meanwhile
    running = is_running(path)
    summary = {} if running else read_object(path / 'summary.json', SUMMARY) or {}
    end = {} if running else read_end(path)
    diagnoses = tuple(entry['name'] for entry in read_diagnostics(path))
  except UnreadableFile as e:
    reason = str(e).removeprefix(f'{path}/')
    return Run(path, BROKEN, reason, age_s=age, size=size)
  total = planned_steps(record)
  state, why = FINISHED, ''
  if running:
    state = RUNNING
  # a callback ended the run
  elif 'ended' in summary and summary.get('step', 0) >= line.get('step', 0):
    why = summary['ended']
  elif summary.get('step', 0) < total:
    state, why = end.get('state', KILLED), end.get('why', '')
    if running is None:
      state, why = UNKNOWN, 'its file system has no locks (flock)'
  done = summary if state == FINISHED else line
  agent, sweep = agent_of(record['agent'])
  log = log_of(record)
  return Run(
    path,
    state,
    why,
    agent=agent,
    sweep=sweep,
    env=record['env'],
    log=log,
    architecture=record.get('architecture', record.get(KIND, '')),
    step=max(line.get('step', 0), summary.get('step', 0), *saved_steps(path), 0),
    total_steps=total,
    episode_return=None if sweep or log else done.get('episode_return'),
    steps_per_s=done.get('steps_per_s'),
    age_s=age,
    size=size,
    diagnostics=diagnoses,
  )


def planned_steps(record: dict[str, Any]) -> int:
  """Return the steps of a recorded run, in whole updates."""
  update = record.get('num_envs', 1) * record.get('unroll_length', 1)
  if record.get(KIND) == 'discover':  # like `Discovery.steps_per_update`
    groups = max(1, len(record['env'].split())) * max(1, len(record['widths']))
    update *= groups * record['agents'] * (record['agent_updates'] + 1)
  total: int = -(-record['total_steps'] // update) * update
  return total


def log_of(record: dict[str, Any]) -> str:
  """Return the data set that all environments of a recorded run replay, '' if one of them acts.

  The episodes of such a run are from the data set, so their return tells nothing of the agent.
  """
  with contextlib.suppress(UsageError):
    p, q = parse_share(str(record.get('log_share', '1')))
    return str(record.get('log', '')) if p == q else ''
  return ''


def agent_of(record: dict[str, Any]) -> tuple[str, bool]:
  """Return the name of a recorded agent, and whether it is a sweep of that agent."""
  inner = record.get('agent')
  if record['name'] != VARIED or not isinstance(inner, dict):
    return record['name'], False
  where = str(inner.get(CLASS, ''))
  names = [name for name, known in AGENTS.items() if ':'.join(known) == where]
  return (names[0] if names else where or VARIED), True


def _modified_at(path: Path) -> float:
  with contextlib.suppress(OSError):
    return path.stat().st_mtime
  return time.time()


def check_stopped(path: Path) -> None:
  """Check that a directory is a run that has certainly stopped.

  Raises:
    UsageError: if not.
  """
  if not os.path.lexists(path / 'config.json') or is_policy(path):
    raise not_a_run(path)
  if (running := is_running(path)) is None:
    raise UsageError(
      f'{path} is on a file system without locks (flock), so it may be running: '
      'if it is not, delete it with rm -r'
    )
  if running:
    raise UsageError(f'{path} is still running: stop it first')


def check_removable(path: Path) -> None:
  """Raise UsageError if `path` is no run, a link, or a run that is still running."""
  if path.is_symlink():
    raise UsageError(f'{path} is a symbolic link: name the run that it leads to')
  check_stopped(path)


def remove(path: Path) -> None:
  """Delete a run directory. A link in it is removed, and its target stays.

  Raises:
    UsageError: if it is not a run, or is still running.
  """
  check_removable(path)
  try:
    for entry in path.iterdir():
      if entry.name != 'config.json':  # the last one, as without it this is no run any more
        files.remove(entry)
    shutil.rmtree(path.resolve())  # of `.` it would delete the content only
  except RecursionError:
    raise UsageError(f'{path} has folders nested too deep: delete it with rm -r') from None
  except OSError as e:
    raise UsageError(f'{path} cannot be deleted: {e.filename}: {e.strerror}') from e
