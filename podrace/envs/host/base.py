"""What pools share: their specification, next-step timesteps, checks, and exact episode counts."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from podrace.envs import registry
from podrace.envs.host.spaces import action_bounds, i32, wide_bounds
from podrace.envs.spaces import (
  ALLOWS_NOTHING,
  ALLOWS_SOME,
  convert,
  leaves,
  values,
  without_choice,
)
from podrace.errors import HostError, RunError, UnknownName
from podrace.types import FIRST, LARGEST_REWARD, MID, Arrival, HostEnvironment, TimeStep

log = logging.getLogger('podrace.envs')


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

  name: str  # with its options, unless they are the defaults: what `make` makes the same from
  observation_space: Any  # gymnasium's, of one environment
  action_space: Any
  make: Callable[[PoolArgs], HostEnvironment]
  ordered_only: bool = False  # the pool can't return less than all
  frame_stack: int = 0  # observations are so many frames along their first axis; 0: they are not
  jax: Any = None  # the podrace Environment, if it is one in JAX, which then runs on the host CPU
  comes_and_goes: bool = False  # any number of a pool's environments may be there, in any order
  metrics: Callable[[], dict[str, float]] | None = None  # of its own, for the log
  finished: Callable[[], None] | None = None  # tells whoever has them that the run is complete
  # Resets and steps one of them, within so many seconds; raises UsageError if that goes wrong.
  try_out: Callable[[float], None] | None = None
  outside: set[str] = dataclasses.field(default_factory=set, compare=False)  # see Checker


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

    observation, action = (convert(i32, s) for s in (pure.observation_space, pure.action_space))
    return HostSpec(name, observation, action, no_pool, ordered_only=True, jax=pure)
  module = registry.adapter_of(library, f"environment '{key}:{env}'")
  try:
    return module.make(env, options)
  except ImportError as error:
    raise UnknownName(
      f"environment '{key}:{env}' needs what is no part of podrace: {error}"
    ) from error


EVERY = slice(None)  # of arrays [num_envs, ...]


@functools.cache
def everyone(num_envs: int) -> np.ndarray:
  """The ids of all environments in order, to be read only.

  It is always the same array: pools that hand it out save who is given it a comparison.
  """
  ids = np.arange(num_envs, dtype=np.int32)
  ids.flags.writeable = False
  return ids


SIZES = 4  # of batches of environments that come and go: all of a thread's, half of them, ...


def batch_sizes(most: int) -> tuple[int, ...]:
  """What batches of at most `most` environments are padded to where these come and go; the least first."""
  return tuple(sorted({-(-most // 2**i) for i in range(SIZES)}))


def groups_at_once(groups: Iterable[int], most: int) -> int:
  """How many of the groups that wait, of so many environments each and in their order, to act for at once.

  As many as fit a batch and leave no more than a quarter of it for padding; all that fit if it can't be had.
  """
  sizes, total, fit, good = batch_sizes(most), 0, 0, 0
  for group in groups:
    total += group
    if total > most:
      break
    fit += 1
    if 4 * total >= 3 * min(s for s in sizes if s >= total):
      good = fit
  return good or fit


def rows_of(env_id: np.ndarray, num_envs: int) -> Any:
  """What picks environments env_id of arrays [num_envs, ...]: EVERY, which copies nothing, where
  it is all of them, in order."""
  ids = everyone(num_envs)
  whole = env_id is ids or (len(env_id) == num_envs and not np.count_nonzero(env_id != ids))
  return EVERY if whole else env_id


# --- deadlines -----------------------------------------------------------------------------------

LOOK_SECONDS = 1.0  # between looks at who is late, at most; more of a pause does not count
AGAIN_SECONDS = 10.0  # that who is late is still given
START_SECONDS = 120.0  # for a worker to import its libraries and reset


class Clock:
  """Seconds that who looks at it has been there; of a pause between two looks, little counts.

  A process that was stopped and goes on (SIGSTOP, a frozen container) finds that much time has
  passed, in which nobody else may have run either.
  """

  def __init__(self) -> None:
    self._now, self._at = 0.0, time.monotonic()

  def look(self) -> float:
    """The time by this clock, from 0."""
    at = time.monotonic()
    self._now += min(at - self._at, 2 * LOOK_SECONDS)
    self._at = at
    return self._now


class Deadline:
  """Who has been silent for more than `seconds`; who seems so is looked at twice."""

  def __init__(self, seconds: float) -> None:
    self._seconds, self._clock = seconds, Clock()
    self._late: dict[int, float] = {}  # since when, by the clock

  def passed(self, who: int, silence: float) -> bool:
    """Whether it is too late for `who`, silent for so many seconds; to be asked again and again."""
    now = self._clock.look()
    if silence <= self._seconds:
      self._late.pop(who, None)
      return False
    return now - self._late.setdefault(who, now) >= min(self._seconds, AGAIN_SECONDS)


# --- timesteps ----------------------------------------------------------------------------------


class Stepper:
  """Makes timesteps of what a library with next-step resets returns: flags, not step types."""

  def __init__(self, num_envs: int) -> None:
    self._opens = np.ones(num_envs, bool)  # the next arrival is FIRST
    self._over = np.zeros(num_envs, bool)  # the last one was FIRST and over at once
    self._any_over = False  # of these

  def reset(self) -> None:
    self.reopen(everyone(len(self._opens)))

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
    rows = rows_of(env_id, len(self._opens))
    over = terminated | truncated
    first: Any
    if rows is EVERY:  # a few operations on small arrays are most of what a pool in C++ costs here
      first, self._opens = self._opens, over
    else:
      first = self._opens[rows]
      self._opens[rows] = over
    last = over & ~first
    final = terminated & last
    if self._any_over:
      final |= self._over[rows]
    at_once = over & first
    if self._any_over or np.count_nonzero(at_once):
      self._over[rows] = at_once
      self._any_over = bool(np.count_nonzero(self._over))
    kind: Any = MID + last.view(np.int8) - first.view(np.int8)  # FIRST, MID, LAST: 0, 1, 2
    learned: Any = np.where(first, 0, reward).astype(np.float32, copy=False)
    discount: Any = (~final).astype(np.float32)
    return TimeStep(observation, learned, discount, kind)


# --- checks -------------------------------------------------------------------------------------


BOUNDED = 1000  # arrivals, of which is looked whether they are within their Boxes


class Checker:
  """Compares what arrives, and is sent, with what was declared; says what of which is wrong.

  Observations outside of their Box are learned from as they are. It is said once of each part, of
  all pools of a HostSpec together.
  """

  def __init__(self, spec: HostSpec, num_envs: int, agent: Any = None) -> None:
    self._name, self._num_envs, self._action_space = spec.name, num_envs, spec.action_space
    self._agent = agent
    self._space, self._leaves = spec.observation_space, list(leaves(spec.observation_space))
    self._low, self._high = action_bounds(spec.action_space)
    self._limits = {field: limits for field, x in self._leaves if (limits := wide_bounds(x))}
    self._outside, self._count = spec.outside, 0

  def __call__(self, arrival: Arrival) -> None:
    ids = arrival.env_id
    n = len(ids)
    known = not n or rows_of(ids, self._num_envs) is EVERY
    if not known and not (ids.min() >= 0 and ids.max() < self._num_envs):
      raise HostError(f'{self._name}: env_id {ids} is out of range({self._num_envs})')
    arrays = values(self._space, arrival.timestep.observation)
    for (field, space), x in zip(self._leaves, map(np.asarray, arrays), strict=True):
      if x.shape != (n, *space.shape):
        raise HostError(f'{self._name}: {field} has shape {x.shape[1:]}, declared {space.shape}')
      if x.dtype != space.dtype:
        raise HostError(f'{self._name}: {field} is {x.dtype}, declared {space.dtype}')
      if x.dtype.kind == 'f':
        self._finite(field, x, ids)
      if self._count < BOUNDED and field in self._limits:
        self._within(field, space, x, ids)
    self._count += 1
    if (stuck := without_choice(arrival.timestep)) is not None and np.count_nonzero(stuck):
      kind = ('FIRST', 'MID', 'LAST')[arrival.timestep.step_type[stuck][0]]
      raise HostError(
        f'{self._name}: environment {ids[stuck].tolist()} has {ALLOWS_NOTHING} with a {kind} timestep, '
        f'expected {ALLOWS_SOME}'
      )
    self._bounded('reward', arrival.timestep.reward, ids)
    if arrival.score is not arrival.timestep.reward:  # as where rewards are clipped for learning
      self._bounded('reward', arrival.score, ids)

  def _bounded(self, field: str, x: Any, ids: np.ndarray) -> None:
    bounded = np.abs(x) <= LARGEST_REWARD  # NaN isn't
    if np.count_nonzero(bounded) != len(x):
      self._finite(field, x, ids)
      raise HostError(
        f'{self._name}: {field} of environment {ids[~bounded].tolist()} is {x[~bounded][0]:g}, '
        f'expected at most {LARGEST_REWARD:g} in size'
      )

  def _finite(self, field: str, x: Any, ids: np.ndarray) -> None:
    finite = np.isfinite(x)
    if np.count_nonzero(finite) != x.size:
      rows = ~finite.reshape(len(x), -1).all(axis=1)
      raise HostError(
        f'{self._name}: {field} of environment {ids[rows].tolist()} is NaN or infinite'
      )

  def _within(self, field: str, space: Any, x: np.ndarray, ids: np.ndarray) -> None:
    low, high = self._limits[field]
    outside = (x < low) | (x > high)
    if np.count_nonzero(outside) and field not in self._outside:
      self._outside.add(field)
      where = tuple(np.argwhere(outside)[0].tolist())
      log.warning(
        '%s: %s of environment %d has %g, outside of %s; it is learned from as it is',
        self._name, field, ids[where[0]], x[where], space,
      )  # fmt: skip

  def action(self, x: np.ndarray) -> None:
    """Raises RunError where an agent's actions [b, ...] are not in the action space."""
    fits = (x >= self._low) & (x <= self._high)  # NaN doesn't
    if np.count_nonzero(fits) != x.size:
      from podrace.system.blame import out_of_space

      row = x[np.argwhere(~fits)[0, 0]]
      raise RunError(out_of_space(self._agent, self._action_space, row.tolist()))


