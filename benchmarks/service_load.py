"""A process of replay_service.py, of either side: writes or samples on request."""

from __future__ import annotations

import time
from typing import Any

import common
import tables_load as load


def work(side: load.Side, kind: str, frames: str) -> None:
  """Answers `write` with steps, begin and end; `read` with items/s."""
  steps = load.steps_of(kind, frames, 2)
  load.write(side, kind, steps, lambda n: n >= 400)
  common.answer(ready=True)

  def write(seconds: float) -> dict[str, Any]:
    begin = time.time()
    n = load.write(side, kind, steps, lambda n: time.time() > begin + seconds)
    return dict(steps=n, begin=begin, end=time.time())

  def read(seconds: float) -> dict[str, Any]:
    return dict(items_per_s=load.sampled_per_s(side, kind, steps, seconds))

  common.serve(write=write, read=read)
