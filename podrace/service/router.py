"""A service's end of the network: one socket, sessions, and a thread that looks after both.

What replay and parameters have in common: who may connect, who is there, who is silent, who sends what
is none. Everything that a client says is checked; what is not as docs/protocol.md has it ends the client's
session, never the service.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from podrace.remote.hub import PEERS, TICK, Hub, Listen, Say, check_hello
from podrace.remote.wire import HEADER_BYTES, WireError, fields, label, pack, plain, plain_reasons
from podrace.service import wire
from podrace.version import __version__

BACKLOG = 64  # messages that one client has not read


class Peer:
  """A client with a session."""

  def __init__(self, address: bytes, session: int, told: dict[str, Any], key: bytes) -> None:
    self.address, self.session, self.key = address, session, key
    self.nonce: int = told['nonce']
    self.name = f'{label(told["host"])}:{told["pid"]}'
    self.since = self.last_seen = time.monotonic()
    self.finished = False  # it has said BYE
    self.state: Any = None  # the service's


class Router(Hub):
  """Listens while it is entered; a service derives from it, and is told what clients say.

  Its methods, but for `call` and those that say otherwise, belong to its own thread.
  """

  service = ''  # its name in HELLO

  def __init__(self, listen: Listen, say: Say) -> None:
    super().__init__(listen, say)
    self._calls: collections.deque[Callable[[], None]] = collections.deque()
    self._stop = threading.Event()
    self.ended = threading.Event()  # its thread has

  # --- what a service says to this ---------------------------------------------------------------

  @property
  def frame_bytes(self) -> int:
    """Bytes of a frame that comes in, at most: of a header, unless clients send arrays."""
    return HEADER_BYTES

  def reasons_against(self, told: dict[str, Any]) -> list[str]:
    """Why this client is refused, which a service may add to."""
    return []

  def welcome(self, peer: Peer, told: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """What a new client is told besides, and frames."""
    raise NotImplementedError

  def handle(self, peer: Peer, header: list[Any], frames: list[Any]) -> None:
    """A message of a client that has this session."""
    raise NotImplementedError

  def pinged(self, peer: Peer, header: list[Any]) -> None:
    """What a PING tells, which may be nothing."""
    fields(header, int)

  def pong(self, peer: Peer) -> Any:
    """What a PONG carries."""
    raise NotImplementedError

  def turn(self) -> None:
    """After messages have come, or the clock has."""

  def wait(self) -> float:
    """Seconds until `turn` has something to do, if nothing comes."""
    return TICK

  def left(self, peer: Peer) -> None:
    """A client is gone."""

  def leave(self) -> None:
    """At the end, before clients are told."""

  def told_of(self, peer: Peer) -> dict[str, Any]:
    """A client's part of the report."""
    return {}

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows."""
    now = time.monotonic()
    clients = [
      dict(
        name=p.name,
        seconds=round(now - p.since, 3),
        last_seen_s=round(now - p.last_seen, 3),
        **self.told_of(p),
      )
      for p in list(self.peers.values())[:500]
    ]
    return dict(
      service=self.service,
      counts=dict(self.counts),
      clients=clients,
      more_clients=max(len(self.peers) - 500, 0),
    )

  # --- its life ----------------------------------------------------------------------------------

  def start(self) -> None:
    """Listens, from now on."""
    # Four times as many go out: transports may count each frame of a message.
    self.open(self.frame_bytes, 4 * BACKLOG, BACKLOG)
    self._thread = threading.Thread(target=self._main, name=self.service, daemon=True)
    self._thread.start()

  def __enter__(self) -> Any:
    self.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends the service; from any thread, more than once if need be."""
    self.ask_to_stop()
    self._thread.join()
    self.shut()

  def ask_to_stop(self) -> None:
    """Has its thread come to its end; `ended` says when."""
    self._stop.set()
    self.wake()

  def call(self, do: Callable[[], None]) -> None:
    """Has something done by the thread; from any other."""
    self._calls.append(do)
    self.wake()

  def do_calls(self) -> None:
    """What others want done."""
    while self._calls:
      self._calls.popleft()()

  def _main(self) -> None:
    for part in (self._listen, self.leave, self._goodbye):  # each, whatever became of the others
      try:
        part()
      except BaseException:
        failure = traceback.format_exc()
        self.failure = f'{self.failure}\n{failure}' if self.failure else failure
        self.log(f'the service failed:\n{failure}', logging.ERROR, always=True)
    self.ended.set()

  def _listen(self) -> None:
    while not self._stop.is_set():
      self.poll(min(self.wait(), TICK))
      self.do_calls()
      for raw in self.received(64):
        self.take(raw)
      self.turn()
      self.look_at_the_clock()

  # --- what clients say --------------------------------------------------------------------------

  def dispatch(self, address: bytes, header: list[Any], frames: list[Any], raw: Any) -> None:
    kind = header[0]
    if kind in (wire.HELLO, wire.ASK, wire.PING, wire.BYE) and frames:
      raise WireError(f'{len(frames)} frames after a header of kind {kind}, expected none')
    if kind == wire.HELLO:
      (told,) = fields(header, dict)
      self._hello(address, told, raw)
      return
    if kind == wire.ASK:
      fields(header)
      self.key_of(raw)
      self.answer_ask(address)
      return
    if len(header) < 2 or type(header[1]) is not int or header[1] < 0:
      raise WireError(f'a header of kind {kind} without a session')
    peer = self.peer_of(address, header[1])
    if peer is None:
      return
    if kind == wire.PING:
      self.pinged(peer, header)
      self.send(address, wire.PONG, peer.session, self.pong(peer))
    elif kind == wire.BYE:
      _, reason = fields(header, int, str)
      peer.finished = True
      self.drop(peer, f'left: {plain(reason)}', logging.INFO)
    else:
      self.handle(peer, header, frames)

  def _hello(self, address: bytes, told: dict[str, Any], raw: Any) -> None:
    key = self.key_of(raw)
    check_hello(told)
    peer = self.peers.get(address)
    if peer is not None and peer.nonce == told['nonce']:
      return  # asked again, while the answer was on its way
    reasons = [
      f'this is {self.service!r} version {wire.VERSION} (podrace {__version__}), '
      f'the client wants {told["name"]!r} version {told["version"]} (podrace {told["podrace"]})'
    ]
    if (told['name'], told['version']) == (self.service, wire.VERSION):
      reasons = self.reasons_against(told)
    if reasons:
      self.counts['refused'] += 1
      reasons = plain_reasons(reasons)
      who = plain(f'{told["host"]}:{told["pid"]}')
      self.log('\n  '.join([f'refused {who}:', *reasons]), logging.WARNING)
      self.send(address, wire.REFUSED, reasons)
      return
    if len(self.peers) >= PEERS and peer is None:  # it asks again, until somebody has left
      self.counts['told to wait'] += 1
      self.send(address, wire.WAIT, f'{self.service} has {PEERS} clients and takes no more')
      return
    if peer is not None:
      self.drop(peer, 'said hello anew')
    session = int.from_bytes(os.urandom(7), 'little')
    peer = self.peers[address] = Peer(address, session, told, key)
    self.counts['sessions'] += 1
    more, frames = self.welcome(peer, told)
    self.log(f'{peer.name} joins')
    answer = dict(nonce=peer.nonce, silence=self.listen.peer_timeout, **more)
    if self.send(address, wire.WELCOME, session, answer, frames=frames):
      self.connected(address, raw)

  # --- ends --------------------------------------------------------------------------------------

  def drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
    """Ends a session."""
    if self.peers.get(peer.address) is not peer:
      return
    del self.peers[peer.address]
    self.counts['dropped'] += 1
    self.log(f'{peer.name}: {reason}', level)
    if peer.state is not None:  # else it was not yet welcome
      self.left(peer)

  def _goodbye(self) -> None:
    for address in list(self.peers):
      with contextlib.suppress(zmq.ZMQError):
        message = [address, pack(wire.END, f'{self.service} has ended')]
        self._router.send_multipart(message, zmq.NOBLOCK)
