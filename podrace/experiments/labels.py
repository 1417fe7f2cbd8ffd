"""Labels of groups of curves: the agent, and the settings that distinguish the lines of a panel."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from podrace.experiments.curves import CurveGroup
from podrace.experiments.runs import agent_of
from podrace.settings.record import option
from podrace.settings.user_code import CLASS
from podrace.system.output import printable

CAP = 56  # characters of a label
VALUE_CAP = 24  # characters of a value in it
NAME = 'agent.name'


def make_labels(groups: Sequence[CurveGroup]) -> list[str]:
  """A short label for each group; groups of one environment never share one.

  It begins with the agent, unless there is but one. Then comes what differs between groups of that agent in the
  same environment: all of it where that fits, else as much as distinguishes them, with an ellipsis for the rest.
  What still is equal has a number.
  """
  agents = [printable(label_agent(g.config), lines=False) for g in groups]
  panels: dict[str, list[int]] = {}
  for i, g in enumerate(groups):
    panels.setdefault(g.env, []).append(i)
  found = [''] * len(groups)
  for panel in panels.values():
    alike = {agent: [groups[i] for i in panel if agents[i] == agent] for agent in agents}
    different = {agent: find_differences(some) for agent, some in alike.items() if some}
    texts = [
      _make_label(a := agents[i], len(set(agents)) == 1, groups[i], alike[a], *different[a])
      for i in panel
    ]
    for i, text in zip(
      panel, number_duplicates([groups[i].config for i in panel], texts), strict=True
    ):
      found[i] = text
  return found


def label_agent(config: dict[str, Any]) -> str:
  """The agent of a flat configuration; a sweep in one program is one of the agent that it varies."""
  record = {'name': str(config.get(NAME, '')), 'agent': {CLASS: config.get(f'agent.agent.{CLASS}')}}
  name, sweep = agent_of(record)
  return f'{name} (sweep)' if sweep else name or 'default'


def find_differences(groups: Sequence[CurveGroup]) -> tuple[list[str], list[str]]:
  """Paths of settings in which groups differ: those that distinguish all of them, and the others.

  The first ones are chosen greedily: each separates as many pairs as any that is left.
  """
  pairs = list(itertools.combinations(groups, 2))
  paths = sorted({p for g in groups for p in g.config} - {'env', NAME})
  values = {id(g): {p: json.dumps(g.config.get(p)) for p in paths} for g in groups}
  separates = {
    p: {i for i, (a, b) in enumerate(pairs) if values[id(a)][p] != values[id(b)][p]} for p in paths
  }
  left = set(range(len(pairs)))
  needed: list[str] = []
  while left:
    best = max(paths, key=lambda p: len(separates[p] & left))  # of several, the first by name
    if not separates[best] & left:
      break  # equal groups: there is nothing to say
    needed.append(best)
    left -= separates[best]
  return needed, [p for p in paths if separates[p] and p not in needed]


def truncate(text: str, length: int) -> str:
  """At most so many characters, with an ellipsis where some are missing."""
  return text if len(text) <= length else text[: length - 1] + '…'


def _make_label(
  agent: str,
  is_only: bool,
  g: CurveGroup,
  alike: Sequence[CurveGroup],
  needed: list[str],
  others: list[str],
) -> str:
  """The label of a group among those of its agent and environment, which have these `differences`."""
  settings = [s for p in (*needed, *others) if (s := _format_setting(g, p, alike))]
  few = sum(p in g.config for p in needed)
  begin = [] if is_only and settings else [truncate(agent, CAP)]
  if len(every := ', '.join([*begin, *settings])) <= CAP:
    return every
  for n in range(few, 0, -1):  # whole settings, as many as fit
    if len(text := ', '.join([*begin, *settings[:n], '…'])) <= CAP:
      return text
  return truncate(', '.join([*begin, *settings]), CAP)


def _format_setting(g: CurveGroup, path: str, groups: Sequence[CurveGroup]) -> str:
  """As `learning-rate 0.001`; '' where the group has no such setting."""
  if path not in g.config:
    return ''
  value = g.config[path]
  text = printable(str(value), lines=False)
  if isinstance(value, float):
    short = f'{value:.4g}'
    others = {x for o in groups if isinstance(x := o.config.get(path), float) and x != value}
    text = text if short in {f'{x:.4g}' for x in others} else short
  if len(text) > VALUE_CAP:
    text = '…' + text[1 - VALUE_CAP :]  # of paths and names the end says most
  name = printable(option(path), lines=False).removeprefix('--').removeprefix('agent.')
  return f'{name} {text or "none"}'


def number_duplicates(configs: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[str]:
  """The texts; those that are equal although their configurations differ have numbers."""
  keys = [json.dumps(c, sort_keys=True) for c in configs]
  of_text: dict[str, list[str]] = {}  # the configurations with this text
  for key, text in zip(keys, texts, strict=True):
    known = of_text.setdefault(text, [])
    if key not in known:
      known.append(key)
  names = {known[0]: text for text, known in of_text.items() if len(known) == 1}
  taken = set(names.values())
  for text, known in of_text.items():
    for n, key in enumerate(known if len(known) > 1 else [], 1):
      while (label := _append_number(text, n)) in taken:
        n += 1
      taken.add(label)
      names[key] = label
  return [names[key] for key in keys]


def _append_number(text: str, n: int) -> str:
  return f'{truncate(text, CAP - len(f" #{n}"))} #{n}'
