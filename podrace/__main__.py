"""The process `podrace`, or `python -m podrace`. A signal ends it without a traceback."""

import os
import signal


def main() -> None:
  """Run the command line. Install signal handlers first, since the imports take long."""
  for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
      signal.signal(signum, lambda number, frame: os._exit(128 + number))
  from podrace.system.process import end_on_signals

  end_on_signals()
  from podrace.cli import entry

  entry()


if __name__ == '__main__':
  main()
