"""Gymnasium environments for tests of worker processes; imported there by `host_envs:ID`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Sequence(gymnasium.Env):
  """Observes (process id, which of it, how manieth step of its life, last action)."""

  observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
  action_space = spaces.Discrete(5)
  made = 0

  def __init__(self, length: int = 7, slow: float = 0.0) -> None:
    self._length, self._slow = length, slow
    self._me, self._steps, self._in_episode = Sequence.made, -1, 0
    Sequence.made += 1

  def _observe(self, action: float) -> np.ndarray:
    self._steps += 1
    return np.array([os.getpid(), self._me, self._steps, action], np.float64)

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    self._in_episode = 0
    return self._observe(-1), {}

  def step(self, action: int) -> Any:
    threading.Event().wait(self._slow)
    self._in_episode += 1
    over = self._in_episode == self._length
    return self._observe(action), 1.0, over and self._me % 2 == 0, over and self._me % 2 == 1, {}


class Telling(Sequence):
  """Tells numbers in its infos, and what are none."""

  def step(self, action: int) -> Any:
    *rest, _ = super().step(action)
    info = dict(speed=2.0 * self._in_episode, won=rest[2], inner=dict(lives=np.int64(3)),
                seen=np.zeros(3), name='x', never=float('nan'))  # fmt: skip
    return *rest, info


class Wrong(Sequence):
  """Does something wrong at its 30th step; with `once`, a file, only who comes first does.

  With `helper`, a file, it has forked a process by then, whose id is there.
  """

  def __init__(self, what: str, at: int = 30, once: str = '', helper: str = '') -> None:
    super().__init__()
    self._what, self._at, self._once, self._helper = what, at, once, helper

  def _first(self) -> bool:
    try:
      return not self._once or bool(os.open(self._once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
      return False

  def step(self, action: int) -> Any:
    observation, reward, terminated, truncated, info = super().step(action)
    if self._steps == 5 and self._helper:
      if not (pid := os.fork()):
        threading.Event().wait()
      with open(self._helper, 'a') as file:
        file.write(f'{pid}\n')
    if self._steps == self._at and self._first():
      if self._what == 'raise':
        raise ZeroDivisionError('the game broke')
      if self._what == 'interrupt':
        raise KeyboardInterrupt
      if self._what == 'exit':
        os._exit(3)
      if self._what == 'fault':
        os.kill(os.getpid(), signal.SIGSEGV)
      if self._what == 'deaf':
        os.closerange(3, 256)  # its pipes among them
      if self._what in ('hang', 'deaf'):
        threading.Event().wait()
      if self._what == 'shape':
        observation = observation[:3]
      if self._what == 'dtype':
        observation = observation.astype(np.complex64)
      if self._what == 'integers':
        observation = np.arange(4)
      if self._what == 'reward':
        reward = 'much'
      if self._what == 'end':
        terminated = np.array([True, False])
      if self._what == 'missing':
        observation[1] = np.nan
    return observation, reward, terminated, truncated, info


class Trees(Sequence):
  """Observations and actions that are not single arrays of floats."""

  observation_space = spaces.Dict(
    board=spaces.Box(0, 255, (6, 6, 1), np.uint8),
    rest=spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(3)]),
  )
  action_space = spaces.Box(-2, 2, (2,), np.float64)

  def _observe(self, action: Any) -> Any:
    self._steps += 1
    board = np.full((6, 6, 1), self._steps % 256, np.uint8)
    return dict(board=board, rest=(self._steps % 4, np.array([1, 0, 1], np.int8)))


class Keys(Sequence):
  """Observes a Dict with the keys 0 and 'a' if they are mixed, else 0 and 1."""

  def __init__(self, mixed: bool = True) -> None:
    super().__init__()
    part = spaces.Box(-1, 1, (2,), np.float32)
    self.observation_space = spaces.Dict({0: part, 'a' if mixed else 1: part})

  def _observe(self, action: Any) -> Any:
    return {k: np.zeros(2, np.float32) for k in self.observation_space}


class Choices(Sequence):
  """Observes choices that are outside of their spaces from the third step on."""

  observation_space = spaces.Dict(
    one=spaces.Discrete(3), some=spaces.MultiDiscrete([2, 3]), flags=spaces.MultiBinary(2)
  )

  def _observe(self, action: Any) -> Any:
    self._steps += 1
    late = self._steps >= 3
    return dict(
      one=np.int64(7 * late), some=np.array([0, -late]), flags=np.array([0, 2 * late], np.int8)
    )


class Masks(Sequence):
  """Its mask allows nothing in the second part of an action from the third step on."""

  action_space = spaces.MultiDiscrete([2, 3])

  def __init__(self, parts: bool = False) -> None:
    super().__init__()
    self._parts = parts
    one, two = spaces.MultiBinary(2), spaces.MultiBinary(3)
    mask = spaces.Tuple([one, two]) if parts else spaces.MultiBinary(5)
    self.observation_space = spaces.Dict(action_mask=mask, view=spaces.Box(-1, 1, (1,), np.float32))

  def _observe(self, action: Any) -> Any:
    self._steps += 1
    mask: Any = np.array([1, 1, *[self._steps < 3] * 3], np.int8)
    mask = (mask[:2], mask[2:]) if self._parts else mask
    return dict(action_mask=mask, view=np.zeros(1, np.float32))


class Closes(Sequence):
  """Raises an exception when it is closed, after some time."""

  def __init__(self, seconds: float = 0.0) -> None:
    super().__init__()
    self._seconds = seconds

  def close(self) -> None:
    threading.Event().wait(self._seconds)
    raise ZeroDivisionError('the window is gone')


class Helped(Sequence):
  """Observes the ids of its process and of two it has started: a program, and one that is forked."""

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    self._program = subprocess.Popen(['sleep', '1000'])
    read, write = os.pipe()
    self._forked = os.fork()
    if not self._forked:
      os.write(write, b'!')
      threading.Event().wait()
    os.read(read, 1)
    return super().reset()

  def _observe(self, action: float) -> np.ndarray:
    return np.array([os.getpid(), self._program.pid, self._forked, action], np.float64)


class Counts(Sequence):
  """Observes the step, as an integer of 64 bits; from the 30th on one that 32 don't hold."""

  observation_space = spaces.Box(0, 2**62, (), np.int64)

  def _observe(self, action: Any) -> Any:
    self._steps += 1
    return np.int64(self._steps + 2**40 * (self._steps >= 30))


