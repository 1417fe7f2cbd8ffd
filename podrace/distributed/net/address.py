"""Addresses: `tcp://HOST:PORT`, or `unix:PATH` on this machine.

A client also takes `announced:FILE#NAME`: a name in a file that --announce writes. It reads the
file for each connection, so it finds a service that has restarted at another host or port.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket as sockets
import stat
import sys
from pathlib import Path

from podrace.errors import SecurityError

SEND_BYTES = 2**21  # send buffer of a Unix socket, at most
BACKLOG = 1024  # connections that the kernel holds until they are accepted


def unix_path(address: str) -> str | None:
  """Return the PATH of unix:PATH; None for any other address."""
  scheme, _, path = address.partition(':')
  return path if scheme == 'unix' else None


def host_and_port(address: str) -> tuple[str, str]:
  """Return the parts of tcp://HOST:PORT; ('', '') for any other address."""
  scheme, _, rest = address.partition('://')
  host, _, port = rest.rpartition(':')
  return (host, port) if scheme == 'tcp' else ('', '')


def announced_at(address: str) -> tuple[Path, str] | None:
  """Return the parts of announced:FILE#NAME; None for any other address."""
  scheme, _, rest = address.partition(':')
  path, _, name = rest.rpartition('#')
  valid = scheme == 'announced' and path and name and not _is_odd(address)
  return (Path(path), name) if valid else None


def current(address: str) -> str:
  """Return the address to connect to now. An announced address is read from its file.

  Raises:
    OSError: if the file announces no address.
  """
  if (announcement := announced_at(address)) is None:
    return address
  from podrace.distributed.net import announce  # most clients do not need it

  path, name = announcement
  place = announce.read(path).get(name)
  if place is None:
    raise OSError(errno.EADDRNOTAVAIL, f'{path} does not announce {name} yet')
  if not is_place(place):
    raise OSError(errno.EINVAL, f'{path} announces {place!r}, no tcp://HOST:PORT or unix:PATH')
  return place


def is_place(address: str, listens: bool = False) -> bool:
  """Return whether a client can connect to an address as written, or a listener listen there."""
  host, port = host_and_port(address)
  if listens:
    tcp = bool(host) and (port == '*' or _is_port(port, 0))
  else:
    tcp = host not in ('', '*') and _is_port(port, 1)
  return (tcp or bool(unix_path(address))) and not _is_odd(address)


def is_local(address: str) -> bool:
  """Return whether an address can be reached from this machine only."""
  if unix_path(address) is not None:
    return True
  host = host_and_port(address)[0].strip('[]')
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def reachable(address: str) -> str:
  """Return an address for clients: an address of all interfaces becomes one of this host's name."""
  host, port = host_and_port(address)
  return f'tcp://{sockets.gethostname()}:{port}' if host in ('*', '0.0.0.0', '[::]') else address


def check_address(
  address: str, keys: Path | None, insecure: bool, flag: str, listens: bool = False
) -> None:
  """Refuse an invalid address, and one beyond this machine without keys.

  Only a listener may leave HOST or PORT open, as `*`. Only a client takes an announced address.

  Raises:
    SecurityError: with the address to give instead.
  """
  if not is_place(address, listens) and (listens or announced_at(address) is None):
    more = ' or * (any)' if listens else ', or announced:FILE#NAME'
    raise SecurityError(
      f'{flag} takes tcp://HOST:PORT or unix:PATH, without blanks and with a PORT of 1 to 65535'
      f'{more}, not {address!r}'
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


def _is_odd(address: str) -> bool:
  return '\0' in address or any(map(str.isspace, address))


# --- listening


def listen(address: str) -> tuple[sockets.socket, str]:
  """Return a non-blocking socket that listens, and its address with the port.

  Raises:
    SecurityError: if it cannot listen there.
  """
  try:
    path = unix_path(address)
    socket = _listen_tcp(address) if path is None else _listen_unix(path)
  except (OSError, UnicodeError) as e:
    why = getattr(e, 'strerror', None) or e
    raise SecurityError(f'cannot listen at {address}: {why}') from e
  socket.setblocking(False)
  if path is not None:
    return socket, address
  host, port = socket.getsockname()[:2]
  return socket, f'tcp://[{host}]:{port}' if ':' in host else f'tcp://{host}:{port}'


def _listen_tcp(address: str) -> sockets.socket:
  host, port = host_and_port(address)
  name = '0.0.0.0' if host == '*' else host.strip('[]')
  infos = sockets.getaddrinfo(name, 0 if port == '*' else int(port), type=sockets.SOCK_STREAM)
  family, *_, where = infos[0]
  both = family == sockets.AF_INET6 and sockets.has_dualstack_ipv6()
  return sockets.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=both)


