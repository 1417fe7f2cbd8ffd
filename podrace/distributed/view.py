"""A learner's view of its replay service, for `podrace top` and for the log."""

from __future__ import annotations

from typing import Any

from podrace import service
from podrace.net.measures import Measures

Reports = list[dict[str, Any]]


def replay_reports(client: service.Client | None) -> Reports:
  """The newest reports of all shards that are there; newer ones are asked for, and come later."""
  connections = [] if client is None else client.connections
  for connection in connections:
    connection.ask_report()
  return [report for c in connections if (report := c.report) is not None]


def replay_metrics(reports: Reports, table: str) -> Measures:
  """For the log: of the service's memory, and of the table that is learned from; none if nothing is known."""
  if not reports:
    return {}
  tables = [t for report in reports for t in report['tables'] if t['name'] == table]
  names = ('inserts', 'waiting_inserts', 'waiting_samplers')
  return {
    'replay_resident_mb': sum(report['resident_mb'] for report in reports),
    'replay_mb': sum(report['bytes'] for report in reports) / 1e6,
    **{f'replay_{name}': sum(t[name] for t in tables) for name in names},
  }