def narrowed(name: str, x: np.ndarray, dtype: Any) -> np.ndarray:
  """An array in the type that was declared for it; raises HostError if integers don't fit."""
  y = x.astype(dtype, copy=False)
  if x.dtype.kind in 'iu' and x.dtype.itemsize > y.dtype.itemsize and np.count_nonzero(x != y):
    raise HostError(f'{name}: observation has {x[x != y][:3].tolist()}, which {y.dtype} has not')
  return y


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
    self.run_id = np.zeros(num_envs, np.int64)
    self._over = np.ones(num_envs, bool)  # the next arrival opens a game
    self._finished = Totals()

  def add(self, arrival: Arrival) -> np.ndarray:
    """Accounts for what arrived; how often each was restarted since it last did, [b]."""
    rows = rows_of(arrival.env_id, len(self._over))
    restarts: np.ndarray = arrival.run_id - self.run_id[rows]
    opens = self._over[rows]
    if np.count_nonzero(restarts):
      opens = np.logical_or(opens, restarts)
      self.run_id[rows] = arrival.run_id
    returns, lengths = self.episode_return[rows], self.episode_length[rows]  # views, if it is all
    returns += arrival.score
    lengths += arrival.timestep.step_type != FIRST  # of a life or of a game
    if np.count_nonzero(opens):
      returns[opens] = 0
      lengths[opens] = 0
    self._over[rows] = arrival.ended
    if rows is not EVERY:
      self.episode_return[rows], self.episode_length[rows] = returns, lengths
    if count := int(np.count_nonzero(arrival.ended)):
      done = returns[arrival.ended]
      length = int(lengths[arrival.ended].sum())
      self._finished += Totals(count, float(done.sum()), float(np.dot(done, done)), length)
    return restarts

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
