"""Networks with a recurrent core that may see the previous action and reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.envs.spaces import map_leaves
from podrace.networks.body import Body
from podrace.networks.layers import flat
from podrace.networks.observations import as_floats, zeros_of
from podrace.networks.protocol import merge_time, split_time
from podrace.types import Array, TimeStep


@dataclasses.dataclass(frozen=True)
class RecurrentBody(Body):
  """A `Body` with inputs for the core besides the observation (Ni et al. 2022, arXiv 2110.05038).

  Without a core the settings change nothing.
  """

  UNRECORDED: ClassVar[Mapping[str, Any]] = {
    **Body.UNRECORDED,
    **dict.fromkeys(('previous_action', 'previous_reward', 'shortcut'), False),
  }

  previous_action: bool = True  # the core sees the previous action; 0 where an episode begins
  previous_reward: bool = False
  # ^ the core sees the previous reward, as sign(r) log(1 + |r|); such a policy cannot be exported
  shortcut: bool = True  # the layers behind the core see the newest observation besides the core

  def remember(
    self, core: nn.Module | None, state: Any, x: Array, t: TimeStep, previous: Any
  ) -> tuple[Array, Any]:
    """Pass features through the core, if there is one.

    Args:
      core: the core, or None.
      state: its state before the first timestep.
      x: [T*B, F] features of the observations.
      t: [T, B, ...] timesteps.
      previous: [T, B, ...] the action before each timestep. None: zeros.

    Returns:
      Features [T*B, G], and the state after the last timestep.
    """
    if core is None:
      return x, state
    inputs = jnp.concatenate([x, *self._extra_inputs(t, previous)], axis=-1)
    outputs, state = core(state, split_time(inputs, t.reward.shape[0]), t.first)
    outputs = merge_time(outputs)
    return (jnp.concatenate([outputs, x], axis=-1) if self.shortcut else outputs), state

  def _extra_inputs(self, t: TimeStep, previous: Any) -> list[Array]:
    """Return the core's inputs [T*B, n] besides the observation."""
    begun = ~t.first.reshape(-1, 1)
    parts = []
    if self.previous_action:
      if previous is None:
        shape = t.reward.shape
        previous = map_leaves(
          lambda s: jnp.zeros((*shape, *s.shape), zeros_of(s).dtype), self.action_space
        )
      actions = map_leaves(self._encode_action, self.action_space, merge_time(previous))
      parts += [flat(x) for x in jax.tree.leaves(actions)]
    if self.previous_reward:
      reward = t.reward.reshape(-1, 1)
      parts.append(jnp.sign(reward) * jnp.log1p(jnp.abs(reward)))
    return [jnp.where(begun, x, 0.0) for x in parts]

  def _encode_action(self, space: Any, action: Array) -> Array:
    """Return actions as floats: one-hot, or within [-1, 1] between two bounds."""
    if hasattr(self.distribution, 'to_unit'):
      unit: Array = self.distribution.to_unit(action)
      return unit
    return as_floats(space, action)
