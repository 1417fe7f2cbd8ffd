"""A program's supervisor: starts processes, restarts failed ones, and ends all with the program.

By default processes run on this machine. They listen at Unix sockets in a directory that only this
user can enter. So they need no keys, and a process that starts again has the address that it had. A
watchdog ends them if this process dies. Engines for several machines pass other places and another
way to start a process.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from podrace.errors import UsageError
from podrace.launch.program import Program, is_one_of_several, is_ready
from podrace.launch.supervisor.addresses import Addresses, Places
from podrace.launch.supervisor.guard import Guard, wait_for_lock
from podrace.launch.supervisor.replica import LAST_CHUNKS, LocalStarter, Replica, Starter
from podrace.launch.supervisor.wakeup import wake_on_signals
from podrace.launch.supervisor.watchdog import GRACE
from podrace.system import files, locks

PROCESSES = 'processes.lock'  # in logs/: locked until all processes of a launcher have ended
TICK = 0.2  # seconds between reads of announcements, files that another process writes
PATIENCE = 30.0  # seconds after which a message names a process that waits for an announcement
BAD_USAGE = 2  # an exit code that a restart does not change
# Likewise. Other errors, such as too many processes for now, may pass.
NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)

Say = Callable[[str, str], None]  # (name of a replica, line)
Look = Callable[[list[Replica]], None]


class Supervisor:
  """The processes of a program.

  Owner: the main thread, which calls `run`.
  Ends when: the main node ends, a node fails for good, or a signal comes.

  Args:
    program: the nodes.
    directory: a directory that the program keeps, for the log of each replica and files of nodes in
      {dir}.
    say: called with each line of a replica, and each change of its state.
    look: called with all replicas after each event.
    start: starts a replica.
    places: the addresses of replicas, from a directory for this user alone that is removed at the
      end.
  """

  def __init__(
    self,
    program: Program,
    directory: Path,
    say: Say,
    look: Look = lambda replicas: None,
    start: Starter | None = None,
    places: Callable[[Path], Places] | None = None,
  ) -> None:
    self._program, self._directory = program, directory
    self._say, self._look, self._start_one = say, look, start or LocalStarter()
    self._places = places or (lambda private: Addresses(program, private, directory).open())
    self._replicas = [Replica(n, i) for n in program.order() for i in range(n.replicas)]
    (self._main,) = (r for r in self._replicas if r.node.main)
    self._selector = selectors.DefaultSelector()
    self._signals: list[int] = []  # received and not handled yet
    self._code: int | None = None  # exit code of the program, once it is ending
    self._terminate_at = self._kill_at = math.inf  # SIGTERM to all but the main one; SIGKILL to all
    self._complained: set[str] = set()
    self._began = time.monotonic()

  def run(self) -> int:
    """Run the program to its end.

    Returns:
      The exit code: 0, 1 if a node failed for good, 2 if the main one refused, 128 + n at signal n.

    Raises:
      UsageError: if the program runs already, or the directory cannot be written to.
    """
    if threading.current_thread() is not threading.main_thread():
      raise UsageError('a program runs in the main thread, which gets its signals')
    with contextlib.ExitStack() as stack:
      self._logs = stack.enter_context(lock_logs(self._directory / 'logs'))
      earlier = stack.enter_context(wait_for_lock(self._logs / PROCESSES))
      if earlier is None:
        raise UsageError(
          f'{self._directory}: processes of a killed launcher still run there; end them first'
        )
      private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='podrace-')))
      self._addresses = self._places(private)
      self._guard = stack.enter_context(Guard(private, earlier))
      stack.callback(self._close)
      for replica in self._replicas:
        with contextlib.suppress(OSError):  # such as a full disk; the first write reports it
          replica.open_log(self._logs)
      self._wake = stack.enter_context(wake_on_signals(self._signals.append))
      self._selector.register(self._wake, selectors.EVENT_READ, None)
      while self._code is None or any(r.process for r in self._replicas):
        self._handle_signals()
        self._keep_deadlines()
        self._start_due()
        self._look(self._replicas)
        self._wait()
        self._reap()
        self._guard.look()
    return self._code

  # --- starting ----------------------------------------------------------------------------------

  def _start_due(self) -> None:
    due = [r for r in self._replicas if r.due is not None and r.due <= time.monotonic()]
    known = self._addresses.known() if due and self._code is None else {}
    for replica in due:
      if self._code is not None:
        return
      node = replica.node
      if is_one_of_several(node) and any(r.follows is not None for r in self._replicas):
        continue  # learners of the life before have not all ended yet
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
      self._fail(replica, BAD_USAGE if e.errno in NO_PROGRAM else 1)
      return
    assert replica.process is not None
    if replica.process.pid is not None:
      self._guard.add(replica.process.pid)
    self._selector.register(replica.output, selectors.EVENT_READ, replica)  # type: ignore[arg-type]

  # --- waiting -----------------------------------------------------------------------------------

  def _wait(self) -> None:
    """Wait until a process writes or ends, a signal comes, or a deadline passes."""
    now = time.monotonic()
    if self._code is None:  # a replica that is due waits for an announcement
      times = [r.due if r.due > now else now + TICK for r in self._replicas if r.due is not None]
    else:
      times = [self._terminate_at, self._kill_at]
    soonest = min(times, default=math.inf)
    timeout = None if soonest == math.inf else max(0.0, soonest - now)
    for key, _ in self._selector.select(timeout):
      if key.data is None:
        self._wake.recv(4096)
      else:
        self._pass_on(key.data)

  def _pass_on(self, replica: Replica) -> bool:
    """Pass some of a process's output on; returns whether there was some."""
    data = replica.read()
    if data == b'':  # no process has the other end of the pipe
      self._close_output(replica)
    if not data:
      return False
    self._write(replica, data)
    for line in replica.split_lines(data):
      self._say(replica.name, line)
    return True

  def _close_output(self, replica: Replica) -> None:
    if replica.output is not None:
      self._selector.unregister(replica.output)
      replica.output.close()
    if replica.rest:
      self._say(replica.name, replica.rest.decode(errors='replace'))
      replica.rest = b''

  def _tell(self, replica: Replica, text: str) -> None:
    """Report a change of a replica's state, also in its log."""
    self._write(replica, f'podrace launch: {replica.name} {text}\n'.encode())
    self._say(replica.name, f'podrace launch: {text}')

  def _write(self, replica: Replica, data: bytes) -> None:
    """Add to a log. A full disk does not end the program."""
    try:
      replica.open_log(self._logs).write(data)
    except OSError as e:
      if 'a log' not in self._complained:  # which is no name of a replica
        self._complained.add('a log')
        self._say(replica.name, f'podrace launch: its log cannot be written: {e.strerror or e}')

  # --- ending ------------------------------------------------------------------------------------

  def _reap(self) -> None:
    """Handle the ends of processes."""
    for replica in self._replicas:
      if (code := replica.poll()) is None:
        continue
      for _ in range(LAST_CHUNKS):
        if not self._pass_on(replica):
          break
      self._close_output(replica)
      assert replica.process is not None
      if replica.process.pid is not None:
        self._guard.remove(replica.process.pid)
      replica.process = None
      if self._code is not None:
        replica.code = code
        if replica is self._main:
          self._terminate_others()
      elif replica.follows is not None:
        replica.schedule_with_failed()
        self._tell(replica, 'was ended, and starts again with the other learner')
      elif code:
        self._fail(replica, code)
      else:
        replica.code = 0
        if replica is self._main:
          self._end(0)

  def _fail(self, replica: Replica, code: int) -> None:
    """Schedule the restart of a replica that failed, or end the program."""
    backoff = replica.node.restart
    replica.count_failure(self._directory)
    if code != BAD_USAGE and backoff is not None and replica.failures < backoff.failures:
      pause = backoff.pause(replica.failures)
      replica.due, replica.restarts = time.monotonic() + pause, replica.restarts + 1
      self._tell(replica, f'ended with {code}, starts again in {pause:g} s')
      if is_one_of_several(replica.node):
        restart_learners(self._replicas, replica.due, code)
      return
    times = f' {replica.failures} times in a row' if replica.failures > 1 else ''
    log = self._logs / f'{replica.name}.log'
    self._tell(replica, f'ended with {code}{times}, so the program ends; its output is in {log}')
    replica.code = code
    learns = replica.node.main or is_one_of_several(replica.node)
    self._end(BAD_USAGE if code == BAD_USAGE and learns else 1)

  def _end(self, code: int) -> None:
    """Begin to end all processes: first the main one, which may need the rest in order to save."""
    now = time.monotonic()
    self._code, self._terminate_at, self._kill_at = code, now + GRACE / 2, now + GRACE
    for replica in self._replicas:
      replica.due = None
    self._main.signal(signal.SIGTERM)
    if self._main.process is None:
      self._terminate_others()

  def _keep_deadlines(self) -> None:
    """Send the signals that are due."""
    now = time.monotonic()
    if now >= self._terminate_at:
      self._terminate_others()
    if now >= self._kill_at:
      self._kill_at = math.inf
      for replica in (r for r in self._replicas if r.process is not None):
        self._tell(replica, 'has not ended, and is killed')
        replica.signal(signal.SIGKILL)

  def _terminate_others(self) -> None:
    """Send SIGTERM to all replicas but the main one."""
    self._terminate_at = math.inf
    for replica in self._replicas:
      if replica is not self._main:
        replica.signal(signal.SIGTERM)

  def _close(self) -> None:
    """Kill the processes that are left, which happens after an error only."""
    for replica in self._replicas:
      replica.signal(signal.SIGKILL)
      if replica.process is not None:
        replica.process.wait()
      if replica.log is not None:
        replica.log.close()
    self._selector.close()

  def _handle_signals(self) -> None:
    """End the program at the first signal; kill its processes at the second."""
    while self._signals:
      signum = self._signals.pop(0)
      if self._code is None:
        self._end(128 + signum)
      else:
        self._kill_at = self._terminate_at = time.monotonic()


