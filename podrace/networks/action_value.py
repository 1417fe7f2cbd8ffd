"""Values of many continuous actions in each state, for a search over actions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.fields import check_support
from podrace.networks.layers import Conv, Dense, flat, unit
from podrace.networks.protocol import merge_time, split_time
from podrace.networks.recurrent_body import RecurrentBody
from podrace.types import Array, TimeStep

CHANNELS = 64  # of each convolution of the paper's network
LEAST_SIDE = 217  # of an image: its strides leave 7 of it, and three convolutions without padding 1


class _SmallValue(nn.Module):
  """The torso sees the state; the action enters at the first of the later layers."""

  settings: ActionValue

  def setup(self) -> None:
    s = self.settings
    first, *rest = s.head_hidden
    self.torso, self.mlp = s.make_torso(), s.mlp(tuple(rest))
    self.rnn = s.make_core()
    self.state, self.action, self.output = (
      Dense(n, kernel_init=s.kernel_init) for n in (first, first, 1)
    )

  def embed(self, observation: Any) -> Array:
    """Observations [B, ...] -> [B, F]."""
    return self.state(self.torso(self.settings.prepare(observation)[0]))

  def unroll(self, state: Any, timesteps: TimeStep, previous: Any = None) -> tuple[Array, Any]:
    """[T, B, ...] -> embeddings [T, B, F] of the experience up to each timestep."""
    s, length = self.settings, timesteps.reward.shape[0]
    x = self.torso(s.prepare(merge_time(timesteps.observation))[0])
    x, state = s.remember(self.rnn, state, x, timesteps, previous)
    return split_time(self.state(x), length), state

  def start(self, state: Any, timesteps: TimeStep, action: Array) -> Array:
    """Use all layers, for the parameters."""
    return self.value_of(self.unroll(state, timesteps)[0][0], action)

  def value_of(self, embedding: Array, action: Array) -> Array:
    """Embeddings [B, F] and actions [B, N, n] -> [B, N]."""
    rows = action.shape[:2]
    x = self.action(action.reshape(-1, action.shape[-1])).reshape(*rows, -1)
    x = self.settings.activate(x + embedding[:, None])
    return self.output(self.mlp(x.reshape(-1, x.shape[-1]))).reshape(rows)

  def __call__(self, observation: Any, action: Array) -> Array:
    return self.value_of(self.embed(observation), action)


class _PaperValue(nn.Module):
  """The tower of the paper. Each channel is normalized over the image, where it has BatchNorm.

  As in the released code (tensor2robot's `networks.py`): 6x6/2, pool, six 5x5, pool, the action,
  six 3x3, pool, three 3x3 without padding, two layers of 64. The action is broadcast over the
  image.
  """

  settings: ActionValue

  @nn.compact
  def __call__(self, observation: Any, action: Array) -> Array:
    return self.value_of(self.embed(observation), action)

  @nn.compact
  def embed(self, observation: Any) -> Any:
    """Observations [B, ...] -> the image's map [B, h, w, 64] and all other numbers [B, m]."""
    leaves = jax.tree.leaves(self.settings.prepare(observation)[0])
    images = [x for x in leaves if x.ndim == 4]
    others = [flat(x) for x in leaves if x.ndim != 4]
    if len(images) != 1:
      raise ValueError(f'the size paper needs one image, not {self.settings.observation_space}')
    height, width = images[0].shape[1:3]
    if min(height, width) < LEAST_SIDE:
      raise ValueError(
        f'the size paper needs an image of at least {LEAST_SIDE} pixels a side, not '
        f'{height}x{width}: take --agent.network.size small'
      )
    x = self.conv(unit(images[0]), 6, 'SAME', 'conv', stride=2)
    x = nn.max_pool(x, (3, 3), strides=(3, 3), padding='SAME')
    for i in range(6):
      x = self.conv(x, 5, 'SAME', f'early_{i}')
    x = nn.max_pool(x, (3, 3), strides=(3, 3), padding='SAME')
    return x, jnp.concatenate([*others, jnp.zeros((x.shape[0], 0))], axis=-1)

  @nn.compact
  def value_of(self, embedding: Any, action: Array) -> Array:
    """An embedding and actions [B, N, n] -> [B, N]."""
    image, numbers = embedding
    batch, samples = action.shape[:2]
    numbers = jnp.broadcast_to(numbers[:, None], (batch, samples, numbers.shape[-1]))
    a = jnp.concatenate([action, numbers], axis=-1).reshape(batch * samples, -1)
    a = nn.relu(nn.LayerNorm(name='action_norm')(Dense(256, name='action_in')(a)))
    a = Dense(CHANNELS, name='action_out')(a).reshape(batch, samples, 1, 1, CHANNELS)
    x = (image[:, None] + a).reshape(-1, *image.shape[1:])
    for i in range(6):
      x = self.conv(x, 3, 'SAME', f'late_{i}')
    x = nn.max_pool(x, (2, 2), strides=(2, 2), padding='SAME')
    for i in range(3):
      x = self.conv(x, 3, 'VALID', f'last_{i}')
    x = flat(x)
    for i in range(2):
      x = nn.relu(nn.LayerNorm(name=f'norm_{i}')(Dense(64, name=f'dense_{i}')(x)))
    return Dense(1, name='output')(x).reshape(batch, samples)

  def conv(self, x: Array, size: int, padding: str, name: str, stride: int = 1) -> Array:
    """Convolve, normalize each channel over the image, and rectify."""
    x = Conv(CHANNELS, size, stride, padding, name=name)(x)
    return nn.relu(nn.InstanceNorm(name=f'{name}_norm')(x))


@dataclasses.dataclass(frozen=True)
class ActionValue(RecurrentBody):
  """The value of an action in a state, in two parts: `embed` a state once, then many actions.

  With a core, `unroll` returns the embeddings, of the experience up to each timestep.
  """

  MODULE, UNROLL = _SmallValue, 'unroll'

  size: Literal['small', 'paper'] = 'small'
  # ^ small: torso, hidden and head_hidden; paper: the convolutions of QT-Opt, for images of about
  #   256 pixels a side and more
  hidden: tuple[int, ...] = ()  # layer widths that see the state only
  head_hidden: tuple[int, ...] = (64, 64)  # layer widths that see state and action
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  head: Literal['sigmoid', 'value'] = 'sigmoid'
  # ^ sigmoid: a share of the range from v_min to v_max, learned by cross-entropy; value: a number,
  #   learned by squared error
  v_min: float = 0.0  # smallest discounted return, of the sigmoid head
  v_max: float = 1.0  # largest discounted return, of the sigmoid head
  one_hot: tuple[int, ...] = ()
  # ^ sizes of groups of numbers at the end of an action, in each of which one number is at its
  #   upper bound and the rest are at their lower bounds

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none' and self.size == 'paper':
      raise ValueError(f'the size paper has no memory, not the core {self.core!r}')
    if not self.head_hidden:
      raise ValueError('head_hidden needs at least one layer, at which the action enters')
    check_support(self.v_min, self.v_max)

  def bind(self, observation_space: Any, action_space: Any) -> Any:
    """This network for these spaces.

    Raises:
      ValueError: if it can't be built for them.
    """
    bound = super().bind(observation_space, action_space)
    if sum(self.one_hot) > (size := math.prod(action_space.shape)):
      raise ValueError(
        f'one_hot {self.one_hot} declares {sum(self.one_hot)} numbers, but an action has {size}'
      )
    return bound

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    """The action distribution, which maps actions to [-1, 1]."""
    return distributions.squashed(self.action_space)

  @functools.cached_property
  def module(self) -> Any:
    """The flax module."""
    return _PaperValue(self) if self.size == 'paper' else _SmallValue(self)

  def init(self, key: Array) -> Any:
    """Return the first parameters."""
    action = jnp.zeros((1, 1, math.prod(self.action_space.shape)))
    if self.core != 'none':
      timesteps = jax.tree.map(lambda x: x[None], self.example())
      inputs = (self.initial_state(1), timesteps, action)
      return self.module.init(key, *inputs, method='start')['params']
    return self.module.init(key, self.example().observation, action)['params']

  def embed(self, params: Any, observation: Any) -> Any:
    """Return the part of values that depends on observations [B, ...] only."""
    return self.module.apply({'params': params}, observation, method='embed')

  def value_of(self, params: Any, embedding: Any, action: Array) -> Array:
    """Return outputs [B, N] for embeddings [B, ...] and actions [B, N, n] within [-1, 1]."""
    outputs: Any = self.module.apply({'params': params}, embedding, action, method='value_of')
    return outputs

  def returns(self, outputs: Array) -> Array:
    """Return the discounted returns that outputs stand for."""
    if self.head == 'value':
      return outputs
    return self.v_min + (self.v_max - self.v_min) * jax.nn.sigmoid(outputs)

  def share(self, returns: Array) -> Array:
    """Return discounted returns as shares of the range from v_min to v_max."""
    return (returns - self.v_min) / (self.v_max - self.v_min)
