"""Acting, replay and learning, each in processes of its own: the arrangements of Ape-X and IMPALA.

Horgan et al. 2018 (arXiv 1803.00933) and Espeholt et al. 2018 (arXiv 1802.01561). Acting processes (`podrace
act`) have environments and their own inference; they write to a replay service (`podrace replay`) and read
the parameters that the learner (`podrace train ... --replay service`) publishes. Agents with replay write windows,
which the learner samples and sets priorities of; the others whole unrolls, to a queue from which the learner takes
each once. Everybody may come, go and come back; who lacks another waits, and says for whom.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import shlex
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import service, tables
from podrace.build import memory
from podrace.checkpoint import Extra, read_json
from podrace.config import (
  Config,
  UsageError,
  agent_name,
  argument,
  bind_run,
  changes,
  flag,
  option,
  to_json,
  validate,
)
from podrace.envs.host import base as host
from podrace.envs.host.base import HostSpec, Totals, action_bounds
from podrace.errors import RunError
from podrace.presets import PRESETS
from podrace.process import on_signals
from podrace.remote import security
from podrace.remote.hub import PEER_SECONDS, Listen
from podrace.remote.wire import plain
from podrace.replay.host import (
  TABLE,
  Columns,
  Draw,
  Layout,
  ReplayFailed,
  Streams,
  is_single,
  named,
  selector,
  unnamed,
  weighted,
)
from podrace.replay.windows import CONTINUED, REPEATED, Windows
from podrace.run import write_json
from podrace.sebulba import (
  ActingProgram,
  ActorFailed,
  Actors,
  Batch,
  LearningProgram,
  State,
  Unroll,
  example_trajectory,
)
from podrace.service import contents
from podrace.topology import AXIS, TRAJECTORY_SPECS, split_devices
from podrace.types import FIRST, LAST, Array, Trajectory

UNROLLS = 'unrolls'  # the table of agents without replay: a queue
LARGEST_TOTAL = 1e30  # of what is told of episodes
EPISODES = 'episodes'  # the table through which acting processes tell of theirs
PREFETCH = 2  # batches that are asked for, and that are unpacked, ahead of time
PUBLISH_SECONDS = 0.25  # between versions of the parameters
UNROLLS_PUBLISH_SECONDS = 0.05  # likewise, where no replay makes the policy's lag matter less
VERSIONS = 10_000  # of which an acting process knows the learner's numbers
SOURCES = 4096  # acting processes of which is known what the learner has had
GOODBYE_SECONDS = 5.0  # for acting processes to see that the run is complete
POLL = 0.1  # seconds between looks at whether a wait has lost its sense
RECORD, FINISHED = '.run', '.finished'  # what is published besides parameters
RUN = 'run'  # of the record: the name of the run, which its tables have, too
REMIND = 30.0  # seconds between messages that nobody acts
DIFFERENCES = 10  # that are told, of a run that is another one
COMMON = ('agent', 'env', 'num_envs', 'unroll_length')  # what the two sides must agree on
ACTING = {'architecture': 'sebulba', 'lag': 'async', 'replay': 'service'}  # as all acting processes
HEEDED = (
  *COMMON,
  'actor_devices',
  'actor_threads',
  'max_lag',
  'env_batch_size',
  'env_threads',
  'env_deadline',
)

log = logging.getLogger('podrace.apex')


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Where the others are."""

  replay: tuple[str, ...]  # of the service, or of its shards
  parameters: str  # where the learner publishes them
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = PEER_SECONDS  # of silence, after which the learner drops an acting process


# --- what both sides know ---------------------------------------------------------------------------


def _limits(name: str, kind: str, space: Any) -> tuple[Any, Any] | None:
  """The least and the greatest value of a column that a learner can use, by its name in a trajectory."""
  field = name.removeprefix('timesteps/').removeprefix('outputs/')
  if field.startswith('observation') or field == 'action':
    if kind == 'f':
      return contents.FINITE
    return action_bounds(space) if field == 'action' else None
  return {
    'reward': contents.FINITE,
    'discount': (0, 1),
    'step_type': (FIRST, LAST),
    'stacks': (CONTINUED, REPEATED),
    'env_id': (0, 2**31 - 1),
  }.get(field)


def _column(name: str, dtype: Any, shape: tuple[int, ...], rows: int | None, space: Any) -> Any:
  return contents.told(name, dtype, shape, rows, _limits(name, np.dtype(dtype).kind, space))


