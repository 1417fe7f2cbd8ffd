"""The numbers that observations of `faults_env` end with."""

from __future__ import annotations

import numpy as np

SCALE = np.float32(2.0**-100)


def read(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Of [T+1, B, 3]: the environments [B], the timesteps' counts [T+1, B], and which streams are whole [B]."""
  found = (np.asarray(numbers, np.float64) / float(SCALE)).astype(np.int64)
  who, count = found[..., 0] << 24 | found[..., 1], found[..., 2]
  return who[0], count, (who == who[0]).all(0) & (np.diff(count, axis=0) == 1).all(0)
