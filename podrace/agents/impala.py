"""IMPALA: a V-trace actor-critic (Espeholt et al. 2018, arXiv 1802.01561).

One gradient per trajectory. Against the paper:

- The loss is a mean over the batch instead of a sum, so the learning rate does not depend on its
  size.
- Adam is the default, RMSProp an option.
- The learning rate is constant unless `anneal_learning_rate` is set. The paper anneals it to 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import distributions, returns
from podrace.agents import metagradient, policy_gradient
from podrace.agents.popart import PopArt, Units, shrink, to_raw, to_units, with_popart
from podrace.agents.value_moments import value_moments
from podrace.fields import check_fields, no_limit
from podrace.learner import Learned, adam, clip_norm, flatten, means, sgd
from podrace.networks import ActorCritic
from podrace.topology import AXIS
from podrace.types import Array, Metrics, Sample, TrainState, Trajectory, take_batch


@metagradient.self_tuned
@with_popart
@dataclasses.dataclass(frozen=True)
class Impala:
  """Hyper-parameters, and the four functions of an `Agent`."""

  network: ActorCritic = ActorCritic(initializer='lecun', activation='relu')
  learning_rate: float = 6e-4  # learning rate of the optimiser
  anneal_learning_rate: bool = False  # lower the learning rate linearly to 0 over the run
  optimizer: Literal['adam', 'rmsprop'] = 'adam'  # the optimiser
  epsilon: float = 1e-5  # epsilon of the optimiser, which divides by it and the size of gradients
  rmsprop_decay: float = 0.99  # decay of the mean square gradient of rmsprop
  max_grad_norm: float = 40.0  # largest norm of the gradient; 0: no limit
  discount: float = 0.99  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 1.0
  # ^ mix of n-step targets, as in TD(lambda)
  clip_rho: float = 1.0  # largest importance weight in the value targets; 0: not clipped
  clip_pg_rho: float = 1.0  # largest importance weight in the policy gradient; 0: not clipped
  clip_mix: float = 1.0
  # ^ share of the clipped weight in each importance weight; less than 1: leaky V-trace
  policy_cost: float = 1.0  # weight of the policy's loss
  value_cost: float = 0.5  # weight of the value's loss
  entropy_cost: float = 0.01  # weight of the policy's entropy; higher explores more
  normalize_observations: bool = False
  # ^ subtract the running mean of observations, divide by their deviation
  normalize_rewards: bool = False  # divide rewards by the running deviation of returns
  normalize_values: bool = False  # learn values in units of their targets' deviation (PopArt)
  popart: PopArt = PopArt()
  self_tuning: bool = False  # learn the settings of tuning.fields during the run
  tuning: metagradient.Tuning = metagradient.Tuning(
    fields=('discount', 'lambda', 'clip_mix', 'policy_cost', 'value_cost', 'entropy_cost')
  )
  greedy: bool = False  # act by the mode of the policy, for evaluation
  total_updates: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner

  def __post_init__(self) -> None:
    check_fields(self)

  init = policy_gradient.init
  initial_state = policy_gradient.initial_state
  act = policy_gradient.act

  def learn(
    self, train: TrainState, sample: Sample, key: Array, units: Units | None = None
  ) -> Learned:
    """Make one gradient step."""
    params, trajectory = train.params, sample.trajectory

    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other noise on each device
    moments = policy_gradient.new_moments(params, trajectory)
    length, streams = trajectory.outputs.extras.log_prob.shape

    def loss(network: Any, index: Array) -> tuple[Array, Any]:
      part = trajectory if index.shape[0] == streams else take_batch(trajectory, index)
      part_key = jax.random.fold_in(own_key, index[0])  # and in each chunk
      total, metrics = self.loss(params._replace(network=network), part, part_key, units)
      return total, (metrics, moments)

    chunks = policy_gradient.chunks(self.network, jnp.arange(streams), length + 1)
    network, opt_state, (metrics, moments) = sgd(
      loss, self.optimiser(), params.network, train.rest, chunks
    )
    params = policy_gradient.merge_moments(params, moments, lax.axis_size(AXIS))
    train = TrainState(params._replace(network=network), opt_state)
    return train, jnp.ones_like(sample.weight), metrics

  def loss(
    self,
    params: policy_gradient.PolicyParams,
    trajectory: Trajectory,
    key: Array,
    units: Units | None = None,
  ) -> tuple[Array, Metrics]:
    """Return the loss and metrics: equation 1 and section 4.2 of the paper.

    The loss is a mean over [T, B]. Masked transitions count as 0. V-trace is in raw units.
    """
    policy, extras = self.network.distribution, trajectory.outputs.extras
    output, _ = self.network.unroll(
      params.network,
      trajectory.agent_state.core,
      policy_gradient.observe(params, trajectory.timesteps),
    )
    logits, value = output.policy[:-1], output.value[:-1]
    v_tm1, v_t = to_raw(value, units), to_raw(output.value[1:], units)
    log_prob = policy.log_prob(logits, extras.sample)
    step = policy_gradient.transitions(trajectory, params, self.discount, self.lambda_)
    one_stream = functools.partial(
      returns.vtrace,
      clip_rho=no_limit(self.clip_rho),
      clip_pg_rho=no_limit(self.clip_pg_rho),
      clip_mix=self.clip_mix,
    )
    vtrace = jax.vmap(one_stream, in_axes=1, out_axes=1)
    log_rho = log_prob - extras.log_prob
    rho_tm1 = jnp.exp(log_rho)
    # The targets are fixed for the network, but not for metaparameters.
    fixed = lax.stop_gradient((v_tm1, v_t, rho_tm1))
    estimate = vtrace(step.reward_t, step.discount_t, step.lambda_t, *fixed)
    target = to_units(estimate.target, units)
    mean = means(
      surrogate=step.mask * shrink(estimate.advantage, units) * log_prob,
      value_error=step.mask * jnp.square(target - value),
      entropy=step.mask * policy.entropy(logits, key),
      rho=step.mask * rho_tm1,
      approx_kl=step.mask * (rho_tm1 - 1 - log_rho),
      **value_moments(target, value, step.mask),
    )
    policy_loss, value_loss = -mean.pop('surrogate'), 0.5 * mean.pop('value_error')
    total = self.policy_cost * policy_loss + self.value_cost * value_loss
    total -= self.entropy_cost * mean['entropy']
    mean |= distributions.saturation(policy, trajectory.outputs.action)
    return total, dict(loss=total, policy_loss=policy_loss, value_loss=value_loss, **mean)

  outer_loss = loss  # for self-tuning: of all streams at once

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rate: Any = self.learning_rate
    if self.anneal_learning_rate:
      rate = optax.linear_schedule(self.learning_rate, 0.0, self.total_updates)
    if self.optimizer == 'rmsprop':
      step = optax.rmsprop(rate, decay=self.rmsprop_decay, eps=self.epsilon)
    else:
      step = adam(rate, self.epsilon, differentiable=self.self_tuning)
    return flatten(
      optax.chain(clip_norm(self.max_grad_norm, differentiable=self.self_tuning), step)
    )
