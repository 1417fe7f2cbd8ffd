"""Messages that are nearly right or none at all, against each service, and against TLS's handshake; memory is measured.

Each service is a process of its own. A part sends its messages over ever new connections, most of which have a session: first
what is right, then what is nearly right, then nonsense until the connection is cut (tests/support/storm.py). A good client does its work
meanwhile, and fails if it waits for more than 30 s. A part fails if the process ends, or says that a check was missing.

seed: a learner of remote environments with a stub; replay: the replay service; parameters: a publisher; tls: a publisher with
keys, to which come half a handshake, a spoiled one, one with keys of others, nonsense, or nothing at all; up to 2,000 of these
connections stay open.

training: `podrace train pong` with its environments in another process, both on one core, while the messages of the part seed come
from another core: as fast as the learner takes them, and a million in ten minutes. Against it, in turn: the same, while the storm
goes to a stub of its own on that other core, so that both cores are busy (the stub takes more messages in a second than a learner
that trains). The rate is the median of steps_per_s in the last three quarters of a run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import resource
import socket as sockets
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / 'benchmarks'))

import common
import remote
import tables_load

sys.path.extend(
  str(common.ROOT / 'tests' / x)
  for x in ('support', 'distributed/environments', 'distributed/replay')
)

import numpy as np
from mutants import data_of, spoiled
from storm import REPLAYED, storm

from podrace import tables
from podrace.distributed import parameters, replay
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import session_messages
from podrace.distributed.net.listener import Listener
from podrace.distributed.parameters import parameter_messages, reader

PARTS = ('seed', 'replay', 'parameters', 'tls', 'training')
ANY = 'tcp://127.0.0.1:*'
OPEN = 2000  # connections that stay open, of the part tls
PACES = {
  'as fast as they are taken': 0.0,
  'a million in ten minutes': 1e6 / 600,
}  # messages a second
SHARE = dict(seed=1.0, replay=1.0, parameters=1.0, tls=0.1)  # of the messages


# --- services, each a process ---------------------------------------------------------------------


@contextlib.contextmanager
def served(part: str, directory: Path) -> Iterator[Listener]:
  """The listener of a service that runs."""
  if part == 'seed':
    from peers import Learner

    with Learner(keep=False, slots=64) as learner:
      yield learner.server.listener
  elif part == 'replay':
    from podrace.distributed.replay.server import ReplayServer

    with ReplayServer(ANY, most_bytes=2**20) as server:
      yield server.listener
  else:
    keys = directory if part == 'tls' else None
    with parameters.Publisher(ANY, keys=keys) as publisher:
      publisher.publish(1, [('x', np.ones(5))])
      yield publisher.listener


def serve(part: str, directory: Path) -> None:
  with served(part, directory) as listener:
    common.answer(address=listener.address)
    for _ in common.requests():
      common.answer(
        counts=dict(listener.counts),
        guests=len(listener.guests),
        resident=tables_load.resident(),
        cpu_s=time.process_time(),
        unexpected=[x for x in listener.lines.events if 'Trace' in x],
      )


# --- what is sent -----------------------------------------------------------------------------------


def nonsense(rng: random.Random) -> bytes:
  """Bytes that begin like a frame, more or less."""
  data = bytearray(rng.randbytes(rng.randrange(1, 200)))
  if rng.random() < 0.7 and len(data) >= 8:
    data[:4] = rng.choice([len(data) - 8, len(data), 2**31, 0]).to_bytes(4, 'little')
    data[4:8] = (rng.randrange(256) | rng.randrange(40) << 8).to_bytes(4, 'little')
  return bytes(data)


Sent = tuple[Any, Callable[[], dict[str, Any]], Any, Callable[[], None]]


def of_learner(address: str, env: Any = None) -> Sent:
  """Kinds that come back, hello, a case, and what a good client does (here nothing); so of the others."""
  from peers import Raw
  from test_server_fuzz import documents

  from podrace.distributed.environments import environment_messages

  template = Raw(address, env)

  hello = lambda: template.told(client=session_messages.new_client())  # noqa: E731
  return environment_messages.OF_LEARNERS, hello, spoiled(hello, documents(template)), lambda: None


def of_seed(address: str) -> Sent:
  from peers import Raw

  good, seq = Raw(address), 0
  good.join(2)

  def go_on() -> None:
    nonlocal seq
    seq += 1
    good.step(2, seq)
    good.act(2, seq)

  return (*of_learner(address)[:3], go_on)


def of_replay(address: str) -> Sent:
  from test_service_security import documents, told_hello

  from podrace.distributed.replay import replay_messages

  client = replay.connect(address)
  settings = dict(sampler=tables.uniform(), remover=tables.fifo(), max_size=10)
  client.table('it', rate_limiter=tables.min_size(1), **settings)  # type: ignore[arg-type]
  table = client.table('good', rate_limiter=tables.min_size(1), **settings)  # type: ignore[arg-type]
  writer = client.writer(history=1, delay=0.0)

  def go_on() -> None:
    writer.append({'x': np.int64(1)})
    writer.create_item(table, 1.0, num_steps=1)
    writer.flush(timeout=30)
    assert table.sample(1, timeout=30).data['x'].tolist() == [[1]]

  small = lambda: [d for d in documents() if 60_000 not in d[1]]  # noqa: E731  # they take seconds
  return replay_messages.OF_SERVICES, told_hello, spoiled(told_hello, small), go_on


def of_parameters(address: str, keys: Path | None = None) -> Sent:
  def go_on() -> None:
    reader = parameters.Parameters(address, keys=keys)
    assert reader.get(timeout=30).version == 1
    reader.close()

  hello = lambda: session_messages.hello(parameter_messages.SERVICE, session_messages.new_client())  # noqa: E731
  every = lambda: [  # noqa: E731
    (session_messages.PING, [None], []),
    (session_messages.ASK, [], []),
    (session_messages.BYE, ['x'], []),
  ]
  return reader.Parameters.kinds, hello, spoiled(hello, every), go_on


def messages_of(nearly: Any, rng: random.Random) -> Iterator[bytes]:
  """What one connection says: what is right, what is nearly right, and nonsense."""
  before, mutant = nearly(rng)
  yield from map(data_of, before)
  yield mutant
  for _ in range(rng.randrange(6)):
    yield nonsense(rng)


class Enough(Exception):
  """Of messages."""


def storm_of_training(address: str, name: str, pace: float) -> None:
  """Sends until stdin ends, from when environments have the learner's places; says how much it has sent."""
  import bare

  from podrace.envs.host import base

  env, over, sent = base.make(name) if name else None, threading.Event(), 0.0
  threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()

  def listens() -> bool:
    try:
      kinds, hello, *_ = of_learner(address, env)
      with bare.connect(address, kinds) as end:
        end.say(session_messages.HELLO, hello())
        end.expect(session_messages.WELCOME)
        end.say(session_messages.ASK)
        (report,), _ = end.expect(session_messages.REPORT)
      return not name or not report['free']
    except (OSError, AssertionError):  # it is not ready
      return False

  while not listens():
    if over.wait(0.2):
      raise SystemExit(f'environments never had all places of {address}')
  kinds, hello, nearly, _ = of_learner(address, env)

  def messages(rng: random.Random) -> Iterator[bytes]:
    nonlocal sent
    for data in messages_of(nearly, rng):
      sent += 1 + REPLAYED  # so many are sent again
      yield data

  def go_on() -> None:
    if over.wait(begun + sent / pace - time.monotonic() if pace else 0.0):
      raise Enough

  begun = time.monotonic()
  try:
    storm(address, kinds, 2**62, hello, messages, go_on, lambda: 0)
  except (Enough, OSError, AssertionError):
    seconds = time.monotonic() - begun
    if not over.wait(60):  # else the learner has ended with its run
      raise
  common.answer(messages=round(sent), seconds=seconds)


