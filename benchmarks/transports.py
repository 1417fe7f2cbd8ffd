"""This checkout's services against another checkout's, in turn: replay, and parameters to 100 clients.

    python benchmarks/transports.py --other ../main

Replay: steps inserted per second by 1 and 4 writer processes, and items sampled per second by one; the loads of
replay_service.py. Parameters: versions of 2.7 MB, each published when all clients hold the one before; the CPU time of the
publisher's process for a version, and of all clients'. Servers and clients are processes of their own, all on the cores that this one may use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import tables

CLIENTS, PROCESSES = 100, 4  # of parameters
VERSION_BYTES = 2_700_000
WRITERS = (1, 4)
ANY = 'tcp://127.0.0.1:*'


# --- processes, of either checkout ------------------------------------------------------------------


def serve_replay() -> None:
  from podrace.distributed.replay.server import ReplayServer

  with ReplayServer(ANY) as server:
    common.answer(address=server.address)
    for _ in common.requests():
      common.answer(cpu_s=time.process_time())


def write_and_read(address: str, kind: str, frames: str) -> None:
  import replay_service
  import service_load

  service_load.work(replay_service.Remote(address, kind), kind, frames)
  os._exit(0)


def publish() -> None:
  from podrace.distributed import parameters

  array = np.random.default_rng(0).integers(0, 255, VERSION_BYTES, np.uint8)
  with parameters.Publisher(ANY) as publisher:
    common.answer(address=publisher.address)
    for request in common.requests():
      if 'version' in request:
        array[0] += 1
        publisher.publish(request['version'], [('x', array)])
      common.answer(cpu_s=time.process_time())


def hold(address: str, clients: str) -> None:
  from podrace.distributed import parameters

  readers = [parameters.Parameters(address) for _ in range(int(clients))]
  common.answer(ready=True)
  for request in common.requests():
    for reader in readers:
      with reader.changed:
        while reader.version < request['version']:
          reader.changed.wait(1.0)
    common.answer(cpu_s=time.process_time())
  os._exit(0)


# --- the measurements -------------------------------------------------------------------------------


class Side:
  """One checkout's processes."""

  def __init__(self, checkout: Path) -> None:
    self._path = os.pathsep.join([str(checkout), str(common.ROOT / 'benchmarks')])

  def started(self, *args: str) -> tuple[common.Worker, Any]:
    """A process, and what it says first."""
    worker = common.Worker([sys.executable, __file__, *args], PYTHONPATH=self._path)
    assert worker.process.stdout
    return worker, json.loads(worker.process.stdout.readline())

  def replay(self, kind: str, seconds: float) -> dict[str, float]:
    server, told = self.started('--part', 'serve_replay')
    workers = [
      self.started('--part', 'write_and_read', told['address'], kind, str(tables.FRAMES))[0]
      for _ in range(max(WRITERS))
    ]
    found = {}
    for n in WRITERS:
      before = server.ask()['cpu_s']
      said = together(workers[:n], write=seconds)
      wall = max(s['end'] for s in said) - min(s['begin'] for s in said)
      steps = sum(s['steps'] for s in said)
      found[f'insert {kind}, {n} writers, steps/s'] = steps / wall
      found[f'insert {kind}, {n} writers, server CPU us a step'] = (
        1e6 * (server.ask()['cpu_s'] - before) / steps
      )
    found[f'sample {kind}, items/s'] = workers[0].ask(read=seconds)['items_per_s']
    for worker in (*workers, server):
      worker.__exit__()
    return found

  def parameters(self, versions: int) -> dict[str, float]:
    publisher, told = self.started('--part', 'publish')
    each = str(CLIENTS // PROCESSES)
    holders = [self.started('--part', 'hold', told['address'], each)[0] for _ in range(PROCESSES)]
    publisher.ask(version=1)
    before = [x['cpu_s'] for x in together(holders, version=1)]
    cpu, begun = publisher.ask()['cpu_s'], time.perf_counter()
    for version in range(2, 2 + versions):
      publisher.ask(version=version)
      after = [x['cpu_s'] for x in together(holders, version=version)]
    seconds = time.perf_counter() - begun
    found = {
      'versions/s': versions / seconds,
      'publisher CPU ms a version': 1e3 * (publisher.ask()['cpu_s'] - cpu) / versions,
      'clients CPU ms a version': 1e3 * (sum(after) - sum(before)) / versions,
    }
    for worker in (*holders, publisher):
      worker.__exit__()
    return {f'parameters to {CLIENTS}, {k}': v for k, v in found.items()}


def together(workers: list[common.Worker], **request: Any) -> list[Any]:
  """What all of them say, asked at once."""
  said: list[Any] = [None] * len(workers)

  def ask(i: int) -> None:
    said[i] = workers[i].ask(**request)

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(workers))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return said


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--other', type=Path, help='the other checkout')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=2.0)
  parser.add_argument('--versions', type=int, default=10)
  parser.add_argument('--part', nargs='+', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.part:
    name, *rest = args.part
    parts: dict[str, Any] = dict(
      serve_replay=serve_replay, write_and_read=write_and_read, publish=publish, hold=hold
    )
    parts[name](*rest)
    return
  if args.other is None or not (args.other / 'podrace').is_dir():
    parser.error('--other must be a checkout of podrace')
  tables.make_frames()
  sides = {'this': Side(common.ROOT), 'other': Side(args.other.resolve())}
  found: dict[str, dict[str, list[float]]] = {}
  for _ in range(args.repeats):
    for side, processes in sides.items():
      for kind in ('small', 'atari'):
        add(found, side, processes.replay(kind, args.seconds))
      add(found, side, processes.parameters(args.versions))
  results: dict[str, Any] = {
    name: dict({k: common.summary(v) for k, v in both.items()},
               this_over_other=float(np.median(both['this']) / np.median(both['other'])))
    for name, both in found.items()
  }  # fmt: skip
  for name, row in results.items():
    print(f'{name}: {row["this"]["median"]:,.1f}, other {row["other"]["median"]:,.1f}', flush=True)
  head = ['git', '-C', str(args.other), 'rev-parse', 'HEAD']
  results['other_commit'] = subprocess.run(
    head, check=True, capture_output=True, text=True
  ).stdout.strip()
  common.record('transports', results)


def add(found: dict[str, dict[str, list[float]]], side: str, values: dict[str, float]) -> None:
  for name, value in values.items():
    found.setdefault(name, {'this': [], 'other': []})[side].append(value)


if __name__ == '__main__':
  main()
