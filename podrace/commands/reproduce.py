"""podrace reproduce: run a suite of published experiments again, and write its page."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podrace import hooks
from podrace.commands import configure
from podrace.errors import MissingExtra, UnknownName, UsageError
from podrace.experiments.suites import suite as suites
from podrace.run import compile_cache
from podrace.run.directory import check_directory
from podrace.settings.record import to_json
from podrace.system.options import Command, Option, Options
from podrace.system.output import (
  lasting_results,
  print_json,
  print_text,
  results,
  results_alone,
  tell,
)
from podrace.system.scheduling import cores

if TYPE_CHECKING:
  from podrace.experiments.suites.records import Record
  from podrace.experiments.suites.reproduce import Reproduction
  from podrace.settings.config import Config

CHECKOUT = Path(__file__).parents[2]  # of an editable installation
COMMAND = Command(
  'reproduce',
  'NAME [OPTIONS]',
  'train, evaluate and record all agents, tasks and seeds of a suite; started again, it goes on',
  (
    Option('--list', '', 'the suites, with their hours on two cores and what is recorded; with '
      'NAME, the programs of that suite'),
    Option('--only', 'TASK/AGENT', 'a part of the suite, as cartpole/ppo or cartpole/*, or a '
      'program, as cartpole.ppo.0; may be repeated'),
    Option('--seeds', 'N', 'only programs with a seed below N (default: all)'),
    Option('--steps', 'N', 'a trial of the suite, NAME-N: at most N steps for each program'),
    Option('--jobs', 'N', 'programs at a time (default: one for each core)'),
    Option('--to', 'DIR', f'directory of the records (default: {suites.RECORDS}/NAME, here, '
      'or in the checkout of podrace if only that has records)'),
    Option('--dir', 'DIR', 'directory of the run directories (default: runs/suites/NAME)'),
    Option('--again', '', 'discard records and runs of other settings, and train them again'),
    Option('--page', 'FILE', 'train nothing, and write a page about the records, such as '
      'docs/results/NAME.md, with its pictures'),
    Option('--program', 'NAME', 'only this program, such as cartpole.ppo.0, in this process'),
  ),
  """
NAME is a suite of --list, or your own file, NAME.toml. A program is one `podrace train`, with one
seed or more. Its record has the curve, the final scores, the configuration and the commit. Without
--list the last line printed is JSON.
""",
  jax=True,
  foreign={
    '--list': 'show all',
    '--only TASK/AGENT': 'task tasks agent agents env env-id filter algo',
    '--seeds': 'num-seeds n-seeds seed',
    '--jobs': 'n-jobs workers parallel num-workers',
    '--to DIR': 'out output results save',
    '--dir DIR': 'run-dir runs logdir',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Run the suite."""
  options = Options(args, COMMAND)
  _check_used(options)
  if '--list' in options and not options.arguments:
    _list()
    return 0
  steps = 0
  if '--steps' in options and (steps := options.whole('--steps')) < 1:
    raise UsageError('--steps must be at least 1')
  suite = suites.load(options.one_argument('suite'), steps)
  to = options.path('--to') or default_records(suite)
  if '--again' in options and '--to' not in options and to.is_absolute():
    raise UsageError(
      f'--again would discard records of the checkout of podrace, {to}: name the directory of your '
      'records, or that one, by --to'
    )
  folder = options.path('--dir') or Path('runs/suites') / suite.name
  for name, path in (('--to', to), ('--dir', folder)):
    check_directory(path, name)
  if '--list' in options:
    _list_programs(_select(suite, options), to, folder)
    return 0
  jobs = options.whole('--jobs') if '--jobs' in options else cores()
  if jobs < 1:
    raise UsageError('--jobs must be at least 1')
  if '--page' in options:
    from podrace.experiments.suites.page import write_page

    page = Path(options.text('--page'))
    check_directory(page.parent, '--page')
    if page.is_dir():
      raise UsageError(f'--page {page} is a directory: name a file in it')
    if page.suffix != '.md':
      raise UsageError(f'--page {page}: its name must end with .md')
    check_recorded(suite, to)
    print_json(write_page(suite, to, page))
    return 0
  from podrace.experiments.suites.reproduce import Reproduction

  programs = _select(suite, options)
  configs = _configure_all(suite, programs)
  plan = Reproduction(suite, programs, configs, folder, to, jobs, '--again' in options)
  return _run_alone(plan) if '--program' in options else _run_all(plan)


