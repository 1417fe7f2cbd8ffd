"""`podrace replay` as a process, programs that write to it, and what they have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from children import DEADLINE, Process

from podrace import tables
from podrace.distributed import replay

HERE = Path(__file__).parent
ANY = 'tcp://127.0.0.1:*'


class Replay(Process):
  """`podrace replay` at a port that it keeps when it is started again."""

  def __init__(self, folder: Path, *args: str, address: str = ANY) -> None:
    log = folder / 'replay.log'
    log.unlink(missing_ok=True)
    command = ['-m', 'podrace.cli', 'replay', '--listen', address, '--dir', str(folder / 'kept')]
    super().__init__(log, *command, *args)
    self.says('listening at')
    self.address = self.output.partition('listening at ')[2].split()[0]


class Program(Process):
  """One of programs.py."""

  def __init__(self, log: Path, name: str, *args: Any) -> None:
    super().__init__(log, str(HERE / 'programs.py'), name, *map(str, args))

  def said(self) -> list[list[int]]:
    """Its lines of numbers, the last one if it is whole."""
    whole = self.output.rpartition('\n')[0]
    return [[int(x) for x in line.split()] for line in whole.splitlines() if line[:1].isdigit()]


def all_of(client: replay.ReplayClient, name: str = 'all') -> replay.RemoteTable:
  """A table from which everything can be read once, in its order."""
  return client.table(
    name,
    sampler=tables.fifo(),
    remover=tables.fifo(),
    rate_limiter=tables.min_size(1),
    max_size=10**6,
    max_times_sampled=1,
  )


def read_all(table: replay.RemoteTable) -> list[tuple[int, int]]:
  """Take all items out of a table that `all_of` made; each must be as programs.step made it.

  The table's size ends the loop, so a server that is late, or that has to be found again, loses no item.

  Returns:
    (writer, index) of each item, in the order of sampling.
  """
  items = []
  while table.info().size:
    samples = table.sample(1000, at_least=1, timeout=DEADLINE)
    for who, index, frame, lengths in zip(
      samples.data['who'], samples.data['index'], samples.data['frame'], samples.lengths['index'],
      strict=True,
    ):  # fmt: skip
      assert (np.diff(index[:lengths]) == 1).all() and len(set(who[:lengths].tolist())) == 1
      assert (frame[:lengths] == (index[:lengths, None] % 251)).all()
      items.append((int(who[0]), int(index[lengths - 1])))
  return items
