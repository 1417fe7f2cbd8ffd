"""SAC: soft actor-critic with an automatic temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Two critics, of which the smaller counts; no value network. Actor, critics and temperature take one
gradient step together, so the actor's sees the critics of the step before.

Against the authors' code: the first steps are the new policy's, where theirs are uniformly random;
log sigma is kept within [-5, 2], where theirs goes down to -20; rewards are not scaled.

With a core in the actor or the critics it learns from sequences; see `podrace.agents.recurrent`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace import distributions
from podrace.agents import correlated_noise, recurrent
from podrace.agents.recurrent import Recurrence
from podrace.fields import check_fields
from podrace.learner import Learned, separately, sgd
from podrace.networks import Actor, Critic
from podrace.replay import Buffer
from podrace.topology import AXIS
from podrace.types import ActorOutput, Array, Sample, TimeStep, TrainState


class SACLearned(NamedTuple):
  """Everything that takes gradient steps."""

  actor: Any
  critic: Any
  log_alpha: Array  # [] f32 the temperature's


class SACRest(NamedTuple):
  """Learned state that is not sent to actors."""

  critic: Any
  log_alpha: Array
  target: Any  # parameters of the target critics
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class SAC:
  """Hyper-parameters, and the functions of an `Agent`."""

  actor: Actor = Actor()
  critic: Critic = Critic(critics=2)
  buffer: Buffer = Buffer(batch_size=256, samples_per_insert=256.0)
  actor_learning_rate: float = 3e-4  # learning rate of the policy
  critic_learning_rate: float = 3e-4  # learning rate of the critics
  temperature_learning_rate: float = 3e-4  # learning rate of the temperature
  initial_temperature: float = 1.0  # first temperature, the weight of the entropy
  learn_temperature: bool = True
  # ^ move the temperature so that the entropy approaches target_entropy
  target_entropy: float | None = None
  # ^ entropy that the temperature aims at; None: -1 for each free number of an action
  discount: float = 0.99  # discount of each step
  n_step: int = 1  # rewards before a value is bootstrapped from
  target_rate: float = 0.005  # share of the critics in each update of the target critics
  noise_correlation: float = 0.0
  # ^ correlation of the noise of successive steps, for far exploration; 0: independent
  greedy: bool = False  # act by the mode of the policy, for evaluation
  recurrence: Recurrence = Recurrence()

  def __post_init__(self) -> None:
    check_fields(self)
    recurrent.check_used(self.recurrence, self.actor, self.critic)

  is_recurrent = property(recurrent.is_recurrent)
  memory = recurrent.memory
  initial_state = correlated_noise.initial_state

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    actor_key, critic_key = jax.random.split(key)
    log_alpha = jnp.float32(math.log(self.initial_temperature))
    learned = SACLearned(self.actor.init(actor_key), self.critic.init(critic_key), log_alpha)
    opt_state = self.optimiser().init(learned)
    return TrainState(learned.actor, SACRest(learned.critic, log_alpha, learned.critic, opt_state))

  def act(
    self,
    params: Any,
    state: Any,
    timestep: TimeStep,
    key: Array,
    replace: Callable[[Array], Array] = lambda action: action,
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B], which `replace` may change."""
    memory, noise = correlated_noise.draw(self, state, timestep, key)
    policy = self.actor.distribution
    outputs, core = recurrent.step(self.actor, params, memory, timestep)
    x, log_std = policy.mean_and_log_std(outputs)
    if not self.greedy:
      x = x + jnp.exp(log_std) * policy.only_free(noise)
    action = replace(policy.to_action(x))
    memory = recurrent.after(memory, core, action)
    return ActorOutput(action), correlated_noise.after(state, memory, noise)

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    rest: SACRest = train.rest
    batch = recurrent.transitions(
      self.recurrence if self.is_recurrent else None, sample, self.discount, self.n_step
    )
    step = batch.step
    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other actions on each device
    target_key, actor_key = jax.random.split(own_key)
    target = self.target(train.params, rest, batch, target_key)
    taken = self.critic.distribution.to_unit(step.action)
    policy = self.actor.distribution

    def loss(learned: SACLearned) -> tuple[Array, Any]:
      seen = batch.seen(self.critic, learned.critic)
      q = self.critic.value(learned.critic, seen, taken)[..., 0]
      error = target[None] - q
      critic_loss = 0.5 * batch.mean(jnp.square(error), batch.weight) * q.shape[0]
      action, log_prob = self.draw(batch.outputs(self.actor, learned.actor), actor_key)
      fixed, seen = lax.stop_gradient((learned.critic, seen))
      alpha = jnp.exp(lax.stop_gradient(learned.log_alpha))
      value = jnp.min(self.critic.value(fixed, seen, action)[..., 0], axis=0)
      actor_loss = batch.mean(alpha * log_prob - value)
      surplus = lax.stop_gradient(-log_prob) - self.entropy_goal
      alpha_loss = jnp.exp(learned.log_alpha) * batch.mean(surplus)
      total = critic_loss + actor_loss + (alpha_loss if self.learn_temperature else 0.0)
      metrics = dict(
        loss=critic_loss,
        actor_loss=actor_loss,
        value=batch.mean_of_valid(value),
        entropy=-batch.mean_of_valid(log_prob),
        temperature=alpha,
        **distributions.saturation(policy, policy.from_unit(action)),
      )
      priority = step.mask * (jnp.mean(jnp.abs(error), axis=0) + 1e-6)
      return total, (metrics, batch.priority(priority))

    learned = SACLearned(train.params, rest.critic, rest.log_alpha)
    learned, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), learned, rest.opt_state, keep=True
    )
    followed = optax.incremental_update(learned.critic, rest.target, self.target_rate)
    rest = SACRest(learned.critic, learned.log_alpha, followed, opt_state)
    return TrainState(learned.actor, rest), priority, metrics

  def draw(self, outputs: Array, key: Array) -> tuple[Array, Array]:
    """Return actions [N, n] within [-1, 1] by the policy, and their log-densities [N]."""
    policy = self.actor.distribution
    x = policy.sample(outputs, key)
    return jnp.tanh(x), policy.log_prob(outputs, x)

  def target(self, actor: Any, rest: SACRest, batch: recurrent.Batch, key: Array) -> Array:
    """Return the targets [N] of the critics; equation 3 of the paper."""
    action, log_prob = self.draw(batch.outputs(self.actor, actor, after=True), key)
    seen = batch.seen(self.critic, rest.target, after=True)
    q_t = jnp.min(self.critic.value(rest.target, seen, action)[..., 0], axis=0)
    v_t = q_t - jnp.exp(rest.log_alpha) * log_prob
    return batch.step.r_t + batch.step.discount_t * v_t

  @property
  def entropy_goal(self) -> float:
    """The entropy that the temperature aims at."""
    if self.target_entropy is not None:
      return self.target_entropy
    return -float(sum(self.actor.distribution.free))

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rates = dict(
      actor=self.actor_learning_rate,
      critic=self.critic_learning_rate,
      log_alpha=self.temperature_learning_rate,
    )
    return separately(rates, SACLearned)
