"""Who may connect, and that nobody else gets anywhere."""

from __future__ import annotations

import os
import socket as sockets
import stat
from pathlib import Path

import pytest
import zmq
from children import until
from peers import Envs, Learner, Raw
from podrace.remote.hub import Listen

from podrace import cli
from podrace.remote import security, wire

LOCAL = ['tcp://127.0.0.1:5555', 'tcp://localhost:1', 'tcp://[::1]:5555', 'tcp://127.8.8.8:*',
         'ipc:///tmp/x']  # fmt: skip
ELSEWHERE = ['tcp://0.0.0.0:5555', 'tcp://*:5555', 'tcp://192.168.0.1:5555', 'tcp://[::]:5555',
             'tcp://eth0:5555', 'tcp://example.org:5555']  # fmt: skip


@pytest.mark.parametrize('address', LOCAL)
def test_loopback_needs_no_keys(address: str) -> None:
  assert Listen(address).address == address


@pytest.mark.parametrize('address', ELSEWHERE)
def test_beyond_loopback_keys_are_needed_or_insecure(address: str) -> None:
  with pytest.raises(ValueError, match='can be reached from other machines, so it needs keys'):
    Listen(address)
  assert Listen(address, insecure=True).insecure
  assert Listen(address, keys=Path('keys')).keys


@pytest.mark.parametrize(
  'address', ['', 'x', 'tcp://', 'tcp://:5', 'tcp://h', 'tcp://h:x', 'udp://h:5', 'ipc://', 'tcp://h 1:5']
)  # fmt: skip
def test_addresses_that_are_none(address: str) -> None:
  with pytest.raises(ValueError, match='takes tcp://HOST:PORT or ipc://PATH'):
    Listen(address, insecure=True)


def command(*args: str) -> int:
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return end.value.code


@pytest.mark.parametrize(
  'address',
  ['tcp://h:*', 'tcp://h:0', 'tcp://h:65536', 'tcp://h:99999', 'tcp://*:5555', 'tcp://h:\u00b2'],
)
def test_addresses_that_cannot_be_connected_to(
  address: str, capfd: pytest.CaptureFixture[str]
) -> None:
  envs = ['envs', '--env', 'gymnasium:CartPole-v1', '--connect']
  for args in (['top', address], [*envs, address]):
    assert command(*args, '--insecure') == 2
    assert (
      'takes tcp://HOST:PORT or ipc://PATH, with a PORT of 1 to 65535, not'
      in capfd.readouterr().err
    )


def test_addresses_that_zeromq_refuses(capfd: pytest.CaptureFixture[str]) -> None:
  address = f'ipc://{"x" * 200}'
  for args in (
    ['top', address],
    ['envs', '--env', 'gymnasium:CartPole-v1', '--connect', address],
  ):
    assert command(*args) == 2
    assert f'cannot connect to {address}: ' in capfd.readouterr().err
  with pytest.raises(security.SecurityError, match='cannot listen at ipc://xx'):
    Learner(address=address).__enter__()


