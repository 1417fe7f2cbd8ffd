"""Sampling of items from a table, immediately or when its limiter permits."""

from __future__ import annotations

from podrace.tables.blocking import Desk, Interrupted, Wait, deadline_of
from podrace.tables.contents import Contents
from podrace.tables.inserts import Inserts
from podrace.tables.items import Draws, Samples
from podrace.tables.limiters import RateLimiter


class Reads:
  """Queue of samplers, which wait until the limiter permits their samples."""

  def __init__(
    self, contents: Contents, limiter: RateLimiter, desk: Desk, inserts: Inserts
  ) -> None:
    self._contents, self._limiter, self._desk, self._inserts = contents, limiter, desk, inserts
    self._cancels = 0  # number of cancellations

  def sample(self, n: int, least: int, timeout: float | None, peek: bool) -> Samples:
    """Sample between `least` and `n` items, as Table.sample."""
    if not 1 <= least <= n:
      name = self._contents.name
      raise ValueError(f'table {name!r}: at_least={least} of {n=}, expected 1 <= at_least <= n')
    draws = Draws([], [])
    try:
      self._take(draws, n, least, deadline_of(timeout), peek)
    except Interrupted as e:
      if draws.items:
        e.taken = self._read(draws)
      raise
    return self._read(draws)

  def _read(self, draws: Draws) -> Samples:
    signature = self._contents.signature or draws.items[0].signature
    return draws.read(self._contents.store, signature.structure)

  def _take(self, draws: Draws, n: int, least: int, deadline: float, peek: bool) -> None:
    with self._desk.sampling:
      wait = None
      while True:
        self._draw_now(draws, n, peek)
        if len(draws.items) >= least:
          return
        wait = wait or Wait(deadline, lambda: self._cancels)
        self._desk.wait_more(1, peek)
        try:
          wait.on(self._desk, self._desk.readable, 'sample from', lambda: self.why_not(peek))
        finally:
          self._desk.wait_more(-1, peek)

  def draw(self, draws: Draws, n: int, peek: bool) -> None:
    """Draw items until `draws` has n, as far as the limiter permits now. Never wait.

    Raises:
      Closed: If the table is closed.
    """
    with self._desk.sampling:
      self._draw_now(draws, n, peek)

  def _draw_now(self, draws: Draws, n: int, peek: bool) -> None:
    self._desk.check_open()
    if peek:
      if self._contents.slots:
        self._contents.peek(draws, n - len(draws.items))
      return
    while self._draw(draws, n - len(draws.items)) and self._desk.inserts:
      self._inserts.admit()  # newly admitted items may be sampled at once

  def _draw(self, draws: Draws, most: int) -> int:
    """Draw up to `most` items, as far as the limiter permits now, and return their number."""
    contents, limiter = self._contents, self._limiter
    if contents.max_times_sampled:
      n = 0
      while n < most and limiter.may_sample(contents.counts):
        contents.draw(draws, 1)
        n += 1
    else:
      n = limiter.samples_allowed(contents.counts, most)
      if n:
        contents.draw(draws, n)
    return n

  def wait_more(self, more: int, peek: bool) -> None:
    """Add `more` to the number of waiting samplers, which use `draw`. It may be negative."""
    with self._desk.running:
      self._desk.wait_more(more, peek)

  def cancel(self) -> None:
    """Cancel every waiting call. Requires the lock."""
    self._cancels += 1
    self._desk.readable.notify_all()

  def why_not(self, peek: bool = False) -> str:
    """Explain why a sampler waits, or a call with `peek`."""
    contents, more = self._contents, f'{len(self._desk.inserts)} inserts wait as well'
    if peek:
      return f'there is no item; {more}'
    why = self._limiter.why_no_sample(contents.counts)
    if contents.max_bytes is not None and contents.account.bytes > 0.9 * contents.max_bytes:
      why += f'; {contents.account.bytes} of {contents.max_bytes} bytes are used, which may be why'
    return f'{why}; {more}'
