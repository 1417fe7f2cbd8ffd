"""podrace launch: all processes of a distributed run, with one command."""

from __future__ import annotations

import os
from pathlib import Path

from podrace.commands import configuration
from podrace.commands.options import Command, Option, Options
from podrace.commands.train import AGENT
from podrace.commands.train import COMMAND as TRAIN
from podrace.config import unknown
from podrace.launch import local
from podrace.program import Program
from podrace.runs import run_directory

ARRANGEMENTS = ('seed', 'impala', 'apex', 'reanalyse')
ENGINES = ('local',)
OF_TRAIN = ('--no-compile-cache', '--allow-code', '--override', '--sinks', '--quiet')

COMMAND = Command(
  'launch',
  '[PRESET] --as ARRANGEMENT [OPTIONS]',
  'all processes of a distributed run: starts them, starts again those that fail, and ends them with the '
  'learner',
  (
    Option('--as', 'ARRANGEMENT', 'seed: a learner and processes of environments; impala: a queue and acting '
      'processes; apex: a replay service and acting processes; reanalyse: as apex, and processes that search '
      'again', choices=ARRANGEMENTS),
    Option('--actors', 'N', 'processes that act, or have environments', 2),
    Option('--shards', 'N', 'of the replay service', 1),
    Option('--reanalysers', 'N', 'processes that search again', 1),
    Option('--on', 'ENGINE', 'local: processes on this machine', 'local', choices=ENGINES),
    Option('--run-dir', 'DIR', 'where the run is kept, with logs/ of all processes; started again with the same '
      'one, it resumes'),
    Option('--dry-run', '', 'only prints the commands'),
    AGENT,
    *(o for o in TRAIN.options if o.name in OF_TRAIN),
  ),
  """
Besides, the options of train. Each line that a process prints begins with its name. SIGTERM and Ctrl-C have
all processes save and end; a second one kills them. Exit codes: the learner's; 1 if another process failed
for good; 2 bad usage; 143 and 130 on signals.
""",
  others_pass=True,
)  # fmt: skip


def run(args: list[str]) -> int:
  """Launches."""
  preset = configuration.take_preset(args)
  options = Options(args, COMMAND)
  options.needed('--as')
  for name, what, known in (('--as', 'arrangement', ARRANGEMENTS), ('--on', 'engine', ENGINES)):
    if options.text(name) not in known:
      raise unknown(what, options.text(name), known)
  environ = dict(os.environ)
  os.environ['JAX_PLATFORMS'] = (
    'cpu'  # here, where nothing is computed: accelerators are the learner's
  )
  from podrace import net
  from podrace.launch.arrangements import ARRANGEMENTS as MADE
  from podrace.launch.arrangements import Asked

  net.require()
  config = configuration.configured(preset, options, 'podrace launch')
  agent = ('--agent', options.text('--agent')) if '--agent' in options else ()
  flags = [x for name in OF_TRAIN for x in _as_given(options, name)]
  name = preset or config.env.partition(',')[0].replace(':', '-').replace('/', '-')
  given = options.path('--run-dir')

  def asked(run_dir: Path) -> Asked:
    return Asked(
      config, preset, (*agent, *options.arguments, *flags), str(run_dir),
      options.whole('--actors'), options.whole('--shards'), options.whole('--reanalysers'),
    )  # fmt: skip

  make = MADE[options.text('--as')]
  program = make(
    asked(given or Path('runs') / name)
  )  # what can't be is refused before a directory is made
  if '--dry-run' in options:
    return _show(program, given or Path('runs') / name)
  with run_directory(given, name) as run_dir:
    return local.run(make(asked(run_dir)), run_dir, environ)


def _as_given(options: Options, name: str) -> list[str]:
  """An option as it was given, every time."""
  return [x for value in options.every(name) for x in ([name, value] if value else [name])]


def _show(program: Program, run_dir: Path) -> int:
  """Prints what would be started."""
  print('# SOCKETS: a directory of yours alone. mkdir -m 700 SOCKETS SOCKETS/announced')
  for name, words in local.Local(program, run_dir, lambda name, line: None).commands('SOCKETS'):
    print(f'# {name}\n{words}')
  return 0
