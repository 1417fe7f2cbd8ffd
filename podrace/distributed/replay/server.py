"""`podrace replay`: podrace.tables behind a socket. Imports no JAX.

One thread has the network and the tables. Items come with the chunks that they are the first to need, packed
by their writer; they are kept and sent on as they came. Each part of a service has a module: `inserting`,
`sampling` and `saving` here, over the `registry` of tables.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podrace import tables
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.frame import Kind, WireError
from podrace.distributed.net.listener import Listen, Listener, Peer, ServiceHandler, Serving
from podrace.distributed.net.safe_text import Say, plain_lines
from podrace.distributed.net.session_messages import SILENCE
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.checkpoints import Saving
from podrace.distributed.replay.inserting import Inserting
from podrace.distributed.replay.sampling import Reading, Sampling
from podrace.distributed.replay.served_tables import Registry
from podrace.distributed.replay.streams import Stream
from podrace.system.process import on_signals
from podrace.tables import checkpoint
from podrace.tables.chunks import ChunkStore

SLACK = 2**20  # bytes of a frame beyond what is counted, as of items and packed steps

log = logging.getLogger('podrace.distributed.replay')


class Client(NamedTuple):
  """A peer's state."""

  stream: Stream
  reading: Reading


class ReplayServer(ServiceHandler):
  """Tables behind a socket, while it is entered.

  Args:
    address: to listen at.
    dir: where checkpoints are kept; the newest is read at the start. None for no checkpoints.
      While it is open no other service may keep its own there.
    tables: settings by name (`wire.packed_settings`), made at the start; clients may have others made.
    checkpoint_every: seconds; 0 for on demand and at the end only.
    most_bytes: of the steps that one client's writers keep.
    say: gets what is worth a line, and its level.

  Attributes:
    tables: by name.
    peers: clients with a session.
    counts: of what has happened, by name.
    ended: set when its thread has ended.

  Raises:
    CheckpointError: if the newest checkpoint is damaged, or its tables are not as given; if another
      service has `dir`, or it is no directory that can be written to.
    ValueError: if a number can't be.
    SecurityError: see podrace.distributed.net.keys.
  """

  service, kinds = replay_messages.SERVICE, replay_messages.OF_CLIENTS

  def __init__(
    self,
    address: str,
    dir: Path | None = None,
    keys: Path | None = None,
    insecure: bool = False,
    tables: dict[str, dict[str, Any]] | None = None,
    checkpoint_every: float = 0.0,
    most_bytes: int = 2**30,
    peer_timeout: float = SILENCE,
    say: Say = log.log,
    announce: Announcement | None = None,
  ) -> None:
    listen = Listen(address, keys, insecure, peer_timeout, announce)
    listener = self.listener = Listener(listen, self, say)
    self.peers, self.counts = listener.peers, listener.counts
    if not 0 <= checkpoint_every < math.inf:
      raise ValueError(f'--checkpoint-every must be 0 or more seconds, not {checkpoint_every}')
    if checkpoint_every and dir is None:
      raise ValueError(
        f'--checkpoint-every {checkpoint_every:g} needs --dir, where checkpoints are kept'
      )
    if most_bytes < 1:
      raise ValueError(f'--client-bytes must be at least 1, not {most_bytes}')
    self._most_bytes = most_bytes
    self.store = ChunkStore(cache_bytes=0)
    self.tables = self.store.tables
    self.registry = Registry(self.store, listener)
    self.inserting = Inserting(self.registry, listener, most_bytes)
    self.sampling = Sampling(self.registry, listener)
    for name, details in (tables or {}).items():
      self.registry.make(name, details)
    self.saving = Saving(dir, checkpoint_every, self._snapshot, listener)
    self._serving = Serving(listener, self.sampling.seconds, self.saving.leave)
    self.ended, self.ask_to_stop = self._serving.ended, self._serving.ask_to_stop
    self._or_unlock(self._restore)

  def _restore(self) -> None:
    """The newest checkpoint, if there is one."""
    if newest := self.saving.newest():
      path, extra = newest
      self.registry.restore(path, extra['tables'])
      self.inserting.restore(extra, time.time() - path.stat().st_mtime)
      items = sum(map(len, self.tables.values()))
      self.listener.log(f'restored {path}: {len(self.tables)} tables, {items:,} items')

  def _snapshot(self) -> checkpoint.Snapshot:
    """Tables and streams, at one moment."""
    settings = {name: entry.settings for name, entry in self.registry.entries.items()}
    extra = dict(tables=settings, **self.inserting.snapshot())
    return checkpoint.snapshot(self.store, json.loads(json.dumps(extra)))

  # --- its life

  @property
  def address(self) -> str:
    """Where it listens."""
    return self.listener.address

  @property
  def failure(self) -> str | None:
    """The traceback of what has ended its thread; None if nothing has."""
    return self._serving.failure

  def start(self) -> None:
    """Listens, from now on."""
    self._or_unlock(self._serving.start)

  def _or_unlock(self, do: Callable[[], None]) -> None:
    try:
      do()
    except BaseException:
      self.saving.unlock()
      raise

  def __enter__(self) -> ReplayServer:
    self.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends it, after a last checkpoint."""
    self._serving.stop()
    self.saving.unlock()

  # --- as a listener's handler

  @property
  def largest(self) -> int:
    """Bytes of a frame: the steps that a client may keep, or the chunks of one message; and a little more."""
    return min(
      replay_messages.FRAME_BYTES,
      self._most_bytes + replay_messages.MESSAGE_CHUNKS * replay_messages.CHUNK.itemsize + SLACK,
    )

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    if not details['client']:
      raise WireError('a hello of client 0, which none is')
    return []

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    stream = self.inserting.join(peer)
    peer.state = Client(stream, Reading())
    self.listener.log(f'{peer.name} joins')
    return dict(
      most_items=replay_messages.MOST_ITEMS,
      most_bytes=self._most_bytes,
      largest=self.largest,
      number=stream.number,
      sizes=self.registry.sizes(),
      waiting=replay_messages.numbers(stream.waiting),
      missing=replay_messages.numbers(stream.missing),
    )

  def left(self, peer: Peer, reason: str, level: int) -> None:
    self.sampling.left(peer)
    self.inserting.left(peer)

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if kind is replay_messages.INSERT:
      self.inserting.insert(peer, fields[0], arrays)
    elif kind is replay_messages.SAMPLE:
      self.sampling.sample(peer, fields)
    elif kind is replay_messages.DECLARE:
      self.inserting.declare(peer.state.stream, fields[0])
    elif kind is replay_messages.CANCEL:
      self.sampling.cancel(peer, fields[0])
    else:
      self._request(peer, kind, fields[0], fields[1:], arrays)

  def _request(
    self, peer: Peer, kind: Kind, number: int, args: Sequence[Any], arrays: list[memoryview]
  ) -> None:
    """What is answered at once, or by an error that is the client's to raise; a SAVE when it is written."""
    does: dict[Kind, Any] = {
      replay_messages.TABLE: self.registry.table,
      replay_messages.UPDATE: self.registry.update,
      replay_messages.DELETE: self.registry.delete,
      replay_messages.INFO: self.registry.info,
    }
    try:
      if kind is replay_messages.SAVE:
        self.saving.want(peer, number)
        return
      good, answer = True, does[kind](*args, *arrays)
    except ValueError as e:
      good, answer = False, plain_lines(e)
    self.listener.send(peer, replay_messages.ANSWER, number, good, answer)

  def ping(self, peer: Peer, said: Any) -> dict[str, int]:
    if said is not None:  # a client that never samples need not tell
      if type(said) is not int or said < 0:
        raise WireError('a PING without the number of samples that have come')
      self.sampling.received(peer.state.reading, said)
    return self.registry.sizes()

  def turned(self) -> None:
    touched = self.registry.touched
    touched |= self.sampling.take_unfinished()
    while touched:
      entry = touched.pop()
      self.sampling.serve(entry.readers)
      self.sampling.serve(entry.peekers)
      self.inserting.admit(entry)
    self.sampling.expire()
    self.saving.turned()

  def report(self) -> dict[str, Any]:
    shown = [dataclasses.asdict(t.info()) for t in itertools.islice(self.tables.values(), 64)]
    return dict(self.listener.report(_described), tables=shown, bytes=self.store.total.bytes,
                checkpoints=[str(p) for p in self.saving.saved])  # fmt: skip


