"""The newest metrics of a run over HTTP, in the text format that Prometheus reads.

https://prometheus.io/docs/instrumenting/exposition_formats/. One connection at a time, each for a bounded time, in a
thread of its own: whoever reads slowly, or not at all, holds up other readers for so long, and never the run.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket as sockets
import threading
import time
from typing import Any

from podrace.errors import UsageError
from podrace.metrics import Line
from podrace.net import address as addresses
from podrace.worker import Worker

SECONDS = 2.0  # that a connection may take
POLL = 0.05  # seconds between looks at whether it is to end
FORMAT = 'text/plain; version=0.0.4; charset=utf-8'


def checked(where: str, insecure: bool) -> str:
  """The address of HOST:PORT.

  Raises:
    UsageError: if it is none, or one beyond this machine that is not asked for.
  """
  address = f'tcp://{where}'
  try:
    addresses.check_address(address, None, True, '--metrics-listen', listens=True)
  except addresses.SecurityError:
    address = ''
  if not address or '/' in where:
    raise UsageError(
      f'--metrics-listen takes HOST:PORT, with a PORT of 1 to 65535 or * (any), not {where!r}'
    )
  if not (insecure or addresses.is_local(address)):
    raise UsageError(
      f'--metrics-listen {where} can be reached from other machines: give a HOST of this one, as 127.0.0.1; or '
      '--metrics-insecure, with which anybody who reaches it can read the metrics, unencrypted'
    )
  return address


def exposition(line: Line, at: float) -> bytes:
  """A line of metrics, written `at` that time; lists have a sample for each seed. What has no value is left out."""
  found: dict[str, list[str]] = {}
  for name, value in {**line, 'written_timestamp_seconds': at}.items():
    metric = 'podrace_' + re.sub(r'[^a-zA-Z0-9_]', '_', name)
    if isinstance(value, list):
      samples = [(f'{metric}{{seed="{i}"}}', x) for i, x in enumerate(value)]
    else:
      samples = [(metric, value)]
    rows = [f'{sample} {float(x)!r}' for sample, x in samples if isinstance(x, int | float)]
    if rows:
      found.setdefault(metric, [f'# TYPE {metric} gauge', *rows])
  return ''.join(f'{row}\n' for rows in found.values() for row in rows).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
  server: _Server
  timeout = SECONDS
  server_version, sys_version = 'podrace', ''

  def do_GET(self) -> None:
    if self.path != '/metrics':
      self.send_error(404, 'the metrics are at /metrics')
      return
    text = self.server.text
    self.send_response(200)
    self.send_header('Content-Type', FORMAT)
    self.send_header('Content-Length', str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def log_message(self, format: str, *args: Any) -> None:
    """Others' requests are no business of the log."""


class _Server(http.server.HTTPServer):
  """At a socket that listens already."""

  def __init__(self, socket: sockets.socket) -> None:
    super().__init__(('', 0), _Handler, bind_and_activate=False)
    self.socket.close()
    self.socket, self.text = socket, b''

  def process_request(self, request: Any, client_address: Any) -> None:
    # `timeout` bounds each read: bytes that come one by one would go on for ever.
    timer = threading.Timer(SECONDS, _shut, [request])
    timer.start()
    try:
      super().process_request(request, client_address)
    finally:
      timer.cancel()

  def handle_error(self, request: Any, client_address: Any) -> None:
    """The reader is gone, or was too slow."""


def _shut(socket: sockets.socket) -> None:
  with contextlib.suppress(OSError):  # it has ended by itself
    socket.shutdown(sockets.SHUT_RDWR)


class Endpoint:
  """A sink that serves the newest line at /metrics, until it is closed.

  Args:
    address: as of `checked`.

  Raises:
    SecurityError: if it can't listen there.
  """

  def __init__(self, address: str) -> None:
    socket, self.address = addresses.listen(address)
    self._server = _Server(socket)
    self._worker = Worker('metrics', lambda: self._server.serve_forever(POLL))

  @property
  def url(self) -> str:
    """Where the metrics are."""
    return f'http://{addresses.reachable(self.address).removeprefix("tcp://")}/metrics'

  def write(self, line: Line) -> None:
    self._server.text = exposition(line, time.time())

  def close(self) -> None:
    self._server.shutdown()
    self._worker.wait()
    self._server.server_close()
