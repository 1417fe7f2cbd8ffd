"""Agents: one paper, one file. Importing this does not import them."""

from __future__ import annotations

import math
from typing import Any

AGENTS = {  # what the command line calls them -> module, class
  'impala': ('podrace.agents.impala', 'Impala'),
  'ppo': ('podrace.agents.ppo', 'PPO'),
  'dqn': ('podrace.agents.dqn', 'DQN'),
  'r2d2': ('podrace.agents.r2d2', 'R2D2'),
  'sac': ('podrace.agents.sac', 'SAC'),
  'd4pg': ('podrace.agents.d4pg', 'D4PG'),
}


def check(agent: Any, low: float, high: float, *names: str) -> None:
  """Raises ValueError for the first of these fields that is not within [low, high]."""
  for name in names:
    value = vars(agent)[name]
    if not low <= value <= high:
      bounds = f'within [{low:g}, {high:g}]' if high < math.inf else f'at least {low:g}'
      raise ValueError(f'{name.rstrip("_")} must be {bounds}, not {value}')
