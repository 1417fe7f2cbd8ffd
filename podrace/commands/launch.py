"""podrace launch: start all processes of a distributed run with one command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.commands import configure
from podrace.commands.shared_options import AGENT
from podrace.commands.train import COMMAND as TRAIN
from podrace.commands.train import metrics_address
from podrace.errors import UsageError, unknown
from podrace.launch.arrangements import ARRANGEMENTS, LaunchRequest
from podrace.launch.engines import kubernetes, ray, skypilot, slurm
from podrace.launch.program import Program
from podrace.launch.supervisor import local
from podrace.launch.supervisor.addresses import Addresses
from podrace.run.directory import check_directory, differences_of, read_record
from podrace.run.new_directory import name_run, run_directory
from podrace.settings.config import Config
from podrace.settings.record import unrecorded_options
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text, results_alone

ENGINES: dict[str, Any] = {
  'slurm': slurm,
  'ray': ray,
  'kubernetes': kubernetes,
  'skypilot': skypilot,
}  # besides local
OF_ENGINES: dict[str, tuple[Option, ...]] = {
  'local': (),
  **{name: x.OPTIONS for name, x in ENGINES.items()},
}
OF_TRAIN = (
  '--no-compile-cache', '--allow-code', '--override', '--sinks', '--metrics-listen',
  '--metrics-insecure', '--quiet', '--peer-timeout',
)  # fmt: skip
SET_HERE = {o.name for o in TRAIN.options} - {*OF_TRAIN, '--run-dir', '--agent'}

OF = {  # options of some arrangements only
  'seed': {'--actors', '--learners', '--peer-timeout'},
  'impala': {'--actors', '--shards', '--learners', '--peer-timeout'},
  'apex': {'--actors', '--shards', '--learners', '--peer-timeout'},
  'reanalyse': {'--actors', '--shards', '--reanalysers', '--learners', '--peer-timeout'},
  'qtopt': {'--actors', '--shards', '--labellers', '--learners', '--peer-timeout'},
  'learners': {'--learners'},
}
OF_ARRANGEMENTS = set().union(*OF.values())

COMMAND = Command(
  'launch',
  '[PRESET] --as ARRANGEMENT [OPTIONS]',
  'start all processes of a distributed run, restart failed ones, and end them with the learner',
  (
    Option('--as', 'ARRANGEMENT', 'processes to start; seed: a learner and environment '
      'processes; impala: a queue and '
      'acting processes; apex: a replay service and acting processes; reanalyse: as apex, with '
      'processes that search again; qtopt: as apex, with processes that compute the targets; '
      'learners: processes that learn as one',
      choices=tuple(ARRANGEMENTS)),
    Option('--actors', 'N', 'acting or environment processes', 2),
    Option('--shards', 'N', 'processes of the replay service', 1),
    Option('--reanalysers', 'N', 'processes that search again', 1),
    Option('--labellers', 'N', 'processes that compute targets', 1),
    Option('--learners', 'N', 'processes that learn as one; 2 with --as learners', 1),
    Option('--on', 'ENGINE', 'place of the processes; local: on this machine; slurm: a job; ray: '
      'a cluster of '
      'Ray; kubernetes: a JobSet; skypilot: machines of a cloud', 'local',
      choices=tuple(OF_ENGINES)),
    Option('--run-dir', 'DIR', 'the run directory, with logs/ of all processes; started again with '
      'the same one, the run resumes'),
    Option('--dry-run', '', 'only print the commands, or the manifest for an engine'),
    *dict.fromkeys(o for options in OF_ENGINES.values() for o in options),
    AGENT,
    *(o for o in TRAIN.options if o.name in OF_TRAIN),
  ),
  """
It also takes the options of train. Each line of output begins with the name of its process. On
SIGTERM and Ctrl-C all processes save and exit; a second signal kills them. Exit codes: 0 the
learner is complete, 1 a process failed for good, 2 bad usage, 143 and 130 on signals.
""",
  others_pass=True,
  jax=True,
  foreign={
    '--actors': 'workers num-workers num-actors n-actors num-env-runners num-rollout-workers',
    '--learners': 'num-learners n-learners world-size',
    '--on ENGINE': 'cluster backend engine launcher',
    '--as ARRANGEMENT': 'arrangement mode run-mode',
  },
)  # fmt: skip


def run(args: list[str]) -> int:
  """Launch the processes."""
  preset, options = _options(list(args))
  folder = options.path('--run-dir')
  if folder is not None:
    check_directory(folder)
  environ = dict(os.environ)
  # The launcher computes nothing, and must not occupy the learner's accelerators.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  name, make = _program(preset, options)
  if options.text('--on') == 'local' and '--dry-run' not in options:
    make(folder or Path('runs') / name)  # raises UsageError before a directory is created
    with run_directory(folder, name) as run_dir:
      return local.run(make(run_dir), run_dir, environ)
  if engine := ENGINES.get(options.text('--on')):
    del os.environ['JAX_PLATFORMS']  # the job and its learner inherit the environment
    os.environ.update(environ)
    code: int = engine.launch(make, options)
    return code
  _show(make(folder or Path('runs') / name), folder or Path('runs') / name)
  return 0


def _options(args: list[str]) -> tuple[str | None, Options]:
  """Return the preset and the options."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  options.needed('--as')
  for name, kind, known in (('--as', 'arrangement', ARRANGEMENTS), ('--on', 'engine', OF_ENGINES)):
    if options.text(name) not in known:
      raise unknown(kind, options.text(name), known)
  _check(options)
  return preset, options


