"""The settings of a sweep in one program, each as a run of its own. This does not import jax."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile
from podrace.experiments.runs import agent_of
from podrace.run.metrics import Line
from podrace.system.files.reading import read_object
from podrace.system.files.schema import COUNT, TEXT, Member, check_members, is_number, needed

Setting = tuple[dict[str, Any], slice]  # flat configuration, and seeds in the program
MOST = 1000  # most settings with a line of their own
VARIED = {
  'fields': needed(Member('a list', each=TEXT)),
  'values': needed(Member('a list', each=Member('a number'))),
  'seeds': needed(COUNT),
}
# Metrics of the whole program. Any other metric without seeds is a mean over all settings.
OF_PROGRAM = ('step', 'wall_s', 'steps_per_s', 'gradient_steps')


def split_config(path: Path, record: dict[str, Any], config: dict[str, Any]) -> list[Setting]:
  """Return the flat configuration of each setting of a sweep, and its seeds in the program.

  There are none of other runs, of a population (its settings change), and of more than MOST.

  Args:
    path: run directory.
    record: content of config.json.
    config: flat record, from the path of a setting to its value.
  """
  name, is_sweep = agent_of(record['agent'])
  try:
    check_members(record | record['agent'], VARIED)
  except ValueError:
    return []
  fields, values, seeds = record['agent']['fields'], record['agent']['values'], record['seeds']
  settings = len(values) // max(1, len(fields))
  whole = settings * len(fields) == len(values) and seeds % max(1, settings) == 0
  if not is_sweep or not whole or not 0 < settings <= MOST or _is_population(path):
    return []
  inner = 'agent.agent.'
  alone = {k: x for k, x in config.items() if not k.startswith('agent.')} | {
    f'agent.{k.removeprefix(inner)}': x for k, x in config.items() if k.startswith(inner)
  }
  alone.pop('agent.class', None)
  each = seeds // settings
  return [
    (
      alone
      | {'agent.name': name}
      | {f'agent.{field}': x for field, x in zip(fields, values[i * len(fields) :], strict=False)},
      slice(i * each, (i + 1) * each),
    )
    for i in range(settings)
  ]


def _is_population(path: Path) -> bool:
  with contextlib.suppress(UnreadableFile):
    return (read_object(path.parent / 'sweep.json', {'method': TEXT}) or {}).get('method') == 'pbt'
  return False


def take_seeds(lines: list[Line], seeds: slice | None) -> list[Line]:
  """Return the lines of metrics of one setting, without means over all settings.

  With `seeds` None, the lines are of a run without settings, and remain as they are.
  """
  return lines if seeds is None else [_take_seeds(line, seeds) for line in lines]


def _take_seeds(line: Line, seeds: slice) -> Line:
  result: Line = {name: line[name] for name in OF_PROGRAM if name in line}
  for name, values in line.items():
    if name.endswith('_by_seed') and isinstance(values, list):
      known = [x for x in values[seeds] if is_number(x)]
      count = 1 if name == 'episodes_by_seed' else len(known)
      result[name] = values[seeds]
      result[name.removesuffix('_by_seed')] = sum(known) / count if known else None
  return result
