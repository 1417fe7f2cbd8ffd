"""What commands have in common: what they tell, and to whom."""

from __future__ import annotations

import ast
import logging
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import podrace
from podrace.system import process, signals
from podrace.system.locks import is_locked, lock
from podrace.system.logs import log_to_stderr
from podrace.system.process import on_signals

LOG = logging.getLogger('podrace.somewhere')


def tell() -> None:
  LOG.info('somebody joins')
  LOG.warning('somebody is silent')


def test_a_command_tells_what_is_logged_in_one_format(capfd: pytest.CaptureFixture[str]) -> None:
  root = logging.StreamHandler()  # as some library may have set up
  logging.getLogger().addHandler(root)
  try:
    with log_to_stderr('podrace it'):
      tell()
    assert capfd.readouterr().err == 'podrace it: somebody joins\npodrace it: somebody is silent\n'
    with log_to_stderr('podrace it', quiet=True):
      tell()
    assert capfd.readouterr().err == 'podrace it: somebody is silent\n'
  finally:
    logging.getLogger().removeHandler(root)


def test_what_a_command_has_set_up_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
  ours = logging.getLogger('podrace')
  before = ours.level, ours.propagate, list(ours.handlers)
  with pytest.raises(ZeroDivisionError), log_to_stderr('podrace it'):
    raise ZeroDivisionError
  assert (ours.level, ours.propagate, ours.handlers) == before


def test_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  class Closed:
    def write(self, text: str) -> None:
      raise BrokenPipeError

    def flush(self) -> None:
      raise BrokenPipeError

  monkeypatch.setattr('sys.stderr', Closed())
  with log_to_stderr('podrace it'):
    tell()


def test_only_commands_configure_logging() -> None:
  """A library that does takes it from the program that it is part of."""
  source, found = Path(podrace.__file__).parent, set()
  for file in source.rglob('*.py'):
    for node in ast.walk(ast.parse(file.read_text())):
      if isinstance(node, ast.Attribute) and node.attr in ('addHandler', 'basicConfig'):
        found.add(str(file.relative_to(source)))
      if isinstance(node, ast.Name) and node.id == 'log_to_stderr':
        found.add(str(file.relative_to(source)))
  names = ('train', 'act', 'stages', 'envs', 'replay', 'discover', 'record')
  commands = {f'commands/{x}.py' for x in names}
  assert found == {'system/logs.py', *commands}


def test_a_hang_up_is_handled_and_under_nohup_stays_ignored() -> None:
  handled: list[int] = []
  before = signal.getsignal(signal.SIGHUP)
  try:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_signals(lambda signum, frame: handled.append(signum)):
      signal.raise_signal(signal.SIGHUP)
    assert handled == []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with on_signals(lambda signum, frame: handled.append(signum)):
      signal.raise_signal(signal.SIGHUP)
    assert handled == [signal.SIGHUP] and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
  finally:
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(('seconds', 'handled'), [(60.0, [2, 15]), (0.0, [2, 2, 15])])
def test_equal_signals_at_once_are_one(
  seconds: float, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
  """As `timeout -s INT` sends them, to a process and its group."""
  monkeypatch.setattr(process, 'ONCE_SECONDS', seconds)
  seen: list[int] = []
  with on_signals(lambda signum, frame: seen.append(signum)):
    for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
      signal.raise_signal(signum)
  assert seen == handled


def test_a_lock_is_of_one_directory(tmp_path: Path) -> None:
  folder = tmp_path / 'folder'
  folder.mkdir()
  with lock(folder) as file:
    assert is_locked(folder, file)
    with pytest.raises(BlockingIOError):
      lock(folder)
    folder.rename(tmp_path / 'moved')
    assert not is_locked(folder, file)
    folder.mkdir()
    with lock(folder) as other:
      assert is_locked(folder, other) and not is_locked(folder, file)
    shutil.rmtree(folder)
    folder.write_text('a file')
    assert not is_locked(folder, file)


def test_a_process_is_left_without_taking_it_apart() -> None:
  """What was registered is called, threads are waited for, and no object is torn down behind a thread's back."""
  code = """
import atexit, threading
from podrace.system.process import leave
class Last:
  def __del__(self): print('torn down')
last = Last()
atexit.register(print, 'registered')
go = threading.Event()
def work():
  go.wait(); sum(range(10_000_000)); print('worked')  # much later than `leave` is called
threading.Thread(target=work).start()
go.set()
leave(3)
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout, done.stderr) == (3, '', 'worked\nregistered\n')


def test_the_command_ends_with_the_code_of_main() -> None:
  code = """
import sys
from podrace import cli
sys.modules.setdefault('jax', sys)
cli.main = lambda: sys.exit(2)
class Last:
  def __del__(self): print('torn down')
last = Last()
cli.entry()
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout, done.stderr) == (2, '', '')


@pytest.mark.parametrize('of_user', [True, False])
def test_a_wait_names_no_function_of_python(of_user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  told: list[str] = []
  warned = threading.Event()

  def warn(text: str) -> None:
    told.append(text)
    warned.set()

  def waits_here() -> None:
    warned.wait()

  monkeypatch.setattr(signals, 'SLOW_SECONDS', 0.01)
  with signals.Stop() as stopping:
    stopping.during(waits_here if of_user else warned.wait, 'waiting', warn)
  file = 'test_process' if of_user else 'threads'
  name = 'waits_here' if of_user else 'podrace'
  assert re.search(rf' in {name} \(.*{file}\.py:\d+\)', told[0]), told
