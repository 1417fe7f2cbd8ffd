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


def test_bad_usage_is_refused_before_anything_is_computed(
  capfd: pytest.CaptureFixture[str],
) -> None:
  for args, option in (
    (['train', 'pong', '--envs', 'remote', '--listen', 'tcp://0.0.0.0:5555'], '--keys'),
    (['envs', '--connect', 'tcp://10.0.0.1:5555', '--env', 'ale:pong'], '--keys'),
    (['train', 'pong', '--keys', 'x'], '--listen'),
  ):
    assert command(*args) == 2
    assert option in capfd.readouterr().err
  with pytest.raises(ValueError, match='contradict'):
    Listen('tcp://0.0.0.0:1', Path('keys'), insecure=True)


def test_the_command_makes_keys_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  keys = tmp_path / 'keys'
  assert command('keys', 'new', str(keys)) == 0
  assert 'authority.pem' in capfd.readouterr().out
  before = (keys / 'server.key').read_text()
  assert command('keys', 'new', str(keys)) == 2
  assert str(keys) in capfd.readouterr().err
  assert before == (keys / 'server.key').read_text()
  assert command('keys', 'client', str(keys), str(tmp_path / 'other')) == 0
  assert len(net_keys.Allowed(keys / net_keys.ALLOWED)) == 2
  assert command('keys', 'old') == 2
  (tmp_path / 'file').write_text('')
  for args in (['new', f'{tmp_path}/file/keys'], ['client', str(keys), f'{tmp_path}/file']):
    capfd.readouterr()
    assert command('keys', *args) == 2
    assert args[-1] in capfd.readouterr().err


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


def test_another_key_ends_no_session(keys: Path, tmp_path: Path) -> None:
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
      assert first.gone()


def test_clients_outlive_a_list_that_is_empty_for_a_while(keys: Path, tmp_path: Path) -> None:
  allowed = keys / net_keys.ALLOWED
  whole = allowed.read_text()
  args = ['--keys', str(keys)]
  with Learner(keys=keys) as learner, Envs(learner.address, tmp_path / 'log', *args) as envs:
    until(lambda: learner.steps > 20)
    allowed.write_text('')
    envs.says('listed')
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
    with Learner(address=address) as learner, pytest.raises(SecurityError) as error:
      Learner(address=learner.address).__enter__()
    assert learner.address in str(error.value)


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
  with pytest.raises(SecurityError, match=str(path)):
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


def test_printed_commands_have_a_reachable_address(keys: Path) -> None:
  with Learner(address='tcp://0.0.0.0:*', keys=keys) as learner:
    learner.says('--connect')
    (line,) = [x for x in learner.said if '--connect' in x]
    assert f' tcp://{sockets.gethostname()}:' in line and '0.0.0.0' not in line
    assert line.count('--keys DIR') == 1
