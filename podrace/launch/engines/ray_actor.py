"""A replica in an actor of Ray: the side of the actor and the side of the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from podrace.launch.supervisor.remote_child import ReplicaRequest
from podrace.launch.supervisor.replica import CHUNK, LAST_CHUNKS
from podrace.system.child import ChildProcess, python
from podrace.system.threads import Worker

ROOM = 600.0  # seconds in which the cluster must have room
DEAF = 10.0  # seconds in which an actor must end its replica after SIGKILL
HOST = 'PODRACE-HOST'  # in commands: the address of the machine
TICK = 1.0  # seconds between checks of deadlines, as `ray.wait` has a timeout only

STARTED, SAID, ANNOUNCED, ENDED = 'started', 'said', 'announced', 'ended'
Event = tuple[str, Any]  # (kind, None, output in bytes, announcement in JSON, or exit code)


class Runner:
  """Runs a replica on the actor's machine, in a child process that ends when the actor does.

  Owner: the actor.
  Ends when: the replica ends, after which `events` ends.

  Args:
    request: a `ReplicaRequest` as JSON.
    host: returns the address that replaces HOST in the request.
  """

  def __init__(self, request: str, host: Callable[[], str]) -> None:
    self._reports, report = os.pipe()
    self.keeper = ChildProcess(
      python('-m', 'podrace.launch.supervisor.remote_child', str(report)), pass_fds=(report,),
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(report)
    self.tell(request.replace(HOST, host()))

  def tell(self, line: str) -> None:
    """Send a line to the child process; see podrace.launch.supervisor.remote_child."""
    self.keeper.send(line.encode() + b'\n')

  def events(self) -> Iterator[Event]:
    """Yield events, up to the end of the replica."""
    yield STARTED, None
    output = self.keeper.stdout.fileno()
    with selectors.DefaultSelector() as selector:
      selector.register(output, selectors.EVENT_READ)
      selector.register(self._reports, selectors.EVENT_READ)
      while self._reports in selector.get_map():  # the child process alone has its other end
        for key, _ in selector.select():
          if not (data := os.read(key.fd, CHUNK)):
            selector.unregister(key.fd)
          else:
            yield (SAID, data) if key.fd == output else (ANNOUNCED, data.decode().splitlines()[-1])
    os.set_blocking(output, False)
    for _ in range(LAST_CHUNKS):
      with contextlib.suppress(BlockingIOError):
        if data := os.read(output, CHUNK):
          yield SAID, data
          continue
      break
    yield ENDED, self.keeper.wait()


class Placed:
  """A replica in an actor; a ReplicaProcess.

  Owner: the supervisor.
  Ends when: the replica ends, the actor or its machine is lost, or the cluster has no room.

  Args:
    request: the replica to run.
    make: makes an actor with a Runner, from the request as JSON.
    on_announcement: called with the name and the text of the replica's announcement.
    on_end: called at its end.
  """

  def __init__(
    self,
    request: ReplicaRequest,
    make: Callable[[str], Any],
    on_announcement: Callable[[str, str], None],
    on_end: Callable[[Placed], None],
  ) -> None:
    self._request, self._on_announcement, self._on_end = request, on_announcement, on_end
    self._code: int | None = None
    self._started = False
    self._began, self._deaf = time.monotonic(), math.inf
    self.pid: int | None = None
    read, self._write = os.pipe()
    os.set_blocking(read, False)
    self.stdout: IO[bytes] = os.fdopen(read, 'rb', buffering=0)
    self._actor = make(json.dumps(dataclasses.asdict(request)))
    self._worker = Worker('replica', self._main)

  def poll(self) -> int | None:
    """Return the exit code as a shell has it, None while the replica runs."""
    return self._code

  def wait(self) -> bool:
    """Wait for the end of a replica that was killed; returns whether it ended in time."""
    return self._worker.wait(2 * DEAF)

  def signal(self, signum: int) -> None:
    """Send a signal to the processes of the replica's session."""
    if not self._started:
      self._deaf = time.monotonic()  # it has no state to save
    elif signum == signal.SIGKILL:
      self._deaf = min(self._deaf, time.monotonic() + DEAF)
    if self._code is None:
      self.tell({'signal': int(signum)})

  def tell(self, line: dict[str, Any]) -> None:
    """Send a line to the replica's Runner. The loss of Ray is handled in `_main`."""
    with contextlib.suppress(Exception):
      self._actor.tell.remote(json.dumps(line))

  def _main(self) -> None:
    import ray

    code = 1
    try:
      code = self._follow()
    except Exception as e:  # in general an error of Ray
      why = f'{type(e).__name__}: {str(e).partition(chr(10))[0]}'
      self._say(f'podrace launch: its machine or its actor is lost ({why})\n'.encode())
    finally:
      with contextlib.suppress(Exception):  # the supervisor must see the end also without Ray
        ray.kill(self._actor)
      self._on_end(self)
      self._code = code
      os.close(self._write)

  def _follow(self) -> int:
    """Pass events on, up to the end of the replica; returns its exit code."""
    import ray

    events = self._actor.events.options(num_returns='streaming').remote()
    while True:
      if not ray.wait([events], timeout=TICK)[0]:
        if time.monotonic() >= self._deaf:
          return 128 + signal.SIGKILL
        if not self._started and time.monotonic() >= self._began + ROOM:
          self._say(
            f'podrace launch: the cluster has had no room for it in {ROOM:.0f} s\n'.encode()
          )
          return 1
        continue
      kind, value = ray.get(next(events))
      if kind == ENDED:
        return int(value)
      self._started = True
      if kind == SAID:
        self._say(value)
      elif kind == ANNOUNCED:
        self._on_announcement(self._request.announces, value)

  def _say(self, data: bytes) -> None:
    while data:
      data = data[os.write(self._write, data) :]
