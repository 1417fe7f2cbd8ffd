"""Keys: what is made, who is let in, and that secrets are their user's alone."""

from __future__ import annotations

import os
import socket as sockets
import time
from pathlib import Path
from typing import Any

import bare
import pytest
from children import until

from podrace import cli
from podrace.distributed.net import address as addresses
from podrace.distributed.net import connecting, keys, session_messages
from podrace.distributed.net.address import check_address, is_local, listen
from podrace.distributed.net.link import Link, LinkHandler, Refused
from podrace.distributed.net.listener import Listen
from podrace.errors import SecurityError

OTHERS = session_messages.of_listeners()


class Nobody(LinkHandler):
  """A client's handler that does nothing."""

  service, kinds = 'test', OTHERS

  def __init__(self) -> None:
    self.joins = self.losses = 0
    self.over = False

  def joined(self, told: Any) -> None:
    self.joins += 1

  def handle(self, *args: Any) -> None:
    raise AssertionError(args)

  def lost(self, reason: str) -> None:
    self.losses += 1

  def ended(self, complete: bool, reason: str) -> bool:
    self.over = complete
    return complete


@pytest.fixture
def directory(tmp_path: Path) -> Path:
  keys.new_keys(tmp_path / 'keys')
  return tmp_path / 'keys'


def test_keys_are_private_and_never_overwritten(directory: Path, tmp_path: Path) -> None:
  for name in ('authority.key', 'server.key', 'client.key'):
    assert (directory / name).stat().st_mode & 0o777 == 0o600
  assert directory.stat().st_mode & 0o777 == 0o700
  with pytest.raises(SecurityError, match=str(directory)):
    keys.new_keys(directory)
  keys.new_client(directory, tmp_path / 'other')
  assert {x.name for x in (tmp_path / 'other').iterdir()} == set(keys.CLIENT_FILES)
  lines = (directory / keys.ALLOWED).read_text().splitlines()
  assert [line.partition('# ')[2] for line in lines] == ['client', 'other']
  (directory / 'client.key').chmod(0o640)
  with pytest.raises(SecurityError, match=r'client.key .*640.*chmod 600'):
    keys.client_context(directory)
  (directory / 'server.key').write_text('nonsense')
  with pytest.raises(SecurityError, match=r'server.key'):
    keys.server_context(directory)
  (directory / 'server.pem').unlink()
  with pytest.raises(SecurityError, match=r'server.pem .* `podrace keys new DIR`'):
    keys.server_context(directory)


def test_a_client_is_added_after_a_line_without_its_end(directory: Path, tmp_path: Path) -> None:
  allowed = directory / keys.ALLOWED
  allowed.write_text(allowed.read_text().partition('  #')[0])  # as an editor may save it
  keys.new_client(directory, tmp_path / 'other')
  assert [len(line.split()[0]) for line in allowed.read_text().splitlines()] == [64, 64]


def test_the_name_of_a_client_is_one_line_of_ascii(directory: Path, tmp_path: Path) -> None:
  keys.new_client(directory, tmp_path / f'a\n{"0" * 64}\udcff')
  lines = (directory / keys.ALLOWED).read_text(encoding='ascii').splitlines()
  assert len(lines) == len(keys.Allowed(directory / keys.ALLOWED)) == 2


@pytest.mark.parametrize('name', ['authority.pem', 'authority.key'])
def test_a_damaged_authority_is_named(name: str, directory: Path, tmp_path: Path) -> None:
  (directory / name).write_text('nonsense')
  with pytest.raises(SecurityError, match=r'authority\.pem'):
    keys.new_client(directory, tmp_path / 'other')
  assert not list((tmp_path / 'other').iterdir())


def joined(link: Link) -> bool:
  until(lambda: link.check() or link.session is not None, 20)
  return True


def test_a_removed_line_cuts_its_client(directory: Path, tmp_path: Path) -> None:
  keys.new_client(directory, tmp_path / 'other')
  with bare.Service().listen(keys=directory) as service:
    one, two = Nobody(), Nobody()
    first = Link(service.address, directory, False, one).start()
    second = Link(service.address, tmp_path / 'other', False, two).start()
    assert joined(first) and joined(second)
    listed = directory / keys.ALLOWED
    text = listed.read_text()
    begun = time.monotonic()
    listed.write_text(text.splitlines()[0] + '\n')
    until(lambda: second.session is None)
    assert time.monotonic() - begun < 5.0  # a second, and what a busy machine adds
    until(lambda: keys.ALLOWED in second.why)
    assert first.session == 1 and one.losses == 0
    fingerprint = text.splitlines()[1].split()[0]
    until(lambda: any(fingerprint in x for x in service.said))
    listed.write_text(text)
    assert joined(second)
    listed.unlink()  # a list that can't be read allows nobody
    until(lambda: first.session is None and second.session is None)
    for link in (first, second):
      link.close()


def test_keys_of_another_authority_are_refused(directory: Path, tmp_path: Path) -> None:
  keys.new_keys(tmp_path / 'foreign')
  with bare.Service().listen(keys=directory) as service:
    link = Link(service.address, tmp_path / 'foreign', False, Nobody()).start()
    with pytest.raises(Refused, match=service.address):
      joined(link)
    until(lambda: service.listener.counts['turned away'] and service.said)
    assert not service.listener.peers
    link.close()


