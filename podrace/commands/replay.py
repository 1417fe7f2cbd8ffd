"""podrace replay: serve replay tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podrace.commands import shared_options as shared
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options, parse_number, parse_whole
from podrace.system.process import on_signals

if TYPE_CHECKING:
  from podrace.tables import RateLimiter

COMMAND = Command(
  'replay',
  '--listen ADDRESS [OPTIONS]',
  'serve replay tables that many processes write to and sample from; needs no JAX. Clients create '
  'the tables that they need, see docs/tables.md',
  (
    Option('--listen', 'ADDRESS', 'address of the service: tcp://HOST:PORT or unix:PATH'),
    Option('--dir', 'DIR', 'directory of checkpoints: the service restores the newest, and writes '
      'on SIGTERM and Ctrl-C, at the request of a client, and by --checkpoint-every'),
    Option('--checkpoint-every', 'S', 'seconds between checkpoints (default 60 with --dir; 0: not '
      'by time)', 0),
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
  foreign={
    '--listen tcp://HOST:PORT': 'port host address bind server-address',
    '--dir': 'checkpoint-dir run-dir',
    '--table name=NAME,max_size=N': 'capacity max-size buffer-size',
  },
)  # fmt: skip


def run(args: list[str]) -> int:
  """Serve until a signal."""
  options = Options(args, COMMAND)
  options.no_arguments()
  listen = options.needed('--listen')
  from podrace.distributed import net

  net.require()
  by_time = '--checkpoint-every' in options or '--dir' not in options
  with log_to_stderr('podrace replay', '--quiet' in options):
    return serve(
      listen,
      dir=options.path('--dir'),
      keys=options.path('--keys'),
      insecure='--insecure' in options,
      tables=parse_tables(options.every('--table')),
      checkpoint_every=options.number('--checkpoint-every') if by_time else 60.0,
      most_bytes=options.whole('--client-bytes'),
      peer_timeout=options.number('--peer-timeout'),
      announce=shared.announcement(options, 'replay'),
    )


def serve(address: str, **options: Any) -> int:
  """Serve until a signal, and return the exit code. Takes the arguments of `ReplayServer`."""
  from podrace import tables
  from podrace.distributed.replay.server import ReplayServer, log

  received = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal received
    received = signum
    server.ask_to_stop()

  try:
    server = ReplayServer(address, **options)
  except tables.CheckpointError as e:
    log.error('%s', e)
    return 2
  with on_signals(on_signal), server:
    log.info('listening at %s', server.address)
    if options['dir'] and not server.saving.saved:
      log.info('%s has no checkpoint: the tables begin empty', options['dir'])
    server.ended.wait()
  return 1 if server.failure else 128 + received


def parse_tables(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Return settings by name from the values of `--table`. Raise ValueError."""
  parsed: dict[str, dict[str, Any]] = {}
  for text in texts:
    try:
      name, settings = _parse_table(text)
      if name in parsed:
        raise ValueError(f'there is a table {name!r} already')
    except ValueError as e:
      raise ValueError(f'--table {text}: {e}') from None
    parsed[name] = settings
  return parsed


def _parse_table(text: str) -> tuple[str, dict[str, Any]]:
  from podrace.distributed.replay.table_settings import pack_settings, parse_selector

  needed, sizes = ['name', 'sampler', 'remover', 'rate', 'max_size'], dict[str, Any]()
  known = [*needed, 'max_bytes', 'max_times_sampled']
  values: dict[str, str] = {}
  for part in text.split(','):
    key, _, value = part.partition('=')
    if key not in known or not value or key in values:
      raise ValueError(f'{part!r}, expected {", ".join(known)}, each =VALUE')
    if key.startswith('max_'):
      sizes[key] = parse_whole(key, value)
    values[key] = value
  if missing := [k for k in needed if k not in values]:
    raise ValueError(f'needs {", ".join(missing)}')
  settings = pack_settings(
    sampler=parse_selector(values['sampler']),
    remover=parse_selector(values['remover']),
    rate_limiter=_parse_limiter(values['rate']),
    **sizes,
  )
  return values['name'], settings


def _parse_limiter(text: str) -> RateLimiter:
  from podrace import tables

  name, *numbers = text.split(':')
  if name in ('min_size', 'queue', 'stack') and len(numbers) == 1:
    return getattr(tables, name)(parse_whole(f'N of {name}', numbers[0]))
  if name == 'sample_to_insert' and len(numbers) == 3:
    ratio, least, error = numbers
    return tables.sample_to_insert_ratio(
      parse_number('RATIO', ratio), parse_whole('MIN_SIZE', least), parse_number('ERROR', error)
    )
  raise ValueError(
    f'rate={text}, expected min_size:N, sample_to_insert:RATIO:MIN_SIZE:ERROR, queue:N or stack:N'
  )