@results_alone()
def _program(preset: str | None, options: Options) -> tuple[str, Callable[[Path], Program]]:
  """Return a name for the run, and a function from a run directory to the program."""
  from podrace.distributed import net

  net.require()
  metrics_address(options)  # refuse a bad address before a job waits for its machines
  config = configure.parse_config(preset, options, 'podrace launch')
  agent = ('--agent', options.text('--agent')) if '--agent' in options else ()
  flags = [x for name in OF_TRAIN for x in _words_of(options, name)]

  arrangement = options.text('--as')
  actors = options.whole('--actors')
  if arrangement == 'learners':  # it has no acting processes
    actors = 1

  def make(run_dir: Path) -> Program:
    # The learner resumes with the run's old defaults; acting processes do not read its record.
    if not (preset or agent or '--env' in {x.partition('=')[0] for x in options.arguments}):
      _check_run(run_dir, config)
    record = read_record(run_dir)
    old_defaults = [] if record is None else unrecorded_options(config, record)
    request = LaunchRequest(
      config, preset, (*agent, *options.arguments, *old_defaults, *flags), str(run_dir),
      actors, options.whole('--shards'), options.whole('--reanalysers'),
      options.whole('--labellers'), _learners(options),
      keyed=options.text('--on') in ENGINES, learners_insecure='--learners-insecure' in options,
    )  # fmt: skip
    return ARRANGEMENTS[arrangement](request)

  return name_run(preset, config.env, config.log), make


def _learners(options: Options) -> int:
  """Return the number of processes that learn as one."""
  if options.text('--as') == 'learners' and '--learners' not in options:
    return 2
  return options.whole('--learners')


def _show(program: Program, run_dir: Path) -> None:
  """Print the commands of all processes."""
  print_text('# SOCKETS: a private directory. mkdir -m 700 SOCKETS SOCKETS/announced')
  for name, words in Addresses(program, Path('SOCKETS'), run_dir).commands():
    print_text(f'# {name}\n{words}')


def _check_run(run_dir: Path, config: Config) -> None:
  """Raise UsageError if acting processes would not have the settings of the run that goes on.

  Without a preset a learner takes them from the run's record, which acting processes do not read.
  """
  from podrace.distributed.run_identity import COMMON

  changed = [c for c in differences_of(config, run_dir) if c.path.partition('.')[0] in COMMON]
  if changed:
    raise UsageError(
      f'{run_dir} has a run already:\n  '
      + '\n  '.join(map(str, changed))
      + '\nto go on with it, give the same preset and options as before'
    )


def _check(options: Options) -> None:
  """Raise UsageError for options that contradict each other."""
  arrangement = options.text('--as')
  if wrong := sorted(OF_ARRANGEMENTS & set(options.names) - OF[arrangement]):
    raise UsageError(f'{", ".join(wrong)}: not of --as {arrangement}')
  own = {o.name for o in OF_ENGINES[options.text('--on')]}
  foreign = {o.name for known in OF_ENGINES.values() for o in known} - own
  if wrong := sorted(foreign & set(options.names)):
    raise UsageError(
      f'{", ".join(wrong)}: not of --on {options.text("--on")}; see podrace launch --help'
    )
  names = {x.partition('=')[0] for x in options.arguments}
  if reserved := sorted(names & SET_HERE):
    raise UsageError(f'{", ".join(reserved)}: podrace launch sets it itself, or has no such option')
  if options.text('--on') == 'skypilot' and _learners(options) > 1:
    raise UsageError(
      f'--learners {_learners(options)}: learners share a run directory, and the machines of --on '
      'skypilot share none; take slurm, ray or kubernetes'
    )


def _words_of(options: Options, name: str) -> list[str]:
  """Return all occurrences of an option as words."""
  return [x for value in options.every(name) for x in ([name, value] if value else [name])]
