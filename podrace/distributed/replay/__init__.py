"""Replay and parameters as services: what acts, what learns and what remembers in different processes.

`podrace replay` is podrace.tables behind a socket (`server`); `connect` gives tables and writers with the surface
of podrace.tables' own (`client`). A learner's `Publisher` sends parameters to acting processes' `Parameters`.
docs/tables.md is the manual, docs/protocol.md what goes over the wire. Imports no JAX; the
extra `remote` installs what it needs.
"""

from podrace.distributed import net

net.require()

from podrace.distributed.net.link import Refused  # noqa: E402
from podrace.distributed.parameters.parameter_messages import Published  # noqa: E402
from podrace.distributed.parameters.publisher import Publisher  # noqa: E402
from podrace.distributed.parameters.reader import Parameters, StaleParameters  # noqa: E402
from podrace.distributed.replay.client import Client, connect  # noqa: E402
from podrace.distributed.replay.drawing import Sampler  # noqa: E402
from podrace.distributed.replay.remote_table import RemoteTable  # noqa: E402

__all__ = [
  'Client',
  'Parameters',
  'Published',
  'Publisher',
  'Refused',
  'RemoteTable',
  'Sampler',
  'StaleParameters',
  'connect',
]
