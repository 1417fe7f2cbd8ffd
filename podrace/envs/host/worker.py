"""A process that steps Gymnasium environments in memory it shares with the run. Imports no JAX.

One byte on a pipe has it step (or, at first, reset) all its environments, and answers
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
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from podrace.envs.host.infos import Adder
from podrace.envs.spaces import leaves, values
from podrace.process import tell_of_faults

GO, DONE, FAILED = b'g', b'd', b'f'
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ACTION, REWARD, TERMINATED, TRUNCATED = 'action', 'reward', 'terminated', 'truncated'

Field = tuple[str, str, list[int]]  # name, dtype, shape of one environment's


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


class Leaf:
  """One array of the observations [n, ...] of a worker's environments, in shared memory."""

  def __init__(self, env: str, name: str, space: Any, target: np.ndarray, start: int) -> None:
    self._env, self._name, self._space, self._start = env, name, space, start
    self._shape, self._target = space.shape, target.dtype
    self._rows = [target[i, ...] for i in range(len(target))]
    self._fits: Any = None  # the last type that was seen to fit
    self._wide = False  # it has integers that the memory's has not

  def write(self, i: int, x: Any) -> None:
    """Writes what environment i observes; raises ValueError if it is not as declared."""
    x = np.asarray(x)
    if x.shape != self._shape:
      raise ValueError(f'{self._of(i)} has shape {x.shape}, declared {self._shape}')
    if x.dtype is not self._fits:
      rounds = x.dtype.kind in 'biu' and self._target.kind == 'f'  # though NumPy finds it alike
      if rounds or not np.can_cast(x.dtype, self._target, 'same_kind'):
        raise ValueError(f'{self._of(i)} is {x.dtype}, declared {self._space.dtype}')
      self._fits = x.dtype
      self._wide = x.dtype.kind in 'iu' and not np.can_cast(x.dtype, self._target)
    self._rows[i][...] = x
    if self._wide and np.count_nonzero(self._rows[i] != x):
      raise ValueError(f'{self._of(i)} is {x}, which {self._target} has not')

  def _of(self, i: int) -> str:
    return f'{self._env}: {self._name} of environment {self._start + i}'


class Environments:
  """Some of a pool's environments, with next-step resets.

  `into` are the pool's arrays, in which these environments have the rows from `start` on. What is
  the same for every step is made here: a step of a small environment takes a few microseconds.
  """

  def __init__(
    self,
    name: str,
    label: str,
    options: dict[str, Any],
    seeds: list[int],
    into: dict[str, np.ndarray],
    start: int,
  ) -> None:
    self._label, self._start = label, start
    envs = [gymnasium.make(name, **options) for _ in seeds]
    self._steps, self._resets = [e.step for e in envs], [e.reset for e in envs]
    self._seeds: list[int | None] = list(seeds)  # for the first reset only
    self._over = [True] * len(seeds)
    self._into = {k: x[start : start + len(seeds)] for k, x in into.items()}
    self._space, self._action_space = envs[0].observation_space, envs[0].action_space
    self._leaves = [Leaf(label, n, s, self._into[n], start) for n, s in leaves(self._space)]
    tree = isinstance(self._space, spaces.Dict | spaces.Tuple)
    self._write = self._write_tree if tree else self._leaves[0].write
    self._infos = Adder(into, start)

  def step(self) -> None:
    """Steps all of them; those whose episode is over ignore the action and begin a new one."""
    steps, over, write = self._steps, self._over, self._write
    rewards: list[Any] = []
    terminations: list[Any] = []
    truncations: list[Any] = []
    for i, action in enumerate(actions_for(self._action_space, self._into[ACTION])):
      try:
        if over[i]:
          observation, _ = self._resets[i](seed=self._seeds[i])
          self._seeds[i] = None
          reward: Any = 0.0
          terminated = truncated = False
        else:
          observation, reward, terminated, truncated, info = steps[i](action)
          if info:
            self._infos.add(info)
      except Exception as error:
        error.add_note(f'in environment {self._start + i}')
        raise
      rewards.append(reward)
      terminations.append(terminated)
      truncations.append(truncated)
      write(i, observation)
    self._put(REWARD, rewards)
    self._put(TERMINATED, terminations)
    self._put(TRUNCATED, truncations)
    self._over = (self._into[TERMINATED] | self._into[TRUNCATED]).tolist()

  def _write_tree(self, i: int, observation: Any) -> None:
    for leaf, x in zip(self._leaves, values(self._space, observation), strict=True):
      leaf.write(i, x)

  def _put(self, field: str, numbers: list[Any]) -> None:
    try:
      self._into[field][:] = numbers
    except (TypeError, ValueError) as error:
      kinds = ((x, np.asarray(x)) for x in numbers)
      wrong = next((x for x, y in kinds if y.ndim or y.dtype.kind not in 'biuf'), numbers)
      raise ValueError(f'{self._label}: {field} is {wrong!r}, which is no number') from error


def actions_for(space: Any, x: np.ndarray) -> list[Any]:
  """Actions [n, ...], each as the environment wants it."""
  if isinstance(space, spaces.Discrete):
    return x.tolist()
  return list(x.astype(space.dtype))  # of their own: environments may keep them


def end_with(parent: int) -> None:
  """Has this process killed with the thread that started it, even while it hangs in a step.

  On Linux; elsewhere it ends when it next reads its pipe.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:
    sys.exit(1)


def outlive_signals() -> None:
  """Has SIGINT and SIGTERM do nothing here: the run is the one to stop, and ends its workers.

  Not by SIG_IGN, which what environments start would have as well.
  """
  before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
  os.register_at_fork(after_in_child=lambda: [signal.signal(*x) for x in before.items()])


def tell(answer: int, data: bytes) -> None:
  """Writes to the run; ends this process where the run is gone."""
  try:
    os.write(answer, data)
  except BrokenPipeError:
    os._exit(1)


def main() -> None:
  """What the process runs; its settings are JSON on the command line."""
  outlive_signals()
  tell_of_faults()
  settings = json.loads(sys.argv[1])
  end_with(settings['parent'])
  memory = mmap.mmap(settings['memory'], settings['bytes'])
  into = arrays(memory, [(n, d, s) for n, d, s in settings['fields']], settings['num_envs'])
  ask, answer = settings['ask'], settings['answer']
  try:
    environments = Environments(
      settings['name'],
      settings['label'],
      settings['options'],
      settings['seeds'],
      into,
      settings['start'],
    )
    while os.read(ask, 1) == GO:  # else the run is gone
      environments.step()
      tell(answer, DONE)
  except BaseException:
    text = traceback.format_exc().encode()
    tell(answer, FAILED + len(text).to_bytes(8) + text)


if __name__ == '__main__':
  main()
