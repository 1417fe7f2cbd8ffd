"""podrace's own networks as they act: NumPy computes them, podrace.policy.onnx writes their graph.

Importing this imports neither jax nor another module of podrace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

MASKED = np.float32(-1e9)  # the logit of an action that the environment forbids
MASKED_VALUE = np.float32(-1e17)  # likewise its value
STATES = {'none': 0, 'gru': 1, 'lstm': 2}  # number of arrays [B, core_size] in a core's state
IMAGES = {
  'nature': 'Nature',
  'impala': 'ImpalaShallow',
  'impala-deep': 'ImpalaDeep',
  'grid': 'Grid',
}
CONVOLVED = 2**26  # most numbers of a convolution of one observation: its patches or features
STRIDES = {'nature': (4, 2, 1), 'impala': (4, 2), 'grid': (1,)}  # strides of the convolutions

COVERED = (
  'NumPy and ONNX run ppo, impala, pqn, bc and r2d2, also with a GRU or LSTM that sees only '
  'observations, and dqn, sac and d4pg without a core; they have no transformer, no network of '
  "your own, and no agent of your own whose action is not its network's best"
)

Params = dict[str, np.ndarray]
Tensor = Any  # an array of NumPy, or a value of a graph: both have + - * / @
Bound = np.ndarray | np.floating


class Operations(Protocol):
  """Operations of a network besides + - * / and @. B is the batch, unknown in a graph."""

  def cast(self, x: Tensor, dtype: str) -> Tensor:
    """Convert x to `dtype`."""

  def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape [B, ...] to [B, *shape]."""

  def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
    """Slice [B, n] to [B, stop - start]."""

  def channels_last(self, x: Tensor) -> Tensor:
    """Transpose [B, C, H, W] to [B, H, W, C]."""

  def concat(self, xs: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last axis."""

  def one_hot(self, x: Tensor, values: np.ndarray) -> Tensor:
    """Compare [B, 1] with values [n]: floats [B, n], 1 where equal."""

  def log(self, x: Tensor) -> Tensor:
    """Return the natural logarithm."""

  def tanh(self, x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""

  def relu(self, x: Tensor) -> Tensor:
    """Return max(x, 0)."""

  def sigmoid(self, x: Tensor) -> Tensor:
    """Return the logistic function."""

  def sqrt(self, x: Tensor) -> Tensor:
    """Return the square root."""

  def softmax(self, x: Tensor) -> Tensor:
    """Return the softmax over the last axis."""

  def clip(self, x: Tensor, low: Bound, high: Bound) -> Tensor:
    """Limit x to [low, high]."""

  def where(self, mask: Tensor, x: Tensor, otherwise: Bound) -> Tensor:
    """Return x where `mask` holds, else `otherwise`."""

  def mean(self, x: Tensor, axis: int) -> Tensor:
    """Average over an axis, which stays with length 1."""

  def sum(self, x: Tensor) -> Tensor:
    """Sum over the last axis, which is removed."""

  def argmax(self, x: Tensor) -> Tensor:
    """Map [B, n] to the index [B] of the first largest element."""

  def conv(
    self, x: Tensor, kernel: np.ndarray, bias: np.ndarray, stride: int, same: bool
  ) -> Tensor:
    """Convolve [B, H, W, C] with `kernel` [h, w, C, F]."""

  def max_pool(self, x: Tensor) -> Tensor:
    """Pool [B, H, W, C] by 3x3 with stride 2 and same padding."""


def flatten_space(space: Any) -> list[dict[str, Any]]:
  """Return the array specs of a described space, with dict keys sorted as in JAX."""
  if not isinstance(space, dict):
    raise ValueError('has a space that is no object')
  if 'dict' in space:
    parts = space['dict']
    if not isinstance(parts, dict):
      raise ValueError('has a space whose dict is no object')
    return [x for key in sorted(parts) for x in flatten_space(parts[key])]
  if 'tuple' in space:
    if not isinstance(space['tuple'], list):
      raise ValueError('has a space whose tuple is no list')
    return [x for part in space['tuple'] for x in flatten_space(part)]
  return [space]


class PolicyNetwork:
  """The network that policy.json describes: torso, core, head and the best action."""

  def __init__(self, about: dict[str, Any], params: Params, ops: Operations) -> None:
    self._net, self._action = about['network'], about['action']
    self._specs = flatten_space(about['observation_space'])
    self._params, self._ops = params, ops

  def step(
    self, inputs: Sequence[Tensor], state: Sequence[Tensor]
  ) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the action and the core's next state.

    Args:
      inputs: arrays [B, ...] of the observation.
      state: arrays [B, core_size] of the core's state.
    """
    mask = None
    if self._net['mask'] is not None:
      mask = self._allowed(inputs[self._net['mask']])
    # older policies have no `inputs`
    shown = [i for i in range(len(inputs)) if i != self._net['mask']]
    shown = self._net.get('inputs', shown)
    features = [self._as_floats(self._specs[i], self._standardize(i, inputs[i])) for i in shown]
    images = [len(self._specs[i]['shape']) == 3 for i in shown]
    x, after = self._torso(features, images), ()
    if self._net['core'] != 'none':
      x, after = self._core(x, state)
    return self._best(x, mask), after

  # --- observations -----------------------------------------------------------------------------

  def _standardize(self, i: int, x: Tensor) -> Tensor:
    if i not in self._net['floats'] or 'observation/mean/0' not in self._params:
      return x
    n = self._net['floats'].index(i)
    mean, var = (self._params[f'observation/{name}/{n}'] for name in ('mean', 'var'))
    scale = np.float32(1) / np.sqrt(var + np.float32(1e-8))
    x = (self._ops.cast(x, 'float32') - mean) * scale
    return self._ops.clip(x, np.float32(-10), np.float32(10))

  def _as_floats(self, spec: dict[str, Any], x: Tensor) -> Tensor:
    """As podrace.networks.observations."""
    ops, kind = self._ops, spec['kind']
    if kind in ('discrete', 'multidiscrete'):
      x = ops.reshape(ops.cast(x, 'int64'), (-1,))
      starts, sizes = np.atleast_1d(spec['start']), np.atleast_1d(spec['n'])
      choices = [np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
      return ops.concat(
        [ops.one_hot(ops.columns(x, i, i + 1), values) for i, values in enumerate(choices)]
      )
    x = ops.cast(x, 'float32')
    if spec['pixels']:
      x = x / np.float32(255)
    else:
      x = self._encode(x, np.asarray(spec.get('log', False), np.float32))
      x = x / np.asarray(spec['scale'], np.float32)
    return ops.channels_last(x) if spec.get('channels_first') else x

  def _encode(self, x: Tensor, log: np.ndarray) -> Tensor:
    """sign(x) * log(1 + |x|) where `log` is 1, x where it is 0."""
    if not np.any(log):
      return x
    ops, one = self._ops, np.float32(1)
    y = ops.log(ops.relu(x) + one) - ops.log(ops.relu(np.float32(-1) * x) + one)
    return y if np.all(log) else log * y + (one - log) * x

  # --- layers -----------------------------------------------------------------------------------

  def _dense(self, name: str, x: Tensor) -> Tensor:
    return x @ self._params[f'{name}/kernel'] + self._params[f'{name}/bias']

  def _torso(self, inputs: Sequence[Tensor], images: Sequence[bool]) -> Tensor:
    kind, name = self._net['torso'], self._net['torso_name']
    features, count = [], 0
    for x, image in zip(inputs, images, strict=True):
      if image and kind != 'mlp':
        x = self._image(kind, f'{name}/{IMAGES[kind]}_{count}', x)
        count += 1
      features.append(self._ops.reshape(x, (-1,)))
    out = self._ops.concat(features)
    activation = {'tanh': self._ops.tanh, 'relu': self._ops.relu}[self._net['activation']]
    for i in range(self._net['layers']):
      out = self._dense(f'{name}/Mlp_0/Dense_{i}', out)
      out = activation(self._layer_norm(f'{name}/Mlp_0/LayerNorm_{i}', out, 1))
    return out

  def _layer_norm(self, name: str, x: Tensor, axis: int) -> Tensor:
    """As flax.linen.LayerNorm over `axis`, the last one; nothing without its parameters."""
    if f'{name}/scale' not in self._params:
      return x
    x = x - self._ops.mean(x, axis)
    x = x / self._ops.sqrt(self._ops.mean(x * x, axis) + np.float32(1e-6))
    return x * self._params[f'{name}/scale'] + self._params[f'{name}/bias']

  def _image(self, kind: str, name: str, x: Tensor) -> Tensor:
    if kind == 'impala-deep':
      return self._residual(name, x)
    for i, stride in enumerate(STRIDES[kind]):
      x = self._conv(f'{name}/Conv_{i}', x, stride)
      x = self._ops.relu(self._layer_norm(f'{name}/LayerNorm_{i}', x, 3))
    return x

  def _residual(self, name: str, x: Tensor) -> Tensor:
    names = (f'{name}/Conv_{i}' for i in range(15))
    relu = self._ops.relu
    for _ in range(3):
      x = self._ops.max_pool(self._conv(next(names), x, 1, same=True))
      for _ in range(2):
        y = self._conv(next(names), relu(x), 1, same=True)
        x = x + self._conv(next(names), relu(y), 1, same=True)
    return relu(x)

  def _conv(self, name: str, x: Tensor, stride: int, same: bool = False) -> Tensor:
    kernel, bias = self._params[f'{name}/kernel'], self._params[f'{name}/bias']
    return self._ops.conv(x, kernel, bias, stride, same)

  def _core(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    ops, name, size = self._ops, self._net['core_name'], self._net['core_size']
    x = self._dense(f'{name}/input', x)
    h = state[0] @ self._params[f'{name}/recurrent']
    bias = self._params[f'{name}/bias']

    def part(y: Tensor, i: int) -> Tensor:
      return ops.columns(y, i * size, (i + 1) * size)

    one = np.float32(1)
    if self._net['core'] == 'gru':
      r, z = (ops.sigmoid(part(x, i) + part(h, i)) for i in (0, 1))
      n = ops.tanh(part(x, 2) + r * (part(h, 2) + bias))
      after: tuple[Tensor, ...] = ((one - z) * n + z * state[0],)
    else:
      i, f, g, o = (part(x + h, i) for i in range(4))
      c = ops.sigmoid(f + one) * state[1] + ops.sigmoid(i) * ops.tanh(g + bias)
      after = (ops.sigmoid(o) * ops.tanh(c), c)
    return after[0], after

  def _allowed(self, mask: Tensor) -> Tensor:
    """Return which choices [B, n] a mask allows; all of a part of the action where it has none."""
    ops, n = self._ops, self._action.get('n')
    flat = ops.cast(ops.cast(ops.reshape(mask, (-1,)), 'bool'), 'float32')
    ends = np.cumsum(n if isinstance(n, list) else [n]).tolist()
    zero, one, parts = np.float32(0), np.float32(1), []
    for start, end in zip([0, *ends], ends, strict=False):
      part = ops.columns(flat, start, end)
      none = one - ops.clip(ops.reshape(ops.sum(part), (1,)), zero, one)
      parts.append(part + none)
    return ops.cast(ops.concat(parts), 'bool')

  # --- heads ------------------------------------------------------------------------------------

  def _best(self, x: Tensor, mask: Tensor | None) -> Tensor:
    ops, action = self._ops, self._action
    if self._net['head'] == 'q':
      return ops.argmax(self._values(x, mask))
    out = self._dense(self._net['head_name'], x)
    if action['kind'] == 'box':
      return self._in_box(ops.columns(out, 0, int(np.prod(action['shape']))))
    if mask is not None:
      out = ops.where(mask, out, MASKED)
    if action['kind'] == 'categorical':
      return ops.argmax(out)
    ends = np.cumsum(action['n']).tolist()
    parts = [ops.columns(out, end - n, end) for n, end in zip(action['n'], ends, strict=True)]
    return ops.concat([ops.reshape(ops.argmax(part), (1,)) for part in parts])

  def _values(self, x: Tensor, mask: Tensor | None) -> Tensor:
    ops, atoms = self._ops, self._net['atoms']
    q = ops.reshape(self._stream('advantage', x), (-1, atoms))  # [B, A, atoms]
    if self._net['dueling']:
      q = q - ops.mean(q, 1) + ops.reshape(self._stream('value', x), (1, atoms))
    if mask is not None:
      q = ops.where(ops.reshape(mask, (-1, 1)), q, MASKED_VALUE)
    if self._net['support'] is not None:
      return ops.sum(ops.softmax(q) * np.array(self._net['support'], np.float32))
    return ops.reshape(ops.mean(q, 2), (-1,))

  def _stream(self, name: str, x: Tensor) -> Tensor:
    if f'{name}_hidden/kernel' in self._params:
      x = self._ops.relu(self._dense(f'{name}_hidden', x))
    return self._dense(f'{name}_head', x)

  def _in_box(self, x: Tensor) -> Tensor:
    low, high = (np.array(self._action[side], np.float32) for side in ('low', 'high'))
    if self._action['squash']:
      half = np.float32(0.5) * (high - low)
      x = low + (self._ops.tanh(x) + np.float32(1)) * half
    elif self._action.get('scale'):
      centre, scale = (np.array(self._action[key], np.float32) for key in ('centre', 'scale'))
      x = x * scale + centre
    return self._ops.clip(x, low, high)


class Numpy:
  """The operations in NumPy."""

  def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(dtype, copy=False)

  def reshape(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.reshape(len(x), *shape)

  def columns(self, x: np.ndarray, start: int, stop: int) -> np.ndarray:
    return x[:, start:stop]

  def channels_last(self, x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1)

  def concat(self, xs: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(xs, -1)

  def one_hot(self, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    return (x == values).astype(np.float32)

  def log(self, x: np.ndarray) -> np.ndarray:
    return np.log(x)

  def tanh(self, x: np.ndarray) -> np.ndarray:
    return np.tanh(x)

  def relu(self, x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.float32(0))

  def sigmoid(self, x: np.ndarray) -> np.ndarray:
    half = np.float32(0.5)
    return half * (np.tanh(half * x) + np.float32(1))  # this form does not overflow

  def sqrt(self, x: np.ndarray) -> np.ndarray:
    return np.sqrt(x)

  def softmax(self, x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

  def clip(self, x: np.ndarray, low: Bound, high: Bound) -> np.ndarray:
    return np.clip(x, low, high)

  def where(self, mask: np.ndarray, x: np.ndarray, otherwise: Bound) -> np.ndarray:
    return np.where(mask, x, otherwise)

  def mean(self, x: np.ndarray, axis: int) -> np.ndarray:
    return x.mean(axis, keepdims=True)

  def sum(self, x: np.ndarray) -> np.ndarray:
    return x.sum(-1)

  def argmax(self, x: np.ndarray) -> np.ndarray:
    return x.argmax(-1)

  def conv(
    self, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, stride: int, same: bool
  ) -> np.ndarray:
    height, width, channels, features = kernel.shape
    if same:
      x = _pad_same(x, height, stride, 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(x, (height, width), axis=(1, 2))
    windows = windows[:, ::stride, ::stride]  # [B, H, W, C, h, w]
    places = windows.shape[1] * windows.shape[2]
    if (size := places * max(height * width * channels, features)) > CONVOLVED:
      raise ValueError(f'a convolution has {size:,} numbers, expected at most {CONVOLVED:,}')
    patches = np.moveaxis(windows, 3, -1).reshape(*windows.shape[:3], height * width * channels)
    return patches @ kernel.reshape(-1, features) + bias

  def max_pool(self, x: np.ndarray) -> np.ndarray:
    x = _pad_same(x, 3, 2, -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2]
    pooled: np.ndarray = windows.max((-1, -2))
    return pooled


def _pad_same(x: np.ndarray, window: int, stride: int, value: float) -> np.ndarray:
  """Pad [B, H, W, C] as 'SAME' does."""
  sides = []
  for size in x.shape[1:3]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    sides.append((total // 2, total - total // 2))
  return np.pad(x, [(0, 0), *sides, (0, 0)], constant_values=value)
