"""Atari through ale-py's vector environment, in C++ threads. The ROMs are part of ale-py.

The protocol is that of Mnih et al. 2015 and Machado et al. 2018 (arXiv 1709.06009): 84 x 84 grey
frames, 4 stacked, 4 repeats of an action with the maximum over the last two, up to 30 no-ops at
the start. Rewards are clipped to -1, 0, 1 for learning, and reported unclipped. Options: `sticky`
(the probability that an action is repeated; 0.25 is Machado's protocol), `full_actions` (all 18),
`episodic_life` (the loss of a life ends an episode for learning, but not the reported game).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

from podrace.envs.env_names import at_least, full_name, nearest, read_options
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.timesteps import Stepper, everyone
from podrace.envs.options import Value
from podrace.errors import UnknownName
from podrace.types import Arrival

DEFAULTS: dict[str, Value] = dict(
  sticky=0.0,
  full_actions=False,
  episodic_life=False,
  clip_rewards=True,
  frame_skip=4,
  stack=4,
  noop_max=30,
  fire_reset=True,
  max_frames=108_000,
)


def make(name: str, options: Mapping[str, Value]) -> HostSpec:
  """Return a game by its ROM's name: pong, breakout, ms_pacman."""
  games = roms.get_all_rom_ids()
  if name not in games:
    raise UnknownName(f'ale has no game {name!r}{nearest(name, games)}')
  values = read_options(f'ale:{name}', options, DEFAULTS)
  if not 0 <= values['sticky'] < 1:
    raise UnknownName(
      f'ale:{name}: sticky is a probability, from 0 to below 1, not {values["sticky"]}'
    )
  at_least(f'ale:{name}', values, stack=1, frame_skip=1, max_frames=1, noop_max=0)
  probe: Any = vector(name, values, 1, 1, 1)
  return HostSpec(
    name=full_name('ale', name, values, DEFAULTS),
    observation_space=probe.single_observation_space,
    action_space=gymnasium.spaces.Discrete(int(probe.single_action_space.n), dtype=np.int32),
    make=lambda args: AtariPool(name, values, args),
    frame_stack=int(values['stack']),
  )


def vector(
  name: str,
  values: Mapping[str, Any],
  num_envs: int,
  batch_size: int,
  threads: int,
  **pictures: Any,
) -> AtariVectorEnv:
  """Return ale-py's environment with our options and unclipped rewards.

  `pictures` are ale-py's options for observations.
  """
  pictures = {'stack_num': values['stack'], **pictures}
  return AtariVectorEnv(
    name,
    num_envs,
    batch_size=batch_size,
    num_threads=threads,
    max_num_frames_per_episode=values['max_frames'],
    repeat_action_probability=values['sticky'],
    full_action_space=values['full_actions'],
    frameskip=values['frame_skip'],
    noop_max=values['noop_max'],
    life_loss_info=values['episodic_life'],
    reward_clipping=False,
    use_fire_reset=values['fire_reset'],
    **pictures,
  )


class AtariPool:
  """Games of one kind. Each `send` answers the games of the last arrival, as ale-py requires."""

  watches_itself = False

  def __init__(self, name: str, values: Mapping[str, Any], args: PoolArgs) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._seeds = args.seeds.astype(np.int64) % 2**31
    self._clip, self._lives = values['clip_rewards'], values['episodic_life']
    self._env = vector(name, values, args.num_envs, args.batch_size, args.threads)
    self._stepper = Stepper(args.num_envs)
    self._lost = np.zeros(args.num_envs, bool)  # a life was lost: the next action is a no-op
    self._ended = np.ones(args.num_envs, bool)
    self._arrived = everyone(args.num_envs)  # the order in which ale-py takes actions
    self._action = np.zeros(args.num_envs, np.int32)
    self._zeros = np.zeros(args.batch_size, np.int32)
    self._first: Arrival | None = None

  def reset(self) -> None:
    """Start the first episode of every environment."""
    self._stepper.reset()
    self._ended[:] = True
    n = self.batch_size
    observation: Any
    observation, info = self._env.reset(seed=self._seeds)
    none = np.zeros(n, bool)
    self._first = self._arrival(observation, np.zeros(n, np.float32), none, none, info)

  def send(self, env_id: np.ndarray, action: np.ndarray) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    self._action[env_id] = action
    if self._lives:
      self._action[self._lost] = 0
    self.sent = self._action[self._arrived]
    self._env.send(self.sent)

  def recv(self) -> Arrival:
    """Wait for environments that are ready."""
    if self._first is not None:
      first, self._first = self._first, None
      return first
    return self._arrival(*self._env.recv())

  def _arrival(
    self,
    observation: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    info: dict[str, Any],
  ) -> Arrival:
    self._arrived = ids = info['env_id'].astype(np.int32)
    score = np.where(self._ended[ids], 0, reward).astype(np.float32)
    lost = terminated & (info['lives'] > 0) if self._lives else np.zeros(len(ids), bool)
    self._lost[ids] = lost
    ended = ((terminated & ~lost) | truncated) & ~self._ended[ids]
    self._ended[ids] = ended
    learned = np.sign(reward) if self._clip else reward
    timestep = self._stepper.timestep(ids, observation, learned, terminated, truncated)
    return Arrival(ids, timestep, score, ended, self._zeros)

  def kill(self) -> None:
    """Do nothing: there are no processes."""

  def close(self) -> None:
    """Close the environments."""
    self._env.close()
