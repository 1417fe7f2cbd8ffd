"""One agent in pools of one kind of environment, on a topology: what is computed where."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from podrace import topology as topology_
from podrace.envs.host.base import EpisodeCounter, HostSpec, batch_sizes
from podrace.envs.spaces import over
from podrace.learner import (
  Log,
  add_to_log,
  all_finite,
  empty_log,
  init_memory,
  learner,
  sample_learner,
)
from podrace.replay.host import Layout
from podrace.sebulba.acting import Acting, Programs, pack
from podrace.sebulba.pipe import Lag, Snapshot, Unroll
from podrace.topology import AXIS, TRAJECTORY_SPECS, Topology
from podrace.types import Agent, Array, Replay, TimeStep, TrainState, Trajectory, map_batch

COLUMNS = 2  # of an environment that returns in any order: an open unroll, and a finished one


class State(NamedTuple):
  """What a run has learned, and where its actors are if they can be saved."""

  train: TrainState  # the same on all learner devices
  memory: Any
  log: Log
  key: Array
  update: Array  # [] i32
  previous: Any  # with lag 1, the parameters before the last update: the next unroll's
  actors: tuple[Snapshot, ...]  # one for each thread, where environments can give their state


@dataclasses.dataclass(frozen=True)
class Sebulba:
  """One agent in pools of one kind of environment, on a topology.

  `num_envs` are divided over all processes' actor threads; with `batch_size` (of one thread) less
  than its share, environments come back in any order, as they are ready.
  """

  agent: Agent
  spec: HostSpec
  replay: Replay
  topology: Topology
  num_envs: int
  unroll_length: int
  threads: int = 2  # per actor device
  lag: Lag = '1'
  max_lag: int = 4
  batch_size: int = 0  # 0: all of a thread's environments, in order
  env_threads: int = 0  # C++ threads or worker processes of all pools together; 0: one per core
  deadline: float = 60.0  # seconds that an answer of the environments may take
  seed: int = 0
  hosted: bool = False  # replay is on the host: the `windows` of `replay`, and not its state
  first_thread: int = 0  # of this one's, where other runs of threads act for the same learner

  def __post_init__(self) -> None:
    for name in ('num_envs', 'unroll_length', 'threads', 'max_lag'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
    parts = self.total_threads * self.num_local_learners
    if self.num_envs % parts:
      below = self.num_envs // parts * parts
      near = f'{below} or {below + parts}' if below else f'{parts}'
      raise ValueError(
        f'--num-envs {self.num_envs} must be a multiple of {parts}, as {near} is: each of '
        f'{self.total_threads} actor threads (--actor-threads is of each device) sends equal parts to '
        f'each of {self.num_local_learners} learner devices'
      )
    if not 0 <= self.batch_size <= self.envs_per_thread or (
      self.batch_size and self.envs_per_thread % self.batch_size
    ):
      raise ValueError(
        f'--env-batch-size {self.batch_size} does not divide the {self.envs_per_thread} '
        'environments of a thread'
      )
    if not self.ordered and self.lag != 'async':
      why = f'--env-batch-size {self.batch_size}' if self.batch_size else self.spec.name
      raise ValueError(f'environments in any order ({why}) need --lag async, not {self.lag}')
    if self.hosted and self.replay.windows is None:
      raise ValueError(
        'this agent learns from the newest trajectory only: it has no replay to host'
      )
    if self.hosted and jax.process_count() > 1:
      raise ValueError('replay on the host is for runs of one process; leave out --replay host')
    if not self.ordered and self.in_turn:
      why = f'--env-batch-size {self.batch_size}' if self.batch_size else self.spec.name
      raise ValueError(
        f'environments in any order ({why}) need replay on the host: give --replay host'
      )
    if not self.ordered and self.spec.ordered_only:
      raise ValueError(f'{self.spec.name} comes in order only; leave out --env-batch-size')
    if self.spec.jax is not None:
      topology_.host_device()  # or say now that there is none

  # --- sizes

  @property
  def mesh(self) -> Any:
    return self.topology.learners

  @property
  def local_threads(self) -> int:
    return self.threads * len(self.topology.actors)

  @property
  def total_threads(self) -> int:
    return self.local_threads * jax.process_count()

  @property
  def num_local_learners(self) -> int:
    return len(self.topology.local_learners)

  @property
  def envs_per_thread(self) -> int:
    return self.num_envs // self.total_threads

  @property
  def ordered(self) -> bool:
    return self.batch_size in (0, self.envs_per_thread) and not self.spec.comes_and_goes

  @property
  def in_turn(self) -> bool:
    """Replay needs each environment's unroll where the one before was."""
    return self.replay.windows is not None and not self.hosted

  @property
  def columns(self) -> int:
    """Of each environment."""
    return 1 if self.ordered else COLUMNS

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """How many environments the programs for some of a thread's are compiled for."""
    most = self.batch_size or self.envs_per_thread
    if not self.spec.comes_and_goes:
      return (most,)
    return batch_sizes(most)

  @property
  def saves_actors(self) -> bool:
    return self.spec.jax is not None and self.lag != 'async' and jax.process_count() == 1

  def thread_index(self, local: int) -> int:
    """A thread of this process, counted over all processes."""
    return self.first_thread + jax.process_index() * self.local_threads + local

  def first_env(self, local: int) -> int:
    """The number of a thread's first environment, counted over all."""
    return self.thread_index(local) * self.envs_per_thread

  def device_of(self, local: int) -> jax.Device:
    return self.topology.actors[local // self.threads]

  # --- what is computed where

  @functools.cached_property
  def programs(self) -> Programs:
    """The actor threads'."""
    n, parts = self.envs_per_thread, self.num_local_learners
    return Programs(Acting(self.agent, n, self.unroll_length, self.columns, parts))

  @functools.cached_property
  def jax_steps(self) -> Any:
    """Those of environments in JAX."""
    from podrace.envs.host.jax import JaxSteps

    return JaxSteps(self.spec.jax, self.envs_per_thread, self.unroll_length)

  @functools.cached_property
  def example(self) -> TimeStep:
    """A timestep of one thread's environments, of zeros."""
    n = self.envs_per_thread
    observation = _zeros(self.spec.observation_space, n)
    zeros: Any = np.zeros(n, np.float32)
    return TimeStep(observation, zeros, zeros + 1, zeros.astype(np.int8))

  def _example_trajectory(self, params: Any) -> Trajectory:
    """A learner batch, in shapes only."""

    def make(params: Any, timestep: TimeStep, key: Array) -> Trajectory:
      env_id = jnp.zeros([self.envs_per_thread], jnp.int32)
      carry = Acting(self.agent, self.envs_per_thread, self.unroll_length, 1, 1).begin(
        params, env_id, timestep, key
      )
      one = Trajectory(carry.timesteps, carry.outputs, carry.start, env_id)
      return _concatenate([one] * self.total_threads)

    return jax.eval_shape(make, params, self.example, jax.random.key(0))

  def _init(self, keys: Array) -> State:
    train_key, _, run_key = jax.random.split(keys[0], 3)
    train = self.agent.init(train_key)
    memory: Any = ()
    if self.hosted:
      learn = sample_learner(self.agent, self.mesh, self.layout.sample)
      _, _, metrics = jax.eval_shape(learn, train, self.layout.batch(), run_key)
    else:
      example = self._example_trajectory(train.params)
      memory = init_memory(self.replay, self.mesh, example)
      learn = learner(self.agent, self.replay, self.mesh)
      _, _, metrics, _ = jax.eval_shape(learn, train, memory, example, run_key, jnp.int32(0))
    previous = jax.tree.map(jnp.copy, train.params) if self.lag == '1' else ()
    return State(train, memory, empty_log(metrics), run_key, jnp.int32(0), previous, ())

  @functools.cached_property
  def shapes(self) -> State:
    """A State of shapes, dtypes and shardings: what a checkpoint holds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(self._init, keys)
    split = NamedSharding(self.mesh, P(AXIS))
    same = topology_.replicated(self.mesh)

    def place(sharding: Any, tree: Any) -> Any:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    placed = State(
      *(place(split if f == 'memory' else same, x) for f, x in state._asdict().items())
    )
    if not self.saves_actors:
      return placed
    return placed._replace(actors=tuple(map(self._snapshot_shape, range(self.local_threads))))

  def _snapshot_shape(self, local: int) -> Snapshot:
    from podrace.envs.base import batch

    n = self.envs_per_thread
    env_state, timestep = jax.eval_shape(batch(self.spec.jax, n).reset, jax.random.key(0))
    agent_state = jax.eval_shape(self.agent.initial_state, jnp.zeros([n], jnp.int32))
    episodes = EpisodeCounter(n).state()
    on_device = SingleDeviceSharding(self.device_of(local))
    on_host = SingleDeviceSharding(topology_.host_device())

    def place(sharding: Any, tree: Any) -> Any:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    return Snapshot(
      place(on_device, agent_state),
      place(on_device, timestep),
      place(on_host, env_state),
      place(on_host, episodes),
    )

  @functools.cached_property
  def shardings(self) -> Any:
    return jax.tree.map(lambda x: x.sharding, self.shapes._replace(actors=()))

  @functools.cached_property
  def init(self) -> Any:
    """keys [1] -> State, placed on the learners' mesh."""
    return jax.jit(self._init, out_shardings=self.shardings)

  @functools.cached_property
  def learn(self) -> Any:
    """(params, rest, memory, log, key, update, trajectories) -> (train, memory, log, update).

    `trajectories` are those of all threads. The parameters are not donated: actors have them.
    """
    learn = learner(self.agent, self.replay, self.mesh)
    specs = (TRAJECTORY_SPECS,) * self.local_threads
    join = jax.shard_map(
      lambda *trajectories: _concatenate(trajectories),
      mesh=self.mesh,
      in_specs=specs,
      out_specs=TRAJECTORY_SPECS,
    )

    def update(
      params: Any, rest: Any, memory: Any, log: Log, key: Array, update: Array, trajectories: Any
    ) -> Any:
      _, learn_key = jax.random.split(jax.random.fold_in(key, update))  # as Anakin's
      train, memory, metrics, count = learn(
        TrainState(params, rest), memory, join(*trajectories), learn_key, update
      )
      return train, memory, add_to_log(log, metrics, count, update), update + 1

    s = self.shardings
    return jax.jit(
      update, donate_argnums=(1, 2, 3, 5), out_shardings=(s.train, s.memory, s.log, s.update)
    )

  @functools.cached_property
  def layout(self) -> Layout:
    """How replay on the host keeps trajectories."""
    params = jax.eval_shape(lambda key: self.agent.init(key).params, jax.random.key(0))
    return Layout(self.replay.windows, self._example_trajectory(params))

  @property
  def batch(self) -> dict[str, Any]:
    """The shapes of what `learn_sample` is given."""
    split = NamedSharding(self.mesh, P(AXIS))
    shapes = self.layout.batch()
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for k, x in shapes.items()}

  @functools.cached_property
  def batch_of_unrolls(self) -> Trajectory:
    """The shapes of what `learn` is given, where one thread acts."""
    params = jax.eval_shape(lambda key: self.agent.init(key).params, jax.random.key(0))

    def place(spec: Any, x: Any) -> Any:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    return Trajectory(*(
      jax.tree.map(functools.partial(place, spec), field)
      for spec, field in zip(TRAJECTORY_SPECS, self._example_trajectory(params), strict=True)
    ))  # fmt: skip

  @functools.cached_property
  def learn_sample(self) -> Any:
    """(params, rest, log, key, update, i, batch) -> (train, log, priority): the i-th of an update.

    As `learn` does with the samples of replay on the device.
    """
    learn = sample_learner(self.agent, self.mesh, self.layout.sample)

    def one(
      params: Any, rest: Any, log: Log, key: Array, update: Array, i: Array, batch: Any
    ) -> Any:
      _, update_key = jax.random.split(jax.random.fold_in(key, update))
      _, learn_key = jax.random.split(jax.random.fold_in(update_key, i))
      train, priority, metrics = learn(TrainState(params, rest), batch, learn_key)
      return train, add_to_log(log, metrics, jnp.int32(1), update), priority

    s = self.shardings
    split = NamedSharding(self.mesh, P(AXIS))
    return jax.jit(one, donate_argnums=(1, 2), out_shardings=(s.train, s.log, split))

  @functools.cached_property
  def health(self) -> Any:
    """State -> (the first update whose loss was not finite or -1, all parameters are finite)."""

    def check(params: Any, broken: Array) -> tuple[Array, Array]:
      return broken, all_finite(params)

    check = jax.jit(check, out_shardings=topology_.replicated(self.mesh))
    return lambda state: check(state.train.params, state.log.broken)

  def warm_up(self) -> tuple[Trajectory, ...]:
    """Compiles the actors' programs on all their devices; the shapes that `learn` is given."""
    for device in dict.fromkeys(self.topology.actors):
      with jax.default_device(device):
        params = jax.jit(lambda key: self.agent.init(key).params)(jax.random.key(0))
        params = jax.device_put(params, device)  # committed, as in a run: else it compiles anew
        env_id = jax.device_put(np.zeros(self.envs_per_thread, np.int32), device)
        carry = self.programs.begin(params, env_id, self.example, jax.random.key(1))
        keys = self.programs.keys(jax.random.key(2))
        if self.ordered:
          numbers, last = pack(self.example, 0, 0), jax.device_put(self.example.observation, device)
          for observation in self.example.observation, last:  # which opens the next unroll
            carry, action = self.programs.step(params, carry, keys, numbers, observation)
          parts, _ = self.programs.finish(carry, pack(self.example), last, env_id)
          if self.spec.jax is not None:
            self._warm_up_pool(action)
        else:
          for size in self.sizes:
            ids = np.zeros(size, np.int32)
            example = jax.tree.map(lambda x, size=size: x[:size], self.example)
            carry, _ = self.programs.step_some(
              params, carry, keys, pack(example, 0, ids, ids, ids), example.observation
            )
            carry = self.programs.store(carry, pack(example, ids, ids), example.observation)
          ids = np.zeros(self.envs_per_thread, np.int32)
          parts = self.programs.take(carry, ids, ids)

    def whole(axis: int, x: Array) -> Any:
      shape, dtype, sharding = self._over_mesh(axis, x)
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return (map_batch(whole, parts[0]),) * self.local_threads

  def _over_mesh(self, axis: int, part: Array) -> tuple[Any, Any, NamedSharding]:
    """Shape, type and place of the array over the learners' mesh of which this is a part."""
    shape = list(part.shape)
    shape[axis] *= self.mesh.size
    return tuple(shape), part.dtype, NamedSharding(self.mesh, topology_.split_along(axis))

  def _warm_up_pool(self, action: Any) -> None:
    """Compiles environments in JAX: what compiling takes is not theirs to answer for."""
    from podrace.envs.host.jax import JaxPool

    host = topology_.host_device()
    with jax.default_device(host):
      reset_key, unroll_key = jax.random.key(3), jax.random.key(4)
    pool = JaxPool(self.jax_steps, reset_key, lambda number: unroll_key)
    pool.reset()
    pool.send(np.arange(self.envs_per_thread), jax.tree.map(np.asarray, action))
    pool.recv()

  def join(self, unrolls: list[Unroll]) -> tuple[Trajectory, ...]:
    """Each unroll's parts, which are on the learner devices, as arrays over the mesh."""
    if self.mesh.size == 1:  # they are that already
      return tuple(u.parts[0] for u in unrolls)

    def one(axis: int, *parts: Array) -> Array:
      shape, _, sharding = self._over_mesh(axis, parts[0])
      return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return tuple(map_batch(one, *u.parts) for u in unrolls)


def _concatenate(trajectories: Any) -> Trajectory:
  """Trajectories side by side along the batch."""
  if len(trajectories) == 1:
    return trajectories[0]
  return map_batch(lambda axis, *xs: jnp.concatenate(xs, axis), *trajectories)


def _zeros(space: Any, n: int) -> Any:
  """Observations [n, ...] of zeros, as numpy arrays."""
  return over(lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), space)
