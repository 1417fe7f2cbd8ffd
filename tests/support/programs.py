"""Programs that the tests run in processes of their own, and kill: programs.py NAME ADDRESS ARGS."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from typing import Any

import numpy as np

from podrace import tables
from podrace.distributed import parameters, replay


def say(*numbers: int | str) -> None:
  """Write a line at once: by PYTHONUNBUFFERED, `print` writes each word by itself."""
  os.write(1, f'{" ".join(map(str, numbers))}\n'.encode())


def step(who: int, index: int) -> dict[str, Any]:
  frame = np.full(300, index % 251, np.uint8)
  return {'who': np.int32(who), 'index': np.int64(index), 'frame': frame}


def write(address: str, who: str, count: str, each: str = '10') -> None:
  """Items of the newest 3 steps, one a step; every `each` of them says which is the newest that is in."""
  with replay.connect(address) as client:
    table = client.table('all')
    writer = client.writer(history=3, rows_per_chunk=8, max_in_flight=32, delay=0.01)
    for i in range(int(count)):
      writer.append(step(int(who), i))
      if i >= 2:
        writer.create_item(table, 1.0, num_steps=3)
      if i % int(each) == int(each) - 1:
        writer.flush()
        say(who, i)
    writer.close()
    say(who, int(count) - 1)


def sample(address: str, name: str, n: str) -> None:
  """Samples without end; says how many."""
  with replay.connect(address) as client, client.table(name).sampler(int(n)) as batches:
    total, said = 0, time.monotonic()
    say(0)
    for samples in batches:
      total += len(samples.key)
      if time.monotonic() > said + 0.02:
        say(total)
        said = time.monotonic()


def read(address: str, count: str) -> None:
  """Parameters, as they come: checks that they are of one version, and says which."""
  reader = parameters.Parameters(address)
  seen = -1
  while seen < int(count):
    got = reader.get()
    if got.version != seen:
      seen = got.version
      for path, array in got.leaves:
        assert (array == seen).all(), (seen, path)
      say(seen)
    with reader.changed:
      if reader.version == seen:
        reader.changed.wait(1.0)
  reader.close()


def hold(address: str, seconds: str) -> None:
  """Keeps Python's lock for so long, as compiling does for a while, and then samples."""
  with replay.connect(address) as client:
    say(0)
    ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
    client.table('it').sample(1, timeout=60)
    say(1)


if __name__ == '__main__':
  logging.basicConfig(level=logging.INFO)
  assert not tables.__name__.startswith('jax') and 'jax' not in sys.modules
  globals()[sys.argv[1]](*sys.argv[2:])
