"""A sweep: its record, its trials, and its table, picture and best command."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.experiments.sweep import processes, settings
from podrace.experiments.sweep.proposals import OptunaStudy, check_optuna
from podrace.experiments.sweep.settings import ChoiceSpace, RangeSpace, Setting, Spaces
from podrace.run.metrics import Line
from podrace.settings import user_code
from podrace.settings.config import Config
from podrace.settings.record import (
  changes,
  complete,
  to_json,
  unrecorded_options,
  with_unrecorded,
)
from podrace.system import locks
from podrace.system.files import check_folder, make_user_folder, write_whole
from podrace.system.files.reading import read_json, read_object
from podrace.system.output import tell

Trials = list[dict[str, Any]]  # settings, score, state, run (and member) of each trial


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Settings of a sweep."""

  folder: Path
  config: Config
  options: list[str]  # arguments of `podrace train`
  spaces: Spaces
  method: str
  trials: int
  every: int  # steps between changes of a population
  prune: bool
  jobs: int
  separate: bool  # one process for each trial

  def record(self) -> dict[str, Any]:
    """Return the record that must stay the same when the sweep is resumed."""
    spaces = {name: dataclasses.asdict(space) for name, space in self.spaces.items()}
    for space in spaces.values():
      if 'values' in space:
        space['values'] = list(space['values'])
    return {
      'config': to_json(self.config),
      'vary': spaces,
      'method': self.method,
      'trials': self.trials,
      'every': self.every,
      'prune': self.prune,
      'processes': self.separate,
    }


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Any]:
  """Train all settings that are not trained yet, and return the results, best first.

  Args:
    sweep: settings of the sweep.
    say: receives progress messages.

  Raises:
    UsageError: if the settings are wrong, or the directory holds another sweep.
    RunError: if no setting could be trained, or no episode ended. results.json is written first.
  """
  sweep = complete_from_record(sweep)
  if sweep.method == 'tpe':
    check_optuna()
    record_sweep(sweep)
    results = _train_proposed(sweep, say)
  else:
    seed = sweep.config.seed
    settings_list = (
      settings.make_grid(sweep.spaces)
      if sweep.method == 'grid'
      else settings.draw_random(sweep.spaces, sweep.trials, seed)
    )
    results = _train_all(sweep, settings_list, say)
  results.sort(key=lambda t: -float('inf') if t['score'] is None else t['score'], reverse=True)
  results_path = sweep.folder / 'results.json'
  write_whole(results_path, json.dumps(results, indent=2) + '\n')
  if results[0]['score'] is None:
    if any(t['state'] == 'finished' for t in results):
      raise RunError(
        f'no episode ended, so no setting is the best: the settings are in {results_path}; give a '
        'larger --total-steps and another --dir'
      )
    if any(t['state'] == 'diverged' for t in results):
      raise RunError(f'all settings have diverged: they are in {results_path}; try other values')
    raise RunError(f'no setting could be trained: see output.txt in {results[0]["run"]}')
  best = results[0]
  command = ['podrace', *processes.make_arguments(sweep.options, best['settings'])]
  if sweep.method == 'pbt':
    command = ['podrace', 'export', best['run'], 'policy', '--member', str(best['member'])]
  return {
    'best': best,
    'command': shlex.join(command),
    'results': str(results_path),
    'plot': _draw(sweep, results),
    'trials': results,
  }


def complete_from_record(sweep: Sweep) -> Sweep:
  """Return the sweep with fields that its older record lacks at their values of then."""
  record = (_read_record(sweep) or {}).get('config')
  if not isinstance(record, dict):
    return sweep
  options = [*sweep.options, *unrecorded_options(sweep.config, record)]
  return dataclasses.replace(sweep, config=with_unrecorded(sweep.config, record), options=options)


def _read_record(sweep: Sweep) -> dict[str, Any] | None:
  """Return the record in the sweep's directory, or None.

  Raises:
    UsageError: if it is damaged.
  """
  path = sweep.folder / 'sweep.json'
  check_folder(sweep.folder, '--dir')
  try:
    return read_object(path, {})
  except UnreadableFile as e:
    raise UsageError(f'{path} is damaged: it {e.reason}; remove it to start again') from e


def record_sweep(sweep: Sweep) -> None:
  """Record the sweep, or check that its directory holds the same one.

  Raises:
    UsageError: if the directory holds another sweep.
  """
  before, now = _read_record(sweep), sweep.record()
  if before is not None:
    if isinstance(record := before.get('config'), dict):
      before['config'] = complete(record, user_code.named_modules(now['config']))
    if changed := list(map(str, changes(before, now))):
      raise UsageError(
        f'{sweep.folder} holds another sweep:\n  ' + '\n  '.join(changed) + '\ngive another --dir'
      )
    return
  make_user_folder(sweep.folder)
  write_whole(sweep.folder / 'sweep.json', json.dumps(now, indent=2) + '\n')


