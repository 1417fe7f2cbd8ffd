"""A process that measures the items of one group, and appends a line of JSON for each item."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

import session
from groups import groups
from kernels import inspect, memory_of
from runs import learn
from session import TINY


def limited(function: Any, limit: float) -> Any:
  """Returns a function that learns for at most the limit; any other function as it is."""
  if not isinstance(function, functools.partial) or function.func is not learn:
    return function
  longest = function.keywords['limit'] * (15 if TINY else 1)
  return functools.partial(function, limit=min(longest, max(5.0, limit - 15)))


def attempt(function: Any, *args: Any) -> dict[str, Any]:
  """Returns the figures of a function, or its error."""
  try:
    return function(*args)
  except Exception as e:
    return dict(error=f'{type(e).__name__}: {str(e)[-1_500:]}')


def measure_group(
  name: str, only: list[str], ahead: bool, trace: bool, path: pathlib.Path, limit: float
) -> None:
  """Measures items of a group; writes a line for each at once, and another with its kernels."""
  import timing

  if ahead:
    os.nice(10)  # the smoke tests go first
    session.SECONDS, session.REPEATS = 1e-3, 1

  def report(item: str, result: dict[str, Any]) -> None:
    with path.open('a') as file:
      file.write(json.dumps({item: result}, default=str) + '\n')

  for item, function in groups()[name].items.items():
    if only and item not in only:
      continue
    timing.LAST.clear()
    session.NOTES.update(ahead=ahead, report=functools.partial(report, item))
    began = time.perf_counter()
    result = attempt(limited(function, limit))
    result.pop('origin', None)
    result['took_s'] = round(time.perf_counter() - began, 1)
    run = timing.LAST.get('run')
    if 'jax' in sys.modules:
      import jax

      device = jax.devices()[0]
      result['device'] = device.device_kind
      if run and (stats := device.memory_stats()):
        result['peak_mib_of_process'] = round(stats['peak_bytes_in_use'] / 2**20)
    if run and 'error' not in result:
      result['program_mib'] = memory_of(run)
    report(item, result)
    if run and trace and not ahead and 'error' not in result:
      report(item, result | dict(kernels=attempt(inspect, run)))
