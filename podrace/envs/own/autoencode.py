"""Autoencode of POPGym: memory of a whole sequence, recited backwards."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from podrace.envs.own.cards import SUITS, CardState, CardTask, graded, suit
from podrace.types import Array

PLAY, WATCH = 0, 1


@dataclasses.dataclass(frozen=True)
class Autoencode(CardTask):
  """Watch N cards, and then name their suits, the last card first.

  An episode has 2 N - 1 steps. The observation that shows the last card asks for its suit too. The
  later ones show suit 0 whatever the cards. Each of the N answers has reward 1 / N if it is right,
  else -1 / N. `difficulty`: 1, 2, 3 decks.
  """

  @property
  def longest_episode(self) -> int:
    """Steps of every episode."""
    return 2 * self.cards - 1

  @property
  def parts(self) -> tuple[int, ...]:
    """The mode, PLAY or WATCH, and a suit."""
    return (2, SUITS)

  @property
  def actions(self) -> int:
    """One for each suit."""
    return SUITS

  def observe(self, state: CardState) -> tuple[Array, ...]:
    """Show the newest card while cards are dealt."""
    watching = state.time < self.cards - 1
    mode = jnp.where(watching, WATCH, PLAY)
    newest = suit(state.piles[0, jnp.minimum(state.time, self.cards - 1)])
    return mode, jnp.where(state.time < self.cards, newest, 0)

  def reward(self, state: CardState, action: Array) -> Array:
    """Compare the action with the next card backwards."""
    answers = state.time - (self.cards - 1)  # so far
    queried = jnp.clip(self.cards - 1 - answers, 0, self.cards - 1)
    right = action == suit(state.piles[0, queried])
    return jnp.where(answers >= 0, graded(right) / self.cards, 0.0)
