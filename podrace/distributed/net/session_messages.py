"""The messages of every session.

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
HELLO = packed(1, 'HELLO', dict, about='entries')
PING = packed(4, 'PING', object, about="null, or the service's value")
BYE = packed(5, 'BYE', str, about='reason')
ASK = packed(6, 'ASK')
METRICS = packed(7, 'METRICS', dict, about='numbers by name')
# Of a listener.
WAIT = packed(65, 'WAIT', str, about='reason')
WELCOME = packed(66, 'WELCOME', dict, about='entries')
PONG = packed(69, 'PONG', object, about="null, or the service's value")
REFUSED = packed(70, 'REFUSED', list, about='reasons')
GONE = packed(71, 'GONE', str, about='reason')
END = packed(72, 'END', bool, str, about='the run is complete, reason')
REPORT = packed(73, 'REPORT', dict, about='entries')

OF_CLIENTS = HELLO, PING, BYE, ASK, METRICS
OF_LISTENERS = WAIT, WELCOME, PONG, REFUSED, GONE, END, REPORT
GUEST_BYTES = 65536  # of a frame of a connection without a session, at most
SILENCE = 10.0  # seconds of silence after which a client is dropped, by default


def of_clients(*more: Kind) -> dict[int, Kind]:
  """Return the kinds that clients of a service send."""
  return numbered(*OF_CLIENTS, *more)


def of_listeners(*more: Kind) -> dict[int, Kind]:
  """Return the kinds that a service sends."""
  return numbered(*OF_LISTENERS, *more)


def hello(service: str, client: int, **more: Any) -> dict[str, Any]:
  """Return the entries of HELLO.

  Args:
    service: its name.
    client: number of this client. Its new connection replaces the last one.
    more: further entries.
  """
  return {
    'name': service, 'version': VERSION, 'client': client, 'host': sockets.gethostname()[:STRING],
    'pid': os.getpid(), 'podrace': __version__, **more,
  }  # fmt: skip


def new_client() -> int:
  """Return a random number for `hello`."""
  return int.from_bytes(os.urandom(8), 'little') >> 1 | 1


def check_hello(details: dict[str, Any]) -> None:
  """Raise WireError for a HELLO without the common entries."""
  for name in ('name', 'host', 'podrace'):
    x = details.get(name)
    if type(x) is not str or len(x) > STRING:
      raise WireError(f'a hello without a {name} that is a string of at most {STRING} characters')
  for name in ('version', 'client', 'pid'):
    x = details.get(name)
    if type(x) is not int or not 0 <= x < NUMBER:
      raise WireError(f'a hello without a {name} that is an integer from 0 to 2^63 - 1')
