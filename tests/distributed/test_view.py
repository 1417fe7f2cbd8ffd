"""What a learner shows of its program, and `podrace top` makes of it."""

from __future__ import annotations

import json
import time
from typing import Any

import bare
import numpy as np
import pytest
from children import until
from rich.console import Console
from services import ANY, all_of

from podrace import cli
from podrace.distributed import acting, parameters, replay
from podrace.distributed.learner import replay_metrics, replay_reports
from podrace.distributed.net import reports, session_messages
from podrace.distributed.net.dashboard import Asker, counters, table
from podrace.distributed.net.frame import WireError
from podrace.distributed.parameters import parameter_messages, reader
from podrace.distributed.replay.server import ReplayServer


def test_reports_come_over_the_existing_connection() -> None:
  assert replay_reports(None) == [] and replay_metrics([], 'all') == {}
  with ReplayServer(ANY) as one, ReplayServer(ANY) as two:
    with replay.connect([one.address, two.address]) as client:
      there = all_of(client)
      for writer in client.writers(1):
        writer.append({'x': np.arange(1000)})
        writer.create_item(there, 1.0, num_steps=1)
        writer.flush()
      until(lambda: [r['tables'][0]['inserts'] for r in replay_reports(client)] == [1, 1])
      found = replay_metrics(replay_reports(client), 'all')
      assert found.pop('replay_resident_mb') > 2 * 20
      assert found == dict(
        replay_mb=(one.store.total.bytes + two.store.total.bytes) / 1e6,
        replay_inserts=2, replay_waiting_inserts=0, replay_waiting_samplers=0,
      )  # fmt: skip
      assert one.counts['sessions'] == 1  # and no more connections
      assert replay_metrics(replay_reports(client), 'other')['replay_inserts'] == 0
    assert replay_reports(client)  # a closed client has its last ones


def test_a_service_that_is_gone_has_no_numbers() -> None:
  with ReplayServer(ANY) as server:
    client = replay.connect(server.address)
    until(lambda: replay_reports(client))
  until(lambda: not replay_reports(client))
  client.close()


@pytest.mark.parametrize(
  'change',
  [{'tables': None}, {'tables': [7]}, {'tables': [{}]}, {'bytes': -1}, {'resident_mb': 1}, {'service': 1}],
)  # fmt: skip
def test_a_report_that_is_none(change: dict[str, Any]) -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    all_of(client)
    report = dict(server.report(), clients=[])
    kept = reports.read_shard(report)
    assert kept.keys() == reports.OF_SHARD.keys()
    assert kept['tables'][0].keys() == reports.OF_TABLE.keys()
    with pytest.raises(WireError):
      reports.read_shard(report | change)


def test_top_shows_the_whole_program(capfd: pytest.CaptureFixture[str]) -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    all_of(client)
    steps = 1000

    def program() -> dict[str, Any]:
      return dict(steps=steps, replay=replay_reports(client))

    with parameters.Publisher(ANY, environments=32, program=program) as publisher:
      publisher.publish(5, [('w', np.zeros(2))])
      one, two = (bare.connect(publisher.address, reader.Parameters.kinds) for _ in range(2))
      one.hello(parameter_messages.SERVICE, role='act', environments=16)
      one.say(session_messages.METRICS, {'steps_per_s': 2345.6, 'resident_mb': 512.25})
      two.hello(parameter_messages.SERVICE, role='[red]reanalyse')
      two.say(session_messages.METRICS, {'windows_per_s': 7.5})
      asker = Asker(publisher.address, None, False)
      until(lambda: asker.ask()['program']['replay'] and asker.ask()['clients'][1]['metrics'])
      with pytest.raises(SystemExit) as end:
        cli.main(['top', publisher.address, '--once'])
      assert end.value.code == 0
      report = json.loads(capfd.readouterr().out)
      before = counters(report)
      report['program']['steps'] = 3000
      console = Console(width=250, record=True)
      console.print(table(report, {}, 2.0))  # of what was not there before there is no rate
      assert ' 0 steps/s' in console.export_text()
      console.print(table(report, before, 2.0))
      shown = console.export_text()
      asker.close()
      one.close()
      two.close()
  for text in (
    'version 5', '3,000 steps, 1,000 steps/s', 'steps_per_s', '2,346', '512', 'windows_per_s', '7.5',
    'podrace replay shard 0', '[red]reanalyse', 'act', '0 of 1,000,000',
  ):  # fmt: skip
    assert text in shown, shown


def test_a_write_that_waits_is_counted_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
  now = 100.0
  monkeypatch.setattr(time, 'monotonic', lambda: now)
  meter = acting.ActingMeter()
  now = 104.0
  with meter.writing():
    now = 110.0
    assert meter.read()['write_share'] == 0.6
    now = 112.0
  now = 114.0
  assert meter.read()['write_share'] == 0.5
  now = 115.0
  assert meter.read()['write_share'] == 0
