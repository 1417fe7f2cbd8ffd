"""Remote environments: round trips of inference with a stub network and with a real one, and training ale:pong.

Round trips: so many clients, each with one group of environments and one message in flight, in one process;
the server in another, which answers with actions. The servers: podrace's with a stub in the place of
the network (`recv`, zeros, `send`), over TCP, a Unix socket and TLS; a bare pyzmq echo with the same messages (it answers with a
constant and looks at nothing), and grpcio's bidirectional streams with messages of the same size, the
faster of its threaded and its asyncio server. Clients are as bare as their library allows: podrace's are plain sockets.
`cpu_us` is the CPU time of the server's whole process for a round trip.

Network: the same with a real network in every server, the same one with the same parameters: two layers of 64 for 16 bytes, the shallow
IMPALA network for 28 KB, sampling actions, in batches padded to four sizes. The echo and grpcio's asyncio server give it all that
has come while it was busy. `alone` is the network without any messages, with batches of all environments, of half, a quarter and an eighth: the most that there can be.

Light clients: 1,000 of them connected to podrace's server at once, with one environment each that takes a step a
second; round trips' latency and what the server's process grows by, against the bounds below.

Training: `podrace train pong` with environments in the process, with `podrace envs` in another, with two of these, and
with one over TLS; in turn, on the same cores; the median of steps_per_s in the last three quarters of a run.

Local: two processes that exchange messages of the same sizes over a bare Unix socket, and through shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import itertools
import json
import multiprocessing
import pathlib
import resource
import selectors
import socket as sockets
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from multiprocessing import shared_memory
from typing import Any

import common
import numpy as np
import tables_load

CLIENTS, ENVIRONMENTS = (1, 8, 64, 256), (1, 64)
OBSERVATIONS = {'16B': ((4,), 'float32'), '28KB': ((4, 84, 84), 'uint8')}
LIGHT, PERIOD = 1000, 1.0  # clients, and seconds between the steps of one
P99_OF_ECHO, CLIENT_BYTES = 1.2, 30_000  # bounds: latency, and memory for each of them
IDLE = 10_000  # clients that are connected and silent
PARTS = ('round-trips', 'network', 'light', 'training', 'local')
TRAINING = {'local': 0, 'remote': 1, 'two processes': 2, 'TLS': 1}  # processes of environments
GRPC = ('grpc-threads', 'grpc-asyncio')
SERVERS = ('podrace', 'podrace-unix', 'podrace-tls', 'echo', *GRPC)  # TCP on loopback, but for one
WITH_NETWORK = ('podrace-network', 'echo-network', 'grpc-network')
VOLUME_PER_S = 5e7  # bytes of all clients' messages, for each of which a measurement takes a second
NETWORK_SIZES = 4  # all environments, a half, a quarter, an eighth: what podrace pads batches to


def spec(observation: str) -> Any:
  from gymnasium import spaces

  from podrace.envs.host.base import HostSpec

  shape, dtype = OBSERVATIONS[observation]
  low, high = (0, 255) if dtype == 'uint8' else (-1, 1)
  box = spaces.Box(low, high, shape, np.dtype(dtype))
  return HostSpec('bench:stub', box, spaces.Discrete(6, dtype=np.int32), lambda args: None)  # type: ignore[arg-type, return-value]


# --- servers, each a process --------------------------------------------------------------------


class Network:
  """A real network for so many environments, padded to a few sizes, which are compiled."""

  def __init__(self, most: int, observation: str) -> None:
    import jax

    from podrace.agents.impala import Impala
    from podrace.networks import ActorCritic
    from podrace.settings.agents import bind

    self._shape, self._dtype = OBSERVATIONS[observation]
    torso = dict(torso='impala', hidden=(256,)) if observation == '28KB' else dict(hidden=(64, 64))
    agent = bind(Impala(network=ActorCritic(**torso)), spec(observation))
    self._params = agent.init(jax.random.key(0)).params
    self._sizes = sorted({-(-most // 2**i) for i in range(NETWORK_SIZES)})
    self._calls = 0
    key = jax.random.key(1)

    @jax.jit
    def act(params: Any, timestep: Any, call: Any) -> Any:
      state = agent.initial_state(np.arange(timestep.reward.shape[0]))
      return agent.act(params, state, timestep, jax.random.fold_in(key, call))[0].action

    self._act = act
    for size in self._sizes:
      self(np.zeros((size, *self._shape), self._dtype))

  def __call__(self, observation: np.ndarray) -> np.ndarray:
    """Actions [n] i32."""
    from podrace.types import TimeStep

    n = len(observation)
    size = min(s for s in self._sizes if s >= n)
    if size > n:
      padded = np.zeros((size, *self._shape), self._dtype)
      padded[:n] = observation
      observation = padded
    ones: Any = np.ones(size, np.float32)
    step_type: Any = np.ones(size, np.int8)
    self._calls += 1
    timestep = TimeStep(observation, ones, ones, step_type)  # type: ignore[arg-type]
    return np.asarray(self._act(self._params, timestep, np.int32(self._calls)), np.int32)[:n]

  def read(self, frames: list[Any], environments: int) -> np.ndarray:
    """The observations in messages' last frames, in one array."""
    arrays = [np.frombuffer(x, self._dtype).reshape(environments, *self._shape) for x in frames]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

  def alone(self, seconds: float) -> float:
    """Environments/s, without any messages; of the best of its sizes."""
    rates = []
    for size in self._sizes:
      observation, count = np.zeros((size, *self._shape), self._dtype), 0
      begin = time.perf_counter()
      while (took := time.perf_counter() - begin) < seconds / len(self._sizes):
        self(observation)
        count += size
      rates.append(count / took)
    return max(rates)


