"""podrace envs: environments for a learner on another machine."""

from __future__ import annotations

from podrace.commands.shared_options import CLIENT_INSECURE, CLIENT_KEYS, QUIET
from podrace.settings import user_code
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import results_alone

COMMAND = Command(
  'envs',
  '--connect ADDRESS --env LIB:NAME [OPTIONS]',
  'environments for a learner on another machine, `podrace train --envs remote --listen ADDRESS`; '
  'needs no JAX',
  (
    Option('--connect', 'ADDRESS', 'address of the learner: tcp://HOST:PORT or unix:PATH; for '
      'several learner processes a '
      'list with commas, each of which gets a part of the environments'),
    Option('--env', 'LIB:NAME', 'environment: LIB is ale, envpool, gymnasium or c; options follow '
      'after commas'),
    Option('--num-envs', 'N', 'number of environments', 1),
    Option('--workers', 'N', 'threads or processes that step environments, over all groups '
      '(default: two for each core; one with one group)', 0),
    Option('--groups', 'N', 'groups of environments; one group steps while the learner computes '
      'the actions of another (default: the number that the learner requests)', 0),
    CLIENT_KEYS,
    CLIENT_INSECURE,
    Option('--seed', 'S', 'seed of the environments (default: random)'),
    Option('--env-deadline', 'S', 'seconds that a step may take', 60),
    Option('--give-up-after', 'S', 'exit after S seconds without a learner (default: wait)', 0),
    QUIET,
  ),
  """
It reconnects after every failure of the connection or the learner, and restarts its environments.
Exit codes: 0 the run is complete, 1 failed, 2 refused or bad usage, 143 and 130 on signals.
""",
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Step environments until the run is complete."""
  options = Options(args, COMMAND)
  options.no_arguments()
  connect, env = (options.needed(name) for name in ('--connect', '--env'))
  user_code.look_here(user_code.of_env(env))
  from podrace.distributed import net

  net.require()
  from podrace.distributed.environments import client

  settings = client.ClientOptions(
    connect=connect,
    env=env,
    num_envs=options.whole('--num-envs'),
    workers=options.whole('--workers'),
    groups=options.whole('--groups'),
    seed=options.whole('--seed'),
    keys=options.path('--keys'),
    insecure='--insecure' in options,
    deadline=options.number('--env-deadline'),
    give_up=options.number('--give-up-after'),
  )
  with log_to_stderr('podrace envs', '--quiet' in options):
    return client.run(settings)
