"""Curves of runs: read them, group them by configuration, and aggregate them.

This uses NumPy only. `podrace.experiments.plot` draws, and `podrace.experiments.statistics`
aggregates over tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from podrace.errors import UnreadableFile, UsageError
from podrace.experiments.runs import log_of
from podrace.experiments.statistics import CURVE_RESAMPLES, interval, trimmed_mean
from podrace.experiments.sweep_members import Setting, split_config, take_seeds
from podrace.run import metrics, sinks
from podrace.run.directory import read_record
from podrace.run.summary import final_return_of
from podrace.system.files.reading import read_object
from podrace.system.files.schema import SUMMARY, is_number

Floats = np.ndarray
X = Literal['steps', 'wall', 'gradient-steps']
# settings in which runs of one group may differ
NOT_OF_GROUP = (
  'seed', 'seeds', 'keep', 'log_every', 'checkpoint_every', 'eval_every', 'eval_episodes',
  'eval_env', 'eval_video', 'version',
)  # fmt: skip
# metrics that are equal to the bit if two runs are the same
RESULTS = (
  'step', 'episodes', 'episode_return', 'episode_return_by_seed', 'episode_length', 'loss',
)  # fmt: skip
GRID = 200  # number of points of a group's curve


@dataclasses.dataclass(frozen=True)
class RunCurve:
  """A metric of one seed of one run."""

  x: Floats  # [L] rising
  y: Floats  # [L]
  run: Path
  final: float | None = None  # its mean in the last tenth, if not that of `y`


@dataclasses.dataclass(frozen=True)
class CurveGroup:
  """Curves of runs with one configuration, apart from NOT_OF_GROUP."""

  config: dict[str, Any]  # flat: path of each setting, such as agent.network.hidden, to its value
  curves: list[RunCurve]

  @property
  def log(self) -> str:
    """Data set that all environments replay, '' if one of them acts."""
    return log_of(self.config)

  @property
  def env(self) -> str:
    """Name of the environment and of such a data set. Groups with one name are comparable."""
    names = [str(self.config.get('env', '')), f'log {self.log}' if self.log else '']
    return ', '.join(filter(None, names))


@dataclasses.dataclass(frozen=True)
class LoggedRun:
  """The configuration and the metrics of a run, or of one setting of a sweep in one program."""

  path: Path
  config: dict[str, Any]  # as a CurveGroup has it
  seed: Any
  lines: list[metrics.Line]
  params_sha256: str  # hash of the last parameters of a finished run, otherwise ''
  settings: Sequence[Setting] = ()  # of a sweep in one program
  seeds: slice | None = None  # of one of these settings, in the lists of a line

  @property
  def group(self) -> str:
    """Key of the run's group."""
    return json.dumps(self.config, sort_keys=True)

  @property
  def identity(self) -> str:
    """Key that only copies and exact repetitions of the run share."""
    if self.params_sha256:
      return self.params_sha256
    results = [[line.get(name) for name in RESULTS] for line in self.lines]
    return hashlib.sha256(json.dumps([self.seed, results]).encode()).hexdigest()


class LoggedRuns(NamedTuple):
  """The runs that were read, and a message about each path that is left out."""

  runs: list[LoggedRun]
  wrong: dict[Path, str]
  copies: set[Path]  # paths left out because they repeat another run to the bit


# --- reading ------------------------------------------------------------------------------------


def read(paths: Sequence[Path], metric: str, x: X) -> tuple[list[CurveGroup], list[str]]:
  """Read runs into groups of curves, ordered by their first runs.

  Args:
    paths: run directories.
    metric: key of metrics.jsonl. `episode_return` of a run with many seeds gives a curve for each.
    x: quantity of the x axis.

  Returns:
    The groups, and messages about runs without a curve. A run that repeats another one to the bit
    is the same run, and counts once.
  """
  logged = read_runs(paths)
  groups: dict[str, CurveGroup] = {}
  for run in logged.runs:
    try:
      curves = extract_curves(run, metric, x)
    except UsageError as e:
      logged.wrong[run.path] = str(e)
      continue
    groups.setdefault(run.group, CurveGroup(run.config, [])).curves.extend(curves)
  return list(groups.values()), [logged.wrong[path] for path in paths if path in logged.wrong]


