"""The shipped networks have this in common: observations through torso and core."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import linen as nn

from podrace import distributions
from podrace.envs.spaces import KERNEL, MASK, PIXELS, leaves, map_leaves, seen
from podrace.fields import PlainText, check_fields
from podrace.networks import attention, torsos, transformer
from podrace.networks.attention import Attention, TransformerCore
from podrace.networks.cores import Core
from podrace.networks.initializers import INITIALIZERS
from podrace.networks.observations import as_floats, image_sides, images_in, zeros_of
from podrace.networks.torsos import IMAGE_TORSOS, Torso
from podrace.networks.transformer import Transformer
from podrace.types import Array, TimeStep

SHARDING = torsos.SHARDING + transformer.SHARDING
CPU_CHUNK = 4096  # samples in one gradient: fits the caches, and still keeps all cores busy
RULES, REPEATS, CHOICES = 100, 2, 4  # of --model-devices: rules, and of a pattern * + {, and ? |
FLAT = 2048  # numbers of an image that an MLP takes as they are: MinAtar's boards have up to 1,000
CPU_CHUNK_FRAMES = 32  # likewise, where a sample is a frame that goes through convolutions


@dataclasses.dataclass(frozen=True)
class Body:
  """The common part of the shipped networks: from observations through torso and core.

  Observations may be any tree of boxes and discrete values. Integers are divided by their bound
  (pixels by 255). Integers without bounds and the bytes of small images become logarithms. Discrete
  values become one-hot. An entry `action_mask` forbids discrete actions where it is 0.
  """

  UNRECORDED: ClassVar[Mapping[str, Any]] = {'scaling': 'plain'}  # of runs before the field
  MODULE: ClassVar[type[Any]]  # the class of the flax module, made of a network's settings
  DISCRETE: ClassVar[bool] = False  # its agents support Discrete action spaces only
  UNROLL: ClassVar[str] = '__call__'  # the method of the module for unrolls

  torso: Literal['auto', 'mlp', 'nature', 'impala', 'impala-deep', 'grid', 'transformer'] = 'auto'
  # ^ first layers: nature, impala or impala-deep for images, grid for small images, mlp for
  #   vectors, transformer for all; auto: by the size of the observation
  hidden: tuple[int, ...] = (64, 64)  # layer widths of the MLP behind the torso
  activation: Literal['tanh', 'relu'] = 'tanh'  # activation of the layers
  initializer: Literal['orthogonal', 'lecun'] = 'orthogonal'  # initialiser of the kernels
  core: Literal['none', 'gru', 'lstm', 'transformer'] = 'none'
  # ^ recurrent core, for tasks that need memory; transformer: attention to the last steps
  core_size: int = 128  # units of the recurrent core
  attention: Attention = Attention()  # used by the core transformer
  transformer: Transformer = Transformer()  # used by that torso
  scaling: Literal['space', 'plain'] = 'space'
  # ^ units of numbers in observations; space: of the environment's spaces; plain: 1, as before
  #   this setting
  sharding: tuple[tuple[PlainText, int], ...] = ()
  # ^ patterns of arrays' names, each with the axis that --model-devices splits; none:
  #   docs/model_axis.md
  observation_space: Annotated[Any, tyro.conf.Suppress] = None  # bound by the runner
  action_space: Annotated[Any, tyro.conf.Suppress] = None

  def __post_init__(self) -> None:
    check_fields(self)
    if len(self.sharding) > RULES:
      raise ValueError(f'sharding has {len(self.sharding)} rules, expected at most {RULES}')
    for rule in self.sharding:
      if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[1], int):
        raise ValueError(f'sharding has the rule {rule!r}, expected a pattern and an axis')
      _check_pattern(rule[0])
    if self.core == 'transformer' and self.core_size % self.attention.heads:
      raise ValueError(
        f'core_size {self.core_size} does not divide into {self.attention.heads} heads of attention'
      )

  def bind(self, observation_space: Any, action_space: Any) -> Any:
    """This network for these spaces.

    Raises:
      ValueError: if it can't be built for them.
    """
    if self.DISCRETE:
      _check_discrete(action_space)
    bound = dataclasses.replace(
      self, observation_space=observation_space, action_space=action_space
    )
    if not bound.distribution.size:
      raise ValueError(f'an empty action space: {action_space}')
    shapes = [s.shape for _, s in leaves(seen(observation_space))]
    if not any(shape is None or math.prod(shape) for shape in shapes):  # None is refused below
      raise ValueError(
        f'an empty observation space: {observation_space}; add a number, such as a constant, in a '
        'wrapper as gymnasium.wrappers.TransformObservation'
      )
    distributions.check_range(action_space, bound.distribution)
    jax.eval_shape(bound.init, jax.random.key(0))
    return bound

  @functools.cached_property
  def distribution(self) -> distributions.Distribution:
    """The kind of actions there are."""
    return distributions.for_space(self.action_space, scaled=self.scaling == 'space')

  @functools.cached_property
  def module(self) -> nn.Module:
    """The flax module, from (state, timesteps) to (outputs, state)."""
    return self.MODULE(self)

  @functools.cached_property
  def image_torso(self) -> str:
    """The convolutions for images; mlp: none."""
    images = images_in(self.observation_space)
    if self.torso in IMAGE_TORSOS and not images:
      raise ValueError(
        f'torso {self.torso!r} needs an image, [height, width, channels]; '
        f'the observation space is {self.observation_space}'
      )
    if self.torso != 'auto' or not images:
      return 'mlp' if self.torso == 'auto' else self.torso
    least = min(image_sides(self.observation_space))
    if least >= PIXELS:
      return 'nature'
    return 'mlp' if math.prod(images[0].shape) <= FLAT or least < KERNEL else 'grid'

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """How `podrace.architectures.sharding` splits its parameters."""
    return self.sharding or SHARDING

  @property
  def cpu_chunk(self) -> int:
    """Samples in one gradient on CPU: convolutions of whole frames fill the caches with few."""
    return CPU_CHUNK if self.image_torso in ('mlp', 'grid') else CPU_CHUNK_FRAMES

  @property
  def kernel_init(self) -> Any:
    """The initializer of the layers."""
    return INITIALIZERS[self.initializer]()

  @property
  def activate(self) -> Any:
    """The activation function."""
    return {'tanh': jnp.tanh, 'relu': nn.relu}[self.activation]

  def make_torso(
    self, hidden: tuple[int, ...] | None = None, layer_norm: bool = False
  ) -> nn.Module:
    """Return the layers from prepared observations to features, by default with `self.hidden`."""
    sizes = self.hidden if hidden is None else hidden
    layers = self.image_torso, sizes, self.activate, self.kernel_init, self.transformer
    return Torso(*layers, layer_norm)

  def mlp(self, hidden: tuple[int, ...]) -> nn.Module:
    """Return an MLP with the settings of the network."""
    return torsos.Mlp(hidden, self.activate, self.kernel_init)

  def make_core(self) -> Core | TransformerCore | None:
    """Return the recurrent core; None if there is none."""
    if self.core == 'transformer':
      return TransformerCore(self.core_size, self.attention)
    return Core(self.core, self.core_size) if self.core != 'none' else None

  def prepare(self, observation: Any) -> tuple[Any, Array | None]:
    """Return observations [B, ...] as floats (pixels as bytes), and the mask of allowed actions."""
    mask = None
    if isinstance(observation, dict) and MASK in observation:
      if not isinstance(
        self.distribution, distributions.Categorical | distributions.MultiCategorical
      ):
        raise ValueError(f'action_mask in the observation, but the actions are {self.action_space}')
      mask = observation[MASK]
      if math.prod(mask.shape[1:]) != self.distribution.size:
        raise ValueError(
          f"the observation's action_mask has shape {mask.shape[1:]}; "
          f'expected one entry for each of the {self.distribution.size} choices of '
          f'{self.action_space}'
        )
      mask = distributions.allowed(mask, self.distribution)
    encode = functools.partial(as_floats, plain=self.scaling == 'plain')
    return map_leaves(encode, seen(self.observation_space), observation), mask

  def example(self) -> TimeStep:
    """A timestep [1, ...] of zeros."""
    observation = map_leaves(zeros_of, self.observation_space)
    return TimeStep(observation, jnp.zeros([1]), jnp.ones([1]), jnp.zeros([1], jnp.int8))

  def init(self, key: Array) -> Any:
    """Return the first parameters."""
    timesteps = jax.tree.map(lambda x: x[None], self.example())
    return self.module.init(key, self.initial_state(1), timesteps)['params']

  def initial_state(self, batch_size: int) -> Any:
    """Return the state of acting before the first timestep."""
    size, window = (self.core_size,), attention.state_shapes(self.core_size, self.attention)
    shapes = {'none': (), 'gru': (size,), 'lstm': (size, size), 'transformer': window}
    return tuple(jnp.zeros([batch_size, *shape]) for shape in shapes[self.core])

  def step(
    self,
    params: Any,
    state: Any,
    timestep: TimeStep,
    key: Any = None,
    per_row: bool = False,
    previous: Any = None,
  ) -> Any:
    """Return the outputs for a timestep [B, ...], and the next state."""
    timesteps, before = jax.tree.map(lambda x: x[None], (timestep, previous))
    outputs, state = self.unroll(params, state, timesteps, key, per_row, before)
    return jax.tree.map(lambda x: x[0], outputs), state

  def unroll(
    self,
    params: Any,
    state: Any,
    timesteps: TimeStep,
    key: Any = None,
    per_row: bool = False,
    previous: Any = None,
  ) -> Any:
    """Return outputs [T, B, ...] and the state after them.

    Args:
      params: the parameters.
      state: the recurrent state before the first timestep.
      timesteps: [T, B, ...].
      key: draws noise. None: no noise.
      per_row: one sample of the noise for each row, instead of one for all.
      previous: [T, B, ...] the action before each timestep, for a `RecurrentBody`. None: zeros.
    """
    rngs = None if key is None else {'row_noise' if per_row else 'noise': key}
    inputs = (state, timesteps) if previous is None else (state, timesteps, previous)
    return self.module.apply({'params': params}, *inputs, rngs=rngs, method=self.UNROLL)


def _check_discrete(action_space: Any) -> None:
  """Raise ValueError for an action space that rules do not support."""
  from gymnasium import spaces

  if not isinstance(action_space, spaces.Discrete):
    raise ValueError(
      f'a rule for discrete actions needs a Discrete action space, not {action_space}'
    )


def _check_pattern(pattern: str) -> None:
  """Raise ValueError for an unsafe pattern: one from another user's record may never end."""
  try:
    re.compile(pattern)
  except (re.error, RecursionError, OverflowError) as e:
    raise ValueError(f'sharding: {pattern!r:.200} is no pattern of names: {e}') from e
  plain = re.sub(r'\\.', 'x', pattern)  # without escaped characters
  repeats, choices = len(re.findall(r'[*+{]', plain)), len(re.findall(r'[?|]', plain))
  if repeats > REPEATS or choices > CHOICES or re.search(r'\)[*+?{]', plain):
    raise ValueError(
      f'sharding: {pattern!r:.200} may be slow; expected at most {REPEATS} of * + '
      f'{{ and {CHOICES} of ? | in a pattern, '
      'none of them behind a group: write several rules'
    )
