"""Timesteps that a server must refuse, and clients that are dropped while they are answered."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import numpy as np
import pytest
from children import until
from gymnasium import spaces
from peers import Learner, Raw, lives, spec

from podrace.distributed.environments import environment_messages, incoming
from podrace.distributed.environments.groups import Latencies
from podrace.distributed.net import loop, session_messages
from podrace.distributed.net.dashboard import table
from podrace.distributed.net.frame import PREFIX
from podrace.types import FIRST, LARGEST_OBSERVATION, LARGEST_REWARD, LAST, MID


def replayed(raw: Raw) -> None:
  body = raw.body(2)
  raw.step(2, 1, body=body)
  raw.step(2, 1, body=body)


def torn(raw: Raw) -> None:
  body = raw.body(2)
  raw.step(2, 1, body=[*body[:-1], body[-1][:-1]])


def records(raw: Raw, size: int, kind: int = MID, **fields: Any) -> list[bytes]:
  """The bytes of a STEP, with other values of some fields."""
  body = raw.body(size, kind)
  changed = np.frombuffer(body[0], environment_messages.RECORD).copy()
  for name, values in fields.items():
    changed[name] = values
  return [changed.tobytes(), *body[1:]]


def changed(field: str, value: Any, kind: int = MID) -> Any:
  return lambda raw: raw.step(2, 1, body=records(raw, 2, kind, **{field: value}))


def observed(value: float) -> Any:
  def wrong(raw: Raw) -> None:
    body = raw.body(2)
    raw.step(2, 1, body=[body[0], np.full((2, 4), value, np.float32).tobytes()])

  return wrong


@pytest.mark.parametrize(
  ('wrong', 'reason'),
  [
    (replayed, 'timesteps 1 of group 0'),
    (torn, 'STEP of 71 bytes, expected 72'),
    (lambda raw: raw.step(2, 5), 'timesteps 5 of group 0'),
    (lambda raw: raw.step(2, 1, group=1), 'group 1'),
    (lambda raw: raw.step(2, 1, body=raw.body(3)), 'STEP of 108 bytes, expected 72 '),
    (lambda raw: raw.step(2, 1, body=raw.body(2)[:1]), 'STEP of 40 bytes'),
    (lambda raw: raw.step(2, 1, body=[*raw.body(2), b'x']), 'STEP of 73 bytes'),
    (observed(np.nan), 'NaN'),
    (changed('reward', np.inf), 'NaN'),
    (changed('score', np.nan), 'NaN'),
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
    (changed('step_type', 3), 'step type'),
    (changed('step_type', FIRST), ''),
    (changed('life', 1), 'first timestep'),
    (changed('zero', 1), 'zero'),
    (changed('ended', 1), 'over'),
    (changed('reward', [0, 1], FIRST), 'reward'),
    (lambda raw: raw.say(environment_messages.ENTER, 0, 2), 'already'),
    (lambda raw: raw.say(environment_messages.ENTER, 1, 9), '9 environments, expected 1 to 8'),
    (lambda raw: raw.say(environment_messages.ENTER, 300, 1), 'group 300'),
    (lambda raw: raw.say(environment_messages.ENTER, 0, -1), '-1 in a ENTER'),
    (lambda raw: raw.send(PREFIX.pack(4, 3 | 4 << 8) + bytes(4)), 'header of 4 bytes'),
    (lambda raw: raw.send(PREFIX.pack(0, 99)), 'kind 99'),
    (lambda raw: raw.send(PREFIX.pack(3, 4 | 2 << 8) + b'\x91\xc0x'), '1 bytes'),
    (lambda raw: raw.send(b'x' * 70_000), 'kind 120'),
    (lambda raw: raw.send(PREFIX.pack(2021161080, 3 | 8 << 8)), '2021161080 bytes'),
    (lambda raw: raw.say(session_messages.HELLO, raw.told()), 'second HELLO'),
  ],
)
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

  def all_are_there() -> bool:
    for peer in (peers[raw.client] for raw in raws if raw.client in peers):
      learner.server.listener.serve(peer, loop.READ)
      # On a slow machine a turn ends before all is handled.
      while peer.stream.reader.unread and not peer.stream.closed:
        learner.server.listener.serve(peer, loop.READ)
    return heard == messages

  until(lambda: all(learner.has_arrived(raw) for raw in raws if raw.client in peers))
  until(all_are_there)
  for raw in raws:
    raw.out = 0
  del learner.server.handle, one.drop


@pytest.mark.parametrize('bound', [incoming.BATCH_BYTES, 0], ids=['together', 'one by one'])
def test_wrong_steps_among_many_are_found(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
  monkeypatch.setattr('podrace.distributed.environments.incoming.BATCH_BYTES', bound)
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
      within.step(3, 2, body=records(within, 3, reward=[1, 2, 4]))
      for raw in (ends, closes):
        raw.step(2, 2, body=records(raw, 2, step_type=[MID, LAST], discount=[1, 0], reward=8))
      begins.step(2, 2, FIRST)
      two.step(2, 2)
      two.step(2, 1, group=1, body=records(two, 2, discount=[1, 2]))
      for group in (0, 1):
        both.step(2, 2 - group, group=group, body=records(both, 2, discount=[1, 2]))
      leaves.step(2, 2)
      leaves.say(session_messages.BYE, 'enough')
      together(learner, raws, 10)
      infinite.step(2, 2, body=records(infinite, 2, reward=[0, np.inf]))
      nan.step(2, 2, body=[raw.body(2)[0], np.full((2, 4), np.nan, np.float32).tobytes()])
      again.step(2, 2, body=records(again, 2, life=[0, 1], step_type=[MID, FIRST]))
      last.step(1, 2)
      together(learner, raws, 4)
      assert len(learner.server.incoming) == (4 if bound else 1)
      learner.server.turned()
    for raw in (within, ends, closes, again, last):
      raw.act(sizes[raw], 2)
    bad = {infinite: 'infinite', nan: 'observation', begins: '', two: 'discount', both: 'discount'}
    for raw, reason in bad.items():
      assert reason in raw.gone()
    assert counts['malformed'] == len(bad)
    assert counts['frames'] - before == (12 if bound else 14)  # the first group of `two`
    until(lambda: learner.pools[0].awaited == 10)
    # Both are bad, beside one that is within an episode and one that isn't.
    with learner.server.network.lead:
      ends.step(2, 3)
      within.step(3, 3)
      together(learner, raws, 2)
      learner.server.turned()
      closes.step(2, 3)
      ended = dict(life=[0, 1], step_type=[MID, LAST], discount=[1, 0])
      again.step(2, 3, body=records(again, 2, **ended))
      together(learner, raws, 2)
      learner.server.turned()
    for raw in (ends, closes):
      assert 'first timestep' in raw.gone()
    for raw in (within, again):
      raw.act(sizes[raw], 3)
    groups = learner.server.groups()
    assert sorted(g.size for g in groups) == [1, 2, 3]
    rewards = [r for _, a in learner.arrivals for r in a.timestep.reward if r]
    assert sorted(rewards) == [1, 2, 4, 8, 8, 8, 8]
    assert max(a.run_id.max() for _, a in learner.arrivals) == 1  # of the one that was restarted
    seen = sum(len(a.env_id) for _, a in learner.arrivals)
    assert seen + counts['withdrawn'] == counts['frames'] - before
    taken = [int(slot) for g in groups for slot in g.slots]
    assert sorted([*learner.pools[0].free, *taken]) == list(range(30))


def test_steps_for_a_closed_pool_are_forgotten() -> None:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    with learner.server.network.lead:
      raw.step(2, 1)
      together(learner, [raw], 1)
      learner.server.slots.remove(learner.pools[0])
      learner.server.turned()
    assert learner.server.counts['frames'] == 2
    assert not learner.server.counts['unexpected'] and not learner.pools[0].ready


def test_a_drop_during_an_answer_leaves_all_slots() -> None:
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
      first, _ = raw.body(2, step_type)
      raw.step(2, seq, body=[first, np.array(numbers, dtype).tobytes()])
      if numbers is good:
        raw.act(2, seq)
    assert 'observation' in raw.gone()


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
