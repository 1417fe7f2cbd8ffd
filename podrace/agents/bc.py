"""BC: behaviour cloning, the imitation of recorded actions (Pomerleau 1988, NeurIPS).

It maximises the log-likelihood of the actions in replay, so it is meant for logs (`--log`): from
its own actions it learns nothing. Rewards are not used. With actions of numbers the policy is a
Normal with a standard deviation that no observation changes, so the mean minimises the squared
error, or a tanh-Normal with `network.squash`.

With `network.core` it learns from sequences; see `podrace.agents.recurrent`. The network sees no
previous actions, from which a clone would copy instead of looking (de Haan et al. 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from podrace.agents import recurrent
from podrace.agents.recurrent import Recurrence
from podrace.fields import check_fields
from podrace.learner import Learned, flatten, sgd
from podrace.networks import ActorCritic
from podrace.replay import Buffer
from podrace.types import ActorOutput, Array, Sample, TimeStep, TrainState


@dataclasses.dataclass(frozen=True)
class BC:
  """Hyper-parameters, and the functions of an `Agent`. The network's value is not used."""

  network: ActorCritic = ActorCritic()
  buffer: Buffer = Buffer(batch_size=256, samples_per_insert=32.0)
  learning_rate: float = 1e-3  # learning rate of the optimiser
  greedy: bool = False  # act by the mode of the policy, for evaluation
  recurrence: Recurrence = Recurrence()

  def __post_init__(self) -> None:
    check_fields(self)
    recurrent.check_used(self.recurrence, self.network)

  is_recurrent = property(recurrent.is_recurrent)
  memory = recurrent.memory
  initial_state = recurrent.initial_state

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    return TrainState(network, self.optimiser().init(network))

  def act(
    self,
    params: Any,
    state: Any,
    timestep: TimeStep,
    key: Array,
    replace: Callable[[Array], Array] = lambda action: action,
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B], which `replace` may change."""
    outputs, core = recurrent.step(self.network, params, state, timestep)
    policy = self.network.distribution
    x = policy.mode(outputs.policy) if self.greedy else policy.sample(outputs.policy, key)
    action = replace(policy.to_action(x))
    return ActorOutput(action), recurrent.after(state, core, action)

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    policy = self.network.distribution
    recurrence = self.recurrence if self.is_recurrent else None
    batch = recurrent.transitions(recurrence, sample, discount=1.0, n_step=1)
    taken, mask = policy.from_action(batch.step.action), batch.step.mask

    def loss(network: Any) -> tuple[Array, Any]:
      outputs = batch.outputs(self.network, network)
      surprise = -policy.log_prob(outputs.policy, taken)
      total = batch.mean(surprise, batch.weight)
      # The value head is not used. A constant gradient of it would have an all-reduce of its own.
      total += 0.0 * jnp.mean(jnp.square(outputs.value))
      own = policy.to_action(policy.mode(outputs.policy))
      error = jnp.abs(own - policy.to_action(taken)).reshape(*mask.shape, -1)
      distance = jnp.mean(_distance(error, own), -1)
      is_number = jnp.issubdtype(own.dtype, jnp.floating)  # a surprise may be negative
      metrics = dict(
        loss=total,
        entropy=batch.mean_of_valid(policy.entropy(outputs.policy, key)),
        action_error=batch.mean_of_valid(distance),
      )
      priority = distance if is_number else surprise
      return total, (metrics, batch.priority(mask * (priority + 1e-6)))

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), train.params, train.rest, keep=True
    )
    return TrainState(network, opt_state), priority, metrics

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    return flatten(optax.adam(self.learning_rate))


def _distance(error: Array, action: Array) -> Array:
  """Return errors of numbers as they are, and of choices as 1 where they differ."""
  is_number = jnp.issubdtype(action.dtype, jnp.floating)
  return error if is_number else (error > 0).astype(jnp.float32)
