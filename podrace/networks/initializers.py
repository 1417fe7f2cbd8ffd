"""Initialisers of layers' kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.types import Array


def orthonormal(matrix: Array) -> Array:
  """Orthonormalize the columns of `matrix` [M, N], M >= N, with a positive triangular diagonal.

  Classical Gram-Schmidt, twice for each column (Giraud et al. 2005). It is QR without LAPACK:
  jaxlib's batched LAPACK calls deadlock where two of them run at once on a CPU.
  """

  def orthogonalize(j: Array, done: Array) -> Array:
    column = matrix[:, j]
    for _ in range(2):
      column = column - done @ (column @ done)
      column = column / jnp.linalg.norm(column)
    return done.at[:, j].set(column)

  return jax.lax.fori_loop(0, matrix.shape[1], orthogonalize, jnp.zeros_like(matrix))


def orthogonal(scale: float = 1.0) -> Callable[..., Array]:
  """Return an initialiser, uniform over orthogonal matrices (Saxe et al. 2013, arXiv 1312.6120).

  The last axis is a layer's outputs, all before it are its inputs, as in
  `jax.nn.initializers.orthogonal`, with the same values to rounding, times `scale`.
  """

  def init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> Array:
    inputs, outputs = math.prod(shape[:-1]), shape[-1]
    tall = jax.random.normal(key, (max(inputs, outputs), min(inputs, outputs)), dtype)
    basis = orthonormal(tall)
    return scale * (basis if inputs >= outputs else basis.T).reshape(shape)

  return init


INITIALIZERS = {
  # Schulman et al.'s PPO as released in OpenAI's baselines
  'orthogonal': lambda: orthogonal(math.sqrt(2)),
  # As Sonnet's default, IMPALA's and DQN's, a truncated normal; its standard deviation is
  # 1/sqrt(fan in) here. Sonnet's is 0.88 of that, after truncation
  'lecun': nn.initializers.lecun_normal,
}
