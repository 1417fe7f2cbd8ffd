"""The learning half: the programs of the learner's devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import topology as topology_
from podrace.architectures.sebulba.pipe import Snapshot
from podrace.architectures.sharding import train_specs, with_shardings
from podrace.envs.host.episodes import Totals
from podrace.hooks import gradient_steps
from podrace.learner import (
  Log,
  add_to_log,
  all_finite,
  empty_log,
  init_memory,
  learner,
  sample_learner,
)
from podrace.replay.layout import Layout
from podrace.replay.windows import Windows
from podrace.topology import AXIS, TRAJECTORY_SPECS
from podrace.types import Agent, Array, Replay, TrainState, Trajectory, map_batch


class State(NamedTuple):
  """The state of a learner, with the snapshots of its actors if they can be saved."""

  train: TrainState  # the same along AXIS
  memory: Any
  log: Log
  key: Array
  update: Array  # [] i32
  previous: Any  # with lag 1, the parameters before the last update, for the next unroll
  actors: tuple[Snapshot, ...]  # one for each thread; () if environments cannot give their state


class Batch(NamedTuple):
  """The data of one gradient step, or of one update."""

  data: Any  # trajectories, or a sample of replay; None: this update learns from nothing
  key: Any = None  # [n] keys of its items of replay
  i: int = 0  # its index among the batches of the update
  last: bool = True  # it ends the update
  snapshots: tuple[Snapshot, ...] = ()  # of the actors, with the last batch


@dataclasses.dataclass(frozen=True)
class LearningProgram:
  """One agent that learns on a mesh, in the calling thread. It knows no environment.

  With a `Replay`, replay is on the devices of the mesh, and a batch is the trajectories of
  `streams` threads. With a `Layout`, replay is on the host or in a service, and a batch is a sample
  of that layout.
  """

  agent: Agent
  mesh: Mesh
  replay: Replay | Layout
  example: Trajectory  # of all environments, in shapes
  streams: int = 1
  keeps_previous: bool = False  # actors act with the parameters before the newest

  @property
  def windows(self) -> Windows | None:
    """The sizes of replay; None if it holds the newest trajectory only."""
    return self.replay.windows

  def _init(self, keys: Array) -> State:
    train_key, _, run_key = jax.random.split(keys[0], 3)
    with topology_.on_mesh(self.mesh):
      train = self.agent.init(train_key)
    memory: Any = ()
    if isinstance(self.replay, Layout):
      learn = sample_learner(self.agent, self.mesh, self.replay.sample)
      _, _, metrics = jax.eval_shape(learn, train, self.replay.batch(), run_key)
    else:
      memory = init_memory(self.replay, self.mesh, self.example)
      learn = learner(self.agent, self.replay, self.mesh)
      _, _, metrics, _ = jax.eval_shape(learn, train, memory, self.example, run_key, jnp.int32(0))
    previous = jax.tree.map(jnp.copy, train.params) if self.keeps_previous else ()
    return State(train, memory, empty_log(metrics), run_key, jnp.int32(0), previous, ())

  @functools.cached_property
  def shapes(self) -> State:
    """A State of shapes, dtypes and shardings, without actors."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(self._init, keys)
    train = train_specs(self.agent, state.train, self.mesh)
    previous = train.params if self.keeps_previous else ()
    same: Any = P()
    specs = State(train, P(AXIS), same, same, same, previous, same)
    return with_shardings(state, specs, self.mesh)

  @functools.cached_property
  def shardings(self) -> Any:
    """The sharding of each leaf of a State."""
    return jax.tree.map(lambda x: x.sharding, self.shapes)

  @functools.cached_property
  def init(self) -> Any:
    """Keys [1] -> State, placed on the mesh."""
    return jax.jit(self._init, out_shardings=self.shardings)

  @functools.cached_property
  def batch(self) -> Any:
    """The shapes of `Batch.data`."""
    if isinstance(self.replay, Layout):
      split = NamedSharding(self.mesh, P(AXIS))
      shapes = self.replay.batch().items()
      return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for k, x in shapes}

    def part(axis: int, x: Any) -> Any:
      shape = list(x.shape)
      shape[axis] //= self.streams
      sharding = NamedSharding(self.mesh, topology_.split_along(axis))
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return (map_batch(part, self.example),) * self.streams

  # --- the update

  def _update(
    self, params: Any, rest: Any, memory: Any, log: Log, key: Array, update: Array, i: Array, x: Any
  ) -> Any:
    """Learn from the data `x` of a batch, the i-th of an update; see `jitted`."""
    train = TrainState(params, rest)
    if isinstance(self.replay, Layout):
      learn_key = sample_key(key, update, i)
      learn = sample_learner(self.agent, self.mesh, self.replay.sample)
      train, priority, metrics = learn(train, x, learn_key)
      return train, memory, add_to_log(log, metrics, jnp.int32(1), update), update, priority
    _, key = jax.random.split(jax.random.fold_in(key, update))
    join = topology_.on_each(
      lambda *trajectories: _concatenate(trajectories),
      self.mesh,
      in_specs=(TRAJECTORY_SPECS,) * self.streams,
      out_specs=TRAJECTORY_SPECS,
    )
    learn = learner(self.agent, self.replay, self.mesh)
    train, memory, metrics, count = learn(train, memory, join(*x), key, update)
    return train, memory, add_to_log(log, metrics, count, update), update + 1, ()

  @functools.cached_property
  def jitted(self) -> Any:
    """(params, rest, memory, log, key, update, i, data) -> (train, memory, log, update, priority).

    The parameters are not donated, because actors use them.
    """
    s, sampled = self.shardings, isinstance(self.replay, Layout)
    priority: Any = NamedSharding(self.mesh, P(AXIS)) if sampled else ()
    out = (s.train, s.memory, s.log, s.update, priority)
    return jax.jit(self._update, donate_argnums=(1, 2, 3), out_shardings=out)

  @functools.cached_property
  def _compiled(self) -> Any:
    s, i = self.shapes, jax.ShapeDtypeStruct((), jnp.int32)
    return self.jitted.lower(
      s.train.params, s.train.rest, s.memory, s.log, s.key, s.update, i, self.batch
    ).compile()

  def compile(self) -> None:
    """Compile the update, once."""
    self._compiled  # noqa: B018

  def learn(self, state: State, batch: Batch) -> tuple[State, Any]:
    """Learn from one batch; returns the state and new priorities [n] of its items, if any.

    Call `end_update` after the last batch of an update.
    """
    s = state
    i = np.int32(batch.i)
    train, memory, log, update, priority = self._compiled(
      s.train.params, s.train.rest, s.memory, s.log, s.key, s.update, i, batch.data
    )
    return s._replace(train=train, memory=memory, log=log, update=update), priority

  def end_update(self, state: State, update: int, before: Any, batch: Batch) -> State:
    """Return the state after `update` updates.

    `before` are the parameters at the beginning of the update, `batch` is its last batch.
    """
    previous = before if self.keeps_previous else ()
    state = state._replace(previous=previous, actors=batch.snapshots)
    if isinstance(self.replay, Layout):  # a sample is not always the last one
      state = state._replace(update=jax.device_put(np.int32(update), self.shardings.update))
    return state

  # --- the log

  def read_log(
    self, state: State, episodes: Totals, host: dict[str, Any]
  ) -> tuple[dict[str, Any], State]:
    """Return a summary since the last reading (see `Anakin.read_log`), and the state after it."""
    log = jax.device_get(state.log)
    summary = dict(
      metrics={k: x / log.samples if log.samples else np.nan for k, x in log.sums.items()},
      gradient_steps=log.samples * gradient_steps(self.agent),
      episodes=episodes.count,
      return_sum=episodes.return_sum,
      return_deviation=episodes.return_deviation,
      length_sum=episodes.length_sum,
      host=host,
    )
    zero = jax.tree.map(np.zeros_like, log)._replace(broken=log.broken)
    return summary, state._replace(log=jax.device_put(zero, self.shardings.log))

  @functools.cached_property
  def _health(self) -> Any:
    def check(params: Any, broken: Array) -> tuple[Array, Array]:
      return broken, all_finite(params)

    return jax.jit(check, out_shardings=topology_.replicated(self.mesh))

  def health(self, state: State) -> tuple[Any, Any]:
    """Return the first update with non-finite loss, else -1; and if all parameters are finite."""
    return jax.device_get(self._health(state.train.params, state.log.broken))


def sample_key(key: Array, update: Any, i: Any) -> Array:
  """Return the key with which an agent learns from the i-th sample of an update, as `learner` does.

  `key` is the key of the run.
  """
  _, key = jax.random.split(jax.random.fold_in(key, update))
  _, learn_key = jax.random.split(jax.random.fold_in(key, i))
  return learn_key


def _concatenate(trajectories: Any) -> Trajectory:
  """Concatenate trajectories along the batch."""
  if len(trajectories) == 1:
    return trajectories[0]
  return map_batch(lambda axis, *xs: jnp.concatenate(xs, axis), *trajectories)
