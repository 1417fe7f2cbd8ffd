"""The transport. A session is a connection, TCP or a Unix socket, under TLS beyond this machine.

`Listener` and `Link` are the two ends; a service and its client are their handlers. `frame` has the
bytes on the wire (docs/protocol.md), `keys` the certificates, `dashboard` the reports. The extra
`remote` installs the libraries.
"""

from __future__ import annotations

from podrace.errors import MissingExtra
from podrace.system.importing import why_not


def require() -> None:
  """Raise MissingExtra if the extra `remote` is not installed."""
  try:
    import cryptography  # noqa: F401
    import msgpack  # noqa: F401
  except Exception as e:
    raise MissingExtra(why_not('a connection to another process', 'remote', e)) from e
