"""Residual towers, as MuZero's (Schrittwieser et al. 2020, arXiv 1911.08265, appendix F).

Against the paper: layers are normalized over the channels of each place, not over the batch, so
that there are no statistics to keep.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.envs.spaces import PIXELS
from podrace.networks.layers import Conv, unit
from podrace.types import Array


class Convolution(nn.Module):
  """A 3 x 3 convolution, normalized over the channels of each place or not."""

  channels: int
  stride: int = 1
  kernel_init: Any = nn.initializers.lecun_normal()
  normalize: bool = True

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    x = Conv(self.channels, 3, self.stride, 'SAME', self.kernel_init)(x)
    if not self.normalize:
      return x
    scale = self.param('scale', nn.initializers.ones_init(), (self.channels,))
    bias = self.param('bias', nn.initializers.zeros_init(), (self.channels,))
    return nn.standardize(x, axis=-1) * scale[None, None, None] + bias[None, None, None]


class Blocks(nn.Module):
  """Residual blocks of two convolutions each."""

  channels: int
  blocks: int
  layer: Any  # makes a Convolution of channels and a stride

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    for _ in range(self.blocks):
      y = nn.relu(self.layer(self.channels)(x))
      x = nn.relu(x + self.layer(self.channels)(y))
    return x


class Tower(nn.Module):
  """A convolution, then residual blocks: [B, H, W, C] to [B, H, W, channels]."""

  channels: int
  blocks: int
  layer: Any  # makes a Convolution of channels and a stride

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    x = nn.relu(self.layer(self.channels)(x))
    return Blocks(self.channels, self.blocks, self.layer)(x)


class Downsample(nn.Module):
  """The hidden state of an observation: boards keep their size, pixels become a sixteenth a side.

  The paper's: half the channels, stride 2, two blocks; all channels, stride 2, three blocks;
  average pooling; three blocks; average pooling; then the tower. The rest of the observation
  becomes planes of one number each.
  """

  channels: int
  blocks: int
  layer: Any  # makes a Convolution of channels and a stride

  @nn.compact
  def __call__(self, observation: Any) -> Array:
    """Apply the layers."""
    leaves = [unit(x) for x in jax.tree.leaves(observation)]
    images = [x for x in leaves if x.ndim == 4]
    if not images:
      shapes = [x.shape[1:] for x in leaves]
      raise ValueError(f'a residual tower needs an image, [height, width, channels], not {shapes}')
    height, width = images[0].shape[1:3]
    planes = [self._planes(x, height, width) for x in leaves]
    x = jnp.concatenate(planes, axis=-1)
    if min(height, width) >= PIXELS:
      x = self._smaller(x)
    return Tower(self.channels, self.blocks, self.layer)(x)

  def _planes(self, x: Array, height: int, width: int) -> Array:
    if x.ndim == 4:
      if x.shape[1:3] != (height, width):
        raise ValueError(f'images of {x.shape[1:3]} and {(height, width)} in one observation')
      return x
    x = x.reshape(x.shape[0], 1, 1, -1)
    return jnp.broadcast_to(x, (x.shape[0], height, width, x.shape[-1]))

  def _smaller(self, x: Array) -> Array:
    half = max(self.channels // 2, 1)
    x = nn.relu(self.layer(half, 2)(x))
    x = Blocks(half, min(2, self.blocks), self.layer)(x)
    x = nn.relu(self.layer(self.channels, 2)(x))
    x = Blocks(self.channels, min(3, self.blocks), self.layer)(x)
    x = nn.avg_pool(x, (3, 3), (2, 2), 'SAME')
    x = Blocks(self.channels, min(3, self.blocks), self.layer)(x)
    return nn.avg_pool(x, (3, 3), (2, 2), 'SAME')
