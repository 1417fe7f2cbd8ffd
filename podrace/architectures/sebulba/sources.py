"""Sources of the learner's batches from actor threads of this process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from podrace.architectures.protocol import Part, SavedReplay, WriteExtra
from podrace.architectures.sebulba.acting import ActingProgram
from podrace.architectures.sebulba.actors import Actors
from podrace.architectures.sebulba.labels import LabelOrder
from podrace.architectures.sebulba.learning import Batch, State
from podrace.architectures.sebulba.pipe import Snapshot, Unroll
from podrace.architectures.sebulba.saved_actors import ActorState, SavedActors, part_of
from podrace.architectures.sebulba.statistics import Statistics
from podrace.envs.host.episodes import Totals
from podrace.errors import CheckpointError, ReplayFailed, UsageError
from podrace.replay.host import HostReplay
from podrace.replay.host_labels import HostLabels
from podrace.replay.layout import Layout
from podrace.system.files import make_folder, sync, write_json
from podrace.system.files.reading import read_json
from podrace.topology import data_size, model_size, split_along
from podrace.types import Array, Trajectory, map_batch

log = logging.getLogger('podrace')

Cancelled = Callable[[], bool]
PART = 'record.json'  # in the folder of one process, if there is more than one


class Source(Protocol):
  """The source of the learner's batches."""

  @property
  def snapshots(self) -> tuple[Snapshot, ...]:
    """The actors' snapshots in shapes and shardings; () if actors cannot be saved."""
    ...

  @property
  def parts(self) -> Mapping[str, Part]:
    """State on the host, as `Architecture.parts`."""
    ...

  @property
  def saved_replay(self) -> SavedReplay | None:
    """As `Architecture.saved_replay`."""
    ...

  def open(self) -> None:
    """Compile and connect: everything that takes long and needs no state."""
    ...

  def start(self, state: State, key: Array) -> None:
    """Begin at `state`."""
    ...

  def take(self, update: int, cancelled: Cancelled) -> Batch | None:
    """Return the next batch, in the update-th update; None if `cancelled()` becomes true.

    A source may return None also after a long wait at the beginning of an update.

    Raises:
      ActorFailed, ReplayFailed: if no batch will come, in each call from then on.
    """
    ...

  def learned(self, batch: Batch, priority: Any, params: Any) -> None:
    """Take new priorities and parameters after a batch was used, which may be being computed."""
    ...

  def read(self) -> tuple[Totals, dict[str, Any]]:
    """Return the episodes that ended since the last reading, and metrics."""
    ...

  def finish(self, state: State) -> None:
    """Tell the processes that take part in the run that it is complete."""
    ...

  def close(self) -> None:
    """Stop acting, and close connections."""
    ...


