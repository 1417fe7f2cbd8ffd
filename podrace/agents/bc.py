"""BC: behaviour cloning, the imitation of recorded actions (Pomerleau 1988, NeurIPS).

It maximises the log-likelihood of the actions in replay, so it is meant for logs (`--log`): from
its own actions it learns nothing. Rewards are not used. With actions of numbers the policy is a
Normal with a standard deviation that no observation changes, so the mean minimises the squared
error, or a tanh-Normal with `network.squash`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podrace.fields import check_fields
from podrace.learner import Learned, flatten, sgd
from podrace.networks import ActorCritic
from podrace.replay import Buffer, windows
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState


@dataclasses.dataclass(frozen=True)
class BC:
  """Hyper-parameters, and the functions of an `Agent`. The network's value is not used."""

  network: ActorCritic = ActorCritic()
  buffer: Buffer = Buffer(batch_size=256, samples_per_insert=32.0)
  learning_rate: float = 1e-3  # learning rate of the optimiser
  greedy: bool = False  # act by the mode of the policy, for evaluation

  def __post_init__(self) -> None:
    check_fields(self)
    if self.network.core != 'none':
      raise ValueError(f'bc has no memory, not the core {self.network.core!r}')

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: windows of one step."""
    return windows(self.buffer, 1, num_envs, unroll_length, stack=stack)

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    return TrainState(network, self.optimiser().init(network))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    del env_id
    return ()

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    outputs, _ = self.network.step(params, (), timestep)
    policy = self.network.distribution
    x = policy.mode(outputs.policy) if self.greedy else policy.sample(outputs.policy, key)
    return ActorOutput(policy.to_action(x)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    window, policy = sample.trajectory, self.network.distribution
    before = jax.tree.map(lambda x: x[0], window.timesteps)
    taken = policy.from_action(window.outputs.action[0])
    mask = 1.0 - before.last.astype(jnp.float32)

    def loss(network: Any) -> tuple[Array, Any]:
      outputs, _ = self.network.step(network, (), before)
      surprise = -policy.log_prob(outputs.policy, taken)
      total = jnp.mean(sample.weight * mask * surprise)
      own = policy.to_action(policy.mode(outputs.policy))
      error = jnp.abs(own - policy.to_action(taken)).reshape(*mask.shape, -1)
      metrics = dict(
        loss=total,
        entropy=jnp.mean(mask * policy.entropy(outputs.policy, key)),
        action_error=jnp.mean(mask * jnp.mean(_distance(error, own), -1)),
      )
      return total, (metrics, mask * (jnp.abs(surprise) + 1e-6))

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
