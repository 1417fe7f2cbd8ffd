"""Keys: TLS 1.3 with certificates of both sides, and the list of clients that may connect.

`podrace keys new DIR` makes an authority, certificates of a listener and a client, and the list. A
client may connect if the authority has signed its certificate and its fingerprint is listed.
Removing the line ends the client's connections.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import ssl
import stat
from pathlib import Path
from typing import Any

from podrace.distributed.net.safe_text import label
from podrace.errors import SecurityError
from podrace.system import files

AUTHORITY, SERVER, CLIENT = 'authority', 'server', 'client'  # NAME.pem and NAME.key
CLIENT_FILES = ('authority.pem', 'client.pem', 'client.key')  # needed on a client's machine
ALLOWED = 'allowed_clients'
DAYS = 36500  # of validity: the list ends a certificate, not a date
_FINGERPRINT = re.compile(r'[0-9a-f]{64}')


# --- making keys


def new_keys(directory: Path) -> None:
  """Make an authority, keys of a listener and a client, and the list that allows the client.

  Raises:
    SecurityError: if the directory is not empty, or cannot be made.
  """
  _new_directory(directory)
  _make(directory, AUTHORITY, directory)
  _make(directory, SERVER, directory)
  allow(directory, _make(directory, CLIENT, directory), CLIENT)


def new_client(directory: Path, to: Path) -> None:
  """Make keys of another client in the directory `to`, and allow them.

  Raises:
    SecurityError: if `directory` has no valid authority, or `to` is not empty.
  """
  for name in (f'{AUTHORITY}.pem', f'{AUTHORITY}.key', ALLOWED):
    readable(directory / name)
  _new_directory(to)
  fingerprint = _make(to, CLIENT, directory)
  _write(to / f'{AUTHORITY}.pem', (directory / f'{AUTHORITY}.pem').read_bytes())
  allow(directory, fingerprint, label(to.name))


def _new_directory(directory: Path) -> None:
  """Make a directory for keys that only this user can read."""
  try:
    if directory.exists() and any(directory.iterdir()):
      raise SecurityError(f'{directory} is not empty: keys are never overwritten')
    files.make_user_folder(directory).chmod(0o700)
  except OSError as e:
    raise SecurityError(f'cannot make the directory {directory} for keys: {e.strerror or e}') from e


def allow(directory: Path, fingerprint: str, name: str) -> None:
  """Add a certificate to the list."""
  path = directory / ALLOWED
  with files.open_append(path) as file:
    ended = path.read_bytes()[-1:] in (b'', b'\n')  # an editor may leave out the last one
    file.write(('' if ended else '\n') + f'{fingerprint}  # {name}\n')


def _make(directory: Path, role: str, signed_by: Path) -> str:
  """Make a key and its certificate, signed by the authority; return its fingerprint."""
  from cryptography import x509
  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric import ed25519

  key = ed25519.Ed25519PrivateKey.generate()
  subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f'podrace {role}')])
  signer: Any = key
  issuer = subject
  if role != AUTHORITY:
    authority = signed_by / f'{AUTHORITY}.pem'
    try:
      issuer = x509.load_pem_x509_certificate(authority.read_bytes()).subject
      text = authority.with_suffix('.key').read_bytes()
      signer = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError) as e:  # TypeError: the key has a password
      raise SecurityError(f'{authority} and its key cannot sign: {e}') from e
  certificate = _certificate(role, key, subject, signer, issuer)
  pem, der = (certificate.public_bytes(getattr(serialization.Encoding, x)) for x in ('PEM', 'DER'))
  _write(directory / f'{role}.pem', pem)
  secret = key.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
  )
  _write(directory / f'{role}.key', secret, 0o600)
  return fingerprint_of(der)


def _write(path: Path, content: bytes, permissions: int = 0o666) -> None:
  """Write a file of keys. A present file is never overwritten."""
  with files.create(path, 'wb', permissions) as file:
    file.write(content)


def _certificate(role: str, key: Any, subject: Any, signer: Any, issuer: Any) -> Any:
  """Return a certificate that is valid for its role only."""
  from cryptography import x509

  now = datetime.datetime.now(datetime.UTC)
  builder = (
    x509.CertificateBuilder()
    .subject_name(subject)
    .issuer_name(issuer)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
    .not_valid_after(now + datetime.timedelta(days=DAYS))
    .add_extension(x509.BasicConstraints(ca=role == AUTHORITY, path_length=None), critical=True)
    .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    .add_extension(
      x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    .add_extension(_usage(role), critical=True)
  )
  uses = x509.ExtendedKeyUsageOID
  use = {SERVER: uses.SERVER_AUTH, CLIENT: uses.CLIENT_AUTH}.get(role)
  if use is not None:
    builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=True)
  return builder.sign(signer, None)


def _usage(role: str) -> Any:
  from cryptography import x509

  names = ('content_commitment', 'key_encipherment', 'data_encipherment', 'key_agreement')
  signs = role == AUTHORITY
  return x509.KeyUsage(
    digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, encipher_only=False,
    decipher_only=False, **dict.fromkeys(names, False),
  )  # fmt: skip


# --- using keys


def fingerprint_of(der: bytes) -> str:
  """Return the SHA-256 of a certificate, in hexadecimal."""
  return hashlib.sha256(der).hexdigest()


def readable(path: Path) -> Path:
  """Return the path of a file of keys after checking it. A secret one must be private.

  Raises:
    SecurityError: if it is missing, or other users may read it.
  """
  try:
    status = path.stat()
    path.open('rb').close()
  except OSError as e:
    raise SecurityError(
      f'--keys {path.parent}: no {path.name} ({e.strerror}); `podrace keys new DIR` makes keys'
    ) from e
  if path.suffix == '.key' and (status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0)):
    raise SecurityError(
      f'{path} can be used by others on this machine (mode {stat.S_IMODE(status.st_mode):o}, user '
      f'{status.st_uid}), who may have read it: `chmod 600 {path}`, or make other keys with '
      '`podrace keys new DIR`'
    )
  return path


def server_context(directory: Path) -> ssl.SSLContext:
  """Return the TLS context of a listener.

  Raises:
    SecurityError: naming the file that is missing or invalid.
  """
  context = _context(ssl.PROTOCOL_TLS_SERVER, directory, SERVER)
  context.num_tickets = 0  # no resumption: the list is read each time
  return context


def client_context(directory: Path) -> ssl.SSLContext:
  """Return the TLS context of a client. Raises as `server_context`."""
  return _context(ssl.PROTOCOL_TLS_CLIENT, directory, CLIENT)


def _context(protocol: int, directory: Path, role: str) -> ssl.SSLContext:
  files = [readable(directory / x) for x in (f'{AUTHORITY}.pem', f'{role}.pem', f'{role}.key')]
  context = ssl.SSLContext(protocol)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.check_hostname = False  # the authority is private, and signs one server
  context.verify_mode = ssl.CERT_REQUIRED
  try:
    context.load_verify_locations(files[0])
    context.load_cert_chain(files[1], files[2], password=_no_password)
  except (ssl.SSLError, ValueError) as e:
    raise SecurityError(
      f'--keys {directory}: {", ".join(x.name for x in files)} are not certificates and a key '
      f'that belong together ({e})'
    ) from e
  return context


def _no_password() -> str:
  raise ValueError('the key has a password')


class Allowed:
  """The fingerprints of clients that may connect, read again when the file has changed.

  Raises:
    SecurityError: if there is no such file.
  """

  def __init__(self, path: Path) -> None:
    self._path, self._seen = readable(path), (0, 0, 0)
    self._keys: frozenset[str] = frozenset()
    self.refresh()

  def refresh(self) -> None:
    """Read the list again, if the file has changed. An unreadable file allows no client."""
    try:
      status = self._path.stat()
      seen = (status.st_mtime_ns, status.st_size, status.st_ino)
      if seen == self._seen:
        return
      text = self._path.read_text(encoding=files.UTF8)
    except (OSError, UnicodeDecodeError):
      seen, text = (0, 0, 0), ''
    lines = [line.partition('#')[0].strip() for line in text.splitlines()]
    self._keys, self._seen = frozenset(filter(_FINGERPRINT.fullmatch, lines)), seen

  def __contains__(self, fingerprint: str) -> bool:
    return fingerprint in self._keys

  def __len__(self) -> int:
    return len(self._keys)
