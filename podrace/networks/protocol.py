"""The protocol of networks, and helpers for networks of your own."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podrace import distributions
from podrace.types import Array, TimeStep


class Network(Protocol):
  """Four pure functions over a plain pytree of arrays.

  `step` acts, on [B, ...]; `unroll` learns, on [T, B, ...], from the state before the first
  timestep. The state is reset where a timestep is FIRST, before that timestep is seen. For a
  network of your own, `unroll_merged` or `unroll_steps` may serve as `unroll`.
  """

  @property
  def distribution(self) -> distributions.Distribution:
    """The action distribution over the policy output; see `distributions.for_space`."""
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

  def step(self, params: Any, state: Any, timestep: TimeStep) -> tuple[Any, Any]:
    """Return the outputs for a timestep [B, ...], and the next state."""
    ...

  def unroll(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[Any, Any]:
    """Return outputs [T, B, ...] and the state after them."""
    ...


class PolicyValue(NamedTuple):
  """Outputs of an actor-critic network for each timestep."""

  policy: Array  # [..., P] f32 parameters of the action distribution
  value: Array  # [...] f32


def is_recurrent(network: Any) -> bool:
  """Return whether the network or model has a recurrent state."""
  return bool(jax.tree.leaves(jax.eval_shape(lambda: network.initial_state(1))))


def merge_time(tree: Any) -> Any:
  """[T, B, ...] -> [T*B, ...]."""
  return jax.tree.map(lambda x: x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])), tree)


def split_time(tree: Any, length: int) -> Any:
  """[T*B, ...] -> [T, B, ...]."""
  return jax.tree.map(lambda x: x.reshape((length, x.shape[0] // length, *x.shape[1:])), tree)


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
