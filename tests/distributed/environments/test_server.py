"""What a server does with clients that are right, wrong, slow, gone or hostile."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import logging
import random
import resource
import termios
import threading
import time
import types
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

from podrace.distributed.environments import environment_messages, incoming, server, shared_listener
from podrace.distributed.environments import pool as remote_pool
from podrace.distributed.environments.groups import ClientState, Latencies
from podrace.distributed.net import (
  connections,
  loop,
  process_metrics,
  session_messages,
  sessions,
)
from podrace.distributed.net.dashboard import Asker, table
from podrace.distributed.net.frame import PREFIX
from podrace.distributed.net.safe_text import label
from podrace.envs.host.base import groups_at_once
from podrace.types import FIRST, LARGEST_OBSERVATION, LARGEST_REWARD, LAST, MID

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
  with (
    Learner(address=address.format(dir=tmp_path), on_cores=on_cores) as learner,
    Raw(learner.address, source=source) as raw,
  ):
    assert raw.join_as()['groups'] == groups


def test_a_client_that_is_back_ends_its_session_of_before() -> None:
  with (
    Learner(peer_timeout=600.0) as learner,
    Raw(learner.address) as lost,
    Raw(learner.address) as back,
  ):
    lost.join(8)  # all slots; the learner waits for its step, and can't know that it is lost
    back.client = lost.client
    back.join_as()
    back.enter(8)
    back.step(8, 0, FIRST)
    back.act(8, 0)
    assert 'back over another connection' in lost.gone()
    assert learner.server.counts['dropped'] == 1


def test_it_says_when_there_are_no_environments_and_goes_on() -> None:
  with Learner() as learner:
    learner.says('no environments are connected; waiting for `podrace envs --connect tcp://127')
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('environments are here, going on')
      raw.say(session_messages.BYE, 'test')
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
    raw.say(session_messages.HELLO, raw.told())
    (reason,) = raw.refused()
    import re

    assert re.search(line, reason), reason
    learner.says(reason)


def test_another_version_is_refused_with_both_sides() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.say(session_messages.HELLO, raw.told(version=1))
    (reason,) = raw.refused()
    assert "this is 'podrace' version 2" in reason and "wants 'podrace' version 1" in reason
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
    learner.says('no environments are connected')
    with Raw(learner.address) as raw:
      raw.join(2)
      learner.says('going on')
      raw.say(session_messages.BYE, 'test')
      learner.says('left: test')
    with Raw(learner.address) as raw:
      raw.join_as()
      raw.send(b'\xc1' * 9)
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

      learner.server.listener.lines._say = say
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


def test_a_client_that_waits_at_the_end_is_told_of_it() -> None:
  with Learner() as learner, Raw(learner.address) as one, Raw(learner.address) as late:
    one.join_as()
    for pool in learner.pools:
      pool.close()
    late.say(session_messages.HELLO, late.told())
    heard = late.hear()
    assert heard is not None and heard[0] is session_messages.WAIT
    learner.server.network.finish()
    learner.server.__exit__()
    assert (
      one.expect(session_messages.END)[0][0] is True
      and late.expect(session_messages.END)[0][0] is True
    )
    assert learner.server.failure is None


# --- slots ------------------------------------------------------------------------------------------


def test_slots_are_waited_for_and_taken_over_as_another_life() -> None:
  with Learner(slots=4) as learner, Raw(learner.address) as one, Raw(learner.address) as other:
    one.join(3)
    other.join_as()
    other.say(environment_messages.ENTER, 0, 2)
    other.say(session_messages.PING, None)
    assert other.hear()[0] is session_messages.PONG  # no START: one slot is left
    other.say(environment_messages.ENTER, 1, 2)
    other.say(session_messages.PING, None)
    assert other.hear()[0] is session_messages.PONG
    (told,) = [x for x in learner.said if 'wait until others leave' in x]  # once, of both groups
    assert 'all 4 slots' in told, told
    one.say(session_messages.BYE, 'enough')
    other.expect(environment_messages.START)
    other.step(2, 0, FIRST)
    other.act(2, 0)
    found = lives(learner.arrivals)
    assert len(found) == 5
    assert sorted(run for _, _, run in found) in ([0, 0, 0, 0, 1], [0, 0, 0, 1, 1])


@pytest.mark.parametrize('transport', ['tcp', 'unix'])
def test_a_session_ends_with_its_connection(transport: str, tmp_path: Path) -> None:
  """Over and over, so that the files of connections have the same numbers again."""
  address = f'unix:{tmp_path}/socket' if transport == 'unix' else ANY
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
    gone = Raw(learner.address)
    for raw in (gone, last):
      raw.join_as()
      raw.say(environment_messages.ENTER, 0, 2)
      raw.say(session_messages.PING, None)
      raw.expect(session_messages.PONG)
    send = learner.server.listener.send

    def to_those_who_are_there(peer: Any, kind: Any, *fields: Any, **more: Any) -> bool:
      if kind is environment_messages.START and peer.client == gone.client:
        learner.server.listener.drop(peer, 'is gone')  # as where it fails
        return False
      return send(peer, kind, *fields, **more)

    learner.server.listener.send = to_those_who_are_there  # type: ignore[method-assign]
    one.say(session_messages.BYE, 'enough')
    last.expect(environment_messages.START)
    last.say(session_messages.PING, None)
    assert last.hear()[0] is session_messages.PONG  # and no further START
    last.step(2, 0, FIRST)
    last.act(2, 0)
    last.say(session_messages.BYE, 'enough')
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
      raw.say(environment_messages.ENTER, 0, size)
      return raw

    def go(raw: Raw) -> None:
      raw.say(session_messages.BYE, 'enough')

    here = [come(2), come(2)]
    for raw in here:
      raw.expect(environment_messages.START)
    large = come(4)
    large.say(session_messages.PING, None)
    assert large.hear()[0] is session_messages.PONG  # it has entered, and waits
    for _ in range(4):
      here.append(come(2))
      go(here.pop(0))
      here[-1].expect(environment_messages.START)
    late = come(2)
    for raw in here:
      go(raw)
    large.expect(environment_messages.START)
    late.say(session_messages.PING, None)
    assert late.hear()[0] is session_messages.PONG
    go(large)
    late.expect(environment_messages.START)


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
      body = raw.body(2)
      records = np.frombuffer(body[0], environment_messages.RECORD).copy()
      records['life'], records['step_type'] = lives, np.where(np.equal(lives, life), MID, FIRST)
      body[0] = records.tobytes()
      raw.step(2, seq, body=body)
      raw.act(2, seq)
      life, run_id = list(lives), list(run_ids)
      assert learner.arrivals[-1][1].run_id.tolist() == run_id
    raw.say(session_messages.ASK)
    assert raw.expect(session_messages.REPORT)[0][0]['clients'][0]['restarts'] == 13


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
      until(lambda: learner.server.listener._loop.wait(0))
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
    assert 'silent for' in silent.gone() and silent.is_closed()
    silent.close()
    good.close()


def test_who_was_not_listened_to_is_not_silent() -> None:
  with Learner(peer_timeout=1.0, deadline=5.0) as learner, Raw(learner.address) as raw:
    raw.join(2)
    server, looked = learner.server, threading.Event()

    def stop() -> None:  # for ten seconds, as far as it can tell
      for peer in server.peers:
        peer.last_seen -= 10
        peer.state.groups[0].since -= 10
      server.listener._ticked -= 10
      server.listener._check_deadlines()
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
    raw.say(session_messages.PING, None)
    learner.says('group 0 has not answered for 1 s')
    assert 'has not answered' in raw.gone()


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


def test_a_client_that_dies_while_it_is_answered_leaves_its_slots() -> None:
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


# --- what must not be learned from ------------------------------------------------------------------


def replayed(raw: Raw) -> None:
  body = raw.body(2)
  raw.step(2, 1, body=body)
  raw.step(2, 1, body=body)


def torn(raw: Raw) -> None:
  body = raw.body(2)
  raw.step(2, 1, body=[*body[:-1], body[-1][:-1]])


def changed(field: str, value: Any) -> Any:
  def wrong(raw: Raw) -> None:
    body = raw.body(2)
    records = np.frombuffer(body[0], environment_messages.RECORD).copy()
    records[field] = value
    raw.step(2, 1, body=[records.tobytes(), *body[1:]])

  return wrong


def rewarded_first(raw: Raw) -> None:
  body = raw.body(2, FIRST)
  records = np.frombuffer(body[0], environment_messages.RECORD).copy()
  records['reward'] = [0, 1]
  raw.step(2, 1, body=[records.tobytes(), *body[1:]])


def not_finite(raw: Raw) -> None:
  body = raw.body(2)
  raw.step(2, 1, body=[body[0], np.full((2, 4), np.nan, np.float32).tobytes()])


def observed(value: float) -> Any:
  def wrong(raw: Raw) -> None:
    body = raw.body(2)
    raw.step(2, 1, body=[body[0], np.full((2, 4), value, np.float32).tobytes()])

  return wrong


@pytest.mark.parametrize(
  ('wrong', 'reason'),
  [
    (replayed, r'timesteps 1 of group 0, in turn'),
    (torn, 'a STEP of 71 bytes, expected 72'),
    (lambda raw: raw.step(2, 5), 'timesteps 5 of group 0, in turn 1'),
    (lambda raw: raw.step(2, 1, group=1), 'which has not entered'),
    (lambda raw: raw.step(2, 1, body=raw.body(3)), 'a STEP of 108 bytes, expected 72 of 2'),
    (lambda raw: raw.step(2, 1, body=raw.body(2)[:1]), 'a STEP of 40 bytes'),
    (lambda raw: raw.step(2, 1, body=[*raw.body(2), b'x']), 'a STEP of 73 bytes'),
    (not_finite, 'NaN or infinite'),
    (changed('reward', np.inf), 'NaN or infinite'),
    (changed('score', np.nan), 'NaN or infinite'),
    (changed('reward', 3e38), '3e+38'),
    (changed('reward', -2 * LARGEST_REWARD), '-2e+12'),
    (changed('score', 3e38), '3e+38'),
    (changed('reward', [0, np.nextafter(np.float32(LARGEST_REWARD), np.float32(np.inf))]), '1e+12'),
    (observed(3e38), '3e+38'),
    (observed(-2 * LARGEST_OBSERVATION), '-2e+09'),
    (changed('reward', -LARGEST_REWARD), ''),
    (changed('score', LARGEST_REWARD), ''),
    (observed(-LARGEST_OBSERVATION), ''),
    (changed('discount', 2), 'discount'),
    (changed('step_type', 3), 'a step type'),
    (changed('step_type', FIRST), ''),
    (changed('life', 1), 'without its first timestep'),
    (changed('zero', 1), 'a zero that is none'),
    (changed('ended', 1), 'a game that is over within an episode'),
    (rewarded_first, 'a reward with the first timestep'),
    (lambda raw: raw.say(environment_messages.ENTER, 0, 2), 'is there already'),
    (lambda raw: raw.say(environment_messages.ENTER, 1, 9), '9 environments, expected 1 to 8'),
    (lambda raw: raw.say(environment_messages.ENTER, 300, 1), 'group 300'),
    (lambda raw: raw.say(environment_messages.ENTER, 0, -1), '-1 in a ENTER'),
    (lambda raw: raw.send(PREFIX.pack(4, 3 | 4 << 8) + bytes(4)), 'a STEP with a header of 4 bytes'),
    (lambda raw: raw.send(PREFIX.pack(0, 99)), 'a frame of kind 99'),
    (lambda raw: raw.send(PREFIX.pack(3, 4 | 2 << 8) + b'\x91\xc0x'), '1 bytes after its header, expected none'),
    (lambda raw: raw.send(b'x' * 70_000), 'a frame of kind 120'),
    (lambda raw: raw.send(PREFIX.pack(2021161080, 3 | 8 << 8)), 'a frame of 2021161080 bytes'),
    (lambda raw: raw.say(session_messages.HELLO, raw.told()), 'a second HELLO'),
  ],
)  # fmt: skip
def test_what_is_wrong_ends_the_session_and_reaches_nobody(wrong: Any, reason: str) -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    wrong(raw)
    if reason == '':  # as FIRST after FIRST, which is how an episode ends at once
      raw.act(2, 1)
      return
    assert reason in raw.gone()
    learner.says(reason)
    assert raw.is_closed()
    with Raw(learner.address) as other:  # nobody else is any worse off
      other.join(8)
    assert all(len(rows) <= 2 for rows in lives(learner.arrivals).values())


def together(learner: Learner, raws: list[Raw], messages: int) -> None:
  """Has so many messages dealt with before those that step are looked at; of the thread that has the network.

  In this order of the clients.
  """
  one, heard = learner.server.listener.sessions, 0
  handle, drop = learner.server.handle, one.drop

  def handled(*args: Any) -> None:
    nonlocal heard
    heard += 1
    handle(*args)

  def dropped(peer: Any, reason: str, *more: Any) -> None:
    nonlocal heard
    heard += reason.startswith('left')  # a BYE
    drop(peer, reason, *more)

  learner.server.handle, one.drop = handled, dropped  # type: ignore[method-assign]
  peers = {peer.client: peer for peer in one.peers}

  def has_arrived(raw: Raw) -> bool:
    size = np.zeros(1, np.int32)
    fcntl.ioctl(peers[raw.client].stream.socket, termios.FIONREAD, size)
    return size[0] == raw.out

  def all_are_there() -> bool:
    for raw in raws:
      if raw.client in peers:
        learner.server.listener._serve(peers[raw.client], loop.READ)
    return heard == messages

  until(lambda: all(has_arrived(raw) for raw in raws if raw.client in peers))
  until(all_are_there)
  for raw in raws:
    raw.out = 0
  del learner.server.handle, one.drop


@pytest.mark.parametrize('bound', [incoming.BATCH_BYTES, 0], ids=['together', 'one by one'])
def test_of_many_that_come_together_those_that_are_wrong_are_found(
  monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
  monkeypatch.setattr('podrace.distributed.environments.incoming.BATCH_BYTES', bound)

  def frames(raw: Raw, size: int, **fields: Any) -> list[bytes]:
    body = raw.body(size)
    records = np.frombuffer(body[0], environment_messages.RECORD).copy()
    for name, values in fields.items():
      records[name] = values
    return [records.tobytes(), *body[1:]]

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
    until(lambda: learner.pools[0].awaited == 26)
    before = counts['frames']
    with learner.server.network.lead:
      within.step(3, 2, body=frames(within, 3, reward=[1, 2, 4]))
      for raw in (ends, closes):
        raw.step(2, 2, body=frames(raw, 2, step_type=[MID, LAST], discount=[1, 0], reward=8))
      begins.step(2, 2, FIRST)
      two.step(2, 2)
      two.step(2, 1, group=1, body=frames(two, 2, discount=[1, 2]))
      for group in (0, 1):
        both.step(2, 2 - group, group=group, body=frames(both, 2, discount=[1, 2]))
      leaves.step(2, 2)
      leaves.say(session_messages.BYE, 'enough')
      together(learner, raws, 10)
      infinite.step(2, 2, body=frames(infinite, 2, reward=[0, np.inf]))
      nan.step(2, 2, body=[raw.body(2)[0], np.full((2, 4), np.nan, np.float32).tobytes()])
      again.step(2, 2, body=frames(again, 2, life=[0, 1], step_type=[MID, FIRST]))
      last.step(1, 2)
      together(learner, raws, 4)
      assert len(learner.server.incoming) == (4 if bound else 1)
      learner.server.turned()
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
      assert reason in raw.gone()
    assert counts['malformed'] == len(bad)
    assert counts['frames'] - before == (12 if bound else 14)  # the first group of `two`
    until(lambda: learner.pools[0].awaited == 10)
    with (
      learner.server.network.lead
    ):  # both bad, beside one that is within an episode and one that isn't
      ends.step(2, 3)
      within.step(3, 3)
      together(learner, raws, 2)
      learner.server.turned()
      closes.step(2, 3)
      ended = dict(life=[0, 1], step_type=[MID, LAST], discount=[1, 0])
      again.step(2, 3, body=frames(again, 2, **ended))
      together(learner, raws, 2)
      learner.server.turned()
    for raw in (ends, closes):
      assert 'without its first timestep' in raw.gone()
    for raw in (within, again):
      raw.act(sizes[raw], 3)
    groups = learner.server._groups()
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
    with learner.server.network.lead:
      raw.step(2, 1)
      together(learner, [raw], 1)
      learner.server.slots.remove(learner.pools[0])
      learner.server.turned()
    assert learner.server.counts['frames'] == 2
    assert not learner.server.counts['unexpected'] and not learner.pools[0]._ready


def test_who_is_dropped_while_it_is_answered_leaves_all_its_slots() -> None:
  with Learner(slots=8, max_wait=600.0) as learner, Raw(learner.address) as raw:
    raw.join_as()
    for group in (0, 1):
      raw.enter(2, group)
    server, one, send = learner.server, learner.server.listener, learner.server.listener.send

    def fails(peer: Any, kind: Any, *fields: Any, **more: Any) -> bool:
      if kind is environment_messages.ACTION:
        one.drop(peer, 'does not read')
        return False
      return send(peer, kind, *fields, **more)

    one.send = fails  # type: ignore[method-assign]
    with server.network.lead:
      for group in (0, 1):
        raw.step(2, 0, FIRST, group)
      together(learner, [raw], 2)
      server.turned()
    learner.says('does not read')
    until(lambda: sorted(learner.pools[0].free) == list(range(8)) and not learner.pools[0].awaited)
    one.send = send  # type: ignore[method-assign]
    with Raw(learner.address) as other:
      other.join(8)


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
    assert 'in observation, expected ' in raw.gone()


def test_percentiles_are_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
  clock = types.SimpleNamespace(monotonic=lambda: now)
  monkeypatch.setattr('podrace.distributed.environments.groups.time', clock)
  now = 10.0
  latencies = Latencies()
  assert latencies.milliseconds() == (0.0, 0.0)
  for i in range(101):
    latencies.add(i / 1000)
  assert latencies.milliseconds() == (50.0, 99.0)
  for _ in range(1024):
    latencies.add(1.0)
  assert latencies.milliseconds() == (50.0, 99.0)
  now += 1.1
  assert latencies.milliseconds() == (1000.0, 1000.0)


def test_names_are_shown_as_they_are() -> None:
  from rich.console import Console

  with Learner() as learner, Raw(learner.address) as raw:
    raw.say(session_messages.HELLO, raw.told(host='[/x]\x1b[2J', env='[/y]'))
    raw.expect(session_messages.WELCOME)
    learner.server.env = '[/z]'
    report = learner.server.report()
    clients = [{'name': c['name'], 'last_seen_s': 0.0, 'metrics': {}} for c in report['clients']]
    console = Console(record=True, width=250)
    console.print(table(report, {}, 1.0))
    del report['env']  # as a service has it
    console.print(table({**report, 'service': '[/z]', 'tables': [], 'clients': clients}, {}, 1.0))
    text = console.export_text()
    assert text.count(r'[/x]\x1b[2J') == 2 and '[/z]' in text and '\x1b' not in text


# --- reports, and clients that do not read -----------------------------------------------------------


@pytest.mark.parametrize(
  'seconds', [sessions.REPORT_SECONDS, 0.0], ids=['one for all', 'each anew']
)
def test_reports_cost_little_however_often_they_are_asked_for(
  seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(sessions, 'REPORT_SECONDS', seconds)
  made: list[float] = []
  with Learner() as learner, Raw(learner.address) as raw, Raw(learner.address) as deaf:
    report, counts = learner.server.report, learner.server.counts

    def large() -> dict[str, Any]:
      made.append(time.monotonic())
      return {**report(), 'env': 'x' * 900_000}

    monkeypatch.setattr(learner.server, 'report', large)
    before = memory()
    for _ in range(300):
      deaf.say(session_messages.ASK)
    until(lambda: counts['asked'] == 300)
    assert memory() - before < 50 * 2**20  # else 300 of them wait there
    for _ in range(2):  # some that fitted on the way, and the answer to all those after
      deaf.expect(session_messages.REPORT)
    for _ in range(30):
      raw.say(session_messages.ASK)
      raw.expect(session_messages.REPORT)
    assert all(y - x >= seconds for x, y in itertools.pairwise(made))


def test_a_report_of_the_longest_names_fits() -> None:
  told = dict(host='\U000e0001' * 200, pid=2**63 - 1, env='\U0001f600' * 200)
  with Learner(act=False) as learner:
    filled = threading.Event()

    def fill() -> None:
      for _ in range(1500):
        peer = connections.Peer('here')
        peer.name = f'{label(told["host"])}:{told["pid"]}'
        peer.state = ClientState(told)
        peer.state.environments, peer.state.frames, peer.state.restarts = 65536, 2**62, 2**62
        peer.metrics = {
          f'{"a" * 38}{i}': -(2.0**62) for i in range(10, 10 + process_metrics.MAX_METRICS)
        }
        learner.server.peers[peer] = None
      filled.set()

    learner.server.call(fill)
    assert filled.wait(10)
    asker = Asker(learner.address, None, False)
    report = asker.ask()
    asker.close()
    assert len(report['clients']) == 1000 and report['more_clients'] == 500
    name = report['clients'][0]['name']
    assert name.startswith('\\U000e0001') and name.endswith(f'...:{2**63 - 1}') and len(name) == 220
    learner.server.peers.clear()


def test_a_stranger_that_does_not_read_is_cut_off() -> None:
  with Learner() as learner, Raw(learner.address) as good, Raw(learner.address) as deaf:
    leaf = ['x' * 400, '<f4', [], 'y' * 200, []]
    schema = {'observation': [[f'{i}{leaf[0]}', *leaf[1:]] for i in range(30)], 'action': leaf}
    with contextlib.suppress(OSError):
      for _ in range(20_000):  # until all that there is to hold the answers is full
        deaf.say(session_messages.HELLO, good.told(schema=schema))
    assert not learner.server.counts['malformed'] and learner.server.counts['refused'] < 20_000
    good.join(2)


# --- fuzzing ----------------------------------------------------------------------------------------


def garbage(random: random.Random, raw: Raw) -> bytes:
  """A message that is wrong in one of many ways, or a right one at the wrong time."""
  kinds = [1, 2, 3, 4, 5, 6, 0, 65, 200]
  values: list[Any] = [0, 1, -1, 2**63, 3.5, None, True, 'x', b'y' * random.randrange(50), [],
                       [[[[]]]], {'a': 1}, {1: 2}, raw.told(),
                       raw.told(schema=[1]), raw.told(pid='x'), raw.told(host='h' * 300)]  # fmt: skip
  way = random.choices(range(5), [1, 2, 4, 4, 4])[0]
  if way == 0:
    return random.randbytes(random.randrange(60))
  if way == 1:
    fields = [random.choice(values) for _ in range(random.randrange(6))]
    head = msgpack.packb(fields)
    body = head + random.randbytes(random.choice([0, random.randrange(200)]))
    return PREFIX.pack(len(body), random.choice(kinds) | len(head) << 8) + body
  document = (environment_messages.STEP, [random.randrange(2), random.randrange(3)], raw.body(2))
  data = bytearray(data_of(document))
  if way == 2:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
  elif way == 3:
    data = data[: random.randrange(len(data))]
  return bytes(data)


def memory() -> int:
  """Bytes that this process has in memory."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def fuzz(count: int) -> None:
  """Garbage, each heard in a session of its own."""
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as raw:

    def case(rng: random.Random) -> Any:
      return [(environment_messages.ENTER, [0, 2], [])], garbage(rng, raw)

    hello = lambda: raw.told(client=session_messages.new_client())  # noqa: E731
    good = tell(learner.server.listener, environment_messages.OF_LEARNERS, hello, case, count)
    assert 0 < good < 0.6 * count, good
    until(lambda: len(learner.pools[0].free) == 64)
    with Raw(learner.address) as last:  # the first has said nothing for too long
      last.join(64)  # all slots are free again, and the server does what it did


