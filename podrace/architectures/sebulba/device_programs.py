"""Acting on a device: the compiled programs of one group of environments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrace.networks import outside_loops
from podrace.types import ActorOutput, Agent, Array, TimeStep, Trajectory, map_batch


class Carry(NamedTuple):
  """The state of a group on its device. N environments, C columns, one or more for each."""

  agent_state: Any  # [N, ...]
  start: Any  # [C, ...] the agent's state before row 0
  timesteps: TimeStep  # [T+1, C, ...]
  outputs: ActorOutput  # [T, C, ...]


def pack(timestep: TimeStep, *more: Any) -> np.ndarray:
  """Pack a timestep [b] without its observation and `m` integers per environment: [3+m, b] i32.

  It is one array, because each host array that a program takes is a separate transfer.
  """
  numbers = np.empty((3 + len(more), len(timestep.reward)), np.int32)
  numbers[0] = np.asarray(timestep.reward, np.float32).view(np.int32)
  numbers[1] = np.asarray(timestep.discount, np.float32).view(np.int32)
  numbers[2] = timestep.step_type
  for row, x in zip(numbers[3:], more, strict=True):
    row[:] = x
  return numbers


def _unpack(numbers: Array, observation: Any) -> tuple[TimeStep, tuple[Array, ...]]:
  """Undo `pack`."""
  reward, discount = (lax.bitcast_convert_type(numbers[i], jnp.float32) for i in (0, 1))
  timestep = TimeStep(observation, reward, discount, numbers[2].astype(jnp.int8))
  return timestep, tuple(numbers[i] for i in range(3, len(numbers)))


class Programs:
  """The functions of one group, compiled. Each step is one call.

  Args:
    num_envs: N, of this group.
    length: T.
    each: columns of each environment.
    parts: learner devices that a trajectory is split over.
  """

  def __init__(self, agent: Agent, num_envs: int, length: int, each: int, parts: int) -> None:
    self.agent, self.num_envs, self.length, self.each = agent, num_envs, length, each
    self.parts = parts
    self.empty = jax.jit(self._empty)
    self.keys = jax.jit(self._keys)
    self.step = jax.jit(self._step, donate_argnums=1)
    self.step_some = jax.jit(self._step_some, donate_argnums=1)
    self.store = jax.jit(self._store, donate_argnums=0)
    self.finish = jax.jit(self._finish)
    self.take = jax.jit(self._take)

  def begin(self, params: Any, env_id: Array, timestep: TimeStep, key: Array) -> Carry:
    """Return `empty` on the device of env_id. Like results of `step` it is committed."""
    return jax.device_put(self.empty(params, env_id, timestep, key), env_id.sharding)

  def _empty(self, params: Any, env_id: Array, timestep: TimeStep, key: Array) -> Carry:
    """Return an empty Carry for environments env_id [N], of the shapes of the other arguments."""
    state = self.agent.initial_state(env_id)
    output, _ = jax.eval_shape(self.agent.act, params, state, timestep, key)
    columns = self.num_envs * self.each

    def rows(n: int, x: Any) -> Array:
      return jnp.zeros((n, columns, *x.shape[1:]), x.dtype)

    return Carry(
      agent_state=state,
      start=jax.tree.map(lambda x: jnp.zeros((columns, *x.shape[1:]), x.dtype), state),
      timesteps=jax.tree.map(functools.partial(rows, self.length + 1), timestep),
      outputs=jax.tree.map(functools.partial(rows, self.length), output),
    )

  def _keys(self, key: Array) -> Array:
    """Return the acting keys [T] of an unroll, as numbers, from the key of `unroll.unroll`."""
    act_key, _ = jax.random.split(key)
    return jax.random.key_data(jax.random.split(act_key, self.length))

  def _step(
    self, params: Any, carry: Carry, keys: Array, numbers: Array, observation: Any
  ) -> tuple[Carry, Any]:
    """Act in all environments at row t, with the call-th key; returns the carry and actions [N].

    `numbers` is `pack` of the timestep, call and t.
    """
    timestep, (call, t) = _unpack(numbers, observation)
    call, t = call[0], t[0]
    with outside_loops():
      output, agent_state = self.agent.act(params, carry.agent_state, timestep, _key(keys, call))

    def put(rows: Array, x: Array) -> Array:
      return lax.dynamic_update_slice(rows, x[None].astype(rows.dtype), (t,) + (0,) * x.ndim)

    carry = Carry(
      agent_state=agent_state,
      start=jax.tree.map(lambda s, x: jnp.where(t == 0, x, s), carry.start, carry.agent_state),
      timesteps=jax.tree.map(put, carry.timesteps, timestep),
      outputs=jax.tree.map(put, carry.outputs, output),
    )
    return carry, output.action

  def _step_some(
    self, params: Any, carry: Carry, keys: Array, numbers: Array, observation: Any
  ) -> tuple[Carry, Any]:
    """Act in environments env_id [b], each at its own row and column. Padding is out of range.

    `numbers` is `pack` of the timestep, call, env_id, row and column.
    """
    timestep, (call, env_id, row, column) = _unpack(numbers, observation)
    before = jax.tree.map(lambda x: x.at[env_id].get(mode='clip'), carry.agent_state)
    with outside_loops():
      output, after = self.agent.act(params, before, timestep, _key(keys, call[0]))
    opens = jnp.where(row == 0, column, self.num_envs * self.each)
    place = functools.partial(self._place, row, column)
    carry = Carry(
      agent_state=jax.tree.map(
        lambda s, x: s.at[env_id].set(x, mode='drop'), carry.agent_state, after
      ),
      start=jax.tree.map(lambda s, x: s.at[opens].set(x, mode='drop'), carry.start, before),
      timesteps=jax.tree.map(place, carry.timesteps, timestep),
      outputs=jax.tree.map(place, carry.outputs, output),
    )
    return carry, output.action

  @staticmethod
  def _place(row: Array, column: Array, rows: Array, x: Array) -> Array:
    return rows.at[row, column].set(x.astype(rows.dtype), mode='drop')

  def _store(self, carry: Carry, numbers: Array, observation: Any) -> Carry:
    """Store the last timesteps of unrolls, without acting.

    `numbers` is `pack` of the timestep, row and column.
    """
    timestep, (row, column) = _unpack(numbers, observation)
    place = functools.partial(self._place, row, column)
    return carry._replace(timesteps=jax.tree.map(place, carry.timesteps, timestep))

  def _finish(
    self, carry: Carry, numbers: Array, observation: Any, env_id: Array
  ) -> tuple[Any, Any]:
    """Return the trajectory [T+1, N] that ends here, in parts, and the agent's state [N]."""
    timestep, _ = _unpack(numbers, observation)
    timesteps = jax.tree.map(
      lambda rows, x: rows.at[self.length].set(x.astype(rows.dtype)), carry.timesteps, timestep
    )
    trajectory = Trajectory(timesteps, carry.outputs, carry.start, env_id)
    return self._split(trajectory), jax.tree.map(jnp.copy, carry.agent_state)

  def _take(self, carry: Carry, column: Array, env_id: Array) -> Any:
    """Return the trajectory in columns [N], in parts."""
    no_id: Any = ()
    all_columns = Trajectory(carry.timesteps, carry.outputs, carry.start, no_id)
    trajectory = map_batch(lambda axis, x: jnp.take(x, column, axis), all_columns)
    return self._split(trajectory._replace(env_id=env_id))

  def _split(self, trajectory: Trajectory) -> tuple[Trajectory, ...]:
    n = self.num_envs // self.parts

    def part(i: int) -> Trajectory:
      return map_batch(
        lambda axis, x: lax.slice_in_dim(x, i * n, (i + 1) * n, axis=axis), trajectory
      )

    return tuple(part(i) for i in range(self.parts))


def _key(keys: Array, i: Array) -> Array:
  """Return the i-th of keys that are kept as numbers."""
  return jax.random.wrap_key_data(keys[i])
