"""A client's connection to one replay service: questions and their answers, and the items of its writers."""

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

import numpy as np

from podrace.distributed.net.frame import Kind, WireError, short
from podrace.distributed.net.link import Link, LinkHandler, Refused
from podrace.distributed.net.safe_text import plain_lines
from podrace.distributed.net.session_messages import ASK, PING, REPORT
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.outbox import Outbox
from podrace.tables.blocking import Closed, RateLimited
from podrace.tables.items import Signature

PING_SECONDS = 1.0  # between questions for the sizes of tables, at most


@dataclasses.dataclass(eq=False)
class Asked:
  """A question, and its answer when there is one."""

  connection: Connection
  number: int
  kind: Kind
  args: tuple[Any, ...]
  arrays: Sequence[Any] = ()
  end: float = math.inf  # of a SAMPLE, on time.monotonic's clock
  again: bool = False  # it was answered in an earlier session
  sent: bool = False  # in this session
  cancelled: bool = False  # what has been drawn is enough
  done: bool = False
  good: bool = False
  value: Any = None

  def result(self) -> Any:
    """The answer, which is there; raises ValueError if it is a refusal."""
    if not self.good:
      raise ValueError(self.value)
    return self.value

  def wait(self, deadline: float, what: str) -> Any:
    """The answer; raises ValueError if it is a refusal, RateLimited if there is none in time."""
    connection = self.connection
    if not connection.wait_until(lambda: self.done, deadline):
      connection.forget(self)
      raise RateLimited(f'{what} at {connection.address}: no answer; {connection.state()}')
    return self.result()


def _sizes(details: Any) -> dict[str, int]:
  """Of tables, as WELCOME and PONG tell them."""
  if type(details) is not dict or any(type(n) is not int or n < 0 for n in details.values()):
    raise WireError(f'{short(details)}, expected sizes of tables')
  return details


