"""Signals to a command: at any moment it ends with 128 + n, without a traceback."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import DEADLINE, environment
from processes import podrace
from shorthand import slow_after

HANGS_IN_C = """
import ctypes
from podrace.system.process import end_at_once, end_on_signals, on_signals
end_on_signals()
on_signals(end_at_once).__enter__()  # as `podrace train` does
mutex = ctypes.create_string_buffer(256)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
print('hangs', flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, whatever signal comes
"""

# Signals its own process where a module begins to be imported.
AT_IMPORT = """
import os, sys
module, signum, *args = sys.argv[1:]
class Finder:
  def find_spec(self, name, path=None, target=None):
    if name == module:
      os.kill(os.getpid(), int(signum))
sys.meta_path.insert(0, Finder())
sys.argv[1:] = args
from podrace.__main__ import main
main()
"""


def ended(code: str, *args: str, cwd: Path | None = None) -> tuple[int, str]:
  """The exit code of a program, and what is on its stderr."""
  done = subprocess.run(
    [sys.executable, '-c', code, *args], capture_output=True, text=True, cwd=cwd, check=False,
    timeout=DEADLINE, env=environment(),
  )  # fmt: skip
  return done.returncode, done.stderr


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp('signals')
  args = ['train', 'catch', '--total-steps', '2000', '--quiet', '--run-dir', str(folder / 'run')]
  code, output = podrace(args, folder / 'log')
  assert code == 0, output
  return folder / 'run'


@pytest.mark.parametrize(
  ('signum', 'module', 'command'),
  slow_after(
    7,
    (signal.SIGINT, 'podrace.system.process', 'list'),
    (signal.SIGINT, 'podrace.cli', 'runs'),
    (signal.SIGTERM, 'podrace.commands.train', 'devices'),
    (signal.SIGHUP, 'jax', 'devices'),
    (signal.SIGINT, 'jax', 'eval'),
    (signal.SIGTERM, 'podrace.run.evaluate', 'eval'),
    (signal.SIGINT, 'podrace.run.loop', 'train'),
    (signal.SIGINT, 'jax.numpy', 'eval'),
    (signal.SIGINT, 'orbax.checkpoint', 'export'),
    (signal.SIGINT, 'tyro', 'train'),
  ),
)
def test_a_signal_during_imports(
  signum: int, module: str, command: str, run_dir: Path, tmp_path: Path
) -> None:
  args = {'eval': [str(run_dir)], 'export': [str(run_dir), str(tmp_path / 'policy')]}
  code, errors = ended(
    AT_IMPORT, module, str(int(signum)), command, *args.get(command, []), cwd=tmp_path
  )
  assert code == 128 + signum and 'Traceback' not in errors, errors
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_main_thread_is_in_c(signum: int) -> None:
  process = subprocess.Popen(
    [sys.executable, '-c', HANGS_IN_C], stdout=subprocess.PIPE, env=environment()
  )
  with process:
    try:
      assert process.stdout is not None and process.stdout.readline() == b'hangs\n'
      process.send_signal(signum)
      assert process.wait(DEADLINE) == 128 + signum
    finally:
      process.kill()


def test_a_signal_to_a_fork_is_not_for_the_process_that_it_is_of() -> None:
  code = """
import os, signal
from podrace.system.process import end_on_signals
end_on_signals()
for signum in (signal.SIGTERM, signal.SIGINT):
  read, write = os.pipe()
  if not (pid := os.fork()):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
      os.write(write, b'x')
      while True:  # a signal that comes just before the wait is handled after it
        signal.sigtimedwait({signal.SIGALRM}, 0.1)
    except KeyboardInterrupt:
      os._exit(3)
  os.read(read, 1)
  os.kill(pid, signum)
  print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
  done = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=False,
    timeout=DEADLINE, env=environment(),
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (0, '-15\n3\n'), done.stderr


def test_what_is_not_to_stay_is_removed(tmp_path: Path) -> None:
  code = """
import signal, sys
from pathlib import Path
from podrace.system.process import end_on_signals, scratch_directory
end_on_signals()
with scratch_directory('draft-', Path(sys.argv[1])) as folder:
  (folder / 'file').write_text('it')
  signal.raise_signal(signal.SIGTERM)
"""
  assert ended(code, str(tmp_path))[0] == 143
  assert not list(tmp_path.iterdir())


def test_the_cursor_of_a_terminal_is_shown_again() -> None:
  code = 'import signal; from podrace.system.process import end_at_once; end_at_once(signal.SIGINT, None)'
  ours, theirs = pty.openpty()
  try:
    done = subprocess.run(
      [sys.executable, '-c', code], stdout=theirs, timeout=DEADLINE, env=environment(), check=False
    )
    assert done.returncode == 130 and os.read(ours, 100) == b'\x1b[?25h'
  finally:
    os.close(ours)
    os.close(theirs)
