"""How much is remembered, how often it is learned from, and how samples are weighted."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from podrace.fields import check_fields
from podrace.types import Array


@dataclasses.dataclass(frozen=True)
class Buffer:
  """What is remembered, and how often it is learned from; the settings of `windows`."""

  capacity: int = 100_000  # environment steps, of all environments
  batch_size: int = 32  # windows in one gradient, over all devices
  min_size: int = 1_000  # environment steps before learning begins
  samples_per_insert: float = 8.0  # windows learned from for every step that is stored, exactly
  priority_exponent: float = 0.0  # 0: all windows alike; 1: in proportion to their priority
  importance_exponent: float = 0.6  # how far that is corrected for; 1: wholly
  importance_steps: int = 0  # environment steps until it has risen to 1, linearly; 0: it never does

  def __post_init__(self) -> None:
    check_fields(self)
    if self.min_size > self.capacity:
      raise ValueError(f'min_size {self.min_size} is more than the capacity of {self.capacity}')

  def batch_per_device(self, streams: int, num_envs: int) -> int:
    """Windows of a gradient on a device that holds so many of all streams."""
    size = self.batch_size * streams
    if size % num_envs:
      raise ValueError(
        f'batch_size {self.batch_size} does not divide over {num_envs // streams} learner devices'
      )
    return size // num_envs

  def weights(self, size: Any, probability: Any, steps: Any) -> Any:
    """Importance weights [n] of windows that were drawn from so many with these probabilities [n]."""
    weight = (size * probability) ** -self.importance(steps)
    return weight / weight.max()

  def importance(self, steps: Any) -> Any:
    """The importance exponent after so many environment steps, f32.

    Schaul et al. 2016, section 3.4: it matters most at the end, and is annealed to 1 until then.
    """
    first, until = self.importance_exponent, self.importance_steps
    return first + (1 - first) * (steps / until).clip(max=1.0) if until else first


@dataclasses.dataclass(frozen=True)
class Schedule:
  """How many samples are learned from in each update."""

  buffer: Buffer
  length: int  # steps of a window
  num_envs: int  # of all devices
  unroll_length: int

  def times(self, update: Array) -> Array:
    """How many samples are learned from in the update-th update, [] i32.

    Over u updates these are floor(u * samples_per_insert * inserts / batch), counted from where
    `min_size` was reached; a function of the update alone, so it is the same on all devices.
    """
    if self.rate.numerator * self.rate.denominator >= 2**31:
      raise ValueError(
        f'samples_per_insert {self.buffer.samples_per_insert} makes {self.rate} samples in an update: too odd '
        'a number to keep exactly'
      )
    due = self.due(jnp.maximum(update - self.ready, 0))
    return jnp.where(update >= self.ready, due, 0).astype(jnp.int32)

  @property
  def ready(self) -> int:
    """The first update that learns."""
    steps = self.num_envs * self.unroll_length
    return max(-(-self.buffer.min_size // steps), -(-self.length // self.unroll_length)) - 1

  def due(self, updates: Any) -> Any:
    """How many samples are learned from in an update, so many after learning began."""
    p, q = self.rate.numerator, self.rate.denominator
    phase = updates % q
    return (p // q) + ((phase + 1) * (p % q)) // q - (phase * (p % q)) // q

  @property
  def rate(self) -> Fraction:
    """Samples that are learned from in an update."""
    b = self.buffer
    steps = self.num_envs * self.unroll_length
    exact = Fraction(b.samples_per_insert)
    ratio = exact.limit_denominator(1_000_000)  # 1/3 for 0.333...
    if abs(ratio - exact) > exact / 1_000_000:
      raise ValueError(
        f'samples_per_insert {b.samples_per_insert} is too odd a number to keep exactly: take a fraction '
        'with a denominator of at most a million'
      )
    return ratio * steps / b.batch_size
