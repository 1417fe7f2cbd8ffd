"""Slots that environments of a server take, wait for and leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from children import until
from peers import ANY, Learner, Raw, lives

from podrace.distributed.environments import environment_messages
from podrace.distributed.net import session_messages
from podrace.types import FIRST, MID


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
    assert sum(' 4 slots' in x for x in learner.said) == 1  # once, of both groups
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
  learner = Learner(address=address, slots=4, peer_timeout=600.0)
  with learner, Raw(learner.address) as last:
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
