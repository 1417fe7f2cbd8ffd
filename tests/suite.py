"""Runs the tests; the few that fail beside others get a second try, alone, and are named.

    python tests/suite.py [PYTEST'S ARGUMENTS]

Tests with real processes, sockets and deadlines share two cores here with whatever else runs. One
that fails there and passes alone says something of the machine, or of itself, but its failure must
not hide what the others say: both outcomes are printed. More than a few failures, a collection that
fails or a run that is interrupted get no second try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FEW = 5
SOME_FAILED = 1  # pytest's exit code
LAST_FAILED = Path('.pytest_cache/v/cache/lastfailed')


def main(args: Sequence[str]) -> int:
  """The exit code: of the first run, or of the second try where there is one."""
  pytest = [sys.executable, '-m', 'pytest']
  code = subprocess.call([*pytest, '--cache-clear', *args])
  if code != SOME_FAILED:
    return code
  failed = sorted(json.loads(LAST_FAILED.read_text()))
  if len(failed) > FEW:
    return code
  print(f'\n{len(failed)} failed; once more, alone: {" ".join(failed)}', flush=True)
  code = subprocess.call([*pytest, '-q', '-p', 'no:xdist', *failed])
  told = 'passed alone only, so look at' if code == 0 else 'failed twice, or one of'
  print(f'{told}: {" ".join(failed)}', flush=True)
  return code


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
