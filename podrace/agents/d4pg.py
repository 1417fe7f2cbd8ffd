"""D4PG: distributed distributional deterministic policy gradients (Barth-Maron et al. 2018).

arXiv 1804.08617. A deterministic policy, explored with normal noise; a critic of the distribution
of returns over fixed atoms; n-step targets from target networks.

Against the paper: layers have 256 units each and nothing is normalized in between, where the
paper's are of unequal sizes; all windows are drawn alike unless `buffer.priority_exponent` is more
than 0, and then importance weights have the exponent of the buffer, not 1; windows end early where
episodes do. The default replay has 100,000 steps, not a million.

With a core in the actor or the critic it learns from sequences; see `podrace.agents.recurrent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace import distributions
from podrace.agents import correlated_noise, recurrent, value_based
from podrace.agents.recurrent import Recurrence
from podrace.fields import check_fields, check_support
from podrace.learner import Learned, separately, sgd
from podrace.networks import Actor, Critic
from podrace.replay import Buffer
from podrace.types import ActorOutput, Array, Sample, TimeStep, TrainState


class D4PGLearned(NamedTuple):
  """Everything that takes gradient steps."""

  actor: Any
  critic: Any


class D4PGRest(NamedTuple):
  """Learned state that is not sent to actors."""

  critic: Any
  target: D4PGLearned  # target networks, for bootstrapping
  opt_state: Any
  steps: Array  # [] i32 gradient steps so far


@dataclasses.dataclass(frozen=True)
class D4PG:
  """Hyper-parameters, and the functions of an `Agent`."""

  actor: Actor = Actor(deterministic=True)
  critic: Critic = Critic(atoms=51)
  buffer: Buffer = Buffer(batch_size=256, samples_per_insert=256.0)
  v_min: float = -150.0  # smallest discounted return that the critic can represent
  v_max: float = 150.0  # largest discounted return that the critic can represent
  actor_learning_rate: float = 1e-4  # learning rate of the policy
  critic_learning_rate: float = 1e-4  # learning rate of the critic
  discount: float = 0.99  # discount of each step
  n_step: int = 5  # rewards before a value is bootstrapped from
  noise: float = 0.3  # standard deviation of the noise on actions, which are within [-1, 1]
  noise_correlation: float = 0.0
  # ^ correlation of the noise of successive steps, for far exploration; 0: independent
  target_period: int = 100  # gradient steps between updates of the target networks
  target_rate: float = 1.0
  # ^ share of the online networks in an update of the target networks; 1: a copy
  greedy: bool = False  # act without noise, for evaluation
  recurrence: Recurrence = Recurrence()

  def __post_init__(self) -> None:
    check_fields(self)
    check_support(self.v_min, self.v_max, max(self.critic.atoms, 2))
    if not self.actor.deterministic or self.critic.atoms < 2:
      raise ValueError('d4pg has a deterministic actor, and a critic with at least 2 atoms')
    recurrent.check_used(self.recurrence, self.actor, self.critic)

  is_recurrent = property(recurrent.is_recurrent)
  memory = recurrent.memory
  initial_state = correlated_noise.initial_state

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    actor_key, critic_key = jax.random.split(key)
    learned = D4PGLearned(self.actor.init(actor_key), self.critic.init(critic_key))
    rest = D4PGRest(learned.critic, learned, self.optimiser().init(learned), jnp.int32(0))
    return TrainState(learned.actor, rest)

  def warm_start(self, train: TrainState, params: Any) -> TrainState:
    """Start from the policy of another run; the critic learns the values of this policy."""
    target = train.rest.target._replace(actor=params)
    return TrainState(params, train.rest._replace(target=target))

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
    outputs, core = recurrent.step(self.actor, params, memory, timestep)
    unit = self.policy(outputs)
    if not self.greedy:
      unit = unit + self.noise * noise
    action = replace(self.actor.distribution.from_unit(unit))
    memory = recurrent.after(memory, core, action)
    return ActorOutput(action), correlated_noise.after(state, memory, noise)

  def policy(self, outputs: Array) -> Array:
    """Return the best actions [N, n], within [-1, 1], of the actor's outputs."""
    return self.actor.distribution.only_free(jnp.tanh(outputs))

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    del key
    rest: D4PGRest = train.rest
    batch = recurrent.transitions(
      self.recurrence if self.is_recurrent else None, sample, self.discount, self.n_step
    )
    step = batch.step
    target, cut = self.target(rest.target, batch)
    taken = self.critic.distribution.to_unit(step.action)
    policy = self.actor.distribution

    def loss(learned: D4PGLearned) -> tuple[Array, Any]:
      seen = batch.seen(self.critic, learned.critic)
      logits = self.critic.value(learned.critic, seen, taken)[0]
      each = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
      critic_loss = batch.mean(each, batch.weight)
      fixed, seen = lax.stop_gradient((learned.critic, seen))
      action = self.policy(batch.outputs(self.actor, learned.actor))
      value = self.mean(self.critic.value(fixed, seen, action)[0])
      actor_loss = -batch.mean(value)
      metrics = dict(
        loss=critic_loss,
        actor_loss=actor_loss,
        value=batch.mean_of_valid(value),
        **distributions.saturation(policy, policy.from_unit(action)),
        **cut,
      )
      return critic_loss + actor_loss, (metrics, batch.priority(step.mask * (each + 1e-6)))

    learned = D4PGLearned(train.params, rest.critic)
    learned, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), learned, rest.opt_state, keep=True
    )
    steps = rest.steps + 1
    followed = value_based.follow(rest.target, learned, steps, self.target_period, self.target_rate)
    rest = D4PGRest(learned.critic, followed, opt_state, steps)
    return TrainState(learned.actor, rest), priority, metrics

  @property
  def support(self) -> Array:
    """Returns [atoms] that the critic gives probabilities to."""
    return jnp.linspace(self.v_min, self.v_max, self.critic.atoms)

  def mean(self, logits: Array) -> Array:
    """Return the expected returns [B] of a critic's outputs [B, atoms]."""
    return jnp.sum(jax.nn.softmax(logits) * self.support[None], axis=-1)

  def target(self, target: D4PGLearned, batch: recurrent.Batch) -> tuple[Array, dict[str, Array]]:
    """Return the critic's target probabilities [N, atoms], and metrics; equation 2 of the paper."""
    action = self.policy(batch.outputs(self.actor, target.actor, after=True))
    seen = batch.seen(self.critic, target.critic, after=True)
    logits = self.critic.value(target.critic, seen, action)[0]
    return value_based.project(batch.step, jax.nn.softmax(logits), self.support)

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rates = dict(actor=self.actor_learning_rate, critic=self.critic_learning_rate)
    return separately(rates, D4PGLearned)
