"""A replica on another machine, kept by pipes: `python -m podrace.launch.supervisor.remote_child FD`, started by an engine there.

Each line of standard input is a JSON object: the fields of `Asked` first, then any of

    {"files": {NAME: TEXT}}    files that have come or changed, in a directory of this user's alone
    {"signal": N}              for the replica and the processes of its session

The replica's output is the keeper's, and so is its exit code. To FD the keeper writes what the replica announces, a line
each time that it changes. When its input ends, so does the replica. If the keeper is killed, a watchdog ends the
replica and removes the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from podrace.distributed.net import announce
from podrace.launch.supervisor.guard import Guard
from podrace.launch.supervisor.replica import runnable
from podrace.launch.supervisor.watchdog import GRACE, signal_all
from podrace.system.files import make_folder, open_lock, write_whole
from podrace.system.output import print_text
from podrace.system.threads import Worker

TICK = 0.1  # seconds between looks for an announcement
NOT_THERE = 2  # the exit code where there is no such program: bad usage


@dataclasses.dataclass(frozen=True)
class Asked:
  """What there is to run."""

  words: list[str]
  environ: dict[str, str]  # besides the machine's own
  directory: str  # in which it runs, if this machine has it
  private: str  # stands in `words` for the directory of files
  announces: str  # its announcement among the files; '' for none
  addresses: int  # that there are in it in the end
  files: dict[str, str]  # that are there from the beginning
  lock: str  # a file that one replica has at a time; where its directory is not, nobody needs it


def main(report: int) -> int:
  """Runs one replica; its exit code, as a shell has it."""
  if not (line := sys.stdin.readline()):
    return 0  # nobody wants one any more
  asked = Asked(**json.loads(line))
  with contextlib.ExitStack() as stack:
    private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='podrace-')))
    guard = stack.enter_context(Guard(private))
    lock = stack.enter_context(locked(Path(asked.lock)))
    if lock is None:
      return 1
    make_folder((private / asked.announces).parent)
    write(private, asked.files)
    try:
      process = start(asked, private, lock)
    except OSError as e:
      print_text(f'{asked.words[0]} cannot be started: {e.strerror}', flush=True)
      return NOT_THERE
    guard.add(process.pid)
    Worker('input', lambda: obey(sys.stdin, private, process.pid))
    code = until_ended(process, private / asked.announces, asked.addresses, report)
    signal_all({process.pid}, signal.SIGKILL)  # what it has left
    guard.remove(process.pid)
  return code if code >= 0 else 128 - code


@contextlib.contextmanager
def locked(path: Path) -> Iterator[tuple[int, ...] | None]:
  """Descriptors of a file that nobody else has; None if another process has kept it for too long.

  A replica whose keeper was killed, or whose machine was cut off, may save yet. It has the file until it has ended.
  """
  if not path.parent.is_dir():
    yield ()
    return
  with open_lock(make_folder(path.parent) / path.name) as file:
    end = time.monotonic() + 2 * GRACE
    said = False
    while not lock(file):
      if time.monotonic() > end:
        print_text(f'podrace launch: the one before has not ended in {2 * GRACE:.0f} s', flush=True)
        yield None
        return
      if not said:
        print_text('podrace launch: waits for the end of the one before', flush=True)
        said = True
      time.sleep(TICK)
    yield (file.fileno(),)


def lock(file: IO[str]) -> bool:
  """Whether nobody else has the file."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def start(asked: Asked, private: Path, lock: tuple[int, ...]) -> subprocess.Popen[bytes]:
  """The replica, in a session of its own."""
  words = [x.replace(asked.private, str(private)) for x in runnable(tuple(asked.words))]
  there = os.path.isdir(asked.directory)
  return subprocess.Popen(
    words, env={**os.environ, **asked.environ}, cwd=asked.directory if there else None,
    stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=lock,
  )  # fmt: skip


def write(private: Path, files: Mapping[str, str]) -> None:
  """Writes files that only this user can read."""
  before = os.umask(0o077)
  try:
    for name, text in files.items():
      make_folder((private / name).parent)
      write_whole(private / name, text)
  finally:
    os.umask(before)


def obey(lines: Iterable[str], private: Path, pid: int) -> None:
  """Does what the engine says; at the end of its words, or if they are none, the replica has to end."""
  try:
    for line in lines:
      given = json.loads(line)
      write(private, given.get('files', {}))
      if 'signal' in given:
        signal_all({pid}, given['signal'])
  finally:
    signal_all({pid}, signal.SIGTERM)
    time.sleep(GRACE)  # the process ends meanwhile, and this thread with it
    signal_all({pid}, signal.SIGKILL)


def until_ended(
  process: subprocess.Popen[bytes], announcement: Path, addresses: int, report: int
) -> int:
  """Waits for its end, and reports its announcement until it has so many addresses; the exit code."""
  known: dict[str, str] = {}
  while len(known) < addresses:
    with contextlib.suppress(subprocess.TimeoutExpired):
      return process.wait(TICK)
    if (found := announce.read(announcement)) != known:
      os.write(report, json.dumps(found).encode() + b'\n')
      known = found
  return process.wait()


if __name__ == '__main__':
  sys.exit(main(int(sys.argv[1])))
