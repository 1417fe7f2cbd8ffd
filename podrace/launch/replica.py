"""A process of a program: its start, what it says, its log, and the pause before it starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from podrace.program import Node

CHUNK = 64 * 1024  # bytes that are read of one process before the others
LONGEST = 256 * 1024  # bytes of a line, after which it is taken for whole
LEFT = 64  # chunks that are read of a process that has ended
END = re.compile(rb'\r?\n|\r')  # of a line; progress bars end theirs with \r


Process = subprocess.Popen[bytes]


def spawn(words: tuple[str, ...], environ: Mapping[str, str], stdin: int) -> Process:
  """A process in a session of its own, whose output is ours to read."""
  return subprocess.Popen(
    words, env=environ, start_new_session=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip


@contextlib.contextmanager
def warmed(environ: Mapping[str, str]) -> Iterator[Process]:
  """A process that imports what `podrace` needs for a learner, and waits to become one; killed if it did not."""
  process = spawn((sys.executable, '-P', '-m', 'podrace.launch.warm'), environ, subprocess.PIPE)
  assert process.stdin is not None
  try:
    yield process
  finally:
    if not process.stdin.closed:
      process.kill()
      process.communicate()


@dataclasses.dataclass
class Replica:
  """One process of a node, or the pause before it."""

  node: Node
  number: int
  due: float | None = 0.0  # when it starts, by the monotonic clock; None: it runs or has ended
  process: Process | None = None
  code: int | None = None  # with which it ended for good
  failures: int = 0  # in a row
  restarts: int = 0
  began: float = 0.0
  rest: bytes = b''  # the beginning of a line that is to come
  log: IO[bytes] | None = None

  @property
  def name(self) -> str:
    return self.node.names[self.number]

  @property
  def state(self) -> str:
    """A word or two, for people."""
    if self.process is not None:
      return 'runs'
    if self.code is not None:
      return f'ended with {self.code}'
    return 'restarts' if self.restarts else 'waits'

  def start(
    self, words: tuple[str, ...], environ: Mapping[str, str], warm: Process | None = None
  ) -> None:
    """Starts the process, in a session of its own; or has one that was started before become it.

    Raises:
      OSError: if there is no such program.
    """
    own = words[0] == 'podrace'
    # -P: as for the command itself, modules of the working directory are not for podrace to import
    words = (sys.executable, '-P', '-m', *words) if own else words
    environ = dict(environ) if own else {'PYTHONUNBUFFERED': '1', **environ}
    if not self.node.gpus and not self.node.main:
      environ |= {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
    self.process = warm or spawn(words, environ, subprocess.DEVNULL)
    if warm is not None:
      assert warm.stdin is not None
      with contextlib.suppress(BrokenPipeError), warm.stdin:  # it has died, which will be seen
        warm.stdin.write(json.dumps(words[words.index('podrace') :]).encode() + b'\n')
    self.due, self.began = None, time.monotonic()
    assert self.process.stdout is not None
    os.set_blocking(self.process.stdout.fileno(), False)

  @property
  def output(self) -> IO[bytes] | None:
    """What it writes to, as long as somebody may."""
    stdout = self.process and self.process.stdout
    return stdout if stdout and not stdout.closed else None

  def read(self) -> bytes | None:
    """Some of what it has written; None if that is nothing now, b'' at the end."""
    return None if self.output is None else self.output.read(CHUNK)

  def lines(self, data: bytes) -> Iterator[str]:
    """The lines that are whole with this."""
    *lines, self.rest = END.split(self.rest + data)
    if len(self.rest) > LONGEST:
      lines, self.rest = [*lines, self.rest], b''
    return (line.decode(errors='replace') for line in lines)

  def write(self, directory: Path, data: bytes) -> None:
    """Adds to its log.

    Raises:
      OSError: if that can't be.
    """
    if self.log is None:
      self.log = (directory / f'{self.name}.log').open('ab', buffering=0)
    self.log.write(data)

  def signal(self, signum: int) -> None:
    """Signals it and the processes that it has started and that stayed in its session."""
    if self.process is not None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.process.pid, signum)

  def ended(self) -> int | None:
    """The exit code as a shell has it, if the process has ended just now. What it may have left is killed."""
    if self.process is None or (code := self.process.poll()) is None:
      return None
    self.signal(signal.SIGKILL)
    return code if code >= 0 else 128 - code
