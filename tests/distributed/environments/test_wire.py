"""What goes over the wire between learners and environments: schemas, records, observations, actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from peers import spec

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import WireError
from podrace.distributed.net import safe_text
from podrace.distributed.net.frame import unpack
from podrace.distributed.net.session_messages import GUEST_BYTES, HELLO, REFUSED


def schema() -> dict[str, Any]:
  return environment_messages.schema(spec().observation_space, spec().action_space)


def test_the_example_schema_is_ours() -> None:
  assert schema() == {
    'observation': [['observation', '<f4', [4], 'Box', [-np.inf, -np.inf, np.inf, np.inf]]],
    'action': ['action', '<i4', [], 'Discrete', [0, 5]],
  }


def test_schemas_of_trees_survive_the_wire() -> None:
  tree = spaces.Dict(
    b=spaces.Tuple([spaces.Discrete(4, dtype=np.int32), spaces.MultiBinary(3)]),
    a=spaces.Box(0, 255, (6, 6), np.uint8),
  )
  one = environment_messages.schema(tree, spaces.MultiDiscrete([3, 4], dtype=np.int32))
  assert unpack(HELLO.pack([one])[0][8:]) == [one]
  paths = [x[0] for x in one['observation']]
  assert paths == ['observation/b/0', 'observation/b/1', 'observation/a']  # as the space has them
  assert environment_messages.differences(one, one) == []


@pytest.mark.parametrize(
  'theirs', [None, 1, [], {}, {'observation': 3, 'action': 4}, {'observation': [], 'action': []}]
)
def test_what_is_no_schema_differs(theirs: Any) -> None:
  (line,) = environment_messages.differences(schema(), theirs)
  assert 'schema' in line


def test_a_space_without_elements_has_no_limits() -> None:
  one = environment_messages.schema(spaces.Box(0, 1, (0,), np.float32), spaces.Discrete(2))
  assert one['observation'] == [['observation', '<f4', [0], 'Box', []]]


@pytest.mark.parametrize('dtype', ['<f2', '<f4', '<f8'])
@pytest.mark.parametrize('wrong', [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_are_not_bounded(wrong: float, dtype: str) -> None:
  assert environment_messages.is_bounded(np.array([1, -2], dtype), 1e9)
  assert not environment_messages.is_bounded(np.array([1, wrong], dtype), 1e9)


def test_missing_and_further_arrays_differ() -> None:
  one = schema()
  further = {**one, 'observation': [*one['observation'], ['observation/x', '<f4', [], 'Box', []]]}
  (line,) = environment_messages.differences(one, further)
  assert line.startswith('observation/x: ')


def test_arrays_go_there_and_back_without_a_copy() -> None:
  layout = environment_messages.Layout(schema())
  records = np.zeros(3, environment_messages.RECORD)
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  body = records.tobytes() + x.tobytes()
  assert len(body) == 3 * layout.environment_bytes
  arrays = layout.arrays(body, 3)
  buffers = layout.buffers(8)
  back, (y,) = layout.records([arrays]), layout.observations([arrays], buffers)
  np.testing.assert_array_equal(x, y)
  assert not back.words.flags.owndata and not y.flags.owndata
  (both,) = layout.observations([arrays, arrays], buffers)  # those of several STEPs are copied
  np.testing.assert_array_equal(both, np.concatenate([x, x]))
  assert np.shares_memory(both, buffers[0]) and not np.shares_memory(y, buffers[0])
  action = np.array([1, 2, 3], np.int32).tobytes()
  np.testing.assert_array_equal(layout.actions(action, 3), [1, 2, 3])
  with pytest.raises(WireError, match=r'12 .* 16'):
    layout.actions(action, 4)


def test_foreign_text_is_bounded_and_obeyed_by_no_terminal() -> None:
  assert safe_text.plain('caf\u00e9 \x1b[2J\n\u202e x') == 'caf\u00e9 \\x1b[2J\\n\\u202e x'
  assert safe_text.plain('x' * 600) == 'x' * 500 + '... (100 more)'
  assert safe_text.plain('\x00' * 400) == '\\x00' * 125 + '...'  # as long as it is shown
  assert safe_text.label('caf\u00e9\x1b') == 'caf\\xe9\\x1b'
  assert len(safe_text.label('\U000e0001' * 200)) == 200
  lines = safe_text.plain_lines('\n'.join(f'{i}\t' for i in range(100))).split('\n')
  assert lines == [f'{i}\\t' for i in range(40, 100)]  # the end of a traceback says what it was
  reasons = safe_text.plain_reasons(['a\nb', 5, *['y' * 10**6] * 500])
  assert reasons[:2] == ['a\\nb', '5'] and reasons[-1] == 'and 482 more'
  assert sum(map(len, REFUSED.pack([reasons]))) < GUEST_BYTES