class ActorSource:
  """A `Source` of the unrolls of actor threads, as trajectories over the learner's mesh."""

  def __init__(self, acting: ActingProgram, mesh: Mesh) -> None:
    self.acting, self.snapshots = acting, acting.snapshots
    self.saved_actors = SavedActors(acting) if acting.keeps_states else None
    self.parts = {'statistics': Part(self._save_statistics, self._restore_statistics)}
    self._mesh = mesh
    self._statistics = Statistics()
    self._actors: Actors | None = None

  @property
  def saved_replay(self) -> SavedReplay | None:
    """The states of the actor threads, if a file keeps them."""
    return self.saved_actors

  def open(self) -> None:
    """Compile the actors' programs."""
    self.acting.warm_up()

  def _save_statistics(self) -> dict[str, Any]:
    return dataclasses.asdict(self._statistics.over_processes())

  def _restore_statistics(self, saved: dict[str, Any]) -> None:
    if jax.process_index() == 0:  # they are the sum over all processes
      known = {f.name for f in dataclasses.fields(Statistics)}  # of --replay service there are more
      self._statistics = Statistics(**{k: x for k, x in saved.items() if k in known})

  def start(self, state: State, key: Array) -> None:
    """Start the actor threads."""
    update = int(jax.device_get(state.update))
    versions = {update: state.train.params}
    if self.acting.lag == '1' and update > 0:
      versions[update - 1] = state.previous
    saved, life = self.saved_actors, 0
    snapshots: tuple[Snapshot | ActorState, ...] = state.actors
    if saved is not None and not snapshots:
      snapshots = saved.states
      life = saved.life = saved.life if snapshots else update
    if update > 0 and not snapshots:
      reason = f'--lag {self.acting.lag} keeps no state of them' if saved is None else saved.reason
      log.warning('%s: the environments begin anew: %s', self.acting.spec.name, reason)
    self._actors = Actors(self.acting, versions, state.key, key, snapshots, life)

  def publish(self, update: int, params: Any) -> None:
    """Give the actors the parameters after `update` updates."""
    assert self._actors, 'publish before start'
    if self.saved_actors is not None:
      self.saved_actors.end_update()
    if self.acting.lag == 'async':  # until then, actors go on with the version before
      jax.block_until_ready(params)
    self._actors.publish(update, params)

  def unrolls(self, update: int, cancelled: Cancelled) -> list[Unroll] | None:
    """Return this process's unrolls of the update; None if `cancelled()` becomes true."""
    assert self._actors, 'take before start'
    unrolls = self._actors.take(update, cancelled)
    for unroll in unrolls or ():
      self._statistics.add(unroll, update)
    if unrolls is not None and self.saved_actors is not None:
      self.saved_actors.take(unrolls)
    return unrolls

  def take(self, update: int, cancelled: Cancelled) -> Batch | None:
    """Return the next trajectories."""
    unrolls = self.unrolls(update, cancelled)
    if unrolls is None:
      return None
    return Batch(self._join(unrolls), snapshots=snapshots_of(unrolls))

  def _join(self, unrolls: list[Unroll]) -> tuple[Trajectory, ...]:
    """Join each unroll's parts, which are on the learner devices, to arrays over the mesh."""
    if self._mesh.size == 1:
      return tuple(u.parts[0] for u in unrolls)
    local = [d for d in self._mesh.devices.flat if d.process_index == jax.process_index()]
    model = model_size(self._mesh)

    def one(axis: int, *parts: Array) -> Array:
      shape = list(parts[0].shape)
      shape[axis] *= data_size(self._mesh)
      sharding = NamedSharding(self._mesh, split_along(axis))
      every = [
        part if d == part.device else jax.device_put(part, d)
        for i, part in enumerate(parts)
        for d in local[i * model : (i + 1) * model]
      ]
      return jax.make_array_from_single_device_arrays(tuple(shape), sharding, every)

    return tuple(map_batch(one, *u.parts) for u in unrolls)

  def learned(self, batch: Batch, priority: Any, params: Any) -> None:
    """Do nothing: trajectories have no priorities."""

  def read(self) -> tuple[Totals, dict[str, Any]]:
    """Return the episodes that ended since the last reading, and metrics."""
    statistics, self._statistics = self._statistics.over_processes(), Statistics()
    metrics = self.acting.env_metrics
    return Totals(**statistics.episodes), statistics.metrics() | (metrics() if metrics else {})

  def shares_by_thread(self) -> list[dict[str, float]]:
    """Return each actor thread's shares of time since the log was last read."""
    n, every = self.acting.groups, range(self.acting.local_groups)
    return [self._statistics.shares(every[i : i + n]) for i in every[::n]]

  def finish(self, state: State) -> None:
    """Tell remote environments that the run is complete."""
    if self.acting.spec.finished:
      self.acting.spec.finished()

  def close(self) -> None:
    """End the actor threads."""
    if self._actors:
      self._actors.close()


def snapshots_of(unrolls: list[Unroll]) -> tuple[Snapshot, ...]:
  """Return the snapshots of the groups that the learner's state keeps."""
  return tuple(u.snapshot for u in unrolls if isinstance(u.snapshot, Snapshot))


