"""Options that several commands take, each declared once for help and parsing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from podrace.agents import AGENTS
from podrace.distributed.net.announce import Announcement
from podrace.run import compile_cache
from podrace.settings import user_code
from podrace.system.options import Option, Options

if TYPE_CHECKING:
  from podrace.distributed.learner_client import Patience
  from podrace.distributed.run_identity import Addresses

AGENT = Option('--agent', 'NAME', f'agent: {", ".join(AGENTS)} or module:Class')
NO_COMPILE_CACHE = Option(
  '--no-compile-cache', '', 'do not read or write the cache of compiled programs'
)
ALLOW_CODE = Option('--allow-code', 'MODULE', 'a module that the run may import; may be repeated')
CHECKPOINT = Option(
  '--checkpoint', 'WHICH', 'checkpoint to read: newest, best (by --eval-every) or a step', 'newest'
)
OVERRIDE = Option('--override', '', 'resume although the configuration has changed')
SINKS = Option('--sinks', 'NAMES', 'write metrics to tensorboard, wandb or both as well',
  choices=('tensorboard', 'wandb'))  # fmt: skip
QUIET_RUN = Option('--quiet', '', 'no progress, only warnings and the result')
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

OF_WORKERS = (  # processes that work for a learner: act, reanalyse, label
  MAX_STALENESS, GIVE_UP_AFTER, CLIENT_KEYS, CLIENT_INSECURE, QUIET, NO_COMPILE_CACHE, AGENT,
  ALLOW_CODE,
)  # fmt: skip


def worker_settings(options: Options) -> tuple[Addresses, Patience]:
  """Return the addresses of the run that a process works for, and its patience."""
  from podrace.distributed.learner_client import Patience
  from podrace.distributed.run_identity import Addresses

  replay, params = (options.needed(option.name) for option in (CONNECT_REPLAY, PARAMS))
  keys, insecure = options.path('--keys'), '--insecure' in options
  limits = (options.number(option.name) for option in (MAX_STALENESS, GIVE_UP_AFTER))
  return Addresses(tuple(replay.split(',')), params, keys, insecure), Patience(*limits)


def enable_compile_cache(options: Options) -> None:
  """Keep compiled programs, unless --no-compile-cache forbids it; a message goes to the log."""
  if NO_COMPILE_CACHE.name not in options:
    compile_cache.enable(logging.getLogger('podrace').info)


def allowed_modules(options: Options) -> list[str]:
  """Return the modules of --allow-code, and look for them in the working directory as well."""
  allowed = options.every(ALLOW_CODE.name)
  user_code.allow(allowed)
  user_code.look_here(allowed)
  return allowed


def announcement(options: Options, name: str) -> Announcement | None:
  """Return the announcement of --announce, with the address under `name`; None without it."""
  path = options.path(ANNOUNCE.name)
  return None if path is None else Announcement(path, name)
