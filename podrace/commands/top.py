"""podrace top: show the processes of a distributed run, or the clients of a service."""

from __future__ import annotations

from podrace.commands.shared_options import CLIENT_INSECURE, CLIENT_KEYS
from podrace.errors import UsageError
from podrace.system.options import Command, Option, Options

COMMAND = Command(
  'top',
  'ADDRESS [OPTIONS]',
  'show all processes of a run, by the address of its learner, or the clients of a service',
  (
    CLIENT_KEYS,
    CLIENT_INSECURE,
    Option('--once', '', 'print it once, as JSON'),
    Option('--every', 'S', 'seconds between updates', 1),
  ),
  'If the output is no terminal, each update is a line of JSON.',
)


def run(args: list[str]) -> int:
  """Show the processes."""
  options = Options(args, COMMAND)
  address = options.one_argument('address')
  from podrace.distributed import net

  net.require()
  from podrace.distributed.net import dashboard

  if not (every := options.number('--every')):
    raise UsageError('--every must be more than 0 seconds')
  return dashboard.run(
    address,
    options.path('--keys'),
    '--insecure' in options,
    '--once' in options,
    every,
  )