def window_contents(layout: Layout, space: Any) -> list[Any]:
  """What each window must hold, with actions of `space`."""
  found = []
  for name, x in layout.batch().items():
    if is_single(name) or name == 'env_id':
      found.append(_column(name, x.dtype, x.shape[1:], None, space))
    elif name != 'weight':
      found.append(_column(name, x.dtype, x.shape[2:], x.shape[1], space))
  return found


def unroll_contents(example: Trajectory, space: Any) -> list[Any]:
  """What each unroll of one environment must hold; `example` is of several, in shapes."""
  found = [
    _column(k, x.dtype, x.shape[:1] + x.shape[2:] if _timed(k) else x.shape[1:], None, space)
    for k, x in named(example).items()
  ]
  return found + [contents.told(k, np.int64, ()) for k in ('source', 'number', 'version')]


def replay_table(client: service.Client, layout: Layout, space: Any, run: str) -> Any:
  """The table of windows, made if there is none.

  Its limiter keeps `samples_per_insert` to within a few updates' windows.
  """
  w, b = layout.windows, layout.windows.buffer
  per_window = b.samples_per_insert * w.period
  least = max(1, b.min_size // w.period)
  error = 4.0 * b.batch_size + 4 * max(1.0, per_window) * w.num_envs * w.unroll_length / w.period
  return client.table(
    TABLE,
    sampler=selector(w),
    remover=tables.fifo(),
    rate_limiter=tables.sample_to_insert_ratio(per_window, least, error),
    max_size=-(-b.capacity // w.period),
    run=run,
    contents=window_contents(layout, space),
  )


def unrolls_table(
  client: service.Client, num_envs: int, example: Trajectory, space: Any, run: str
) -> Any:
  """The queue of unrolls of single environments, made if there is none; it holds one batch."""
  return client.table(
    UNROLLS,
    sampler=tables.fifo(),
    remover=tables.fifo(),
    rate_limiter=tables.queue(num_envs),
    max_size=num_envs,
    max_times_sampled=1,
    run=run,
    contents=unroll_contents(example, space),
  )


def episodes_table(client: service.Client, run: str) -> Any:
  """The table of finished episodes; the oldest go if nobody reads them."""
  return client.table(
    EPISODES,
    sampler=tables.fifo(),
    remover=tables.fifo(),
    rate_limiter=tables.min_size(1),
    max_size=10_000,
    max_times_sampled=1,
    run=run,
    contents=[contents.told('totals', np.float64, (4,), 1, (-LARGEST_TOTAL, LARGEST_TOTAL))],
  )


def to_leaves(params: Any) -> list[tuple[str, np.ndarray]]:
  """Parameters as they are published."""
  found = jax.tree_util.tree_leaves_with_path(params)
  return [(jax.tree_util.keystr(path), np.asarray(x.addressable_data(0))) for path, x in found]


def from_leaves(like: Any, leaves: dict[str, np.ndarray]) -> Any:
  """Parameters of the shapes of `like`.

  Raises:
    UsageError: with both sides, if they are others.
  """
  paths = jax.tree_util.tree_leaves_with_path(like)
  expected = {jax.tree_util.keystr(path): x for path, x in paths}
  told = [
    f'{path}: the learner has {_kind(leaves.get(path))}, this process {_kind(expected.get(path))}'
    for path in {**expected, **leaves}
    if _kind(leaves.get(path)) != _kind(expected.get(path))
  ]
  if told:
    raise UsageError('the learner publishes other parameters:\n  ' + '\n  '.join(told))
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in expected])


def _kind(x: Any) -> str:
  return 'none' if x is None else f'{x.dtype}{list(x.shape)}'


def record(config: Config) -> dict[str, Any]:
  """What the two sides must agree on."""
  return {k: v for k, v in to_json(config).items() if k in COMMON}


def other_run(learner: dict[str, Any], here: dict[str, Any]) -> list[str]:
  """In what an acting process has another `record` than its learner, in a few lines."""
  lines, names = [], [x.get('agent', {}).get('name') for x in (learner, here)]
  if names[0] != names[1]:  # then its settings are others as well
    lines = [f'the learner runs {names[0]}, this process {names[1]}']
    learner, here = ({k: v for k, v in x.items() if k != 'agent'} for x in (learner, here))
  lines += [
    f'{option(path)}: the learner has {argument(a)}, this process {argument(b)}'
    for path, a, b in changes(learner, here)
  ]
  more = len(lines) - DIFFERENCES
  return [plain(x) for x in lines[:DIFFERENCES]] + ([f'and {more} more'] if more > 0 else [])