def _train_all(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  """Train settings that are known from the beginning."""
  from podrace.experiments.sweep import together

  why = '--processes' if sweep.separate else together.why_not(sweep.config, tried)
  if sweep.method == 'pbt':
    if why:
      raise UsageError(f'--method pbt is one program, and these settings cannot be: {why}')
    if len(tried) < 2 or sweep.config.seeds > 1:
      raise UsageError('--method pbt needs at least 2 --trials, each of one seed')
  record_sweep(sweep)
  if why:
    say(f'a process for each of {len(tried)} settings: {why}')
    return _train_in_processes(sweep, tried, say)
  say(f'{len(tried)} settings in one program')
  config, population = sweep.config, None
  if sweep.method == 'pbt':
    population = together.Population(sweep.spaces, config.seed, sweep.folder / 'population.json')
    config = dataclasses.replace(config, log_every=sweep.every or config.total_steps // 20)
  run_dir = sweep.folder / 'run'
  returns, diverged = together.train(config, tried, run_dir, population, quiet=False)
  history = population and (population.history or read_json(sweep.folder / 'population.json'))
  if history:  # of a run that had ended, the file has it
    tried = [_last_values(history, i, setting) for i, setting in enumerate(tried)]
  return [
    {
      'settings': s, 'score': None if bad else _mean(r), 'scores': r, 'run': str(run_dir),
      'state': 'diverged' if bad else 'finished', 'member': i * len(r),
    }
    for i, (s, r, bad) in enumerate(zip(tried, returns, diverged, strict=True))
  ]  # fmt: skip


def _last_values(history: list[dict[str, Any]], member: int, setting: Setting) -> Setting:
  """Return the newest values of a member of a population that had not diverged by then."""
  from podrace.experiments.sweep.together import field_path

  for change in reversed(history):
    values = {name: change['values'][field_path(name)][member] for name in setting}
    if None not in values.values():
      return values
  return setting


def _mean(returns: list[float | None]) -> float | None:
  known = [r for r in returns if r is not None]
  return sum(known) / len(known) if known else None


def _train_in_processes(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  paths = {sweep.folder / f'{i:04d}': setting for i, setting in enumerate(tried)}
  results: Trials = []

  def record_end(path: Path, code: int) -> None:
    results.append(processes.make_result(path, paths[path], code))

  _run_trials(sweep, paths.items(), record_end, lambda path, line: False, say)
  return results


def _run_trials(
  sweep: Sweep,
  trials: Iterable[tuple[Path, Setting]],
  ended: Callable[[Path, int], None],
  line: Callable[[Path, Line], bool],
  say: Callable[[str], None],
) -> None:
  """Run a process for each setting, and say when it begins and ends.

  Raises:
    UsageError: if another sweep runs in the directory: both would record the same trials.
  """
  begun: dict[Path, Setting] = {}

  def commands() -> Iterator[tuple[Path, list[str]]]:
    for path, setting in trials:  # read when a process is free
      begun[path] = setting
      if processes.read_summary(path) is None:
        say(f'{settings.describe(setting)}: begins, see {path / "output.txt"}')
      yield path, processes.make_arguments(sweep.options, setting, path)

  def say_end(path: Path, code: int) -> None:
    ended(path, code)
    result = processes.make_result(path, begun[path], code)
    score = 'no return' if result['score'] is None else f'return {result["score"]:.2f}'
    say(f'{settings.describe(begun[path])}: {result["state"]}, {score}, see {path / "output.txt"}')

  try:
    file = locks.lock(sweep.folder)
  except BlockingIOError:
    raise UsageError(f'{sweep.folder} is in use by another sweep that is still going') from None
  except OSError as e:
    raise UsageError(f'{sweep.folder} cannot be locked: {e.strerror}') from e
  with file:
    processes.run_trials(commands(), sweep.jobs, say_end, line, say)


def _train_proposed(sweep: Sweep, say: Callable[[str], None]) -> Trials:
  """Train settings that Optuna proposes."""
  study = OptunaStudy(sweep.folder, sweep.spaces, sweep.trials, sweep.config.seed, sweep.prune)
  say(f'{sweep.trials} settings, {sweep.jobs} at a time; Optuna proposes them')
  _run_trials(sweep, study.settings(), study.finish, study.report, say)
  return study.results()


# --- the picture ----------------------------------------------------------------------------------


def _draw(sweep: Sweep, trials: Trials) -> str | None:
  """Draw the returns by each varied field. Say why, and return None, if that is impossible."""
  from podrace.experiments import plot

  out = sweep.folder / 'sweep.png'
  try:
    plot.check_out(out)
    plot.draw_sweep(trials, {name: _is_log(space) for name, space in sweep.spaces.items()}, out)
  except UsageError as e:
    tell(f'there is no picture: {e}')
    return None
  return str(out)


def _is_log(space: ChoiceSpace | RangeSpace) -> bool:
  """Return whether the values of a space are above 0 and span at least a factor of 20."""
  if isinstance(space, RangeSpace):
    return space.log
  values = [settings.parse_value(v) for v in space.values]
  numbers = [v for v in values if isinstance(v, int | float)]
  return len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 20 * min(numbers)
