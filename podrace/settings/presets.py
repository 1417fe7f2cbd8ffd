"""Presets: functions that return a whole Config. Importing this does not import jax.

The scores are those of a recorded run: see docs/presets.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from podrace.settings.config import Config


def catch() -> Config:
  """IMPALA on Catch: return 1 within seconds. What `podrace train` alone does."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(initializer='lecun', activation='relu')
  return Config(
    agent=Impala(network=network, learning_rate=1e-3),
    env='podrace:catch', num_envs=64, unroll_length=16, total_steps=2_000_000,
  )  # fmt: skip


def cartpole() -> Config:
  """PPO on CartPole: the full return of 500."""
  from podrace.agents.ppo import PPO

  return Config(
    agent=PPO(learning_rate=1e-3, entropy_cost=0.0, normalize_rewards=True),
    env='gymnax:CartPole-v1', num_envs=64, unroll_length=32, total_steps=600_000,
  )  # fmt: skip


def minatar_breakout() -> Config:
  """PPO on MinAtar Breakout: a return of 20 and more, by seed."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  # A convolution costs four times the speed here and brings nothing: the board is 10 x 10.
  network = ActorCritic(torso='mlp', shared=False, activation='relu')
  return Config(
    agent=PPO(network=network, learning_rate=5e-3, minibatches=8),
    env='gymnax:Breakout-MinAtar', num_envs=64, unroll_length=128, total_steps=10_000_000,
  )  # fmt: skip


def memory() -> Config:
  """Recurrent IMPALA on the memory task: remember a cue over 20 steps."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(
    initializer='lecun', activation='relu', hidden=(32,), core='gru', core_size=32
  )
  return Config(
    agent=Impala(network=network, learning_rate=2e-3),
    env='podrace:memory,length=20', num_envs=64, unroll_length=22, total_steps=3_000_000,
  )  # fmt: skip


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
    env='brax:inverted_pendulum', num_envs=64, unroll_length=64, total_steps=1_000_000,
  )  # fmt: skip


def snake() -> Config:
  """PPO on Jumanji's Snake, with its action mask."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic(torso='grid', hidden=(64,), activation='relu')
  return Config(
    agent=PPO(network=network, learning_rate=1e-3, epochs=2, minibatches=8),
    env='jumanji:Snake-v1', num_envs=64, unroll_length=128, total_steps=2_000_000,
  )  # fmt: skip


def pong() -> Config:
  """IMPALA on Atari Pong under Sebulba, with the shallow network."""
  from podrace.agents.impala import Impala
  from podrace.networks import ActorCritic

  network = ActorCritic(torso='impala', hidden=(256,), initializer='lecun', activation='relu')
  return Config(
    agent=Impala(network=network, learning_rate=5e-4, max_grad_norm=0.5, entropy_cost=0.003),
    env='ale:pong',
    architecture='sebulba',
    actor_threads=1,
    num_envs=16,
    unroll_length=10,
    total_steps=5_000_000,
  )


def ppo_pong() -> Config:
  """PPO on Atari Pong under Sebulba: fewer frames than IMPALA, more gradients for each."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic(torso='impala', hidden=(256,), activation='relu')
  return Config(
    agent=PPO(
      network=network, learning_rate=5e-4, anneal_learning_rate=False, epochs=3, minibatches=4,
      clip=0.1,
    ),
    env='ale:pong',
    architecture='sebulba',
    actor_threads=1,
    num_envs=16,
    unroll_length=64,
    total_steps=4_000_000,
  )  # fmt: skip


def dqn_cartpole() -> Config:
  """Double DQN on CartPole: the full return of 500."""
  from podrace.agents.dqn import DQN
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  return Config(
    agent=DQN(
      network=QNetwork(hidden=(128, 128)),
      buffer=Buffer(capacity=50_000, batch_size=128, min_size=2_000, samples_per_insert=16.0),
      learning_rate=2.5e-4,
      n_step=3,
      target_period=250,
      epsilon=0.02,
      epsilon_steps=5_000,
    ),
    env='gymnax:CartPole-v1', num_envs=16, unroll_length=4, total_steps=500_000,
  )  # fmt: skip


