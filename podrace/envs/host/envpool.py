"""EnvPool: Atari, classic control, MuJoCo and more in C++ threads (github.com/sail-sg/envpool)."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import envpool
import numpy as np
from gymnasium import spaces

from podrace.envs.env_names import at_least, full_name, nearest, read_options
from podrace.envs.host.action_log import ActionLog
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.checker import cast_exactly
from podrace.envs.host.spaces import in_jax, narrow
from podrace.envs.host.timesteps import EVERY, Stepper, everyone, rows_of
from podrace.envs.options import Value
from podrace.envs.spaces import convert
from podrace.errors import UnknownName
from podrace.types import Arrival

_OURS = (
  'num_envs',
  'batch_size',
  'num_threads',
  'seed',
  'reward_clip',  # replaced by clip_rewards, which is for learning only
  'base_path',
  'task',
  'episodic_life',  # would report each life as an episode; ale: reports games
  'zero_discount_on_life_loss',
)


def make(name: str, options: Mapping[str, Value]) -> HostSpec:
  """Return an environment by EnvPool's id; options are the scalars of EnvPool's configuration."""
  known = envpool.list_all_envs()
  if name not in known:
    raise UnknownName(f'envpool has no environment {name!r}{nearest(name, known)}')
  config = envpool.make_spec(name).config._asdict()
  atari = 'reward_clip' in config
  defaults: dict[str, Value] = {
    k: v for k, v in config.items() if k not in _OURS and isinstance(v, bool | int | float)
  }
  if atari:
    defaults['clip_rewards'] = True
  values = read_options(f'envpool:{name}', options, defaults)
  least = dict(
    stack_num=1, frame_skip=1, max_episode_steps=1, noop_max=0, img_height=1, img_width=1
  )
  at_least(f'envpool:{name}', values, **{k: v for k, v in least.items() if k in options})
  full = full_name('envpool', name, values, defaults)
  clip = bool(values.pop('clip_rewards', False))
  spec = envpool.make_spec(name, **{k: v for k, v in values.items() if k in options})
  if config.get('max_num_players', 1) != 1:
    raise UnknownName(f'envpool:{name} has several players, which podrace has no notion of')
  with _without_warnings():
    space = convert(space_in_jax, spec.gymnasium_observation_space)
  chosen = {k: v for k, v in values.items() if k in options}
  action_space = convert(space_in_jax, spec.gymnasium_action_space)
  return HostSpec(
    name=full,
    observation_space=space,
    action_space=action_space,
    make=lambda args: EnvPool(name, chosen, clip, space, action_space, args),
    frame_stack=int(values['stack_num']) if atari and values.get('gray_scale', True) else 0,
  )


# Families with steps of less than 1 us. Taking turns at EnvPool's queue takes two threads longer.
TINY = ('envpool.classic_control', 'envpool.toy_text')

_WARNINGS = threading.Lock()  # warning filters are global


def is_tiny(name: str) -> bool:
  """Return whether a step takes less time than handing it to another thread."""
  return any(c.__module__.startswith(TINY) for c in type(envpool.make_spec(name)).__mro__)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
  """Suppress the warning that Gymnasium's Box casts bounds to float32."""
  with _WARNINGS, warnings.catch_warnings():
    warnings.simplefilter('ignore', UserWarning)
    yield


def space_in_jax(space: Any) -> Any:
  """Return a space in the types that JAX has."""
  if isinstance(space, spaces.Box) and space.dtype == np.float64:
    # EnvPool marks missing bounds by the smallest double above 0 and the largest double.
    limits = np.finfo(np.float64)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return narrow(space, low, high, np.float32)
  return in_jax(space)


def as_declared(name: str, space: Any, x: Any, order: Any) -> Any:
  """Return an observation [n, ...] in the types of `space`, with its rows reordered."""
  if isinstance(x, dict):
    return {k: as_declared(name, s, x[k], order) for k, s in space.spaces.items()}
  return cast_exactly(name, x if order is EVERY else x[order], space.dtype)


