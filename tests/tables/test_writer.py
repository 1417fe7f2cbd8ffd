"""The writer: steps, slices of the history, items, what is in flight; and how chunks are packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from podrace import tables
from podrace.tables import chunks


def make(**changes: Any) -> tables.Table:
  fifo: dict[str, Any] = dict(sampler=tables.fifo(), remover=tables.fifo())
  options = dict(fifo, rate_limiter=tables.min_size(1), max_size=100)
  return tables.Table('it', tables.ChunkStore(), **{**options, **changes})


def writer_of(table: tables.Table, steps: int = 0, **options: Any) -> tables.Writer:
  writer = tables.Writer(table.store, **{'history': 10, **options})
  for i in range(steps):
    writer.append(step(i))
  return writer


def step(i: int) -> dict[str, np.ndarray]:
  return {'observation': np.full((2, 3), i, np.uint8), 'action': np.int32(i)}


@pytest.mark.parametrize('rows', [1, 3, 4, 100])
def test_columns_of_different_lengths(rows: int) -> None:
  table = make()
  writer = writer_of(table, 7, rows_per_chunk=rows)
  h = writer.history
  columns = {
    'from': h['observation'][-5:-1],
    'to': h['observation'][-4:],
    'first': h['action'][0:1],
  }
  columns |= {'action': h['action'][-4:-2], 'last': h['action'][-1]}
  key = writer.create_item(table, 2.0, columns)
  sample = table.sample(2)
  data = sample.data
  assert sample.key.tolist() == [key, key]
  assert data['from'].shape == data['to'].shape == (2, 4, 2, 3)
  assert data['from'][1, :, 0, 0].tolist() == [2, 3, 4, 5]
  assert data['to'][1, :, 1, 2].tolist() == [3, 4, 5, 6]
  assert data['action'].tolist() == [[3, 4], [3, 4]]
  assert data['last'].tolist() == [6, 6]
  assert data['first'].tolist() == [[0], [0]]
  assert {k: v.dtype for k, v in data.items()}['action'] == np.int32
  assert sample.lengths['action'].tolist() == [2, 2]


class Step(NamedTuple):
  x: Any
  y: Any


def test_nesting_is_kept() -> None:
  table = make()
  writer = tables.Writer(table.store, history=3)
  for i in range(3):
    writer.append({'a': Step(np.float32(i), [np.int8(i), {'b': np.bool_(i % 2)}]), 'c': (i,)})
  writer.create_item(table, 1.0, num_steps=2)
  data = table.sample(1).data
  assert isinstance(data['a'], Step)
  assert data['a'].x.tolist() == [[1.0, 2.0]]
  assert data['a'].y[0].dtype == np.int8
  assert data['a'].y[1]['b'].tolist() == [[True, False]]
  assert data['c'][0].tolist() == [[1, 2]]
  h = writer.history
  step = {'a': Step(np.float32(0), [np.int8(0), {'b': np.bool_(1)}]), 'c': (0,)}
  for name, bad in (
    ('a/x', dict(step, a=Step(np.int8(0), step['a'].y))),
    ('a/y/0', dict(step, a=Step(step['a'].x, [np.int16(0), {'b': np.bool_(1)}]))),
    ('a/y/1/b', dict(step, a=Step(step['a'].x, [np.int8(0), {'b': np.int8(1)}]))),
    ('c/0', dict(step, c=(np.float32(0),))),
  ):
    with pytest.raises(ValueError, match=name):
      writer.append(bad)
  with pytest.raises(ValueError, match='store'):
    writer.create_item(make(), 1.0, h['a'].x[-1:])


def test_what_is_appended_is_copied() -> None:
  table = make()
  writer = tables.Writer(table.store, history=3)
  buffer = np.zeros(4)
  for i in range(3):
    buffer[:] = i
    writer.append(buffer)
  writer.create_item(table, 1.0, num_steps=3)
  buffer[:] = 9
  sample = table.sample(1)
  assert sample.data[0, :, 0].tolist() == [0, 1, 2]
  sample.data[:] = 7  # what is sampled is the caller's
  assert table.sample(1).data[0, :, 0].tolist() == [0, 1, 2]


def test_steps_may_lack_columns() -> None:
  """The last observation of an episode has no action."""
  table = make()
  writer = writer_of(table, 2)
  writer.append({'observation': np.full((2, 3), 2, np.uint8)})
  h = writer.history
  assert (len(h['observation']), len(h['action'])) == (3, 2)
  writer.create_item(table, 1.0, {'o': h['observation'][-3:], 'a': h['action'][-2:]})
  data = table.sample(1).data
  assert data['o'][0, :, 0, 0].tolist() == [0, 1, 2]
  assert data['a'].tolist() == [[0, 1]]
  writer.append({'observation': None, 'action': np.int32(2)})
  assert (len(h['observation']), len(h['action'])) == (3, 3)


def test_the_end_of_an_episode() -> None:
  table = make()
  writer = writer_of(table, 3, rows_per_chunk=4)
  writer.create_item(table, 1.0, num_steps=3)
  writer.end_episode()
  assert len(writer.history['action']) == 0
  writer.append(step(7))
  with pytest.raises(ValueError, match=r'2 to 4 .* 3 to 4'):
    writer.create_item(table, 1.0, num_steps=2)
  writer.create_item(table, 1.0, num_steps=1)
  table.delete(table.sample(1).key)
  assert table.sample(1).data['action'].tolist() == [[7]]


def test_the_history_is_bounded() -> None:
  table = make()
  writer = writer_of(table, 25, history=5, rows_per_chunk=2)
  assert len(writer.history['action']) == 5
  with pytest.raises(ValueError, match=r'19 to 25 .* 20 to 25'):
    writer.create_item(table, 1.0, num_steps=6)
  writer.create_item(table, 1.0, num_steps=5)
  assert table.sample(1).data['action'].tolist() == [[20, 21, 22, 23, 24]]
  held = [len(column.chunks) for column in writer.history.values()]
  assert held == [3, 3]  # rows 20 to 25; the last chunk has room for one more
  old = writer.history['action'][-5:]
  writer.append(step(25))
  with pytest.raises(ValueError, match='21 to 26'):
    writer.create_item(table, 1.0, old)


@pytest.mark.parametrize('index', [slice(2, 2), slice(0, 3, 2), 3, -4, slice(5, 9)])
def test_slices_of_nothing(index: Any) -> None:
  writer = writer_of(make(), 3)
  with pytest.raises(IndexError, match='action'):
    writer.history['action'][index]


@pytest.mark.parametrize(
  'bad, message',
  [
    ({'observation': np.zeros((2, 3)), 'action': np.int32(0)}, r'uint8\[2, 3\], got float64'),
    ({'observation': np.zeros((2, 2), np.uint8)}, r'observation: expected uint8\[2, 3\]'),
    ({'other': 1}, "'other'"),
    ({'observation': None, 'action': np.int64(3)}, r'int32\[\], got int64'),
    ({'observation': None, 'action': 1.5}, r'int32.*, got float64'),
    ([1, 2], 'expected a dict'),
    ({'observation': None, 'action': 2**31}, 'action: 2147483648 .* int32'),
    ({'observation': {'a': 1}, 'action': np.int32(3)}, r'observation: .* object'),
  ],
)
def test_other_steps_are_refused_whole(bad: Any, message: str) -> None:
  writer = writer_of(make(), 2)
  with pytest.raises(ValueError, match=message):
    writer.append(bad)
  assert [len(column) for column in writer.history.values()] == [2, 2]


@given(
  cuts=st.lists(st.integers(0, 7), max_size=6),
  history=st.integers(1, 12),
  rows_per_chunk=st.integers(1, 9),
)
def test_many_steps_are_as_one_after_the_other(
  cuts: list[int], history: int, rows_per_chunk: int
) -> None:
  numbers, table = np.arange(sum(cuts)), make()
  observation = np.multiply.outer(numbers, np.ones((2, 3), int)).astype(np.uint8)
  some = {'observation': observation, 'action': numbers.astype(np.int32)}
  one, many = (writer_of(table, 1, history=history, rows_per_chunk=rows_per_chunk) for _ in '12')
  for i in numbers:
    one.append({k: x[i] for k, x in some.items()})
  at = 0
  for n in cuts:
    many.extend({k: x[at : at + n] for k, x in some.items()})
    at += n
  for of_one, of_many in zip(one.history.values(), many.history.values(), strict=True):
    assert [c.length for c in of_many.chunks] == [c.length for c in of_one.chunks]
    assert len(of_many) == len(of_one) == min(history, len(numbers) + 1)
  first, second = (w.read({k: c[:] for k, c in w.history.items()}) for w in (one, many))
  for name, x in first.items():
    np.testing.assert_array_equal(second[name], x)
    assert second[name].dtype == x.dtype


def test_many_steps_may_be_the_first_and_of_different_numbers() -> None:
  table = make()
  writer = tables.Writer(table.store, history=9)
  writer.extend({'a': {'b': np.arange(3)}, 'c': np.ones((2, 4), np.float32)})
  writer.extend({'a': None, 'c': np.zeros((1, 4), np.float32)})
  h = writer.history
  writer.create_item(table, 1.0, {'b': h['a']['b'][:], 'c': h['c'][-2:], 'last': h['c'][-1]})
  data = table.sample(1).data
  assert data['b'].tolist() == [[0, 1, 2]]
  assert data['c'].tolist() == [[[1] * 4, [0] * 4]] and data['last'].tolist() == [[0] * 4]


@pytest.mark.parametrize(
  'bad, message',
  [
    ({'observation': np.zeros((2, 2, 3))}, r'uint8\[n, 2, 3\], got float64\[2, 2, 3\]'),
    ({'observation': np.zeros((2, 3), np.uint8)}, r'expected uint8\[n, 2, 3\], got uint8\[2, 3\]'),
    ({'action': np.int32(3)}, r'action: expected int32\[n\], got int32\[\]'),
    ({'observation': np.zeros((3, 2, 3), np.uint8), 'action': np.zeros(3)}, 'action: .* int32'),
    ({'other': [1]}, "'action', 'other'"),
  ],
)
def test_many_other_steps_are_refused_whole(bad: Any, message: str) -> None:
  writer = writer_of(make(), 2)
  with pytest.raises(ValueError, match=message):
    writer.extend({'action': np.zeros(3, np.int32), **bad})
  assert [len(column) for column in writer.history.values()] == [2, 2]


def test_many_numbers_are_no_steps() -> None:
  writer = tables.Writer(make().store, history=1)
  with pytest.raises(ValueError, match=r'\[n, ...\]'):
    writer.extend({'a': np.zeros(3), 'b': 1.0})
  writer.extend({'a': np.zeros(3), 'b': np.ones(3)})
  writer.close()
  with pytest.raises(ValueError, match='closed'):
    writer.extend({'a': np.zeros(3), 'b': np.ones(3)})


def test_python_numbers_are_what_their_column_is() -> None:
  table = make()
  writer = tables.Writer(table.store, history=9)
  writer.append({'i': np.int8(0), 'f': np.float32(0)})
  for i, f in ((127, 0.1), (-128, 3), (True, 1e-9)):
    writer.append({'i': i, 'f': f})
  for i in (128, -129, 300, 2**63):
    with pytest.raises(ValueError, match=f'i: {i} .* int8'):
      writer.append({'i': i, 'f': 0.0})
  writer.create_item(table, 1.0, num_steps=4)
  data = table.sample(1).data
  assert data['i'].tolist() == [[0, 127, -128, 1]]
  np.testing.assert_array_equal(data['f'], np.float32([[0, 0.1, 3, 1e-9]]))


def test_a_closed_writer_makes_nothing() -> None:
  table = make()
  writer = writer_of(table, 3)
  h = writer.history
  slices = {'a': h['action'][-1]}
  writer.close()
  for call in (
    lambda: writer.create_item(table, 1.0, num_steps=1),
    lambda: writer.create_item(table, 1.0, slices),
    lambda: writer.read(slices),
  ):
    with pytest.raises(ValueError, match='closed'):
      call()
  assert len(table) == 0


def test_other_items_are_refused() -> None:
  table = make()
  writer = writer_of(table, 3)
  h = writer.history
  writer.create_item(table, 1.0, {'o': h['observation'][-2:], 'a': h['action'][-1]})
  for other in (
    {'o': h['observation'][-2:]},
    {'o': h['observation'][-2:], 'a': h['action'][-1:]},
    {'a': h['action'][-1], 'o': h['observation'][-2:]},
    {'o': h['action'][-2:], 'a': h['action'][-1]},
  ):
    with pytest.raises(ValueError, match=r'o: uint8\[2, 3\] .* a: int32\[\]'):
      writer.create_item(table, 1.0, other)
  writer.create_item(table, 1.0, {'o': h['observation'][-3:], 'a': h['action'][0]})
  stranger = writer_of(table, 3)
  with pytest.raises(ValueError, match='history'):
    stranger.create_item(table, 1.0, [h['action'][-1]])
  stranger.create_item(
    table, 1.0, {'o': stranger.history['observation'][-2:], 'a': stranger.history['action'][-1]}
  )
  with pytest.raises(ValueError, match='history'):  # though it looks the same
    stranger.create_item(table, 1.0, {'o': h['observation'][-2:], 'a': h['action'][-1]})
  with pytest.raises(ValueError, match='slices'):
    writer.create_item(table, 1.0, {'o': np.zeros(3)})
  for wrong in (dict(), dict(trajectory=h['action'][-1:], num_steps=1)):
    with pytest.raises(ValueError, match='num_steps'):
      writer.create_item(table, 1.0, **wrong)
  with pytest.raises(ValueError, match='3 to 3'):
    writer.create_item(table, 1.0, num_steps=0)
  assert len(table) == 3


def test_the_history_can_be_read() -> None:
  """As samples would have it, over chunks, packed or not."""
  writer = tables.Writer(tables.ChunkStore(), history=7, rows_per_chunk=3)
  for t in range(11):
    writer.append({'o': np.full((40, 40), t, np.uint8), 'a': np.int32(t)})
  h = writer.history
  found = writer.read({'x': (h['o'][-6:-1], h['a'][-2]), 'y': h['a'][:]})
  np.testing.assert_array_equal(found['x'][0][:, 0, 0], np.arange(5, 10))
  assert found['x'][1] == 9 and found['x'][1].shape == ()
  np.testing.assert_array_equal(found['y'], np.arange(4, 11))
  with pytest.raises(ValueError, match='num_steps'):
    writer.read(None)


def test_objects_and_strings_are_refused() -> None:
  for bad in (object(), 'text', None):
    with pytest.raises(ValueError, match='column'):
      tables.Writer(tables.ChunkStore(), history=1).append(bad)


@pytest.mark.parametrize('wrong', [dict(history=0), dict(rows_per_chunk=0), dict(max_in_flight=-1)])
def test_sizes_of_a_writer(wrong: dict[str, int]) -> None:
  with pytest.raises(ValueError, match=f'{next(iter(wrong))}='):
    writer_of(make(), **wrong)


def test_items_in_flight_are_bounded() -> None:
  table = make(rate_limiter=tables.queue(1), max_times_sampled=1)
  writer = writer_of(table, 4, max_in_flight=2)
  for n in (1, 2, 3):
    writer.create_item(table, 1.0, num_steps=n)
  assert writer.in_flight == 2
  with pytest.raises(tables.RateLimited):
    writer.create_item(table, 1.0, num_steps=4, timeout=0)
  assert writer.in_flight == 2
  with pytest.raises(tables.RateLimited):
    writer.flush(1, timeout=0)
  assert table.sample(1).lengths['action'] == 1  # which lets the second one in
  writer.flush(1, timeout=0)
  assert writer.in_flight == 1
  assert table.sample(2).lengths['action'].tolist() == [2, 3]
  writer.end_episode(timeout=0)
  assert writer.in_flight == 0
  writer.close()
  with pytest.raises(ValueError, match='closed'):
    writer.append(step(0))


def test_keys_of_ones_own() -> None:
  table = make()
  writer = writer_of(table, 1)
  assert writer.create_item(table, 1.0, num_steps=1, key=70) == 70
  assert writer.create_item(table, 1.0, num_steps=1) == 71  # not one that is in use
  assert writer.create_item(table, 1.0, num_steps=1, key=3) == 3
  assert writer.create_item(table, 1.0, num_steps=1) == 72
  with pytest.raises(ValueError, match='key=0'):
    writer.create_item(table, 1.0, num_steps=1, key=0)
  with pytest.raises(ValueError, match=f'key={2**62} .*62'):
    writer.create_item(table, 1.0, num_steps=1, key=2**62)
  with pytest.raises(TypeError, match='float'):
    writer.create_item(table, 1.0, num_steps=1, key=2.5)  # type: ignore[arg-type]
  assert writer.create_item(table, 1.0, num_steps=1, key=np.int64(2**62 - 1)) == 2**62 - 1  # type: ignore[arg-type]
  assert writer.create_item(table, 1.0, num_steps=1) == 2**62
  assert table.info().inserts == 6
  assert set(table.sample(100).key.tolist()) <= {3, 70, 71, 72, 2**62 - 1, 2**62}


def test_the_bytes_of_a_writer() -> None:
  table = make()
  writer = writer_of(table, 5, history=2, rows_per_chunk=2)
  assert table.store.total.bytes == writer.bytes > 0
  writer.close()
  assert table.store.total.bytes == writer.bytes == 0


# --- packing ----------------------------------------------------------------------------------

DTYPES = st.sampled_from(
  [*map(np.dtype, ['?', 'i1', 'u1', 'i2', 'u2', 'i4', 'u4', 'i8', 'u8', 'f2', 'f4', 'f8', 'c8'])]
)


@given(
  DTYPES.flatmap(
    lambda d: arrays.arrays(
      d,
      st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 9)),
      elements=arrays.from_dtype(d, allow_nan=True),
      fill=arrays.from_dtype(d),
    )
  ),
  st.integers(1, 50),
)
def test_rows_come_back_bit_for_bit(rows: np.ndarray, rows_per_chunk: int) -> None:
  table = make()
  writer = tables.Writer(table.store, history=len(rows), rows_per_chunk=rows_per_chunk)
  for row in rows:
    writer.append(row)
  writer.create_item(table, 1.0, num_steps=len(rows))
  for _ in range(2):
    found = table.sample(1).data[0]
    assert found.dtype == rows.dtype
    assert found.tobytes() == rows.tobytes()
    writer.close()  # packs what was open


@given(
  st.sampled_from(['i1', 'u1', 'i2', 'u4', 'i8']).flatmap(
    lambda d: arrays.arrays(np.dtype(d), st.tuples(st.integers(1, 20), st.integers(1, 5)))
  )
)
def test_differences(rows: np.ndarray) -> None:
  again = chunks.difference(rows)
  chunks.accumulate(again)
  np.testing.assert_array_equal(again, rows)
  wide = np.tile(rows, (1, 2000))  # summed row by row
  again = chunks.difference(wide)
  chunks.accumulate(again)
  np.testing.assert_array_equal(again, wide)


def test_differences_are_used_where_they_help() -> None:
  counter = np.arange(256) * 1_000_003
  noise = np.random.default_rng(0).integers(0, 2**62, 256)
  labels = np.random.default_rng(0).integers(0, 6, 256).astype(np.int32)
  assert chunks.differences_help(counter)
  assert not chunks.differences_help(noise)
  assert not chunks.differences_help(labels)
  assert not chunks.differences_help(counter.astype(np.float64))
  packed = chunks.pack(counter, True)
  assert packed is not None
  assert len(packed[0]) < counter.nbytes / 20
  assert chunks.pack(noise, False) is None  # kept as it is
  table = make()
  writer = tables.Writer(table.store, history=256, rows_per_chunk=256)
  for i in counter:
    writer.append(np.int64(i))
  writer.create_item(table, 1.0, num_steps=256)
  assert table.info().bytes == len(packed[0])
  np.testing.assert_array_equal(table.sample(1).data[0], counter)


def test_a_block_closes_its_writer_unless_it_fails() -> None:
  table = make(rate_limiter=tables.queue(1), max_times_sampled=1)
  with writer_of(table, 2) as writer:
    writer.create_item(table, 1.0, num_steps=1)
  with pytest.raises(ValueError, match='closed'):
    writer.append(step(2))
  with pytest.raises(ArithmeticError), writer_of(table, 1) as writer:
    writer.create_item(table, 1.0, num_steps=1)  # has to wait; nothing samples
    raise ArithmeticError
  assert len(table) == 1