def rainbow_minatar() -> Config:
  """Rainbow on MinAtar Breakout, explored by its noise alone; give another game by --env."""
  from podrace.agents.dqn import DQN
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  network = QNetwork(
    torso='grid', hidden=(), head='categorical', num_atoms=51, v_min=0.0, v_max=20.0,
    head_size=128, dueling=True, noisy=True,
  )  # fmt: skip
  buffer = Buffer(
    capacity=200_000, batch_size=64, min_size=5_000, samples_per_insert=8.0,
    priority_exponent=0.5, importance_exponent=0.4, importance_steps=1_000_000,
  )  # fmt: skip
  return Config(
    agent=DQN(
      network,
      buffer,
      learning_rate=2.5e-4,
      n_step=3,
      double=True,
      target_period=250,
      epsilon=0.0,
      epsilon_steps=1,
    ),
    env='gymnax:Breakout-MinAtar', num_envs=16, unroll_length=4, total_steps=1_000_000,
  )  # fmt: skip


def r2d2_memory() -> Config:
  """R2D2 on the memory task: remember a cue over 20 steps, with stored states and burn-in."""
  from podrace.agents.r2d2 import R2D2
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  network = QNetwork(hidden=(32,), core='gru', core_size=32, dueling=True)
  buffer = Buffer(
    capacity=100_000, batch_size=64, min_size=5_000, samples_per_insert=4.0, priority_exponent=0.9,
  )  # fmt: skip
  return Config(
    agent=R2D2(
      network, buffer, sequence=22, burn_in=11, learning_rate=1e-3, adam_epsilon=1e-5,
      target_period=200,
    ),
    env='podrace:memory,length=20', num_envs=64, unroll_length=11, total_steps=400_000,
  )  # fmt: skip


def sac_pendulum() -> Config:
  """SAC on Pendulum: about -150, which is as good as it gets."""
  from podrace.agents.sac import SAC
  from podrace.networks import Actor, Critic
  from podrace.replay import Buffer

  return Config(
    agent=SAC(
      Actor(hidden=(64, 64)),
      Critic(hidden=(64, 64), critics=2),
      Buffer(capacity=100_000, batch_size=256, min_size=1_000, samples_per_insert=128.0),
      actor_learning_rate=1e-3,
      critic_learning_rate=1e-3,
      temperature_learning_rate=1e-3,
    ),
    env='gymnax:Pendulum-v1', num_envs=8, unroll_length=8, total_steps=60_000,
  )  # fmt: skip


def sac_brax() -> Config:
  """SAC on Brax's inverted pendulum: the full return of 1,000."""
  from podrace.agents.sac import SAC
  from podrace.networks import Actor, Critic
  from podrace.replay import Buffer

  return Config(
    agent=SAC(
      Actor(hidden=(128, 128)),
      Critic(hidden=(128, 128), critics=2),
      Buffer(capacity=200_000, batch_size=256, min_size=5_000, samples_per_insert=32.0),
      actor_learning_rate=1e-3,
      critic_learning_rate=1e-3,
      temperature_learning_rate=1e-3,
    ),
    env='brax:inverted_pendulum', num_envs=64, unroll_length=4, total_steps=200_000,
  )  # fmt: skip


def d4pg_pendulum() -> Config:
  """D4PG on Pendulum: about -150."""
  from podrace.agents.d4pg import D4PG
  from podrace.networks import Actor, Critic
  from podrace.replay import Buffer

  return Config(
    agent=D4PG(
      Actor(hidden=(64, 64), deterministic=True),
      Critic(hidden=(64, 64), atoms=51),
      Buffer(capacity=100_000, batch_size=256, min_size=1_000, samples_per_insert=128.0),
      v_min=-400.0,
      v_max=0.0,
      actor_learning_rate=5e-4,
      critic_learning_rate=1e-3,
      n_step=3,
    ),
    env='gymnax:Pendulum-v1', num_envs=8, unroll_length=8, total_steps=60_000,
  )  # fmt: skip


