"""The common part of commands that are a stage of a run: podrace reanalyse and podrace label."""

from __future__ import annotations

from podrace.commands import configure
from podrace.commands import shared_options as shared
from podrace.errors import UsageError
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import results_alone

USAGE = '[PRESET] --connect-replay ADDRESSES --params ADDRESS [OPTIONS]'
OPTIONS = (
  shared.CONNECT_REPLAY,
  shared.PARAMS,
  Option('--batch-size', 'N', 'windows of a batch (default: buffer.batch_size of the agent)'),
  *shared.OF_WORKERS,
)
NOTES = """
It also takes --log, and, equal to the learner's, --agent, --agent.FIELD, --env, --log-share,
--num-envs and --unroll-length.

Any number of these processes can start and stop at any time. Each waits for the learner and the
replay service, and reconnects to them. Exit codes: 0 the run is complete, 1 failed, 2 refused or
bad usage, 143 and 130 on signals.
"""


def command(name: str, about: str) -> Command:
  """Return the command of a stage."""
  return Command(name, USAGE, about, OPTIONS, NOTES, others_pass=True, jax=True)


@results_alone()
def run(command: Command, args: list[str]) -> int:
  """Work until the run is complete."""
  preset = configure.take_preset(args)
  options = Options(args, command)
  addresses, patience = shared.worker_settings(options)
  if '--batch-size' in options and not options.whole('--batch-size'):
    raise UsageError('--batch-size must be at least 1, not 0')
  from podrace.distributed import net

  net.require()
  name = f'podrace {command.name}'
  config = configure.parse_config(preset, options, name)
  from podrace.distributed import label, reanalyse, stage

  duty = {'label': label.DUTY, 'reanalyse': reanalyse.DUTY}[command.name]
  settings = stage.Options(addresses, options.whole('--batch-size') or 0, patience)
  with log_to_stderr(name, '--quiet' in options):
    shared.enable_compile_cache(options)
    return stage.run(duty, config, options.arguments, settings)
