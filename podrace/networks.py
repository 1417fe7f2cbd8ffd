"""Networks. `Network` is all that agents ask for; `ActorCritic` is the one that ships.

Only this file imports flax. A network from Haiku, Equinox, NNX or by hand fits as well: see
examples/own_network.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import linen as nn

from podrace import distributions
from podrace.envs.spaces import leaves, over
from podrace.fields import check_types
from podrace.types import Array, TimeStep

CPU_CHUNK = 4096  # samples in one gradient: fits the caches, and still keeps all cores busy
CPU_CHUNK_FRAMES = 32  # likewise, where a sample is a frame that goes through convolutions


class Network(Protocol):
  """Four pure functions over a plain pytree of arrays, and what they are made for.

  `step` acts, on [B, ...]; `unroll` learns, on [T, B, ...], from the state before the first
  timestep. The state is reset where a timestep is FIRST, before that timestep is seen. For a
  network of your own, `unroll_merged` or `unroll_steps` may serve as `unroll`.
  """

  @property
  def distribution(self) -> distributions.Distribution:
    """What actor-critics make of the policy output; see `distributions.for_space`."""
    ...

  def example(self) -> TimeStep:
    """A timestep [1, ...] of zeros, as the environment's are."""
    ...

  def init(self, key: Array) -> Any: ...
  def initial_state(self, batch_size: int) -> Any: ...
  def step(self, params: Any, state: Any, timestep: TimeStep) -> tuple[Any, Any]: ...
  def unroll(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[Any, Any]: ...


class PolicyValue(NamedTuple):
  """What an actor-critic network says of each timestep."""

  policy: Array  # [..., P] f32 what the action distribution takes
  value: Array  # [...] f32


# --- for any network --------------------------------------------------------------------------


def merge_time(tree: Any) -> Any:
  """[T, B, ...] -> [T*B, ...]."""
  return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), tree)


def split_time(tree: Any, length: int) -> Any:
  """[T*B, ...] -> [T, B, ...]."""
  return jax.tree.map(lambda x: x.reshape((length, -1, *x.shape[1:])), tree)


def reset_where(first: Array, initial: Any, state: Any) -> Any:
  """`state` [B, ...], replaced by `initial` where `first` [B]."""
  return jax.tree.map(
    lambda i, s: jnp.where(first.reshape((-1,) + (1,) * (s.ndim - 1)), i, s), initial, state
  )


def unroll_steps(network: Network, params: Any, state: Any, timesteps: TimeStep) -> Any:
  """`unroll` by `step` alone, for a network that has nothing faster."""

  def step(state: Any, timestep: TimeStep) -> Any:
    output, state = network.step(params, state, timestep)
    return state, output

  state, outputs = jax.lax.scan(step, state, timesteps)
  return outputs, state


def unroll_merged(network: Network, params: Any, state: Any, timesteps: TimeStep) -> Any:
  """`unroll` of a network without state: one step on the merged [T*B]."""
  outputs, state = network.step(params, state, merge_time(timesteps))
  return split_time(outputs, timesteps.reward.shape[0]), state


# --- torsos -----------------------------------------------------------------------------------


def affine(x: Array, kernel: Array, bias: Array) -> Array:
  """x @ kernel + bias, [N, A] with [A, B] and [1, B]."""
  return product(x, kernel) + bias


@jax.custom_vjp
def product(x: Array, kernel: Array) -> Array:
  """x @ kernel, [N, A] with [A, B], the fast way on each platform.

  XLA's CPU backend is slow at a product that contracts the first axes of both, which the gradient
  of the kernel is. There the smaller side is transposed first, which is 1.4 to 10 times as fast.
  """
  return x @ kernel


def _product_forward(x: Array, kernel: Array) -> tuple[Array, Any]:
  return x @ kernel, (x, kernel)


def _product_backward(saved: Any, g: Array) -> tuple[Array, Array]:
  x, kernel = saved

  def on_cpu(x: Array, g: Array) -> Array:
    apart = jax.lax.optimization_barrier
    if x.size <= g.size + kernel.size:
      narrow = x.shape[-1] < 8  # not worth a copy
      return (x.T if narrow else apart(x.T)) @ g
    # `g.T` by a product, because XLA would transpose it together with what made it, element by element
    identity = jnp.eye(g.shape[-1], dtype=g.dtype)
    transposed = jax.lax.dot_general(identity, g, (((1,), (1,)), ((), ())))
    return apart(transposed @ x).T

  kernel_grad = jax.lax.platform_dependent(x, g, cpu=on_cpu, default=lambda x, g: x.T @ g)
  return g @ kernel.T, kernel_grad


