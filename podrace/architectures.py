"""What a run needs of an architecture: the same functions, for each of the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from podrace import anakin, sebulba, tables
from podrace.check import check_faults
from podrace.checkpoint import CheckpointError, Extra
from podrace.envs.host.base import Totals
from podrace.replay.host import HostReplay, ReplayFailed
from podrace.replay.windows import Windows
from podrace.sebulba import Actors, Learner, Snapshot
from podrace.types import Array


class Architecture(Protocol):
  """One agent in one kind of environment, ready to run. Its states have `train` and `update`."""

  @property
  def mesh(self) -> Any: ...
  @property
  def shapes(self) -> Any:
    """A state of shapes, dtypes and shardings: what a checkpoint holds."""
    ...

  @property
  def ready(self) -> int:
    """The first update that learns, where a call can't be ended when that makes updates dear."""
    ...

  @property
  def windows(self) -> Windows | None:
    """The sizes of its replay, wherever that is; None if it is that of the newest trajectory."""
    ...

  def compile(self) -> None: ...
  def init(self, keys: Array) -> Any: ...

  def start(self, state: Any, keys: Array, statistics: dict[str, Any]) -> None:
    """Begins acting from `state`; `statistics` is what `statistics()` gave when the state was saved."""
    ...

  def advance(self, state: Any, updates: int, give_up: Callable[[], bool]) -> tuple[Any, int]:
    """The state after so many updates, or after those that were made until `give_up`."""
    ...

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    """What there is to tell since the last time (see `Anakin.read_log`), and the state after."""
    ...

  def health(self, state: Any) -> tuple[Any, Any]:
    """The first update whose loss was not finite or -1; whether all parameters are finite."""
    ...

  def statistics(self) -> dict[str, Any]:
    """What of the log is kept on the host, for a checkpoint's meta."""
    ...

  def save(self, path: Path) -> Extra | None:
    """Takes a snapshot of what there is besides the state; what writes it to a new directory.

    None if there is nothing. The function may be called in another thread while the run goes on.
    It returns what `restore` wants, and raises CheckpointError if it can't write.
    """
    ...

  def finished(self, state: Any) -> None:
    """The run is complete; whoever takes part in it elsewhere may know."""
    ...

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    """Reads what `save` wrote, before `start`; raises CheckpointError if it is damaged."""
    ...

  def close(self) -> None: ...


class OnDevice:
  """Anakin: all of it is in the compiled program."""

  def __init__(self, program: anakin.Anakin) -> None:
    self._program = program
    self.mesh, self.shapes, self.init = program.mesh, program.shapes, program.init
    self.windows = program.replay.windows
    self.ready = self.windows.ready if self.windows else 0

  def compile(self) -> None:
    one = jax.ShapeDtypeStruct((), jnp.int32)
    self._run = self._program.run.lower(self.shapes, one).compile()
    self._read_log = self._program.read_log.lower(self.shapes).compile()
    self._health = self._program.health.lower(self.shapes).compile()

  def start(self, state: Any, keys: Array, statistics: dict[str, Any]) -> None:
    pass

  def advance(self, state: Any, updates: int, give_up: Callable[[], bool]) -> tuple[Any, int]:
    return jax.block_until_ready(self._run(state, np.int32(updates))), updates

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    summary, state = self._read_log(state)
    return jax.device_get(summary), state

  def health(self, state: Any) -> tuple[Any, Any]:
    broken, finite, counts = jax.device_get(self._health(state))
    check_faults(counts, self._program.agent, self._program.env)
    return broken, finite

  def statistics(self) -> dict[str, Any]:
    return {}

  def save(self, path: Path) -> Extra | None:
    return None

  def finished(self, state: Any) -> None:
    pass

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    pass

  def close(self) -> None:
    pass


@dataclasses.dataclass
class Told:
  """What happened on the host since the log was last read; sums, as JSON has them."""

  episodes: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(Totals()))
  unrolls: int = 0
  lag_sum: float = 0.0  # of the unrolls' means
  lag_max: int = 0
  restarts: int = 0
  dropped: int = 0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by 'WHAT THREAD'

  def add(self, unroll: sebulba.Unroll, update: int) -> None:
    self.episodes = dataclasses.asdict(Totals(**self.episodes) + unroll.totals)
    self.unrolls += 1
    self.lag_sum += update - float(unroll.versions.mean())
    self.lag_max = max(self.lag_max, update - unroll.version)
    self.restarts += unroll.restarts
    self.dropped += unroll.dropped
    for what, seconds in unroll.seconds.items():
      key = f'{what} {unroll.thread}'
      self.seconds[key] = self.seconds.get(key, 0.0) + seconds

  def shares(self, thread: int | None = None) -> dict[str, float]:
    """Where the time of an actor thread went, or of all; as the log names it."""
    found: dict[str, float] = {}
    for key, seconds in sorted(self.seconds.items()):
      what, _, of = key.partition(' ')
      if thread is None or of == str(thread):
        found[f'actor_{what}'] = found.get(f'actor_{what}', 0.0) + seconds
    whole = sum(found.values()) or 1.0
    return {k: round(x / whole, 4) for k, x in found.items()}

  def over_processes(self) -> Told:
    """The sum over all processes, which must all ask at the same time."""
    if jax.process_count() == 1:
      return self
    whole = [self.unrolls, self.lag_sum, self.restarts, self.dropped]
    numbers = np.array([*self.episodes.values(), *whole, self.lag_max], np.float64)
    # as bytes, since JAX has no doubles
    every = np.asarray(multihost_utils.process_allgather(numbers.view(np.uint8))).view(np.float64)
    sums, most = every.sum(0), int(every[:, -1].max())
    unrolls, restarts, dropped = (int(x) for x in sums[[-5, -3, -2]])
    totals = Totals(int(sums[0]), float(sums[1]), float(sums[2]), int(sums[3]))
    episodes = dataclasses.asdict(totals)
    return Told(episodes, unrolls, float(sums[-4]), most, restarts, dropped, self.seconds)


