"""A process of replay_service.py, of either side: writes or samples when it is told to."""

from __future__ import annotations

import time
from typing import Any

import common
import numpy as np
import tables_load as load


def work(side: load.Side, kind: str, frames: str) -> None:
  """Answers {write: seconds} with steps, begin and end; {read: seconds} with items and seconds."""
  steps: Any = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
  if kind == 'atari':
    steps = load.frames_of(frames, 2 * load.EPISODE)
  load.write(side, kind, steps, lambda n: n >= 400)
  common.answer(ready=True)
  for request in common.requests():
    if 'write' in request:
      begin = time.time()
      end = begin + request['write']
      n = load.write(side, kind, steps, lambda n, end=end: time.time() > end)
      common.answer(steps=n, begin=begin, end=time.time())
    else:
      common.answer(items_per_s=load.sampled_per_s(side, kind, steps, request['read']))
