"""podrace: reinforcement learning at scale in JAX."""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING

from podrace.version import __version__ as __version__

if TYPE_CHECKING:
  from podrace.api import Result as Result
  from podrace.api import configure as configure
  from podrace.api import train as train
  from podrace.errors import EndTraining as EndTraining
  from podrace.policy import load_policy as load_policy
  from podrace.settings.config import Config as Config

# Imported on first use, so that the command line starts quickly.
_MODULES = {
  'train': 'api', 'configure': 'api', 'Result': 'api', 'EndTraining': 'errors',
  'Config': 'settings.config', 'load_policy': 'policy',
}  # fmt: skip


__all__ = ['Config', 'EndTraining', 'Result', '__version__', 'configure', 'load_policy', 'train']


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(_importlib.import_module(f'podrace.{_MODULES[name]}'), name)
