"""NAME: an n-step advantage actor-critic, as a start for an agent of your own.

Its parts are explained in docs/own.md. `podrace train --agent FILE:NAME` trains it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace import returns
from podrace.learner import sgd
from podrace.networks import ActorCritic
from podrace.types import ActorOutput, TrainState


@dataclasses.dataclass(frozen=True)
class NAME:
  """Settings; each is a flag, as --agent.learning-rate."""

  network: ActorCritic = ActorCritic()
  learning_rate: float = 3e-3
  discount: float = 0.99
  entropy_cost: float = 0.01
  greedy: bool = False

  def init(self, key):
    """Return the parameters and the state of the optimiser."""
    params = self.network.init(key)
    return TrainState(params, optax.adam(self.learning_rate).init(params))

  def initial_state(self, env_id):
    """Return the recurrent state at the start of an episode."""
    return self.network.initial_state(env_id.shape[0])

  def act(self, params, state, timestep, key):
    """Return the actions and the next recurrent state."""
    output, state = self.network.step(params, state, timestep)
    policy = self.network.distribution
    x = policy.mode(output.policy) if self.greedy else policy.sample(output.policy, key)
    return ActorOutput(policy.to_action(x), extras=x), state

  def learn(self, train, sample, key):
    """Return the updated state, a priority for each trajectory, and metrics."""
    trajectory = sample.trajectory
    before = jax.tree.map(lambda x: x[:-1], trajectory.timesteps)  # where the agent acted
    after = jax.tree.map(lambda x: x[1:], trajectory.timesteps)  # what came of it
    mask = 1.0 - before.last  # LAST -> FIRST is no transition of any episode

    def loss(params):
      output, _ = self.network.unroll(params, trajectory.agent_state, trajectory.timesteps)
      logits, v_tm1, v_t = output.policy[:-1], output.value[:-1], output.value[1:]
      advantage = jax.vmap(returns.gae, in_axes=1, out_axes=1)(
        after.reward,
        self.discount * after.discount,
        1.0 - after.last,  # lambda: 1, but nothing passes the end of an episode
        *lax.stop_gradient((v_tm1, v_t)),
      )
      policy = self.network.distribution
      log_prob = policy.log_prob(logits, trajectory.outputs.extras)
      entropy = policy.entropy(logits, key)
      error = advantage + lax.stop_gradient(v_tm1) - v_tm1
      total = jnp.mean(mask * (0.5 * error**2 - log_prob * advantage - self.entropy_cost * entropy))
      return total, dict(loss=total, entropy=jnp.mean(mask * entropy))

    optimizer = optax.adam(self.learning_rate)
    params, opt_state, metrics = sgd(loss, optimizer, train.params, train.rest)
    return TrainState(params, opt_state), jnp.ones_like(sample.weight), metrics
