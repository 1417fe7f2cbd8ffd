"""Labels of groups of curves: the agent, and the settings that distinguish lines of a panel."""

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

CAP = 56  # most characters of a label
VALUE_CAP = 24  # most characters of a value in a label
NAME = 'agent.name'


def make_labels(groups: Sequence[CurveGroup]) -> list[str]:
  """Return a short label for each group, unique within its environment.

  A label begins with the agent, unless all groups have the same one. Then follow the settings that
  differ between groups of that agent and environment: all of them if they fit, else enough to
  distinguish the groups and an ellipsis. Labels that are still equal get a number.
  """
  agents = [printable(label_agent(g.config), lines=False) for g in groups]
  panels: dict[str, list[int]] = {}
  for i, g in enumerate(groups):
    panels.setdefault(g.env, []).append(i)
  result = [''] * len(groups)
  for panel in panels.values():
    alike = {agent: [groups[i] for i in panel if agents[i] == agent] for agent in agents}
    different = {
      agent: find_differences(same_agent) for agent, same_agent in alike.items() if same_agent
    }
    texts = [
      _make_label(a := agents[i], len(set(agents)) == 1, groups[i], alike[a], *different[a])
      for i in panel
    ]
    for i, text in zip(
      panel, number_duplicates([groups[i].config for i in panel], texts), strict=True
    ):
      result[i] = text
  return result


def label_agent(config: dict[str, Any]) -> str:
  """Return the agent's name in a flat configuration. A sweep in one program gets its agent's."""
  record = {'name': str(config.get(NAME, '')), 'agent': {CLASS: config.get(f'agent.agent.{CLASS}')}}
  name, sweep = agent_of(record)
  return f'{name} (sweep)' if sweep else name or 'default'


def find_differences(groups: Sequence[CurveGroup]) -> tuple[list[str], list[str]]:
  """Return paths of settings that distinguish all groups, and further settings that differ.

  The first paths are chosen greedily: each separates the most remaining pairs.
  """
  pairs = list(itertools.combinations(groups, 2))
  paths = sorted({p for g in groups for p in g.config} - {'env', NAME})
  values = {id(g): {p: json.dumps(g.config.get(p)) for p in paths} for g in groups}
  separates = {
    p: {i for i, (a, b) in enumerate(pairs) if values[id(a)][p] != values[id(b)][p]} for p in paths
  }
  remaining = set(range(len(pairs)))
  needed: list[str] = []
  while remaining and paths:
    # of equally good paths, the first by name
    best = max(paths, key=lambda p: len(separates[p] & remaining))
    if not separates[best] & remaining:
      break  # the remaining groups are equal
    needed.append(best)
    remaining -= separates[best]
  return needed, [p for p in paths if separates[p] and p not in needed]


def shorten(text: str, length: int) -> str:
  """Cut text to at most `length` characters, with an ellipsis for the rest."""
  return text if len(text) <= length else text[: length - 1] + '…'


def _make_label(
  agent: str,
  is_only: bool,
  g: CurveGroup,
  alike: Sequence[CurveGroup],
  needed: list[str],
  further: list[str],
) -> str:
  """Return the label of a group among groups `alike` of its agent and environment."""
  settings = [s for p in (*needed, *further) if (s := _format_setting(g, p, alike))]
  few = sum(p in g.config for p in needed)
  begin = [] if is_only and settings else [shorten(agent, CAP)]
  if len(full := ', '.join([*begin, *settings])) <= CAP:
    return full
  for n in range(few, 0, -1):  # as many whole settings as fit
    if len(text := ', '.join([*begin, *settings[:n], '…'])) <= CAP:
      return text
  return shorten(', '.join([*begin, *settings]), CAP)


def _format_setting(g: CurveGroup, path: str, groups: Sequence[CurveGroup]) -> str:
  """Format a setting, such as `learning-rate 0.001`, or return '' if the group lacks it."""
  value = g.config.get(path)
  if value in (None, '', 'null'):
    return ''
  text = printable(str(value), lines=False)
  if isinstance(value, float):
    short = f'{value:.4g}'
    other_values = {x for o in groups if isinstance(x := o.config.get(path), float) and x != value}
    text = text if short in {f'{x:.4g}' for x in other_values} else short
  if len(text) > VALUE_CAP:
    text = '…' + text[1 - VALUE_CAP :]  # the end of a path or name tells most
  name = printable(option(path), lines=False).removeprefix('--').removeprefix('agent.')
  return f'{name} {text}'


def number_duplicates(configs: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[str]:
  """Return the texts, with numbers where texts are equal and configurations differ."""
  keys = [json.dumps(c, sort_keys=True) for c in configs]
  of_text: dict[str, list[str]] = {}  # configurations by text
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
  return f'{shorten(text, CAP - len(f" #{n}"))} #{n}'
