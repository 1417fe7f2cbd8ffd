"""Who may connect: loopback without keys, everything else with CURVE keys that are listed.

CURVE is ZeroMQ's (RFC 26): Curve25519 keys, every message encrypted and authenticated. The learner
has a key pair; each client needs one whose public key is in the learner's list, and the learner's public
key.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket as sockets
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

SERVER_SECRET, SERVER_PUBLIC = 'server.secret', 'server.public'
CLIENT_SECRET, CLIENT_PUBLIC = 'client.secret', 'client.public'
ALLOWED = 'allowed_clients'
NEW_SOCKET_SECONDS = 5.0  # without an answer: libzmq does not come back to who turned it away
_KEY = re.compile(r'[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}')


class SecurityError(ValueError):
  """Keys or addresses that can't be right; the message is for the user."""


def new_context(**options: Any) -> zmq.Context[Any]:
  """A ZeroMQ context; all of podrace's are made here.

  A ROUTER numbers connections from C's `rand`, which libzmq 4.3.5 does not seed: it began with the same number in
  every process. A peer that takes a number to come makes libzmq end the process.
  """
  ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), 'little'))
  return zmq.Context(**options)


# --- addresses --------------------------------------------------------------------------------------


def is_local(address: str) -> bool:
  """Whether an address can be reached from this machine only."""
  scheme, _, rest = address.partition('://')
  if scheme == 'ipc':
    return True
  host = rest.rpartition(':')[0].strip('[]')
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def check_address(
  address: str, keys: Path | None, insecure: bool, flag: str, listens: bool = False
) -> None:
  """Refuses an address that is none, and one beyond loopback without keys.

  Who listens may leave HOST or PORT open, as `*`.

  Raises:
    SecurityError: saying what to give instead.
  """
  scheme, _, rest = address.partition('://')
  host, _, port = rest.rpartition(':')
  if listens:
    tcp, more = bool(host) and (port == '*' or _is_port(port, 0)), ' or * (any)'
  else:
    tcp, more = host not in ('', '*') and _is_port(port, 1), ''
  if not ((scheme == 'tcp' and tcp) or (scheme == 'ipc' and rest)) or any(
    map(str.isspace, address)
  ):
    raise SecurityError(
      f'{flag} takes tcp://HOST:PORT or ipc://PATH, with a PORT of 1 to 65535{more}, not {address!r}'
    )
  if keys is not None and insecure:
    raise SecurityError('--keys and --insecure contradict each other: give one of them')
  if keys is None and not insecure and not is_local(address):
    raise SecurityError(
      f'{flag} {address} can be reached from other machines, so it needs keys: '
      '`podrace keys new DIR`, then --keys DIR at both ends; '
      'or --insecure, with which anybody who reaches it can take part, unencrypted'
    )


def _is_port(text: str, least: int) -> bool:
  return text.isascii() and text.isdigit() and len(text) <= 5 and least <= int(text) <= 65535


def needs_ipv6(address: str) -> bool:
  """Whether a host has IPv6 addresses only; ZeroMQ looks for either these or the others."""
  scheme, _, rest = address.partition('://')
  host = rest.rpartition(':')[0]
  if scheme != 'tcp' or host.startswith('['):
    return scheme == 'tcp'
  try:
    found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
  except (OSError, UnicodeError):  # it may be known later; until then nobody answers
    return False
  return {family for family, *_ in found} == {sockets.AF_INET6}


def connect(socket: zmq.Socket[Any], address: str) -> None:
  """Has a client's socket connect, for as long as it takes.

  Raises:
    SecurityError: if ZeroMQ says that it can't be.
  """
  socket.ipv6 = needs_ipv6(address)
  try:
    socket.connect(address)
  except zmq.ZMQError as e:
    raise SecurityError(f'cannot connect to {address}: {e.strerror or e}') from e


# --- keys -------------------------------------------------------------------------------------------


def new_keys(directory: Path) -> None:
  """Makes a learner's key pair, one client's, and the list that allows it.

  Raises:
    SecurityError: if there is something already, or the directory can't be made.
  """
  _new_directory(directory)
  _write_pair(directory, SERVER_PUBLIC, SERVER_SECRET)
  public = _write_pair(directory, CLIENT_PUBLIC, CLIENT_SECRET)
  allow(directory, public, 'client')


def new_client(directory: Path, to: Path) -> None:
  """Makes another client's keys in the directory `to`, and allows them.

  Raises:
    SecurityError: if `directory` has no learner's keys, or `to` has files already.
  """
  server = read_key(directory / SERVER_PUBLIC)
  _new_directory(to)
  public = _write_pair(to, CLIENT_PUBLIC, CLIENT_SECRET)
  (to / SERVER_PUBLIC).write_text(server.decode() + '\n')
  allow(directory, public, to.name)


