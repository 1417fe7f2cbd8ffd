"""The beginning of a run: its options, refusals, and the lock on its directory."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from podrace.errors import CheckpointError, RunError, UsageError
from podrace.run import metrics, progress
from podrace.run.callbacks import Callbacks
from podrace.run.directory import (
  changes_of,
  check_directory,
  has_lock,
  locked,
  read_summary,
  saved_steps,
)
from podrace.run.setting_changes import needs_override
from podrace.run.sinks import check_sinks
from podrace.settings.config import Basics, Config
from podrace.settings.log_settings import replays_only
from podrace.settings.record import Change, nameless_functions, to_json
from podrace.system.files import check_folder, make_user_folder, path_error


@dataclasses.dataclass(frozen=True)
class RunOptions:
  """Options of a run that are not part of its configuration.

  Attributes:
    override: the run goes on although its configuration has changed.
    sinks: names of sinks, or sinks, which the caller closes.
    quiet: silences progress, not warnings.
  """

  run_dir: Path
  override: bool
  sinks: tuple[str | metrics.Sink, ...]
  quiet: bool
  callbacks: Callbacks

  def __post_init__(self) -> None:
    if isinstance(self.sinks, str):
      raise UsageError(f'sinks is {self.sinks!r}, expected a sequence, as ({self.sinks!r},)')
    object.__setattr__(self, 'sinks', tuple(self.sinks))
    # A callback or an environment may change the working directory.
    object.__setattr__(self, 'run_dir', self.run_dir.absolute())

  def check(self) -> None:
    """Raise UsageError for unknown sinks, and for callbacks that these processes cannot have."""
    check_sinks(self.sinks, self.run_dir)
    if self.callbacks.transforms and jax.process_count() > 1:
      raise UsageError('a callback with transform is for runs of one process')


@dataclasses.dataclass(frozen=True)
class Console:
  """Messages of a run.

  Attributes:
    terminal: shows progress; None if the run is quiet.
    warn: prints a warning. Of several processes only the first prints.
    say: prints a message, unless the run is quiet.
  """

  terminal: progress.Progress | None
  warn: Callable[[str], None]
  say: Callable[[str], None]


@contextlib.contextmanager
def open_run(config: Basics, options: RunOptions) -> Iterator[Console]:
  """Refuse a run that cannot be, and raise failures of the machine as RunError.

  Raises:
    UsageError: if the directory is in use, or is that of another run.
  """
  options.check()
  of = ' of the log' if isinstance(config, Config) and replays_only(config) else ''
  terminal = progress.make_progress(config.total_updates * config.steps_per_update, of)
  warn = terminal.say if jax.process_index() == 0 else _ignore
  with contextlib.closing(terminal), _as_run_errors(options.run_dir):
    refuse(config, options.run_dir, options.override)
    if saved_steps(options.run_dir) and (paths := set(nameless_functions(to_json(config)))):
      warn(
        f'{", ".join(sorted(paths))}: a lambda or an inner function has no name of its own, so it '
        'is not compared with the one that the run began with; a function of a module is, by name'
      )
    if options.quiet:
      yield Console(None, warn, _ignore)
    else:
      yield Console(terminal, warn, warn)


@contextlib.contextmanager
def open_directory(run_dir: Path) -> Iterator[Callable[[], bool]]:
  """Make and lock a run's directory; yields a function that returns whether it is still the same.

  A refused run leaves no directory, so this is called once nothing else can be refused.
  """
  try:
    make_user_folder(run_dir)
  except OSError as e:
    raise path_error(f'--run-dir {run_dir} cannot be a directory: {e.strerror}', e) from e
  if jax.process_index() > 0:
    yield lambda: True
    return
  with locked(run_dir) as is_ours:
    yield is_ours


def refuse(config: Basics, run_dir: Path, override: bool) -> None:
  """Raise UsageError if the directory cannot be that of this run, before anything is made."""
  check_directory(run_dir)
  if run_dir.is_dir():
    check_folder(run_dir, '--run-dir')
    if jax.process_index() == 0 and has_lock(run_dir):  # of several processes the first one has it
      raise UsageError(f'{run_dir} is in use by another run that is still going')
    read_finished(config, run_dir, override, _ignore)


def read_finished(
  config: Basics, run_dir: Path, override: bool, warn: Callable[[str], None]
) -> dict[str, Any] | None:
  """Return the summary of the run in a directory if it is finished, else None.

  Raises:
    UsageError: if its configuration differs, and `override` is false or would have no effect, or if
      its results have no checkpoint to go on from and `override` is false.
  """
  changed = changes_of(config, run_dir)
  refused = any(map(needs_override, changed)) and not override
  summary = read_summary(run_dir / 'summary.json', _ignore if refused else warn)
  finished = summary is not None and is_finished(summary, config.total_steps, changed)
  if refused and not finished:
    raise UsageError(
      f'{run_dir} holds a run with another configuration:\n  '
      + '\n  '.join(map(str, changed))
      + f'\nto go on with its own settings, give --run-dir {shlex.quote(str(run_dir))} alone; with '
      'these, --override as well (in Python override=True); or give another --run-dir'
    )
  if summary is None or not finished:
    if not override:
      _check_results(run_dir)
    return None
  if changed:
    raise UsageError(
      f'{run_dir} is finished at step {summary["step"]:,}, and what changed would not be used:\n  '
      + '\n  '.join(map(str, changed))
      + '\ngive a larger --total-steps as well (other settings also need --override), or another '
      '--run-dir'
    )
  return summary


def _check_results(run_dir: Path) -> None:
  """Raise UsageError if a run would begin again and replace results.

  A run that was killed before its first checkpoint has the directory of checkpoints, and may have
  evaluated.
  """
  is_evaluated = any((run_dir / 'best').glob('*')) and not (run_dir / 'checkpoints').exists()
  if not saved_steps(run_dir) and ((run_dir / 'summary.json').exists() or is_evaluated):
    raise UsageError(
      f'{run_dir} has results and no checkpoint, so it would begin again at step 0 and replace '
      'them: restore its checkpoints, give another --run-dir, or --override to begin again (in '
      'Python override=True)'
    )


def is_finished(summary: dict[str, Any], total_steps: int, changed: Sequence[Change]) -> bool:
  """Return whether a run is finished; one that a callback ended goes on with changed settings."""
  return summary['step'] >= total_steps or ('ended' in summary and not changed)


def _ignore(message: str) -> None:
  pass


@contextlib.contextmanager
def _as_run_errors(run_dir: Path) -> Iterator[None]:
  """Raise failures of files, checkpoints and JAX as RunError."""
  try:
    yield
  except OSError as e:
    raise RunError(f'{run_dir}: {e}; what was saved before is kept') from e
  except CheckpointError as e:
    raise RunError(f'{e}; the checkpoints before it are kept') from e
  except jax.errors.JaxRuntimeError as e:
    raise RunError(f'JAX failed, on this device or with another process: {e}') from e