def read_runs(paths: Sequence[Path]) -> LoggedRuns:
  """Read runs, each once."""
  logged = LoggedRuns([], {}, set())
  counted: dict[tuple[str, str], Path] = {}  # by group and identity
  for path in paths:
    try:
      run = _read_run(path)
    except UsageError as e:
      logged.wrong[path] = str(e)
      continue
    first = counted.setdefault((run.group, run.identity), path)
    if first is path:
      logged.runs.extend(_split_settings(run))
    else:
      logged.copies.add(path)
      logged.wrong[path] = (
        f'{path}: counted once, as it has the settings and the results of {first}'
      )
  return logged


def _read_run(path: Path) -> LoggedRun:
  try:
    record = read_record(path)
  except UnreadableFile as e:
    raise UsageError(f'{path}: config.json cannot be read: it {e.reason}') from e
  if record is None:
    raise UsageError(f'{path}: config.json cannot be read: it is not there')
  try:
    config = {k: v for k, v in sinks.flatten_config(record).items() if k not in NOT_OF_GROUP}
  except UsageError as e:
    raise UsageError(f'{path}: {e}') from e
  lines = metrics.read(path / 'metrics.jsonl', shown=True)
  if not lines:
    raise UsageError(f'{path}: no line of metrics yet')
  settings = split_config(path, record, config)
  return LoggedRun(path, config, record.get('seed'), lines, _params_sha256(path), settings)


def _split_settings(run: LoggedRun) -> list[LoggedRun]:
  """Return a run for each setting of a sweep in one program, else the run itself."""
  return [
    dataclasses.replace(run, config=config, seeds=seeds, lines=take_seeds(run.lines, seeds))
    for config, seeds in run.settings
  ] or [run]


def extract_curves(run: LoggedRun, metric: str, x: X) -> list[RunCurve]:
  """Return the curves of a metric, one for each seed that the run logs apart.

  Raises:
    UsageError: if no line has the metric, or the position on the x axis is missing.
  """
  path, lines = run.path, run.lines
  by_seed = f'{metric}_by_seed'
  seeds = max(
    (len(line[by_seed]) for line in lines if isinstance(line.get(by_seed), list)), default=0
  )
  at = _positions(lines, x, path)
  if seeds * len(lines) > metrics.SHOWN_VALUES:  # shorter lists are padded below
    raise UsageError(
      f'{path}: metrics.jsonl has {len(lines):,} lines of up to {seeds:,} seeds, expected at most '
      f'{metrics.SHOWN_VALUES:,} numbers'
    )
  if seeds:
    lists = [v if isinstance(v := line.get(by_seed), list) else [] for line in lines]
    rows = [v + [None] * (seeds - len(v)) for v in lists]
  else:
    rows = [[line.get(metric)] for line in lines]
  y = np.array([[v if is_number(v) else np.nan for v in row] for row in rows], float)
  read_curves = curves_of(at, y.T, path)
  if metric == 'episode_return':
    final = final_return_of(lines)
    means = final.get('episode_return_by_seed') or [final['episode_return']]
    if len(means) == y.shape[1]:  # not so if the lines contradict each other
      known = itertools.compress(means, np.isfinite(y).any(axis=0))
      pairs = zip(read_curves, known, strict=True)
      read_curves = [dataclasses.replace(curve, final=mean) for curve, mean in pairs]
  if not read_curves:
    names = sorted(k for k, v in lines[-1].items() if isinstance(v, int | float) and k != 'step')
    alone = ' of each setting' if run.seeds else ''
    raise UsageError(f'{path}: no value of {metric}{alone}; it has {", ".join(names)}')
  return read_curves