def documents(raw: Raw) -> Callable[[], list[Document]]:
  """What a client of a session may say, in an order in which it may say it."""
  body = raw.body(2, FIRST)
  return lambda: [
    (session_messages.PING, [None], []),
    (environment_messages.ENTER, [0, 2], []),
    (environment_messages.STEP, [0, 0], body),
    (session_messages.ASK, [], []),
    (session_messages.BYE, ['enough'], []),
  ]


def fuzz_documents(count: int) -> None:
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as raw:
    before = memory()
    hello = lambda: raw.told(client=session_messages.new_client())  # noqa: E731
    one = learner.server.listener
    good = tell(one, environment_messages.OF_LEARNERS, hello, spoiled(hello, documents(raw)), count)
    assert count / 20 < good < count * 0.9, good
    until(lambda: len(learner.pools[0].free) == 64)
    until(lambda: not learner.server.peers)
    assert memory() - before < 30 * 2**20
    with Raw(learner.address) as last:  # the first has said nothing for too long
      last.join(64)  # the server does what it did


def test_documents_that_are_nearly_right() -> None:
  fuzz_documents(1500)


@pytest.mark.slow
def test_many_documents_that_are_nearly_right() -> None:
  fuzz_documents(200_000)


def test_fuzzing() -> None:
  fuzz(1500)