def dqn_pong() -> Config:
  """Double, dueling, prioritised n-step DQN on Atari Pong under Sebulba."""
  from podrace.agents.dqn import DQN
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  network = QNetwork(torso='impala', hidden=(256,), dueling=True)
  buffer = Buffer(
    capacity=200_000, batch_size=32, min_size=20_000, samples_per_insert=8.0,
    priority_exponent=0.5, importance_exponent=0.4,
  )  # fmt: skip
  return Config(
    agent=DQN(
      network, buffer, learning_rate=1e-4, n_step=3, target_period=2_000, epsilon=0.01,
      epsilon_steps=50_000,
    ),
    env='ale:pong',
    architecture='sebulba',
    num_envs=16,
    unroll_length=8,
    total_steps=2_000_000,
  )  # fmt: skip


def r2d2_pong() -> Config:
  """R2D2 on Atari Pong under Sebulba: shorter sequences than SEED RL's, learned from more often."""
  from podrace.agents.r2d2 import R2D2
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  network = QNetwork(torso='impala', hidden=(256,), core='lstm', core_size=256, dueling=True)
  buffer = Buffer(
    capacity=200_000, batch_size=8, min_size=20_000, samples_per_insert=0.1,
    priority_exponent=0.9, importance_exponent=0.6,
  )  # fmt: skip
  return Config(
    agent=R2D2(
      network,
      buffer,
      sequence=40,
      burn_in=40,
      learning_rate=3e-4,
      adam_epsilon=1e-5,
      target_period=150,
    ),
    env='ale:pong',
    architecture='sebulba',
    num_envs=16,
    unroll_length=40,
    total_steps=4_000_000,
  )


def apex_pong() -> Config:
  """Ape-X DQN on Atari Pong: learner, replay service and acting processes (docs/distributed.md)."""
  from podrace.agents.dqn import DQN
  from podrace.networks import QNetwork
  from podrace.replay import Buffer

  network = QNetwork(torso='impala', hidden=(256,), dueling=True)
  buffer = Buffer(
    capacity=500_000, batch_size=64, min_size=20_000, samples_per_insert=4.0,
    priority_exponent=0.6, importance_exponent=0.4,
  )  # fmt: skip
  return Config(
    agent=DQN(
      network, buffer, learning_rate=1e-4, n_step=3, target_period=2_500, epsilon_ladder=True,
      actor_priorities=True,
    ),
    env='ale:pong',
    architecture='sebulba',
    num_envs=32,
    unroll_length=16,
    total_steps=5_000_000,
    lag='async',
    replay='service',
  )  # fmt: skip


def r2d2_remote_memory() -> Config:
  """R2D2 on the memory task with a replay service and acting processes (docs/distributed.md)."""
  return dataclasses.replace(
    r2d2_memory(), architecture='sebulba', lag='async', replay='service', total_steps=100_000
  )


def muzero_catch() -> Config:
  """MuZero on Catch: return 1, by 8 simulations a move in a learned model."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  network = LearnedModel(latent=32, hidden=(64,), bins=21, v_min=-2.0, v_max=2.0)
  buffer = Buffer(
    capacity=20_000, batch_size=64, min_size=1_000, samples_per_insert=8.0, priority_exponent=1.0,
    importance_exponent=1.0,
  )  # fmt: skip
  return Config(
    agent=MuZero(network, buffer, simulations=8, unroll=3, learning_rate=2e-3),
    env='podrace:catch', num_envs=32, unroll_length=4, total_steps=60_000,
  )  # fmt: skip


def muzero_cartpole() -> Config:
  """MuZero on CartPole: the full return of 500."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  network = LearnedModel(
    hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), v_min=-1.0, v_max=110.0
  )
  buffer = Buffer(
    batch_size=128, min_size=2_000, samples_per_insert=16.0, priority_exponent=0.6,
    importance_exponent=0.4,
  )  # fmt: skip
  return Config(
    agent=MuZero(network, buffer, simulations=16, n_step=20, bootstrap='target', discount=0.99),
    env='gymnax:CartPole-v1', num_envs=16, unroll_length=4, total_steps=50_000,
  )  # fmt: skip