def serve_network(address: str, clients: int, environments: int, observation: str) -> None:
  """podrace's server with a real network."""
  network = Network(clients * environments, observation)
  serve_podrace(address, clients, environments, observation, network)


def serve_podrace(
  address: str,
  clients: int,
  environments: int,
  observation: str,
  network: Network | None = None,
  keys: pathlib.Path | None = None,
) -> None:
  from podrace.distributed.environments.server import Server
  from podrace.distributed.net.listener import Listen
  from podrace.envs.host.base import PoolArgs

  n = clients * environments
  server = Server(Listen(address, keys, peer_timeout=600.0), n, say=lambda level, line: None)
  kind = server.spec(spec(observation))
  with server:
    pool: Any = kind.make(PoolArgs(n, n, np.zeros(n, np.uint32), 1, 60.0))
    pool.reset()

    def act() -> None:
      while True:
        arrival = pool.recv()
        ids = arrival.env_id
        if len(ids):
          zeros = np.zeros(len(ids), np.int32)
          pool.send(ids, zeros if network is None else network(arrival.timestep.observation))

    threading.Thread(target=act, daemon=True).start()
    common.answer(address=server.address, keys=keys and str(keys))
    for _ in common.requests():
      common.answer(batches={str(k): v for k, v in sorted(pool.batches.items())}, **used())


def used() -> dict[str, float]:
  """What this process has used so far."""
  return dict(cpu_s=time.process_time(), resident=tables_load.resident())


def serve_echo(
  clients: int, environments: int, observation: str, network: Network | None = None
) -> None:
  import zmq

  router = zmq.Context().socket(zmq.ROUTER)
  router.bind('tcp://127.0.0.1:*')
  action = bytes(4 * environments)

  def echo() -> None:
    while True:
      frames = router.recv_multipart(copy=False)
      router.send_multipart([frames[0], frames[1], action])

  def infer(network: Network) -> None:
    while True:
      messages = [router.recv_multipart(copy=False)]
      with contextlib.suppress(zmq.Again):
        while len(messages) < clients:
          messages.append(router.recv_multipart(zmq.NOBLOCK, copy=False))
      actions = network(network.read([m[-1] for m in messages], environments))
      for m, part in zip(messages, np.split(actions, len(messages)), strict=True):
        router.send_multipart([m[0], m[1], part.tobytes()])

  target = echo if network is None else functools.partial(infer, network)
  threading.Thread(target=target, daemon=True).start()
  common.answer(address=router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip('\0'))
  for _ in common.requests():
    common.answer(batches={}, **used())


def keys_in(directory: pathlib.Path) -> pathlib.Path:
  """Of server and clients; the clients' process is told where."""
  from podrace.distributed.net.keys import new_keys

  new_keys(directory / 'keys')
  return directory / 'keys'


OPTIONS = [('grpc.max_receive_message_length', -1), ('grpc.max_send_message_length', -1)]


