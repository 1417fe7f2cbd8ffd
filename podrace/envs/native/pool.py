"""A batch of environments in C, stepped by the threads that all batches of a process share."""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podrace.envs.host.base import PoolArgs
from podrace.envs.host.infos import COUNTS, NAMES, SUMS, Infos, no_rows
from podrace.envs.host.timesteps import EVERY, everyone, rows_of
from podrace.envs.native.build import HERE, compile_library
from podrace.envs.native.frame import Frame
from podrace.envs.native.library import (
  TEXT,
  EnvironmentLibrary,
  Functions,
  Int32,
  Int64,
  NativeSpec,
  Pointer,
  text_of,
)
from podrace.envs.spaces import leaves, tree, values
from podrace.errors import HostError, RunError
from podrace.types import LAST, Arrival, TimeStep


class Part(ctypes.Structure):
  """`part` of pool.c."""

  _fields_ = (('offset', Int64), ('bytes', Int64))


@functools.cache
def shared_pool(name: str) -> Any:
  """Return pool.c, compiled. All batches of the process use this one.

  Raises:
    UsageError: if there is no compiler; the message names `name`.
  """
  pool = ctypes.CDLL(str(compile_library(HERE / 'pool.c', name)))
  texts = (ctypes.c_char_p, ctypes.c_size_t)
  for function, result, arguments in (
    ('batch_open', Pointer, (
      ctypes.POINTER(Functions), ctypes.c_char_p, ctypes.c_char_p, Int64, Int64, Pointer, Int32,
      Int32, ctypes.POINTER(Part), Int64, Int64, Int64, Int32, Pointer, Pointer, *texts)),
    ('batch_close', None, (Pointer,)),
    ('batch_reset', None, (Pointer,)),
    ('batch_send', ctypes.c_int, (Pointer, Int64, Pointer)),
    ('batch_recv', ctypes.c_int, (Pointer,)),
    ('batch_save', Int64, (Pointer, *(Pointer,) * 5)),
    ('batch_load', Int64, (Pointer, *(Pointer,) * 5)),
    ('batch_render', None, (Pointer, Int64, Pointer)),
    ('pool_workers', ctypes.c_int, ()),
    ('pool_ends', None, ()),
  ):  # fmt: skip
    f = getattr(pool, f'podrace_{function}')
    f.restype, f.argtypes = result, arguments
  atexit.register(pool.podrace_pool_ends)
  return pool


class NativeInfos:
  """The numbers for the log of all pools of a kind of environment."""

  def __init__(self) -> None:
    self.infos = Infos()
    self._open: weakref.WeakSet[NativePool] = weakref.WeakSet()

  def open(self, pool: NativePool) -> None:
    """Add a pool."""
    self._open.add(pool)
    self.infos.open(pool.rows)

  def close(self, pool: NativePool) -> None:
    """Keep the sums of a pool that ends."""
    self._open.discard(pool)
    pool.write_infos(pool.rows, 0)
    self.infos.close(pool.rows)

  def means(self) -> dict[str, float]:
    """Return the means since the last call, by their names in metrics.jsonl."""
    for pool in list(self._open):
      pool.write_infos(pool.rows, 0)
    return self.infos.means()


