"""The page of a suite: tables, pictures, published scores, protocol and origin of its records."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.experiments import plot, statistics
from podrace.experiments.curves import Band, CurveGroup
from podrace.experiments.labels import NAME
from podrace.experiments.suites.records import (
  Record,
  failing,
  have_equal_hashes,
  read_records,
  runs_of_equal_seeds,
)
from podrace.experiments.suites.suite import Program, Suite
from podrace.system.files import make_user_folder, write_whole
from podrace.system.output import printable

GRID = 100  # points of a sample efficiency curve
Pairs = Mapping[tuple[str, str], Sequence[Record]]  # records of each task and agent


def by_pair(suite: Suite, records: Mapping[str, Record]) -> Pairs:
  """Return the records of each task and agent, in the order of the suite."""
  pairs: dict[tuple[str, str], list[Record]] = {}
  for program in suite.programs:
    if program.name in records:
      pairs.setdefault((program.task, program.agent), []).append(records[program.name])
  return pairs


def scores_of(records: Sequence[Record], name: str) -> np.ndarray:
  """Return a score of all seeds of some records."""
  return np.concatenate([np.array([]), *(r.scores(name) for r in records)])


def describe_score(records: Sequence[Record], name: str) -> str:
  """Return `describe` of a score, and the number of seeds that have one if not all have."""
  scores, lacking = _scored(records, name)
  return describe(scores) + lacking


def _scored(records: Sequence[Record], name: str) -> tuple[np.ndarray, str]:
  """Return the scores, and the number of seeds that have one if only some have."""
  scores, seeds = scores_of(records, name), sum(len(r.content[name]) for r in records)
  return scores, f' ({len(scores)} of {seeds} seeds)' if 0 < len(scores) < seeds else ''


def describe(scores: np.ndarray) -> str:
  """Return a mean and its 95% bootstrap interval as text."""
  if not len(scores):
    return 'none'
  value = _number(float(scores.mean()))
  if len(scores) == 1:
    return value
  low, high = statistics.interval(statistics.mean, [scores])
  return f'{value} [{_number(float(low))}, {_number(float(high))}]'


def _number(x: float) -> str:
  return f'{x:,.2f}' if abs(x) < 1000 else f'{x:,.0f}'


def summarize(suite: Suite, records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
  """Return the scores of each task and agent, as texts."""
  result: dict[str, dict[str, Any]] = {}
  for (task, agent), some in by_pair(suite, records).items():
    row: dict[str, Any] = {n: describe_score(some, n) for n in ('evaluated', 'training')}
    result.setdefault(task, {})[agent] = row | {'seeds': len(scores_of(some, 'evaluated'))}
  return result


def write_page(suite: Suite, folder: Path, out: Path) -> dict[str, Any]:
  """Write the page of a suite and its pictures beside it, and return their paths.

  Args:
    suite: the suite.
    folder: directory of its records.
    out: the page.

  Raises:
    UsageError: if there is no record, or matplotlib is not installed.
    RunError: if a file cannot be written.
  """
  records = read_records(folder, suite)
  if not records:
    raise UsageError(
      f'{folder} has no record of {suite.name}: run podrace reproduce {shlex.join(suite.words)}'
    )
  pairs = by_pair(suite, records)
  curves, aggregate = (out.with_name(f'{out.stem}-{x}.png') for x in ('curves', 'aggregate'))
  plot.check_out(curves)
  with failing(out):
    make_user_folder(out.parent)
  groups = [
    CurveGroup({'env': task, NAME: agent}, [c for r in some for c in r.curves()])
    for (task, agent), some in pairs.items()
  ]
  picture = []
  if drawn := [g for g in groups if g.curves]:
    plot.draw(drawn, 'episode_return', 'steps', 'mean', curves)
    picture = [f'![Learning curves]({curves.name})']
  sections = [
    f'# {suite.title}', _head(suite), *picture, _table(suite, pairs),
    *([_hashes(suite, pairs)] if suite.hashes else []),
    *([_published(suite, pairs)] if suite.published else []),
    *(() if suite.hashes or len(suite.agents) == 1 else _aggregate(suite, pairs, aggregate)),
    _protocol(suite, records), _origin(records),
  ]  # fmt: skip
  with failing(out):
    write_whole(out, '\n\n'.join(sections) + '\n')
  return {'page': str(out), 'recorded': len(records), 'programs': len(suite.programs)}


def _head(suite: Suite) -> str:
  name = shlex.join(suite.words)
  most = f'A trial, of at most {suite.most_steps:,} steps each. ' if suite.most_steps else ''
  return (
    f'{suite.about}. {most}These commands reproduce the records and this page:\n\n'
    f'```\npodrace reproduce {name}\npodrace reproduce {name} --page docs/results/{suite.name}.md\n'
    '```'
  )


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  cells = [[printable(str(c), lines=False).replace('|', r'\|') for c in line] for line in lines]
  return '\n'.join(f'| {" | ".join(line)} |' for line in cells)


def _table(suite: Suite, pairs: Pairs) -> str:
  programs = {(p.task, p.agent): p for p in suite.programs}
  rows = []
  for (task, agent), some in pairs.items():
    hours = sum(r.content.get('wall_s') or 0.0 for r in some) / 3600
    planned = sum(p.count for p in suite.programs if (p.task, p.agent) == (task, agent))
    seeds = sum(len(r.content['seeds']) for r in some)
    rows.append([
      task, agent, f'{seeds}' if seeds == planned else f'{seeds} of {planned}',
      f'{programs[task, agent].steps:,}', describe_score(some, 'evaluated'),
      describe_score(some, 'training'), f'{hours:.2f}',
    ])  # fmt: skip
  head = ['task', 'agent', 'seeds', 'steps', 'final evaluation', 'training, last tenth', 'hours']
  lacking = [f'{task} by {agent}' for task, agent in programs if (task, agent) not in pairs]
  return (
    '## Scores\n\nMean over the seeds, and its 95% bootstrap interval. Hours are of all seeds.\n\n'
    + _rows(head, rows) + (f'\n\nNot run yet: {", ".join(lacking)}.' if lacking else '')
  )  # fmt: skip


def _hashes(suite: Suite, pairs: Pairs) -> str:
  rows = []
  for task in suite.tasks:
    compared = runs_of_equal_seeds(itertools.chain(*pairs.values()), task)
    if compared:
      same = all(map(have_equal_hashes, compared))
      killed = [f'{step:,}' for runs in compared for x in runs for step in x.get('killed_at', ())]
      first = compared[0][0]['params_sha256'][:16]
      rows.append([task, ', '.join(killed) or 'never', first, 'yes' if same else '**no**'])
  head = ['task', 'killed at step', 'first hash of the parameters', 'all hashes are equal']
  return f'## Killed and resumed\n\n{_rows(head, rows)}'


def _published(suite: Suite, pairs: Pairs) -> str:
  tasks = [t for t in suite.tasks if any(t in row.scores for row in suite.published)]
  rows = []
  for agent in suite.agents:
    for name, how in (('evaluated', 'final evaluation'), ('training', 'training, last tenth')):
      cells = [_mean(pairs.get((t, agent), ()), name) for t in tasks]
      if any(cells):
        rows.append([f'**{agent}, here**', *cells, how, 'this page'])
  for row in suite.published:
    rows.append([row.who, *(row.scores.get(t, '') for t in tasks), row.protocol, row.source])
  return '## Published scores\n\nScores compare only where the protocols agree.\n\n' + _rows(
    ['', *tasks, 'protocol', 'source'], rows
  )


def _mean(records: Sequence[Record], name: str) -> str:
  scores, lacking = _scored(records, name)
  return _number(float(scores.mean())) + lacking if len(scores) else ''


def _aggregate(suite: Suite, pairs: Pairs, out: Path) -> Iterator[str]:
  """Yield the aggregates over tasks, of the agents with scores and curves in all recorded tasks."""
  tasks = [t for t in suite.tasks if any(t == task for task, _ in pairs)]
  agents = [
    a
    for a in suite.agents
    if all(
      len(scores_of(pairs.get((t, a), ()), 'evaluated')) and any(r.curves() for r in pairs[t, a])
      for t in tasks
    )
  ]
  if not agents:
    return
  scores = {
    a: [suite.tasks[t].normalize(scores_of(pairs[t, a], 'evaluated')) for t in tasks]
    for a in agents
  }
  numbers = plot.draw_aggregate(
    scores, f'score: {suite.scale}', out, *_efficiency(suite, pairs, scores)
  )
  rows = [
    [name, *(_interval(values, s) for s in statistics.AGGREGATES)]
    for name, values in numbers.items()
  ]
  yield (
    f'## Over the tasks\n\nNormalized final evaluations over {", ".join(tasks)}: {suite.scale}. '
    'Intervals: 95%, stratified bootstrap.\n\n'
    + _rows(['agent', 'interquartile mean', 'median', 'mean', 'optimality gap'], rows)
  )
  if len(agents) > 1:
    table = [[a, *(_improvement(scores, a, b) for b in agents)] for a in agents]
    yield 'Probability that the row beats the column in a task:\n\n' + _rows(['', *agents], table)
  yield f'![Aggregates]({out.name})'


def _interval(values: Mapping[str, Any], statistic: str) -> str:
  ends = values[f'{statistic}_interval']
  return f'{values[statistic]:.3f}' + (f' [{ends[0]:.3f}, {ends[1]:.3f}]' if ends else '')


def _improvement(scores: Mapping[str, Sequence[np.ndarray]], a: str, b: str) -> str:
  if a == b:
    return ''
  value = statistics.probability_of_improvement(scores[a], scores[b])
  if min(map(len, [*scores[a], *scores[b]])) < 2:
    return f'{value:.2f}'
  low, high = statistics.interval(
    statistics.probability_of_improvement,
    scores[a],
    scores[b],
    resamples=statistics.CURVE_RESAMPLES,
  )
  return f'{value:.2f} [{low:.2f}, {high:.2f}]'


def _efficiency(
  suite: Suite, pairs: Pairs, scores: Mapping[str, Sequence[np.ndarray]]
) -> tuple[dict[str, Band], str]:
  """Return the interquartile mean of each agent over its steps, and the name of that axis.

  If an agent has different numbers of steps in its tasks, positions are parts of the runs. A curve
  begins when an episode of each run has ended.
  """
  tasks = [t for t in suite.tasks if any(t == task for task, _ in pairs)]
  totals = {(p.task, p.agent): p.steps for p in suite.programs}
  equal = all(len({totals[t, a] for t in tasks}) == 1 for a in scores)
  bands = {}
  for agent in scores:
    last = totals[tasks[0], agent] if equal else 1.0
    grid = np.linspace(last / GRID, last, GRID)
    each = [
      _on_grid(suite, t, pairs[t, agent], grid, 1.0 if equal else totals[t, agent]) for t in tasks
    ]
    known = np.isfinite(np.concatenate(each)).all(axis=0)
    if not known.any():  # an episode ended after the last position only
      continue
    grid, each = grid[known], [x[:, known] for x in each]
    low, high = statistics.interval(statistics.iqm, each, resamples=statistics.CURVE_RESAMPLES)
    count = np.full(len(grid), sum(map(len, each)))
    bands[agent] = Band(grid, statistics.iqm(each), low, high, count)
  return bands, 'environment steps' if equal else 'part of the run'


def _on_grid(
  suite: Suite, task: str, records: Sequence[Record], grid: np.ndarray, unit: float
) -> np.ndarray:
  """Return the normalized curves [runs, GRID] of a task, NaN before the first return of a run."""
  rows = [
    np.interp(grid * unit, c.x, suite.tasks[task].normalize(c.y), left=np.nan)
    for r in records
    for c in r.curves()
  ]
  return np.array(rows)


def _protocol(suite: Suite, records: Mapping[str, Record]) -> str:
  shown: dict[tuple[str, str], Program] = {}
  for program in suite.programs:
    if program.name in records:
      shown.setdefault((program.task, program.agent), program)
  ways: dict[str, dict[str, None]] = {}
  for evaluation in (p.evaluation for p in shown.values()):
    way = f'{evaluation.episodes:,} {evaluation.acting} episodes for each seed'
    where = (
      f'in `{evaluation.env}`' if evaluation.env else f'of at most {evaluation.max_steps:,} steps'
    )
    ways.setdefault(way, {})[where] = None
  final = '; '.join(f'{way}, {" or ".join(places)}' for way, places in ways.items())
  notes = [
    f'Final evaluation: {final}. The training return is the mean over the episodes that '
    'end in the last tenth of a run.',
    f'Normalization: {suite.scale}. '
    + '; '.join(f'{t.name} {t.low:g} to {t.high:g}' for t in suite.tasks.values()) + '.',
    *suite.notes,
  ]  # fmt: skip
  commands = dict.fromkeys(shlex.join(['podrace', 'train', *p.command]) for p in shown.values())
  return (
    '## Protocol\n\n' + '\n'.join(f'- {note}' for note in notes)
    + '\n\nThe first program of each task and agent:\n\n```\n' + '\n'.join(commands) + '\n```'
  )  # fmt: skip


def _origin(records: Mapping[str, Record]) -> str:
  origins: dict[tuple[str, str], int] = {}
  for record in records.values():
    machine = record.content['machine']
    names = ('device', 'processor', 'cores', 'jax', 'python')
    where = ', '.join(f'{n} {machine[n]}' for n in names if n in machine)
    key = re.sub('[0-9a-f]{28}(?=$|-)', '', record.content['commit']), where  # leaves 12 digits
    origins[key] = origins.get(key, 0) + 1
  rows = [[commit, where, count] for (commit, where), count in origins.items()]
  return f'## Origin\n\n{_rows(["commit", "machine", "programs"], rows)}'
