"""The load under which tables.py and replay_service.py put both sides: numpy and threads, for either virtual environment.

A side has `writer(kind)`, which returns functions (append a step, make an item of the newest, wait until all items are in),
and `batches(kind)`, which yields batches of sampled items, stacked, as numpy arrays [n, ...]. Small steps are
float32[4] (16 bytes) with an item each; Atari steps are real frames, in sequences of 80 that overlap by 40, from episodes
of 2,000. The kind `unrolls` is Atari, written 40 steps at once, for sides that can.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np

FRAME = (84, 84)
SEQUENCE, PERIOD, EPISODE = 80, 40, 2_000
BATCH = {'small': 256, 'atari': 16}
FILL = {'small': 50_000, 'atari': 20_000}  # steps to sample from


def length_of(kind: str) -> int:
  """Returns the number of steps of an item."""
  return 1 if kind == 'small' else SEQUENCE


def steps_of(kind: str, path: str, episodes: int) -> np.ndarray:
  """Returns the steps to write, over and over."""
  if kind == 'small':
    return np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
  return frames_of(path, episodes * EPISODE)


def frames_of(path: str, n: int, start: int = 0) -> np.ndarray:
  """Returns n frames of the file, read and not mapped."""
  size = FRAME[0] * FRAME[1]
  return np.fromfile(path, np.uint8, n * size, offset=start * size).reshape(n, *FRAME)


def write(side: Any, kind: str, steps: Any, until: Callable[[int], bool]) -> int:
  """Writes steps, over and over, with their items; returns how many."""
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


def at_once(number: int, function: Callable[[int], Any]) -> list[Any]:
  """Calls a function in threads, with 0 to `number` - 1, and returns the results."""
  results: list[Any] = [None] * number

  def run(i: int) -> None:
    results[i] = function(i)

  threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def inserted_per_s(side: Any, kind: str, steps: Any, writers: int, seconds: float) -> float:
  """Returns the steps/s of writers, each a thread, until the last item of the last is there."""
  write(side, kind, steps, lambda n: n >= 400)
  begin = time.perf_counter()
  over = lambda n: time.perf_counter() > begin + seconds  # noqa: E731
  written = at_once(writers, lambda i: write(side, kind, steps, over))
  return sum(written) / (time.perf_counter() - begin)


def sampled_per_s(side: Any, kind: str, steps: Any, seconds: float) -> float:
  """Returns the items/s of a filled table that one reader gets, in batches."""
  write(side, kind, steps, lambda n: n >= FILL[kind])
  batches = side.batches(kind)
  expected = (BATCH[kind], *((1, 4) if kind == 'small' else (SEQUENCE, *FRAME)))
  for _ in range(10):
    if (shape := next(batches).shape) != expected:
      raise RuntimeError(f'a batch has shape {shape}, expected {expected}')
  n, begin = 0, time.perf_counter()
  while time.perf_counter() < begin + seconds:
    n += len(next(batches))
  return n / (time.perf_counter() - begin)


def resident() -> int:
  """Returns the bytes of this process's memory that no file backs."""
  with open('/proc/self/status') as status:
    line = next(line for line in status if line.startswith('RssAnon'))
  return int(line.split()[1]) * 1024


def memory(side: Any, path: str, steps: int) -> dict[str, float]:
  """Returns the growth of the process by that many real steps in a table, and its size after it."""
  write(side, 'atari', frames_of(path, 400), lambda n: n >= 400)  # the first steps cost more
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


def run(side: Any, mode: str, kind: str, writers: int, seconds: float, path: str) -> Any:
  """Makes one measurement, as named on the command line."""
  if mode == 'memory':
    return memory(side, path, 100_000)
  steps = steps_of(kind, path, 5)
  if mode == 'insert':
    return inserted_per_s(side, kind, steps, writers, seconds)
  return sampled_per_s(side, kind, steps, seconds)


def work(side: Any, kind: str, frames: str) -> None:
  """In a process of replay_service.py: answers `write` with steps, begin and end; `read` with items/s."""
  steps = steps_of(kind, frames, 2)
  write(side, kind, steps, lambda n: n >= 400)
  common.answer(ready=True)

  def write_for(seconds: float) -> dict[str, Any]:
    begin = time.time()
    n = write(side, kind, steps, lambda n: time.time() > begin + seconds)
    return dict(steps=n, begin=begin, end=time.time())

  def read_for(seconds: float) -> dict[str, Any]:
    return dict(items_per_s=sampled_per_s(side, kind, steps, seconds))

  common.serve(write=write_for, read=read_for)
