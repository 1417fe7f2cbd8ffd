"""podrace reanalyse: compute newer targets for the contents of a replay service."""

from __future__ import annotations

from podrace.commands import configure
from podrace.commands import shared_options as shared
from podrace.errors import UsageError
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import results_alone

COMMAND = Command(
  'reanalyse',
  '[PRESET] --connect-replay ADDRESSES --params ADDRESS [OPTIONS]',
  'search the states in a replay service again, with newer parameters of the learner, `podrace '
  'train [PRESET] --connect-replay ... --listen ADDRESS`',
  (
    shared.CONNECT_REPLAY,
    shared.PARAMS,
    Option('--batch-size', 'N', 'windows of a batch (default: buffer.batch_size of the agent)'),
    *shared.OF_WORKERS,
  ),
  """
It also takes, equal to the learner's, --agent, --agent.FIELD, --env, --num-envs and
--unroll-length.

Any number of these processes can start and stop at any time. Each waits for the learner and the
replay service, and reconnects to them. Exit codes: 0 the run is complete, 1 failed, 2 refused or
bad usage, 143 and 130 on signals.
""",
  others_pass=True,
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Reanalyse until the run is complete."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  addresses, patience = shared.worker_settings(options)
  if '--batch-size' in options and not options.whole('--batch-size'):
    raise UsageError('--batch-size must be at least 1, not 0')
  from podrace.distributed import net

  net.require()
  config = configure.parse_config(preset, options, 'podrace reanalyse')
  from podrace.distributed import reanalyse

  reanalyse.check_options(config, options.arguments)
  settings = reanalyse.Options(addresses, options.whole('--batch-size') or 0, patience)
  with log_to_stderr('podrace reanalyse', '--quiet' in options):
    shared.enable_compile_cache(options)
    return reanalyse.reanalyse(config, settings)
