"""Helpers of the adapters: arrays of the declared types, spaces, a time limit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.hidden import DynamicsWrapper
from podrace.envs.spaces import map_leaves
from podrace.errors import UnknownName
from podrace.types import LAST, Array, TimeStep


def raw_key(key: Array) -> Array:
  """Return a key as plain numbers, for libraries that store a key or use one twice."""
  return jax.random.key_data(key)


def as_strong_types(tree: Any) -> Any:
  """Return a tree with strongly typed arrays, so that a scan's carry keeps its type.

  Libraries start their states from Python literals (weakly typed) and return strongly typed ones.
  """

  def leaf(x: Any) -> Array:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    return jnp.asarray(x, dtype=jnp.result_type(x))

  return jax.tree.map(leaf, tree)


def allow_rank_promotion(method: Callable[..., Any]) -> Callable[..., Any]:
  """Decorate a method that runs a library's code, which may not pass our stricter checks."""

  @functools.wraps(method)
  def lenient(*args: Any) -> Any:
    with jax.numpy_rank_promotion('allow'):
      return method(*args)

  return lenient


def to_space(space: gymnasium.Space, observation: Any) -> Any:
  """Cast `observation` to the types of `space`.

  Raises:
    ValueError: if a shape is not as declared.
  """

  def typed(space: gymnasium.Space, x: Any) -> Array:
    if jnp.shape(x) != space.shape:
      raise ValueError(f'observation of shape {jnp.shape(x)}, declared {space.shape}')
    return jnp.asarray(x, space.dtype)

  return map_leaves(typed, space, observation)


def box(low: Any, high: Any, shape: tuple[int, ...], dtype: Any) -> gymnasium.spaces.Box:
  """Return a Box from bounds that broadcast. The largest floats of a type mean no bound."""
  dtype = np.dtype(dtype)
  if dtype == np.bool_:
    low, high = False, True
  low, high = np.asarray(low), np.asarray(high)
  if np.issubdtype(dtype, np.floating):
    huge = np.finfo(np.float32).max
    low, high = low.astype(np.float64), high.astype(np.float64)
    low = np.where(low <= -huge, -np.inf, low)
    high = np.where(high >= huge, np.inf, high)
  return gymnasium.spaces.Box(
    np.broadcast_to(low, shape).astype(dtype),
    np.broadcast_to(high, shape).astype(dtype),
    shape,
    dtype.type,
  )


def discrete(n: int) -> gymnasium.spaces.Discrete:
  """Return a Discrete of n choices in int32, since jax has no int64 by default."""
  return gymnasium.spaces.Discrete(int(n), dtype=np.int32)


class LimitedState(NamedTuple):
  """State of a TimeLimit."""

  inner: Any
  time: Array  # [] i32 steps since the episode began


@dataclasses.dataclass(frozen=True)
class TimeLimit(DynamicsWrapper):
  """Dynamics that truncate an episode after `steps` steps."""

  steps: int

  def __post_init__(self) -> None:
    if self.steps < 1:
      raise UnknownName(f'an episode has at least 1 step, not {self.steps}')

  def reset(self, key: Array) -> tuple[LimitedState, TimeStep]:
    """Begin an episode."""
    inner, timestep = self.dynamics.reset(key)
    return LimitedState(inner, jnp.int32(0)), timestep

  def step(self, state: LimitedState, action: Any, key: Array) -> tuple[LimitedState, TimeStep]:
    """Take one action."""
    inner, timestep = self.dynamics.step(state.inner, action, key)
    time = state.time + 1
    step_type = jnp.where(time >= self.steps, jnp.int8(LAST), timestep.step_type)
    return LimitedState(inner, time), timestep._replace(step_type=step_type)

  @property
  def longest_episode(self) -> int:
    """Steps of the longest episode."""
    return self.steps

  def infos(self, state: LimitedState) -> dict[str, Array]:
    """Return numbers to log about the episode that ends in `state`."""
    return super().infos(state.inner)
