"""A transformer over the parts of an observation, and its sharding over a model axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.fields import check_fields
from podrace.networks.layers import Conv, flat
from podrace.types import Array

# Heads, and the units between the two layers behind attention, are split over devices. The rest is
# on all.
SHARDING = (
  (r'attention/(query|key|value)/kernel$', -2),
  (r'attention/(query|key|value)/bias$', -2),
  (r'attention/out/kernel$', -3),
  (r'/up/(kernel|bias)$', -1),
  (r'/down/kernel$', -2),
)


@dataclasses.dataclass(frozen=True)
class Transformer:
  """Sizes of a transformer torso: it has about 12 * layers * width^2 parameters."""

  layers: int = 2  # transformer: blocks of attention and two layers
  width: int = 64  # transformer: numbers of a token
  heads: int = 4  # transformer: heads of attention; --model-devices divides them
  patch: int = 2  # transformer: side of the squares of an image, each of which is a token

  def __post_init__(self) -> None:
    check_fields(self)
    if self.width % self.heads:
      raise ValueError(
        f'the width {self.width} of a transformer does not divide into {self.heads} heads'
      )


class TransformerTorso(nn.Module):
  """Features [B, width] of observations [B, ...]: the mean over the outputs of all tokens.

  Layers are normalized before each block (Xiong et al. 2020, arXiv 2002.04745).
  """

  sizes: Transformer

  @nn.compact
  def __call__(self, observation: Any) -> Array:
    """Apply the layers."""
    x = Tokens(self.sizes.width, self.sizes.patch, name='tokens')(observation)
    for i in range(self.sizes.layers):
      x = Block(self.sizes.heads, name=f'block_{i}')(x)
    return jnp.mean(nn.LayerNorm(name='last')(x), axis=1)


class Tokens(nn.Module):
  """Tokens [B, N, width] of observations.

  Images are cut into patches (Dosovitskiy et al. 2021, arXiv 2010.11929). Each other number is a
  token of its own (Gorishniy et al. 2021, arXiv 2106.11959). A token is an embedding of its content
  plus one of its place. Both start with the same size, since the norm hides the size of their sum.
  """

  width: int
  patch: int

  @nn.compact
  def __call__(self, observation: Any) -> Array:
    """Apply the layers."""
    tokens = []
    for i, x in enumerate(jax.tree.leaves(observation)):
      x = x[..., None] if x.ndim == 3 else x  # a board without channels
      if x.ndim == 4:
        patches = Conv(self.width, self.patch, self.patch, padding='SAME', name=f'patches_{i}')(x)
        tokens.append(patches.reshape(x.shape[0], -1, self.width))
      else:
        numbers = flat(x)
        shape = (numbers.shape[1], self.width)
        embedding = self.param(f'numbers_{i}', nn.initializers.normal(1.0), shape)
        tokens.append(numbers[:, :, None] * embedding[None])
    content = jnp.concatenate(tokens, axis=1)
    place = self.param('places', nn.initializers.normal(1.0), content.shape[1:])
    return content + place[None]


class Block(nn.Module):
  """Self-attention and two layers with GELU between them, on [B, N, width]."""

  heads: int

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    normal = nn.LayerNorm(name='before_attention')(x)
    x = x + nn.MultiHeadDotProductAttention(self.heads, name='attention')(normal)
    y = nn.Dense(4 * x.shape[-1], name='up')(nn.LayerNorm(name='before_layers')(x))
    return x + nn.Dense(x.shape[-1], name='down')(nn.gelu(y))