def serve_grpc_network(clients: int, environments: int, observation: str) -> None:
  """An asyncio server whose streams put what they get into a queue, of which all is taken for a batch."""
  import grpc

  network = Network(clients * environments, observation)

  async def main() -> None:
    asked: asyncio.Queue[tuple[bytes, asyncio.Future[bytes]]] = asyncio.Queue()

    async def step(requests: Any, context: Any) -> Any:
      async for message in requests:
        answer: asyncio.Future[bytes] = loop.create_future()
        asked.put_nowait((message, answer))
        yield await answer

    async def infer() -> None:
      size = len(payload(environments, observation)[0])  # the records come first, a header last
      while True:
        batch = [await asked.get()]
        while not asked.empty():
          batch.append(asked.get_nowait())
        frames = [memoryview(message)[size:-24] for message, _ in batch]
        actions = await loop.run_in_executor(None, lambda f=frames: network(network.read(f, environments)))  # fmt: skip
        for (_, answer), part in zip(batch, np.split(actions, len(batch)), strict=True):
          answer.set_result(part.tobytes())

    loop = asyncio.get_running_loop()
    server = grpc.aio.server(options=OPTIONS)
    method = grpc.stream_stream_rpc_method_handler(step)
    server.add_generic_rpc_handlers(
      (grpc.method_handlers_generic_handler('bench', {'Step': method}),)
    )
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    task = asyncio.create_task(infer())
    common.answer(address=f'127.0.0.1:{port}')
    while await loop.run_in_executor(None, sys.stdin.readline):
      common.answer(batches={}, **used())
    task.cancel()
    await server.stop(0)

  asyncio.run(main())


def serve_grpc(kind: str, clients: int, environments: int) -> None:
  import grpc

  action = bytes(4 * environments)

  def handlers(step: Any) -> Any:
    method = grpc.stream_stream_rpc_method_handler(step)
    return grpc.method_handlers_generic_handler('bench', {'Step': method})

  if kind == 'grpc-threads':

    def step(requests: Any, context: Any) -> Any:
      for _ in requests:
        yield action

    server = grpc.server(futures.ThreadPoolExecutor(clients + 2), options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(step),))
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    common.answer(address=f'127.0.0.1:{port}')
    for _ in common.requests():
      common.answer(batches={}, **used())
    return

  async def main() -> None:
    async def step(requests: Any, context: Any) -> Any:
      async for _ in requests:
        yield action

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(step),))
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    common.answer(address=f'127.0.0.1:{port}')
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
      common.answer(batches={}, **used())
    await server.stop(0)

  asyncio.run(main())


def serve(kind: str, clients: int, environments: int, observation: str) -> None:
  if kind == 'podrace-network':
    serve_network('tcp://127.0.0.1:*', clients, environments, observation)
  elif kind == 'echo-network':
    network = Network(clients * environments, observation)
    serve_echo(clients, environments, observation, network)
  elif kind == 'grpc-network':
    serve_grpc_network(clients, environments, observation)
  elif kind == 'alone':
    network = Network(clients * environments, observation)
    common.answer(address='')
    for _ in common.requests():
      common.answer(environments_per_s=network.alone(2.0))
  elif kind.startswith('podrace'):
    with tempfile.TemporaryDirectory() as directory:
      address = f'unix:{directory}/socket' if kind == 'podrace-unix' else 'tcp://127.0.0.1:*'
      keys = keys_in(pathlib.Path(directory)) if kind == 'podrace-tls' else None
      serve_podrace(address, clients, environments, observation, keys=keys)
  elif kind == 'echo':
    serve_echo(clients, environments, observation)
  else:
    serve_grpc(kind, clients, environments)


# --- clients, all in one process ------------------------------------------------------------------


def told(latencies: list[float], seconds: float) -> dict[str, float]:
  """Of answers that came within so many seconds, the first and the last of them included."""
  if len(latencies) < 2:
    raise RuntimeError(f'{len(latencies)} answers: measure for more --seconds')
  p50, p99 = np.percentile(latencies, [50, 99]) * 1000
  return dict(
    round_trips_per_s=(len(latencies) - 1) / seconds, p50_ms=float(p50), p99_ms=float(p99)
  )


def payload(environments: int, observation: str) -> list[bytes]:
  from podrace.distributed.environments import environment_messages

  shape, dtype = OBSERVATIONS[observation]
  records = np.zeros(environments, environment_messages.RECORD)
  records['discount'] = 1
  return [records.tobytes(), bytes(np.zeros((environments, *shape), dtype))]


