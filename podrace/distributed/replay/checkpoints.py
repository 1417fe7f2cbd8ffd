"""Checkpoints of a replay service: now and then, when clients ask, and at its end."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from podrace.distributed.net.connections import Peer
from podrace.distributed.net.listener import Listener
from podrace.distributed.net.safe_text import TokenBucket
from podrace.distributed.replay import replay_messages
from podrace.system import files
from podrace.system.locks import lock
from podrace.system.threads import Worker
from podrace.tables import CheckpointError, checkpoint

SAVES_AT_ONCE, SAVE_SECONDS = 5, 30.0  # that clients ask for: so many, then one in so many seconds
SAVES = 256  # clients that wait for a checkpoint to be written
KEEP = 2  # checkpoints


class Saving:
  """A directory of checkpoints, which is this service's until `unlock`; or none, and no checkpoints.

  Args:
    every: seconds between them; 0 for none by time.
    snapshot: what is to be written.

  Attributes:
    saved: those that are there, the newest last.

  Raises:
    CheckpointError: if another service has the directory, or it can't be written to.
  """

  def __init__(
    self,
    dir: Path | None,
    every: float,
    snapshot: Callable[[], checkpoint.Snapshot],
    listener: Listener,
  ) -> None:
    self._dir, self._every, self._snapshot, self._listener = dir, every, snapshot, listener
    self.saved: list[Path] = []
    self._lock: IO[str] | None = None
    if dir is not None:
      self._lock = locked(dir)
      for partial in dir.glob('.*.partial-*'):  # of a process that was killed while it wrote
        files.remove(partial)
        listener.log(f'removed {partial}, which was half-written')
      self.saved = sorted(p for p in dir.iterdir() if p.name.isdigit())
    self._number = int(self.saved[-1].name) if self.saved else 0
    self._saver: Worker | None = None
    self._wanted: list[tuple[Peer, int]] = []
    self._saved_at = time.monotonic()
    self._saves = TokenBucket(SAVES_AT_ONCE, 1 / SAVE_SECONDS)
    self._not_saved = ''  # why the last one was not written

  def unlock(self) -> None:
    """Others may have the directory."""
    if self._lock is not None:
      self._lock.close()

  def newest(self) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint, if there is one, and what it has besides tables.

    Raises:
      CheckpointError: if it is damaged.
    """
    if not self.saved:
      return None
    newest = self.saved[-1]
    try:
      extra = checkpoint.extra_of(newest)
    except CheckpointError as e:
      before = f'to begin with {self.saved[-2]}' if self.saved[1:] else 'to begin without one'
      raise CheckpointError(f'{e}; {before}, move {newest} elsewhere') from e
    if not isinstance(extra, dict) or 'streams' not in extra:
      raise CheckpointError(f'checkpoint {newest} is not of a replay service')
    return newest, extra

  def want(self, peer: Peer, number: int) -> None:
    """Lets a client know when a checkpoint is written; raises ValueError if there are none, or too many wait."""
    if self._dir is None:
      raise ValueError(f'{self._listener.address} has no --dir, so it keeps no checkpoints')
    if len(self._wanted) >= SAVES:
      raise ValueError(f'{SAVES} others wait for a checkpoint already')
    self._wanted.append((peer, number))

  def turned(self) -> None:
    """Begins a checkpoint if it is time, or clients wait for one and have not had too many lately."""
    if self._every and time.monotonic() - self._saved_at > self._every:
      self._save()
    if self._wanted and not self._is_writing and self._saves.left >= 1:
      self._saves.take(1)
      self._save()

  @property
  def _is_writing(self) -> bool:
    return self._saver is not None and self._saver.alive

  def _save(self) -> None:
    """Begins a checkpoint of this moment, if none is being written; who has asked hears of it."""
    if self._dir is None or self._is_writing:
      return
    self._saved_at = time.monotonic()
    wanted, self._wanted = self._wanted, []
    self._number += 1
    path = self._dir / f'{self._number:08}'
    self._not_saved = f'{path} is not complete'
    try:
      taken = self._snapshot()
      self._saver = Worker('checkpoint', lambda: self._write(path, taken, wanted))
    except Exception as e:  # no memory, or no more threads: perhaps there are the next time
      self._done(path, wanted, why_not(path, e), False)

  def _write(self, path: Path, taken: checkpoint.Snapshot, wanted: list[tuple[Peer, int]]) -> None:
    try:
      details = checkpoint.write(taken, path)
    except BaseException as e:  # whatever it is, and be it a want of memory: it is no checkpoint
      line, good = why_not(path, e), False
    else:
      line = f'checkpoint {path}: {details["bytes"]:,.0f} bytes in {details["seconds"]:.2f} s, which held up '
      line, good = f'{line}traffic for {details["blocked_s"] * 1e3:.1f} ms', True
    self._listener.call(lambda: self._done(path, wanted, line, good))

  def _done(self, path: Path, wanted: list[tuple[Peer, int]], line: str, good: bool) -> None:
    self._listener.log(line, logging.INFO if good else logging.ERROR, always=True)
    self._not_saved = '' if good else line
    if good:
      self._listener.counts['checkpoints'] += 1
      self.saved.append(path)
      while len(self.saved) > KEEP:
        files.remove(self.saved.pop(0))
    for peer, number in wanted:
      if peer in self._listener.peers:
        self._listener.send(peer, replay_messages.ANSWER, number, good, str(path) if good else line)
    self._wait()  # it has nothing more to do

  def _wait(self) -> None:
    if self._saver is not None:
      self._saver.wait()

  def leave(self) -> None:
    """The last checkpoint, also after a failure of the thread.

    Raises:
      CheckpointError: if it could not be written.
    """
    self._wait()
    self._save()
    self._wait()
    self._listener.do_calls()  # who waits for a checkpoint hears of it
    if self._not_saved:
      raise CheckpointError(f'the last checkpoint was not written: {self._not_saved}')


def locked(dir: Path) -> IO[str]:
  """A directory that is this service's for as long as the file is open; it is made if it is missing.

  Raises:
    CheckpointError: if another one has it, or it can't be written to.
  """
  try:
    files.check_folder(files.make_user_folder(dir), '--dir')
    return lock(dir)
  except BlockingIOError as e:
    raise CheckpointError(
      f'--dir {dir} is in use by another replay service, whose checkpoints would be lost: '
      f'end that one, or give another --dir ({e.strerror})'
    ) from e
  except OSError as e:
    raise CheckpointError(f'--dir {dir} cannot be written to: {e.strerror}') from e


def why_not(path: Path, error: BaseException) -> str:
  """Why there is no checkpoint; with the traceback, where nobody has foreseen it."""
  if isinstance(error, CheckpointError | ValueError | OSError):
    return str(error)
  trace = ''.join(traceback.format_exception(error))
  return f'checkpoint {path} could not be written: {error!r}\n{trace}'