def act_command(config: Config, addresses: Addresses) -> str:
  """What starts an acting process for a learner: from the preset that is nearest to its config."""
  wanted, name = record(config), agent_name(config.agent)
  bases: dict[tuple[str, ...], Config] = {(preset,): make() for preset, make in PRESETS.items()}
  near = {given: base for given, base in bases.items() if agent_name(base.agent) == name}
  if not near:  # somebody's own, with the preset that there is without one
    agent = dataclasses.replace(config.agent, **_defaults(type(config.agent)))
    near = {('--agent', name): dataclasses.replace(bases['catch',], agent=agent)}
  different = {given: list(changes(record(base), wanted)) for given, base in near.items()}
  given = min(different, key=lambda x: len(different[x]))
  options = [f'{option(path)} {quoted(value)}' for path, _, value in different[given]]
  a = addresses
  where = f'--connect-replay {",".join(a.replay)} --params {a.parameters}'
  keys = ['--keys DIR'] if a.keys else ['--insecure'] if a.insecure else []
  return ' '.join(['podrace act', *given, *options, where, *keys])


def quoted(value: Any) -> str:
  """A record's value as a shell takes it."""
  return ' '.join(map(shlex.quote, argument(value).split(' ')))


def _defaults(cls: Any) -> dict[str, Any]:
  fields = [f for f in dataclasses.fields(cls) if f.init]
  return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | {
    f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING
  }


# --- the learner ------------------------------------------------------------------------------------


class Sampled:
  """Batches of windows, for agents with replay."""

  def __init__(self, table: Any, w: Windows, mesh: Mesh) -> None:
    self.table, self.size, self.ahead = table, w.buffer.batch_size, PREFETCH
    self.prioritised = w.prioritised
    self._windows, self._sharding = w, NamedSharding(mesh, P(AXIS))
    self.steps = 0  # of the environments, up to the update at hand
    self._samples = 0

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """What is learned from, on the learner's devices."""
    self._samples += len(samples.key)
    yield Draw(
      samples.key, jax.device_put(weighted(samples, self._windows, self.steps), self._sharding)
    )

  def metrics(self) -> dict[str, float]:
    """For the log."""
    return {'replay_windows': self.table.size_last_told, 'replay_samples': self._samples}


class Queued:
  """Batches of unrolls, for agents without replay; a batch's `key` are the versions that acted, [n].

  Each unroll comes once. A service that was killed begins again from a checkpoint and does not know who has
  had what since: so it is known here, by its source and number.
  """

  prioritised, ahead = False, 1

  def __init__(self, table: Any, example: Trajectory, mesh: Mesh) -> None:
    self.table, self.size = table, example.env_id.shape[0]
    self._example = example
    self._shardings: Any = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), TRAJECTORY_SPECS, is_leaf=lambda x: isinstance(x, P)
    )
    self._newest: collections.OrderedDict[int, int] = collections.OrderedDict()
    self._kept: Columns = {}  # rows that do not make a batch yet
    self._taken = self._repeated = 0

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """As `Sampled.batches`; none, or several, where unrolls were repeated."""
    new = [self._is_new(*ids) for ids in zip(
      samples.data['source'].tolist(), samples.data['number'].tolist(), strict=True
    )]  # fmt: skip
    rows = {k: x[new] for k, x in samples.data.items()}
    if self._kept:
      rows = {k: np.concatenate([self._kept[k], x]) for k, x in rows.items()}
    n = self.size
    while len(rows['number']) >= n:
      batch, rows = {k: x[:n] for k, x in rows.items()}, {k: x[n:] for k, x in rows.items()}
      yield Draw(batch['version'], jax.device_put(self._trajectory(batch), self._shardings))
    self._kept = rows

  def _is_new(self, source: int, number: int) -> bool:
    self._taken += 1
    newest = self._newest.pop(source, -1)
    self._newest[source] = max(newest, number)
    while len(self._newest) > SOURCES:
      self._newest.popitem(last=False)
    self._repeated += number <= newest
    return number > newest

  def _trajectory(self, rows: Columns) -> Trajectory:
    return unnamed(
      self._example, {k: np.moveaxis(x, 0, 1) if _timed(k) else x for k, x in rows.items()}
    )

  def metrics(self) -> dict[str, float]:
    """For the log."""
    return {'unrolls_taken': self._taken, 'unrolls_repeated': self._repeated}


