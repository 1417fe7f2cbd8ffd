"""Higher Lower of POPGym: a guess that is better if the dealt cards are counted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from podrace.envs.own.cards import RANKS, CardState, CardTask, graded, rank
from podrace.types import Array

HIGHER = 0  # the action


@dataclasses.dataclass(frozen=True)
class HigherLower(CardTask):
  """Guess whether the next card has a higher rank than the visible one (0) or a lower one (1).

  With N cards, an episode has N - 1 steps. The reward is 1 / N for the right guess, -1 / N for the
  wrong one, and 0 if the ranks are equal. `difficulty`: 1, 2, 3 decks.
  """

  @property
  def parts(self) -> tuple[int, ...]:
    """The rank of the visible card."""
    return (RANKS,)

  @property
  def actions(self) -> int:
    """Higher and lower."""
    return 2

  def observe(self, state: CardState) -> tuple[Array, ...]:
    """Show the newest card."""
    return (rank(state.piles[0, state.time]),)

  def reward(self, state: CardState, action: Array) -> Array:
    """Compare the guess with the next card."""
    visible = rank(state.piles[0, state.time])
    drawn = rank(state.piles[0, jnp.minimum(state.time + 1, self.cards - 1)])
    right = (drawn > visible) == (action == HIGHER)
    return jnp.where(drawn == visible, 0.0, graded(right) / self.cards)
