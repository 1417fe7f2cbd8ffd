"""A client's connection to one replay service: calls and their answers, and items to insert."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from podrace.distributed.net import reports
from podrace.distributed.net.frame import HEADER_BYTES, Kind, WireError, read_map, short
from podrace.distributed.net.link import Link, LinkHandler, Refused
from podrace.distributed.net.safe_text import plain_lines
from podrace.distributed.net.session_messages import ASK, PING, REPORT
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.outbox import Outbox
from podrace.distributed.replay.writer_store import WriterStore
from podrace.tables.blocking import Closed, RateLimited
from podrace.tables.items import Signature

MOST_ARGUMENTS = HEADER_BYTES - 2**10  # bytes, besides the other fields of a header
PING_SECONDS = 1.0  # at most, between PINGs; their answers have the sizes of tables


@dataclasses.dataclass(eq=False)
class ServiceCall:
  """A request to a replay service, and its answer once it is there."""

  connection: ReplayConnection
  number: int
  kind: Kind
  args: tuple[Any, ...]
  arrays: Sequence[Any] = ()
  end: float = math.inf  # deadline of a SAMPLE, on time.monotonic's clock
  repeated: bool = False  # an earlier session has answered it
  sent: bool = False  # in this session
  cancelled: bool = False  # the service is to answer with the items drawn so far
  done: bool = False
  accepted: bool = False  # the answer is a value, not a refusal
  value: Any = None

  def result(self) -> Any:
    """Return the value of the answer, which must be there.

    Raises:
      ValueError: the answer is a refusal.
    """
    if not self.accepted:
      raise ValueError(self.value)
    return self.value

  def wait(self, deadline: float, what: str) -> Any:
    """Wait for the answer and return its value.

    Raises:
      ValueError: the answer is a refusal.
      RateLimited: no answer came before the deadline.
    """
    connection = self.connection
    if not connection.wait_until(lambda: self.done, deadline):
      connection.forget(self)
      raise RateLimited(f'{what} at {connection.address}: no answer; {connection.state()}')
    return self.result()


def _check_arguments(kind: Kind, args: tuple[Any, ...]) -> None:
  """Raise TypeError or ValueError for arguments that a message cannot have."""
  try:
    size = len(msgpack.packb(args))
  except (TypeError, ValueError, OverflowError) as e:
    raise TypeError(f'{kind.name} cannot be sent with {short(args)}: {e}') from e
  if size > MOST_ARGUMENTS:
    raise ValueError(
      f'{kind.name} cannot be sent with {short(args)}: it has {size:,} bytes, of at most '
      f'{MOST_ARGUMENTS:,}'
    )


def _check_requests(connection: ReplayConnection) -> None:
  """Raise ValueError if a service would refuse one more SAMPLE."""
  count = 1 + sum([call.kind is replay_messages.SAMPLE for call in connection.calls.values()])
  if count > replay_messages.MOST_REQUESTS:
    raise ValueError(
      f'{count:,} samples would wait at {connection.address}, of at most '
      f'{replay_messages.MOST_REQUESTS:,}: lower prefetch'
    )


def _read_sizes(details: Any) -> dict[str, int]:
  """Check and return the sizes of tables in WELCOME and PONG."""
  if type(details) is not dict or any(type(n) is not int or n < 0 for n in details.values()):
    raise WireError(f'{short(details)}, expected sizes of tables')
  return details


class ReplayConnection(LinkHandler):
  """A connection to one replay service, kept by a thread that connects again whenever it breaks.

  *Owner*: the `ReplayClient`, which calls `close`.
  *Ends when*: closed, or refused by the service.
  *Raises*: every call that waits raises Closed or the error that ended the link.

  Attributes:
    link: the thread and its session.
    changed: notified when an answer comes, or a waiting call should look again.
    tables: settings by name of the tables in use.
    sizes: latest known number of items by table.
    report: the newest report of the service that was requested, or None.
    released: chunks that writers no longer need.
    calls: calls without an answer, by number.
  """

  service, kinds = replay_messages.SERVICE, replay_messages.OF_SERVICES

  def __init__(
    self, address: str, keys: Path | None, insecure: bool, changed: threading.Condition
  ) -> None:
    self.address, self.changed = address, changed
    link = self.link = Link(address, keys, insecure, self, changed)
    link.ping_every = PING_SECONDS
    self.wake, self.close = link.wake, link.close
    self.outbox = Outbox(link)
    self.released = self.outbox.released
    self.tables: dict[str, dict[str, Any]] = {}
    self.sizes: dict[str, int] = {}
    self.calls: dict[int, ServiceCall] = {}
    self.unsent: deque[ServiceCall] = deque()  # to send, or to cancel if they have been sent
    self._numbers = itertools.count(1)
    self._begin_session()
    link.start()

  def _begin_session(self) -> None:
    self._received = 0  # samples
    # Bytes and samples that have come and that no PING has reported yet.
    self._unreported_bytes = self._unreported_samples = 0
    self._signatures: dict[int, Signature] = {}
    self.report: dict[str, Any] | None = None

  # --- from any thread

  @property
  def away(self) -> bool:
    """Whether there is no session."""
    return self.link.session is None

  def state(self) -> str:
    """Return the state of the connection, for messages."""
    return f'there is no connection: {self.link.why}' if self.away else 'it is connected'

  @property
  def idle(self) -> bool:
    """Whether an item would be sent at once."""
    return self.outbox.idle

  def why_not_inserted(self) -> str:
    """Return the reason why the newest items are not in their tables."""
    why = self.outbox.why_held or 'it has not been acknowledged yet'
    return f'at {self.address} {self.state() if self.away else why}'

  def writer_store(self, delay: float) -> WriterStore:
    """Make the store of a new writer. Its items wait for at most `delay` seconds."""
    store = WriterStore(self, delay)
    self.outbox.add(store)
    return store

  def ask_report(self) -> None:
    """Request a newer `report`."""
    self.link.send(ASK)

  def check_open(self) -> None:
    """Raise Closed, or the error that has ended the link."""
    if self.link.closed:
      raise Closed(f'the client of {self.address} is closed')
    self.link.check()

  def wait_until(self, ready: Callable[[], bool], deadline: float) -> bool:
    """Wait until `ready()`; return False after the deadline. Raise as `check_open`."""
    with self.changed:
      while not ready():
        self.check_open()
        if (left := deadline - time.monotonic()) <= 0:
          return False
        self.changed.wait(min(left, 3600.0))
    return True

  def ask(
    self, kind: Kind, *args: Any, arrays: Sequence[Any] = (), end: float = math.inf
  ) -> ServiceCall:
    """Send a request, and send it again in each new session until it is answered.

    Raises:
      TypeError: for an argument that a message cannot have. Here, as the link's thread would end.
      ValueError: the arguments are too large for a message, or too many samples wait.
    """
    _check_arguments(kind, args)
    with self.changed:
      self.check_open()
      if kind is replay_messages.SAMPLE:
        _check_requests(self)
      call = ServiceCall(self, next(self._numbers), kind, args, arrays, end)
      self.calls[call.number] = call
      self.unsent.append(call)
    self.wake()
    return call

  def forget(self, call: ServiceCall) -> None:
    """Drop a call without waiting for its answer."""
    with self.changed:
      if self.calls.pop(call.number, None) is None:
        return
      self.unsent = deque(c for c in self.unsent if c is not call)
      if call.kind is replay_messages.SAMPLE and call.sent and not self.away:
        self.cancel(call)

  def cancel(self, call: ServiceCall) -> None:
    """Ask the service to answer a SAMPLE with the items drawn so far."""
    with self.changed:
      call.cancelled = True
      self.unsent.append(call)
    self.wake()

  # --- the link's handler

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Give samples memory of their own, because another thread unpacks them."""
    return np.empty(size, np.uint8) if kind is replay_messages.SAMPLES else None

  def joined(self, details: dict[str, Any]) -> None:
    """Begin a session: send again the calls without an answer and the settings of tables."""
    expected = dict(number=int, largest=int, waiting=bytes, missing=bytes)
    read_map('welcome', details, expected)
    waiting, missing = (
      set(replay_messages.read_records(details[name], '<u8').tolist())
      for name in ('waiting', 'missing')
    )
    self._begin_session()
    self.sizes = _read_sizes(details.get('sizes'))
    self.outbox.joined(details['number'], details['largest'], waiting, missing)
    with self.changed:
      self.calls = {n: call for n, call in self.calls.items() if not call.repeated}
      for call in self.calls.values():
        call.sent = False
      # A cancelled call is queued twice: to be sent, then to be cancelled.
      self.unsent = deque(call for call in self.calls.values() for _ in range(1 + call.cancelled))
      for name, settings in self.tables.items():  # the service may be a new process
        table = ServiceCall(
          self, next(self._numbers), replay_messages.TABLE, (name, settings), repeated=True
        )
        self.calls[table.number] = table
        self.unsent.appendleft(table)

  def lost(self, reason: str) -> None:
    """End a session."""
    if not self.link.closed:  # a closed connection keeps its last report
      self.report = None
    self.outbox.lost()

  def ping(self) -> int:
    """Return the number of samples received, for PING and SAMPLE."""
    self._unreported_bytes = self._unreported_samples = 0
    return self._received

  def pong(self, details: Any) -> None:
    """Take the sizes of tables from PONG."""
    sizes = _read_sizes(details)
    with self.changed:
      if sizes != self.sizes:  # a waiting sample may be drawn elsewhere now
        self.sizes = sizes
        self.changed.notify_all()

  def turned(self) -> None:
    """Send calls, items and the number of samples received."""
    if self.away:
      return
    while self._send_call():
      pass
    while self.outbox.send():
      pass
    if (
      self._unreported_bytes > replay_messages.MOST_BYTES // 4
      or self._unreported_samples >= replay_messages.MOST_UNREAD // 4
    ):
      self.link.send(PING, self.ping())

  def _send_call(self) -> bool:
    """Send the next call, or cancel it if it was sent before; return False if there is none."""
    with self.changed:
      if not self.unsent:
        return False
      call = self.unsent.popleft()
      was_sent, call.sent = call.sent, True
    kind, args = call.kind, call.args
    if was_sent:
      kind, args = replay_messages.CANCEL, ()
    elif kind is replay_messages.SAMPLE:
      left = max(call.end - time.monotonic(), 0.0) if call.end < math.inf else -1.0
      args = *args, left, self.ping()
    self.link.send(kind, call.number, *args, arrays=() if was_sent else call.arrays)
    return True

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Take a message of the service."""
    if kind is replay_messages.ACK:
      self.outbox.acknowledge(*fields, *arrays)
    elif kind is replay_messages.SAMPLES:
      self._take_samples(arrays, *fields)
    elif kind is replay_messages.SIGNATURE:
      number, signature = fields
      self._signatures[number] = replay_messages.read_signature(signature)
    elif kind is REPORT:
      self.report = reports.read_shard(fields[0])
    else:
      number, accepted, value = fields
      if not accepted:
        value = plain_lines(value)
      elif (pending := self.calls.get(number)) is not None:
        replay_messages.check_answer(pending.kind, value)
      call = self._finish_call(number, accepted, value)
      if call is not None and call.repeated and not accepted:
        raise Refused(str(value))

  def _take_samples(
    self, arrays: list[memoryview], number: int, signature: int, reason: str, size: int
  ) -> None:
    self._received += 1
    self._unreported_bytes += sum(map(len, arrays))
    self._unreported_samples += 1
    if signature and signature not in self._signatures:
      raise WireError(f'samples with a signature {signature}, which was not sent')
    with self.changed:
      if (call := self.calls.get(number)) is not None:
        if call.kind is not replay_messages.SAMPLE:
          raise WireError(f'samples as an answer to {call.kind.name}')
        self.sizes[call.args[0]] = size
        self._finish_call(number, True, (self._signatures.get(signature), arrays, reason))

  def _finish_call(self, number: int, accepted: bool, value: Any) -> ServiceCall | None:
    with self.changed:
      call = self.calls.pop(number, None)
      if call is not None:
        call.value, call.accepted, call.done = value, accepted, True
        self.changed.notify_all()
      return call
