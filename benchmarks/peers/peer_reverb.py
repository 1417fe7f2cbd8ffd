"""In the peer's virtual environment: dm-reverb, server and client in one process.

    python peer_reverb.py VARIANT MODE KIND WRITERS SECONDS FRAMES

VARIANT is KEEP/WORKERS: how many steps a writer keeps (from which Reverb tunes the length of its chunks)
and how many workers a dataset has (-1 is Reverb's choice), or client, to sample without a dataset.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import reverb
import tables_load as load
import tensorflow as tf


class Reverb(load.Side):
  def __init__(self, variant: str) -> None:
    keep, self.reading = variant.split('/')
    self.keep = int(keep)
    shapes = {'small': ((1, 4), tf.float32), 'atari': ((load.SEQUENCE, *load.FRAME), tf.uint8)}
    self.server = reverb.Server(
      [
        reverb.Table(
          name=kind,
          sampler=reverb.selectors.Uniform(),
          remover=reverb.selectors.Fifo(),
          max_size=100_000,
          rate_limiter=reverb.rate_limiters.MinSize(1),
          signature={'x': tf.TensorSpec(shape, dtype)},
        )
        for kind, (shape, dtype) in shapes.items()
      ]
    )
    self.client = self.server.localhost_client()

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    length = 1 if kind == 'small' else load.SEQUENCE
    writer = self.client.trajectory_writer(max(length, self.keep), validate_items=False)
    if kind == 'atari':
      writer.configure(('x',), num_keep_alive_refs=length, max_chunk_length=load.PERIOD)
    items = 0

    def item() -> None:
      nonlocal items
      writer.create_item(kind, 1.0, {'x': writer.history['x'][-length:]})
      items += 1
      if items % 100 == 0:
        writer.flush(200)  # else what is in flight grows without bound

    return (lambda x: writer.append({'x': x})), item, writer.flush

  def batches(self, kind: str) -> Iterator[Any]:
    batch = load.SMALL_BATCH if kind == 'small' else load.ATARI_BATCH
    if self.reading == 'client':
      import numpy as np

      while True:
        samples = self.client.sample(kind, batch, emit_timesteps=False)
        yield np.stack([s.data['x'] for s in samples])
    data = reverb.TrajectoryDataset.from_table_signature(
      f'localhost:{self.server.port}',
      kind,
      max_in_flight_samples_per_worker=4 * batch,
      num_workers_per_iterator=int(self.reading),
    )
    for sample in data.batch(batch).prefetch(2).as_numpy_iterator():
      yield sample.data['x']


def main() -> None:
  variant, mode, kind, writers, seconds, frames = sys.argv[1:]
  side = Reverb(variant)
  print(json.dumps(load.run(side, mode, kind, int(writers), float(seconds), frames)), flush=True)
  os._exit(0)  # the server's threads are of no further use


if __name__ == '__main__':
  main()
