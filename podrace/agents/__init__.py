"""Agents: one paper, one file. Importing this does not import them."""

AGENTS = {  # what the command line calls them -> module, class
  'impala': ('podrace.agents.impala', 'Impala'),
  'ppo': ('podrace.agents.ppo', 'PPO'),
}
