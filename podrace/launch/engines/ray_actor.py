"""A replica in an actor of Ray: the actor's side, and the launcher's."""

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
DEAF = 10.0  # seconds that an actor has to end its replica after SIGKILL
HOST = 'PODRACE-HOST'  # in commands: the machine's address
TICK = 1.0  # seconds between looks at the clock

STARTED, SAID, ANNOUNCED, ENDED = 'started', 'said', 'announced', 'ended'
Event = tuple[str, Any]  # and bytes of output, a text of JSON, or an exit code


class Runner:
  """Keeps a replica on the actor's machine, in a process of its own, which ends when the actor does.

  Args:
    asked: `ReplicaRequest`, as JSON; HOST in it stands for what `host` gives.
  """

  def __init__(self, asked: str, host: Callable[[], str]) -> None:
    self._reports, report = os.pipe()
    self._keeper = ChildProcess(
      python('-m', 'podrace.launch.supervisor.remote_child', str(report)), pass_fds=(report,),
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(report)
    self.tell(asked.replace(HOST, host()))

  def tell(self, line: str) -> None:
    """A line for the keeper."""
    self._keeper.send(line.encode() + b'\n')

  def events(self) -> Iterator[Event]:
    """What happens, to the end of the replica."""
    yield STARTED, None
    output = self._keeper.stdout.fileno()
    with selectors.DefaultSelector() as selector:
      selector.register(output, selectors.EVENT_READ)
      selector.register(self._reports, selectors.EVENT_READ)
      while self._reports in selector.get_map():  # which nobody but the keeper has
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
    yield ENDED, self._keeper.wait()


class Placed:
  """A replica that runs in an actor; a ReplicaProcess.

  Args:
    make: an actor with a Runner, of what is asked for, as JSON.
    announced: gets the replica's announcement, by its file.
    ended: is called at its end.
  """

  def __init__(
    self,
    asked: ReplicaRequest,
    make: Callable[[str], Any],
    announced: Callable[[str, str], None],
    ended: Callable[[Placed], None],
  ) -> None:
    self._asked, self._announced, self._ended = asked, announced, ended
    self._code: int | None = None
    self._started = False
    self._began, self._deaf = time.monotonic(), math.inf
    self.pid: int | None = None
    read, self._write = os.pipe()
    os.set_blocking(read, False)
    self.stdout: IO[bytes] = os.fdopen(read, 'rb', buffering=0)
    self._actor = make(json.dumps(dataclasses.asdict(asked)))
    self._worker = Worker('replica', self._main)

  def poll(self) -> int | None:
    return self._code

  def wait(self) -> bool:
    return self._worker.wait(2 * DEAF)

  def signal(self, signum: int) -> None:
    if not self._started:
      self._deaf = time.monotonic()  # there is nothing to save
    elif signum == signal.SIGKILL:
      self._deaf = min(self._deaf, time.monotonic() + DEAF)
    if self._code is None:
      self.tell({'signal': int(signum)})

  def tell(self, line: dict[str, Any]) -> None:
    """A line for the keeper, if Ray is there: `_main` sees it where it is not."""
    with contextlib.suppress(Exception):
      self._actor.tell.remote(json.dumps(line))

  def _main(self) -> None:
    import ray

    code = 1
    try:
      code = self._follow()
    except Exception as e:  # almost always an error of Ray
      why = f'{type(e).__name__}: {str(e).partition(chr(10))[0]}'
      self._say(f'podrace launch: its machine or its actor is lost ({why})\n'.encode())
    finally:
      with contextlib.suppress(Exception):  # Ray may be lost, and the end must be seen all the same
        ray.kill(self._actor)
      self._ended(self)
      self._code = code
      os.close(self._write)

  def _follow(self) -> int:
    """Passes events on; the exit code."""
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
        self._announced(self._asked.announces, value)

  def _say(self, data: bytes) -> None:
    while data:
      data = data[os.write(self._write, data) :]
