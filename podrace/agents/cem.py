"""The cross-entropy method: the best action by samples, without an actor network.

Rubinstein and Kroese 2004, as QT-Opt has it (Kalashnikov et al. 2018, arXiv 1806.10293): a normal
is fitted to the best of its own samples. The result is the best sample of the last iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podrace.fields import check_fields
from podrace.types import Array

MIXED = 0.05  # share of each iteration's choices that are uniform, so that none is lost


@dataclasses.dataclass(frozen=True)
class CEM:
  """Settings of the cross-entropy method."""

  iterations: int = 2  # times that the distribution of actions is sampled
  samples: int = 64  # actions of each iteration, for each state
  elites: int = 6  # best samples, to which the next iteration's distribution is fitted
  min_std: float = 0.05  # least standard deviation; actions are within [-1, 1]

  def __post_init__(self) -> None:
    check_fields(self)
    if self.elites > self.samples:
      raise ValueError(f'elites {self.elites} must be at most samples {self.samples}')


class ActionLayout(NamedTuple):
  """The numbers of an action: continuous ones within [-1, 1], then groups of one-hot ones.

  In a group one number is 1 and the rest are -1.
  """

  continuous: int
  one_hot: tuple[int, ...] = ()  # sizes of the groups


class Sampler(NamedTuple):
  """The distribution of actions for each of B states."""

  mean: Array  # [B, continuous]
  std: Array  # [B, continuous]
  shares: tuple[Array, ...]  # [B, k] probabilities of each group


def initial(batch: int, layout: ActionLayout) -> Sampler:
  """Return standard normals, and uniform choices."""
  zeros = jnp.zeros([batch, layout.continuous])
  return Sampler(
    zeros, jnp.ones_like(zeros), tuple(jnp.full([batch, k], 1 / k) for k in layout.one_hot)
  )


def draw(sampler: Sampler, samples: int, key: Array) -> Array:
  """Return actions [B, samples, n]. Normals are clipped to [-1, 1]."""
  batch, size = sampler.mean.shape
  normal_key, *keys = jax.random.split(key, 1 + len(sampler.shares))
  noise = jax.random.normal(normal_key, (batch, samples, size))
  x = jnp.clip(sampler.mean[:, None] + sampler.std[:, None] * noise, -1.0, 1.0)
  groups = [_choose(p, samples, k) for p, k in zip(sampler.shares, keys, strict=True)]
  return jnp.concatenate([x, *groups], axis=-1)


def _choose(shares: Array, samples: int, key: Array) -> Array:
  """Return one-hot groups [B, samples, k] of -1 and 1."""
  batch, k = shares.shape
  u = jax.random.uniform(key, (batch, samples, 1))
  below = jnp.sum(jnp.cumsum(shares, axis=-1)[:, None, :-1] <= u, axis=-1)
  return 2.0 * jax.nn.one_hot(below, k) - 1.0


def fit(actions: Array, scores: Array, settings: CEM, layout: ActionLayout) -> Sampler:
  """Return the distribution of the elites of actions [B, N, n] with scores [B, N].

  The standard deviation has Bessel's correction.
  """
  _, best = jax.lax.top_k(scores, settings.elites)  # of equal scores the first ones
  elites = jnp.take_along_axis(actions, best[..., None], axis=1)
  x, *groups = jnp.split(elites, _starts(layout), axis=-1)
  std = jnp.maximum(jnp.std(x, axis=1, ddof=1), settings.min_std)
  chosen = [0.5 * jnp.mean(group, axis=1) + 0.5 for group in groups]
  shares = tuple((1 - MIXED) * p + MIXED / p.shape[-1] for p in chosen)
  return Sampler(jnp.mean(x, axis=1), std, shares)


def _starts(layout: ActionLayout) -> list[int]:
  """Return where the groups begin."""
  return [layout.continuous + sum(layout.one_hot[:i]) for i in range(len(layout.one_hot))]


def maximize(
  score: Callable[[Array], Array], batch: int, layout: ActionLayout, settings: CEM, key: Array
) -> tuple[Array, Array]:
  """Return the best actions [B, n] and their scores [B].

  Args:
    score: the scores [B, N] of actions [B, N, n], all of them in one call.
    batch: B, the number of states.
    layout: the numbers of an action.
    settings: the settings.
    key: a PRNG key.
  """
  first_key, *keys = jax.random.split(key, settings.iterations)
  actions = draw(initial(batch, layout), settings.samples, first_key)
  scores = score(actions)
  for next_key in keys:
    sampler = fit(actions, scores, settings, layout)
    actions = draw(sampler, settings.samples, next_key)
    scores = score(actions)
  best = jnp.argmax(scores, axis=-1)[:, None]
  action = jnp.take_along_axis(actions, best[..., None], axis=1)[:, 0]
  return action, jnp.take_along_axis(scores, best, axis=1)[:, 0]


def uniform(batch: int, layout: ActionLayout, key: Array) -> Array:
  """Return random actions [B, n]: uniform numbers, and uniform choices."""
  number_key, choice_key = jax.random.split(key)
  x = jax.random.uniform(number_key, (batch, layout.continuous), minval=-1.0, maxval=1.0)
  groups = initial(batch, ActionLayout(0, layout.one_hot))
  return jnp.concatenate([x, draw(groups, 1, choice_key)[:, 0]], axis=-1)