class ZmqClients:
  """Of the echo, which has no sessions."""

  def __init__(self, address: str, clients: int, environments: int, observation: str) -> None:
    import zmq

    self._context = zmq.Context()
    self._context.max_sockets = clients + 16
    self._sockets = [self._context.socket(zmq.DEALER) for _ in range(clients)]
    self._number = {s: i for i, s in enumerate(self._sockets)}
    self._poller = zmq.Poller()
    for s in self._sockets:
      s.connect(address)
      self._poller.register(s, zmq.POLLIN)
    self._frames = payload(environments, observation)

  def send(self, i: int) -> None:
    self._sockets[i].send_multipart([b'header', *self._frames], copy=False)

  def answered(self, seconds: float | None) -> list[int]:
    """Whose answers have come."""
    ready = self._poller.poll(None if seconds is None else seconds * 1000)
    for s, _ in ready:
      s.recv_multipart()
    return [self._number[s] for s, _ in ready]

  def close(self) -> None:
    for s in self._sockets:
      s.close(0)
    self._context.term()


class StreamClients:
  """Of podrace's server, with a session and a group each; plain sockets, that put their frames together themselves."""

  def __init__(
    self, address: str, clients: int, environments: int, observation: str, keys: str | None = None
  ) -> None:
    from podrace.distributed.environments import environment_messages
    from podrace.distributed.net import frame
    from podrace.distributed.net import keys as net_keys

    self._context = None if keys is None else net_keys.client_context(pathlib.Path(keys))
    self._prefix, self._step = frame.PREFIX, environment_messages.STEP
    self._hello = {
      'env': 'bench:stub',
      'schema': environment_messages.schema(*_spaces(observation)),
    }
    self._arrays = payload(environments, observation)
    records = np.frombuffer(self._arrays[0], environment_messages.RECORD).copy()
    records['step_type'] = 1
    self._later = [records.tobytes(), *self._arrays[1:]]
    self._answer = self._prefix.size + 8 + 4 * environments  # bytes of an ACTION
    self._selector = selectors.DefaultSelector()
    self._sockets = [self._join(address, i, environments) for i in range(clients)]
    self._seqs, self._come = [0] * clients, [0] * clients

  def _join(self, address: str, i: int, environments: int) -> sockets.socket:
    from podrace.distributed.environments import environment_messages
    from podrace.distributed.net import session_messages

    socket = self._connect(address)
    hello = b''.join(
      session_messages.HELLO.pack(
        [session_messages.hello(environment_messages.SERVICE, i + 1, **self._hello)]
      )
    )
    socket.sendall(hello)
    while self._hear(socket) == session_messages.WAIT.number:
      time.sleep(0.1)
      socket.sendall(hello)
    socket.sendall(b''.join(environment_messages.ENTER.pack([0, environments])))
    if (number := self._hear(socket)) != environment_messages.START.number:
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

  def _hear(self, socket: sockets.socket) -> int:
    """The kind of the next frame."""
    size, word = self._prefix.unpack(self._exactly(socket, self._prefix.size))
    self._exactly(socket, size)
    return word & 0xFF

  def _exactly(self, socket: sockets.socket, size: int) -> bytes:
    data = b''
    while len(data) < size:
      more = socket.recv(size - len(data))
      if not more:
        raise RuntimeError('the server has closed the connection')
      data += more
    return data

  def send(self, i: int) -> None:
    buffers = self._step.pack((0, self._seqs[i]), self._later if self._seqs[i] else self._arrays)
    self._seqs[i] += 1
    socket, size = self._sockets[i], sum(map(len, buffers))
    if size <= 2**14:
      socket.sendall(b''.join(buffers))
    elif isinstance(socket, ssl.SSLSocket):
      socket.sendall(b''.join(buffers[:-1]))
      socket.sendall(buffers[-1])
    elif (sent := socket.sendmsg(buffers)) < size:
      socket.sendall(memoryview(b''.join(buffers[:-1]))[sent:])
      socket.sendall(memoryview(buffers[-1])[max(sent - size + len(buffers[-1]), 0) :])

  def answered(self, seconds: float | None) -> list[int]:
    """Whose answers have come."""
    found = []
    for key, _ in self._selector.select(seconds):
      data = key.fileobj.recv(2**16)  # type: ignore[union-attr]
      i = key.data
      self._come[i] += len(data)
      if not data or self._come[i] > self._answer:
        raise RuntimeError(f'{data[:200]!r} where actions were expected')
      if self._come[i] == self._answer:
        self._come[i] = 0
        found.append(i)
    return found

  def close(self) -> None:
    for s in self._sockets:
      s.close()


