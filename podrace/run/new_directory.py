"""New run directories: their names, and their removal if the run did not begin."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from podrace.errors import Stopped
from podrace.run.directory import saved_steps
from podrace.run.run_end import END
from podrace.settings.log_settings import SPACES
from podrace.system.files import create_folder, make_user_folder, path_error


def name_run(preset: str | None, env: str, log: str = '') -> str:
  """Return the name of a new run: a preset, an environment without its options, or a data set."""
  plain = env.partition(',')[0].replace(':', '-').replace('/', '-')
  return preset or plain or os.path.basename(os.path.abspath(log.replace('\0', '')))


def choose_run_dir(name: str) -> Path:
  """Return a path for a new run: runs/NAME-DATE-TIME."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  path = Path('runs') / f'{name}-{now}'
  n = 1
  while path.exists():
    n += 1
    path = Path('runs') / f'{name}-{now}-{n}'
  return path


@contextlib.contextmanager
def reserve_run_dir(name: str) -> Iterator[Path]:
  """Make a new run's directory, so that no other run takes it; remove it if it stays empty."""
  with contextlib.ExitStack() as stack:
    runs = Path('runs')
    try:
      if not runs.exists():
        make_user_folder(runs)
        stack.callback(_remove_empty, runs)
      while True:
        path = choose_run_dir(name)
        with contextlib.suppress(FileExistsError):  # another run was quicker
          create_folder(path)
          break
    except OSError as e:
      raise path_error(f'{runs} cannot be written to: {e.strerror}; give --run-dir', e) from e
    stack.callback(_remove_empty, path)
    try:
      yield path
    except Stopped as e:
      e.kept = not _remove_unbegun(path)
      raise


def run_directory(run_dir: Path | str | None, name: str) -> contextlib.AbstractContextManager[Path]:
  """Yield the directory `run_dir`, or a new one with a name from `name_run`."""
  return reserve_run_dir(name) if run_dir is None else contextlib.nullcontext(Path(run_dir))


def _remove_unbegun(path: Path) -> bool:
  """Remove the files of a run that was stopped before its first step; returns whether it was."""
  unbegun = {'config.json', SPACES, 'name.json', END, 'lock', 'checkpoints'}
  with contextlib.suppress(OSError):
    if {p.name for p in path.iterdir()} <= unbegun and not saved_steps(path):
      shutil.rmtree(path)
      return True
  return False


def _remove_empty(path: Path) -> None:
  with contextlib.suppress(OSError):  # it isn't
    path.rmdir()
