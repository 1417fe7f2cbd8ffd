"""Reading of Minari data sets, by HDF5 alone: no code that a data set names is run.

Another user may have written the files. Links, virtual and external storage, objects and arrays of
other sizes than expected are refused before they are read.
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from podrace.envs.host.spaces import action_bounds, wide_bounds
from podrace.envs.logs.recorded import Log, LogRows
from podrace.envs.logs.recorded_spaces import SPACES, spaces_in
from podrace.envs.spaces import MASK, leaves, tree
from podrace.envs.timestep_rules import choices_of
from podrace.errors import MissingExtra, UnreadableFile, UsageError
from podrace.system.files.reading import open_regular, read_json
from podrace.system.importing import why_not
from podrace.types import FIRST, LARGEST_REWARD, LAST, MID

METADATA, MAIN = 'metadata.json', 'main_data.hdf5'
METADATA_BYTES = 2**26
JPEG_HEADER = 2**16  # most bytes of a JPEG besides its image
EPISODES = 2**24
FAULTS = OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError  # of h5py
CHUNK = 2**26  # bytes that a chunk of a small array may have
NUMBERS = {'rewards': 'iuf', 'terminations': 'b', 'truncations': 'b'}  # name -> kinds of dtypes


def minari_home() -> Path:
  """Return the directory of Minari's data sets."""
  root = os.environ.get('MINARI_DATASETS_PATH')
  return Path(root or os.path.expanduser('~/.minari/datasets'))  # Path.home may raise


