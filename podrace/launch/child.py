"""Becomes a command that ends when its parent does: `python child.py PARENT COMMAND...`. Imports nothing of podrace."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG; it stays through exec
NOT_FOUND = 2  # an exit code: what was to be started would not be found the next time either


def main(parent: int, command: list[str]) -> None:
  """Replaces this process by the command. On Linux the kernel sends it SIGTERM when the parent dies."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it died before that
      sys.exit(1)
  try:
    os.execvp(command[0], command)
  except OSError as e:
    print(f'{command[0]} cannot be started: {e.strerror}', file=sys.stderr)
    sys.exit(NOT_FOUND)


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2:])
