"""Environments in JAX that replay a log."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from podrace.envs.base import EnvironmentBatch, anywhere, batch
from podrace.envs.logs.recorded import Log, LogRows
from podrace.envs.logs.share import Share, is_logged
from podrace.errors import UsageError
from podrace.types import LAST, Array, Environment, TimeStep

INNER, RECORDED, FLAG = 'inner', 'recorded', 'is_recorded'  # entries of an observation


class LogStreams(NamedTuple):
  """The places of n streams in the log, on one device."""

  row: Array  # [n] i32 of the timestep that each stream has reached
  order: Array  # [E] i32 a permutation of the episodes
  next: Array  # [1] i32 the place in `order` of the episode that the next stream begins
  key: Array  # [1, ...] u32 PRNG key of the next permutation, as numbers


class LogState(NamedTuple):
  """State of a batch, of which a part replays the log."""

  streams: LogStreams
  inner: Any  # of the environments that act; () if there are none


@dataclasses.dataclass(frozen=True, eq=False)
class LogEnvironment:
  """Copies of `env` of which a share replays a log. It is stepped as a batch.

  An observation has three entries: that of the environment or log, the recorded action, and
  whether there is one. The streams of a device walk through the episodes in a shuffled order. Each
  episode is replayed once, by one stream, before the order is shuffled again.

  Args:
    log: the recorded episodes.
    share: p of every q environments replay the log.
    env: the environment that the rest act in; None if all replay the log.
  """

  log: Log
  share: Share
  env: Environment | None
  _held: list[LogRows] = dataclasses.field(default_factory=list, init=False, repr=False)

  @property
  def arrays(self) -> LogRows:
    """The timesteps of the log, which a program may take as an argument.

    As constants they would be compiled, at several times their memory.
    """
    return self.log.rows

  @contextlib.contextmanager
  def holding(self, arrays: Any) -> Iterator[None]:
    """Let functions that are traced meanwhile read `arrays`, if there are any."""
    self._held.extend([arrays] if arrays else [])
    try:
      yield
    finally:
      self._held.clear()

  @property
  def _rows(self) -> LogRows:
    return self._held[0] if self._held else self.log.rows

  @property
  def action_space(self) -> Any:
    """Space of the actions of one environment."""
    return (self.env or self.log).action_space

  @property
  def observation_space(self) -> Any:
    """Space of the observations of one environment."""
    return observation_space(self.env or self.log)

  def batch(self, num_envs: int) -> EnvironmentBatch:
    """Return functions that step `num_envs` environments together.

    Raises:
      UsageError: if they are no multiple of q.
    """
    logged, acting = split_block(num_envs, self.share)
    streams = Streams(len(logged))
    inner = batch(self.env, len(acting)) if self.env is not None and len(acting) else None
    merge = functools.partial(_merge, order=np.argsort(np.concatenate([logged, acting])))

    def reset(key: Array) -> tuple[LogState, TimeStep]:
      log_key, env_key = jax.random.split(key)
      place, timestep = streams.reset(self._rows, log_key)
      if inner is None:
        return LogState(place, ()), timestep
      state, acted = inner.reset(env_key)
      return LogState(place, state), merge(timestep, _unrecorded(acted, self.action_space))

    def draw(keys: Array) -> Any:
      return () if inner is None else inner.draw(keys[acting])

    def step_drawn(state: LogState, action: Any, draws: Any) -> tuple[LogState, TimeStep]:
      place, timestep = streams.step(self._rows, state.streams)
      if inner is None:
        return LogState(place, ()), timestep
      step = inner.step_drawn or inner.step
      of_acting = jax.tree.map(lambda x: x[acting], action)
      after, acted = step(state.inner, of_acting, draws)
      return LogState(place, after), merge(timestep, _unrecorded(acted, self.action_space))

    def step(state: LogState, action: Any, keys: Array) -> tuple[LogState, TimeStep]:
      return step_drawn(state, action, draw(keys))

    def infos(state: LogState) -> dict[str, Array]:
      if inner is None:
        return {}
      zeros = jnp.zeros(len(logged))
      return {name: merge(zeros, x) for name, x in inner.infos(state.inner).items()}

    return EnvironmentBatch(reset, step, infos, draw, step_drawn)


def observation_space(env: Any) -> spaces.Dict:
  """Return the space of observations with a recorded action, for the spaces of `env`."""
  flag = spaces.Box(0, 1, (), np.int8)
  return spaces.Dict({INNER: env.observation_space, RECORDED: env.action_space, FLAG: flag})


def split_block(num_envs: int, share: Share) -> tuple[np.ndarray, np.ndarray]:
  """Return the positions of the environments that replay the log, and of the rest.

  Raises:
    UsageError: if the environments are no multiple of q.
  """
  p, q = share
  if num_envs % q:
    raise UsageError(
      f'--log-share {p}/{q}: each device or actor thread has {num_envs} environments, which must '
      f'be a multiple of {q}: give another --num-envs'
    )
  position = np.arange(num_envs)
  logged = is_logged(position, share)
  return position[logged], position[~logged]


@dataclasses.dataclass(frozen=True)
class Streams:
  """`n` streams of a log, as pure functions of its rows."""

  n: int

  def reset(self, rows: LogRows, key: Array) -> tuple[LogStreams, TimeStep]:
    """Begin an episode in each stream."""
    order_key, next_key = jax.random.split(key)
    order = jax.random.permutation(order_key, jnp.arange(len(rows.starts), dtype=jnp.int32))
    none = jnp.zeros(self.n, jnp.int32)
    streams = LogStreams(none, order, jnp.zeros(1, jnp.int32), jax.random.key_data(next_key)[None])
    return self._walk(rows, streams, jnp.ones(self.n, bool))

  def step(self, rows: LogRows, streams: LogStreams) -> tuple[LogStreams, TimeStep]:
    """Move each stream on by one timestep."""
    return self._walk(rows, streams, jnp.asarray(rows.step_type)[streams.row] == LAST)

  def _walk(self, rows: LogRows, streams: LogStreams, over: Array) -> tuple[LogStreams, TimeStep]:
    """Move each stream to its next row, or to the next episode if its own is over [n]."""
    episodes = len(rows.starts)
    place = streams.next + jnp.cumsum(over, dtype=jnp.int32) - 1
    following = streams.next + jnp.sum(over, dtype=jnp.int32)
    through = anywhere(following[0] >= episodes)

    def shuffled(key: Array) -> tuple[Array, Array]:
      order_key, next_key = jax.random.split(jax.random.wrap_key_data(key[0]))
      return jax.random.permutation(order_key, streams.order), jax.random.key_data(next_key)[None]

    again, key = jax.lax.cond(through, shuffled, lambda key: (streams.order, key), streams.key)
    ended = following[0] >= episodes  # of this member of a batch, which `through` is not
    again, key = (jnp.where(ended, x, y) for x, y in ((again, streams.order), (key, streams.key)))
    episode = jnp.where(place < episodes, streams.order[place % episodes], again[place % episodes])
    row = jnp.where(over, jnp.asarray(rows.starts)[episode], streams.row + 1)
    moved = LogStreams(row, again, following % episodes, key)
    return moved, read_rows(rows, row)


def read_rows(rows: LogRows, row: Any) -> TimeStep:
  """Return the timesteps at `row` [n], with the recorded actions in their observations."""
  observation, action, *rest = jax.tree.map(
    lambda x: jnp.asarray(x)[row], (rows.observation, rows.action, *rows[2:5])
  )
  flag = jnp.ones(row.shape, jnp.int8)
  return TimeStep({INNER: observation, RECORDED: action, FLAG: flag}, *rest)


def _unrecorded(timestep: TimeStep, action_space: Any) -> TimeStep:
  """Return timesteps [n] of an environment with an empty entry for the recorded action."""
  n = timestep.reward.shape[0]
  action = jnp.zeros((n, *action_space.shape), jax.dtypes.canonicalize_dtype(action_space.dtype))
  observation = {INNER: timestep.observation, RECORDED: action, FLAG: jnp.zeros(n, jnp.int8)}
  return timestep._replace(observation=observation)


def _merge(of_log: Any, acted: Any, order: np.ndarray) -> Any:
  """Return the rows of the log and the rest in the order of the environments."""

  def leaf(x: Array, y: Array) -> Array:
    return jnp.concatenate([x, y.astype(x.dtype)])[order]

  return jax.tree.map(leaf, of_log, acted)
