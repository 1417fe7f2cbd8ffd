"""Hindsight modelling of value, HiMo (Guez et al. 2020, arXiv 2002.08329).

    v+(h_t, h_{t+k}) = psi_1(sg h_t, phi(sg h_{t+k}))     sees k steps of the future
    v_m(h_t)         = psi_2(h_t, sg phi_hat(h_t))        predicts the useful part of that future
    L = L_v(v_m) + alpha L_v(v+) + beta (sg phi - phi_hat)^2

`regression` is the paper's illustrative task, as its authors released it. There v+ also trains h.
`HiMo` is an IMPALA agent with these heads: V-trace uses v_m, and the policy sees (h, sg phi_hat).
Against the paper: a feed-forward network, a small task of its own (`Bets`), no R2D2.

    python examples/papers/himo.py

or, in this directory:

    podrace train --agent himo:HiMo --env python:himo.bets --total-steps 1_000_000
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax import lax

import podrace
from podrace import distributions, returns
from podrace.envs.base import NextStepReset, restart, transition
from podrace.learner import sgd
from podrace.types import ActorOutput, Array, Sample, TimeStep, TrainState, Trajectory

sg = lax.stop_gradient


def init_mlp(key: Array, *sizes: int) -> list[tuple[Array, Array]]:
  """Returns weights and biases, with the initializer of Haiku's Linear."""
  normal = jax.nn.initializers.truncated_normal(1.0)
  keys, shapes = jax.random.split(key, len(sizes) - 1), zip(sizes, sizes[1:], strict=False)
  return [
    (normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, (n, m) in zip(keys, shapes, strict=True)
  ]


def mlp(layers: list[tuple[Array, Array]], *inputs: Array, final: bool = False) -> Array:
  """Applies layers to the concatenated inputs; `final`: with a ReLU behind the last one too."""
  x = jnp.concatenate(inputs, axis=-1)
  for i, (w, b) in enumerate(layers):
    x = jnp.dot(x, w) + jnp.broadcast_to(b, (*x.shape[:-1], len(b)))
    x = jax.nn.relu(x) if final or i < len(layers) - 1 else x
  return x


# --- the toy regression, section 3.2 --------------------------------------------------------------

D1, D2 = 28, 4
D = D1 + D2
HIDDEN, PHI, BATCH, ITERATIONS, BETA = 16, 3, 64, 8_000, 3.0
METHODS = {'direct': 'v', 'himo': 'v_m', 'model': 'model-based v'}  # and the label of its value


class Chain(NamedTuple):
  """A random Markov chain of one step: x2' = heaviside(W x2 + b), x1' = MLP(x) + noise."""

  w: Array
  b: Array
  distractor: Any

  def next(self, key: Array, x: Array) -> Array:
    """Draws x' [..., D] after x [..., D]."""
    noise, x1 = jax.random.normal(key, x[..., :D1].shape), x
    for w, b in self.distractor:
      x1 = jax.nn.sigmoid(jnp.dot(x1, w) + jnp.broadcast_to(b, (*x1.shape[:-1], len(b))))
    bits = jnp.dot(x[..., D1:], self.w) + jnp.broadcast_to(self.b, x[..., D1:].shape)
    return jnp.concatenate([x1 + noise, jnp.heaviside(bits, 0.0)], axis=-1)


def chain(key: Array) -> Chain:
  """Draws a chain, all of its numbers from N(0, 1)."""
  shapes = [(D2, D2), (D2,), (D, D), (D,), (D, D1), (D1,)]
  keys = jax.random.split(key, len(shapes))
  w, b, w1, b1, w2, b2 = (jax.random.normal(*args) for args in zip(keys, shapes, strict=True))
  return Chain(w, b, ((w1, b1), (w2, b2)))


def init_regression(key: Array, method: str) -> Any:
  """Returns the parameters of a method."""
  shapes = dict(h=(D, HIDDEN, HIDDEN), phi_hat=(HIDDEN, PHI), v=(HIDDEN + PHI, HIDDEN, 1),
                phi=(D, HIDDEN, PHI), v_plus=(HIDDEN + PHI, HIDDEN, 1))  # fmt: skip
  if method == 'model':
    shapes = dict(model=(D, HIDDEN, HIDDEN, D), v=(2 * D, HIDDEN, HIDDEN, HIDDEN, 1))
  keys = jax.random.split(key, len(shapes))
  return {name: init_mlp(k, *shapes[name]) for k, name in zip(keys, shapes, strict=True)}


def regression_loss(
  params: Any, x: Array, x_next: Array, r: Array, method: str
) -> tuple[Array, Any]:
  """Returns the loss, and the value's squared error: of v_m and v+, or of v."""

  def error(v: Array) -> Array:
    return jnp.mean((v[:, 0] - r) ** 2)

  if method == 'model':
    predicted = mlp(params['model'], x)
    total = error(mlp(params['v'], x, x_next)) + BETA * jnp.mean((predicted - x_next) ** 2)
    return total, (error(mlp(params['v'], x, predicted)),)
  h = mlp(params['h'], x, final=True)
  phi_hat = mlp(params['phi_hat'], h)
  if method == 'direct':  # the same network without hindsight
    value = error(mlp(params['v'], h, phi_hat))
    return value, (value,)
  phi = mlp(params['phi'], x_next)
  value, plus = error(mlp(params['v'], h, sg(phi_hat))), error(mlp(params['v_plus'], h, phi))
  return value + plus + BETA * jnp.mean((sg(phi) - phi_hat) ** 2), (value, plus)


@functools.partial(jax.jit, static_argnums=(1, 2))
def regression(key: Array, method: str, iterations: int = ITERATIONS) -> Any:
  """Trains in a new chain. Returns the errors, smoothed by 0.99, at each 100th iteration."""
  chain_key, init_key, data_key = jax.random.split(key, 3)
  world, params = chain(chain_key), init_regression(init_key, method)
  optimizer = optax.adam(4e-3, eps=1e-3)

  def step(carry: Any, key: Array) -> Any:
    params, opt_state = carry
    x_key, next_key = jax.random.split(key)
    x = jax.random.normal(x_key, (BATCH, D))
    x_next = world.next(next_key, x)
    r = jnp.sum(x[:, :D1], 1) * jnp.sum(x_next[:, D1:], 1) / D**0.5
    grads, errors = jax.grad(regression_loss, has_aux=True)(params, x, x_next, r, method)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), errors

  def smooth(mean: Any, now: Any) -> Any:
    mean = jax.tree.map(lambda m, x: 0.99 * m + 0.01 * x, mean, now)
    return mean, mean

  keys = jax.random.split(data_key, iterations)
  _, errors = lax.scan(step, (params, optimizer.init(params)), keys)
  _, smoothed = lax.scan(smooth, jax.tree.map(lambda x: x[0], errors), errors)
  return jax.tree.map(lambda x: x[99::100], smoothed)
