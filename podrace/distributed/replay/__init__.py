"""Replay as a service: acting, learning and remembering in different processes.

`podrace replay` serves podrace.tables over a socket (`server`). `connect` opens its tables and
makes writers (`client`). docs/tables.md is the manual, docs/protocol.md the wire format. Imports no
JAX. The extra `remote` installs the libraries that it needs.
"""

from podrace.distributed import net

net.require()

from podrace.distributed.net.link import Refused  # noqa: E402  # after the check of the extra
from podrace.distributed.replay.client import ReplayClient, connect  # noqa: E402
from podrace.distributed.replay.remote_table import RemoteTable  # noqa: E402
from podrace.distributed.replay.sampler import Sampler  # noqa: E402

__all__ = ['Refused', 'RemoteTable', 'ReplayClient', 'Sampler', 'connect']
