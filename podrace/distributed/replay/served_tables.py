"""The tables of a replay service by name, their settings, and requests for one table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from podrace import tables
from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener
from podrace.distributed.replay import replay_messages, table_settings
from podrace.distributed.replay.item_schema import ItemSchema, describe_difference
from podrace.distributed.replay.table_settings import CONTENTS, describe_differences
from podrace.tables.chunks import ChunkStore
from podrace.tables.table import Table

TABLES = 1024
NAME_CHARACTERS = 200  # of a table's name
SETTINGS_BYTES = 2**26  # of all tables' settings, as JSON
SIZES = 256  # tables of which the size is sent to clients


class ServedTable:
  """A table, its settings, and the schema of its items if the settings have one."""

  def __init__(self, table: Table, settings: dict[str, Any]) -> None:
    self.table, self.name, self.settings = table, table.name, settings
    self.schema: ItemSchema | None = None

  def apply_schema(self) -> None:
    """Make the table take only the items that its settings describe, if they do."""
    if CONTENTS in self.settings:
      self.schema = ItemSchema(self.settings[CONTENTS])
      contents = self.table.contents
      contents.signature = contents.signature or self.schema.signature

  def merge_settings(self, requested: dict[str, Any]) -> list[str]:
    """Compare settings with a client's, and take over its schema if there was none.

    Returns:
      A line for each setting that differs.
    """
    current, columns = self.settings, requested.get(CONTENTS)
    reasons = describe_differences(self.name, current, requested)
    if columns is None or reasons or columns == current.get(CONTENTS):
      return reasons
    signature, expected = self.table.contents.signature, ItemSchema(columns).signature
    if CONTENTS in current:
      return [f'table {self.name!r}: {describe_difference(current[CONTENTS], columns)}']
    if signature is not None and signature.leaves != expected.leaves:
      return [
        f'table {self.name!r} has items of other columns than the contents that are asked for'
      ]
    self.settings = {**current, CONTENTS: columns}
    self.apply_schema()
    return []


class ServedTables:
  """The tables of a replay service.

  Attributes:
    store: of all tables' chunks.
    by_name: the tables.
    touched: tables at which a waiting request may go on.
  """

  def __init__(self, store: ChunkStore, listener: Listener) -> None:
    self.store, self._listener = store, listener
    self.by_name: dict[str, ServedTable] = {}
    self.touched: set[ServedTable] = set()
    self._settings_bytes = 0  # that clients have sent

  def make(self, name: str, settings: dict[str, Any]) -> None:
    """Make a new table. Raise ValueError for a name or settings that are not valid."""
    if not 0 < len(name) <= NAME_CHARACTERS:
      raise ValueError(
        f"a table's name has 1 to {NAME_CHARACTERS} characters, not the {len(name)} of "
        f'{name[:60]!r}'
      )
    if CONTENTS in settings:
      ItemSchema(settings[CONTENTS])  # raises before anything is made
    self.by_name[name] = ServedTable(
      table_settings.make_table(name, self.store, settings), settings
    )
    self.by_name[name].apply_schema()

  def restore(self, path: Path, settings: dict[str, dict[str, Any]]) -> None:
    """Restore the tables of a checkpoint, which were saved with these settings by name.

    Raises:
      CheckpointError: it is damaged, or a table exists already with other settings.
    """
    for name, details in settings.items():
      if name not in self.by_name:
        self.make(name, details)
      elif reasons := describe_differences(name, details, self.by_name[name].settings):
        raise tables.CheckpointError(
          f'checkpoint {path} has other settings than --table: ' + '; '.join(reasons)
        )
      else:
        self.by_name[name].settings = details  # which have the run, too
    for name in self.by_name.keys() - settings.keys():
      raise tables.CheckpointError(
        f'checkpoint {path} has tables {sorted(settings)}, and no {name!r}: '
        'clients can have new tables made, --table only those of the checkpoint'
      )
    tables.restore(self.store, path)
    for served in self.by_name.values():
      served.apply_schema()

  def sizes(self) -> dict[str, int]:
    """Return items by table, for clients that sample from shards in proportion."""
    return {t.name: len(t.table) for t in itertools.islice(self.by_name.values(), SIZES)}

  # --- requests of clients: a ValueError is the answer

  def open(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a table's settings and largest priority. Make the table if it does not exist."""
    if name not in self.by_name and settings:
      if len(self.by_name) >= TABLES:
        raise ValueError(f'table {name[:60]!r}: there are {TABLES} tables already')
      text = self._encode_settings(name, settings)
      self.make(name, settings)
      self._settings_bytes += len(text)
      self._listener.log(f'made table {name!r}: {text}')
    served = self._find(name, '. Give settings, with which it would be made')
    if CONTENTS in settings and CONTENTS not in served.settings:
      text, before = self._encode_settings(name, settings), served.settings
      reasons = served.merge_settings(settings)
      self._settings_bytes += len(text) * (served.settings is not before)
    else:
      reasons = served.merge_settings(settings) if settings else []
    if reasons:
      self._listener.log('\n  '.join(['refused:', *reasons]), logging.WARNING)
      raise ValueError('\n  '.join(['the server refused:', *reasons]))
    contents = served.table.contents
    return dict(settings=served.settings, most=min(contents.sampler.most, contents.remover.most))

  def _encode_settings(self, name: str, settings: dict[str, Any]) -> str:
    """Return a client's settings as JSON; raise ValueError if all settings become too large."""
    # Values that JSON lacks are refused by name when the table is made.
    text = json.dumps(settings, default=repr)
    if self._settings_bytes + len(text) > SETTINGS_BYTES:
      raise ValueError(
        f'table {name!r}: settings of {len(text):,} bytes, where those of all tables may have '
        f'{SETTINGS_BYTES:,} and have {self._settings_bytes:,}'
      )
    return text

  def _find(self, name: str, hint: str = '') -> ServedTable:
    if name not in self.by_name:
      where = self._listener.address
      raise ValueError(f'{where} has no table {name!r}; it has {sorted(self.by_name)}{hint}')
    return self.by_name[name]

  def update_priorities(self, name: str, keys: memoryview, priorities: memoryview) -> int:
    """Set priorities by key; return how many keys were in the table."""
    known = _read_keys(keys)
    self._listener.counts['updated'] += len(known)
    values = replay_messages.read_records(priorities, '<f8')
    return self._find(name).table.update_priorities(known, values)

  def delete(self, name: str, keys: memoryview) -> int:
    """Remove items by key; return how many keys were in the table."""
    served = self._find(name)
    self.touched.add(served)
    return served.table.delete(_read_keys(keys))

  def info(self, name: str) -> dict[str, Any]:
    """Return the statistics of a table, and why its samples and inserts wait."""
    table = self._find(name).table
    return dict(
      dataclasses.asdict(table.info()),
      why_no_sample=table.reads.why_not(),
      why_no_insert=table.inserts.why_not(),
    )


def _read_keys(array: memoryview) -> np.ndarray:
  keys = replay_messages.read_records(array, '<i8')
  if len(keys) > replay_messages.MESSAGE_KEYS:
    raise WireError(f'{len(keys)} keys in a message, at most {replay_messages.MESSAGE_KEYS}')
  return keys
