"""What connections without a session cost a listener: memory of each, and time while they come as fast as they can.

A publisher of parameters listens in a process of its own, on a core of its own where there are two. First a
thousand connections each stand still at one point. Then two processes connect, begin a handshake and leave, over
and over; a client with a session asks how long its PINGs take.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import select
import socket as sockets
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / 'benchmarks'))

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'support'))

import common
from children import unchanged, until

from podrace.distributed.net import descriptors, session_messages
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net.frame import PREFIX
from podrace.distributed.parameters import parameter_messages

HERE = pathlib.Path(__file__).resolve().parent
CONNECTIONS = 1000
LARGEST_HELLO = 131_396  # bytes, of OpenSSL 3
SERVER = """
import pathlib, sys, threading
from podrace.distributed.parameters.publisher import Publisher
with Publisher('tcp://127.0.0.1:*', pathlib.Path(sys.argv[1]) if sys.argv[1:] else None) as one:
  print(one.address, flush=True)
  sys.stdin.read()
"""


class Server:
  """A listener's process."""

  def __init__(self, keys: pathlib.Path | None) -> None:
    self.keys = keys
    self._process = subprocess.Popen(
      [sys.executable, '-c', SERVER, *([str(keys)] if keys else [])],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
      env={**os.environ, 'PYTHONPATH': common.PATH},
    )  # fmt: skip
    assert self._process.stdout is not None
    host, _, port = self._process.stdout.readline().strip().removeprefix('tcp://').rpartition(':')
    self.where = host, int(port)
    self._descriptors = len(os.listdir(f'/proc/{self._process.pid}/fd'))
    os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})

  def close(self) -> None:
    self._process.communicate()

  def kib(self) -> float:
    """Memory of its own."""
    pages = pathlib.Path(f'/proc/{self._process.pid}/statm').read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf('SC_PAGE_SIZE') / 1024

  def accept(self, connections: int) -> None:
    """Waits until it has that many more descriptors than at its start."""
    folder = f'/proc/{self._process.pid}/fd'
    until(lambda: len(os.listdir(folder)) >= self._descriptors + connections)

  def cpu(self) -> float:
    """Seconds of a core."""
    fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

  def known(self) -> sockets.socket:
    """A client's connection, with a session."""
    socket = sockets.create_connection(self.where)
    if self.keys is not None:
      socket = net_keys.client_context(self.keys).wrap_socket(socket)
    socket.sendall(
      b''.join(session_messages.HELLO.pack([session_messages.hello(parameter_messages.SERVICE, 7)]))
    )
    hear(socket)
    return socket


def hear(socket: sockets.socket) -> None:
  """One message."""
  data = b''
  while len(data) < 8 or len(data) < 8 + PREFIX.unpack_from(data)[0]:
    data += socket.recv(4096)


def client_hello(keys: pathlib.Path) -> bytes:
  """With which a handshake begins."""
  out = ssl.MemoryBIO()
  shaking = net_keys.client_context(keys).wrap_bio(ssl.MemoryBIO(), out)
  try:
    shaking.do_handshake()
  except ssl.SSLWantReadError:
    return out.read()
  raise AssertionError('it shook hands with nobody')


def large_hello() -> bytes:
  """All but a byte of a ClientHello as large as OpenSSL takes one, in records."""
  data = b'\x01' + LARGEST_HELLO.to_bytes(3, 'big') + bytes(LARGEST_HELLO - 1)
  records = [data[i : i + 2**14] for i in range(0, len(data), 2**14)]
  return b''.join(b'\x16\x03\x01' + len(r).to_bytes(2, 'big') + r for r in records)


def standing(server: Server, data: bytes) -> float:
  """KiB of each of a thousand connections that have sent this."""
  warm = [sockets.create_connection(server.where) for _ in range(20)]
  server.accept(len(warm))
  before = unchanged(server.kib, 0.5)
  ends = []
  for _ in range(CONNECTIONS):
    ends.append(sockets.create_connection(server.where))
    ends[-1].sendall(data)
  server.accept(len(warm) + len(ends))
  found = (unchanged(server.kib, 0.5) - before) / CONNECTIONS
  for end in (*warm, *ends):
    end.close()
  return found


