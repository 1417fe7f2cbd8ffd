"""Count Recall of POPGym: memory of numbers, without an order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp

from podrace.envs.own.cards import (
  COLORS,
  RANKS,
  SUITS,
  CardState,
  CardTask,
  color,
  graded,
  rank,
  suit,
)
from podrace.types import Array

KINDS: tuple[tuple[Callable[[Array], Array], int], ...] = (
  (color, COLORS),
  (suit, SUITS),
  (rank, RANKS),
)


@dataclasses.dataclass(frozen=True)
class CountRecall(CardTask):
  """Tell how many cards of the queried kind were dealt, with the visible card.

  Each step deals a card and queries a kind. Queries come from a pile of their own. With N cards, an
  episode has N - 1 steps, each with reward 1 / (N - 1) for the right number and -1 / (N - 1) for
  another. `difficulty`: kinds are colors, suits, ranks, with 1, 2, 4 decks.
  """

  DECKS: ClassVar[tuple[int, int, int]] = (1, 2, 4)
  PILES: ClassVar[int] = 2

  @property
  def parts(self) -> tuple[int, ...]:
    """The kind of the visible card, and the queried kind."""
    return (KINDS[self.level][1],) * 2

  @property
  def actions(self) -> int:
    """Numbers from 0 to that of all cards of a kind."""
    return self.cards // KINDS[self.level][1] + 1

  def observe(self, state: CardState) -> tuple[Array, ...]:
    """Show the newest card and the query."""
    kind, _ = KINDS[self.level]
    shown = kind(state.piles[:, state.time])
    return shown[0], shown[1]

  def reward(self, state: CardState, action: Array) -> Array:
    """Compare the action with the number of cards."""
    kind, _ = KINDS[self.level]
    dealt, queries = kind(state.piles)
    seen = jnp.arange(self.cards) <= state.time
    count = jnp.sum(seen & (dealt == queries[state.time]))
    return graded(action == count) / self.longest_episode