def drive(
  clients: ZmqClients | StreamClients, count: int, seconds: float, period: float = 0.0
) -> tuple[dict[str, float], int]:
  """Latencies and rates, and all answers; `period` is between the steps of a client, 0 is at once."""
  sent, done = [0.0] * count, 0
  latencies: list[float] = []
  begin = time.perf_counter()
  due = collections.deque((begin + period * i / count, i) for i in range(count))
  warm = begin + max(seconds / 3, 2 * period)
  end = warm + seconds
  since = last = 0.0
  while (now := time.perf_counter()) < end:
    while due and due[0][0] <= now:
      i = due.popleft()[1]
      sent[i] = time.perf_counter()
      clients.send(i)
    for i in clients.answered(max(due[0][0] - now, 0) if due else None):
      now = time.perf_counter()
      done += 1
      if now > warm:
        since, last = since or now, now
        latencies.append(now - sent[i])
      due.append((max(sent[i] + period, now), i))
  return told(latencies, last - since), done


def _spaces(observation: str) -> tuple[Any, Any]:
  kind = spec(observation)
  return kind.observation_space, kind.action_space


def ask_grpc(
  address: str, clients: int, environments: int, observation: str, seconds: float
) -> tuple[dict[str, float], int]:
  import grpc

  message = b''.join(payload(environments, observation)) + bytes(24)  # and a header
  latencies: list[float] = []
  done = 0
  since = last = 0.0

  async def one(channel: Any, warm: float, end: float) -> None:
    nonlocal since, last, done
    stream = channel.stream_stream('/bench/Step')()
    while (at := time.perf_counter()) < end:
      await stream.write(message)
      await stream.read()
      now = time.perf_counter()
      done += 1
      if warm < now < end:
        since, last = since or now, now
        latencies.append(now - at)
    await stream.done_writing()

  async def main() -> None:
    channels = [
      grpc.aio.insecure_channel(address, [*OPTIONS, ('grpc.use_local_subchannel_pool', 1)])
      for _ in range(clients)
    ]
    warm = time.perf_counter() + seconds / 3
    await asyncio.gather(*(one(c, warm, warm + seconds) for c in channels))
    for c in channels:
      await c.close()

  asyncio.run(main())
  return told(latencies, last - since), done


# --- round trips --------------------------------------------------------------------------------------


def round_trips(
  kind: str, clients: int, environments: int, observation: str, seconds: float
) -> dict[str, Any]:
  sizes = [str(clients), str(environments), observation]
  server = common.Worker([sys.executable, __file__, '--serve', kind, *sizes])
  assert server.process.stdout
  with server:
    line = server.process.stdout.readline()
    if not line:
      raise RuntimeError(f'the server {kind} ended before it listened; its error is above')
    first = json.loads(line)
    if kind == 'alone':
      return server.ask()
    before = server.ask()['cpu_s']
    if kind.startswith('grpc'):
      found, count = ask_grpc(first['address'], clients, environments, observation, seconds)
    else:
      found, count = ask(kind, first, clients, environments, observation, seconds)
    last = server.ask()
    found['batches'], found['cpu_us'] = last['batches'], 1e6 * (last['cpu_s'] - before) / count
  return found


def ask(
  kind: str, server: dict[str, Any], clients: int, environments: int, observation: str,
  seconds: float, period: float = 0.0,
) -> tuple[dict[str, float], int]:  # fmt: skip
  """What a load shows, and its round trips, those before it is warm too."""
  sizes = clients, environments, observation
  if kind.startswith('podrace'):
    every: Any = StreamClients(server['address'], *sizes, server.get('keys'))
  else:
    every = ZmqClients(server['address'], *sizes)
  try:
    return drive(every, clients, seconds, period)
  finally:
    every.close()


