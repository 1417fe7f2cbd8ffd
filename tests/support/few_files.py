"""A process with two listeners that may have few files open, which answers lines on stdin with JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
from typing import Any

LIMIT = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))

from bare import ANY, Service  # noqa: E402

from podrace.distributed.net import connections  # noqa: E402

connections.SILENT_SECONDS = 3600.0  # a slow machine takes its time to connect so often


class Ticking(Service):
  """Counts looks at the clock."""

  ticks = 0
  ticked = threading.Event()

  def tick(self, now: float) -> None:
    self.ticks += 1
    self.ticked.set()


def take_all() -> list[int]:
  """Every descriptor that is left."""
  held = []
  with contextlib.suppress(OSError):
    while True:
      held.append(os.open(os.devnull, os.O_RDONLY))
  return held


def release(held: list[int]) -> None:
  while held:
    os.close(held.pop())


def say(**what: Any) -> None:
  print(json.dumps(what), flush=True)


def main() -> None:
  with Ticking().listen(ANY) as one, Ticking().listen(ANY) as two:
    share = one.listener.sessions.connections.share
    say(
      addresses=[one.address, two.address],
      guests=share.guests,
      sessions=share.sessions,
      room=share.room,
    )
    held: list[int] = []
    for line in sys.stdin:
      if line.strip() == 'take':
        held = take_all()
      elif line.strip() == 'release':
        release(held)
      elif line.strip() == 'tick':
        for _ in range(3):
          one.ticked.clear()
          one.ticked.wait(60)
      left = take_all()
      free = len(left)
      release(left)
      say(
        free=free,
        held=len(held),
        ticks=one.ticks,
        guests=[len(x.listener.guests) for x in (one, two)],
        peers=[len(x.listener.peers) for x in (one, two)],
        errors=one.listener.counts['errors'],
        connections=[x.listener.counts['connections'] for x in (one, two)],
      )


if __name__ == '__main__':
  main()
