"""Returns and advantages. Each function is for one stream, [T]; callers vmap over the batch.

A stream is T transitions, from timestep t-1 (`_tm1`) to timestep t (`_t`). `discount_t` is the
agent's discount times the environment's (0 where the episode terminated). A truncated episode
ends with discount 1 and its last value is bootstrapped from. The *next* episode must not leak in
through the recursion, so `lambda_t` is 0 wherever timestep t is LAST. The transition LAST -> FIRST
itself belongs to no episode, and the loss masks it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podrace.types import Array

UNROLL = 16  # steps of a recursion in one round of its loop on a GPU, where a round is 4 kernels


def discounted_sum(x_t: Array, decay_t: Array) -> Array:
  """Return y_t = x_t + decay_t * y_{t+1}, backwards over time, with 0 past the end.

  Shapes: x_t, decay_t and the result are [T] f32.
  """

  def step(y: Array, x_and_decay: tuple[Array, Array]) -> tuple[Array, Array]:
    x, decay = x_and_decay
    y = x + decay * y
    return y, y

  start = jnp.zeros_like(x_t[0])
  # A loop of one round would be a kernel a step.
  unroll = 1 if jax.default_backend() == 'cpu' else max(1, min(UNROLL, len(x_t) // 2))
  _, y_t = jax.lax.scan(step, start, (x_t, decay_t), reverse=True, unroll=unroll)
  return y_t


def gae(r_t: Array, discount_t: Array, lambda_t: Array, v_tm1: Array, v_t: Array) -> Array:
  """Return generalised advantages A_{t-1} (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

  Shapes: all [T] f32. The value target is `advantage + v_tm1` (TD(lambda)).
  """
  td_error = r_t + discount_t * v_t - v_tm1
  return discounted_sum(td_error, discount_t * lambda_t)


def lambda_returns(r_t: Array, discount_t: Array, lambda_t: Array, v_t: Array) -> Array:
  """Return lambda-returns G_{t-1} (Sutton and Barto 2018, eq. 12.18). The last bootstraps from v_t.

  With the largest values of actions as `v_t`, they are Peng's Q(lambda) (Peng and Williams 1996).

  Shapes: all [T] f32.
  """
  lambda_t = jnp.concatenate([lambda_t[:-1], jnp.zeros_like(lambda_t[-1:])])
  return discounted_sum(r_t + discount_t * (1 - lambda_t) * v_t, discount_t * lambda_t)


class VTrace(NamedTuple):
  """V-trace's estimates, [T] f32 each."""

  target: Array  # v_s, the target of the value at t-1
  advantage: Array  # rho-weighted policy-gradient advantage of the action at t-1


def vtrace(
  r_t: Array,
  discount_t: Array,
  lambda_t: Array,
  v_tm1: Array,
  v_t: Array,
  rho_tm1: Array,
  clip_rho: float = 1.0,
  clip_pg_rho: float = 1.0,
  clip_mix: float | Array = 1.0,
) -> VTrace:
  """Return V-trace's estimates (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

  `rho_tm1` is pi(a|s) / mu(a|s), not clipped, of the action at t-1. Where `lambda_t` is 0 the
  policy gradient too bootstraps from v_t and not from the (foreign) target behind it.

  `clip_mix` is the share of the clipped weight in each weight; the rest is the weight that is not
  clipped. Less than 1 is leaky V-trace (Zahavy et al. 2020, arXiv 2002.12928), with one share for
  all weights.

  Shapes: all [T] f32, `clip_mix` [].
  """
  td_error = clip_weights(rho_tm1, clip_rho, clip_mix) * (r_t + discount_t * v_t - v_tm1)
  c_tm1 = clip_weights(rho_tm1, 1.0, clip_mix)
  error = discounted_sum(td_error, discount_t * lambda_t * c_tm1)
  target = error + v_tm1
  target_t = jnp.concatenate([target[1:], v_t[-1:]])  # v_{s+1}
  q = r_t + discount_t * (lambda_t * target_t + (1 - lambda_t) * v_t)
  return VTrace(target, clip_weights(rho_tm1, clip_pg_rho, clip_mix) * (q - v_tm1))


def clip_weights(rho: Array, limit: float, mix: float | Array) -> Array:
  """Return importance weights [T] f32, of which the share `mix` is clipped."""
  clipped = jnp.minimum(limit, rho)
  if isinstance(mix, float | int) and mix == 1:
    return clipped  # also where rho is infinite
  return mix * clipped + (1 - mix) * rho


def retrace(r_t: Array, discount_t: Array, c_t: Array, q_t: Array, v_t: Array) -> Array:
  """Return Retrace's estimates of Q_{t-1} (Munos et al. 2016, arXiv 1606.02647, eq. 4).

  `q_t` is the value of the action taken at t, `v_t` the expectation over the target policy's, and
  `c_t` the trace, lambda min(1, pi / mu) of that action; 0 where timestep t is LAST. The last step
  bootstraps from v_t.

  Shapes: all [T] f32.
  """
  c_t = jnp.concatenate([c_t[:-1], jnp.zeros_like(c_t[-1:])])
  return discounted_sum(r_t + discount_t * (v_t - c_t * q_t), discount_t * c_t)


class NStep(NamedTuple):
  """One transition over several steps, [] each."""

  r_t: Array  # f32 the discounted sum of the rewards
  discount_t: Array  # f32 of the value that is bootstrapped from; 0 where the episode terminated
  end: Array  # i32 the timestep of that value: n, or less where the episode ended


def n_step(r_t: Array, discount_t: Array, last_t: Array) -> NStep:
  """Return the transition from timestep 0 over n steps, or fewer where a timestep t is LAST.

  Sutton and Barto 2018, eq. 7.1. Shapes: r_t, discount_t [n] f32; last_t [n] bool.
  """
  going = jnp.concatenate([jnp.ones_like(last_t[:1]), jnp.cumsum(last_t[:-1]) == 0])
  before = jnp.concatenate([jnp.ones_like(discount_t[:1]), jnp.cumprod(discount_t)[:-1]])
  reward = jnp.sum(jnp.where(going, before * r_t, 0.0))
  discount = jnp.prod(jnp.where(going, discount_t, 1.0))
  return NStep(reward, discount, jnp.sum(going, dtype=jnp.int32))


def n_step_bootstrapped(
  r_t: Array, discount_t: Array, lambda_t: Array, v_t: Array, n: int
) -> Array:
  """Return n-step targets for each of T timesteps [T] f32; the last n - 1 look less far.

  Where `lambda_t` [T] is 0, at episode ends, v_t is bootstrapped from instead of looking further.
  Shapes: all [T] f32.
  """
  length = r_t.shape[0]
  n = min(n, length)  # no target looks further, and each step is compiled
  target = jnp.concatenate([v_t[n - 1 :], jnp.broadcast_to(v_t[-1:], (n - 1,))])

  def pad(x: Array, value: float) -> Array:
    return jnp.concatenate([x, jnp.full_like(x[:1], value, shape=(n - 1,))])

  r, discount, lambda_ = pad(r_t, 0.0), pad(discount_t, 1.0), pad(lambda_t, 1.0)
  v = jnp.concatenate([v_t, jnp.broadcast_to(v_t[-1:], (n - 1,))])
  for i in reversed(range(n)):
    now = slice(i, i + length)
    target = r[now] + discount[now] * ((1 - lambda_[now]) * v[now] + lambda_[now] * target)
  return target


def rescale(x: Array, epsilon: float = 1e-3) -> Array:
  """Return h(x), which compresses returns (Pohlen et al. 2018, arXiv 1805.11593, prop. A.2).

  This form, as that of `unscale`, takes no difference of nearly equal numbers.
  """
  return x / (jnp.sqrt(jnp.abs(x) + 1) + 1) + epsilon * x


def unscale(x: Array, epsilon: float = 1e-3) -> Array:
  """Return the inverse of `rescale`: y (|y| + 2), where 1 + |y| is the root in its sum."""
  b = 1 + 2 * epsilon
  y = 2 * x / (b + jnp.sqrt(b * b + 4 * epsilon * jnp.abs(x)))
  return y * (jnp.abs(y) + 2)


def project(atoms: Array, probabilities: Array, support: Array) -> Array:
  """Project a distribution over any atoms [N] onto an ascending support [M] (C51's projection).

  Bellemare et al. 2017 (arXiv 1707.06887, eq. 7). Shapes: f32; returns probabilities [M]. Each gap
  of the support counts by its own width. The gaps of an even support differ by rounding, and with
  one width for all of them the probabilities would add up to 1 only within that.
  """
  gaps = jnp.diff(support)
  below, above = jnp.concatenate([gaps[:1], gaps]), jnp.concatenate([gaps, gaps[-1:]])
  distance = jnp.clip(atoms, support[0], support[-1])[None] - support[:, None]
  gap = jnp.where(distance < 0, below[:, None], above[:, None])
  share = jnp.clip(1 - jnp.abs(distance) / gap, 0, 1)
  return jnp.dot(share, probabilities, precision='highest')  # they are to add up to 1


def quantile_loss(quantiles: Array, targets: Array, threshold: float = 1.0) -> Array:
  """Return the quantile Huber loss of quantiles [N] against sampled targets [M], [] f32.

  Dabney et al. 2018 (arXiv 1710.10044, eq. 10), divided by the threshold, so that the smallest
  thresholds give the quantile loss itself (arXiv 1806.06923, eq. 3).
  """
  n = quantiles.shape[0]
  tau = (jnp.arange(n, dtype=jnp.float32) + 0.5) / n
  error = targets[None] - quantiles[:, None]
  small = jnp.abs(error) <= threshold
  huber = jnp.where(small, 0.5 * error**2, threshold * (jnp.abs(error) - 0.5 * threshold))
  weight = jnp.abs(tau[:, None] - (error < 0))
  return jnp.sum(jnp.mean(weight * huber / threshold, axis=1))
