"""The tasks with cards: POPGym's rules, played step by step with lists, and returns of simple policies."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shorthand import slow_after

from podrace.envs import make
from podrace.envs.base import batch

LEVELS = ('easy', 'medium', 'hard')
TASKS = {  # steps of an episode by difficulty, size of an observation, actions
  'repeat_previous': ((51, 103, 155), (4, 4, 4), (4, 4, 4)),
  'count_recall': ((51, 103, 207), (4, 8, 26), (27, 27, 17)),
  'autoencode': ((103, 207, 311), (6, 6, 6), (4, 4, 4)),
  'higher_lower': ((51, 103, 155), (13, 13, 13), (2, 2, 2)),
}
CASES = [(task, level) for task in TASKS for level in range(3)]


class Turn(NamedTuple):
  """An observation by its parts, and the answer to it: None if there is no reward for any."""

  seen: tuple[int, ...]
  right: int | None
  stake: float = 0.0  # reward of the right answer; another has minus that


def repeat_previous(level: int, deck: list[int], _: list[int]) -> Iterator[Turn]:
  k, size, hand = (4, 32, 64)[level], len(deck), [deck.pop(0)]
  while deck:
    right = hand[-k] % 4 if len(hand) >= k else None
    yield Turn((hand[-1] % 4,), right, 1 / (size - k))
    hand.append(deck.pop(0))
  yield Turn((hand[-1] % 4,), None)


def count_recall(level: int, deck: list[int], queries: list[int]) -> Iterator[Turn]:
  kind = (lambda c: c % 2, lambda c: c % 4, lambda c: c // 4 % 13)[level]
  counts: Counter[int] = Counter()
  steps = len(deck) - 1
  while deck:
    dealt, query = kind(deck.pop(0)), kind(queries.pop(0))
    counts[dealt] += 1
    yield Turn((dealt, query), counts[query] if deck else None, 1 / steps)


def autoencode(_: int, deck: list[int], __: list[int]) -> Iterator[Turn]:
  size, hand = len(deck), [deck.pop(0)]
  while deck:
    yield Turn((1, hand[-1] % 4), None)
    hand.append(deck.pop(0))
  newest = hand[-1] % 4
  while hand:
    yield Turn((0, newest), hand.pop() % 4, 1 / size)
    newest = 0
  yield Turn((0, 0), None)


def higher_lower(_: int, deck: list[int], __: list[int]) -> Iterator[Turn]:
  size, card = len(deck), deck.pop(0)
  for other in deck:
    rank, drawn = card // 4 % 13, other // 4 % 13
    right = None if drawn == rank else 0 if drawn > rank else 1
    yield Turn((rank,), right, 1 / size)
    card = other
  yield Turn((card // 4 % 13,), None)


REFERENCES: dict[str, Callable[..., Iterator[Turn]]] = {
  'repeat_previous': repeat_previous,
  'count_recall': count_recall,
  'autoencode': autoencode,
  'higher_lower': higher_lower,
}


def one_hot(seen: tuple[int, ...], size: int) -> np.ndarray:
  part = size // len(seen) if size != 6 else 2  # of autoencode: a mode, and a suit
  x = np.zeros(size, np.float32)
  x[seen[0]] = 1
  if len(seen) == 2:
    x[part + seen[1]] = 1
  return x


@pytest.mark.parametrize(('task', 'level'), CASES)
def test_an_episode_is_that_of_the_slow_reference(task: str, level: int) -> None:
  env = make(f'podrace:{task},difficulty={LEVELS[level]}')
  steps, size, actions = (x[level] for x in TASKS[task])
  assert env.observation_space.shape == (size,) and env.action_space.n == actions
  state, timestep = env.reset(jax.random.key(level))
  piles = np.asarray(state.inner.piles).tolist()
  assert all(sorted(pile) == list(range(len(piles[0]))) for pile in piles)
  turns = list(REFERENCES[task](level, piles[0], piles[-1] if len(piles) > 1 else []))
  assert len(turns) == steps + 1
  rng, step, total = np.random.default_rng(level), jax.jit(env.step), 0.0
  for i, turn in enumerate(turns[:-1]):
    np.testing.assert_array_equal(timestep.observation, one_hot(turn.seen, size))
    assert not timestep.last
    is_right = turn.right is not None and rng.random() < 0.5
    action = turn.right if is_right else int(rng.integers(actions))
    state, timestep = step(state, jnp.int32(action), jax.random.key(i))
    expected = 0.0 if turn.right is None else turn.stake * (1 if action == turn.right else -1)
    np.testing.assert_allclose(timestep.reward, expected, rtol=1e-6)
    total += expected
  np.testing.assert_array_equal(timestep.observation, one_hot(turns[-1].seen, size))
  assert timestep.last and timestep.discount == 0 and -1 <= total <= 1
  best = sum(turn.stake for turn in turns if turn.right is not None)
  assert best == pytest.approx(1) or task == 'higher_lower'


EPISODES = 2000


@functools.cache
def returns(task: str, policy: Callable[[Any, Any, int], Any], level: str = 'easy') -> np.ndarray:
  """Returns of one episode in each environment. A policy has observations, a key, and actions."""
  env = make(f'podrace:{task},difficulty={level}')
  many, n = batch(env, EPISODES), int(env.action_space.n)

  def step(carry: Any, key: Any) -> Any:
    state, timestep, total = carry
    act_key, env_key = jax.random.split(key)
    action = policy(timestep.observation, act_key, n)
    state, timestep = many.step(state, action, jax.random.split(env_key, EPISODES))
    return (state, timestep, total + timestep.reward), timestep.last

  @jax.jit
  def run(key: Any) -> Any:
    reset_key, key = jax.random.split(key)
    start = (*many.reset(reset_key), jnp.zeros(EPISODES))
    keys = jax.random.split(key, TASKS[task][0][LEVELS.index(level)])
    (_, _, total), last = jax.lax.scan(step, start, keys)
    return total, last

  total, last = run(jax.random.key(5))
  assert last[-1].all() and not last[:-1].any()
  return np.asarray(total)


def uniform(observation: Any, key: Any, actions: int) -> Any:
  return jax.random.randint(key, observation.shape[:1], 0, actions, jnp.int32)


def middle(observation: Any, key: Any, actions: int) -> Any:
  """Higher below the middle rank, else lower: the best without memory."""
  del key, actions
  return (jnp.argmax(observation, axis=1) >= 6).astype(jnp.int32)


def assert_mean(samples: np.ndarray, expected: float) -> None:
  """Within four standard errors."""
  assert abs(samples.mean() - expected) < 4 * samples.std() / len(samples) ** 0.5
  assert samples.std() > 0


@pytest.mark.parametrize(
  ('task', 'expected'),
  slow_after(
    2,
    ('count_recall', 2 / 27 - 1),
    ('higher_lower', 0.0),
    ('repeat_previous', 2 / 4 - 1),
    ('autoencode', 2 / 4 - 1),
  ),
)
def test_random_play_has_the_return_of_theory(task: str, expected: float) -> None:
  assert_mean(returns(task, uniform), expected)


def another(observation: Any, key: Any, actions: int) -> Any:
  """A suit that is not the visible one: the best without memory."""
  del key
  return ((jnp.argmax(observation, axis=1) + 1) % actions).astype(jnp.int32)


@pytest.mark.slow
def test_the_best_without_memory_has_the_return_of_theory() -> None:
  """Of the 51 other cards 4 (12 - r) are higher than rank r, 4 r are lower, and 13 of each suit."""
  advantage = np.mean([abs(4 * (12 - r) - 4 * r) / 51 for r in range(13)])
  assert_mean(returns('higher_lower', middle), float(51 * advantage / 52))
  assert_mean(returns('repeat_previous', another), 2 * 13 / 51 - 1)
