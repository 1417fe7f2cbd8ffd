"""A process of a program: its start, what it says, its log, and the pause before it starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from podrace.launch.program import Node, is_one_of_several
from podrace.system.files import open_append
from podrace.system.process import python

CHUNK = 64 * 1024  # bytes that are read of one process before the others
LONGEST = 256 * 1024  # bytes of a line, after which it is taken for whole
LEFT = 64  # chunks that are read of a process that has ended
END = re.compile(rb'\r?\n|\r')  # of a line; progress bars end theirs with \r


NO_ACCELERATORS = {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
Process = subprocess.Popen[bytes]


def spawn(
  words: tuple[str, ...], environ: Mapping[str, str], stdin: int, pass_fds: tuple[int, ...] = ()
) -> Process:
  """A process in a session of its own, whose output is ours to read."""
  return subprocess.Popen(
    words, env=environ, start_new_session=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    pass_fds=pass_fds,
  )  # fmt: skip


class Child(Protocol):
  """A process that was started, here or elsewhere.

  Attributes:
    pid: here, of its session; None if it is elsewhere.
    stdout: what it says, a pipe that does not block.
  """

  pid: int | None
  stdout: IO[bytes]

  def poll(self) -> int | None:
    """The exit code as a shell has it; None as long as it runs."""

  def signal(self, signum: int) -> None:
    """Signals it and the processes that it has started and that stayed in its session."""

  def wait(self) -> object:
    """Waits for the end of one that was killed."""


class Group:
  """A process on this machine, with those of its session; a Child."""

  def __init__(self, process: Process) -> None:
    assert process.stdout is not None
    self._process, self.stdout, self.wait = process, process.stdout, process.wait
    self.pid: int | None = process.pid
    os.set_blocking(self.stdout.fileno(), False)

  def poll(self) -> int | None:
    code = self._process.poll()
    return code if code is None or code >= 0 else 128 - code

  def signal(self, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signum)


Start = Callable[[Node, int, tuple[str, ...]], Child]  # of a replica of a node: its words


@dataclasses.dataclass
class Here:
  """Starts processes on this machine.

  Args:
    environ: of the processes.
  """

  environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)

  def __call__(self, node: Node, number: int, words: tuple[str, ...]) -> Child:
    """Starts a replica in a session of its own.

    Raises:
      OSError: if there is no such program.
    """
    words = runnable(words)
    environ = {**self.environ, **settings(node)}
    return Group(spawn(words, environ, subprocess.DEVNULL))


def runnable(words: tuple[str, ...]) -> tuple[str, ...]:
  """A command, where `podrace` need not be on PATH."""
  return python('-m', *words) if words[0] == 'podrace' else words


def settings(node: Node) -> dict[str, str]:
  """What a node's environment has besides: accelerators are for the main node, and for those that ask.

  Several learners need devices of one kind, and each would take all accelerators.
  """
  unbuffered = {} if node.command[0] == 'podrace' else {'PYTHONUNBUFFERED': '1'}
  has_all = node.gpus or (node.main and not is_one_of_several(node))
  return unbuffered if has_all else unbuffered | NO_ACCELERATORS


@dataclasses.dataclass
class Replica:
  """One process of a node, or the pause before it."""

  node: Node
  number: int
  due: float | None = 0.0  # when it starts, by the monotonic clock; None: it runs or has ended
  follows: float | None = None  # when it starts again, once it has ended, as another has failed
  process: Child | None = None
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

  def start(self, start: Start, words: tuple[str, ...]) -> None:
    """Starts the process.

    Raises:
      OSError: if there is no such program.
    """
    self.process = start(self.node, self.number, words)
    self.due, self.began = None, time.monotonic()

  def follow(self) -> None:
    """Is due when the one that failed is."""
    self.due, self.follows, self.restarts = self.follows, None, self.restarts + 1

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
    self.open_log(directory).write(data)

  def open_log(self, directory: Path) -> IO[bytes]:
    """Open its log, unless that is open; raises as `files.open_append`."""
    if self.log is None:
      self.log = open_append(directory / f'{self.name}.log', 'ab', 0)
    return self.log

  def signal(self, signum: int) -> None:
    """Signals it and the processes that it has started and that stayed in its session."""
    if self.process is not None:
      self.process.signal(signum)

  def ended(self) -> int | None:
    """The exit code as a shell has it, if the process has ended just now. What it may have left is killed."""
    if self.process is None or (code := self.process.poll()) is None:
      return None
    self.signal(signal.SIGKILL)
    return code
