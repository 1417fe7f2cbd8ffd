"""Returns and advantages. Each function is for one stream, [T]; callers vmap over the batch.

A stream is T transitions, from timestep t-1 (`_tm1`) to timestep t (`_t`). `discount_t` is the
agent's discount times the environment's (0 where the episode terminated). A truncated episode
ends with discount 1 and its last value is bootstrapped from; what must not happen is that the
*next* episode leaks in through the recursion, so `lambda_t` is 0 wherever timestep t is LAST.
The transition LAST -> FIRST itself belongs to no episode, and the loss masks it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podrace.types import Array


def discounted_sum(x_t: Array, decay_t: Array) -> Array:
  """y_t = x_t + decay_t * y_{t+1}, backwards over time; what is past the end counts as 0.

  Shapes: x_t, decay_t and the result are [T] f32.
  """

  def step(y: Array, x_and_decay: tuple[Array, Array]) -> tuple[Array, Array]:
    x, decay = x_and_decay
    y = x + decay * y
    return y, y

  _, y_t = jax.lax.scan(step, jnp.zeros_like(x_t[0]), (x_t, decay_t), reverse=True)
  return y_t


def gae(r_t: Array, discount_t: Array, lambda_t: Array, v_tm1: Array, v_t: Array) -> Array:
  """Generalised advantage estimates A_{t-1} (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

  Shapes: all [T] f32. The value target is `advantage + v_tm1` (TD(lambda)).
  """
  td_error = r_t + discount_t * v_t - v_tm1
  return discounted_sum(td_error, discount_t * lambda_t)


class VTrace(NamedTuple):
  """What V-trace estimates, [T] f32 each."""

  target: Array  # v_s, what the value at t-1 should be
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
) -> VTrace:
  """V-trace targets and advantages (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

  `rho_tm1` is pi(a|s) / mu(a|s), not clipped, of the action at t-1. Where `lambda_t` is 0 the
  policy gradient too bootstraps from v_t and not from the (foreign) target behind it.

  Shapes: all [T] f32.
  """
  td_error = jnp.minimum(clip_rho, rho_tm1) * (r_t + discount_t * v_t - v_tm1)
  c_tm1 = jnp.minimum(1.0, rho_tm1)
  error = discounted_sum(td_error, discount_t * lambda_t * c_tm1)
  target = error + v_tm1
  target_t = jnp.concatenate([target[1:], v_t[-1:]])  # v_{s+1}
  q = r_t + discount_t * (lambda_t * target_t + (1 - lambda_t) * v_t)
  return VTrace(target, jnp.minimum(clip_pg_rho, rho_tm1) * (q - v_tm1))
