"""The service of `podrace replay`: podrace.tables behind a socket. Imports no JAX.

One thread serves the network and the tables. Items come with the chunks that no earlier item
needed. Their writer has packed the chunks, and the service keeps and sends them as they came.
`inserting`, `sampling` and `checkpoints` are its parts, over `served_tables`.
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

from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.frame import Kind, WireError
from podrace.distributed.net.listener import Listen, Listener, Peer, ServiceHandler, Serving
from podrace.distributed.net.safe_text import Say, plain_lines
from podrace.distributed.net.session_messages import SILENCE
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.checkpoints import ReplayCheckpoints
from podrace.distributed.replay.insert_streams import InsertStream
from podrace.distributed.replay.inserting import Inserting
from podrace.distributed.replay.sample_requests import SampleWindow
from podrace.distributed.replay.sampling import Sampling
from podrace.distributed.replay.served_tables import ServedTables
from podrace.tables import checkpoint
from podrace.tables.chunks import ChunkStore

SLACK = 2**20  # bytes of a frame besides steps and chunks, such as items
REPORTED = 64  # tables in a report

log = logging.getLogger('podrace.distributed.replay')


class ClientState(NamedTuple):
  """The state of a peer's session."""

  stream: InsertStream
  window: SampleWindow


class ReplayServer(ServiceHandler):
  """Tables behind a socket, served by a thread while the server is entered.

  *Owner*: the caller, by `with` or `start` and `stop`.
  *Ends when*: stopped, or its thread fails.
  *Raises*: nothing while it serves; `failure` has the traceback of the thread.

  Example:
    with ReplayServer('tcp://127.0.0.1:5560') as server:
      server.ended.wait()

  Args:
    address: to listen at.
    dir: where checkpoints are kept, or None for no checkpoints. The newest one is restored. No
      other service may use the directory at the same time.
    keys: a directory with the service's keys, needed beyond this machine.
    insecure: no keys, beyond this machine.
    tables: settings by name (`table_settings.pack_settings`) of tables to make at the start.
      Clients can make more.
    checkpoint_every: seconds; 0 for checkpoints on demand and at the end only.
    most_bytes: of the steps that one client's writers keep.
    peer_timeout: seconds of silence after which a client's session ends.
    say: called with each line to log and its level.
    announce: how the address is announced.

  Attributes:
    tables: by name.
    peers: clients with a session.
    counts: events by name.
    ended: set when the thread has ended.

  Raises:
    CheckpointError: the newest checkpoint is damaged, or its tables have other settings; or another
      service uses `dir`, or it cannot be written to.
    ValueError: a number is out of range.
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
    self.served = ServedTables(self.store, listener)
    self.inserting = Inserting(self.served, listener, most_bytes)
    self.sampling = Sampling(self.served, listener)
    for name, details in (tables or {}).items():
      self.served.make(name, details)
    self.saving = ReplayCheckpoints(dir, checkpoint_every, self._snapshot, listener)
    self._serving = Serving(listener, self.sampling.seconds, self.saving.leave)
    self.ended, self.ask_to_stop = self._serving.ended, self._serving.ask_to_stop
    self._or_unlock(self._restore)

  def _restore(self) -> None:
    if newest := self.saving.newest():
      path, extra = newest
      self.served.restore(path, extra['tables'])
      self.inserting.restore(extra, time.time() - path.stat().st_mtime)
      items = sum(map(len, self.tables.values()))
      self.listener.log(f'restored {path}: {len(self.tables)} tables, {items:,} items')

  def _snapshot(self) -> checkpoint.Snapshot:
    """Take the tables and streams of one moment."""
    settings = {name: served.settings for name, served in self.served.by_name.items()}
    extra = dict(tables=settings, **self.inserting.snapshot())
    return checkpoint.snapshot(self.store, json.loads(json.dumps(extra)))

  @property
  def address(self) -> str:
    """The address at which it listens."""
    return self.listener.address

  @property
  def failure(self) -> str | None:
    """The traceback of the exception that ended the thread, or None."""
    return self._serving.failure

  def start(self) -> None:
    """Start to listen."""
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
    """End the thread after a last checkpoint."""
    self._serving.stop()
    self.saving.unlock()

  # --- the listener's handler

  @property
  def largest(self) -> int:
    """The largest frame in bytes: the steps that a client may keep, and the chunks of a message."""
    return min(
      replay_messages.FRAME_BYTES,
      self._most_bytes + replay_messages.MESSAGE_CHUNKS * replay_messages.CHUNK.itemsize + SLACK,
    )

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    """Raise WireError for a client without a number."""
    if not details['client']:
      raise WireError('a hello of client 0, which none is')
    return []

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    """Begin a session, and return the details of WELCOME."""
    stream = self.inserting.join(peer)
    peer.state = ClientState(stream, SampleWindow())
    self.listener.log(f'{peer.name} joins')
    return dict(
      most_items=replay_messages.MOST_ITEMS,
      most_bytes=self._most_bytes,
      largest=self.largest,
      number=stream.number,
      sizes=self.served.sizes(),
      waiting=replay_messages.pack_numbers(stream.waiting),
      missing=replay_messages.pack_numbers(stream.missing),
    )

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """End a session."""
    self.sampling.left(peer)
    self.inserting.left(peer)

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Take a message of a client."""
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
    """Answer a request with a value, or with an error that the client raises.

    SAVE is answered when the checkpoint is written.
    """
    functions: dict[Kind, Any] = {
      replay_messages.TABLE: self.served.open,
      replay_messages.UPDATE: self.served.update_priorities,
      replay_messages.DELETE: self.served.delete,
      replay_messages.INFO: self.served.info,
    }
    try:
      if kind is replay_messages.SAVE:
        self.saving.request(peer, number)
        return
      accepted, answer = True, functions[kind](*args, *arrays)
    except ValueError as e:
      accepted, answer = False, plain_lines(e)
    self.listener.send(peer, replay_messages.ANSWER, number, accepted, answer)

  def ping(self, peer: Peer, said: Any) -> dict[str, int]:
    """Take the number of samples that a client has received, and return the sizes of tables."""
    if said is not None:  # a client that never samples may leave it out
      if type(said) is not int or said < 0:
        raise WireError('a PING without the number of samples that have come')
      self.sampling.acknowledge(peer.state.window, said)
    return self.served.sizes()

  def turned(self) -> None:
    """Serve the requests and items that can go on."""
    touched = self.served.touched
    touched |= self.sampling.take_unfinished()
    while touched:
      served = touched.pop()
      self.sampling.serve(served)
      self.inserting.admit(served)
    self.sampling.expire()
    self.saving.turned()

  def report(self) -> dict[str, Any]:
    """Return the details of REPORT."""
    shown = itertools.islice(self.tables.values(), REPORTED)
    return dict(
      self.listener.report(_client_report),
      tables=[dataclasses.asdict(table.info()) for table in shown],
      bytes=self.store.total.bytes,
      checkpoints=[str(p) for p in self.saving.saved],
    )


def _client_report(peer: Peer) -> dict[str, Any]:
  client: ClientState = peer.state
  return dict(
    inserted=client.stream.inserted,
    sampled=client.window.sampled,
    refused=client.stream.refusals,
    waiting_inserts=len(client.stream.waiting),
    waiting_samples=len(client.window.waiting),
    kept_bytes=client.stream.kept_bytes,
    unread_bytes=client.window.bytes,
  )
