"""What a server does with clients that are right, wrong, slow, gone or hostile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from children import until
from gymnasium import spaces
from mutants import Document, data_of, spoiled, tell
from peers import ANY, Learner, Raw, lives, spec
from storm import MESSAGES, storm

from podrace.envs.host.base import groups_at_once
from podrace.net import listener, session
from podrace.net.frame import PREFIX
from podrace.net.top import Asker, table
from podrace.remote import server, wire
from podrace.remote.groups import Latencies
from podrace.types import FIRST, LAST, MID

# --- joining --------------------------------------------------------------------------------------


def test_a_client_joins_steps_and_is_counted() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    welcome = raw.join_as()
    assert welcome['largest_group'] == 8 and welcome['nonce'] == raw.nonce
    raw.enter(3)
    for seq in range(20):
      raw.step(3, seq, FIRST if seq == 0 else MID)
      action = raw.act(3, seq)
      assert action.shape == (3,) and action.dtype == np.int32
    raw.say(session.ASK)
    report = raw.expect(session.REPORT)[0][0]
    (client,) = report['clients']
    assert client['frames'] == 60 and client['acting'] == 3 and report['free'] == 5
    assert 0 < client['answer_ms'][0] <= client['answer_ms'][1]
    assert learner.spec.metrics()['remote_envs'] == 3


def test_who_is_back_ends_its_session_of_before() -> None:
  with (
    Learner(peer_timeout=600.0) as learner,
    Raw(learner.address) as lost,
    Raw(learner.address) as back,
  ):
    lost.join(8)  # all slots; the learner waits for its step, and can't know that it is lost
    back.hello(before=lost.session)
    back.enter(8)
    back.step(8, 0, FIRST)
    back.act(8, 0)
    lost.step(8, 1)
    assert 'no such session' in lost.expect(session.GONE)[0][2]
    assert learner.server.counts['dropped'] == 1
    session = back.session  # its own, but anew: it ends as one that said hello anew does
    back.hello(before=session, nonce=back.nonce + 1)
    assert back.session != session and learner.server.counts['dropped'] == 2
    learner.says('said hello anew')


def test_it_says_when_there_are_no_environments_and_goes_on() -> None:
  with Learner() as learner:
    learner.says('no environments are connected; waiting for `podrace envs --connect tcp://127')
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('environments are here, going on')
      raw.say(session.BYE, 'test')
      learner.says('left: test')
    until(lambda: sum('no environments' in x for x in learner.said) == 2)


@pytest.mark.parametrize(
  ('theirs', 'line'),
  [
    (spec(shape=(5,)), r'observation: the learner has Box <f4 of shape \[4\].* the environments Box <f4 of shape \[5\]'),
    (spec(dtype=np.uint8), r'the learner has Box <f4 .* the environments Box \|u1'),
    (spec(actions=6), r'action: the learner has Discrete <i4 of shape \[\], limits \[0, 5\], the environments .*\[0, 6\]'),
  ],
)  # fmt: skip
def test_another_schema_is_refused_with_both_sides(theirs: Any, line: str) -> None:
  with Learner() as learner, Raw(learner.address, theirs) as raw:
    raw.say(session.HELLO, raw.told())
    (reason,) = raw.refused()
    import re

    assert re.search(line, reason), reason
    learner.says(reason)


def test_another_version_is_refused_with_both_sides() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.say(session.HELLO, raw.told(version=2))
    (reason,) = raw.refused()
    assert 'the learner speaks podrace version 1' in reason and 'podrace version 2' in reason
    learner.says(reason)


def test_a_refusal_is_short_however_much_the_client_has_said() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    leaf = ['\x1b[2J' + 'x' * 400, '<f4', [], 'y\n' * 200, []]
    schema = {'observation': [[f'{i}{leaf[0]}', *leaf[1:]] for i in range(60)], 'action': leaf}
    raw.say(session.HELLO, raw.told(schema=schema, host='h\nforged'))
    header = raw.socket.recv_multipart()[0]
    (reasons,) = wire.unpack(header)[1:]
    assert len(header) < 2**14 and reasons[-1].startswith('and ')
    learner.says(r'refused h\nforged:')
    assert all('\x1b' not in x and len(x) < 2**14 for x in learner.said)


def test_only_what_is_wrong_is_a_warning() -> None:
  with Learner() as learner:
    learner.says('no environments are connected')
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('going on')
      raw.say(session.BYE, 'test')
      learner.says('left: test')
    with Raw(learner.address) as raw:
      raw.join_as()
      raw.socket.send(b'\xc1')
      learner.says('dropped, it sent')
  told = dict(zip(learner.said, learner.levels, strict=True))

  def levels(text: str) -> set[int]:
    return {level for line, level in told.items() if text in line}

  assert levels(' joins with ') == levels('left: test') == levels('going on') == {logging.INFO}
  assert levels('dropped, it sent') == levels('no environments are connected') == {logging.WARNING}


def test_the_log_ends_nobody() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    for error in (BrokenPipeError(), ValueError('I/O operation on closed file'), SystemExit(1)):

      def say(level: int, line: str, error: BaseException = error) -> None:
        raise error

      learner.server._say = say
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


def test_hello_again_at_the_end_is_no_failure_and_who_waits_is_told_of_it() -> None:
  with Learner() as learner, Raw(learner.address) as one, Raw(learner.address) as late:
    one.join_as()
    for pool in learner.pools:
      pool.close()
    one.say(session.HELLO, one.told())  # as if the first answer had been slow
    assert one.hear()[0][0] == session.WAIT
    late.say(session.HELLO, late.told())
    assert late.hear()[0][0] == session.WAIT
    learner.server.finished()
    learner.server.__exit__()
    assert one.expect(session.END)[0][1] is True and late.expect(session.END)[0][1] is True
    assert learner.server.failure is None


# --- slots ------------------------------------------------------------------------------------------


def test_slots_are_waited_for_and_taken_over_as_another_life() -> None:
  with Learner(slots=4) as learner, Raw(learner.address) as one, Raw(learner.address) as other:
    one.join(3)
    other.join_as()
    other.say(wire.ENTER, 0, 2)
    other.say(session.PING, None)
    assert other.hear()[0][0] == session.PONG  # no START: one slot is left
    other.say(wire.ENTER, 1, 2)
    other.say(session.PING, None)
    assert other.hear()[0][0] == session.PONG
    (told,) = [x for x in learner.said if 'wait until others leave' in x]  # once, of both groups
    assert 'all 4 slots' in told, told
    one.say(session.BYE, 'enough')
    other.expect(wire.START)
    other.step(2, 0, FIRST)
    other.act(2, 0)
    found = lives(learner.arrivals)
    assert len(found) == 5
    assert sorted(run for _, _, run in found) in ([0, 0, 0, 0, 1], [0, 0, 0, 1, 1])


@pytest.mark.parametrize('transport', ['tcp', 'ipc'])
def test_a_session_ends_with_its_connection(transport: str, tmp_path: Path) -> None:
  """Over and over, so that the files of connections have the same numbers again."""
  address = f'ipc://{tmp_path}/socket' if transport == 'ipc' else ANY
  with (
    Learner(address=address, slots=4, peer_timeout=600.0) as learner,
    Raw(learner.address) as last,
  ):
    last.join_as()
    for i in range(20):
      with Raw(learner.address) as one:
        one.join_as()
        one.enter(4)  # and is gone while it steps, when nothing is said to it
        if i % 2:  # or while the learner thinks
          one.step(4, 0, FIRST)
          until(lambda n=2 * (i + 1): learner.server.counts['frames'] == n)
    learner.says('is gone')
    last.enter(4)
    last.step(4, 0, FIRST)
    last.act(4, 0)
    counts = learner.server.counts
    assert (counts['sessions'], counts['dropped'], len(learner.server.peers)) == (21, 20, 1)
    assert len(lives(learner.arrivals)) == 4 * 11


def test_slots_of_who_is_gone_before_it_starts_go_to_the_next_once() -> None:
  with Learner(slots=4) as learner, Raw(learner.address) as one, Raw(learner.address) as last:
    one.join(4)
    server, gone = learner.server, Raw(learner.address)
    for raw in (gone, last):
      raw.join_as()
      raw.say(wire.ENTER, 0, 2)
      raw.say(session.PING, None)
      raw.expect(session.PONG)
    send = server.send

    def to_who_is_there(address: bytes, *header: Any, **more: Any) -> bool:
      if header[:2] == (wire.START, gone.session):
        server._cut[address] = 0.0  # as where it fails
        return False
      return send(address, *header, **more)

    server.send = to_who_is_there  # type: ignore[method-assign]
    one.say(session.BYE, 'enough')
    last.expect(wire.START)
    last.say(session.PING, None)
    assert last.hear()[0][0] == session.PONG  # and no further START
    last.step(2, 0, FIRST)
    last.act(2, 0)
    last.say(session.BYE, 'enough')
    until(lambda: len(learner.pools[0].free) == 4)
    assert sorted(learner.pools[0].free) == [0, 1, 2, 3]
    gone.close()


def test_small_groups_keep_no_large_one_waiting_for_ever() -> None:
  """They take what is too little for it, but not again and again."""
  with contextlib.ExitStack() as stack:
    learner = stack.enter_context(Learner(slots=4))

    def come(size: int) -> Raw:
      raw = stack.enter_context(Raw(learner.address))
      raw.join_as()
      raw.say(wire.ENTER, 0, size)
      return raw

    def go(raw: Raw) -> None:
      raw.say(session.BYE, 'enough')

    here = [come(2), come(2)]
    for raw in here:
      raw.expect(wire.START)
    large = come(4)
    large.say(session.PING, None)
    assert large.hear()[0][0] == session.PONG  # it has entered, and waits
    for _ in range(4):
      here.append(come(2))
      go(here.pop(0))
      here[-1].expect(wire.START)
    late = come(2)
    for raw in here:
      go(raw)
    large.expect(wire.START)
    late.say(session.PING, None)
    assert late.hear()[0][0] == session.PONG
    go(large)
    late.expect(wire.START)


def test_a_restarted_environment_is_another_life() -> None:
  """As often as its number went up, also around its end; any other change is one restart."""
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    life, run_id = [0, 0], [0, 0]
    steps = [
      ((0, 3), (0, 3)),
      ((1, 2**32 - 5), (1, 4)),
      ((1, 1), (1, 10)),
      ((2**31, 2002), (2, 11)),
    ]
    for seq, (lives, run_ids) in enumerate(steps, 1):
      frames = raw.body(2)
      records = np.frombuffer(frames[0], wire.RECORD).copy()
      records['life'], records['step_type'] = lives, np.where(np.equal(lives, life), MID, FIRST)
      frames[0] = records.tobytes()
      raw.step(2, seq, body=frames)
      raw.act(2, seq)
      life, run_id = list(lives), list(run_ids)
      assert learner.arrivals[-1][1].run_id.tolist() == run_id
    raw.say(session.ASK)
    assert raw.expect(session.REPORT)[0][0]['clients'][0]['restarts'] == 13


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
    with learner.server._lead:  # nobody reads what comes while the batch is acted for
      raws[5].step(1, 0, FIRST)
      until(lambda: learner.server._router.poll(0))
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


def test_a_silent_client_is_dropped_in_seconds_and_does_not_hold_up_others() -> None:
  with Learner(peer_timeout=1.0) as learner:
    silent, good = Raw(learner.address), Raw(learner.address)
    silent.join(4)
    good.join(4)
    seq = 1
    while not any('silent for' in x for x in learner.said):
      good.step(4, seq)
      good.act(4, seq)  # in time, or it fails
      seq += 1
    assert seq > 10
    assert silent.expect(session.GONE)[0][1] == silent.session
    silent.step(4, 1)  # too late
    assert 'no such session' in silent.expect(session.GONE)[0][2]
    silent.close()
    good.close()


def test_who_was_not_listened_to_is_not_silent() -> None:
  with Learner(peer_timeout=1.0, deadline=5.0) as learner, Raw(learner.address) as raw:
    raw.join(2)
    server, looked = learner.server, threading.Event()

    def stop() -> None:  # for ten seconds, as far as it can tell
      for peer in server.peers.values():
        peer.last_seen -= 10
        peer.groups[0].since -= 10
      server._ticked -= 10
      server.look_at_the_clock()
      looked.set()

    server.call(stop)
    assert looked.wait(10)
    raw.step(2, 1)
    raw.act(2, 1)
    learner.says('silent for 1.')  # from now on


def test_environments_that_hang_while_their_client_lives_are_dropped(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(server, 'START_SECONDS', 0.2)
  with Learner(deadline=0.4) as learner, Raw(learner.address) as raw:
    raw.join(2)
    raw.say(session.PING, None)
    learner.says('group 0 has not answered for 1 s')
    assert raw.expect(session.GONE)[0][1] == raw.session


def test_a_learner_that_is_behind_holds_clients_back() -> None:
  """A client has one message of each group in the server, whatever it does."""
  with Learner(keep=False) as learner, Raw(learner.address) as raw:
    raw.join(8)
    learner.pause.clear()
    raw.step(8, 1)
    assert raw.hear(0.3) is None
    raw.say(session.PING, None)
    raw.expect(session.PONG)  # it is alive
    learner.pause.set()
    raw.act(8, 1)


def test_a_client_that_dies_while_it_is_answered_leaves_its_slots() -> None:
  with Learner(slots=2) as learner, Raw(learner.address) as one:
    one.join(2)
    learner.pause.clear()
    one.step(2, 1)
    until(lambda: learner.pools[0]._inferring)
    one.say(session.BYE, 'test')
    learner.says('left: test')
    with Raw(learner.address) as other:
      other.join_as()
      other.say(wire.ENTER, 0, 2)
      assert other.hear(0.2) is None
      learner.pause.set()
      other.expect(wire.START)
      other.step(2, 0, FIRST)
      other.act(2, 0)
    assert learner.arrivals[-1][1].run_id.tolist() == [1, 1]


# --- what must not be learned from ------------------------------------------------------------------


def replayed(raw: Raw) -> None:
  frames = raw.body(2)
  raw.step(2, 1, body=frames)
  raw.step(2, 1, body=frames)


def torn(raw: Raw) -> None:
  frames = raw.body(2)
  crc = wire.checksum(frames)
  frames[1] = frames[1][:-1] + b'x'
  raw.say(wire.STEP, 0, 1, crc, body=frames)


def changed(field: str, value: Any) -> Any:
  def wrong(raw: Raw) -> None:
    frames = raw.body(2)
    records = np.frombuffer(frames[0], wire.RECORD).copy()
    records[field] = value
    raw.step(2, 1, body=[records.tobytes(), *frames[1:]])

  return wrong


def rewarded_first(raw: Raw) -> None:
  frames = raw.body(2, FIRST)
  records = np.frombuffer(frames[0], wire.RECORD).copy()
  records['reward'] = [0, 1]
  raw.step(2, 1, body=[records.tobytes(), *frames[1:]])


def not_finite(raw: Raw) -> None:
  frames = raw.body(2)
  raw.step(2, 1, body=[frames[0], np.full((2, 4), np.nan, np.float32).tobytes()])


@pytest.mark.parametrize(
  ('wrong', 'reason'),
  [
    (replayed, r'timesteps 1 of group 0, in turn'),
    (torn, 'checksum'),
    (lambda raw: raw.step(2, 5), 'timesteps 5 of group 0, in turn 1'),
    (lambda raw: raw.step(2, 1, group=1), 'which has not entered'),
    (lambda raw: raw.step(2, 1, body=raw.body(3)), 'a frame of 60 bytes, expected 40'),
    (lambda raw: raw.step(2, 1, body=raw.body(2)[:1]), '1 frames after the header, expected 2'),
    (lambda raw: raw.step(2, 1, body=[*raw.body(2), b'']), '3 frames after the header'),
    (not_finite, 'NaN or infinite'),
    (changed('reward', np.inf), 'NaN or infinite'),
    (changed('score', np.nan), 'NaN or infinite'),
    (changed('discount', 2), 'discount'),
    (changed('step_type', 3), 'a step type'),
    (changed('step_type', FIRST), ''),
    (changed('life', 1), 'without its first timestep'),
    (changed('zero', 1), 'a zero that is none'),
    (changed('ended', 1), 'a game that is over within an episode'),
    (rewarded_first, 'a reward with the first timestep'),
    (lambda raw: raw.say(wire.ENTER, 0, 2), 'is there already'),
    (lambda raw: raw.say(wire.ENTER, 1, 9), '9 environments, expected 1 to 8'),
    (lambda raw: raw.say(wire.ENTER, 300, 1), 'group 300'),
    (lambda raw: raw.say(wire.STEP, 0, 1), '3 fields'),
    (lambda raw: raw.say(wire.STEP, 0, -1, 0), '-1 in a header'),
    (lambda raw: raw.say(99), 'kind 99'),
    (lambda raw: raw.say(session.PING, body=[b'x']), 'expected none'),
    (lambda raw: raw.socket.send(b'\x92\x04' + b'\x91' * 999 + b'\x90'), 'within each other'),
    (lambda raw: raw.socket.send(b'\xc1'), 'not msgpack'),
    (lambda raw: raw.socket.send(b''), 'not msgpack'),
    (lambda raw: raw.socket.send(b'x' * 70_000), '70000 bytes, at most'),
    (lambda raw: raw.say(session.HELLO, {'name': 1}), 'hello without a name that is a string'),
    (lambda raw: raw.say(session.HELLO, raw.told(nonce=2**63)), 'hello without a nonce that is an integer'),
    (lambda raw: raw.say(session.HELLO, raw.told(nonce=1, before='')), 'session before that is no integer'),
    (lambda raw: raw.say(session.HELLO, raw.told(nonce=1, before=-1)), 'session before that is no integer'),
    (lambda raw: raw.say(session.HELLO, raw.told(pid=-1)), 'hello without a pid that is an integer'),
    (lambda raw: raw.say(session.HELLO, raw.told(host='h' * 201)), 'hello without a host that is a string'),
  ],
)  # fmt: skip
def test_what_is_wrong_ends_the_session_and_reaches_nobody(wrong: Any, reason: str) -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    wrong(raw)
    if reason == '':  # FIRST after FIRST is how an episode ends at once
      raw.act(2, 1)
      return
    while (heard := raw.expect(session.GONE) if wrong is not replayed else raw.hear())[0][
      0
    ] != session.GONE:
      assert heard[0][0] == wire.ACTION  # of the one that was no replay
    assert reason in heard[0][2], heard
    learner.says(reason)
    raw.say(session.PING, None)
    until(lambda: learner.server.counts['ignored'] == 1)
    with Raw(learner.address) as other:  # nobody else is any worse off
      other.join(8)
    assert all(len(rows) <= 2 for rows in lives(learner.arrivals).values())


def together(learner: Learner, raws: list[Raw], messages: int) -> None:
  """Has so many messages dealt with that have come before the first of them is; of who has the network.

  In this order of the clients.
  """
  came: list[Any] = []
  order = [raw.session for raw in raws]

  def all_are_there() -> bool:
    came.extend(learner.server.received(256))
    return len(came) == messages

  until(all_are_there)
  for message in sorted(came, key=lambda m: order.index(wire.unpack(m[1].buffer)[1])):
    learner.server.take(message)


@pytest.mark.parametrize('bound', [server.TOGETHER, 0], ids=['together', 'one by one'])
def test_of_many_that_come_together_those_that_are_wrong_are_found(
  monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
  monkeypatch.setattr(server, 'TOGETHER', bound)

  def frames(raw: Raw, size: int, **fields: Any) -> list[bytes]:
    frames = raw.body(size)
    records = np.frombuffer(frames[0], wire.RECORD).copy()
    for name, values in fields.items():
      records[name] = values
    return [records.tobytes(), *frames[1:]]

  with Learner(slots=30, max_wait=0.001) as learner, contextlib.ExitStack() as stack:
    raws = [stack.enter_context(Raw(learner.address)) for _ in range(11)]
    within, ends, closes, infinite, nan, begins, two, both, leaves, again, last = raws
    sizes = {raw: 1 if raw is last else 3 if raw is within else 2 for raw in raws}
    for raw, size in sizes.items():
      raw.join(size)
      raw.step(size, 1)
      raw.act(size, 1)
    for raw in (two, both):
      raw.enter(2, group=1)
      raw.step(2, 0, FIRST, group=1)
      raw.act(2, 0, group=1)
    learner.arrivals.clear()
    counts = learner.server.counts
    until(lambda: learner.pools[0]._asked == 26)
    before = counts['frames']
    with learner.server._lead:
      within.step(3, 2, body=frames(within, 3, reward=[1, 2, 4]))
      for raw in (ends, closes):
        raw.step(2, 2, body=frames(raw, 2, step_type=[MID, LAST], discount=[1, 0], reward=8))
      begins.step(2, 2, FIRST)
      two.step(2, 2)
      two.step(2, 1, group=1, body=frames(two, 2, discount=[1, 2]))
      for group in (0, 1):
        both.step(2, 2 - group, group=group, body=frames(both, 2, discount=[1, 2]))
      leaves.step(2, 2)
      leaves.say(session.BYE, 'enough')
      together(learner, raws, 10)
      infinite.step(2, 2, body=frames(infinite, 2, reward=[0, np.inf]))
      nan.step(2, 2, body=[raw.body(2)[0], np.full((2, 4), np.nan, np.float32).tobytes()])
      again.step(2, 2, body=frames(again, 2, life=[0, 1], step_type=[MID, FIRST]))
      last.step(1, 2)
      together(learner, raws, 4)
      assert len(learner.server._come) == (4 if bound else 1)
      learner.server.settle()
    for raw in (within, ends, closes, again, last):
      raw.act(sizes[raw], 2)
    bad = {
      infinite: 'infinite',
      nan: 'observation',
      begins: 'within another',
      two: 'discount',
      both: 'discount',
    }
    for raw, reason in bad.items():
      assert reason in raw.expect(session.GONE)[0][2]
    assert counts['malformed'] == len(bad)
    assert counts['frames'] - before == (12 if bound else 14)  # the first group of `two`
    until(lambda: learner.pools[0]._asked == 10)
    with learner.server._lead:  # both bad, beside one that is within an episode and one that isn't
      ends.step(2, 3)
      within.step(3, 3)
      together(learner, raws, 2)
      learner.server.settle()
      closes.step(2, 3)
      ended = dict(life=[0, 1], step_type=[MID, LAST], discount=[1, 0])
      again.step(2, 3, body=frames(again, 2, **ended))
      together(learner, raws, 2)
      learner.server.settle()
    for raw in (ends, closes):
      assert 'without its first timestep' in raw.expect(session.GONE)[0][2]
    for raw in (within, again):
      raw.act(sizes[raw], 3)
    groups = [g for p in learner.server.peers.values() for g in p.groups.values()]
    assert sorted(g.size for g in groups) == [1, 2, 3]
    rewards = [r for _, a in learner.arrivals for r in a.timestep.reward if r]
    assert sorted(rewards) == [1, 2, 4, 8, 8, 8, 8]
    assert max(a.run_id.max() for _, a in learner.arrivals) == 1  # of the one that was restarted
    seen = sum(len(a.env_id) for _, a in learner.arrivals)
    assert seen + counts['withdrawn'] == counts['frames'] - before
    taken = [int(slot) for g in groups for slot in g.slots]
    assert sorted([*learner.pools[0].free, *taken]) == list(range(30))


def test_what_has_come_for_a_pool_that_is_closed_is_forgotten() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    with learner.server._lead:
      raw.step(2, 1)
      together(learner, [raw], 1)
      learner.server.unpool(learner.pools[0])
      learner.server.settle()
    assert learner.server.counts['frames'] == 2
    assert not learner.server.counts['unexpected'] and not learner.pools[0]._ready


def test_who_is_dropped_while_it_is_answered_leaves_all_its_slots() -> None:
  with Learner(slots=8, max_wait=600.0) as learner, Raw(learner.address) as raw:
    raw.join_as()
    for group in (0, 1):
      raw.enter(2, group)
    server, send = learner.server, learner.server.send

    def fails(address: bytes, *header: Any, **more: Any) -> bool:
      if header[0] == wire.ACTION:
        server.drop(server.peers[address], 'does not read')
        return False
      return send(address, *header, **more)

    server.send = fails  # type: ignore[method-assign]
    with server._lead:
      for group in (0, 1):
        raw.step(2, 0, FIRST, group)
      together(learner, [raw], 2)
      server.settle()
    learner.says('does not read')
    until(lambda: sorted(learner.pools[0].free) == list(range(8)) and not learner.pools[0]._asked)
    server.send = send  # type: ignore[method-assign]
    raw.join(8)


@pytest.mark.parametrize(
  ('space', 'good', 'wrong'),
  [
    (spaces.Discrete(4, start=2, dtype=np.int32), [2, 5], [5, 6]),
    (spaces.Discrete(4, start=2, dtype=np.int32), [2, 5], [1, 2]),
    (spaces.MultiDiscrete([3, 5], dtype=np.int32), [[2, 4], [0, 0]], [[2, 4], [3, 0]]),
    (spaces.MultiBinary(2), [[0, 1], [1, 0]], [[0, 1], [2, 0]]),
    (spaces.Box(0, 1, (2,), np.bool_), [[0, 1], [1, 0]], [[0, 1], [2, 0]]),
  ],
)  # fmt: skip
def test_choices_that_there_are_not(space: Any, good: Any, wrong: Any) -> None:
  kind = dataclasses.replace(spec(), observation_space=space)
  with Learner(kind) as learner, Raw(learner.address, kind) as raw:
    raw.join_as()
    raw.enter(2)
    dtype = np.uint8 if space.dtype == np.bool_ else space.dtype
    for seq, (step_type, numbers) in enumerate([(FIRST, good), (MID, good), (MID, wrong)]):
      records, _ = raw.body(2, step_type)
      raw.step(2, seq, body=[records, np.array(numbers, dtype).tobytes()])
      if numbers is good:
        raw.act(2, seq)
    assert 'in observation, expected ' in raw.expect(session.GONE)[0][2]


def test_percentiles_are_made_once_a_second() -> None:
  latencies = Latencies()
  assert latencies.milliseconds() == (0.0, 0.0)
  for i in range(101):
    latencies.add(i / 1000)
  assert latencies.milliseconds() == (50.0, 99.0)
  for _ in range(1024):
    latencies.add(1.0)
  latencies._told_at = time.monotonic()
  assert latencies.milliseconds() == (50.0, 99.0)
  latencies._told_at -= 1.1
  assert latencies.milliseconds() == (1000.0, 1000.0)


def test_names_are_shown_as_they_are() -> None:
  from rich.console import Console

  with Learner() as learner, Raw(learner.address) as raw:
    raw.say(session.HELLO, raw.told(host='[/x]\x1b[2J', env='[/y]'))
    raw.expect(session.WELCOME)
    learner.server.env = '[/z]'
    report = learner.server.report()
    clients = [{'name': c['name'], 'last_seen_s': 0.0} for c in report['clients']]
    console = Console(record=True, width=250)
    console.print(table(report, {}, 1.0))
    console.print(table({**report, 'service': '[/z]', 'tables': [], 'clients': clients}, {}, 1.0))
    text = console.export_text()
    assert text.count(r'[/x]\x1b[2J') == 2 and '[/z]' in text and '\x1b' not in text


# --- who asks, and does not read ---------------------------------------------------------------------


def deaf(context: zmq.Context[Any], address: str) -> zmq.Socket[Any]:
  """A client that keeps next to nothing of what it has not read."""
  socket = context.socket(zmq.DEALER)
  socket.linger, socket.rcvhwm, socket.sndtimeo = 0, 1, 10_000
  socket.connect(address)
  return socket


@pytest.mark.parametrize('seconds', [hub.REPORT_SECONDS, 0.0], ids=['one for all', 'each anew'])
def test_reports_cost_little_however_often_they_are_asked_for(
  seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(hub, 'REPORT_SECONDS', seconds)
  made: list[float] = []
  with (
    Learner() as learner,
    Raw(learner.address) as raw,
    deaf(raw.context, learner.address) as socket,
  ):
    report, counts = learner.server.report, learner.server.counts

    def large() -> dict[str, Any]:
      made.append(time.monotonic())
      return {**report(), 'env': 'x' * 900_000}

    monkeypatch.setattr(learner.server, 'report', large)
    before = memory()
    for _ in range(300):
      socket.send(wire.pack(session.ASK))
    until(lambda: counts['asked'] == 300)
    assert memory() - before < 50 * 2**20  # else 300 of them wait there
    for _ in range(2):  # what it was sent, and the answer to all those after
      assert socket.poll(10_000)
      assert wire.unpack(socket.recv(), wire.REPORT_BYTES)[0] == session.REPORT
    for _ in range(30):
      raw.say(session.ASK)
      assert raw.socket.poll(10_000)
      raw.socket.recv()
    assert all(y - x >= seconds for x, y in itertools.pairwise(made))


def test_a_report_of_the_longest_names_fits() -> None:
  told = dict(nonce=0, host='\U000e0001' * 200, pid=2**63 - 1, env='\U0001f600' * 200)
  with Learner(act=False) as learner:
    filled = threading.Event()

    def fill() -> None:
      for i in range(1500):
        peer = Peer(i.to_bytes(5, 'big'), 2**56 - 1, told, b'')
        peer.environments, peer.frames, peer.restarts = 65536, 2**62, 2**62
        learner.server.peers[peer.address] = peer
      filled.set()

    learner.server.call(fill)
    assert filled.wait(10)
    asker = Asker(learner.address, None, False)
    report = asker.ask()
    asker.close()
    assert len(report['clients']) == 1000 and report['more_clients'] == 500
    name = report['clients'][0]['name']
    assert name.startswith('\\U000e0001') and name.endswith(f'...:{2**63 - 1}') and len(name) == 220


def test_a_stranger_that_does_not_read_is_ignored() -> None:
  with (
    Learner() as learner,
    Raw(learner.address) as good,
    deaf(good.context, learner.address) as socket,
  ):
    leaf = ['x' * 400, '<f4', [], 'y' * 200, []]
    schema = {'observation': [[f'{i}{leaf[0]}', *leaf[1:]] for i in range(30)], 'action': leaf}
    hello = wire.pack(session.HELLO, good.told(schema=schema))
    for _ in range(20_000):  # until all that there is to hold the answers is full
      socket.send(hello)
      if learner.server.counts['ignored']:
        break
    assert learner.server.counts['ignored'] and not learner.server.counts['malformed']
    good.join(2)


# --- fuzzing ----------------------------------------------------------------------------------------


def garbage(random: random.Random, raw: Raw) -> list[bytes]:
  """A message that is wrong in one of many ways, or a right one at the wrong time."""
  kinds = [session.HELLO, wire.ENTER, wire.STEP, session.PING, session.BYE, session.ASK, 0, 65, 200]
  values: list[Any] = [0, 1, -1, 2**63, 3.5, None, True, 'x', b'y' * random.randrange(50), [],
                       [[[[]]]], {'a': 1}, {1: 2}, raw.told(),
                       raw.told(schema=[1]), raw.told(pid='x'), raw.told(host='h' * 300)]  # fmt: skip
  way = random.choices(range(6), [1, 1, 4, 4, 4, 4])[0]
  if way == 0:
    return [random.randbytes(random.randrange(60)) for _ in range(random.randrange(1, 6))]
  fields = [random.choice(values) for _ in range(random.randrange(6))]
  header = msgpack.packb([random.choice(kinds), *fields])
  if way == 1:
    return [header[: random.randrange(len(header) + 1)]]
  if way == 2:
    return [header, *[random.randbytes(random.randrange(200)) for _ in range(random.randrange(4))]]
  frames = raw.body(2)
  if way == 3:
    return [
      msgpack.packb([wire.STEP, 0, random.randrange(3), wire.checksum(frames)]),
      *frames,
    ]
  if way == 4:
    return [msgpack.packb([wire.STEP, 0, 1, 5]), *frames]
  return [header]


def memory() -> int:
  """Bytes that this process has in memory."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def fuzz(count: int) -> None:
  """Garbage, each heard in a session of its own."""
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as raw:

    def case(rng: random.Random, session: int) -> Any:
      raw.session = session
      return [([wire.ENTER, session, 0, 2], [], None)], garbage(rng, raw)

    heard = tell(learner.server, lambda: [session.HELLO, raw.told()], case, count)
    assert heard.parsed > 0.8 * count and heard.good < 0.5 * count, heard
    until(lambda: len(learner.pools[0].free) == 64)
    raw.join(64)  # all slots are free again, and the server does what it did


