"""podrace launch: all processes of a distributed run, with one command."""

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
from podrace.launch.arrangements import ARRANGEMENTS, Asked
from podrace.launch.engines import kubernetes, ray, skypilot, slurm
from podrace.launch.program import Program
from podrace.launch.supervisor import local
from podrace.launch.supervisor.addresses import Addresses
from podrace.run.directory import check_directory, name_of, read_run_record, run_directory
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
  '--no-compile-cache', '--allow-code', '--override', '--sinks', '--metrics-listen', '--metrics-insecure', '--quiet',
)  # fmt: skip
SET_HERE = {o.name for o in TRAIN.options} - {*OF_TRAIN, '--run-dir', '--agent'}

OF = {  # how many processes there are of each kind, by arrangement
  'seed': {'--actors', '--learners'},
  'impala': {'--actors', '--shards', '--learners'},
  'apex': {'--actors', '--shards', '--learners'},
  'reanalyse': {'--actors', '--shards', '--reanalysers', '--learners'},
  'learners': {'--learners'},
}
OF_ARRANGEMENTS = set().union(*OF.values())

COMMAND = Command(
  'launch',
  '[PRESET] --as ARRANGEMENT [OPTIONS]',
  'all processes of a distributed run: starts them, starts again those that fail, and ends them with the '
  'learner',
  (
    Option('--as', 'ARRANGEMENT', 'seed: a learner and processes of environments; impala: a queue and acting '
      'processes; apex: a replay service and acting processes; reanalyse: as apex, and processes that search '
      'again; learners: processes that learn as one', choices=tuple(ARRANGEMENTS)),
    Option('--actors', 'N', 'processes that act, or have environments', 2),
    Option('--shards', 'N', 'of the replay service', 1),
    Option('--reanalysers', 'N', 'processes that search again', 1),
    Option('--learners', 'N', 'processes that learn as one; 2 with --as learners', 1),
    Option('--on', 'ENGINE', 'local: processes on this machine; slurm: a job; ray: a cluster of Ray; kubernetes: a JobSet; '
      'skypilot: machines of a cloud', 'local', choices=tuple(OF_ENGINES)),
    Option('--run-dir', 'DIR', 'where the run is kept, with logs/ of all processes; started again with the same '
      'one, it resumes'),
    Option('--dry-run', '', 'only prints the commands, or what an engine would be given'),
    *dict.fromkeys(o for options in OF_ENGINES.values() for o in options),
    AGENT,
    *(o for o in TRAIN.options if o.name in OF_TRAIN),
  ),
  """
Besides, the options of train. Each line that a process prints begins with its name. SIGTERM and Ctrl-C have
all processes save and end; a second one kills them. Exit codes: the learner's; 1 if another process failed
for good; 2 bad usage; 143 and 130 on signals.
""",
  others_pass=True,
  jax=True,
)  # fmt: skip


def run(args: list[str]) -> int:
  """Launches."""
  preset, options = _options(list(args))
  given = options.path('--run-dir')
  if given is not None:
    check_directory(given)
  environ = dict(os.environ)
  # The launcher computes nothing. Accelerators belong to the learner.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  name, make = _program(preset, options)
  if options.text('--on') == 'local' and '--dry-run' not in options:
    make(given or Path('runs') / name)  # raises UsageError before a directory is made
    with run_directory(given, name) as run_dir:
      return local.run(make(run_dir), run_dir, environ)
  if engine := ENGINES.get(options.text('--on')):
    del os.environ['JAX_PLATFORMS']  # a job has this environment, and with it the learner
    os.environ.update(environ)
    found: int = engine.launch(make, options)
    return found
  _show(make(given or Path('runs') / name), given or Path('runs') / name)
  return 0


def _options(args: list[str]) -> tuple[str | None, Options]:
  """The preset and the options, which are taken out of args."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  options.needed('--as')
  for name, what, known in (('--as', 'arrangement', ARRANGEMENTS), ('--on', 'engine', OF_ENGINES)):
    if options.text(name) not in known:
      raise unknown(what, options.text(name), known)
  _check(preset, options, options.path('--run-dir'))
  return preset, options


@results_alone()
def _program(preset: str | None, options: Options) -> tuple[str, Callable[[Path], Program]]:
  """A name for the run, and its program for a run directory."""
  from podrace.distributed import net

  net.require()
  metrics_address(options)  # is refused here, before a job waits for its machines
  config = configure.parse_config(preset, options, 'podrace launch')
  agent = ('--agent', options.text('--agent')) if '--agent' in options else ()
  flags = [x for name in OF_TRAIN for x in _as_given(options, name)]

  arrangement = options.text('--as')
  actors = options.whole('--actors')
  if arrangement == 'learners':  # for which nobody else acts
    actors = 1

  def make(run_dir: Path) -> Program:
    # The learner goes on as the run began, and acting processes do not read its record.
    record = read_run_record(run_dir)
    begun = [] if record is None else unrecorded_options(config, record)
    asked = Asked(
      config, preset, (*agent, *options.arguments, *begun, *flags), str(run_dir),
      actors, options.whole('--shards'), options.whole('--reanalysers'), _learners(options),
      keyed=options.text('--on') in ENGINES, learners_insecure='--learners-insecure' in options,
    )  # fmt: skip
    return ARRANGEMENTS[arrangement](asked)

  return name_of(preset, config.env), make


def _learners(options: Options) -> int:
  """How many processes learn as one."""
  if options.text('--as') == 'learners' and '--learners' not in options:
    return 2
  return options.whole('--learners')


def _show(program: Program, run_dir: Path) -> None:
  """Prints what would be started."""
  print_text('# SOCKETS: a directory of yours alone. mkdir -m 700 SOCKETS SOCKETS/announced')
  for name, words in Addresses(program, Path('SOCKETS'), run_dir).commands():
    print_text(f'# {name}\n{words}')


def _check(preset: str | None, options: Options, run_dir: Path | None) -> None:
  """Raises UsageError for options that contradict each other."""
  arrangement = options.text('--as')
  if wrong := sorted(OF_ARRANGEMENTS & set(options.names) - OF[arrangement]):
    raise UsageError(f'{", ".join(wrong)}: not of --as {arrangement}')
  here = {o.name for o in OF_ENGINES[options.text('--on')]}
  elsewhere = {o.name for known in OF_ENGINES.values() for o in known} - here
  if wrong := sorted(elsewhere & set(options.names)):
    raise UsageError(
      f'{", ".join(wrong)}: not of --on {options.text("--on")}; see podrace launch --help'
    )
  names = {x.partition('=')[0] for x in options.arguments}
  if given := sorted(names & SET_HERE):
    raise UsageError(f'{", ".join(given)}: podrace launch sets it itself')
  if options.text('--on') == 'skypilot' and _learners(options) > 1:
    raise UsageError(
      f'--learners {_learners(options)}: learners have one run directory, and the machines of --on skypilot have none '
      'in common; take slurm, ray or kubernetes'
    )
  named = preset or '--agent' in options or '--env' in names
  if not named and run_dir is not None and (run_dir / 'config.json').exists():
    raise UsageError(
      f'{run_dir} has a run already: to go on with it, give the same preset and options as before'
    )


def _as_given(options: Options, name: str) -> list[str]:
  """An option as it was given, every time."""
  return [x for value in options.every(name) for x in ([name, value] if value else [name])]
