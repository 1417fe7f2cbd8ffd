"""The newest metrics of a run over HTTP, in the text format that Prometheus reads.

https://prometheus.io/docs/instrumenting/exposition_formats/. One thread serves all connections without blocking, each for
a bounded time: a reader that is slow or says nothing delays neither other readers nor the run.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import re
import socket as sockets
import threading
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from podrace.distributed.net import address as addresses
from podrace.distributed.net import descriptors
from podrace.distributed.net.loop import READ, WRITE, Loop
from podrace.errors import UsageError
from podrace.run.metrics import Line
from podrace.system.threads import Worker

SECONDS = 2.0  # that a connection may take
READERS = 32  # connections at most, fewer where few files may be open; then the oldest goes
REQUEST_BYTES = 2**14  # of a request, at most
PAUSE = 0.2  # seconds until new connections are accepted again, where files ran out


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
  """Render a line of metrics in Prometheus' text format.

  A list becomes one sample per seed. Metrics without a number are left out. If two names map to
  one, the first is kept.

  Args:
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
  return generate_latest(_Families(families.values()))


class _Families(Collector):
  """The metric families of one line."""

  def __init__(self, families: Iterable[Metric]) -> None:
    self._families = families

  def collect(self) -> Iterable[Metric]:
    """Return the families."""
    return self._families


class _Answer(http.server.BaseHTTPRequestHandler):
  """What is answered to a request: its bytes are in `wfile`."""

  server_version, sys_version = 'podrace', ''

  def __init__(self, request: bytes, text: bytes) -> None:
    self._text, self.client_address = text, ('', 0)
    self.rfile, self.wfile = io.BytesIO(request), io.BytesIO()
    self.handle_one_request()

  def do_GET(self) -> None:
    if self.path != '/metrics':
      self.send_error(404, 'the metrics are at /metrics')
      return
    self.send_response(200)
    self.send_header('Content-Type', CONTENT_TYPE_PLAIN_0_0_4)
    self.send_header('Content-Length', str(len(self._text)))
    self.end_headers()
    self.wfile.write(self._text)

  def log_message(self, format: str, *args: Any) -> None:
    """Requests are not logged."""


class _Reader:
  """A connection: its request as far as it has come, and what is left of the answer."""

  def __init__(self, socket: sockets.socket) -> None:
    socket.setblocking(False)
    self.socket, self.until = socket, time.monotonic() + SECONDS
    self.request, self.answer = b'', memoryview(b'')

  def read(self) -> bool:
    """Reads what has come; whether the request is whole, or as long as it may be."""
    data = self.socket.recv(REQUEST_BYTES)
    self.request += data
    ends = b'\r\n\r\n' in self.request or b'\n\n' in self.request
    return ends or not data or len(self.request) >= REQUEST_BYTES

  def write(self) -> bool:
    """Sends what there is room for; whether all is sent."""
    self.answer = self.answer[self.socket.send(self.answer) :]
    return not self.answer


class Endpoint:
  """A sink that serves the newest line at /metrics, until it is closed.

  Owner: the run, which closes it. Its thread ends with `close`, which raises what has failed in it.

  Args:
    address: as of `checked`.

  Raises:
    SecurityError: if it can't listen there.
  """

  def __init__(self, address: str) -> None:
    self._socket, self.address = addresses.listen(address)
    self._loop, self._readers = Loop(), dict[_Reader, None]()  # the oldest first
    self._paused_until: float | None = None
    self._closing, self.text = threading.Event(), b''
    self._loop.add(self._socket, READ, self)
    self._worker = Worker('metrics', self._main)

  @property
  def url(self) -> str:
    """Where the metrics are."""
    return f'http://{addresses.reachable(self.address).removeprefix("tcp://")}/metrics'

  def write(self, line: Line) -> None:
    self.text = exposition(line, time.time())

  def close(self) -> None:
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
          elif key.data in self._readers:  # else it was ended for a newer one
            self._serve(key.data)
        self._look_at_the_clock()
    finally:
      for reader in [*self._readers]:
        self._end(reader)

  def _seconds(self) -> float:
    """Until the time of the oldest reader is over."""
    now = time.monotonic()
    ends = [reader.until for reader in self._readers][:1]
    return max(min([now + 60.0, *ends, *filter(None, [self._paused_until])]) - now, 0.0)

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    for reader in [reader for reader in self._readers if reader.until <= now]:
      self._end(reader)
    if self._paused_until is not None and self._paused_until <= now:
      self._paused_until = None
      self._loop.add(self._socket, READ, self)

  def _accept(self) -> None:
    try:
      socket, _ = self._socket.accept()
    except OSError as e:  # the reader has left, or there are no more files
      if (
        e.errno in descriptors.LACKING
      ):  # else the kernel would say at once again that there is one
        self._paused_until = time.monotonic() + PAUSE
        self._loop.remove(self._socket)
      return
    reader = _Reader(socket)
    self._loop.add(socket, READ, reader)
    self._readers[reader] = None
    while len(self._readers) > max(min(READERS, descriptors.limit() // 32), 1):
      self._end(next(iter(self._readers)))

  def _serve(self, reader: _Reader) -> None:
    is_over = False
    try:
      if reader.answer:
        is_over = reader.write()
      elif reader.read():
        reader.answer = memoryview(_Answer(reader.request, self.text).wfile.getvalue())  # type: ignore[attr-defined]
        is_over = not reader.answer  # the connection has ended without a request
        self._loop.change(reader.socket, WRITE, reader)
      if is_over:
        self._end(reader)
    except BlockingIOError:
      return
    except OSError:
      self._end(reader)

  def _end(self, reader: _Reader) -> None:
    del self._readers[reader]
    self._loop.remove(reader.socket)
    with contextlib.suppress(OSError):  # the reader has ended it
      reader.socket.shutdown(sockets.SHUT_WR)
    reader.socket.close()
