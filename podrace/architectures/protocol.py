"""The interface between the loop of a run and an architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from podrace.replay.windows import Windows
from podrace.types import Array

WriteExtra = Callable[[], dict[str, Any]]
"""Writes the folder that belongs to a checkpoint. Returns the record that restoring it needs."""


@dataclasses.dataclass(frozen=True)
class Part:
  """State of a run outside of its arrays, which a checkpoint keeps as JSON.

  Attributes:
    save: returns the state as JSON.
    restore: takes that JSON back, before the run goes on.
  """

  save: Callable[[], Any]
  restore: Callable[[Any], None]


class SavedReplay(Protocol):
  """Replay on the host, which a checkpoint keeps in a folder of its own."""

  def save(self, folder: Path) -> WriteExtra:
    """Take a snapshot. The function returned may run in another thread while the run goes on.

    Raises:
      CheckpointError: from either function, if the folder cannot be written.
    """
    ...

  def restore(self, folder: Path, record: dict[str, Any] | None) -> None:
    """Read the folder, before `start`. `record` is None if the checkpoint has no such folder.

    Raises:
      CheckpointError: if the folder is missing or damaged.
    """
    ...


class Architecture(Protocol):
  """One agent in one kind of environment, ready to run. Its states have `train` and `update`.

  A failure of an architecture is a RunError, or an exception of the agent or of JAX.
  """

  @property
  def mesh(self) -> Any:
    """The mesh of the learning devices."""
    ...

  @property
  def shapes(self) -> Any:
    """A state of shapes, dtypes and shardings, as a checkpoint holds it."""
    ...

  @property
  def ready(self) -> int:
    """The first update that learns. A call ends there, as later updates take longer."""
    ...

  @property
  def windows(self) -> Windows | None:
    """The sizes of replay, on any machine; None if replay holds the newest trajectory only."""
    ...

  @property
  def parts(self) -> Mapping[str, Part]:
    """State on the host that a checkpoint keeps, by its key in the checkpoint's meta."""
    ...

  @property
  def saved_replay(self) -> SavedReplay | None:
    """Replay that is not in the state; None if there is none that this process saves."""
    ...

  def compile(self) -> None:
    """Compile, and open connections: everything that takes long and needs no state."""
    ...

  def init(self, keys: Array) -> Any:
    """Return the first state, from a PRNG key for each seed [seeds]."""
    ...

  def start(self, state: Any, keys: Array) -> None:
    """Begin to act from `state`, after `parts` and `saved_replay` were restored."""
    ...

  def advance(self, state: Any, updates: int, cancelled: Callable[[], bool]) -> tuple[Any, int]:
    """Make up to `updates` updates, fewer if `cancelled()` becomes true.

    Returns:
      The state and the number of updates made.
    """
    ...

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    """Return a summary since the last reading (see `Anakin.read_log`) and the state after it."""
    ...

  def health(self, state: Any) -> tuple[Any, Any]:
    """Return the first update with non-finite loss, else -1; and if all parameters are finite."""
    ...

  def finish(self, state: Any) -> None:
    """Tell the processes that take part in the run that it is complete."""
    ...

  def close(self) -> None:
    """Stop acting, and close connections."""
    ...
