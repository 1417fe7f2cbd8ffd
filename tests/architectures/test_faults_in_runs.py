"""What is against the contract while a run is under way: which of several faults was the first."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from podrace.architectures.faults import FAULTS, find_faults, first_outside
from podrace.types import FIRST, MID, ActorOutput, TimeStep, Trajectory

BOX = spaces.Box(-1.0, 1.0, (2,), 'float32')
NONE = jnp.zeros(1, jnp.int32)


def trajectory(reward: int | None = None, action: int | None = None) -> Trajectory:
  """Five steps of one environment; from these on, rewards and actions are NaN."""
  rewards, actions = np.ones((6, 1), np.float32), np.zeros((5, 1, 2), np.float32)
  if reward is not None:
    rewards[reward:] = np.nan
  if action is not None:
    actions[action:] = np.nan
  kind = np.full((6, 1), MID, np.int8)
  kind[0] = FIRST
  steps: Any = TimeStep(jnp.zeros((6, 1, 1)), rewards, np.ones((6, 1), np.float32), kind)
  output: Any = ActorOutput(jnp.asarray(actions))
  return Trajectory(TimeStep(*map(jnp.asarray, steps)), output, (), jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize(
  ('reward', 'action', 'expected'),
  [
    (None, None, []),
    (3, None, ['reward']),
    (None, 3, ['action']),
    (4, 3, ['action']),  # the reward after it
    (3, 3, ['reward']),  # the action is the answer to it
    (0, 0, ['reward']),
  ],
)
def test_the_first_fault_counts(
  reward: int | None, action: int | None, expected: list[str]
) -> None:
  bits = int(find_faults(NONE, BOX, trajectory(reward, action))[0])
  assert [name for i, name in enumerate(FAULTS) if bits >> i & 1] == expected
  before = jnp.array([4], jnp.int32)
  assert int(find_faults(before, BOX, trajectory(reward, action))[0]) == 4


def test_an_example_of_an_action_outside() -> None:
  assert first_outside(BOX, np.array([[0.0, 1.0], [0.5, 2.0]], np.float32)) == [0.5, 2.0]
  assert first_outside(BOX, np.zeros((3, 2), np.float32)) is None
  assert first_outside(spaces.Discrete(2), np.array([0, 2, 1])) == 2