# --- parts ------------------------------------------------------------------------------------------


def messages_against(
  part: str, address: str, count: int, memory: Callable[[], int]
) -> dict[str, Any]:
  makers = dict(seed=of_seed, replay=of_replay, parameters=of_parameters)
  kinds, hello, nearly, go_on = makers[part](address)

  messages = functools.partial(messages_of, nearly)
  told = storm(address, kinds, count, hello, messages, go_on, memory)
  return told._asdict()


def half_handshake(keys: Path, sizes: random.Random) -> bytes:
  """The first bytes of a client's handshake, some of them spoiled at times."""
  incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
  with contextlib.suppress(ssl.SSLWantReadError):
    net_keys.client_context(keys).wrap_bio(incoming, outgoing).do_handshake()
  data = bytearray(outgoing.read())
  for _ in range(sizes.choice([0, 0, 1, 3])):
    data[sizes.randrange(len(data))] ^= 1 << sizes.randrange(8)
  return bytes(data[: sizes.randrange(1, len(data) + 1)])


def handshakes_against(
  keys: Path, address: str, count: int, memory: Callable[[], int]
) -> dict[str, Any]:
  """So many connections; the good client comes in anew every thousand."""
  host, port = address.removeprefix('tcp://').rsplit(':', 1)
  others = keys.parent / 'others'
  net_keys.new_keys(others)
  *_, go_on = of_parameters(address, keys)
  rng = random.Random(0)
  hellos = [half_handshake(keys, rng) for _ in range(500)]
  wrong = net_keys.client_context(others)
  kept: collections.deque[sockets.socket] = collections.deque()
  before, slowest, begun = 0, 0.0, time.monotonic()
  for i in range(count):
    end = sockets.create_connection((host, int(port)))
    way = rng.random()
    with contextlib.suppress(OSError):
      if way < 0.5:
        end.sendall(rng.choice(hellos))
      elif way < 0.7:
        end.sendall(rng.randbytes(rng.randrange(1, 300)))
      elif way < 0.71:
        end.settimeout(10)
        wrong.wrap_socket(end)
    kept.append(end)
    if len(kept) > OPEN:
      kept.popleft().close()
    if i % 1000 == 999:
      now = time.monotonic()
      go_on()
      slowest = max(slowest, time.monotonic() - now)
    if i == count // 10:
      before = memory()
  grown = memory() - before
  for end in kept:
    end.close()
  return dict(
    connections=count, open=OPEN, seconds=round(time.monotonic() - begun, 1), slowest=slowest,
    megabytes=round(grown / 2**20, 1),
  )  # fmt: skip


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
  """What is begun meanwhile stays there."""
  every = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  try:
    yield
  finally:
    os.sched_setaffinity(0, every)