def _timed(name: str) -> bool:
  """Whether a column of an unroll has an axis of time, which comes first."""
  return name.startswith(('timesteps', 'outputs'))


class Feed:
  """Batches for the learner, and priorities from it, by threads of their own."""

  def __init__(self, source: Sampled | Queued, episodes: Any) -> None:
    self._source, self._table, self._episodes = source, source.table, episodes
    self._drawn: queue.Queue[Draw] = queue.Queue(source.ahead)
    self._learned: queue.Queue[tuple[np.ndarray, Array]] = queue.Queue(PREFETCH)
    self._lock = threading.Lock()
    self._totals = Totals()
    self._failure: str | None = None
    self._closed = False
    self._next: Draw | None = None  # drawn and not yet given away
    self._threads = [
      threading.Thread(target=self._main, args=(work,), name=work.__name__, daemon=True)
      for work in (self._sample, self._prioritise, self._listen)
    ]
    for thread in self._threads:
      thread.start()

  def begun(self, give_up: Callable[[], bool]) -> bool:
    """Waits until there is a batch, which `take` returns next; False where that would return None."""
    self._next = self.take(give_up)
    return self._next is not None

  def take(self, give_up: Callable[[], bool]) -> Draw | None:
    """The next batch; None if `give_up` says so before, or if there will be none: see `check`."""
    if self._next is not None:
      found, self._next = self._next, None
      return found
    while True:
      try:
        return self._drawn.get(timeout=POLL)
      except queue.Empty:
        if self._failure is not None or give_up():
          return None

  def update(self, key: np.ndarray, priority: Array, give_up: Callable[[], bool]) -> None:
    """New priorities [n], which may still be being computed; none are set if `give_up` says so."""
    while self._source.prioritised and self._failure is None:
      with contextlib.suppress(queue.Full):
        self._learned.put((key, priority), timeout=POLL)
        return
      if give_up():
        return

  def episodes(self) -> Totals:
    """Those that were told of since the last time."""
    with self._lock:
      totals, self._totals = self._totals, Totals()
    return totals

  def metrics(self) -> dict[str, float]:
    """For the log."""
    return self._source.metrics()

  def close(self) -> None:
    """Has the threads end with the client, which is closed next."""
    self._closed = True

  def check(self) -> None:
    """Raises ReplayFailed if a thread has failed."""
    if self._failure is not None:
      raise ReplayFailed(self._failure)

  def _main(self, work: Callable[[], None]) -> None:
    try:
      work()
    except tables.Closed:
      pass
    except BaseException:
      self._failure = self._failure or traceback.format_exc()

  def _sample(self) -> None:
    with self._table.sampler(self._source.size, self._source.ahead) as samples:
      while not self._closed:
        for found in self._source.batches(next(samples)):
          while not self._closed:
            with contextlib.suppress(queue.Full):
              self._drawn.put(found, timeout=POLL)
              break

  def _prioritise(self) -> None:
    while not self._closed:
      try:
        key, priority = self._learned.get(timeout=POLL)
      except queue.Empty:
        continue
      values = np.asarray(priority, np.float64)
      if np.isfinite(values).all():  # else neither is the loss, which ends the run
        self._table.update_priorities(key, values)

  def _listen(self) -> None:
    while not self._closed:
      try:
        found = self._episodes.sample(1000, at_least=1, timeout=1.0)
      except tables.RateLimited as e:
        if e.taken is None:
          continue
        found = e.taken
      count, return_sum, square, length = found.data['totals'].sum((0, 1)).tolist()
      with self._lock:
        self._totals += Totals(int(count), return_sum, square, int(length))


def check(addresses: Addresses) -> None:
  """Raises SecurityError for addresses and keys with which a learner can't listen or connect."""
  a = addresses
  Listen(a.parameters, a.keys, a.insecure, a.peer_timeout)
  for address in a.replay:
    security.check_address(address, a.keys, a.insecure, '--connect-replay')
  if a.keys is not None:
    security.read_key(a.keys / security.SERVER_SECRET)
    security.Allowed(a.keys / security.ALLOWED)
    try:
      security.client_keys(a.keys)
    except security.SecurityError as e:
      raise security.SecurityError(f'{e}; a learner is a client of its replay service') from e


def run_name(run_dir: Path) -> str:
  """The name of a run, made with its directory and kept there, so that a resumed run has the same.

  Raises:
    UsageError: if what is kept there is no name.
  """
  path = run_dir / 'name.json'
  if (name := read_json(path)) is None:
    name = f'{plain(run_dir.resolve().name)[:100]}-{os.urandom(4).hex()}'
    write_json(path, name)
  if not isinstance(name, str) or not name:
    raise UsageError(f'{path} is not the name of a run')
  return name