def _listen_unix(path: str) -> sockets.socket:
  """Return a socket at a file that only this user may connect to."""
  _check_free(path)
  socket = sockets.socket(sockets.AF_UNIX)
  before = os.umask(0o177)  # private from the first moment
  try:
    socket.bind(path)
    socket.listen(BACKLOG)
  except BaseException:
    socket.close()
    raise
  finally:
    os.umask(before)
  if why := not_private(path):  # a file system without modes
    socket.close()
    os.unlink(path)
    raise PermissionError(errno.EPERM, why)
  return socket


def _check_free(path: str) -> None:
  """Remove the socket of a process that died. Raise OSError for any other file."""
  try:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
      raise FileExistsError(
        errno.EEXIST, 'there is a file that is no socket; move it, or give another path'
      )
  except FileNotFoundError:
    return
  with sockets.socket(sockets.AF_UNIX) as probe:
    probe.setblocking(False)
    try:
      probe.connect(path)
    except ConnectionRefusedError:
      os.unlink(path)
      return
    except BlockingIOError:  # a process listens, and is busy
      pass
  raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def not_private(path: str) -> str:
  """Return the reason why other users may use a file; '' if they may not."""
  status = os.stat(path)
  if status.st_uid not in (os.geteuid(), 0):
    return f'{path} belongs to user {status.st_uid}, not to user {os.geteuid()}'
  if status.st_mode & 0o077:
    return f'{path} is open to others (mode {status.st_mode & 0o777:o}): `chmod 600 {path}`'
  return ''


def same_user(socket: sockets.socket) -> bool:
  """Return whether the peer of a Unix socket is a process of this user, or of root."""
  if not hasattr(sockets, 'SO_PEERCRED'):
    return True  # the file's mode protects it
  credentials = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12)
  uid = int.from_bytes(credentials[4:8], sys.byteorder)
  return uid in (os.geteuid(), 0)


# --- connecting


def connect(address: str, seconds: float) -> sockets.socket:
  """Return a connected socket, at the first of the host's addresses that answers.

  Args:
    address: of a service, also an announced one.
    seconds: timeout for each address of the host.

  Raises:
    OSError: if none answers, a Unix socket is not this user's, or the file announces no address.
  """
  address = current(address)
  if (path := unix_path(address)) is not None:
    return _connect_unix(path, seconds)
  host, port = host_and_port(address)
  try:
    return sockets.create_connection((host.strip('[]'), int(port)), seconds)
  except UnicodeError:
    raise OSError(errno.EINVAL, f'{host!r} is not a name of a machine') from None


def _connect_unix(path: str, seconds: float) -> sockets.socket:
  if why := not_private(path):
    raise PermissionError(errno.EPERM, why)
  socket = sockets.socket(sockets.AF_UNIX)
  try:
    # A large frame is then sent in one piece, if the system allows it.
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, SEND_BYTES)
    socket.settimeout(seconds)
    socket.connect(path)
    if not same_user(socket):
      raise PermissionError(errno.EPERM, "another user's process listens there")
  except BaseException:
    socket.close()
    raise
  return socket
