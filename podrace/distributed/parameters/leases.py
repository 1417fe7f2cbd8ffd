"""Environments of a run that are lent to acting processes, each for as long as its session lasts."""

from __future__ import annotations

from typing import Any

from podrace.distributed.net.frame import NUMBER, WireError


class Leases:
  """Ranges of environments, none of which overlap.

  Args:
    total: environments of the run, from number 0 on.

  Attributes:
    held: the ranges, by who has them.
  """

  def __init__(self, total: int) -> None:
    self.total = total
    self.held: dict[Any, range] = {}

  def find(self, size: int, wish: int) -> range | None:
    """`size` environments that are free, from number `wish` on if they are; None if there are not so many in a row."""
    taken = sorted(self.held.values(), key=lambda r: r.start)
    starts, stops = [0, *(r.stop for r in taken)], [*(r.start for r in taken), self.total]
    free = [(a, b - size) for a, b in zip(starts, stops, strict=True) if b - a >= size]
    if not free:
      return None
    first = wish if any(a <= wish <= b for a, b in free) else free[0][0]
    return range(first, first + size)

  def lend(self, holder: Any, size: int, wish: int) -> range:
    """As `find`, for `holder`.

    Raises:
      WireError: if there are none; nobody should have asked.
    """
    if (found := self.find(size, wish)) is None:
      raise WireError(f'a hello of {size} environments, of which there are none')
    self.held[holder] = found
    return found

  def give_back(self, holder: Any) -> None:
    """What it had, if it had any."""
    self.held.pop(holder, None)


def asked(details: dict[str, Any]) -> tuple[int, int]:
  """How many environments a HELLO wants, and from which number on if possible; 0: it wants none."""
  size, wish = details.get('environments', 0), details.get('first', 0)
  for name, x in (('environments', size), ('first', wish)):
    if type(x) is not int or not 0 <= x < NUMBER:
      raise WireError(f'a hello with {name} that is no integer from 0 to 2^63 - 1')
  return size, wish
