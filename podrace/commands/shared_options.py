"""Options of commands: each is declared once, for the help and for the reading of arguments."""

from __future__ import annotations

from podrace.agents import AGENTS
from podrace.distributed.net.announce import Announcement
from podrace.system.options import Option, Options

AGENT = Option('--agent', 'NAME', f'{", ".join(AGENTS)} or module:Class')
NO_COMPILE_CACHE = Option(
  '--no-compile-cache', '', 'compile anew, and keep nothing of it for the next command'
)
ALLOW_CODE = Option('--allow-code', 'MODULE', 'the run may import this module of its own, from the '
  'working directory too; may be repeated. Without it a run directory that names code of its own is '
  'refused; --agent and --env allow theirs')  # fmt: skip
QUIET = Option('--quiet', '', 'only warnings and errors')
SERVER_KEYS = Option('--keys', 'DIR', 'of --listen: with authority.pem, server.pem, server.key and '
  'allowed_clients, made by `podrace keys new`; needed beyond this machine')  # fmt: skip
SERVER_INSECURE = Option(
  '--insecure', '', 'of --listen: no keys, anybody may connect, nothing is encrypted'
)
PEER_TIMEOUT = Option(
  '--peer-timeout', 'S', 'of --listen: seconds of silence that end a session', 10
)
ANNOUNCE = Option('--announce', 'FILE', 'a JSON file for the address, once it listens')
CLIENT_KEYS = Option(
  '--keys', 'DIR', 'with authority.pem, client.pem and client.key: `podrace keys new`'
)
CLIENT_INSECURE = Option('--insecure', '', 'no keys, beyond this machine: nothing is encrypted')
CONNECT_REPLAY = Option(
  '--connect-replay', 'ADDRESSES', 'where `podrace replay` listens; several shards with commas'
)
PARAMS = Option('--params', 'ADDRESS', 'where the learner listens')
MAX_STALENESS = Option(
  '--max-staleness', 'S', 'seconds that parameters may be out of date; then it waits', 60
)
GIVE_UP_AFTER = Option(
  '--give-up-after', 'S', 'end if there is no learner for S seconds more (default: wait for it)', 0
)


def announcement(options: Options, name: str) -> Announcement | None:
  """What --announce asks for, of the one address at which a command listens; its name there."""
  path = options.path(ANNOUNCE.name)
  return None if path is None else Announcement(path, name)
