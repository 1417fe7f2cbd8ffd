"""Layers: dense, convolutional and noisy, each the fast way on its platform."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace.types import Array


def affine(x: Array, kernel: Array, bias: Array) -> Array:
  """Return x @ kernel + bias, [N, A] with [A, B] and [1, B]."""
  return product(x, kernel) + bias


@jax.custom_vjp
def product(x: Array, kernel: Array) -> Array:
  """Return x @ kernel, [N, A] with [A, B], in the fast way of each platform.

  XLA's CPU backend is slow at a product that contracts the first axes of both, as the gradient of
  the kernel does. There the smaller side is transposed first, which is 1.4 to 10 times as fast.
  """
  return x @ kernel


def _product_forward(x: Array, kernel: Array) -> tuple[Array, Any]:
  return x @ kernel, (x, kernel)


def _product_backward(saved: Any, g: Array) -> tuple[Array, Array]:
  x, kernel = saved

  def on_cpu(x: Array, g: Array) -> Array:
    barrier = jax.lax.optimization_barrier
    if x.size <= g.size + kernel.size:
      narrow = x.shape[-1] < 8  # not worth a copy
      return (x.T if narrow else barrier(x.T)) @ g
    # `g.T` by a product, because XLA would fuse its transpose with its producer, element by
    # element
    identity = jnp.eye(g.shape[-1], dtype=g.dtype)
    transposed = jax.lax.dot_general(identity, g, (((1,), (1,)), ((), ())))
    return barrier(transposed @ x).T

  kernel_grad = jax.lax.platform_dependent(x, g, cpu=on_cpu, default=lambda x, g: x.T @ g)
  return g @ kernel.T, kernel_grad


product.defvjp(_product_forward, _product_backward)


def patches_conv(x: Array, kernel: Array, stride: int, padding: str) -> Array:
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
  out = product(unit(patches), kernel.reshape(-1, features))
  return out.reshape(x.shape[0], rows, columns, features)


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
  total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
  return total // 2, total - total // 2


def xla_conv(x: Array, kernel: Array, stride: int, padding: str) -> Array:
  """Convolve as `conv2d`, by XLA's convolution."""
  return jax.lax.conv_general_dilated(
    unit(x), kernel, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


def unit(x: Array) -> Array:
  """Bytes are pixels: floats within [0, 1]."""
  return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def flat(x: Array) -> Array:
  """Return x as floats [B, n]."""
  return unit(x).reshape(x.shape[0], math.prod(x.shape[1:]))  # -1 is ambiguous for empty arrays


_in_loop = contextvars.ContextVar('in_loop', default=True)


@contextlib.contextmanager
def _loops(inside: bool) -> Iterator[None]:
  token = _in_loop.set(inside)
  try:
    yield
  finally:
    _in_loop.reset(token)


def outside_loops() -> contextlib.AbstractContextManager[None]:
  """Mark code that is traced here as not in a loop.

  XLA's CPU backend has a threaded convolution only for code outside of loops.
  """
  return _loops(False)


def inside_loops() -> contextlib.AbstractContextManager[None]:
  """For a loop within `outside_loops`, such as a search."""
  return _loops(True)


def conv2d(x: Array, kernel: Array, stride: int, padding: str) -> Array:
  """A 2-D convolution, [B, H, W, C] with [h, w, C, F], the fast way on each platform.

  Bytes are divided by 255, on CPU after they are gathered: a quarter of the memory to move.
  """
  if not _in_loop.get():
    return xla_conv(x, kernel, stride, padding)
  return jax.lax.platform_dependent(
    x,
    kernel,
    cpu=functools.partial(patches_conv, stride=stride, padding=padding),
    default=functools.partial(xla_conv, stride=stride, padding=padding),
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
    """Apply the layers."""
    if self.padding == 'VALID' and min(x.shape[1:3]) < self.size:
      raise ValueError(
        f'a convolution of {self.size}x{self.size} does not fit an image of '
        f'{x.shape[1]}x{x.shape[2]}, which is what is left of the observation in its turn: '
        'take another torso (auto, grid or mlp)'
      )
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', self.kernel_init, shape)
    bias = self.param('bias', nn.initializers.zeros_init(), (self.features,))
    return conv2d(x, kernel, self.stride, self.padding) + bias[None, None, None]


class Dense(nn.Module):
  """A fully connected layer, on [N, F]."""

  features: int
  kernel_init: Any = nn.initializers.lecun_normal()
  bias_init: Any = nn.initializers.zeros

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    kernel = self.param('kernel', self.kernel_init, (x.shape[-1], self.features))
    bias = self.param('bias', self.bias_init, (self.features,))
    return affine(x, kernel, bias[None])


class NoisyDense(nn.Module):
  """A layer with learned noise (Fortunato et al. 2018, arXiv 1706.10295): factorised Gaussian.

  A key for 'noise' draws one sample for all rows; one for 'row_noise', a sample for each row.
  Without either it is the mean of its layers.
  """

  features: int
  sigma: float = 0.5

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Apply the layers."""
    inputs = x.shape[-1]
    bound = 1 / math.sqrt(inputs)

    def uniform(key: Array, shape: tuple[int, ...]) -> Array:
      return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    sigma = nn.initializers.constant(self.sigma * bound)
    kernel = self.param('kernel', uniform, (inputs, self.features))
    bias = self.param('bias', uniform, (self.features,))
    kernel_sigma = self.param('kernel_sigma', sigma, (inputs, self.features))
    bias_sigma = self.param('bias_sigma', sigma, (self.features,))
    if self.has_rng('row_noise'):  # the same product, without weights of each row's own
      noise_in, noise_out = self._noise('row_noise', x.shape[0], inputs)
      varied = affine(x * noise_in, kernel_sigma, bias_sigma[None])
      return affine(x, kernel, bias[None]) + varied * noise_out
    if self.has_rng('noise'):
      noise_in, noise_out = self._noise('noise', 1, inputs)
      kernel += kernel_sigma * noise_in.T * noise_out
      bias += bias_sigma * noise_out[0]
    return affine(x, kernel, bias[None])

  def _noise(self, name: str, rows: int, inputs: int) -> tuple[Array, Array]:
    """Return f(epsilon) of inputs and of outputs, [rows, ...]: equations 10 and 11 of the paper."""
    in_key, out_key = jax.random.split(self.make_rng(name))
    x, y = (
      jax.random.normal(key, (rows, size))
      for key, size in ((in_key, inputs), (out_key, self.features))
    )
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x)), jnp.sign(y) * jnp.sqrt(jnp.abs(y))
