"""The rule of LPG, the learned policy gradient (Oh et al. 2020, arXiv 2007.08794).

An LSTM runs backwards over a trajectory. In each step it is given reward, end, discount, the
probability of the action, and the agent's predictions before and after the step. It returns the
increase of the action's log-probability, and the target of the prediction y. It sees no observation
and no other action, so it is the same for all of them.

Ours: the prediction after a terminated episode is nothing. Where a time limit cuts an episode, the
LSTM is reset and the prediction of the last observation counts, as at the end of a trajectory.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from podrace.agents.rules.layers import (
  RuleParams,
  backwards,
  dense,
  embed,
  embedding,
  initial,
  with_biases,
)
from podrace.types import Array

REGULARISERS = {  # metrics of an agent that learns by it -> the paper's weights in meta-training
  'y_entropy': -1e-3,
  'policy_target_square': 5e-3,
  'y_target_square': 1e-3,
}
INPUTS = 6  # numbers that describe a step


class LPGInputs(NamedTuple):
  """Inputs of the rule, from a trajectory of T steps."""

  reward: Array  # [T, B] f32
  discount: Array  # [T, B] f32 the environment's: 0 where the episode has terminated
  last: Array  # [T, B] bool: the episode ends with the step
  probability: Array  # [T, B] f32 of the action, by the policy that is to learn
  y: Array  # [T+1, B, Y] f32 logits


class LPGTargets(NamedTuple):
  """How the agent should change."""

  policy: Array  # [T, B] f32: by how much the logarithm of the action's probability should grow
  y: Array  # [T, B, Y] f32 logits, of which the loss is a KL divergence


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Widths of the layers; the defaults are the paper's."""

  predictions: int = 30  # numbers of the prediction y (Y)
  trajectory: int = 256  # units of the LSTM over a trajectory
  embedding: int = 16  # units of a prediction before it becomes one number

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of each array, by its name in the file."""
    h = self.trajectory
    return with_biases(
      {
        **embedding('embedding', self.predictions, self.embedding),
        'lstm/linear': (INPUTS + h, 4 * h),
        'policy/linear': (h, 1),
        'y/linear': (h, self.predictions),
      }
    )

  @classmethod
  def of(cls, params: RuleParams) -> Self:
    """Return the widths of a rule."""
    (trajectory, predictions), width = params['y/linear/w'].shape, params['embedding/~/linear_0/b']
    return cls(predictions, trajectory, width.shape[0])


def init(key: Array, sizes: Sizes) -> dict[str, Array]:
  """A rule before it is trained."""
  return initial(key, sizes.shapes(), {})


def targets(params: RuleParams, inputs: LPGInputs, discount: float) -> LPGTargets:
  """Return the targets of a trajectory, for an agent of this discount."""
  y = embed(params, 'embedding', jax.nn.softmax(inputs.y))[..., 0]
  rows = (
    inputs.reward,
    1.0 - inputs.discount,
    jnp.full_like(inputs.reward, discount),
    inputs.probability,
    y[:-1],
    y[1:] * inputs.discount,
  )
  x = backwards(params, 'lstm/linear', jnp.stack(rows, axis=-1), inputs.last)
  return LPGTargets(dense(params, 'policy/linear', x)[..., 0], dense(params, 'y/linear', x))