def all_round_trips(
  wanted: list[int], repeats: int, seconds: float, known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
  rows = [row for row in known if row['clients'] not in wanted]
  for observation in OBSERVATIONS:
    for clients in wanted:
      for environments in ENVIRONMENTS:
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SERVERS}
        volume = clients * sum(map(len, payload(environments, observation)))
        longer = max(
          seconds, volume / VOLUME_PER_S
        )  # a few for each client, before and after it is warm
        for _ in range(repeats):
          for kind in SERVERS:
            found[kind].append(round_trips(kind, clients, environments, observation, longer))
        row = compare(found)
        rows.append(
          dict(
            observation=observation,
            clients=clients,
            environments=environments,
            **row,
            load_1min=common.machine()['load_1min'],
            origin=common.origin(),
          )
        )
        shown = {k: round(v['round_trips_per_s']['median']) for k, v in row['servers'].items()}
        print(
          f'{observation} {clients} clients x {environments}: {shown}; of the echo '
          f'{row["of_echo"]:.2f}, of grpc {row["of_grpc"]:.2f}, TLS {row["tls_over_plain"]:.2f}; '
          f'CPU us {({k: round(v["cpu_us"]["median"]) for k, v in row["servers"].items()})}', flush=True,
        )  # fmt: skip
  return sorted(
    rows,
    key=lambda r: (list(OBSERVATIONS).index(r['observation']), r['clients'], r['environments']),
  )


def compare(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  servers: dict[str, Any] = {
    kind: {
      k: common.summary([r[k] for r in runs])
      for k in ('round_trips_per_s', 'p50_ms', 'p99_ms', 'cpu_us')
    }
    for kind, runs in found.items()
  }

  def rate(kind: str) -> float:
    return servers[kind]['round_trips_per_s']['median']

  return dict(
    servers=servers,
    of_echo=rate('podrace') / rate('echo'),
    unix_over_tcp=rate('podrace-unix') / rate('podrace'),
    tls_over_plain=rate('podrace-tls') / rate('podrace'),
    of_grpc=rate('podrace') / max(map(rate, GRPC)),
    batches=found['podrace'][-1]['batches'],
  )


def all_with_network(
  wanted: list[int], repeats: int, seconds: float, known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
  """As `all_round_trips`, of the servers with a real network."""
  rows = [row for row in known if row['clients'] not in wanted]
  for observation in OBSERVATIONS:
    for clients in wanted:
      for environments in ENVIRONMENTS:
        sizes = clients, environments, observation
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WITH_NETWORK}
        alone = []
        for _ in range(repeats):
          alone.append(round_trips('alone', *sizes, seconds)['environments_per_s'])
          most = statistics.median(alone) / environments  # round trips/s
          longer = max(seconds, 12 * clients / most)  # a dozen for each client
          for kind in WITH_NETWORK:
            found[kind].append(round_trips(kind, *sizes, longer))
        servers = {
          kind: {k: common.summary([r[k] for r in runs]) for k in ('round_trips_per_s', 'p50_ms', 'p99_ms')}
          for kind, runs in found.items()
        }  # fmt: skip
        rate = {k: v['round_trips_per_s']['median'] for k, v in servers.items()}
        row = dict(
          origin=common.origin(),
          observation=observation,
          clients=clients,
          environments=environments,
          servers=servers,
          alone=common.summary(alone),
          of_echo=rate['podrace-network'] / rate['echo-network'],
          of_grpc=rate['podrace-network'] / rate['grpc-network'],
          of_alone=rate['podrace-network'] * environments / statistics.median(alone),
          batches=found['podrace-network'][-1]['batches'],
        )
        rows.append(row)
        shown = {k: round(v) for k, v in rate.items()}
        print(
          f'{observation} {clients} clients x {environments}, real network: {shown}; of the echo '
          f'{row["of_echo"]:.2f}, of grpc {row["of_grpc"]:.2f}, of the network alone {row["of_alone"]:.2f}',
          flush=True,
        )
  return sorted(
    rows,
    key=lambda r: (list(OBSERVATIONS).index(r['observation']), r['clients'], r['environments']),
  )


# --- light clients ------------------------------------------------------------------------------------


def light(kind: str, seconds: float) -> tuple[dict[str, Any], int, int]:
  """What such a load shows, and the bytes of the server's process before and after."""
  server = common.Worker([sys.executable, __file__, '--serve', kind, str(LIGHT), '1', '16B'])
  assert server.process.stdout
  with server:
    first = json.loads(server.process.stdout.readline())
    before = server.ask()['resident']
    found: dict[str, Any] = ask(kind, first, LIGHT, 1, '16B', seconds, PERIOD)[0]
    return found, before, server.ask()['resident']


def light_clients(seconds: float) -> dict[str, Any]:
  more_files()
  found, before, after = light('podrace', seconds)
  echo, *_ = light('echo', seconds)
  tls, before_tls, after_tls = light('podrace-tls', seconds)
  tls['server_bytes_per_client'] = (after_tls - before_tls) / LIGHT
  found |= dict(
    clients=LIGHT,
    steps_per_s_of_each=1 / PERIOD,
    server_bytes_per_client=(after - before) / LIGHT,
    echo=echo,
    tls=tls,
    p99_of_echo=found['p99_ms'] / echo['p99_ms'],
    bounds=dict(p99_of_echo=P99_OF_ECHO, server_bytes_per_client=CLIENT_BYTES),
  )
  print(f'{LIGHT} light clients: {found}', flush=True)
  found['idle'] = {kind: idle(kind) for kind in ('podrace', 'podrace-tls')}
  print(f'{IDLE} idle clients: {found["idle"]}', flush=True)
  return found


def more_files() -> None:
  """As many as may be: each connection is one."""
  _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(2**16, hard), hard))


