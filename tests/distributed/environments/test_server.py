"""What a server does with clients that are right, wrong, slow, gone or hostile."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import until
from gymnasium import spaces
from peers import Learner, Raw, spec

from podrace.distributed.environments import environment_messages, server, shared_listener
from podrace.distributed.environments import pool as remote_pool
from podrace.distributed.net import session_messages
from podrace.envs.host.base import groups_at_once
from podrace.types import FIRST, MID

# --- joining --------------------------------------------------------------------------------------


def test_a_client_joins_steps_and_is_counted() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    welcome = raw.join_as()
    assert welcome['largest_group'] == 8 and welcome['env'] == 'test:spec'
    raw.enter(3)
    for seq in range(20):
      raw.step(3, seq, FIRST if seq == 0 else MID)
      action = raw.act(3, seq)
      assert action.shape == (3,) and action.dtype == np.int32
    raw.say(session_messages.METRICS, {'steps_per_s': 12.5, 'resident_mb': 100})
    raw.say(session_messages.ASK)
    report = raw.expect(session_messages.REPORT)[0][0]
    (client,) = report['clients']
    assert client['metrics'] == {'steps_per_s': 12.5, 'resident_mb': 100}
    found = learner.spec.metrics()
    assert (found['remote_steps_per_s'], found['remote_resident_mb']) == (12.5, 100)
    assert 0.5 < found['learner_resident_mb'] / report['resident_mb'] < 2
    assert client['frames'] == 60 and client['acting'] == 3 and report['free'] == 5
    assert 0 < client['answer_ms'][0] <= client['answer_ms'][1]
    assert learner.spec.metrics()['remote_envs'] == 3


@pytest.mark.parametrize(
  ('address', 'source', 'on_cores', 'groups'),
  [
    ('tcp://127.0.0.1:0', '127.0.0.1', True, 1),
    ('tcp://127.0.0.1:0', '127.0.0.1', False, 2),  # an accelerator acts
    ('tcp://127.0.0.1:0', '127.0.0.2', True, 2),  # as from another machine
    ('unix:{dir}/a', '', True, 1),
    ('unix:{dir}/a', '', False, 2),
  ],
)
def test_groups_are_advised_by_whose_cores_act(
  address: str, source: str, on_cores: bool, groups: int, tmp_path: Path
) -> None:
  learner = Learner(address=address.format(dir=tmp_path), on_cores=on_cores)
  with learner, Raw(learner.address, source=source) as raw:
    assert raw.join_as()['groups'] == groups


def test_it_says_when_there_are_no_environments_and_goes_on() -> None:
  with Learner() as learner:
    command = '`podrace envs --connect tcp://127'
    learner.says(command)
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('going on')
      raw.say(session_messages.BYE, 'test')
      learner.says('left: test')
    until(lambda: sum(command in x for x in learner.said) == 2)


@pytest.mark.parametrize(
  ('theirs', 'line'),
  [
    (spec(shape=(5,)), r'observation: .*Box <f4 .*\[4\].* Box <f4 .*\[5\]'),
    (spec(dtype=np.uint8), r'Box <f4 .* Box \|u1'),
    (spec(actions=6), r'action: .*Discrete <i4 .*\[\], .*\[0, 5\], .*\[0, 6\]'),
  ],
)
def test_another_schema_is_refused_with_both_sides(theirs: Any, line: str) -> None:
  with Learner() as learner, Raw(learner.address, theirs) as raw:
    raw.say(session_messages.HELLO, raw.told())
    (reason,) = raw.refused()
    assert re.search(line, reason), reason
    learner.says(reason)


def test_a_refusal_is_short_however_much_the_client_has_said() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    leaf = ['\x1b[2J' + 'x' * 400, '<f4', [], 'y\n' * 200, []]
    schema = {'observation': [[f'{i}{leaf[0]}', *leaf[1:]] for i in range(60)], 'action': leaf}
    raw.say(session_messages.HELLO, raw.told(schema=schema, host='h\nforged'))
    reasons = raw.refused()
    assert sum(map(len, reasons)) < 2**14 and reasons[-1].startswith('and ')
    learner.says(r'refused h\nforged:')
    assert all('\x1b' not in x and len(x) < 2**14 for x in learner.said)


def test_only_what_is_wrong_is_a_warning() -> None:
  with Learner() as learner:
    learner.says('--connect')
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('going on')
      raw.say(session_messages.BYE, 'test')
      learner.says('left: test')
    with Raw(learner.address) as raw:
      raw.join_as()
      raw.send(b'\xc1' * 9)
      learner.says('dropped')
  told = dict(zip(learner.said, learner.levels, strict=True))

  def levels(text: str) -> set[int]:
    return {level for line, level in told.items() if text in line}

  assert levels(' joins ') == levels('left: test') == levels('going on') == {logging.INFO}
  assert levels('dropped') == levels('--connect') == {logging.WARNING}


def test_the_log_ends_nobody() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    for error in (BrokenPipeError(), ValueError('I/O operation on closed file'), SystemExit(1)):

      def say(level: int, line: str, error: BaseException = error) -> None:
        raise error

      learner.say = say
      learner.server.log('what nobody reads', always=True)
    raw.join(2)
    assert learner.server.failure is None


def test_trees_of_arrays() -> None:
  tree = spaces.Dict(
    board=spaces.Box(0, 255, (6, 6), np.uint8),
    rest=spaces.Tuple([spaces.Discrete(4, dtype=np.int32), spaces.MultiBinary(3)]),
  )
  kind = dataclasses.replace(spec(), observation_space=tree)
  with Learner(kind) as learner, Raw(learner.address, kind) as raw:
    raw.join(2)
    (_, arrival), *_ = learner.arrivals
    observation = arrival.timestep.observation
    assert observation['board'].shape == (2, 6, 6) and observation['rest'][0].dtype == np.int32
    assert observation['rest'][1].shape == (2, 3)


def test_a_waiting_client_hears_the_end() -> None:
  with Learner() as learner, Raw(learner.address) as one, Raw(learner.address) as late:
    one.join_as()
    for pool in learner.pools:
      pool.close()
    late.say(session_messages.HELLO, late.told())
    heard = late.hear()
    assert heard is not None and heard[0] is session_messages.WAIT
    learner.server.network.finish()
    learner.server.__exit__()
    assert one.last(session_messages.END) is late.last(session_messages.END) is True
    assert learner.server.failure is None


# --- batches ----------------------------------------------------------------------------------------


def test_half_is_acted_for_while_the_other_half_steps() -> None:
  """As soon as so many have come as are awaited, whatever the deadline."""
  with Learner(slots=8, max_wait=600.0) as learner:
    raws = [Raw(learner.address) for _ in range(4)]
    for raw in raws:
      raw.join_as()
      raw.enter(2)
    for seq, kind in enumerate((FIRST, MID)):
      for pair in (raws[:2], raws[2:]):
        for raw in pair:
          raw.step(2, seq, kind)
        for raw in pair:
          raw.act(2, seq)
    assert [len(a.env_id) for _, a in learner.arrivals] == [4, 4, 4, 4]
    for raw in raws:
      raw.close()


@pytest.mark.parametrize(
  ('groups', 'most', 'taken'),
  [
    ([], 8, 0), ([1], 8, 1), ([1] * 3, 8, 3), ([1] * 5, 8, 4), ([1] * 6, 8, 6), ([1] * 9, 8, 8), ([1], 1, 1),
    ([64] * 5, 512, 4), ([5] * 2, 16, 2), ([10] * 2, 64, 2), ([6, 2], 8, 2), ([8, 1], 16, 1), ([8, 4], 16, 2),
  ],
)  # fmt: skip
def test_a_batch_is_padded_by_a_quarter_at_most(groups: list[int], most: int, taken: int) -> None:
  assert groups_at_once(groups, most) == taken


def test_few_of_many_that_ask_are_in_the_next_batch() -> None:
  """Five have asked: four are one of the sizes that are compiled. The fifth is late then, but one more has come."""
  with Learner(slots=8, max_wait=0.001, act=False) as learner:
    pool, raws = learner.pools[0], [Raw(learner.address) for _ in range(6)]
    for raw in raws:
      raw.join_as()
      raw.enter(1)
    for raw in raws[:5]:
      raw.step(1, 0, FIRST)
    until(lambda: learner.server.counts['frames'] == 5)
    first = pool.recv()
    ids = first.env_id
    assert len(ids) == 4
    with learner.server.network.lead:  # nobody reads what comes while the batch is acted for
      raws[5].step(1, 0, FIRST)
      until(lambda: learner.has_arrived(raws[5]))
    pool.send(ids, np.zeros(len(ids), np.int32))
    second = pool.recv()
    ids = second.env_id
    assert len(ids) == 2
    assert np.shares_memory(first.timestep.observation, second.timestep.observation)
    pool.send(ids, np.zeros(len(ids), np.int32))
    pool.recv()
    for raw in raws:
      raw.act(1, 0)
      raw.close()


def test_requests_are_gathered_within_the_deadline() -> None:
  """Who is one of few that asked waits no longer than that."""
  with Learner(slots=8, max_wait=0.5) as learner:
    raws = [Raw(learner.address) for _ in range(4)]
    for raw in raws:
      raw.join_as()
      raw.enter(2)
    began = time.monotonic()
    raws[0].step(2, 0, FIRST)
    raws[0].act(2, 0)
    assert 0.4 < time.monotonic() - began < 5  # the three others never came
    assert [len(a.env_id) for _, a in learner.arrivals] == [2]
    for raw in raws:
      raw.close()


def test_a_silent_client_is_dropped_and_delays_no_other() -> None:
  with Learner(peer_timeout=1.0) as learner:
    silent, good = Raw(learner.address), Raw(learner.address)
    silent.join(4)
    good.join(4)
    seq = 1
    while not any('silent' in x for x in learner.said):
      good.step(4, seq)
      good.act(4, seq)  # in time, or it fails
      seq += 1
    assert seq > 10
    assert 'silent' in silent.gone() and silent.is_closed()
    silent.close()
    good.close()


class Clock:
  """The module `time`, in which `stopped` seconds have gone by unseen."""

  stopped = 0.0

  def monotonic(self) -> float:
    return time.monotonic() + self.stopped

  def __getattr__(self, name: str) -> Any:
    return getattr(time, name)


def test_who_was_not_listened_to_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
  clock, forgiven = Clock(), list[float]()
  for name, module in list(sys.modules.items()):
    if name.startswith('podrace.distributed') and getattr(module, 'time', None) is time:
      monkeypatch.setattr(module, 'time', clock)
  with Learner(peer_timeout=1.0, deadline=5.0) as learner, Raw(learner.address) as raw:
    raw.join(2)
    forgive = learner.server.forgive
    monkeypatch.setattr(
      learner.server, 'forgive', lambda seconds: (forgive(seconds), forgiven.append(seconds))
    )
    clock.stopped = 10.0
    until(lambda: forgiven)
    assert 9 < forgiven[0] < 12
    raw.step(2, 1)
    raw.act(2, 1)
    learner.says('silent for 1.')  # from now on


def test_environments_that_hang_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
  """Though their client lives."""
  monkeypatch.setattr(server, 'START_SECONDS', 0.2)
  with Learner(deadline=0.4) as learner, Raw(learner.address) as raw:
    raw.join(2)
    raw.say(session_messages.PING, None)
    learner.says('group 0 ')
    assert 'group 0 ' in raw.gone()


def test_a_learner_that_is_behind_holds_clients_back() -> None:
  """A client has one message of each group in the server, whatever it does."""
  with Learner(keep=False) as learner, Raw(learner.address) as raw:
    raw.join(8)
    learner.pause.clear()
    raw.step(8, 1)
    assert raw.hear(0.3) is None
    raw.say(session_messages.PING, None)
    raw.expect(session_messages.PONG)  # it is alive
    learner.pause.set()
    raw.act(8, 1)


def test_a_client_that_dies_during_an_answer_leaves_its_slots() -> None:
  with Learner(slots=2) as learner, Raw(learner.address) as one:
    one.join(2)
    learner.pause.clear()
    one.step(2, 1)
    until(lambda: learner.pools[0].acting)
    one.say(session_messages.BYE, 'test')
    learner.says('left: test')
    with Raw(learner.address) as other:
      other.join_as()
      other.say(environment_messages.ENTER, 0, 2)
      assert other.hear(0.2) is None
      learner.pause.set()
      other.expect(environment_messages.START)
      other.step(2, 0, FIRST)
      other.act(2, 0)
    assert learner.arrivals[-1][1].run_id.tolist() == [1, 1]


def test_a_thread_that_found_the_network_taken_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
  """It does not wait until the server's own thread looks around again."""
  taken, give_back = threading.Event(), threading.Event()
  turns: list[bool] = []
  monkeypatch.setattr(remote_pool, 'IDLE_SECONDS', 1000.0)
  with Learner(act=False, slots=2) as learner:
    turn, as_pool = learner.server.listener.turn, learner.server.network.turn

    def slow(seconds: float) -> None:
      if threading.current_thread().name == 'remote' and not give_back.is_set():
        taken.set()
        assert give_back.wait(20)
        monkeypatch.setattr(shared_listener, 'IDLE_TURN_SECONDS', 1000.0)
      turn(seconds)

    def watched(seconds: float) -> bool:
      turns.append(as_pool(seconds))
      return turns[-1]

    monkeypatch.setattr(learner.server.listener, 'turn', slow)
    assert taken.wait(20)
    monkeypatch.setattr(learner.server.network, 'turn', watched)
    pool = learner.pools[0]
    thread = threading.Thread(target=pool.recv)
    thread.start()
    until(lambda: turns == [False])
    give_back.set()
    with Raw(learner.address) as raw:
      raw.join_as()
    pool.kill()
    thread.join(20)
    assert not thread.is_alive()
