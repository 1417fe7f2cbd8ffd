"""A process that steps Gymnasium environments in memory shared with the run. Imports no JAX.

One byte on a pipe makes it step (at first, reset) all its environments. It answers with one byte
when the results are in the memory. An exception is answered by FAILED, a length of 8 bytes, and
JSON: a message for the user or null, and the traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from podrace.envs import env_names
from podrace.envs.hidden import make_gymnasium
from podrace.envs.host.infos import FIELDS, InfoAdder
from podrace.envs.host.trial import blame_exception, owner, watch_layers
from podrace.envs.spaces import leaves, values
from podrace.errors import HostError, RunError, UsageError
from podrace.system.blame import describe, refuse
from podrace.system.process import tell_of_faults

GO, DONE, FAILED = b'g', b'd', b'f'
BUSY = b'b'  # a replay goes on
BUSY_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ACTION, REWARD, TERMINATED, TRUNCATED = 'action', 'reward', 'terminated', 'truncated'
SCORE = 'score'  # of environments whose rewards for learning differ from those in reports
SEED = 'seed'  # of the next reset; -1: the environment goes on with its own random numbers

Field = tuple[str, str, list[int]]  # name, dtype, shape of one environment's
ENDS: list[Field] = [(TERMINATED, '|b1', []), (TRUNCATED, '|b1', []), (SEED, '<i8', []), *FIELDS]


def arrays(memory: mmap.mmap, fields: list[Field], n: int) -> dict[str, np.ndarray]:
  """Return arrays [n, ...] in shared memory, one for each field, aligned to cache lines."""
  result, offset = {}, 0
  for name, dtype, shape in fields:
    count = n * int(np.prod(shape, dtype=np.int64))
    flat = np.frombuffer(memory, np.dtype(dtype), count, offset)
    result[name] = flat.reshape(n, *shape)
    offset += -(-flat.nbytes // 64) * 64
  return result


def size(fields: list[Field], n: int) -> int:
  """Return the number of bytes that `arrays` needs."""
  each = (n * int(np.prod(s, dtype=np.int64)) * np.dtype(d).itemsize for _, d, s in fields)
  return sum(-(-b // 64) * 64 for b in each)


class UnfitObservation(HostError):
  """A part of an observation is not as declared. Arguments: description, expectation."""


class ObservationWriter:
  """Writes one array of the observations [n, ...] of a worker's environments to shared memory."""

  def __init__(self, name: str, space: Any, target: np.ndarray) -> None:
    self._name, self._space = name, space
    self._shape, self._target = space.shape, target.dtype
    self._rows = [target[i, ...] for i in range(len(target))]
    self._fits: Any = None  # the last type that fitted
    self._wide = False  # `_fits` has integers that the memory's type has not
    self._wide_floats = False  # `_fits` has floats that the memory's type has not

  def write(self, i: int, came: Any) -> None:
    """Write the observation of environment i.

    Raises:
      UnfitObservation: if it is not as declared.
    """
    try:
      x = np.asarray(came)
    except (TypeError, ValueError) as error:  # a ragged list
      raise self._unfit(describe(came)) from error
    if x.shape != self._shape:
      raise self._unfit(describe(came if x.dtype.kind == 'O' else x))
    if x.dtype is not self._fits:
      rounds = x.dtype.kind in 'biu' and self._target.kind == 'f'  # 'same_kind' for NumPy
      if rounds or not np.can_cast(x.dtype, self._target, 'same_kind'):
        raise self._unfit(describe(came if x.dtype.kind == 'O' else x))
      self._fits = x.dtype
      self._wide = x.dtype.kind in 'iu' and not np.can_cast(x.dtype, self._target)
      self._wide_floats = x.dtype.kind == 'f' and x.dtype.itemsize > self._target.itemsize
    if self._wide_floats:
      self._round(i, x)
    else:
      self._rows[i][...] = x
    if self._wide and np.count_nonzero(self._rows[i] != x):
      raise UnfitObservation(
        f'{self._name} {x}', f'integers that {self._target} has; return less, or floats, or digits'
      )

  def _round(self, i: int, x: np.ndarray) -> None:
    with np.errstate(over='ignore'):
      self._rows[i][...] = x
    if not np.isfinite(self._rows[i]).all() and np.isfinite(x).all():
      raise UnfitObservation(f'{self._name} {x}', f'numbers that {self._target} has')

  def _unfit(self, came: str) -> UnfitObservation:
    declared = f'{self._space.dtype}{list(self._shape)}'
    return UnfitObservation(f'{self._name} {came}', f'{declared}, as the space declares')


