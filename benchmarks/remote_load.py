"""The load under which remote.py puts servers of environments: clients of each, all in one process."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import selectors
import socket as sockets
import ssl
import time
from typing import Any

import numpy as np

OBSERVATIONS = {'16B': ((4,), 'float32'), '28KB': ((4, 84, 84), 'uint8')}
GRPC = [('grpc.max_receive_message_length', -1), ('grpc.max_send_message_length', -1)]

Sizes = tuple[int, int, str]  # clients, environments of each, observation


def spec(observation: str) -> Any:
  """Returns the spaces of a stub environment."""
  from gymnasium import spaces

  from podrace.envs.host.base import HostSpec

  shape, dtype = OBSERVATIONS[observation]
  low, high = (0, 255) if dtype == 'uint8' else (-1, 1)
  box = spaces.Box(low, high, shape, np.dtype(dtype))
  return HostSpec('bench:stub', box, spaces.Discrete(6, dtype=np.int32), lambda args: None)  # type: ignore[arg-type, return-value]


def payload(environments: int, observation: str) -> list[bytes]:
  """Returns the buffers of a message: records, and observations."""
  from podrace.distributed.environments import environment_messages

  shape, dtype = OBSERVATIONS[observation]
  records = np.zeros(environments, environment_messages.RECORD)
  records['discount'] = 1
  return [records.tobytes(), bytes(np.zeros((environments, *shape), dtype))]


class ZmqClients:
  """Clients of the echo, which has no sessions."""

  def __init__(self, address: str, sizes: Sizes) -> None:
    import zmq

    self._context = zmq.Context()
    self._context.max_sockets = sizes[0] + 16
    self._sockets = [self._context.socket(zmq.DEALER) for _ in range(sizes[0])]
    self._number = {s: i for i, s in enumerate(self._sockets)}
    self._poller = zmq.Poller()
    for s in self._sockets:
      s.connect(address)
      self._poller.register(s, zmq.POLLIN)
    self._frames = payload(*sizes[1:])

  def send(self, i: int) -> None:
    self._sockets[i].send_multipart([b'header', *self._frames], copy=False)

  def answered(self) -> list[int]:
    """Waits; returns the clients with an answer."""
    ready = self._poller.poll()
    for s, _ in ready:
      s.recv_multipart()
    return [self._number[s] for s, _ in ready]

  def close(self) -> None:
    for s in self._sockets:
      s.close(0)
    self._context.term()


class StreamClients:
  """Clients of podrace's server, with a session and a group each: plain sockets."""

  def __init__(self, address: str, sizes: Sizes, keys: str | None = None) -> None:
    from podrace.distributed.environments import environment_messages as messages
    from podrace.distributed.net import frame
    from podrace.distributed.net import keys as net_keys

    self._context = None if keys is None else net_keys.client_context(pathlib.Path(keys))
    self._prefix, self._step = frame.PREFIX, messages.STEP
    kind = spec(sizes[2])
    schema = messages.schema(kind.observation_space, kind.action_space)
    self._hello = dict(env='bench:stub', schema=schema)
    self._first = payload(*sizes[1:])
    records = np.frombuffer(self._first[0], messages.RECORD).copy()
    records['step_type'] = 1
    self._later = [records.tobytes(), *self._first[1:]]
    self._answer = self._prefix.size + 8 + 4 * sizes[1]  # bytes of an ACTION
    self._selector = selectors.DefaultSelector()
    self._sockets = [self._join(address, i, sizes[1]) for i in range(sizes[0])]
    self._sent, self._received = [0] * sizes[0], [0] * sizes[0]

  def _join(self, address: str, i: int, environments: int) -> sockets.socket:
    from podrace.distributed.environments import environment_messages as messages
    from podrace.distributed.net import session_messages as session

    socket = self._connect(address)
    hello = b''.join(session.HELLO.pack([session.hello(messages.SERVICE, i + 1, **self._hello)]))
    socket.sendall(hello)
    while self._read_frame(socket) == session.WAIT.number:
      time.sleep(0.1)
      socket.sendall(hello)
    socket.sendall(b''.join(messages.ENTER.pack([0, environments])))
    if (number := self._read_frame(socket)) != messages.START.number:
      raise RuntimeError(f'a frame of kind {number} where a START was expected')
    self._selector.register(socket, selectors.EVENT_READ, i)
    return socket

  def _connect(self, address: str) -> sockets.socket:
    if address.startswith('unix:'):
      socket = sockets.socket(sockets.AF_UNIX)
      socket.connect(address.removeprefix('unix:'))
      return socket
    host, port = address.removeprefix('tcp://').rsplit(':', 1)
    socket = sockets.create_connection((host, int(port)))
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    return socket if self._context is None else self._context.wrap_socket(socket)

  def _read_frame(self, socket: sockets.socket) -> int:
    """Reads a frame and returns its kind."""
    size, word = self._prefix.unpack(self._read(socket, self._prefix.size))
    self._read(socket, size)
    return word & 0xFF

  def _read(self, socket: sockets.socket, size: int) -> bytes:
    data = b''
    while len(data) < size:
      if not (more := socket.recv(size - len(data))):
        raise RuntimeError('the server has closed the connection')
      data += more
    return data

  def send(self, i: int) -> None:
    buffers = self._step.pack((0, self._sent[i]), self._later if self._sent[i] else self._first)
    self._sent[i] += 1
    socket, size = self._sockets[i], sum(map(len, buffers))
    if size <= 2**14:
      socket.sendall(b''.join(buffers))
    elif isinstance(socket, ssl.SSLSocket):
      socket.sendall(b''.join(buffers[:-1]))
      socket.sendall(buffers[-1])
    elif (sent := socket.sendmsg(buffers)) < size:
      socket.sendall(memoryview(b''.join(buffers[:-1]))[sent:])
      socket.sendall(memoryview(buffers[-1])[max(sent - size + len(buffers[-1]), 0) :])

  def answered(self) -> list[int]:
    """Waits; returns the clients with a whole answer."""
    complete = []
    for key, _ in self._selector.select():
      data = key.fileobj.recv(2**16)  # type: ignore[union-attr]
      self._received[key.data] += len(data)
      if not data or self._received[key.data] > self._answer:
        raise RuntimeError(f'{data[:200]!r} where actions were expected')
      if self._received[key.data] == self._answer:
        self._received[key.data] = 0
        complete.append(key.data)
    return complete

  def close(self) -> None:
    for s in self._sockets:
      s.close()


