"""Presets of `podrace train`: whole configurations by name. Importing this does not import jax.

A preset is data: an agent, the settings in which it differs from the defaults of its class, and
the settings of the run. docs/presets.md has the recorded scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from podrace.fields import of_part, replace_paths
from podrace.settings.agents import default_agent
from podrace.settings.config import Config


def _make_config(agent: Any, settings: Mapping[str, Any]) -> Config:
  return Config(agent=agent, **settings)


@dataclasses.dataclass(frozen=True)
class Preset:
  """A configuration as data. Calling it makes the `Config`, or the result of `make`.

  Example:
    config = PRESETS['catch']()
  """

  about: str  # one line for `podrace list`
  agent: str  # a key of AGENTS
  agent_settings: Mapping[str, Any]  # by path, such as network.hidden
  settings: Mapping[str, Any]  # of the run
  make: Callable[[Any, Mapping[str, Any]], Any] = _make_config  # from the agent and `settings`

  def __call__(self) -> Any:
    """Return the configuration."""
    agent = replace_paths(default_agent(self.agent), self.agent_settings)
    return self.make(agent, self.settings)

  @property
  def paths(self) -> dict[str, Any]:
    """All settings by path, the agent's under `agent.`."""
    return {**of_part('agent', self.agent_settings), **self.settings}


_network, _buffer, _actor, _critic = (
  functools.partial(of_part, part) for part in ('network', 'buffer', 'actor', 'critic')
)

R2D2_MEMORY = (  # also of the preset with a replay service
  {'sequence': 22, 'burn_in': 11, 'learning_rate': 1e-3, 'adam_epsilon': 1e-5,
    'target_period': 200}
  | _network(hidden=(32,), core='gru', core_size=32, dueling=True)
  | _buffer(capacity=100_000, batch_size=64, min_size=5_000, samples_per_insert=4.0,
    priority_exponent=0.9)
)  # fmt: skip