def _check_used(options: Options) -> None:
  """Raise UsageError for options that a list or a page does not use."""
  unused = {'--page': {'--only', '--seeds', '--program', '--again', '--list'}}
  unused['--list'] = {'--jobs', '--again'} if options.arguments else {*options.names} - {'--list'}
  for name, others in unused.items():
    if name in options and (wrong := sorted(others.intersection(options.names))):
      raise UsageError(f'{name} does not use {", ".join(wrong)}: leave it out')


def default_records(suite: suites.Suite) -> Path:
  """Return the directory of a suite's records: here, or in the checkout if only that has any."""
  from podrace.experiments.suites.records import record_path

  places = [root / suites.RECORDS / suite.name for root in (Path(), CHECKOUT)]
  recorded = [x for x in places if any(record_path(x, p).exists() for p in suite.programs)]
  return (recorded or places)[0]


def check_recorded(suite: suites.Suite, to: Path) -> None:
  """Refuse records of other settings than the suite has.

  Raises:
    UsageError: if there are any.
  """
  from podrace.experiments.suites.records import record_path
  from podrace.experiments.suites.reproduce import Reproduction, check_settings

  recorded = [p for p in suite.programs if os.path.lexists(record_path(to, p))]
  configs = _configure_all(suite, recorded)
  check_settings(Reproduction(suite, recorded, configs, to, to, 1, False), tell)


def _run_all(plan: Reproduction) -> int:
  from podrace.experiments.suites.page import summarize
  from podrace.experiments.suites.records import check_hashes
  from podrace.experiments.suites.reproduce import reproduce

  records = _with_settings_of(plan, reproduce(plan, tell))
  numbers = summarize(plan.suite, records)
  for task, agents in numbers.items():
    for agent, row in agents.items():
      tell(f'{task} {agent}: {row["evaluated"]}, training {row["training"]}')
  print_json({
    'suite': plan.suite.name, 'to': str(plan.to), 'programs': len(plan.suite.programs),
    'recorded': len(records), 'scores': numbers,
  }, lasting_results())  # fmt: skip
  if plan.suite.hashes:
    check_hashes(plan.suite, records)
  return 0


def _with_settings_of(plan: Reproduction, records: Mapping[str, Record]) -> dict[str, Record]:
  """Return the records that have the settings of the suite; names the ones that are left out.

  Programs that did not run may need a library that is missing here. Their records are left out too.
  """
  ran = {p.name for p in plan.programs}
  skipped = [p for p in plan.suite.programs if p.name in records and p.name not in ran]
  configs: dict[str, Config] = {}
  for _, programs in itertools.groupby(skipped, lambda p: (p.task, p.agent)):
    with contextlib.suppress(UsageError):
      configs |= _configure_all(plan.suite, [*programs])
  differ = [
    p.name
    for p in skipped
    if p.name not in configs or records[p.name].differences(p, to_json(configs[p.name]))
  ]
  if differ:
    tell(
      'left out below, as they have other settings than the suite, or settings that cannot be read '
      f'here: {", ".join(differ)}'
    )
  return {name: record for name, record in records.items() if name not in differ}


def _run_alone(plan: Reproduction) -> int:
  """Run one program in this process."""
  from podrace.experiments.suites.reproduce import run_program

  compile_cache.enable(tell)
  (program,) = plan.programs

  def change(config: Config, words: Sequence[str]) -> Config:
    return configure.parse(config, list(words), 'podrace reproduce') if words else config

  path = run_program(plan, program, change, tell)
  print_json({'record': str(path)}, lasting_results())
  return 0