class Connection(LinkHandler):
  """One server's; the handler of a link.

  Attributes:
    link: to it.
    changed: is notified when there is an answer, or something else to wait for.
    tables: settings of those in use.
    sizes: of tables, as far as is known.
    report: the server's newest, of those that were asked for; None if there is none.
  """

  service, kinds = replay_messages.SERVICE, replay_messages.OF_SERVICES

  def __init__(
    self, address: str, keys: Path | None, insecure: bool, changed: threading.Condition
  ) -> None:
    self.address, self.changed = address, changed
    link = self.link = Link(address, keys, insecure, self, changed)
    link.ping_every = PING_SECONDS
    self.wake, self.close = link.wake, link.close
    self.outbox = Outbox(self, link)
    self.tables: dict[str, dict[str, Any]] = {}
    self.sizes: dict[str, int] = {}
    self._asked: dict[int, Asked] = {}
    self._to_ask: deque[Asked] = deque()  # or to cancel, if they have been sent
    self._numbers = itertools.count(1)
    self._begin()
    link.start()

  def _begin(self) -> None:
    """What is of one session only."""
    self._received = 0  # samples
    self._unsaid = self._unsaid_samples = 0  # bytes and samples that the server does not know of
    self._signatures: dict[int, Signature] = {}
    self.report: dict[str, Any] | None = None

  # --- from any thread

  @property
  def away(self) -> bool:
    """There is no session."""
    return self.link.session is None

  def state(self) -> str:
    """For messages: whether there is a connection."""
    return f'there is no connection: {self.link.why}' if self.away else 'it is connected'

  def ask_report(self) -> None:
    """Has a newer report come, in a while."""
    self.link.send(ASK)

  def check_open(self) -> None:
    """Raises Closed, or what has ended the link."""
    if self.link.closed:
      raise Closed(f'the client of {self.address} is closed')
    self.link.check()

  def wait_until(self, ready: Callable[[], bool], deadline: float) -> bool:
    """Whether something is so in time; raises as `check_open`."""
    with self.changed:
      while not ready():
        self.check_open()
        if (left := deadline - time.monotonic()) <= 0:
          return False
        self.changed.wait(min(left, 3600.0))
    return True

  def ask(self, kind: Kind, *args: Any, arrays: Sequence[Any] = (), end: float = math.inf) -> Asked:
    """Asks, now and again whenever a session begins before there is an answer."""
    with self.changed:
      self.check_open()
      asked = Asked(self, next(self._numbers), kind, args, arrays, end)
      self._asked[asked.number] = asked
      self._to_ask.append(asked)
    self.wake()
    return asked

  def forget(self, asked: Asked) -> None:
    """Nobody waits for the answer any more."""
    with self.changed:
      if self._asked.pop(asked.number, None) is None:
        return
      self._to_ask = deque(a for a in self._to_ask if a is not asked)
      if asked.kind is replay_messages.SAMPLE and asked.sent and not self.away:
        self.cancel(asked)

  def cancel(self, asked: Asked) -> None:
    """Has a sample answered with what has been drawn."""
    with self.changed:
      asked.cancelled = True
      self._to_ask.append(asked)
    self.wake()

  # --- as a link's handler

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """For samples, which are unpacked in another thread."""
    return np.empty(size, np.uint8) if kind is replay_messages.SAMPLES else None

  def joined(self, details: dict[str, Any]) -> None:
    expected = dict(number=int, largest=int, waiting=bytes, missing=bytes)
    replay_messages.read_map('welcome', details, expected)
    waiting, missing = (
      set(replay_messages.records(details[name], '<u8').tolist()) for name in ('waiting', 'missing')
    )
    self._begin()
    self.sizes = _sizes(details.get('sizes'))
    self.outbox.joined(details['number'], details['largest'], waiting, missing)
    with self.changed:
      for asked in self._asked.values():
        asked.sent = False
      self._to_ask = deque(a for a in self._asked.values() for _ in range(1 + a.cancelled))
      for name, settings in self.tables.items():  # it may be a new process
        table = Asked(
          self, next(self._numbers), replay_messages.TABLE, (name, settings), again=True
        )
        self._asked[table.number] = table
        self._to_ask.appendleft(table)

  def lost(self, reason: str) -> None:
    if not self.link.closed:  # what is closed keeps its last one
      self.report = None
    self.outbox.lost()

  def ping(self) -> int:
    self._unsaid = self._unsaid_samples = 0
    return self._received

  def pong(self, details: Any) -> None:
    sizes = _sizes(details)
    with self.changed:
      if sizes != self.sizes:  # a sample may do better elsewhere
        self.sizes = sizes
        self.changed.notify_all()

  def turned(self) -> None:
    if self.away:
      return
    while self._ask_next():
      pass
    while self.outbox.send():
      pass
    if (
      self._unsaid > replay_messages.MOST_BYTES // 4
      or self._unsaid_samples >= replay_messages.MOST_UNREAD // 4
    ):
      self.link.send(PING, self.ping())

  def _ask_next(self) -> bool:
    """Sends a question, or cancels it if it has been sent already; whether there was one."""
    with self.changed:
      if not self._to_ask:
        return False
      asked = self._to_ask.popleft()
      was_sent, asked.sent = asked.sent, True
    kind, args = asked.kind, asked.args
    if was_sent:
      kind, args = replay_messages.CANCEL, ()
    elif kind is replay_messages.SAMPLE:
      left = max(asked.end - time.monotonic(), 0.0) if asked.end < math.inf else -1.0
      args = *args, left, self.ping()
    self.link.send(kind, asked.number, *args, arrays=() if was_sent else asked.arrays)
    return True

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if kind is replay_messages.ACK:
      self.outbox.acknowledged(*fields, *arrays)
    elif kind is replay_messages.SAMPLES:
      self._sampled(arrays, *fields)
    elif kind is replay_messages.SIGNATURE:
      number, signature = fields
      self._signatures[number] = replay_messages.read_signature(signature)
    elif kind is REPORT:
      self.report = replay_messages.read_report(fields[0])
    else:
      number, good, value = fields
      if not good:
        value = plain_lines(value)
      elif (question := self._asked.get(number)) is not None:
        replay_messages.check_answer(question.kind, value)
      asked = self._answered(number, good, value)
      if asked is not None and asked.again and not good:
        raise Refused(str(value))

  def _sampled(
    self, arrays: list[memoryview], number: int, signature: int, reason: str, size: int
  ) -> None:
    self._received += 1
    self._unsaid += sum(map(len, arrays))
    self._unsaid_samples += 1
    if signature and signature not in self._signatures:
      raise WireError(f'samples with a signature {signature}, which was not sent')
    with self.changed:
      if (asked := self._asked.get(number)) is not None:
        if asked.kind is not replay_messages.SAMPLE:
          raise WireError(f'samples as an answer to {asked.kind.name}')
        self.sizes[asked.args[0]] = size
        self._answered(number, True, (self._signatures.get(signature), arrays, reason))

  def _answered(self, number: int, good: bool, value: Any) -> Asked | None:
    with self.changed:
      asked = self._asked.pop(number, None)
      if asked is not None:
        asked.value, asked.good, asked.done = value, good, True
        self.changed.notify_all()
      return asked
