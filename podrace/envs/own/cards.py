"""A deck of cards, and the base of the tasks of POPGym that deal one.

Morad et al. 2023, POPGym: Benchmarking Partially Observable Reinforcement Learning
(arXiv 2303.01859). The rules come from its code, proroklab/popgym at 410d5aa.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import box, discrete
from podrace.envs.base import restart, transition
from podrace.types import Array, TimeStep

DECK, RANKS, SUITS, COLORS = 52, 13, 4, 2
LEVELS = ('easy', 'medium', 'hard')


def rank(card: Array) -> Array:
  """Return the rank of cards, from 0 to 12."""
  return card // SUITS % RANKS


def suit(card: Array) -> Array:
  """Return the suit of cards, from 0 to 3."""
  return card % SUITS


def color(card: Array) -> Array:
  """Return the color of cards, 0 or 1."""
  return card % COLORS


class CardState(NamedTuple):
  """The cards of an episode, and the time in it."""

  piles: Array  # [piles, cards] i32, each in the order of dealing
  time: Array  # [] i32 steps since the episode began


@dataclasses.dataclass(frozen=True)
class CardTask:
  """Base of the tasks: shuffles, deals a card in each step, and adds up to a return in [-1, 1].

  An observation is one-hot: one entry of 1 in each of its parts.
  """

  DECKS: ClassVar[tuple[int, int, int]] = (1, 2, 3)  # in a pile, by difficulty
  PILES: ClassVar[int] = 1

  difficulty: str = 'easy'  # of LEVELS

  def __post_init__(self) -> None:
    if self.difficulty not in LEVELS:
      raise ValueError(f'difficulty must be easy, medium or hard, not {self.difficulty!r:.100}')

  @property
  def level(self) -> int:
    """The difficulty as a number: 0, 1 or 2."""
    return LEVELS.index(self.difficulty)

  @property
  def cards(self) -> int:
    """Cards in a pile."""
    return DECK * self.DECKS[self.level]

  @property
  def longest_episode(self) -> int:
    """Steps of every episode."""
    return self.cards - 1

  @property
  def parts(self) -> tuple[int, ...]:
    """Sizes of the one-hot parts of an observation."""
    raise NotImplementedError

  @property
  def actions(self) -> int:
    """Number of actions."""
    raise NotImplementedError

  def observe(self, state: CardState) -> tuple[Array, ...]:
    """Return the places of 1 in the parts of an observation, each [] i32."""
    raise NotImplementedError

  def reward(self, state: CardState, action: Array) -> Array:
    """Return the reward [] f32 of an action in `state`."""
    raise NotImplementedError

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The one-hot parts behind each other."""
    return box(0, 1, (sum(self.parts),), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Space of the actions of one environment."""
    return discrete(self.actions)

  def reset(self, key: Array) -> tuple[CardState, TimeStep]:
    """Begin an episode with shuffled piles."""
    keys = jax.random.split(key, self.PILES)
    piles = jnp.stack([jax.random.permutation(k, self.cards) for k in keys])
    state = CardState(piles.astype(jnp.int32), jnp.int32(0))
    return state, restart(self._observation(state))

  def step(self, state: CardState, action: Array, key: Array) -> tuple[CardState, TimeStep]:
    """Take one action."""
    del key
    reward = self.reward(state, action)
    state = CardState(state.piles, state.time + 1)
    ended = state.time >= self.longest_episode
    return state, transition(self._observation(state), reward, ended, False)

  def _observation(self, state: CardState) -> Array:
    seen = zip(self.observe(state), self.parts, strict=True)
    return jnp.concatenate([jax.nn.one_hot(x, n, dtype=jnp.float32) for x, n in seen])


def graded(right: Array) -> Array:
  """Return 1 where an answer is right, and else -1."""
  return jnp.where(right, 1.0, -1.0)
