"""Agents: one paper, one file. Importing this does not import them."""

from __future__ import annotations

from typing import Any

AGENTS = {  # name on the command line -> module, class
  'impala': ('podrace.agents.impala', 'Impala'),
  'ppo': ('podrace.agents.ppo', 'PPO'),
  'dqn': ('podrace.agents.dqn', 'DQN'),
  'r2d2': ('podrace.agents.r2d2', 'R2D2'),
  'sac': ('podrace.agents.sac', 'SAC'),
  'd4pg': ('podrace.agents.d4pg', 'D4PG'),
  'qtopt': ('podrace.agents.qtopt', 'QTOpt'),
  'muzero': ('podrace.agents.muzero', 'MuZero'),
  'muesli': ('podrace.agents.muesli', 'Muesli'),
  'disco': ('podrace.agents.disco', 'Disco'),
  'lpg': ('podrace.agents.lpg', 'LPG'),
  'intrinsic': ('podrace.agents.intrinsic', 'Intrinsic'),
  'bc': ('podrace.agents.bc', 'BC'),
}

FROM_LOGS = ('bc', 'dqn', 'r2d2', 'sac', 'd4pg', 'qtopt')  # agents that learn from recorded actions

RELATED = {  # other names of algorithms -> the nearest of ours
  **dict.fromkeys(('a2c', 'a3c', 'reinforce', 'vpg', 'v-trace', 'vtrace'), ('impala', 'ppo')),
  **dict.fromkeys(('trpo', 'ppo2', 'ppg'), ('ppo',)),
  **dict.fromkeys(('td3', 'ddpg', 'mpo'), ('sac', 'd4pg')),
  **dict.fromkeys(
    ('rainbow', 'c51', 'qr-dqn', 'qrdqn', 'ddqn', 'double-dqn', 'iqn', 'ape-x', 'apex'), ('dqn',)
  ),
  **dict.fromkeys(('qt-opt', 'cem', 'cem-q', 'caql'), ('qtopt',)),
  **dict.fromkeys(('drqn', 'ngu', 'agent57'), ('r2d2',)),
  **dict.fromkeys(('alphazero', 'efficientzero', 'gumbel-muzero', 'sampled-muzero'), ('muzero',)),
  **dict.fromkeys(('discorl', 'disco-rl', 'disco103', 'disco-103'), ('disco',)),
  **dict.fromkeys(('behavior-cloning', 'behaviour-cloning', 'imitation'), ('bc',)),
  **dict.fromkeys(('learned-policy-gradient', 'groove'), ('lpg',)),
  **dict.fromkeys(('learned-rewards', 'intrinsic-rewards', 'lirpg'), ('intrinsic',)),
}


def agents_for(space: Any) -> list[str]:
  """Return the names of the agents that act in this kind of gymnasium action space."""
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return ['impala', 'ppo', 'dqn', 'r2d2', 'muzero', 'muesli', 'disco', 'lpg', 'intrinsic', 'bc']
  if not isinstance(space, spaces.Box):
    return ['impala', 'ppo', 'muzero', 'bc']
  bounded = ['sac', 'd4pg', 'qtopt', 'muzero'] if space.is_bounded() else []
  return ['impala', 'ppo', *bounded, 'bc']
