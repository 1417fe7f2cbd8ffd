"""`podrace reanalyse`: a process that refreshes the targets in replay with newer parameters.

Reanalyse is by Schrittwieser et al. 2021 (arXiv 2104.06294). Windows are read from the replay
service and searched again with the learner's newest parameters. Their targets are written back by
key, and the learner samples them like any window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from podrace.distributed import replay, stage
from podrace.distributed.parameters import REANALYSING
from podrace.distributed.run_tables import replay_table
from podrace.distributed.stage import Batch, Duty, Place
from podrace.errors import UsageError
from podrace.hooks import can_refresh, labels_elsewhere
from podrace.replay.layout import Columns
from podrace.settings.agents import agent_name
from podrace.tables import RateLimited

GONE_SECONDS = 10.0  # that an item waits for its shard, until the shard counts as away


def check_agent(agent: Any) -> None:
  """Raise UsageError for an agent without targets that can be refreshed."""
  if labels_elsewhere(agent):
    raise UsageError(f'{agent_name(agent)} learns from labels; take podrace label')
  if not can_refresh(agent):
    raise UsageError(
      f'{agent_name(agent)} has no targets that can be refreshed; podrace reanalyse is for agents '
      'with replay that have a function `refresh`, such as muzero'
    )


def _connect(place: Place) -> tuple[contextlib.AbstractContextManager[Iterator[Batch]], Targets]:
  client, length = place.client, place.layout.windows.length
  table = replay_table(client, place.layout, place.space, place.run)
  return _peeks(table, place.batch_size), Targets(client, table, length)


@contextlib.contextmanager
def _peeks(table: Any, batch_size: int) -> Iterator[Iterator[Batch]]:
  """Yield batches of a table, which the limiter does not count."""
  with table.sampler(batch_size, stage.PREFETCH, peek=True) as samples:
    yield (Batch(sample.key, sample.data) for sample in samples)


DUTY = Duty(REANALYSING, check_agent, 'windows', 'reanalysed', 'reanalysing', True, _connect)


class Targets:
  """Writes columns of windows back to the items that they were sampled from.

  Args:
    client: the client of the service.
    table: the table of the items.
    length: the number of rows of each column of a window.
  """

  def __init__(self, client: replay.ReplayClient, table: Any, length: int) -> None:
    self._table, self._length = table, length
    self._writers, self._connections = client.writers(history=length), client.connections

  def write(self, batch: Batch, fresh: Columns, version: int) -> None:
    """Amend the items of a batch with columns [n, L, ...]; waits until these are computed.

    Items of a shard that is away keep their targets, so that the other shards get theirs.
    """
    del version  # the columns have it
    rows = {k: np.asarray(x) for k, x in fresh.items()}
    for i, key in enumerate(batch.key.tolist()):
      if self._connections[shard := self._table.shard_of(key)].away:
        continue
      writer = self._writers[shard]
      writer.extend({k: x[i] for k, x in rows.items()})
      slices = {k: column[-self._length :] for k, column in writer.history.items()}
      with contextlib.suppress(RateLimited):  # the shard has just gone
        writer.amend_item(self._table, key, slices, timeout=GONE_SECONDS)
