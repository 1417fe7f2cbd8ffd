"""The load under which tables.py puts both sides: numpy and threads, for either virtual environment.

A side gives functions that make a writer's `step(x)`, `item(length)` and `finish()`, and what draws a batch. Small
steps are float32[4] (16 bytes) with an item each; Atari steps are real frames, in sequences of 80
that overlap by 40, from episodes of 2,000. The kind `unrolls` is Atari, written 40 steps at once, of sides that can.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FRAME = (84, 84)
SEQUENCE, PERIOD, EPISODE = 80, 40, 2_000
SMALL_BATCH, ATARI_BATCH = 256, 16
FILL = {'small': 50_000, 'atari': 20_000}  # steps that there are to sample from


class Side:
  """What both have in common; a side overrides the four."""

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    """(append a step, make an item of the newest, wait until all items are in)."""
    raise NotImplementedError

  def batches(self, kind: str) -> Iterator[Any]:
    """Batches of sampled items, stacked, as numpy arrays [n, ...]."""
    raise NotImplementedError


def frames_of(path: str, n: int, start: int = 0) -> np.ndarray:
  """n frames of the file, read and not mapped."""
  size = FRAME[0] * FRAME[1]
  return np.fromfile(path, np.uint8, n * size, offset=start * size).reshape(n, *FRAME)


def write(side: Side, kind: str, steps: Any, until: Callable[[int], bool]) -> int:
  """Writes steps, over and over, with their items; how many."""
  append, item, finish = side.writer(kind)
  n = 0
  while not until(n):
    if kind == 'unrolls':
      append(steps[n % len(steps) :][:PERIOD])
      n += PERIOD
    else:
      for _ in range(PERIOD):
        append(steps[n % len(steps)])
        n += 1
        if kind == 'small':
          item()
    if kind != 'small' and n % EPISODE >= SEQUENCE:
      item()
  finish()
  return n


def inserted_per_s(side: Side, kind: str, steps: Any, writers: int, seconds: float) -> float:
  """Steps that so many writers, each a thread, get in, until the last item of the last is there."""
  write(side, kind, steps, lambda n: n >= 400)
  written = [0] * writers
  begin = time.perf_counter()

  def run(i: int) -> None:
    written[i] = write(side, kind, steps, lambda n: time.perf_counter() > begin + seconds)

  threads = [threading.Thread(target=run, args=(i,)) for i in range(writers)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return sum(written) / (time.perf_counter() - begin)


def sampled_per_s(side: Side, kind: str, steps: Any, seconds: float) -> float:
  """Items of a filled table that one reader gets, in batches."""
  write(side, kind, steps, lambda n: n >= FILL[kind])
  batches = side.batches(kind)
  expected = {'small': (SMALL_BATCH, 1, 4), 'atari': (ATARI_BATCH, SEQUENCE, *FRAME)}[kind]
  for _ in range(10):
    shape = next(batches).shape
    if shape != expected:
      raise RuntimeError(f'a batch has shape {shape}, expected {expected}')
  n, begin = 0, time.perf_counter()
  while time.perf_counter() < begin + seconds:
    n += len(next(batches))
  return n / (time.perf_counter() - begin)


def resident() -> int:
  """Bytes of this process's memory that no file backs."""
  with open('/proc/self/status') as status:
    line = next(line for line in status if line.startswith('RssAnon'))
  return int(line.split()[1]) * 1024


def memory(side: Side, path: str, steps: int) -> dict[str, float]:
  """What the process grows by when that many real steps are in a table; what it is in all."""
  write(side, 'atari', frames_of(path, 400), lambda n: n >= 400)  # what only the first steps cost
  gc.collect()
  before = resident()
  append, item, finish = side.writer('atari')
  block = None
  for n in range(steps):
    if n % EPISODE == 0:
      block = frames_of(path, EPISODE, n)
    append(block[n % EPISODE])
    if (n + 1) % PERIOD == 0 and (n + 1) % EPISODE >= SEQUENCE:
      item()
  block = None
  finish()
  gc.collect()
  after = resident()
  return dict(grown_mb=(after - before) / 1e6, process_mb=after / 1e6)


def run(side: Side, mode: str, kind: str, writers: int, seconds: float, path: str) -> Any:
  """One measurement, as told on the command line."""
  if mode == 'memory':
    return memory(side, path, 100_000)
  steps = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
  if kind != 'small':
    steps = frames_of(path, 5 * EPISODE)
  if mode == 'insert':
    return inserted_per_s(side, kind, steps, writers, seconds)
  return sampled_per_s(side, kind, steps, seconds)