def flood(messages: int) -> None:
  """A good client steps all the while; the others send garbage, each until it is ignored."""
  rng = random.Random(0)
  with Learner(keep=False) as learner, Raw(learner.address) as good:
    good.join(2)
    counts = learner.server.counts
    seq, sent, grown = 1, 0, []
    while sent < messages:
      raws = [Raw(learner.address) for _ in range(4)]
      for raw in raws[:2]:
        raw.join_as()
        raw.say(wire.ENTER, 0, 2)
      for raw in raws:
        for _ in range(500):
          raw.socket.send_multipart(garbage(rng, raw))
      sent += 2000
      for raw in raws:  # all of it has been read, or the connection is ignored
        raw.say(session.ASK)
      before = counts['ignored'] + counts['malformed'] + counts['stale']
      good.step(2, seq)
      good.act(2, seq)
      seq += 1
      until(lambda b=before: counts['ignored'] + counts['malformed'] >= 0.9 * sent)
      for raw in raws:
        raw.close()
      grown.append(memory())
    good.step(2, seq)
    good.act(2, seq)
    assert learner.server.failure is None
    assert counts['malformed'] >= messages / 2000
    half = len(grown) // 2
    assert grown[-1] - grown[half] < 20 * 2**20, grown  # once it has all it needs, it stays
    assert len(learner.server.peers) <= 9 and len(learner.server._banned) <= 4096
    assert len(learner.said) < 30 + 3 * messages / 2000  # and the log is bounded


