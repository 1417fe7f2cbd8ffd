"""Reports of services that are nearly right: `podrace top` refuses them, or shows them as text."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import bare
import numpy as np
import pytest
from children import until
from peers import Learner, Raw
from rich.console import Console
from services import all_of

from podrace import cli
from podrace.distributed import parameters, replay
from podrace.distributed.learner import replay_reports
from podrace.distributed.net import dashboard, reports, session_messages
from podrace.distributed.net.frame import WireError
from podrace.distributed.replay.server import ReplayServer

ESCAPE = '\x1b]0;renamed\x07'
WRONG: list[Any] = [
  None, True, -1, 7, 1.5, math.nan, math.inf, 1e308, 'text', ESCAPE, f'[red]{ESCAPE}', b'bytes', [], [ESCAPE],
  [[1.5, ESCAPE]], {}, {ESCAPE: ESCAPE}, {'a': 1},
]  # fmt: skip


def report_of(address: str, is_whole: Callable[[Any], Any]) -> dict[str, Any]:
  """The first report of a service that is whole."""
  with contextlib.closing(dashboard.Asker(address, None, False)) as asker:
    return until(lambda: report if is_whole(report := asker.ask()) else None)


def of_learner() -> dict[str, Any]:
  with Learner() as learner, Raw(learner.address) as raw:
    raw.join(2)
    raw.say(session_messages.METRICS, {'steps_per_s': 1.5, 'resident_mb': 7})
    return report_of(learner.address, lambda report: report['clients'][0]['metrics'])


def of_program() -> dict[str, Any]:
  with ReplayServer(bare.ANY) as server, replay.connect(server.address) as client:
    all_of(client)
    program = lambda: dict(steps=10, replay=replay_reports(client))  # noqa: E731
    with parameters.Publisher(bare.ANY, environments=2, program=program) as publisher:
      publisher.publish(1, [('x', np.ones(2))])
      with contextlib.closing(parameters.Parameters(publisher.address)):
        return report_of(publisher.address, lambda r: r['program']['replay'] and r['clients'])


def of_replay() -> dict[str, Any]:
  with ReplayServer(bare.ANY) as server, replay.connect(server.address) as client:
    all_of(client)
    return report_of(server.address, bool)


def places(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
  """Where something else can stand."""
  yield path
  for key, value in (
    x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
  ):
    yield from places(value, (*path, key))


def changed(report: Any, path: tuple[Any, ...], value: Any) -> Any:
  """With another value at a place, or without the key if it is `places`."""
  if not path:
    return value
  new = copy.deepcopy(report)
  at = new
  for key in path[:-1]:
    at = at[key]
  if value is places:
    del at[path[-1]]
  else:
    at[path[-1]] = value
  return new


@pytest.mark.parametrize('make', [of_learner, of_program, of_replay])
def test_a_report_is_refused_or_shown_as_text(make: Any) -> None:
  good = make()
  assert reports.read(good) is good
  refused = shown = 0
  for path in places(good):
    for value in (*WRONG, *([places] if path else [])):
      report = changed(good, path, value)
      try:
        reports.read(report)
      except WireError as e:
        refused += 1
        assert not {'\x1b', '\x07'} & set(str(e))
        continue
      shown += 1
      console = Console(width=200, record=True, file=io.StringIO())
      console.print(dashboard.table(report, dashboard.counters(report), 1.0))
      assert not {'\x1b', '\x07'} & set(console.export_text())
      json.dumps(report, allow_nan=False)
  assert refused > 100 and shown > 10


def test_clients_that_name_many_metrics_make_no_endless_table() -> None:
  report = of_replay()
  one = report['clients'][0]
  report['clients'] = [
    {**one, 'metrics': {f'm{i}_{j}': 1.0 for j in range(16)}} for i in range(300)
  ]
  clients = dashboard.service(reports.read(report), {}, 0.0).renderables[-1]
  assert len(clients.columns) == dashboard.COLUMNS + 2


def test_top_ends_at_a_malformed_report(
  monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setattr(dashboard, 'ANSWER_SECONDS', 1.0)

  class Odd(bare.Service):
    def report(self) -> Any:
      return {'service': ESCAPE, 'counts': [ESCAPE]}

  with Odd().listen() as odd:
    for more in ([], ['--once']):
      with pytest.raises(SystemExit) as end:
        cli.main(['top', odd.address, *more])
      assert end.value.code == 1
      told = capfd.readouterr()
      assert not told.out and len(told.err.splitlines()) == 1 and '\x1b' not in told.err


def test_without_a_terminal_each_report_is_a_line(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  class Stub:
    def __init__(self, *args: Any) -> None:
      self.asked = 0

    def ask(self) -> dict[str, Any]:
      self.asked += 1
      if self.asked > 2:
        raise TimeoutError('gone')
      return {'asked': self.asked}

    def close(self) -> None: ...

  monkeypatch.setattr(dashboard, 'Asker', Stub)
  assert dashboard.run('', None, False, once=False, every=0.1) == 1
  assert [json.loads(x) for x in capsys.readouterr().out.splitlines()] == [
    {'asked': 1},
    {'asked': 2},
  ]
