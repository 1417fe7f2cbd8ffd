"""Epochs of minibatches over one trajectory, for agents that make several gradient steps of it.

PPO and PQN share this. Each minibatch takes its own random steps of *every* environment. That needs
no sort, and an update is the same on any number of devices, except for random numbers that the loss
draws. With a recurrent network a minibatch has whole unrolls, which each device draws among its
own: there an update depends on the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from podrace.agents import policy_gradient
from podrace.learner import as_vector, sgd
from podrace.networks import Network, merge_time
from podrace.topology import AXIS
from podrace.types import Array, Metrics, Trajectory


class _EpochsAgent(Protocol):
  """An agent with the functions of this module."""

  @property
  def network(self) -> Network: ...
  @property
  def learning_rate(self) -> float: ...
  @property
  def anneal_learning_rate(self) -> bool: ...
  @property
  def epochs(self) -> int: ...
  @property
  def minibatches(self) -> int: ...
  @property
  def total_updates(self) -> int: ...
  def optimiser(self) -> optax.GradientTransformation: ...


def descend(
  agent: _EpochsAgent,
  loss: Callable[[Any, Any, Any, Array], tuple[Array, tuple[Metrics, Any]]],
  start: tuple[Any, Any],
  batch: Any,
  core: Any,
  trajectory: Trajectory,
  key: Array,
) -> tuple[Any, Any, Metrics, Any]:
  """Make all epochs of gradient steps on one trajectory.

  Args:
    agent: the number of epochs and minibatches, and the optimiser.
    loss: (network, minibatch, state, key) -> (loss, (metrics, tree of floats)), a device's means.
    start: the parameters, and the optimiser's state.
    batch: the data, [T, B, ...]. Of a recurrent agent the first axis may have any length.
    core: the recurrent state [B, ...] before the first step.
    trajectory: has the sizes and the ids of environments.
    key: of the permutations and the loss.

  Returns:
    The new parameters, the optimiser's state, the mean metrics, and the last of the trees.
  """
  shuffle_key, loss_key = jax.random.split(key)
  loss_key = jax.random.fold_in(loss_key, lax.axis_index(AXIS))  # other noise on each device
  index_rows = indices(agent, shuffle_key, trajectory)
  length = trajectory.timesteps.reward.shape[0] - 1 if is_recurrent(agent) else 1
  begin, to_tree = as_vector(start[0])
  to_metrics: Any = None

  def minibatch_step(carry: Any, index_and_key: Any) -> Any:
    nonlocal to_metrics
    (network, opt_state), (index, loss_key) = carry, index_and_key

    def of_minibatch(network: Any, index: Array) -> tuple[Array, Any]:
      minibatch, state = take(agent, batch, core, index)
      own_key = jax.random.fold_in(loss_key, index[0])  # and in each chunk
      return loss(to_tree(network), minibatch, state, own_key)

    chunks = policy_gradient.chunks(agent.network, index, length)
    network, opt_state, (metrics, kept) = sgd(
      of_minibatch, agent.optimiser(), network, opt_state, chunks
    )
    row, to_metrics = ravel_pytree(metrics)  # one array to write, not one for each metric
    return (network, opt_state), (row, kept)

  steps = index_rows, jax.random.split(loss_key, len(index_rows))
  (network, opt_state), (rows, kept) = lax.scan(minibatch_step, (begin, start[1]), steps)
  kept = jax.tree.map(lambda x: x[-1], kept)
  return to_tree(network), opt_state, to_metrics(jnp.mean(rows, 0)), kept


def indices(agent: _EpochsAgent, key: Array, trajectory: Trajectory) -> Array:
  """Return the part of the batch of each gradient step, [epochs * minibatches, size] i32.

  Feed-forward: indices into the merged [T*B]. In every epoch each environment's steps are
  permuted by t -> a*t + b (mod T), with `a` (prime to T) and `b` drawn from the key for each
  epoch and environment, and minibatch i takes the i-th part of every environment's. That is a
  sample without replacement, stratified over environments.
  Recurrent: indices into [B], whole unrolls, permuted in the same manner.
  """
  length, envs = trajectory.timesteps.reward.shape
  time = length - 1
  keys = jax.random.split(key, agent.epochs)
  if is_recurrent(agent):
    require_divisible(envs, agent.minibatches, 'environments on a device')
    columns = jax.vmap(lambda k: permutation(k, envs))(keys)
    return columns.reshape(agent.epochs * agent.minibatches, -1)
  require_divisible(time, agent.minibatches, 'steps of an unroll')

  def one(key: Array, env_id: Array) -> Array:
    return permutation(jax.random.fold_in(key, env_id), time)

  steps = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(keys, trajectory.env_id)  # [epochs, B, T]
  index = steps * envs + jnp.arange(envs)[None, :, None]
  index = index.reshape(agent.epochs, envs, agent.minibatches, -1)
  return index.swapaxes(1, 2).reshape(agent.epochs * agent.minibatches, -1)


def take(agent: _EpochsAgent, batch: Any, core: Any, index: Array) -> tuple[Any, Any]:
  """Return the minibatch at `index`, and the recurrent state before it."""
  if is_recurrent(agent):
    return jax.tree.map(lambda x: x[:, index], batch), jax.tree.map(lambda x: x[index], core)
  return jax.tree.map(lambda x: x[index][None], merge_time(batch)), ()


def is_recurrent(agent: _EpochsAgent) -> bool:
  """Return whether the network has a recurrent state."""
  return bool(jax.tree.leaves(agent.network.initial_state(1)))


def gradient_steps(agent: _EpochsAgent) -> int:
  """Return the gradient steps of one update."""
  return agent.epochs * agent.minibatches


def learning_rate(agent: _EpochsAgent) -> Any:
  """Return the learning rate, or its schedule: linear to 0 over the run."""
  if not agent.anneal_learning_rate:
    return agent.learning_rate
  steps = float(agent.total_updates) * agent.epochs * agent.minibatches  # beyond 32 bits, maybe
  return optax.linear_schedule(agent.learning_rate, 0.0, steps)


def permutation(key: Array, n: int) -> Array:
  """Return a random affine permutation of range(n), [n] i32: t -> a*t + b (mod n), a prime to n."""
  if n > 2**16:
    raise ValueError(
      f'{n} items to permute, expected at most {2**16}, beyond which products overflow: give a '
      'smaller --unroll-length, or with a core a smaller --num-envs'
    )
  units = jnp.asarray([a for a in range(1, max(n, 2)) if math.gcd(a, n) == 1], jnp.uint32)
  a, b = jax.random.bits(key, (2,))
  t = jnp.arange(n, dtype=jnp.uint32)
  return ((units[a % len(units)] * t % n + b % n) % n).astype(jnp.int32)


def require_divisible(size: int, parts: int, what: str) -> None:
  """Raise ValueError with the numbers if `size` does not divide into `parts`."""
  if size % parts:
    raise ValueError(
      f'{size} {what} do not divide into {parts} minibatches: change --agent.minibatches, '
      '--num-envs or --unroll-length'
    )
