"""Training while machines, services and networks fail: what each kind of fault does to a run that goes on.

    sudo .venv/bin/python tests/endurance/faults/faults.py [--kills 100] [--restores 10] [--seconds 30] [--only NAME ...]

Learners train on Catch (tests/endurance/faults/faults_env.py), one after the other: IMPALA with environments elsewhere (`podrace
envs`), IMPALA with acting elsewhere (`podrace act`, `podrace replay`), and DQN with prioritised windows in the same
arrangement. What is elsewhere is in a network namespace of its own, behind a pair of virtual Ethernet devices with
real addresses, with keys; cuts are made there (a device that is down; neighbours with a wrong address for one
way only), delays and resets by TCP proxies, since netem is not in every kernel. Needs Linux, root and iproute2.

Every unroll or window that is learned from is written down by the agent: torn ones have a gap, a repetition or two
environments in them, duplicated ones overlap with another of the same environment. After each row its learner's
ledger is looked at (`Run.ledger`): what came in is what was learned from, was lost for a known reason, or is under
way, and that is bounded. Writes results/faults.json, each row when it is done, in the place of that which is
there; with --only those that are named (as in 'acting: delay').
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from faults_numbers import read

sys.path.append(str(Path(__file__).resolve().parents[3] / 'benchmarks'))
sys.path.append(str(Path(__file__).resolve().parents[2] / 'support'))

from children import pause, unchanged, until
from common import RESULTS, ROOT, free_port, origin, record
from proxy import Proxy

from podrace import tables
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.replay import table_settings
from podrace.tables import checkpoint
from podrace.tables.chunks import ChunkStore, gather

NAMESPACE, NEAR, FAR = 'podrace-far', 'podrace-v0', 'podrace-v1'
HERE, THERE = '10.77.0.1', '10.77.0.2'
WRONG = '02:00:00:00:00:99'  # nobody's address
PATIENCE = 300.0  # seconds in which what has to happen must have happened
ENVIRONMENTS = 8
LENGTH = 8  # of unrolls
BATCH = ENVIRONMENTS * LENGTH  # steps that an update learns from
COMMON = [
  '--env', 'gymnasium:faults_env:Numbered-v0', '--num-envs', str(ENVIRONMENTS),
  '--unroll-length', str(LENGTH), '--actor-threads', '1',
]  # fmt: skip
IMPALA = [
  '--agent', 'faults_agent:Watched', '--agent.learning-rate', '3e-3', '--agent.network.hidden', '64',
  '--agent.network.initializer', 'lecun',
]  # fmt: skip
DQN = [
  '--agent', 'faults_agent:WatchedDQN', '--agent.n-step', '3', '--agent.network.hidden', '64',
  '--agent.learning-rate', '1e-3', '--agent.epsilon-steps', '500', '--agent.target-period', '50',
  '--agent.buffer.capacity', '1_000_000', '--agent.buffer.min-size', '1_000',
  '--agent.buffer.samples-per-insert', '2', '--agent.buffer.priority-exponent', '0.6',
]  # fmt: skip
RESETS = 20  # at least, of a row
# Batches at most: rows of unrolls, those that wait, are drawn, asked for, learned from.
UNDER_WAY = 6


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


# --- processes ----------------------------------------------------------------------------------


EVERY: list[Podrace] = []


class Podrace:
  """`podrace ARGS`, here or in the namespace."""

  def __init__(self, folder: Path, *args: str, far: bool = False) -> None:
    self.log = folder / f'{len(EVERY)}-{args[0]}.txt'
    inside = ['ip', 'netns', 'exec', NAMESPACE] if far else []
    path = os.pathsep.join([str(ROOT), str(ROOT / 'tests' / 'endurance' / 'faults')])
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


# --- a learner, and what it has learned from ----------------------------------------------------


class Run:
  """A learner with clients elsewhere."""

  agent = IMPALA
  lines = 1  # of the record for each unroll

  def __init__(self, network: Network, folder: Path, keys: Path) -> None:
    self.network, self.folder, self.keys = network, folder, keys
    self.clients: list[Podrace] = []
    self.started = 0
    self.through: dict[str, str] = {}  # addresses -> of the proxies that clients come through
    self.address = f'tcp://{HERE}:{free_port()}'
    self.learner = self.start()

  @property
  def addresses(self) -> list[str]:
    """That clients connect to."""
    return [self.address]

  def way(self, address: str) -> str:
    """Where a client that is started now connects to."""
    return self.through.get(address, address)

  @contextlib.contextmanager
  def proxies(self) -> Iterator[list[Proxy]]:
    """Clients that are started meanwhile come through these."""
    made = {a: Proxy(int(a.rpartition(':')[2]), HERE) for a in self.addresses}
    self.through = {a: proxy.address for a, proxy in made.items()}
    try:
      yield list(made.values())
    finally:
      self.through = {}
      for proxy in made.values():
        proxy.close()

  @contextlib.contextmanager
  def slow(self, seconds: float) -> Iterator[None]:
    """The learner pauses after each update."""
    path = self.folder / 'record.pause'
    path.write_text(str(seconds))
    yield
    path.unlink()

  def asked(self, address: str) -> dict[str, Any]:
    """The report of the learner or service at an address, as `podrace top` shows it."""
    asker = Asker(address, self.keys, False)
    try:
      return asker.ask()
    finally:
      asker.close()

  def ledger(self) -> dict[str, Any]:
    """What must add up, after a row whose clients have left; fails where it does not."""
    raise NotImplementedError

  def at_rest(self) -> None:
    """Waits until nothing more is learned from."""
    unchanged(self.count, 2.0)

  def logged(self) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    path = self.folder / 'run' / 'metrics.jsonl'
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

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
      self.folder, 'train', 'catch', '--architecture', 'sebulba', *COMMON, *self.agent, '--lag', 'async',
      '--total-steps', '1_000_000_000', '--log-every', str(BATCH), '--run-dir', str(self.folder / 'run'),
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
    return path.read_bytes().count(b'\n') // self.lines if path.exists() else 0

  def learns(self, more: int) -> None:
    """Waits until so many more unrolls have been learned from."""
    now = self.count()
    until(lambda: self.count() >= now + more or self.learner.process.poll() is not None)
    assert self.learner.process.poll() is None, self.learner.log.read_text()[-3000:]

  def row(self, name: str, fault: Fault) -> dict[str, Any]:
    """What one kind of fault does; both clients are new before, and the run goes on after."""
    if isinstance(fault, Proxied):
      with self.proxies() as proxies:
        return self._row(name, lambda run: fault.on(run, proxies))
    return self._row(name, fault)

  def _row(self, name: str, fault: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    self.started = 0
    self.with_clients()
    before, begun = self.count(), time.time()
    memory = {k: p.megabytes for k, p in self.watched.items()}
    more = fault(self)
    self.learns(60)
    seconds = time.time() - begun
    grown = {k: round(p.megabytes - memory.get(k, 0), 1) for k, p in self.watched.items()}
    told = self.unrolls()[before * self.lines :]
    times = [begun, *(u[0] for u in told)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    found = {
      'fault': name,
      'seconds': round(seconds, 1),
      'unrolls': len(told) // self.lines,
      **self.proof(told),
      'longest_pause_s': round(max(gaps), 1),
      'clients_started': self.started,
      'memory_mb': {k: round(v) for k, v in memory.items()},
      'grown_mb': grown,
      **more,
    }
    self.without_clients()
    self.at_rest()
    found |= {'ledger': self.ledger(), 'origin': origin()}
    print(json.dumps(found), flush=True)
    return found

  def proof(self, told: list[tuple[float, int, int, int, bool]]) -> dict[str, int]:
    """What was wrong with what was learned from."""
    return proof(told)


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
    return learner

  def client(self, share: int) -> Podrace:
    return Podrace(
      self.folder, 'envs', '--connect', self.way(self.address), '--keys', str(self.keys),
      '--env', 'gymnasium:faults_env:Numbered-v0', '--num-envs', str(ENVIRONMENTS // 2),
      '--workers', '1', far=True,
    )  # fmt: skip

  def ledger(self) -> dict[str, Any]:
    """Of all rows so far. Timesteps: each that was taken is a row of an unroll, as it is acted on.

    Under way are unrolls of each slot that have begun, finished ones that are not a batch yet, and what was dropped
    since the last line was logged.
    """

    def counted() -> collections.Counter[str]:
      return collections.Counter(self.asked(self.address)['counts'])

    until(lambda: (c := counted())['sessions'] == c['dropped'])  # a last word may be under way
    counts = counted()
    dropped = int(sum(x['dropped_steps'] for x in self.logged()))
    found = {
      'timesteps_taken': counts['frames'] - counts['withdrawn'],
      'learned': LENGTH * self.count(),
      'dropped': dropped,
    }
    found['under_way'] = found['timesteps_taken'] - found['learned'] - dropped
    assert 0 <= found['under_way'] <= UNDER_WAY * BATCH, found
    return {**found, 'sessions': counts['sessions'], 'sessions_ended': counts['dropped']}


class Acting(Run):
  """Acting elsewhere, and a replay service here, which the learner comes to through a proxy."""

  table = 'unrolls'

  def start(self) -> Podrace:
    self.at = f'tcp://{HERE}:{free_port()}'
    self.replay = self.serve()
    self.lost = 0  # items, with services that were killed, as they say themselves
    self.killed = self.reset = 0  # services; connections of the learner
    self.near = Proxy(int(self.at.rpartition(':')[2]), HERE)
    return self.train(
      '--replay', 'service', '--connect-replay', self.near.address, '--listen', self.address
    )

  @property
  def addresses(self) -> list[str]:
    return [self.at, self.address]

  @contextlib.contextmanager
  def proxies(self) -> Iterator[list[Proxy]]:
    with super().proxies() as made:
      yield [*made, self.near]
      self.near.delay = 0.0

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
      self.folder, 'act', 'catch', *COMMON, *self.agent, '--connect-replay', self.way(self.at),
      '--params', self.way(self.address), '--keys', str(self.keys),
      '--local-envs', str(ENVIRONMENTS // 2), '--max-staleness', '5', far=True,
    )  # fmt: skip

  def told_by_replay(self) -> tuple[dict[str, Any], collections.Counter[str]]:
    """Of the table, and what the service has counted since it was started."""
    report = self.asked(self.at)
    (table,) = [t for t in report['tables'] if t['name'] == self.table]
    return table, collections.Counter(report['counts'])

  def restart(self) -> int:
    """Kills the service and starts another in its place; how many items that found in its checkpoint."""
    self.lost += self.told_by_replay()[1]['lost']
    self.replay.kill()
    self.killed += 1
    found = len(kept(self.folder / 'kept')[self.table])
    self.replay = self.serve()
    return found

  def ledger(self) -> dict[str, Any]:
    """Of all rows so far. Each environment's unrolls follow one another: where one is missing it was lost.

    A killed service loses what came since its checkpoint, and what it had handed out before that and not sent; a
    connection of the learner's that is reset, what was on its way there. Nothing else loses any.
    """
    table, counts = self.told_by_replay()
    assert table['size'] == table['inserts'] - table['deletes'], table
    last = self.logged()[-1]
    learned, missing = self.count(), missed([u[1:4] for u in self.unrolls()])
    found = {
      'learned': learned,
      'taken': int(last['unrolls_taken']),
      'repeated': int(last['unrolls_repeated']),
      'missing': missing,
      'lost_by_service': self.lost + counts['lost'],
      'services_killed': self.killed,
      'learners_connections_reset': self.reset,
      'inserts': table['inserts'],
      'samples': table['samples'],
      'size': table['size'],
    }
    found['under_way'] = found['taken'] - found['repeated'] - learned
    # The last line is of an update ago at most; ahead of the learner are what is drawn and what is asked for.
    assert -ENVIRONMENTS <= found['under_way'] <= UNDER_WAY * ENVIRONMENTS, found
    lost = found['lost_by_service'] + UNDER_WAY * ENVIRONMENTS * (self.killed + self.reset)
    assert missing <= lost, found
    if not self.killed:
      assert not found['repeated'] and not found['lost_by_service'], found
      assert 0 <= table['samples'] - learned <= UNDER_WAY * ENVIRONMENTS + missing, found
    return found


class Windows(Acting):
  """Likewise, of an agent that learns from windows by priority."""

  agent = DQN
  table = 'windows'
  lines = 16  # of windows: two samples for each of an unroll's steps

  def proof(self, told: list[tuple[float, int, int, int, bool]]) -> dict[str, int]:
    """Windows are learned from again and again: in `ledger` are those that are there twice."""
    return {'torn': sum(not u[4] for u in told)}

  def ledger(self) -> dict[str, Any]:
    """Of all rows so far: what the service keeps, window by window."""
    table, counts = self.told_by_replay()
    assert table['size'] == table['inserts'] - table['deletes'] and not table['deletes'], table
    # One of the next checkpoints was begun after `table` was counted.
    until(lambda: len(kept(self.folder / 'kept')[self.table]) == table['size'])
    there = kept(self.folder / 'kept')[self.table]
    items = [x for x in there.snapshot()['items'] if x is not None]
    priorities = there.snapshot()['priorities']
    windows = [numbers_of(there, item) for item in items]
    found = {
      'windows': len(items),
      'torn': sum(not whole for *_, whole in windows),
      'duplicated': len(windows) - len({w[:2] for w in windows}),
      'missing': missed([w[:3] for w in windows], stride=1),
      'lost_by_service': self.lost + counts['lost'],
      'services_killed': self.killed,
      'priorities_changed': int((priorities != 1.0).sum()),
      'updates': table['updates'],
      'samples': table['samples'],
      'learned': self.lines * self.count(),
    }
    assert not found['torn'] and not found['duplicated'], found
    assert found['missing'] <= found['lost_by_service'], found
    assert found['priorities_changed'] > len(items) / 4, found
    return found


def kept(folder: Path) -> dict[str, tables.Table]:
  """The tables of the newest checkpoint that a service has written."""
  while True:
    newest = max(p for p in folder.iterdir() if p.name.isdigit())
    store = ChunkStore(cache_bytes=0)
    try:
      told = checkpoint.extra_of(newest)['tables']
      found = {name: table_settings.make_table(name, store, x) for name, x in told.items()}
      tables.restore(store, newest)
      return found
    except (tables.CheckpointError, OSError):
      if newest.exists():  # else a newer one has taken its place
        raise


def numbers_of(table: tables.Table, item: Any) -> tuple[int, int, int, bool]:
  """A window's environment, its first and its last timestep, and whether it is whole."""
  ((leaf, part),) = [
    (leaf, part)
    for leaf, part in zip(item.signature.leaves, item.parts, strict=True)
    if 'observation' in leaf.name
  ]
  rows, _ = gather(table.store, [part], leaf.dtype, leaf.shape)
  who, count, whole = read(rows[0][:, None, -3:])
  return int(who[0]), int(count[0, 0]), int(count[-1, 0]), bool(whole[0])


