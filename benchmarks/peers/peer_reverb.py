"""In the peer's virtual environment: dm-reverb, server and client in one process, or apart over gRPC.

    python peer_reverb.py VARIANT MODE KIND WRITERS SECONDS FRAMES     # of tables.py
    python peer_reverb.py serve                                        # of replay_service.py
    python peer_reverb.py client VARIANT KIND PORT FRAMES

VARIANT is KEEP/WORKERS: how many steps a writer keeps (from which Reverb tunes the length of its chunks)
and how many workers a dataset has (-1 is Reverb's choice).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import common
import reverb
import tables_load as load
import tensorflow as tf

SHAPES = {'small': ((1, 4), tf.float32), 'atari': ((load.SEQUENCE, *load.FRAME), tf.uint8)}


def table(kind: str) -> Any:
  shape, dtype = SHAPES[kind]
  return reverb.Table(
    kind, reverb.selectors.Uniform(), reverb.selectors.Fifo(), 100_000, reverb.rate_limiters.MinSize(1),
    signature={'x': tf.TensorSpec(shape, dtype)},
  )  # fmt: skip


class Reverb:
  """A client of the server at `port`, or of a new server in this process."""

  def __init__(self, variant: str, port: int = 0) -> None:
    keep, workers = variant.split('/')
    self.keep, self.workers = int(keep), int(workers)
    if not port:
      self.server = reverb.Server([table(kind) for kind in SHAPES])
    self.port = port or self.server.port
    self.client = reverb.Client(f'localhost:{self.port}')

  def writer(self, kind: str) -> tuple[Callable[[Any], None], Callable[[], None], Callable]:
    length = load.length_of(kind)
    writer = self.client.trajectory_writer(max(length, self.keep), validate_items=False)
    if kind == 'atari':
      writer.configure(('x',), num_keep_alive_refs=length, max_chunk_length=load.PERIOD)
    items = 0

    def item() -> None:
      nonlocal items
      writer.create_item(kind, 1.0, {'x': writer.history['x'][-length:]})
      items += 1
      if items % 100 == 0:
        writer.flush(200)  # else the queue grows without bound

    return (lambda x: writer.append({'x': x})), item, writer.flush

  def batches(self, kind: str) -> Iterator[Any]:
    batch = load.BATCH[kind]
    data = reverb.TrajectoryDataset.from_table_signature(
      f'localhost:{self.port}', kind, max_in_flight_samples_per_worker=4 * batch,
      num_workers_per_iterator=self.workers,
    )  # fmt: skip
    for sample in data.batch(batch).prefetch(2).as_numpy_iterator():
      yield sample.data['x']


def main() -> None:
  first, *args = sys.argv[1:]
  if first == 'serve':
    common.answer(port=Reverb('100/-1').port)
    common.serve()
  elif first == 'client':
    variant, kind, port, frames = args
    load.work(Reverb(variant, int(port)), kind, frames)
  else:
    mode, kind, writers, seconds, frames = args
    rate = load.run(Reverb(first), mode, kind, int(writers), float(seconds), frames)
    print(json.dumps(rate), flush=True)
  os._exit(0)  # the server's threads are of no further use


if __name__ == '__main__':
  main()