class EnvPool:
  """A pool of EnvPool's environments."""

  watches_itself = False

  def __init__(
    self,
    name: str,
    values: Mapping[str, Any],
    clip: bool,
    observation_space: Any,
    action_space: Any,
    args: PoolArgs,
  ) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._name, self._clip, self._space = f'envpool:{name}', clip, observation_space
    self._action_space = action_space
    self._args, self._make = args, functools.partial(self._new_pool, name, values)
    self._env = self._make(args.seeds)
    self._log = self._new_log() if args.saves else None
    self._is_restored = False
    self._action, of_action = [*self._env.spec.action_array_spec.items()][-1]
    self._action_type = of_action.dtype
    self._stepper = Stepper(args.num_envs)
    self._zeros = np.zeros(args.batch_size, np.int32)

  def _new_pool(self, name: str, values: Mapping[str, Any], seeds: np.ndarray) -> Any:
    with _without_warnings():
      pool: Any = envpool.make_gymnasium(
        name,
        num_envs=self.num_envs,
        batch_size=self.batch_size,
        num_threads=1 if is_tiny(name) else self._args.threads,
        seed=int(seeds[0]) % 2**31,
        **values,
      )
      _ = pool.observation_space  # EnvPool makes it when it is first read, in recv at the latest
      return pool

  def _new_log(self) -> ActionLog:
    return ActionLog(self._name, self._args.seeds, self._action_space)

  def reset(self) -> None:
    """Start the first episode of every environment."""
    if self._is_restored:  # EnvPool can be reset once
      self._replace(self._args.seeds)
      self._log, self._is_restored = self._new_log(), False
    self._stepper.reset()
    self._env.async_reset()

  def _replace(self, seeds: np.ndarray) -> None:
    self._env.close()
    self._env = self._make(seeds)

  @property
  def saves(self) -> bool:
    """Whether all actions since the pool was made are kept."""
    return self._log is not None and self._log.is_kept

  def state(self) -> dict[str, np.ndarray]:
    """Return all actions since the pool was made: its environments cannot be seeded again."""
    assert self._log is not None, 'the pool keeps no actions'
    return self._log.state()

  def restore(
    self, state: Mapping[str, np.ndarray], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Replay all actions in a new pool. Raises HostError if `state` is of another pool."""
    log = self._new_log()
    log.restore(state)
    self._log, self._is_restored = log, True
    self._replace(log.seed)
    self._stepper.reset()
    self._env.async_reset()
    arrival, ids = self.recv(), everyone(self.num_envs)
    for action in log.rows().actions:
      self._send(ids, action)
      arrival = self.recv()
      on_step()
    return arrival

  def send(self, env_id: np.ndarray, action: np.ndarray) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    if self._log is not None:
      self._log.append(env_id, action)
    self._send(env_id, action)

  def _send(self, env_id: np.ndarray, action: np.ndarray) -> None:
    # A dict with all entries: EnvPool would rebuild its configuration to fill in missing ones.
    action, ids = np.array(action, self._action_type), np.array(env_id, np.int32)
    self._env.send({self._action: action, 'env_id': ids, 'players.env_id': ids})

  def recv(self) -> Arrival:
    """Wait for environments that are ready."""
    observation, reward, terminated, truncated, info = self._env.recv()
    ids = info['env_id'].astype(np.int32)
    order: Any = EVERY
    if self.batch_size == self.num_envs:
      if rows_of(ids, self.num_envs) is not EVERY:
        order = np.argsort(ids)
        reward, terminated, truncated = (x[order] for x in (reward, terminated, truncated))
      ids = everyone(self.num_envs)
    observation = as_declared(self._name, self._space, observation, order)
    learned = np.sign(reward) if self._clip else reward
    timestep: Any = self._stepper.timestep(ids, observation, learned, terminated, truncated)
    score = timestep.reward
    if self._clip:
      score = np.where(timestep.first, 0, reward).astype(np.float32)
    return Arrival(ids, timestep, score, timestep.last, self._zeros)

  def kill(self) -> None:
    """Do nothing: there are no processes."""

  def close(self) -> None:
    """Close the environments."""
    self._env.close()
