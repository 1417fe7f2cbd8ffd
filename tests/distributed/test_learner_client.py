"""Processes that work for a learner end at signals, wherever their work stands."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from podrace.distributed import learner_client
from podrace.distributed.learner_client import Ending, run_to_end
from podrace.errors import RunFinished
from podrace.tables import Closed


@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_waits_of_the_work(signum: int, code: int) -> None:
  ended = threading.Event()

  def work(ending: Ending) -> None:
    ending.calls(ended.set)
    os.kill(os.getpid(), signum)
    assert ended.wait(60)
    raise Closed('the parameters are closed')

  assert run_to_end(work) == code


def test_a_second_signal_does_not_wait_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(learner_client, 'GRACE_SECONDS', 600.0)
  forever = threading.Event()

  def work(ending: Ending) -> None:
    ending.calls(lambda: os.kill(os.getpid(), signal.SIGINT))
    os.kill(os.getpid(), signal.SIGTERM)
    forever.wait()

  assert run_to_end(work) == 143
  forever.set()


def test_work_that_begins_to_wait_after_a_signal_is_ended_too() -> None:
  ending, ended = Ending(), threading.Event()
  ending.begin()
  ending.calls(ended.set)
  assert ended.is_set()


@pytest.mark.parametrize(('error', 'code'), [(RunFinished(), 0), (TimeoutError('late'), 1)])
def test_exit_codes_without_a_signal(error: Exception, code: int) -> None:
  def work(ending: Ending) -> None:
    raise error

  assert run_to_end(work) == code


def test_a_failure_of_the_work_is_raised() -> None:
  def work(ending: Ending) -> None:
    raise ValueError('a defect')

  with pytest.raises(ValueError, match='a defect'):
    run_to_end(work)
