"""Checkpoints of a replay service: at intervals, when clients request one, and at its end."""

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
from podrace.system.files.schema import is_step
from podrace.system.locks import lock
from podrace.system.threads import Worker
from podrace.tables import CheckpointError, checkpoint

SAVES_AT_ONCE, SAVE_SECONDS = 5, 30.0  # requested by clients: a burst, then one per SAVE_SECONDS
SAVES = 256  # requests that may wait
KEEP = 2  # checkpoints


class ReplayCheckpoints:
  """The checkpoints of a replay service in a directory that it locks.

  *Owner*: the server. A thread writes one checkpoint at a time.
  *Ends when*: the server calls `leave`, then `unlock`.
  *Raises*: `leave` raises CheckpointError if the last checkpoint failed.

  Args:
    dir: None for no checkpoints.
    every: seconds between checkpoints; 0 for none by time.
    snapshot: takes the state to be written.
    listener: answers the clients.

  Attributes:
    saved: the checkpoints that exist, the newest last.

  Raises:
    CheckpointError: another service uses the directory, or it cannot be written to.
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
      self._lock = _lock_directory(dir)
      for partial in dir.glob('.*.partial-*'):  # of a process that was killed while it wrote
        files.remove(partial)
        listener.log(f'removed {partial}, which was half-written')
      self.saved = sorted(p for p in dir.iterdir() if is_step(p.name))
    self._number = int(self.saved[-1].name) if self.saved else 0
    self._writer: Worker | None = None
    self.requests: list[tuple[Peer, int]] = []
    self._saved_at = time.monotonic()
    self.saves = TokenBucket(SAVES_AT_ONCE, 1 / SAVE_SECONDS)
    self._failure = ''  # why the last checkpoint was not written

  def unlock(self) -> None:
    """Unlock the directory."""
    if self._lock is not None:
      self._lock.close()

  def newest(self) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint, if there is one, and its data besides the tables.

    Raises:
      CheckpointError: it is damaged.
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

  def request(self, peer: Peer, number: int) -> None:
    """Queue a client's request. Raise ValueError without a directory, or if too many wait."""
    if self._dir is None:
      raise ValueError(f'{self._listener.address} has no --dir, so it keeps no checkpoints')
    if len(self.requests) >= SAVES:
      raise ValueError(f'{SAVES} others wait for a checkpoint already')
    self.requests.append((peer, number))

  def turned(self) -> None:
    """Begin a checkpoint if one is due, or was requested and the rate of requests allows it."""
    if self._every and time.monotonic() - self._saved_at > self._every:
      self._save()
    if self.requests and not self._is_writing and self.saves.left >= 1:
      self.saves.take(1)
      self._save()

  @property
  def _is_writing(self) -> bool:
    return self._writer is not None and self._writer.alive

  def _save(self) -> None:
    """Begin to write a checkpoint of this moment, unless one is being written."""
    if self._dir is None or self._is_writing:
      return
    self._saved_at = time.monotonic()
    requests, self.requests = self.requests, []
    self._number += 1
    path = self._dir / f'{self._number:08}'
    self._failure = f'{path} is not complete'
    try:
      snapshot = self._snapshot()
      self._writer = Worker('checkpoint', lambda: self._write(path, snapshot, requests))
    except Exception as e:  # out of memory or threads, which the next attempt may have
      self._finish(path, requests, _describe_failure(path, e), False)

  def _write(
    self, path: Path, snapshot: checkpoint.Snapshot, requests: list[tuple[Peer, int]]
  ) -> None:
    try:
      details = checkpoint.write(snapshot, path)
    except BaseException as e:  # even a MemoryError must not end the service
      line, written = _describe_failure(path, e), False
    else:
      line = (
        f'checkpoint {path}: {details["bytes"]:,.0f} bytes in {details["seconds"]:.2f} s, which '
        f'held up traffic for {details["blocked_s"] * 1e3:.1f} ms'
      )
      written = True
    self._listener.call(lambda: self._finish(path, requests, line, written))

  def _finish(self, path: Path, requests: list[tuple[Peer, int]], line: str, written: bool) -> None:
    """Log the outcome, remove old checkpoints and answer the clients."""
    self._listener.log(line, logging.INFO if written else logging.ERROR, always=True)
    self._failure = '' if written else line
    if written:
      self._listener.counts['checkpoints'] += 1
      self.saved.append(path)
      while len(self.saved) > KEEP:
        files.remove(self.saved.pop(0))
    answer = str(path) if written else line
    for peer, number in requests:
      if peer in self._listener.peers:
        self._listener.send(peer, replay_messages.ANSWER, number, written, answer)
    self._wait()  # the thread has nothing left to do
    self._writer = None  # which has a snapshot: items that are removed since would stay in memory

  def _wait(self) -> None:
    if self._writer is not None:
      self._writer.wait()

  def leave(self) -> None:
    """Write the last checkpoint, also after a failure of the server's thread.

    Raises:
      CheckpointError: it could not be written.
    """
    self._wait()
    self._save()
    self._wait()
    self._listener.do_calls()  # answers the clients that wait
    if self._failure:
      raise CheckpointError(f'the last checkpoint was not written: {self._failure}')


def _lock_directory(dir: Path) -> IO[str]:
  """Make a directory if it is missing, and lock it for as long as the returned file is open.

  Raises:
    CheckpointError: another service has locked it, or it cannot be written to.
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


def _describe_failure(path: Path, error: BaseException) -> str:
  """Return why there is no checkpoint, with the traceback of an unexpected error."""
  if isinstance(error, CheckpointError | ValueError | OSError):
    return str(error)
  trace = ''.join(traceback.format_exception(error))
  return f'checkpoint {path} could not be written: {error!r}\n{trace}'