def test_after_a_session_other_keys_are_waited_out(directory: Path, tmp_path: Path) -> None:
  keys.new_keys(tmp_path / 'foreign')
  with bare.Service().listen(keys=directory) as service:
    link = Link(service.address, directory, False, Nobody()).start()
    joined(link)
  with bare.Service().listen(service.address, tmp_path / 'foreign') as foreign:
    until(lambda: foreign.listener.counts['turned away'])
  with bare.Service().listen(service.address, directory):
    joined(link)
    link.close()


def test_a_client_certificate_is_no_server(directory: Path, tmp_path: Path) -> None:
  keys.new_client(directory, tmp_path / 'thief')
  for name in ('pem', 'key'):
    (tmp_path / f'thief/server.{name}').write_bytes(
      (tmp_path / f'thief/client.{name}').read_bytes()
    )
  (tmp_path / 'thief/server.key').chmod(0o600)
  (tmp_path / 'thief' / keys.ALLOWED).write_text((directory / keys.ALLOWED).read_text())
  with bare.Service().listen(keys=tmp_path / 'thief') as service:
    link = Link(service.address, directory, False, Nobody()).start()
    until(lambda: 'certificate' in link.why)
    assert link.session is None
    link.close()


def test_one_side_with_keys_says_so_at_the_other(directory: Path) -> None:
  with bare.Service().listen(keys=directory) as service:
    link = Link(service.address, None, False, Nobody()).start()
    until(lambda: '--keys' in link.why)
    link.close()
  with bare.Service().listen() as service:
    link = Link(service.address, directory, False, Nobody()).start()
    until(lambda: connecting.HAS_NO_KEYS in link.why)
    link.close()


def test_a_client_without_keys_is_refused_at_once(
  directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  with bare.Service().listen(keys=directory) as service:
    link = Link(service.address, None, False, Nobody()).start()
    with pytest.raises(Refused, match='--keys DIR'):
      until(lambda: link.check() or link.session, 20)
    link.close()
    with pytest.raises(SystemExit) as end:
      cli.main(['top', service.address, '--once'])
    assert end.value.code == 2 and '--keys DIR' in capfd.readouterr().err


@pytest.mark.parametrize(
  'address',
  ['tcp://host', 'tcp://:1', 'tcp://host:0', 'tcp://host:65536', 'unix:', 'ipc://x', 'udp://h:1', 'tcp://h :1', ''],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(address: str) -> None:
  with pytest.raises(SecurityError, match=r'--connect .*tcp://HOST:PORT or unix:PATH'):
    check_address(address, None, False, '--connect')


def test_beyond_this_machine_keys_are_needed(tmp_path: Path) -> None:
  for address in ('tcp://127.0.0.1:1', 'tcp://[::1]:1', 'tcp://localhost:1', 'unix:/tmp/x'):
    assert is_local(address)
    check_address(address, None, False, '--connect')
  for address in ('tcp://10.0.0.1:1', 'tcp://example.org:1'):
    with pytest.raises(SecurityError, match='keys'):
      check_address(address, None, False, '--connect')
    check_address(address, None, True, '--connect')
    check_address(address, tmp_path, False, '--connect')
    with pytest.raises(SecurityError, match='contradict'):
      check_address(address, tmp_path, True, '--connect')
  with pytest.raises(SecurityError, match='keys'):
    Listen('tcp://*:5555')


def test_unix_sockets_are_their_users_alone(tmp_path: Path) -> None:
  path = tmp_path / 'socket'
  with bare.Service().listen(f'unix:{path}') as service:
    assert path.stat().st_mode & 0o777 == 0o600
    link = Link(service.address, None, False, Nobody()).start()
    assert joined(link)
    with pytest.raises(SecurityError, match=str(path)):
      listen(f'unix:{path}')
    link.close()
    path.chmod(0o666)
    other = Link(service.address, None, False, Nobody()).start()
    until(lambda: '666' in other.why)
    other.close()
  assert not path.exists()
  path.write_text('mine')
  with pytest.raises(SecurityError, match=str(path)):
    listen(f'unix:{path}')
  assert path.read_text() == 'mine'


def test_others_are_told_an_address_that_they_can_use() -> None:
  here = sockets.gethostname()
  for open_to_all in ('0.0.0.0', '*', '[::]'):
    assert addresses.reachable(f'tcp://{open_to_all}:5555') == f'tcp://{here}:5555'
  for one in ('tcp://10.0.0.1:5555', 'tcp://[::1]:5555', 'tcp://learner:1', 'unix:/a/b'):
    assert addresses.reachable(one) == one


def test_what_a_listener_that_died_has_left_is_replaced(tmp_path: Path) -> None:
  address = f'unix:{tmp_path}/socket'
  socket, _ = listen(address)
  socket.close()  # without removing its file
  assert os.path.exists(f'{tmp_path}/socket')
  again, _ = listen(address)
  again.close()
