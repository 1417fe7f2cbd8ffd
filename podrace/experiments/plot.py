"""Pictures of curves and scores, for screens and for print: matplotlib, no display needed."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.experiments import curves
from podrace.experiments.curves import Band, CurveGroup
from podrace.experiments.labels import make_labels, truncate
from podrace.system.files import write_whole
from podrace.system.importing import why_not
from podrace.system.output import printable

# Okabe and Ito's colours: those who are colour-blind can distinguish them. Dashes help in black and white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES: tuple[Any, ...] = ('-', (0, (5, 2)), (0, (1, 1)), (0, (5, 2, 1, 2)))
X_LABELS = {
  'steps': 'environment steps',
  'wall': 'wall time (s)',
  'gradient-steps': 'gradient steps',
}
NAMES = {'episode_return': 'episode return', 'episode_length': 'episode length (steps)'}
NAMES |= {'steps_per_s': 'environment steps per second'}
TITLE = 208  # characters of an environment's name
LEGEND_LINE = 0.15  # inches of a line of a legend
FORMATS = ('.png', '.svg', '.pdf')


def check_out(path: Path) -> None:
  """Raises UsageError for a picture that can't be written, or without matplotlib."""
  if path.suffix not in FORMATS:
    raise UsageError(f'--out {path}: its name must end with {", ".join(FORMATS)}')
  try:
    import matplotlib  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('a picture', 'plot', e)) from e


