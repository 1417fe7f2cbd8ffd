"""The transport: a session is a connection, TCP or a Unix socket, under TLS beyond this machine.

`Listener` and `Link` are the two ends; services and their clients are handlers of theirs. `frame` is what goes
over the wire (docs/protocol.md), `keys` who may connect, `top` what a listener tells of itself. The extra
`remote` installs what they need.
"""

from __future__ import annotations

from podrace.errors import MissingExtra
from podrace.system.importing import why_not


def require() -> None:
  """Raises MissingExtra if the extra is not installed."""
  try:
    import cryptography  # noqa: F401
    import msgpack  # noqa: F401
  except Exception as e:
    raise MissingExtra(why_not('a connection to another process', 'remote', e)) from e
