"""A program's processes on this machine: real ones, and real signals."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from children import SUPPORT, Process, alive, environment, until

from podrace.errors import UsageError
from podrace.launch import Supervisor
from podrace.launch.program import Backoff, Node, Program, literal
from podrace.launch.supervisor.guard import WATCHDOG
from podrace.launch.supervisor.replica import LocalStarter
from podrace.launch.supervisor.screen import Screen

WAITS = 'import signal; print("up"); signal.pause()'
SAVES = """
import signal, sys
def save(*_):
  print("saved"); sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up"); signal.pause()
"""
STUBBORN = (
  'import signal; signal.signal(15, signal.SIG_IGN); print("up")\nwhile True: signal.pause()'
)
# Fails until it has been started so often, as the lines of a file count.
TRIES = """
import sys
with open(sys.argv[1], 'a+') as f:
  f.write('x\\n'); f.seek(0); n = len(f.readlines())
print('try', n)
if n >= int(sys.argv[2]) and sys.argv[3:]: open(sys.argv[3], 'w')
sys.exit(0 if n >= int(sys.argv[2]) else 3)
"""
UNTIL = 'import sys; open(sys.argv[1]).read()'  # until somebody has opened that pipe and closed it


def node(name: str, *command: str, **fields: Any) -> dict[str, Any]:
  """A node that runs code of Python; braces of the code are no references."""
  code, *arguments = command
  code = code.replace('{', '{{').replace('}', '}}')
  return {'name': name, 'command': [code, *arguments], **fields}


def pipe(tmp_path: Path) -> Path:
  """A named pipe, at which a node waits."""
  path = tmp_path / 'go'
  os.mkfifo(path)
  return path


def command(tmp_path: Path, *nodes: dict[str, Any]) -> list[str]:
  """Runs a program as `podrace launch` does, with what it shows."""
  launched, directory = str(SUPPORT / 'launched.py'), str(tmp_path / 'program')
  return [sys.executable, launched, directory, json.dumps(nodes), 'shown']


class Launched(Process):
  """A program that is launched, with the pids of its processes."""

  def __init__(self, tmp_path: Path, *nodes: dict[str, Any]) -> None:
    self.directory = tmp_path / 'program'
    self.directory.mkdir(exist_ok=True)
    program = json.dumps(nodes)
    super().__init__(
      tmp_path / 'launched.txt', str(SUPPORT / 'launched.py'), str(self.directory), program
    )

  def started(self, watchdogs: bool = False) -> list[int]:
    """Pids of the nodes' processes, or of its watchdogs, that live."""
    path = Path(f'/proc/{self.process.pid}/task/{self.process.pid}/children')
    pids = [int(pid) for pid in path.read_text().split() if alive(int(pid))]
    return [p for p in pids if (WATCHDOG in Path(f'/proc/{p}/cmdline').read_text()) == watchdogs]

  def logged(self, name: str) -> str:
    return (self.directory / 'logs' / f'{name}.log').read_text()


def test_the_end_of_the_main_node_is_the_programs(tmp_path: Path) -> None:
  main = node('main', 'print("a"); print("b", end="")', main=True)
  with Launched(tmp_path, main, node('other', WAITS, replicas=2)) as launched:
    assert launched.wait() == 0
    assert [x for x in launched.output.splitlines() if 'main' in x] == ['main: a', 'main: b']
    assert launched.logged('main') == 'a\nb'


