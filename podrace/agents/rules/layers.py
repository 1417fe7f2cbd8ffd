"""Layers of the networks of rules, as pure functions of a rule's arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrace.types import Array

RuleParams = Mapping[str, Any]  # name in the file -> f32 array


def with_biases(weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
  """Return the shapes of all arrays of layers, from the shapes of their weights."""
  all_shapes: dict[str, tuple[int, ...]] = {}
  for name, shape in weights.items():
    all_shapes[f'{name}/b'], all_shapes[f'{name}/w'] = (shape[-1],), shape
  return all_shapes


def embedding(name: str, predictions: int, size: int) -> dict[str, tuple[int, ...]]:
  """Weights of the two layers of `embed`."""
  return {f'{name}/~/linear_0': (predictions, size), f'{name}/~/linear_1': (size, 1)}


def initial(
  key: Array, shapes: Mapping[str, tuple[int, ...]], wide: Mapping[str, float]
) -> dict[str, Array]:
  """Return arrays before training. `wide` has standard deviations that are not by the fan-in."""
  params = {}
  for i, (name, shape) in enumerate(shapes.items()):
    if name.endswith('/b'):
      params[name] = jnp.zeros(shape)
      continue
    std = wide.get(name, 1 / math.sqrt(shape[-2]))
    params[name] = std * jax.random.truncated_normal(jax.random.fold_in(key, i), -2, 2, shape)
  return params


def dense(params: RuleParams, name: str, x: Array) -> Array:
  """A linear layer on [..., N]."""
  w, b = params[f'{name}/w'], params[f'{name}/b']
  return (x.reshape(-1, w.shape[0]) @ w + b[None]).reshape(*x.shape[:-1], -1)


def embed(params: RuleParams, name: str, x: Array) -> Array:
  """A prediction [..., Y] as one number [..., 1]."""
  return dense(params, f'{name}/~/linear_1', jax.nn.relu(dense(params, f'{name}/~/linear_0', x)))


def lstm(gates: Array, cell: Array) -> tuple[Array, Array]:
  """One step from gates [..., 4 H]: the hidden state and the cell."""
  i, g, f, o = jnp.split(gates, 4, axis=-1)
  cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
  return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def backwards(params: RuleParams, name: str, rows: Array, last: Array) -> Array:
  """Run an LSTM backwards over a trajectory [T, B, N].

  It is reset where an episode ends, `last` [T, B].
  """
  w, b = params[f'{name}/w'], params[f'{name}/b']
  inputs, size = rows.shape[-1], b.shape[0] // 4
  gates = (rows.reshape(-1, inputs) @ w[:inputs] + b[None]).reshape(*rows.shape[:2], -1)

  def step(carry: Any, x: Any) -> Any:
    gates, last = x
    hidden, cell = (jnp.where(last[:, None], 0.0, c) for c in carry)
    hidden, cell = lstm(gates + hidden @ w[inputs:], cell)
    return (hidden, cell), hidden

  zeros = jnp.zeros_like(gates[0, :, :size])
  _, outputs = lax.scan(step, (zeros, zeros), (gates, last), reverse=True)
  return outputs


def entropy(logits: Array) -> Array:
  """Return the entropies [...] of categorical distributions, in nats, from logits [..., N]."""
  log_p = jax.nn.log_softmax(logits)
  return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def divergence(p: Array, q: Array) -> Array:
  """KL(p || q) [...] of two categorical distributions by their logits [..., N]."""
  log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
