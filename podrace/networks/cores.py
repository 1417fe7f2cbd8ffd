"""Recurrent cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.networks.initializers import orthogonal
from podrace.networks.protocol import merge_time, reset_where, split_time
from podrace.types import Array, TimeStep


class Core(nn.Module):
  """GRU or LSTM over time, reset where `first`; the products with the inputs are out of the loop.

  GRU: Cho et al. 2014 (arXiv 1406.1078), with the reset gate behind the product, as in cuDNN.
  LSTM: Hochreiter and Schmidhuber 1997, forget bias 1 (Jozefowicz et al. 2015).
  """

  kind: str
  size: int

  @nn.compact
  def __call__(self, state: Any, x: Array, first: Array) -> tuple[Array, Any]:
    """state: [B, size] arrays; x: [T, B, F]; first: [T, B]. Returns [T, B, size] and the state."""
    gates = {'gru': 3, 'lstm': 4}[self.kind]
    inputs = nn.Dense(gates * self.size, name='input')(x)
    kernel = self.param('recurrent', orthogonal(), (self.size, gates * self.size))
    candidate_bias = self.param('bias', nn.initializers.zeros_init(), (self.size,))
    cell = {'gru': _gru, 'lstm': _lstm}[self.kind]

    def step(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
      x, first = inputs
      state = reset_where(first, jax.tree.map(jnp.zeros_like, state), state)
      state = cell(state, x, kernel, candidate_bias[None])
      return state, state[0]

    state, outputs = jax.lax.scan(step, state, (inputs, first))
    return outputs, state


def remember(core: nn.Module | None, state: Any, x: Array, t: TimeStep) -> tuple[Array, Any]:
  """Return outputs [T*B, size] of a core for features [T*B, F] of timesteps [T, B, ...].

  Without a core they are the features.
  """
  if core is None:
    return x, state
  outputs, state = core(state, split_time(x, t.reward.shape[0]), t.first)
  return merge_time(outputs), state


def _gru(state: Any, x: Array, kernel: Array, bias: Array) -> Any:
  (h,) = state
  x_r, x_z, x_n = jnp.split(x, 3, axis=-1)
  h_r, h_z, h_n = jnp.split(h @ kernel, 3, axis=-1)
  r, z = nn.sigmoid(x_r + h_r), nn.sigmoid(x_z + h_z)
  n = jnp.tanh(x_n + r * (h_n + bias))
  return ((1 - z) * n + z * h,)


def _lstm(state: Any, x: Array, kernel: Array, bias: Array) -> Any:
  h, c = state
  i, f, g, o = jnp.split(x + h @ kernel, 4, axis=-1)
  c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g + bias)
  return nn.sigmoid(o) * jnp.tanh(c), c