def test_all_processes_are_told_to_end_and_may_save(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  others = node('other', SAVES, replicas=2)
  with Launched(tmp_path, node('main', UNTIL, str(go), main=True), others) as launched:
    launched.says('other-0: up')
    launched.says('other-1: up')
    go.write_text('')
    assert launched.wait() == 0
    assert launched.output.count('saved') == 2


def test_one_that_fails_is_started_again(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  other = node('other', TRIES, str(tmp_path / 'n'), '3', str(go))
  with Launched(tmp_path, node('main', UNTIL, str(go), main=True), other) as launched:
    assert launched.wait() == 0
    heard = re.findall(r'other: .*?(try \d|ended with \d)', launched.output)
    assert heard[:5] == ['try 1', 'ended with 3', 'try 2', 'ended with 3', 'try 3']
    assert 'ended with 3' in launched.logged('other')


def test_the_main_node_is_started_again_too(tmp_path: Path) -> None:
  with Launched(tmp_path, node('main', TRIES, str(tmp_path / 'n'), '3', main=True)) as launched:
    assert launched.wait() == 0
    assert 'main: try 3' in launched.output


def test_one_that_never_lives_ends_the_program(tmp_path: Path) -> None:
  other = node('other', 'raise SystemExit(5)', restart={'first': 0.0, 'failures': 3})
  with Launched(tmp_path, node('main', WAITS, main=True), other) as launched:
    assert launched.wait() == 1
    assert re.search('other: .* 5 3 times', launched.output)
    assert str(launched.directory / 'logs' / 'other.log') in launched.output


@pytest.mark.parametrize(('step', 'code'), [('5', 1), ('$n', 0)])
def test_a_learner_that_saves_nothing_new_ends_the_program(
  step: str, code: int, tmp_path: Path
) -> None:
  """However long it lives. With a newer checkpoint each time it may fail as often as it likes."""
  folder = tmp_path / 'program' / 'checkpoints'
  saves = f'import os; n = len(open(sys.argv[1]).readlines()); os.makedirs(os.path.join({str(folder)!r}, {step!r}.replace("$n", str(n))), exist_ok=True)\n'
  tries = TRIES.replace("print('try', n)\n", f"print('try', n)\n{saves}")
  restart = {'first': 0.0, 'healthy': 0.0, 'failures': 3}
  main = node('main', tries, str(tmp_path / 'n'), '6', main=True, restart=restart)
  with Launched(tmp_path, main) as launched:
    assert launched.wait() == code
    assert launched.output.count('main: try') == (6 if code == 0 else 3)


def test_a_learner_that_never_saves_ends_the_program(tmp_path: Path) -> None:
  lives = Backoff(first=0.0, healthy=0.0, failures=3)
  program = Program((Node('main', ('podrace', 'train'), main=True, restart=lives),))
  starts: list[str] = []

  def start(node: Node, number: int, words: tuple[str, ...]) -> Any:
    starts.append(node.name)
    return LocalStarter()(node, number, ('false',) if len(starts) < 9 else ('true',))

  assert Supervisor(program, tmp_path, lambda name, line: None, start=start).run() == 1
  assert len(starts) == 3


@pytest.mark.parametrize(('main', 'code'), [(True, 2), (False, 1)])
def test_bad_usage_is_not_tried_again(tmp_path: Path, main: bool, code: int) -> None:
  one = node('one', 'print("what?"); raise SystemExit(2)', main=main)
  with Launched(tmp_path, one, node('other', WAITS, main=not main)) as launched:
    assert launched.wait() == code
    assert launched.output.count('what?') == 1


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
  said: list[str] = []
  missing = Program((Node('main', ('no-such-program',), main=True),))
  assert Supervisor(missing, tmp_path, lambda name, line: said.append(line)).run() == 2
  assert 'no-such-program' in said[0]


def test_a_process_that_cannot_be_started_for_now_is_started_later(
  tmp_path: Path, monkeypatch: Any
) -> None:
  start, calls = LocalStarter.__call__, 0

  def fail_once(self: LocalStarter, *args: Any) -> Any:
    nonlocal calls
    calls += 1
    if calls == 1:
      raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return start(self, *args)

  monkeypatch.setattr(LocalStarter, '__call__', fail_once)
  main = Node('main', (sys.executable, '-c', ''), main=True, restart=Backoff(first=0.0))
  assert Supervisor(Program((main,)), tmp_path, lambda name, line: None).run() == 0
  assert calls == 2


@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_has_all_save_and_end(tmp_path: Path, signum: int, code: int) -> None:
  with Launched(tmp_path, node('main', SAVES, main=True), node('other', SAVES)) as launched:
    launched.says('up', 2)
    pids = launched.started()
    launched.signal(signum)
    assert launched.wait() == code
    assert launched.output.count('saved') == 2
    assert len(pids) == 2 and not any(map(alive, pids))


def test_a_second_signal_waits_for_nobody(tmp_path: Path) -> None:
  with Launched(tmp_path, node('main', STUBBORN, main=True)) as launched:
    launched.says('up')
    (pid,) = launched.started()
    launched.signal(signal.SIGTERM)
    launched.signal(signal.SIGINT)
    assert launched.wait(25) in (143, 130)  # GRACE is 30 s
    assert not alive(pid)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
  temporary = Path(tempfile.mkdtemp())
  monkeypatch.setenv('TMPDIR', str(temporary))
  spawns = f'import subprocess, sys\np = subprocess.Popen([sys.executable, "-c", {WAITS!r}]); print("has", p.pid); p.wait()'
  with Launched(tmp_path, node('main', SAVES, main=True), node('other', spawns)) as launched:
    launched.says('up', 2)
    pids = launched.started()
    grandchild = int(re.findall(r'has (\d+)', launched.output)[0])
    launched.kill()
    until(lambda: not any(map(alive, [*pids, grandchild])))
    until(lambda: not list(temporary.iterdir()))  # of the sockets


def test_a_program_waits_for_processes_of_a_killed_launcher(tmp_path: Path) -> None:
  """As they still save, and so have their directories locked."""
  go, saved = pipe(tmp_path), tmp_path / 'saved'
  saves = (
    'import os, signal, sys\n'
    f'def save(*_): open({str(go)!r}).read(); open({str(saved)!r}, "w"); sys.exit(143)\n'
    'signal.signal(signal.SIGTERM, save); print("up"); signal.pause()'
  )
  with Launched(tmp_path, node('main', saves, main=True)) as first:
    first.says('up')
    first.kill()
    reads = f'import os; print("saved:", os.path.exists({str(saved)!r}))'
    with Launched(tmp_path, node('main', reads, main=True)) as second:
      second.says('waits for the end of the one before')
      go.write_text('')
      assert second.wait() == 0
      assert 'saved: True' in second.output


def test_a_watchdog_that_is_killed_is_replaced(tmp_path: Path) -> None:
  with Launched(tmp_path, node('main', WAITS, main=True)) as launched:
    launched.says('up')
    (watchdog,) = launched.started(watchdogs=True)
    os.kill(watchdog, signal.SIGKILL)
    until(lambda: launched.started(watchdogs=True) not in ([], [watchdog]))
    pids = launched.started()
    launched.kill()
    until(lambda: not any(map(alive, pids)))


def test_a_signal_while_processes_start_reaches_all_of_them(tmp_path: Path) -> None:
  others = node('other', SAVES, replicas=20)
  with Launched(tmp_path, node('main', WAITS, main=True), others) as launched:
    launched.says('up')
    launched.signal(signal.SIGTERM)
    assert launched.wait(20) == 143  # not after the half minute in which they may save


def test_a_program_runs_once_in_a_directory(tmp_path: Path) -> None:
  with Launched(tmp_path, node('main', WAITS, main=True)) as launched:
    launched.says('up')
    program = Program((Node('main', ('true',), main=True),))
    with pytest.raises(UsageError, match='already'):
      Supervisor(program, launched.directory, lambda name, line: None).run()


def test_a_reader_that_has_stopped_holds_up_nothing(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  loud = node('loud', f'for i in range(50_000): print("x" * 100)\nopen({str(go)!r}, "w")')
  words = command(tmp_path, node('main', UNTIL, str(go), main=True), loud)
  read, write = os.pipe()
  launched = subprocess.Popen(words, stdout=write, env=environment())
  os.close(write)
  try:
    assert launched.wait(60) == 0  # nobody has read anything
  finally:
    launched.kill()
    os.close(read)


def test_the_screen_says_what_it_left_out(capfd: Any) -> None:
  with Screen(['a']) as screen:
    screen.lines.maxsize = 1
    for i in range(1_000):
      screen.say('a', str(i))
  out = capfd.readouterr().out
  left_out = sum(int(n) for n in re.findall(r'\.\.\. (\d+) lines were left out here', out))
  assert 'a | 0\n' in out and left_out


def test_a_terminal_has_a_table(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  words = command(tmp_path, node('main', 'print("hello")\n' + UNTIL, str(go), main=True))
  parent, child = pty.openpty()
  launched = subprocess.Popen(words, stdout=child, env=environment() | {'TERM': 'xterm'})
  os.close(child)
  said = b''
  while not (b'hello' in said and b'restarts' in said and b'runs' in said):
    said += os.read(parent, 4096)
  go.write_text('')
  with contextlib.suppress(OSError):  # its end, on Linux
    while os.read(parent, 4096):
      pass
  os.close(parent)
  assert launched.wait(60) == 0


def test_a_terminal_that_is_closed_ends_the_program_in_order(tmp_path: Path) -> None:
  words = command(tmp_path, node('main', SAVES, main=True))
  parent, child = pty.openpty()
  launched = subprocess.Popen(words, stdout=child, stdin=child, stderr=child, env=environment())
  os.close(child)
  log = tmp_path / 'program' / 'logs' / 'main.log'
  until(lambda: log.exists() and 'up' in log.read_text())
  os.close(parent)
  launched.send_signal(signal.SIGHUP)
  assert launched.wait(60) == 129
  assert 'saved' in log.read_text()


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
  stays = 'import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()'
  leaves = f'import subprocess, sys; p = subprocess.Popen([sys.executable, "-c", {stays!r}]); print("left", p.pid)'
  with Launched(tmp_path, node('main', leaves, main=True)) as launched:
    assert launched.wait() == 0
    (pid,) = re.findall(r'left (\d+)', launched.output)
    until(lambda: not alive(int(pid)))


def test_a_replica_listens_at_the_same_address_whenever_it_starts(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  serves = 'import sys; print("at", sys.argv.pop(1))\n' + TRIES
  serve = node('serve', serves, '{listen}', str(tmp_path / 'n'), '2', str(go), listens=['it'])
  wants = 'import sys; print("to", sys.argv.pop(1))\n' + UNTIL
  main = node('main', wants, '{serve}', str(go), main=True)
  with Launched(tmp_path, serve, main) as launched:
    assert launched.wait() == 0
    (to,) = re.findall(r'main: to (.*)', launched.output)
    ats = re.findall(r'serve: at (.*)', launched.output)
    assert to.startswith('unix:') and ats == [to, to]
    assert not os.path.exists(os.path.dirname(to.removeprefix('unix:')))  # it went with the program


def test_one_that_chooses_its_address_is_waited_for(tmp_path: Path) -> None:
  chooses = 'import json, os, sys, signal\nopen(sys.argv[1] + "+", "w").write(json.dumps({"it": "tcp://h:7"}))\nos.rename(sys.argv[1] + "+", sys.argv[1]); signal.pause()'
  serve = node('serve', chooses, '{announce}', listens=['it'])
  main = node('main', 'import sys; print("to", sys.argv[1])', '{serve.it}', main=True)
  with Launched(tmp_path, serve, main) as launched:
    assert launched.wait() == 0
    assert 'main: to tcp://h:7' in launched.output


def test_a_process_that_closes_its_output_lives_on(tmp_path: Path) -> None:
  go = pipe(tmp_path)
  closes = f'import os, signal\nos.close(1); os.close(2); open({str(go)!r}, "w"); signal.pause()'
  main = node('main', UNTIL, str(go), main=True)
  with Launched(tmp_path, main, node('other', closes)) as launched:
    assert launched.wait() == 0
    assert 'starts again' not in launched.output


def test_a_long_directory_for_sockets_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
  long = tmp_path / ('x' * 90)
  long.mkdir()
  monkeypatch.setattr('tempfile.tempdir', str(long))
  program = Program((Node('main', ('true',), main=True),))
  with pytest.raises(UsageError, match='TMPDIR'):
    Supervisor(program, tmp_path / 'program', lambda name, line: None).run()
  assert not list(long.iterdir())


@pytest.mark.parametrize('name', ['a,b', 'a b'])
def test_a_directory_for_sockets_that_ends_addresses_is_refused(
  name: str, tmp_path: Path, monkeypatch: Any
) -> None:
  (tmp_path / name).mkdir()
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path / name))
  with pytest.raises(UsageError, match='TMPDIR'):
    Supervisor(Program((Node('main', ('true',), main=True),)), tmp_path, lambda *_: None).run()


@pytest.mark.parametrize(('words', 'code'), [(('{coordinator}', '{announce}'), 2), ((), 1)])
def test_any_learner_may_refuse_first(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
  python = sys.executable, '-c'
  other = Node('other', (*python, 'raise SystemExit(2)', *words))
  program = Program((Node('main', (*python, WAITS, *words), main=True), other))
  assert Supervisor(program, tmp_path, lambda name, line: None).run() == code


def test_an_ended_learner_joins_one_that_starts_again(tmp_path: Path) -> None:
  count = 'import sys; open(sys.argv[1], "a").write("x")'
  wants_two = 'import sys; f = open(sys.argv[1], "a+"); f.seek(0); sys.exit(len(f.read()) < 2)'
  words = (str(tmp_path / 'file'), '{coordinator}', '{announce}')
  often = Backoff(0.1, 0.1, failures=50)
  other = Node('other', (sys.executable, '-c', count, *words))
  main = Node('main', (sys.executable, '-c', wants_two, *words), main=True, restart=often)
  assert Supervisor(Program((main, other)), tmp_path, lambda name, line: None).run() == 0


@pytest.mark.parametrize('main_fails', [True, False])
def test_learners_start_again_together(main_fails: bool, tmp_path: Path) -> None:
  """One fails, once; the other would wait for ever."""
  until_so_many = (
    f'import os, sys\nsys.path.insert(0, {str(SUPPORT)!r})\nfrom changes import changes\ndef wait(n):\n'
    '  for _ in changes(sys.argv[2]):\n'
    '    if os.path.exists(sys.argv[2]) and os.path.getsize(sys.argv[2]) >= n: return\n'
  )
  fails = until_so_many + (
    'try: os.mkdir(sys.argv[1])\nexcept FileExistsError: wait(2)\nelse: wait(1); sys.exit(1)'
  )
  waits = until_so_many + 'open(sys.argv[2], "a").write("x"); wait(2)'
  here, starts = tmp_path / 'failed', tmp_path / 'starts'
  one, other = (
    (sys.executable, '-c', literal(x), str(here), str(starts), '{coordinator}', '{announce}')
    for x in (fails, waits)
  )
  often, said = Backoff(0.1, 0.1, failures=2), []
  nodes = (
    Node('main', one if main_fails else other, main=True, restart=often),
    Node('other', other if main_fails else one, restart=often),
  )
  assert Supervisor(Program(nodes), tmp_path, lambda name, line: said.append(line)).run() == 0
  assert starts.read_text() == 'xx'
  assert sum('starts again' in line for line in said) == 2


def test_keys_are_for_several_machines(tmp_path: Path) -> None:
  program = Program((Node('main', ('true', '{keys}'), main=True),))
  with pytest.raises(UsageError, match=r'main: \{keys\}'):
    Supervisor(program, tmp_path, lambda name, line: None).run()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
  (tmp_path / 'file').touch()
  program = Program((Node('main', ('true',), main=True),))
  with pytest.raises(UsageError, match='file/program'):
    Supervisor(program, tmp_path / 'file' / 'program', lambda name, line: None).run()


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
  (tmp_path / 'logs' / 'main.log').mkdir(parents=True)
  said: list[str] = []
  program = Program((Node('main', ('echo', 'hello'), main=True),))
  assert Supervisor(program, tmp_path, lambda name, line: said.append(line)).run() == 0
  assert len(said) == 2 and 'log' in said[0] and said[1] == 'hello'


def test_endless_output_silences_no_other(tmp_path: Path) -> None:
  loud = node('loud', 'import os\nwhile True: os.write(1, b"x" * 1_000_000)')
  with Launched(tmp_path, node('main', 'print("heard")', main=True), loud) as launched:
    assert launched.wait() == 0
    assert 'main: heard' in launched.output


def test_it_sleeps_while_a_process_without_output_lives(tmp_path: Path) -> None:
  closes = 'import os, signal; os.close(1); os.close(2); signal.alarm(1); signal.pause()'
  main = Node('main', (sys.executable, '-c', closes), restart=None, main=True)
  looks: list[Any] = []
  assert Supervisor(Program((main,)), tmp_path, lambda name, line: None, looks.append).run() == 1
  assert 1 < len(looks) < 20


def test_a_bar_of_progress_is_shown_as_it_grows(tmp_path: Path) -> None:
  said: list[str] = []
  bar = 'import sys; sys.stdout.write("10%\\r20%\\r\\n30%")'
  main = Node('main', (sys.executable, '-c', bar), main=True)
  assert Supervisor(Program((main,)), tmp_path, lambda name, line: said.append(line)).run() == 0
  assert said == ['10%', '20%', '30%']
