"""Numbers that processes send of themselves."""

from __future__ import annotations

import re
import threading
from typing import Any

import bare
import pytest
from children import ROOT, until

from podrace.distributed.net import link, process_metrics, session_messages
from podrace.distributed.net.frame import WireError
from podrace.distributed.net.link import Link
from podrace.distributed.net.process_metrics import LOGGED, Meter, check, logged, resident_mb
from podrace.learner import is_reserved


@pytest.mark.parametrize(
  'said',
  [
    {'a': True}, {'a': 'x'}, {'a': None}, {'a': float('nan')}, {'a': float('inf')}, {'a': 2**63}, {'a': -1e300},
    {'steps_per_s': -1}, {'resident_mb': -0.5}, {'dropped_steps': -(2**62)},
    {'': 1}, {'A': 1}, {'a b': 1}, {'1a': 1}, {'a\n': 1}, {'a' * 41: 1}, {f'a{i}': 1 for i in range(17)},
  ],
)  # fmt: skip
def test_what_is_no_small_map_of_numbers_is_refused(said: dict[str, Any]) -> None:
  with pytest.raises(WireError):
    check(said)
  good = {'a' * 40: 1, **{f'a{i}_b': -1.5 for i in range(15)}}
  assert check(good) is good


def test_many_processes_become_a_few_numbers() -> None:
  every = [
    dict(steps_per_s=10.0, write_share=0.5, staleness_s=3.0, of_somebody=1.0),
    dict(steps_per_s=5, write_share=0.1, staleness_s=1.0),
    {},
  ]
  found = logged('acting', every)
  assert found == {'acting_steps_per_s': 15, 'acting_write_share': 0.3, 'acting_staleness_s': 3}
  assert logged('acting', [{}]) == {}
  prefixes = ('acting', 'reanalysing', 'remote')
  assert all(is_reserved(f'{prefix}_{k}') for prefix in prefixes for k in LOGGED)
  shown = set(re.findall(r'`(\w+)`', (ROOT / 'docs' / 'runs.md').read_text()))
  assert {
    f'acting_{k}' for k in LOGGED.keys() - {'windows_per_s', 'labels_per_s', 'searches_per_s'}
  } <= shown


def test_a_meter_counts_what_threads_add(monkeypatch: pytest.MonkeyPatch) -> None:
  now = 100.0
  monkeypatch.setattr(process_metrics.time, 'monotonic', lambda: now)
  meter = Meter()
  threads = [threading.Thread(target=meter.add, kwargs={'steps_per_s': 8}) for _ in range(5)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  meter.add(write_share=2.0)
  now = 104.0
  assert meter.read() == {'steps_per_s': 10, 'write_share': 0.5}
  now = 106.0
  assert meter.read() == {'steps_per_s': 0, 'write_share': 0}  # which is news, too


def test_memory_is_that_of_this_process() -> None:
  before = resident_mb()
  more = bytearray(200_000_000)
  more[::4096] = b'x' * len(more[::4096])
  assert 190 < resident_mb() - before < 260


class Measured(link.LinkHandler):
  service, kinds = 'test', session_messages.of_listeners()

  def __init__(self) -> None:
    self.times = 0

  def metrics(self) -> dict[str, float]:
    self.times += 1
    return {} if self.times == 1 else {'times': self.times}


def test_a_client_sends_its_numbers_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(link, 'METRICS_SECONDS', 0.01)
  with bare.Service().listen() as service:
    handler = Measured()
    client = Link(service.address, None, False, handler)
    client.patience = 0.01
    client.start()
    until(lambda: any(p.metrics.get('times', 0) >= 3 for p in list(service.listener.peers)))
    (shown,) = service.listener.report(lambda peer: {})['clients']
    assert shown['metrics'].keys() == {'times'}
    client.close()


@pytest.mark.parametrize('said', [{'a': 'x'}, {f'a{i}': 1 for i in range(17)}])
def test_who_sends_other_numbers_loses_its_session(said: dict[str, Any]) -> None:
  with bare.Service().listen() as service, bare.connect(service.address, Measured.kinds) as end:
    end.hello('test')
    end.say(session_messages.METRICS, {'a': 1})
    end.say(session_messages.METRICS, said)
    assert 'measure' in end.gone()


def test_numbers_need_a_session() -> None:
  with bare.Service().listen() as service, bare.connect(service.address, Measured.kinds) as end:
    end.say(session_messages.METRICS, {'a': 1})
    assert end.gone()
