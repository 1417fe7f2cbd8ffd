"""Messages that are none, over ever new connections to a server that runs, beside a client that goes on."""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import bare

from podrace.distributed.net import session_messages
from podrace.distributed.net.frame import Kind

MESSAGES = int(os.environ.get('PODRACE_FUZZ', 200_000))  # that a slow test sends
REPLAYED, HUGE = 0.1, 0.005  # how often
EVERY = 10  # connections, after which the good client does something

Messages = Callable[[random.Random], Iterable[bytes]]


class Told(NamedTuple):
  """What was sent, and how much a server's memory grew from the first tenth of it on."""

  messages: int
  connections: int
  huge: int
  seconds: float
  slowest: float  # seconds of what the good client did once
  megabytes: float


def storm(
  address: str,
  kinds: dict[int, Kind],
  count: int,
  hello: Callable[[], dict[str, Any]],
  messages: Messages,
  good: Callable[[], None],
  memory: Callable[[], int],
  seed: int = 0,
) -> Told:
  """Sends so many, of ever new connections, most of which have a session; some are sent again, by anybody.

  Args:
    hello: what HELLO tells.
    messages: the bytes of what a connection says.
    good: what a good client does now and then; fails if it can't.
    memory: bytes of the server.
  """
  rng = random.Random(seed)
  sent = connections = huge = 0
  before, slowest, begun = 0, 0.0, time.monotonic()
  known = collections.deque[bytes](maxlen=100)
  while sent < count:
    with bare.connect(address, kinds) as end:
      if rng.random() < 0.8:
        end.say(session_messages.HELLO, hello())
        assert end.hear(30.0) is not None, 'no answer to a hello'
      try:
        for data in messages(rng):
          end.send(data)
          known.append(data)
          sent += 1
          if rng.random() < REPLAYED:
            end.send(rng.choice(known))
            sent += 1
        if rng.random() < HUGE:
          huge += 1
          end.send(bytes(2**24))
      except OSError:  # it has been cut off
        pass
    connections += 1
    if connections % EVERY == 0:
      now = time.monotonic()
      good()
      slowest = max(slowest, time.monotonic() - now)
    if not before and sent > count / 10:
      before = memory()
  seconds = time.monotonic() - begun
  good()
  grown = (memory() - before) / 2**20
  return Told(sent + huge, connections, huge, round(seconds, 1), round(slowest, 2), round(grown, 1))
