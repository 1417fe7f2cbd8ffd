"""Insertion of items into a table, immediately or when its limiter permits."""

from __future__ import annotations

from collections.abc import Sequence

from podrace.tables.blocking import Closed, Desk, InFlight, Pending, Wait
from podrace.tables.chunks import Account
from podrace.tables.contents import Contents
from podrace.tables.items import NEW, Item
from podrace.tables.limiters import RateLimiter


class Inserts:
  """Queue of inserts. Items that the limiter holds back wait in order."""

  def __init__(self, contents: Contents, limiter: RateLimiter, desk: Desk) -> None:
    self._contents, self._limiter, self._desk = contents, limiter, desk
    self._account = Account()  # of the waiting items

  def submit(self, item: Item, writer: InFlight) -> Pending | None:
    """Insert an item, or queue it if the limiter holds it back.

    An item with a known key replaces the item of that key. Its data and priority change; its place
    in the order and its times sampled stay. A replacement is no insert for the limiter and never
    waits. An item that amends replaces only the rows of its columns, and is dropped if its key is
    absent.

    Returns:
      The queued item, or None if nothing waits.

    Raises:
      ValueError: If the item doesn't match the table's items or doesn't fit into max_bytes.
      Closed: If the table is closed.
    """
    with self._desk.inserting:
      return self._submit(item, writer)

  def submit_all(
    self, items: Sequence[Item], writer: InFlight
  ) -> list[Pending | ValueError | None]:
    """Submit many items.

    Returns:
      For each item the result of `submit`, or the ValueError that it raised.

    Raises:
      Closed: If the table is closed.
    """
    found: list[Pending | ValueError | None] = []
    with self._desk.inserting:
      for item in items:
        try:
          self._contents.check_priority(item.priority)
          found.append(self._submit(item, writer))
        except ValueError as e:
          found.append(e)
    return found

  def _submit(self, item: Item, writer: InFlight) -> Pending | None:
    contents, store = self._contents, self._contents.store
    self._desk.check_open()
    contents.check(item)
    if item.amends:
      if item.key in contents.slots:
        contents.amend(item)
        self.admit()  # max_bytes may have removed items
      return None
    if item.key == NEW:
      item.key = store.next_key
    if item.key >= store.next_key:
      store.next_key = item.key + 1
    if item.key in contents.slots:
      contents.replace(item)
      self.admit()  # max_bytes may have removed items
    elif self._limiter.may_insert(contents.counts):
      contents.insert(item)
      if self._desk.samplers:
        self.admit()
    else:
      pending = Pending(item, self, writer)
      contents.hold(item, self._account)
      self._desk.inserts.append(pending)
      return pending
    return None

  def admit(self) -> None:
    """Let waiting calls proceed where the limiter permits: items in order, then samplers."""
    contents, desk = self._contents, self._desk
    while desk.inserts:
      item = desk.inserts[0].item
      if item.key in contents.slots:
        contents.replace(item)
      elif self._limiter.may_insert(contents.counts):
        contents.insert(item)
      else:
        break
      self._finish(desk.inserts.popleft())
    if desk.samplers and (
      self._limiter.may_sample(contents.counts) or (desk.peekers and contents.slots)
    ):
      desk.readable.notify_all()

  def wait_for(self, pending: Pending, most: int, wait: Wait) -> None:
    """Wait for an item to be finished.

    Also return if at most `most` of its writer's items wait, or if one of them was refused.

    Raises:
      RateLimited: If the deadline has passed.
      Cancelled: If a table on which one of the writer's items waits was cancelled.
    """
    writer = pending.writer
    with self._desk.inserting:
      while not pending.done and len(writer.waiting) > most and not writer.refusals:
        wait.on(self._desk, writer.fewer, 'insert into', self.why_not)

  def withdraw(self, pending: Pending) -> bool:
    """Withdraw a waiting item. Return False if it has been inserted already."""
    with self._desk.inserting:
      if pending.done:
        return False
      self._desk.inserts.remove(pending)
      self._finish(pending)
      self.admit()  # the next item may be a replacement
      return True

  def refuse_all(self, error: Closed) -> None:
    """Drop the waiting items and queue `error` for each of their writers. Requires the lock."""
    while self._desk.inserts:
      pending = self._desk.inserts.popleft()
      self._finish(pending)
      pending.writer.refuse(error)

  def cancel(self) -> None:
    """Cancel every call that waits for one of the items. Requires the lock."""
    for writer in {pending.writer for pending in self._desk.inserts}:
      writer.cancels += 1
      writer.fewer.notify_all()

  def why_not(self) -> str:
    """Explain why the oldest item waits."""
    why = self._limiter.why_no_insert(self._contents.counts)
    return f'{why}; {len(self._desk.inserts)} inserts and {self._desk.samplers} samplers wait'

  def _finish(self, pending: Pending) -> None:
    pending.finish()
    self._contents.drop(pending.item, self._account)
