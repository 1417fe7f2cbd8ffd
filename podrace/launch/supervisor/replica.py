"""A replica of a node: its process, output and log, and the pause before it starts again."""

from __future__ import annotations

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
from podrace.run.directory import saved_steps
from podrace.system.child import ChildProcess, python
from podrace.system.files import open_append

CHUNK = 64 * 1024  # bytes read from one process at a time
LONGEST_LINE = 256 * 1024  # bytes, after which a line is passed on without its end
LAST_CHUNKS = 64  # chunks read from a process that has ended
LINE_END = re.compile(rb'\r?\n|\r')  # progress bars end their lines with \r
NO_ACCELERATORS = {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}


class ReplicaProcess(Protocol):
  """A process that was started, on this machine or on another one."""

  @property
  def pid(self) -> int | None:
    """The number of its session on this machine, None on another one."""

  @property
  def stdout(self) -> IO[bytes]:
    """Its output, a pipe that does not block."""

  def poll(self) -> int | None:
    """Return the exit code as a shell has it, None while the process runs."""

  def signal(self, signum: int) -> None:
    """Send a signal to the processes of its session."""

  def wait(self) -> object:
    """Wait for the end of a process that was killed."""


Starter = Callable[[Node, int, tuple[str, ...]], ReplicaProcess]  # (node, replica, command)


@dataclasses.dataclass
class LocalStarter:
  """Starts processes on this machine.

  Args:
    environ: the environment of the processes.
  """

  environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)

  def __call__(self, node: Node, number: int, words: tuple[str, ...]) -> ChildProcess:
    """Start a replica.

    Raises:
      OSError: if the program cannot be started.
    """
    child = ChildProcess(
      expand_podrace(words), environ={**self.environ, **extra_environ(node)},
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.set_blocking(child.stdout.fileno(), False)
    return child


def expand_podrace(words: tuple[str, ...]) -> tuple[str, ...]:
  """Return a command that runs also where `podrace` is not on PATH."""
  return python('-m', *words) if words[0] == 'podrace' else words


def extra_environ(node: Node) -> dict[str, str]:
  """Return the variables of a node's environment besides the ones of its machine.

  Accelerators are for the main node and for nodes with `gpus`. Learners need devices of one kind,
  and each would take all accelerators, so none of several learners has them without `gpus`.
  """
  unbuffered = {} if node.command[0] == 'podrace' else {'PYTHONUNBUFFERED': '1'}
  has_all = node.gpus or (node.main and not is_one_of_several(node))
  return unbuffered if has_all else unbuffered | NO_ACCELERATORS


@dataclasses.dataclass
class Replica:
  """One process of a node, or the pause before it.

  Attributes:
    node: the node.
    number: of the replica, from 0.
    due: when it starts, by the monotonic clock. None: it runs or has ended.
    follows: when it starts again after its end, because another learner has failed. None: not for
      that reason.
    process: the process, None while there is none.
    code: the exit code of its last process, None if it may start again.
    failures: failures in a row.
    newest: the newest checkpoint of the run at the last failure, None if there was none.
    restarts: restarts so far.
    began: when its process was started, by the monotonic clock.
    rest: the beginning of a line, up to the end of the data read so far.
    log: its log, None if it is not open.
  """

  node: Node
  number: int
  due: float | None = 0.0
  follows: float | None = None
  process: ReplicaProcess | None = None
  code: int | None = None
  failures: int = 0
  newest: int | None = None
  restarts: int = 0
  began: float = 0.0
  rest: bytes = b''
  log: IO[bytes] | None = None

  @property
  def name(self) -> str:
    """The name in logs."""
    return self.node.names[self.number]

  @property
  def state(self) -> str:
    """The state, in a word or two."""
    if self.process is not None:
      return 'runs'
    if self.code is not None:
      return f'ended with {self.code}'
    return 'restarts' if self.restarts else 'waits'

  def count_failure(self, directory: Path) -> None:
    """Add to the failures in a row. A healthy life, of a learner with progress, ends the row.

    Args:
      directory: of the run, which may have checkpoints.
    """
    before, backoff = self.newest, self.node.restart
    if self.node.main or is_one_of_several(self.node):
      self.newest = max(saved_steps(directory), default=None)
    trains = self.node.command[:2] == ('podrace', 'train')  # else it need not have checkpoints
    has_progress = self.newest != before or (self.newest is None and not trains)
    lived = time.monotonic() - self.began
    is_healthy = backoff is not None and lived >= backoff.healthy and has_progress
    self.failures = 1 if is_healthy else self.failures + 1

  def start(self, start: Starter, words: tuple[str, ...]) -> None:
    """Start the process.

    Raises:
      OSError: if the program cannot be started.
    """
    self.process = start(self.node, self.number, words)
    self.due, self.began = None, time.monotonic()

  def schedule_with_failed(self) -> None:
    """Become due when the learner that failed is due."""
    self.due, self.follows, self.restarts = self.follows, None, self.restarts + 1

  @property
  def output(self) -> IO[bytes] | None:
    """The pipe of its output, None if it is closed."""
    stdout = self.process and self.process.stdout
    return stdout if stdout and not stdout.closed else None

  def read(self) -> bytes | None:
    """Read some of its output; None if there is nothing now, b'' at the end."""
    return None if self.output is None else self.output.read(CHUNK)

  def split_lines(self, data: bytes) -> Iterator[str]:
    """Return the lines that are complete with `data`."""
    *lines, self.rest = LINE_END.split(self.rest + data)
    if len(self.rest) > LONGEST_LINE:
      lines, self.rest = [*lines, self.rest], b''
    return (line.decode(errors='replace') for line in lines)

  def open_log(self, directory: Path) -> IO[bytes]:
    """Open its log, unless it is open; raises as `files.open_append`."""
    if self.log is None:
      self.log = open_append(directory / f'{self.name}.log', 'ab', 0)
    return self.log

  def signal(self, signum: int) -> None:
    """Send a signal to the processes of its session, if there is one."""
    if self.process is not None:
      self.process.signal(signum)

  def poll(self) -> int | None:
    """Return the exit code if its process has ended, and kill processes that it left behind."""
    if self.process is None or (code := self.process.poll()) is None:
      return None
    self.signal(signal.SIGKILL)
    return code