class OnHost:
  """Sebulba: actor threads beside the learner, which is the thread that calls `advance`."""

  def __init__(self, program: sebulba.Sebulba) -> None:
    self._program = program
    self.mesh, self.shapes, self.init = program.mesh, program.shapes, program.init
    self.windows = program.replay.windows
    self.ready = 0  # `advance` looks up after each update
    self.learner = Learner(program)
    self.health = self.learner.health
    self._told = Told()
    self._actors: Actors | None = None
    self._hosted = HostReplay(program.layout, self.mesh, program.seed) if program.hosted else None

  def compile(self) -> None:
    example = self._program.warm_up()
    self.learner.compile(self._program.batch if self._program.hosted else example)

  def start(self, state: sebulba.State, keys: Array, statistics: dict[str, Any]) -> None:
    self._told = (
      Told(**statistics) if jax.process_index() == 0 else Told()
    )  # it is all processes' sum
    actor_key = jax.random.split(keys[0], 3)[1]
    if self._hosted:
      self._hosted.start()
    self._actors = Actors(self._program, state, actor_key)
    self._update = int(jax.device_get(state.update))

  def advance(
    self, state: sebulba.State, updates: int, give_up: Callable[[], bool]
  ) -> tuple[sebulba.State, int]:
    assert self._actors, 'advance before start'
    alone = jax.process_count() == 1  # several processes must do the same
    for done in range(updates):
      try:
        unrolls = self._actors.take(self._update, give_up if alone else lambda: False)
      except sebulba.ActorFailed:
        if not done or not alone:  # the others make the whole call, and are not left in the middle
          raise
        unrolls = None  # the next call will raise it again; what was learned can be saved before
      if unrolls is None:
        return jax.block_until_ready(state), done
      state = self._one(state, unrolls)
    return jax.block_until_ready(state), updates

  def _one(self, state: sebulba.State, unrolls: list[sebulba.Unroll]) -> sebulba.State:
    assert self._actors
    before = state.train.params
    if self._hosted:
      state = self._learn_from(self._hosted, state, unrolls)
    else:
      state = self.learner.learn(state, self._program.join(unrolls))
    for unroll in unrolls:
      self._told.add(unroll, self._update)
    self._update += 1
    if self._program.lag == 'async':  # until it is computed, actors go on with the one before
      jax.block_until_ready(state.train.params)
    self._actors.publish(self._update, state.train.params)
    snapshots: tuple[Snapshot, ...] = ()
    if self._program.saves_actors:
      snapshots = tuple(u.snapshot for u in unrolls if u.snapshot is not None)
    previous = before if self._program.lag == '1' else ()
    return state._replace(previous=previous, actors=snapshots)

  def _learn_from(
    self, hosted: HostReplay, state: sebulba.State, unrolls: list[sebulba.Unroll]
  ) -> sebulba.State:
    """One update where replay is on the host."""
    for unroll in unrolls:
      hosted.add(unroll.parts, unroll.serial)
    for i, draw in enumerate(hosted.samples(hosted.times(self._update))):
      state, priority = self.learner.learn_sample(state, i, draw.data)
      hosted.update(draw.key, priority)
    return self.learner.end_update(state, self._update + 1)

  def read_log(self, state: sebulba.State) -> tuple[dict[str, Any], sebulba.State]:
    told, self._told = self._told.over_processes(), Told()
    host = {
      'policy_lag_mean': told.lag_sum / max(told.unrolls, 1),
      'policy_lag_max': told.lag_max,
      'env_restarts': told.restarts,
      'dropped_steps': told.dropped,
      **told.shares(),
      **(self._program.spec.metrics() if self._program.spec.metrics else {}),
      **(self._hosted.metrics() if self._hosted else {}),
    }
    return self.learner.read_log(state, Totals(**told.episodes), host)

  def shares_by_thread(self) -> list[dict[str, float]]:
    """Where the time of each actor thread went since the log was last read."""
    return [self._told.shares(i) for i in range(self._program.local_threads)]

  def statistics(self) -> dict[str, Any]:
    return dataclasses.asdict(self._told.over_processes())

  def save(self, path: Path) -> Extra | None:
    if self._hosted is None:
      return None
    try:
      write = self._hosted.save(path, self._program.saves_actors)
    except ReplayFailed as e:
      raise CheckpointError(f'replay could not be saved to {path}: {e}') from e

    def beside() -> dict[str, Any]:
      try:
        return write()
      except (tables.CheckpointError, OSError) as e:
        raise CheckpointError(f'replay could not be saved to {path}: {e}') from e

    return beside

  def finished(self, state: sebulba.State) -> None:
    if self._program.spec.finished:
      self._program.spec.finished()

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    if self._hosted is None:
      return
    if record is None:
      raise CheckpointError(f'checkpoint {path.name} is of a run with replay on the device')
    try:
      self._hosted.restore(path, record)
    except tables.CheckpointError as e:
      raise CheckpointError(str(e)) from e

  def close(self) -> None:
    if self._actors:
      self._actors.close()
    if self._hosted:
      self._hosted.close()
