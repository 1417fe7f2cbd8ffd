"""Environments in JAX, stepped on the host's CPU like other host environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podrace.envs.base import batch
from podrace.envs.host.infos import InfoAdder, Infos, no_rows
from podrace.envs.host.timesteps import everyone
from podrace.envs.timestep_rules import RULES
from podrace.errors import HostError
from podrace.system.blame import label
from podrace.topology import host_device
from podrace.types import LAST, Array, Arrival, Environment, TimeStep


class JaxSteps:
  """The compiled functions that all pools of one size share."""

  def __init__(self, env: Environment, num_envs: int, length: int) -> None:
    self.env, self.num_envs, self.length = env, num_envs, length
    arrays = getattr(env, 'arrays', ()) if hasattr(env, 'holding') else ()
    many = batch(env, num_envs)
    self._arrays = jax.device_put(arrays, host_device()) if arrays else ()

    def holding(arrays: Any) -> contextlib.AbstractContextManager[None]:
      return env.holding(arrays) if arrays else contextlib.nullcontext()  # type: ignore[attr-defined]

    def reset(key: Array, arrays: Any) -> Any:
      with holding(arrays):
        return many.reset(key)

    self.split = jax.jit(  # as numbers, which can be indexed without key-reuse errors
      lambda key: jax.random.key_data(jax.random.split(key, (length, num_envs)))
    )

    def step(state: Any, action: Any, keys: Array, t: Array, arrays: Any) -> Any:
      with holding(arrays):
        state, timestep = many.step(state, action, jax.random.wrap_key_data(keys[t]))
        return state, timestep, many.infos(state)

    self._reset, self._step = jax.jit(reset), jax.jit(step)
    self.infos = Infos()

  def reset(self, key: Array) -> Any:
    """Return the state and the timesteps of new episodes."""
    return self._reset(key, self._arrays)

  def step(self, state: Any, action: Any, keys: Array, t: Any) -> Any:
    """Return the state, the timesteps and the infos after step t of the keys."""
    return self._step(state, action, keys, t, self._arrays)

  def forget_infos(self) -> None:
    """Drop the numbers of all pools so far."""
    self.infos = Infos()


class JaxPool:
  """A pool of copies of a pure environment, in lockstep. Its state can be saved.

  It uses the keys that Anakin would use: `reset_key`, and `unroll_key(k)` for the steps of the k-th
  unroll. So both architectures see the same environments.
  """

  watches_itself = False

  def __init__(self, steps: JaxSteps, reset_key: Array, unroll_key: Callable[[int], Array]) -> None:
    self.num_envs = self.batch_size = steps.num_envs
    self._do, self._reset_key, self._unroll_key = steps, reset_key, unroll_key
    self._device = host_device()
    self._ids = everyone(steps.num_envs)
    self._zeros = np.zeros(steps.num_envs, np.int32)
    self.state: Any = None
    self.steps = 0  # since the run began
    self._waiting: TimeStep | None = None
    self._last: np.ndarray | None = None  # [num_envs] bool: the last step was LAST; None: unknown
    self._keys: Any = None
    self._infos: dict[str, Array] = {}  # [num_envs] each, valid where an episode ends
    self._rows = no_rows(1)
    self._adder = InfoAdder(self._rows, 0)
    steps.infos.open(self._rows)

  def reset(self) -> None:
    """Start the first episode of every environment."""
    key = jax.device_put(self._reset_key, self._device)
    self.state, self._waiting = self._do.reset(key)
    self._last = None

  def restore(self, state: Any, steps: int) -> None:
    """Continue from a saved state, of which the timestep has been received."""
    self.state, self.steps = jax.device_put(state, self._device), steps

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    unroll, t = divmod(self.steps, self._do.length)
    if self._keys is None or t == 0:
      self._keys = self._do.split(jax.device_put(self._unroll_key(unroll), self._device))
    # The state is on the host's device, so the other arguments need no explicit transfer.
    self.state, self._waiting, self._infos = self._do.step(
      self.state, action, self._keys, np.int32(t)
    )
    self.steps += 1

  def recv(self) -> Arrival:
    """Wait for environments that are ready."""
    assert self._waiting is not None, 'recv before reset or send'
    timestep = jax.tree.map(np.asarray, self._waiting)
    self._waiting = None
    ended: np.ndarray = timestep.step_type == LAST
    order = RULES['order']
    if self._last is not None and np.count_nonzero(order.is_broken(timestep, self._last)):
      raise HostError(order.message(label(self._do.env, 'step')))
    self._last = ended
    if self._infos and ended.any():
      infos = {name: np.asarray(x) for name, x in self._infos.items()}
      for i in np.flatnonzero(ended):
        self._adder.add({name: x[i] for name, x in infos.items()})
    return Arrival(self._ids, timestep, timestep.reward, ended, self._zeros)

  def kill(self) -> None:
    """Do nothing: there are no processes."""

  def close(self) -> None:
    """Keep the numbers for the log."""
    self._do.infos.close(self._rows)