def _described(peer: Peer) -> dict[str, Any]:
  """What a report has of a client besides."""
  client: Client = peer.state
  return dict(
    inserted=client.stream.inserted,
    sampled=client.reading.sampled,
    refused=client.stream.refusals,
    waiting_inserts=len(client.stream.waiting),
    waiting_samples=len(client.reading.waiting),
    kept_bytes=client.stream.kept_bytes,
    unread_bytes=client.reading.bytes,
  )


# --- the command ------------------------------------------------------------------------------------


def parse_tables(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Settings by name, of what `--table` was given.

  Raises:
    ValueError: saying what is expected.
  """
  found: dict[str, dict[str, Any]] = {}
  for text in texts:
    try:
      name, settings = _parse_table(text)
      if name in found:
        raise ValueError(f'there is a table {name!r} already')
    except ValueError as e:
      raise ValueError(f'--table {text}: {e}') from None
    found[name] = settings
  return found


def _parse_table(text: str) -> tuple[str, dict[str, Any]]:
  needed, sizes = ['name', 'sampler', 'remover', 'rate', 'max_size'], dict[str, Any]()
  known = [*needed, 'max_bytes', 'max_times_sampled']
  given: dict[str, str] = {}
  for part in text.split(','):
    key, _, value = part.partition('=')
    if key not in known or not value or key in given:
      raise ValueError(f'{part!r}, expected {", ".join(known)}, each =VALUE')
    if key.startswith('max_'):
      if not value.isdigit():
        raise ValueError(f'{key} takes a whole number, not {value!r}')
      sizes[key] = int(value)
    given[key] = value
  if lacking := [k for k in needed if k not in given]:
    raise ValueError(f'needs {", ".join(lacking)}')
  sampler, remover = (
    replay_messages.selector(given['sampler']),
    replay_messages.selector(given['remover']),
  )
  limiter = _limiter(given['rate'])
  settings = replay_messages.packed_settings(
    sampler=sampler, remover=remover, rate_limiter=limiter, **sizes
  )
  return given['name'], settings


def _limiter(text: str) -> tables.RateLimiter:
  name, *numbers = text.split(':')
  if name in ('min_size', 'queue', 'stack') and len(numbers) == 1:
    return getattr(tables, name)(int(numbers[0]))
  if name == 'sample_to_insert' and len(numbers) == 3:
    ratio, least, error = numbers
    return tables.sample_to_insert_ratio(float(ratio), int(least), float(error))
  raise ValueError(
    f'rate={text}, expected min_size:N, sample_to_insert:RATIO:MIN_SIZE:ERROR, queue:N or stack:N'
  )


def run(address: str, **options: Any) -> int:
  """`podrace replay`: serves until a signal; the exit code."""
  found = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal found
    found = signum
    server.ask_to_stop()

  try:
    server = ReplayServer(address, **options)
  except tables.CheckpointError as e:
    log.error('%s', e)
    return 2
  with on_signals(on_signal), server:
    log.info('listening at %s', server.address)
    server.ended.wait()
  return 1 if server.failure else 128 + found