def trained(
  is_target: bool, pace: float, cores: list[int], steps: int, keys: Path
) -> dict[str, Any]:
  """A run, and a storm: against its learner or against another one."""
  address = f'tcp://127.0.0.1:{common.free_port()}'
  me = [sys.executable, __file__]
  with contextlib.ExitStack() as ends:
    with on_cores({cores[-1]}):
      target, env = address, 'ale:pong'
      if not is_target:
        decoy = ends.enter_context(common.Worker([*me, '--serve', 'seed', str(keys)]))
        assert decoy.process.stdout
        target, env = json.loads(decoy.process.stdout.readline())['address'], ''
      process = subprocess.Popen(
        [*me, '--storm', target, env, str(pace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      ends.callback(process.kill)
    with on_cores({cores[0]}):
      run = remote.train('remote', steps, address)
    said, _ = process.communicate(timeout=120)
    if process.returncode:
      raise RuntimeError(f'the storm ended with {process.returncode}')
    return dict(run, storm=json.loads(said))


def training(pace: float, repeats: int, steps: int) -> dict[str, Any]:
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    raise SystemExit('training: needs two cores, one for the messages')
  found: dict[str, list[dict[str, Any]]] = {'against another': [], 'against the learner': []}
  with tempfile.TemporaryDirectory() as directory:
    keys = Path(directory) / 'keys'
    net_keys.new_keys(keys)
    for _ in range(repeats):
      for name, runs in found.items():
        runs.append(trained(name == 'against the learner', pace, cores, steps, keys))
        print(name, runs[-1], flush=True)
  pairs = [
    b['steady_steps_per_s'] / a['steady_steps_per_s'] for a, b in zip(*found.values(), strict=True)
  ]
  return dict(
    steps=steps, pairs=pairs, ratio=statistics.median(pairs), runs=found, origin=common.origin()
  )


def run(part: str, count: int) -> dict[str, Any]:
  with tempfile.TemporaryDirectory() as directory:
    keys = Path(directory) / 'keys'
    net_keys.new_keys(keys)
    server = common.Worker([sys.executable, __file__, '--serve', part, str(keys)])
    assert server.process.stdout
    with server:
      address = json.loads(server.process.stdout.readline())['address']
      first = server.ask()
      memory = lambda: server.ask()['resident']  # noqa: E731
      if part == 'tls':
        found = handshakes_against(keys, address, count, memory)
      else:
        found = messages_against(part, address, count, memory)
      last = server.ask()
    if last['unexpected']:
      raise SystemExit(f'{part}: a check is missing:\n{last["unexpected"][0]}')
    return dict(
      found, resident_before=first['resident'], resident_after=last['resident'],
      server_cpu_s=last['cpu_s'] - first['cpu_s'], counts=last['counts'], origin=common.origin(),
    )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('parts', nargs='*', help=f'of {PARTS}; none: all')
  parser.add_argument('--messages', type=int, default=1_000_000, help='of tls a tenth of it')
  parser.add_argument('--repeats', type=int, default=3, help='of training')
  parser.add_argument('--steps', type=int, default=40_000, help='of training')
  parser.add_argument('--serve', nargs=2, help=argparse.SUPPRESS)
  parser.add_argument('--storm', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.storm:
    storm_of_training(*args.storm[:2], float(args.storm[2]))
    return
  if args.serve:
    serve(args.serve[0], Path(args.serve[1]))
    return
  if wrong := set(args.parts) - set(PARTS):
    parser.error(f'no part is called {sorted(wrong)}; there are {PARTS}')
  _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(2**16, hard), hard))
  path = common.RESULTS / 'fuzz.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  for part in args.parts or PARTS:
    if part == 'training':
      results[part] = {k: training(v, args.repeats, args.steps) for k, v in PACES.items()}
    else:
      results[part] = run(part, int(args.messages * SHARE[part]))
    print(part, results[part], flush=True)
    common.record('fuzz', results)


if __name__ == '__main__':
  main()
