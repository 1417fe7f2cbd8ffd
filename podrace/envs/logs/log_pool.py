"""Environments on the host of which a share replays a log."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from podrace.envs.host.base import HostSpec, PoolArgs, SavedPool, make_jax_spec
from podrace.envs.host.spaces import i32
from podrace.envs.host.timesteps import everyone
from podrace.envs.logs.log_environment import (
  FLAG,
  INNER,
  RECORDED,
  LogEnvironment,
  Streams,
  observation_space,
  read_rows,
  split_block,
)
from podrace.envs.logs.recorded import Log
from podrace.envs.logs.share import Share
from podrace.envs.spaces import convert
from podrace.errors import HostError
from podrace.topology import host_device
from podrace.types import LAST, Arrival, HostEnvironment, TimeStep


def host_spec(log: Log, share: Share, env: HostSpec | None) -> HostSpec:
  """Return a kind of environment on the host, of which a share replays a log.

  Args:
    log: the recorded episodes.
    share: p of every q environments replay the log.
    env: the environment that the rest act in; None if all replay the log.
  """
  if env is None or env.jax is not None or share[0] == share[1]:
    pure = LogEnvironment(log, share, None if env is None else env.jax)
    return make_jax_spec(log.name if env is None else env.name, pure, share[1])
  return dataclasses.replace(
    env,
    observation_space=convert(i32, observation_space(env)),
    make=functools.partial(_make_mixed, _HostLog(log), share, env),
    ordered_only=True,
    frame_stack=0,  # replay stores whole stacks, as the log has recorded actions beside them
    multiple=share[1],
  )


class _HostLog:
  """A log on the host's CPU, with the compiled functions that all pools share."""

  def __init__(self, log: Log) -> None:
    self._log = log

  @functools.cached_property
  def rows(self) -> Any:
    return jax.device_put(self._log.rows, host_device())

  def reset(self, n: int, seed: int) -> tuple[Any, TimeStep]:
    with jax.default_device(host_device()):
      return _reset(n, self.rows, jax.random.key(seed))

  def read(self, row: Any) -> TimeStep:
    return read_rows(self.rows, row)

  def step(self, n: int, streams: Any) -> tuple[Any, TimeStep]:
    return _step(n, self.rows, streams)


@functools.partial(jax.jit, static_argnums=0)
def _reset(n: int, rows: Any, key: Any) -> Any:
  return Streams(n).reset(rows, key)


@functools.partial(jax.jit, static_argnums=0)
def _step(n: int, rows: Any, streams: Any) -> Any:
  return Streams(n).step(rows, streams)


def _make_mixed(log: _HostLog, share: Share, env: HostSpec, args: PoolArgs) -> HostEnvironment:
  logged, acting = split_block(args.num_envs, share)
  of_env = dataclasses.replace(
    args, num_envs=len(acting), batch_size=len(acting), seeds=args.seeds[acting]
  )
  return MixedPool(log, env.make(of_env), logged, acting, int(args.seeds[logged[0]]))