class WorkerEnvironments:
  """A worker's environments, with next-step resets.

  `into` has the pool's arrays. These environments own the rows from `start` on. Everything that is
  the same in each step is prepared here: a step of a small environment takes a few microseconds.
  """

  def __init__(
    self,
    name: str,
    seeds: list[int],
    into: dict[str, np.ndarray],
    start: int,
    trial: bool = False,
  ) -> None:
    self._start, self._trial = start, trial
    _, env_id, options = env_names.parse(name)
    envs = [make_gymnasium(env_id, **options) for _ in seeds]
    self._owners = [owner(e) for e in envs]
    if trial:
      envs = [watch_layers(e) for e in envs]
    self._steps, self._resets = [e.step for e in envs], [e.reset for e in envs]
    self._seeds: list[int | None] = list(seeds)  # for the first reset only
    self._over = [True] * len(seeds)
    self._later = into[SEED][start : start + len(seeds)]
    self._into = {k: x[start : start + len(seeds)] for k, x in into.items()}
    self._space, self._action_space = envs[0].observation_space, envs[0].action_space
    self._leaves = [ObservationWriter(n, s, self._into[n]) for n, s in leaves(self._space)]
    tree = isinstance(self._space, spaces.Dict | spaces.Tuple)
    self._write = self._write_tree if tree else self._leaves[0].write
    self._infos = InfoAdder(into, start)

  def step(self) -> None:
    """Step all environments. Finished ones ignore the action and begin a new episode.

    Raises:
      UsageError: if an environment returns values of a wrong form.
      RunError: if an environment raises an exception.
    """
    steps, over, write = self._steps, self._over, self._write
    rewards: list[Any] = []
    terminations: list[Any] = []
    truncations: list[Any] = []
    if self._trial:  # it also resets environments in the middle of an episode
      over = self._over = (over | (self._later >= 0)).tolist()
    for i, action in enumerate(actions_for(self._action_space, self._into[ACTION])):
      try:
        if over[i]:
          observation, _ = self._resets[i](seed=self._seed(i))
          self._seeds[i] = None
          reward: Any = 0.0
          terminated = truncated = False
        else:
          observation, reward, terminated, truncated, info = steps[i](action)
          if info:
            self._infos.add(info)
      except BaseException as error:
        inputs = f'seed {self._seed(i)}' if over[i] else f'the action {describe(action)}'
        inputs = f'{inputs}, in environment {self._start + i}'
        raise blame_exception(self._owners[i], self._name(i), inputs, error) from error
      rewards.append(reward)
      terminations.append(terminated)
      truncations.append(truncated)
      try:
        write(i, observation)
      except UnfitObservation as error:
        refuse(self._owners[i], self._name(i), *error.args)
    self._put(REWARD, rewards, 'biuf', 'a number')
    self._put(TERMINATED, terminations, 'b', 'True or False')
    self._put(TRUNCATED, truncations, 'b', 'True or False')
    self._over = (self._into[TERMINATED] | self._into[TRUNCATED]).tolist()

  def _seed(self, i: int) -> int | None:
    """Return the seed for a reset of environment i."""
    if self._seeds[i] is not None:
      return self._seeds[i]
    later = int(self._later[i])
    return None if later < 0 else later

  def replay(self, history: Mapping[str, Any], beat: Callable[[], None]) -> None:
    """Reset all environments, and take earlier actions in each of them.

    Args:
      history: result of `read_history`.
      beat: called now and then.
    """
    self.step()
    pairs = zip(history['start'], history['count'], strict=True)
    for i, (start, count) in enumerate(pairs):
      actions = history['actions'][start:count, self._start + i]
      over: Any = self._over[i]
      observation: Any = None
      reward: Any = 0.0
      terminated = truncated = False
      for action in actions_for(self._action_space, actions):
        if over:
          observation, _ = self._resets[i](seed=None)
          reward, terminated, truncated = 0.0, False, False
        else:
          observation, reward, terminated, truncated, _ = self._steps[i](action)
        over = terminated or truncated
        beat()
      if start < count:
        self._write(i, observation)
        self._into[REWARD][i] = reward
        self._into[TERMINATED][i], self._into[TRUNCATED][i] = terminated, truncated
        self._over[i] = bool(over)

  def _name(self, i: int) -> str:
    """Return the name of the function that environment i was called by."""
    return 'reset' if self._over[i] else 'step'

  def _write_tree(self, i: int, observation: Any) -> None:
    try:
      parts = list(values(self._space, observation))
    except (TypeError, ValueError, LookupError) as error:
      raise UnfitObservation(
        f'the observation {describe(observation)}', f'one of {self._space}'
      ) from error
    for leaf, x in zip(self._leaves, parts, strict=True):
      leaf.write(i, x)

  def _put(self, field: str, came: list[Any], kinds: str, expected: str) -> None:
    """Write one number of each environment. `kinds` are NumPy's kinds that are accepted."""
    into = self._into[field]
    try:
      x = np.asarray(came)
    except (TypeError, ValueError):  # a ragged list
      x = np.empty(0)
    if x.shape != into.shape or x.dtype.kind not in kinds:
      for i, one in enumerate(came):
        if not is_scalar(one, kinds):
          refuse(self._owners[i], self._name(i), f'{field} {describe(one)}', expected)
    into[:] = came if x.shape != into.shape else x


