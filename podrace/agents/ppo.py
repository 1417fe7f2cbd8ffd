"""PPO: proximal policy optimisation, clipped (Schulman et al. 2017, arXiv 1707.06347).

Against the usual code:

- Values of the whole trajectory are computed once when learning, not while acting.
- Advantages are normalized over the whole batch of all devices, once per update.
- Each minibatch takes its own random steps of *every* environment (`minibatch.indices`).

Against the paper:

- 4 epochs of 4 minibatches (there 3 on Atari, 10 on MuJoCo).
- The clip of 0.2 is the paper's for MuJoCo and is not annealed (on Atari 0.1, annealed to 0).
- The gradient's norm is clipped, advantages are normalized, and the value's cost is 0.5, as in
  OpenAI's code.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import distributions, returns
from podrace.agents import metagradient, minibatch, policy_gradient
from podrace.agents.popart import PopArt, Units, shrink, to_raw, to_units, with_popart
from podrace.agents.value_moments import value_moments
from podrace.fields import check_fields, no_limit
from podrace.learner import Learned, adam, clip_norm, flatten, means
from podrace.networks import ActorCritic
from podrace.topology import AXIS
from podrace.types import Array, Metrics, Sample, TimeStep, TrainState, Trajectory


class PPOBatch(NamedTuple):
  """The data of the epochs, [T, B] each (or a minibatch of it)."""

  timesteps: TimeStep  # [T, B, ...] without the last
  extras: policy_gradient.PolicyExtras
  value: Array  # before this update, in units as the target
  advantage: Array  # normalized
  target: Array  # in units of PopArt; raw without it
  mask: Array


@metagradient.self_tuned
@with_popart
@dataclasses.dataclass(frozen=True)
class PPO:
  """Hyper-parameters, and the four functions of an `Agent`."""

  network: ActorCritic = ActorCritic(shared=False)
  learning_rate: float = 2.5e-4  # learning rate of the optimiser
  anneal_learning_rate: bool = True  # lower the learning rate linearly to 0 over the run
  adam_epsilon: float = 1e-5  # epsilon of Adam, added to the size of gradients
  max_grad_norm: float = 0.5  # largest norm of the gradient; 0: no limit
  epochs: int = 4  # passes over each trajectory
  minibatches: int = 4  # gradient steps of each epoch
  discount: float = 0.99  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.95
  # ^ lambda of the generalised advantage estimates (GAE)
  clip: float = 0.2  # largest change of the probability ratio to the acting policy; 0: not clipped
  clip_value: float = 0.0  # largest change of a value in an update; 0: not clipped
  value_cost: float = 0.5  # weight of the value's loss
  entropy_cost: float = 0.01  # weight of the policy's entropy; higher explores more
  normalize_advantages: bool = True  # standardise advantages over the batch of all devices
  normalize_observations: bool = False
  # ^ subtract the running mean of observations, divide by their deviation
  normalize_rewards: bool = False  # divide rewards by the running deviation of returns
  normalize_values: bool = False  # learn values in units of their targets' deviation (PopArt)
  popart: PopArt = PopArt()
  self_tuning: bool = False  # learn the settings of tuning.fields during the run
  tuning: metagradient.Tuning = metagradient.Tuning(
    fields=('discount', 'lambda', 'value_cost', 'entropy_cost')
  )
  greedy: bool = False  # act by the mode of the policy, for evaluation
  total_updates: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner

  def __post_init__(self) -> None:
    check_fields(self)

  gradient_steps = property(minibatch.gradient_steps)
  minibatch_indices = minibatch.indices
  init = policy_gradient.init
  initial_state = policy_gradient.initial_state
  act = policy_gradient.act

  def learn(
    self, train: TrainState, sample: Sample, key: Array, units: Units | None = None
  ) -> Learned:
    """Make all epochs of gradient steps on one trajectory."""
    params, trajectory = train.params, sample.trajectory
    batch = self.batch(params, trajectory, units)
    moments = policy_gradient.new_moments(params, trajectory)

    def loss(network: Any, part: PPOBatch, state: Any, key: Array) -> tuple[Array, Any]:
      current = params._replace(network=network)
      total, metrics = self.loss(current, state, part, key)
      return total, (metrics, moments)

    network, opt_state, metrics, joined = minibatch.descend(
      self, loss, (params.network, train.rest), batch, trajectory.agent_state.core, trajectory, key
    )
    params = policy_gradient.merge_moments(params, joined, lax.axis_size(AXIS))
    train = TrainState(params._replace(network=network), opt_state)
    return train, jnp.ones_like(sample.weight), metrics

  def batch(
    self,
    params: policy_gradient.PolicyParams,
    trajectory: Trajectory,
    units: Units | None = None,
  ) -> PPOBatch:
    """Return advantages and value targets by the parameters before the update."""
    timesteps = policy_gradient.observe(params, trajectory.timesteps)
    output, _ = self.network.unroll(params.network, trajectory.agent_state.core, timesteps)
    value = to_raw(output.value, units)
    v_tm1, v_t = value[:-1], value[1:]
    step = policy_gradient.transitions(trajectory, params, self.discount, self.lambda_)
    gae = jax.vmap(returns.gae, in_axes=1, out_axes=1)
    advantage = gae(step.reward_t, step.discount_t, step.lambda_t, v_tm1, v_t)
    target = to_units(advantage + v_tm1, units)
    advantage = shrink(advantage, units)
    if self.normalize_advantages:
      advantage = standardize(advantage, step.mask)
    return PPOBatch(
      timesteps=jax.tree.map(lambda x: x[:-1], timesteps),
      extras=trajectory.outputs.extras._replace(discounted_return=()),
      value=output.value[:-1],
      advantage=advantage,
      target=target,
      mask=step.mask,
    )

  def loss(
    self, params: policy_gradient.PolicyParams, state: Any, batch: PPOBatch, key: Array
  ) -> tuple[Array, Metrics]:
    """Return the loss and metrics: equation 9 of the paper, negated.

    The loss is a mean over the minibatch, in which masked steps count as 0. `batch` is [T, B], and
    `state` is the recurrent state before its first step.
    """
    policy = self.network.distribution
    output, _ = self.network.unroll(params.network, state, batch.timesteps)
    log_ratio = policy.log_prob(output.policy, batch.extras.sample) - batch.extras.log_prob
    ratio = jnp.exp(log_ratio)
    clip, clip_value = no_limit(self.clip), no_limit(self.clip_value)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    surrogate = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    value_error = jnp.square(output.value - batch.target)
    if clip_value < math.inf:
      change = jnp.clip(output.value - batch.value, -clip_value, clip_value)
      value_error = jnp.maximum(value_error, jnp.square(batch.value + change - batch.target))
    mean = means(
      surrogate=batch.mask * surrogate,
      value_error=batch.mask * value_error,
      entropy=batch.mask * policy.entropy(output.policy, key),
      approx_kl=batch.mask * (ratio - 1 - log_ratio),
      clip_fraction=batch.mask * (jnp.abs(ratio - 1) > clip),
      **value_moments(batch.target, batch.value, batch.mask),
    )
    mean |= distributions.saturation(policy, policy.to_action(batch.extras.sample))
    policy_loss, value_loss = -mean.pop('surrogate'), 0.5 * mean.pop('value_error')
    total = policy_loss + self.value_cost * value_loss - self.entropy_cost * mean['entropy']
    return total, dict(loss=total, policy_loss=policy_loss, value_loss=value_loss, **mean)

  def outer_loss(
    self, params: policy_gradient.PolicyParams, trajectory: Trajectory, key: Array
  ) -> tuple[Array, Metrics]:
    """Return the loss of the whole batch for self-tuning.

    Advantages and targets are by these parameters.
    """
    batch = lax.stop_gradient(self.batch(params, trajectory))
    return self.loss(params, trajectory.agent_state.core, batch, key)

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rate = minibatch.learning_rate(self)
    return flatten(
      optax.chain(
        clip_norm(self.max_grad_norm, differentiable=self.self_tuning),
        adam(rate, self.adam_epsilon, differentiable=self.self_tuning),
      )
    )


def standardize(advantage: Array, mask: Array) -> Array:
  """Standardize advantages to mean 0 and variance 1 over the valid steps of all devices.

  The variance is each device's, around its own mean, plus that of the means (Chan et al. 1979). A
  difference of squares would be rounding only if the mean is a thousand times the deviation.
  """
  count = jnp.sum(mask)
  own_mean = jnp.sum(mask * advantage) / jnp.maximum(count, 1)
  own_squares = jnp.sum(mask * jnp.square(advantage - own_mean))
  sums = jnp.stack([count, count * own_mean, own_squares, count * own_mean**2])
  count, total, squares, of_means = lax.psum(sums, AXIS)
  mean, of_means = total / jnp.maximum(count, 1), of_means / jnp.maximum(count, 1)
  between = of_means - mean**2
  between = jnp.where(between > 1e-6 * of_means, between, 0.0)  # else it is rounding
  variance = squares / jnp.maximum(count, 1) + between
  return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)
