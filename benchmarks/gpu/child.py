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
from kernels import looked_into, memory_of
from runs import learn
from session import TINY


def child(
  name: str, only: list[str], ahead: bool, trace: bool, path: pathlib.Path, limit: float
) -> None:
  """Measures items of a group; a line of JSON for each as soon as there is one, and another with its kernels."""
  import common

  common.PATH = os.pathsep.join(
    [common.PATH, os.environ.get('PYTHONPATH', '')]
  )  # for its processes
  start = common.start

  def remembering(*args: Any, **kwargs: Any) -> Any:
    session.NOTES['run'] = start(*args, **kwargs)
    return session.NOTES['run']

  common.start = remembering
  if ahead:
    os.nice(10)  # the smoke tests go first
    session.SECONDS, session.REPEATS = 1e-3, 1

  def tell(item: str, found: dict[str, Any]) -> None:
    with path.open('a') as file:
      file.write(json.dumps({item: found}, default=str) + '\n')

  for item, function in groups()[name].items.items():
    if only and item not in only:
      continue
    session.NOTES.clear()
    session.NOTES.update(ahead=ahead, tell=functools.partial(tell, item))
    if isinstance(function, functools.partial) and function.func is learn:
      most = function.keywords['limit'] * (15 if TINY else 1)
      function = functools.partial(function, limit=min(most, max(5.0, limit - 15)))
    began = time.perf_counter()
    try:
      found = function()
    except Exception as e:
      tell(item, dict(error=f'{type(e).__name__}: {str(e)[-1_500:]}'))
      continue
    found = {k: v for k, v in found.items() if k != 'origin'} | dict(
      took_s=round(time.perf_counter() - began, 1)
    )
    if run := session.NOTES.get('run'):
      found['program_mib'] = memory_of(run)
      import jax

      if stats := jax.devices()[0].memory_stats():
        found['peak_mib_of_process'] = round(stats['peak_bytes_in_use'] / 2**20)
    if 'jax' in sys.modules:
      import jax

      found['device'] = jax.devices()[0].device_kind
    tell(item, found)
    if run and trace and not ahead:
      try:
        tell(item, found | dict(kernels=looked_into(run)))
      except Exception as e:
        tell(item, found | dict(kernels=dict(error=f'{type(e).__name__}: {str(e)[-800:]}')))
    session.NOTES.pop('run', None)
