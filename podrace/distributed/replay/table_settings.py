"""The settings of a served table, as msgpack and JSON have them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from podrace import tables
from podrace.distributed.net.frame import NUMBER
from podrace.tables.chunks import ChunkStore
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector

MOST_NUMBER = 1e15  # among the finite numbers of a rate limiter

RUN = 'run'  # the setting with the name of the only run that may use the table
CONTENTS = 'contents'  # the setting with the columns of `item_schema`
_SELECTORS = 'uniform', 'fifo', 'lifo', 'min_heap', 'max_heap', 'prioritized'


def parse_selector(text: str) -> Selector:
  """Return the selector of a name such as fifo, prioritized:0.6 or prioritized(0.6).

  Raises:
    ValueError: there is no such selector.
  """
  match = re.fullmatch(r'(\w+)(?::([^()]+)|\(([^()]+)\))?', text)
  name, number = (match[1], match[2] or match[3]) if match else ('', None)
  if name not in _SELECTORS or (number is None) == (name == 'prioritized'):
    raise ValueError(
      f'a selector is {", ".join(_SELECTORS[:-1])} or prioritized:EXPONENT, not {text!r}'
    )
  return getattr(tables, name)(*([float(number)] if number else []))


def pack_settings(
  *,
  sampler: Selector,
  remover: Selector,
  rate_limiter: RateLimiter,
  max_size: int,
  max_bytes: int | None = None,
  max_times_sampled: int = 0,
  run: str = '',
  contents: list[Any] | None = None,
) -> dict[str, Any]:
  """Return settings by name. `run` and `contents` are left out if they are empty."""
  details = dict(
    sampler=sampler.name,
    remover=remover.name,
    rate_limiter=[rate_limiter.name, *map(float, rate_limiter.numbers)],
    max_size=_plain(max_size),
    max_bytes=_plain(max_bytes),
    max_times_sampled=_plain(max_times_sampled),
  )
  return details | ({RUN: run} if run else {}) | ({CONTENTS: contents} if contents else {})


def _plain(x: Any) -> Any:
  return x.item() if isinstance(x, np.generic) else x


def make_table(name: str, store: ChunkStore, details: Any) -> tables.Table:
  """Make a table with the settings of `pack_settings`; raise ValueError if they are not valid."""
  try:
    limiter = _read_limiter(*details['rate_limiter'])
    sampler, remover = parse_selector(details['sampler']), parse_selector(details['remover'])
    sizes = {k: details[k] for k in ('max_size', 'max_bytes', 'max_times_sampled')}
  except (KeyError, TypeError) as e:
    raise ValueError(f'table {name!r}: settings without {e}') from None
  if more := details.keys() - sizes.keys() - {'rate_limiter', 'sampler', 'remover', RUN, CONTENTS}:
    raise ValueError(f'table {name!r}: settings {sorted(map(str, more))}, which there are not')
  if RUN in details and not (type(details[RUN]) is str and 0 < len(details[RUN]) <= 200):
    raise ValueError(f'table {name!r}: a run that is not a name of at most 200 characters')
  for k, v in sizes.items():
    if not (type(v) is int and v < NUMBER) and not (k == 'max_bytes' and v is None):
      raise ValueError(f'table {name!r}: {k}={v!r} must be a whole number below 2^63')
  return tables.Table(name, store, sampler=sampler, remover=remover, rate_limiter=limiter, **sizes)


def _read_limiter(name: Any, spi: Any, least: Any, low: Any, high: Any) -> RateLimiter:
  """Return a rate limiter; raise ValueError for numbers with which it could overflow."""
  if type(name) is not str or len(name) > 200:
    raise ValueError('a rate limiter without a name of at most 200 characters')
  if any(type(x) not in (int, float) for x in (spi, least, low, high)):
    raise ValueError(f'{name}: {[spi, least, low, high]}, expected four numbers')
  if not 1 / MOST_NUMBER <= spi <= MOST_NUMBER:
    raise ValueError(f'{name}: samples_per_insert must be positive and finite, not {spi}')
  if not 1 <= least <= MOST_NUMBER or least != int(least):
    raise ValueError(f'{name}: min_size must be a whole number of at least 1, not {least}')
  for which, bound, unlimited in (('min', low, -math.inf), ('max', high, math.inf)):
    if not (bound == unlimited or abs(bound) <= MOST_NUMBER):
      raise ValueError(
        f'{name}: {which}_diff must be {unlimited} or at most {MOST_NUMBER:g}, not {bound}'
      )
  return RateLimiter(name, float(spi), int(least), float(low), float(high))


def describe_differences(
  name: str, current: dict[str, Any], requested: dict[str, Any]
) -> list[str]:
  """Return a line for each setting that differs, or one line if the table is of another run."""
  if RUN in requested and requested[RUN] != current.get(RUN):
    return [
      f'table {name!r} is of {_name_run(current.get(RUN))}, {_name_run(requested[RUN])} asks for '
      'it: each run needs a `podrace replay` of its own, with another --listen and --dir; or end '
      'all processes of the other run, and start this `podrace replay` anew, with another --dir '
      'or none'
    ]
  return [
    f'table {name!r}: {k} is {current[k]} at the server, {requested.get(k)} is asked for'
    for k in current
    if k not in (RUN, CONTENTS) and _comparable(k, current[k]) != _comparable(k, requested.get(k))
  ]


def _name_run(name: Any) -> str:
  return 'no run' if name is None else f'run {name!r}'


def _comparable(setting: str, value: Any) -> Any:
  """Return the part of a setting that must be equal. The name of a limiter is for display only."""
  return value[1:] if setting == 'rate_limiter' and isinstance(value, list) else value