def is_scalar(x: Any, kinds: str) -> bool:
  """Return whether `x` is a scalar of one of NumPy's kinds. 1 and 0 may be flags."""
  try:
    y = np.asarray(x)
  except (TypeError, ValueError):
    return False
  flag = kinds == 'b' and y.dtype.kind in 'iu' and y.ndim == 0 and int(y) in (0, 1)
  return y.ndim == 0 and (y.dtype.kind in kinds or flag)


def actions_for(space: Any, x: np.ndarray) -> list[Any]:
  """Return actions [n, ...] in the types, shapes and bounds of the results of `space.sample()`."""
  y = x.astype(space.dtype)  # a copy, because environments may keep it
  if isinstance(space, spaces.Discrete):
    return list(y)
  if y.dtype != x.dtype and isinstance(space, spaces.Box):
    y = np.clip(y, space.low, space.high)  # a bound may have been rounded
  return [y[i, ...] for i in range(len(y))]  # arrays, also if the shape is ()


def die_with_parent(parent: int) -> None:
  """Let the kernel kill this process when the thread that started it ends, even during a step.

  This works on Linux. Elsewhere the process ends when it next reads its pipe.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:
    sys.exit(1)


def ignore_signals() -> None:
  """Ignore SIGINT and SIGTERM: the run handles them, and ends its workers.

  SIG_IGN would be inherited by processes that environments start.
  """
  before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
  os.register_at_fork(after_in_child=lambda: [signal.signal(*x) for x in before.items()])


def write_answer(answer: int, data: bytes) -> None:
  """Write to the run, or end this process if the run is gone."""
  try:
    os.write(answer, data)
  except BrokenPipeError:
    os._exit(1)


def read_history(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return the actions [R, N, ...] to replay, and the rows of this worker's environments."""
  file = settings['file']
  memory = mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_READ)
  shape = settings['shape']
  flat = np.frombuffer(memory, np.dtype(settings['dtype']), int(np.prod(shape, dtype=np.int64)))
  return dict(actions=flat.reshape(shape), start=settings['start'], count=settings['count'])


class Beat:
  """Writes BUSY every BUSY_SECONDS, if it is called often."""

  def __init__(self, answer: int) -> None:
    self._answer, self._at = answer, time.monotonic()

  def __call__(self) -> None:
    """Write it if it is time."""
    if time.monotonic() - self._at > BUSY_SECONDS:
      write_answer(self._answer, BUSY)
      self._at = time.monotonic()


def main(settings: Mapping[str, Any]) -> None:
  """Run the process with the settings of `WorkerProcess.start`."""
  ignore_signals()
  tell_of_faults()
  gymnasium.logger.min_level = gymnasium.logger.ERROR  # every worker would warn alike
  die_with_parent(settings['parent'])
  memory = mmap.mmap(settings['memory'], settings['bytes'])
  into = arrays(memory, [(n, d, s) for n, d, s in settings['fields']], settings['num_envs'])
  ask, answer = settings['ask'], settings['answer']
  try:
    maker = importlib.import_module(settings['maker'])
    environments = maker.WorkerEnvironments(
      settings['name'],
      settings['seeds'],
      into,
      settings['start'],
      settings['trial'],
    )
    history = read_history(settings['history']) if 'history' in settings else None
    while os.read(ask, 1) == GO:  # else the run is gone
      if history is not None:
        environments.replay(history, Beat(answer))
        history = None
      else:
        environments.step()
      write_answer(answer, DONE)
  except BaseException as error:
    message = str(error) if isinstance(error, UsageError | RunError) else None
    text = json.dumps([message, traceback.format_exc()]).encode()
    write_answer(answer, FAILED + len(text).to_bytes(8) + text)
