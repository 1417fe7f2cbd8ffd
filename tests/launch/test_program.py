"""Programs as data: what is refused, and what references become."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from podrace.errors import UsageError
from podrace.launch.program import (
  Backoff,
  Node,
  Program,
  Reference,
  command,
  from_json,
  is_ready,
  literal,
  parse,
  to_json,
)

LEARNER = Node(
  'learner', ('train', '--at={replay:all}', '{listen}'), listens=('params', 'top'), main=True
)
REPLAY = Node('replay', ('serve', '{listen}', '{replica}/{replicas}'), 2, listens=('tables',))
ACTOR = Node('actor', ('act', '{learner.params}', '{replay.tables:all}', '{{"a": 1}}'), 3)
PROGRAM = Program((ACTOR, LEARNER, REPLAY))
ANNOUNCED = {
  ('replay', 0): {'tables': 'tcp://a:1'},
  ('replay', 1): {'tables': 'tcp://b:2'},
  ('learner', 0): {'params': 'tcp://c:3', 'top': 'tcp://c:4'},
}


def test_references_become_addresses() -> None:
  found = command(PROGRAM, ACTOR, ANNOUNCED, {})
  assert found == ('act', 'tcp://c:3', 'tcp://a:1,tcp://b:2', '{"a": 1}')
  own = {'listen': 'tcp://x:0', 'replica': '1', 'replicas': '2'}
  assert command(PROGRAM, REPLAY, {}, own) == ('serve', 'tcp://x:0', '1/2')


def test_what_an_engine_does_not_give_is_refused() -> None:
  program = Program((Node('main', ('true', '{coordinator}', '{announce}'), main=True),))
  with pytest.raises(UsageError, match=r'\{coordinator\}'):
    command(program, program.main, {}, {'dir': 'somewhere'})


def test_a_node_is_ready_once_its_references_are_announced() -> None:
  assert is_ready(PROGRAM, REPLAY, {})
  assert is_ready(PROGRAM, ACTOR, ANNOUNCED)
  for lacking in ANNOUNCED:
    assert not is_ready(PROGRAM, ACTOR, {k: v for k, v in ANNOUNCED.items() if k != lacking})
  assert not is_ready(PROGRAM, ACTOR, {**ANNOUNCED, ('learner', 0): {'top': 'tcp://c:4'}})


def test_nodes_come_after_those_that_they_refer_to() -> None:
  assert [n.name for n in PROGRAM.order()] == ['replay', 'learner', 'actor']


def test_an_argument_of_braces_stays_as_it_is() -> None:
  text = '{"a": {"b": "{learner.params}"}}'
  assert list(parse('x{replay:all}y')) == ['x', Reference('replay', '', True), 'y']
  node = Node('one', (literal(text),), main=True)
  assert command(Program((node,)), node, {}, {}) == (text,)


def nodes(*more: dict[str, Any]) -> Program:
  """The learner, and nodes of these fields."""
  learner = Node('learner', ('train',), listens=('params', 'top'), main=True)
  return Program((learner, *(Node(**{'name': 'x', 'command': ('c',), **m}) for m in more)))


@pytest.mark.parametrize(
  ('more', 'said'),
  [
    ([{'command': ('{lerner.params}',)}], '{lerner.params}'),
    ([{'command': ('{learner.prams}',)}], 'params, top'),
    ([{'command': ('{learner}',)}], ' 2 addresses (params, top)'),
    ([{'command': ('{x}',)}], '{x}: x announces 0 '),
    ([{'command': ('{listen}',)}], '{listen}: '),
    ([{'command': ('{dir:all}',)}], '{dir:all}: '),
    ([{'command': ('{"a"}',)}], '{NODE}'),
    ([{'command': ('{learner.top!r}',)}], 'reference'),
    ([{'command': ('{learner',)}], '{{ or }}'),
    ([{'command': ('a}',)}], '{{ or }}'),
    ([{}, {}], 'called x'),
    ([{'replicas': 2}, {'name': 'x-0'}], ' x-0'),
    ([{'main': True}], ' 2: learner, x'),
    ([{'name': 'Big'}], "'Big'"),
    ([{'name': 'dir'}], "'dir'"),
    ([{'listens': ('a b',)}], "'a b'"),
    ([{'listens': ('a', 'a')}], 'listens'),
    ([{'command': ()}], 'command'),
    ([{'command': 'ls'}], "'ls'"),
    ([{'command': (3,)}], 'command'),
    ([{'restart': 5.0}], 'restart'),
    ([{'replicas': 0}], 'replicas'),
    ([{'gpus': -1}], 'gpus'),
    ([{'replicas': 2, 'listens': ('a',)}, {'name': 'y', 'command': ('{x}',)}], ':all'),
    (
      [{'listens': ('a',), 'command': ('{y}',)}, {'name': 'y', 'listens': ('a',), 'command': ('{x}',)}],
      'addresses',
    ),
  ],
)  # fmt: skip
def test_what_is_refused(more: list[dict[str, Any]], said: str) -> None:
  with pytest.raises(UsageError) as e:
    nodes(*more)
  assert said in str(e.value)


def test_one_node_must_be_the_main_one() -> None:
  with pytest.raises(UsageError, match=' 0: '):
    Program((REPLAY,))
  with pytest.raises(UsageError, match='replica'):
    Program((Node('learner', ('c',), 2, main=True),))


def test_pauses_double_up_to_the_most() -> None:
  assert [Backoff(1, 5).pause(n) for n in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]
  for wrong in ({'first': 61}, {'first': -1}, {'most': float('inf')}, {'failures': 0}):
    with pytest.raises(UsageError, match='backoff'):
      Backoff(**wrong)  # type: ignore[arg-type]


def test_a_program_is_the_same_after_its_way_as_text() -> None:
  odd = Node('odd', ('a', '{{"b": 1}}'), 2, cpus=0.5, gpus=1, listens=('x', 'y'), restart=None)
  program = Program((*PROGRAM.nodes, odd, Node('slow', ('c',), restart=Backoff(failures=2))))
  assert from_json(to_json(program)) == program


@pytest.mark.parametrize(
  'text', ['', '{}', '[]', '[{"name": "x"}]', '[3]', to_json(PROGRAM).replace('"cpus"', '"cpu"')]
)
def test_text_that_is_no_program_is_refused(text: str) -> None:
  with pytest.raises(UsageError):
    from_json(text)


def test_programs_need_no_jax() -> None:
  code = 'import sys, podrace.launch.program; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
