"""PPO: proximal policy optimisation, clipped (Schulman et al. 2017, arXiv 1707.06347).

Against the usual code:

- Values of the whole trajectory are computed once when learning, not while acting.
- Advantages are normalized over the whole batch of all devices, once per update.
- Each minibatch takes its own random steps of *every* environment (see `minibatch_indices`). That
  needs no sort, and an update is the same on any number of devices, except for random numbers that
  the loss draws.

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
from jax.flatten_util import ravel_pytree

from podrace import distributions, returns
from podrace.agents import metagradient, policy_gradient
from podrace.agents.popart import PopArt, Units, shrink, to_raw, to_units, with_popart
from podrace.agents.value_moments import value_moments
from podrace.fields import check_fields, no_limit
from podrace.learner import Learned, adam, as_vector, clip_norm, flatten, means, sgd
from podrace.networks import ActorCritic, merge_time
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

  @property
  def gradient_steps(self) -> int:
    """Gradient steps of one update."""
    return self.epochs * self.minibatches

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
    shuffle_key, loss_key = jax.random.split(key)
    loss_key = jax.random.fold_in(loss_key, lax.axis_index(AXIS))  # other noise on each device
    core = trajectory.agent_state.core
    indices = self.minibatch_indices(shuffle_key, trajectory)
    length = trajectory.outputs.extras.log_prob.shape[0] if self.recurrent else 1
    begin, to_tree = as_vector(params.network)
    to_metrics: Any = None

    def minibatch_step(carry: Any, index_and_key: Any) -> Any:
      nonlocal to_metrics
      network, opt_state = carry
      index, loss_key = index_and_key

      def loss(network: Any, index: Array) -> tuple[Array, Any]:
        minibatch, state = self.take(batch, core, index)
        own_key = jax.random.fold_in(loss_key, index[0])  # and in each chunk
        current = params._replace(network=to_tree(network))
        total, metrics = self.loss(current, state, minibatch, own_key)
        return total, (metrics, moments)

      network, opt_state, (metrics, joined) = sgd(
        loss,
        self.optimiser(),
        network,
        opt_state,
        policy_gradient.chunks(self.network, index, length),
      )
      row, to_metrics = ravel_pytree(metrics)  # one array to write, not one for each metric
      return (network, opt_state), (row, joined)

    (network, opt_state), (rows, joined) = lax.scan(
      minibatch_step,
      (begin, train.rest),
      (indices, jax.random.split(loss_key, len(indices))),
    )
    joined = jax.tree.map(lambda x: x[-1], joined)  # the same in every step
    params = policy_gradient.merge_moments(params, joined, lax.axis_size(AXIS))
    train = TrainState(params._replace(network=to_tree(network)), opt_state)
    return train, jnp.ones_like(sample.weight), to_metrics(jnp.mean(rows, 0))

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

  def minibatch_indices(self, key: Array, trajectory: Trajectory) -> Array:
    """Which part of the batch each gradient step takes, [epochs * minibatches, size] i32.

    Feed-forward: indices into the merged [T*B]. In every epoch each environment's steps are
    permuted by t -> a*t + b (mod T), with `a` (prime to T) and `b` drawn from the key for each
    epoch and environment, and minibatch i takes the i-th part of every environment's. That is a
    sample without replacement, stratified over environments.
    Recurrent: indices into [B], whole unrolls, permuted in the same manner.
    """
    time, envs = trajectory.outputs.extras.log_prob.shape
    keys = jax.random.split(key, self.epochs)
    if self.recurrent:
      require_divisible(envs, self.minibatches, 'environments on a device')
      columns = jax.vmap(lambda k: permutation(k, envs))(keys)
      return columns.reshape(self.epochs * self.minibatches, -1)
    require_divisible(time, self.minibatches, 'steps of an unroll')

    def one(key: Array, env_id: Array) -> Array:
      return permutation(jax.random.fold_in(key, env_id), time)

    steps = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(keys, trajectory.env_id)  # [epochs, B, T]
    index = steps * envs + jnp.arange(envs)[None, :, None]
    index = index.reshape(self.epochs, envs, self.minibatches, -1)
    return index.swapaxes(1, 2).reshape(self.epochs * self.minibatches, -1)

  def take(self, batch: PPOBatch, core: Any, index: Array) -> tuple[PPOBatch, Any]:
    """Return the minibatch at `index`, and the recurrent state before it."""
    if self.recurrent:
      return jax.tree.map(lambda x: x[:, index], batch), jax.tree.map(lambda x: x[index], core)
    return jax.tree.map(lambda x: x[index][None], merge_time(batch)), ()

  @property
  def recurrent(self) -> bool:
    """Whether the network has a recurrent state."""
    return bool(jax.tree.leaves(self.network.initial_state(1)))

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rate: Any = self.learning_rate
    if self.anneal_learning_rate:
      steps = float(self.total_updates) * self.epochs * self.minibatches  # beyond 32 bits, maybe
      rate = optax.linear_schedule(self.learning_rate, 0.0, steps)
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


def permutation(key: Array, n: int) -> Array:
  """Return a random affine permutation of range(n), [n] i32: t -> a*t + b (mod n), a prime to n."""
  if n > 2**16:
    raise ValueError(f'{n} items to permute: the products overflow past {2**16}')
  units = jnp.asarray([a for a in range(1, max(n, 2)) if math.gcd(a, n) == 1], jnp.uint32)
  a, b = jax.random.bits(key, (2,))
  t = jnp.arange(n, dtype=jnp.uint32)
  return ((units[a % len(units)] * t % n + b % n) % n).astype(jnp.int32)


def require_divisible(size: int, parts: int, what: str) -> None:
  """Raise ValueError with the numbers if `size` does not divide into `parts`."""
  if size % parts:
    raise ValueError(f'{size} {what} do not divide into {parts} minibatches')