def documents(raw: Raw) -> Callable[[int], list[Document]]:
  """What a client of a session may say, in an order in which it may say it."""
  frames = raw.body(2, FIRST)
  return lambda session: [
    ([session.PING, session], [], None),
    ([wire.ENTER, session, 0, 2], [], None),
    ([wire.STEP, session, 0, 0, wire.checksum(frames)], frames, 4),
    ([session.ASK], [], None),
    ([session.BYE, session, 'enough'], [], None),
  ]


def fuzz_documents(count: int) -> None:
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as raw:
    before = memory()
    hello = lambda: [session.HELLO, raw.told()]  # noqa: E731
    heard = tell(learner.server, hello, spoiled(hello, documents(raw)), count)
    assert heard.parsed > 0.8 * count and count / 20 < heard.good < count * 0.9, heard
    until(lambda: len(learner.pools[0].free) == 64)
    assert memory() - before < 30 * 2**20 and not learner.server.peers
    raw.join(64)  # the server does what it did


def test_documents_that_are_nearly_right() -> None:
  fuzz_documents(3000)


@pytest.mark.slow
def test_many_documents_that_are_nearly_right() -> None:
  fuzz_documents(200_000)


def test_fuzzing() -> None:
  fuzz(3000)
  flood(4000)


@pytest.mark.slow
def test_fuzzing_a_million() -> None:
  fuzz(1_000_000)
  flood(100_000)


