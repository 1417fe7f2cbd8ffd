"""podrace: reinforcement learning at scale in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from podrace.policy import load_policy as load_policy

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  if name == 'load_policy':  # when it is used: the command line is to start quickly
    from podrace.policy import load_policy

    return load_policy
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
