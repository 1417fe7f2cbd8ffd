"""Checks of the reports of services: a difference from docs/protocol.md is a WireError."""

from __future__ import annotations

import math
from typing import Any

from podrace.distributed.net import process_metrics
from podrace.distributed.net.frame import WireError, check_fields, read_map, short

OF_ALL = dict(service=str, counts=dict, clients=list, more_clients=int, resident_mb=float)
OF_CLIENT = dict(name=str, seconds=float, last_seen_s=float, metrics=dict)
OF_LEARNER = dict(env=str, slots=int, free=int)
OF_LEARNERS_CLIENT = dict(
  env=str, environments=int, acting=int, frames=int, restarts=int, answer_ms=list, step_ms=list
)
OF_SHARD = dict(service=str, tables=list, bytes=int, resident_mb=float)
OF_TABLE = dict(
  name=str, size=int, max_size=int, bytes=int, inserts=int, samples=int, waiting_inserts=int,
  waiting_samplers=int, limiter=str,
)  # fmt: skip


def read(report: Any) -> dict[str, Any]:
  """Check a report of any service, and return it.

  Raises:
    WireError: naming the entry that is missing or of another type.
  """
  _check_json(report)
  read_map('report', report, OF_ALL)
  counts = report['counts'].values()
  check_fields('counts', list(counts), (int,) * len(counts))
  is_learner = 'env' in report
  if is_learner:
    read_map('report', report, OF_LEARNER)
  elif 'version' in report:
    read_map('report', report, dict(parameter_bytes=int, program=dict))
    if type(report['version']) is not int:
      raise WireError(f'a version {short(report["version"])} in a report, expected int')
    optional = {'steps': 0, 'replay': [], 'missing': []}
    read_map('program', optional | report['program'], dict(steps=int, replay=list, missing=list))
    for role in report['program'].get('missing', []):
      check_fields('missing', [role], (str,))
    for shard in report['program'].get('replay', []):
      read_shard(shard)
  else:
    read_shard(report)
  for client in report['clients']:
    read_map('client of a report', client, OF_CLIENT)
    process_metrics.check(client['metrics'])
    if is_learner:
      read_map('client of a report', client, OF_LEARNERS_CLIENT)
      for name in ('answer_ms', 'step_ms'):
        check_fields(name, client[name], (float, float))
  return report


def read_shard(report: Any) -> dict[str, Any]:
  """Return the known entries of a replay service's report; raises as `read`."""
  _check_json(report)
  known = read_map('report of a replay service', report, OF_SHARD)
  return known | {'tables': [read_map('table of a report', t, OF_TABLE) for t in known['tables']]}


def _check_json(x: Any) -> None:
  """Refuse values that JSON lacks: bytes, NaN and infinity. Headers bound the recursion."""
  if type(x) is dict:
    for value in x.values():
      _check_json(value)
  elif type(x) is list:
    for value in x:
      _check_json(value)
  elif type(x) not in (str, int, bool, float, type(None)) or (
    type(x) is float and not math.isfinite(x)
  ):
    raise WireError(f'{short(x)} in a report, expected what JSON has')
