"""podrace act: environments and inference for a learner with a replay service."""

from __future__ import annotations

from podrace.commands import configure
from podrace.commands import shared_options as shared
from podrace.errors import UsageError
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import results_alone

COMMAND = Command(
  'act',
  '[PRESET] --connect-replay ADDRESSES --params ADDRESS [OPTIONS]',
  'environments and inference for a learner elsewhere, which is `podrace train [PRESET] '
  '--connect-replay ... --listen ADDRESS`',
  (
    shared.CONNECT_REPLAY,
    shared.PARAMS,
    Option('--local-envs', 'N', 'environments of this process, out of --num-envs; the learner '
      'assigns it free ones (default: all)'),
    *shared.OF_WORKERS,
  ),
  """
It also takes these options of train: --actor-devices, --actor-groups, --actor-threads,
--env-batch-size, --env-deadline, --env-threads, --max-lag, --log; and, equal to the learner's,
--agent, --agent.FIELD, --env, --log-share, --num-envs and --unroll-length.

It waits for the learner and the replay service, and reconnects to them. Exit codes: 0 the run is
complete, 1 failed, 2 refused or bad usage, 143 and 130 on signals.
""",
  others_pass=True,
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Act until the run is complete."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  addresses, patience = shared.worker_settings(options)
  local = options.whole('--local-envs')
  if local == 0:
    raise UsageError('--local-envs must be at least 1, not 0')
  from podrace.distributed import net

  net.require()
  config = configure.parse_config(preset, options, 'podrace act')
  from podrace.distributed import acting

  acting.check_options(config, options.arguments)
  with log_to_stderr('podrace act', '--quiet' in options):
    shared.enable_compile_cache(options)
    return acting.act(config, acting.Options(addresses, local or 0, patience))