@pytest.mark.slow
def test_fuzzing_a_million() -> None:
  fuzz(1_000_000)


def weather(count: int) -> None:
  """What is nearly right first, then garbage until the connection is cut; a good client goes on."""
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as good:
    good.join(2)
    template, seq = Raw(learner.address), 0
    hello = lambda: template.told(client=session_messages.new_client())  # noqa: E731
    nearly = spoiled(hello, documents(template))

    def messages(rng: random.Random) -> Iterator[bytes]:
      before, mutant = nearly(rng)
      yield from map(data_of, before)
      yield mutant
      for _ in range(rng.randrange(6)):
        yield garbage(rng, template)

    def go_on() -> None:
      nonlocal seq
      seq += 1
      good.step(2, seq)
      assert good.act(2, seq).shape == (2,)

    told = storm(
      learner.address, environment_messages.OF_LEARNERS, count, hello, messages, go_on, memory
    )
    counts = learner.server.counts
    print(told, dict(counts))
    assert learner.server.failure is None and not counts['unexpected']
    assert told.slowest < 10 and told.megabytes < 20, told
    assert counts['malformed'] > told.connections / 2
    assert any('cut off' in x for x in learner.said)
    assert any('dropped, it sent' in x for x in learner.said)
    assert len(learner.said) < 100 + 4 * told.seconds
    until(lambda: (go_on(), len(learner.server.peers) == 1)[1])  # the others are gone
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
    before = memory()
    with contextlib.suppress(OSError):  # it is cut off, perhaps while it sends
      raw.send(data_of((environment_messages.STEP, [0, 0], [b'x' * 2**26])))
    for seq in range(1, 100):
      good.step(2, seq)
      good.act(2, seq)
    assert memory() - before < 2**26 + 50 * 2**20  # what the sender has
    assert learner.server.counts['malformed'] == 1 and len(learner.server.peers) == 1


