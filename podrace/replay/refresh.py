"""A function of table columns from an agent's function of windows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from podrace.replay.layout import Columns, Layout, named
from podrace.types import Array


class Refresh:
  """A function, to be compiled, that returns the columns of items which an agent refreshes."""

  def __init__(self, agent: Any, layout: Layout) -> None:
    self._agent, self._layout = agent, layout

  def __call__(self, params: Any, data: Columns, key: Array) -> Columns:
    """Return the refreshed columns [n, L, ...] of items with columns `data` [n, L, ...]."""
    window = self._layout.trajectory(data)
    fresh = self._agent.refresh(params, window, key)
    old, new = named(window.outputs), named(fresh.outputs)
    changed = {k: x for k, x in new.items() if x is not old[k]}  # the rest are the same tracers
    return {k: jnp.moveaxis(x, 1, 0) for k, x in changed.items()}