class HostReplaySource:
  """A `Source` of samples from replay on the host, which holds the unrolls of actor threads.

  It is also the `SavedReplay` of this replay, of which each process saves its own part.

  Args:
    actors: the actor threads.
    layout: columns of the trajectories.
    mesh: the learner's mesh.
    seed: seed of sampling.
    labels: computes the targets of the agent, if a stage does.
  """

  def __init__(
    self, actors: ActorSource, layout: Layout, mesh: Mesh, seed: int,
    labels: HostLabels | None = None,
  ) -> None:  # fmt: skip
    self._actors, self.snapshots = actors, actors.snapshots
    self.replay = HostReplay(layout, mesh, seed, labels)
    self._labels = LabelOrder(self.replay, actors.acting.lag == '0') if labels else None
    self.parts, self.open, self.finish = actors.parts, actors.open, actors.finish
    self.saved_replay = self
    self._batches: Iterator[Batch] = iter(())  # of the update under way

  def start(self, state: State, key: Array) -> None:
    """Start replay and the actor threads."""
    self.replay.start()
    if self._labels:
      self._labels.start(state)
    self._actors.start(state, key)

  def publish(self, update: int, params: Any) -> None:
    """Give the actors, and the stage, the parameters after `update` updates."""
    if self._labels:
      self._labels.publish(update, params)
    self._actors.publish(update, params)

  def take(self, update: int, cancelled: Cancelled) -> Batch | None:
    """Add the next unrolls to replay, and return one sample of the update after the other."""
    self.replay.check()
    batch = next(self._batches, None)
    if batch is None:
      unrolls = self._actors.unrolls(update, cancelled)
      if unrolls is None:
        return None
      for unroll in unrolls:
        self.replay.add(unroll.parts, unroll.serial)
      self._batches = self._draw(update, self.replay.times(update), snapshots_of(unrolls))
      batch = next(self._batches)
    return batch

  def _draw(self, update: int, count: int, ends: tuple[Snapshot, ...]) -> Iterator[Batch]:
    labels = self._labels
    draws = labels.samples(update, count) if labels else self.replay.samples(count)
    if not count:
      collections.deque(draws, 0)  # no samples: requests of labels for the next update
      yield Batch(None, snapshots=ends)
      return
    for i, draw in enumerate(draws):
      yield Batch(draw.data, draw.key, i, i == count - 1, ends)

  def learned(self, batch: Batch, priority: Any, params: Any) -> None:
    """Update the priorities of a batch."""
    self.replay.update(batch.key, priority)
    if self._labels:
      self._labels.learned(params)

  def read(self) -> tuple[Totals, dict[str, Any]]:
    """Return the episodes that ended since the last reading, and metrics."""
    episodes, metrics = self._actors.read()
    return episodes, metrics | self.replay.metrics()

  def close(self) -> None:
    """End the actor threads and replay."""
    with contextlib.closing(self.replay):
      self._actors.close()

  def save(self, folder: Path) -> WriteExtra:
    """Take a snapshot; returns a function that writes it to `folder`."""
    part, actors = part_of(folder), self._actors.saved_actors
    write_actors = actors.save(folder) if actors else dict
    try:
      write = self.replay.save(part, streams=bool(self.snapshots or (actors and actors.states)))
    except ReplayFailed as e:
      raise CheckpointError(f'replay could not be saved to {folder}: {e}') from e

    def write_extra() -> dict[str, Any]:
      try:
        if part != folder:
          make_folder(folder.parent)
        record = write()
        if part != folder:
          write_json(part / PART, record)
          sync(folder.parent.parent)  # the first process also made the parent
        return {**record, 'processes': jax.process_count(), **write_actors()}
      except (CheckpointError, OSError) as e:
        raise CheckpointError(f'replay could not be saved to {folder}: {e}') from e

    return write_extra

  def restore(self, folder: Path, record: dict[str, Any] | None) -> None:
    """Read this process's part of `folder`."""
    if record is None:
      raise UsageError(
        f'the checkpoint at step {folder.name} has no replay of --replay host: give the --replay '
        'that the run had, or begin another run with --init-from'
      )
    if (were := record.get('processes', 1)) != jax.process_count():
      raise UsageError(
        f'the checkpoint at step {folder.name} has the replay of {were} process(es), each its own '
        f'part, and this run has {jax.process_count()}: start {were}, or begin another run with '
        '--init-from'
      )
    if (actors := self._actors.saved_actors) is not None:
      actors.restore(folder, record)
    part = part_of(folder)
    if part != folder and (record := read_json(part / PART)) is None:
      raise CheckpointError(f'{part / PART} is not there')
    # Environments that begin anew do not continue the streams of the ones before.
    self.replay.restore(part, record, streams=bool(self.snapshots or (actors and actors.states)))
