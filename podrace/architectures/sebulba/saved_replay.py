"""Saves and restores replay on the host, a part for each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from podrace import tables
from podrace.architectures.protocol import WriteExtra
from podrace.errors import CheckpointError, ReplayFailed, UsageError
from podrace.replay.host import HostReplay
from podrace.system.files import make_folder, sync, write_json
from podrace.system.files.reading import read_json

PART = 'record.json'  # in the folder of one process, if there is more than one


class SavedHostReplay:
  """The `SavedReplay` of a `HostReplay`.

  Args:
    streams: the actors are saved as well, so the unrolls under way continue.
  """

  def __init__(self, replay: HostReplay, streams: bool) -> None:
    self._replay, self._streams = replay, streams

  def save(self, folder: Path) -> WriteExtra:
    """Take a snapshot; returns a function that writes it to `folder`."""
    part = _part(folder)
    try:
      write = self._replay.save(part, self._streams)
    except ReplayFailed as e:
      raise CheckpointError(f'replay could not be saved to {folder}: {e}') from e

    def write_extra() -> dict[str, Any]:
      try:
        if part != folder:
          make_folder(folder.parent)
        record = write()
        if part != folder:
          write_json(part / PART, record)
          sync(folder.parent.parent)  # the first process also made the parent
        return {**record, 'processes': jax.process_count()}
      except (tables.CheckpointError, OSError) as e:
        raise CheckpointError(f'replay could not be saved to {folder}: {e}') from e

    return write_extra

  def restore(self, folder: Path, record: dict[str, Any] | None) -> None:
    """Read this process's part of `folder`."""
    if record is None:
      raise CheckpointError(f'checkpoint {folder.name} is of a run with replay on the device')
    if (were := record.get('processes', 1)) != jax.process_count():
      raise UsageError(
        f'the checkpoint at step {folder.name} has the replay of {were} process(es), each its own '
        f'part, and this run has {jax.process_count()}: start {were}, or begin another run with '
        '--init-from'
      )
    part = _part(folder)
    if part != folder and (record := read_json(part / PART)) is None:
      raise CheckpointError(f'{part / PART} is not there')
    try:
      self._replay.restore(part, record)
    except tables.CheckpointError as e:
      raise CheckpointError(str(e)) from e


def _part(folder: Path) -> Path:
  """Return the folder of this process within the folder of all processes."""
  return folder if jax.process_count() == 1 else folder / str(jax.process_index())
