"""The host's replay tables against dm-reverb, both in one process with their client.

Steps inserted per second by 1, 4 and 16 writers, items sampled per second, and what a process grows by
for 100,000 real Pong steps. Small steps have 16 bytes and an item each; Atari steps are frames of ale-py's
Pong under a random policy (84 x 84, uint8), in sequences of 80 overlapping by 40; samples are uniform, in stacked
batches of 256 (16). Atari steps of ours are written by unrolls of 40, too. The sides take turns, each in a process of its own. Reverb is measured
with several settings, and the fastest one counts for each load. Then, of ours alone: prioritised
sampling with updates, how long a checkpoint holds up traffic, and codecs on real chunks.

Reverb has a virtual environment of its own (build/bench-reverb), which the first run makes; the frames are
made once, too (build/pong-frames.bin, 0.7 GB).
"""

from __future__ import annotations

import argparse
import json
import os
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
VARIANTS = {  # of Reverb: KEEP/WORKERS as in peer_reverb.py
  'insert': ('100/-1',),  # 1/-1 was slower each time
  'sample': ('100/-1', '100/1'),
  'memory': ('100/-1',),
}


class Ours(load.Side):
  def __init__(self) -> None:
    from podrace import tables

    self.store = tables.ChunkStore()
    self.tables = {
      kind: tables.Table(
        kind,
        self.store,
        sampler=tables.uniform(),
        remover=tables.fifo(),
        rate_limiter=tables.min_size(1),
        max_size=100_000,
      )
      for kind in ('small', 'atari')
    }

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    from podrace.tables import Writer

    table = self.tables['small' if kind == 'small' else 'atari']
    length = 1 if kind == 'small' else load.SEQUENCE
    rows = None if kind == 'small' else load.PERIOD
    writer = Writer(self.store, history=length, rows_per_chunk=rows)
    column = 'x'

    def item() -> None:
      writer.create_item(table, 1.0, {'x': writer.history[column][-length:]})

    write = writer.extend if kind == 'unrolls' else writer.append
    return (lambda x: write({column: x})), item, writer.flush

  def batches(self, kind: str) -> Iterator[Any]:
    batch = load.SMALL_BATCH if kind == 'small' else load.ATARI_BATCH
    while True:
      yield self.tables[kind].sample(batch).data['x']


# --- the frames and the peer ------------------------------------------------------------------


def make_frames() -> None:
  """Real frames of Pong, one environment's after the other's."""
  size = load.FRAME[0] * load.FRAME[1]
  if FRAMES.exists() and FRAMES.stat().st_size == STEPS * size:
    return
  from ale_py.vector_env import AtariVectorEnv

  env = AtariVectorEnv(
    'pong', num_envs=ENVIRONMENTS, stack_num=1, img_height=84, img_width=84, grayscale=True
  )
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


# --- side by side -----------------------------------------------------------------------------


def compare(peer: str, mode: str, kind: str, writers: int, args: Any) -> dict[str, Any]:
  load_args = [mode, kind, str(writers), str(args.seconds), str(FRAMES)]
  me = [sys.executable, 'benchmarks/tables.py', '--one']
  ours: list[Any] = []
  unrolls: list[Any] = []  # of ours, where they can be written at once
  theirs: dict[str, list[Any]] = {variant: [] for variant in VARIANTS[mode]}
  for _ in range(args.repeats):
    ours.append(common.last_json([*me, *load_args]))
    if (mode, kind) == ('insert', 'atari'):
      unrolls.append(common.last_json([*me, mode, 'unrolls', *load_args[2:]]))
    for variant, found in theirs.items():
      found.append(common.last_json([peer, 'benchmarks/peers/peer_reverb.py', variant, *load_args]))
  if mode == 'memory':
    return compare_memory(ours, theirs['100/-1'])
  fastest = max(theirs, key=lambda k: statistics.median(theirs[k]))
  ratio = statistics.median(ours) / statistics.median(theirs[fastest])
  print(
    f'{mode} {kind}, {writers} writers: podrace {statistics.median(ours):,.0f}/s, dm-reverb '
    f'{statistics.median(theirs[fastest]):,.0f}/s ({fastest}); {ratio:.2f}x', flush=True,
  )  # fmt: skip
  found = dict(
    podrace=common.summary(ours),
    reverb={variant: common.summary(found) for variant, found in theirs.items()},
    ratio_to_fastest=ratio,
  )
  if unrolls:
    found['podrace, unrolls'] = common.summary(unrolls)
    found['unrolls_over_steps'] = statistics.median(unrolls) / statistics.median(ours)
    print(f'by unrolls: {statistics.median(unrolls):,.0f}/s', flush=True)
  return found


