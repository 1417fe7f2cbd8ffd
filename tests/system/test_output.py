"""Commands go on where nobody reads what they say. Real processes, through the shell."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import DEADLINE, environment

from podrace.system.output import Lasting

TRAIN = ['train', 'catch', '--num-envs', '4', '--unroll-length', '8', '--agent.network.hidden', '16',
         '--total-steps', '640', '--log-every', '32']  # fmt: skip


def test_a_letter_that_a_stream_lacks_is_escaped() -> None:
  data = io.BytesIO()
  stream = Lasting(io.TextIOWrapper(data, encoding='ascii'))
  for text in ('a', 'é', 'b'):
    stream.write(text)
  stream.flush()
  assert data.getvalue() == b'a\\xe9b'


def shell(line: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
  """A line of bash in which `podrace` is the command with these arguments."""
  podrace = shlex.join([sys.executable, '-m', 'podrace.cli', *args])
  return subprocess.run(
    ['bash', '-c', line.replace('podrace', podrace)],
    capture_output=True, text=True, timeout=DEADLINE, env=environment(**env), check=False,
  )  # fmt: skip


@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
def test_a_line_is_one_write(stream: str) -> None:
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps writes apart
  code = (
    'import sys; from podrace.system.output import print_text, tell; '
    f'print_text("a", "b", file=sys.{stream}); tell("c")'
  )
  with ours, theirs:
    ours.settimeout(DEADLINE)
    subprocess.run(
      [sys.executable, '-c', code], check=True, timeout=DEADLINE,
      stdout=theirs, stderr=theirs, env=environment(PYTHONUNBUFFERED='1'),
    )  # fmt: skip
    assert [ours.recv(100), ours.recv(100)] == [b'a b\n', b'c\n']


@pytest.mark.parametrize(
  'line',
  [
    pytest.param('podrace >&- 2>&-', marks=pytest.mark.slow),
    pytest.param('podrace 2>&-', marks=pytest.mark.slow),
    pytest.param('podrace 2>&1 | true; exit ${PIPESTATUS[0]}', marks=pytest.mark.slow),
    'podrace 2>&1 >/dev/full | head -1; exit ${PIPESTATUS[0]}',
  ],
)
def test_training_goes_on_if_nobody_reads_what_it_says(line: str, tmp_path: Path) -> None:
  run_dir = tmp_path / 'run'
  ended = shell(line, *TRAIN, '--run-dir', str(run_dir), PYTHONUNBUFFERED='1')
  assert ended.returncode == 0, ended
  assert json.loads((run_dir / 'summary.json').read_text())['step'] == 640
  assert len((run_dir / 'metrics.jsonl').read_text().splitlines()) == 20
  assert 'Traceback' not in ended.stdout + ended.stderr


def test_an_unread_list_ends_as_by_a_broken_pipe() -> None:
  ended = shell('podrace | true; exit ${PIPESTATUS[0]}', 'list')
  assert (ended.returncode, ended.stderr) == (141, '')


@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize('args', [['list'], ['--help'], ['runs', '.', '--json']])
def test_a_full_disk_ends_a_command_with_a_line(
  args: list[str], unbuffered: str, tmp_path: Path
) -> None:
  line = f'cd {shlex.quote(str(tmp_path))}; podrace >/dev/full'
  ended = shell(line, *args, PYTHONUNBUFFERED=unbuffered)
  assert ended.returncode == 1 and 'standard output' in ended.stderr
  assert len(ended.stderr.splitlines()) == 1


MODULE = """
import signal
try:
  signal.raise_signal(signal.SIG)
except BaseException:  # as libraries do: of optional parts that can't be imported
  pass
from podrace.envs.own.catch import Catch
from podrace.envs.base import NextStepReset
def make():
  return NextStepReset(Catch())
"""


@pytest.mark.parametrize(
  'name', ['SIGINT', *(pytest.param(n, marks=pytest.mark.slow) for n in ('SIGTERM', 'SIGHUP'))]
)
def test_a_signal_while_importing_is_not_lost(name: str, tmp_path: Path) -> None:
  (tmp_path / 'swallows.py').write_text(MODULE.replace('signal.SIG)', f'signal.{name})'))
  args = [*TRAIN, '--env', 'python:swallows.make', '--run-dir', str(tmp_path / 'run')]
  ended = shell('podrace', *args, PYTHONPATH=f'{tmp_path}:{os.environ.get("PYTHONPATH", "")}')
  assert ended.returncode == 128 + signal.Signals[name], ended
  assert name in ended.stderr


def test_a_stream_that_fails_is_left_alone() -> None:
  class Gone(io.StringIO):
    def write(self, text: str) -> int:
      raise BrokenPipeError

  for file in (Gone(), None):
    stream = Lasting(file)
    print('anything', file=stream, flush=True)
    assert not stream.isatty()
  file = io.StringIO()
  closed = Lasting(file)
  file.close()
  print('anything', file=closed, flush=True)
  assert not closed.isatty()


LATE = """
import atexit, os, sys
atexit.register(lambda: (print('printed'), os.write(1, b'written'), os.system('echo child')))
from podrace.system import output
from podrace.system.process import leave
with output.results_alone():
  sys.__stdout__.write('waiting')
  output.print_json({'a': 1})
leave(3)
"""


def test_what_exit_handlers_print_is_no_result() -> None:
  done = subprocess.run([sys.executable, '-c', LATE], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (3, '{"a": 1}\n')
  assert all(x in done.stderr for x in ('printed', 'written', 'child', 'waiting'))
