"""The tables of a replay service by name, with their settings, and what clients ask of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrace import tables
from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.item_schema import Contents, difference
from podrace.distributed.replay.waiting import RequestQueue
from podrace.tables.blocking import Pending
from podrace.tables.chunks import Account, ChunkStore
from podrace.tables.table import Table

if TYPE_CHECKING:
  from podrace.distributed.replay.streams import Stream

TABLES = 1024
SETTINGS_BYTES = 2**26  # of all tables' settings, as JSON


class Entry:
  """A table, its settings, and what waits for it."""

  def __init__(self, table: Table, settings: dict[str, Any]) -> None:
    self.table, self.name, self.settings = table, table.name, settings
    self.contents: Contents | None = None  # what its items must hold, if its settings say so
    self.held: collections.deque[tuple[Pending, Stream, int]] = collections.deque()
    self.held_parts = 0  # of those: rows of a column, and references to chunks
    self.account = Account()  # of the chunks of those
    # A peek does not wait for the limiter, nor for samples that do.
    self.readers, self.peekers = RequestQueue(), RequestQueue()

  def expect(self) -> None:
    """Has the table take such items only as its settings say, if they do."""
    if replay_messages.CONTENTS in self.settings:
      self.contents = Contents(self.settings[replay_messages.CONTENTS])
      table = self.table.contents
      table.signature = table.signature or self.contents.signature

  def differences(self, asked: dict[str, Any]) -> list[str]:
    """A line for each setting that is another one; contents are taken over where there were none."""
    there, columns = self.settings, asked.get(replay_messages.CONTENTS)
    reasons = replay_messages.settings_differences(self.name, there, asked)
    if columns is None or reasons or columns == there.get(replay_messages.CONTENTS):
      return reasons
    signature, wanted = self.table.contents.signature, Contents(columns).signature
    if replay_messages.CONTENTS in there:
      return [f'table {self.name!r}: {difference(there[replay_messages.CONTENTS], columns)}']
    if signature is not None and signature.leaves != wanted.leaves:
      return [
        f'table {self.name!r} has items of other columns than the contents that are asked for'
      ]
    self.settings = {**there, replay_messages.CONTENTS: columns}
    self.expect()
    return []


class Registry:
  """All tables."""

  def __init__(self, store: ChunkStore, listener: Listener) -> None:
    self.store, self._listener = store, listener
    self.entries: dict[str, Entry] = {}  # by name
    self.touched: set[Entry] = set()  # at which somebody who waits may go on
    self._settings_bytes = 0  # that clients have sent

  def make(self, name: str, settings: dict[str, Any]) -> None:
    """A new table.

    Raises:
      ValueError: if there can't be such a table.
    """
    if replay_messages.CONTENTS in settings:
      Contents(settings[replay_messages.CONTENTS])  # which can raise, before anything is made
    self.entries[name] = Entry(replay_messages.make_table(name, self.store, settings), settings)
    self.entries[name].expect()

  def restore(self, path: Path, settings: dict[str, dict[str, Any]]) -> None:
    """A checkpoint's tables, which had these settings.

    Raises:
      CheckpointError: if it is damaged, or a table that is there had other settings.
    """
    for name, details in settings.items():
      if name not in self.entries:
        self.make(name, details)
      elif reasons := replay_messages.settings_differences(
        name, details, self.entries[name].settings
      ):
        raise tables.CheckpointError(
          f'checkpoint {path} has other settings than --table: ' + '; '.join(reasons)
        )
      else:
        self.entries[name].settings = details  # of the run, too
    for name in self.entries.keys() - settings.keys():
      raise tables.CheckpointError(
        f'checkpoint {path} has tables {sorted(settings)}, and no {name!r}: '
        'clients can have new tables made, --table only those of the checkpoint'
      )
    tables.restore(self.store, path)
    for entry in self.entries.values():
      entry.expect()

  def sizes(self) -> dict[str, int]:
    """Of tables, so that clients of several servers can sample in proportion."""
    return {e.name: len(e.table) for e in itertools.islice(self.entries.values(), 256)}

  # --- what clients ask; each raises ValueError for an answer that is a refusal

  def table(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a table, which is made if there is none, and the largest priority."""
    if name not in self.entries and settings:
      if len(self.entries) >= TABLES or not 0 < len(name) <= 200:
        raise ValueError(f'{name!r} is no name for a table, or there are {TABLES} already')
      text = self._read_settings(name, settings)
      self.make(name, settings)
      self._settings_bytes += len(text)
      self._listener.log(f'made table {name!r}: {text}')
    entry = self._named(name, '. Give settings, with which it would be made')
    if replay_messages.CONTENTS in settings and replay_messages.CONTENTS not in entry.settings:
      text, before = self._read_settings(name, settings), entry.settings
      reasons = entry.differences(settings)
      self._settings_bytes += len(text) * (entry.settings is not before)
    else:
      reasons = entry.differences(settings) if settings else []
    if reasons:
      self._listener.log('\n  '.join(['refused:', *reasons]), logging.WARNING)
      raise ValueError('\n  '.join(['the server refused:', *reasons]))
    contents = entry.table.contents
    return dict(settings=entry.settings, most=min(contents.sampler.most, contents.remover.most))

  def _read_settings(self, name: str, settings: dict[str, Any]) -> str:
    """A client's settings as JSON; raises ValueError if there is no room for them."""
    text = json.dumps(
      settings, default=repr
    )  # what JSON lacks is refused by name when the table is made
    if self._settings_bytes + len(text) > SETTINGS_BYTES:
      raise ValueError(
        f'table {name!r}: settings of {len(text):,} bytes, where those of all tables may have {SETTINGS_BYTES:,} and '
        f'have {self._settings_bytes:,}'
      )
    return text

  def _named(self, name: str, more: str = '') -> Entry:
    if name not in self.entries:
      where = self._listener.address
      raise ValueError(f'{where} has no table {name!r}; it has {sorted(self.entries)}{more}')
    return self.entries[name]

  def update(self, name: str, keys: memoryview, priorities: memoryview) -> int:
    """Sets priorities by key; how many keys were there."""
    found = _keys(keys)
    self._listener.counts['updated'] += len(found)
    values = replay_messages.records(priorities, '<f8')
    return self._named(name).table.update_priorities(found, values)

  def delete(self, name: str, keys: memoryview) -> int:
    """Removes items by key; how many keys were there."""
    entry = self._named(name)
    self.touched.add(entry)
    return entry.table.delete(_keys(keys))

  def info(self, name: str) -> dict[str, Any]:
    """How a table does."""
    table = self._named(name).table
    return dict(
      dataclasses.asdict(table.info()),
      why_no_sample=table.reads.why_not(),
      why_no_insert=table.inserts.why_not(),
    )


def _keys(array: memoryview) -> np.ndarray:
  keys = replay_messages.records(array, '<i8')
  if len(keys) > replay_messages.MESSAGE_KEYS:
    raise WireError(f'{len(keys)} keys in a message, at most {replay_messages.MESSAGE_KEYS}')
  return keys
