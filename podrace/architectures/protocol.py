"""What a run needs of an architecture: the same functions, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from podrace.replay.windows import Windows
from podrace.types import Array

Extra = Callable[[], dict[str, Any]]  # writes what belongs to a checkpoint; how to restore it


class Architecture(Protocol):
  """One agent in one kind of environment, ready to run. Its states have `train` and `update`."""

  @property
  def mesh(self) -> Any: ...
  @property
  def shapes(self) -> Any:
    """A state of shapes, dtypes and shardings: what a checkpoint holds."""
    ...

  @property
  def ready(self) -> int:
    """The first update that learns, for which a call ends: from there on updates take longer."""
    ...

  @property
  def windows(self) -> Windows | None:
    """The sizes of its replay, wherever that is; None if it is that of the newest trajectory."""
    ...

  def compile(self) -> None: ...
  def init(self, keys: Array) -> Any: ...

  def start(self, state: Any, keys: Array, statistics: dict[str, Any]) -> None:
    """Begins acting from `state`; `statistics` is what `statistics()` gave when the state was saved."""
    ...

  def advance(self, state: Any, updates: int, give_up: Callable[[], bool]) -> tuple[Any, int]:
    """The state after so many updates, or after those that were made until `give_up`."""
    ...

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    """What happened since the last reading (see `Anakin.read_log`), and the state after."""
    ...

  def health(self, state: Any) -> tuple[Any, Any]:
    """The first update whose loss was not finite or -1; whether all parameters are finite."""
    ...

  def statistics(self) -> dict[str, Any]:
    """What the host has counted since the log was last read, for a checkpoint."""
    ...

  def results(self, run_dir: Path, state: Any) -> None:
    """Writes what else a run has to show at a checkpoint of `state`, for others to use."""
    ...

  def save(self, path: Path) -> Extra | None:
    """Takes a snapshot of what there is besides the state; what writes it to a new directory.

    None if there is nothing. The function may be called in another thread while the run goes on.
    It returns what `restore` wants, and raises CheckpointError if it can't write.
    """
    ...

  def finished(self, state: Any) -> None:
    """The run is complete; processes that take part in it may know."""
    ...

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    """Reads what `save` wrote, before `start`; raises CheckpointError if it is damaged."""
    ...

  def close(self) -> None: ...
