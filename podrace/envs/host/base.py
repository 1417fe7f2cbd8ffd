"""What pools share: their specification, next-step timesteps, checks, and exact episode counts."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podrace.envs import registry
from podrace.envs.registry import MissingExtra, UnknownName, Value
from podrace.types import FIRST, MID, Arrival, HostEnvironment, TimeStep


class HostError(Exception):
  """An environment on the host did what none may do; the message names it and the field."""


@dataclasses.dataclass(frozen=True)
class PoolArgs:
  """What one actor thread's pool is made of."""

  num_envs: int
  batch_size: int  # how many come back together; num_envs: all of them, in order
  seeds: np.ndarray  # [num_envs] u32
  threads: int  # or worker processes, that step them
  deadline: float  # seconds that a step may take


@dataclasses.dataclass(frozen=True)
class HostSpec:
  """A kind of environment on the host, before any is made."""

  name: str
  observation_space: Any  # gymnasium's, of one environment
  action_space: Any
  make: Callable[[PoolArgs], HostEnvironment]
  ordered_only: bool = False  # the pool can't return less than all
  frame_stack: int = 0  # observations are so many frames along their first axis; 0: they are not
  jax: Any = None  # the podrace Environment, if it is one in JAX, which then runs on the host CPU
  comes_and_goes: bool = False  # any number of a pool's environments may be there, in any order
  metrics: Callable[[], dict[str, float]] | None = None  # of its own, for the log


def make(name: str) -> HostSpec:
  """The host environment that `LIB:NAME,key=value,...` names; those in JAX are among them.

  Raises:
    UnknownName, MissingExtra: as `envs.make`.
  """
  key, env, options = registry.parse(name)
  library = registry.HOST_LIBRARIES.get(key)
  if library is None:
    if key not in registry.LIBRARIES:
      known = [*registry.HOST_LIBRARIES, *registry.LIBRARIES]
      raise UnknownName(
        f'no library {key!r} in environment {name!r}{registry.nearest(key, known)}; '
        f'the libraries are {", ".join(known)}'
      )
    pure = registry.make(name)
    refused = 'environments in JAX make their pool from keys, see podrace.envs.host.jax'

    def no_pool(args: PoolArgs) -> HostEnvironment:
      raise TypeError(refused)

    return HostSpec(
      name, pure.observation_space, pure.action_space, no_pool, ordered_only=True, jax=pure
    )
  try:
    module = importlib.import_module(library.module)
  except ImportError as error:
    raise MissingExtra(
      f"environment '{key}:{env}' needs the extra {library.extra!r}: "
      f"pip install 'podrace[{library.extra}]' ({error})"
    ) from error
  try:
    return module.make(env, options)
  except ImportError as error:
    raise UnknownName(
      f"environment '{key}:{env}' needs what is no part of podrace: {error}"
    ) from error


def options_of(
  name: str, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Any]:
  """As `registry.read_options`."""
  return registry.read_options(name, options, defaults)


def rows_of(env_id: np.ndarray, num_envs: int) -> Any:
  """What picks environments env_id of arrays [num_envs, ...]: where it is all of them, a slice,
  which copies nothing. They are sorted in that case."""
  return slice(None) if len(env_id) == num_envs and _in_order(env_id) else env_id


def _in_order(env_id: np.ndarray) -> bool:
  return bool((env_id == np.arange(len(env_id), dtype=env_id.dtype)).all())


# --- timesteps ----------------------------------------------------------------------------------


class Stepper:
  """Makes timesteps of what a library with next-step resets returns: flags, not step types."""

  def __init__(self, num_envs: int) -> None:
    self._opens = np.ones(num_envs, bool)  # the next arrival is FIRST
    self._over = np.zeros(num_envs, bool)  # the last one was FIRST and over at once

  def reset(self) -> None:
    self._opens[:] = True
    self._over[:] = False

  def reopen(self, env_id: np.ndarray) -> None:
    """These were restarted: their next arrival is FIRST."""
    self._opens[env_id] = True
    self._over[env_id] = False

  def timestep(
    self,
    env_id: np.ndarray,
    observation: Any,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
  ) -> TimeStep:
    """Where both flags are set, termination wins (discount 0).

    What is over with its first timestep (a life that is lost while it begins) is followed by
    another FIRST, whose discount is 0: nothing is bootstrapped from it.
    """
    ids = rows_of(env_id, len(self._opens))
    first: Any = self._opens[ids].copy()
    over = terminated | truncated
    last = over & ~first
    at_once = self._over[ids].copy()
    self._over[ids] = over & first
    self._opens[ids] = over
    kind: Any = MID + last.view(np.int8) - first.view(np.int8)  # FIRST, MID, LAST: 0, 1, 2
    learned: Any = np.where(first, 0, reward).astype(np.float32)
    discount: Any = (~((terminated & last) | at_once)).astype(np.float32)
    return TimeStep(observation, learned, discount, kind)


# --- checks -------------------------------------------------------------------------------------


