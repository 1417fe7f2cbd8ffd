"""GAE and V-trace: by hand, against rlax, and against episodes taken one by one."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import streams
from hypothesis import strategies as st
from shorthand import slow_after

from podrace import returns
from podrace.types import LAST

T = 12
GAMMA, LAMBDA = 0.9, 0.8

# Numbers up to 10 in float32, summed over 12 steps: about 12 * 12 * 10 / 2^24, twice over.
TOLERANCE = dict(rtol=1e-5, atol=2e-4)


def compiled(function: Any) -> Any:
  """A compiled function with results in NumPy."""
  quick = jax.jit(function)
  return lambda *args: jax.device_get(quick(*args))


gae, vtrace = compiled(returns.gae), compiled(returns.vtrace)
rlax_gae = compiled(rlax.truncated_generalized_advantage_estimation)
rlax_vtrace = compiled(rlax.vtrace_td_error_and_advantage)


def floats(low: float, high: float, size: int) -> Any:
  return hnp.arrays(np.float32, size, elements=st.floats(low, high, width=32))


@st.composite
def stream(draw: Any) -> dict[str, np.ndarray]:
  """T+1 timesteps, cut by terminations and truncations at random."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  types = streams.step_types(rng, T + 1, draw(st.sampled_from([0.0, 0.2, 0.6])))
  return dict(
    types=types, reward=draw(floats(-10, 10, T + 1)), discount=streams.discounts(rng, types),
    value=draw(floats(-10, 10, T + 1)), rho=draw(floats(0, 4, T)),
  )  # fmt: skip


