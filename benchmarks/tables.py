"""The host's replay tables against dm-reverb, both in one process with their client.

Steps inserted per second by 1, 4 and 16 writers, items sampled per second, and the growth of a process by 100,000 real
Pong steps. Small steps have 16 bytes and an item each; Atari steps are frames of ale-py's Pong under a random policy (84 x
84, uint8), in sequences of 80 overlapping by 40; samples are uniform, in stacked batches of 256 (16). Atari steps of ours
are written by unrolls of 40, too. The sides take turns, each in a process of its own. Reverb is sampled from with two
settings, and the faster one counts. Then, of ours alone: prioritised sampling with updates, how long a checkpoint holds up
traffic, and codecs on real chunks.

Reverb has a virtual environment of its own (build/bench-reverb), which the first run makes; the frames are made once, too
(build/pong-frames.bin, 0.7 GB). Writes benchmarks/results/tables.json after each part.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import tables_load as load

FRAMES = common.ROOT / 'build' / 'pong-frames.bin'
STEPS, ENVIRONMENTS = 100_000, 10
KEEP = '100/-1'  # of Reverb: KEEP/WORKERS as in peer_reverb.py; 1/-1 inserted more slowly each time
VARIANTS = {'insert': (KEEP,), 'sample': (KEEP, '100/1'), 'memory': (KEEP,)}
PARTS = ('small', 'atari', 'memory', 'prioritised', 'checkpoint', 'codecs')


def uniform_settings(max_size: int) -> dict[str, Any]:
  """Returns the settings of a table that is sampled uniformly."""
  from podrace import tables as t

  return dict(sampler=t.uniform(), remover=t.fifo(), rate_limiter=t.min_size(1), max_size=max_size)


def append_and_item(writer: Any, table: Any, kind: str) -> tuple[Callable, Callable]:
  """Returns functions that append a step, and make an item of the newest steps."""
  length, write = load.length_of(kind), writer.extend if kind == 'unrolls' else writer.append

  def item() -> None:
    writer.create_item(table, 1.0, {'x': writer.history['x'][-length:]})

  return (lambda x: write({'x': x})), item


class Ours:
  def __init__(self) -> None:
    from podrace import tables as t

    self.store = t.ChunkStore()
    self.tables = {k: t.Table(k, self.store, **uniform_settings(100_000)) for k in load.BATCH}

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    from podrace.tables import Writer

    rows = None if kind == 'small' else load.PERIOD
    writer = Writer(self.store, history=load.length_of(kind), rows_per_chunk=rows)
    table = self.tables['small' if kind == 'small' else 'atari']
    return (*append_and_item(writer, table, kind), writer.flush)

  def batches(self, kind: str) -> Iterator[Any]:
    while True:
      yield self.tables[kind].sample(load.BATCH[kind]).data['x']


def make_frames() -> None:
  """Writes real frames of Pong, one environment's after the other's."""
  if FRAMES.exists() and FRAMES.stat().st_size == STEPS * load.FRAME[0] * load.FRAME[1]:
    return
  from ale_py.vector_env import AtariVectorEnv

  env = AtariVectorEnv('pong', num_envs=ENVIRONMENTS, stack_num=1, img_height=84, img_width=84, grayscale=True)  # fmt: skip
  each, rng = STEPS // ENVIRONMENTS, np.random.default_rng(0)
  partial = FRAMES.with_suffix('.partial')
  partial.parent.mkdir(exist_ok=True)
  frames = np.memmap(partial, np.uint8, 'w+', shape=(ENVIRONMENTS, each, *load.FRAME))
  observation, _ = env.reset(seed=0)
  for t in range(each):
    frames[:, t] = observation.reshape(ENVIRONMENTS, *load.FRAME)
    observation, *_ = env.step(rng.integers(0, 6, ENVIRONMENTS))
  frames.flush()
  partial.rename(FRAMES)


def measure(side: list[str], mode: str, kind: str, writers: int, seconds: float) -> Any:
  return common.last_json([*side, mode, kind, str(writers), str(seconds), str(FRAMES)])


def compare(peer: str, mode: str, kind: str, writers: int, args: Any) -> dict[str, Any]:
  """Measures both sides in turn; ours by unrolls, too, where they can be written."""
  sides = {'podrace': [sys.executable, 'benchmarks/tables.py', '--worker']}
  sides |= {v: [peer, 'benchmarks/peers/peer_reverb.py', v] for v in VARIANTS[mode]}
  rates: dict[str, list[Any]] = {side: [] for side in sides}
  unrolls: list[float] = []
  for _ in range(args.repeats):
    for side, command in sides.items():
      rates[side].append(measure(command, mode, kind, writers, args.seconds))
    if (mode, kind) == ('insert', 'atari'):
      unrolls.append(measure(sides['podrace'], mode, 'unrolls', writers, args.seconds))
  ours = rates.pop('podrace')
  if mode == 'memory':
    return dict(podrace=common.columns(ours), reverb=common.columns(rates[KEEP]))
  result = common.against_fastest(f'{mode} {kind}, {writers} writers', ours, rates)
  if unrolls:
    result['podrace, unrolls'] = common.summary(unrolls)
    result['unrolls_over_steps'] = statistics.median(unrolls) / statistics.median(ours)
  return result


def filled(items: int) -> tuple[Any, Any]:
  """Returns a store, and its table of small items by priority."""
  from podrace import tables as t

  store, rng = t.ChunkStore(), np.random.default_rng(0)
  table = t.Table('it', store, **uniform_settings(items) | dict(sampler=t.prioritized(0.6)))
  writer = t.Writer(store, history=1)
  for i in range(items):
    writer.append(np.full(4, i, np.float32))
    writer.create_item(table, rng.uniform(), num_steps=1)
  return store, table


def prioritised(items: int, seconds: float) -> dict[str, float]:
  """Samples batches of 256, and updates their priorities."""
  (_, table), rng = filled(items), np.random.default_rng(0)
  n, begin, updating = 0, time.perf_counter(), 0.0
  while time.perf_counter() < begin + seconds:
    sample = table.sample(256)
    start = time.perf_counter()
    table.update_priorities(sample.key, rng.uniform(size=256))
    updating += time.perf_counter() - start
    n += 256
  elapsed = time.perf_counter() - begin
  rates = dict(sampled_and_updated=elapsed, sampled=elapsed - updating, updated=updating)
  return {f'{name}_per_s': n / s for name, s in rates.items()}


def saving(items: int) -> dict[str, float]:
  """Saves a checkpoint of small items; `blocked_s` is how long it holds up traffic."""
  from podrace import tables as t

  FRAMES.parent.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(dir=FRAMES.parent) as folder:
    return t.save(filled(items)[0], Path(folder) / 'saved')


def codecs() -> dict[str, Any]:
  """Returns bytes per step, and GB/s in and out, of each codec on chunks of frames, floats and integers."""
  frames = load.frames_of(str(FRAMES), 8_000)
  rng = np.random.default_rng(0)
  walk = np.cumsum(rng.normal(size=(200, 256, 4)) * 0.01, axis=1).astype(np.float32)
  columns = {
    'pong frames': list(frames.reshape(-1, 40, *load.FRAME)),
    'a float32[4] walk': list(walk),
    'actions 0-5, int32': list(rng.integers(0, 6, (200, 256)).astype(np.int32)),
    'a counter, int64': list(np.arange(200 * 256).reshape(200, 256)),
  }
  return {name: codecs_on(chunks) for name, chunks in columns.items()}


def codecs_on(chunks: list[np.ndarray]) -> dict[str, Any]:
  """Packs and unpacks chunks by each codec, integers also as differences along time."""
  import lz4.block
  import zstandard

  from podrace.tables.chunks import accumulate, difference

  coders: dict[str, tuple[Callable, Callable]] = {
    'lz4': (
      lambda x: lz4.block.compress(x, store_size=False),
      lambda x, n: lz4.block.decompress(x, uncompressed_size=n),
    )
  }
  for level in (-3, -1, 1, 3):
    unpacker = zstandard.ZstdDecompressor()
    pack = zstandard.ZstdCompressor(level=level).compress
    coders[f'zstd {level}'] = (pack, lambda x, n, u=unpacker: u.decompress(x))
  steps, size, results = sum(map(len, chunks)), sum(x.nbytes for x in chunks), {}
  for name, (pack, unpack) in coders.items():
    for by_difference in (False, True) if chunks[0].dtype.kind in 'iu' else (False,):
      best = [9e9, 9e9]
      for _ in range(3):
        begin = time.perf_counter()
        rows = (difference(x) if by_difference else x for x in chunks)
        packed = [pack(x.reshape(-1).view(np.uint8).data) for x in rows]
        middle = time.perf_counter()
        for p, x in zip(packed, chunks, strict=True):
          unpacked = np.frombuffer(unpack(p, x.nbytes), x.dtype).reshape(x.shape).copy()
          if by_difference:
            accumulate(unpacked)
        best = [min(best[0], middle - begin), min(best[1], time.perf_counter() - middle)]
      results[name + (' of differences' if by_difference else '')] = dict(
        bytes_per_step=sum(map(len, packed)) / steps, raw_bytes_per_step=size / steps,
        packed_gb_per_s=size / best[0] / 1e9, unpacked_gb_per_s=size / best[1] / 1e9,
      )  # fmt: skip
  return results


def main() -> None:
  args = common.arguments(__doc__, PARTS, repeats=2, seconds=2.0, writers=[1, 4, 16], items=(0, 'fewer items'))  # fmt: skip
  if args.worker:
    mode, kind, writers, seconds, frames = args.worker
    print(json.dumps(load.run(Ours(), mode, kind, int(writers), float(seconds), frames)))
    return
  peer = common.peer('reverb') if {'small', 'atari', 'memory'} & {*args.cases} else ''
  pinned = common.pins(peer, 'dm-reverb', 'tensorflow', 'numpy') if peer else None
  few, million = args.items or 100_000, args.items or 1_000_000
  if {'atari', 'memory', 'codecs'} & {*args.cases}:
    make_frames()

  def keep(name: str, result: Any) -> None:
    print(f'{name}: {json.dumps(result)[:300]}', flush=True)
    common.keep('tables', name, result, (), pinned)

  for part in args.cases:
    if part in load.BATCH:
      for writers in args.writers:
        name = f'insert {part}, {writers} writers, steps/s'
        keep(name, compare(peer, 'insert', part, writers, args))
      keep(f'sample {part}, items/s', compare(peer, 'sample', part, 1, args))
    elif part == 'memory':
      keep('memory of 100,000 pong steps', compare(peer, 'memory', 'atari', 1, args))
    elif part == 'prioritised':
      keep(f'prioritised, 256 of {few:,}', prioritised(few, args.seconds))
    elif part == 'checkpoint':
      keep(f'checkpoint of {million:,} items', saving(million))
    else:
      keep('codecs', codecs())


if __name__ == '__main__':
  main()
