"""Agents: one paper, one file. Importing this does not import them."""

AGENTS = {  # what the command line calls them -> module, class
  'impala': ('podrace.agents.impala', 'Impala'),
  'ppo': ('podrace.agents.ppo', 'PPO'),
  'dqn': ('podrace.agents.dqn', 'DQN'),
  'r2d2': ('podrace.agents.r2d2', 'R2D2'),
  'sac': ('podrace.agents.sac', 'SAC'),
  'd4pg': ('podrace.agents.d4pg', 'D4PG'),
}
