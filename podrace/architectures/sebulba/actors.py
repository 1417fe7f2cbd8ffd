"""The actor threads of a process while a run is under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import topology as topology_
from podrace.architectures.sebulba.acting import ActingProgram
from podrace.architectures.sebulba.group import ActorGroup
from podrace.architectures.sebulba.pipe import ActorFailed, Pipe, Snapshot, Unroll
from podrace.architectures.sebulba.saved_actors import ActorState
from podrace.architectures.sebulba.thread import ActorThread
from podrace.architectures.sebulba.unrolls import Stopwatch
from podrace.envs.host.answer_timer import AnswerDeadline
from podrace.envs.host.base import PoolArgs
from podrace.types import Array, HostEnvironment

CLOSE_SECONDS = 5.0  # that actor threads have to end


class Actors:
  """The actor threads of this process.

  Args:
    acting: settings and programs of the threads.
    versions: parameters by version. The newest version is the number of updates made.
    key: PRNG key of the run.
    actor_key: PRNG key of the environments.
    snapshots: states of the groups; () if they begin anew.
    life: the update at which the groups of `snapshots` began.
    start: start the threads.

  Owner: `ActorSource`, which calls `close`.
  Ends when: closed, or at the end of the process, as the threads are daemons.
  Raises: ActorFailed, from `take`.
  """

  def __init__(
    self,
    acting: ActingProgram,
    versions: dict[int, Any],
    key: Array,
    actor_key: Array,
    snapshots: Sequence[Snapshot | ActorState] = (),
    life: int = 0,
    start: bool = True,
  ) -> None:
    a = self._acting = acting
    self.pipe = Pipe(a.local_groups, a.lag, a.max_lag, a.ordered, a.in_turn)
    self._deadline, self._life = AnswerDeadline(a.deadline), life
    for version in sorted(versions):
      self.publish(version, versions[version])
    update = max(versions)
    run_key = jax.device_get(jax.random.key_data(key))
    groups: list[ActorGroup] = []
    with contextlib.ExitStack() as made:
      for i in range(a.local_groups):
        if i % a.groups == 0:
          stopwatch = Stopwatch()
        snapshot = snapshots[i] if snapshots else None
        groups.append(self._group(i, update, run_key, actor_key, snapshot, stopwatch))
        made.callback(groups[-1].pool.close)
      made.pop_all()
    self._threads = [
      ActorThread(
        i, a.device_of(i * a.groups), groups[i * a.groups : (i + 1) * a.groups], self.pipe
      )
      for i in range(a.local_threads)
    ]
    for actor in self._threads if start else ():
      actor.start()

  @property
  def pools(self) -> list[HostEnvironment]:
    """The environments of all groups."""
    return [group.pool for actor in self._threads for group in actor.groups]

  def _group(
    self,
    local: int,
    update: int,
    run_key: Any,
    actor_key: Array,
    snapshot: Snapshot | ActorState | None,
    stopwatch: Stopwatch,
  ) -> ActorGroup:
    s = self._acting
    index, device = s.group_index(local), s.device_of(local)

    # A group that begins anew would otherwise draw the same numbers again.
    life = update if snapshot is None else self._life

    def unroll_key(number: int, on: jax.Device) -> Array:
      """Return the key of Anakin's unroll on the index-th device in the number-th update."""
      with jax.default_device(on):
        return _unroll_key(run_key, np.uint32(number), np.uint32(index), np.uint32(life))

    if s.spec.jax is not None:
      from podrace.envs.host.jax import JaxPool

      host = topology_.host_device()
      pool: HostEnvironment = JaxPool(
        s.jax_steps,
        _life_key(jax.random.fold_in(actor_key, index), np.uint32(life)),
        lambda number: _env_key(unroll_key(number, host)),
      )
    else:
      pool = self._make_pool(index, update)
    try:
      return ActorGroup(
        s, local, pool, self.pipe, lambda k: unroll_key(k, device), update, snapshot, stopwatch
      )
    except BaseException:
      pool.close()
      raise

  def _make_pool(self, index: int, update: int) -> HostEnvironment:
    s = self._acting
    n = s.envs_per_group
    seeds = np.random.SeedSequence([s.seed, index, update]).generate_state(n, np.uint32)
    args = PoolArgs(n, s.batch_size or n, seeds, s.pool_threads, s.deadline, s.keeps_states)
    return s.spec.make(args)

  def publish(self, version: int, params: Any) -> None:
    """Copy a version of the parameters to the actors' devices."""
    one = jax.tree.map(_on_one_device, params)
    source = next((x.device for x in jax.tree.leaves(one)), None)
    devices = dict.fromkeys(self._acting.devices)
    # A device_put to the same device would cost as much as a copy.
    self.pipe.publish(version, {d: one if d == source else jax.device_put(one, d) for d in devices})

  def take(self, update: int, cancelled: Callable[[], bool]) -> list[Unroll] | None:
    """Take a batch of unrolls, as `Pipe.take`.

    Raises:
      ActorFailed: if a thread has failed, or is stuck in its environments.
    """
    return self.pipe.take(update, lambda: cancelled() or self._check_threads())

  def _check_threads(self) -> bool:
    for actor in self._threads:
      actor.check()
      for group in actor.groups:
        if group.pool.watches_itself:  # and replaces environments that hang
          continue
        silence = group.silence
        if self._deadline.passed(group.index, silence):
          part = f', group {group.index % self._acting.groups},' if self._acting.groups > 1 else ''
          raise ActorFailed(
            f'{self._acting.spec.name}: environments of actor thread {actor.index}{part} have not '
            f'answered for {silence:.0f} s'
          )
    return False

  def close(self) -> None:
    """End the threads. A thread that is stuck is left behind, and its pools are killed."""
    self.pipe.close()
    deadline = time.monotonic() + CLOSE_SECONDS
    with contextlib.ExitStack() as stack:  # each thread, even if a pool of another one fails
      for actor in self._threads:
        stack.callback(actor.close, deadline)


@jax.jit
def _unroll_key(run_key: Array, number: Array, index: Array, life: Array) -> Array:
  key = jax.random.wrap_key_data(run_key)
  act_key, _ = jax.random.split(jax.random.fold_in(key, number))
  return _life_key(jax.random.fold_in(act_key, index), life)


@jax.jit
def _life_key(key: Array, life: Array) -> Array:
  """Return the key itself in a run's first life, a different key in each later life."""
  numbers = jax.random.key_data(key)
  other = jax.random.key_data(jax.random.fold_in(jax.random.clone(key), life))
  return jax.random.wrap_key_data(jnp.where(life == 0, numbers, other))


@jax.jit
def _env_key(key: Array) -> Array:
  _, env_key = jax.random.split(key)
  return env_key


def _on_one_device(x: Array) -> Array:
  """Return a parameter of the learners, whole, on one device."""
  if x.is_fully_replicated:
    return x.addressable_data(0)
  return jax.device_put(x, x.addressable_shards[0].device)
