"""What every session has in common: its messages, and how it begins.

A session is a connection: it begins with WELCOME and ends with the connection.
"""

from __future__ import annotations

import os
import socket as sockets
from typing import Any

from podrace.distributed.net.frame import NUMBER, VERSION, Kind, WireError, numbered, packed
from podrace.distributed.net.safe_text import STRING
from podrace.version import __version__

# Of a client.
HELLO = packed(1, 'HELLO', dict)
PING = packed(4, 'PING', object)
BYE = packed(5, 'BYE', str)
ASK = packed(6, 'ASK')
METRICS = packed(7, 'METRICS', dict)
# Of a listener.
WAIT = packed(65, 'WAIT', str)
WELCOME = packed(66, 'WELCOME', dict)
PONG = packed(69, 'PONG', object)
REFUSED = packed(70, 'REFUSED', list)
GONE = packed(71, 'GONE', str)
END = packed(72, 'END', bool, str)
REPORT = packed(73, 'REPORT', dict)

OF_CLIENTS = HELLO, PING, BYE, ASK, METRICS
OF_LISTENERS = WAIT, WELCOME, PONG, REFUSED, GONE, END, REPORT
GUEST_BYTES = 65536  # of a frame of a connection without a session
SILENCE = 10.0  # seconds after which a peer is taken for dead, unless a listener says otherwise


def of_clients(*more: Kind) -> dict[int, Kind]:
  """Kinds that clients of a service send."""
  return numbered(*OF_CLIENTS, *more)


def of_listeners(*more: Kind) -> dict[int, Kind]:
  """Kinds that a service sends."""
  return numbered(*OF_LISTENERS, *more)


def hello(service: str, client: int, **more: Any) -> dict[str, Any]:
  """What HELLO tells.

  Args:
    client: this process's number, the same over all its connections: a new one takes the place of the last.
  """
  return {
    'name': service, 'version': VERSION, 'client': client, 'host': sockets.gethostname()[:STRING],
    'pid': os.getpid(), 'podrace': __version__, **more,
  }  # fmt: skip


def new_client() -> int:
  """A number for `hello` that nobody else has."""
  return int.from_bytes(os.urandom(8), 'little') >> 1 | 1


def check_hello(details: dict[str, Any]) -> None:
  """Refuses a HELLO that does not say who the client is."""
  for name in ('name', 'host', 'podrace'):
    x = details.get(name)
    if type(x) is not str or len(x) > STRING:
      raise WireError(f'a hello without a {name} that is a string of at most {STRING} characters')
  for name in ('version', 'client', 'pid'):
    x = details.get(name)
    if type(x) is not int or not 0 <= x < NUMBER:
      raise WireError(f'a hello without a {name} that is an integer from 0 to 2^63 - 1')
