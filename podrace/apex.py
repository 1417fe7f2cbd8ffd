"""Acting, replay and learning, each in processes of its own: the arrangement of Ape-X.

Horgan et al. 2018 (arXiv 1803.00933), as IMPALA's and R2D2's actors. Acting processes (`podrace act`) have
environments and their own inference; they write windows to a replay service (`podrace replay`) and read the
parameters that the learner (`podrace train ... --replay service`) publishes. The learner samples, learns and
sets priorities. Everybody may come, go and come back; who lacks another waits, and says for whom.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import service, tables
from podrace.config import Config, UsageError, bind, differences, to_json
from podrace.envs.host import base as host
from podrace.envs.host.base import Totals
from podrace.replay.hosted import TABLE, Draw, ReplayFailed, Streams, selector, weighted
from podrace.replay.windows import Windows
from podrace.run import memory
from podrace.sebulba import Actors, Sebulba, State
from podrace.topology import AXIS, Topology, split_devices
from podrace.types import Array, TrainState

EPISODES = 'episodes'  # the table through which acting processes tell of theirs
PREFETCH = 2  # batches that are asked for, and that are unpacked, ahead of time
PUBLISH_SECONDS = 0.25  # between versions of the parameters
GOODBYE_SECONDS = 5.0  # for acting processes to see that the run is complete
POLL = 0.1  # seconds between looks at whether a wait has lost its sense
RECORD, FINISHED = '.run', '.finished'  # what is published besides parameters
COMMON = ('agent', 'env', 'num_envs', 'unroll_length')  # what the two sides must agree on


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Where the others are."""

  replay: tuple[str, ...]  # of the service, or of its shards
  parameters: str  # where the learner publishes them
  keys: Path | None = None
  insecure: bool = False


# --- what both sides know ---------------------------------------------------------------------------


