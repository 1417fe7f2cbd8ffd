"""podrace replay: serve replay tables."""

from __future__ import annotations

from podrace.commands import shared_options as shared
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options

COMMAND = Command(
  'replay',
  '--listen ADDRESS [OPTIONS]',
  'serve replay tables that many processes write to and sample from; needs no JAX. Clients create '
  'the tables that they need, see docs/tables.md',
  (
    Option('--listen', 'ADDRESS', 'tcp://HOST:PORT or unix:PATH'),
    Option('--dir', 'DIR', 'directory of checkpoints: the service restores the newest, and writes '
      'on SIGTERM and Ctrl-C, at the request of a client, and by --checkpoint-every'),
    Option('--checkpoint-every', 'S', 'seconds between checkpoints (default: not by time)', 0),
    Option('--table', 'SETTINGS', 'create a table at the start; may be repeated'),
    Option('--client-bytes', 'N', 'bytes of steps that one client may hold for later items '
      '(default 1 GiB)', 2 ** 30),
    shared.SERVER_KEYS,
    shared.SERVER_INSECURE,
    shared.PEER_TIMEOUT,
    shared.ANNOUNCE,
    shared.QUIET,
  ),
  """
SETTINGS, separated by commas:
  name=NAME  sampler=SELECTOR  remover=SELECTOR  max_size=N
  rate=min_size:N, sample_to_insert:RATIO:MIN_SIZE:ERROR, queue:N or stack:N
  max_bytes=N  max_times_sampled=N (by default unbounded)
SELECTOR is uniform, fifo, lifo, min_heap, max_heap or prioritized:EXPONENT

Exit codes: 1 failed, 2 bad usage or a checkpoint that does not fit, 143 and 130 on signals.
""",
)  # fmt: skip


def run(args: list[str]) -> int:
  """Serve until a signal."""
  options = Options(args, COMMAND)
  options.no_arguments()
  listen = options.needed('--listen')
  from podrace.distributed import net

  net.require()
  from podrace.distributed.replay import server

  with log_to_stderr('podrace replay', '--quiet' in options):
    return server.run(
      listen,
      dir=options.path('--dir'),
      keys=options.path('--keys'),
      insecure='--insecure' in options,
      tables=server.parse_tables(options.every('--table')),
      checkpoint_every=options.number('--checkpoint-every'),
      most_bytes=options.whole('--client-bytes'),
      peer_timeout=options.number('--peer-timeout'),
      announce=shared.announcement(options, 'replay'),
    )
