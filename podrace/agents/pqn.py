"""PQN: Q-learning without replay and target network (Gallici et al. 2024, arXiv 2407.04811).

Networks with LayerNorm, many environments, and targets by Peng's Q(lambda) from the newest
trajectory: traces are not cut where an action explored. Targets are made once, of the values that
acting computed. Epochs of minibatches follow. All environments share one epsilon.

With a recurrent network, targets are made inside the loss, by the present parameters. A minibatch
then has whole unrolls of a part of the environments, from the state of acting before them. The
authors also unroll a memory window of earlier steps first. Here the unroll is the window, so
memory is trained over `--unroll-length` steps.

Against the released code (mttga/purejaxql):

- A time limit bootstraps. There it counts as a termination.
- No normalization of inputs, and no scale of rewards.
- Recurrent: the last action is no input.
- Defaults: lambda, epochs, minibatches and the share of epsilon are as in its CartPole. There the
  rate is 1e-4, the last epsilon 0.2, and the network 2 x 256.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.agents import minibatch, value_based
from podrace.fields import check_fields
from podrace.learner import Learned, clip_norm, flatten
from podrace.networks import QNetwork
from podrace.types import ActorOutput, Array, Metrics, Sample, TimeStep, TrainState, Trajectory


class PQNParams(NamedTuple):
  """Everything that acting needs."""

  network: Any
  epsilon: Array  # [] f32, how often an action is random


class PQNRest(NamedTuple):
  """Learned state besides the parameters."""

  opt_state: Any
  updates: Array  # [] i32 updates so far


class PQNBatch(NamedTuple):
  """The data of the epochs, [T, B] each (or a minibatch of it)."""

  timesteps: TimeStep  # [T, B, ...]; [T+1, B, ...] of a recurrent network
  action: Array
  target: Any  # f32; () of a recurrent network, which makes them in the loss
  mask: Array  # f32, 0 for LAST -> FIRST, which is no transition of any episode


@dataclasses.dataclass(frozen=True)
class PQN:
  """Hyper-parameters, and the four functions of an `Agent`."""

  network: QNetwork = QNetwork(hidden=(128, 128), layer_norm=True)
  learning_rate: float = 2.5e-4  # learning rate of the optimiser
  anneal_learning_rate: bool = True  # lower the learning rate linearly to 0 over the run
  max_grad_norm: float = 10.0  # largest norm of the gradient; 0: no limit
  epochs: int = 4  # passes over each trajectory
  minibatches: int = 16  # gradient steps of each epoch
  discount: float = 0.99  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.95
  # ^ mix of n-step targets, as in TD(lambda)
  epsilon_start: float = 1.0  # share of random actions at the beginning
  epsilon: float = 0.05  # final share of random actions
  epsilon_share: float = 0.2  # share of the run in which epsilon falls linearly
  greedy: bool = False  # act without random actions, for evaluation
  total_updates: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner

  def __post_init__(self) -> None:
    check_fields(self)
    if self.network.head != 'value' or self.network.noisy:
      raise ValueError('pqn learns values: its network has the head value and no noise')
    if self.network.previous_action:
      raise ValueError('pqn gives its network no previous action: leave previous_action off')

  gradient_steps = property(minibatch.gradient_steps)

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    rest = PQNRest(self.optimiser().init(network), jnp.int32(0))
    return TrainState(PQNParams(network, self.epsilon_after(jnp.int32(0))), rest)

  def warm_start(self, train: TrainState, params: PQNParams) -> TrainState:
    """Start from the parameters of another run, but explore from the beginning."""
    return train._replace(params=train.params._replace(network=params.network))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.network.initial_state(env_id.shape[0])

  def act(
    self, params: PQNParams, state: Any, timestep: TimeStep, key: Array
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    q, state = self.network.step(params.network, state, timestep)
    values = self.network.mean(q)
    epsilon = jnp.broadcast_to(0.0 if self.greedy else params.epsilon, values.shape[:1])
    action = value_based.epsilon_greedy(values, epsilon, key)
    return ActorOutput(action, jnp.max(values, axis=-1)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make all epochs of gradient steps on one trajectory."""
    trajectory, rest = sample.trajectory, train.rest

    def loss(network: Any, part: PQNBatch, state: Any, key: Array) -> tuple[Array, Any]:
      del key
      total, metrics = self.loss(network, state, part)
      return total, (metrics, ())

    network, opt_state, metrics, _ = minibatch.descend(
      self, loss, (train.params.network, rest.opt_state), self.batch(train.params, trajectory),
      trajectory.agent_state, trajectory, key,
    )  # fmt: skip
    updates = rest.updates + 1
    params = PQNParams(network, self.epsilon_after(updates))
    metrics |= dict(epsilon=params.epsilon)
    return TrainState(params, PQNRest(opt_state, updates)), jnp.ones_like(sample.weight), metrics

  def batch(self, params: PQNParams, trajectory: Trajectory) -> PQNBatch:
    """Return the data of the epochs; feed-forward, with targets by the values of acting."""
    timesteps: Any = trajectory.timesteps
    target: Any = ()
    mask = 1.0 - timesteps.last[:-1].astype(jnp.float32)
    if not minibatch.is_recurrent(self):
      end = jax.tree.map(lambda x: x[-1], timesteps)  # which the next unroll acts on
      q, _ = self.network.step(params.network, (), end)
      best_end = jnp.max(self.network.mean(q), axis=-1)
      best_t = jnp.concatenate([trajectory.outputs.extras[1:], best_end[None]])
      target = self.targets(timesteps, best_t)
      timesteps = jax.tree.map(lambda x: x[:-1], timesteps)
    return PQNBatch(timesteps, trajectory.outputs.action, target, mask)

  def targets(self, timesteps: TimeStep, best_t: Array) -> Array:
    """Return Peng's Q(lambda) of timesteps[:-1], [T, B].

    `best_t` [T, B] are the largest values at timesteps[1:].
    """
    after = jax.tree.map(lambda x: x[1:], timesteps)
    one = jax.vmap(returns.lambda_returns, in_axes=1, out_axes=1)
    lambda_t = jnp.where(after.last, 0.0, self.lambda_)
    return one(after.reward, self.discount * after.discount, lambda_t, best_t)

  def loss(self, network: Any, state: Any, batch: PQNBatch) -> tuple[Array, Metrics]:
    """Return the loss and metrics: a mean over the minibatch, in which masked steps count as 0.

    `state` is the recurrent state before the first timestep.
    """
    q, _ = self.network.unroll(network, state, batch.timesteps)
    values, target = self.network.mean(q), batch.target
    if minibatch.is_recurrent(self):
      best_t = lax.stop_gradient(jnp.max(values[1:], axis=-1))
      values, target = values[:-1], self.targets(batch.timesteps, best_t)
    taken = value_based.select_action(values, batch.action)
    total = jnp.mean(batch.mask * 0.5 * jnp.square(target - taken))
    return total, dict(loss=total, value=jnp.mean(batch.mask * taken))

  def epsilon_after(self, updates: Array) -> Array:
    """Return the share of random actions [] f32 after `updates` updates."""
    steps = jnp.maximum(self.epsilon_share * jnp.float32(self.total_updates), 1.0)
    passed = jnp.minimum(updates / steps, 1.0)
    return jnp.float32(self.epsilon_start + passed * (self.epsilon - self.epsilon_start))

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    step = optax.radam(minibatch.learning_rate(self))
    return flatten(optax.chain(clip_norm(self.max_grad_norm), step))