def draw(groups: Sequence[CurveGroup], metric: str, x: curves.X, center: str, out: Path) -> None:
  """Curves over x: a panel for each environment, a line for each group, with its 95% interval."""
  by_env: dict[str, list[CurveGroup]] = {}
  for group in groups:
    by_env.setdefault(group.env, []).append(group)
  names = dict(zip(map(id, groups), make_labels(groups), strict=True))
  styles = {label: line_style(i) for i, label in enumerate(dict.fromkeys(names.values()))}
  at_ends = all(_fit_at_ends([names[id(g)] for g in those]) for those in by_env.values())
  columns = min(len(by_env), 3)
  rows = -(-len(by_env) // columns)
  sizes = [0 if at_ends else len(those) for those in by_env.values()]
  lines = sum(max(sizes[i : i + columns]) for i in range(0, len(sizes), columns))
  figure, axes = _figure(rows, columns, 4.6, 3.2, extra=lines * LEGEND_LINE)
  for axis, (env, those) in zip(axes, by_env.items(), strict=False):
    ends = []
    for group in those:
      label = names[id(group)]
      found = curves.make_band(group.curves, center)
      axis.plot(found.x, found.center, linewidth=1.6, **styles[label])
      axis.fill_between(
        found.x, found.low, found.high, color=styles[label]['color'], alpha=0.18, linewidth=0
      )
      text = _escape(f'{label} (n={len(group.curves)})')
      ends.append((found, text, styles[label]['color']))
    if at_ends:
      _label_ends(axis, ends)
    else:
      _legend_below(axis, axis.lines, [text for _, text, _ in ends])
    axis.set_title(
      _escape(textwrap.fill(truncate(printable(env, lines=False), TITLE), 52)), fontsize=10
    )
    axis.set_xlabel(X_LABELS[x], fontsize=9)
    axis.set_ylabel(_escape(NAMES.get(metric, metric)), fontsize=9)
    _clean_axis(axis)
  what = {'mean': 'mean', 'median': 'median', 'iqm': 'interquartile mean'}[center]
  several = any(len(g.curves) > 1 for g in groups)
  note = (
    f'line: {what} over n curves; band: 95% bootstrap interval'
    if several
    else 'one curve each: no interval'
  )
  _save(figure, out, note)


def draw_sweep(trials: Sequence[dict[str, Any]], logs: dict[str, bool], out: Path) -> None:
  """The returns of a sweep's trials: a panel for each varied field, and a dot for each seed; the best is ringed.

  Args:
    trials: best first, each with its settings and scores.
    logs: of each varied field, whether its axis is logarithmic.
  """
  columns = min(len(logs), 3)
  figure, axes = _figure(-(-len(logs) // columns), columns, 4.6, 3.2)
  known = [t for t in trials if t['score'] is not None]
  for axis, (name, log) in zip(axes, logs.items(), strict=False):
    dots = [(t['settings'][name], y) for t in known for y in t['scores'] if y is not None]
    words = any(isinstance(x, str) for x, _ in dots)
    at = [(str(x) if words else x, y) for x, y in dots]
    axis.scatter(*zip(*at, strict=True), s=22, color=COLOURS[0], alpha=0.6, linewidth=0)
    best = known[0]['settings'][name]
    axis.scatter(
      [str(best) if words else best],
      [known[0]['score']],
      s=110,
      facecolor='none',
      edgecolor=COLOURS[1],
      linewidth=2,
    )
    if log and not words:
      axis.set_xscale('log')
    axis.set_xlabel(name, fontsize=9)
    axis.set_ylabel('episode return', fontsize=9)
    _clean_axis(axis)
  _save(figure, out, 'a dot: a seed of a setting; ringed: the best setting')


def line_style(i: int) -> dict[str, Any]:
  """Colour and dash of the i-th line; no two of 28 are alike."""
  return dict(color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i // len(COLOURS) % len(DASHES)])


def _fit_at_ends(names: Sequence[str]) -> bool:
  """Whether there is room for the names at the ends of their lines, within the panel."""
  return len(names) <= 6 and max(map(len, names)) <= 12


def _legend_below(axis: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
  """A name a line, under the panel: wide names make the picture higher, never wider."""
  axis.legend(
    handles, names, fontsize=7, frameon=False, loc='upper center', bbox_to_anchor=(0.5, -0.2),
    borderaxespad=0, handlelength=3,
  )  # fmt: skip


def _label_ends(axis: Any, ends: Sequence[tuple[Band, str, str]]) -> None:
  """A name at the end of each line, moved where they would overlap."""
  low, high = axis.get_ylim()
  gap = (high - low) * 0.07
  order = sorted(range(len(ends)), key=lambda i: ends[i][0].center[-1])
  at = np.array([ends[i][0].center[-1] for i in order])
  for i in range(1, len(at)):
    at[i] = max(at[i], at[i - 1] + gap)
  at -= max(0.0, at[-1] - high)  # what stands above the picture moves down, and those below with it
  right = max(found.x[-1] for found, _, _ in ends)
  for i, y in zip(order, at, strict=True):
    _, text, color = ends[i]
    axis.annotate(
      text, (right, y), xytext=(5, 0), textcoords='offset points', va='center',
      fontsize=8, color=color, annotation_clip=False,
    )  # fmt: skip


def draw_aggregate(
  scores: dict[str, list[np.ndarray]], unit: str, out: Path
) -> dict[str, dict[str, Any]]:
  """Median, IQM, mean and optimality gap with intervals; performance profiles. Returns the numbers.

  Args:
    scores: of each algorithm, [runs] for each task, in the same order of tasks.
    unit: of the scores, in words.
  """
  found = {name: summarize_tasks(tasks) for name, tasks in scores.items()}
  order = list(scores)
  outside = max(map(len, order)) > 12 or len(order) > 4
  figure, axes = _figure(
    1, 3, 4.2, 3.2, extra=max(0.3 * (len(order) - 6), LEGEND_LINE * len(order) * outside, 0)
  )
  for axis, what in zip(axes[:2], ('iqm', 'median'), strict=True):
    for i, name in enumerate(order):
      value, (low, high) = found[name][what], found[name][f'{what}_interval']
      axis.plot(
        [low, high],
        [i, i],
        linewidth=7,
        alpha=0.35,
        solid_capstyle='butt',
        color=line_style(i)['color'],
      )
      axis.plot([value], [i], '|', markersize=14, markeredgewidth=2, color=line_style(i)['color'])
    ticks = [_escape(textwrap.fill(name, 24)) if axis is axes[0] else '' for name in order]
    axis.set_yticks(range(len(order)), ticks, fontsize=8)
    axis.set_ylim(len(order) - 0.3, -0.7)  # the first one at the top
    axis.set_title({'iqm': 'interquartile mean', 'median': 'median'}[what], fontsize=10)
    axis.set_xlabel('normalised score', fontsize=9)
    _clean_axis(axis)
  every = np.concatenate([x for tasks in scores.values() for x in tasks])
  thresholds = np.linspace(every.min(), every.max(), 200)
  for i, tasks in enumerate(scores.values()):
    axes[2].plot(
      thresholds, curves.performance_profile(tasks, thresholds), linewidth=1.6, **line_style(i)
    )
  axes[2].set_title('performance profile', fontsize=10)
  axes[2].set_xlabel('normalised score', fontsize=9)
  axes[2].set_ylabel('share of runs above', fontsize=9)
  if outside:
    _legend_below(axes[2], axes[2].lines, list(map(_escape, order)))
  else:
    axes[2].legend(axes[2].lines, list(map(_escape, order)), fontsize=7.5, frameon=False)
  _clean_axis(axes[2])
  _save(figure, out, f'{unit}; bars: 95% stratified bootstrap intervals')
  return found


def summarize_tasks(tasks: list[np.ndarray]) -> dict[str, Any]:
  """The aggregates of one algorithm's scores, with intervals."""
  scores = np.concatenate(tasks)
  found: dict[str, Any] = {'tasks': len(tasks), 'curves': len(scores)}
  for name, center in curves.CENTERS.items():
    found[name] = float(center(scores))
    found[f'{name}_interval'] = list(curves.bootstrap_interval(tasks, center))
  return found


def _figure(
  rows: int, columns: int, width: float, height: float, extra: float = 0.0
) -> tuple[Any, list[Any]]:
  """A figure of panels of that size in inches, and `extra` inches higher; no panel is visible yet."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width * columns, height * rows + extra), layout='constrained')
  axes = list(figure.subplots(rows, columns, squeeze=False).flat)
  for axis in axes:
    axis.set_visible(False)
  return figure, axes


def _clean_axis(axis: Any) -> None:
  from matplotlib.ticker import EngFormatter

  axis.set_visible(True)
  axis.spines[['top', 'right']].set_visible(False)
  axis.grid(axis='y', color='#dddddd', linewidth=0.6)
  axis.set_axisbelow(True)
  axis.tick_params(labelsize=8)
  low, high = axis.get_xlim()
  if high - low >= 10_000 and axis.get_xscale() == 'linear':
    axis.xaxis.set_major_formatter(EngFormatter(sep=''))


def _escape(words: str) -> str:
  """Words as they are, for matplotlib: it reads formulas between dollars, and leaves out what begins with _."""
  words = printable(words).replace('$', r'\$')
  return f' {words}' if words.startswith('_') else words


def _save(figure: Any, out: Path, note: str) -> None:
  """Writes the figure, with a note at its foot; its size is as planned, whatever is in it."""
  figure.supxlabel(note, fontsize=7.5, color='#555555', x=0.01, ha='left')
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'Glyph')  # its font lacks a letter of a name
    try:
      content = io.BytesIO()
      figure.savefig(content, dpi=150, format=out.suffix[1:])
      write_whole(out, content.getvalue())
    except OSError as e:
      raise UsageError(f'--out {out} cannot be written: {e.strerror}') from e
    except ValueError as e:  # such as an image of too many pixels
      raise UsageError(f'--out {out} cannot be drawn: {e}; plot fewer runs at once') from e
