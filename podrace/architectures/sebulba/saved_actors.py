"""States of actor threads that a checkpoint keeps in a file.

A checkpoint holds what each group needs to make the next unroll: the agent's state, the state of
its environments, and its counters. Unrolls under way are made again from there, by the same keys
and versions of the parameters, so nothing of the pipe is kept. Environments in JAX of one process
are in the learner's `State.actors` instead.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podrace.architectures.protocol import WriteExtra
from podrace.architectures.sebulba.pipe import Unroll
from podrace.envs.base import batch
from podrace.envs.host.base import SavedPool
from podrace.envs.host.episodes import EpisodeCounter
from podrace.errors import CheckpointError, HostError, UsageError
from podrace.system.files import make_folder, save_arrays, write_json, write_whole
from podrace.system.files.reading import read_bytes, read_json, read_npz
from podrace.types import HostEnvironment, TimeStep

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram

log = logging.getLogger('podrace')

FILE = 'actors.npz'
RECORD = 'actors.json'  # in the folder of one process, if there is more than one
BYTES = 1 << 32  # largest file


class ActorState(NamedTuple):
  """The state of a group between two unrolls."""

  agent_state: Any  # [N, ...]
  timestep: TimeStep  # [N, ...] to be answered next; without observation if the pool returns it
  environment: Any  # `SavedPool.state`, or the state of environments in JAX
  episodes: Mapping[str, Any]  # `EpisodeCounter.state`
  serial: np.ndarray  # [N] i64, of the next unrolls; see `Unroll`
  keys: np.ndarray  # [2] i64, see `Inference.used_keys`
  digest: np.ndarray  # [32] u8, of the observation; [0] before it is written


def take_state(
  pool: HostEnvironment,
  agent_state: Any,
  timestep: TimeStep,
  episodes: EpisodeCounter,
  serial: np.ndarray,
  keys: np.ndarray,
) -> ActorState | None:
  """Return the state of a group between two steps; None if its environments cannot be saved."""
  if isinstance(pool, SavedPool):
    if not pool.saves:
      return None
    environment: Any = pool.state()
  elif (environment := getattr(pool, 'state', None)) is None:  # of a JaxPool
    return None
  copy = jax.tree.map(np.array, timestep)  # the pool writes to its memory again
  return ActorState(
    agent_state, copy, environment, episodes.state(), serial, keys, np.zeros(0, np.uint8)
  )


def restore_pool(
  name: str, pool: Any, state: ActorState, steps: int, on_step: Callable[[], None]
) -> TimeStep | None:
  """Bring environments back to `state`; returns the timestep to answer.

  Args:
    name: of the environment.
    pool: new environments.
    state: read from a checkpoint.
    steps: since the run began.
    on_step: called after each step that is replayed.

  Returns:
    None if they do not return to it. The reason is logged, and the pool is to be reset.
  """
  t = state.timestep
  if not isinstance(pool, SavedPool):
    pool.restore(state.environment, steps)
    return t
  try:
    restored = pool.restore(state.environment, on_step).timestep
    observation = restored.observation
    if not np.array_equal(digest(observation), state.digest):
      raise HostError('the same seeds and actions led to other observations')
    if not np.array_equal(restored.reward, t.reward):
      raise HostError('the same seeds and actions led to other rewards')
  except (HostError, UsageError) as e:
    log.warning('%s: the environments of %d begin anew: %s', name, pool.num_envs, e)  # type: ignore[attr-defined]
    return None
  return t._replace(observation=observation)


def digest(tree: Any) -> np.ndarray:
  """Return the SHA-256 [32] u8 of the arrays of a tree, with their types and shapes."""
  sha = hashlib.sha256()
  for x in map(np.asarray, jax.tree.leaves(tree)):
    sha.update(f'{x.dtype} {x.shape}\n'.encode())
    sha.update(np.ascontiguousarray(x).tobytes())
  return np.frombuffer(sha.digest(), np.uint8)


class SavedActors:
  """The `SavedReplay` that keeps the states of a process's groups.

  Attributes:
    states: of the groups after the newest update; () if they cannot be saved.
    life: the update at which the groups began anew for the last time.
    reason: why `states` is empty, for the log.
  """

  def __init__(self, acting: ActingProgram) -> None:
    self._acting = acting
    self.states: tuple[ActorState, ...] = ()
    self.life = 0
    self.reason = 'the checkpoint has no state of them'
    self._taken: tuple[ActorState, ...] = ()

  def take(self, unrolls: Sequence[Unroll]) -> None:
    """Take the states at the end of the unrolls of the update under way."""
    states = (u.snapshot for u in unrolls)
    self._taken = tuple(s for s in states if isinstance(s, ActorState))

  def end_update(self) -> None:
    """Note that the update has ended."""
    complete = len(self._taken) == self._acting.local_groups
    self.states = self._taken if complete else ()

  def save(self, folder: Path) -> WriteExtra:
    """Take the states; returns a function that writes them to `folder`."""
    states, life, part = self.states, self.life, part_of(folder)

    def write() -> dict[str, Any]:
      record: dict[str, Any] = {'groups': len(states), 'life': life}
      try:
        for path in dict.fromkeys((folder.parent, folder, part)):
          make_folder(path)
        if states:
          record |= _write(part / FILE, states, self._acting.spec.jax is None)
        if part != folder:
          write_json(part / RECORD, record)
      except OSError as e:
        raise CheckpointError(f'the actors could not be saved to {folder}: {e}') from e
      return {'actors': record, 'processes': jax.process_count()}

    return write

  def restore(self, folder: Path, record: dict[str, Any] | None) -> None:
    """Read the states of this process's groups, if the checkpoint has them.

    Raises:
      CheckpointError: if they are damaged.
    """
    self.states = ()
    if record is None or not isinstance(saved := record.get('actors'), dict):
      return
    if (were := record.get('processes')) != jax.process_count():
      self.reason = f'the checkpoint is of {were} processes, this run has {jax.process_count()}'
      return
    part = part_of(folder)
    if part != folder:
      saved = read_json(part / RECORD)
      if not isinstance(saved, dict):
        raise CheckpointError(f'{part / RECORD} is not there')
    groups, now = saved.get('groups'), self._acting.local_groups
    if groups == 0:
      self.reason = 'their states could not be kept'
    elif groups != now:
      self.reason = (
        f'the checkpoint has {groups} groups of environments, and this run {now} (--actor-threads, '
        '--actor-groups)'
      )
    else:
      arrays = _read(part / FILE, saved)
      try:
        self.states = tuple(_state(_within(arrays, str(i)), self._acting) for i in range(now))
        self.life = int(saved['life'])
      except ValueError as e:
        self.reason = f'the checkpoint has states of other settings: {e}'


def part_of(folder: Path) -> Path:
  """Return the folder of this process within the folder of all processes."""
  return folder if jax.process_count() == 1 else folder / str(jax.process_index())


# --- the file ------------------------------------------------------------------------------------


def _write(path: Path, states: Sequence[ActorState], by_pool: bool) -> dict[str, Any]:
  """Write states, and return entries of the record for `_read`. A file too large is left out."""
  file = io.BytesIO()
  arrays = {f'{i}/{k}': x for i, s in enumerate(states) for k, x in _arrays(s, by_pool).items()}
  save_arrays(file, arrays)
  data = file.getvalue()
  if len(data) > BYTES:
    log.warning(
      'the states of the environments and their policies take %.1f GiB, more than %.0f GiB, and '
      'are not saved: a resumed run begins its environments anew',
      *(len(data) / 2**30, BYTES / 2**30),
    )
    return {'groups': 0}
  write_whole(path, data)
  return {'sha256': hashlib.sha256(data).hexdigest(), 'bytes': len(data)}


def _arrays(state: ActorState, by_pool: bool) -> dict[str, np.ndarray]:
  """Return the arrays of a state. `by_pool`: the pool restores it and returns the observation."""
  s, t = state, state.timestep
  if by_pool:
    arrays = {f'environment/{k}': x for k, x in s.environment.items()}
  else:
    arrays = _numbered('environment', s.environment) | _numbered('observation', t.observation)
  return {
    **arrays,
    **_numbered('agent', s.agent_state),
    **{f'timestep/{k}': getattr(t, k) for k in ('reward', 'discount', 'step_type')},
    **{f'episodes/{k}': np.asarray(x) for k, x in s.episodes.items()},
    'serial': s.serial,
    'keys': s.keys,
    'digest': digest(t.observation),
  }


def _numbered(name: str, tree: Any) -> dict[str, np.ndarray]:
  """Return the leaves of a tree as arrays of numbers that NumPy can store."""
  return {f'{name}/{i}': _stored(x) for i, x in enumerate(jax.tree.leaves(tree))}


def _stored(leaf: Any) -> np.ndarray:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  x = np.asarray(leaf)
  return x.view(f'u{x.dtype.itemsize}') if x.dtype.kind == 'V' else x  # such as bfloat16


def _read(path: Path, record: dict[str, Any]) -> dict[str, np.ndarray]:
  """Return the arrays of a file that is as it was written."""
  try:
    size, life = record.get('bytes'), record.get('life')
    if not isinstance(size, int) or not 0 < size <= BYTES or not isinstance(life, int) or life < 0:
      raise ValueError(f'its record has {size} bytes and life {life}')
    data = read_bytes(path, size)
    if (sha256 := hashlib.sha256(data).hexdigest()) != record.get('sha256'):
      raise ValueError(f'its checksum is {sha256}, expected {record.get("sha256")}')
    return read_npz(data)
  except (OSError, ValueError) as e:
    raise CheckpointError(f'{path} is damaged: {e}') from e


def _state(arrays: Mapping[str, np.ndarray], acting: ActingProgram) -> ActorState:
  """Return the state in these arrays; raises ValueError if one is missing or of another shape."""
  n = acting.envs_per_group
  agent = jax.eval_shape(acting.agent.initial_state, jnp.zeros([n], jnp.int32))
  t: TimeStep = acting.example._replace(observation=())
  if acting.spec.jax is None:
    environment: Any = _within(arrays, 'environment')
  else:
    shapes = jax.eval_shape(batch(acting.spec.jax, n).reset, jax.random.key(0))
    environment = _tree(arrays, 'environment', shapes[0])
    t = t._replace(observation=_tree(arrays, 'observation', acting.example.observation))
  own, names = _within(arrays, 'timestep'), ('reward', 'discount', 'step_type')
  numbers: dict[str, Any] = {k: _fitting(own, k, getattr(acting.example, k)) for k in names}
  t = t._replace(**numbers)
  saved = _within(arrays, 'episodes')
  episodes = {k: _fitting(saved, k, x) for k, x in EpisodeCounter(n).state().items()}
  return ActorState(
    _tree(arrays, 'agent', agent),
    t,
    environment,
    episodes,
    _fitting(arrays, 'serial', np.zeros(n, np.int64)),
    _fitting(arrays, 'keys', np.zeros(2, np.int64)),
    _fitting(arrays, 'digest', np.zeros(32, np.uint8)),
  )


def _within(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
  return {k[len(name) + 1 :]: x for k, x in arrays.items() if k.startswith(f'{name}/')}


def _tree(arrays: Mapping[str, np.ndarray], name: str, shapes: Any) -> Any:
  """Undo `_numbered` for a tree of these shapes."""
  leaves, structure = jax.tree.flatten(shapes)
  return jax.tree.unflatten(
    structure, [_leaf(arrays, f'{name}/{i}', x) for i, x in enumerate(leaves)]
  )


def _leaf(arrays: Mapping[str, np.ndarray], name: str, like: Any) -> Any:
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    numbers = jax.eval_shape(jax.random.key_data, like)
    impl = jax.random.key_impl(jnp.zeros((), like.dtype))
    return jax.random.wrap_key_data(jnp.asarray(_fitting(arrays, name, numbers)), impl=impl)
  dtype = np.dtype(like.dtype)
  plain = np.dtype(f'u{dtype.itemsize}') if dtype.kind == 'V' else dtype
  return _fitting(arrays, name, jax.ShapeDtypeStruct(like.shape, plain)).view(dtype)


def _fitting(arrays: Mapping[str, np.ndarray], name: str, like: Any) -> np.ndarray:
  x = arrays.get(name)
  if x is None:
    raise ValueError(f'it has no {name}')
  if (x.dtype, x.shape) != (like.dtype, like.shape):
    raise ValueError(f'{name} is {x.dtype}{list(x.shape)}, expected {like.dtype}{list(like.shape)}')
  return x
