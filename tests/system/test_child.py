"""Child processes: exit codes, signals to their session, and the end of one that ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import alive, until

from podrace.system.child import ChildProcess, python

WAITS = 'import signal; print("up", flush=True); signal.pause()'
STUBBORN = f'import signal; signal.signal(15, signal.SIG_IGN); {WAITS}'


def start(code: str, **options: int) -> ChildProcess:
  return ChildProcess(python('-c', code), stdout=subprocess.PIPE, **options)


@pytest.mark.parametrize(
  ('code', 'expected'), [('raise SystemExit(3)', 3), ('import os; os.kill(os.getpid(), 9)', 137)]
)
def test_exit_codes_are_those_of_a_shell(code: str, expected: int) -> None:
  assert start(code).finish() == expected


@pytest.mark.parametrize(('code', 'grace', 'expected'), [(WAITS, 600.0, 143), (STUBBORN, 0.1, 137)])
def test_stop_terminates_then_kills(code: str, grace: float, expected: int) -> None:
  child = start(code)
  assert child.stdout.readline() == b'up\n' and child.poll() is None and child.wait(0.0) is None
  assert child.stop(grace) == expected == child.poll()


def test_signals_reach_the_session_and_not_its_owner() -> None:
  spawn = f'import subprocess, sys; p = subprocess.Popen([sys.executable, "-c", {WAITS!r}]); print(p.pid, flush=True); p.wait()'
  child = start(spawn)
  lines = {child.stdout.readline(), child.stdout.readline()}
  (pid,) = (int(x) for x in lines if x != b'up\n')
  assert os.getpgid(pid) == child.pid != os.getpgid(0)
  child.signal(signal.SIGKILL)
  assert child.finish() == 137
  until(lambda: not alive(pid))


def test_a_child_that_has_ended_is_not_written_to() -> None:
  child = start('', stdin=subprocess.PIPE)
  assert child.finish() == 0
  child.send(b'line\n')
  child.close_input()


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
  with pytest.raises(FileNotFoundError):
    ChildProcess((str(tmp_path / 'missing'),))
  assert ChildProcess((sys.executable, '-c', ''), directory=str(tmp_path)).finish() == 0
