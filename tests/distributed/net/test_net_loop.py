"""A thread's loop and its allowances, without a network."""

from __future__ import annotations

import socket as sockets
import threading
import types
from typing import Any

import pytest

from podrace.distributed.net import safe_text
from podrace.distributed.net.loop import READ, WRITE, Loop
from podrace.distributed.net.safe_text import TokenBucket


def ready(loop: Loop, seconds: float) -> list[tuple[Any, int]]:
  return [(key.data, events) for key, events in loop.wait(seconds)]


def test_owners_are_found_by_what_their_sockets_are_ready_for() -> None:
  loop = Loop()
  one, other = sockets.socketpair()
  with one, other:
    loop.add(one, READ, 'one')
    assert loop.wait(0) == []
    other.send(b'x')
    assert ready(loop, 60) == [('one', READ)]
    loop.change(one, READ | WRITE, 'one')
    assert ready(loop, 60) == [('one', READ | WRITE)]
    loop.remove(one)
    assert loop.wait(0) == []
  loop.close()


def test_any_thread_ends_the_wait_and_has_something_done() -> None:
  loop, did = Loop(), []
  other = threading.Thread(target=lambda: loop.call(lambda: did.append('call')))
  other.start()
  assert loop.wait(60) == []  # it would be too long for the test
  other.join()
  loop.do_calls()
  assert did == ['call']
  loop.later(lambda: loop.later(lambda: did.append('of a call')))
  loop.do_calls()
  assert did == ['call', 'of a call']
  loop.close()


def test_a_late_byte_of_a_wake_ends_one_wait_and_has_no_owner() -> None:
  """Two threads wake at once: the byte of one comes after the other has been heard."""
  loop = Loop()
  loop._write.send(b'.')
  assert loop.wait(60) == []
  assert loop.wait(0) == []
  loop.wake()
  assert loop.wait(60) == []
  loop.close()


def test_each_wake_ends_one_wait() -> None:
  loop = Loop()
  for _ in range(3):
    loop.wake()
    loop.wake()
    assert loop.wait(60) == []
  one, other = sockets.socketpair()
  with one, other:
    loop.add(one, READ, 'one')
    other.send(b'x')
    assert ready(loop, 60) == [('one', READ)]  # no wake is left that would have ended it
  loop.close()
  loop.wake()
  loop.close()


def test_a_bucket_fills_up_with_time_to_its_brim(monkeypatch: pytest.MonkeyPatch) -> None:
  clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
  monkeypatch.setattr(safe_text, 'time', clock)
  found = TokenBucket(10, 2.0)
  found.take(13)
  assert found.left == -3
  clock.now = 4.0
  assert found.left == 5
  clock.now = 100.0
  assert found.left == 10
  found.take(1)
  clock.now = 100.25
  assert found.left == 9.5