class From1(Sequence):
  """Its second choice is counted from 1."""

  action_space = spaces.MultiDiscrete([2, 3], start=[0, 1])


class Same(gymnasium.Env):
  """Always looks the same and rewards 1; ends itself every so often, or never."""

  observation_space = spaces.Box(0, 1, (1,), np.float32)
  action_space = spaces.Discrete(2)

  def __init__(self, length: int = 0) -> None:
    self._length, self._time = length, 0

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    self._time = 0
    return np.ones(1, np.float32), {}

  def step(self, action: int) -> Any:
    self._time += 1
    return np.ones(1, np.float32), 1.0, self._time == self._length, False, {}


class Switches(Same):
  """Fails at what is not in its space of switches."""

  action_space = spaces.MultiBinary(3)

  def step(self, action: Any) -> Any:
    assert self.action_space.contains(action), f'{action!r} of {action.dtype}'
    return super().step(action)


class Masked(gymnasium.Env):
  """Allows one of four actions at a time, and fails at any other."""

  observation_space = spaces.Dict(
    x=spaces.Box(0, 1, (2,), np.float32), action_mask=spaces.Box(0, 1, (4,), np.int8)
  )
  action_space = spaces.Discrete(4)

  def _observe(self) -> Any:
    mask = np.zeros(4, np.int8)
    mask[self._time % 4] = 1
    return dict(x=np.ones(2, np.float32), action_mask=mask)

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    self._time = 0
    return self._observe(), {}

  def step(self, action: int) -> Any:
    assert action == self._time % 4, f'{action} is not allowed'
    self._time += 1
    return self._observe(), 1.0, self._time == 10, False, {}


class Tiring(Same):
  """Its reward falls with every step of its life, whatever the seed of a reset."""

  _life = 0

  def step(self, action: int) -> Any:
    self._life += 1
    observation, _, *rest = super().step(action)
    return observation, 1 / self._life, *rest


def normalized() -> gymnasium.Env:
  return gymnasium.wrappers.NormalizeReward(gymnasium.make('Pendulum-v1'))


gymnasium.register('Tiring-v0', entry_point='host_envs:Tiring')
gymnasium.register('Normalized-v0', entry_point='host_envs:normalized')
gymnasium.register('Switches-v0', entry_point='host_envs:Switches', max_episode_steps=4)
gymnasium.register('Masked-v0', entry_point='host_envs:Masked')
gymnasium.register('Keys-v0', entry_point='host_envs:Keys')
gymnasium.register('Choices-v0', entry_point='host_envs:Choices')
gymnasium.register('Masks-v0', entry_point='host_envs:Masks')
gymnasium.register('Closes-v0', entry_point='host_envs:Closes')
gymnasium.register('Sequence-v0', entry_point='host_envs:Sequence')
gymnasium.register('Telling-v0', entry_point='host_envs:Telling')
gymnasium.register('Wrong-v0', entry_point='host_envs:Wrong')
gymnasium.register('Trees-v0', entry_point='host_envs:Trees')
gymnasium.register('Helped-v0', entry_point='host_envs:Helped')
gymnasium.register('Counts-v0', entry_point='host_envs:Counts')
gymnasium.register('From1-v0', entry_point='host_envs:From1')
gymnasium.register('Limited-v0', entry_point='host_envs:Sequence', max_episode_steps=5)
gymnasium.register('Same-v0', entry_point='host_envs:Same')
gymnasium.register('Terminated-v0', entry_point='host_envs:Same', kwargs=dict(length=4))
gymnasium.register('Truncated-v0', entry_point='host_envs:Same', max_episode_steps=4)
