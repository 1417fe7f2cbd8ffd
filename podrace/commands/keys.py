"""podrace keys: make keys of learners, services and their clients."""

from __future__ import annotations

from pathlib import Path

from podrace.errors import UsageError
from podrace.system.options import Command, Options
from podrace.system.output import print_text

COMMAND = Command(
  'keys',
  'new DIR',
  "make a learner's keys, the keys of one client, and the list of allowed clients",
  notes="""
podrace keys client DIR NEW: make another client's keys in the directory NEW, and allow them in DIR

The learner needs DIR. A machine with environments needs authority.pem, client.pem and client.key.
Removing a line of DIR/allowed_clients ends the sessions of that client.
""",
)


def run(args: list[str]) -> int:
  """Make keys."""
  args = Options(args, COMMAND).arguments
  from podrace.distributed import net

  net.require()
  from podrace.distributed.net import keys

  if args[:1] == ['new'] and len(args) == 2:
    keys.new_keys(Path(args[1]))
    print_text(f'keys are in {args[1]}; a machine with environments needs')
    print_text(f'  {" ".join(keys.CLIENT_FILES)}')
  elif args[:1] == ['client'] and len(args) == 3:
    keys.new_client(Path(args[1]), Path(args[2]))
    print_text(f'{args[2]} has the keys of a client that {args[1]}/{keys.ALLOWED} allows')
  else:
    raise UsageError(f'keys takes `new DIR` or `client DIR NEW`, not {" ".join(args)!r}')
  return 0