def muzero_pendulum() -> Config:
  """Sampled MuZero on Pendulum, with 12 candidates of each search: about -150."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  network = LearnedModel(
    hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), v_min=-400.0, v_max=1.0
  )
  buffer = Buffer(batch_size=128, min_size=1_000, samples_per_insert=128.0)
  return Config(
    agent=MuZero(
      network, buffer, simulations=12, sampled_actions=12, n_step=3, bootstrap='target',
      target_period=100, discount=0.97, entropy_cost=0.01,
    ),
    env='gymnax:Pendulum-v1', num_envs=8, unroll_length=8, total_steps=20_000,
  )  # fmt: skip


def muzero_tictactoe() -> Config:
  """MuZero's search by the rules of tic-tac-toe, against itself: it never loses."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  network = LearnedModel(hidden=(256,), head_hidden=(64,), bins=21, v_min=-2.0, v_max=2.0)
  buffer = Buffer(batch_size=256, min_size=2_000, samples_per_insert=4.0)
  return Config(
    agent=MuZero(
      network, buffer, model='rules', simulations=32, value_scale=1.0, epsilon=0.3, n_step=0, discount=-1.0
    ),  # some moves are by chance; no target depends on them
    env='pgx:tic_tac_toe,opponent=self,state=true', num_envs=64, unroll_length=4, total_steps=400_000,
    eval_every=20_000, eval_episodes=100, eval_env='pgx:tic_tac_toe,opponent=random,state=true',
  )  # fmt: skip


def muzero_connect_four() -> Config:
  """MuZero's search by the rules of Connect Four, against itself: it beats a tree search of 100 rollouts."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  network = LearnedModel(
    torso='grid', hidden=(256,), head_hidden=(128,), bins=21, v_min=-2.0, v_max=2.0
  )
  buffer = Buffer(batch_size=256, min_size=2_000, samples_per_insert=4.0)
  return Config(
    agent=MuZero(
      network, buffer, model='rules', simulations=32, value_scale=1.0, epsilon=0.3, n_step=0, discount=-1.0
    ),  # some moves are by chance; no target depends on them
    env='pgx:connect_four,opponent=self,state=true', num_envs=64, unroll_length=4, total_steps=2_000_000,
    eval_every=100_000, eval_episodes=100, eval_env='pgx:connect_four,opponent=mcts,state=true',
  )  # fmt: skip


def muzero_minatar() -> Config:
  """MuZero on MinAtar Breakout: a return above 50."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  # Many gradient steps for each environment step: with 2 in the place of 16 it stays at a return of 6.
  network = LearnedModel(
    torso='mlp', hidden=(128,), latent=128, dynamics_hidden=(128,), head_hidden=(64,),
    bins=101, v_min=-1.0, v_max=60.0,
  )  # fmt: skip
  buffer = Buffer(
    200_000, batch_size=64, min_size=2_000, samples_per_insert=16.0,
    priority_exponent=0.6, importance_exponent=0.4,
  )  # fmt: skip
  return Config(
    agent=MuZero(
      network, buffer, simulations=8, n_step=5, bootstrap='target', target_period=1_000,
      learning_rate=5e-4, entropy_cost=0.01, discount=0.99,
    ),
    env='gymnax:Breakout-MinAtar', num_envs=64, unroll_length=4, total_steps=2_000_000,
  )  # fmt: skip


