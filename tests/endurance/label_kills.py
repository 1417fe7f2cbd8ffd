"""Kills of `podrace label`: no label is lost, and none is made twice.

    python tests/endurance/label_kills.py [--kills 20]

Two labelling processes fill the table of labels, and one of them ends with SIGKILL, again and again, up to a second
after it has labelled. This process is the learner: it takes all labels, in batches. A label has an id: the source, a
random number of its process, and its number there. Twice means that an id comes again, lost that a number is left
out: the service had acknowledged a later label of the same process. Each batch of one version is compared with labels
that this process computes.

Writes benchmarks/results/label_kills.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / 'benchmarks'))

sys.path.append(str(Path(__file__).resolve().parents[1] / 'support'))

import common
import numpy as np
from children import until
from label_agent import go_first
from label_run import AGENT, SIZE, Run, check_labels, check_numbers
from processes import Podrace

from podrace.distributed import replay
from podrace.distributed.replay.server import ReplayServer
from podrace.tables import Closed


class Taker:
  """Takes all labels, in a thread. Owner: `kill_processes`. Ends when the client is closed."""

  def __init__(self, table: Any) -> None:
    self.labels: list[dict[str, np.ndarray]] = []
    self.sources: set[int] = set()
    self._table = table
    self._thread = threading.Thread(target=self._work, daemon=True)
    self._thread.start()

  def _work(self) -> None:
    try:
      with self._table.sampler(SIZE) as samples:
        for sample in samples:
          self.labels.append(sample.data)
          self.sources |= set(sample.data['source'].tolist())
    except Closed:
      pass

  def join(self) -> None:
    self._thread.join()


def kill_processes(
  kills: int, rng: random.Random, folder: Path, cache: Path | None
) -> dict[str, Any]:
  """Makes all kills, and checks the labels."""
  run, address = Run(folder), f'unix:{folder}/replay'
  at = ['--connect-replay', address, '--params', run.addresses.parameters]
  began = time.perf_counter()

  def start(i: int) -> Podrace:
    return Podrace(['label', *AGENT, *at], folder / f'label-{i}.txt', 1, cache, go_first)

  with run.publisher, ReplayServer(address) as server, replay.connect(address) as client:
    run.publish(0)
    run.act()
    taker = Taker(run.train_table(client))
    processes = [start(0), start(1)]
    for kill in range(kills):
      until(lambda kill=kill: len(taker.sources) >= kill + 2, 120)  # the newer one labels as well
      threading.Event().wait(rng.uniform(0, 1))
      run.publish(kill + 1)
      processes.pop(0).kill()
      processes.append(start(kill + 2))
      print(f'kill {kill + 1}: {len(taker.labels) * SIZE:,} labels', flush=True)
    until(lambda: len(taker.sources) >= kills + 2, 120)
    for process in processes:
      process.kill()
    table = server.tables['train']
    until(lambda: not len(table) or len(table) < SIZE, 60)  # all batches are taken
    counts = table.contents.counts
    client.close()
    taker.join()
    run.end(kills + 1, 1)
  made = check_numbers(taker.labels)
  taken = sum(made.values())
  assert len(made) == kills + 2 and taken == counts.samples
  assert counts.inserts - counts.samples < SIZE
  of_one_version = [x for x in taker.labels if len(set(x['version'].tolist())) == 1]
  for data in of_one_version:
    check_labels(run, data)
  return dict(
    kills=kills, sources=len(made), labels=taken, twice=0, lost=0, checked=len(of_one_version) * SIZE,
    seconds=round(time.perf_counter() - began, 1),
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--kills', type=int, default=20)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix='podrace-labels-') as folder:
    result = kill_processes(args.kills, random.Random(0), Path(folder), None)
  print(result)
  common.keep('label_kills', 'kills', result | common.origin())


if __name__ == '__main__':
  main()