class NativePool:
  """Environments in C. A batch is one call, without Python's lock.

  With `batch_size` below `num_envs`, jobs come back in the order in which they were sent.

  Owner: an actor thread.
  Ends when: `close` is called.
  Raises: RunError if an environment cannot be made; HostError if it cannot be saved or restored.

  Args:
    library: the environment's functions.
    spec: its spaces and sizes.
    options: JSON.
    infos: receives the numbers for the log.
    args: of the actor thread.
    first: the number of the first environment, on which seeds depend.
  """

  watches_itself = False

  def __init__(
    self,
    library: EnvironmentLibrary,
    spec: NativeSpec,
    options: bytes,
    infos: NativeInfos | None,
    args: PoolArgs,
    first: int = 0,
  ) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._library, self._spec, self._name = library, spec, library.name
    self._space = spec.observation_space()
    self._ids = everyone(args.num_envs)
    self._run_id = np.zeros(args.num_envs, np.int32)
    self._frames: list[Frame] = []
    self._jobs: collections.deque[Frame] = collections.deque()
    self._last: Arrival | None = None  # of all environments
    self._sums, self._counts = np.zeros((2, args.num_envs, max(len(spec.info), 1)))
    self._infos, self.rows = infos, no_rows(1)
    self._pool = shared_pool(self._name)
    self._batch = self._open(options, args, first)
    if infos is not None:
      infos.open(self)

  def _open(self, options: bytes, args: PoolArgs, first: int) -> Any:
    s = self._spec
    # The leaves of a Dict may be in another order than the declared arrays.
    by_name = {a.name: Part(o, a.bytes) for a, o in zip(s.observation, s.offsets(), strict=True)}
    names = list(self._space) if s.observation[0].name else ['']
    parts = (Part * len(names))(*(by_name[n] for n in names))
    seeds = args.seeds.astype(np.uint64) % 2**31  # as processes with environments have them
    error = ctypes.create_string_buffer(TEXT)
    batch = self._pool.podrace_batch_open(
      self._library.functions(), self._name.encode(), options, self.num_envs, first,
      seeds.ctypes.data, args.threads,
      len(names), parts, s.obs_bytes, s.act_bytes, s.state_bytes, len(s.info),
      self._sums.ctypes.data, self._counts.ctypes.data, error, TEXT,
    )  # fmt: skip
    if not batch:
      raise RunError(f'{self._name}: {text_of(error)}')
    return batch

  def reset(self) -> None:
    """Begin an episode in every environment."""
    while self._jobs:
      self.recv()
    self._pool.podrace_batch_reset(self._batch)
    for i in range(0, self.num_envs, self.batch_size):
      self._job(self._ids[i : i + self.batch_size])

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions [b] to environments `env_id` [b], which begin to step."""
    whole = rows_of(env_id, self.num_envs) is EVERY
    if not whole or len(env_id) > self.batch_size:
      self._check_ids(np.asarray(env_id))
    self._job(self._ids if whole else env_id, action)

  def _check_ids(self, ids: np.ndarray) -> None:
    whole = len(ids) and ids.min() >= 0 and ids.max() < self.num_envs
    if not whole or len(ids) > self.batch_size or np.bincount(ids).max() > 1:
      raise HostError(
        f'{self._name}: actions for environments {ids}, expected 1 to {self.batch_size} distinct '
        f'ones below {self.num_envs}'
      )

  def _job(self, ids: np.ndarray, action: Any = None) -> None:
    frame = next((f for f in self._frames if f.is_free), None)
    if frame is None:
      frame = Frame(self._spec, self._space, self.batch_size)
      self._frames.append(frame)
    n = len(ids)
    frame.ids[:n] = ids
    if action is not None:
      frame.act[:n] = action
    in_order = ids is self._ids or (n == self.num_envs and bool((ids == self._ids).all()))
    frame.sent = self._ids if in_order else frame.ids[:n].copy()
    if self._pool.podrace_batch_send(self._batch, n, frame.pointer):
      raise HostError(f'{self._name}: there is no memory left')
    self._jobs.append(frame)

  def recv(self) -> Arrival:
    """Wait for the oldest job. The waiting thread steps environments, too."""
    if not self._jobs:
      raise HostError(f'{self._name}: recv before reset or send')
    self._pool.podrace_batch_recv(self._batch)
    frame = self._jobs.popleft()
    ids, frame.sent = frame.sent, None
    assert ids is not None
    n = len(ids)
    arrays: Any = [*frame.observation, frame.reward, frame.discount, frame.step_type, frame.score]
    if n < self.batch_size:
      arrays = [x[:n] for x in arrays]
    *observation, reward, discount, step_type, score = arrays
    timestep = TimeStep(tree(self._space, iter(observation)), reward, discount, step_type)
    ended = step_type == LAST
    arrival = Arrival(ids, timestep, score, ended, self._run_id[:n])
    self._last = arrival if ids is self._ids else None
    return arrival

  def write_infos(self, rows: Mapping[str, np.ndarray], row: int) -> None:
    """Write the sums of the numbers for the log to a row."""
    if n := len(self._spec.info):
      text = json.dumps(self._spec.info).encode()
      rows[NAMES][row, : len(text)] = np.frombuffer(text, np.uint8)
      rows[SUMS][row, :n], rows[COUNTS][row, :n] = self._sums.sum(0), self._counts.sum(0)

  def read_infos(self, rows: Mapping[str, np.ndarray], row: int) -> None:
    """Go on from the sums of a row, of an earlier process with these environments."""
    n = len(self._spec.info)
    self._sums[0, :n], self._counts[0, :n] = rows[SUMS][row, :n], rows[COUNTS][row, :n]

  @property
  def renders(self) -> bool:
    """Whether `render` works."""
    return self._spec.render != (0, 0)

  def render(self, env: int = 0) -> np.ndarray:
    """Return the picture [height, width, 3] u8 of an environment."""
    rgb = np.zeros((*self._spec.render, 3), np.uint8)
    self._pool.podrace_batch_render(self._batch, env, rgb.ctypes.data)
    return rgb

  # --- the state ----------------------------------------------------------------------------------

  @property
  def saves(self) -> bool:
    """Whether `state` and `restore` work."""
    return self._spec.state_bytes > 0 and self.batch_size == self.num_envs

  def state(self) -> dict[str, np.ndarray]:
    """Return all that is needed to go on to the bit: a copy, of at most 32 bits an element.

    The environments must wait for actions. The state has their bytes, the numbers of their
    episodes, their seeds, and the last timesteps. Numbers for the log are not part of it.

    Raises:
      HostError: if they do not wait for actions, or cannot be saved.
    """
    self._check_saves()
    if self._last is None or self._jobs:
      raise HostError(f'{self._name}: its state is known when all environments wait for actions')
    state = self._empty_state()
    self._save(state)
    t: Any = self._last.timestep
    state |= {k: getattr(t, k) for k in ('reward', 'discount', 'step_type')}
    state['score'] = self._last.score
    state |= dict(zip(self._paths(), values(self._space, t.observation), strict=True))
    return {k: np.array(x.view(np.uint32) if x.dtype.itemsize > 4 else x) for k, x in state.items()}

  def restore(
    self, state: Mapping[str, Any], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Restore a saved state without a step; returns the timesteps that wait for actions.

    Raises:
      HostError: if it is no state of these environments. They are as before.
    """
    self._check_saves()
    while self._jobs:
      self.recv()
    into, before = self._empty_state(), self._empty_state()
    frame = Frame(self._spec, self._space, self.num_envs)
    targets = {k: x.view(np.uint32) if x.dtype.itemsize > 4 else x for k, x in into.items()}
    targets |= dict(zip(self._paths(), frame.observation, strict=True))
    targets |= {k: getattr(frame, k) for k in ('reward', 'discount', 'step_type', 'score')}
    for key, target in targets.items():
      x = np.asarray(state[key]) if key in state else np.zeros(0)
      if (x.shape, x.dtype) != (target.shape, target.dtype):
        raise HostError(
          f'{self._name}: the saved {key} is {x.dtype}{list(x.shape)}, expected '
          f'{target.dtype}{list(target.shape)}'
        )
      target[...] = x
    if not ((into['sizes'] >= 0) & (into['sizes'] <= self._spec.state_bytes)).all():
      raise HostError(f'{self._name}: saved sizes are not 0 to {self._spec.state_bytes} bytes')
    if is_fresh := self._last is None:  # the interface has a reset come first
      self.reset()
      self.recv()
    self._save(before)
    failed = self._pool.podrace_batch_load(self._batch, *_addresses(into))
    if failed >= 0:
      before['episodes'] -= np.uint64(is_fresh)
      self._pool.podrace_batch_load(self._batch, *_addresses(before))
      self._last = None if is_fresh else self._last
      raise HostError(f'{self._name}: podrace_load of environment {failed} refused its saved state')
    fields: Any = frame.reward, frame.discount, frame.step_type
    t: Any = TimeStep(tree(self._space, iter(frame.observation)), *fields)
    self._last = Arrival(self._ids, t, frame.score, t.last, self._run_id)
    return self._last

  def _save(self, state: dict[str, np.ndarray]) -> None:
    """Write the environments' states, seeds and numbers of episodes to arrays."""
    failed = self._pool.podrace_batch_save(self._batch, *_addresses(state))
    if failed >= 0:
      raise HostError(
        f'{self._name}: podrace_save of environment {failed} returned {state["sizes"][failed]}, '
        f'expected 0 to {self._spec.state_bytes} bytes'
      )

  def _check_saves(self) -> None:
    if not self.saves:
      raise HostError(
        f'{self._name} has no state to save: state_bytes is {self._spec.state_bytes}, and batches '
        f'are of {self.batch_size} of {self.num_envs} environments'
      )

  def _empty_state(self) -> dict[str, np.ndarray]:
    n = self.num_envs
    return dict(
      bytes=np.zeros((n, self._spec.state_bytes), np.uint8),
      sizes=np.zeros((n, 1), np.int64),
      episodes=np.zeros((n, 1), np.uint64),
      seeds=np.zeros((n, 1), np.uint64),
      over=np.zeros(n, bool),
    )

  def _paths(self) -> list[str]:
    return [path for path, _ in leaves(self._space)]

  def kill(self) -> None:
    """Do nothing: there are no processes."""

  def close(self) -> None:
    """Close the environments, after the chunks that are under way."""
    if self._batch:
      if self._infos is not None:
        self._infos.close(self)
      self._pool.podrace_batch_close(self._batch)
      self._batch = None
      self._jobs.clear()


STATE = ('bytes', 'sizes', 'episodes', 'seeds', 'over')  # in the order of podrace_batch_save


def _addresses(state: Mapping[str, np.ndarray]) -> list[int]:
  return [state[k].ctypes.data for k in STATE]
