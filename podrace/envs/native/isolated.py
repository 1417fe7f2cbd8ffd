"""Environments in C within a worker process (`isolate=true`). Imports no JAX."""

from __future__ import annotations

import numpy as np

from podrace.envs import env_names
from podrace.envs.host import worker as w
from podrace.envs.host.base import PoolArgs
from podrace.envs.native.environment import compiled, locate, options_text
from podrace.envs.native.library import EnvironmentLibrary
from podrace.envs.native.pool import NativePool
from podrace.envs.spaces import leaves, values
from podrace.types import LAST


class WorkerEnvironments:
  """A worker's environments, stepped by `step`, as `podrace.envs.host.worker` has them.

  Args:
    name: of the environment, with its options.
    seeds: of its environments.
    into: the pool's arrays in shared memory.
    start: the first row of these environments.
  """

  def __init__(
    self,
    name: str,
    seeds: list[int],
    into: dict[str, np.ndarray],
    start: int,
    trial: bool = False,
  ) -> None:
    _, path, options = env_names.parse(name)
    text, library = options_text(path, options), f'c:{path}'
    opened = EnvironmentLibrary(compiled(locate(path), library), library)
    n = len(seeds)
    self._rows, self._start = into, start
    self._into = {k: x[start : start + n] for k, x in into.items()}
    args = PoolArgs(n, n, np.array(seeds, np.uint32), 1, 0.0)
    self._pool = NativePool(opened, opened.spec(text), text, None, args, first=start)
    self._pool.read_infos(into, start)
    self._ids = np.arange(n, dtype=np.int32)
    self._space, self._begun = opened.spec(text).observation_space(), False

  def step(self) -> None:
    """Step all environments. Finished ones ignore the action and begin a new episode."""
    if self._begun:
      self._pool.send(self._ids, self._into[w.ACTION])
    else:
      self._pool.reset()
      self._begun = True
    arrival, into = self._pool.recv(), self._into
    t = arrival.timestep
    for (path, _), x in zip(leaves(self._space), values(self._space, t.observation), strict=True):
      into[path][:] = x
    into[w.REWARD][:], into[w.SCORE][:] = t.reward, arrival.score
    last = t.step_type == LAST
    into[w.TERMINATED][:] = last & (t.discount == 0)
    into[w.TRUNCATED][:] = last & (t.discount != 0)
    self._pool.write_infos(self._rows, self._start)