def compare_memory(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
  found = {
    side: {k: common.summary([x[k] for x in values]) for k in values[0]}
    for side, values in (('podrace', ours), ('reverb', theirs))
  }
  print(
    'memory for 100,000 Pong steps: '
    + ', '.join(f'{side} {x["grown_mb"]["median"]:.1f} MB' for side, x in found.items()),
    flush=True,
  )
  return found


# --- ours alone -------------------------------------------------------------------------------


def prioritised(seconds: float) -> dict[str, float]:
  """Items sampled, and their priorities updated, in batches of 256 from 100,000 small items."""
  from podrace import tables

  store = tables.ChunkStore()
  table = tables.Table(
    'it',
    store,
    sampler=tables.prioritized(0.6),
    remover=tables.fifo(),
    rate_limiter=tables.min_size(1),
    max_size=100_000,
  )
  writer, rng = tables.Writer(store, history=1), np.random.default_rng(0)
  for i in range(100_000):
    writer.append(np.full(4, i, np.float32))
    writer.create_item(table, rng.uniform(), num_steps=1)
  n, begin, updating = 0, time.perf_counter(), 0.0
  while time.perf_counter() < begin + seconds:
    sample = table.sample(256)
    start = time.perf_counter()
    table.update_priorities(sample.key, rng.uniform(size=256))
    updating += time.perf_counter() - start
    n += 256
  elapsed = time.perf_counter() - begin
  return dict(
    sampled_and_updated_per_s=n / elapsed,
    sampled_per_s=n / (elapsed - updating),
    updated_per_s=n / updating,
  )


def saving() -> dict[str, float]:
  """A checkpoint of a million small items: how long nobody could use the table."""
  from podrace import tables

  store = tables.ChunkStore()
  table = tables.Table(
    'it',
    store,
    sampler=tables.prioritized(0.6),
    remover=tables.fifo(),
    rate_limiter=tables.min_size(1),
    max_size=1_000_000,
  )
  writer = tables.Writer(store, history=1)
  for i in range(1_000_000):
    writer.append(np.full(4, i, np.float32))
    writer.create_item(table, 1.0, num_steps=1)
  with tempfile.TemporaryDirectory(dir=common.ROOT / 'build') as folder:
    saved = tables.save(store, Path(folder) / 'saved')
  print(f'a checkpoint of 1,000,000 items blocks for {saved["blocked_s"] * 1e3:.1f} ms', flush=True)
  return saved


def codecs() -> dict[str, Any]:
  """Bytes per step, and GB/s in and out, of each codec on chunks of frames, floats and integers."""
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
  import lz4.block
  import zstandard

  from podrace.tables.chunks import accumulate, difference

  coders: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes, int], bytes]]] = {
    'lz4': (
      lambda x: lz4.block.compress(x, store_size=False),
      lambda x, n: lz4.block.decompress(x, uncompressed_size=n),
    )
  }
  for level in (-3, -1, 1, 3):
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    coders[f'zstd {level}'] = (packer.compress, lambda x, n, u=unpacker: u.decompress(x))
  steps, size, found = sum(map(len, chunks)), sum(x.nbytes for x in chunks), {}
  for name, (pack, unpack) in coders.items():
    for differences in (False, True) if chunks[0].dtype.kind in 'iu' else (False,):
      best = [9e9, 9e9]
      for _ in range(3):
        begin = time.perf_counter()
        packed = [
          pack((difference(x) if differences else x).reshape(-1).view(np.uint8).data)
          for x in chunks
        ]
        middle = time.perf_counter()
        for p, x in zip(packed, chunks, strict=True):
          rows = np.frombuffer(unpack(p, x.nbytes), x.dtype).reshape(x.shape).copy()
          if differences:
            accumulate(rows)
        best = [min(best[0], middle - begin), min(best[1], time.perf_counter() - middle)]
      found[name + (' of differences' if differences else '')] = dict(
        bytes_per_step=sum(map(len, packed)) / steps,
        raw_bytes_per_step=size / steps,
        packed_gb_per_s=size / best[0] / 1e9,
        unpacked_gb_per_s=size / best[1] / 1e9,
      )
  return found


def main() -> None:
  if '--one' in sys.argv:
    mode, kind, writers, seconds, frames = sys.argv[2:]
    print(json.dumps(load.run(Ours(), mode, kind, int(writers), float(seconds), frames)))
    return
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=2)
  parser.add_argument('--seconds', type=float, default=2.0)
  args = parser.parse_args()
  peer = common.peer('reverb')
  make_frames()
  results: dict[str, Any] = dict(cores=len(os.sched_getaffinity(0)))
  for kind in ('small', 'atari'):
    for writers in (1, 4, 16):
      results[f'insert {kind}, {writers} writers, steps/s'] = compare(
        peer, 'insert', kind, writers, args
      )
    results[f'sample {kind}, items/s'] = compare(peer, 'sample', kind, 1, args)
  results['memory of 100,000 pong steps'] = compare(peer, 'memory', 'atari', 1, args)
  results['prioritised, 256 of 100,000'] = prioritised(args.seconds)
  results['checkpoint of 1,000,000 items'] = saving()
  results['codecs'] = codecs()
  common.record('tables', results, common.pins(peer, 'dm-reverb', 'tensorflow', 'numpy'))


if __name__ == '__main__':
  main()
