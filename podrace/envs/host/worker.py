"""A process that steps Gymnasium environments in memory it shares with the run. Imports no JAX.

It is told by one byte on a pipe to step (or, at first, to reset) all its environments, and answers
with one byte when the results are in the memory; an exception is answered by the length of its
traceback in 8 bytes, and the traceback.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GO, DONE, FAILED = b'g', b'd', b'f'
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ACTION, REWARD, TERMINATED, TRUNCATED = 'action', 'reward', 'terminated', 'truncated'

Field = tuple[str, str, list[int]]  # name, dtype, shape of one environment's


def leaves(space: Any, path: str = 'observation') -> Iterator[tuple[str, Any]]:
  """(name, space) of everything in a space that is an array."""
  if isinstance(space, spaces.Dict):
    for key, sub in space.spaces.items():
      yield from leaves(sub, f'{path}/{key}')
  elif isinstance(space, spaces.Tuple):
    for i, sub in enumerate(space.spaces):
      yield from leaves(sub, f'{path}/{i}')
  else:
    yield path, space


def values(space: Any, x: Any) -> Iterator[Any]:
  """The arrays of an observation, in the order of `leaves`."""
  if isinstance(space, spaces.Dict):
    for key, sub in space.spaces.items():
      yield from values(sub, x[key])
  elif isinstance(space, spaces.Tuple):
    for sub, value in zip(space.spaces, x, strict=True):
      yield from values(sub, value)
  else:
    yield x


def tree(space: Any, leaves: Iterator[Any]) -> Any:
  """The observation that has these arrays, in the order of `leaves`."""
  if isinstance(space, spaces.Dict):
    return {k: tree(s, leaves) for k, s in space.spaces.items()}
  if isinstance(space, spaces.Tuple):
    return tuple(tree(s, leaves) for s in space.spaces)
  return next(leaves)


def arrays(memory: mmap.mmap, fields: list[Field], n: int) -> dict[str, np.ndarray]:
  """Arrays [n, ...] in shared memory, one for each field, each on a cache line of its own."""
  found, offset = {}, 0
  for name, dtype, shape in fields:
    count = n * int(np.prod(shape, dtype=np.int64))
    flat = np.frombuffer(memory, np.dtype(dtype), count, offset)
    found[name] = flat.reshape(n, *shape)
    offset += -(-flat.nbytes // 64) * 64
  return found


def size(fields: list[Field], n: int) -> int:
  """Bytes that `arrays` needs."""
  each = (n * int(np.prod(s, dtype=np.int64)) * np.dtype(d).itemsize for _, d, s in fields)
  return sum(-(-b // 64) * 64 for b in each)


class Environments:
  """Some of a pool's environments, with next-step resets."""

  def __init__(self, name: str, options: dict[str, Any], seeds: list[int]) -> None:
    self._name = name
    self._envs = [gymnasium.make(name, **options) for _ in seeds]
    self._seeds: list[int | None] = list(seeds)  # for the first reset only
    self._over = [True] * len(seeds)

  def step(self, into: dict[str, np.ndarray], start: int) -> None:
    """Steps all of them; those whose episode is over ignore the action and begin a new one."""
    for i, env in enumerate(self._envs):
      row = start + i
      if self._over[i]:
        observation, _ = env.reset(seed=self._seeds[i])
        self._seeds[i] = None
        reward: Any = 0.0
        terminated = truncated = False
      else:
        action = action_for(env.action_space, into[ACTION][row])
        observation, reward, terminated, truncated, _ = env.step(action)
      self._over[i] = bool(terminated or truncated)
      into[REWARD][row] = reward
      into[TERMINATED][row], into[TRUNCATED][row] = terminated, truncated
      self._write(env.observation_space, observation, into, row)

  def _write(self, space: Any, observation: Any, into: dict[str, np.ndarray], row: int) -> None:
    for (name, leaf), x in zip(leaves(space), values(space, observation), strict=True):
      x, target = np.asarray(x), into[name]
      if x.shape != leaf.shape:
        raise ValueError(f'{self._name}: {name} has shape {x.shape}, declared {leaf.shape}')
      if not np.can_cast(x.dtype, target.dtype, 'same_kind'):
        raise ValueError(f'{self._name}: {name} is {x.dtype}, declared {leaf.dtype}')
      target[row] = x


def action_for(space: Any, x: np.ndarray) -> Any:
  """An action as the environment wants it."""
  if isinstance(space, spaces.Discrete):
    return int(x)
  return x.astype(space.dtype)


def end_with(parent: int) -> None:
  """Has this process killed with the thread that started it, even while it hangs in a step.

  On Linux; elsewhere it ends when it next reads its pipe.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:
    sys.exit(1)


def main() -> None:
  """What the process runs; its settings are JSON on the command line."""
  for signum in (signal.SIGINT, signal.SIGTERM):  # the run is told to stop, and ends its workers
    signal.signal(signum, signal.SIG_IGN)
  told = json.loads(sys.argv[1])
  end_with(told['parent'])
  sys.path[:] = told['path']
  memory = mmap.mmap(told['memory'], told['bytes'])
  into = arrays(memory, [(n, d, s) for n, d, s in told['fields']], told['num_envs'])
  ask, answer = told['ask'], told['answer']
  try:
    environments = Environments(told['name'], told['options'], told['seeds'])
    while os.read(ask, 1) == GO:  # else the run is gone
      environments.step(into, told['start'])
      os.write(answer, DONE)
  except BaseException:
    text = traceback.format_exc().encode()
    os.write(answer, FAILED + len(text).to_bytes(8) + text)


if __name__ == '__main__':
  main()