def replay_table(client: service.Client, w: Windows) -> Any:
  """The table of windows, made if there is none.

  Its limiter keeps `samples_per_insert` to within a few updates' windows.
  """
  b = w.buffer
  per_window = b.samples_per_insert * w.period
  least = max(1, b.min_size // w.period)
  error = 4.0 * b.batch_size + 4 * max(1.0, per_window) * w.num_envs * w.unroll_length / w.period
  return client.table(
    TABLE,
    sampler=selector(w),
    remover=tables.fifo(),
    rate_limiter=tables.sample_to_insert_ratio(per_window, least, error),
    max_size=-(-b.capacity // w.period),
  )


def episodes_table(client: service.Client) -> Any:
  """The table of finished episodes; the oldest go if nobody reads them."""
  return client.table(
    EPISODES,
    sampler=tables.fifo(),
    remover=tables.fifo(),
    rate_limiter=tables.min_size(1),
    max_size=10_000,
    max_times_sampled=1,
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


# --- the learner ------------------------------------------------------------------------------------


class Feed:
  """Batches for the learner, and priorities from it, by threads of their own."""

  def __init__(self, client: service.Client, w: Windows, mesh: Mesh, steps: int) -> None:
    self._windows, self._sharding = w, NamedSharding(mesh, P(AXIS))
    self._table, self._episodes = replay_table(client, w), episodes_table(client)
    self._drawn: queue.Queue[Draw] = queue.Queue(PREFETCH)
    self._learned: queue.Queue[tuple[np.ndarray, Array]] = queue.Queue(PREFETCH)
    self._lock = threading.Lock()
    self._totals = Totals()
    self._samples = 0
    self.steps = steps  # of the environments, up to the update at hand
    self._failure: str | None = None
    self._closed = False
    self._threads = [
      threading.Thread(target=self._main, args=(work,), name=work.__name__, daemon=True)
      for work in (self._sample, self._prioritise, self._listen)
    ]
    for thread in self._threads:
      thread.start()

  def take(self, give_up: Callable[[], bool]) -> Draw | None:
    """The next batch; None if `give_up` says so before."""
    while True:
      try:
        return self._drawn.get(timeout=POLL)
      except queue.Empty:
        self._look()
      if give_up():
        return None

  def update(self, key: np.ndarray, priority: Array, give_up: Callable[[], bool]) -> None:
    """New priorities [n], which may still be being computed; none are set if `give_up` says so."""
    while self._windows.prioritised:
      self._look()
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
    return {'replay_windows': self._table.size_last_told, 'replay_samples': self._samples}

  def close(self) -> None:
    """Has the threads end with the client, which is closed next."""
    self._closed = True

  def _look(self) -> None:
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
    with self._table.sampler(self._windows.buffer.batch_size, PREFETCH) as batches:
      while not self._closed:
        samples = next(batches)
        data = jax.device_put(weighted(samples, self._windows, self.steps), self._sharding)
        found = Draw(samples.key, data)
        self._samples += len(samples.key)
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


class Apart:
  """The learner's part of a run whose acting and replay are elsewhere; an `Architecture`.

  The `update`-th update has the samples that `samples_per_insert` makes of its steps: the service's limiter
  sees to it that as many steps have been made.
  """

  def __init__(self, program: Sebulba, addresses: Addresses, config: Config) -> None:
    self._program, self._addresses, self._record = program, addresses, record(config)
    self.mesh, self.shapes, self.init = program.mesh, program.shapes, program.init
    size = program.replay.windows.buffer.batch_size
    if size % self.mesh.size:
      raise ValueError(f'batch_size {size} does not divide over {self.mesh.size} learner devices')
    self._client: service.Client | None = None
    self._publisher: service.Publisher | None = None
    self._feed: Feed | None = None
    self._version, self._published_at = -1, 0.0
    self._episodes = Totals()

  def compile(self) -> None:
    p, s = self._program, self.shapes
    given = (s.train.params, s.train.rest, s.log, s.key, s.update, s.update, p.batch)
    self._learn = p.learn_sample.lower(*given).compile()
    # What listens is there before the others are waited for, as they may wait for it.
    a = self._addresses
    self._publisher = service.Publisher(a.parameters, a.keys, a.insecure)
    self._client = service.connect(a.replay, a.keys, a.insecure, timeout=None)

  def start(self, state: State, keys: Array, told: dict[str, Any]) -> None:
    assert self._client is not None, 'start before compile'
    self._update = int(jax.device_get(state.update))
    self._episodes = Totals(**told.get('episodes', {}))
    self._publish(state.train.params)
    self._feed = Feed(self._client, self._program.replay.windows, self.mesh, self._steps())

  def _publish(self, params: Any, *more: tuple[str, np.ndarray]) -> None:
    assert self._publisher is not None
    text = np.frombuffer(json.dumps(self._record).encode(), np.uint8)
    self._version = max(self._version + 1, self._update)
    self._publisher.publish(self._version, [*to_leaves(params), (RECORD, text), *more])
    self._published_at = time.monotonic()

  def advance(self, state: State, updates: int, give_up: Callable[[], bool]) -> tuple[State, int]:
    for done in range(updates):
      state, whole = self._one(state, give_up)
      if not whole:
        return jax.block_until_ready(state), done
      if time.monotonic() > self._published_at + PUBLISH_SECONDS:
        self._publish(state.train.params)
    return jax.block_until_ready(state), updates

  def _one(self, state: State, give_up: Callable[[], bool]) -> tuple[State, bool]:
    """An update, or the part of one until `give_up`."""
    assert self._feed is not None
    train, log = state.train, state.log
    w: Windows = self._program.replay.windows
    self._feed.steps = self._steps()
    for i in range(w.due(self._update - w.ready) if self._update >= w.ready else 0):
      batch = self._feed.take(give_up)
      if batch is None:
        return state._replace(train=train, log=log), False
      train, log, priority = self._learn(
        train.params, train.rest, log, state.key, state.update, self._placed(i), batch.data
      )
      self._feed.update(batch.key, priority, give_up)
    self._update += 1
    return state._replace(train=train, log=log, update=self._placed(self._update)), True

  def _steps(self) -> int:
    """Of the environments, up to the update at hand."""
    w: Windows = self._program.replay.windows
    return (self._update + 1) * w.num_envs * w.unroll_length

  def _placed(self, number: int) -> Array:
    return jax.device_put(np.int32(number), self._program.shardings.update)

  def read_log(self, state: State) -> tuple[dict[str, Any], State]:
    assert self._feed is not None and self._publisher is not None
    seen = jax.device_get(state.log)
    e, self._episodes = self._episodes + self._feed.episodes(), Totals()
    summary = dict(
      metrics={k: x / seen.count if seen.count else np.nan for k, x in seen.sums.items()},
      episodes=e.count,
      return_sum=e.return_sum,
      return_square=e.return_square,
      length_sum=e.length_sum,
      host={'acting_processes': len(self._publisher.peers), **self._feed.metrics()},
    )
    zero = jax.tree.map(np.zeros_like, seen)._replace(broken=seen.broken)
    return summary, state._replace(log=jax.device_put(zero, self._program.shardings.log))

  def health(self, state: State) -> tuple[Any, Any]:
    return jax.device_get(self._program.health(state))

  def told(self) -> dict[str, Any]:
    if self._feed is not None:
      self._episodes += self._feed.episodes()
    return {'episodes': dataclasses.asdict(self._episodes)}

  def save(self, path: Path) -> dict[str, Any] | None:
    return None  # the service has checkpoints of its own

  def restore(self, path: Path, told: dict[str, Any] | None) -> None:
    pass

  def finished(self, state: State) -> None:
    """Tells acting processes that the run is complete, and waits for them to leave."""
    self._publish(state.train.params, (FINISHED, np.ones(1, np.uint8)))
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
    if not 0 <= i < n:
      raise UsageError(f'--share {i}/{n}: the parts of {n} are 0/{n} to {n - 1}/{n}')
    if not self.max_staleness > 0:
      raise UsageError(f'--max-staleness must be more than 0, not {self.max_staleness}')
    if self.give_up < 0:
      raise UsageError(f'--give-up-after must be 0 or more, not {self.give_up}')


class _Signalled(BaseException):
  """Ends whatever is waited for."""


class _Finished(Exception):
  """The run is complete."""


def act(config: Config, options: Options) -> int:
  """`podrace act`: acts until the run is complete, a signal comes or it gives up; the exit code.

  Raises:
    UsageError: if the learner's run is another one; both sides are named.
    ActorFailed: if a thread or its environments fail.
  """
  n = options.share[1]
  if config.num_envs % n:
    raise UsageError(f'--num-envs {config.num_envs} does not divide into {n} shares')
  found = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal found
    if not found:
      found = signum
      raise _Signalled

  for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, on_signal)
  with contextlib.suppress(_Signalled):
    try:
      _Acting(config, options).run()
    except _Finished:
      say('the run is complete')
    except TimeoutError as e:
      say(f'giving up: {e}')
      return 1
  return 128 + found if found else 0


def say(message: str) -> None:
  """To whoever started it."""
  print(f'podrace act: {message}', file=sys.stderr, flush=True)


class _Acting:
  """One acting process."""

  def __init__(self, config: Config, options: Options) -> None:
    a = options.addresses
    i, n = options.share
    spec = host.make(config.env)
    agent = bind(config.agent, spec, config.total_updates, config.num_envs)
    one = split_devices(config.actor_devices or '0', config.actor_devices or '0', None)
    device = one.actors[0]
    self._program = Sebulba(
      agent=agent,
      spec=spec,
      replay=memory(agent, spec, config),
      topology=Topology(one.actors, Mesh(np.array([device]), (AXIS,))),
      num_envs=config.num_envs // n,
      unroll_length=config.unroll_length,
      threads=config.actor_threads,
      lag='async',
      max_lag=2**30,  # in versions; it is bounded in seconds
      batch_size=config.env_batch_size,
      env_threads=config.env_threads,
      deadline=config.env_deadline,
      seed=int.from_bytes(os.urandom(4), 'little'),
      hosted=True,
      first_thread=i * config.actor_threads * len(one.actors),
    )
    self._record, self._max_staleness = record(config), options.max_staleness
    self._give_up = options.give_up or None
    say(f'waiting for parameters of {a.parameters}')
    self._reader = service.Parameters(a.parameters, a.keys, a.insecure, options.max_staleness)
    self._addresses = a
    self._held = -1  # version of the parameters that are acted with
    self._ended: BaseException | None = None  # why there is no more to be written

  def run(self) -> None:
    with contextlib.ExitStack() as stack:
      stack.callback(self._reader.close)
      params = self._parameters(self._reader.get(self._give_up))
      a, program = self._addresses, self._program
      say(f'connecting to the replay service at {", ".join(a.replay)}')
      client = service.connect(a.replay, a.keys, a.insecure, timeout=self._give_up)
      stack.callback(client.close)
      w = program.layout.windows
      in_flight = 2 * max(1, w.unroll_length // w.period)  # else old windows would queue up
      streams = Streams(
        program.layout, replay_table(client, w),
        lambda history: client.writer(history, max_in_flight=in_flight),
      )  # fmt: skip
      program.warm_up()
      actors = self._start(params)
      stack.callback(actors.close)
      threading.Thread(target=self._watch, args=(actors, client), daemon=True).start()
      say(f'acting in {program.num_envs} environments')
      try:
        self._write(actors, streams, _Teller(client))
      except tables.Closed as e:
        raise self._ended or e from None

  def _start(self, params: Any) -> Actors:
    key, actor_key = jax.random.split(jax.random.key(self._program.seed))
    nothing: Any = ()
    state = State(TrainState(params, ()), nothing, nothing, key, jax.numpy.int32(0), nothing, ())
    return Actors(self._program, state, actor_key)

  def _write(self, actors: Actors, streams: Streams, teller: _Teller) -> None:
    """Writes what is acted, until `_watch` closes what it is written to."""
    while True:
      self._reader.get()  # waits while what is held is too old to act with
      for unroll in actors.take(0, self._is_stale) or ():
        for part in unroll.parts:
          streams.add(part, unroll.serial)
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
          actors.publish(version, self._parameters(found))
        with self._reader.changed:
          if self._reader.version == self._held:
            self._reader.changed.wait(1.0)
    except BaseException as e:
      self._ended = e
    finally:
      client.close()
      self._reader.close()

  def _parameters(self, found: service.Published) -> Any:
    """Those of a version, on a device.

    Raises:
      UsageError: if they are of another run.
      _Finished: if the run is complete.
    """
    leaves = dict(found.leaves)
    told = json.loads(leaves.pop(RECORD).tobytes()) if RECORD in leaves else {}
    if different := differences(told, self._record):
      raise UsageError(
        'the learner has another run (its setting -> the one here):\n  ' + '\n  '.join(different)
      )
    if leaves.pop(FINISHED, None) is not None:
      raise _Finished
    self._held = found.version
    shapes = jax.eval_shape(lambda key: self._program.agent.init(key).params, jax.random.key(0))
    return jax.tree.map(jax.numpy.asarray, from_leaves(shapes, leaves))


class _Teller:
  """Tells the learner of finished episodes, through a table of their own."""

  def __init__(self, client: service.Client) -> None:
    self._table, self._writer = episodes_table(client), client.writer(1)

  def add(self, totals: Totals) -> None:
    if totals.count:
      self._writer.append({'totals': np.array(dataclasses.astuple(totals), np.float64)})
      self._writer.create_item(self._table, 1.0, num_steps=1)