class DistributedSource:
  """Batches of experience that other processes made; a `Source`.

  With replay the `update`-th update has the samples that `samples_per_insert` makes of its steps: the
  service's limiter sees to it that as many steps have been made, and none is counted before it lets
  something be sampled. Without, it has a batch of unrolls.
  """

  snapshots = ()

  def __init__(
    self,
    learning: LearningProgram,
    spec: HostSpec,
    addresses: Addresses,
    config: Config,
    run_dir: Path,
  ) -> None:
    self._learning, self._spec, self._addresses, self._config = learning, spec, addresses, config
    self._record, self._run_dir, self._run = record(config), run_dir, ''
    check(addresses)  # is refused before it is compiled for
    self._windows, mesh = learning.windows, learning.mesh
    size = self._windows.buffer.batch_size if self._windows else 0
    if size % mesh.size:
      raise ValueError(f'batch_size {size} does not divide over {mesh.size} learner devices')
    self._client: service.Client | None = None
    self._publisher: service.Publisher | None = None
    self._feed: Feed | None = None
    self._publish_seconds = PUBLISH_SECONDS if self._windows else UNROLLS_PUBLISH_SECONDS
    self._version, self._published_at = -1, 0.0
    self._episodes = Totals()
    self._reminded = -math.inf
    self._waited = False  # for the first experience, which was logged
    self._lags: list[np.ndarray] = []  # of unrolls, in updates, since the log was last read
    self._taken = 0  # batches of the update at hand
    self._give_up: Callable[[], bool] = lambda: False

  def open(self) -> None:
    self._run = run_name(self._run_dir)
    # Acting processes may wait for the publisher, so it listens before the service is waited for.
    a = self._addresses
    self._publisher = service.Publisher(a.parameters, a.keys, a.insecure, a.peer_timeout)
    self._client = service.connect(a.replay, a.keys, a.insecure, timeout=None)
    # Here, where a signal ends the wait: a service may go away while it is asked for its tables.
    space, mesh, replay = self._spec.action_space, self._learning.mesh, self._learning.replay
    if isinstance(replay, Layout):
      table = replay_table(self._client, replay, space, self._run)
      self._source: Sampled | Queued = Sampled(table, replay.windows, mesh)
    else:
      example = self._learning.example
      table = unrolls_table(self._client, self._config.num_envs, example, space, self._run)
      self._source = Queued(table, example, mesh)
    self._episodes_table = episodes_table(self._client, self._run)

  def start(self, state: State, key: Array, statistics: dict[str, Any]) -> None:
    assert self._client is not None, 'start before open'  # which has made the tables
    self._episodes = Totals(**statistics.get('episodes', {}))
    update = int(jax.device_get(state.update))
    self._publish(update, state.train.params)
    self._count_steps(update)
    self._feed = Feed(self._source, self._episodes_table)

  def publish(self, update: int, params: Any) -> None:
    """Publishes the parameters, if the last version is old enough."""
    if time.monotonic() > self._published_at + self._publish_seconds:
      with contextlib.suppress(ReplayFailed):  # the next `take` raises it
        self._publish(update, params)

  def _publish(self, update: int, params: Any, *more: tuple[str, np.ndarray]) -> None:
    assert self._publisher is not None
    text = np.frombuffer(json.dumps({**self._record, RUN: self._run}).encode(), np.uint8)
    self._version = max(self._version + 1, update)
    try:
      self._publisher.publish(self._version, [*to_leaves(params), (RECORD, text), *more])
    except RuntimeError as e:  # its thread has failed
      raise ReplayFailed(str(e)) from e
    self._published_at = time.monotonic()

  def _check(self) -> None:
    """Raises ReplayFailed if a thread has failed."""
    assert self._feed is not None and self._publisher is not None
    self._feed.check()
    if self._publisher.failure:
      raise ReplayFailed(self._publisher.failure)

  def _warn_if_alone(self) -> None:
    """Logs that no process acts, while there is nothing to learn from: at once, then now and then."""
    assert self._publisher is not None
    now = time.monotonic()
    if self._publisher.peers:
      self._reminded = -math.inf
    elif now - self._reminded > REMIND:
      self._reminded = now
      there = dataclasses.replace(self._addresses, parameters=self._publisher.address)
      log.warning(
        'no acting process is connected; waiting for experience of `%s`',
        act_command(self._config, there),
      )

  def take(self, update: int, give_up: Callable[[], bool]) -> Batch | None:
    def waits() -> bool:
      self._warn_if_alone()
      return give_up() or bool(self._publisher and self._publisher.failure)

    self._give_up = waits
    self._check()
    take = self._take_sample if self._windows else self._take_unrolls
    batch = take(update)
    if batch is None and not give_up():
      self._check()
    return batch

  def _take_sample(self, update: int) -> Batch | None:
    assert self._feed is not None and self._windows is not None
    w = self._windows
    self._count_steps(update)
    if update < w.ready:  # nothing is due, but the steps must have been made
      if not self._waited:
        self._waited = True
        log.info('waiting until the replay service has %d steps (min_size)', w.buffer.min_size)
      return Batch(None) if self._feed.begun(self._give_up) else None
    due = int(w.due(update - w.ready))
    if not due:
      return Batch(None)
    draw, i = self._feed.take(self._give_up), self._taken
    if draw is None:
      return None
    self._taken = (i + 1) % due
    return Batch(draw.data, draw.key, i, not self._taken)

  def _take_unrolls(self, update: int) -> Batch | None:
    assert self._feed is not None
    draw = self._feed.take(self._give_up)
    if draw is None:
      return None
    self._lags.append(np.maximum(update - draw.key, 0))  # below 0: of a life that was lost
    return Batch((draw.data,))

  def learned(self, batch: Batch, priority: Any) -> None:
    assert self._feed is not None
    if self._windows:
      self._feed.update(batch.key, priority, self._give_up)

  def _count_steps(self, update: int) -> None:
    """Sets how many steps of the environments there are with the update at hand."""
    if isinstance(self._source, Sampled) and (w := self._windows):
      learned = max(update, w.ready)  # no batch is of less
      self._source.steps = (learned + 1) * w.num_envs * w.unroll_length

  def read(self) -> tuple[Totals, dict[str, Any]]:
    assert self._feed is not None and self._publisher is not None
    episodes, self._episodes = self._episodes + self._feed.episodes(), Totals()
    lags, self._lags = np.concatenate([np.zeros(0), *self._lags]), []
    lag = {'policy_lag_mean': lags.mean(), 'policy_lag_max': lags.max()} if len(lags) else {}
    return episodes, {
      'acting_processes': len(self._publisher.peers),
      **{k: float(x) for k, x in lag.items()},
      **self._feed.metrics(),
    }

  def statistics(self) -> dict[str, Any]:
    if self._feed is not None:
      self._episodes += self._feed.episodes()
    return {'episodes': dataclasses.asdict(self._episodes)}

  def save(self, path: Path) -> Extra | None:
    return None  # the service has checkpoints of its own

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    pass

  def finished(self, state: State) -> None:
    """Publishes that the run is complete, and waits for the acting processes to leave."""
    update = int(jax.device_get(state.update))
    self._publish(update, state.train.params, (FINISHED, np.ones(1, np.uint8)))
    assert self._publisher is not None
    end = time.monotonic() + GOODBYE_SECONDS
    while self._publisher.peers and time.monotonic() < end:
      time.sleep(POLL)

  def close(self) -> None:
    if self._feed:
      self._feed.close()
    if self._client:
      self._client.close()
    if self._publisher:
      self._publisher.close()


