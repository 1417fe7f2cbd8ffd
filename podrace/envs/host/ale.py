"""Atari through ale-py's vector environment, in C++ threads. The ROMs are part of ale-py.

The protocol is that of Mnih et al. 2015 and Machado et al. 2018 (arXiv 1709.06009): 84 x 84 grey
frames (`size`), 4 stacked, 4 repeats of an action with the maximum over the last two, up to 30
no-ops at the start. Rewards are clipped to -1, 0, 1 for learning, and reported unclipped. Options:
`sticky` (the probability that an action is repeated; 0.25 is Machado's protocol), `full_actions`
(all 18), `episodic_life` (the loss of a life ends an episode for learning, but not the reported
game).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.vector_env import AtariVectorEnv

from podrace.envs.env_names import at_least, full_name, nearest, read_options
from podrace.envs.host.action_log import ActionLog
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.timesteps import Stepper, everyone
from podrace.envs.options import Value
from podrace.errors import HostError, UnknownName
from podrace.types import Arrival

DEFAULTS: dict[str, Value] = dict(
  sticky=0.0,
  full_actions=False,
  episodic_life=False,
  clip_rewards=True,
  frame_skip=4,
  stack=4,
  size=84,
  noop_max=30,
  fire_reset=True,
  max_frames=108_000,
)


SCREEN_HEIGHT = 210
# If its pool is saved, an environment is seeded anew after SEED_RESETS resets, or after SEED_STEPS
# steps where an episode depends on the ones before. That loads the ROM: as long as some 300 steps.
SEED_RESETS, SEED_STEPS = 200, 20_000
# Frames that two consoles play differently and then alike, to find whether a game remembers.
TRIALS, TRIAL = ((0, 400), (1200, 37)), 100

# Of `recv`: observations, rewards, terminations, truncations, infos of all games.
Results = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


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
  at_least(f'ale:{name}', values, stack=1, size=1, frame_skip=1, max_frames=1, noop_max=0)
  if values['size'] > SCREEN_HEIGHT:
    raise UnknownName(
      f'ale:{name}: size must be at most {SCREEN_HEIGHT}, the height of the screen, '
      f'not {values["size"]}'
    )
  probe: Any = vector(name, values, 1, 1, 1)
  action_space: Any = gymnasium.spaces.Discrete(int(probe.single_action_space.n), dtype=np.int32)
  return HostSpec(
    name=full_name('ale', name, values, DEFAULTS),
    observation_space=probe.single_observation_space,
    action_space=action_space,
    make=lambda args: AtariPool(name, values, action_space, args),
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
  size = values['size']
  pictures = {'stack_num': values['stack'], 'img_height': size, 'img_width': size} | pictures
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


@functools.cache
def remembers(name: str) -> bool:
  """Return whether a game that was reset depends on the games before, beyond their number.

  A reset does not clear the console's memory, and a few games use what is there. Two consoles play
  differently, are reset, and play alike.
  """
  consoles = [_console(name) for _ in range(2)]
  random = np.random.default_rng(0)
  for frames in TRIALS:
    for console, count in zip(consoles, frames, strict=True):
      for choice in random.random(count):
        actions = console.getMinimalActionSet()
        console.act(actions[int(choice * len(actions))])
      console.reset_game()
    for choice in random.random(TRIAL):
      for console in consoles:
        actions = console.getMinimalActionSet()
        console.act(actions[int(choice * len(actions))])
      looks = [(x.getRAM().tobytes(), x.getScreenGrayscale().tobytes()) for x in consoles]
      if looks[0] != looks[1]:
        return True
  return False


def _console(name: str) -> Any:
  ALEInterface.setLoggerMode(LoggerMode.Error)
  console = ALEInterface()
  console.setInt('random_seed', 1)
  console.setFloat('repeat_action_probability', 0.0)
  console.loadROM(roms.get_rom_path(name))
  console.reset_game()
  return console


class AtariPool:
  """Games of one kind. Each `send` answers the games of the last arrival, as ale-py requires."""

  watches_itself = False

  def __init__(
    self, name: str, values: Mapping[str, Any], action_space: Any, args: PoolArgs
  ) -> None:
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
    self._remembers, self._log = False, None
    if args.saves and args.batch_size == args.num_envs:
      self._remembers = values['sticky'] > 0 or remembers(name)
      self._new_log = lambda: ActionLog(f'ale:{name}', args.seeds, action_space)
      self._log = self._new_log()
    self._over = np.zeros(args.num_envs, bool)  # the next step resets the game
    self._frame = np.zeros(args.num_envs, np.int64)  # of the game

  def reset(self) -> None:
    """Start the first episode of every environment."""
    if self._log is not None:
      self._log = self._new_log()
    self._first = self._arrival(*self._reset(self._seeds))

  def _reset(self, seeds: np.ndarray) -> Results:
    """Reset all games to their beginnings, and return the results of that step."""
    self._stepper.reset()
    self._ended[:], self._lost[:] = True, False
    self._arrived = everyone(self.num_envs)
    observation: Any
    observation, info = self._env.reset(seed=seeds)
    n = len(observation)
    none = np.zeros(n, bool)
    return observation, np.zeros(n, np.float32), none, none.copy(), info

  def send(self, env_id: np.ndarray, action: np.ndarray) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    if self._log is not None:
      self._log.append(env_id, action)
    self._send(env_id, action)

  def _send(self, env_id: np.ndarray, action: np.ndarray) -> None:
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
    results: Any = self._env.recv()
    if self._log is not None:
      results = self._note_resets(self._log, results)
    return self._arrival(*results)

  def _note_resets(self, log: ActionLog, results: Results) -> Results:
    """Note which games were reset in this step, and seed the ones that are due."""
    fresh = np.flatnonzero(self._over | (results[-1]['episode_frame_number'] < self._frame))
    if not len(fresh):
      return results
    if not self._remembers:
      log.reset(fresh)
    due = fresh[log.is_due(fresh, SEED_STEPS, SEED_RESETS)]
    return self._rewind(due, log.seeded(due), 0, results) if len(due) else results

  def _rewind(self, ids: np.ndarray, seeds: np.ndarray, resets: Any, results: Results) -> Results:
    """Seed and reset games `ids`, and then reset each of them `resets` times more.

    Returns:
      `results` with these games at their beginnings.
    """
    observation, reward, terminated, truncated, info = results
    resets = np.broadcast_to(resets, len(ids))
    for number in range(resets.max(initial=0) + 1):
      which = resets >= number
      mask = np.zeros(self.num_envs, bool)
      mask[ids[which]] = True
      again = seeds[which] if number == 0 else np.full(which.sum(), -1)
      observation, info = self._env.reset(seed=again, options={'reset_mask': mask})
    reward[ids], terminated[ids], truncated[ids] = 0, False, False
    self._stepper.reopen(ids)
    self._ended[ids], self._lost[ids] = True, False
    return observation, reward, terminated, truncated, info

  @property
  def saves(self) -> bool:
    """Whether the actions are kept from which the games can be restored."""
    return self._log is not None and self._log.is_kept

  def state(self) -> dict[str, np.ndarray]:
    """Return the actions since each game was seeded or, if it forgets the past, reset."""
    assert self._log is not None, 'the pool keeps no actions'
    return self._log.state()

  def restore(
    self, state: Mapping[str, np.ndarray], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Replay the actions of `state`; a game that begins later than the first one waits for it.

    Raises:
      HostError: if it is the state of another pool.
    """
    log, ids = self._new_log(), everyone(self.num_envs)
    log.restore(state)
    if (log.resets > SEED_RESETS).any():
      raise HostError(
        f'ale: its saved state has {log.resets.max()} resets of a game, '
        f'expected at most {SEED_RESETS}'
      )
    self._log, rows, seeds = log, log.rows(), log.seeds()
    results, arrival = self._reset(seeds), None
    for number in range(rows.first, rows.end + 1):
      begins = np.flatnonzero(log.start == number)
      if len(begins):
        results = self._rewind(begins, seeds[begins], log.resets[begins], results)
      arrival = self._arrival(*results)
      if number < rows.end:
        self._send(ids, rows.actions[number - rows.first])
        results = self._env.recv()
      on_step()
    assert arrival is not None, 'there is always a first row'
    return arrival

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
    over = (terminated & ~lost) | truncated
    self._over[ids], self._frame[ids] = over, info['episode_frame_number']
    ended = over & ~self._ended[ids]
    self._ended[ids] = ended
    learned = np.sign(reward) if self._clip else reward
    timestep = self._stepper.timestep(ids, observation, learned, terminated, truncated)
    return Arrival(ids, timestep, score, ended, self._zeros)

  def kill(self) -> None:
    """Do nothing: there are no processes."""

  def close(self) -> None:
    """Close the environments."""
    self._env.close()
