"""An environment of Gymnasium with actions of one of many types; worker processes import it, and no JAX."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete


class Typed(gymnasium.Env):
  """Refuses actions that are not as its space samples them; observes one integer of 64 bits."""

  def __init__(self, kind: str, seen: int = 5) -> None:
    self.observation_space = Box(0, 2**63, (1,), np.uint64)
    self.action_space, self.seen = ACTIONS[kind], seen

  def reset(self, *, seed=None, options=None):
    return np.array([self.seen], np.uint64), {}

  def step(self, action):
    sample = self.action_space.sample()
    assert type(action) is type(sample) and action.dtype == sample.dtype, (action, sample)
    assert action.shape == sample.shape and self.action_space.contains(action), action
    return np.array([self.seen], np.uint64), 1.0, False, False, {}


ACTIONS = {
  'discrete': Discrete(3),
  'bytes': Discrete(3, dtype=np.uint8),
  'several': MultiDiscrete([2, 3]),
  'bits': MultiBinary(3),
  'scalar': Box(-0.1, 0.1, (), np.float64),
  'fixed': Box(0.1, 0.1, (2,), np.float64),
  'half': Box(-0.1, 0.1, (1,), np.float16),
}
gymnasium.register('Typed-v0', entry_point=Typed, disable_env_checker=True)