def missed(pieces: list[tuple[int, int, int]], stride: int = 0) -> int:
  """How many pieces (environment, first, last) are not there between others of the same environment.

  Each begins `stride` after the one before; 0: where that ends.
  """
  count, end = 0, (-1, -1)  # environment, and where its next piece begins
  for who, first, last in sorted(pieces):
    step = stride or last - first
    if end[0] == who and first > end[1]:
      count += (first - end[1]) // step
    end = who, first + step
  return count


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
    pause(client.process, seconds)
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
      pause(run.learner.process, seconds)
    return {'times': 1, 'for_s': seconds}

  return fault


class Proxied(NamedTuple):
  """Connections that are slow, or each of which is reset with a probability each 0.1 s: at least RESETS."""

  seconds: float
  delay: float = 0.0
  resets: float = 0.0

  def on(self, run: Run, proxies: list[Proxy]) -> dict[str, Any]:
    rng, times = random.Random(0), [0] * len(proxies)
    for proxy in proxies:
      proxy.delay = self.delay
    begun, least = time.monotonic(), RESETS if self.resets else 0
    while (passed := time.monotonic() - begun) < self.seconds or sum(times) < least:
      pause(run.learner.process, 0.1)
      assert passed < PATIENCE, times
      for i, proxy in enumerate(proxies):
        times[i] += proxy.reset_some(lambda: rng.random() < self.resets)
    if isinstance(run, Acting):
      run.reset += times[-1]
    told = {'for_s': round(passed, 1)}
    return {**told, 'times': sum(times), 'by_proxy': times} if self.resets else told