PRESETS: Mapping[str, Preset] = {
  'catch': Preset(
    'IMPALA on Catch: return 1 within seconds. What `podrace train` alone does.',
    'impala',
    {'learning_rate': 1e-3} | _network(initializer='lecun', activation='relu'),
    {'env': 'podrace:catch', 'num_envs': 64, 'unroll_length': 16, 'total_steps': 2_000_000},
  ),
  'cartpole': Preset(
    'PPO on CartPole: the full return of 500.',
    'ppo',
    {'learning_rate': 1e-3, 'entropy_cost': 0.0, 'normalize_rewards': True},
    {'env': 'gymnax:CartPole-v1', 'num_envs': 64, 'unroll_length': 32, 'total_steps': 600_000},
  ),
  'minatar-breakout': Preset(
    'PPO on MinAtar Breakout: a return of 20 and more, by seed.',
    'ppo',
    # A convolution is four times slower and gains nothing: the board is 10 x 10.
    {'learning_rate': 5e-3, 'minibatches': 8}
    | _network(torso='mlp', shared=False, activation='relu'),
    {'env': 'gymnax:Breakout-MinAtar', 'num_envs': 64, 'unroll_length': 128,
      'total_steps': 10_000_000},
  ),
  'memory': Preset(
    'Recurrent IMPALA on the memory task: remember a cue over 20 steps.',
    'impala',
    {'learning_rate': 2e-3}
    | _network(initializer='lecun', activation='relu', hidden=(32,), core='gru', core_size=32),
    {'env': 'podrace:memory,length=20', 'num_envs': 64, 'unroll_length': 22,
      'total_steps': 3_000_000},
  ),
  'brax-inverted-pendulum': Preset(
    "PPO with normalized observations on Brax's inverted pendulum: the lightest Brax task.",
    'ppo',
    {'learning_rate': 3e-4, 'anneal_learning_rate': False, 'normalize_observations': True,
      'normalize_rewards': True, 'entropy_cost': 0.0},
    {'env': 'brax:inverted_pendulum', 'num_envs': 64, 'unroll_length': 64,
      'total_steps': 1_000_000},
  ),
  'snake': Preset(
    "PPO on Jumanji's Snake, with its action mask.",
    'ppo',
    {'learning_rate': 1e-3, 'epochs': 2, 'minibatches': 8}
    | _network(torso='grid', hidden=(64,), activation='relu', shared=True),
    {'env': 'jumanji:Snake-v1', 'num_envs': 64, 'unroll_length': 128, 'total_steps': 2_000_000},
  ),
  'pong': Preset(
    'IMPALA on Atari Pong under Sebulba, with the shallow network.',
    'impala',
    {'learning_rate': 5e-4, 'max_grad_norm': 0.5, 'entropy_cost': 0.003}
    | _network(torso='impala', hidden=(256,), initializer='lecun', activation='relu'),
    {'env': 'ale:pong', 'architecture': 'sebulba', 'actor_threads': 1, 'num_envs': 16,
      'unroll_length': 10, 'total_steps': 5_000_000},
  ),
  'ppo-pong': Preset(
    'PPO on Atari Pong under Sebulba: fewer frames than IMPALA, more gradients for each.',
    'ppo',
    {'learning_rate': 5e-4, 'anneal_learning_rate': False, 'epochs': 3, 'minibatches': 4,
      'clip': 0.1}
    | _network(torso='impala', hidden=(256,), activation='relu', shared=True),
    {'env': 'ale:pong', 'architecture': 'sebulba', 'actor_threads': 1, 'num_envs': 16,
      'unroll_length': 64, 'total_steps': 4_000_000},
  ),
  'dqn-cartpole': Preset(
    'Double DQN on CartPole: the full return of 500.',
    'dqn',
    {'learning_rate': 2.5e-4, 'n_step': 3, 'target_period': 250, 'epsilon': 0.02,
      'epsilon_steps': 5_000}
    | _network(hidden=(128, 128), layer_norm=True)
    | _buffer(capacity=50_000, batch_size=128, min_size=2_000, samples_per_insert=16.0),
    {'env': 'gymnax:CartPole-v1', 'num_envs': 16, 'unroll_length': 4, 'total_steps': 500_000},
  ),
  'rainbow-minatar': Preset(
    'Rainbow on MinAtar Breakout, explored by its noise alone; give another game by --env.',
    'dqn',
    {'learning_rate': 2.5e-4, 'n_step': 3, 'double': True, 'target_period': 250, 'epsilon': 0.0,
      'epsilon_steps': 1}
    | _network(torso='grid', hidden=(), head='categorical', num_atoms=51, v_min=0.0, v_max=20.0,
      head_size=128, dueling=True, noisy=True)
    | _buffer(capacity=200_000, batch_size=64, min_size=5_000, samples_per_insert=8.0,
      priority_exponent=0.5, importance_exponent=0.4, importance_steps=1_000_000),
    {'env': 'gymnax:Breakout-MinAtar', 'num_envs': 16, 'unroll_length': 4,
      'total_steps': 1_000_000},
  ),
  'pqn-cartpole': Preset(
    'PQN on CartPole: Q-learning without replay and target network.',
    'pqn',
    {'learning_rate': 5e-4, 'epsilon': 0.2} | _network(hidden=(256, 256)),
    {'env': 'gymnax:CartPole-v1', 'num_envs': 32, 'unroll_length': 64, 'total_steps': 500_000},
  ),
  'pqn-minatar': Preset(
    'PQN on MinAtar Breakout; give another game by --env.',
    'pqn',
    {'learning_rate': 5e-4, 'epochs': 2, 'minibatches': 32, 'lambda_': 0.65, 'epsilon_share': 0.1}
    | _network(torso='grid', hidden=(128,)),
    {'env': 'gymnax:Breakout-MinAtar', 'num_envs': 128, 'unroll_length': 32,
      'total_steps': 10_000_000},
  ),
  'r2d2-memory': Preset(
    'R2D2 on the memory task: remember a cue over 20 steps, with stored states and burn-in.',
    'r2d2',
    R2D2_MEMORY,
    {'env': 'podrace:memory,length=20', 'num_envs': 64, 'unroll_length': 11,
      'total_steps': 400_000},
  ),
  'sac-pendulum': Preset(
    'SAC on Pendulum: about -150, which is as good as it gets.',
    'sac',
    {'actor_learning_rate': 1e-3, 'critic_learning_rate': 1e-3, 'temperature_learning_rate': 1e-3}
    | _actor(hidden=(64, 64))
    | _critic(hidden=(64, 64))
    | _buffer(capacity=100_000, batch_size=256, min_size=1_000, samples_per_insert=128.0),
    {'env': 'gymnax:Pendulum-v1', 'num_envs': 8, 'unroll_length': 8, 'total_steps': 60_000},
  ),
  'sac-brax': Preset(
    "SAC on Brax's inverted pendulum: the full return of 1,000.",
    'sac',
    {'actor_learning_rate': 1e-3, 'critic_learning_rate': 1e-3, 'temperature_learning_rate': 1e-3}
    | _actor(hidden=(128, 128))
    | _critic(hidden=(128, 128))
    | _buffer(capacity=200_000, batch_size=256, min_size=5_000, samples_per_insert=32.0),
    {'env': 'brax:inverted_pendulum', 'num_envs': 64, 'unroll_length': 4, 'total_steps': 200_000},
  ),
  'd4pg-pendulum': Preset(
    'D4PG on Pendulum: about -150.',
    'd4pg',
    {'v_min': -400.0, 'v_max': 0.0, 'actor_learning_rate': 5e-4, 'critic_learning_rate': 1e-3,
      'n_step': 3}
    | _actor(hidden=(64, 64))
    | _critic(hidden=(64, 64))
    | _buffer(capacity=100_000, batch_size=256, min_size=1_000, samples_per_insert=128.0),
    {'env': 'gymnax:Pendulum-v1', 'num_envs': 8, 'unroll_length': 8, 'total_steps': 60_000},
  ),
  'qtopt-pendulum': Preset(
    'QT-Opt on Pendulum, without an actor.',
    'qtopt',
    {'discount': 0.97, 'target_rate': 0.01, 'target_period': 50}
    | _network(v_min=-250.0, v_max=0.0)
    | _buffer(capacity=100_000, batch_size=256, min_size=1_000, samples_per_insert=128.0),
    {'env': 'gymnax:Pendulum-v1', 'num_envs': 8, 'unroll_length': 8, 'total_steps': 60_000},
  ),
  'qtopt-grasp': Preset(
    'QT-Opt on a small grasping task from pixels.',
    'qtopt',
    {'epsilon': 0.2}
    | _network(hidden=(128,), v_min=-0.2, v_max=1.0)
    | _buffer(capacity=200_000, batch_size=128, min_size=5_000, samples_per_insert=10.0),
    {'env': 'podrace:grasp', 'num_envs': 32, 'unroll_length': 8, 'total_steps': 200_000},
  ),
  'dqn-pong': Preset(
    'Double, dueling, prioritised n-step DQN on small frames of Atari Pong under Sebulba.',
    'dqn',
    {'learning_rate': 2e-4, 'n_step': 3, 'target_period': 1_000, 'epsilon': 0.01,
      'epsilon_steps': 50_000}
    | _network(torso='impala', hidden=(256,), dueling=True)
    | _buffer(capacity=200_000, batch_size=32, min_size=10_000, samples_per_insert=8.0,
      priority_exponent=0.5, importance_exponent=0.4),
    {'env': 'ale:pong,size=60', 'architecture': 'sebulba', 'num_envs': 16, 'unroll_length': 8,
      'total_steps': 700_000},
  ),
  'r2d2-pong': Preset(
    "R2D2 on Atari Pong under Sebulba: shorter sequences than SEED RL's, learned from more often.",
    'r2d2',
    {'sequence': 40, 'burn_in': 40, 'learning_rate': 3e-4, 'adam_epsilon': 1e-5,
      'target_period': 150}
    | _network(torso='impala', hidden=(256,), core='lstm', core_size=256, dueling=True)
    | _buffer(capacity=200_000, batch_size=8, min_size=20_000, samples_per_insert=0.1,
      priority_exponent=0.9, importance_exponent=0.6),
    {'env': 'ale:pong', 'architecture': 'sebulba', 'num_envs': 16, 'unroll_length': 40,
      'total_steps': 4_000_000},
  ),
  'apex-pong': Preset(
    'Ape-X DQN on Atari Pong: learner, replay service and acting processes (docs/distributed.md).',
    'dqn',
    {'learning_rate': 1e-4, 'n_step': 3, 'target_period': 2_500, 'epsilon_ladder': True,
      'actor_priorities': True}
    | _network(torso='impala', hidden=(256,), dueling=True)
    | _buffer(capacity=500_000, batch_size=64, min_size=20_000, samples_per_insert=4.0,
      priority_exponent=0.6, importance_exponent=0.4),
    {'env': 'ale:pong', 'architecture': 'sebulba', 'num_envs': 32, 'unroll_length': 16,
      'total_steps': 5_000_000, 'lag': 'async', 'replay': 'service'},
  ),
  'r2d2-remote-memory': Preset(
    'R2D2 on the memory task with a replay service and acting processes (docs/distributed.md).',
    'r2d2',
    R2D2_MEMORY,
    {'env': 'podrace:memory,length=20', 'num_envs': 64, 'unroll_length': 11, 'total_steps': 100_000,
      'architecture': 'sebulba', 'lag': 'async', 'replay': 'service'},
  ),
  'muzero-catch': Preset(
    'MuZero on Catch: return 1, by 8 simulations a move in a learned model.',
    'muzero',
    {'simulations': 8, 'unroll': 3, 'learning_rate': 2e-3}
    | _network(latent=32, hidden=(64,), bins=21, v_min=-2.0, v_max=2.0)
    | _buffer(capacity=20_000, batch_size=64, min_size=1_000, samples_per_insert=8.0,
      priority_exponent=1.0, importance_exponent=1.0),
    {'env': 'podrace:catch', 'num_envs': 32, 'unroll_length': 4, 'total_steps': 60_000},
  ),
  'muzero-cartpole': Preset(
    'MuZero on CartPole: the full return of 500.',
    'muzero',
    {'simulations': 16, 'n_step': 20, 'bootstrap': 'target', 'discount': 0.99}
    | _network(hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), v_min=-1.0, v_max=110.0)
    | _buffer(batch_size=128, min_size=2_000, samples_per_insert=16.0, priority_exponent=0.6,
      importance_exponent=0.4),
    {'env': 'gymnax:CartPole-v1', 'num_envs': 16, 'unroll_length': 4, 'total_steps': 50_000},
  ),
  'muzero-pendulum': Preset(
    'Sampled MuZero on Pendulum, with 12 candidates of each search: about -150.',
    'muzero',
    {'simulations': 12, 'sampled_actions': 12, 'n_step': 3, 'bootstrap': 'target',
      'target_period': 100, 'discount': 0.97, 'entropy_cost': 0.01}
    | _network(hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), v_min=-400.0, v_max=1.0)
    | _buffer(batch_size=128, min_size=1_000, samples_per_insert=128.0, priority_exponent=0.0,
      importance_exponent=0.6),
    {'env': 'gymnax:Pendulum-v1', 'num_envs': 8, 'unroll_length': 8, 'total_steps': 20_000},
  ),
  'muzero-tictactoe': Preset(
    "MuZero's search by the rules of tic-tac-toe, against itself: it never loses.",
    'muzero',
    {'model': 'rules', 'simulations': 32, 'value_scale': 1.0, 'epsilon': 0.3, 'n_step': 0,
      'discount': -1.0}
    | _network(hidden=(256,), head_hidden=(64,), bins=21, v_min=-2.0, v_max=2.0)
    | _buffer(batch_size=256, min_size=2_000, samples_per_insert=4.0, priority_exponent=0.0,
      importance_exponent=0.6),
    {'env': 'pgx:tic_tac_toe,opponent=self,state=true', 'num_envs': 64, 'unroll_length': 4,
      'total_steps': 400_000, 'eval_every': 20_000, 'eval_episodes': 100,
      'eval_env': 'pgx:tic_tac_toe,opponent=random,state=true'},
  ),
  'muzero-connect-four': Preset(
    "MuZero's search by the rules of Connect Four, against itself: it beats a tree search of 100 "
    'rollouts.',
    'muzero',
    {'model': 'rules', 'simulations': 32, 'value_scale': 1.0, 'epsilon': 0.3, 'n_step': 0,
      'discount': -1.0}
    | _network(torso='grid', hidden=(256,), head_hidden=(128,), bins=21, v_min=-2.0, v_max=2.0)
    | _buffer(batch_size=256, min_size=2_000, samples_per_insert=4.0, priority_exponent=0.0,
      importance_exponent=0.6),
    {'env': 'pgx:connect_four,opponent=self,state=true', 'num_envs': 64, 'unroll_length': 4,
      'total_steps': 2_000_000, 'eval_every': 100_000, 'eval_episodes': 100,
      'eval_env': 'pgx:connect_four,opponent=mcts,state=true'},
  ),
  'muzero-minatar': Preset(
    'MuZero on MinAtar Breakout: a return above 50.',
    'muzero',
    # Needs many gradient steps for each environment step: with 2 instead of 16 it stays at 6.
    {'simulations': 8, 'n_step': 5, 'bootstrap': 'target', 'target_period': 1_000,
      'learning_rate': 5e-4, 'entropy_cost': 0.01, 'discount': 0.99}
    | _network(torso='mlp', hidden=(128,), latent=128, dynamics_hidden=(128,), head_hidden=(64,),
      bins=101, v_min=-1.0, v_max=60.0)
    | _buffer(capacity=200_000, batch_size=64, min_size=2_000, samples_per_insert=16.0,
      priority_exponent=0.6, importance_exponent=0.4),
    {'env': 'gymnax:Breakout-MinAtar', 'num_envs': 64, 'unroll_length': 4,
      'total_steps': 2_000_000},
  ),
  'muzero-asterix': Preset(
    'MuZero on MinAtar Asterix, with an image as the hidden state: a return above 20.',
    'muzero',
    # With a vector as the hidden state the return stays at 1: positions are not learned.
    {'simulations': 8, 'unroll': 3, 'n_step': 3, 'bootstrap': 'target', 'target_period': 500,
      'learning_rate': 7e-4, 'entropy_cost': 0.01, 'discount': 0.97}
    | _network(blocks=1, channels=8, normalize=False, head_hidden=(64,), v_min=-15.0, v_max=15.0)
    | _buffer(capacity=100_000, batch_size=32, min_size=2_000, samples_per_insert=4.0,
      priority_exponent=0.6, importance_exponent=0.4),
    {'env': 'gymnax:Asterix-MinAtar', 'num_envs': 64, 'unroll_length': 4, 'total_steps': 1_000_000},
  ),
  'muesli-catch': Preset(
    'Muesli on Catch: return 1.',
    'muesli',
    {'capacity': 20_000, 'unroll': 3, 'learning_rate': 1e-3, 'anneal_learning_rate': True}
    | _network(hidden=(64,), latent=32, dynamics_hidden=(64,), head_hidden=(32,), bins=21,
      v_min=-2.0, v_max=2.0),
    {'env': 'podrace:catch', 'num_envs': 32, 'unroll_length': 8, 'total_steps': 150_000},
  ),
  'muesli-cartpole': Preset(
    'Muesli on CartPole.',
    'muesli',
    {'learning_rate': 1e-3, 'anneal_learning_rate': True, 'discount': 0.995}
    | _network(v_min=-1.0, v_max=200.0),
    {'env': 'gymnax:CartPole-v1', 'num_envs': 32, 'unroll_length': 16, 'total_steps': 500_000},
  ),
  'muesli-minatar': Preset(
    'Muesli on MinAtar Breakout; give another game by --env.',
    'muesli',
    # Small batches, since there are few updates. Breakout has no noise: by the default costs the
    # policy is deterministic after 100,000 steps, and the return stays at 6 to 8.
    {'capacity': 200_000, 'batch_size': 8, 'learning_rate': 5e-4, 'anneal_learning_rate': True,
      'discount': 0.99, 'policy_cost': 1.0, 'cmpo_cost': 0.5, 'entropy_cost': 0.05}
    | _network(torso='grid', hidden=(128,), latent=128, dynamics_hidden=(128,), head_hidden=(64,),
      v_min=-1.0, v_max=110.0),
    {'env': 'gymnax:Breakout-MinAtar', 'num_envs': 64, 'unroll_length': 16,
      'total_steps': 3_000_000},
  ),
}  # fmt: skip