def _select(suite: suites.Suite, options: Options) -> list[suites.Program]:
  """Return the programs that the options name."""
  programs = list(suite.programs)
  if '--program' in options:
    name = options.text('--program')
    programs = [p for p in programs if p.name == name]
    if not programs:
      raise UsageError(f'--program {name}: {suite.name} has no such program')
  for pattern in options.every('--only'):
    if not any(_matches(p, pattern) for p in programs):
      pairs = dict.fromkeys(f'{p.task}/{p.agent}' for p in suite.programs)
      raise UsageError(f'--only {pattern}: {suite.name} has {", ".join(pairs)}')
  if patterns := options.every('--only'):
    programs = [p for p in programs if any(_matches(p, x) for x in patterns)]
  if '--seeds' in options:
    if (seeds := options.whole('--seeds')) < 1:
      raise UsageError('--seeds must be at least 1')
    programs = [p for p in programs if p.first < seeds]
    if not programs:
      raise UsageError(f'no program has a seed below --seeds {seeds}')
  return programs


def _matches(program: suites.Program, pattern: str) -> bool:
  names = (f'{program.task}/{program.agent}', program.name)
  return any(fnmatch.fnmatch(name, pattern) for name in names)


def _configure_all(suite: suites.Suite, programs: Sequence[suites.Program]) -> dict[str, Config]:
  """Return the configuration of each program, by name.

  Reading options takes a third of a second. Programs that differ in their seeds alone share it.
  """
  configs: dict[str, Config] = {}
  shared: dict[tuple[str, str, int], Config] = {}
  for program in programs:
    key = program.task, program.agent, program.count
    if key not in shared:
      shared[key] = _configure(suite, program)
    configs[program.name] = dataclasses.replace(shared[key], seed=program.first)
  return configs


def _configure(suite: suites.Suite, program: suites.Program) -> Config:
  """Return the configuration of a program, as `podrace train` makes it."""
  from podrace.settings.resolved import resolve

  try:
    config = configure.parse_words(program.command, 'podrace reproduce')
    evaluated = configure.parse(config, list(program.evaluation.options), 'podrace reproduce')
    _check_evaluation(config, evaluated)
    resolve(config)
  except MissingExtra as e:
    raise UsageError(f'{program.name}: {e}; --only leaves out parts of {suite.name}') from e
  except (UsageError, UnknownName) as e:
    raise UsageError(f'{suite.source}: {program.name}: {e}') from e
  own = {'total_steps': program.steps, 'seed': program.first, 'seeds': program.count}
  for name, value in own.items():
    if (other := getattr(config, name)) != value:
      raise UsageError(
        f'{suite.source}: {program.name}: its settings make {name} {other}, and the suite {value}'
      )
  return config


def _check_evaluation(config: Config, evaluated: Config) -> None:
  """Raise UsageError if the options of an evaluation change more than the acting of the agent."""
  if dataclasses.replace(evaluated, agent=config.agent) != config:
    raise UsageError(
      'evaluate has an option that is not of the agent: --agent options alone go there'
    )
  trained, acting = hooks.innermost(config.agent), hooks.innermost(evaluated.agent)
  for name in ('network', 'actor', 'critic'):
    if getattr(trained, name, None) != getattr(acting, name, None):
      raise UsageError(f'evaluate changes --agent.{name}, whose parameters have been learned')


def _list_programs(programs: Sequence[suites.Program], to: Path, folder: Path) -> None:
  """Print the time that programs train on one core, and how far they are."""
  from podrace.experiments.suites.records import record_path
  from podrace.experiments.suites.reproduce import format_time
  from podrace.run.directory import last_line

  tell(f'records: {to}, runs: {folder}')
  width = max(len(p.name) for p in programs)
  for p in programs:
    line, _ = last_line(folder / p.name / 'metrics.jsonl')
    state = f'step {line["step"]:,} of {p.steps:,}' if line else 'not begun'
    state = 'recorded' if os.path.lexists(record_path(to, p)) else state
    print_text(f'{p.name:{width}} {format_time(p.seconds):>8}  {state}', file=results())


def _list() -> None:
  """Print the suites."""
  for name in suites.names():
    suite = suites.load(name)
    folder = default_records(suite)
    done = sum((folder / f'{p.name}.json').exists() for p in suite.programs)
    seeds = sum(p.count for p in suite.programs)
    print_text(f'{name:16}{suite.about}', file=results())
    print_text(
      f'{"":16}{len(suite.tasks)} tasks, {len(suite.agents)} agents, {seeds} runs; '
      f'{suite.seconds / 7200:.1f} h on two cores; {done} of {len(suite.programs)} programs '
      'recorded',
      file=results(),
    )
