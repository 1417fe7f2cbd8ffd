"""Where the processes of a run meet."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import environment
from shorthand import Patch

from podrace import cli
from podrace.distributed.net.announce import Announcement, read
from podrace.errors import RunError
from podrace.run import processes
from podrace.run.processes import Place, join_processes, wait_for_coordinator
from podrace.system.threads import Worker


@pytest.mark.parametrize(
  ('place', 'said'),
  [
    (Place('here', 2, 0), r"HOST:PORT.*'here'"),
    (Place(':1', 2, 0), r"HOST:PORT.*':1'"),
    (Place('h:65536', 2, 0), 'HOST:PORT'),
    (Place('h:0', 2, 1), 'HOST:PORT'),  # only the first one chooses
    (Place('h:1', 2, 2), r'--process-id 2.*2'),
    (Place('announced:f#coordinator', 2, 0), 'HOST:PORT'),
  ],
)
def test_a_place_that_cannot_be(place: Place, said: str) -> None:
  with pytest.raises(ValueError, match=said):
    place.check()


@pytest.mark.parametrize(
  ('host', 'known', 'bound'),
  [
    ('127.0.0.1', '127.0.0.1', '127.0.0.1'),
    ('*', socket.gethostname(), '0.0.0.0'),
    ('0.0.0.0', socket.gethostname(), '0.0.0.0'),
  ],
)
def test_the_first_process_chooses_a_port(host: str, known: str, bound: str) -> None:
  place = Place(f'{host}:0', 2, 0)
  place.check()
  found = place.with_port()
  port = found.coordinator.removeprefix(f'{known}:')
  assert 0 < int(port) < 2**16 and found.bind == f'{bound}:{port}'
  assert found.with_port() is found
  found.check()


def test_a_port_that_is_given_stays() -> None:
  for place in Place('h:7', 2, 0), Place('announced:f#coordinator', 2, 1):
    place.check()
    assert place.with_port() is place


def test_what_was_announced_before_a_restart_is_not_taken(tmp_path: Path) -> None:
  """Others may start before the first process does, and read what it announced the last time."""
  file, found = tmp_path / 'first', []
  with socket.create_server(('127.0.0.1', 0)) as closed:
    gone = closed.getsockname()[1]
  Announcement(file, 'coordinator').make(f'tcp://127.0.0.1:{gone}')
  waiting = Worker(
    'waiting', lambda: found.append(wait_for_coordinator(f'announced:{file}#coordinator'))
  )
  with socket.create_server(('127.0.0.1', 0)) as there:
    at = f'127.0.0.1:{there.getsockname()[1]}'
    Announcement(file, 'coordinator').make(f'tcp://{at}')
    assert waiting.wait(60)
  waiting.check()
  assert found == [at]


@pytest.mark.parametrize(
  ('text', 'why'), [(None, 'does not announce coordinator'), ('{}', 'does not')]
)
def test_a_first_process_that_does_not_come(
  text: str | None, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  file = tmp_path / 'first'
  if text is not None:
    file.write_text(text)
  with pytest.raises(
    RunError, match=f'the first process, at announced:.*: not there after 0 s: .*{why}'
  ):
    wait_for_coordinator(f'announced:{file}#coordinator', 0.1)
  assert caplog.text.count('waiting for the first process') == 1


def test_a_name_may_come_later(monkeypatch: Patch) -> None:
  """As that of a pod, which Kubernetes knows once it has a machine."""
  asked = []

  def resolve(host: str, port: int) -> list[Any]:
    asked.append(host)
    if len(asked) < 3:
      raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')
    return []

  monkeypatch.setattr(processes.socket, 'getaddrinfo', resolve)
  monkeypatch.setattr(processes, 'PAUSE', 0.0)
  joined: list[Any] = []
  monkeypatch.setattr(processes.jax.distributed, 'initialize', lambda *x, **y: joined.append(y))
  monkeypatch.setattr(processes.jax.config, 'update', lambda *_: None)
  join_processes(Place('pod:1', 2, 1))
  assert asked == ['pod'] * 3
  # JAX must not ask the cluster's variables after all: under SLURM each would see one GPU of its own.
  assert joined[0]['cluster_detection_method'] == 'deactivate'


def test_a_name_that_does_not_come_is_told(monkeypatch: Patch) -> None:
  monkeypatch.setattr(processes, 'PATIENCE', 0.1)
  with pytest.raises(RunError, match=r'--coordinator no\.such\.host\.invalid:70.*0'):
    join_processes(Place('no.such.host.invalid:70', 2, 0))


def test_a_process_that_waits_elsewhere_than_the_first_one_ends(tmp_path: Path) -> None:
  """JAX would try the old address for minutes, and the others would wait for it."""
  file = tmp_path / 'first'
  code = (
    'import sys\nfrom podrace.run import processes as coordinator\n'
    'def initialize(*_, **__):\n  print("joins", flush=True); sys.stdin.read()\n'
    'coordinator.jax.distributed.initialize = initialize\n'
    f'coordinator.join_processes(coordinator.Place("announced:{file}#coordinator", 2, 1))'
  )
  with socket.create_server(('127.0.0.1', 0)) as there:
    Announcement(file, 'coordinator').make(f'tcp://127.0.0.1:{there.getsockname()[1]}')
    process = subprocess.Popen(
      (sys.executable, '-c', code), env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b'joins\n'
    Announcement(file, 'coordinator').make('tcp://127.0.0.1:1')
    assert process.wait(60) == 1
    said = process.communicate()[0]
  assert b'started again' in said


def test_other_addresses_are_announced_with_the_coordinators(tmp_path: Path) -> None:
  file = tmp_path / 'first'
  Announcement(file, 'params').with_other('coordinator', 'tcp://h:1').make('tcp://h:2')
  assert read(file) == {'coordinator': 'tcp://h:1', 'params': 'tcp://h:2'}


class Joined(Exception):
  """The place is known."""


@pytest.fixture
def joins(monkeypatch: Patch) -> Any:
  """What a command would join, and announces."""

  def join(*words: str) -> Place:
    with pytest.raises(Joined) as e:
      cli.main(['train', 'catch', *words])
    found: Place = e.value.args[0]
    return found

  def stop(place: Place) -> None:
    raise Joined(place)

  monkeypatch.setattr('podrace.run.processes.join_processes', stop)
  return join


def test_a_process_announces_where_the_others_come_to(joins: Any, tmp_path: Path) -> None:
  several = ('--num-processes', '2', '--process-id')
  file = tmp_path / 'first'
  place = joins('--coordinator', '127.0.0.1:0', *several, '0', '--announce', str(file))
  assert read(file) == {'coordinator': f'tcp://{place.coordinator}'}
  place = joins('--coordinator', 'h:7', *several, '0', '--announce', str(file))
  assert read(file) == {'coordinator': 'tcp://h:7'}
  at = f'announced:{file}#coordinator'
  assert joins('--coordinator', at, *several, '1') == Place(at, 2, 1)
  assert [p.name for p in tmp_path.iterdir()] == ['first']


@pytest.mark.parametrize(
  ('words', 'said'),
  [
    (('127.0.0.1:0', '--num-processes', '2', '--process-id', '0'), '--announce FILE'),
    (('127.0.0.1:0', '--num-processes', '2', '--process-id', '1'), 'HOST:PORT'),
    (('announced:f#c', '--num-processes', '2', '--process-id', '0'), 'the first process listens'),
    (('announced:f#c', '--num-processes', '2'), 'go together'),
    (('h:1', '--num-processes', '2', '--process-id', '0', '--keys', 'k'), '--listen'),
    (('h:1', '--num-processes', '2', '--process-id', '1', '--announce', 'f'), '--announce'),
  ],
)  # fmt: skip
def test_bad_usage_is_2(
  words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit) as e:
    cli.main(['train', 'catch', '--coordinator', *words])
  assert e.value.code == 2 and said in capfd.readouterr().err
