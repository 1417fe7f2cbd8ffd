"""Endpoint that serves a run's newest metrics over HTTP in Prometheus' text format.

One thread serves all connections without blocking, each for a limited time. A reader that is slow
or silent delays neither another reader nor the run.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import re
import socket as sockets
import threading
import time
import types
from typing import Any, cast

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from podrace.distributed.net import address as addresses
from podrace.distributed.net import descriptors
from podrace.distributed.net.loop import READ, WRITE, Loop
from podrace.errors import UsageError
from podrace.run.metrics import Line
from podrace.system.threads import Worker

SECONDS = 2.0  # time limit of a connection
READERS = 32  # most connections, fewer where few files may be open; the oldest is closed first
REQUEST_BYTES = 2**14  # largest request
PAUSE = 0.2  # seconds without new connections after the process ran out of files


def check_listen_address(where: str, insecure: bool) -> str:
  """Return the address for HOST:PORT.

  Raises:
    UsageError: if it is not HOST:PORT, or other machines can reach it and `insecure` is false.
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
      f'--metrics-listen {where} can be reached from other machines: give a HOST of this one, such '
      'as 127.0.0.1; or --metrics-insecure, with which any of them can read the metrics, '
      'unencrypted'
    )
  return address


def render_metrics(line: Line, at: float) -> bytes:
  """Render a line of metrics in Prometheus' text format.

  A list becomes one sample per seed. Metrics without a number are left out. If two names map to
  one, the first is kept.

  Args:
    line: line of metrics.
    at: time of the line, in seconds since the epoch.
  """
  families: dict[str, GaugeMetricFamily] = {}
  for name, value in {**line, 'written_timestamp_seconds': at}.items():
    metric = 'podrace_' + re.sub(r'[^a-zA-Z0-9_]', '_', name)
    is_list = isinstance(value, list)
    family = GaugeMetricFamily(metric, '', labels=['seed'] if is_list else [])
    for i, x in enumerate(value if is_list else [value]):
      if isinstance(x, int | float):
        family.add_metric([str(i)] if is_list else [], x)
    if family.samples:
      families.setdefault(metric, family)
  collector = types.SimpleNamespace(collect=families.values)
  return generate_latest(cast(Collector, collector))


class _Response(http.server.BaseHTTPRequestHandler):
  """HTTP response to one request. Its bytes are in `wfile`."""

  server_version, sys_version = 'podrace', ''

  def __init__(self, request: bytes, text: bytes) -> None:
    self._text, self.client_address = text, ('', 0)
    self.rfile, self.wfile = io.BytesIO(request), io.BytesIO()
    self.handle_one_request()

  def do_GET(self) -> None:
    """Answer with the metrics, or 404 for another path."""
    if self.path != '/metrics':
      self.send_error(404, 'the metrics are at /metrics')
      return
    self.send_response(200)
    self.send_header('Content-Type', CONTENT_TYPE_PLAIN_0_0_4)
    self.send_header('Content-Length', str(len(self._text)))
    self.end_headers()
    self.wfile.write(self._text)

  def log_message(self, format: str, *args: Any) -> None:
    """Ignore the message: requests are not logged."""


class _Connection:
  """Connection of a reader: the request received so far, and the unsent part of the response."""

  def __init__(self, socket: sockets.socket) -> None:
    socket.setblocking(False)
    self.socket, self.until = socket, time.monotonic() + SECONDS
    self.request, self.answer = b'', memoryview(b'')

  def read(self) -> bool:
    """Read available data. Return whether the request is complete or at its limit."""
    data = self.socket.recv(REQUEST_BYTES)
    self.request += data
    ends = b'\r\n\r\n' in self.request or b'\n\n' in self.request
    return ends or not data or len(self.request) >= REQUEST_BYTES

  def write(self) -> bool:
    """Send as much as the socket accepts. Return whether all is sent."""
    self.answer = self.answer[self.socket.send(self.answer) :]
    return not self.answer


class Endpoint:
  """Sink that serves the newest line at /metrics.

  Owner: the run, which calls `close`.
  Ends when: `close` is called. It raises a failure of the thread.

  Args:
    address: address as returned by `check_listen_address`.

  Raises:
    SecurityError: if it cannot listen at the address.
  """

  def __init__(self, address: str) -> None:
    self._socket, self.address = addresses.listen(address)
    self._loop, self._readers = Loop(), dict[_Connection, None]()  # ordered by age
    self._paused_until: float | None = None
    self._closing, self.text = threading.Event(), b''
    self._loop.add(self._socket, READ, self)
    self._worker = Worker('metrics', self._main)

  @property
  def url(self) -> str:
    """URL of the metrics."""
    return f'http://{addresses.reachable(self.address).removeprefix("tcp://")}/metrics'

  def write(self, line: Line) -> None:
    """Replace the served metrics."""
    self.text = render_metrics(line, time.time())

  def close(self) -> None:
    """End the thread and all connections."""
    self._closing.set()
    self._loop.wake()
    self._worker.wait()
    self._socket.close()
    self._loop.close()
    self._worker.check()

  # --- the thread

  def _main(self) -> None:
    try:
      while not self._closing.is_set():
        for key, _ in self._loop.wait(self._seconds()):
          if key.data is self:
            self._accept()
          elif key.data in self._readers:  # else it was closed in favour of a newer one
            self._serve(key.data)
        self._check_deadlines()
    finally:
      for reader in [*self._readers]:
        self._end(reader)

  def _seconds(self) -> float:
    """Return the time until the next deadline."""
    now = time.monotonic()
    ends = [connection.until for connection in self._readers][:1]
    return max(min([now + 60.0, *ends, *filter(None, [self._paused_until])]) - now, 0.0)

  def _check_deadlines(self) -> None:
    now = time.monotonic()
    for connection in [connection for connection in self._readers if connection.until <= now]:
      self._end(connection)
    if self._paused_until is not None and self._paused_until <= now:
      self._paused_until = None
      self._loop.add(self._socket, READ, self)

  def _accept(self) -> None:
    try:
      socket, _ = self._socket.accept()
    except OSError as e:  # the reader has left, or the process has no free file
      if e.errno in descriptors.LACKING:  # else the kernel would report the same connection at once
        self._paused_until = time.monotonic() + PAUSE
        self._loop.remove(self._socket)
      return
    connection = _Connection(socket)
    self._loop.add(socket, READ, connection)
    self._readers[connection] = None
    while len(self._readers) > max(min(READERS, descriptors.limit() // 32), 1):
      self._end(next(iter(self._readers)))

  def _serve(self, connection: _Connection) -> None:
    is_over = False
    try:
      if connection.answer:
        is_over = connection.write()
      elif connection.read():
        connection.answer = memoryview(_Response(connection.request, self.text).wfile.getvalue())  # type: ignore[attr-defined]
        is_over = not connection.answer  # the connection ended without a request
        self._loop.change(connection.socket, WRITE, connection)
      if is_over:
        self._end(connection)
    except BlockingIOError:
      return
    except OSError:
      self._end(connection)

  def _end(self, connection: _Connection) -> None:
    del self._readers[connection]
    self._loop.remove(connection.socket)
    with contextlib.suppress(OSError):  # the reader has closed it
      connection.socket.shutdown(sockets.SHUT_WR)
    connection.socket.close()
