"""A child process that its owner supervises."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def python(*arguments: str) -> tuple[str, ...]:
  """Return the command line of a child interpreter.

  `arguments` are options of Python, then its program.

  With -P the child does not import from its working directory, in which another user may have put
  modules.
  """
  return sys.executable, '-P', *arguments


def import_path() -> list[str]:
  """Return the `sys.path` for a child: that of this process, and then podrace's directory."""
  return list(dict.fromkeys([*map(os.path.abspath, sys.path), str(Path(__file__).parents[2])]))


def exit_code(code: int) -> int:
  """Return an exit code of `subprocess` as a shell has it: 128 + n after signal n."""
  return code if code >= 0 else 128 - code


class ChildProcess:
  """A process in a session of its own, so that a Ctrl-C in the terminal reaches its owner alone.

      child = ChildProcess(python('-m', 'podrace', 'train'), stdout=subprocess.PIPE)
      code = child.stop(grace=60.0)

  Owner: the creator, which calls `wait` or `stop`.
  Ends when: its program exits, or `stop` is called. It outlives a killed owner, unless a `Guard`
  ends it.
  Raises: OSError from the constructor, if the program cannot be started.

  Args:
    words: the program and its arguments.
    environ: the environment. None: that of this process.
    directory: the working directory. None: that of this process.
    stdin: as `subprocess.Popen` has it, also `stdout` and `stderr`.
    stdout: None: that of this process.
    stderr: None: that of this process.
    pass_fds: descriptors that the process inherits.
  """

  def __init__(
    self,
    words: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    directory: str | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    pass_fds: tuple[int, ...] = (),
  ) -> None:
    self._process = subprocess.Popen(
      words, env=environ, cwd=directory, stdin=stdin, stdout=stdout, stderr=stderr,
      pass_fds=pass_fds, start_new_session=True,
    )  # fmt: skip

  @property
  def pid(self) -> int:
    """The number of the process, and of its session."""
    return self._process.pid

  @property
  def stdout(self) -> IO[bytes]:
    """The pipe from its standard output."""
    assert self._process.stdout is not None, 'its standard output is no pipe'
    return self._process.stdout

  def send(self, data: bytes) -> None:
    """Write to its standard input, a pipe; does nothing if the process has ended."""
    assert self._process.stdin is not None, 'its standard input is no pipe'
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(data)
      self._process.stdin.flush()

  def close_input(self) -> None:
    """Close the pipe to its standard input."""
    assert self._process.stdin is not None, 'its standard input is no pipe'
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()

  def poll(self) -> int | None:
    """Return the exit code as a shell has it, None while the process runs."""
    code = self._process.poll()
    return None if code is None else exit_code(code)

  def wait(self, timeout: float | None = None) -> int | None:
    """Wait for the end, at most `timeout` seconds; returns as `poll`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout)
    return self.poll()

  def signal(self, signum: int) -> None:
    """Send a signal to the processes of its session, also after its own end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
      os.killpg(self._process.pid, signum)

  def terminate(self) -> None:
    """Send SIGTERM, if it runs."""
    if self.poll() is None:
      self.signal(signal.SIGTERM)

  def finish(self, grace: float | None = None) -> int:
    """Wait for the end, and send SIGKILL after `grace` seconds.

    Returns the exit code as a shell has it.
    """
    if (code := self.wait(grace)) is None:
      self.signal(signal.SIGKILL)
      code = exit_code(self._process.wait())
    return code

  def stop(self, grace: float) -> int:
    """Send SIGTERM, then as `finish`."""
    self.terminate()
    return self.finish(grace)
