"""A worker process of a pool, its pipes, and the memory that they share."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from podrace.envs.host import worker as w
from podrace.envs.host.action_log import ActionLog
from podrace.envs.host.answer_timer import START_SECONDS
from podrace.errors import HostError
from podrace.system.child import import_path, python

TELL_SECONDS = 5.0  # time for a worker to send its exception
KILL_SECONDS = 30.0  # time for a killed process to end

# Not `-m`, which looks for libraries in the working directory first. The settings are in a file,
# because a command line has room for the seeds of a few thousand environments only.
START = (
  'import json, sys; settings = json.load(open(int(sys.argv[1]), encoding="utf-8")); '
  'sys.path[:] = settings["path"]; '
  'import podrace.envs.host.worker as worker; worker.main(settings)'
)


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
  """Return the descriptors that can be read or were closed, after at most `seconds`.

  `select.select` does not work with descriptors from 1,024 on.
  """
  poll = select.poll()
  for fd in descriptors:
    poll.register(fd, select.POLLIN)
  return [fd for fd, _ in poll.poll(seconds * 1000)]


def memory_file(length: int) -> Any:
  """Return a file of `length` bytes to share with workers, in memory on Linux.

  All of it is allocated: a write to a hole ends in a signal if there is no room left.

  Raises:
    OSError: if there is no room for it.
  """
  if hasattr(os, 'memfd_create'):
    file: Any = os.fdopen(os.memfd_create('podrace'), 'w+b')
  else:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
  try:
    if hasattr(os, 'posix_fallocate'):
      os.posix_fallocate(file.fileno(), 0, length)
    else:
      file.truncate(length)
  except BaseException:
    file.close()
    raise
  return file


class History:
  """A file in memory with the actions that workers replay. A context manager."""

  def __init__(self, log: ActionLog) -> None:
    rows = log.rows()
    self._first, self._actions = rows.first, rows.actions
    self._start, self._count = log.start, log.count
    self.file = memory_file(max(self._actions.nbytes, 1))

  def __enter__(self) -> Self:
    self.file.write(np.ascontiguousarray(self._actions).data)
    self.file.flush()
    return self

  def __exit__(self, *exc: object) -> None:
    self.file.close()

  def settings(self, ids: np.ndarray) -> dict[str, Any]:
    """Return what the worker of environments `ids` needs; see `worker.read_history`."""
    return dict(
      file=self.file.fileno(),
      dtype=self._actions.dtype.str,
      shape=self._actions.shape,
      start=(self._start[ids] - self._first).tolist(),
      count=(self._count[ids] - self._first).tolist(),
    )


class WorkerProcess:
  """One process and its pipes.

  Owner: a WorkerPool, which calls `kill` or `end`.
  """

  def __init__(self, first: int, count: int) -> None:
    self.first, self.count = first, count
    self.ids = np.arange(first, first + count, dtype=np.int32)
    self.requested_at: float | None = (
      None  # time of the request, by the pool's clock; None: no answer due
    )
    self.limit = START_SECONDS
    self.begun = False  # the process has reset its environments
    self.lives = 0
    self._pipes: tuple[int, ...] = ()  # to be closed

  def start(
    self, settings: dict[str, Any], memory: int, now: float, history: History | None = None
  ) -> None:
    """Start a new process, which resets its environments, and replays `history` in them.

    `settings` has the seeds of the resets.
    """
    ask_read, self.ask = os.pipe()
    self._pipes = self.ask, ask_read
    self.answer, answer_write = os.pipe()
    self._pipes = self.ask, ask_read, self.answer, answer_write
    settings = {
      **settings,
      'memory': memory,
      'ask': ask_read,
      'answer': answer_write,
      'start': self.first,
    }
    settings['parent'] = os.getpid()
    settings['path'] = import_path()
    if history is not None:
      settings['history'] = history.settings(self.ids)
    text = json.dumps(settings).encode()
    with memory_file(len(text)) as file:
      file.write(text)
      file.seek(0)
      self.process = subprocess.Popen(
        python('-c', START, str(file.fileno())),
        pass_fds=(
          *(memory, ask_read, answer_write, file.fileno()),
          *([] if history is None else [history.file.fileno()]),
        ),
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is for results
        start_new_session=True,  # a Ctrl-C in the terminal reaches only the run
      )
    self._pipes = self.ask, self.answer
    os.close(ask_read)
    os.close(answer_write)
    self.lives += 1
    self.begun = False
    self.go(now, START_SECONDS)

  def go(self, now: float, limit: float) -> None:
    """Request a step, which has `limit` seconds."""
    self.requested_at, self.limit = now, limit
    with contextlib.suppress(BrokenPipeError):  # dead; the answer's pipe will show it
      os.write(self.ask, w.GO)

  @property
  def due(self) -> float:
    """Time when the answer is due."""
    assert self.requested_at is not None
    return self.requested_at + self.limit

  def failure(self) -> tuple[str | None, str]:
    """Return a message for the user or None, and the traceback that came in TELL_SECONDS."""
    text, end = b'', time.monotonic() + TELL_SECONDS
    while len(text) < 8 or len(text) < 8 + int.from_bytes(text[:8]):
      if not readable([self.answer], max(end - time.monotonic(), 0)):
        break
      if not (more := os.read(self.answer, 65536)):
        break
      text += more
    try:
      message, shown = json.loads(text[8:])
    except ValueError:
      return None, text[8:].decode(errors='replace')
    return message, shown

  def kill(self) -> None:
    """Kill the process and its process group, and wait for the process.

    Raises:
      HostError: if it does not end, as while a file system does not answer.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
      os.killpg(self.process.pid, signal.SIGKILL)
    try:
      self.process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired as e:
      raise HostError(
        f'the worker {self.process.pid} did not end {KILL_SECONDS:g} s after SIGKILL: does a file '
        'system or a device of this machine not answer?'
      ) from e

  def end(self) -> None:
    """Close the pipes and kill the process, as `kill`. The next `start` opens others."""
    pipes, self._pipes = self._pipes, ()
    for pipe in pipes:
      os.close(pipe)
    self.kill()
