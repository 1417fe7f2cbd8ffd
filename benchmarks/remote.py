"""Remote environments: round trips with a stub network, and training ale:pong.

round-trips: clients with one group of environments and one message in flight each, all in one process; the server in
another, which answers with actions. The servers: podrace's with a stub in the place of the network (`recv`, zeros, `send`),
over TCP, a Unix socket and TLS; a bare pyzmq echo with the same messages (it answers with a constant and looks at nothing),
and grpcio's bidirectional streams with messages of the same size, by its asyncio server. Clients are as bare as their
library allows: podrace's are plain sockets. `cpu_us` is the CPU time of the server's process for a round trip.

training: `podrace train pong` with environments in the process, with `podrace envs` in another, with two of these, and with
one over TLS; in turn, on the same cores; the median of steps_per_s in the last three quarters of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import tables_load
from remote_load import GRPC, OBSERVATIONS, Sizes, drive, drive_grpc, payload, spec

SERVERS = ('podrace', 'podrace-unix', 'podrace-tls', 'echo', 'grpc')  # TCP on loopback, but for one
KEYS = ('round_trips_per_s', 'p50_ms', 'p99_ms', 'cpu_us')
TRAINING = {'local': 0, 'remote': 1, 'two processes': 2, 'TLS': 1}  # processes of environments
VOLUME_PER_S = 5e7  # a measurement takes a second for each of these bytes of all clients' messages
PARTS = ('round-trips', 'training')


def usage() -> dict[str, float]:
  """Returns the resources that this process has used."""
  return dict(cpu_s=time.process_time(), resident=tables_load.resident())


def serve_podrace(address: str, sizes: Sizes, keys: pathlib.Path | None) -> None:
  from podrace.distributed.environments.server import Server
  from podrace.distributed.net.listener import Listen
  from podrace.envs.host.base import PoolArgs

  n = sizes[0] * sizes[1]
  server = Server(Listen(address, keys, peer_timeout=600.0), n, say=lambda level, line: None)
  kind = server.spec(spec(sizes[2]))
  with server:
    pool: Any = kind.make(PoolArgs(n, n, np.zeros(n, np.uint32), 1, 60.0))
    pool.reset()

    def act() -> None:
      while True:
        if len(ids := pool.recv().env_id):
          pool.send(ids, np.zeros(len(ids), np.int32))

    threading.Thread(target=act, daemon=True).start()
    common.answer(address=server.address, keys=keys and str(keys))
    common.serve(usage=usage)


def serve_echo(action: bytes) -> None:
  import zmq

  router = zmq.Context().socket(zmq.ROUTER)
  router.bind('tcp://127.0.0.1:*')

  def echo() -> None:
    while True:
      frames = router.recv_multipart(copy=False)
      router.send_multipart([frames[0], frames[1], action])

  threading.Thread(target=echo, daemon=True).start()
  common.answer(address=router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip('\0'))
  common.serve(usage=usage)


def serve_grpc(action: bytes) -> None:
  import grpc

  async def step(requests: Any, context: Any) -> Any:
    async for _ in requests:
      yield action

  async def main() -> None:
    server = grpc.aio.server(options=GRPC)
    method = grpc.stream_stream_rpc_method_handler(step)
    handler = grpc.method_handlers_generic_handler('bench', {'Step': method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    common.answer(address=f'127.0.0.1:{port}')
    await asyncio.get_running_loop().run_in_executor(None, lambda: common.serve(usage=usage))
    await server.stop(0)

  asyncio.run(main())


def new_keys(directory: str) -> pathlib.Path:
  """Makes keys for a server and its clients."""
  from podrace.distributed.net import keys

  keys.new_keys(pathlib.Path(directory) / 'keys')
  return pathlib.Path(directory) / 'keys'


def serve(kind: str, sizes: Sizes) -> None:
  """In a worker: serves until the input closes."""
  action = bytes(4 * sizes[1])
  if kind == 'echo':
    serve_echo(action)
  elif kind == 'grpc':
    serve_grpc(action)
  else:
    with tempfile.TemporaryDirectory() as directory:
      address = f'unix:{directory}/socket' if kind == 'podrace-unix' else 'tcp://127.0.0.1:*'
      serve_podrace(address, sizes, new_keys(directory) if kind == 'podrace-tls' else None)


@contextlib.contextmanager
def served(kind: str, sizes: Sizes) -> Iterator[tuple[common.Worker, dict[str, Any]]]:
  """Starts a server; yields its process and its address."""
  with common.Worker([sys.executable, __file__, '--worker', kind, *map(str, sizes)]) as server:
    yield server, server.read()


def round_trips(kind: str, sizes: Sizes, seconds: float) -> dict[str, float]:
  with served(kind, sizes) as (server, about):
    before = server.ask(do='usage')['cpu_s']
    if kind == 'grpc':
      latencies = drive_grpc(about['address'], sizes, seconds)
    else:
      latencies = drive(kind, about, sizes, seconds)
    cpu_s = server.ask(do='usage')['cpu_s'] - before
  return dict(latencies.summarize(), cpu_us=1e6 * cpu_s / latencies.count)


def compare(sizes: Sizes, repeats: int, seconds: float) -> dict[str, Any]:
  """Measures all servers in turn."""
  volume = sizes[0] * sum(map(len, payload(*sizes[1:])))
  seconds = max(
    seconds, volume / VOLUME_PER_S
  )  # a few for each client, before and after it is warm
  runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in SERVERS}
  for _ in range(repeats):
    for kind, each in runs.items():
      each.append(round_trips(kind, sizes, seconds))
  servers = {kind: common.columns(each, *KEYS) for kind, each in runs.items()}
  rate = {kind: x['round_trips_per_s']['median'] for kind, x in servers.items()}
  return dict(
    servers=servers, of_echo=rate['podrace'] / rate['echo'], of_grpc=rate['podrace'] / rate['grpc'],
    unix_over_tcp=rate['podrace-unix'] / rate['podrace'], tls_over_plain=rate['podrace-tls'] / rate['podrace'],
    load_1min=common.machine()['load_1min'], origin=common.origin(),
  )  # fmt: skip


def train(name: str, steps: int, address: str = '') -> dict[str, Any]:
  """Makes a run of `TRAINING`; over a Unix socket if no address is given, but for TLS."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as directory:
    folder, keys = pathlib.Path(directory), ()
    if name == 'TLS':
      keys = ('--keys', new_keys(directory))
      address = f'tcp://127.0.0.1:{common.free_port()}'
    address, processes = address or f'unix:{directory}/socket', TRAINING[name]
    act = ('--connect', address, '--env', 'ale:pong', '--num-envs', 16 // max(processes, 1), *keys)
    environments: list[subprocess.Popen[bytes]] = [
      common.start_podrace(folder / f'envs{i}.txt', 'envs', *act) for i in range(processes)
    ]
    remote = ('--envs', 'remote', '--listen', address, *keys) if processes else ()
    common.podrace('train', 'pong', '--total-steps', steps, '--run-dir', folder / 'run', '--quiet', *remote)  # fmt: skip
    for one in environments:
      if one.wait(60):
        raise RuntimeError(f'the environments ended with {one.returncode}')
    lines, summary = common.metrics(folder / 'run'), common.summary_of(folder / 'run')
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return dict(
    cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,  # of all processes
    steps_per_s=summary['steps_per_s'],
    steady_steps_per_s=statistics.median(x['steps_per_s'] for x in lines[len(lines) // 4 :]),
    policy_lag_mean=statistics.mean(x['policy_lag_mean'] for x in lines),
    dropped_steps=sum(x['dropped_steps'] for x in lines),
    actor_time={k: v for k, v in lines[-1].items() if k.startswith('actor_')},
  )  # fmt: skip


def training(repeats: int, steps: int) -> dict[str, Any]:
  runs: dict[str, list[dict[str, Any]]] = {name: [] for name in TRAINING}
  for _ in range(repeats):
    for name, each in runs.items():
      each.append(train(name, steps))
      print(name, each[-1], flush=True)
  rates, cpu = ({k: common.summary([r[x] for r in v]) for k, v in runs.items()} for x in ('steady_steps_per_s', 'cpu_s'))  # fmt: skip
  over_local = {k: r['median'] / rates['local']['median'] for k, r in rates.items()}
  return dict(steps=steps, rates=rates, cpu_s=cpu, runs=runs, over_local=over_local)


def main() -> None:
  args = common.arguments(
    __doc__, PARTS, repeats=3, seconds=2.0, steps=60_000,
    clients=([1, 8, 64, 256], 'of round-trips; rows of other numbers stay'), envs=[1, 64],
  )  # fmt: skip
  if args.worker:
    kind, clients, environments, observation = args.worker
    serve(kind, (int(clients), int(environments), observation))
    return
  if 'round-trips' in args.cases:
    rows = [r for r in common.known('remote').get('round_trips', []) if r['clients'] not in args.clients]  # fmt: skip
    for observation in OBSERVATIONS:
      for clients in args.clients:
        for environments in args.envs:
          row = compare((clients, environments, observation), args.repeats, args.seconds)
          ratios = {k: round(v, 2) for k, v in row.items() if isinstance(v, float)}
          print(f'{observation} {clients} clients x {environments}: {ratios}', flush=True)
          about = dict(observation=observation, clients=clients, environments=environments)
          rows.append(about | row)
          common.keep('remote', 'round_trips', rows)
  if 'training' in args.cases:
    result = training(args.repeats, args.steps)
    common.keep('remote', 'training', result | dict(origin=common.origin()))


if __name__ == '__main__':
  main()
