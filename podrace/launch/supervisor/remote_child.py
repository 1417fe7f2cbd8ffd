"""Runs a replica on another machine, started there by an engine.

    python -m podrace.launch.supervisor.remote_child FD

Each line of standard input is a JSON object. The first one has the fields of `ReplicaRequest`, each
further one is

    {"files": {NAME: TEXT}}    files that are new or changed, in a directory for this user alone
    {"signal": N}              a signal for the processes of the replica's session

This process has the output and the exit code of the replica. Each time that the replica's
announcement changes, a line with it is written to FD. When standard input ends, the replica is
ended. If this process is killed, a watchdog ends the replica and removes the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from podrace.distributed.net import announce
from podrace.launch.supervisor.guard import Guard, wait_for_lock
from podrace.launch.supervisor.replica import expand_podrace
from podrace.launch.supervisor.watchdog import GRACE
from podrace.system.child import ChildProcess
from podrace.system.files import make_folder, write_whole
from podrace.system.output import print_text
from podrace.system.threads import Worker

TICK = 0.1  # seconds between looks at files of other processes, which have no event to wait for
NOT_THERE = 2  # the exit code if the program cannot be started: bad usage


@dataclasses.dataclass(frozen=True)
class ReplicaRequest:
  """A replica to run.

  Attributes:
    words: its command.
    environ: variables besides the ones of the machine.
    directory: the working directory, if the machine has it.
    private: stands in `words` for the directory of files.
    announces: the name of its announcement among the files; '' for none.
    addresses: the number of addresses in a complete announcement.
    files: the first files, name -> text.
    lock: a file that one replica locks at a time. Without its directory there is no lock.
  """

  words: list[str]
  environ: dict[str, str]
  directory: str
  private: str
  announces: str
  addresses: int
  files: dict[str, str]
  lock: str


def main(report: int) -> int:
  """Run one replica, and report its announcements to descriptor `report`.

  Returns its exit code as a shell has it.
  """
  if not (line := sys.stdin.readline()):
    return 0  # the engine has gone
  request = ReplicaRequest(**json.loads(line))
  with contextlib.ExitStack() as stack:
    private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='podrace-')))
    guard = stack.enter_context(Guard(private))
    lock = stack.enter_context(wait_for_lock(Path(request.lock)))
    if lock is None:
      return 1
    if request.announces:
      make_folder((private / request.announces).parent)
    write_files(private, request.files)
    try:
      child = start(request, private, lock)
    except OSError as e:
      print_text(f'{request.words[0]} cannot be started: {e.strerror}', flush=True)
      return NOT_THERE
    guard.add(child.pid)
    Worker('input', lambda: obey(sys.stdin, private, child))
    code = wait_and_report(child, private / request.announces, request.addresses, report)
    child.signal(signal.SIGKILL)  # processes that it has left behind
    guard.remove(child.pid)
  return code


def start(request: ReplicaRequest, private: Path, lock: tuple[int, ...]) -> ChildProcess:
  """Start the replica, which inherits the descriptors of its lock."""
  words = [x.replace(request.private, str(private)) for x in expand_podrace(tuple(request.words))]
  return ChildProcess(
    words, environ={**os.environ, **request.environ},
    directory=request.directory if os.path.isdir(request.directory) else None,
    stderr=subprocess.STDOUT, pass_fds=lock,
  )  # fmt: skip


def write_files(private: Path, files: Mapping[str, str]) -> None:
  """Write files that only this user can read."""
  before = os.umask(0o077)
  try:
    for name, text in files.items():
      make_folder((private / name).parent)
      write_whole(private / name, text)
  finally:
    os.umask(before)


def obey(lines: Iterable[str], private: Path, child: ChildProcess) -> None:
  """Follow the engine's lines. At their end, or at one that is not JSON, end the replica."""
  try:
    for line in lines:
      message = json.loads(line)
      write_files(private, message.get('files', {}))
      if 'signal' in message:
        child.signal(message['signal'])
  except (OSError, ValueError) as e:
    print_text(f'podrace launch: it is ended, as a message cannot be followed: {e}', flush=True)
  finally:
    child.signal(signal.SIGTERM)
    time.sleep(GRACE)  # the process ends meanwhile, and this thread with it
    child.signal(signal.SIGKILL)


def wait_and_report(child: ChildProcess, announcement: Path, addresses: int, report: int) -> int:
  """Wait for the end of a replica, and report its announcement until it has all addresses.

  Args:
    child: the replica.
    announcement: its file.
    addresses: the number of addresses in a complete announcement.
    report: a descriptor, to which a line is written at each change.

  Returns:
    The exit code, as a shell has it.
  """
  known: dict[str, str] = {}
  while len(known) < addresses:
    if (code := child.wait(TICK)) is not None:
      return code
    if (newest := announce.read(announcement)) != known:
      os.write(report, json.dumps(newest).encode() + b'\n')
      known = newest
  return child.finish()


if __name__ == '__main__':
  sys.exit(main(int(sys.argv[1])))
