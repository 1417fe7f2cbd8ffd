"""Ends a launcher's processes after the launcher was killed.

    python watchdog.py DIRECTORY PID...    # started by the launcher

The PIDs are of process groups. Each line of standard input is `+PID` for a group that begins or
`-PID` for one that ended. The end of the input means that the launcher is gone. Groups that are
left get SIGTERM, and SIGKILL half a minute later. Then the directory of sockets is removed. Imports
nothing of podrace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE = 30.0  # seconds in which processes may save


def main(directory: str, groups: set[int]) -> None:
  """Wait for the launcher's end, then end the groups."""
  for line in sys.stdin:
    pid = int(line[1:])
    (groups.add if line[0] == '+' else groups.discard)(pid)
  signal_all(groups, signal.SIGTERM)
  end = time.monotonic() + GRACE
  while signal_all(groups, 0) and time.monotonic() < end:
    time.sleep(0.05)
  signal_all(groups, signal.SIGKILL)
  shutil.rmtree(directory, ignore_errors=True)


def signal_all(groups: set[int], signum: int) -> bool:
  """Send a signal to groups; returns whether one of them exists."""
  exists = False
  for pid in groups:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(pid, signum)
      exists = True
  return exists


if __name__ == '__main__':
  main(sys.argv[1], {int(pid) for pid in sys.argv[2:]})