product.defvjp(_product_forward, _product_backward)


def _patches_conv(x: Array, kernel: Array, stride: int, padding: str) -> Array:
  """A convolution as strided slices, concatenated, times one matrix.

  On CPU this is 5 to 15 times faster than XLA's convolution inside a loop, where everything is.
  """
  height, width, channels, features = kernel.shape
  if padding == 'SAME':
    x = jnp.pad(
      x, [(0, 0), *(_same(x.shape[1 + i], kernel.shape[i], stride) for i in (0, 1)), (0, 0)]
    )
  rows = (x.shape[1] - height) // stride + 1
  columns = (x.shape[2] - width) // stride + 1
  parts = [
    x[:, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride]
    for i in range(height)
    for j in range(width)
  ]
  patches = jnp.concatenate(parts, axis=-1).reshape(-1, height * width * channels)
  out = product(_unit(patches), kernel.reshape(-1, features))
  return out.reshape(x.shape[0], rows, columns, features)


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
  total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
  return total // 2, total - total // 2


def _xla_conv(x: Array, kernel: Array, stride: int, padding: str) -> Array:
  return jax.lax.conv_general_dilated(
    _unit(x), kernel, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


def _unit(x: Array) -> Array:
  """Bytes are pixels: floats within [0, 1]."""
  return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def _flat(x: Array) -> Array:
  return _unit(x).reshape(x.shape[0], -1)


_in_loop = contextvars.ContextVar('in_loop', default=True)


@contextlib.contextmanager
def outside_loops() -> Iterator[None]:
  """For what is traced here and will not be in a loop: XLA's convolution is the fast one there.

  XLA's CPU backend gives its threaded convolution only to what is in no loop.
  """
  token = _in_loop.set(False)
  try:
    yield
  finally:
    _in_loop.reset(token)


def conv2d(x: Array, kernel: Array, stride: int, padding: str) -> Array:
  """A 2-D convolution, [B, H, W, C] with [h, w, C, F], the fast way on each platform.

  Bytes are divided by 255, on CPU after they are gathered: a quarter of the memory to move.
  """
  if not _in_loop.get():
    return _xla_conv(x, kernel, stride, padding)
  return jax.lax.platform_dependent(
    x,
    kernel,
    cpu=functools.partial(_patches_conv, stride=stride, padding=padding),
    default=functools.partial(_xla_conv, stride=stride, padding=padding),
  )


class Conv(nn.Module):
  """A convolution layer with bias."""

  features: int
  size: int
  stride: int = 1
  padding: str = 'VALID'
  kernel_init: Any = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    if self.padding == 'VALID' and min(x.shape[1:3]) < self.size:
      raise ValueError(
        f'a convolution of {self.size}x{self.size} does not fit an image of {x.shape[1]}x{x.shape[2]}, which is '
        'what is left of the observation in its turn: take another torso (auto, grid or mlp)'
      )
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', self.kernel_init, shape)
    bias = self.param('bias', nn.initializers.zeros_init(), (self.features,))
    return conv2d(x, kernel, self.stride, self.padding) + bias[None, None, None]


class Dense(nn.Module):
  """A fully connected layer, on [N, F]."""

  features: int
  kernel_init: Any = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    kernel = self.param('kernel', self.kernel_init, (x.shape[-1], self.features))
    bias = self.param('bias', nn.initializers.zeros_init(), (self.features,))
    return affine(x, kernel, bias[None])


class Mlp(nn.Module):
  """Fully connected layers, each followed by the activation."""

  hidden: tuple[int, ...]
  activation: Callable[[Array], Array]
  kernel_init: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    for size in self.hidden:
      x = self.activation(Dense(size, kernel_init=self.kernel_init)(x))
    return x


class Nature(nn.Module):
  """The convolutions of Mnih et al. 2015 (Nature 518): 32x8/4, 64x4/2, 64x3/1."""

  kernel_init: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
      x = nn.relu(Conv(features, size, stride, kernel_init=self.kernel_init)(x))
    return x


class ImpalaShallow(nn.Module):
  """The shallow convolutions of Espeholt et al. 2018 (arXiv 1802.01561, fig. 3): 16x8/4, 32x4/2."""

  kernel_init: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    for features, size, stride in ((16, 8, 4), (32, 4, 2)):
      x = nn.relu(Conv(features, size, stride, kernel_init=self.kernel_init)(x))
    return x


class ImpalaDeep(nn.Module):
  """The residual network of Espeholt et al. 2018 (fig. 3): 16, 32, 32 channels, 2 blocks each."""

  kernel_init: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    conv = functools.partial(Conv, size=3, padding='SAME', kernel_init=self.kernel_init)
    for features in (16, 32, 32):
      x = nn.max_pool(conv(features)(x), (3, 3), strides=(2, 2), padding='SAME')
      for _ in range(2):
        y = conv(features)(nn.relu(x))
        x = x + conv(features)(nn.relu(y))
    return nn.relu(x)


class Grid(nn.Module):
  """One 3x3 convolution of 16 channels, as MinAtar's baselines have (arXiv 1903.03176)."""

  kernel_init: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    return nn.relu(Conv(16, 3, kernel_init=self.kernel_init)(x))


IMAGE_TORSOS = {
  'nature': Nature,
  'impala': ImpalaShallow,
  'impala-deep': ImpalaDeep,
  'grid': Grid,
}


class Torso(nn.Module):
  """Observations [B, ...] to features [B, F]: images through convolutions, then all through an MLP."""

  image: str  # a key of IMAGE_TORSOS, or 'mlp' to flatten images too
  hidden: tuple[int, ...]
  activation: Callable[[Array], Array]
  kernel_init: Any

  @nn.compact
  def __call__(self, observation: Any) -> Array:
    flat = []
    for x in jax.tree.leaves(observation):
      if x.ndim == 4 and self.image != 'mlp':
        x = IMAGE_TORSOS[self.image](self.kernel_init)(x)
      flat.append(_flat(x))
    return Mlp(self.hidden, self.activation, self.kernel_init)(jnp.concatenate(flat, axis=-1))


# --- cores ------------------------------------------------------------------------------------


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
    kernel = self.param('recurrent', nn.initializers.orthogonal(), (self.size, gates * self.size))
    candidate_bias = self.param('bias', nn.initializers.zeros_init(), (self.size,))
    cell = {'gru': _gru, 'lstm': _lstm}[self.kind]

    def step(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
      x, first = inputs
      state = reset_where(first, jax.tree.map(jnp.zeros_like, state), state)
      state = cell(state, x, kernel, candidate_bias[None])
      return state, state[0]

    state, outputs = jax.lax.scan(step, state, (inputs, first))
    return outputs, state


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


# --- the actor-critic -------------------------------------------------------------------------

INITIALIZERS = {
  # Schulman et al.'s PPO as released in OpenAI's baselines
  'orthogonal': lambda: nn.initializers.orthogonal(math.sqrt(2)),
  # As Sonnet's default, IMPALA's and DQN's, a truncated normal; its standard deviation is 1/sqrt(fan in)
  # here, where Sonnet's is what truncation leaves of that, 0.88 of it
  'lecun': nn.initializers.lecun_normal,
}


class _ActorCritic(nn.Module):
  settings: ActorCritic

  def setup(self) -> None:
    s = self.settings
    init = s.kernel_init
    self.torso = s.make_torso()
    if not s.shares_torso:
      self.value_torso = s.make_torso()
    if s.core != 'none':
      self.rnn = Core(s.core, s.core_size)
    small = s.initializer == 'orthogonal'
    head = nn.initializers.orthogonal
    size = s.distribution.size
    if s.has_log_std:
      size //= 2
      start = nn.initializers.constant(s.initial_log_std)
      self.log_std = self.param('log_std', start, (size,))
    self.policy_head = Dense(size, kernel_init=head(0.01) if small else init)
    self.value_head = Dense(1, kernel_init=head(1.0) if small else init)

  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[PolicyValue, Any]:
    """[T, B, ...]; T is 1 to act."""
    length = timesteps.reward.shape[0]
    merged = merge_time(timesteps.observation)
    observation, mask = self.settings.prepare(merged)
    policy = self.torso(observation)
    value = policy if self.settings.shares_torso else self.value_torso(observation)
    if self.settings.core != 'none':
      outputs, state = self.rnn(state, split_time(policy, length), timesteps.first)
      policy = value = merge_time(outputs)
    logits = self.policy_head(policy)
    if self.settings.has_log_std:
      logits = jnp.concatenate([logits, jnp.broadcast_to(self.log_std, logits.shape)], axis=-1)
    if mask is not None:
      logits = jnp.where(mask.reshape(logits.shape), logits, distributions.MASKED)
    output = PolicyValue(logits, self.value_head(value)[..., 0])
    return split_time(output, length), state


@dataclasses.dataclass(frozen=True)
class Body:
  """What the shipped networks have in common: from observations through torso and core.

  Observations may be any tree of boxes and discrete values; integers are divided by their bound
  (pixels by 255), discrete values become one-hot. An entry `action_mask` forbids discrete actions
  where it is 0.
  """

  torso: Literal['auto', 'mlp', 'nature', 'impala', 'impala-deep', 'grid'] = 'auto'
  # ^ for images; auto: nature from 36 pixels a side, grid below
  hidden: tuple[int, ...] = (64, 64)  # the MLP behind it
  activation: Literal['tanh', 'relu'] = 'tanh'
  initializer: Literal['orthogonal', 'lecun'] = 'orthogonal'
  core: Literal['none', 'gru', 'lstm'] = 'none'
  core_size: int = 128
  observation_space: Annotated[Any, tyro.conf.Suppress] = None  # bound by the runner
  action_space: Annotated[Any, tyro.conf.Suppress] = None

  def __post_init__(self) -> None:
    check_types(self)
    if min(self.core_size, *self.hidden, 1) < 1:
      raise ValueError(f'sizes must be at least 1: {self.hidden=} {self.core_size=}')

  def bind(self, observation_space: Any, action_space: Any) -> Any:
    """This network for these spaces.

    Raises:
      ValueError: if it can't be built for them.
    """
    bound = dataclasses.replace(
      self, observation_space=observation_space, action_space=action_space
    )
    if not bound.distribution.size:
      raise ValueError(f'an empty action space: {action_space}')
    jax.eval_shape(bound.init, jax.random.key(0))
    return bound

  @functools.cached_property
  def distribution(self) -> distributions.Distribution:
    """The kind of actions there are."""
    return distributions.for_space(self.action_space)

  @functools.cached_property
  def module(self) -> nn.Module:
    """The flax module, from (state, timesteps) to (outputs, state)."""
    raise NotImplementedError

  @functools.cached_property
  def image_torso(self) -> str:
    images = _images(self.observation_space)
    if self.torso in IMAGE_TORSOS and not images:
      raise ValueError(
        f'torso {self.torso!r} needs an image, [height, width, channels]; '
        f'the observation space is {self.observation_space}'
      )
    if self.torso != 'auto' or not images:
      return 'mlp' if self.torso == 'auto' else self.torso
    sides = images[0].shape[1:] if channels_first(images[0]) else images[0].shape[:2]
    return 'nature' if min(sides) >= 36 else 'grid'

  @property
  def cpu_chunk(self) -> int:
    """Samples in one gradient on CPU: convolutions of whole frames fill the caches with few."""
    return CPU_CHUNK if self.image_torso in ('mlp', 'grid') else CPU_CHUNK_FRAMES

  @property
  def kernel_init(self) -> Any:
    return INITIALIZERS[self.initializer]()

  def make_torso(self) -> nn.Module:
    """Observations, prepared, to features."""
    activation = {'tanh': jnp.tanh, 'relu': nn.relu}[self.activation]
    return Torso(self.image_torso, self.hidden, activation, self.kernel_init)

  def prepare(self, observation: Any) -> tuple[Any, Array | None]:
    """Observations [B, ...] as floats, but pixels as bytes; and the action mask if there is one."""
    mask = None
    if isinstance(observation, dict) and 'action_mask' in observation:
      if not isinstance(
        self.distribution, distributions.Categorical | distributions.MultiCategorical
      ):
        raise ValueError(f'action_mask in the observation, but the actions are {self.action_space}')
      observation = dict(observation)
      mask = observation.pop('action_mask')
      if math.prod(mask.shape[1:]) != self.distribution.size:
        raise ValueError(
          f"the observation's action_mask has shape {mask.shape[1:]}; "
          f'expected one entry for each of the {self.distribution.size} choices of {self.action_space}'
        )
      space = {k: v for k, v in self.observation_space.items() if k != 'action_mask'}
    else:
      space = self.observation_space
    return over(_floats, space, observation), mask

  def example(self) -> TimeStep:
    """A timestep [1, ...] of zeros."""
    observation = over(_zeros, self.observation_space)
    return TimeStep(observation, jnp.zeros([1]), jnp.ones([1]), jnp.zeros([1], jnp.int8))

  def init(self, key: Array) -> Any:
    timesteps = jax.tree.map(lambda x: x[None], self.example())
    return self.module.init(key, self.initial_state(1), timesteps)['params']

  def initial_state(self, batch_size: int) -> Any:
    zeros = jnp.zeros([batch_size, self.core_size])
    return {'none': (), 'gru': (zeros,), 'lstm': (zeros, zeros)}[self.core]

  def step(self, params: Any, state: Any, timestep: TimeStep, key: Any = None) -> Any:
    timesteps = jax.tree.map(lambda x: x[None], timestep)
    outputs, state = self.unroll(params, state, timesteps, key)
    return jax.tree.map(lambda x: x[0], outputs), state

  def unroll(self, params: Any, state: Any, timesteps: TimeStep, key: Any = None) -> Any:
    """`key` is for networks that draw noise; without, there is none."""
    rngs = None if key is None else {'noise': key}
    return self.module.apply({'params': params}, state, timesteps, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class ActorCritic(Body):
  """Torso, core and two heads, built from an environment's spaces; a `Network`."""

  shared: bool = True  # policy and value share the torso (always so for images and recurrent)
  squash: bool = False  # continuous actions: tanh-Normal, standard deviation from the network
  initial_log_std: float = 0.0  # continuous actions without squash: where log std starts

  @functools.cached_property
  def distribution(self) -> distributions.Distribution:
    """The action distribution that goes with this network's policy output."""
    return distributions.for_space(self.action_space, self.squash)

  @property
  def has_log_std(self) -> bool:
    return type(self.distribution) is distributions.Normal

  @property
  def shares_torso(self) -> bool:
    return self.shared or self.core != 'none' or self.image_torso != 'mlp'

  @functools.cached_property
  def module(self) -> nn.Module:
    return _ActorCritic(self)


# --- values of discrete actions ---------------------------------------------------------------


class NoisyDense(nn.Module):
  """A layer with learned noise (Fortunato et al. 2018, arXiv 1706.10295): factorised Gaussian.

  Without a key for 'noise' it is the mean of its layers.
  """

  features: int
  sigma: float = 0.5

  @nn.compact
  def __call__(self, x: Array) -> Array:
    inputs = x.shape[-1]
    bound = 1 / math.sqrt(inputs)

    def uniform(key: Array, shape: tuple[int, ...]) -> Array:
      return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    sigma = nn.initializers.constant(self.sigma * bound)
    kernel = self.param('kernel', uniform, (inputs, self.features))
    bias = self.param('bias', uniform, (self.features,))
    kernel_sigma = self.param('kernel_sigma', sigma, (inputs, self.features))
    bias_sigma = self.param('bias_sigma', sigma, (self.features,))
    if self.has_rng('noise'):
      in_key, out_key = jax.random.split(self.make_rng('noise'))
      noise_in, noise_out = self._noise(in_key, inputs), self._noise(out_key, self.features)
      kernel += kernel_sigma * noise_in[:, None] * noise_out[None]
      bias += bias_sigma * noise_out
    return affine(x, kernel, bias[None])

  @staticmethod
  def _noise(key: Array, size: int) -> Array:
    x = jax.random.normal(key, (size,))
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


class _QNetwork(nn.Module):
  settings: QNetwork

  def setup(self) -> None:
    s = self.settings
    self.torso = s.make_torso()
    if s.core != 'none':
      self.rnn = Core(s.core, s.core_size)
    size = s.num_actions * s.atoms
    self.advantage_hidden, self.advantage_head = self._layers(size)
    if s.dueling:
      self.value_hidden, self.value_head = self._layers(s.atoms)

  def _layers(self, features: int) -> tuple[Any, Any]:
    """A hidden layer of its own if a stream has one, and a head."""
    s = self.settings
    make = NoisyDense if s.noisy else functools.partial(Dense, kernel_init=s.kernel_init)
    return make(s.head_size) if s.head_size else None, make(features)

  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    """[T, B, ...] -> [T, B, A, atoms]; T is 1 to act."""
    s, length = self.settings, timesteps.reward.shape[0]
    observation, mask = s.prepare(merge_time(timesteps.observation))
    x = self.torso(observation)
    if s.core != 'none':
      outputs, state = self.rnn(state, split_time(x, length), timesteps.first)
      x = merge_time(outputs)
    q = self._stream(x, self.advantage_hidden, self.advantage_head)
    q = q.reshape(-1, s.num_actions, s.atoms)
    if s.dueling:
      value = self._stream(x, self.value_hidden, self.value_head)
      q = q - jnp.mean(q, axis=1, keepdims=True) + value[:, None]
    if mask is not None:
      if s.categorical:
        raise ValueError('a categorical head takes no action_mask; the others do')
      q = jnp.where(mask.reshape(*q.shape[:2], 1), q, distributions.MASKED)
    return split_time(q, length), state

  def _stream(self, x: Array, hidden: Any, head: Any) -> Array:
    return head(x if hidden is None else nn.relu(hidden(x)))


@dataclasses.dataclass(frozen=True)
class QNetwork(Body):
  """Values of discrete actions, or the distributions of their returns: [..., A, atoms].

  Dueling: Wang et al. 2016 (arXiv 1511.06581, eq. 9). `head` says what the atoms are: one value;
  the logits of fixed returns (C51, Bellemare et al. 2017, arXiv 1707.06887); or quantiles
  (QR-DQN, Dabney et al. 2018, arXiv 1710.10044).
  """

  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  head: Literal['value', 'categorical', 'quantile'] = 'value'
  num_atoms: int = 51  # of the distributional heads
  v_min: float = -10.0  # the least return of the categorical head
  v_max: float = 10.0
  head_size: int = 0  # units of a hidden layer in each stream; 0: none
  dueling: bool = False
  noisy: bool = False  # noise in the heads, which explores; agents may act at random beside it

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.head != 'value' and self.num_atoms < 2:
      raise ValueError(f'a {self.head} head needs at least 2 atoms, not {self.num_atoms}')
    if self.v_min >= self.v_max:
      raise ValueError(f'v_min {self.v_min} is not less than v_max {self.v_max}')

  @property
  def categorical(self) -> bool:
    return self.head == 'categorical'

  @property
  def atoms(self) -> int:
    return 1 if self.head == 'value' else self.num_atoms

  @property
  def support(self) -> Array:
    """The returns [atoms] of the categorical head."""
    return jnp.linspace(self.v_min, self.v_max, self.num_atoms)

  @property
  def num_actions(self) -> int:
    if not isinstance(self.distribution, distributions.Categorical):
      raise ValueError(f'values of actions need a Discrete action space, not {self.action_space}')
    return self.distribution.num_actions

  def mean(self, q: Array) -> Array:
    """The expected returns [..., A] of outputs [..., A, atoms]."""
    if self.categorical:
      return jnp.sum(jax.nn.softmax(q) * self.support.reshape((1,) * (q.ndim - 1) + (-1,)), axis=-1)
    return jnp.mean(q, axis=-1)

  @functools.cached_property
  def module(self) -> nn.Module:
    return _QNetwork(self)


# --- continuous actions -----------------------------------------------------------------------


class _Actor(nn.Module):
  settings: Actor

  @nn.compact
  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    s, length = self.settings, timesteps.reward.shape[0]
    x = s.make_torso()(s.prepare(merge_time(timesteps.observation))[0])
    size = s.distribution.size // (2 if s.deterministic else 1)
    return split_time(Dense(size, kernel_init=s.kernel_init)(x), length), state


@dataclasses.dataclass(frozen=True)
class Actor(Body):
  """A policy over a bounded box: what a tanh-Normal takes, or raw actions before tanh."""

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  deterministic: Annotated[bool, tyro.conf.Suppress] = False  # the agent's choice

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none':
      raise ValueError(f'an actor of continuous actions has no memory, not the core {self.core!r}')

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    return distributions.squashed(self.action_space)

  @functools.cached_property
  def module(self) -> nn.Module:
    return _Actor(self)


class _Critic(nn.Module):
  settings: Critic

  @nn.compact
  def __call__(self, observation: Any, action: Array) -> Array:
    """Observations [B, ...] and actions [B, n] in [-1, 1] -> [critics, B, atoms]."""
    s = self.settings
    activation = {'tanh': jnp.tanh, 'relu': nn.relu}[s.activation]
    flat = [_flat(x) for x in jax.tree.leaves(s.prepare(observation)[0])]
    x = jnp.concatenate([*flat, action], axis=-1)
    outputs = []
    for _ in range(s.critics):
      y = Mlp(s.hidden, activation, s.kernel_init)(x)
      outputs.append(Dense(s.atoms, kernel_init=s.kernel_init)(y))
    return jnp.stack(outputs)


@dataclasses.dataclass(frozen=True)
class Critic(Body):
  """Values of continuous actions: several critics, or the distribution of returns."""

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  critics: Annotated[int, tyro.conf.Suppress] = 1  # the agent's choice
  atoms: Annotated[int, tyro.conf.Suppress] = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none' or self.torso not in ('auto', 'mlp'):
      raise ValueError(f'a critic is an MLP: {self.core=} {self.torso=}')

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    return distributions.squashed(self.action_space)

  @functools.cached_property
  def module(self) -> nn.Module:
    return _Critic(self)

  def init(self, key: Array) -> Any:
    action = jnp.zeros((1, math.prod(self.action_space.shape)))
    return self.module.init(key, self.example().observation, action)['params']

  def value(self, params: Any, observation: Any, action: Array) -> Array:
    """[critics, B, atoms] of observations [B, ...] and actions [B, n] in [-1, 1]."""
    values: Any = self.module.apply({'params': params}, observation, action)
    return values


# --- spaces -----------------------------------------------------------------------------------


def _zeros(space: Any) -> Array:
  """Observations [1, ...] of zeros, in the shape of a space that holds arrays."""
  if space.shape is None:
    raise ValueError(f'no network input for the observation space {space}')
  return jnp.asarray(np.zeros((1, *space.shape), space.dtype))  # int64 becomes int32


def _images(space: Any) -> list[Any]:
  """The boxes with three axes, of which an action_mask is none."""
  from gymnasium import spaces

  found = [s for path, s in leaves(space) if path.split('/')[1:2] != ['action_mask']]
  return [s for s in found if isinstance(s, spaces.Box) and len(s.shape) == 3]


def _floats(space: Any, x: Array) -> Array:
  """Observations as floats, by what their space says they are; pixels as bytes, channels last."""
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return jax.nn.one_hot(x - int(space.start), int(space.n))
  if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
    parts = [
      jax.nn.one_hot(x[..., i] - int(space.start[i]), int(n)) for i, n in enumerate(space.nvec)
    ]
    return jnp.concatenate(parts, axis=-1)
  if isinstance(space, spaces.MultiBinary):
    return x.astype(jnp.float32)
  if isinstance(space, spaces.Box):
    if channels_first(space):
      x = jnp.moveaxis(x, -3, -1)
    if _pixels(space):
      return x
    return x.astype(jnp.float32) / _scale(space)
  raise ValueError(f'no network input for the observation space {space}')


def channels_first(space: Any) -> bool:
  """Whether a box is of pixels [channels, height, width], as Atari's stacked frames are."""
  return _pixels(space) and space.shape[0] < min(space.shape[1:])


def _pixels(space: Any) -> bool:
  return len(space.shape) == 3 and space.dtype == np.uint8 and np.max(space.high) == 255


def _scale(space: Any) -> float:
  """What integers are divided by so as to lie within [-1, 1]: 255 for pixels; 1 if unbounded."""
  if not np.issubdtype(space.dtype, np.integer):
    return 1.0
  largest = float(max(abs(np.max(space.high).item()), abs(np.min(space.low).item()), 1))
  return largest if largest < np.iinfo(np.int32).max else 1.0
