"""The replay service against dm-reverb over its own gRPC: server, writers and sampler in processes of their own.

Steps inserted per second by 1, 4 and 16 writer processes, from the first step until the last item is acknowledged, and
items sampled per second by one process. The load is that of tables.py: small steps have 16 bytes and an item each, Atari
steps are real frames of Pong in sequences of 80 overlapping by 40; samples are uniform, in stacked batches of 256 (16).
All processes of both sides are started first; then the sides take turns. Reverb is sampled from with two settings, and
the faster one counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import common
import tables
import tables_load as load

READERS = ('100/-1', '100/1')  # settings of Reverb
PREFETCH = 2


class Remote:
  """A client of `podrace replay`."""

  def __init__(self, address: str, kind: str) -> None:
    from podrace.distributed import replay

    self.client = replay.connect(address)
    self.table = self.client.table(kind, **tables.uniform_settings(100_000))
    length = load.length_of(kind)
    rows = None if kind == 'small' else load.PERIOD
    self._writer = self.client.writer(length, rows)  # a process writes one stream

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    return (*tables.append_and_item(self._writer, self.table, kind), self._writer.end_episode)

  def batches(self, kind: str) -> Iterator[Any]:
    with self.table.sampler(load.BATCH[kind], prefetch=PREFETCH) as samples:
      for sample in samples:
        yield sample.data['x']


def work(args: list[str]) -> None:
  """In a process of our side: the server, or a client."""
  if args[0] == 'server':
    from podrace.distributed.replay.server import ReplayServer

    with ReplayServer('tcp://127.0.0.1:*') as server:
      common.answer(address=server.address)
      common.serve()
    return
  _, address, kind, frames = args
  load.work(Remote(address, kind), kind, frames)
  os._exit(0)


class Sides:
  """Servers and clients of both, of one kind of step. Owner: `measure`, which closes them."""

  def __init__(self, peer: str, kind: str, writers: int) -> None:
    ours = [sys.executable, __file__, '--worker']
    theirs = [peer, 'benchmarks/peers/peer_reverb.py']
    self.processes: list[common.Worker] = []
    address = self.start(*ours, 'server').read()['address']
    port = str(self.start(*theirs, 'serve').read()['port'])
    client = [*ours, 'client', address, kind, str(tables.FRAMES)]
    reverb = [[*theirs, 'client', v, kind, port, str(tables.FRAMES)] for v in READERS]
    self.writers = {
      'podrace': [self.start(*client) for _ in range(writers)],
      'reverb': [self.start(*reverb[0]) for _ in range(writers)],
    }
    self.readers = dict(zip(READERS, (self.start(*command) for command in reverb), strict=True))
    for worker in self.processes[2:]:
      worker.read()  # it is ready

  def start(self, *command: str) -> common.Worker:
    self.processes.append(common.Worker(command))
    return self.processes[-1]

  def inserted_per_s(self, side: str, writers: int, seconds: float) -> float:
    ask = lambda i: self.writers[side][i].ask(do='write', seconds=seconds)  # noqa: E731
    rows = load.at_once(writers, ask)
    wall = max(row['end'] for row in rows) - min(row['begin'] for row in rows)
    return sum(row['steps'] for row in rows) / wall

  def close(self) -> None:
    for worker in reversed(self.processes):
      worker.close()


def measure(peer: str, kind: str, args: Any) -> dict[str, Any]:
  sides, results = Sides(peer, kind, max(args.writers)), {}
  try:
    for writers in args.writers:
      rates: dict[str, list[float]] = {'podrace': [], 'reverb': []}
      for _ in range(args.repeats):
        for side, values in rates.items():
          values.append(sides.inserted_per_s(side, writers, args.seconds))
      name = f'insert {kind}, {writers} writers, steps/s'
      results[name] = common.against_fastest(name, rates.pop('podrace'), rates)
    readers = {'podrace': sides.writers['podrace'][0], **sides.readers}
    rates = {name: [] for name in readers}
    for _ in range(args.repeats):
      for reader, worker in readers.items():
        rates[reader].append(worker.ask(do='read', seconds=args.seconds)['items_per_s'])
    name = f'sample {kind}, items/s'
    results[name] = common.against_fastest(name, rates.pop('podrace'), rates)
  finally:
    sides.close()
  return results


def main() -> None:
  args = common.arguments(__doc__, repeats=3, seconds=2.0, writers=[1, 4, 16])
  if args.worker:
    work(args.worker)
    return
  peer = common.peer('reverb')
  tables.make_frames()
  results: dict[str, Any] = dict(cores=len(os.sched_getaffinity(0)))
  for kind in ('small', 'atari'):
    results |= measure(peer, kind, args)
  common.record('replay_service', results, common.pins(peer, 'dm-reverb', 'tensorflow', 'numpy'))


if __name__ == '__main__':
  main()