def pings(server: Server, seconds: float) -> dict[str, float]:
  """How long a client's PINGs took, in ms, and the listener's share of a core."""
  took = []
  with server.known() as end:
    ping = b''.join(session_messages.PING.pack([None]))
    begun, cpu = time.perf_counter(), server.cpu()
    while (at := time.perf_counter()) < begun + seconds:
      end.sendall(ping)
      hear(end)
      took.append(time.perf_counter() - at)
      select.select([end], [], [], 0.005)  # a pause, which the end of the connection ends
    share = (server.cpu() - cpu) / (time.perf_counter() - begun)
  took.sort()
  return dict(
    p50_ms=statistics.median(took) * 1e3,
    p99_ms=took[int(0.99 * len(took))] * 1e3,
    most_ms=took[-1] * 1e3,
    cpu_share=share,
  )


def storm(where: tuple[str, int], data: bytes, seconds: float) -> None:
  """Connects, says this and leaves."""
  print('begins', flush=True)
  end, count = time.monotonic() + seconds, 0
  while time.monotonic() < end:
    try:
      with sockets.create_connection(where, 1.0) as one:
        one.sendall(data)
        count += 1
    except OSError:
      continue
  print(count, flush=True)


def stormed(server: Server, data: bytes, seconds: float) -> dict[str, float]:
  """PINGs while two processes connect as fast as they can."""
  code = f'import strangers; strangers.storm({server.where!r}, {data!r}, {seconds + 2})'
  storms = [
    subprocess.Popen(
      [sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': f'{HERE}:{common.PATH}'}
    )
    for _ in range(2)
  ]  # fmt: skip
  for one in storms:
    assert one.stdout is not None and one.stdout.readline() == 'begins\n'
  found = pings(server, seconds)
  count = sum(int(one.communicate()[0]) for one in storms)
  return {**found, 'connections_per_s': count / (seconds + 2)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seconds', type=float, default=10.0)
  seconds = parser.parse_args().seconds
  descriptors.raise_limit()
  results: dict[str, Any] = {'kib_of_each': {}}
  with tempfile.TemporaryDirectory() as folder:
    keys = pathlib.Path(folder) / 'keys'
    net_keys.new_keys(keys)
    hello = client_hello(keys)
    cases = {
      'without keys, says nothing': (None, b''),
      'without keys, all but a byte of the largest frame': (
        None, PREFIX.pack(session_messages.GUEST_BYTES - 1, 1 | 100 << 8) + bytes(session_messages.GUEST_BYTES - 2),
      ),
      'with keys, says nothing': (keys, b''),
      'with keys, half a ClientHello': (keys, hello[: len(hello) // 2]),
      'with keys, a ClientHello and no more': (keys, hello),
      'with keys, all but a byte of the largest ClientHello': (keys, large_hello()),
    }  # fmt: skip
    for name, (dir, data) in cases.items():
      server = Server(dir)
      server.known().close()
      results['kib_of_each'][name] = round(standing(server, data), 1)
      server.close()
      print(name, results['kib_of_each'][name], 'KiB', flush=True)
    for name, (dir, data) in {
      'without keys': (None, b'x' * 100),
      'with keys': (keys, hello),
    }.items():
      server = Server(dir)
      results[f'quiet, {name}'] = pings(server, seconds)
      results[f'storm, {name}'] = stormed(server, data, seconds)
      server.close()
      for kind in ('quiet', 'storm'):
        told = results[f'{kind}, {name}']
        print(kind, name, {k: round(v, 2) for k, v in told.items()}, flush=True)
  common.record('strangers', results)


if __name__ == '__main__':
  main()
