"""In the peer's virtual environment: dm-reverb's server, or a client of it over gRPC.

python peer_reverb_service.py serve
python peer_reverb_service.py VARIANT KIND PORT FRAMES       (VARIANT as in peer_reverb.py)
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import common
import reverb
import service_load
from peer_reverb import Reverb


class Remote(Reverb):
  """The client's half, with the server elsewhere."""

  def __init__(self, variant: str, port: int) -> None:
    keep, self.reading = variant.split('/')
    self.keep = int(keep)
    self.server = SimpleNamespace(port=port)
    self.client = reverb.Client(f'localhost:{port}')


def main() -> None:
  if sys.argv[1] == 'serve':
    server = Reverb('100/-1').server
    common.answer(port=server.port)
    for _ in common.requests():
      pass
  else:
    variant, kind, port, frames = sys.argv[1:]
    service_load.work(Remote(variant, int(port)), kind, frames)
  os._exit(0)  # its threads are of no further use


if __name__ == '__main__':
  main()
