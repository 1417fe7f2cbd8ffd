"""What the items of a table must hold, as whoever has the table made says; checked at the service's door.

Without this one client could end a learner with a NaN, or with windows of another length.
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
from podrace.tables.chunks import Chunk, unpack, unpack_into
from podrace.tables.items import Item, Leaf, Samples, Signature

LARGEST = sys.float_info.max
FINITE = (-LARGEST, LARGEST)
NO_NAN = (-np.inf, np.inf)
CHUNK_BYTES = 2**20  # of a chunk of several rows, unpacked; `podrace` cuts them at 2^18


def column(
  name: str,
  dtype: Any,
  shape: Sequence[int],
  rows: int | None = None,
  bounds: tuple[Any, Any] | None = None,
) -> list[Any]:
  """One column of an item, as settings have it.

  Args:
    shape: of one row.
    rows: how many, over time; None for a single one without an axis of time.
    bounds: the least and the greatest value, which NaN is not between; numbers, or arrays like a row.
  """
  dtype = np.dtype(dtype)
  if bounds is None and dtype.kind == 'f':
    bounds = NO_NAN
  low, high = (np.asarray(x, np.float64).tolist() for x in bounds) if bounds else (None, None)
  return [name, dtype.str, list(shape), rows is None, 1 if rows is None else rows, low, high]


class Column(NamedTuple):
  """One leaf of an item; its values are within the bounds, if there are any."""

  leaf: Leaf
  rows: int
  low: np.ndarray | None
  high: np.ndarray | None

  def wrong(self, x: np.ndarray) -> bool:
    """Whether a value of rows [n, ...] is out of bounds."""
    if self.low is None or self.high is None:
      return False
    if x.dtype.kind == 'f' and self.low.ndim == self.high.ndim == 0:
      low, high = float(self.low), float(self.high)
      if (low, high) == FINITE:
        return not np.isfinite(x).all()
      if (low, high) == NO_NAN:
        return bool(np.isnan(x).any())
      return bool(x.size) and not (float(x.min()) >= low and float(x.max()) <= high)  # NaN is
    return not ((x >= self.low) & (x <= self.high)).all()


class Contents:
  """The columns of a table's items.

  Args:
    columns: of `column`, in the order in which writers name them.

  Attributes:
    signature: of every item.
    unpacked: bytes that `check` has unpacked so far.

  Raises:
    ValueError: if there can't be such columns.
  """

  def __init__(self, columns: Any) -> None:
    try:
      self._columns = tuple(_column(*one) for one in columns)
      leaves = tuple(c.leaf for c in self._columns)
      names = tuple(leaf.name for leaf in leaves)
      if not 1 <= len(set(names)) == len(names) <= replay_messages.LEAVES:
        raise ValueError(
          f'{len(names)} columns, expected 1 to {replay_messages.LEAVES} with different names'
        )
    except (TypeError, WireError) as e:
      raise ValueError(f'contents that are no columns: {e}') from None
    self.signature = Signature(('dict', names, (trees.LEAF,) * len(names)), leaves)
    self._by_leaf = {column.leaf: column for column in self._columns}
    self.unpacked = 0

  def check(self, item: Item) -> None:
    """Raises ValueError for an item of this signature that is not as it must be."""
    if item.amends:
      columns = [self._by_leaf.get(leaf) for leaf in item.signature.leaves]
    else:
      columns = list(self._columns) if item.signature.leaves == self.signature.leaves else [None]
    if None in columns:
      return  # which the table says
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
    """Refuses samples with other columns, or other numbers of rows, than such items have.

    Raises:
      WireError: naming the column.
    """
    if signature.leaves != self.signature.leaves or not isinstance(samples.data, dict):
      raise WireError(
        f'samples of ({", ".join(str(leaf)[:100] for leaf in signature.leaves[:8])}), expected '
        f'({", ".join(str(column.leaf)[:100] for column in self._columns[:8])})'
      )
    for column in self._columns:
      lengths = samples.lengths[column.leaf.name]
      if (lengths != column.rows).any():
        raise WireError(
          f'{int(lengths[lengths != column.rows][0])} rows of {column.leaf}, expected {column.rows}'
        )

  def _check_chunk(self, column: Column, chunk: Chunk) -> None:
    size = chunk.length * replay_messages.row_bytes(chunk.dtype, chunk.shape)
    if size > CHUNK_BYTES and chunk.length > 1:
      raise ValueError(
        f'a chunk of {chunk.length} rows of {column.leaf} takes {size:,} bytes unpacked, at most '
        f'{CHUNK_BYTES:,} if it has more than one row'
      )
    array = chunk.array
    if array is None:
      array = self._unpacked(column, chunk)
    if column.wrong(array[: chunk.length]):
      raise ValueError(f'{column.leaf} is {_first(column, array)}, expected {_bounds(column)}')
    chunk.passed = column

  def _unpacked(self, column: Column, chunk: Chunk) -> np.ndarray:
    assert chunk.packed is not None
    shape = chunk.length, *chunk.shape
    rows = np.empty(shape, chunk.dtype)
    self.unpacked += rows.nbytes
    try:
      if column.low is not None:
        return unpack(chunk.packed, chunk.dtype, shape)
      unpack_into((chunk.packed[0], False), rows)  # to see that it can be; not what is in it
    except (zstandard.ZstdError, ValueError) as e:
      raise ValueError(f'a chunk of {column.leaf} is damaged: {e}') from None
    return rows


def _first(column: Column, array: np.ndarray) -> Any:
  """A value that is out of bounds."""
  within = np.broadcast_to((array >= column.low) & (array <= column.high), array.shape)
  return array[~within][0]


def _bounds(column: Column) -> str:
  bounds = column.low, column.high
  if any(x is not None and x.ndim for x in bounds):
    return f'{column.low} to {column.high}'
  low, high = (float(x) for x in bounds if x is not None)
  return {FINITE: 'a finite number', NO_NAN: 'a number'}.get((low, high), f'{low:g} to {high:g}')


def _column(
  name: Any, dtype: Any, shape: Any, single: Any, rows: Any, low: Any, high: Any
) -> Column:
  """What `column` makes, read; raises ValueError, TypeError or WireError for anything else."""
  if type(name) is not str or type(single) is not bool or type(rows) is not int or rows < 1:
    raise ValueError('a column without a name, single or not, and a number of rows')
  kind, row = replay_messages.read_spec([dtype, shape])
  if (low is None) != (high is None):
    raise ValueError(f'column {name!r} with one bound')
  limits = [None if x is None else np.array(x, np.float64) for x in (low, high)]
  for x in limits:
    if x is not None and (np.isnan(x).any() or np.broadcast_shapes(x.shape, row) != row):
      raise ValueError(f'column {name!r}: bounds {x.shape} for rows of {row}')
  return Column(Leaf(name, kind, row, single), rows, *limits)


def difference(there: Any, asked: Any) -> str:
  """In what two tables' contents differ, briefly."""
  for a, b in zip(there or [], asked or [], strict=False):
    if a != b:
      return f'the server expects {str(a)[:200]}, {str(b)[:200]} is asked for'
  return f'the server expects {len(there or [])} columns, {len(asked or [])} are asked for'
