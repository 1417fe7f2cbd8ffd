"""A custom agent for continuous actions, a deterministic policy gradient with replay, and a task.

    python examples/own_agent.py

or, in this directory:

    podrace train --agent own_agent:DPG --env python:own_agent.reach --num-envs 8 --unroll-length 4
"""

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace.agents.value_based import transitions
from podrace.architectures.anakin import Anakin
from podrace.envs.base import NextStepReset, restart, transition
from podrace.hooks import memory
from podrace.learner import sgd
from podrace.networks import Actor, Critic
from podrace.replay import Buffer, windows
from podrace.settings.agents import bind
from podrace.topology import learner_mesh
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState


@dataclasses.dataclass(frozen=True)
class DPG:
  """The critic takes actions in [-1, 1]: tanh(x) for a new action, `to_unit` for a stored one."""

  actor: Actor = Actor()
  critic: Critic = Critic()
  buffer: Buffer = Buffer(capacity=20_000, min_size=1_000, batch_size=128, samples_per_insert=16.0)
  learning_rate: float = 1e-3
  discount: float = 0.9
  target_rate: float = 0.01
  noise: float = 0.3
  greedy: bool = False

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    return windows(self.buffer, 1, num_envs, unroll_length, stack=stack)

  def init(self, key: Array) -> TrainState:
    keys = jax.random.split(key)
    learned = dict(actor=self.actor.init(keys[0]), critic=self.critic.init(keys[1]))
    opt_state = optax.adam(self.learning_rate).init(learned)
    return TrainState(learned['actor'], (learned['critic'], learned['critic'], opt_state))

  def initial_state(self, env_id: Array) -> Any:
    return ()

  def raw(self, params: Any, timestep: TimeStep) -> Array:
    """The action before it is squashed, [B, n]."""
    outputs, _ = self.actor.step(params, (), timestep)
    return self.actor.distribution.mode(outputs)

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    x = self.raw(params, timestep)
    if not self.greedy:
      x = x + self.noise * jax.random.normal(key, x.shape)
    return ActorOutput(self.actor.distribution.to_action(x)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> tuple[TrainState, Array, Any]:
    critic, target, opt_state = train.rest
    step = transitions(sample.trajectory, self.discount)
    q_t = self.critic.value(
      target, step.after.observation, jnp.tanh(self.raw(train.params, step.after))
    )
    target_q = step.r_t + step.discount_t * q_t[0, :, 0]
    unit_action = self.critic.distribution.to_unit(step.action)

    def loss(learned: Any) -> tuple[Array, Any]:
      q = self.critic.value(learned['critic'], step.before.observation, unit_action)[0, :, 0]
      critic_loss = jnp.mean(step.mask * (target_q - q) ** 2)
      action = jnp.tanh(self.raw(learned['actor'], step.before))
      fixed = lax.stop_gradient(learned['critic'])
      value = self.critic.value(fixed, step.before.observation, action)[0, :, 0]
      return critic_loss - jnp.mean(step.mask * value), dict(loss=critic_loss)

    learned = dict(actor=train.params, critic=critic)
    learned, opt_state, metrics = sgd(loss, optax.adam(self.learning_rate), learned, opt_state)
    target = optax.incremental_update(learned['critic'], target, self.target_rate)
    rest = (learned['critic'], target, opt_state)
    return TrainState(learned['actor'], rest), jnp.ones_like(sample.weight), metrics


class Reach:
  """Stay at 0 for ten steps; the reward is 1 minus the distance."""

  observation_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), 'float32')
  action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), 'float32')

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    place = jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0)
    return (place, jnp.int32(0)), restart(place)

  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    place, time = jnp.clip(state[0] + 0.5 * action, -2.0, 2.0), state[1] + 1
    late = time >= 10
    reward = 1.0 - jnp.abs(place[0])
    return (place, time), transition(place, reward=reward, terminated=False, truncated=late)


def reach() -> NextStepReset:
  return NextStepReset(Reach())


def train(agent: Any, updates: int = 1_000) -> float:
  """The mean return of episodes in the last fifth of the updates."""
  env = reach()
  agent = bind(agent, env)
  replay = memory(agent, env, num_envs=16, unroll_length=10)
  run = Anakin(agent, env, replay, learner_mesh(1), num_envs=16, unroll_length=10)
  state = run.init(jax.random.split(jax.random.key(0), 1))
  _, state = run.read_log(run.run(state, jnp.int32(updates * 4 // 5)))
  log, _ = run.read_log(run.run(state, jnp.int32(updates // 5)))
  return float(log['return_sum'] / log['episodes'])


if __name__ == '__main__':
  print(f'DPG: mean return {train(DPG()):.2f} of 10')
