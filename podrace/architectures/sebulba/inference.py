"""One group's state on its device: parameters, keys, and the unrolls under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.architectures.sebulba.device_programs import Carry, pack
from podrace.types import Array, TimeStep

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram


class Inference:
  """Calls the programs of `device_programs` with the state of one group.

  Args:
    acting: has the compiled programs.
    index: of the group, counted in this process.
    unroll_key: from the number of an unroll to its PRNG key.
    number: of the first unroll.
  """

  carry: Carry

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    device: jax.Device,
    unroll_key: Callable[[int], Array],
    number: int,
  ) -> None:
    self.acting, self.index, self.device = acting, index, device
    self.num_envs, self.length = acting.envs_per_group, acting.unroll_length
    self._programs = acting.programs
    env_id = acting.first_env(index) + np.arange(self.num_envs, dtype=np.int32)
    self._env_id = jax.device_put(env_id, device)
    self.version, self.params = -1, None  # none yet
    self._unroll_key = unroll_key
    self._keyed = number  # the unroll that the keys belong to; after a restart a later one
    self._calls = 0  # number of these keys that were used

  def use(self, version: int, params: Any) -> None:
    """Act with these parameters from now on."""
    self.version, self.params = version, params

  def begin(self, timestep: TimeStep, agent_state: Any = None) -> None:
    """Make the first carry, for timesteps of this shape, with `agent_state` if there is one."""
    example = jax.tree.map(lambda x: np.zeros((self.num_envs, *x.shape[1:]), x.dtype), timestep)
    key = self._unroll_key(self._keyed)
    self.carry = self._programs.begin(self.params, self._env_id, example, key)
    if agent_state is not None:
      state = jax.tree.map(jnp.copy, jax.device_put(agent_state, self.device))
      self.carry = self.carry._replace(agent_state=state)
    self._new_keys()

  def key_unroll(self, number: int) -> None:
    """Use the keys of unroll `number`, unless the keys of a later unroll are in use."""
    if self._keyed < number:
      self._keyed = number
      self._new_keys()

  @property
  def used_keys(self) -> np.ndarray:
    """The unroll that the keys belong to and how many of them were used, [2] i64."""
    return np.array([self._keyed, self._calls], np.int64)

  def go_on(self, used_keys: np.ndarray) -> None:
    """Continue the keys of an earlier life, if they belong to a later unroll than these."""
    keyed, calls = used_keys.tolist()
    if keyed >= self._keyed:
      self._keyed = keyed
      self._new_keys()
      self._calls = calls

  def _new_keys(self) -> None:
    self._keys = self._programs.keys(self._unroll_key(self._keyed))
    self._calls = 0

  def _next_call(self) -> int:
    """Return the index of the next key. An unroll with a restart also uses keys of the next one."""
    if self._calls == self.length:
      self._keyed += 1
      self._new_keys()
    self._calls += 1
    return self._calls - 1

  def step(self, timestep: TimeStep, observation: Any, t: int) -> Any:
    """Return the actions [N] of all environments, which are at row t."""
    numbers = pack(timestep, self._next_call(), t)
    self.carry, action = self._programs.step(
      self.params, self.carry, self._keys, numbers, observation
    )
    return action

  def step_some(
    self, ids: np.ndarray, timestep: TimeStep, row: np.ndarray, column: np.ndarray
  ) -> np.ndarray:
    """Return the actions [b] of environments ids [b], each at its own row and column."""
    row, column, timestep = self._pad(timestep, row, column)
    env_id = np.full(len(row), self.num_envs, np.int32)
    env_id[: len(ids)] = ids
    numbers = pack(timestep, self._next_call(), env_id, row, column)
    self.carry, action = self._programs.step_some(
      self.params, self.carry, self._keys, numbers, timestep.observation
    )
    return np.asarray(action)[: len(ids)]

  def store(self, timestep: TimeStep, row: np.ndarray, column: np.ndarray) -> None:
    """Store timesteps [b] that end their unrolls."""
    row, column, timestep = self._pad(timestep, row, column)
    numbers = pack(timestep, row, column)
    self.carry = self._programs.store(self.carry, numbers, timestep.observation)

  def finish(self, timestep: TimeStep, observation: Any) -> tuple[Any, Any]:
    """Return the trajectory that ends with this timestep, in parts, and the agent's state [N]."""
    return self._programs.finish(self.carry, pack(timestep), observation, self._env_id)

  def take(self, columns: np.ndarray, env_id: np.ndarray) -> Any:
    """Return the trajectory in columns [N], in parts."""
    return self._programs.take(self.carry, columns, env_id)

  def _pad(self, timestep: TimeStep, row: np.ndarray, column: np.ndarray) -> Any:
    """Pad (row, column, timestep) to the next size of `ActingProgram.sizes`, out of range."""
    more = min(s for s in self.acting.sizes if s >= len(row)) - len(row)
    if not more:
      return row, column, timestep

    def fill(x: np.ndarray, value: int = 0) -> np.ndarray:
      return np.concatenate([x, np.full((more, *x.shape[1:]), value, x.dtype)])

    return (
      fill(row, self.length + 1),
      fill(column, self.num_envs * self.acting.columns),
      jax.tree.map(fill, timestep),
    )
