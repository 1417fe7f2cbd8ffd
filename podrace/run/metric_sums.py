"""Sums of an agent's metrics in checkpoints: restored by name, as a newer podrace may have more."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np


def with_sums(state: Any, names: Collection[str] | None) -> Any:
  """Return shapes of a state with the sums of these metrics; None: the sums that it has.

  Every sum has the shape of the loss's.
  """
  if names is None:
    return state
  known = state.log.sums
  sums = {name: known.get(name, known['loss']) for name in names}
  return state._replace(log=state.log._replace(sums=sums))


def match_sums(state: Any, names: Collection[str]) -> Any:
  """Return a restored state with the sums of these metrics. Missing ones begin at zero."""
  stored = state.log.sums
  sums = {name: stored[name] if name in stored else _zeros(stored['loss']) for name in names}
  return state._replace(log=state.log._replace(sums=sums))


def _zeros(like: Any) -> Any:
  return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
