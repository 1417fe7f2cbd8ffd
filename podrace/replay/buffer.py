"""Settings of replay: its capacity, the samples per update and their importance weights."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from podrace.fields import check_fields
from podrace.types import Array

SETTINGS_OF_RATE = '; replay_share of muesli and replay_ratio of disco make such a number, too'


@dataclasses.dataclass(frozen=True)
class Buffer:
  """Settings of `windows`: the steps that replay keeps, and how often it samples them."""

  capacity: int = 100_000  # environment steps that replay keeps, summed over all environments
  batch_size: int = 32  # windows of each gradient, over all devices
  min_size: int = 1_000  # environment steps before learning begins
  samples_per_insert: float = 8.0  # windows learned from for each stored step, kept exactly
  priority_exponent: float = 0.0
  # ^ exponent of priorities; 0: uniform sampling; 1: in proportion to priority
  importance_exponent: float = 0.6  # exponent of the correction for priorities; 1: full correction
  importance_steps: int = 0
  # ^ environment steps in which importance_exponent rises linearly to 1; 0: it is constant
  online_share: float | None = None
  # ^ with --log: share of samples from environments that act; None: as the environments' share
  online_share_end: float | None = None  # value that online_share reaches; None: it is constant
  online_share_steps: int = 0  # environment steps in which online_share reaches its end, linearly

  def __post_init__(self) -> None:
    check_fields(self)
    if self.min_size > self.capacity:
      raise ValueError(f'min_size {self.min_size} is more than the capacity of {self.capacity}')
    if self.online_share is None and (self.online_share_end, self.online_share_steps) != (None, 0):
      raise ValueError('online_share_end and online_share_steps need online_share')
    if (self.online_share_end is None) != (self.online_share_steps == 0):
      raise ValueError('online_share_end and online_share_steps, at least 1, go together')
    if self.online_share is not None and self.priority_exponent:
      raise ValueError(
        'online_share needs uniform samples, a priority_exponent of 0, '
        f'not {self.priority_exponent}: priorities decide how often each window is sampled'
      )

  def batch_per_device(self, devices: int) -> int:
    """Return the part of `batch_size` of each of the learner devices.

    Raises:
      ValueError: `batch_size` does not divide over them.
    """
    if self.batch_size % devices:
      raise ValueError(
        f'batch_size {self.batch_size} does not divide over {devices} learner devices: give a '
        f'multiple of {devices}'
      )
    return self.batch_size // devices

  def weights(self, size: Any, probability: Any, steps: Any) -> Any:
    """Compute the importance weights of sampled windows.

    Args:
      size: number of windows to sample from.
      probability: [n] the probability of each sampled window.
      steps: environment steps so far, for `importance`.

    Returns:
      The weights [n], scaled so that the largest is 1.
    """
    weight = (size * probability) ** -self.importance(steps)
    return weight / weight.max()

  def importance(self, steps: Any) -> Any:
    """Return the importance exponent after `steps` environment steps, f32.

    Schaul et al. 2016, section 3.4: the correction matters most at the end of training, so the
    exponent is annealed to 1 until then.
    """
    first, until = self.importance_exponent, float(self.importance_steps)  # beyond 32 bits, maybe
    return first + (1 - first) * (steps / until).clip(max=1.0) if until else first

  def online(self, steps: Any) -> Any:
    """Return the share of samples from environments that act, after `steps` steps, f32.

    QT-Opt (Kalashnikov et al. 2018, arXiv 1806.10293) raises it from 1% to 50%.
    """
    first, end, until = self.online_share, self.online_share_end, float(self.online_share_steps)
    if first is None or end is None:
      return first
    return first + (end - first) * (steps / until).clip(max=1.0)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The number of samples to learn from in each update."""

  buffer: Buffer
  length: int  # steps per window
  num_envs: int  # environments of all devices
  unroll_length: int

  def times(self, update: Array) -> Array:
    """Return the number of samples to learn from in an update.

    The total over u updates is floor(u * samples_per_insert * inserts / batch), counted from the
    update that reached `min_size`. The number depends on `update` only, so all devices agree.

    Args:
      update: [] i32, the index of the update from the beginning of the run.

    Returns:
      The number of samples, [] i32. 0 before the update `ready`.

    Raises:
      ValueError: `samples_per_insert` makes a fraction that i32 cannot represent exactly.
    """
    if self.rate.numerator * self.rate.denominator >= 2**31:
      raise ValueError(
        f'samples_per_insert {self.buffer.samples_per_insert} makes {self.rate} samples in an '
        f'update: too odd a number to keep exactly{SETTINGS_OF_RATE}'
      )
    due = self.due(jnp.maximum(update - self.ready, 0))
    return jnp.where(update >= self.ready, due, 0).astype(jnp.int32)

  @property
  def ready(self) -> int:
    """Index of the first update that learns."""
    steps = self.num_envs * self.unroll_length
    return max(-(-self.buffer.min_size // steps), -(-self.length // self.unroll_length)) - 1

  def due(self, updates: Any) -> Any:
    """Return the number of samples of an update, with `updates` since learning began before it."""
    p, q = self.rate.numerator, self.rate.denominator
    phase = updates % q
    return (p // q) + ((phase + 1) * (p % q)) // q - (phase * (p % q)) // q

  @property
  def rate(self) -> Fraction:
    """Average number of samples per update, as an exact fraction.

    Raises:
      ValueError: `samples_per_insert` is not a fraction with a denominator of at most a million.
    """
    b = self.buffer
    steps = self.num_envs * self.unroll_length
    exact = Fraction(b.samples_per_insert)
    ratio = exact.limit_denominator(1_000_000)  # 1/3 for 0.333...
    if abs(ratio - exact) > exact / 1_000_000:
      raise ValueError(
        f'samples_per_insert {b.samples_per_insert} is too odd a number to keep exactly: '
        f'take a fraction with a denominator of at most a million{SETTINGS_OF_RATE}'
      )
    return ratio * steps / b.batch_size