def _new_directory(directory: Path) -> None:
  """Makes a directory for keys, which nobody else can read."""
  try:
    if directory.exists() and any(directory.iterdir()):
      raise SecurityError(f'{directory} is not empty: keys are never overwritten')
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
  except OSError as e:
    raise SecurityError(f'cannot make the directory {directory} for keys: {e.strerror or e}') from e


def allow(directory: Path, public: bytes, name: str) -> None:
  """Adds a public key to the list."""
  with (directory / ALLOWED).open('a') as file:
    file.write(f'{public.decode()}  # {name}\n')


def _write_pair(directory: Path, public_name: str, secret_name: str) -> bytes:
  public, secret = zmq.curve_keypair()
  (directory / public_name).write_text(public.decode() + '\n')
  descriptor = os.open(directory / secret_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  with os.fdopen(descriptor, 'w') as file:
    file.write(secret.decode() + '\n')
  return public


def read_key(path: Path) -> bytes:
  """A key, of 40 characters (Z85).

  Raises:
    SecurityError: if there is none, or a secret one is open to everybody.
  """
  try:
    text = path.read_text().strip()
    if path.suffix == '.secret' and path.stat().st_mode & 0o007:
      raise SecurityError(
        f'{path} can be used by everybody on this machine, who may have read it: `chmod 600 {path}`, or make other '
        'keys with `podrace keys new DIR`'
      )
  except OSError as e:
    raise SecurityError(
      f'--keys {path.parent}: no {path.name} ({e.strerror}); `podrace keys new DIR` makes keys'
    ) from e
  except UnicodeDecodeError:
    text = ''
  if not _KEY.fullmatch(text):
    raise SecurityError(f'{path} is not a key of 40 characters')
  return text.encode()


def secure_server(socket: zmq.Socket[Any], keys: Path) -> None:
  """Makes a socket take CURVE connections only."""
  socket.curve_secretkey = read_key(keys / SERVER_SECRET)
  socket.curve_publickey = read_key(keys / SERVER_PUBLIC)
  socket.curve_server = True
  socket.zap_domain = b'podrace'


class Keys(NamedTuple):
  """A client's."""

  server: bytes  # its public one
  secret: bytes
  public: bytes

  def __repr__(self) -> str:
    return 'Keys(...)'  # tracebacks and logs are read by others


def client_keys(directory: Path | None) -> Keys | None:
  """What a client needs of its directory; None without one.

  Raises:
    SecurityError: naming the file that lacks.
  """
  if directory is None:
    return None
  names = SERVER_PUBLIC, CLIENT_SECRET, CLIENT_PUBLIC
  return Keys(*(read_key(directory / name) for name in names))


def secure_client(socket: zmq.Socket[Any], keys: Keys) -> None:
  """Makes a socket connect to a learner that has the right keys, with this client's."""
  socket.curve_serverkey, socket.curve_secretkey, socket.curve_publickey = keys


class Allowed:
  """The list of client keys that may connect, read again whenever the file has changed."""

  def __init__(self, path: Path) -> None:
    self._path, self._seen = path, (0, 0, 0)
    self._keys: frozenset[bytes] = frozenset()
    if not path.exists():
      raise SecurityError(f'no list of allowed clients {path}; `podrace keys new DIR` makes one')
    self.refresh()

  def refresh(self) -> bool:
    """Whether the list is another one than before; one that can't be read allows nobody."""
    try:
      stat = self._path.stat()
      seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
      if seen == self._seen:
        return False
      text = self._path.read_text()
    except (OSError, UnicodeDecodeError):
      seen, text = (0, 0, 0), ''
    lines = [line.partition('  #')[0].strip() for line in text.splitlines()]
    keys = frozenset(line.encode() for line in lines if _KEY.fullmatch(line))
    changed, self._keys, self._seen = keys != self._keys, keys, seen
    return changed

  def __contains__(self, key: bytes) -> bool:
    return key in self._keys

  def __len__(self) -> int:
    return len(self._keys)


class Gate:
  """Answers ZeroMQ's question about each new connection (ZAP, RFC 27): is its key in the list?"""

  def __init__(self, context: zmq.Context[Any], allowed: Allowed) -> None:
    self.allowed, self.turned_away = allowed, 0
    self.socket = context.socket(zmq.REP)
    self.socket.linger = 0
    self.socket.bind('inproc://zeromq.zap.01')

  def answer(self) -> str | None:
    """Answers one question, if there is one; what to log if the answer is no."""
    try:
      version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(
        zmq.NOBLOCK
      )
    except zmq.Again:
      return None
    self.allowed.refresh()
    key = credentials[0] if credentials else b''
    name = z85.encode(key) if len(key) == 32 else b''
    good = mechanism == b'CURVE' and name in self.allowed
    status = (b'200', b'OK', name) if good else (b'400', b'key not listed', b'')
    self.socket.send_multipart([version, request, *status, b''])
    if good:
      return None
    self.turned_away += 1
    return f'turned away {address.decode(errors="replace")}: its key {name.decode()} is not listed'

  def close(self) -> None:
    self.socket.close()
