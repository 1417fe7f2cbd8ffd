"""A replica that is kept by pipes, as an actor of Ray has it: real processes, without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import alive, environment, until
from test_local import SAVES, STUBBORN, WAITS

from podrace.launch.engines.ray_actor import Event, Runner
from podrace.launch.supervisor import guard
from podrace.launch.supervisor.remote_child import ReplicaRequest

PID = 'import os; print("pid", os.getpid(), flush=True)\n'


class Kept:
  """A keeper with its replica, and what has happened."""

  def __init__(self, code: str, *arguments: str, **more: Any) -> None:
    words = [sys.executable, '-uc', code, *arguments]
    asked = ReplicaRequest(words, {'HAS': 'it'}, '/', '/PRIVATE', '', 0, {}, '/not/there')
    text = json.dumps(dataclasses.asdict(dataclasses.replace(asked, **more)))
    self.runner = Runner(text, lambda: '10.0.0.7')
    self.process = self.runner.keeper
    self.events: Iterator[Event] = self.runner.events()
    self.output = ''
    assert next(self.events) == ('started', None)

  def says(self, text: str) -> str:
    """What it has said, once that has the text."""
    while text not in self.output:
      kind, value = next(self.events)
      assert kind == 'said', (kind, value, self.output)
      self.output += value.decode()
    return self.output

  def tell(self, **line: Any) -> None:
    self.runner.tell(json.dumps(line))

  def end(self) -> int:
    """Its exit code."""
    for kind, value in self.events:
      if kind == 'said':
        self.output += value.decode()
    assert kind == 'ended'
    return int(value)

  @property
  def pid(self) -> int:
    """Of a replica that says so."""
    self.says('\n')
    return int(re.findall(r'pid (\d+)', self.output)[0])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
  """Makes keepers whose directories are in tmp_path."""
  made: list[Kept] = []
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setenv('PYTHONPATH', environment()['PYTHONPATH'])

  def make(*arguments: Any, **more: Any) -> Kept:
    made.append(Kept(*arguments, **more))
    return made[-1]

  yield make
  for one in made:
    one.process.close_input()
    one.process.wait(60)
  until(lambda: not list(tmp_path.iterdir()))


def test_what_it_says_and_its_exit_code_are_passed_on(kept: Any) -> None:
  code = 'import os, sys; print(os.getcwd(), os.environ["HAS"], sys.argv[1]); print("oh", file=sys.stderr); sys.exit(3)'
  one = kept(code, 'tcp://PODRACE-HOST:0')
  assert one.end() == 3
  assert one.output == '/ it tcp://10.0.0.7:0\noh\n'
  two = kept('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', directory='/not/there')
  assert two.end() == 137


def test_files_are_its_users_alone(kept: Any) -> None:
  reads = (
    'import os, sys\nfrom pathlib import Path\nfrom changes import changes\nfile = Path(sys.argv[1])\n'
    'print(oct(file.stat().st_mode), oct(file.parent.stat().st_mode), file.read_text())\n'
    'for _ in changes(sys.argv[1]):\n  if file.read_text() != "one": break\n'
    'print(file.read_text(), os.umask(0))'
  )
  one = kept(reads, '/PRIVATE/keys/client.key', files={'keys/client.key': 'one'})
  assert one.says('one\n') == '0o100600 0o40700 one\n'
  one.tell(files={'keys/client.key': 'two', 'announced/other': 'x'})
  assert one.end() == 0
  ours = os.umask(0)
  os.umask(ours)
  assert one.output.splitlines()[1] == f'two {ours}'


def test_what_it_announces_is_reported_each_time_that_it_changes(kept: Any) -> None:
  announces = (
    'import sys, signal\nfrom pathlib import Path\nfrom podrace.distributed.net.announce import Announcement\n'
    'first = Announcement(Path(sys.argv[1]), "coordinator"); first.make("tcp://h:1")\n'
    'signal.signal(signal.SIGUSR1, lambda *_: None); print("up", flush=True); signal.pause()\n'
    'Announcement(Path(sys.argv[1]), "it").with_other("coordinator", "tcp://h:1").make("tcp://h:2"); signal.pause()'
  )
  at = 'announced/it-0'
  one = kept(announces, f'/PRIVATE/{at}', announces=at, addresses=2)
  found = []
  for kind, value in one.events:
    if kind == 'announced':
      found.append(json.loads(value))
      if len(found) == 2:
        break
      one.tell(signal=signal.SIGUSR1)
  assert found == [{'coordinator': 'tcp://h:1'}, {'coordinator': 'tcp://h:1', 'it': 'tcp://h:2'}]
  one.tell(signal=signal.SIGTERM)
  assert one.end() == 143


def test_signals_reach_all_that_it_has_started(kept: Any) -> None:
  spawns = f'import subprocess, sys\np = subprocess.Popen([sys.executable, "-uc", {WAITS!r}]); print("pid", p.pid)\np.wait()'
  one = kept(spawns)
  one.says('up')
  pid = one.pid
  one.tell(signal=signal.SIGTERM)
  assert one.end() == 143
  until(lambda: not alive(pid))


def test_it_saves_when_nobody_wants_it_any_more(kept: Any) -> None:
  one = kept(SAVES)
  one.says('up')
  one.process.close_input()
  assert one.end() == 143
  assert 'saved' in one.output


def test_a_line_that_is_none_ends_it(kept: Any) -> None:
  one = kept(SAVES)
  one.says('up')
  one.runner.tell('what?')
  assert one.end() == 143


def test_a_file_that_cannot_be_written_ends_it_and_is_named(kept: Any) -> None:
  one = kept(SAVES)
  one.says('up')
  one.tell(files={'not/there/file': 'text'})
  one.end()
  assert 'not/there' in one.output


def test_a_replica_does_not_outlive_a_keeper_that_is_killed(kept: Any, tmp_path: Path) -> None:
  one = kept(PID + SAVES, files={'keys/client.key': 'one'})
  one.says('up')
  one.process.signal(signal.SIGKILL)
  until(lambda: not alive(one.pid))
  assert 'saved' in one.says('saved')
  until(lambda: not list(tmp_path.iterdir()))
  assert one.end() == 137


def test_one_waits_for_the_end_of_the_one_before(kept: Any, tmp_path: Path) -> None:
  go = tmp_path / 'go'
  os.mkfifo(go)
  saves = f'open({str(go)!r}).read(); open("saved", "w"); sys.exit(0)'
  slow = f'import signal, sys\ndef save(*_): {saves}\nsignal.signal(15, save); print("up")\nsignal.pause()'
  there = dict(directory=str(tmp_path), lock=str(tmp_path / 'lock'))
  one = kept(slow, **there)
  one.says('up')
  one.process.signal(signal.SIGKILL)
  two = kept('import os; print(os.path.exists("saved"))', **there)
  two.says('waits for the end of the one before')
  go.write_text('')
  assert two.end() == 0
  assert two.output.endswith('True\n')
  for file in (go, tmp_path / 'saved', tmp_path / 'lock'):
    file.unlink()


def test_a_replica_that_waits_too_long_starts_later(monkeypatch: Any, tmp_path: Path) -> None:
  monkeypatch.setattr(guard, 'GRACE', 0.0)
  with (
    guard.wait_for_lock(tmp_path / 'lock') as one,
    guard.wait_for_lock(tmp_path / 'lock') as two,
  ):
    assert one and two is None
  with guard.wait_for_lock(tmp_path / 'not' / 'there') as none:
    assert none == ()


def test_what_it_leaves_behind_ends_with_it(kept: Any) -> None:
  leaves = f'import subprocess, sys; p = subprocess.Popen([sys.executable, "-uc", {STUBBORN!r}]); print("pid", p.pid)'
  one = kept(leaves)
  assert one.end() == 0
  until(lambda: not alive(one.pid))


def test_a_process_that_has_left_its_session_holds_nothing_up(kept: Any) -> None:
  leaves = (
    f'import subprocess, sys; more = dict(start_new_session=True)\n'
    f'p = subprocess.Popen([sys.executable, "-uc", {WAITS!r}], **more); print("pid", p.pid)'
  )
  one = kept(leaves)
  pid = one.pid
  try:
    assert one.end() == 0
    assert alive(pid)
  finally:
    os.kill(pid, signal.SIGKILL)


def test_one_that_closes_its_output_is_kept(kept: Any) -> None:
  one = kept(PID + 'import signal; os.close(1); os.close(2); signal.pause()')
  pid = one.pid
  one.tell(signal=signal.SIGTERM)
  assert one.end() == 143
  assert not alive(pid)


def test_a_program_that_is_not_there_is_named(kept: Any) -> None:
  one = kept('', words=['no-such-program'])
  assert one.end() == 2
  assert one.output == 'no-such-program cannot be started: No such file or directory\n'
