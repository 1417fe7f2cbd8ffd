"""--announce: the file in which a process says where it listens."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import bare
import pytest
from children import Process, until
from test_net_keys import Nobody

from podrace.distributed import parameters
from podrace.distributed.net import address as net_address
from podrace.distributed.net import announce, keys
from podrace.distributed.net.address import host_and_port
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.link import Link
from podrace.errors import SecurityError, UsageError


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
  with parameters.Publisher('tcp://127.0.0.1:0', announce=there) as publisher:
    assert announce.read(file) == {'params': publisher.address}
    assert not publisher.address.endswith(':0')
  with parameters.Publisher('tcp://0.0.0.0:0', insecure=True, announce=there) as publisher:
    assert announce.read(file) == {'params': publisher.reachable}
    assert host_and_port(publisher.reachable)[0] == socket.gethostname()


def test_what_cannot_be_announced_is_refused(tmp_path: Path) -> None:
  there = Announcement(tmp_path / 'no/at.json', 'params')
  with pytest.raises(UsageError, match=r'--announce .*/no/at.json '):
    parameters.Publisher('tcp://127.0.0.1:0', announce=there)


@pytest.mark.parametrize('text', ['', '[]', '{"a": 1}', '{"a": "b"', '\xff', '[' * 200_000])
def test_a_file_that_is_no_announcement_has_no_addresses(tmp_path: Path, text: str) -> None:
  (tmp_path / 'at.json').write_text(text, encoding='latin-1')
  assert announce.read(tmp_path / 'at.json') == {}


def test_a_pipe_is_no_announcement(tmp_path: Path) -> None:
  os.mkfifo(tmp_path / 'at.json')
  assert announce.read(tmp_path / 'at.json') == {}


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
  file = tmp_path / 'at.json'
  for address in ('tcp://a:1', 'tcp://b:2'):
    Announcement(file, 'envs').make(address)
    assert json.loads(file.read_text()) == {'envs': address}
  assert [p.name for p in tmp_path.iterdir()] == ['at.json']


def test_a_client_finds_a_service_that_has_come_back_elsewhere(tmp_path: Path) -> None:
  file = tmp_path / 'at.json'
  keys.new_keys(tmp_path / 'keys')
  link = Link(f'announced:{file}#it', tmp_path / 'keys', False, Nobody()).start()
  until(lambda: str(file) in link.why)
  places = set()
  for at in ('tcp://127.0.0.1:0', 'tcp://127.0.0.2:0', f'unix:{tmp_path}/socket'):
    with bare.Service().listen(at, keys=tmp_path / 'keys') as there:
      Announcement(file, 'it').make(there.address)
      until(lambda: link.session is not None)
      places.add(there.address)
    until(lambda: link.session is None)
  assert len(places) == 3
  link.close()


@pytest.mark.parametrize('there', ['tcp://h:0', 'tcp://*:5', 'announced:/x#it', 'h:5', ''])
def test_what_is_announced_must_be_a_place(tmp_path: Path, there: str) -> None:
  file = tmp_path / 'at.json'
  Announcement(file, 'it').make(there)
  with pytest.raises(OSError, match=re.escape(repr(there))):
    net_address.connect(f'announced:{file}#it', 1.0)


def test_an_announced_address_needs_keys_and_is_for_clients(tmp_path: Path) -> None:
  for one in ('announced:/a/b#it', 'announced:/a#b#it'):
    net_address.check_address(one, tmp_path, False, '--connect')
    with pytest.raises(SecurityError, match='keys'):
      net_address.check_address(one, None, False, '--connect')
    with pytest.raises(SecurityError, match=r'--listen .*tcp://HOST:PORT or unix:PATH'):
      net_address.check_address(one, tmp_path, False, '--listen', listens=True)
  for none in ('announced:', 'announced:/a', 'announced:#it', 'announced:/a#', 'announced:/a b#it'):
    with pytest.raises(SecurityError, match='announced:FILE#NAME'):
      net_address.check_address(none, tmp_path, False, '--connect')
  assert net_address.announced_at('announced:/a#b#it') == (Path('/a#b'), 'it')
