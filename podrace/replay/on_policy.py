"""On-policy replay, which holds only the newest trajectory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from podrace.types import Array, Replay, Sample, Trajectory


def on_policy() -> Replay:
  """Make a replay of one trajectory, which is dropped after one update.

  The state is the trajectory between `add` and `update`, and empty otherwise. So no update copies
  a trajectory to the next update, and a checkpoint contains none.

  Returns:
    A replay that yields one sample per update, with weights of 1.
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
