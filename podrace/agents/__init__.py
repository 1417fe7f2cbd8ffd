"""Agents: one paper, one file. `AGENTS` says where each is, without importing it."""

from __future__ import annotations

import importlib
from typing import Any

AGENTS = {
  'impala': ('podrace.agents.impala', 'Impala'),
  'ppo': ('podrace.agents.ppo', 'PPO'),
}


def agent_class(name: str) -> Any:
  """The class of the agent called `name`."""
  module, attribute = AGENTS[name]
  return getattr(importlib.import_module(module), attribute)


def agent_name(agent: Any) -> str:
  """What the class of `agent` is called in AGENTS."""
  for name, (module, attribute) in AGENTS.items():
    if (type(agent).__module__, type(agent).__name__) == (module, attribute):
      return name
  raise ValueError(f'{type(agent).__name__} is not one of podrace.agents: {", ".join(AGENTS)}')