def test_a_thousand_light_clients() -> None:
  """Joined at once, each answered within seconds, all forgotten when they are silent."""
  with (
    Learner(slots=1000, peer_timeout=5.0, keep=False) as learner,
    contextlib.ExitStack() as stack,
  ):
    count = min(1000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 4)
    before = memory()
    raws = [stack.enter_context(Raw(learner.address)) for _ in range(count)]
    for raw in raws:
      raw.say(session_messages.HELLO, raw.told())
    for raw in raws:
      raw.expect(session_messages.WELCOME, 20)
      raw.say(environment_messages.ENTER, 0, 1)
    for raw in raws:
      raw.expect(environment_messages.START, 20)
      raw.step(1, 0, FIRST)
    for raw in raws:
      raw.act(1, 0)
    assert memory() - before < 100 * 2**20  # the clients' own sockets are in it
    assert learner.steps == count
    asker = Asker(learner.address, None, False)
    assert len(asker.ask()['clients']) == count
    asker.close()
    until(lambda: not learner.server.peers)
    assert len(learner.pools[0].free) == 1000


def test_the_log_is_bounded() -> None:
  with Learner() as learner:
    for _ in range(60):
      with Raw(learner.address) as raw:
        raw.send(b'\xc1' * 9)
        raw.gone()
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
