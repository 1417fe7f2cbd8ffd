"""Messages that are none, over real connections to a server that runs, beside a client that goes on."""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import zmq

from podrace.remote.wire import pack, unpack

MESSAGES = int(os.environ.get('PODRACE_FUZZ', 200_000))  # that a slow test sends
REPLAYED, HUGE = 0.1, 0.005  # how often
EVERY = 10  # connections, after which the good client does something

Messages = Callable[[random.Random, int], Iterable[list[bytes]]]


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
  count: int,
  hello: Callable[[], list[Any]],
  welcome: int,
  messages: Messages,
  good: Callable[[], None],
  memory: Callable[[], int],
  seed: int = 0,
) -> Told:
  """Sends so many, of ever new connections, most of which have a session; some are sent again, by anybody.

  Args:
    hello: a header that is answered by one of kind `welcome`, with a session.
    messages: what a connection with such a session (0: none) says.
    good: what a good client does now and then; fails if it can't.
    memory: bytes of the server.
  """
  rng, context = random.Random(seed), zmq.Context()
  sent = connections = huge = 0
  before, slowest, begun = 0, 0.0, time.monotonic()
  known = collections.deque[list[bytes]](maxlen=100)
  while sent < count:
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.sndhwm, socket.rcvhwm = 5000, 0, 0
    socket.connect(address)
    session = 0
    if rng.random() < 0.8:
      socket.send(pack(*hello()))
      assert socket.poll(30_000), 'no answer to a hello'
      header = unpack(socket.recv_multipart()[0], 2**20)
      session = header[1] if header[0] == welcome else 0
    for frames in messages(rng, session):
      socket.send_multipart(frames)
      known.append(frames)
      sent += 1
      if rng.random() < REPLAYED:
        socket.send_multipart(rng.choice(known))
        sent += 1
    if rng.random() < HUGE:
      socket.send(bytes(2**24), copy=False)
      huge += 1
    socket.close()
    connections += 1
    if connections % EVERY == 0:
      now = time.monotonic()
      good()
      slowest = max(slowest, time.monotonic() - now)
    if not before and sent > count / 10:
      before = memory()
  context.term()
  seconds = time.monotonic() - begun
  good()
  grown = (memory() - before) / 2**20
  return Told(sent + huge, connections, huge, round(seconds, 1), round(slowest, 2), round(grown, 1))
