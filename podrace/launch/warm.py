"""A process that imports what `podrace train` needs, and then becomes it: its arguments come as a line of JSON.

So a learner imports while its program is still made. Without that line, as when options are refused, it ends.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
  """Imports, waits and runs."""
  import tyro  # noqa: F401

  from podrace import build, cli, run  # noqa: F401

  if line := sys.stdin.readline():
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.argv = json.loads(line)
    cli.entry()


if __name__ == '__main__':
  main()
