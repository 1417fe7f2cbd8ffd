"""Keys and sockets of a learner: what the commands make and refuse, and clients that outlive a list."""

from __future__ import annotations

import os
import socket as sockets
import stat
from pathlib import Path

import pytest
from children import until
from peers import Envs, Learner, Raw

from podrace import cli
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net.listener import Listen
from podrace.errors import SecurityError


def command(*args: str) -> int:
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return end.value.code


def test_the_command_line_refuses_before_anything_is_computed(
  capfd: pytest.CaptureFixture[str],
) -> None:
  remote = ['train', 'pong', '--envs', 'remote']
  assert command(*remote, '--listen', 'tcp://0.0.0.0:5555') == 2
  assert 'needs keys' in capfd.readouterr().err
  assert command('envs', '--connect', 'tcp://10.0.0.1:5555', '--env', 'ale:pong') == 2
  assert 'needs keys' in capfd.readouterr().err
  assert command('train', 'pong', '--keys', 'x') == 2
  assert '--keys needs --listen' in capfd.readouterr().err
  with pytest.raises(ValueError, match='contradict'):
    Listen('tcp://0.0.0.0:1', Path('keys'), insecure=True)


def test_keys_are_made_once_by_the_command(
  tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  keys = tmp_path / 'keys'
  assert command('keys', 'new', str(keys)) == 0
  assert 'authority.pem client.pem client.key' in capfd.readouterr().out
  before = (keys / 'server.key').read_text()
  assert command('keys', 'new', str(keys)) == 2
  assert 'never overwritten' in capfd.readouterr().err
  assert before == (keys / 'server.key').read_text()
  assert command('keys', 'client', str(keys), str(tmp_path / 'other')) == 0
  assert len(net_keys.Allowed(keys / net_keys.ALLOWED)) == 2
  assert command('keys', 'old') == 2
  (tmp_path / 'file').write_text('')
  for args in (
    ['new', str(tmp_path / 'file' / 'keys')],
    ['client', str(keys), str(tmp_path / 'file')],
  ):
    capfd.readouterr()
    assert command('keys', *args) == 2
    assert f'cannot make the directory {args[-1]} for keys: Not a dir' in capfd.readouterr().err


@pytest.fixture
def keys(tmp_path: Path) -> Path:
  net_keys.new_keys(tmp_path / 'keys')
  return tmp_path / 'keys'


def test_a_listed_key_joins_under_tls_and_steps(keys: Path) -> None:
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as raw:
    raw.join(2)
    assert raw.socket.version() == 'TLSv1.3'  # type: ignore[attr-defined]
    (peer,) = learner.server.peers
    certificate = net_keys.ssl.PEM_cert_to_DER_cert((keys / 'client.pem').read_text())
    assert peer.key == net_keys.fingerprint_of(certificate)


def test_a_session_is_not_ended_by_one_that_has_another_key(keys: Path, tmp_path: Path) -> None:
  net_keys.new_client(keys, tmp_path / 'second')
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as first:
    first.join(2)
    with Raw(learner.address, keys=tmp_path / 'second') as second:
      second.client = first.client
      second.join_as()
      first.step(2, 1)
      first.act(2, 1)
    with Raw(learner.address, keys=keys) as again:
      again.client = first.client
      again.join_as()
      assert 'back over another connection' in first.gone()


def test_a_removed_key_is_cut_whatever_it_does(keys: Path, tmp_path: Path) -> None:
  net_keys.new_client(keys, tmp_path / 'second')
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as first:
    first.join(2)
    with Raw(learner.address, keys=tmp_path / 'second') as second:
      second.join(2)
      lines = (keys / net_keys.ALLOWED).read_text().splitlines()
      (keys / net_keys.ALLOWED).write_text(lines[1] + '\n')
      assert 'not listed any more' in first.gone()
      assert first.is_closed()
      second.step(2, 1)
      second.act(2, 1)
    assert learner.server.counts['sessions'] == 2


def test_a_client_that_was_turned_away_joins_once_it_is_listed(keys: Path, tmp_path: Path) -> None:
  allowed = keys / net_keys.ALLOWED
  before = allowed.read_text()
  net_keys.new_client(keys, tmp_path / 'late')
  whole = allowed.read_text()
  allowed.write_text(before)
  late = ['--keys', str(tmp_path / 'late')]
  with Learner(keys=keys) as learner, Envs(learner.address, tmp_path / 'log', *late) as envs:
    learner.says('turned away')
    envs.says('is not in allowed_clients')
    assert not learner.steps
    allowed.write_text(whole)
    until(lambda: learner.steps > 20)


def test_clients_outlive_a_list_that_is_empty_for_a_while(keys: Path, tmp_path: Path) -> None:
  allowed = keys / net_keys.ALLOWED
  whole = allowed.read_text()
  args = ['--keys', str(keys)]
  with Learner(keys=keys) as learner, Envs(learner.address, tmp_path / 'log', *args) as envs:
    until(lambda: learner.steps > 20)
    allowed.write_text('')
    envs.says('its key is not listed any more')
    learner.says('turned away')
    before = learner.steps
    allowed.write_text(whole)
    until(lambda: learner.steps > before + 20)


def test_hosts_that_have_ipv6_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  try:
    with sockets.socket(sockets.AF_INET6) as probe:
      probe.bind(('::1', 0))
  except OSError as e:
    pytest.skip(f'this machine has no IPv6: {e}')
  with Learner(address='tcp://[::1]:*') as learner:
    assert command('top', learner.address, '--once') == 0
    assert '"clients": []' in capfd.readouterr().out
    with Envs(learner.address, tmp_path / 'log'):
      until(lambda: learner.steps > 20)


def test_an_address_that_is_taken_is_said(tmp_path: Path) -> None:
  for address in ('tcp://127.0.0.1:*', f'unix:{tmp_path}/socket'):
    with (
      Learner(address=address) as learner,
      pytest.raises(SecurityError, match=f'cannot listen at {learner.address}.*in use'),
    ):
      Learner(address=learner.address).__enter__()


@pytest.mark.parametrize('kind', ['file', 'folder', 'link', 'link to nothing'])
def test_what_stands_at_a_path_and_is_no_socket_stays(kind: str, tmp_path: Path) -> None:
  path, other = tmp_path / 'mine', tmp_path / 'other'
  if kind == 'file':
    path.write_text('mine')
  elif kind == 'folder':
    path.mkdir()
  else:
    path.symlink_to(other)
    if kind == 'link':
      other.write_text('mine')
  before = path.lstat()
  with pytest.raises(SecurityError, match='there is a file that is no socket; move it'):
    Learner(address=f'unix:{path}').__enter__()
  assert path.lstat().st_ino == before.st_ino
  if kind in ('file', 'link'):
    assert path.read_text() == 'mine'


@pytest.mark.parametrize('umask', [0o000, 0o022, 0o777])
def test_a_socket_is_the_users_alone(umask: int, tmp_path: Path) -> None:
  path = tmp_path / 'socket'
  before = os.umask(umask)
  try:
    with Learner(address=f'unix:{path}') as learner, Raw(learner.address) as raw:
      assert stat.S_IMODE(path.stat().st_mode) == 0o600
      assert os.umask(umask) == umask  # as it was
      raw.join(2)
  finally:
    os.umask(before)


@pytest.mark.parametrize('mode', [0o604, 0o640, 0o602])
def test_a_secret_that_others_can_read_is_refused(keys: Path, mode: int) -> None:
  (keys / 'server.pem').chmod(0o644)
  with Learner(keys=keys):
    pass
  (keys / 'server.key').chmod(mode)
  with pytest.raises(SecurityError, match=f'`chmod 600 {keys / "server.key"}`'):
    Learner(keys=keys)


def test_commands_that_are_printed_have_an_address_that_others_can_reach(keys: Path) -> None:
  with Learner(address='tcp://0.0.0.0:*', keys=keys) as learner:
    learner.says('no environments are connected')
    (line,) = [x for x in learner.said if 'no environments are connected' in x]
    assert f'--connect tcp://{sockets.gethostname()}:' in line and '0.0.0.0' not in line
    assert line.count('--keys DIR') == 1
