"""A program's supervisor: each replica is a process, started again when it fails, ended with the program.

By itself it starts processes on this machine. Replicas then listen at Unix sockets in a directory that only this user
can enter, so they need no keys, and a process that is started again has the address that it had. A watchdog ends them
if this process dies. Engines for several machines give it other places and another way to start a process.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from podrace.errors import UsageError
from podrace.launch.program import Program, is_one_of_several, is_ready
from podrace.launch.supervisor.addresses import Addresses, Places
from podrace.launch.supervisor.guard import Guard
from podrace.launch.supervisor.replica import LEFT, Here, Replica, Start
from podrace.launch.supervisor.watchdog import GRACE
from podrace.system import files, process

TICK = 0.2  # seconds between looks at announcements, where processes choose their addresses
PATIENCE = 30.0  # seconds after which it is said that a process waits for an announcement
BAD_USAGE = 2  # an exit code that would come again

Say = Callable[[str, str], None]  # of a replica, by name: a line
Look = Callable[[list[Replica]], None]


class Local:
  """A program's processes.

  Args:
    directory: what the program keeps: a log for each replica, and what nodes write to {dir}.
    say: gets each line of a replica, and what becomes of replicas.
    look: gets all replicas whenever something may have happened to them.
    start: starts a replica.
    places: where replicas listen, given a directory of this user's alone that goes with the program.
  """

  def __init__(
    self,
    program: Program,
    directory: Path,
    say: Say,
    look: Look = lambda replicas: None,
    start: Start | None = None,
    places: Callable[[Path], Places] | None = None,
  ) -> None:
    self._program, self._directory = program, directory
    self._say, self._look, self._start_one = say, look, start or Here()
    self._places = places or (lambda private: Addresses(program, private, directory).open())
    self._replicas = [Replica(n, i) for n in program.order() for i in range(n.replicas)]
    (self._main,) = (r for r in self._replicas if r.node.main)
    self._selector = selectors.DefaultSelector()
    self._signalled: list[int] = []  # signals that have come
    self._code: int | None = None  # of the program, once it is ending
    self._others_end = self._all_end = math.inf  # when others are asked to end; when all are killed
    self._complained: set[str] = set()
    self._began = time.monotonic()

  def run(self) -> int:
    """Runs the program to its end; the exit code: the main node's, 1 if another failed for good, 128 + n on signal n.

    Raises:
      UsageError: if the program runs already, or the directory can't be written to.
    """
    if threading.current_thread() is not threading.main_thread():
      raise UsageError('a program runs in the main thread, which gets its signals')
    with contextlib.ExitStack() as stack:
      self._logs = stack.enter_context(locked(self._directory / 'logs'))
      private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='podrace-')))
      self._addresses = self._places(private)
      self._guard = stack.enter_context(Guard(private))
      stack.callback(self._close)
      for replica in self._replicas:
        with contextlib.suppress(OSError):  # such as a full disk; the first write reports it
          replica.open_log(self._logs)
      stack.enter_context(self._signals())
      while self._code is None or any(r.process for r in self._replicas):
        self._heed_signals()
        self._keep_deadlines()
        self._start_those_due()
        self._look(self._replicas)
        self._wait()
        self._reap()
        self._guard.look()
    return self._code

  # --- starting -------------------------------------------------------------------------------------

  def _start_those_due(self) -> None:
    due = [r for r in self._replicas if r.due is not None and r.due <= time.monotonic()]
    known = self._addresses.known() if due and self._code is None else {}
    for replica in due:
      if self._code is not None:
        return
      node = replica.node
      if is_one_of_several(node) and any(r.follows is not None for r in self._replicas):
        continue  # the learners of before have not all ended yet
      if is_ready(self._program, node, known):
        self._addresses.forget(node, replica.number)
        self._start(replica, self._addresses.command(node, replica.number, known))
      elif time.monotonic() - self._began > PATIENCE and replica.name not in self._complained:
        self._complained.add(replica.name)
        self._tell(replica, 'waits for an address that another node has not announced yet')

  def _start(self, replica: Replica, words: tuple[str, ...]) -> None:
    try:
      replica.start(self._start_one, words)
    except OSError as e:
      self._tell(replica, f'{words[0]} cannot be started: {e.strerror}')
      replica.due = None
      self._fails(replica, BAD_USAGE)
      return
    assert replica.process is not None
    if replica.process.pid is not None:
      self._guard.add(replica.process.pid)
    self._selector.register(replica.output, selectors.EVENT_READ, replica)  # type: ignore[arg-type]

  # --- waiting --------------------------------------------------------------------------------------

  def _wait(self) -> None:
    """Until a process says something or ends, a signal comes, or something is due."""
    now = time.monotonic()
    if self._code is None:  # those that are due wait for an announcement
      times = [r.due if r.due > now else now + TICK for r in self._replicas if r.due is not None]
    else:
      times = [self._others_end, self._all_end]
    soonest = min(times, default=math.inf)
    timeout = None if soonest == math.inf else max(0.0, soonest - now)
    for key, _ in self._selector.select(timeout):
      if key.data is None:
        self._wake.recv(4096)
      else:
        self._hear(key.data)

  def _hear(self, replica: Replica) -> bool:
    """Takes some of what a process has written; whether there was some."""
    data = replica.read()
    if data == b'':  # nobody can write to it any more
      self._hear_no_more(replica)
    if not data:
      return False
    self._write(replica, data)
    for line in replica.lines(data):
      self._say(replica.name, line)
    return True

  def _hear_no_more(self, replica: Replica) -> None:
    if replica.output is not None:
      self._selector.unregister(replica.output)
      replica.output.close()
    if replica.rest:
      self._say(replica.name, replica.rest.decode(errors='replace'))
      replica.rest = b''

  def _tell(self, replica: Replica, text: str) -> None:
    """Tells what becomes of a replica, there and in its log."""
    self._write(replica, f'podrace launch: {replica.name} {text}\n'.encode())
    self._say(replica.name, f'podrace launch: {text}')

  def _write(self, replica: Replica, data: bytes) -> None:
    """Adds to a log. A full disk ends no program."""
    try:
      replica.write(self._logs, data)
    except OSError as e:
      if 'a log' not in self._complained:  # which is no name of a replica
        self._complained.add('a log')
        self._say(replica.name, f'podrace launch: its log cannot be written: {e.strerror or e}')

  # --- ending ---------------------------------------------------------------------------------------

  def _reap(self) -> None:
    """Takes note of processes that have ended."""
    for replica in self._replicas:
      if (code := replica.ended()) is None:
        continue
      for _ in range(LEFT):
        if not self._hear(replica):
          break
      self._hear_no_more(replica)
      assert replica.process is not None
      if replica.process.pid is not None:
        self._guard.remove(replica.process.pid)
      replica.process = None
      if self._code is not None:
        replica.code = code
        if replica is self._main:
          self._ask_others()
      elif replica.follows is not None:
        replica.follow()
        self._tell(replica, 'was ended, and starts again with the other learner')
      elif code:
        self._fails(replica, code)
      else:
        replica.code = 0
        if replica is self._main:
          self._end(0)

  def _fails(self, replica: Replica, code: int) -> None:
    """Decides what follows a failure: a pause, or the end of the program."""
    backoff, lived = replica.node.restart, time.monotonic() - replica.began
    replica.failures = 1 if backoff and lived >= backoff.healthy else replica.failures + 1
    if code != BAD_USAGE and backoff is not None and replica.failures < backoff.failures:
      pause = backoff.pause(replica.failures)
      replica.due, replica.restarts = time.monotonic() + pause, replica.restarts + 1
      self._tell(replica, f'ended with {code}, starts again in {pause:g} s')
      if is_one_of_several(replica.node):
        start_learners_again(self._replicas, replica.due, code)
      return
    times = f' {replica.failures} times in a row' if replica.failures > 1 else ''
    log = self._logs / f'{replica.name}.log'
    self._tell(replica, f'ended with {code}{times}, so the program ends; all that it said: {log}')
    replica.code = code
    refuses = code == BAD_USAGE and is_one_of_several(replica.node)  # as all learners do
    self._end(code if replica.node.main or refuses else 1)

  def _end(self, code: int) -> None:
    """Has all processes end: first the main one, which may need others to save."""
    now = time.monotonic()
    self._code, self._others_end, self._all_end = code, now + GRACE / 2, now + GRACE
    for replica in self._replicas:
      replica.due = None
    self._main.signal(signal.SIGTERM)
    if self._main.process is None:
      self._ask_others()

  def _keep_deadlines(self) -> None:
    """Asks and kills those that have not ended in time."""
    now = time.monotonic()
    if now >= self._others_end:
      self._ask_others()
    if now >= self._all_end:
      self._all_end = math.inf
      for replica in self._replicas:
        replica.signal(signal.SIGKILL)

  def _ask_others(self) -> None:
    self._others_end = math.inf
    for replica in self._replicas:
      if replica is not self._main:
        replica.signal(signal.SIGTERM)

  def _close(self) -> None:
    """Kills what is left; there is something only after an error."""
    for replica in self._replicas:
      replica.signal(signal.SIGKILL)
      if replica.process is not None:
        replica.process.wait()
      if replica.log is not None:
        replica.log.close()
    self._selector.close()

  # --- signals --------------------------------------------------------------------------------------

  @contextlib.contextmanager
  def _signals(self) -> Iterator[None]:
    """Has the end of a child, SIGTERM, Ctrl-C and SIGHUP wake the loop."""
    self._wake, other = socket.socketpair()
    self._wake.setblocking(False)
    other.setblocking(False)
    self._selector.register(self._wake, selectors.EVENT_READ, None)
    before: Any = signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
    try:
      with process.on_signals(lambda signum, _: self._signalled.append(signum)):
        yield
    finally:
      signal.set_wakeup_fd(wakeup)
      signal.signal(signal.SIGCHLD, before)
      self._wake.close()
      other.close()

  def _heed_signals(self) -> None:
    """At the first one the program ends; at the second nothing is waited for."""
    while self._signalled:
      signum = self._signalled.pop(0)
      if self._code is None:
        self._end(128 + signum)
      else:
        self._all_end = self._others_end = time.monotonic()


def start_learners_again(replicas: list[Replica], due: float, code: int) -> None:
  """Has those that learn with one that failed start again at that time: JAX would notice in 30 s, and end them."""
  saved = code in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # all of them, and they are leaving
  for other in replicas:
    if not is_one_of_several(other.node):
      continue
    if other.code == 0:
      other.code, other.due = None, due
    elif other.process is not None and other.follows is None and not saved:
      other.follows = due
      other.signal(signal.SIGKILL)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[Path]:
  """The directory of a program's logs, which is made, for this process alone.

  Raises:
    UsageError: if another process has it, or it can't be written to.
  """
  try:
    files.make_folder(files.make_user_folder(directory.parent) / directory.name)
    files.check_folder(directory.parent, '--run-dir')
    if links := sorted(p.name for p in directory.iterdir() if p.is_symlink()):
      # SLURM adds to files there by itself.
      raise UsageError(f'{directory}: {", ".join(links)} there is a symbolic link; remove it')
    file = process.lock(directory)
  except BlockingIOError:
    raise UsageError(
      f'{directory.parent}: this program runs already; end it first, or give another directory'
    ) from None
  except files.NotOwn:
    raise
  except OSError as e:
    raise UsageError(f'{directory.parent} cannot be written to: {e.strerror}') from None
  with file:
    yield directory


def run(
  program: Program,
  directory: Path | str,
  environ: Mapping[str, str] = os.environ,
) -> int:
  """Runs a program on this machine, with a view of its processes where the output is a terminal.

  Args:
    directory: for the logs of all processes, and what nodes keep in {dir}.
    environ: of the processes.

  Returns:
    an exit code: the main node's; 1 if another node failed for good; 128 + n after signal n.
  """
  from podrace.launch.supervisor.screen import Screen

  with Screen([name for node in program.nodes for name in node.names]) as screen:
    return Local(program, Path(directory), screen.say, screen.look, Here(environ)).run()
