"""Presets: functions that return a whole Config. Importing this does not import jax.

The scores are those of a recorded run: see docs/presets.md.
"""

from __future__ import annotations

from collections.abc import Callable

from podrace.config import Config


def catch() -> Config:
  """IMPALA on Catch: return 1 within seconds. What `podrace train` alone does."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(initializer='lecun', activation='relu')
  return Config(
    agent=Impala(network=network, learning_rate=1e-3),
    env='podrace:catch',
    num_envs=64,
    unroll_length=16,
    total_steps=2_000_000,
  )


def cartpole() -> Config:
  """PPO on CartPole: the full return of 500."""
  from podrace.agents.ppo import PPO

  return Config(
    agent=PPO(learning_rate=1e-3, entropy_cost=0.0, normalize_rewards=True),
    env='gymnax:CartPole-v1',
    num_envs=64,
    unroll_length=32,
    total_steps=600_000,
  )


def minatar_breakout() -> Config:
  """PPO on MinAtar Breakout: a return of 29 to 87 by seed."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  # A convolution costs four times the speed here and brings nothing: the board is 10 x 10.
  network = ActorCritic(torso='mlp', shared=False, activation='relu')
  return Config(
    agent=PPO(network=network, learning_rate=5e-3, minibatches=8),
    env='gymnax:Breakout-MinAtar',
    num_envs=64,
    unroll_length=128,
    total_steps=10_000_000,
  )


def memory() -> Config:
  """Recurrent IMPALA on the memory task: remember a cue over 20 steps."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(
    initializer='lecun', activation='relu', hidden=(32,), core='gru', core_size=32
  )
  return Config(
    agent=Impala(network=network, learning_rate=2e-3),
    env='podrace:memory,length=20',
    num_envs=64,
    unroll_length=22,
    total_steps=3_000_000,
  )


def brax_inverted_pendulum() -> Config:
  """PPO with normalised observations on Brax's inverted pendulum: the lightest Brax task."""
  from podrace.agents.ppo import PPO

  return Config(
    agent=PPO(
      learning_rate=3e-4,
      anneal_learning_rate=False,
      normalize_observations=True,
      normalize_rewards=True,
      entropy_cost=0.0,
    ),
    env='brax:inverted_pendulum',
    num_envs=64,
    unroll_length=64,
    total_steps=1_000_000,
  )


def snake() -> Config:
  """PPO on Jumanji's Snake, with its action mask."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic(torso='grid', hidden=(64,), activation='relu')
  return Config(
    agent=PPO(network=network, learning_rate=1e-3, epochs=2, minibatches=8),
    env='jumanji:Snake-v1',
    num_envs=64,
    unroll_length=128,
    total_steps=2_000_000,
  )


def pong() -> Config:
  """IMPALA on Atari Pong under Sebulba, with the shallow network."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(torso='impala', hidden=(256,), initializer='lecun', activation='relu')
  return Config(
    agent=Impala(network=network, learning_rate=6e-4),
    env='ale:pong',
    architecture='sebulba',
    num_envs=32,
    unroll_length=20,
    total_steps=10_000_000,
  )


PRESETS: dict[str, Callable[[], Config]] = {
  'catch': catch,
  'cartpole': cartpole,
  'minatar-breakout': minatar_breakout,
  'memory': memory,
  'brax-inverted-pendulum': brax_inverted_pendulum,
  'snake': snake,
  'pong': pong,
}