def inputs(s: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
  """r_t, discount_t, lambda_t, v_tm1, v_t, as agents prepare them."""
  lambda_t = np.where(s['types'][1:] == LAST, 0, LAMBDA).astype(np.float32)
  discount_t = np.float32(GAMMA) * s['discount'][1:]
  return s['reward'][1:], discount_t, lambda_t, s['value'][:-1], s['value'][1:]


def valid(s: dict[str, np.ndarray]) -> np.ndarray:
  """[T] bool: not LAST -> FIRST."""
  return s['types'][:-1] != LAST


# --- the reference: one episode at a time -----------------------------------------------------


def one_episode(s: dict[str, np.ndarray], episode: list[int]) -> tuple[list[float], list[float]]:
  """An episode's rewards, and its values; that of a terminal state is 0, whatever was said."""
  rewards = [float(s['reward'][t]) for t in episode[1:]]
  values = [float(s['value'][t]) for t in episode]
  if s['discount'][episode[-1]] == 0:
    values[-1] = 0.0
  return rewards, values


def gae_by_episode(s: dict[str, np.ndarray]) -> np.ndarray:
  result = np.full(T, np.nan)
  for episode in streams.episodes(s['types']):
    rewards, values = one_episode(s, episode)
    n = len(rewards)
    td = [rewards[k] + GAMMA * values[k + 1] - values[k] for k in range(n)]
    for k in range(n):
      result[episode[k]] = sum((GAMMA * LAMBDA) ** (j - k) * td[j] for j in range(k, n))
  return result


def vtrace_by_episode(
  s: dict[str, np.ndarray], clip_rho: float, clip_pg_rho: float, clip_mix: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
  def leaky(limit: float, ratio: float) -> float:
    return clip_mix * min(limit, ratio) + (1 - clip_mix) * ratio

  targets, advantages = np.full(T, np.nan), np.full(T, np.nan)
  for episode in streams.episodes(s['types']):
    rewards, values = one_episode(s, episode)
    n = len(rewards)
    ratios = [float(s['rho'][t]) for t in episode[:-1]]
    target = list(values)  # past its last transition an episode's target is the value itself
    for k in range(n):
      for j in range(k, n):
        trace = 1.0
        for i in range(k, j):
          trace *= GAMMA * LAMBDA * leaky(1.0, ratios[i])
        td = rewards[j] + GAMMA * values[j + 1] - values[j]
        target[k] += trace * leaky(clip_rho, ratios[j]) * td
    for k in range(n):
      behind = (
        values[k + 1] if k == n - 1 else LAMBDA * target[k + 1] + (1 - LAMBDA) * values[k + 1]
      )
      targets[episode[k]] = target[k]
      advantages[episode[k]] = leaky(clip_pg_rho, ratios[k]) * (
        rewards[k] + GAMMA * behind - values[k]
      )
  return targets, advantages


# --- tests ------------------------------------------------------------------------------------

# Timesteps: 0 MID, 1 MID, 2 LAST (terminated), 3 FIRST, 4 MID, 5 LAST (truncated), 6 FIRST.
# Discount 1/2. TD errors of the transitions that are some episode's:
#   0 -> 1: 1 + 2/2 - 1 = 1      1 -> 2: 3 + 0 - 2 = 1 (the value 100 of a terminal state is nothing)
#   3 -> 4: 2 + 6/2 - 4 = 1      4 -> 5: 1 + 8/2 - 6 = -1 (truncated: the value 8 counts)
VALUE = np.float32([1, 2, 100, 4, 6, 8, 50])
REWARD_T = np.float32([1, 3, 0, 2, 1, 0])
DISCOUNT_T = np.float32([0.5, 0, 0.5, 0.5, 0.5, 0.5])
NOT_LAST_T = np.float32([1, 0, 1, 1, 0, 1])
VALID = [0, 1, 3, 4]


def test_gae_by_hand() -> None:
  # lambda = 1/2, so a TD error counts a quarter one step earlier:
  #   1, and 1 + 1/4; -1, and 1 - 1/4
  advantage = gae(REWARD_T, DISCOUNT_T, 0.5 * NOT_LAST_T, VALUE[:-1], VALUE[1:])
  assert advantage[VALID].tolist() == [1.25, 1, 0.75, -1]


def test_vtrace_by_hand() -> None:
  # lambda = 1. Ratios 1/2, 2 and 2, 1/2 in the two episodes; clipped 1/2, 1 and 1, 1/2.
  # Weighted TD errors: 1/2, 1 and 1, -1/2. Targets:
  #   v(1) = 2 + 1 = 3          v(0) = 1 + 1/2 + 1/2 * 1/2 * 1 = 1.75
  #   v(4) = 6 - 1/2 = 5.5      v(3) = 4 + 1 + 1/2 * 1 * (-1/2) = 4.75
  # Advantages, ratio * (r + target behind / 2 - value):
  #   0: 1/2 (1 + 3/2 - 1) = 0.75       1: 3 + 0 - 2 = 1
  #   3: 2 + 5.5/2 - 4 = 0.75           4: 1/2 (1 + 8/2 - 6) = -0.5
  rho = np.float32([0.5, 2, 7, 2, 0.5, 7])
  target, advantage = vtrace(REWARD_T, DISCOUNT_T, NOT_LAST_T, VALUE[:-1], VALUE[1:], rho)
  assert target[VALID].tolist() == [1.75, 3, 4.75, 5.5]
  assert advantage[VALID].tolist() == [0.75, 1, 0.75, -0.5]


def test_discounted_sum_by_hand() -> None:
  # 4; 2 + 4/2 = 4; 1 + 0 * 4 = 1
  y = returns.discounted_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([0.0, 0.5, 9.0]))
  assert y.tolist() == [1, 4, 4]


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(stream())
def test_gae_is_rlaxs(s: dict[str, np.ndarray]) -> None:
  r_t, discount_t, lambda_t, v_tm1, v_t = inputs(s)
  expected = rlax_gae(r_t, discount_t, lambda_t, s['value'])
  np.testing.assert_allclose(gae(r_t, discount_t, lambda_t, v_tm1, v_t), expected, **TOLERANCE)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(stream())
def test_gae_is_that_of_each_episode(s: dict[str, np.ndarray]) -> None:
  ok = valid(s)
  np.testing.assert_allclose(gae(*inputs(s))[ok], gae_by_episode(s)[ok], **TOLERANCE)


@pytest.mark.parametrize(
  ('clip_rho', 'clip_pg_rho'), slow_after(2, (1.0, 1.0), (0.5, 0.7), (2.0, 1.0), (1.0, 3.0))
)
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(s=stream())
def test_vtrace_is_rlaxs(s: dict[str, np.ndarray], clip_rho: float, clip_pg_rho: float) -> None:
  r_t, discount_t, lambda_t, v_tm1, v_t = inputs(s)
  expected = rlax_vtrace(v_tm1, v_t, r_t, discount_t, s['rho'], lambda_t, clip_rho, clip_pg_rho)
  target, advantage = vtrace(*inputs(s), s['rho'], clip_rho, clip_pg_rho)
  np.testing.assert_allclose(target - v_tm1, expected.errors, **TOLERANCE)
  np.testing.assert_allclose(advantage, expected.pg_advantage, **TOLERANCE)


@pytest.mark.parametrize(
  ('clip_rho', 'clip_pg_rho', 'clip_mix'),
  slow_after(
    3, (2.0, 3.0, 1.0), (0.5, 1.3, 0.6), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.7, 1.0)
  ),
)
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(s=stream())
def test_vtrace_is_that_of_each_episode(
  s: dict[str, np.ndarray], clip_rho: float, clip_pg_rho: float, clip_mix: float
) -> None:
  ok = valid(s)
  target, advantage = vtrace(*inputs(s), s['rho'], clip_rho, clip_pg_rho, clip_mix)
  expected = vtrace_by_episode(s, clip_rho, clip_pg_rho, clip_mix)
  # without clipping, products of ratios are up to 4^T
  tolerance = (
    TOLERANCE
    if clip_mix == 1
    else dict(rtol=1e-4, atol=1e-5 * np.abs(expected).max(where=ok, initial=1))
  )
  np.testing.assert_allclose(target[ok], expected[0][ok], **tolerance)
  np.testing.assert_allclose(advantage[ok], expected[1][ok], **tolerance)


