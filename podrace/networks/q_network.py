"""The network of value-based agents, and its dueling and noisy heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.fields import check_support
from podrace.networks.layers import Dense, NoisyDense
from podrace.networks.protocol import merge_time, split_time
from podrace.networks.recurrent_body import RecurrentBody
from podrace.types import Array, TimeStep


class _QNetwork(nn.Module):
  settings: QNetwork

  def setup(self) -> None:
    s = self.settings
    self.torso = s.make_torso(layer_norm=s.layer_norm)
    self.rnn = s.make_core()
    size = s.num_actions * s.atoms
    self.advantage_hidden, self.advantage_head = self._layers(size)
    if s.dueling:
      self.value_hidden, self.value_head = self._layers(s.atoms)

  def _layers(self, features: int) -> tuple[Any, Any]:
    """A hidden layer of its own if a stream has one, and a head."""
    s = self.settings
    make = NoisyDense if s.noisy else functools.partial(Dense, kernel_init=s.kernel_init)
    return make(s.head_size) if s.head_size else None, make(features)

  def __call__(self, state: Any, timesteps: TimeStep, previous: Any = None) -> tuple[Array, Any]:
    """[T, B, ...] -> [T, B, A, atoms]; T is 1 to act."""
    s, length = self.settings, timesteps.reward.shape[0]
    observation, mask = s.prepare(merge_time(timesteps.observation))
    x = self.torso(observation)
    x, state = s.remember(self.rnn, state, x, timesteps, previous)
    q = self._stream(x, self.advantage_hidden, self.advantage_head)
    q = q.reshape(-1, s.num_actions, s.atoms)
    if s.dueling:
      value = self._stream(x, self.value_hidden, self.value_head)
      q = q - jnp.mean(q, axis=1, keepdims=True) + value[:, None]
    if mask is not None:
      if s.categorical:
        raise ValueError('a categorical head takes no action_mask; the others do')
      q = jnp.where(mask.reshape(*q.shape[:2], 1), q, distributions.MASKED_VALUE)
    return split_time(q, length), state

  def _stream(self, x: Array, hidden: Any, head: Any) -> Array:
    return head(x if hidden is None else nn.relu(hidden(x)))


@dataclasses.dataclass(frozen=True)
class QNetwork(RecurrentBody):
  """Values of discrete actions, or the distributions of their returns: [..., A, atoms].

  Dueling: Wang et al. 2016 (arXiv 1511.06581, eq. 9). `head` is the meaning of the atoms: one
  value; the logits of fixed returns (C51, Bellemare et al. 2017, arXiv 1707.06887); or quantiles
  (QR-DQN, Dabney et al. 2018, arXiv 1710.10044).
  """

  MODULE = _QNetwork

  activation: Literal['tanh', 'relu'] = 'relu'  # activation of the layers
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'  # initialiser of the kernels
  layer_norm: bool = False  # normalize the outputs of each layer of the torso over its channels
  head: Literal['value', 'categorical', 'quantile'] = 'value'
  # ^ form of the values: a number, atoms (C51) or quantiles
  num_atoms: int = 51  # atoms or quantiles of the distributional heads
  v_min: float = -10.0  # smallest return that the categorical head can represent
  v_max: float = 10.0  # largest return that the categorical head can represent
  head_size: int = 0  # units of a hidden layer in each stream; 0: no such layer
  dueling: bool = False  # separate streams for the value and the advantages
  previous_action: bool = False  # the core sees the previous action; 0 where an episode begins
  shortcut: bool = False  # the heads see the newest observation besides the core
  noisy: bool = False  # noise in the heads, which explores; each environment has its own sample

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.head != 'value' and self.num_atoms < 2:
      raise ValueError(f'a {self.head} head needs at least 2 atoms, not {self.num_atoms}')
    check_support(self.v_min, self.v_max, self.num_atoms if self.categorical else 2)

  @property
  def categorical(self) -> bool:
    """Whether the head is categorical."""
    return self.head == 'categorical'

  @property
  def atoms(self) -> int:
    """Numbers of the output for each action."""
    return 1 if self.head == 'value' else self.num_atoms

  @property
  def support(self) -> Array:
    """The returns [atoms] of the categorical head."""
    return jnp.linspace(self.v_min, self.v_max, self.num_atoms)

  @property
  def num_actions(self) -> int:
    """Number of actions."""
    if not isinstance(self.distribution, distributions.Categorical):
      raise ValueError(f'values of actions need a Discrete action space, not {self.action_space}')
    return self.distribution.num_actions

  def mean(self, q: Array) -> Array:
    """The expected returns [..., A] of outputs [..., A, atoms]."""
    if self.categorical:
      return jnp.sum(jax.nn.softmax(q) * self.support.reshape((1,) * (q.ndim - 1) + (-1,)), axis=-1)
    return jnp.mean(q, axis=-1)
