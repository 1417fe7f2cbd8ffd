"""A listening end of the network: one socket, who may connect, who is there, and what is logged.

What the learner's server of environments and the services have in common. What clients say is checked: what
is not as docs/protocol.md has it ends the client's session, never the one who listens.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import math
import os
import resource
import socket as sockets
import stat
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from podrace.remote import security
from podrace.remote.guests import TALKING_SECONDS, Guests
from podrace.remote.wire import (
  GONE,
  NUMBER,
  REPORT,
  STRING,
  Wake,
  WireError,
  pack,
  plain_lines,
  unpack,
)

PEERS = 4096  # with a session, at most
BANNED = 4096  # connections that misbehaved, remembered
TICK = 0.2  # seconds between looks at who is silent
# Of silence. Clients say something every quarter of it, from a thread of their own, which does not run while
# JAX holds Python's lock to lower or load a large program: 2 s where a dozen processes share 2 cores.
PEER_SECONDS = 10.0
UNREAD_SECONDS = 1.0  # that what came over a connection which is closed may take to be read
PAUSE = 1.0  # seconds between them from which on nobody has been listened to
LINES = 20  # logged at most in LINE_SECONDS
LINE_SECONDS = 10.0
LOG_BYTES, LOG_BYTES_A_SECOND = (
  2**17,
  200.0,
)  # logged at once at most, and over a long time: 17 MB a day
LARGE = 65536  # bytes from which on a frame is sent without copying it
FILES = 2**16  # that may be open, if that is permitted: each connection is one
REPORT_SECONDS = 0.5  # that a report is told again: to make it takes time from those who act

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # enums are slow to combine

Say = Callable[[int, str], None]  # as logging.Logger.log: a level, and what there is to say


def allow_files() -> int:
  """Has this process open as many files as it may, up to FILES; how many that is."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
  if soft == resource.RLIM_INFINITY or soft >= wanted:
    return FILES if soft == resource.RLIM_INFINITY else soft
  with contextlib.suppress(OSError, ValueError):  # not even that is permitted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclasses.dataclass(frozen=True)
class Listen:
  """Where to listen, and to whom."""

  address: str
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = PEER_SECONDS  # of silence after which a client is dropped

  def __post_init__(self) -> None:
    security.check_address(self.address, self.keys, self.insecure, '--listen', listens=True)
    if not 0 < self.peer_timeout < math.inf:
      raise ValueError(f'--peer-timeout must be more than 0, not {self.peer_timeout}')


def _file_of(address: str) -> str | None:
  """The PATH of ipc://PATH; None where there is no file."""
  scheme, _, path = address.partition('://')
  return None if scheme != 'ipc' or path[0] in '*@' else path


def _check_free(address: str) -> None:
  """Raises OSError where somebody listens at ipc://PATH, or a file is there, which ZeroMQ would delete."""
  if (path := _file_of(address)) is None:
    return
  with contextlib.suppress(FileNotFoundError):
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
      raise FileExistsError(
        errno.EEXIST, 'there is a file that is no socket; move it, or give another path'
      )
  with sockets.socket(sockets.AF_UNIX) as probe:
    probe.setblocking(False)
    try:
      probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):  # nobody, or what one who died has left
      return
    except BlockingIOError:  # somebody who is busy
      pass
  raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def check_hello(told: dict[str, Any], *strings: str) -> None:
  """Refuses a HELLO that does not say who the client is; `strings` are what this one tells besides."""
  for name in ('name', 'host', 'podrace', *strings):
    x = told.get(name)
    if type(x) is not str or len(x) > STRING:
      raise WireError(f'a hello without a {name} that is a string of at most {STRING} characters')
  for name in ('version', 'nonce', 'pid'):
    x = told.get(name)
    if type(x) is not int or not 0 <= x < NUMBER:
      raise WireError(f'a hello without a {name} that is an integer from 0 to 2^63 - 1')