# --- an acting process ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
  """What `podrace act` is asked for, besides the run's config."""

  addresses: Addresses
  share: tuple[int, int] = (0, 1)  # which of how many equal parts of all environments
  max_staleness: float = 60.0  # seconds that parameters may be out of date
  give_up: float = 0.0  # seconds without a learner, after them, until it ends; 0: never

  def __post_init__(self) -> None:
    i, n = self.share
    if n < 1:
      raise UsageError(f'--share {i}/{n}: of {n} parts there is none; the whole is 0/1')
    if not 0 <= i < n:
      raise UsageError(f'--share {i}/{n}: the parts of {n} are 0/{n} to {n - 1}/{n}')
    if not 0 < self.max_staleness < math.inf:
      raise UsageError(f'--max-staleness must be more than 0, not {self.max_staleness}')
    if not 0 <= self.give_up < math.inf:
      raise UsageError(f'--give-up-after must be 0 or more, not {self.give_up}')


class _Signalled(BaseException):
  """Ends whatever is waited for."""


class _Finished(Exception):
  """The run is complete."""


def check_options(config: Config, args: list[str]) -> None:
  """Raises UsageError for options of `train` in `args` that an acting process would not heed."""
  fields = {f.name for f in dataclasses.fields(Config)}
  given = [a.partition('=')[0].removeprefix('--').replace('-', '_') for a in args if a[:2] == '--']
  for name in given:
    if name in ACTING:
      if (value := getattr(config, name)) != ACTING[name]:
        raise UsageError(
          f'--{name} {value}: podrace act always has --{name} {ACTING[name]}; leave it out'
        )
    elif name == 'max_lag' and hasattr(config.agent, 'memory'):
      raise UsageError(
        f'--max-lag: {agent_name(config.agent)} learns from replay, where --max-staleness bounds the lag; leave it out'
      )
    elif name in fields and name not in HEEDED:
      raise UsageError(
        f'--{flag(name)} is for podrace train only: nothing of podrace act depends on it; leave it out'
      )