class MixedPool:
  """A pool in lockstep, of environments that act and of streams of a log.

  Args:
    log: the log.
    inner: the environments that act, in lockstep.
    logged: [n] the positions of the streams in this pool.
    acting: [m] the positions of the environments of `inner`.
    seed: of the order of the episodes.
  """

  def __init__(
    self, log: _HostLog, inner: HostEnvironment, logged: np.ndarray, acting: np.ndarray, seed: int
  ) -> None:
    self.num_envs = self.batch_size = len(logged) + len(acting)
    self.watches_itself = inner.watches_itself
    self._log, self._inner, self._seed = log, inner, seed
    self._logged, self._acting = logged, acting
    self._place: Any = None  # of the streams
    self._rows: TimeStep | None = None  # of the streams, to be received
    self._ready = np.zeros(len(logged), bool)  # streams that `recv` returns
    self._asked = 0  # environments of `inner` that have not answered

  def reset(self) -> None:
    """Begin an episode in each environment and stream."""
    self._inner.reset()
    self._asked = len(self._acting)
    self._place, rows = self._log.reset(len(self._logged), self._seed)
    self._show(rows, np.ones(len(self._logged), bool))

  def _show(self, rows: Any, ready: np.ndarray) -> None:
    self._rows = jax.tree.map(np.asarray, rows)
    self._ready = ready

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions to environments; streams of the log move on together."""
    position = np.asarray(env_id)
    of_env = np.isin(position, self._acting)
    if of_env.any():
      self._asked += int(of_env.sum())
      ids = np.searchsorted(self._acting, position[of_env]).astype(np.int32)
      whole = len(ids) == len(self._acting)
      self._inner.send(everyone(len(ids)) if whole else ids, action[of_env])
    moved = np.isin(self._logged, position)
    if moved.any():
      if not moved.all():
        raise HostError('the streams of a log step together')
      self._place, rows = self._log.step(len(self._logged), self._place)
      self._show(rows, moved)

  def recv(self) -> Arrival:
    """Wait for the environments that act; returns them and the streams that have moved."""
    ids = self._logged[self._ready].astype(np.int32)
    rows: Any = jax.tree.map(lambda x: x[self._ready], self._rows)
    zeros = np.zeros(len(ids), np.int32)
    of_log = Arrival(ids, rows, rows.reward, rows.step_type == LAST, zeros)
    self._ready = np.zeros_like(self._ready)
    if not self._asked:
      return of_log
    arrival = self._inner.recv()
    self._asked -= len(arrival.env_id)
    acted = arrival._replace(
      env_id=self._acting[arrival.env_id].astype(np.int32),
      timestep=_with_entries(arrival.timestep, rows),
    )
    if not len(ids):
      return acted
    order = np.argsort(np.concatenate([of_log.env_id, acted.env_id]))
    both = jax.tree.map(lambda x, y: np.concatenate([x, y])[order], of_log, acted)
    is_whole = len(order) == self.num_envs
    return both._replace(env_id=everyone(self.num_envs)) if is_whole else both

  def close(self) -> None:
    """Close the environments."""
    self._inner.close()

  def kill(self) -> None:
    """End processes at once."""
    self._inner.kill()

  # --- SavedPool

  @property
  def saves(self) -> bool:
    """Whether the environments that act can be saved."""
    return isinstance(self._inner, SavedPool) and self._inner.saves

  def state(self) -> dict[str, np.ndarray]:
    """Return everything that decides the future."""
    assert isinstance(self._inner, SavedPool)
    log = {f'log/{k}': np.array(x) for k, x in self._place._asdict().items()}
    return {**{f'inner/{k}': x for k, x in self._inner.state().items()}, **log}

  def restore(
    self, state: Mapping[str, np.ndarray], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Restore a state; returns the timesteps that wait for actions, without their kinds.

    Raises:
      HostError: if it is no state of this pool.
    """
    assert isinstance(self._inner, SavedPool)
    device = host_device()
    if self._place is None:
      self._place, _ = self._log.reset(len(self._logged), self._seed)
    saved = {}
    for name, like in self._place._asdict().items():
      x = state.get(f'log/{name}', np.zeros(0))
      if (x.dtype, x.shape) != (like.dtype, like.shape):
        raise HostError(f'a saved state has {name} {x.dtype}{list(x.shape)} of the log')
      saved[name] = jax.device_put(x, device)
    inner = {k.removeprefix('inner/'): x for k, x in state.items() if k.startswith('inner/')}
    arrival = self._inner.restore(inner, on_step)
    self._place = self._place._replace(**saved)
    with jax.default_device(device):
      rows = jax.tree.map(np.asarray, self._log.read(self._place.row))
    self._asked, self._ready = 0, np.zeros(len(self._logged), bool)
    order = np.argsort(np.concatenate([self._logged, self._acting]))
    observation = jax.tree.map(
      lambda x, y: np.concatenate([x, y])[order],
      rows.observation,
      _with_entries(arrival.timestep, rows).observation,
    )
    reward: Any = np.concatenate([rows.reward, arrival.timestep.reward])[order]
    zeros: Any = np.zeros(self.num_envs, np.float32)
    timestep = TimeStep(observation, reward, zeros + 1, zeros.astype(np.int8))
    ids = everyone(self.num_envs)
    return Arrival(ids, timestep, zeros, zeros > 0, zeros.astype(np.int32))


def _with_entries(timestep: TimeStep, rows: Any) -> TimeStep:
  """Return timesteps of environments that act, with the entries of a log's observations."""
  n, recorded = len(timestep.reward), rows.observation[RECORDED]
  action = np.zeros((n, *recorded.shape[1:]), recorded.dtype)
  observation = {INNER: timestep.observation, RECORDED: action, FLAG: np.zeros(n, np.int8)}
  return timestep._replace(observation=observation)
