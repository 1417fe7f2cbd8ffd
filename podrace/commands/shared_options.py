"""Options that several commands take, each declared once for help and parsing."""

from __future__ import annotations

from podrace.agents import AGENTS
from podrace.distributed.net.announce import Announcement
from podrace.system.options import Option, Options

AGENT = Option('--agent', 'NAME', f'{", ".join(AGENTS)} or module:Class')
NO_COMPILE_CACHE = Option(
  '--no-compile-cache', '', 'do not read or write the cache of compiled programs'
)
ALLOW_CODE = Option('--allow-code', 'MODULE', 'a module that the run may import; may be repeated')
QUIET = Option('--quiet', '', 'only warnings and errors')
SERVER_KEYS = Option('--keys', 'DIR', 'for --listen: directory with authority.pem, server.pem, '
  'server.key and allowed_clients, made by `podrace keys new`; needed beyond this '
  'machine')  # fmt: skip
SERVER_INSECURE = Option(
  '--insecure', '', 'for --listen: no keys; anybody may connect, nothing is encrypted'
)
PEER_TIMEOUT = Option(
  '--peer-timeout', 'S', 'for --listen: seconds of silence that end a session', 10
)
ANNOUNCE = Option('--announce', 'FILE', 'write the address to a JSON file once the process listens')
CLIENT_KEYS = Option('--keys', 'DIR', 'directory with authority.pem, client.pem and client.key, '
  'made by `podrace keys new`')  # fmt: skip
CLIENT_INSECURE = Option('--insecure', '', 'no keys beyond this machine; nothing is encrypted')
CONNECT_REPLAY = Option(
  '--connect-replay', 'ADDRESSES', 'addresses of `podrace replay`, one for each shard, with commas'
)
PARAMS = Option('--params', 'ADDRESS', 'address of the learner')
MAX_STALENESS = Option(
  '--max-staleness', 'S', 'age of parameters, in seconds, beyond which the process waits', 60
)
GIVE_UP_AFTER = Option(
  '--give-up-after', 'S', 'exit after S more seconds without a learner (default: wait)', 0
)


def announcement(options: Options, name: str) -> Announcement | None:
  """Return the announcement of --announce, with the address under `name`; None without it."""
  path = options.path(ANNOUNCE.name)
  return None if path is None else Announcement(path, name)