class Checker:
  """Compares what arrives with what was declared, and says which environment and field is wrong."""

  def __init__(self, spec: HostSpec, num_envs: int) -> None:
    self._name, self._num_envs = spec.name, num_envs
    self._fields = list(_fields('observation', spec.observation_space))

  def __call__(self, arrival: Arrival) -> None:
    ids = arrival.env_id
    n = len(ids)
    if n and not (ids.min() >= 0 and ids.max() < self._num_envs):
      raise HostError(f'{self._name}: env_id {ids} is out of range({self._num_envs})')
    for field, space, get in self._fields:
      x = np.asarray(get(arrival.timestep.observation))
      if x.shape != (n, *space.shape):
        raise HostError(f'{self._name}: {field} has shape {x.shape[1:]}, declared {space.shape}')
      if x.dtype != space.dtype:
        raise HostError(f'{self._name}: {field} is {x.dtype}, declared {space.dtype}')
      if x.dtype.kind == 'f':
        self._finite(field, x, ids)
    self._finite('reward', arrival.timestep.reward, ids)

  def _finite(self, field: str, x: Any, ids: np.ndarray) -> None:
    if not np.isfinite(x).all():
      rows = ~np.isfinite(x.reshape(len(x), -1)).all(axis=1)
      raise HostError(
        f'{self._name}: {field} of environment {ids[rows].tolist()} is NaN or infinite'
      )


def _fields(where: str, space: Any) -> Any:
  from gymnasium import spaces

  if isinstance(space, spaces.Dict):
    for key, sub in space.spaces.items():
      for name, leaf, get in _fields(f'{where}/{key}', sub):
        yield name, leaf, lambda x, key=key, get=get: get(x[key])
  elif isinstance(space, spaces.Tuple):
    for i, sub in enumerate(space.spaces):
      for name, leaf, get in _fields(f'{where}/{i}', sub):
        yield name, leaf, lambda x, i=i, get=get: get(x[i])
  else:
    yield where, space, lambda x: x


def check_action(name: str, space: Any, action: Any) -> None:
  """Raises HostError where an agent's actions [b, ...] are not in the action space."""
  from gymnasium import spaces

  x: Any = np.asarray(action)
  if isinstance(space, spaces.Discrete):
    wrong = (x < int(space.start)) | (x >= int(space.start) + int(space.n))
  elif isinstance(space, spaces.MultiDiscrete):
    wrong = (x < space.start) | (x >= space.start + space.nvec)
  else:
    wrong = ~((x >= space.low) & (x <= space.high))  # NaN is wrong as well
  if wrong.any():
    raise HostError(f'{name}: the agent chose action {x[wrong][:3].tolist()}, not in {space}')


# --- episodes -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Totals:
  """Sums over finished episodes."""

  count: int = 0
  return_sum: float = 0.0
  return_square: float = 0.0
  length_sum: int = 0

  @property
  def return_deviation(self) -> float:
    """The sum of squared differences from the mean; doubles are exact enough for the difference."""
    return self.return_square - self.return_sum * (self.return_sum / max(self.count, 1))

  def __add__(self, other: Totals) -> Totals:
    return Totals(
      self.count + other.count,
      self.return_sum + other.return_sum,
      self.return_square + other.return_square,
      self.length_sum + other.length_sum,
    )


class EpisodeCounter:
  """Every finished episode of a pool, once, with unclipped returns."""

  def __init__(self, num_envs: int) -> None:
    self.episode_return = np.zeros(num_envs, np.float64)
    self.episode_length = np.zeros(num_envs, np.int64)
    self._run_id = np.zeros(num_envs, np.int64)
    self._over = np.ones(num_envs, bool)  # the next arrival opens a game
    self._finished = Totals()

  def add(self, arrival: Arrival) -> None:
    ids = rows_of(arrival.env_id, len(self._over))
    opens = self._over[ids] | (arrival.run_id != self._run_id[ids])
    self._run_id[ids] = arrival.run_id
    self.episode_return[ids] += arrival.score
    self.episode_length[ids] += arrival.timestep.step_type != FIRST  # of a life or of a game
    if opens.any():
      opened = arrival.env_id[opens]
      self.episode_return[opened] = 0
      self.episode_length[opened] = 0
    self._over[ids] = arrival.ended
    if arrival.ended.any():
      done = arrival.env_id[arrival.ended]
      returns = self.episode_return[done]
      self._finished += Totals(
        len(done),
        float(returns.sum()),
        float((returns**2).sum()),
        int(self.episode_length[done].sum()),
      )

  def take(self) -> Totals:
    """What finished since the last time."""
    finished, self._finished = self._finished, Totals()
    return finished

  def state(self) -> dict[str, np.ndarray]:
    """Of the episodes under way; the f64 returns as two f32, since JAX has no more."""
    high = self.episode_return.astype(np.float32)
    return dict(
      return_high=high,
      return_low=(self.episode_return - high).astype(np.float32),
      length=self.episode_length.astype(np.int32),
      over=self._over.copy(),
    )

  def restore(self, state: Mapping[str, Any]) -> None:
    """Undoes `state`."""
    high, low = (np.asarray(state[k], np.float64) for k in ('return_high', 'return_low'))
    self.episode_return = high + low
    self.episode_length = np.array(state['length'], np.int64)
    self._over = np.array(state['over'], bool)
