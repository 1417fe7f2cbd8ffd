"""Training while machines, services and networks fail: what each kind of fault does to a run that goes on.

    sudo .venv/bin/python benchmarks/faults.py [--kills 100] [--restores 10] [--seconds 30] [--only NAME ...]

Two learners train IMPALA on Catch (benchmarks/faults_env.py), one after the other: one with environments elsewhere
(`podrace envs`), one with acting elsewhere (`podrace act`, `podrace replay`). What is elsewhere is in a network
namespace of its own, behind a pair of virtual Ethernet devices with real addresses, with CURVE keys; cuts are made
there (a device that is down; neighbours with a wrong address for one way only), delays and resets by a TCP proxy,
since netem is not in every kernel. Needs Linux, root and iproute2.

Every unroll that is learned from is written down by the agent: torn ones have a gap, a repetition or two
environments in them, duplicated ones overlap with another of the same environment. Writes results/faults.json;
with --only the rows that are named, in the place of those that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, origin, record

sys.path.append(str(ROOT / 'tests'))

from proxy import Proxy

NAMESPACE, NEAR, FAR = 'podrace-far', 'podrace-v0', 'podrace-v1'
HERE, THERE = '10.77.0.1', '10.77.0.2'
WRONG = '02:00:00:00:00:99'  # nobody's address
PATIENCE = 300.0  # seconds in which what has to happen must have happened
ENVIRONMENTS = 8
COMMON = [
  '--agent', 'faults_agent:Watched', '--env', 'gymnasium:faults_env:Numbered-v0', '--num-envs',
  str(ENVIRONMENTS), '--unroll-length', '8', '--agent.learning-rate', '3e-3', '--actor-threads', '1',
  '--agent.network.hidden', '64', '--agent.network.initializer', 'lecun',
]  # fmt: skip


# --- the network --------------------------------------------------------------------------------


def ip(*args: str, far: bool = False, check: bool = True) -> None:
  inside = ['ip', 'netns', 'exec', NAMESPACE] if far else []
  subprocess.run([*inside, 'ip', *args], check=check, capture_output=not check)


class Network:
  """This machine, and another one in a namespace."""

  def __enter__(self) -> Network:
    self.__exit__()
    ip('netns', 'add', NAMESPACE)
    ip('link', 'add', NEAR, 'type', 'veth', 'peer', 'name', FAR)
    ip('link', 'set', FAR, 'netns', NAMESPACE)
    for device, address, far in ((NEAR, HERE, False), (FAR, THERE, True)):
      ip('addr', 'add', f'{address}/24', 'dev', device, far=far)
      ip('link', 'set', device, 'up', far=far)
    ip('link', 'set', 'lo', 'up', far=True)
    return self

  def __exit__(self, *exc: object) -> None:
    ip('link', 'del', NEAR, check=False)
    ip('netns', 'del', NAMESPACE, check=False)

  @contextlib.contextmanager
  def cut(self, ways: str) -> Iterator[None]:
    """Nothing gets through: `both` ways, `in` to this machine, or `out` of it."""
    if ways == 'both':
      ip('link', 'set', NEAR, 'down')
      yield
      ip('link', 'set', NEAR, 'up')
      return
    far = ways == 'in'
    neighbour = [HERE if far else THERE, 'dev', FAR if far else NEAR]
    ip('neigh', 'replace', *neighbour, 'lladdr', WRONG, 'nud', 'permanent', far=far)
    yield
    ip('neigh', 'del', *neighbour, far=far)


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as s:
    return s.getsockname()[1]


# --- processes ----------------------------------------------------------------------------------


EVERY: list[Podrace] = []


class Podrace:
  """`podrace ARGS`, here or in the namespace."""

  def __init__(self, folder: Path, *args: str, far: bool = False) -> None:
    self.log = folder / f'{len(EVERY)}-{args[0]}.txt'
    inside = ['ip', 'netns', 'exec', NAMESPACE] if far else []
    path = os.pathsep.join([str(ROOT), str(ROOT / 'benchmarks')])
    self.process = subprocess.Popen(
      [*inside, sys.executable, '-m', 'podrace.cli', *args],
      cwd=folder, stdout=self.log.open('w'), stderr=subprocess.STDOUT,
      env={**os.environ, 'PYTHONPATH': path, 'FAULTS_RECORD': str(folder / 'record'),
           'JAX_PLATFORMS': 'cpu'},
    )  # fmt: skip
    EVERY.append(self)

  def signal(self, signum: int) -> None:
    self.process.send_signal(signum)

  def kill(self) -> None:
    """SIGKILL, and wait."""
    self.process.send_signal(signal.SIGCONT)
    self.process.kill()
    self.process.wait()

  @property
  def megabytes(self) -> float:
    """Resident, of its own."""
    text = Path(f'/proc/{self.process.pid}/status').read_text()
    return int(text.partition('RssAnon:')[2].split()[0]) / 1024

  def says(self, text: str) -> None:
    until(lambda: text in self.log.read_text() or self.process.poll() is not None)
    assert text in self.log.read_text(), self.log.read_text()[-3000:]


def until(condition: Callable[[], Any]) -> None:
  end = time.monotonic() + PATIENCE
  while not condition():
    if time.monotonic() > end:
      raise RuntimeError(f'not in {PATIENCE:.0f} s: {condition}')
    time.sleep(0.05)


# --- a learner, and what it has learned from ----------------------------------------------------


class Run:
  """A learner with clients elsewhere."""

  def __init__(self, network: Network, folder: Path, keys: Path) -> None:
    self.network, self.folder, self.keys = network, folder, keys
    self.clients: list[Podrace] = []
    self.started = 0
    self.port = free_port()
    self.address = f'tcp://{HERE}:{self.port}'
    self.learner = self.start()

  def start(self) -> Podrace:
    """The learner."""
    raise NotImplementedError

  def client(self, share: int) -> Podrace:
    """One of two."""
    raise NotImplementedError

  @property
  def watched(self) -> dict[str, Podrace]:
    """Those whose memory is of interest."""
    return {'learner': self.learner}

  def train(self, *more: str) -> Podrace:
    return Podrace(
      self.folder, 'train', 'catch', '--architecture', 'sebulba', *COMMON, '--lag', 'async',
      '--total-steps', '1_000_000_000', '--log-every', '1280', '--run-dir', str(self.folder / 'run'),
      '--keys', str(self.keys), *more,
    )  # fmt: skip

  def with_clients(self) -> None:
    """Two clients, from which is learned."""
    for share in range(2):
      self.replace(share)
    self.learns(60)

  def replace(self, share: int) -> None:
    """Another client in the place of one, which is killed if it lives."""
    while len(self.clients) < 2:
      self.clients.append(self.client(len(self.clients)))
      self.started += 1
      if len(self.clients) == share + 1:
        return
    self.clients[share].kill()
    self.clients[share] = self.client(share)
    self.started += 1

  def without_clients(self) -> None:
    """Ends them in an orderly way."""
    for client in self.clients:
      client.signal(signal.SIGTERM)
    for client in self.clients:
      client.process.wait(60)
    self.clients = []

  def unrolls(self) -> list[tuple[float, int, int, int, bool]]:
    path = self.folder / 'record'
    whole = path.read_text().rpartition('\n')[0].splitlines() if path.exists() else []
    rows = [line.split() for line in whole]
    return [(float(t), int(w), int(a), int(b), ok == '1') for t, w, a, b, ok in rows]

  def count(self) -> int:
    path = self.folder / 'record'
    return path.read_bytes().count(b'\n') if path.exists() else 0

  def learns(self, more: int) -> None:
    """Waits until so many more unrolls have been learned from."""
    now = self.count()
    until(lambda: self.count() >= now + more or self.learner.process.poll() is not None)
    assert self.learner.process.poll() is None, self.learner.log.read_text()[-3000:]

  def row(self, name: str, fault: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """What one kind of fault does; both clients are new before, and the run goes on after."""
    self.started = 0
    self.with_clients()
    before, begun = self.count(), time.time()
    memory = {k: p.megabytes for k, p in self.watched.items()}
    more = fault(self)
    self.learns(60)
    seconds = time.time() - begun
    grown = {k: round(p.megabytes - memory.get(k, 0), 1) for k, p in self.watched.items()}
    told = self.unrolls()
    times = [begun, *(u[0] for u in told[before:])]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    found = {
      'fault': name,
      'seconds': round(seconds, 1),
      'unrolls': len(told) - before,
      **proof(told[before:]),
      'longest_pause_s': round(max(gaps), 1),
      'clients_started': self.started,
      'memory_mb': {k: round(v) for k, v in memory.items()},
      'grown_mb': grown,
      **more,
      'origin': origin(),
    }
    self.without_clients()
    print(json.dumps(found), flush=True)
    return found


def proof(told: list[tuple[float, int, int, int, bool]]) -> dict[str, int]:
  """How many unrolls were torn, and how many overlap with another one of the same environment."""
  duplicated, end = 0, (-1, -1)  # environment, and where its unrolls so far end
  for who, first, last in sorted((who, first, last) for _, who, first, last, _ in told):
    known = end[1] if end[0] == who else -1
    duplicated += first < known
    end = who, max(last, known)
  return {'duplicated': duplicated, 'torn': sum(not u[4] for u in told)}


class Environments(Run):
  """Environments elsewhere."""

  def start(self) -> Podrace:
    learner = self.train('--envs', 'remote', '--listen', self.address)
    learner.says('no environments are connected')
    self.through: str | None = None
    return learner

  def client(self, share: int) -> Podrace:
    return Podrace(
      self.folder, 'envs', '--connect', self.through or self.address, '--keys', str(self.keys),
      '--env', 'gymnasium:faults_env:Numbered-v0', '--num-envs', str(ENVIRONMENTS // 2),
      '--workers', '1', far=True,
    )  # fmt: skip


class Acting(Run):
  """Acting elsewhere, and a replay service here."""

  def start(self) -> Podrace:
    self.at = f'tcp://{HERE}:{free_port()}'
    self.replay = self.serve()
    return self.train('--replay', 'service', '--connect-replay', self.at, '--listen', self.address)

  def serve(self) -> Podrace:
    server = Podrace(
      self.folder, 'replay', '--listen', self.at, '--dir', str(self.folder / 'kept'),
      '--checkpoint-every', '0.5', '--keys', str(self.keys),
    )  # fmt: skip
    server.says('listening at')
    return server

  @property
  def watched(self) -> dict[str, Podrace]:
    return {'learner': self.learner, 'replay': self.replay}

  def client(self, share: int) -> Podrace:
    return Podrace(
      self.folder, 'act', 'catch', *COMMON, '--connect-replay', self.at, '--params', self.address,
      '--keys', str(self.keys), '--share', f'{share}/2', '--max-staleness', '5', far=True,
    )  # fmt: skip


# --- faults -------------------------------------------------------------------------------------


def nothing(run: Run) -> dict[str, Any]:
  run.learns(400)
  return {}


def kills(count: int) -> Callable[[Run], dict[str, Any]]:
  def fault(run: Run) -> dict[str, Any]:
    rng = random.Random(0)
    for i in range(count):
      run.learns(rng.randrange(1, 60))
      run.replace(i % 2)
    return {'times': count}

  return fault


def frozen(seconds: float) -> Callable[[Run], dict[str, Any]]:
  def fault(run: Run) -> dict[str, Any]:
    client = run.clients[0]
    client.signal(signal.SIGSTOP)
    time.sleep(seconds)
    client.signal(signal.SIGCONT)
    client_back(client)
    return {'times': 1, 'for_s': seconds}

  return fault


def client_back(client: Podrace) -> None:
  """A process that was away goes on, or has not noticed."""
  assert client.process.poll() is None, client.log.read_text()[-3000:]


def cut(ways: str, seconds: float) -> Callable[[Run], dict[str, Any]]:
  def fault(run: Run) -> dict[str, Any]:
    with run.network.cut(ways):
      time.sleep(seconds)
    return {'times': 1, 'for_s': seconds}

  return fault


def proxied(
  seconds: float, delay: float = 0.0, resets: float = 0.0
) -> Callable[[Run], dict[str, Any]]:
  """Clients come through a proxy that is slow, or resets each connection each second with a probability."""

  def fault(run: Run) -> dict[str, Any]:
    assert isinstance(run, Environments)
    run.without_clients()
    proxy, rng, times = Proxy(run.port, HERE), random.Random(0), 0
    run.through = proxy.address
    try:
      run.with_clients()
      proxy.delay = delay
      end = time.monotonic() + seconds
      while time.monotonic() < end:
        time.sleep(1.0)
        times += proxy.reset_some(lambda: rng.random() < resets)
      run.learns(60)
      run.without_clients()
    finally:
      proxy.close()
      run.through = None
    run.with_clients()
    return {'for_s': seconds, **({'times': times} if resets else {})}

  return fault


def restores(count: int) -> Callable[[Run], dict[str, Any]]:
  def fault(run: Run) -> dict[str, Any]:
    assert isinstance(run, Acting)
    for _ in range(count):
      run.learns(random.Random(0).randrange(40, 120))
      run.replay.kill()
      run.replay = run.serve()
    return {'times': count}

  return fault


# --- the whole ----------------------------------------------------------------------------------


def measure(kind: type[Run], folder: Path, faults: dict[str, Any], only: list[str]) -> Any:
  """A learner, all faults one after the other, and its end."""
  chosen = {k: v for k, v in faults.items() if not only or any(o in k for o in only)}
  if not chosen:
    return {'rows': []}
  folder.mkdir()
  keys = folder / 'keys'
  podrace = [sys.executable, '-m', 'podrace.cli']
  subprocess.run([*podrace, 'keys', 'new', str(keys)], check=True, capture_output=True, cwd=ROOT)
  with Network() as network:
    run = kind(network, folder, keys)
    try:
      rows = [run.row(name, fault) for name, fault in chosen.items()]
      run.learner.signal(signal.SIGTERM)
      code = run.learner.process.wait(PATIENCE)
      lines = [json.loads(x) for x in (folder / 'run' / 'metrics.jsonl').read_text().splitlines()]
      told = [x for x in lines if x['episodes']]
      last = told[-1] if told else {}
      counts = {
        k: v for k, v in last.items()
        if k.startswith(('remote_', 'unrolls_', 'env_restarts', 'policy_lag'))
      }  # fmt: skip
      return {
        'rows': rows,
        'exit_code_after_sigterm': code,
        'steps': lines[-1]['step'] if lines else 0,
        'episode_return_at_the_end': last.get('episode_return'),
        'last_line': counts,
        **proof(run.unrolls()),
      }
    finally:
      for process in EVERY:
        with contextlib.suppress(ProcessLookupError):
          process.kill()
      EVERY.clear()


def main() -> None:
  """Records all, or those that are named."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--kills', type=int, default=100, help='of clients with environments')
  parser.add_argument('--act-kills', type=int, default=10, help='of acting processes')
  parser.add_argument('--restores', type=int, default=10, help='of the replay service')
  parser.add_argument(
    '--seconds', type=float, default=30.0, help='of cuts, freezes, delays, resets'
  )
  parser.add_argument('--only', nargs='*', default=[], help='parts of names')
  args = parser.parse_args()
  s = args.seconds
  environments = {
    'none': nothing,
    'a client is killed': kills(args.kills),
    'a client is frozen (SIGSTOP)': frozen(s),
    'cut both ways': cut('both', s),
    'cut one way, to the learner': cut('in', s),
    'cut one way, to the clients': cut('out', s),
    'delay of 200 ms each way': proxied(s, delay=0.2),
    '5% of connections reset each second': proxied(s, resets=0.05),
  }
  acting = {
    'none': nothing,
    'the replay service is killed and restored': restores(args.restores),
    'an acting process is killed': kills(args.act_kills),
    'an acting process is frozen (SIGSTOP)': frozen(s),
    'cut both ways': cut('both', s),
    'cut one way, from the acting processes': cut('in', s),
  }
  with tempfile.TemporaryDirectory() as folder:
    results = {
      'environments elsewhere': measure(
        Environments, Path(folder) / 'environments', environments, args.only
      ),
      'acting elsewhere': measure(Acting, Path(folder) / 'acting', acting, args.only),
    }
  path = RESULTS / 'faults.json'
  before = json.loads(path.read_text())['results'] if args.only and path.exists() else {}
  for name, found in results.items():
    rows = {x['fault']: x for x in before.get(name, {}).get('rows', [])}
    rows |= {x['fault']: x for x in found['rows']}
    results[name] = {**before.get(name, {}), **(found if found['rows'] else {})}
    results[name]['rows'] = list(rows.values())
  record('faults', dict(results, clients=2, environments=ENVIRONMENTS))


if __name__ == '__main__':
  main()
