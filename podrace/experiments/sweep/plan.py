"""A sweep from its beginning, or from where it was, to its table, its picture and the best command."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.experiments.sweep import processes, settings
from podrace.experiments.sweep.settings import Choices, Range, Setting, Spaces
from podrace.run.directory import reason
from podrace.run.metrics import Line
from podrace.settings import user_code
from podrace.settings.config import Config
from podrace.settings.record import (
  complete,
  differences,
  to_json,
  unrecorded_options,
  with_unrecorded,
)
from podrace.system.files import check_folder, make_user_folder, open_append, open_lock, write_whole
from podrace.system.files.reading import read_object
from podrace.system.importing import why_not

Trials = list[dict[str, Any]]  # settings, score, state, run (and member) of each


@dataclasses.dataclass(frozen=True)
class Sweep:
  """What a sweep is."""

  folder: Path
  config: Config
  given: list[str]  # arguments of `podrace train`
  spaces: Spaces
  method: str
  trials: int
  every: int  # steps between changes of a population
  prune: bool
  jobs: int
  separate: bool  # a process each

  def described(self) -> dict[str, Any]:
    """What must be the same when it goes on."""
    spaces = {name: dataclasses.asdict(space) for name, space in self.spaces.items()}
    for space in spaces.values():
      if 'values' in space:
        space['values'] = list(space['values'])
    return {
      'config': to_json(self.config), 'vary': spaces, 'method': self.method, 'trials': self.trials, 'every': self.every,
      'prune': self.prune, 'processes': self.separate,
    }  # fmt: skip


def carry_out(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Any]:
  """Trains all settings that are not trained yet; what came of them, best first.

  Raises:
    UsageError: if the settings can't be right, or the directory holds another sweep.
    RunError: if no setting could be trained.
  """
  sweep = continued(sweep)
  if sweep.method == 'tpe':
    _check_optuna()
    begin(sweep)
    found = _proposed(sweep, say)
  else:
    seed = sweep.config.seed
    tried = (
      settings.grid(sweep.spaces)
      if sweep.method == 'grid'
      else settings.random(sweep.spaces, sweep.trials, seed)
    )
    found = _all(sweep, tried, say)
  found.sort(key=lambda t: -float('inf') if t['score'] is None else t['score'], reverse=True)
  if found[0]['score'] is None:
    raise RunError(f'no setting could be trained: see output.txt in {found[0]["run"]}')
  results = sweep.folder / 'results.json'
  write_whole(results, json.dumps(found, indent=2) + '\n')
  best = found[0]
  command = ['podrace', *processes.arguments(sweep.given, best['settings'])]
  if sweep.method == 'pbt':
    command = ['podrace', 'export', best['run'], 'policy', '--member', str(best['member'])]
  return {
    'best': best, 'command': shlex.join(command), 'results': str(results), 'plot': _draw(sweep, found), 'trials': found,
  }  # fmt: skip


def continued(sweep: Sweep) -> Sweep:
  """Return the sweep with fields that the record of its directory lacks as it began."""
  record = (_recorded(sweep) or {}).get('config')
  if not isinstance(record, dict):
    return sweep
  given = [*sweep.given, *unrecorded_options(sweep.config, record)]
  return dataclasses.replace(sweep, config=with_unrecorded(sweep.config, record), given=given)


def _recorded(sweep: Sweep) -> dict[str, Any] | None:
  """What the sweep's directory records; None if there is nothing yet."""
  path = sweep.folder / 'sweep.json'
  check_folder(sweep.folder, '--dir')
  try:
    return read_object(path, {})
  except UnreadableFile as e:
    raise UsageError(f'{path} is damaged: it {e.reason}; remove it to begin anew') from e


def begin(sweep: Sweep) -> None:
  """Records the sweep, or finds that it is the one that is there."""
  before, now = _recorded(sweep), sweep.described()
  if before is not None:
    if isinstance(record := before.get('config'), dict):
      before['config'] = complete(record, user_code.named_modules(now['config']))
    if changed := differences(before, now):
      raise UsageError(
        f'{sweep.folder} holds another sweep:\n  ' + '\n  '.join(changed) + '\ngive another --dir'
      )
    return
  make_user_folder(sweep.folder)
  write_whole(sweep.folder / 'sweep.json', json.dumps(now, indent=2) + '\n')


