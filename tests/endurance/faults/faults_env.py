"""Catch in numpy for `podrace envs` and `podrace act`, whose observations also say whose and the how manieth they are.

The last three numbers are the environment's identity (twice 24 bits) and how often it has been reset or stepped,
times 2^-100: a network does not notice them, and `faults_numbers` reads them.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from faults_numbers import SCALE
from gymnasium import spaces

ROWS, COLUMNS = 10, 5


class Catch(gymnasium.Env):
  """A ball falls; the paddle at the bottom should be where it lands."""

  observation_space = spaces.Box(0, 1, (ROWS * COLUMNS + 3,), np.float32)
  action_space = spaces.Discrete(3)

  def __init__(self) -> None:
    self._identity = np.frombuffer(os.urandom(6), np.uint8).astype(np.uint32)
    self._count = -1
    self._rng = np.random.default_rng()

  def _observe(self) -> np.ndarray:
    self._count += 1
    out = np.zeros(ROWS * COLUMNS + 3, np.float32)
    out[self._row * COLUMNS + self._ball] = 1
    out[(ROWS - 1) * COLUMNS + self._paddle] = 1
    a, b, c, d, e, f = self._identity.tolist()
    out[-3:] = np.array([a << 16 | b << 8 | c, d << 16 | e << 8 | f, self._count], np.float32)
    out[-3:] *= SCALE
    return out

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    if seed is not None:
      self._rng = np.random.default_rng(seed)
    self._row, self._ball, self._paddle = 0, int(self._rng.integers(COLUMNS)), COLUMNS // 2
    return self._observe(), {}

  def step(self, action: int) -> Any:
    self._paddle = min(max(self._paddle + int(action) - 1, 0), COLUMNS - 1)
    self._row += 1
    over = self._row == ROWS - 1
    reward = (1.0 if self._ball == self._paddle else -1.0) if over else 0.0
    return self._observe(), reward, over, False, {}


gymnasium.register('Numbered-v0', entry_point='faults_env:Catch')
