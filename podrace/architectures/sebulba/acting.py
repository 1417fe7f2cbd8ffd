"""The acting half: the programs of a process's actor threads, and their devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from podrace import topology as topology_
from podrace.architectures.sebulba.device_programs import Programs, pack
from podrace.architectures.sebulba.pipe import Lag, Snapshot
from podrace.envs.base import batch
from podrace.envs.host.base import HostSpec, batch_sizes
from podrace.envs.host.episodes import EpisodeCounter
from podrace.envs.spaces import map_leaves
from podrace.system.scheduling import cores
from podrace.types import Agent, Array, TimeStep, Trajectory

COLUMNS = 2  # of an environment in any order: an open unroll and a finished one


@dataclasses.dataclass(frozen=True)
class ActingProgram:
  """One agent that acts in pools of one kind of environment. It knows no learner.

  The `num_envs` are divided over the actor threads of all processes, and in each thread over its
  groups, which take turns: the device acts for one while the rest step. If `batch_size` (of one
  thread) is less than a thread's share, environments return in any order, as they become ready.
  """

  agent: Agent
  spec: HostSpec
  devices: tuple[jax.Device, ...]  # of this process, for acting
  destinations: tuple[jax.Device, ...]  # likewise, for learning; an unroll is split over them
  num_envs: int
  unroll_length: int
  threads: int = 2  # per device
  groups: int = 1  # per thread, each with a pool, an unroll and keys of its own; see `make_program`
  lag: Lag = '1'
  max_lag: int = 4
  batch_size: int = 0  # 0: all of a thread's environments, in order
  env_threads: int = 0  # C++ threads or workers of all pools; 0: one per core, for each group
  deadline: float = 60.0  # seconds for an answer of the environments
  seed: int = 0
  in_turn: bool = False  # a batch has the next unroll of every thread, as replay on devices needs
  first: int = 0  # the number of its first environment, counted over all programs
  part_multiple: int = 1  # divides the environments of a group on each learner device

  def __post_init__(self) -> None:
    for name in ('num_envs', 'unroll_length', 'threads', 'groups', 'max_lag'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
    parts = self.total_groups * len(self.destinations)
    if self.num_envs % parts:
      below = self.num_envs // parts * parts
      near = f'{below} or {below + parts}' if below else f'{parts}'
      senders = f'{self.total_groups} actor threads (--actor-threads is of each device)'
      if self.groups > 1:
        senders = f'{self.total_groups} groups ({self.groups} of each actor thread, --actor-groups)'
      raise ValueError(
        f'--num-envs {self.num_envs} must be a multiple of {parts}, as {near} is: each of '
        f'{senders} sends equal parts to each of {len(self.destinations)} learner devices'
      )
    if self.envs_per_group % self.spec.multiple:
      raise ValueError(
        f'each of {self.total_groups} groups of an actor thread has {self.envs_per_group} '
        f'environments, which must be a multiple of {self.spec.multiple} for --log-share: give '
        f'--num-envs a multiple of {self.total_groups * self.spec.multiple}'
      )
    if self.num_envs // parts % self.part_multiple:
      raise ValueError(
        f'--num-envs {self.num_envs} must be a multiple of {parts * self.part_multiple}: with '
        '--agent.buffer.online-share each learner device needs the --log-share of environments'
      )
    if not 0 <= self.batch_size <= self.envs_per_group or (
      self.batch_size and self.envs_per_group % self.batch_size
    ):
      raise ValueError(
        f'--env-batch-size {self.batch_size} does not divide the {self.envs_per_group} '
        'environments of a thread'
      )
    why = f'--env-batch-size {self.batch_size}' if self.batch_size else self.spec.name
    if not self.ordered and self.spec.ordered_only:
      raise ValueError(f'{self.spec.name} comes in order only; leave out --env-batch-size')
    if not self.ordered and self.groups > 1:
      raise ValueError(
        f'--actor-groups {self.groups} is for environments in order; environments in any order '
        f'({why}) step while others are acted for: leave it out'
      )
    if not self.ordered and self.lag != 'async':
      raise ValueError(f'environments in any order ({why}) need --lag async, not {self.lag}')
    if not self.ordered and self.in_turn:
      raise ValueError(
        f'environments in any order ({why}) need replay on the host: give --replay host'
      )
    if self.spec.jax is not None:
      topology_.host_device()  # raises now if there is none

  # --- sizes

  @property
  def local_threads(self) -> int:
    """Actor threads of this process."""
    return self.threads * len(self.devices)

  @property
  def total_threads(self) -> int:
    """Actor threads of all processes."""
    return self.local_threads * jax.process_count()

  @property
  def local_groups(self) -> int:
    """Groups of environments of this process."""
    return self.local_threads * self.groups

  @property
  def total_groups(self) -> int:
    """Groups of environments of all processes."""
    return self.total_threads * self.groups

  @property
  def envs_per_group(self) -> int:
    """Environments of each group."""
    return self.num_envs // self.total_groups

  @property
  def pool_threads(self) -> int:
    """Threads or worker processes of each pool.

    While a group is acted for, the threads of its pool are idle. So by default each group of a
    thread may use all cores of the thread.
    """
    budget = self.env_threads or cores() * self.groups
    return max(1, min(self.envs_per_group, budget // self.local_groups))

  @property
  def ordered(self) -> bool:
    """Whether all environments of a group step together."""
    return self.batch_size in (0, self.envs_per_group) and not self.spec.comes_and_goes

  @property
  def columns(self) -> int:
    """Columns of each environment."""
    return 1 if self.ordered else COLUMNS

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Padded batch sizes, ascending, of the programs for a part of a thread's environments."""
    limit = self.batch_size or self.envs_per_group
    if not self.spec.comes_and_goes:
      return (limit,)
    return batch_sizes(limit)

  @property
  def saves_actors(self) -> bool:
    """Whether a checkpoint keeps the state of the actor threads."""
    return self.spec.jax is not None and self.lag != 'async' and jax.process_count() == 1

  @property
  def keeps_states(self) -> bool:
    """Whether a checkpoint has a file with the states of the actor threads; see `saved_actors`."""
    return self.ordered and self.lag != 'async' and not self.saves_actors

  def group_index(self, local: int) -> int:
    """Return the number of a group of this process, counted over all processes."""
    return jax.process_index() * self.local_groups + local

  def first_env(self, local: int) -> int:
    """Return the number of a group's first environment, counted over all environments."""
    return self.first + self.group_index(local) * self.envs_per_group

  def device_of(self, local: int) -> jax.Device:
    """Return the device of a group of this process."""
    return self.devices[local // (self.threads * self.groups)]

  # --- programs

  @functools.cached_property
  def programs(self) -> Programs:
    """The compiled programs of the actor threads."""
    n, parts = self.envs_per_group, len(self.destinations)
    return Programs(self.agent, n, self.unroll_length, self.columns, parts)

  @functools.cached_property
  def jax_steps(self) -> Any:
    """The compiled programs of environments in JAX."""
    from podrace.envs.host.jax import JaxSteps

    return JaxSteps(self.spec.jax, self.envs_per_group, self.unroll_length)

  @property
  def env_metrics(self) -> Callable[[], dict[str, float]] | None:
    """Returns the environments' own metrics; None if they have none."""
    return self.spec.metrics if self.spec.jax is None else self.jax_steps.infos.means

  @functools.cached_property
  def example(self) -> TimeStep:
    """A timestep of zeros for one group's environments."""
    return example_timestep(self.spec, self.envs_per_group)

  @functools.cached_property
  def snapshots(self) -> tuple[Snapshot, ...]:
    """The snapshot of each group, in shapes and shardings; () if groups cannot be saved."""
    return tuple(map(self._snapshot, range(self.local_groups))) if self.saves_actors else ()

  def _snapshot(self, local: int) -> Snapshot:
    n = self.envs_per_group
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

  def warm_up(self) -> None:
    """Compile the threads' programs on all their devices."""
    for device in dict.fromkeys(self.devices):
      with jax.default_device(device):
        params = jax.jit(lambda key: self.agent.init(key).params)(jax.random.key(0))
        params = jax.device_put(params, device)  # committed, as in a run, or it compiles anew
        env_id = jax.device_put(np.zeros(self.envs_per_group, np.int32), device)
        carry = self.programs.begin(params, env_id, self.example, jax.random.key(1))
        keys = self.programs.keys(jax.random.key(2))
        if self.ordered:
          numbers, last = pack(self.example, 0, 0), jax.device_put(self.example.observation, device)
          for observation in self.example.observation, last:  # which opens the next unroll
            carry, action = self.programs.step(params, carry, keys, numbers, observation)
          self.programs.finish(carry, pack(self.example), last, env_id)
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
          ids = np.zeros(self.envs_per_group, np.int32)
          self.programs.take(carry, ids, ids)

  def _warm_up_pool(self, action: Any) -> None:
    """Compile environments in JAX, so that compilation does not count for their deadline."""
    from podrace.envs.host.jax import JaxPool

    host = topology_.host_device()
    with jax.default_device(host):
      reset_key, unroll_key = jax.random.key(3), jax.random.key(4)
    pool = JaxPool(self.jax_steps, reset_key, lambda number: unroll_key)
    pool.reset()
    pool.send(np.arange(self.envs_per_group), jax.tree.map(np.asarray, action))
    pool.recv()
    self.jax_steps.forget_infos()  # of the warm-up


def make_program(*args: Any, groups: int = 0, **settings: Any) -> ActingProgram:
  """Return an `ActingProgram`. With groups=0 a thread has two where that is faster, else one.

  Two, if it acts on an accelerator, for environments in order. On a CPU acting and stepping share
  the cores, and two half batches take longer than a whole one. Environments in JAX keep the keys
  of Anakin, which has one group on each device.
  """
  program = ActingProgram(*args, **{**settings, 'groups': groups or 1})
  if groups:
    return program
  on_cpu = all(d.platform == 'cpu' for d in program.devices)
  parts = 2 * program.total_groups * len(program.destinations)
  if on_cpu or program.spec.jax is not None or not program.ordered or program.num_envs % parts:
    return program
  with contextlib.suppress(ValueError):  # half a thread's environments may not be a whole part
    return dataclasses.replace(program, groups=2)
  return program


def example_timestep(spec: HostSpec, num_envs: int) -> TimeStep:
  """Return a timestep [num_envs] of zeros, as NumPy arrays."""
  n = num_envs
  observation = map_leaves(
    lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), spec.observation_space
  )
  zeros: Any = np.zeros(n, np.float32)
  return TimeStep(observation, zeros, zeros + 1, zeros.astype(np.int8))


def example_trajectory(agent: Agent, spec: HostSpec, num_envs: int, length: int) -> Trajectory:
  """Return an unroll of `num_envs` environments and `length` steps, in shapes only."""

  def make(key: Array) -> Trajectory:
    env_id = jnp.zeros([num_envs], jnp.int32)
    params, timestep = agent.init(key).params, example_timestep(spec, num_envs)
    programs = Programs(agent, num_envs, length, 1, 1)
    carry = programs.empty(params, env_id, timestep, jax.random.key(1))
    return Trajectory(carry.timesteps, carry.outputs, carry.start, env_id)

  return jax.eval_shape(make, jax.random.key(0))
