"""Fixed inputs for the update of Disco, as formulas: for what is recorded of the released code, and for the test.

It imports numpy alone, because the released code runs in an environment of its own.
"""

from __future__ import annotations

import math

import numpy as np

T, B, A, Y, BINS = 5, 4, 3, 600, 601  # steps, streams, actions, predictions, atoms of a value
UPDATES = 3
LEARNING_RATE = 0.01
SHAPES = {'logits': (A,), 'y': (Y,), 'z': (A, Y), 'q': (A, BINS), 'aux_pi': (A, A)}
SHOWN = {
  'logits': 1,
  'y': 151,
  'z': 401,
  'q': 401,
  'aux_pi': 7,
}  # every so many-th number is recorded
LAST = [(2, 0), (4, 1), (1, 3), (5, 3)]  # timesteps and streams where an episode ends, of the first


def wave(shape: tuple[int, ...], number: int) -> np.ndarray:
  """Numbers within [-1, 1] that look like chance."""
  i = np.arange(math.prod(shape), dtype=np.float64)
  return np.sin(i * (0.37 + 0.11 * number) + number).astype(np.float32).reshape(shape)


def predictions() -> dict[str, np.ndarray]:
  """A table of what is predicted in each timestep [T+1, B, ...]: the parameters that are learned."""
  found = {k: wave((T + 1, B, *shape), i) for i, (k, shape) in enumerate(SHAPES.items())}
  atoms = np.arange(BINS, dtype=np.float32) - BINS // 2
  found['q'] = found['q'] * 2 - 0.02 * (atoms + 4 * found['logits'][..., None]) ** 2
  return found


def trajectory(update: int) -> dict[str, np.ndarray]:
  """Actions and logits of the behaviour [T+1, B, ...], rewards, and where episodes end."""
  step, stream = np.meshgrid(np.arange(T + 1), np.arange(B), indexing='ij')
  last = np.zeros((T + 1, B), bool)
  for t, b in LAST:
    last[t, (b + update) % B] = True
  reward = 2 * wave((T + 1, B), 10 + update)
  reward[1:][last[:-1]] = 0
  action = (step * 2 + stream * stream + update + step * stream) % A
  return dict(
    action=action.astype(np.int32), last=last, reward=reward, behaviour=1.5 * wave((T + 1, B, A), 20 + update)
  )  # fmt: skip


def shown(params: dict[str, np.ndarray]) -> dict[str, list[float]]:
  """Some of the numbers of each table."""
  return {k: rounded(np.asarray(params[k]).ravel()[::each]) for k, each in SHOWN.items()}


def rounded(x: np.ndarray) -> list[float]:
  """f32 numbers, with as many digits as they have."""
  return [float(f'{v:.8g}') for v in np.asarray(x, np.float32).ravel()]