def muzero_asterix() -> Config:
  """MuZero on MinAtar Asterix, with an image as the hidden state: a return above 20."""
  from podrace.agents.muzero import MuZero
  from podrace.networks import LearnedModel
  from podrace.replay import Buffer

  # A vector as the hidden state learns too little of where things are: it stays at a return of 1.
  network = LearnedModel(
    blocks=1, channels=8, normalize=False, head_hidden=(64,), v_min=-15.0, v_max=15.0
  )
  buffer = Buffer(
    100_000, batch_size=32, min_size=2_000, samples_per_insert=4.0,
    priority_exponent=0.6, importance_exponent=0.4,
  )  # fmt: skip
  return Config(
    agent=MuZero(
      network, buffer, simulations=8, unroll=3, n_step=3, bootstrap='target', target_period=500,
      learning_rate=7e-4, entropy_cost=0.01, discount=0.97,
    ),
    env='gymnax:Asterix-MinAtar', num_envs=64, unroll_length=4, total_steps=1_000_000,
  )  # fmt: skip


def muesli_catch() -> Config:
  """Muesli on Catch: return 1."""
  from podrace.agents.muesli import Muesli
  from podrace.networks import LearnedModel

  network = LearnedModel(
    hidden=(64,),
    latent=32,
    dynamics_hidden=(64,),
    head_hidden=(32,),
    bins=21,
    v_min=-2.0,
    v_max=2.0,
  )
  return Config(
    agent=Muesli(network, capacity=20_000, unroll=3, learning_rate=1e-3, anneal_learning_rate=True),
    env='podrace:catch', num_envs=32, unroll_length=8, total_steps=150_000,
  )  # fmt: skip


def muesli_cartpole() -> Config:
  """Muesli on CartPole."""
  from podrace.agents.muesli import Muesli
  from podrace.networks import LearnedModel

  return Config(
    agent=Muesli(
      LearnedModel(v_min=-1.0, v_max=200.0),
      learning_rate=1e-3,
      anneal_learning_rate=True,
      discount=0.995,
    ),
    env='gymnax:CartPole-v1', num_envs=32, unroll_length=16, total_steps=500_000,
  )  # fmt: skip


def muesli_minatar() -> Config:
  """Muesli on MinAtar Breakout; give another game by --env."""
  from podrace.agents.muesli import Muesli
  from podrace.networks import LearnedModel

  network = LearnedModel(
    hidden=(128,), latent=128, dynamics_hidden=(128,), head_hidden=(64,), v_min=-1.0, v_max=110.0
  )
  return Config(
    agent=Muesli(
      network, capacity=200_000, learning_rate=1e-3, anneal_learning_rate=True, discount=0.99
    ),
    env='gymnax:Breakout-MinAtar', num_envs=64, unroll_length=16, total_steps=3_000_000,
  )  # fmt: skip


PRESETS: dict[str, Callable[[], Config]] = {
  'catch': catch,
  'cartpole': cartpole,
  'minatar-breakout': minatar_breakout,
  'memory': memory,
  'brax-inverted-pendulum': brax_inverted_pendulum,
  'snake': snake,
  'pong': pong,
  'ppo-pong': ppo_pong,
  'dqn-cartpole': dqn_cartpole,
  'rainbow-minatar': rainbow_minatar,
  'r2d2-memory': r2d2_memory,
  'sac-pendulum': sac_pendulum,
  'sac-brax': sac_brax,
  'd4pg-pendulum': d4pg_pendulum,
  'dqn-pong': dqn_pong,
  'r2d2-pong': r2d2_pong,
  'apex-pong': apex_pong,
  'r2d2-remote-memory': r2d2_remote_memory,
  'muzero-catch': muzero_catch,
  'muzero-cartpole': muzero_cartpole,
  'muzero-pendulum': muzero_pendulum,
  'muzero-tictactoe': muzero_tictactoe,
  'muzero-connect-four': muzero_connect_four,
  'muzero-minatar': muzero_minatar,
  'muzero-asterix': muzero_asterix,
  'muesli-catch': muesli_catch,
  'muesli-cartpole': muesli_cartpole,
  'muesli-minatar': muesli_minatar,
}
