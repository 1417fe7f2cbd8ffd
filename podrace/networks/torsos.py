"""Torsos: observations to features, through convolutions and an MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.networks.layers import Conv, Dense, flat
from podrace.networks.transformer import Transformer, TransformerTorso
from podrace.types import Array

# Layers in turn by outputs and by inputs, so that there is one sum over devices for two.
SHARDING = (
  (r'Mlp_\d+/Dense_\d*[02468]/(kernel|bias)$', -1),
  (r'Mlp_\d+/Dense_\d*[13579]/kernel$', -2),
)


class Mlp(nn.Module):
  """Fully connected layers, each followed by LayerNorm, if that is set, and the activation."""

  hidden: tuple[int, ...]
  activation: Callable[[Array], Array]
  kernel_init: Any
  layer_norm: bool = False

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    for size in self.hidden:
      x = Dense(size, kernel_init=self.kernel_init)(x)
      x = self.activation(nn.LayerNorm()(x) if self.layer_norm else x)
    return x


class Convolutions(nn.Module):
  """Convolutions, each followed by LayerNorm over its channels, if that is set, and ReLU."""

  LAYERS: ClassVar[tuple[tuple[int, int, int], ...]]  # channels, side and stride of each

  kernel_init: Any
  layer_norm: bool = False

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    for features, size, stride in self.LAYERS:
      x = Conv(features, size, stride, kernel_init=self.kernel_init)(x)
      x = nn.relu(nn.LayerNorm()(x) if self.layer_norm else x)
    return x


class Nature(Convolutions):
  """The convolutions of Mnih et al. 2015 (Nature 518): 32x8/4, 64x4/2, 64x3/1."""

  LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class ImpalaShallow(Convolutions):
  """The shallow convolutions of Espeholt et al. 2018 (arXiv 1802.01561, fig. 3): 16x8/4, 32x4/2."""

  LAYERS = ((16, 8, 4), (32, 4, 2))


class Grid(Convolutions):
  """One 3x3 convolution of 16 channels, as MinAtar's baselines have (arXiv 1903.03176)."""

  LAYERS = ((16, 3, 1),)


class ImpalaDeep(nn.Module):
  """The residual network of Espeholt et al. 2018 (fig. 3): 16, 32, 32 channels, 2 blocks each."""

  kernel_init: Any
  layer_norm: bool = False

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    if self.layer_norm:
      raise ValueError('layer_norm is for the torsos mlp, grid, nature and impala')
    conv = functools.partial(Conv, size=3, padding='SAME', kernel_init=self.kernel_init)
    for features in (16, 32, 32):
      x = nn.max_pool(conv(features)(x), (3, 3), strides=(2, 2), padding='SAME')
      for _ in range(2):
        y = conv(features)(nn.relu(x))
        x = x + conv(features)(nn.relu(y))
    return nn.relu(x)


IMAGE_TORSOS = dict(nature=Nature, impala=ImpalaShallow, grid=Grid) | {'impala-deep': ImpalaDeep}


class Torso(nn.Module):
  """Features [B, F] of observations [B, ...].

  Images pass through convolutions, or all observations through a transformer; then an MLP follows.
  """

  image: str  # a key of IMAGE_TORSOS, 'transformer', or 'mlp' to flatten images too
  hidden: tuple[int, ...]
  activation: Callable[[Array], Array]
  kernel_init: Any
  transformer: Transformer = Transformer()
  layer_norm: bool = False

  @nn.compact
  def __call__(self, observation: Any) -> Array:
    """Apply the layers."""
    if self.image == 'transformer':
      features = [TransformerTorso(self.transformer)(observation)]
    else:
      features = self.features(observation)
    mlp = Mlp(self.hidden, self.activation, self.kernel_init, self.layer_norm)
    return mlp(jnp.concatenate(features, axis=-1))

  def features(self, observation: Any) -> list[Array]:
    """Return the features of each part of an observation."""
    features = []
    for x in jax.tree.leaves(observation):
      if x.ndim == 4 and self.image != 'mlp':
        x = IMAGE_TORSOS[self.image](self.kernel_init, self.layer_norm)(x)
      features.append(flat(x))
    return features