def _all(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  """Trains settings that are known from the beginning."""
  from podrace.experiments.sweep import together

  why = '--processes' if sweep.separate else together.why_not(sweep.config, tried)
  if sweep.method == 'pbt':
    if why:
      raise UsageError(f'--method pbt is one program, and these settings cannot be: {why}')
    if len(tried) < 2 or sweep.config.seeds > 1:
      raise UsageError('--method pbt needs at least 2 --trials, each of one seed')
  begin(sweep)
  if why:
    say(f'a process for each of {len(tried)} settings: {why}')
    return _in_processes(sweep, tried, say)
  say(f'{len(tried)} settings in one program')
  config, population = sweep.config, None
  if sweep.method == 'pbt':
    population = together.Population(sweep.spaces, config.seed)
    config = dataclasses.replace(config, log_every=sweep.every or config.total_steps // 20)
  run_dir = sweep.folder / 'run'
  returns = together.train(config, tried, run_dir, population, quiet=False)
  if population is not None and population.history:
    last = population.history[-1]['values']
    names = dict(zip(sweep.spaces, last, strict=True))
    tried = [{n: last[p][i] for n, p in names.items()} for i in range(len(tried))]
    write_whole(sweep.folder / 'population.json', json.dumps(population.history) + '\n')
  return [
    {'settings': s, 'score': _mean(r), 'scores': r, 'state': 'finished', 'run': str(run_dir), 'member': i * len(r)}
    for i, (s, r) in enumerate(zip(tried, returns, strict=True))
  ]  # fmt: skip


def _mean(returns: list[float | None]) -> float | None:
  known = [r for r in returns if r is not None]
  return sum(known) / len(known) if known else None


def _in_processes(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  paths = {sweep.folder / f'{i:04d}': setting for i, setting in enumerate(tried)}
  found: Trials = []
  commands = ((p, processes.arguments(sweep.given, s)) for p, s in paths.items())

  def ended(path: Path, code: int) -> None:
    found.append(_trial(path, paths[path], code))

  processes.carry_out(commands, sweep.jobs, ended, say=say)
  return found


def _trial(path: Path, setting: Setting, code: int) -> dict[str, Any]:
  summary = processes.summary_of(path) or {}
  score = summary.get('episode_return')
  returns = summary.get('episode_return_by_seed') or [score]
  state = 'finished' if summary else 'pruned' if code == 0 else f'failed, exit code {code}'
  return {'settings': setting, 'score': score, 'scores': returns, 'state': state, 'run': str(path)}


# --- Optuna ---------------------------------------------------------------------------------------


def _check_optuna() -> None:
  try:
    import optuna  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('--method tpe', 'sweep', e)) from e


class JournalLock:
  """Optuna's lock of its journal. Optuna's own is a link, and a stale link to nothing is waited for without end."""

  def __init__(self, journal: Path) -> None:
    self._path = journal.with_name(f'{journal.name}.flock')
    self._file: IO[str] | None = None

  def acquire(self) -> bool:
    """Wait until no other process has the journal."""
    self._file = open_lock(self._path)
    fcntl.flock(self._file, fcntl.LOCK_EX)
    return True

  def release(self) -> None:
    """Let other processes have the journal."""
    if self._file is not None:
      self._file.close()


def _proposed(sweep: Sweep, say: Callable[[str], None]) -> Trials:
  """Settings that Optuna proposes, each from what came of those before."""
  import optuna
  from optuna.storages import JournalStorage
  from optuna.storages.journal import JournalFileBackend
  from optuna.trial import TrialState

  optuna.logging.set_verbosity(optuna.logging.WARNING)
  journal = sweep.folder / 'study.log'
  lock: Any = JournalLock(journal)
  open_append(journal).close()  # Optuna opens it by its path, again and again
  try:
    study = optuna.create_study(
      storage=JournalStorage(JournalFileBackend(str(journal), lock)),
      study_name='sweep',
      direction='maximize',
      sampler=optuna.samplers.TPESampler(seed=sweep.config.seed),
      pruner=optuna.pruners.SuccessiveHalvingPruner()
      if sweep.prune
      else optuna.pruners.NopPruner(),
      load_if_exists=True,
    )
    _check_trials(study, sweep)
  except Exception as e:  # Optuna expects its own lines, and fails in many ways at other ones
    raise UsageError(
      f'{journal} is not the log of this sweep: {reason(e)}; remove it to begin anew'
    ) from e
  begun = study.get_trials(states=[TrialState.RUNNING])
  asked: dict[Path, Any] = {}
  found: Trials = []

  def setting_of(trial: Any) -> Setting:
    return {name: _suggested(trial, name, space) for name, space in sweep.spaces.items()}

  def commands() -> Iterator[tuple[Path, list[str]]]:
    for frozen in begun:  # a sweep that died was in the middle of them
      yield prepared(optuna.trial.Trial(study, frozen._trial_id))
    while len(study.get_trials()) < sweep.trials:
      yield prepared(study.ask())

  def prepared(trial: Any) -> tuple[Path, list[str]]:
    path = sweep.folder / f'{trial.number:04d}'
    asked[path] = trial
    return path, processes.arguments(sweep.given, setting_of(trial))

  def line(path: Path, line: Line) -> bool:
    if line.get('episode_return') is None or not sweep.prune:
      return False
    asked[path].report(line['episode_return'], line['step'])
    return bool(asked[path].should_prune())

  def ended(path: Path, code: int) -> None:
    trial = _trial(path, asked[path].params, code)
    state = {'finished': TrialState.COMPLETE, 'pruned': TrialState.PRUNED}.get(
      trial['state'], TrialState.FAIL
    )
    if trial['score'] is None and state is TrialState.COMPLETE:
      state = TrialState.FAIL
    study.tell(asked[path], trial['score'] if state is TrialState.COMPLETE else None, state)

  say(f'{sweep.trials} settings, {sweep.jobs} at a time; Optuna proposes them')
  processes.carry_out(commands(), sweep.jobs, ended, line, say)
  for frozen in study.get_trials():
    path = sweep.folder / f'{frozen.number:04d}'
    code = 0 if frozen.state is TrialState.PRUNED else 1
    found.append(_trial(path, dict(frozen.params), code))
  return found


def _check_trials(study: Any, sweep: Sweep) -> None:
  """Check trials of a log that another user may have written: their settings become arguments of `podrace train`.

  Raises:
    ValueError: for a setting that is not of this sweep, a value that is not in its space, or a score that is no number.
  """
  trials = study.get_trials(deepcopy=False)
  if len(trials) > sweep.trials:
    raise ValueError(f'it has {len(trials)} trials, expected at most {sweep.trials}')
  for trial in trials:
    for name, value in trial.params.items():
      space = sweep.spaces.get(name)
      if space is None:
        raise ValueError(f'trial {trial.number} has {name:.99}, which the sweep does not vary')
      if not space.has(value):
        raise ValueError(f'trial {trial.number} has {name} {value!r:.99}, expected {space}')
    scores = trial.intermediate_values
    for score in (*(trial.values or ()), *scores, *scores.values()):
      if not isinstance(score, int | float):
        raise ValueError(f'trial {trial.number} has the score {score!r:.99}, expected a number')


def _suggested(trial: Any, name: str, space: Choices | Range) -> Any:
  if isinstance(space, Choices):
    return trial.suggest_categorical(name, [settings.value_of(v) for v in space.values])
  if space.whole:
    return trial.suggest_int(name, int(space.low), int(space.high), log=space.log)
  return trial.suggest_float(name, space.low, space.high, log=space.log)


# --- the picture ----------------------------------------------------------------------------------


def _draw(sweep: Sweep, found: Trials) -> str | None:
  """The returns by each varied field, as a picture; None without matplotlib."""
  from podrace.experiments import plot

  try:
    import matplotlib  # noqa: F401
  except ImportError:
    return None
  out = sweep.folder / 'sweep.png'
  plot.draw_sweep(found, {name: _is_log(space) for name, space in sweep.spaces.items()}, out)
  return str(out)


def _is_log(space: Choices | Range) -> bool:
  """Whether the values of a space span a factor of 20 and more, above 0."""
  if isinstance(space, Range):
    return space.log
  values = [settings.value_of(v) for v in space.values]
  numbers = [v for v in values if isinstance(v, int | float)]
  return len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 20 * min(numbers)