def idle(kind: str) -> dict[str, float]:
  """Memory and CPU of the server's process with clients that are connected, and with a session without a group."""
  server = common.Worker([sys.executable, __file__, '--serve', kind, str(IDLE), '1', '16B'])
  assert server.process.stdout
  with server:
    first = json.loads(server.process.stdout.readline())
    before = server.ask()['resident']
    every = StreamClients(first['address'], IDLE, 1, '16B', first.get('keys'))
    begun = server.ask()
    time.sleep(5.0)
    ended = server.ask()
    every.close()
  return dict(
    clients=IDLE,
    server_bytes_per_client=(begun['resident'] - before) / IDLE,
    cores=(ended['cpu_s'] - begun['cpu_s']) / 5.0,
  )


# --- training -------------------------------------------------------------------------------------


def train(name: str, steps: int, address: str = '') -> dict[str, Any]:
  """A run of `TRAINING`; over a Unix socket if no address is given, but for TLS."""
  processes = TRAINING[name]
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as directory:
    run_dir = pathlib.Path(directory) / 'run'
    args = ['train', 'pong', '--total-steps', str(steps), '--run-dir', str(run_dir), '--quiet']
    podrace = [sys.executable, '-m', 'podrace.cli']
    if name == 'TLS':
      keys = ['--keys', str(keys_in(pathlib.Path(directory)))]
      address = f'tcp://127.0.0.1:{common.free_port()}'
    else:
      keys = []
      address = address or f'unix:{directory}/socket'
    envs = [
      subprocess.Popen(
        [*podrace, 'envs', '--connect', address, '--env', 'ale:pong', '--num-envs', str(16 // processes), *keys]
      )
      for _ in range(processes)
    ]  # fmt: skip
    if envs:
      args += ['--envs', 'remote', '--listen', address, *keys]
    done = subprocess.run([*podrace, *args], check=False, capture_output=True, text=True)
    for one in envs:
      if one.wait(60):
        raise RuntimeError(f'the environments ended with {one.returncode}')
    if done.returncode:
      raise RuntimeError(f'{args} failed:\n{done.stderr}')
    lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
    tail = [x['steps_per_s'] for x in lines[len(lines) // 4 :]]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return dict(
      cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,  # of all processes
      steps_per_s=json.loads((run_dir / 'summary.json').read_text())['steps_per_s'],
      steady_steps_per_s=float(np.median(tail)),
      policy_lag_mean=float(np.mean([x['policy_lag_mean'] for x in lines])),
      dropped_steps=sum(x['dropped_steps'] for x in lines),
      actor_time={k: v for k, v in lines[-1].items() if k.startswith('actor_')},
    )


def training(repeats: int, steps: int) -> dict[str, Any]:
  found: dict[str, list[dict[str, Any]]] = {name: [] for name in TRAINING}
  for _ in range(repeats):
    for name, runs in found.items():
      runs.append(train(name, steps))
      print(name, runs[-1], flush=True)
  rates = {k: common.summary([r['steady_steps_per_s'] for r in v]) for k, v in found.items()}
  over_local = {k: r['median'] / rates['local']['median'] for k, r in rates.items()}
  cpu = {k: common.summary([r['cpu_s'] for r in v]) for k, v in found.items()}
  told = ', '.join(f'{k} {over_local[k]:.2f}, {v["median"]:.0f} s of CPU' for k, v in cpu.items())
  print(f'training, of local: {told}', flush=True)
  return dict(steps=steps, rates=rates, cpu_s=cpu, runs=found, over_local=over_local)


# --- processes of one machine ---------------------------------------------------------------------


def answer_locally(path: str, name: str, size: int) -> None:
  """Copies each message into an array, which is then given to a network, and answers, until the other end closes."""
  memory = shared_memory.SharedMemory(name) if name else None
  array = np.empty(size, np.uint8)
  with sockets.socket(sockets.AF_UNIX) as socket:
    socket.connect(path)
    while True:
      if memory is None:
        at = 0
        while at < size and (n := socket.recv_into(memoryview(array)[at:])):
          at += n
        if at < size:
          break
      else:
        if not socket.recv(8):
          break
        array[:] = np.frombuffer(memory.buf, np.uint8, size)
      socket.send(bytes(8))
  if memory is not None:
    memory.close()


def ask_locally(shared: bool, size: int, seconds: float) -> float:
  """Round trips/s of `size` bytes over a Unix socket, or through shared memory with a small message for each."""
  observations = np.random.default_rng(0).integers(0, 255, size, np.uint8)
  with contextlib.ExitStack() as stack:
    path = f'{stack.enter_context(tempfile.TemporaryDirectory())}/socket'
    memory = shared_memory.SharedMemory(create=True, size=size) if shared else None
    if memory is not None:
      stack.callback(memory.unlink)
      stack.callback(memory.close)
    listening = stack.enter_context(sockets.socket(sockets.AF_UNIX))
    listening.bind(path)
    listening.listen()
    spawn = multiprocessing.get_context('spawn')
    name = '' if memory is None else memory.name
    child = spawn.Process(target=answer_locally, args=(path, name, size), daemon=True)
    child.start()
    listening.settimeout(30)
    socket = stack.enter_context(listening.accept()[0])

    def ask() -> None:
      if memory is None:
        socket.sendall(observations.data)
      else:
        np.frombuffer(memory.buf, np.uint8, size)[:] = observations
        socket.send(bytes(8))
      if not socket.recv(8):
        raise SystemExit('the other process does not answer')

    ask()
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
      ask()
      count += 1
    socket.close()
    child.join(10)
    return count / took


def local(repeats: int, seconds: float) -> dict[str, dict[str, Any]]:
  """What shared memory would gain over a Unix socket, without all that podrace does for a message."""
  found = {}
  for observation, environments in itertools.product(OBSERVATIONS, ENVIRONMENTS):
    size = sum(map(len, payload(environments, observation)))
    rates: dict[str, list[float]] = {'unix': [], 'shared': []}
    for _ in range(repeats):
      for kind, those in rates.items():
        those.append(ask_locally(kind == 'shared', size, seconds))
    row = {k: common.summary(v) for k, v in rates.items()}
    found[f'{observation}, {environments}'] = dict(bytes=size, **row)
    told = ', '.join(f'{k} {v["median"]:,.0f}' for k, v in row.items())
    print(f'{observation} x {environments} ({size} bytes): {told} round trips/s', flush=True)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('parts', nargs='*', help=f'of {PARTS}; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=2.0)
  parser.add_argument('--steps', type=int, default=60_000)
  parser.add_argument(
    '--clients',
    type=int,
    nargs='+',
    default=list(CLIENTS),
    help='of round-trips; rows of others are kept',
  )
  parser.add_argument('--serve', nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    kind, clients, environments, observation = args.serve
    serve(kind, int(clients), int(environments), observation)
    return
  if wrong := set(args.parts) - set(PARTS):
    parser.error(f'no part is called {sorted(wrong)}; there are {PARTS}')
  parts = args.parts or PARTS
  path = common.RESULTS / 'remote.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  if 'round-trips' in parts:
    for clients in args.clients:
      known = results.get('round_trips', [])
      results['round_trips'] = all_round_trips([clients], args.repeats, args.seconds, known)
      common.record('remote', results)
  if 'network' in parts:
    for clients in args.clients:  # minutes each: what there is is kept
      known = results.get('network', [])
      results['network'] = all_with_network([clients], args.repeats, args.seconds, known)
      common.record('remote', results)
  results.pop('checksum_ms', None)  # there are none any more
  if 'light' in parts:
    results['light_clients'] = dict(light_clients(5 * args.seconds), origin=common.origin())
  if 'training' in parts:
    results['training'] = dict(training(args.repeats, args.steps), origin=common.origin())
  if 'local' in parts:
    results['local'] = dict(local(args.repeats, args.seconds), origin=common.origin())
  common.record('remote', results)


if __name__ == '__main__':
  main()
