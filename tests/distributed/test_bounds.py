"""What acting processes and replay services may send: numbers beyond float32's arithmetic, and other shapes."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare
import numpy as np
import pytest
from processes import Podrace, as_users_have_it, cache
from services import ANY
from test_service_tables import SIMPLE

from podrace import configure, tables
from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import parameters, replay, run_identity, run_tables
from podrace.distributed.net import session_messages
from podrace.distributed.parameters import parameter_messages
from podrace.distributed.replay import item_schema, replay_messages
from podrace.distributed.replay.remote_table import RemoteTable
from podrace.distributed.replay.server import ReplayServer
from podrace.envs.host import base as host
from podrace.errors import RunError, UsageError
from podrace.settings.resolved import resolve
from podrace.types import LARGEST_OBSERVATION, LARGEST_OUTPUT, LARGEST_REWARD

ENV = 'gymnasium:CartPole-v1'


@pytest.mark.parametrize('agent', ['impala', 'ppo', 'r2d2'])
def test_floats_of_acting_processes_fit_into_float32(agent: str) -> None:
  spec = host.make(ENV)
  config = configure(env=ENV, agent=agent, architecture='sebulba')
  example = example_trajectory(resolve(config).agent, spec, 4, 8)
  columns = run_tables.unroll_contents(example, spec.action_space)
  floats = [c for c in columns if np.dtype(c[1]).kind == 'f']
  assert {'timesteps/observation', 'timesteps/reward'} <= {c[0] for c in floats}
  for column in columns:
    checked = item_schema.ItemSchema([column]).columns[0]
    dtype, shape = np.dtype(column[1]), (column[4], *column[2])
    if dtype.kind != 'f':
      continue
    largest = {
      'timesteps/observation': LARGEST_OBSERVATION,
      'timesteps/reward': LARGEST_REWARD,
      'timesteps/discount': 1.0,
    }.get(column[0], LARGEST_OUTPUT)
    assert not checked.is_violated(np.full(shape, largest, dtype))
    for value in (3e38, 1.01 * largest, np.inf, np.nan):
      assert checked.is_violated(np.full(shape, value, dtype)), (column[0], value)


def test_totals_of_episodes_are_bounded_each() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = run_tables.episodes_table(client, 'run')
    for totals in (
      [-1.0, 0, 0, 0], [1, 1e31, 0, 0], [1, 0, -1, 0], [1, 0, 0, -1], [1e300, 0, 0, 0], [1, np.nan, 0, 0],
    ):  # fmt: skip
      writer = client.writer(1)
      writer.append({'totals': np.array(totals, np.float64)})
      writer.create_item(table, 1.0, num_steps=1)
      with pytest.raises(ValueError, match='totals'):
        writer.flush(timeout=30)
    writer = client.writer(1)
    writer.append({'totals': np.array([2, -LARGEST_REWARD, LARGEST_REWARD**2, 7], np.float64)})
    writer.create_item(table, 1.0, num_steps=1)
    writer.flush(timeout=30)
    assert server.counts['refused items'] == 6


@pytest.mark.parametrize(
  'document', [b'', b'[1', b'[]', b'7', b'"x"', b'{"run": 7}', b'\xff\xfe', b'[' * 100_000]
)
def test_a_record_that_is_none_is_refused_in_a_line(document: bytes) -> None:
  with pytest.raises(UsageError) as e:
    run_identity.read_record(np.frombuffer(document, np.uint8))
  assert len(str(e.value).splitlines()) == 1 and len(str(e.value)) < 500


@pytest.mark.parametrize('agent', [None, 7, [], 'x', {'name': []}])
def test_records_of_other_shapes_are_other_runs(agent: Any) -> None:
  run, record = run_identity.read_record(np.frombuffer(b'{"env": 7}', np.uint8))
  told = {**record, 'agent': agent}
  assert run == '' and run_identity.describe_differences(told, {'agent': {'name': 'x'}})


def test_a_malformed_record_ends_an_acting_process(tmp_path: Path, cache: Path) -> None:
  with parameters.Publisher(ANY, environments=64) as publisher:
    publisher.publish(1, [(run_identity.RECORD, np.frombuffer(b'{"agent": [1', np.uint8))])
    one = Podrace(
      ['act', 'catch', '--connect-replay', 'tcp://127.0.0.1:9', '--params', publisher.address],
      tmp_path / 'log', 1, cache,
    )  # fmt: skip
    assert one.wait() == 2
    assert 'Traceback' not in one.output and 'JSON' in one.output


def answering(end: bare.Accepting, answers: list[Any]) -> Callable[[], None]:
  """A replay service that gives these answers to TABLE, each in a session of its own."""

  def serve() -> None:
    for value in answers:
      one = end.accept(30)
      one.expect(session_messages.HELLO)
      welcome = dict(silence=5.0, number=0, sizes={}, largest=2**24, waiting=b'', missing=b'')
      one.say(session_messages.WELCOME, welcome)
      (number, *_), _ = one.expect(replay_messages.TABLE)
      one.say(replay_messages.ANSWER, number, True, value)
      if value is not answers[-1]:
        assert one.is_closed(30)

  return serve


def test_a_service_with_odd_answers_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr('podrace.distributed.net.connecting.BACKOFF', (0.0, 0.0))
  good = {'settings': {}, 'most': 1.0}
  wrong = [{'settings': [], 'most': 1.0}, {'settings': {}, 'most': 'x'}]
  answers = [None, 7, 'text', [], {}, *wrong, good]
  end = bare.Accepting(replay_messages.OF_CLIENTS)
  worker = threading.Thread(target=answering(end, answers), daemon=True)
  worker.start()
  with replay.connect(end.address) as client:
    assert client.table('it').max_priority == 1.0
  worker.join(60)
  assert not worker.is_alive()
  end.close()


def test_values_of_answers_are_checked_by_their_question() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    info = server.served.info('it')
    replay_messages.check_answer(replay_messages.INFO, info)
    assert table.info().size == 0
  for kind, values in {
    replay_messages.INFO: [None, {}, {**info, 'size': 'x'}, {**info, 'seconds': {'a': 'x'}}, {**info, 'max_bytes': 'x'}],
    replay_messages.UPDATE: [None, -1, 1.5, 'x', True],
    replay_messages.DELETE: [None, -1, 1.5, 'x'],
    replay_messages.SAVE: [None, 7, ['x']],
    replay_messages.SAMPLE: [None, 7, {}],
  }.items():  # fmt: skip
    for value in values:
      with pytest.raises(replay_messages.WireError):
        replay_messages.check_answer(kind, value)


def test_samples_of_other_columns_name_their_service() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    with client.writer(4) as writer:
      for _ in range(4):
        writer.append({'x': np.float32(1)})
      writer.create_item(table, 1.0, num_steps=3)
      writer.flush(timeout=30)
    for name, dtype, rows, good in (
      ('x', np.float32, 3, True), ('x', np.float32, 4, False), ('x', np.float64, 3, False), ('y', np.float32, 3, False),
    ):  # fmt: skip
      expected = item_schema.ItemSchema([item_schema.pack_column(name, dtype, (), rows)])
      mine = RemoteTable('it', client.connections, 1.0, expected)
      if good:
        assert mine.sample(1, timeout=30).data['x'].shape == (1, 3)
      else:
        with pytest.raises(RunError, match=server.address):
          mine.sample(1, timeout=30)


@pytest.mark.parametrize('shape', [[0, 2**62, 2**62], [1] * 100 + [0], [0, 2**63 - 1]])
def test_impossible_shapes_end_a_session_only(
  shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr('podrace.distributed.net.connecting.BACKOFF', (0.0, 0.0))
  end = bare.Accepting(session_messages.of_clients())
  with contextlib.closing(parameters.Parameters(end.address)) as reader:
    for newest in ([['x', '<f8', shape]], [['x', '<f8', []]]):
      one = end.welcome()
      size = 8 if newest[0][2] == [] else 0
      one.say(parameter_messages.NEWEST, 1, 'x' * 64, newest, arrays=(bytes(size),))
      if size:
        assert reader.get(timeout=30).version == 1
      else:
        assert one.is_closed(30)
      one.close()
  end.close()
