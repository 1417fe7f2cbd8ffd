"""Settings that Optuna proposes, each from the results of the trials before it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from podrace.errors import RunError, UsageError
from podrace.experiments.sweep import processes, settings
from podrace.experiments.sweep.settings import ChoiceSpace, RangeSpace, Setting, Spaces
from podrace.run.metrics import Line
from podrace.run.run_end import summarize_failure
from podrace.system.files import NotOwn, open_append, open_lock, write_whole
from podrace.system.files.reading import open_regular
from podrace.system.importing import why_not

EXIT_CODE = 'exit_code'  # attribute of a trial that failed


def check_optuna() -> None:
  """Raise UsageError if Optuna cannot be imported."""
  try:
    import optuna  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('--method tpe', 'sweep', e)) from e


class JournalLock:
  """Lock of Optuna's journal.

  Optuna's own lock is a link. It waits without end for a stale link that leads nowhere. Optuna also
  appends to a line that a kill or a full disk has cut, and can read neither line afterwards.
  """

  def __init__(self, journal: Path) -> None:
    self._journal, self._path = journal, journal.with_name(f'{journal.name}.flock')
    self._file: IO[str] | None = None

  def acquire(self) -> bool:
    """Wait until no other process has the journal, and drop a last line that is incomplete."""
    self._file = open_lock(self._path)
    fcntl.flock(self._file, fcntl.LOCK_EX)
    with open_regular(self._journal) as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(0, size - 1))
      if file.read() not in (b'', b'\n'):
        file.seek(0)
        write_whole(self._journal, b''.join(line for line in file if line.endswith(b'\n')))
    return True

  def release(self) -> None:
    """Let other processes have the journal."""
    if self._file is not None:
      self._file.close()


class OptunaStudy:
  """The trials of one sweep, as Optuna proposes and records them in study.log.

  Args:
    folder: directory of the sweep.
    spaces: values of each varied field.
    count: number of trials.
    seed: seed of Optuna's sampler.
    prune: whether poor trials end early.

  Raises:
    UsageError: if study.log is not the log of this sweep.
  """

  def __init__(self, folder: Path, spaces: Spaces, count: int, seed: int, prune: bool) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    self._folder, self._spaces, self._count, self._prune = folder, spaces, count, prune
    self._trials: dict[Path, Any] = {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._journal = journal = folder / 'study.log'
    lock: Any = JournalLock(journal)
    open_append(journal).close()  # Optuna opens it by its path, again and again
    pruners = optuna.pruners
    try:
      self._storage = JournalStorage(JournalFileBackend(str(journal), lock))
      self._study = optuna.create_study(
        storage=self._storage,
        study_name='sweep',
        direction='maximize',
        pruner=pruners.SuccessiveHalvingPruner() if prune else pruners.NopPruner(),
        load_if_exists=True,
      )
      self._check_trials()
      # A sampler that began again with `seed` would propose the settings of the first trials.
      stream = np.random.SeedSequence([seed, len(self._study.get_trials(deepcopy=False))])
      self._study.sampler = optuna.samplers.TPESampler(seed=int(stream.generate_state(1)[0]))
    except NotOwn:
      raise
    except OSError as e:
      raise self._unwritten(e) from e
    except Exception as e:  # Optuna fails in many ways at lines that are not its own
      raise UsageError(
        f'{journal} is not the log of this sweep: {summarize_failure(e)}; remove it to begin anew'
      ) from e
    self._interrupted = self._study.get_trials(states=[TrialState.RUNNING])

  def settings(self) -> Iterator[tuple[Path, Setting]]:
    """Yield the run directory and setting of each trial, interrupted trials first."""
    import optuna

    study_id = self._storage.get_study_id_from_name('sweep')
    for frozen in self._interrupted:
      trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, frozen.number)
      yield self._begin(functools.partial(optuna.trial.Trial, self._study, trial_id))
    while len(self._study.get_trials()) < self._count:
      yield self._begin(self._study.ask)

  @contextlib.contextmanager
  def _recording(self) -> Iterator[None]:
    """Raise a failure to write the journal as RunError."""
    try:
      yield
    except NotOwn:
      raise
    except OSError as e:
      raise self._unwritten(e) from e

  def _unwritten(self, error: OSError) -> RunError:
    return RunError(
      f'{self._journal} cannot be written: {error.strerror}; its trials are kept: start again with '
      'the same --dir to go on'
    )

  def _begin(self, make_trial: Callable[[], Any]) -> tuple[Path, Setting]:
    with self._recording():
      trial = make_trial()
      path = self._path(trial.number)
      self._trials[path] = trial
      return path, {name: _suggest(trial, name, space) for name, space in self._spaces.items()}

  def _path(self, number: int) -> Path:
    return self._folder / f'{number:04d}'

  def report(self, path: Path, line: Line) -> bool:
    """Report a line of a trial's metrics. Return whether the trial is to end."""
    if line.get('episode_return') is None or not self._prune:
      return False
    with self._recording():
      self._trials[path].report(line['episode_return'], line['step'])
    return bool(self._trials[path].should_prune())

  def finish(self, path: Path, code: int) -> None:
    """Record the end of a trial, with its exit code."""
    from optuna.trial import TrialState

    result = processes.make_result(path, self._trials[path].params, code)
    if code and result['state'] != 'finished':
      with self._recording():
        self._trials[path].set_user_attr(EXIT_CODE, code)
      return  # it stays open, and a sweep that is started again tries it again
    states = {'finished': TrialState.COMPLETE, 'pruned': TrialState.PRUNED}
    state = states.get(result['state'], TrialState.FAIL)
    if result['score'] is None and state is TrialState.COMPLETE:
      state = TrialState.FAIL
    score = result['score'] if state is TrialState.COMPLETE else None
    with self._recording():
      self._study.tell(self._trials[path], score, state)

  def results(self) -> list[dict[str, Any]]:
    """Return the result of each trial, by number."""
    from optuna.trial import TrialState

    return [
      processes.make_result(
        self._path(trial.number),
        dict(trial.params),
        0 if trial.state is TrialState.PRUNED else trial.user_attrs.get(EXIT_CODE, 1),
      )
      for trial in self._study.get_trials()
    ]

  def _check_trials(self) -> None:
    """Check the trials of the log: another user may have written it, and settings are arguments.

    Raises:
      ValueError: for a setting that the sweep does not vary, a value outside its space, or a score
        that is not a number.
    """
    trials = self._study.get_trials(deepcopy=False)
    if len(trials) > self._count:
      raise ValueError(f'it has {len(trials)} trials, expected at most {self._count}')
    for trial in trials:
      for name, value in trial.params.items():
        space = self._spaces.get(name)
        if space is None:
          raise ValueError(f'trial {trial.number} has {name:.99}, which the sweep does not vary')
        if not space.has(value):
          raise ValueError(f'trial {trial.number} has {name} {value!r:.99}, expected {space}')
      if type(code := trial.user_attrs.get(EXIT_CODE, 1)) is not int:
        raise ValueError(f'trial {trial.number} has the exit code {code!r:.99}')
      scores = trial.intermediate_values
      for score in (*(trial.values or ()), *scores, *scores.values()):
        if not isinstance(score, int | float):
          raise ValueError(f'trial {trial.number} has the score {score!r:.99}, expected a number')


def _suggest(trial: Any, name: str, space: ChoiceSpace | RangeSpace) -> Any:
  if isinstance(space, ChoiceSpace):
    return trial.suggest_categorical(name, [settings.parse_value(v) for v in space.values])
  if space.whole:
    return trial.suggest_int(name, int(space.low), int(space.high), log=space.log)
  return trial.suggest_float(name, space.low, space.high, log=space.log)