def test_an_infinite_ratio_is_clipped() -> None:
  rho = np.float32([np.inf, 0.5, 1, 1, 1, 1])
  target, advantage = vtrace(REWARD_T, DISCOUNT_T, NOT_LAST_T, VALUE[:-1], VALUE[1:], rho)
  assert np.isfinite(target).all() and np.isfinite(advantage).all()


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(stream())
def test_on_policy_vtrace_is_gae(s: dict[str, np.ndarray]) -> None:
  """With ratios of 1 the V-trace target is the TD(lambda) target."""
  target, _ = vtrace(*inputs(s), np.ones(T, np.float32))
  advantage = gae(*inputs(s))
  np.testing.assert_allclose(target, advantage + s['value'][:-1], **TOLERANCE)


def test_nothing_leaks_from_the_next_episode() -> None:
  """Whatever follows a LAST, the estimates before it stay the same, to the bit."""
  rng = np.random.default_rng(0)
  s = dict(
    types=np.int8([1, 1, 2, 0, 1, 1, 2, 0, 1, 1, 1, 1, 1]),
    reward=rng.normal(size=T + 1).astype(np.float32),
    discount=np.ones(T + 1, np.float32),  # both are truncated
    value=rng.normal(size=T + 1).astype(np.float32),
    rho=rng.uniform(0, 3, T).astype(np.float32),
  )
  changed = {k: np.copy(x) for k, x in s.items()}
  for name in ('reward', 'value'):
    changed[name][7:] += 1000
  changed['rho'][6:] = 5
  assert np.array_equal(gae(*inputs(s))[:6], gae(*inputs(changed))[:6])
  for before, after in zip(
    vtrace(*inputs(s), s['rho']), vtrace(*inputs(changed), changed['rho']), strict=True
  ):
    assert np.array_equal(before[:6], after[:6])
