"""Writing of episodes as a Minari data set, by Minari's library."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podrace.envs.spaces import map_leaves, values
from podrace.errors import MissingExtra, RunError, UsageError
from podrace.system.files import create_folder, make_user_folder, move
from podrace.system.importing import why_not
from podrace.system.process import scratch_directory

FILE, ARRAY = 2**16, 4096  # bytes that HDF5 takes besides numbers, at most


class Episode(NamedTuple):
  """One episode of L steps."""

  observations: Any  # [L + 1, ...] a pytree of arrays
  actions: np.ndarray  # [L, ...]
  rewards: np.ndarray  # [L] f32
  terminated: bool
  truncated: bool  # by a time limit of the environment, or of the recording
  seed: int


def check_target(folder: Path) -> None:
  """Raise UsageError if a data set cannot be written to a new directory `folder`.

  Raises:
    MissingExtra: if Minari is not installed.
  """
  if os.path.lexists(folder):
    raise _existing(folder)
  _storage_class()


def _storage_class() -> Any:
  try:
    import h5py  # noqa: F401
    from minari.dataset.minari_storage import MinariStorage
  except Exception as e:  # libraries of the wrong version fail by any exception
    raise MissingExtra(why_not('podrace record', 'logs', e)) from e
  return MinariStorage


def write_log(
  folder: Path, observation_space: Any, action_space: Any, batches: Iterable[Any], about: Any
) -> int:
  """Write a data set to a new directory, whole or not at all.

  Args:
    folder: the directory of the data set. Minari finds it by name if it is in Minari's home.
    observation_space: of the environment.
    action_space: of the environment.
    batches: lists of episodes, which are written one list after the other.
    about: entries for the metadata.

  Returns:
    Bytes of the files.
  """
  import minari
  from minari.data_collector import EpisodeBuffer

  folder = folder.absolute()  # Minari mistakes a relative path
  with _failing(folder):
    make_user_folder(folder.parent)
  with contextlib.ExitStack() as stack:
    with _failing(folder):
      draft = stack.enter_context(scratch_directory(f'.{folder.name}.', folder.parent)) / 'log'
      create_folder(draft)
      _check_space(draft, observation_space, ())
      storage = _storage_class().new(
        draft / 'data', observation_space, action_space, jpeg_encoding=False
      )
    for episodes in batches:
      with _failing(folder):
        _check_space(draft / 'data', observation_space, episodes)
        storage.update_episodes(EpisodeBuffer(**_buffer(e)) for e in episodes)
    known = {'dataset_id': dataset_id(folder.name), 'minari_version': minari.__version__}
    with _failing(folder):
      storage.update_metadata({**known, **about})
      size = sum(x.stat().st_size for x in (draft / 'data').iterdir())
      move(draft, folder)
  return size


def _check_space(folder: Path, observation_space: Any, episodes: Iterable[Episode]) -> None:
  """Raise OSError if the disk, a quota or a limit of the process leaves no space for episodes.

  HDF5 ends the process by a segmentation fault if it cannot write.
  """
  arrays = [x for e in episodes for x in (*values(observation_space, e.observations), *e[1:])]
  size = FILE + sum(ARRAY + np.asarray(x).nbytes for x in arrays)
  limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
  written = sum(x.stat().st_size for x in folder.iterdir())
  if limit != resource.RLIM_INFINITY and written + size > limit:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
  with tempfile.TemporaryFile('w+b', dir=folder) as file:
    if hasattr(os, 'posix_fallocate'):  # not on macOS
      os.posix_fallocate(file.fileno(), 0, size)


@contextlib.contextmanager
def _failing(folder: Path) -> Iterator[None]:
  """Raise a failure to write as RunError; UsageError if another process made the data set."""
  try:
    yield
  except FileExistsError:
    raise _existing(folder) from None
  except OSError as e:
    raise RunError(f'--to {folder} cannot be written: {e.strerror or e}') from e


def _existing(folder: Path) -> UsageError:
  return UsageError(f'--to {folder} exists already: name a new directory')


def dataset_id(name: str) -> str:
  """Return a directory's name as Minari names data sets: NAME-vN."""
  plain = re.sub(r'[^\w-]+', '-', name).strip('-') or 'log'
  return plain if re.fullmatch(r'[-\w]+-v\d+', plain) else f'{plain}-v0'


def _buffer(episode: Episode) -> dict[str, Any]:
  flags = np.zeros((2, len(episode.rewards)), bool)
  flags[:, -1] = episode.terminated, episode.truncated
  return {
    'seed': episode.seed,
    'observations': episode.observations,
    'actions': episode.actions,
    'rewards': episode.rewards,
    'terminations': flags[0],
    'truncations': flags[1],
  }


def cut_episodes(
  observation_space: Any, timesteps: Any, actions: Any, lengths: np.ndarray, seeds: np.ndarray
) -> list[Episode]:
  """Return the first episode of each of n environments.

  Args:
    observation_space: of the environment.
    timesteps: [T + 1, n, ...] from FIRST on.
    actions: [T, n, ...].
    lengths: [n] steps of each episode.
    seeds: [n] of the environments.
  """
  episodes = []
  for i, length in enumerate(lengths.tolist()):
    seen = map_leaves(
      lambda _, x, i=i, length=length: x[: length + 1, i], observation_space, timesteps.observation
    )
    terminated = bool(timesteps.discount[length, i] == 0)
    reward = np.asarray(timesteps.reward[1 : length + 1, i], np.float32)
    episodes.append(
      Episode(seen, actions[:length, i], reward, terminated, not terminated, int(seeds[i]))
    )
  return episodes
