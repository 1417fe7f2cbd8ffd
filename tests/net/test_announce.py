"""--announce: the file in which a process says where it listens."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from children import Process, until

from podrace import service
from podrace.errors import UsageError
from podrace.net import announce
from podrace.net.address import host_and_port
from podrace.net.announce import Announcement


def test_a_service_announces_the_port_that_it_has(tmp_path: Path) -> None:
  file = tmp_path / 'at.json'
  assert announce.read(file) == {}
  command = ['-m', 'podrace.cli', 'replay', '--listen', 'tcp://127.0.0.1:0', '--announce']
  with Process(tmp_path / 'log.txt', *command, str(file)) as one:
    (address,) = until(lambda: announce.read(file).values())
    assert announce.read(file) == {'replay': address}
    host, port = host_and_port(address)
    socket.create_connection((host, int(port)), 10).close()
    one.signal(signal.SIGTERM)
    assert one.wait() == 143, one.output


def test_a_learner_announces_where_its_parameters_are(tmp_path: Path) -> None:
  file = tmp_path / 'at.json'
  there = Announcement(file, 'params')
  with service.Publisher('tcp://127.0.0.1:0', announce=there) as publisher:
    assert announce.read(file) == {'params': publisher.address}
    assert not publisher.address.endswith(':0')
  with service.Publisher('tcp://0.0.0.0:0', insecure=True, announce=there) as publisher:
    assert announce.read(file) == {'params': publisher.reachable}
    assert host_and_port(publisher.reachable)[0] == socket.gethostname()


def test_what_cannot_be_announced_is_refused(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'--announce .*/no/at.json cannot be written: No such file'):
    service.Publisher('tcp://127.0.0.1:0', announce=Announcement(tmp_path / 'no/at.json', 'params'))


@pytest.mark.parametrize('text', ['', '[]', '{"a": 1}', '{"a": "b"', '\xff'])
def test_a_file_that_is_no_announcement_has_no_addresses(tmp_path: Path, text: str) -> None:
  (tmp_path / 'at.json').write_text(text, encoding='latin-1')
  assert announce.read(tmp_path / 'at.json') == {}


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
  file = tmp_path / 'at.json'
  for address in ('tcp://a:1', 'tcp://b:2'):
    Announcement(file, 'envs').make(address)
    assert json.loads(file.read_text()) == {'envs': address}
  assert [p.name for p in tmp_path.iterdir()] == ['at.json']
