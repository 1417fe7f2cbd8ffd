"""How long a client waits, what it says meanwhile, and when it gives up."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

from podrace.distributed.net import connecting
from podrace.distributed.net.connecting import Outage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
  found = types.SimpleNamespace(now=1000.0, monotonic=lambda: found.now)
  monkeypatch.setattr(connecting, 'time', found)
  monkeypatch.setattr(connecting, 'random', lambda: 1.0)
  return found


def test_attempts_become_rarer_and_never_cease(clock: Any) -> None:
  """Also after half an hour, and after days."""
  one = Outage('service', 'there', 0.0)
  assert one.due == clock.now
  pauses = []
  for _ in range(100_000):
    one.failed(connecting.NOBODY)
    pauses.append(one.due - clock.now)
  assert pauses[:3] == pytest.approx([0.05, 0.1, 0.2]) and set(pauses[6:]) == {2.0}
  one.end()
  one.begin('cut')
  assert one.due - clock.now == pytest.approx(0.05)


def test_what_is_known_better_is_not_forgotten(clock: Any) -> None:
  one = Outage('service', 'there', 0.0)
  for reason, why in (
    (connecting.NOBODY, connecting.SAYS_NOTHING),
    ('its key is not listed', 'its key is not listed'),
  ):
    one.failed(reason)
    one.stands()
    assert one.why == why
  one.end()
  assert one.why == connecting.NOTHING_KNOWN


def test_it_gives_up_after_seconds_without_a_reason(clock: Any) -> None:
  one = Outage('service', 'there', 5.0)
  clock.now += 4.0
  one.wait('all is taken')
  clock.now += 4.0
  one.check(clock.now)
  clock.now += 2.0
  with pytest.raises(TimeoutError, match=r'service .*there .* 5 s: all is taken'):
    one.check(clock.now)


def test_it_is_said_again_every_half_minute(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.INFO):
    one = Outage('service', 'there', 0.0)
    one.end()
    assert not caplog.records  # nothing was said, so nothing is over
    one.begin('cut')
    for _ in range(3):
      clock.now += 1.0
      one.check(clock.now)
    clock.now += connecting.REMIND_SECONDS + 1.0
    one.check(clock.now)
    one.check(clock.now)
    one.end()
  said = [record.getMessage() for record in caplog.records]
  assert len(said) == 4 and all('service' in x and 'there' in x for x in said)
  assert ['cut' in x for x in said] == [True, True, True, False]  # at last it is back
