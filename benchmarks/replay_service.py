"""The replay service against dm-reverb over its own gRPC: server, writers and sampler in processes of their own.

Steps inserted per second by 1, 4 and 16 writer processes, from the first step until the last item is acknowledged, and
items sampled per second by one process. The load is that of tables.py: small steps have 16 bytes and an item each,
Atari steps are real frames of Pong in sequences of 80 overlapping by 40; samples are uniform, in stacked
batches of 256 (16). All processes of both sides are started first; then the sides take turns. Reverb is
sampled from with two settings, and the faster one counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import common
import service_load
import tables
import tables_load as load

WRITERS = (1, 4, 16)
READERS = {'podrace': ('',), 'reverb': ('100/-1', '100/1')}
PREFETCH = 2


class Remote(load.Side):
  """A client of `podrace replay`."""

  def __init__(self, address: str, kind: str) -> None:
    from podrace import tables as t
    from podrace.distributed import replay

    self.client = replay.connect(address)
    self.table = self.client.table(
      kind,
      sampler=t.uniform(),
      remover=t.fifo(),
      rate_limiter=t.min_size(1),
      max_size=100_000,
    )
    self._writer: Any = None

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    if self._writer is None:  # a process writes one stream
      length = 1 if kind == 'small' else load.SEQUENCE
      self._writer = self.client.writer(length, None if kind == 'small' else load.PERIOD)
    writer, table, column = self._writer, self.table, 'x'
    length = 1 if kind == 'small' else load.SEQUENCE

    def item() -> None:
      writer.create_item(table, 1.0, {'x': writer.history[column][-length:]})

    return (lambda x: writer.append({'x': x})), item, writer.end_episode

  def batches(self, kind: str) -> Iterator[Any]:
    batch = load.SMALL_BATCH if kind == 'small' else load.ATARI_BATCH
    with self.table.sampler(batch, prefetch=PREFETCH) as samples:
      for sample in samples:
        yield sample.data['x']


def serve() -> None:
  from podrace.distributed.replay.server import ReplayServer

  with ReplayServer('tcp://127.0.0.1:*') as server:
    common.answer(address=server.address)
    for _ in common.requests():
      pass


# --- side by side -----------------------------------------------------------------------------------


class Sides:
  """Servers and clients of both, of one kind of step."""

  def __init__(self, peer: str, kind: str) -> None:
    me, theirs = [sys.executable, __file__], [peer, 'benchmarks/peers/peer_reverb_service.py']
    frames = str(tables.FRAMES)
    self.servers = {
      'podrace': started([*me, '--serve']),
      'reverb': started([*theirs, 'serve']),
    }
    address = answered(self.servers['podrace'])['address']
    port = str(answered(self.servers['reverb'])['port'])
    self.writers = {
      'podrace': [started([*me, '--work', address, kind, frames]) for _ in range(max(WRITERS))],
      'reverb': [started([*theirs, '100/-1', kind, port, frames]) for _ in range(max(WRITERS))],
    }
    self.readers = {
      'podrace': {'': self.writers['podrace'][0]},
      'reverb': {v: started([*theirs, v, kind, port, frames]) for v in READERS['reverb']},
    }
    for worker in self.all():
      if not any(worker is s for s in self.servers.values()):
        answered(worker)

  def all(self) -> list[common.Worker]:
    """Each once, servers last."""
    every = [w for ws in self.writers.values() for w in ws]
    return [*every, *self.readers['reverb'].values(), *self.servers.values()]

  def inserted_per_s(self, side: str, writers: int, seconds: float) -> float:
    said: list[Any] = [None] * writers

    def ask(i: int) -> None:
      said[i] = self.writers[side][i].ask(write=seconds)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(writers)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    wall = max(s['end'] for s in said) - min(s['begin'] for s in said)
    return sum(s['steps'] for s in said) / wall

  def sampled_per_s(self, side: str, variant: str, seconds: float) -> float:
    return self.readers[side][variant].ask(read=seconds)['items_per_s']

  def close(self) -> None:
    for worker in self.all():
      worker.__exit__()


def started(command: list[str]) -> common.Worker:
  return common.Worker(command, PYTHONPATH=common.PATH)


def answered(worker: common.Worker) -> Any:
  """What a worker says first, without having been asked."""
  import json

  assert worker.process.stdout is not None
  return json.loads(worker.process.stdout.readline())


def compare(name: str, found: dict[str, list[float]]) -> dict[str, Any]:
  """Summaries, and the ratio to the faster of Reverb's settings."""
  medians = {k: statistics.median(v) for k, v in found.items()}
  fastest = max((k for k in medians if k != 'podrace'), key=lambda k: medians[k])
  ratio = medians['podrace'] / medians[fastest]
  print(
    f'{name}: podrace {medians["podrace"]:,.0f}/s, {fastest} {medians[fastest]:,.0f}/s; {ratio:.2f}x',
    flush=True,
  )
  return dict({k: common.summary(v) for k, v in found.items()}, ratio_to_fastest=ratio)


def measure(peer: str, kind: str, seconds: float, repeats: int) -> dict[str, Any]:
  sides = Sides(peer, kind)
  results = {}
  try:
    for writers in WRITERS:
      found: dict[str, list[float]] = {'podrace': [], 'reverb': []}
      for _ in range(repeats):
        for side, values in found.items():
          values.append(sides.inserted_per_s(side, writers, seconds))
      name = f'insert {kind}, {writers} writers, steps/s'
      results[name] = compare(name, found)
    found = {'podrace': [], **{f'reverb {v}': [] for v in READERS['reverb']}}
    for _ in range(repeats):
      for key, values in found.items():
        side, _, variant = key.partition(' ')
        values.append(sides.sampled_per_s(side, variant, seconds))
    name = f'sample {kind}, items/s'
    results[name] = compare(name, found)
  finally:
    sides.close()
  return results


def main() -> None:
  if sys.argv[1:2] == ['--serve']:
    serve()
    return
  if sys.argv[1:2] == ['--work']:
    address, kind, frames = sys.argv[2:]
    service_load.work(Remote(address, kind), kind, frames)
    os._exit(0)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=2.0)
  args = parser.parse_args()
  peer = common.peer('reverb')
  tables.make_frames()
  results: dict[str, Any] = dict(cores=len(os.sched_getaffinity(0)))
  for kind in ('small', 'atari'):
    results |= measure(peer, kind, args.seconds, args.repeats)
  common.record('replay_service', results, common.pins(peer, 'dm-reverb', 'tensorflow', 'numpy'))


if __name__ == '__main__':
  main()
