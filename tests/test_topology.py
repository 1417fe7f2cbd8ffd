"""What each process of a run has of a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace import topology


def test_one_process_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
  assert topology.share(7) == 7
  assert topology.everyones([1, 0.1]).tolist() == [[1, 0.1]]
  assert topology.from_first('a run') == 'a run'
  assert topology.own_rows(jnp.arange(3)).tolist() == [0, 1, 2]
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert topology.share(7) == 4


def test_rows_come_in_the_order_of_the_batch() -> None:
  """Whatever the order of this process's devices."""

  def shard(start: int) -> Any:
    return SimpleNamespace(index=(slice(start, start + 2),), data=np.arange(start, start + 2))

  x: Any = SimpleNamespace(is_fully_addressable=False, addressable_shards=[shard(6), shard(4)])
  assert topology.own_rows(x).tolist() == [4, 5, 6, 7]