def weather(count: int) -> None:
  """Over real connections; what is nearly right first, then garbage until the connection is ignored."""
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as good:
    good.join(2)
    template, seq = Raw(learner.address), 0
    hello = lambda: [session.HELLO, template.told(nonce=random.getrandbits(40))]  # noqa: E731
    nearly = spoiled(hello, documents(template))

    def messages(rng: random.Random, session: int) -> Iterator[list[bytes]]:
      template.session = session
      before, mutant = nearly(rng, session)
      for header, frames, _ in before:
        yield [wire.pack(*header), *frames]
      yield mutant
      for _ in range(rng.randrange(6)):
        yield garbage(rng, template)

    def go_on() -> None:
      nonlocal seq
      seq += 1
      good.step(2, seq)
      assert good.act(2, seq).shape == (2,)

    told = storm(learner.address, count, hello, session.WELCOME, messages, go_on, memory)
    counts = learner.server.counts
    print(told, dict(counts))
    assert learner.server.failure is None and not counts['unexpected']
    assert told.slowest < 10 and told.megabytes < 20, told
    assert counts['malformed'] > told.connections / 2  # each once, then it is ignored
    assert counts['ignored'] < 0.7 * told.messages
    assert any('ignoring somebody who sent' in x for x in learner.said)
    assert any('dropped, it sent' in x for x in learner.said)
    assert len(learner.said) < 100 + 4 * told.seconds
    until(lambda: (go_on(), len(learner.server.peers) == 1)[1])  # the others are silent
    assert counts['sessions'] == counts['dropped'] + 1
    template.close()


