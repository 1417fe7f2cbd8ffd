"""Models to plan with: an observation becomes a hidden state, in which actions are tried out.

`Model` is all that a planning agent asks for; `LearnedModel` ships. See docs/planning.md for one of
your own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from podrace import distributions, returns
from podrace.fields import check_support
from podrace.networks.body import Body
from podrace.networks.cores import remember
from podrace.networks.layers import Dense, flat
from podrace.networks.protocol import merge_time, split_time
from podrace.networks.towers import Convolution, Downsample, Tower
from podrace.types import Array, TimeStep


class Prediction(NamedTuple):
  """Outputs of a model for hidden states [B, ...]."""

  policy: Array  # [B, P] f32 parameters of the action distribution
  value: Array  # [B, bins] f32 logits over the model's support; [B, 1] without one: the value


class Model(Protocol):
  """Pure functions over a plain pytree of arrays: representation, dynamics and prediction.

  `represent` is over time, as `Network.unroll` is: its recurrent state is reset where a timestep is
  FIRST. An action is a raw sample [B, ...] of `distribution`.
  """

  @property
  def distribution(self) -> distributions.Distribution:
    """The action distribution of the policy output."""
    ...

  @property
  def support(self) -> Array | None:
    """Evenly spaced rescaled returns [bins] (`returns.rescale`); None: values are plain numbers."""
    ...

  def example(self) -> TimeStep:
    """A timestep [1, ...] of zeros, as the environment's are."""
    ...

  def init(self, key: Array) -> Any:
    """Return the first parameters."""
    ...

  def initial_state(self, batch_size: int) -> Any:
    """Return the state of acting before the first timestep."""
    ...

  def represent(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[Any, Any]:
    """Hidden states [T, B, ...] of timesteps [T, B, ...], and the recurrent state after them."""
    ...

  def dynamics(self, params: Any, hidden: Any, action: Any) -> tuple[Any, Array]:
    """The hidden states [B, ...] after an action, and the reward [B, bins] as a value is."""
    ...

  def predict(self, params: Any, hidden: Any) -> Prediction:
    """Return the policies and values of hidden states."""
    ...


# --- numbers as distributions over a support -----------------------------------------------------

MOST_TILTED = 20.0  # difference between the first logits of the outermost atoms


def encode(x: Array, support: Array | None) -> Array:
  """Targets [N, bins] of numbers [N]: two-hot over the support; [N, 1] without one.

  The number is rescaled first (Schrittwieser et al. 2020, arXiv 1911.08265, appendix F).
  """
  if support is None:
    return x[:, None]
  one = jax.vmap(lambda y: returns.project(y[None], jnp.ones(1), support))
  return one(returns.rescale(x))


def decode(outputs: Array, support: Array | None) -> Array:
  """The numbers [...] that outputs [..., bins] of a model stand for."""
  if support is None:
    return outputs[..., 0]
  p = jax.nn.softmax(outputs)
  return returns.unscale(jnp.sum(p * support.reshape((1,) * (p.ndim - 1) + (-1,)), axis=-1))


def outside_support(x: Array, support: Array | None) -> dict[str, Array]:
  """Return 1 for each number that the support cuts off, else 0, as a metric; {} without one."""
  if support is None:
    return {}
  y = returns.rescale(x)
  outside = (y < support[0] - 1e-4) | (y > support[-1] + 1e-4)
  return dict(outside_support=outside.astype(jnp.float32))


def number_loss(outputs: Array, x: Array, support: Array | None) -> Array:
  """The loss [N] of outputs [N, bins] against numbers [N]: cross-entropy, or half the square."""
  if support is None:
    return 0.5 * jnp.square(outputs[:, 0] - x)
  return -jnp.sum(encode(x, support) * jax.nn.log_softmax(outputs), axis=-1)


def first_logits(support: Array | None) -> np.ndarray:
  """Return the first logits [bins] of a value: the most even distribution with a mean near 0.

  Equal logits stand for the middle of the support. On a support from -1 to 110 that is a return of
  32, and each bootstrapped target would have it for a long time.
  """
  if support is None:
    return np.zeros(1, np.float32)
  atoms = np.asarray(support, np.float64)
  low, high = np.array([-1.0, 1.0]) * MOST_TILTED / (atoms[-1] - atoms[0])
  if atoms[0] == -atoms[-1]:
    low = high = 0.0
  for _ in range(60):  # the mean rises with the slope
    slope = (low + high) / 2
    weight = np.exp(slope * atoms - np.max(slope * atoms))
    low, high = (low, slope) if weight @ atoms > 0 else (slope, high)
  logits = (low + high) / 2 * atoms
  return (logits - np.mean(logits)).astype(np.float32)


def scale_hidden(hidden: Array) -> Array:
  """Scale each hidden state [B, ...] to [0, 1] by minimum and maximum (the paper, appendix G)."""
  axes = tuple(range(1, hidden.ndim))
  low = jnp.min(hidden, axis=axes, keepdims=True)
  high = jnp.max(hidden, axis=axes, keepdims=True)
  return (hidden - low) / jnp.maximum(high - low, 1e-5)


def features(hidden: Array) -> Array:
  """Return hidden states [B, ...] as [B, n]; for images also the maximum of each channel.

  An object may be anywhere, such as gold next to the player. The maximum is then learned once for
  all places.
  """
  everywhere = (flat(hidden), jnp.max(hidden, axis=(1, 2))) if hidden.ndim == 4 else (flat(hidden),)
  return jnp.concatenate(everywhere, axis=-1)


def scale_gradient(tree: Any, factor: float) -> Any:
  """Return the same numbers with a gradient that is `factor` times as large."""
  return jax.tree.map(lambda x: factor * x + (1 - factor) * jax.lax.stop_gradient(x), tree)


# --- the model that ships -------------------------------------------------------------------------


class _LearnedModel(nn.Module):
  settings: LearnedModel

  def setup(self) -> None:
    s = self.settings
    self.represent_observation = self._tower(Downsample) if s.blocks else s.make_torso()
    self.rnn = s.make_core()
    if s.blocks:
      self.next_hidden = self._tower(Tower)
    else:
      self.first_hidden = Dense(s.latent, kernel_init=s.kernel_init)
      self.next_hidden = s.mlp((*s.dynamics_hidden,))
      self.next_change = Dense(s.latent, kernel_init=s.kernel_init)
    self.reward_head = self._number()
    self.policy_head = self._head(s.distribution.size)
    self.value_head = self._number()
    if s.projection:
      self.projector = self._head(s.projection, nn.initializers.lecun_normal())
      self.predictor = self._head(s.projection, nn.initializers.lecun_normal())

  def _tower(self, kind: Any) -> nn.Module:
    s = self.settings
    layer = functools.partial(Convolution, kernel_init=s.kernel_init, normalize=s.normalize)
    module: nn.Module = kind(s.channels, s.blocks, layer)
    return module

  def _number(self) -> nn.Module:
    """A head of a reward or a value, which begins as 0."""
    with jax.ensure_compile_time_eval():
      logits = first_logits(self.settings.support)
    return self._head(len(logits), bias=nn.initializers.constant(logits))

  def _head(
    self, size: int, last: Any = nn.initializers.zeros, bias: Any = nn.initializers.zeros
  ) -> nn.Module:
    """A hidden layer and the outputs, which begin as the bias for each hidden state."""
    s = self.settings
    outputs = Dense(size, kernel_init=last, bias_init=bias)
    return nn.Sequential([features, s.mlp(s.head_hidden), outputs])

  def represent(self, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    """Return hidden states [T, B, ...] and the recurrent state after them."""
    s, length = self.settings, timesteps.reward.shape[0]
    observation, _ = s.prepare(merge_time(timesteps.observation))
    x = self.represent_observation(observation)
    x, state = remember(self.rnn, state, x, timesteps)
    if not s.blocks:
      x = self.first_hidden(x)
    return split_time(scale_hidden(x), length), state

  def dynamics(self, hidden: Array, action: Array) -> tuple[Array, Array]:
    """Return the hidden states after actions, and the rewards."""
    code = self.settings.encode_action(action)
    if self.settings.blocks:
      planes = jnp.broadcast_to(code[:, None, None, :], (*hidden.shape[:3], code.shape[-1]))
      x = hidden + self.next_hidden(jnp.concatenate([hidden, planes], axis=-1))
    else:
      x = self.next_hidden(jnp.concatenate([hidden, code], axis=-1))
      x = hidden + self.next_change(x)
    x = scale_hidden(x)
    return x, self.reward_head(x)

  def predict(self, hidden: Array) -> Prediction:
    """Return the policies and values of hidden states."""
    return Prediction(self.policy_head(hidden), self.value_head(hidden))

  def project(self, hidden: Array, online: bool) -> Array:
    """Return projections for the consistency loss."""
    x = self.projector(hidden)
    return self.predictor(x) if online else x

  def __call__(self, state: Any, timesteps: TimeStep, action: Array) -> Any:
    """All parts once, to make their parameters."""
    hidden, _ = self.represent(state, timesteps)
    hidden, reward = self.dynamics(hidden[0], action)
    projection = self.project(hidden, True) if self.settings.projection else ()
    return reward, self.predict(hidden), projection


@dataclasses.dataclass(frozen=True)
class LearnedModel(Body):
  """A `Model` built from an environment's spaces.

  Its hidden state is a vector: behind the torso (an MLP, the grid's or IMPALA's convolutions) and
  the core, and dynamics of an MLP. With `blocks` it is an image, by the paper's residual tower.
  Dynamics add to the hidden state that they are given, as EfficientZero's do (Ye et al. 2021, arXiv
  2111.00210).
  """

  MODULE = _LearnedModel

  activation: Literal['tanh', 'relu'] = 'relu'  # activation of the layers
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'  # initialiser of the kernels
  latent: int = 64  # numbers of the hidden state, if it is a vector
  dynamics_hidden: tuple[int, ...] = (64,)  # layer widths of the dynamics
  head_hidden: tuple[int, ...] = (32,)  # layer widths before policy, value and reward, each its own
  blocks: int = 0  # residual blocks of the tower; 0: the hidden state is a vector; 16 in the paper
  channels: int = 64  # channels of the tower; 256 in the paper
  normalize: bool = True
  # ^ normalize the tower's layers, as in the paper; a small tower learns faster without
  bins: int = 51  # atoms of value and reward; 1: they are numbers, learned by their squared error
  v_min: float = -300.0  # smallest return that the atoms can represent
  v_max: float = 300.0  # largest return that the atoms can represent
  projection: int = 0  # numbers of the consistency loss's projection; 0: no projection

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.bins == 2:
      raise ValueError(f'bins must be 1 or at least 3, not {self.bins}')
    check_support(self.v_min, self.v_max, max(self.bins, 2))
    if self.blocks and self.core != 'none':
      raise ValueError(
        f'a residual tower has an image as its hidden state, so there is no core {self.core!r}: '
        'blocks is 0 with one'
      )

  @functools.cached_property
  def distribution(self) -> distributions.Distribution:
    """The action distribution of the policy output."""
    from gymnasium import spaces

    return distributions.for_space(self.action_space, isinstance(self.action_space, spaces.Box))

  @property
  def support(self) -> Array | None:
    """The atoms of values and rewards; None: they are numbers."""
    if self.bins == 1:
      return None
    low, high = returns.rescale(jnp.array([self.v_min, self.v_max], jnp.float32))
    return jnp.linspace(low, high, self.bins)

  def encode_action(self, action: Array) -> Array:
    """Raw samples [B, ...] as the numbers [B, n] that the dynamics are given."""
    kind = self.distribution
    if isinstance(kind, distributions.Categorical):
      return jax.nn.one_hot(action, kind.num_actions)
    if isinstance(kind, distributions.MultiCategorical):
      parts = [jax.nn.one_hot(action[:, i], n) for i, n in enumerate(kind.num_actions)]
      return jnp.concatenate(parts, axis=-1)
    return jnp.tanh(action)

  def init(self, key: Array) -> Any:
    """Return the first parameters."""
    timesteps = jax.tree.map(lambda x: x[None], self.example())
    zeros = jnp.zeros([1, self.distribution.size])
    action = self.distribution.mode(zeros)
    return self.module.init(key, self.initial_state(1), timesteps, action)['params']

  def represent(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    """Return hidden states [T, B, ...] and the recurrent state after them."""
    return self._apply(params, 'represent', state, timesteps)

  def dynamics(self, params: Any, hidden: Array, action: Array) -> tuple[Array, Array]:
    """Return the hidden states after actions, and the rewards."""
    return self._apply(params, 'dynamics', hidden, action)

  def predict(self, params: Any, hidden: Array) -> Prediction:
    """Return the policies and values of hidden states."""
    return self._apply(params, 'predict', hidden)

  def project(self, params: Any, hidden: Array, online: bool) -> Array:
    """Return projections [B, projection] for the consistency loss.

    The `online` side has a predictor behind the projector.
    """
    return self._apply(params, 'project', hidden, online)

  def _apply(self, params: Any, method: str, *args: Any) -> Any:
    return self.module.apply({'params': params}, *args, method=method)
