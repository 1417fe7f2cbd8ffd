"""That the check of what every environment keeps can fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import pytest

import podrace.envs
from podrace.envs import contract
from podrace.envs.base import NextStepReset
from podrace.types import LAST


@dataclasses.dataclass(frozen=True)
class Broken:
  """Catch, with one thing wrong."""

  fault: str

  @property
  def good(self) -> NextStepReset:
    return podrace.envs.make('podrace:catch,rows=4,columns=3')

  @property
  def observation_space(self) -> Any:
    space = self.good.observation_space
    return gymnasium.spaces.Box(0, 0.5, space.shape) if self.fault == 'bounds' else space

  @property
  def action_space(self) -> Any:
    return self.good.action_space

  def reset(self, key: Any) -> Any:
    return self.good.reset(key)

  def step(self, state: Any, action: Any, key: Any) -> Any:
    state, timestep = self.good.step(state, action, key)
    if self.fault == 'order':
      timestep = timestep._replace(
        step_type=jnp.minimum(timestep.step_type, LAST - 1).astype('int8')
      )
    if self.fault == 'reward':
      timestep = timestep._replace(reward=timestep.reward + 1)
    if self.fault == 'discount':
      timestep = timestep._replace(discount=0.99 * timestep.discount)
    if self.fault == 'dtype':
      timestep = timestep._replace(discount=timestep.discount.astype(jnp.float16))
    if self.fault == 'action':
      moved = jnp.where(timestep.first, action.astype(jnp.float32), 0.0)
      timestep = timestep._replace(observation=timestep.observation * 0 + moved / 2)
    return state, timestep


@pytest.mark.parametrize('fault', ['bounds', 'order', 'reward', 'discount', 'dtype', 'action'])
def test_check_finds(fault: str) -> None:
  with pytest.raises((AssertionError, TypeError)):
    contract.check(Broken(fault), jax.random.key(0), steps=30)


def test_check_passes_what_is_right() -> None:
  contract.check(Broken('nothing'), jax.random.key(0), steps=30)
