"""Comparison of a user's runs with the records and the published scores of a suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.experiments import plot
from podrace.experiments.curves import CurveGroup, final_mean
from podrace.experiments.labels import label_agent, make_labels
from podrace.experiments.scores import compare_pairs
from podrace.experiments.suites.page import by_pair, describe, scores_of
from podrace.experiments.suites.records import read_records
from podrace.experiments.suites.suite import Suite

YOURS = 'yours'
Scores = dict[str, dict[str, np.ndarray]]  # by the name of the agent and the task, [runs]
Steps = dict[str, dict[str, int]]  # likewise: environment steps of the longest run


def compare(
  suite: Suite, folder: Path, groups: Sequence[CurveGroup], out: Path
) -> tuple[dict[str, Any], list[str]]:
  """Draw aggregates of runs and of a suite's agents over the tasks that all runs have.

  A score is the training return of the last tenth, normalized as the suite states.

  Args:
    suite: the suite.
    folder: directory of its records.
    groups: curves of the user's runs.
    out: path of the picture.

  Returns:
    The numbers, and a table as lines of text.

  Raises:
    UsageError: if no task is shared.
  """
  yours, steps = _your_scores(suite, groups)
  tasks = [t for t in suite.tasks if yours and all(len(x.get(t, ())) for x in yours.values())]
  if not tasks:
    envs = ', '.join(sorted({g.env for g in groups}))
    known = ', '.join(t.env for t in suite.tasks.values())
    raise UsageError(
      f'--suite {suite.name}: no task is in all configurations of your runs, which are in {envs}; '
      f'its tasks are {known}'
    )
  pairs = by_pair(suite, read_records(folder, suite))
  recorded: Scores = {}
  for (task, agent), some in pairs.items():
    recorded.setdefault(agent, {})[task] = scores_of(some, 'training')
    steps.setdefault(agent, {})[task] = max(r.content['step'] for r in some)
  whole = {a: x for a, x in recorded.items() if all(t in x and len(x[t]) for t in tasks)}
  scaled = {
    name: [suite.tasks[t].normalize(x[t]) for t in tasks] for name, x in (yours | whole).items()
  }
  numbers = plot.draw_aggregate(scaled, f'score: {suite.scale}', out)
  result = {
    'suite': suite.name, 'tasks': tasks, 'normalized': suite.scale, 'groups': numbers,
    'probability_of_improvement': [p for p in compare_pairs(scaled) if p['better'] in yours],
    'steps': {name: {t: n for t, n in x.items() if t in tasks} for name, x in steps.items()},
    'published': [dataclasses.asdict(p) for p in suite.published],
  }  # fmt: skip
  return result, _table(suite, tasks, yours | recorded, steps)


def _your_scores(suite: Suite, groups: Sequence[CurveGroup]) -> tuple[Scores, Steps]:
  """Return the scores of the runs in environments of the suite, and their steps.

  A line is an agent, or if a task has several settings of an agent, each of these settings.
  Runs count in each task of their environment.
  """
  by_env: dict[str, list[str]] = {}
  for name, task in suite.tasks.items():
    by_env.setdefault(task.env, []).append(name)
  ours = [g for g in groups if g.env in by_env]
  labels = [label_agent(g.config) for g in ours]
  if len(set(zip(labels, (g.env for g in ours), strict=True))) < len(ours):
    labels = make_labels([dataclasses.replace(g, config=g.config | {'env': ''}) for g in ours])
  scores: Scores = {}
  steps: Steps = {}
  for group, label in zip(ours, labels, strict=True):
    final = np.array([final_mean(curve) for curve in group.curves])
    name = f'{YOURS}: {label}'
    tasks, longest = scores.setdefault(name, {}), steps.setdefault(name, {})
    for key in by_env[group.env]:
      tasks[key] = np.concatenate([tasks.get(key, np.array([])), final])
      longest[key] = max(longest.get(key, 0), *(int(c.x[-1]) for c in group.curves))
  return scores, steps


def _table(
  suite: Suite, tasks: Sequence[str], scores: Mapping[str, Any], steps: Steps
) -> list[str]:
  lines = []
  for task in tasks:
    lines.append(f'{task}, training return of the last tenth, mean [95% interval]:')
    for name, of_tasks in scores.items():
      if task in of_tasks:
        text, count = describe(of_tasks[task]), len(of_tasks[task])
        lines.append(f'  {name}: {text}, {count} seeds, {steps[name][task]:,} steps')
    lines += [
      f'  published, {p.who}: {p.scores[task]} ({p.protocol})'
      for p in suite.published
      if task in p.scores
    ]
  return lines
