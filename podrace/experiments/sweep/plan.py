"""A sweep from its beginning, or from where it was, to its table, its picture and the best command."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.experiments.sweep import processes, settings
from podrace.experiments.sweep.proposals import OptunaStudy, check_optuna
from podrace.experiments.sweep.settings import ChoiceSpace, RangeSpace, Setting, Spaces
from podrace.settings import user_code
from podrace.settings.config import Config
from podrace.settings.record import (
  completed,
  differences,
  to_json,
  unrecorded_options,
  with_unrecorded,
)
from podrace.system.files import check_folder, make_user_folder, write_whole
from podrace.system.files.reading import read_object

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

  def record(self) -> dict[str, Any]:
    """What must be the same when it goes on."""
    spaces = {name: dataclasses.asdict(space) for name, space in self.spaces.items()}
    for space in spaces.values():
      if 'values' in space:
        space['values'] = list(space['values'])
    return {
      'config': to_json(self.config), 'vary': spaces, 'method': self.method, 'trials': self.trials, 'every': self.every,
      'prune': self.prune, 'processes': self.separate,
    }  # fmt: skip


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Any]:
  """Trains all settings that are not trained yet; what came of them, best first.

  Raises:
    UsageError: if the settings can't be right, or the directory holds another sweep.
    RunError: if no setting could be trained.
  """
  sweep = complete_from_record(sweep)
  if sweep.method == 'tpe':
    check_optuna()
    record_sweep(sweep)
    found = _train_proposed(sweep, say)
  else:
    seed = sweep.config.seed
    tried = (
      settings.make_grid(sweep.spaces)
      if sweep.method == 'grid'
      else settings.draw_random(sweep.spaces, sweep.trials, seed)
    )
    found = _train_all(sweep, tried, say)
  found.sort(key=lambda t: -float('inf') if t['score'] is None else t['score'], reverse=True)
  if found[0]['score'] is None:
    raise RunError(f'no setting could be trained: see output.txt in {found[0]["run"]}')
  results = sweep.folder / 'results.json'
  write_whole(results, json.dumps(found, indent=2) + '\n')
  best = found[0]
  command = ['podrace', *processes.make_arguments(sweep.given, best['settings'])]
  if sweep.method == 'pbt':
    command = ['podrace', 'export', best['run'], 'policy', '--member', str(best['member'])]
  return {
    'best': best, 'command': shlex.join(command), 'results': str(results), 'plot': _draw(sweep, found), 'trials': found,
  }  # fmt: skip


def complete_from_record(sweep: Sweep) -> Sweep:
  """Return the sweep with fields that the record of its directory lacks as it began."""
  record = (_read_record(sweep) or {}).get('config')
  if not isinstance(record, dict):
    return sweep
  given = [*sweep.given, *unrecorded_options(sweep.config, record)]
  return dataclasses.replace(sweep, config=with_unrecorded(sweep.config, record), given=given)


def _read_record(sweep: Sweep) -> dict[str, Any] | None:
  """What the sweep's directory records; None if there is nothing yet."""
  path = sweep.folder / 'sweep.json'
  check_folder(sweep.folder, '--dir')
  try:
    return read_object(path, {})
  except UnreadableFile as e:
    raise UsageError(f'{path} is damaged: it {e.reason}; remove it to begin anew') from e


def record_sweep(sweep: Sweep) -> None:
  """Records the sweep, or finds that it is the one that is there."""
  before, now = _read_record(sweep), sweep.record()
  if before is not None:
    if isinstance(record := before.get('config'), dict):
      before['config'] = completed(record, user_code.named(now['config']))
    if changed := differences(before, now):
      raise UsageError(
        f'{sweep.folder} holds another sweep:\n  ' + '\n  '.join(changed) + '\ngive another --dir'
      )
    return
  make_user_folder(sweep.folder)
  write_whole(sweep.folder / 'sweep.json', json.dumps(now, indent=2) + '\n')


def _train_all(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  """Trains settings that are known from the beginning."""
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


def _train_in_processes(sweep: Sweep, tried: list[Setting], say: Callable[[str], None]) -> Trials:
  paths = {sweep.folder / f'{i:04d}': setting for i, setting in enumerate(tried)}
  found: Trials = []
  commands = ((p, processes.make_arguments(sweep.given, s)) for p, s in paths.items())

  def ended(path: Path, code: int) -> None:
    found.append(processes.make_result(path, paths[path], code))

  processes.run_trials(commands, sweep.jobs, ended, say=say)
  return found


def _train_proposed(sweep: Sweep, say: Callable[[str], None]) -> Trials:
  """Train settings that Optuna proposes."""
  study = OptunaStudy(sweep.folder, sweep.spaces, sweep.trials, sweep.config.seed, sweep.prune)
  say(f'{sweep.trials} settings, {sweep.jobs} at a time; Optuna proposes them')
  commands = ((path, processes.make_arguments(sweep.given, s)) for path, s in study.settings())
  processes.run_trials(commands, sweep.jobs, study.finish, study.report, say)
  return study.results()


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


def _is_log(space: ChoiceSpace | RangeSpace) -> bool:
  """Whether the values of a space span a factor of 20 and more, above 0."""
  if isinstance(space, RangeSpace):
    return space.log
  values = [settings.parse_value(v) for v in space.values]
  numbers = [v for v in values if isinstance(v, int | float)]
  return len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 20 * min(numbers)