class Latencies:
  """Seconds from messages to answers, after a third of the time to warm up, and the number of all answers."""

  def __init__(self, seconds: float) -> None:
    self.begin = time.perf_counter()
    self.warm = self.begin + seconds / 3
    self.end = self.warm + seconds
    self.values: list[float] = []
    self.count, self._since, self._last = 0, 0.0, 0.0

  def add(self, sent: float) -> None:
    """Counts an answer to a message that was sent then."""
    now = time.perf_counter()
    self.count += 1
    if self.warm < now < self.end:
      self._since, self._last = self._since or now, now
      self.values.append(now - sent)

  def summarize(self) -> dict[str, float]:
    if len(self.values) < 2:
      raise RuntimeError(f'{len(self.values)} answers: measure for more --seconds')
    p50, p99 = np.percentile(self.values, [50, 99]) * 1000
    rate = (len(self.values) - 1) / (self._last - self._since)
    return dict(round_trips_per_s=rate, p50_ms=float(p50), p99_ms=float(p99))


def drive(kind: str, server: dict[str, Any], sizes: Sizes, seconds: float) -> Latencies:
  """Sends the steps of all clients."""
  every: Any = (
    ZmqClients(server['address'], sizes)
    if kind == 'echo'
    else StreamClients(server['address'], sizes, server.get('keys'))
  )
  sent, latencies = [0.0] * sizes[0], Latencies(seconds)
  due = list(range(sizes[0]))
  with contextlib.closing(every):
    while time.perf_counter() < latencies.end:
      for i in due:
        sent[i] = time.perf_counter()
        every.send(i)
      due = every.answered()
      for i in due:
        latencies.add(sent[i])
  return latencies


def drive_grpc(address: str, sizes: Sizes, seconds: float) -> Latencies:
  """Sends the steps of all clients, each a task with a channel of its own."""
  import grpc

  message = b''.join(payload(*sizes[1:])) + bytes(24)  # and a header

  async def one(latencies: Latencies) -> None:
    options = [*GRPC, ('grpc.use_local_subchannel_pool', 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
      stream = channel.stream_stream('/bench/Step')()
      while (at := time.perf_counter()) < latencies.end:
        await stream.write(message)
        await stream.read()
        latencies.add(at)
      await stream.done_writing()

  async def main() -> Latencies:
    latencies = Latencies(seconds)
    await asyncio.gather(*(one(latencies) for _ in range(sizes[0])))
    return latencies

  return asyncio.run(main())