@pytest.mark.parametrize('host', ['[::1]', 'ip6-localhost'])
def test_hosts_that_have_ipv6_only(
  host: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  try:
    with sockets.socket(sockets.AF_INET6) as probe:
      probe.bind(('::1', 0))
    families = {family for family, *_ in sockets.getaddrinfo(host.strip('[]'), None)}
  except OSError as e:
    pytest.skip(f'this machine has no {host}: {e}')
  if families != {sockets.AF_INET6}:
    pytest.skip(f'{host} is something else here')
  with Learner(address='tcp://[::1]:*') as learner:
    address = f'tcp://{host}:{learner.address.rpartition(":")[2]}'
    assert command('top', address, '--once', '--insecure') == 0
    assert '"clients": []' in capfd.readouterr().out
    with Envs(address, tmp_path / 'log', '--insecure'):
      until(lambda: learner.steps > 20)


@pytest.mark.parametrize(
  ('families', 'ipv6'),
  [((sockets.AF_INET6,), True), ((sockets.AF_INET6, sockets.AF_INET), False), ((sockets.AF_INET,), False),
   ((), False)],
)  # fmt: skip
def test_names_are_looked_up_once_for_what_they_have(
  families: tuple[int, ...], ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  def found(host: str, *args: object, **more: object) -> list[tuple[int, str]]:
    if not families:
      raise sockets.gaierror('no such name')
    return [(family, host) for family in families]

  monkeypatch.setattr(security.sockets, 'getaddrinfo', found)
  assert security.needs_ipv6('tcp://learner.example:5555') is ipv6
  assert security.needs_ipv6('tcp://[::1]:5555') and not security.needs_ipv6('ipc:///tmp/x')


def test_keys_and_insecure_contradict() -> None:
  with pytest.raises(ValueError, match='contradict'):
    Listen('tcp://0.0.0.0:1', Path('keys'), insecure=True)


def test_the_command_line_refuses_before_anything_is_computed(
  capfd: pytest.CaptureFixture[str],
) -> None:
  remote = ['train', 'pong', '--envs', 'remote']
  assert command(*remote, '--listen', 'tcp://0.0.0.0:5555') == 2
  assert 'needs keys' in capfd.readouterr().err
  assert command('envs', '--connect', 'tcp://10.0.0.1:5555', '--env', 'ale:pong') == 2
  assert 'needs keys' in capfd.readouterr().err
  assert command('train', 'pong', '--keys', 'x') == 2
  assert '--keys: of --listen' in capfd.readouterr().err


def test_keys_are_made_once_and_secrets_are_ones_own(
  tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  keys = tmp_path / 'keys'
  assert command('keys', 'new', str(keys)) == 0
  secrets = [keys / security.SERVER_SECRET, keys / security.CLIENT_SECRET]
  before = [p.read_text() for p in secrets]
  assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in secrets)
  assert stat.S_IMODE(keys.stat().st_mode) == 0o700
  assert command('keys', 'new', str(keys)) == 2
  assert 'never overwritten' in capfd.readouterr().err
  assert before == [p.read_text() for p in secrets]
  assert command('keys', 'client', str(keys), str(tmp_path / 'other')) == 0
  assert sorted(p.name for p in (tmp_path / 'other').iterdir()) == [
    'client.public', 'client.secret', 'server.public',
  ]  # fmt: skip
  assert len(security.Allowed(keys / security.ALLOWED)) == 2
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
  security.new_keys(tmp_path / 'keys')
  return tmp_path / 'keys'


def test_a_listed_key_joins_and_all_of_it_is_encrypted(keys: Path) -> None:
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as raw:
    raw.join(2)
    assert raw.socket.mechanism == zmq.CURVE
    (peer,) = learner.server.peers.values()
    assert peer.key == security.read_key(keys / security.CLIENT_PUBLIC)


def test_without_keys_or_with_others_nothing_is_accepted(keys: Path, tmp_path: Path) -> None:
  security.new_keys(tmp_path / 'strange')
  (tmp_path / 'strange' / security.SERVER_PUBLIC).write_text(
    (keys / security.SERVER_PUBLIC).read_text()
  )
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as good:
    plain = Raw(learner.address)
    unlisted = Raw(learner.address, keys=tmp_path / 'strange')
    for raw in (plain, unlisted):
      for _ in range(20):
        raw.say(wire.HELLO, raw.told())
    learner.says('turned away 127.0.0.1: its key')
    good.join(2)
    assert plain.hear(0.5) is None and unlisted.hear(0.5) is None
    assert learner.server.counts['sessions'] == 1
    assert learner.server.counts['turned away'] >= 1
    plain.close()
    unlisted.close()


def test_the_list_is_read_again(keys: Path, tmp_path: Path) -> None:
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as first:
    first.join(2)
    security.new_client(keys, tmp_path / 'second')
    with Raw(learner.address, keys=tmp_path / 'second') as second:
      second.join(2)
      lines = (keys / security.ALLOWED).read_text().splitlines()
      (keys / security.ALLOWED).write_text(lines[1] + '\n')
      assert 'not listed any more' in first.expect(wire.GONE)[0][2]
      second.step(2, 1)
      second.act(2, 1)
      first.say(wire.HELLO, first.told(nonce=1))  # over the connection that is still there
      assert 'not listed any more' in first.expect(wire.GONE)[0][2]
      assert learner.server.counts['sessions'] == 2


def test_a_session_is_not_ended_by_who_has_another_key(keys: Path, tmp_path: Path) -> None:
  security.new_client(keys, tmp_path / 'second')
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as first:
    first.join(2)
    with Raw(learner.address, keys=tmp_path / 'second') as second:
      second.hello(before=first.session)
      first.step(2, 1)
      first.act(2, 1)
    with Raw(learner.address, keys=keys) as again:
      again.hello(before=first.session)
      first.step(2, 2)
      assert 'no such session' in first.expect(wire.GONE)[0][2]


def test_who_comes_after_a_key_was_removed_does_not_save_it(keys: Path, tmp_path: Path) -> None:
  security.new_client(keys, tmp_path / 'second')
  with Learner(keys=keys) as learner, Raw(learner.address, keys=keys) as first:
    first.join(2)
    server = learner.server
    assert server._gate is not None
    (keys / security.ALLOWED).write_text(
      (keys / security.ALLOWED).read_text().splitlines()[1] + '\n'
    )
    server._gate.allowed.refresh()  # as the gate does for whoever connects
    with Raw(learner.address, keys=tmp_path / 'second') as second:
      second.join(2)
      assert 'not listed any more' in first.expect(wire.GONE)[0][2]
      second.step(2, 1)
      second.act(2, 1)


def test_who_was_turned_away_joins_once_it_is_listed(keys: Path, tmp_path: Path) -> None:
  allowed = keys / security.ALLOWED
  before = allowed.read_text()
  security.new_client(keys, tmp_path / 'late')
  whole = allowed.read_text()
  allowed.write_text(before)
  late = ['--keys', str(tmp_path / 'late')]
  with Learner(keys=keys) as learner, Envs(learner.address, tmp_path / 'log', *late):
    learner.says('turned away')
    assert not learner.steps
    allowed.write_text(whole)
    until(lambda: learner.steps > 20)


def test_clients_outlive_a_list_that_is_empty_for_a_while(keys: Path, tmp_path: Path) -> None:
  allowed = keys / security.ALLOWED
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


def test_a_list_that_is_gone_allows_nobody(keys: Path) -> None:
  allowed = security.Allowed(keys / security.ALLOWED)
  key = security.read_key(keys / security.CLIENT_PUBLIC)
  assert key in allowed
  (keys / security.ALLOWED).unlink()
  assert allowed.refresh() and key not in allowed


@pytest.mark.parametrize('text', ['', 'short', 'x' * 41, '\xff'])
def test_files_that_are_not_keys(keys: Path, text: str) -> None:
  (keys / security.SERVER_SECRET).write_bytes(text.encode('latin-1'))
  with pytest.raises(security.SecurityError, match='is not a key of 40 characters'):
    Learner(keys=keys).__enter__()


def test_an_address_that_is_taken_is_told() -> None:
  with (
    Learner() as learner,
    pytest.raises(security.SecurityError, match=f'cannot listen at {learner.address}.*in use'),
  ):
    Learner(address=learner.address).__enter__()


def test_a_path_at_which_somebody_listens_is_taken(tmp_path: Path) -> None:
  path = tmp_path / 'socket'
  with sockets.socket(sockets.AF_UNIX) as dead:  # and leaves its path
    dead.bind(str(path))
  address = f'ipc://{path}'
  with Learner(address=address) as learner, Raw(address) as raw:
    raw.join(2)
    with pytest.raises(security.SecurityError, match=f'cannot listen at {address}.*in use'):
      Learner(address=address).__enter__()
    with Raw(address) as other:  # it is there as before
      other.join(2)
      assert len(learner.server.peers) == 2
  with Learner(address=address), Raw(address) as raw:
    raw.join(2)


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
  with pytest.raises(security.SecurityError, match='there is a file that is no socket; move it'):
    Learner(address=f'ipc://{path}').__enter__()
  assert path.lstat().st_ino == before.st_ino
  if kind in ('file', 'link'):
    assert path.read_text() == 'mine'


@pytest.mark.parametrize('umask', [0o000, 0o022, 0o777])
def test_a_socket_is_the_users_alone(umask: int, tmp_path: Path) -> None:
  path = tmp_path / 'socket'
  before = os.umask(umask)
  try:
    with Learner(address=f'ipc://{path}') as learner, Raw(learner.address) as raw:
      assert stat.S_IMODE(path.stat().st_mode) == 0o600
      assert os.umask(umask) == umask  # as it was
      raw.join(2)
  finally:
    os.umask(before)


@pytest.mark.parametrize('mode', [0o604, 0o644, 0o602])
def test_a_secret_that_everybody_can_read_is_refused(keys: Path, mode: int) -> None:
  for name in (security.SERVER_SECRET, security.CLIENT_SECRET):
    (keys / name).chmod(mode)
    with pytest.raises(security.SecurityError, match=f'`chmod 600 {keys / name}`'):
      security.read_key(keys / name)
    (keys / name).chmod(0o600)
    security.read_key(keys / name)
  (keys / security.SERVER_PUBLIC).chmod(0o644)
  with Learner(keys=keys):
    pass
  (keys / security.SERVER_SECRET).chmod(mode)
  with pytest.raises(security.SecurityError, match='chmod 600'):
    Learner(keys=keys).__enter__()
