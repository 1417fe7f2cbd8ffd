"""podrace top: a program, from its learner; or a service and its clients."""

from __future__ import annotations

from podrace.commands.shared_options import CLIENT_INSECURE, CLIENT_KEYS
from podrace.system.options import Command, Option, Options

COMMAND = Command(
  'top',
  'ADDRESS [OPTIONS]',
  'a whole program, by the address of its learner; or the clients of a service, and what they do',
  (
    CLIENT_KEYS,
    CLIENT_INSECURE,
    Option('--once', '', 'print it once, as JSON'),
    Option('--every', 'S', 'seconds between looks', 1),
  ),
)


def run(args: list[str]) -> int:
  """Shows them."""
  options = Options(args, COMMAND)
  address = options.one_argument('address')
  from podrace.distributed import net

  net.require()
  from podrace.distributed.net import dashboard

  return dashboard.run(
    address,
    options.path('--keys'),
    '--insecure' in options,
    '--once' in options,
    options.number('--every'),
  )