def act(config: Config, options: Options) -> int:
  """`podrace act`: acts until the run is complete, a signal comes or it gives up; the exit code.

  Raises:
    UsageError: if the config can't be; if the learner's run is another one: both sides are named.
    RunError: if a thread or its environments fail.
  """
  config = dataclasses.replace(config, **ACTING)  # type: ignore[arg-type]  # whatever the preset is for
  validate(config)
  a = options.addresses
  security.check_address(a.parameters, a.keys, a.insecure, '--params')
  for address in a.replay:
    security.check_address(address, a.keys, a.insecure, '--connect-replay')
  n = options.share[1]
  if config.num_envs % n:
    raise UsageError(f'--num-envs {config.num_envs} does not divide into {n} shares')
  found = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal found
    if not found:
      found = signum
      raise _Signalled

  with contextlib.suppress(_Signalled), on_signals(on_signal):
    try:
      _Acting(config, options).run()
    except _Finished:
      log.info('the run is complete')
    except TimeoutError as e:
      log.error('giving up: %s', e)
      return 1
    except ActorFailed as e:
      raise RunError(f'{config.env}: {e}') from e
  return 128 + found if found else 0


class _Acting:
  """One acting process."""

  def __init__(self, config: Config, options: Options) -> None:
    a = options.addresses
    i, n = options.share
    spec = host.make(config.env)
    agent = bind_run(config, spec)
    devices = split_devices(config.actor_devices or '0', config.actor_devices or '0', None).actors
    windows = memory(agent, spec, config).windows
    self._program = ActingProgram(
      agent=agent,
      spec=spec,
      devices=devices,
      destinations=devices[:1],  # whence they are written
      num_envs=config.num_envs // n,
      unroll_length=config.unroll_length,
      threads=config.actor_threads,
      lag='async',
      # In versions. With replay it is bounded in seconds.
      max_lag=2**30 if windows else config.max_lag,
      batch_size=config.env_batch_size,
      env_threads=config.env_threads,
      deadline=config.env_deadline,
      seed=int.from_bytes(os.urandom(4), 'little'),
      first_thread=i * config.actor_threads * len(devices),
    )
    self._example = example_trajectory(agent, spec, config.num_envs // n, config.unroll_length)
    self._layout = Layout(windows, self._example) if windows else None
    self._record, self._max_staleness = record(config), options.max_staleness
    self._give_up = options.give_up or None
    log.info('waiting for parameters of %s', a.parameters)
    self._reader = service.Parameters(a.parameters, a.keys, a.insecure, options.max_staleness)
    self._addresses = a
    self._num_envs = config.num_envs  # of all acting processes
    self._run = ''  # the name of the learner's, once it is known
    self._held = -1  # version of the parameters that are acted with
    self._versions: dict[int, int] = {}  # the learner's, of those that the actors count
    self._ended: BaseException | None = None  # why there is no more to be written

  def run(self) -> None:
    with contextlib.ExitStack() as stack:
      stack.callback(self._reader.close)
      params = self._parameters(self._reader.get(self._give_up))
      a, program = self._addresses, self._program
      log.info('connecting to the replay service at %s', ', '.join(a.replay))
      client = service.connect(a.replay, a.keys, a.insecure, timeout=self._give_up)
      stack.callback(client.close)
      write = self._windows(client, self._layout) if self._layout else self._unrolls(client)
      program.warm_up()
      actors = self._start(params)
      stack.callback(actors.close)
      threading.Thread(target=self._watch, args=(actors, client), daemon=True).start()
      log.info('acting in %d environments', program.num_envs)
      try:
        self._write(actors, write, _Teller(client, self._run))
      except tables.Closed as e:
        raise self._ended or e from None

  def _windows(self, client: service.Client, layout: Layout) -> Callable[[Unroll], None]:
    """Writes unrolls as windows, for agents with replay."""
    w = layout.windows
    in_flight = 2 * max(1, w.unroll_length // w.period)  # else old windows would queue up
    table = replay_table(client, layout, self._program.spec.action_space, self._run)
    streams = Streams(
      layout, table,
      lambda history: client.writer(history, max_in_flight=in_flight),
    )  # fmt: skip

    def write(unroll: Unroll) -> None:
      for part in unroll.parts:
        streams.add(part, unroll.serial)

    return write

  def _unrolls(self, client: service.Client) -> Callable[[Unroll], None]:
    """Writes unrolls as they are, an item for each environment, and waits until they are in the queue."""
    example, space = self._example, self._program.spec.action_space
    table = unrolls_table(client, self._num_envs, example, space, self._run)
    writer = client.writer(1)
    source, number = np.int64(int.from_bytes(os.urandom(7), 'little')), 0

    def write(unroll: Unroll) -> None:
      nonlocal number
      known = self._versions
      version = np.int64(known.get(unroll.version, min(known.values())))  # or older
      for part in unroll.parts:
        columns = named(jax.tree.map(np.asarray, part))
        for b in range(len(columns['env_id'])):
          row = {k: x[:, b] if _timed(k) else x[b, ...] for k, x in columns.items()}
          writer.append(row | dict(source=source, number=np.int64(number), version=version))
          writer.create_item(table, 1.0, {k: c[-1] for k, c in writer.history.items()})
          number += 1
      writer.flush()

    return write

  def _start(self, params: Any) -> Actors:
    key, actor_key = jax.random.split(jax.random.key(self._program.seed))
    self._versions[0] = self._held
    return Actors(self._program, {0: params}, key, actor_key)

  def _write(self, actors: Actors, write: Callable[[Unroll], None], teller: _Teller) -> None:
    """Writes what is acted, until `_watch` closes what it is written to."""
    while True:
      if self._ended is not None:
        raise self._ended
      self._reader.get()  # waits while what is held is too old to act with
      for unroll in actors.take(0, self._is_stale) or ():
        write(unroll)
        teller.add(unroll.totals)

  def _is_stale(self) -> bool:
    return self._ended is not None or self._reader.staleness > self._max_staleness

  def _watch(self, actors: Actors, client: service.Client) -> None:
    """Has the actors act with each new version."""
    try:
      version = 0
      while True:
        found = self._reader.get(self._give_up)
        if found.version != self._held:
          version += 1
          params = self._parameters(found)
          self._versions[version] = found.version
          self._versions.pop(version - VERSIONS, None)
          actors.publish(version, params)
        with self._reader.changed:
          if self._reader.version == self._held:
            self._reader.changed.wait(1.0)
    except BaseException as e:
      self._ended = e
    finally:
      try:
        client.close()
      finally:
        self._reader.close()

  def _parameters(self, found: service.Published) -> Any:
    """Those of a version, on a device.

    Raises:
      UsageError: if they are of another run.
      _Finished: if the run is complete.
    """
    leaves = dict(found.leaves)
    told = json.loads(leaves.pop(RECORD).tobytes()) if RECORD in leaves else {}
    run = told.pop(RUN, '')
    if different := other_run(told, self._record):
      raise UsageError('\n  '.join(['the learner has another run:', *different]))
    if self._run not in ('', run):
      raise UsageError(
        f'the learner at {self._addresses.parameters} has run {plain(run)!r} now, this process acts for run '
        f'{self._run!r}: start it again to act for the other'
      )
    self._run = run
    if leaves.pop(FINISHED, None) is not None:
      raise _Finished
    self._held = found.version
    shapes = jax.eval_shape(lambda key: self._program.agent.init(key).params, jax.random.key(0))
    return jax.tree.map(jax.numpy.asarray, from_leaves(shapes, leaves))


class _Teller:
  """Tells the learner of finished episodes, through a table of their own."""

  def __init__(self, client: service.Client, run: str) -> None:
    self._table, self._writer = episodes_table(client, run), client.writer(1)

  def add(self, totals: Totals) -> None:
    if totals.count:
      self._writer.append({'totals': np.array(dataclasses.astuple(totals), np.float64)})
      self._writer.create_item(self._table, 1.0, num_steps=1)
