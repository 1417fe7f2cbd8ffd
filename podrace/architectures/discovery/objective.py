"""The objective of meta-training: an agent's return, by an actor-critic with its own values."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.fields import check_fields
from podrace.learner import scale_by_adam
from podrace.networks import ActorCritic
from podrace.types import Array, Trajectory


class ValueState(NamedTuple):
  """The state of one agent's value function."""

  params: Any
  opt_state: Any
  second: Array  # [] f32 the moving average of squared advantages
  start: Array  # [] f32 the weight of the initial 0 in that average


class Estimates(NamedTuple):
  """Estimates of a value function on a trajectory, [T, B] f32 each."""

  advantage: Array
  target: Array
  mask: Array  # 0 where the action was ignored


@dataclasses.dataclass(frozen=True)
class ValueFunction:
  """Values of an agent's states, which only meta-training uses.

  They are learned from unrolls of the newest policy. So the importance weights of DiscoRL's V-trace
  are 1, and left out. Advantages are divided by a moving average of their size, so that agents with
  large rewards do not count more (Oh et al. 2025, Nature). That average counts LAST -> FIRST as
  well, as in google-deepmind/disco_rl, but no loss does.
  """

  network: ActorCritic = ActorCritic(hidden=(256, 256), initializer='lecun', activation='relu')
  # ^ its policy is not used
  learning_rate: float = 1e-3  # learning rate of the value function
  adam_epsilon: float = 1e-8  # epsilon of Adam, added to the size of gradients
  discount: float = 0.99  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.96
  # ^ lambda of the generalised advantage estimates (GAE)
  decay: float = 0.99  # decay of the moving average that advantages are divided by

  def __post_init__(self) -> None:
    check_fields(self)
    if self.network.core != 'none':
      raise ValueError(f'the value function has no memory, not the core {self.network.core!r}')

  def bind(self, observation_space: Any, action_space: Any) -> ValueFunction:
    """Return this value function for these spaces."""
    return dataclasses.replace(self, network=self.network.bind(observation_space, action_space))

  def init(self, key: Array) -> ValueState:
    """Return the first state."""
    params = self.network.init(key)
    return ValueState(params, self.optimiser().init(params), jnp.float32(0), jnp.float32(1))

  def estimate(self, state: ValueState, unrolled: Trajectory) -> Estimates:
    """Return TD(lambda) estimates from these values, without a gradient."""
    t = unrolled.timesteps
    v = lax.stop_gradient(self.values(state.params, unrolled))
    discount = self.discount * t.discount[1:]
    lambda_ = jnp.where(t.last[1:], 0.0, self.lambda_)
    gae = jax.vmap(returns.gae, in_axes=1, out_axes=1)
    advantage = gae(t.reward[1:], discount, lambda_, v[:-1], v[1:])
    return Estimates(advantage, advantage + v[:-1], 1.0 - t.last[:-1])

  def values(self, params: Any, unrolled: Trajectory) -> Array:
    """Return the values [T+1, B] f32 of an unroll's states."""
    values: Array = self.network.unroll(params, (), unrolled.timesteps)[0].value
    return values

  def learn(self, state: ValueState, unrolled: Trajectory) -> ValueState:
    """Make one gradient step."""
    estimates = self.estimate(state, unrolled)

    def loss(params: Any) -> Array:
      error = self.values(params, unrolled)[:-1] - estimates.target
      return 0.5 * jnp.mean(estimates.mask * jnp.square(error))

    grads = jax.grad(loss)(state.params)
    updates, opt_state = self.optimiser().update(grads, state.opt_state, state.params)
    keep = self.decay
    second = keep * state.second + (1 - keep) * jnp.mean(jnp.square(estimates.advantage))
    params = optax.apply_updates(state.params, updates)
    return ValueState(params, opt_state, second, keep * state.start)

  def scale(self, state: ValueState, advantage: Array) -> Array:
    """Scale advantages [T, B] to a size of about 1."""
    second = state.second / jnp.maximum(1 - state.start, 1e-6)
    return advantage / (jnp.sqrt(second) + 1e-6)

  def optimiser(self) -> optax.GradientTransformation:
    """Return Adam with the settings of this value function."""
    rate = optax.scale_by_learning_rate(self.learning_rate)
    return optax.flatten(optax.chain(scale_by_adam(self.adam_epsilon), rate))
