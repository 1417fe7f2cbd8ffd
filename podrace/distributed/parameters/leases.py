"""Leases: environments of a run that acting processes have for as long as their sessions last."""

from __future__ import annotations

from typing import Any

from podrace.distributed.net.frame import NUMBER, WireError


class Leases:
  """Ranges of environments that do not overlap.

  Args:
    total: environments of the run, from number 0 on.

  Attributes:
    held: the range of each holder.
  """

  def __init__(self, total: int) -> None:
    self.total = total
    self.held: dict[Any, range] = {}

  def find(self, size: int, wish: int) -> range | None:
    """Return `size` free environments in a row, at `wish` if they are free, or None."""
    taken = sorted(self.held.values(), key=lambda r: r.start)
    starts, stops = [0, *(r.stop for r in taken)], [*(r.start for r in taken), self.total]
    free = [(a, b - size) for a, b in zip(starts, stops, strict=True) if b - a >= size]
    if not free:
      return None
    first = wish if any(a <= wish <= b for a, b in free) else free[0][0]
    return range(first, first + size)

  def lend(self, holder: Any, size: int, wish: int) -> range:
    """Lease the environments that `find` returns. Raise WireError if there are none."""
    if (lease := self.find(size, wish)) is None:
      raise WireError(f'a hello of {size} environments, of which there are none')
    self.held[holder] = lease
    return lease

  def give_back(self, holder: Any) -> None:
    """End the lease of a holder, if it has one."""
    self.held.pop(holder, None)


def read_request(details: dict[str, Any]) -> tuple[int, int]:
  """Return the number of environments that a HELLO requests (0: none), and its preferred first."""
  size, wish = details.get('environments', 0), details.get('first', 0)
  for name, x in (('environments', size), ('first', wish)):
    if type(x) is not int or not 0 <= x < NUMBER:
      raise WireError(f'a hello with {name} that is no integer from 0 to 2^63 - 1')
  return size, wish