@contextlib.contextmanager
def _own(address: str) -> Iterator[None]:
  """Has the socket at ipc://PATH, which is made meanwhile, be this user's alone."""
  if (path := _file_of(address)) is None:
    yield
    return
  before = os.umask(0o077)  # and not less: another thread may make a directory now
  try:
    yield
  finally:
    os.umask(before)
  os.chmod(path, 0o600)


class Hub:
  """Clients by the addresses that the socket gives them: their sessions, and what they send.

  Who derives from it has `dispatch` and `drop`. All of it belongs to the thread that has the network.
  """

  def __init__(self, listen: Listen, say: Say) -> None:
    self.listen, self._say = listen, say
    self.address = listen.address
    self.peers: dict[bytes, Any] = {}  # with address, session, key, name, last_seen
    self.counts: collections.Counter[str] = collections.Counter()
    self.events: collections.deque[str] = collections.deque(maxlen=200)
    self.failure: str | None = None
    self._banned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    self._report, self._report_until = b'', -math.inf
    self._unread: dict[bytes, zmq.MessageTracker] = {}  # reports, by who may not have read them
    self._asked: set[bytes] = set()  # of these, who wants another
    self._lines: collections.deque[float] = collections.deque()
    self._unsaid = 0
    self._unsaid_since = 0.0
    self._log_room, self._log_at = float(LOG_BYTES), time.monotonic()
    self._ticked = time.monotonic()
    self._wake: Wake | None = None  # while it is open
    # By file: who has said hello over it; empty: nobody yet.
    self._connections: dict[int, bytes] = {}
    self._guests = Guests()  # those of no session
    # Whose connections have been closed, since when that is known; what they had said may be unread.
    self._cut: dict[bytes, float] = {}

  def dispatch(self, address: bytes, header: list[Any], frames: list[Any], raw: Any) -> None:
    """A message; `raw` is the header's frame. May raise WireError, which bans the connection."""
    raise NotImplementedError

  def settle(self) -> None:
    """Deals with what `dispatch` has put off, so that it is dealt with together with more of its kind."""

  def drop(self, peer: Any, reason: str, level: int = logging.WARNING) -> None:
    """Ends a session, if it has not ended; `level` is how bad that is."""
    raise NotImplementedError

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows."""
    raise NotImplementedError

  # --- its life ----------------------------------------------------------------------------------

  def open(self, largest: int, sends: int, receives: int) -> None:
    """Listens, from now on.

    Args:
      largest: bytes of a frame that comes in.
      sends, receives: messages of a client that wait, at most.

    Raises:
      SecurityError: if the address can't be listened at.
    """
    if (files := allow_files()) < PEERS:
      self.log(
        f'this process may have {files:,} files open, enough for about {max(files - 200, 0):,} clients '
        f'instead of {PEERS:,}: `ulimit -n {FILES}` before it is started allows more',
        logging.WARNING, always=True,
      )  # fmt: skip
    self._context = security.new_context(io_threads=1)  # see `connected`
    self._wake = Wake()
    self._gate: security.Gate | None = None
    try:
      self._bind(largest, sends, receives)
    except BaseException:
      self.shut()
      raise
    self._poller = zmq.Poller()
    self._wake_number = self._wake.fileno()
    gate: list[Any] = [self._gate.socket] if self._gate else []
    for socket in (self._router, self._monitor, self._wake_number, *gate):
      self._poller.register(socket, zmq.POLLIN)

  def _bind(self, largest: int, sends: int, receives: int) -> None:
    keys = self.listen.keys
    if keys is not None:
      self._gate = security.Gate(self._context, security.Allowed(keys / security.ALLOWED))
    router = self._router = self._context.socket(zmq.ROUTER)
    if keys is not None:
      security.secure_server(router, keys)
    router.linger = 500  # milliseconds, for the last words
    router.router_mandatory = True  # so that we are told who is gone
    router.maxmsgsize = largest
    router.sndhwm, router.rcvhwm = sends, receives
    # Not heartbeat_ivl: with it libzmq 4.3.5 aborts when a connection whose input is held back ends.
    router.tcp_keepalive, router.tcp_keepalive_idle, router.tcp_keepalive_intvl = 1, 30, 10
    router.handshake_ivl = 5000
    if '[' in self.listen.address:
      router.ipv6 = True
    self._monitor = self._watch(router)
    try:
      _check_free(self.listen.address)
      with _own(self.listen.address):
        router.bind(self.listen.address)
    except (OSError, zmq.ZMQError) as e:
      raise security.SecurityError(
        f'cannot listen at {self.listen.address}: {e.strerror or e}'
      ) from e
    self.address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip('\0')

  def _watch(self, router: zmq.Socket) -> zmq.Socket:
    """Tells of connections that are accepted and closed."""
    router.monitor('inproc://connections', zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    monitor = self._context.socket(zmq.PAIR)
    monitor.rcvhwm = 0  # else ZeroMQ's thread would wait here for ours
    monitor.connect('inproc://connections')
    return monitor

  def shut(self) -> None:
    """Closes the sockets, after the thread that had the network is done with it."""
    if (router := getattr(self, '_router', None)) and not router.closed:
      router.disable_monitor()
    for socket in (router, getattr(self, '_monitor', None), self._gate):
      if socket:
        socket.close()
    self._context.term()
    if self._wake:
      self._wake.close()

  def wake(self) -> None:
    """Has the thread that listens look around, if there is one; from any other."""
    if self._wake:
      self._wake.set()

  # --- what comes --------------------------------------------------------------------------------

  def poll(self, seconds: float) -> None:
    """Until something has come, or somebody wakes it, or the time is over."""
    for ready, _ in self._poller.poll(max(int(seconds * 1000 + 0.999), 0)):
      if self._wake and ready == self._wake_number:
        self._wake.clear()
      elif ready is self._monitor:
        self._see_connections()
      elif self._gate and ready is self._gate.socket and (told := self._gate.answer()):
        self.counts['turned away'] += 1
        self.log(told, logging.WARNING)

  def received(self, most: int) -> Iterator[list[Any]]:
    """The messages that have come, as frames; but not for so long that others wait."""
    receive = self._router.recv
    for _ in range(most):
      try:
        frame = receive(_NOBLOCK, False)  # without copying
        raw = [frame]
        while frame.more:
          frame = receive(_NOBLOCK, False)
          raw.append(frame)
      except zmq.Again:  # nothing is unread
        self.settle()
        self._drop_cut()
        return
      except zmq.ZMQError as e:
        self.counts['errors'] += 1
        self.log(f'receiving: {e}', logging.WARNING)
        return
      yield raw

  def take(self, raw: list[Any]) -> None:
    """Deals with a message, unless its connection is banned."""
    address = raw[0].bytes
    if address in self._banned:
      self.counts['ignored'] += 1
      return
    try:
      if len(raw) < 2:
        raise WireError('a message without a header')
      if address not in self.peers:
        self._guests.spoke(raw[1])
      self.dispatch(address, unpack(raw[1].buffer), [f.buffer for f in raw[2:]], raw[1])
    except Exception as e:
      self.blame(address, e)

  def blame(self, address: bytes, e: Exception) -> None:
    """Bans who has sent what led to this."""
    if isinstance(e, WireError):
      self.ban(address, str(e))
      return
    self.unexpected(e)  # nobody else shall be the worse for it
    self.ban(address, f'what could not be dealt with ({type(e).__name__})')

  def unexpected(self, e: Exception) -> None:
    """Counts and tells that a check is missing."""
    self.counts['unexpected'] += 1
    trace = ''.join(traceback.format_exception(e))[-4000:]
    self.log(f'a message that was not checked well enough:\n{trace}', logging.ERROR)

  def _see_connections(self) -> None:
    """Reads which connections have been accepted and closed."""
    while True:
      try:
        event, file = struct.unpack('=Hi', self._monitor.recv_multipart(_NOBLOCK)[0])
      except zmq.Again:
        return
      if event == zmq.EVENT_ACCEPTED:
        self._connections[file] = b''
        self._guests.came(file)
        continue
      self._guests.left(file)
      if address := self._connections.pop(file, b''):
        self._cut[address] = time.monotonic()

  def connected(self, address: bytes, raw: Any) -> None:
    """A client has a session from now on: it ends with the connection over which this frame came.

    Files are numbered anew when they are closed. ZeroMQ's thread (there must be one only) tells of a connection
    before what comes over it, so whatever is told later than here of this number is about this connection
    or one after it.
    """
    try:
      file = raw.get(zmq.SRCFD)
    except zmq.ZMQError:  # it came over none, or over one that ZeroMQ has no address of
      return
    self._see_connections()
    if file in self._connections:
      self._guests.left(file)
      self._connections[file] = address
      self._cut.pop(address, None)  # of an older one, if clients choose their addresses
    else:
      self._cut[address] = time.monotonic()

  def is_cut(self, peer: Any) -> bool:
    """Whether its connection is known to be closed: its session ends when what it has said is read."""
    return peer.address in self._cut

  def _drop_cut(self, until: float = math.inf) -> None:
    """Who has no connection any more, as was known by then, has nothing more to say."""
    for address in [a for a, since in self._cut.items() if since <= until]:
      del self._cut[address]
      if (peer := self.peers.get(address)) is not None:
        self.drop(peer, 'is gone')

  def key_of(self, raw: Any) -> bytes:
    """The client's key; connections live on when it is taken from the list."""
    if self._gate is None:
      return b''
    key = raw.get('User-Id').encode()
    if key not in self._gate.allowed:
      raise WireError('something with a key that is not listed any more')
    return key

  def peer_of(self, address: bytes, session: int) -> Any | None:
    """The client, if it has this session; else it is told that there is none."""
    peer = self.peers.get(address)
    if peer is None or peer.session != session:
      self.counts['stale'] += 1
      self.send(address, GONE, session, 'there is no such session; say hello again')
      return None
    peer.last_seen = time.monotonic()
    return peer

  # --- what goes ---------------------------------------------------------------------------------

  def send(self, address: bytes, *header: Any, frames: list[Any] | None = None) -> bool:
    """Whether it is on its way; else the client has been dropped, or is when what it has said is read."""
    message: list[Any] = [address, pack(*header), *(frames or [])]
    last = message.pop()
    try:
      for frame in message:
        self._router.send(frame, _MORE, copy=len(frame) < LARGE)
      self._router.send(last, _NOBLOCK, copy=len(last) < LARGE)
    except zmq.ZMQError as e:
      self._unsent(address, e)
      return False
    return True

  def _unsent(self, address: bytes, error: zmq.ZMQError) -> None:
    """Who is gone has perhaps said something before; who does not read what it is sent is heard no longer."""
    peer = self.peers.get(address)
    if error.errno != zmq.EAGAIN:
      self._cut.setdefault(address, time.monotonic())
    elif peer is not None:
      self.drop(peer, 'does not read what it is sent')
    elif address not in self._banned:
      self._ignore(address)
      self.log('ignoring somebody who does not read what it is sent', logging.WARNING)

  def answer_ask(self, address: bytes) -> None:
    """Sends the report; later, if the one before it is unread: nobody has more than one to read."""
    self.counts['asked'] += 1
    if address in self._unread and not self._unread[address].done:
      self._asked.add(address)
    else:
      self._send_report(address)

  def _send_report(self, address: bytes) -> None:
    if time.monotonic() > self._report_until:
      self._report = pack(REPORT, self.report())
      self._report_until = time.monotonic() + REPORT_SECONDS
    frame = zmq.Frame(self._report, track=True, copy=False)  # all are sent the same bytes
    self._unread[address] = frame.tracker
    with contextlib.suppress(zmq.ZMQError):  # it is gone, or reads nothing else either
      self._router.send(address, _MORE)
      self._router.send(frame, _NOBLOCK, copy=False)

  def _answer_later(self) -> None:
    """Those who have asked for another report, and have read the one before."""
    for address in [a for a, unread in self._unread.items() if unread.done]:
      del self._unread[address]
      if address in self._asked:
        self._asked.discard(address)
        self._send_report(address)

  def tell_gone(self, peer: Any, reason: str) -> None:
    """Ends a session, and says why."""
    self.drop(peer, reason)
    self.send(peer.address, GONE, peer.session, reason)

  def ban(self, address: bytes, reason: str) -> None:
    """Ignores a connection from now on, and tells why."""
    self.counts['malformed'] += 1
    peer = self.peers.get(address)
    self._ignore(address)
    if peer is not None:
      self.drop(peer, f'dropped, it sent {reason}')
    else:
      self.log(f'ignoring somebody who sent {reason}', logging.WARNING)
    self.send(address, GONE, peer.session if peer else 0, f'you sent {reason}')

  def _ignore(self, address: bytes) -> None:
    self._banned[address] = None
    while len(self._banned) > BANNED:
      self._banned.popitem(last=False)

  # --- time --------------------------------------------------------------------------------------

  def look_at_the_clock(self) -> None:
    """Every TICK seconds: who is silent, whose key was taken from the list."""
    now = time.monotonic()
    if (passed := now - self._ticked) > TICK:
      if passed > PAUSE:  # stopped, or busy: what was said meanwhile may not have been read yet
        self.forgive(passed)
      self.tick(now)
      self._ticked = time.monotonic()

  def forgive(self, seconds: float) -> None:
    """These do not count as silence."""
    now = time.monotonic()
    for peer in self.peers.values():
      peer.last_seen = min(peer.last_seen + seconds, now)

  def tick(self, now: float) -> None:
    self._answer_later()
    self._drop_cut(now - UNREAD_SECONDS)  # where there is always something to read
    for peer in list(self.peers.values()):
      if now - peer.last_seen > self.listen.peer_timeout:
        self.tell_gone(peer, f'silent for {now - peer.last_seen:.1f} s')
    self._look_at_guests(now)
    if self._gate:  # which has perhaps read the list again itself, for somebody new
      self._gate.allowed.refresh()
      for peer in list(self.peers.values()):
        if peer.key not in self._gate.allowed:
          self.tell_gone(peer, 'its key is not listed any more')
    if self._unsaid and now - self._unsaid_since > LINE_SECONDS:
      self.log(f'({self._unsaid} more lines were left out)', logging.WARNING, always=True)
      self._unsaid = 0

  def _look_at_guests(self, now: float) -> None:
    """Cuts connections that no client has, if they say nothing or are too many."""
    for file, address in self._connections.items():
      if address and address not in self.peers and file not in self._guests:  # its session is over
        self._guests.came(file, TALKING_SECONDS)
    self._guests.look(now)
    if cut := self._guests.cut - self.counts['cut']:
      self.counts['cut'] = self._guests.cut
      self.log(f'cut {cut} connections that said nothing', logging.WARNING)

  def log(self, line: str, level: int = logging.INFO, always: bool = False) -> None:
    """Says it, unless there was much to say lately; whatever that leads to, it raises nothing."""
    now = time.monotonic()
    line = plain_lines(line)
    self.events.append(line)
    while self._lines and now - self._lines[0] > LINE_SECONDS:
      self._lines.popleft()
    self._log_room = min(LOG_BYTES, self._log_room + LOG_BYTES_A_SECOND * (now - self._log_at))
    self._log_at = now
    if (len(self._lines) >= LINES or self._log_room < len(line)) and not always:
      self._unsaid_since = self._unsaid_since if self._unsaid else now
      self._unsaid += 1
      return
    self._log_room -= len(line)
    self._lines.append(now)
    with contextlib.suppress(Exception, SystemExit):  # rich exits where nobody reads any more
      self._say(level, line)
