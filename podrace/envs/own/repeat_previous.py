"""Repeat Previous of POPGym: memory of a fixed number of steps."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from podrace.envs.own.cards import SUITS, CardState, CardTask, graded, suit
from podrace.types import Array


@dataclasses.dataclass(frozen=True)
class RepeatPrevious(CardTask):
  """Name the suit of the card that was dealt k - 1 steps before the visible one.

  With N cards, an episode has N - 1 steps. From step k on, the reward is 1 / (N - k) for the right
  suit and -1 / (N - k) for another. `difficulty`: k is 4, 32, 64, with 1, 2, 3 decks.
  """

  @property
  def k(self) -> int:
    """Cards to remember, with the visible one."""
    return (4, 32, 64)[self.level]

  @property
  def parts(self) -> tuple[int, ...]:
    """The suit of the visible card."""
    return (SUITS,)

  @property
  def actions(self) -> int:
    """One for each suit."""
    return SUITS

  def observe(self, state: CardState) -> tuple[Array, ...]:
    """Show the newest card."""
    return (suit(state.piles[0, state.time]),)

  def reward(self, state: CardState, action: Array) -> Array:
    """Compare the action with an earlier card."""
    earlier = state.time - (self.k - 1)
    right = action == suit(state.piles[0, jnp.maximum(earlier, 0)])
    return jnp.where(earlier >= 0, graded(right) / (self.cards - self.k), 0.0)
