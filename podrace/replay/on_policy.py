"""On-policy: the replay that holds only the newest trajectory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from podrace.types import Array, Replay, Sample, Trajectory


def on_policy() -> Replay:
  """A replay of one trajectory, forgotten as soon as it has been learned from.

  Its state is the trajectory between `add` and `update` and empty otherwise, so nothing of it
  is copied from one update to the next, and nothing is saved with a run.
  """

  def init(example: Trajectory) -> Any:
    del example
    return ()

  def add(state: Any, trajectory: Trajectory) -> Trajectory:
    del state
    return trajectory

  def sample(state: Trajectory, key: Array) -> Sample:
    del key
    weight = jnp.ones(state.env_id.shape, jnp.float32)
    return Sample(state, weight, jnp.arange(state.env_id.shape[0]))

  def update(state: Trajectory, index: Array, priority: Array) -> Any:
    del state, index, priority
    return ()

  def times(update: Array) -> int:
    del update
    return 1

  return Replay(init, add, sample, update, times)
