"""Runs of a suite: train, evaluate and record its programs, and go on after any interruption."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.experiments import runs
from podrace.experiments.suites.kills import kill_repeatedly
from podrace.experiments.suites.records import (
  Record,
  commit,
  failing,
  make_record,
  read_record,
  read_records,
  record_path,
  write_record,
)
from podrace.experiments.suites.suite import Program, Suite
from podrace.experiments.sweep import processes
from podrace.run.directory import continued, differences_of, locked
from podrace.run.metrics import Line
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.settings.resolved import Resolved
from podrace.system.files import check_folder, make_user_folder, remove

NEARLY = 0.99  # part of a program that has trained and is not recorded yet
SHOWN = 300.0  # seconds between messages about the progress
EVALUATION_SEED = 1_000_000  # added to the first seed of a program


@dataclasses.dataclass(frozen=True)
class Reproduction:
  """A suite, or a part of it, that is to be run.

  Attributes:
    suite: the suite.
    programs: the programs to run.
    configs: configuration of each program, by its name.
    folder: directory of the run directories.
    to: directory of the records.
    jobs: number of processes.
    again: discard records and runs of other settings.
  """

  suite: Suite
  programs: Sequence[Program]
  configs: Mapping[str, Config]
  folder: Path
  to: Path
  jobs: int
  again: bool

  def run_dir(self, program: Program) -> Path:
    """Return the run directory of a program."""
    return self.folder / program.name


def reproduce(plan: Reproduction, say: Callable[[str], None]) -> dict[str, Record]:
  """Run the programs that have no record yet, and return all records of the suite.

  Args:
    plan: the programs.
    say: receives progress messages.

  Raises:
    UsageError: if a record or a begun run has other settings, or a program does not accept its own.
    RunError: if a program fails. The remaining programs run first, in both cases.
  """
  check_settings(plan, say)
  remaining = {plan.run_dir(p): p for p in plan.programs if not _is_recorded(plan, p)}
  watch = Watch(plan, remaining, say)
  say(
    f'{plan.suite.name}: {len(plan.programs) - len(remaining)} of {len(plan.programs)} programs '
    f'are recorded in {plan.to}; the rest takes {format_time(watch.estimate.seconds_left())}, '
    f'{plan.jobs} at a time'
  )
  for folder in (plan.folder, plan.to):
    with failing(folder):
      make_user_folder(folder)
  with failing(plan.folder):
    processes.run_trials(
      [(path, _child_arguments(plan, program)) for path, program in remaining.items()],
      plan.jobs, watch.end, watch.line, say, lambda path: _is_recorded(plan, remaining[path]),
    )  # fmt: skip
  if watch.failed:
    count = f'{len(watch.failed)} of {len(remaining)} programs of {plan.suite.name} failed:'
    error = UsageError if watch.is_usage else RunError
    raise error('\n'.join([count, *watch.failed]))
  return read_records(plan.to, plan.suite)


class Watch:
  """Receives the ends and the lines of metrics of the programs' processes, and shows them.

  Attributes:
    estimate: the time left.
    failed: a message about each program that failed.
    is_usage: whether one of them did not accept its settings.
  """

  def __init__(
    self, plan: Reproduction, remaining: Mapping[Path, Program], say: Callable[[str], None]
  ) -> None:
    self._plan, self._remaining, self._say = plan, remaining, say
    self.estimate = Estimate(list(remaining.values()), plan.jobs)
    self.failed: list[str] = []
    self.is_usage = False

  def end(self, path: Path, code: int) -> None:
    """Take the exit code of a program."""
    program = self._remaining[path]
    recorded = _is_recorded(self._plan, program)  # perhaps by another `podrace reproduce`
    self.estimate.end(program.name)
    if not recorded:
      result = f'ended with {code}: {_last_message(path / "output.txt")}'
      self.failed.append(f'{program.name} {result}')
      self.is_usage |= code == 2
    else:
      record = read_record(self._plan.to, self._plan.suite, program)
      result = describe_scores(record) if record else 'its record was removed'
    self._show(f'{program.name}: {result}; ')

  def line(self, path: Path, values: Line) -> bool:
    """Take a line of metrics. No program is to end early."""
    if self.estimate.update(self._remaining[path], values):
      self._show('')
    return False

  def _show(self, begin: str) -> None:
    left = format_time(self.estimate.seconds_left())
    self._say(f'{begin}{self.estimate.describe()}, {left} left')


def _is_recorded(plan: Reproduction, program: Program) -> bool:
  return record_path(plan.to, program).exists()


def _child_arguments(plan: Reproduction, program: Program) -> list[str]:
  """Return the command that runs one program in its own process."""
  return [
    'reproduce', *plan.suite.words, '--program', program.name, '--to', str(plan.to),
    '--dir', str(plan.folder),
  ]  # fmt: skip


def check_settings(plan: Reproduction, say: Callable[[str], None]) -> None:
  """Compare recorded and begun programs with the suite.

  Raises:
    UsageError: if settings differ or a record is damaged, unless `again` discards these programs.
  """
  check_folder(plan.to, '--to')
  records: dict[str, Record] = {}
  other_commits: collections.Counter[str] = collections.Counter()
  now = commit()
  differ: dict[Program, list[str]] = {}
  for program in plan.programs:
    config, run_dir = plan.configs[program.name], plan.run_dir(program)
    try:
      record = read_record(plan.to, plan.suite, program)
      begun = differences_of(config, run_dir) if record is None and run_dir.is_dir() else []
    except UnreadableFile as e:
      if not plan.again:
        raise UsageError(f'{e}; podrace reproduce --again trains it again') from e
      differ[program] = [e.reason]
      continue
    differences = list(map(str, begun))
    if record is not None:
      records[program.name] = record
      differences = record.differences(program, to_json(config))
      if not differences and (then := record.content['commit']) != now:
        other_commits[then] += 1
    if differences:
      differ[program] = differences
  for name, count in other_commits.items():
    say(f'{count} programs were recorded by another commit, {name:.20}, with the same settings')
  if differ and not plan.again:
    raise UsageError(_describe_differences(plan, records, differ))
  for program, differences in differ.items():
    run_dir = plan.run_dir(program)
    if os.path.lexists(run_dir / 'config.json'):  # else no run has begun there
      runs.remove(run_dir)
    remove(record_path(plan.to, program))
    say(f'{program.name} is trained again: {"; ".join(differences)}')


def _describe_differences(
  plan: Reproduction, records: Mapping[str, Record], differ: Mapping[Program, list[str]]
) -> str:
  groups: dict[tuple[str, ...], list[Program]] = {}
  for program, differences in differ.items():
    groups.setdefault(tuple(differences), []).append(program)
  lines = []
  for texts, programs in groups.items():
    record = records.get(programs[0].name)
    by = f'by commit {record.content["commit"]:.20}' if record else 'begun, not recorded'
    place = record.path if record else plan.run_dir(programs[0])
    more = f', and {len(programs) - 1} like it' if programs[1:] else ''
    lines.append(f'{place}{more}, {by}: {"; ".join(texts)}')
  return '\n'.join([
    f'{len(differ)} programs of {plan.suite.name} have other settings than the suite:', *lines[:3],
    *(['  ...'] if len(lines) > 3 else []),
    'give another --to and --dir, or --again to train these programs again',
  ])  # fmt: skip


def _last_message(path: Path) -> str:
  """Return the error that a program ended with, which may have several lines, or its last line."""
  try:
    lines = path.read_text(encoding='utf-8', errors='replace').rstrip().splitlines()
  except OSError:
    return 'it left no output'
  begins = [i for i, line in enumerate(lines) if line.startswith('podrace: ')]
  message = ' '.join(lines[begins[-1] if begins else -1 :])
  return f'{message[:500]} ({path})' if lines else 'it left no output'


def run_program(
  plan: Reproduction, program: Program, change: Callable[[Config, Sequence[str]], Config],
  say: Callable[[str], None],
) -> Path:  # fmt: skip
  """Train, evaluate and record one program in this process, and return the record's path.

  Args:
    plan: the suite and the directories.
    program: the program.
    change: returns a configuration with options of the agent, for the evaluation.
    say: receives progress messages.
  """
  from podrace.run.evaluate import check_acting, check_numbers, evaluate, stage_of
  from podrace.run.loop import train

  config, run_dir = plan.configs[program.name], plan.run_dir(program)
  make_user_folder(plan.folder)
  how, seed = program.evaluation, EVALUATION_SEED + program.first
  check_numbers(how.episodes, how.max_steps, seed)  # a mistake shows before training
  acting = Resolved(config).acting
  check_acting(acting.agent, (how.acting,))
  stage_of(acting, how.env)
  killed_at = kill_repeatedly(program, run_dir, say) if program.kills else []
  summary = train(config, run_dir)
  with locked(run_dir):  # so that another `podrace reproduce` waits
    evaluated = evaluate(
      run_dir, how.episodes, seed, (how.acting,), how.max_steps,
      config=change(continued(config, run_dir), how.options), say=say, env=how.env,
    )  # fmt: skip
    record = make_record(
      plan.suite, program, to_json(config), summary, run_dir, evaluated, killed_at
    )
    return write_record(plan.to, program, record)


def describe_scores(record: Record) -> str:
  """Return the mean scores of a record in words."""
  training, evaluated = (record.scores(name) for name in ('training', 'evaluated'))
  if not (len(training) and len(evaluated)):
    return 'no episode ended'
  return (
    f'training {training.mean():,.2f}, evaluated {evaluated.mean():,.2f} '
    f'({len(evaluated)} seed{"s" * (len(evaluated) > 1)})'
  )


class Estimate:
  """The time that programs still take, from the speeds in the suite and the measured speed.

  Args:
    programs: the programs to run.
    jobs: number of programs at a time.
  """

  def __init__(self, programs: Sequence[Program], jobs: int) -> None:
    self._jobs = min(jobs, max(1, len(programs)))
    self._seconds = {p.name: p.seconds for p in programs}
    self._done = dict.fromkeys(self._seconds, 0.0)  # part of each program
    self._measured: dict[str, float] = {}  # seconds of each running or finished program
    self._shown = time.monotonic()

  def update(self, program: Program, line: Line) -> bool:
    """Take a line of a program's metrics. Returns whether a message is due."""
    self._done[program.name] = min(NEARLY, line['step'] / program.steps)
    self._measured[program.name] = line.get('wall_s') or 0.0
    due = time.monotonic() - self._shown >= SHOWN
    self._shown = time.monotonic() if due else self._shown
    return due

  def end(self, name: str) -> None:
    """Count a program as done."""
    self._done[name] = 1.0

  def describe(self) -> str:
    """Return the progress in words."""
    done = sum(x == 1.0 for x in self._done.values())
    under_way = [f'{name} {x:.0%}' for name, x in self._done.items() if 0.0 < x < 1.0]
    return ', '.join([f'{done} of {len(self._done)} programs done', *under_way])

  def seconds_left(self) -> float:
    """Return the estimated seconds until all programs are done."""
    expected = sum(self._seconds[name] * self._done[name] for name in self._measured)
    ratio = sum(self._measured.values()) / expected if expected else 1.0
    return ratio * sum(s * (1 - self._done[n]) for n, s in self._seconds.items()) / self._jobs


def format_time(seconds: float) -> str:
  """Return a duration in minutes or hours."""
  return f'{seconds / 3600:.1f} h' if seconds >= 3600 else f'{seconds / 60:.0f} min'