def restart_learners(replicas: list[Replica], due: float, code: int) -> None:
  """Schedule all learners that learn as one for a restart at `due`, as one of them failed.

  JAX would notice the failure 30 s later, and abort them.
  """
  saved = code in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # all learners, which are leaving
  for other in replicas:
    if not is_one_of_several(other.node):
      continue
    if other.code == 0:
      other.code, other.due = None, due
    elif other.process is not None and other.follows is None and not saved:
      other.follows = due
      other.signal(signal.SIGKILL)


@contextlib.contextmanager
def lock_logs(directory: Path) -> Iterator[Path]:
  """Make the directory of a program's logs, and lock it for this process.

  Raises:
    UsageError: if another process has it, or it cannot be written to.
  """
  try:
    files.make_folder(files.make_user_folder(directory.parent) / directory.name)
    files.check_folder(directory.parent, '--run-dir')
    if links := sorted(p.name for p in directory.iterdir() if p.is_symlink()):
      # SLURM adds to files there by itself.
      raise UsageError(f'{directory}: {", ".join(links)} there is a symbolic link; remove it')
    file = locks.lock(directory)
  except BlockingIOError:
    raise UsageError(
      f'{directory.parent}: this program runs already; end it first, or give another directory'
    ) from None
  except files.NotOwn:
    raise
  except OSError as e:
    raise files.path_error(f'{directory.parent} cannot be written to: {e.strerror}', e) from None
  with file:
    yield directory


def run(
  program: Program,
  directory: Path | str,
  environ: Mapping[str, str] = os.environ,
) -> int:
  """Run a program on this machine, with a table of its processes if the output is a terminal.

  Args:
    program: the nodes.
    directory: for the logs of all processes, and files of nodes in {dir}.
    environ: the environment of the processes.

  Returns:
    The exit code, as `Supervisor.run`.
  """
  return supervise(program, Path(directory), LocalStarter(environ))


def supervise(
  program: Program,
  directory: Path,
  start: Starter,
  places: Callable[[Path], Places] | None = None,
) -> int:
  """Run a program as `run`; `start` and `places` are as of `Supervisor`."""
  from podrace.launch.supervisor.screen import Screen

  with Screen([name for node in program.nodes for name in node.names]) as screen:
    return Supervisor(program, directory, screen.say, screen.look, start, places).run()
