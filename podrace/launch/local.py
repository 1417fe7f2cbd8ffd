"""Programs on this machine: each replica is a process, started again when it fails, ended with the program.

Replicas listen at Unix sockets in a directory that only this user can enter, so they need no keys, and a process that
is started again has the address that it had. On Linux the kernel ends all replicas if this process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from podrace.errors import UsageError
from podrace.net import announce
from podrace.output import Lasting
from podrace.program import Announced, Node, Program, Reference, command, is_ready, references

GRACE = 30.0  # seconds in which processes may save before they are killed
TICK = 0.2  # seconds between looks at announcements, where processes choose their addresses
BAD_USAGE = 2  # an exit code that would come again
SAID = 256 * 1024  # bytes of a line without an end, at most
CHUNK = 64 * 1024  # bytes that are read of one process before the others
LONGEST = 100  # bytes of a Unix socket's path, which may have 107 or less
CHILD = str(Path(__file__).with_name('child.py'))


@dataclasses.dataclass
class Replica:
  """A process of a node, or the pause before it."""

  node: Node
  number: int
  due: float | None = 0.0  # when it starts, by the monotonic clock; None: it runs or has ended
  process: subprocess.Popen[bytes] | None = None
  code: int | None = None  # with which it ended for good
  failures: int = 0  # in a row
  restarts: int = 0
  began: float = 0.0
  line: bytes = b''  # the beginning of a line that is to come
  last: str = ''  # the last whole line

  @property
  def name(self) -> str:
    return self.node.name if self.node.replicas == 1 else f'{self.node.name}-{self.number}'

  @property
  def state(self) -> str:
    """A word or two, for people."""
    if self.process is not None:
      return 'runs'
    if self.code is not None:
      return f'ended with {self.code}'
    return 'waits' if not self.restarts else 'restarts'


class Local:
  """A program's processes.

  Args:
    directory: what the program keeps: a log for each replica, and what nodes write to {dir}.
    say: gets each line of a replica, and what becomes of replicas: (name, line).
    look: gets all replicas whenever something has happened to them.
    environ: of the processes.
  """

  def __init__(
    self,
    program: Program,
    directory: Path,
    say: Callable[[str, str], None],
    look: Callable[[list[Replica]], None] = lambda replicas: None,
    environ: Mapping[str, str] = os.environ,
  ) -> None:
    self.program, self.directory, self._environ = program, directory, environ
    self._say, self._look = say, look
    self.replicas = [Replica(n, i) for n in program.order() for i in range(n.replicas)]
    self._selector = selectors.DefaultSelector()
    self._logs: dict[str, IO[bytes]] = {}
    self._ending: float | None = None  # when those that still run are killed
    self._code: int | None = None  # of the program, once it is ending
    self._complained = False  # that a log cannot be written

  def run(self) -> int:
    """Runs the program to its end; the exit code: the main node's, 1 if another failed for good, 128 + n on signal n."""
    with contextlib.ExitStack() as stack:
      self._sockets = Path(stack.enter_context(self._private_directory()))
      self._announced_in = self._sockets / 'announced'
      self._announced_in.mkdir()
      try:
        (self.directory / 'logs').mkdir(parents=True, exist_ok=True)
      except OSError as e:
        raise UsageError(f'{self.directory} cannot be written to: {e.strerror}') from None
      stack.callback(self._kill_all)
      stack.enter_context(self._signals())
      while self._code is None or any(r.process for r in self.replicas):
        self._start_those_due()
        self._look(self.replicas)
        self._wait()
        self._reap()
    return self._code

  def _private_directory(self) -> tempfile.TemporaryDirectory[str]:
    """For sockets, of this user alone."""
    made = tempfile.TemporaryDirectory(prefix='podrace-')
    longest = max(len(os.fsencode(f'{made.name}/{r.node.name}-{r.number}')) for r in self.replicas)
    if longest > LONGEST:
      made.cleanup()
      raise UsageError(
        f'{made.name} is too long for the path of a Unix socket; set TMPDIR to a shorter one, such as /tmp'
      )
    return made

  # --- addresses ------------------------------------------------------------------------------------

  def address(self, node: Node, number: int) -> str:
    """Where a replica has to listen."""
    return f'unix:{self._sockets}/{node.name}-{number}'

  def announced(self) -> dict[tuple[str, int], Mapping[str, str]]:
    """The addresses that are known: those that this gives, and those that processes have announced."""
    found: dict[tuple[str, int], Mapping[str, str]] = {}
    for node in self.program.nodes:
      for i in range(node.replicas):
        if Reference('listen') in references(node):
          found[node.name, i] = dict.fromkeys(node.listens, self.address(node, i))
        elif node.listens:
          found[node.name, i] = announce.read(self._announced_in / f'{node.name}-{i}')
    return found

  def commands(self, where: str) -> Iterator[tuple[str, str]]:
    """(name, a line for a shell) of each replica; `where` stands for the directory of sockets."""
    self._sockets = Path(where)
    self._announced_in = self._sockets / 'announced'
    known = self.announced()
    for node in self.program.nodes:
      for i in range(node.replicas):
        chosen = {x: f'{{{node.name}.{x}}}' for x in node.listens}  # by the process itself
        known[node.name, i] = {**chosen, **known.get((node.name, i), {})}
    for replica in self.replicas:
      yield replica.name, shlex.join(self._command(replica, known))

  def _command(self, replica: Replica, announced: Announced) -> tuple[str, ...]:
    node, i = replica.node, replica.number
    own = dict(
      listen=self.address(node, i), announce=str(self._announced_in / f'{node.name}-{i}'),
      keys=str(self.directory / 'keys'), dir=str(self.directory), replica=str(i), replicas=str(node.replicas),
    )  # fmt: skip
    return command(self.program, node, announced, own)

  # --- processes ------------------------------------------------------------------------------------

  def _start_those_due(self) -> None:
    if self._code is not None:
      return
    now, known = time.monotonic(), self.announced()
    for replica in self.replicas:
      due = replica.due is not None and replica.due <= now
      if due and is_ready(self.program, replica.node, known):
        self._start(replica, self._command(replica, known))

  def _start(self, replica: Replica, words: tuple[str, ...]) -> None:
    if words[0] == 'podrace':
      words = (sys.executable, '-m', *words)
    environ = {**self._environ, 'PYTHONUNBUFFERED': '1'}
    if not replica.node.gpus and not replica.node.main:
      environ['CUDA_VISIBLE_DEVICES'] = ''  # the learner has the accelerators
    process = subprocess.Popen(
      (sys.executable, '-IS', CHILD, str(os.getpid()), *words), env=environ, start_new_session=True,
      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    replica.process, replica.due, replica.began = process, None, time.monotonic()
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    self._selector.register(process.stdout, selectors.EVENT_READ, replica)

  def _wait(self) -> None:
    """Until a process says something or ends, a signal comes, or something is due."""
    now = time.monotonic()
    times = [r.due for r in self.replicas if r.due is not None and self._code is None]
    times = [t if t > now else now + TICK for t in times]  # due, but an address is not known yet
    if self._ending is not None:
      times.append(self._ending)
    timeout = max(0.0, min(times) - now) if times else None
    for key, _ in self._selector.select(timeout):
      if key.data is None:
        self._wake.recv(4096)
      else:
        self._read(key.data)
    if self._ending is not None and time.monotonic() >= self._ending:
      self._kill_all()

  def _reap(self) -> None:
    for replica in self.replicas:
      if replica.process is not None and replica.process.poll() is not None:
        code = replica.process.returncode
        code = code if code >= 0 else 128 - code  # as a shell has it
        _signal_group(replica.process, signal.SIGKILL)  # what it may have left
        while self._read(replica):
          pass
        self._hear_no_more(replica)
        replica.process = None
        if self._code is None:
          self._ended(replica, code)
        else:
          replica.code = code

  def _ended(self, replica: Replica, code: int) -> None:
    """Decides what follows the end of a process that nobody has asked for."""
    node, backoff = replica.node, replica.node.restart
    if code == 0:
      replica.code = 0
      if node.main:
        self._end(0)
      return
    lived = time.monotonic() - replica.began
    replica.failures = 1 if backoff and lived >= backoff.healthy else replica.failures + 1
    if code == BAD_USAGE or backoff is None or replica.failures >= backoff.failures:
      times = f' {replica.failures} times in a row' if replica.failures > 1 else ''
      log = self.directory / 'logs' / f'{replica.name}.log'
      self._tell(replica, f'ended with {code}{times}, so the program ends; all that it said: {log}')
      replica.code = code
      self._end(code if node.main else 1)
      return
    pause = backoff.pause(replica.failures)
    replica.due, replica.restarts = time.monotonic() + pause, replica.restarts + 1
    self._tell(replica, f'ended with {code}, starts again in {pause:g} s')

  def _end(self, code: int) -> None:
    """Has all processes end."""
    self._code, self._ending = code, time.monotonic() + GRACE
    for replica in self.replicas:
      replica.due = None
      if replica.process is not None:
        _signal_group(replica.process, signal.SIGTERM)

  def _kill_all(self) -> None:
    for replica in self.replicas:
      if replica.process is not None:
        _signal_group(replica.process, signal.SIGKILL)
        replica.process.wait()
    self._ending = None

  # --- what they say --------------------------------------------------------------------------------

  def _read(self, replica: Replica) -> bool:
    """Takes some of what a process has written, to its log and line by line to `say`; whether there was some."""
    stdout = replica.process and replica.process.stdout
    if not stdout or stdout.closed:
      return False
    data = stdout.read(CHUNK)
    if data == b'':  # nobody can write to it any more
      self._hear_no_more(replica)
    if not data:
      return False
    self._log(replica, data)
    *lines, replica.line = (replica.line + data).split(b'\n')
    if len(replica.line) > SAID:
      lines, replica.line = [*lines, replica.line], b''
    for line in lines:
      self._line(replica, line)
    return True

  def _hear_no_more(self, replica: Replica) -> None:
    stdout = replica.process and replica.process.stdout
    if stdout and not stdout.closed:
      self._selector.unregister(stdout)
      stdout.close()
    if replica.line:
      self._line(replica, replica.line)
      replica.line = b''

  def _line(self, replica: Replica, line: bytes) -> None:
    replica.last = line.decode(errors='replace').rstrip('\r')
    self._say(replica.name, replica.last)

  def _tell(self, replica: Replica, text: str) -> None:
    """Tells what became of a replica, there and in its log."""
    self._log(replica, f'podrace launch: {replica.name} {text}\n'.encode())
    self._say(replica.name, f'podrace launch: {text}')

  def _log(self, replica: Replica, data: bytes) -> None:
    """Adds to a replica's log. A full disk ends no program."""
    try:
      if replica.name not in self._logs:
        path = self.directory / 'logs' / f'{replica.name}.log'
        self._logs[replica.name] = path.open('ab', buffering=0)
      self._logs[replica.name].write(data)
    except OSError as e:
      if not self._complained:
        self._complained = True
        self._say(replica.name, f'podrace launch: its log cannot be written: {e.strerror or e}')

  # --- signals --------------------------------------------------------------------------------------

  @contextlib.contextmanager
  def _signals(self) -> Iterator[None]:
    """Has the end of a child, SIGTERM, Ctrl-C and SIGHUP wake the loop."""
    self._wake, other = socket.socketpair()
    self._wake.setblocking(False)
    other.setblocking(False)
    self._selector.register(self._wake, selectors.EVENT_READ, None)
    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._asked)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
      handlers[signal.SIGHUP] = self._asked
    handlers[signal.SIGCHLD] = lambda *_: None
    before = {s: signal.signal(s, h) for s, h in handlers.items()}
    wakeup = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
    try:
      yield
    finally:
      signal.set_wakeup_fd(wakeup)
      for signum, handler in before.items():
        signal.signal(signum, handler)
      self._selector.close()
      self._wake.close()
      other.close()
      for log in self._logs.values():
        log.close()

  def _asked(self, signum: int, frame: Any) -> None:
    """Ends the program; at the second time without waiting for anything to be saved."""
    if self._code is None:
      self._end(128 + signum)
    else:
      self._ending = time.monotonic()


def run(program: Program, directory: Path | str, environ: Mapping[str, str] = os.environ) -> int:
  """Runs a program on this machine, with a view of its processes where the output is a terminal.

  Args:
    directory: for the logs of all processes, and what nodes keep in {dir}.
    environ: of the processes.

  Returns:
    an exit code: the main node's; 1 if another node failed for good; 128 + n after signal n.
  """
  names = [Replica(n, n.replicas - 1).name for n in program.nodes]
  width, out = max(map(len, names)), Lasting(sys.stdout)
  if out.isatty():
    from podrace.launch.view import View

    with View(width) as view:
      return Local(program, Path(directory), view.say, view.look, environ).run()

  def say(name: str, line: str) -> None:
    print(f'{name:<{width}} | {line}', file=out, flush=True)

  return Local(program, Path(directory), say, environ=environ).run()


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
  """Signals a process and those that it has started; they are a session of their own."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signum)