def memory_limit() -> int:
  """Return the largest size of all arrays in bytes: half of this machine's memory."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 2


def find_data(name: str) -> Path:
  """Return the directory with the files of a data set.

  Args:
    name: the directory of the data set, or its name in Minari's home.

  Raises:
    UsageError: if there is none.
  """
  for folder in (Path(name), minari_home() / name):
    for data in (folder / 'data', folder):
      if os.path.lexists(data / METADATA):
        return data
  raise UsageError(f'there is no Minari data set, neither in this directory nor in {minari_home()}')


def read_log(name: str) -> Log:
  """Read a Minari data set into arrays.

  Args:
    name: the directory of the data set, or its name in Minari's home.

  Raises:
    MissingExtra: if h5py is not installed.
    UsageError: if there is no data set, or it is damaged, too large or of another kind.
  """
  try:
    data = find_data(name)
    metadata = _read_metadata(data)
    observation_space, action_space = spaces_in(metadata)
    with _open(data / MAIN) as file:
      try:
        rows = _Reader(file, observation_space, action_space, metadata.get('total_episodes')).read()
      except (*FAULTS, MemoryError) as e:
        if isinstance(e, UsageError):
          raise
        raise UsageError(f'{MAIN} is damaged: {type(e).__name__}: {e}') from e
  except UsageError as e:
    raise UsageError(f'--log {name}: {e}'.replace('\n', ' ')[:600]) from e
  return Log(name, observation_space, action_space, rows, {k: metadata[k] for k in SPACES})


def read_spaces(name: str) -> tuple[Any, Any]:
  """Return the observation space and the action space of a data set; raises as `read_log`."""
  try:
    return spaces_in(_read_metadata(find_data(name)))
  except UsageError as e:
    raise UsageError(f'--log {name}: {e}'.replace('\n', ' ')[:600]) from e


def _read_metadata(data: Path) -> dict[str, Any]:
  metadata = read_json(data / METADATA, METADATA_BYTES)
  if not isinstance(metadata, dict):
    raise UsageError(f'{METADATA} is no object')
  form = metadata.get('data_format')
  if form != 'hdf5':
    raise UsageError(f'its format is {str(form)[:40]!r}, expected hdf5: record or convert it anew')
  return metadata


def _open(path: Path) -> Any:
  try:
    import h5py
  except Exception as e:  # libraries of the wrong version fail by any exception
    raise MissingExtra(why_not('--log', 'logs', e)) from e
  try:
    file = open_regular(path)
  except FileNotFoundError as e:
    raise UsageError(f'it has no {MAIN}') from e
  try:
    return h5py.File(file, 'r')
  except (OSError, ValueError, OverflowError, RuntimeError) as e:  # of offsets, too
    raise UnreadableFile(MAIN, f'is no HDF5 file, or is cut short: {e}') from e


class _Array:
  """A dataset of an open file, by h5py's low-level functions: data sets have millions of arrays.

  Attributes:
    id: the identifier of h5py.
    name: the path in the file.
    shape: the shape; None without elements.
    dtype: the type of the elements.
  """

  def __init__(self, name: str, identifier: Any) -> None:
    self.id, self.name, self.dtype = identifier, name, identifier.dtype
    self.shape: tuple[int, ...] | None = identifier.shape

  @property
  def nbytes(self) -> int:
    """The bytes of all elements."""
    return math.prod(self.shape or ()) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """Return all elements."""
    import h5py

    values = np.zeros(self.shape or (), self.dtype)
    if values.size:
      self.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def _open_member(group: Any, path: str, name: str) -> Any:
  """Return the identifier of the member `name` of a group, which must be in the file itself."""
  import h5py

  try:
    link = group.links.get_info(name.encode()).type
  except (KeyError, RuntimeError):
    raise UsageError(f'{path or "/"} has no {name}') from None
  if link != h5py.h5l.TYPE_HARD:
    raise UsageError(f'{path}/{name} is a link, which is not followed')
  return h5py.h5o.open(group, name.encode())


def _group(group: Any, path: str, name: str) -> Any:
  """Return the identifier of the group `name` in the group at `path`."""
  import h5py

  member = _open_member(group, path, name)
  if not isinstance(member, h5py.h5g.GroupID):
    raise UsageError(f'{path}/{name} is no group')
  return member


def _array(group: Any, path: str, name: str) -> _Array:
  """Return the dataset `name` in the group at `path`."""
  import h5py

  member = _open_member(group, path, name)
  name = f'{path}/{name}'
  if not isinstance(member, h5py.h5d.DatasetID):
    raise UsageError(f'{name} is no dataset')
  storage, array = member.get_create_plist(), _Array(name, member)
  layout = storage.get_layout()
  if layout == h5py.h5d.VIRTUAL or storage.get_external_count():
    raise UsageError(f'{name} is stored in other files, which are not read')
  if layout == h5py.h5d.CHUNKED:
    _check_chunk(array, math.prod(storage.get_chunk()) * array.dtype.itemsize)
  return array


def _check_chunk(array: _Array, size: int) -> None:
  """Refuse chunks much larger than their array: a small file could fill the memory with them."""
  if size > (limit := max(CHUNK, 4 * array.nbytes)):
    raise UsageError(
      f'{array.name} is stored in chunks of {size:,} bytes, expected at most {limit:,}'
    )


class _Reader:
  """Reads the episodes of an open file: first all lengths, then each array after its checks."""

  def __init__(self, file: Any, observation_space: Any, action_space: Any, count: Any) -> None:
    self._file = file.id
    self._observations, self._action = observation_space, action_space
    names = sum(1 for name in file if name.startswith('episode_'))
    if not names:
      raise UsageError('it has no episodes')
    if names > EPISODES or count != names:
      raise UsageError(f'{METADATA} tells of {str(count)[:40]} episodes, {MAIN} has {names:,}')
    self._episodes = names
    self._leaves = [*leaves(observation_space, 'observations'), ('actions', action_space)]

  def read(self) -> LogRows:
    """Return all timesteps."""
    lengths = [self._count_steps(e) for e in range(self._episodes)]
    total = sum(lengths) + len(lengths)
    row = sum(_row_bytes(leaf) for _, leaf in self._leaves) + 9
    if total * row > (limit := memory_limit()) or total >= 2**31:
      raise UsageError(
        f'its {total:,} timesteps of {row:,} bytes take {total * row / 2**30:.2f} GiB, and at most '
        f'{limit / 2**30:.2f} GiB, half of the memory, are kept: use a '
        'data set with fewer episodes'
      )
    steps = np.array(lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(steps + 1)[:-1]]).astype(np.int32)
    arrays = [np.zeros((total, *leaf.shape), leaf.dtype) for _, leaf in self._leaves]
    rows = LogRows(
      tree(self._observations, iter(arrays[:-1])),
      arrays[-1],
      np.zeros(total, np.float32),
      np.ones(total, np.float32),
      np.full(total, MID, np.int8),
      starts,
    )
    for e, (first, length) in enumerate(zip(starts.tolist(), steps.tolist(), strict=True)):
      self._fill(e, rows, arrays, slice(first, first + length + 1))
    self._check_masks(rows)
    return rows

  def _check_masks(self, rows: LogRows) -> None:
    """Refuse actions that the masks of their observations forbid."""
    mask = rows.observation.get(MASK) if isinstance(rows.observation, dict) else None
    counts = np.array(choices_of(self._action), int)
    if not counts.size or not isinstance(mask, np.ndarray):
      return
    chosen = rows.action.reshape(len(mask), -1) - np.ravel(getattr(self._action, 'start', 0))
    choices = chosen + np.cumsum(counts) - counts
    allowed = mask.reshape(len(mask), -1) != 0
    if allowed.shape[1] != counts.sum():
      raise UsageError(
        f'its {MASK} has {allowed.shape[1]} entries, not the {counts.sum()} of actions'
      )
    is_wrong = ~np.take_along_axis(allowed, choices, 1).all(1) & (rows.step_type != LAST)
    if is_wrong.any():
      row = int(np.argmax(is_wrong))
      e = int(np.searchsorted(rows.starts, row, 'right')) - 1
      raise UsageError(
        f'/episode_{e}/actions has at step {row - rows.starts[e]} an action that its {MASK} forbids'
      )

  def _leaf(self, episode: Any, at: str, path: str) -> _Array:
    """Return the array of a leaf in the episode at `at`, as `leaves` names its path."""
    name: str
    name, *parts = path.split('/')
    space = self._observations
    for part in parts:
      episode, at = _group(episode, at, name), f'{at}/{name}'
      is_dict = hasattr(space, 'keys')
      key = part.replace('~0', '~')
      name = key if is_dict else f'_index_{part}'
      space = space[key if is_dict else int(part)]
    return _array(episode, at, name)

  def _count_steps(self, e: int) -> int:
    """Return the number of steps of an episode."""
    name = f'episode_{e}'
    rewards = _array(_group(self._file, '', name), f'/{name}', 'rewards')
    shape = rewards.shape
    if shape is None or len(shape) != 1 or shape[0] < 1:
      raise UsageError(f'{rewards.name} has the shape {shape}, expected one number a step')
    return int(shape[0])

  def _fill(self, e: int, rows: LogRows, arrays: list[np.ndarray], at: slice) -> None:
    """Read an episode into its rows."""
    path = f'/episode_{e}'
    episode = _group(self._file, '', path[1:])
    steps = at.stop - at.start - 1
    for array, (name, leaf) in zip(arrays, self._leaves, strict=True):
      is_action = name == 'actions'
      read = self._leaf(episode, path, name)
      values = _fit(_read(read, leaf, steps + (not is_action)), leaf, read.name, is_action)
      array[at] = np.concatenate([values, values[:1]]) if is_action else values
    numbers = {name: _array(episode, path, name) for name in NUMBERS}
    for name, kinds in NUMBERS.items():
      _check_array(numbers[name], (steps,), kinds)
    reward, terminated, truncated = (numbers[name].read() for name in NUMBERS)
    if not (np.abs(reward.astype(np.float64)) <= LARGEST_REWARD).all():
      raise UsageError(f'{path}/rewards has numbers that are not finite, or too large')
    if (early := np.flatnonzero((terminated | truncated)[:-1])).size:
      raise UsageError(f'{path} goes on after its end at step {early[0]}')
    rows.reward[at][1:] = reward
    rows.discount[at][-1] = 0.0 if terminated[-1] else 1.0
    rows.step_type[at][0], rows.step_type[at][-1] = FIRST, LAST


def _read(array: _Array, leaf: Any, rows: int) -> np.ndarray:
  """Return the `rows` rows of a leaf, after a check of the type and the size of its array."""
  if not _holds_jpeg(array, leaf):
    kinds = {'b': 'b', 'f': 'f'}.get(np.dtype(leaf.dtype).kind, 'iu')
    _check_array(array, (rows, *leaf.shape), kinds)
    return array.read()
  shape = array.shape or ()
  if shape[0] != rows:
    raise UsageError(f'{array.name} has {shape[0]} images, expected {rows}')
  limit = JPEG_HEADER + 4 * _row_bytes(leaf)
  if len(shape) == 2 and shape[1] > limit:
    raise UsageError(f'{array.name} has images of {shape[1]:,} bytes, expected at most {limit:,}')
  return _decode(array, leaf, rows)


def _row_bytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _check_array(array: _Array, shape: tuple[int, ...], kinds: str) -> None:
  """Refuse an array of another shape or kind of numbers. Nothing is read."""
  if array.shape != shape or array.dtype.kind not in kinds:
    raise UsageError(
      f'{array.name} is {array.dtype}{list(array.shape or ())}, expected '
      f'{" or ".join({"b": "bool", "i": "int", "u": "uint", "f": "float"}[k] for k in kinds)}'
      f'{list(shape)}'
    )
  if array.nbytes > (limit := memory_limit()):  # of wider numbers than the space has
    raise UsageError(
      f'{array.name} is {array.dtype} of {array.nbytes:,} bytes, expected at most {limit:,}'
    )


def _fit(values: np.ndarray, leaf: Any, name: str, is_action: bool) -> np.ndarray:
  """Return an array in the type of its space, with actions within their bounds."""
  with np.errstate(over='ignore'):
    fitted: np.ndarray = values.astype(leaf.dtype)
  if fitted.dtype.kind == 'f' and not np.isfinite(fitted).all():
    raise UsageError(f'{name} has numbers that are not finite')
  if fitted.dtype.kind in 'iu' and (fitted != values).any():
    raise UsageError(f'{name} has numbers that {fitted.dtype} cannot hold')
  if not is_action and hasattr(leaf, 'low'):
    return fitted
  low, high = action_bounds(leaf)
  wide = wide_bounds(leaf) or (low, high)
  if ((fitted < wide[0]) | (fitted > wide[1])).any():
    advice = ': clip them when recording' if is_action else ''
    raise UsageError(f'{name} has values outside of {leaf}{advice}')
  return np.clip(fitted, low, high)


def _holds_jpeg(array: _Array, leaf: Any) -> bool:
  """Return whether each row of an array is a JPEG, as Minari writes images."""
  import h5py

  if np.dtype(leaf.dtype) != np.uint8 or len(leaf.shape) not in (2, 3):
    return False
  dimensions = len(array.shape or ())
  varying = h5py.check_vlen_dtype(array.dtype)
  if varying is not None:
    return bool(varying == np.uint8) and dimensions == 1
  return bool(array.dtype == np.uint8) and dimensions == 2


def _decode(array: _Array, leaf: Any, rows: int) -> np.ndarray:
  """Return the images [rows, ...] of an array of JPEGs."""
  try:
    from PIL import Image
  except ImportError as e:
    raise MissingExtra(why_not('--log', 'logs', e)) from e
  import h5py

  images, dataset = np.empty((rows, *leaf.shape), np.uint8), h5py.Dataset(array.id)
  for i in range(rows):
    try:
      image = Image.open(io.BytesIO(dataset[i].tobytes()), formats=('JPEG',))
      if image.size != leaf.shape[1::-1]:
        raise UsageError(f'{array.name} has an image of {image.size}, expected {leaf.shape}')
      images[i] = np.array(image, np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
      if isinstance(e, UsageError):
        raise
      raise UsageError(f'{array.name} has an image that cannot be read: {e}') from e
  return images
