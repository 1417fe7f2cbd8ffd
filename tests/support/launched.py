"""Runs a program of nodes: `launched.py DIRECTORY NODES [shown|ray]`, where NODES is a list in JSON.

On this machine; with `ray` on the cluster of RAY_ADDRESS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from podrace.launch import Supervisor, run
from podrace.launch.engines import ray
from podrace.launch.program import Backoff, Node, Program


def nodes(told: str) -> tuple[Node, ...]:
  """The nodes of a list in JSON; commands are code of Python, whose arguments follow."""
  found = []
  for fields in json.loads(told):
    backoff = fields.pop('restart', {'first': 0.0})
    fields['command'] = (sys.executable, '-uc', *fields['command'])
    fields['listens'] = tuple(fields.get('listens', ()))
    found.append(Node(**fields, restart=None if backoff is None else Backoff(**backoff)))
  return tuple(found)


if __name__ == '__main__':
  directory, told, *shown = sys.argv[1:]
  program = Program(nodes(told))
  if shown == ['ray']:
    with ray.cluster(), ray.room(program) as group:
      sys.exit(ray.run(program, Path(directory), group))
  if shown:
    sys.exit(run(program, directory))
  say = lambda name, line: print(f'{name}: {line}', flush=True)  # noqa: E731
  sys.exit(Supervisor(program, Path(directory), say).run())
