"""`podrace label`: a process that computes the targets of an agent with `labels='stage'`.

These are the Bellman updaters of QT-Opt (Kalashnikov et al. 2018, arXiv 1806.10293). Windows are
drawn from the online and from the offline table, labelled with the learner's newest parameters, and
inserted into the table that the learner takes its batches from.

A label is a draw of a window. Its id is the `source`, a random number of the process, and its
`number` there. Sources keep their windows, so a process that is killed loses nothing but the labels
under way. The service inserts each label once, and the learner drops an id that it has seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from podrace.distributed import stage
from podrace.distributed.parameters import LABELLING
from podrace.distributed.run_tables import source_tables, train_table
from podrace.distributed.stage import Batch, Duty, Place
from podrace.errors import UsageError
from podrace.hooks import can_refresh, labels_elsewhere
from podrace.replay.labels import OFFLINE, TABLE, LabelWriter, Mix
from podrace.replay.layout import Columns
from podrace.settings.agents import agent_name
from podrace.system.threads import ClosableQueue, Worker
from podrace.tables import Closed, Samples

DELAY = 0.05  # seconds that labels wait for more of them before they are sent


def check_agent(agent: Any) -> None:
  """Raise UsageError for an agent that computes its own targets."""
  if not (labels_elsewhere(agent) and can_refresh(agent)):
    raise UsageError(
      f'{agent_name(agent)} computes its targets when it learns; podrace label is for agents with '
      '--agent.labels stage, such as qtopt'
    )


def _connect(place: Place) -> tuple[contextlib.AbstractContextManager[Iterator[Batch]], Labels]:
  return Draws(place), Labels(place)


DUTY = Duty(LABELLING, check_agent, 'labels', 'labelled', 'labelling', False, _connect)


class Draws:
  """Batches from the online and the offline table, read ahead by a thread.

  Owner: the stage, which enters it.
  Ends when: it is left, or the client is closed, or a request fails.
  Raises: the failure of a request, from `next`.
  """

  def __init__(self, place: Place) -> None:
    self._place, self._mix = place, Mix(place.layout.windows)
    self._tables = source_tables(place.client, place.layout, place.space, place.run)
    self._batches: ClosableQueue[Batch] = ClosableQueue(stage.PREFETCH)

  def __enter__(self) -> Iterator[Batch]:
    return self._each(Worker('draws', self._read, self._batches.close))

  def __exit__(self, *exc: object) -> None:
    self._batches.close()

  def _each(self, worker: Worker) -> Iterator[Batch]:
    while (batch := self._batches.get()) is not None:
      yield batch
    worker.join()
    raise Closed('the source is closed')

  def _read(self) -> None:
    number = 0
    while self._batches.put(self._draw(number)):
      number += 1

  def _draw(self, number: int) -> Batch:
    size, mix = self._place.batch_size, self._mix
    online = mix.online(size, number, self._place.steps())
    parts = []  # samples, and if they are of the log
    if TABLE in self._tables:
      counted = mix.counted(size, number)
      for n, peek in ((counted, False), (online - counted, True)):
        if n > 0:
          parts.append((self._tables[TABLE].sample(n, peek=peek), False))
    if online < size:
      # Without environments that act, the limiter of this table keeps samples_per_insert.
      peek = TABLE in self._tables
      parts.append((self._tables[OFFLINE].sample(size - online, peek=peek), True))
    return _join(parts, size)


def _join(parts: list[tuple[Samples, bool]], size: int) -> Batch:
  """Return the last `size` rows of samples, of which the first may only have been counted."""
  samples = [x for x, _ in parts]
  logged = np.repeat([is_logged for _, is_logged in parts], [len(x.key) for x in samples])
  data = {
    k: samples[0].data[k] if len(parts) == 1 else np.concatenate([x.data[k] for x in samples])
    for k in samples[0].data
  }
  key = np.concatenate([x.key for x in samples])
  return Batch(key[-size:], {k: x[-size:] for k, x in data.items()}, logged[-size:])


class Labels:
  """Inserts labelled windows into the learner's table."""

  def __init__(self, place: Place) -> None:
    client, size = place.client, place.batch_size
    table = train_table(client, place.layout, place.space, place.run)
    self._writer = LabelWriter(
      place.layout, table, size,
      lambda history: client.writer(history, max_in_flight=size, delay=DELAY),
    )  # fmt: skip
    self._source, self._number = int.from_bytes(os.urandom(7), 'little'), 0

  def write(self, batch: Batch, fresh: Columns, version: int) -> None:
    """Insert a batch with columns `fresh` [n, L, ...]; waits until these are computed."""
    n, first = len(batch.key), self._number
    self._number += n
    ids = dict(
      source=np.full(n, self._source),
      number=np.arange(first, first + n),
      version=np.full(n, version),
      logged=batch.logged,
    )
    self._writer.write(batch.data | {k: np.asarray(x) for k, x in fresh.items()} | ids)
