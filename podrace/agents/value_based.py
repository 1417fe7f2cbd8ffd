"""Exploration of value-based agents, and the transitions that they learn from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podrace import returns
from podrace.distributions import MASKED_VALUE
from podrace.types import Array, TimeStep, Trajectory


class ValueExtras(NamedTuple):
  """Values that acting computed, for the first priority of a window, [B] f32 each."""

  value: Array  # of the action that was taken
  best: Array  # of the best one


class NStepTransitions(NamedTuple):
  """One n-step transition for each of B windows."""

  r_t: Array  # [B] f32
  discount_t: Array  # [B] f32
  before: TimeStep  # [B, ...] where the action was taken
  after: TimeStep  # [B, ...] the timestep to bootstrap from
  action: Any  # [B, ...]
  mask: Array  # [B] f32, 0 for LAST -> FIRST, which is no transition of any episode
  end: Array  # [B] i32, where `after` is in the window


def transitions(window: Trajectory, discount: float) -> NStepTransitions:
  """Return windows [n+1, B] as one transition each, ended early where an episode ends."""
  timesteps = window.timesteps
  step = jax.vmap(returns.n_step, in_axes=1)(
    timesteps.reward[1:], discount * timesteps.discount[1:], timesteps.last[1:]
  )
  streams = jnp.arange(step.end.shape[0])
  before = jax.tree.map(lambda x: x[0], timesteps)
  return NStepTransitions(
    r_t=step.r_t,
    discount_t=step.discount_t,
    before=before,
    after=jax.tree.map(lambda x: x[step.end, streams], timesteps),
    action=jax.tree.map(lambda x: x[0], window.outputs.action),
    mask=1.0 - before.last.astype(jnp.float32),
    end=step.end,
  )


def project(
  step: NStepTransitions, probabilities: Array, support: Array
) -> tuple[Array, dict[str, Array]]:
  """Return the n-step targets [N, atoms] of a distribution of returns, and their metrics.

  Bellemare et al. 2017 (arXiv 1707.06887, eq. 7). `probabilities` [N, atoms] are those of the
  returns after each step. What is beyond the ends of the support is cut off there.
  """
  atoms = step.r_t[:, None] + step.discount_t[:, None] * support[None]
  mean = jnp.sum(probabilities * atoms, axis=-1)
  outside = (mean < support[0] - 1e-4) | (mean > support[-1] + 1e-4)
  share = jnp.sum(step.mask * outside) / jnp.maximum(jnp.sum(step.mask), 1.0)
  projected = jax.vmap(returns.project, in_axes=(0, 0, None))(atoms, probabilities, support)
  return projected, dict(outside_support=share)


def epsilon_ladder(env_id: Array, total_envs: int, base: float, power: float) -> Array:
  """Return epsilon [B]: base^(1 + power i / (n - 1)) (Ape-X, Horgan et al. 2018)."""
  return base ** (1 + power * env_id / max(total_envs - 1, 1))


def epsilon_greedy(values: Array, epsilon: Array, key: Array) -> Array:
  """Return actions [B] i32: random with probability epsilon [B], else the best by values [B, A].

  Ties are broken at random. An action that the environment forbids is never taken.
  """
  explore_key, random_key = jax.random.split(key)
  noise = jax.random.uniform(random_key, values.shape)
  allowed = values > MASKED_VALUE / 2
  best = allowed & (values == jnp.max(values, axis=-1, keepdims=True))
  explore = jax.random.uniform(explore_key, epsilon.shape) < epsilon
  among = jnp.where(explore[:, None], allowed, best)
  return jnp.argmax(jnp.where(among, noise, -1.0), axis=-1).astype(jnp.int32)


def select_action(values: Array, action: Array) -> Array:
  """Return the values [..., *rest] of actions [...], from values [..., A, *rest]."""
  rest = values.ndim - action.ndim - 1
  index = action.reshape(action.shape + (1,) * (rest + 1))
  return jnp.take_along_axis(values, index, axis=action.ndim).squeeze(action.ndim)


def follow(target: Any, online: Any, steps: Array, period: int, rate: float) -> Any:
  """Return the target parameters after `steps` gradient steps.

  They are a copy every `period` steps. With `rate` less than 1 they move by that share every
  `period` steps: with a `period` of 1 they are Polyak's average.
  """
  now = steps % period == 0
  moved = optax.incremental_update(online, target, rate)
  return jax.tree.map(lambda new, old: jnp.where(now, new, old), moved, target)