Fault = Callable[[Run], dict[str, Any]] | Proxied


def restores(count: int, pause: float = 0.0) -> Callable[[Run], dict[str, Any]]:
  """The service is killed while there is something in its table: the learner pauses, if it must."""

  def fault(run: Run) -> dict[str, Any]:
    assert isinstance(run, Acting)
    rng, found = random.Random(0), []
    with run.slow(pause) if pause else contextlib.nullcontext():
      for _ in range(count):
        run.learns(rng.randrange(24, 64))
        found.append(run.restart())
    assert min(found) > 0 and len(found) == count, found
    return {
      'times': count,
      'restored_items': found,
      **({'learner_pauses_s': pause} if pause else {}),
    }

  return fault


# --- the whole ----------------------------------------------------------------------------------


def measure(
  kind: type[Run],
  folder: Path,
  faults: dict[str, Fault],
  only: list[str],
  keep: Callable[[dict[str, Any]], None],
) -> None:
  """A learner, all faults one after the other, and its end; `keep` is given each row, and the end's."""
  chosen = {
    k: v for k, v in faults.items() if not only or any(o in f'{folder.name}: {k}' for o in only)
  }
  if not chosen:
    return
  folder.mkdir()
  keys = folder / 'keys'
  podrace = [sys.executable, '-m', 'podrace.cli']
  subprocess.run([*podrace, 'keys', 'new', str(keys)], check=True, capture_output=True, cwd=ROOT)
  with Network() as network:
    run = kind(network, folder, keys)
    try:
      for name, fault in chosen.items():
        keep({'rows': [run.row(name, fault)]})
      run.learner.signal(signal.SIGTERM)
      code = run.learner.process.wait(PATIENCE)
      lines = run.logged()
      told = [x for x in lines if x['episodes']]
      last = told[-1] if told else {}
      counts = {
        k: v for k, v in last.items()
        if k.startswith(('remote_', 'unrolls_', 'env_restarts', 'policy_lag'))
      }  # fmt: skip
      end = {
        'exit_code_after_sigterm': code,
        'steps': lines[-1]['step'] if lines else 0,
        'episode_return_at_the_end': last.get('episode_return'),
        'last_line': counts,
        **run.proof(run.unrolls()),
        'origin': origin(),
      }
      keep(end)
    finally:
      for process in EVERY:
        with contextlib.suppress(ProcessLookupError):
          process.kill()
      EVERY.clear()
      if isinstance(run, Acting):
        run.near.close()


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
  environments: dict[str, Fault] = {
    'none': nothing,
    'a client is killed': kills(args.kills),
    'a client is frozen (SIGSTOP)': frozen(s),
    'cut both ways': cut('both', s),
    'cut one way, to the learner': cut('in', s),
    'cut one way, to the clients': cut('out', s),
    'delay of 200 ms each way': Proxied(s, delay=0.2),
    '5% of connections reset each 0.1 s': Proxied(s, resets=0.05),
  }
  acting: dict[str, Fault] = {
    'none': nothing,
    'the replay service is killed and restored': restores(args.restores, pause=0.3),
    'an acting process is killed': kills(args.act_kills),
    'an acting process is frozen (SIGSTOP)': frozen(s),
    'cut both ways': cut('both', s),
    'cut one way, from the acting processes': cut('in', s),
    'delay of 200 ms each way': Proxied(s, delay=0.2),
    '5% of connections reset each 0.1 s': Proxied(s, resets=0.05),
  }
  windows: dict[str, Fault] = {
    'none': nothing,
    'the replay service is killed and restored': restores(args.restores),
    'an acting process is killed': kills(args.act_kills),
    '5% of connections reset each 0.1 s': Proxied(s, resets=0.05),
  }
  kinds: dict[str, tuple[type[Run], str, dict[str, Fault]]] = {
    'environments elsewhere': (Environments, 'environments', environments),
    'acting elsewhere': (Acting, 'acting', acting),
    'acting elsewhere, windows by priority': (Windows, 'windows', windows),
  }
  path = RESULTS / 'faults.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}

  def keep(name: str, found: dict[str, Any]) -> None:
    """In the place of what there is of it."""
    before = results.get(name, {})
    rows = {x['fault']: x for x in [*before.get('rows', []), *found.pop('rows', [])]}
    results[name] = {**before, **found, 'rows': [rows[k] for k in kinds[name][2] if k in rows]}
    record('faults', dict(results, clients=2, environments=ENVIRONMENTS))

  with tempfile.TemporaryDirectory() as folder:
    for name, (kind, short, faults) in kinds.items():
      measure(kind, Path(folder) / short, faults, args.only, functools.partial(keep, name))


if __name__ == '__main__':
  main()
