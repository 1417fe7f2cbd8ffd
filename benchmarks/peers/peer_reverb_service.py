"""In the peer's virtual environment: dm-reverb's server, or a client of it over gRPC.

python peer_reverb_service.py serve
python peer_reverb_service.py VARIANT KIND PORT FRAMES       (VARIANT as in peer_reverb.py)
"""

from __future__ import annotations

import os
import sys

import common
import service_load
from peer_reverb import Reverb


def main() -> None:
  if sys.argv[1] == 'serve':
    server = Reverb('100/-1').server
    common.answer(port=server.port)
    common.serve()
  else:
    variant, kind, port, frames = sys.argv[1:]
    service_load.work(Reverb(variant, int(port)), kind, frames)
  os._exit(0)  # its threads are of no further use


if __name__ == '__main__':
  main()
