"""The samples that wait for a table, in the order in which they are served."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from podrace.distributed.net.listener import Peer
  from podrace.distributed.replay.sampling import Request


class RequestQueue:
  """Requests of one table: of each client in their order, and the clients in turn.

  A client that asks for thousands of large samples has another client wait for one of them, not for all.
  """

  def __init__(self) -> None:
    self._by_peer: collections.OrderedDict[Peer, collections.OrderedDict[Request, None]] = (
      collections.OrderedDict()
    )
    self._count = 0

  def __len__(self) -> int:
    return self._count

  @property
  def first(self) -> Request:
    """The request that is served next; there must be one."""
    return next(iter(next(iter(self._by_peer.values()))))

  def add(self, request: Request) -> None:
    """Adds a request after the other ones of its client."""
    self._by_peer.setdefault(request.peer, collections.OrderedDict())[request] = None
    self._count += 1

  def discard(self, request: Request) -> None:
    """Removes a request, if it is in the queue."""
    requests = self._by_peer.get(request.peer)
    if requests is not None and request in requests:
      del requests[request]
      self._count -= 1
      if not requests:
        del self._by_peer[request.peer]

  def end_turn(self, peer: Peer) -> None:
    """Lets the other clients go first."""
    if peer in self._by_peer:
      self._by_peer.move_to_end(peer)
