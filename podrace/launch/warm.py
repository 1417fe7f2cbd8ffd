"""The process that makes a program and then becomes its main node: a learner needs the same imports, which take a second.

The launcher imports none of them. Each says a line of JSON in turn, the launcher by the process's standard input, the
process by a pipe:

    the arguments of `podrace launch`           a name for the run, or what is wrong
    the run directory                           the program
    the words of the main node                  (it is that now)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from podrace import program as programs
from podrace.errors import RunError, UsageError
from podrace.launch.replica import Process, spawn
from podrace.output import flush_standard
from podrace.process import python
from podrace.program import Program


class Warm:
  """The launcher's end. What did not become a node is killed at the end.

  Args:
    environ: of the process.
    arguments: of `podrace launch`.

  Attributes:
    name: for the run.
    process: takes the words of the main node.

  Raises:
    UsageError: of `with`, for arguments that can't be.
    RunError: if the process has died.
  """

  name: str

  def __init__(self, environ: Mapping[str, str], arguments: list[str]) -> None:
    read, answers = os.pipe()
    try:
      errors = os.dup(2)  # where it complains until there is a log for it
    except OSError:  # it is closed
      errors = os.open(os.devnull, os.O_WRONLY)
    words = python('-m', 'podrace.launch.warm', str(answers), str(errors))
    self.process: Process = spawn(words, environ, subprocess.PIPE, (answers, errors))
    os.close(answers)
    os.close(errors)
    self._answers, self._arguments = os.fdopen(read, encoding='utf-8'), arguments

  def __enter__(self) -> Warm:
    try:
      self.name = self._ask(self._arguments)
    except BaseException:
      self.end()
      raise
    return self

  def __exit__(self, *exc: object) -> None:
    self.end()

  def end(self) -> None:
    """Kills the process, unless it has become a node."""
    assert self.process.stdin is not None
    self._answers.close()
    if not self.process.stdin.closed:
      self.process.kill()
      self.process.communicate()

  def program(self, run_dir: Path) -> Program:
    """The program for a run directory; raises as `with`."""
    return programs.from_json(self._ask(str(run_dir)))

  def _ask(self, given: Any) -> str:
    assert self.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, as is seen next
      self.process.stdin.write(json.dumps(given).encode() + b'\n')
      self.process.stdin.flush()
    if not (line := self._answers.readline()):
      self.process.communicate()
      raise RunError(f'the process that makes the program has ended with {self.process.returncode}')
    found: dict[str, str] = json.loads(line)
    for name, error in ('refused', UsageError), ('failed', RunError):
      if name in found:
        raise error(found[name])
    return found['made']


def main(answers: TextIO, errors: int) -> None:
  """Makes a program, imports what a learner needs, waits and becomes one; without the next line it ends."""
  with telling(errors):
    if not make(answers):
      return
  import tyro  # noqa: F401

  from podrace import build, cli, run  # noqa: F401

  if line := sys.stdin.readline():
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.argv = json.loads(line)
    cli.entry()


@contextlib.contextmanager
def telling(errors: int) -> Iterator[None]:
  """What is printed meanwhile goes there: nobody reads this process's output yet."""
  kept = os.dup(1)
  os.dup2(errors, 1)
  os.dup2(errors, 2)
  os.close(errors)
  try:
    yield
  finally:
    flush_standard()
    os.dup2(kept, 1)
    os.dup2(kept, 2)
    os.close(kept)


def make(answers: TextIO) -> bool:
  """Answers the launcher; whether there is a program."""
  from podrace import cli
  from podrace.commands import launch

  def answer(**said: str) -> None:
    answers.write(json.dumps(said) + '\n')
    answers.flush()

  with answers:
    try:
      name, program = launch.made(json.loads(sys.stdin.readline()))
      answer(made=name)
      if run_dir := sys.stdin.readline():
        answer(made=programs.to_json(program(Path(json.loads(run_dir)))))
        return True
    except RunError as e:
      answer(failed=str(e))
    except ValueError as e:
      if not cli.is_ours(e) or os.environ.get('PODRACE_TRACEBACK'):
        raise
      answer(refused=str(e))
  return False


if __name__ == '__main__':
  main(os.fdopen(int(sys.argv[1]), 'w', encoding='utf-8'), int(sys.argv[2]))
