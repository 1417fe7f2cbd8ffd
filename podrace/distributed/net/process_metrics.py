"""Numbers that a process sends of itself, and the few that a learner makes of many processes'. Imports no JAX."""

from __future__ import annotations

import collections
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from podrace.distributed.net.frame import WireError, short

MOST = 16  # numbers in a message
NAME = re.compile(r'[a-z][a-z0-9_]{0,39}')

Measures = dict[str, float]

# Those that a learner logs, and how many processes' become one.
LOGGED: dict[str, Callable[[list[float]], float]] = {
  'steps_per_s': sum,
  'windows_per_s': sum,
  'searches_per_s': sum,
  'env_restarts': sum,
  'dropped_steps': sum,
  'write_share': lambda every: sum(every) / len(every),
  'staleness_s': max,
  'resident_mb': sum,
}


def check(details: dict[str, Any]) -> Measures:
  """Refuses what is no small map of numbers, which came from somebody else."""
  if len(details) > MOST:
    raise WireError(f'{len(details)} measures, at most {MOST}')
  for name, x in details.items():
    if not NAME.fullmatch(name):
      raise WireError(f'a measure called {short(name)}')
    if type(x) not in (int, float) or not math.isfinite(x) or abs(x) >= 2**63:
      raise WireError(f'a measure {name} of {short(x)}, expected a number')
    if name in LOGGED and x < 0:
      raise WireError(f'a measure {name} of {short(x)}, expected at least 0')
  return details


def logged(prefix: str, every: Iterable[Measures]) -> Measures:
  """Of several processes' measures those in LOGGED, each as PREFIX_NAME; none that nobody sent."""
  found = collections.defaultdict[str, list[float]](list)
  for one in every:
    for name in LOGGED.keys() & one.keys():
      found[name].append(one[name])
  return {f'{prefix}_{k}': round(how(found[k]), 4) for k, how in LOGGED.items() if k in found}


def resident_mb() -> float:
  """Memory of this process that is in use; where Linux's /proc is not, the most that ever was."""
  try:
    pages = int(Path('/proc/self/statm').read_text(encoding='ascii').split()[1])
  except (OSError, ValueError, IndexError):
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(most / (1e6 if sys.platform == 'darwin' else 1e3), 1)
  return round(pages * os.sysconf('SC_PAGE_SIZE') / 1e6, 1)


class Meter:
  """What happens in a second, by name. Any thread may add."""

  def __init__(self) -> None:
    self._lock, self._counts = threading.Lock(), collections.Counter[str]()
    self._since = time.monotonic()

  def add(self, **counts: float) -> None:
    """So much more has happened; of seconds, the rate is a share of the time."""
    with self._lock:
      self._counts.update(counts)

  def read(self) -> Measures:
    """Rates since they were last read, or it was made; of all that was ever added."""
    with self._lock:
      now = time.monotonic()
      seconds = max(now - self._since, 1e-3)
      found = {k: round(x / seconds, 4) for k, x in self._counts.items()}
      self._counts, self._since = collections.Counter(dict.fromkeys(found, 0)), now
    return found
