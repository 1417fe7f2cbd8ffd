"""The tables that carry experience from acting processes to the learner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from podrace import tables
from podrace.distributed import replay
from podrace.distributed.replay import item_schema
from podrace.distributed.replay.replay_messages import MESSAGE_PARTS, MOST_ITEMS
from podrace.envs.host.spaces import action_bounds
from podrace.errors import UsageError
from podrace.replay.frame_stacks import CONTINUED, REPEATED
from podrace.replay.host_tables import selector
from podrace.replay.labels import LOGGED, OFFLINE, TABLE, TRAIN, VERSION, Mix
from podrace.replay.layout import Layout, is_single, named
from podrace.topology import share
from podrace.types import (
  FIRST,
  LARGEST_OBSERVATION,
  LARGEST_OUTPUT,
  LARGEST_REWARD,
  LAST,
  Trajectory,
)

UNROLLS = 'unrolls'  # the table of agents without replay: a queue
EPISODES = 'episodes'  # the table of finished episodes
QUEUED = 2  # batches of labels that wait for the learner
# Bounds of the number of episodes, the sum of their returns, that of the squared returns, and that
# of their lengths.
LOWEST_TOTALS = (0.0, -1e30, 0.0, 0.0)
HIGHEST_TOTALS = (2.0**53, 1e30, 1e60, 2.0**53)


def _limits(name: str, kind: str, space: Any) -> tuple[Any, Any] | None:
  """Return the range of a column that a learner can use, None if it can use all values."""
  field = name.removeprefix('timesteps/').removeprefix('outputs/')
  if field.startswith('observation') or field == 'action':
    if kind == 'f':
      return -LARGEST_OBSERVATION, LARGEST_OBSERVATION
    return action_bounds(space) if field == 'action' else None
  default = (-LARGEST_OUTPUT, LARGEST_OUTPUT) if kind == 'f' else None
  return {
    'reward': (-LARGEST_REWARD, LARGEST_REWARD),
    'discount': (0, 1),
    'step_type': (FIRST, LAST),
    'stacks': (CONTINUED, REPEATED),
    'env_id': (0, 2**31 - 1),
  }.get(field, default)


def _column(name: str, dtype: Any, shape: tuple[int, ...], rows: int | None, space: Any) -> Any:
  return item_schema.pack_column(
    name, dtype, shape, rows, _limits(name, np.dtype(dtype).kind, space)
  )


def timed(name: str) -> bool:
  """Return whether a column of an unroll has a time axis, which is its first."""
  return name.startswith(('timesteps', 'outputs'))


def window_contents(layout: Layout, space: Any) -> list[Any]:
  """Return the columns of each window, with actions of `space`."""
  columns = []
  for name, x in layout.batch().items():
    if is_single(name) or name == 'env_id':
      columns.append(_column(name, x.dtype, x.shape[1:], None, space))
    elif name != 'weight':
      columns.append(_column(name, x.dtype, x.shape[2:], x.shape[1], space))
  return columns


def unroll_contents(example: Trajectory, space: Any) -> list[Any]:
  """Return the columns of the unroll of one environment; `example` has shapes [T, B, ...]."""
  columns = [
    _column(k, x.dtype, x.shape[:1] + x.shape[2:] if timed(k) else x.shape[1:], None, space)
    for k, x in named(example).items()
  ]
  return columns + [
    item_schema.pack_column(k, np.int64, ()) for k in ('source', 'number', 'version')
  ]


def label_contents(layout: Layout, space: Any) -> list[Any]:
  """Return the columns of each labelled window, with actions of `space`."""
  ids = [item_schema.pack_column(k, np.int64, ()) for k in ('source', 'number', VERSION)]
  return [*window_contents(layout, space), *ids, item_schema.pack_column(LOGGED, np.bool_, ())]


def check_sample(name: str, items: int, contents: list[Any]) -> None:
  """Raise UsageError if a process's share of a batch is more than one sample can have.

  Args:
    name: the option that sets the size of the batch.
    items: the size of the batch, over all processes.
    contents: the columns of each item.
  """
  limit = min(MOST_ITEMS, MESSAGE_PARTS // len(contents))
  if share(items) > limit:
    raise UsageError(
      f'{name} {items}: a process samples at most {limit} items of {len(contents)} columns each of '
      'a replay service at once: give a smaller number'
    )


def replay_table(
  client: replay.ReplayClient,
  layout: Layout,
  space: Any,
  run: str,
  name: str = TABLE,
  part: float = 1.0,
  draws: int = 1,
  paced: bool = True,
) -> Any:
  """Open a table of windows, or create it.

  Its limiter keeps `samples_per_insert` to within the windows of a few updates. Each shard has its
  share of the capacity and of the first windows.

  Args:
    client: the client of the service.
    layout: columns of the windows.
    space: of the actions.
    run: the name of the run.
    name: the name of the table.
    part: the share of all environments whose windows it has.
    draws: the draws of which the limiter counts one.
    paced: whether the limiter keeps this pace; else windows are drawn once there are enough.
  """
  w, b = layout.windows, layout.windows.buffer
  per_window = b.samples_per_insert * w.period / draws
  part /= len(client.connections)
  least = max(1, int(b.min_size * part) // w.period)
  error = 4.0 * b.batch_size + 4 * max(1.0, per_window) * w.num_envs * w.unroll_length / w.period
  return client.table(
    name,
    sampler=selector(w),
    remover=tables.fifo(),
    rate_limiter=(
      tables.sample_to_insert_ratio(per_window, least, error) if paced else tables.min_size(least)
    ),
    max_size=-(-math.ceil(b.capacity * part) // w.period),
    run=run,
    contents=window_contents(layout, space),
  )


def source_tables(
  client: replay.ReplayClient, layout: Layout, space: Any, run: str
) -> dict[str, Any]:
  """Open the tables from which a stage draws windows, or create them.

  The environments that act keep the pace. Each process acts in its share of them and replays its
  share of the log, so the offline table has no limiter of its own beside the online one: two
  limiters could wait for each other.
  """
  mix, names = Mix(layout.windows), Mix(layout.windows).tables
  if len(names) == 1:
    return {names[0]: replay_table(client, layout, space, run, names[0])}
  online = replay_table(client, layout, space, run, TABLE, mix.acting, mix.period)
  part = mix.part(OFFLINE)
  return {
    TABLE: online,
    OFFLINE: replay_table(client, layout, space, run, OFFLINE, part, paced=False),
  }


def train_table(client: replay.ReplayClient, layout: Layout, space: Any, run: str) -> Any:
  """Open the queue of labelled windows, or create it. Each label is learned from once.

  It has room for few batches, so labels are not much older than the parameters.
  """
  size = QUEUED * layout.windows.buffer.batch_size
  return _queue(client, TRAIN, size, tables.queue(size), run, label_contents(layout, space))


def unrolls_table(
  client: replay.ReplayClient, num_envs: int, example: Trajectory, space: Any, run: str
) -> Any:
  """Open the queue of unrolls of single environments, with room for one batch, or create it."""
  contents = unroll_contents(example, space)
  return _queue(client, UNROLLS, num_envs, tables.queue(num_envs), run, contents)


def episodes_table(client: replay.ReplayClient, run: str) -> Any:
  """Open the table of finished episodes, from which the oldest are dropped, or create it."""
  bounds = LOWEST_TOTALS, HIGHEST_TOTALS
  contents = [item_schema.pack_column('totals', np.float64, (4,), 1, bounds)]
  return _queue(client, EPISODES, 10_000, tables.min_size(1), run, contents)


def _queue(
  client: replay.ReplayClient, name: str, size: int, limiter: Any, run: str, contents: list[Any]
) -> Any:
  """Open a table that gives each item once and in order, or create it."""
  return client.table(
    name, sampler=tables.fifo(), remover=tables.fifo(), rate_limiter=limiter, max_size=size,
    max_times_sampled=1, run=run, contents=contents,
  )  # fmt: skip