def test_a_storm() -> None:
  weather(2000)


@pytest.mark.slow
def test_a_long_storm() -> None:
  weather(MESSAGES)


def test_a_huge_frame_ends_the_connection_before_it_is_read() -> None:
  with Learner() as learner, Raw(learner.address) as raw, Raw(learner.address) as good:
    good.join(2)
    raw.join_as()
    largest = learner.server._router.maxmsgsize
    assert largest < 140_000
    before = memory()
    raw.socket.send(b'x' * 2**28)
    for seq in range(1, 100):
      good.step(2, seq)
      good.act(2, seq)
    assert memory() - before < 2**28 + 50 * 2**20  # what the sender has
    assert learner.server.counts['malformed'] == 0  # it never got as far


def test_a_thousand_light_clients() -> None:
  """Joined at once, each answered within seconds, all forgotten when they are silent."""
  with Learner(slots=1000, peer_timeout=5.0, keep=False) as learner:
    context_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(1000, (context_limit - 200) // 4)
    context = zmq.Context()
    context.max_sockets = 2000
    sockets = []
    template = Raw(learner.address)
    before = memory()
    for i in range(count):
      s = context.socket(zmq.DEALER)
      s.linger = 0
      s.connect(learner.address)
      s.send(wire.pack(session.HELLO, template.told(nonce=i)))
      sockets.append(s)
    sessions = []
    for s in sockets:
      assert s.poll(20_000)
      header = wire.unpack(s.recv())
      assert header[0] == session.WELCOME
      sessions.append(header[1])
    for s, session in zip(sockets, sessions, strict=True):
      s.send(wire.pack(wire.ENTER, session, 0, 1))
    for s, session in zip(sockets, sessions, strict=True):
      assert s.poll(20_000)
      assert wire.unpack(s.recv())[0] == wire.START
      frames = template.frames(1, FIRST)
      header = wire.pack(wire.STEP, session, 0, 0, wire.checksum(frames))
      s.send_multipart([header, *frames])
    for s in sockets:
      assert s.poll(20_000)
      assert wire.unpack(s.recv_multipart()[0])[0] == wire.ACTION
    assert memory() - before < 400 * 2**20  # the clients' own sockets are in it
    assert learner.steps == count
    asker = Asker(learner.address, None, False)
    assert len(asker.ask()['clients']) == count
    asker.close()
    for s in sockets:
      s.close()
    context.term()
    template.close()
    until(lambda: not learner.server.peers, 20)
    assert len(learner.pools[0].free) == 1000


def test_the_log_is_bounded() -> None:
  with Learner() as learner:
    for _ in range(60):
      with Raw(learner.address) as raw:
        raw.socket.send(b'\xc1')
        raw.expect(session.GONE)
    assert len(learner.said) <= 22


def test_what_fails_in_the_network_thread_is_told() -> None:
  def fails() -> None:
    raise ArithmeticError('a bug')

  with Learner(act=False) as learner:
    with contextlib.suppress(RuntimeError):  # if this thread is the one that does it
      learner.server.call(fails)
    until(lambda: learner.server.failure)
    with pytest.raises(RuntimeError, match='a bug'):
      learner.pools[0].recv()
    learner.says('the network failed')
