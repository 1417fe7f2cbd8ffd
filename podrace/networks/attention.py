"""A core that attends to the last timesteps of an episode: a gated transformer over time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from podrace.fields import check_fields
from podrace.types import Array

GATE_BIAS = 2.0  # a block begins close to the identity (Parisotto et al. 2020, section 3.2)
FORBIDDEN = -1e9  # logit of a timestep that is not attended to


@dataclasses.dataclass(frozen=True)
class Attention:
  """Sizes of the core transformer, besides `core_size`, the width."""

  window: int = 64  # core transformer: earlier timesteps that each block attends to
  layers: int = 1  # core transformer: blocks; each adds its window to the steps that are seen
  heads: int = 4  # core transformer: heads of attention, which divide core_size

  def __post_init__(self) -> None:
    check_fields(self)


class TransformerCore(nn.Module):
  """The gated transformer of Parisotto et al. 2020 (arXiv 1910.06764, section 3) over time.

  A block attends to the timestep itself and to the last `window` ones of the same episode. It is
  normalized before each part, and gated behind it. Deviations: positions are a bias for each head
  and distance (Raffel et al. 2020, arXiv 1910.10683, section 2.1), and gradients reach back to the
  beginning of an unroll. They end there, as with a GRU.
  """

  size: int
  settings: Attention

  @nn.compact
  def __call__(self, state: Any, x: Array, first: Array) -> tuple[Array, Any]:
    """Apply the blocks.

    Args:
      state: the inputs of each block at the last timesteps, [B, layers, window, size], and 1.0
        where they belong to the episode, [B, window].
      x: [T, B, F] inputs.
      first: [T, B] whether an episode begins.

    Returns:
      Outputs [T, B, size], and the state after them.
    """
    memory, valid = state
    window = self.settings.window
    episode = jnp.cumsum(first, axis=0).T  # [B, T], 0 for the one that was under way
    episodes = jnp.concatenate([jnp.where(valid > 0, 0, -1), episode], axis=1)  # [B, window + T]
    distance = jnp.arange(len(x))[:, None] - jnp.arange(-window, len(x))[None]
    near = (distance >= 0) & (distance <= window)
    seen = near[None] & (episode[:, :, None] == episodes[:, None])  # [B, T, window + T]
    x = nn.Dense(self.size, name='input')(x).swapaxes(0, 1)
    blocks = []
    for i in range(self.settings.layers):
      context = jnp.concatenate([memory[:, i], x], axis=1)
      blocks.append(context[:, -window:])
      block = GatedBlock(self.settings.heads, window, name=f'block_{i}')
      x = block(x, context, seen, jnp.clip(distance, 0, window))
    valid = (episodes == episode[:, -1:])[:, -window:]
    return x.swapaxes(0, 1), (jnp.stack(blocks, axis=1), valid.astype(memory.dtype))


def state_shapes(size: int, settings: Attention) -> tuple[tuple[int, ...], ...]:
  """Return the shapes of the two arrays of a `TransformerCore`'s state, without the batch."""
  return (settings.layers, settings.window, size), (settings.window,)


class GatedBlock(nn.Module):
  """Attention of timesteps [B, T, size] to a context [B, K, size], and two layers, each gated."""

  heads: int
  window: int

  @nn.compact
  def __call__(self, x: Array, context: Array, seen: Array, distance: Array) -> Array:
    """Apply the layers; seen: [B, T, K] and distance: [T, K], of each timestep to the context."""
    size = x.shape[-1]
    normal = nn.LayerNorm(name='before_attention')
    bias = self.param('distance', nn.initializers.zeros_init(), (self.heads, self.window + 1))
    logits = jnp.where(seen[:, None], bias[:, distance][None], FORBIDDEN)
    attend = functools.partial(nn.dot_product_attention, bias=logits)
    heads = nn.MultiHeadDotProductAttention(self.heads, attention_fn=attend, name='attention')
    y = heads(normal(x), normal(context))
    x = Gate(name='attention_gate')(x, nn.relu(y))
    y = nn.relu(nn.Dense(4 * size, name='up')(nn.LayerNorm(name='before_layers')(x)))
    return Gate(name='layers_gate')(x, nn.relu(nn.Dense(size, name='down')(y)))


class Gate(nn.Module):
  """A GRU's update of x by y (Parisotto et al. 2020, section 3.2), close to x at first."""

  @nn.compact
  def __call__(self, x: Array, y: Array) -> Array:
    """Return [B, T, size]."""
    size = x.shape[-1]
    from_y = nn.Dense(3 * size, use_bias=False, name='from_y')(y)
    reset_y, update_y, new_y = jnp.split(from_y, 3, axis=-1)
    from_x = nn.Dense(2 * size, use_bias=False, name='from_x')(x)
    reset_x, update_x = jnp.split(from_x, 2, axis=-1)
    bias = self.param('bias', nn.initializers.constant(GATE_BIAS), (size,))
    update = nn.sigmoid(update_y + update_x - bias[None, None])
    reset = nn.sigmoid(reset_y + reset_x)
    new = jnp.tanh(new_y + nn.Dense(size, use_bias=False, name='reset')(reset * x))
    return (1 - update) * x + update * new