def curves_of(x: Floats, rows: Floats, path: Path) -> list[RunCurve]:
  """Return the curves of rows [N, P] at positions x [P], without their NaN; none of a row of NaN.

  Between its values a row is linear. Its last value holds until the last position: a row that ends
  in NaN, such as of a seed whose episodes are long, has no other value there.
  """
  result = []
  for y in rows:
    known = np.isfinite(y)
    if known.any():
      end = x[-1:] if not known[-1] else x[:0]
      held = np.full(len(end), y[known][-1])
      result.append(RunCurve(np.append(x[known], end), np.append(y[known], held), path))
  return result


def _params_sha256(path: Path) -> str:
  """Return the hash of a finished run's parameters, '' if there is none."""
  with contextlib.suppress(UnreadableFile):
    sha256 = (read_object(path / 'summary.json', SUMMARY) or {}).get('params_sha256')
    return sha256 if isinstance(sha256, str) else ''
  return ''


def _positions(lines: list[metrics.Line], x: X, path: Path) -> Floats:
  key = {'steps': 'step', 'wall': 'wall_s', 'gradient-steps': 'gradient_steps'}[x]
  if not all(is_number(line.get(key)) for line in lines):
    raise UsageError(f'{path}: no {key} in its metrics; an older podrace made it')
  at = np.array([line[key] for line in lines], float)
  at = np.cumsum(at) if x == 'gradient-steps' else at
  if (np.diff(at) < 0).any():
    raise UsageError(f'{path}: {key} in its metrics goes back')
  return at


# --- one curve for a group ----------------------------------------------------------------------


CENTERS: dict[str, Callable[..., Floats]] = {
  'mean': np.mean, 'median': np.median, 'iqm': trimmed_mean,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Band:
  """Curve of a group. With fewer than two of its curves left, `low` and `high` are NaN."""

  x: Floats  # [P]
  center: Floats  # [P]
  low: Floats  # [P]
  high: Floats  # [P]
  count: Floats  # [P] number of curves


def make_band(curves: Sequence[RunCurve], center: str = 'mean') -> Band:
  """Aggregate curves at common positions, with 95% intervals.

  Each curve counts as far as it goes, linearly interpolated.
  """
  start = max(min(c.x[0] for c in curves), 0.0)
  grid = np.linspace(start, max(c.x[-1] for c in curves), GRID)
  if len(curves) == 1:
    only, none = curves[0], np.full(len(curves[0].x), np.nan)
    return Band(only.x, only.y, none, none, np.ones(len(only.x)))
  at = np.stack([np.interp(grid, c.x, c.y, left=np.nan, right=np.nan) for c in curves])  # [N, P]
  known = ~np.isnan(at)
  rows = np.full((4, len(grid)), np.nan)
  rows[3] = known.sum(axis=0)
  edges = np.flatnonzero(np.any(known[:, 1:] != known[:, :-1], axis=0)) + 1
  for part in np.split(np.arange(len(grid)), edges):  # the same curves are known in all of a part
    values = at[known[:, part[0]]][:, part]
    if len(values):
      rows[0, part] = CENTERS[center](values, axis=0)
    if len(values) > 1:
      rows[1:3, part] = interval(
        lambda tasks: CENTERS[center](tasks[0], axis=0), [values], resamples=CURVE_RESAMPLES
      )
  kept = rows[3] > 0
  return Band(grid[kept], *(row[kept] for row in rows))


def final_mean(curve: RunCurve) -> float:
  """Return the mean of a curve's last tenth.

  The mean of a return weighs episodes alike, as in summary.json. Any other weighs lines alike.
  """
  if curve.final is not None:
    return curve.final
  return float(np.mean(curve.y[curve.x >= 0.9 * curve.x[-1]]))
