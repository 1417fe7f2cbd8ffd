"""Random streams of timesteps for tests, and their episodes cut out the slow way."""

from __future__ import annotations

from typing import Any

import numpy as np

from podrace.types import FIRST, LAST, MID, ActorOutput, TimeStep, Trajectory


def step_types(rng: np.random.Generator, length: int, end: float = 0.25) -> np.ndarray:
  """[length] i8: a stream that starts anywhere in an episode; each step ends one with chance `end`."""
  types = [rng.choice([FIRST, MID, LAST])]
  while len(types) < length:
    if types[-1] == LAST:
      types.append(FIRST)
    else:
      types.append(LAST if rng.random() < end else MID)
  return np.array(types, np.int8)


def discounts(rng: np.random.Generator, types: np.ndarray) -> np.ndarray:
  """[length] f32: half of the episodes terminate (0), the other half are truncated (1)."""
  return np.where((types == LAST) & (rng.random(types.shape) < 0.5), 0.0, 1.0).astype(np.float32)


def timesteps(rng: np.random.Generator, length: int, batch: int, observation: Any) -> TimeStep:
  """[length, batch, ...] timesteps; `observation` is a function of (rng, leading shape)."""
  types = np.stack([step_types(rng, length) for _ in range(batch)], axis=1)
  reward = np.where(types == FIRST, 0.0, rng.normal(size=types.shape)).astype(np.float32)
  return TimeStep(observation(rng, types.shape), reward, discounts(rng, types), types)


def floats(*shape: int) -> Any:
  """An `observation` of normal floats."""
  return lambda rng, leading: rng.normal(size=(*leading, *shape)).astype(np.float32)


def trajectory(steps: TimeStep, action: Any, extras: Any, agent_state: Any) -> Trajectory:
  """A trajectory of `steps` [T+1, B], of environments 0 to B-1."""
  env_id = np.arange(steps.reward.shape[1], dtype=np.int32)
  return Trajectory(steps, ActorOutput(action, extras), agent_state, env_id)


def episodes(types: np.ndarray) -> list[list[int]]:
  """The indices of a stream's timesteps, cut after every LAST."""
  cut: list[list[int]] = [[]]
  for t, kind in enumerate(types):
    cut[-1].append(t)
    if kind == LAST:
      cut.append([])
  return [episode for episode in cut if episode]
