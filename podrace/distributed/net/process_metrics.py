"""The metrics that a process sends, and their aggregates at the learner. Imports no JAX."""

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

MAX_METRICS = 16  # in a message
NAME = re.compile(r'[a-z][a-z0-9_]{0,39}')

Measures = dict[str, float]

# The metrics that a learner logs, and their aggregates over processes.
LOGGED: dict[str, Callable[[list[float]], float]] = {
  'steps_per_s': sum,
  'windows_per_s': sum,
  'labels_per_s': sum,
  'searches_per_s': sum,
  'env_restarts': sum,
  'dropped_steps': sum,
  'write_share': lambda values: sum(values) / len(values),
  'staleness_s': max,
  'resident_mb': sum,
}


def check(details: dict[str, Any]) -> Measures:
  """Return the metrics of a peer; raise WireError unless they are at most MAX_METRICS numbers."""
  if len(details) > MAX_METRICS:
    raise WireError(f'{len(details)} measures, at most {MAX_METRICS}')
  for name, x in details.items():
    if not NAME.fullmatch(name):
      raise WireError(f'a measure called {short(name)}')
    if type(x) not in (int, float) or not math.isfinite(x) or abs(x) >= 2**63:
      raise WireError(f'a measure {name} of {short(x)}, expected a number')
    if name in LOGGED and x < 0:
      raise WireError(f'a measure {name} of {short(x)}, expected at least 0')
  return details


def logged(prefix: str, processes: Iterable[Measures]) -> Measures:
  """Return the LOGGED metrics that any process sent, aggregated, as PREFIX_NAME."""
  values = collections.defaultdict[str, list[float]](list)
  for metrics in processes:
    for name in LOGGED.keys() & metrics.keys():
      values[name].append(metrics[name])
  return {f'{prefix}_{k}': round(f(values[k]), 4) for k, f in LOGGED.items() if k in values}


def resident_mb() -> float:
  """Return the resident memory of this process in 10^6 bytes; without /proc its maximum so far."""
  try:
    pages = int(Path('/proc/self/statm').read_text(encoding='ascii').split()[1])
  except (OSError, ValueError, IndexError):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1e6 if sys.platform == 'darwin' else 1e3), 1)
  return round(pages * os.sysconf('SC_PAGE_SIZE') / 1e6, 1)


class Meter:
  """Rates per second, by name. Any thread may add."""

  def __init__(self) -> None:
    self._lock, self._counts = threading.Lock(), collections.Counter[str]()
    self._since = time.monotonic()

  def add(self, **counts: float) -> None:
    """Add to counts. The rate of seconds is a share of the time."""
    with self._lock:
      self._counts.update(counts)

  def read(self) -> Measures:
    """Return the rates since the last call, of all names that were ever added."""
    with self._lock:
      now = time.monotonic()
      seconds = max(now - self._since, 1e-3)
      rates = {k: round(x / seconds, 4) for k, x in self._counts.items()}
      self._counts, self._since = collections.Counter(dict.fromkeys(rates, 0)), now
    return rates
