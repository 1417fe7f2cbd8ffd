"""Rate limiters, which balance inserts into a table against samples from it.

The rules are Reverb's (Cassirer et al. 2021, arXiv 2102.04736, section 3.4). They use lifetime
counts of inserts, samples and deletes. SPI is samples_per_insert.

- n may be sampled if inserts - deletes >= min_size and inserts * SPI - samples - n >= min_diff.
- n may be inserted if inserts + n - deletes <= min_size
  or (inserts + n) * SPI - samples <= max_diff.
"""

from __future__ import annotations

import dataclasses
import math

INFINITY = math.inf


@dataclasses.dataclass
class Counts:
  """Lifetime counts of a table, which checkpoints preserve."""

  inserts: int = 0  # with new keys
  samples: int = 0
  deletes: int = 0  # by key, by the remover, and after max_times_sampled

  @property
  def size(self) -> int:
    """Number of items in the table."""
    return self.inserts - self.deletes


@dataclasses.dataclass(frozen=True)
class RateLimiter:
  """Parameters of the rules. Use the functions below, which also refuse settings that deadlock."""

  name: str  # call that made the limiter, for messages
  samples_per_insert: float
  min_size: int
  min_diff: float
  max_diff: float

  @property
  def numbers(self) -> tuple[float, int, float, float]:
    """Numbers that decide whether two limiters are equal."""
    return self.samples_per_insert, self.min_size, self.min_diff, self.max_diff

  def __post_init__(self) -> None:
    if not 0 < self.samples_per_insert < INFINITY:
      raise ValueError(f'{self.name}: samples_per_insert must be positive and finite')
    if self.min_size < 1:
      raise ValueError(f'{self.name}: min_size is {self.min_size}, must be at least 1')
    if not self.min_diff <= self.max_diff:  # also refuses NaN
      raise ValueError(
        f'{self.name}: the lower bound of the balance, min_diff {self.min_diff:g}, must be at most '
        f'the upper one, max_diff {self.max_diff:g}'
      )
    if self.min_diff > self.samples_per_insert * self.min_size:
      raise ValueError(
        f'{self.name} deadlocks: min_size items allow {self.samples_per_insert * self.min_size:g} '
        f'samples, fewer than the lower bound of the balance, min_diff {self.min_diff:g}: lower '
        'it, or raise min_size'
      )

  def may_sample(self, counts: Counts, n: int = 1) -> bool:
    """Return whether n items may be sampled, by the first rule."""
    balance = counts.inserts * self.samples_per_insert - counts.samples - n
    return counts.size >= self.min_size and balance >= self.min_diff

  def may_insert(self, counts: Counts) -> bool:
    """Return whether one more item may be inserted, by the second rule."""
    if counts.size < self.min_size:
      return True
    return (counts.inserts + 1) * self.samples_per_insert - counts.samples <= self.max_diff

  def samples_allowed(self, counts: Counts, most: int) -> int:
    """Return the largest n <= `most` that may be sampled now, if nothing is deleted in between."""
    if counts.size < self.min_size:
      return 0
    balance = counts.inserts * self.samples_per_insert - counts.samples - self.min_diff
    n = most if balance >= most else max(0, math.floor(balance))
    # `balance` may be rounded differently from the rule, which decides.
    while n and not self.may_sample(counts, n):
      n -= 1
    while n < most and self.may_sample(counts, n + 1):
      n += 1
    return n

  def why_no_sample(self, counts: Counts) -> str:
    """Explain in numbers why the next sample waits, and how the wait can end."""
    reasons = []
    if counts.size < self.min_size:
      reasons.append(
        f'{self.min_size} items are needed and {counts.size} are there '
        f'(insert {self.min_size - counts.size} more)'
      )
    balance = counts.inserts * self.samples_per_insert - counts.samples - 1
    if balance < self.min_diff:
      more = math.ceil((self.min_diff - balance) / self.samples_per_insert)
      reasons.append(
        f'inserts * samples_per_insert - samples would fall to {balance:g}, below '
        f'{self.min_diff:g} (insert {more} more)'
      )
    return self._report(counts, reasons)

  def why_no_insert(self, counts: Counts) -> str:
    """Explain in numbers why the next insert waits, and how the wait can end."""
    reasons = []
    if not self.may_insert(counts):
      balance = (counts.inserts + 1) * self.samples_per_insert - counts.samples
      reasons.append(
        f'inserts * samples_per_insert - samples would rise to {balance:g}, above '
        f'{self.max_diff:g} (sample {math.ceil(balance - self.max_diff)} more)'
      )
    return self._report(counts, reasons)

  def _report(self, counts: Counts, reasons: list[str]) -> str:
    done = f'{counts.inserts} inserts, {counts.samples} samples, {counts.deletes} deletes'
    return f'{self.name} after {done}: ' + ('; '.join(reasons) or 'nothing stands in the way')


def min_size(size: int) -> RateLimiter:
  """Limit sampling to tables with at least `size` items. Set no further bound."""
  return RateLimiter(f'min_size({size})', 1.0, size, -INFINITY, INFINITY)


def sample_to_insert_ratio(
  samples_per_insert: float, min_size: int, error: float | tuple[float, float]
) -> RateLimiter:
  """Hold an average of `samples_per_insert` samples for each item.

  Args:
    samples_per_insert: Target ratio, positive.
    min_size: Number of items before sampling may begin.
    error: Number of samples by which the balance may deviate to either side, or the two bounds
      (min_diff, max_diff).

  Raises:
    ValueError: For settings under which inserts and samples could deadlock.
  """
  name = f'sample_to_insert_ratio({samples_per_insert:g}, min_size={min_size}, error={error})'
  if not 0 < samples_per_insert < INFINITY:
    raise ValueError(f'{name}: samples_per_insert must be positive and finite')
  middle = samples_per_insert * min_size
  low, high = error if isinstance(error, tuple) else (middle - error, middle + error)
  least = max(1.0, samples_per_insert)
  if not high - low >= 2 * least:
    bounds = f'the bounds of error must differ by at least {2 * least:g}, twice'
    wanted = bounds if isinstance(error, tuple) else f'error must be at least {least:g},'
    raise ValueError(f'{name} may deadlock: {wanted} the larger of 1 and samples_per_insert')
  return RateLimiter(name, samples_per_insert, min_size, low, high)


def queue(size: int) -> RateLimiter:
  """Sample each item once, and hold at most `size` items. Use with fifo and max_times_sampled=1."""
  return _each_once(f'queue({size})', size)


def stack(size: int) -> RateLimiter:
  """Sample each item once, as `queue`, for a table with lifo as its sampler and remover."""
  return _each_once(f'stack({size})', size)


def _each_once(name: str, size: int) -> RateLimiter:
  if size < 1:
    raise ValueError(f'{name}: the size must be at least 1')
  return RateLimiter(name, 1.0, 1, 0.0, float(size))
