"""Schemas: the columns that the items of a table must have. The service checks each insert.

Without a schema one client could end a learner with a NaN, or with windows of another length.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from podrace.distributed.net.frame import WireError
from podrace.distributed.replay import replay_messages
from podrace.tables import trees
from podrace.tables.chunks import PACKED, Chunk, unpack, unpack_into
from podrace.tables.items import Item, Leaf, Samples, Signature

LARGEST = sys.float_info.max
FINITE = (-LARGEST, LARGEST)
NO_NAN = (-np.inf, np.inf)
CHUNK_BYTES = 2**20  # unpacked, of a chunk of more than one row; `podrace` cuts chunks at 2^18


def pack_column(
  name: str,
  dtype: Any,
  shape: Sequence[int],
  rows: int | None = None,
  bounds: tuple[Any, Any] | None = None,
) -> list[Any]:
  """Describe one column of an item as JSON, for the setting `contents` of a table.

  Args:
    name: of the column.
    dtype: of its values.
    shape: of one row.
    rows: number of rows over time, or None for a single row without a time axis.
    bounds: inclusive lower and upper limit: numbers, or arrays that broadcast to a row. NaN is out
      of bounds. By default floats may be anything but NaN.
  """
  dtype = np.dtype(dtype)
  if bounds is None and dtype.kind == 'f':
    bounds = NO_NAN
  low, high = (np.asarray(x, np.float64).tolist() for x in bounds) if bounds else (None, None)
  return [name, dtype.str, list(shape), rows is None, 1 if rows is None else rows, low, high]


class SchemaColumn(NamedTuple):
  """One leaf of an item, its number of rows, and the limits of its values, if it has any."""

  leaf: Leaf
  rows: int
  low: np.ndarray | None
  high: np.ndarray | None

  def is_violated(self, x: np.ndarray) -> bool:
    """Return whether a value of rows [n, ...] is out of bounds."""
    if self.low is None or self.high is None:
      return False
    if x.dtype.kind == 'f' and self.low.ndim == self.high.ndim == 0:
      low, high = float(self.low), float(self.high)
      if (low, high) == FINITE:
        return not np.isfinite(x).all()
      if (low, high) == NO_NAN:
        return bool(np.isnan(x).any())
      # Written so that a NaN is out of bounds.
      return bool(x.size) and not (float(x.min()) >= low and float(x.max()) <= high)
    return not ((x >= self.low) & (x <= self.high)).all()


class ItemSchema:
  """The columns of a table's items.

  Args:
    columns: descriptions by `pack_column`, in the order in which writers name the columns.

  Attributes:
    signature: of every item.
    unpacked: bytes that `check` has unpacked since the schema was made.

  Raises:
    ValueError: these are no descriptions of columns.
  """

  def __init__(self, columns: Any) -> None:
    try:
      self.columns = tuple(_read_column(*column) for column in columns)
      leaves = tuple(c.leaf for c in self.columns)
      names = tuple(leaf.name for leaf in leaves)
      if not 1 <= len(set(names)) == len(names) <= replay_messages.LEAVES:
        raise ValueError(
          f'{len(names)} columns, expected 1 to {replay_messages.LEAVES} with different names'
        )
    except (TypeError, WireError) as e:
      raise ValueError(f'contents that are no columns: {e}') from None
    self.signature = Signature(('dict', names, (trees.LEAF,) * len(names)), leaves)
    self._by_leaf = {column.leaf: column for column in self.columns}
    self.unpacked = 0

  def check(self, item: Item) -> None:
    """Raise ValueError if the rows or values of an item do not fit its columns.

    An item of other columns passes: the table refuses it.
    """
    if item.amends:
      columns = [self._by_leaf.get(leaf) for leaf in item.signature.leaves]
    else:
      columns = list(self.columns) if item.signature.leaves == self.signature.leaves else [None]
    if None in columns:
      return
    for column, (chunks, _, rows) in zip(columns, item.parts, strict=True):
      assert column is not None
      if rows != column.rows or len(chunks) > rows:
        raise ValueError(
          f'{rows} rows in {len(chunks)} chunks of {column.leaf}, expected {column.rows} rows'
        )
      for chunk in chunks:
        if chunk.passed is not column:
          self._check_chunk(column, chunk)

  def check_samples(self, samples: Samples, signature: Signature) -> None:
    """Raise WireError if the columns or numbers of rows of samples differ from the schema."""
    if signature.leaves != self.signature.leaves or not isinstance(samples.data, dict):
      raise WireError(
        f'samples of ({", ".join(str(leaf)[:100] for leaf in signature.leaves[:8])}), expected '
        f'({", ".join(str(column.leaf)[:100] for column in self.columns[:8])})'
      )
    for column in self.columns:
      lengths = samples.lengths[column.leaf.name]
      if (lengths != column.rows).any():
        raise WireError(
          f'{int(lengths[lengths != column.rows][0])} rows of {column.leaf}, expected {column.rows}'
        )

  def _check_chunk(self, column: SchemaColumn, chunk: Chunk) -> None:
    size = chunk.length * replay_messages.row_bytes(chunk.dtype, chunk.shape)
    if size > CHUNK_BYTES and chunk.length > 1:
      raise ValueError(
        f'a chunk of {chunk.length} rows of {column.leaf} takes {size:,} bytes unpacked, at most '
        f'{CHUNK_BYTES:,} if it has more than one row'
      )
    array = chunk.array
    if array is None:
      array = self._unpack(column, chunk)
    if column.is_violated(array[: chunk.length]):
      value, bounds = _first_violation(column, array), _describe_bounds(column)
      raise ValueError(f'{column.leaf} is {value}, expected {bounds}')
    chunk.passed = column

  def _unpack(self, column: SchemaColumn, chunk: Chunk) -> np.ndarray:
    """Unpack a chunk. Without bounds the values do not matter, so they may be anything."""
    assert chunk.packed is not None
    shape = chunk.length, *chunk.shape
    rows = np.empty(shape, chunk.dtype)
    self.unpacked += rows.nbytes
    try:
      if column.low is not None:
        return unpack(chunk.packed, chunk.dtype, shape)
      unpack_into((chunk.packed[0], PACKED), rows)  # only to see that it can be unpacked
    except (zstandard.ZstdError, ValueError) as e:
      raise ValueError(f'a chunk of {column.leaf} is damaged: {e}') from None
    return rows


def _first_violation(column: SchemaColumn, array: np.ndarray) -> Any:
  within = np.broadcast_to((array >= column.low) & (array <= column.high), array.shape)
  return array[~within][0]


def _describe_bounds(column: SchemaColumn) -> str:
  bounds = column.low, column.high
  if any(x is not None and x.ndim for x in bounds):
    return f'{column.low} to {column.high}'
  low, high = (float(x) for x in bounds if x is not None)
  return {FINITE: 'a finite number', NO_NAN: 'a number'}.get((low, high), f'{low:g} to {high:g}')


def _read_column(
  name: Any, dtype: Any, shape: Any, single: Any, rows: Any, low: Any, high: Any
) -> SchemaColumn:
  """Read a column of `pack_column`; raise ValueError, TypeError or WireError."""
  if type(name) is not str or type(single) is not bool or type(rows) is not int or rows < 1:
    raise ValueError('a column without a name, single or not, and a number of rows')
  kind, row = replay_messages.read_spec([dtype, shape])
  if (low is None) != (high is None):
    raise ValueError(f'column {name!r} with one bound')
  if not all(x is None or _is_of_numbers(x) for x in (low, high)):
    raise ValueError(f'column {name!r}: bounds that are not numbers or nested lists of them')
  limits = [None if x is None else np.array(x, np.float64) for x in (low, high)]
  for x in limits:
    if x is not None and (np.isnan(x).any() or np.broadcast_shapes(x.shape, row) != row):
      raise ValueError(f'column {name!r}: bounds {x.shape} for rows of {row}')
  return SchemaColumn(Leaf(name, kind, row, single), rows, *limits)


def _is_of_numbers(x: Any) -> bool:
  return type(x) in (int, float) or (type(x) is list and all(map(_is_of_numbers, x)))


def describe_difference(current: Any, requested: Any) -> str:
  """Return in one line how two tables' descriptions of columns differ."""
  for a, b in zip(current or [], requested or [], strict=False):
    if a != b:
      return f'the server expects {str(a)[:200]}, {str(b)[:200]} is asked for'
  n, m = len(current or []), len(requested or [])
  return f'the server expects {n} columns, {m} are asked for'
