"""The items that come to a table: at once, or when its limiter permits."""

from __future__ import annotations

from collections.abc import Sequence

from podrace.tables.blocking import Closed, Desk, InFlight, Pending, Wait
from podrace.tables.chunks import Account
from podrace.tables.contents import Contents
from podrace.tables.items import NEW, Item
from podrace.tables.limiters import RateLimiter


class Inserts:
  """Where items come in: those that the limiter holds back wait in their order."""

  def __init__(self, contents: Contents, limiter: RateLimiter, desk: Desk) -> None:
    self._contents, self._limiter, self._desk = contents, limiter, desk
    self._account = Account()  # of items that wait

  def submit(self, item: Item, writer: InFlight) -> Pending | None:
    """Inserts an item now, or leaves it waiting for the limiter and says so.

    An item whose key is known replaces the one of that key: its data and its priority, not its place
    in the order nor its times sampled. That is no insert for the limiter, and never waits. One that amends
    replaces only the rows of its columns; it is dropped if the key is not there.

    Raises:
      ValueError: if it isn't like the table's other items, or can't fit into max_bytes.
      Closed: if the table is.
    """
    with self._desk.inserting:
      return self._submit(item, writer)

  def submit_all(
    self, items: Sequence[Item], writer: InFlight
  ) -> list[Pending | ValueError | None]:
    """What `submit` returns, or the ValueError that it raises, for each of the items."""
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
        self.admit()  # as below
      return None
    if item.key == NEW:
      item.key = store.next_key
    if item.key >= store.next_key:
      store.next_key = item.key + 1
    if item.key in contents.slots:
      contents.replace(item)
      self.admit()  # max_bytes may have made it delete others
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
    """Whatever may now go on, does: waiting items in their order, then samplers."""
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
    """Returns when an item waits no longer, or at most so many of its writer's, or one was refused.

    Raises:
      RateLimited: if the deadline has passed.
      Cancelled: if a table on which one of the writer's items waits was cancelled.
    """
    writer = pending.writer
    with self._desk.inserting:
      while not pending.done and len(writer.waiting) > most and not writer.refusals:
        wait.on(self._desk, writer.fewer, 'insert into', self.why_not)

  def withdraw(self, pending: Pending) -> bool:
    """Takes back an item that still waits; False if it has been inserted."""
    with self._desk.inserting:
      if pending.done:
        return False
      self._desk.inserts.remove(pending)
      self._finish(pending)
      self.admit()  # the one behind it may be a replacement
      return True

  def refuse_all(self, error: Closed) -> None:
    """Drops the items that wait, and lets the writer of each know; under the lock."""
    while self._desk.inserts:
      pending = self._desk.inserts.popleft()
      self._finish(pending)
      pending.writer.refuse(error)

  def cancel(self) -> None:
    """Every call that waits for one of the items raises Cancelled; under the lock."""
    for writer in {pending.writer for pending in self._desk.inserts}:
      writer.cancels += 1
      writer.fewer.notify_all()

  def why_not(self) -> str:
    """What keeps an item waiting."""
    why = self._limiter.why_no_insert(self._contents.counts)
    return f'{why}; {len(self._desk.inserts)} inserts and {self._desk.samplers} samplers wait'

  def _finish(self, pending: Pending) -> None:
    pending.finish()
    self._contents.drop(pending.item, self._account)
