"""Pictures of curves and scores for screens and print, made by matplotlib without a display."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.experiments import curves, statistics
from podrace.experiments.curves import Band, CurveGroup
from podrace.experiments.labels import make_labels, shorten
from podrace.system.files import write_whole
from podrace.system.importing import why_not
from podrace.system.output import printable

# Okabe and Ito's colours, distinguishable with colour blindness. Dashes help in black and white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES: tuple[Any, ...] = ('-', (0, (5, 2)), (0, (1, 1)), (0, (5, 2, 1, 2)))
X_LABELS = {
  'steps': 'environment steps',
  'wall': 'wall time (s)',
  'gradient-steps': 'gradient steps',
}
NAMES = {'episode_return': 'episode return', 'episode_length': 'episode length (steps)'}
NAMES |= {'steps_per_s': 'environment steps per second'}
TITLE = 208  # most characters of an environment's name
LEGEND_LINE = 0.15  # height of a line of a legend, in inches
FORMATS = ('.png', '.svg', '.pdf')
NO_BAND = Band(*[np.array([])] * 5)


def check_out(path: Path) -> None:
  """Check the name of a picture and that matplotlib is installed.

  Raises:
    UsageError: if not.
  """
  if path.suffix not in FORMATS:
    raise UsageError(f'--out {path}: its name must end with {", ".join(FORMATS)}')
  try:
    import matplotlib  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('a picture', 'plot', e)) from e


def draw(groups: Sequence[CurveGroup], metric: str, x: curves.X, center: str, out: Path) -> None:
  """Draw curves over x: a panel per environment, and a line per group with its 95% interval."""
  by_env: dict[str, list[CurveGroup]] = {}
  for group in groups:
    by_env.setdefault(group.env, []).append(group)
  names = dict(zip(map(id, groups), make_labels(groups), strict=True))
  styles = {label: line_style(i) for i, label in enumerate(dict.fromkeys(names.values()))}
  at_ends = all(_fit_at_ends([names[id(g)] for g in env_groups]) for env_groups in by_env.values())
  columns = min(len(by_env), 3)
  rows = -(-len(by_env) // columns)
  sizes = [0 if at_ends else len(env_groups) for env_groups in by_env.values()]
  lines = sum(max(sizes[i : i + columns]) for i in range(0, len(sizes), columns))
  figure, axes = _figure(rows, columns, 4.6, 3.2, extra=lines * LEGEND_LINE)
  for axis, (env, env_groups) in zip(axes, by_env.items(), strict=False):
    ends = []
    for group in env_groups:
      label = names[id(group)]
      band = curves.make_band(group.curves, center)
      axis.plot(band.x, band.center, linewidth=1.6, **styles[label])
      axis.fill_between(
        band.x, band.low, band.high, color=styles[label]['color'], alpha=0.18, linewidth=0
      )
      text = _escape(f'{label} (n={len(group.curves)})')
      ends.append((band, text, styles[label]['color']))
    if at_ends:
      _label_ends(axis, ends)
    else:
      _legend_below(axis, axis.lines, [text for _, text, _ in ends])
    axis.set_title(
      _escape(textwrap.fill(shorten(printable(env, lines=False), TITLE), 52)), fontsize=10
    )
    axis.set_xlabel(X_LABELS[x], fontsize=9)
    of_log = ' of the log' if env_groups[0].log and metric.startswith('episode') else ''
    axis.set_ylabel(_escape(NAMES.get(metric, metric) + of_log), fontsize=9)
    _clean_axis(axis)
  center_name = {'mean': 'mean', 'median': 'median', 'iqm': 'interquartile mean'}[center]
  has_interval = any(len(g.curves) > 1 for g in groups)
  note = (
    f'line: {center_name} over n curves; band: 95% bootstrap interval'
    if has_interval
    else 'one curve each: no interval'
  )
  _save(figure, out, note)


def draw_sweep(trials: Sequence[dict[str, Any]], logs: dict[str, bool], out: Path) -> None:
  """Draw the returns of a sweep: a panel per varied field, and a dot per seed. The best is ringed.

  Args:
    trials: trials, best first, each with its settings and scores.
    logs: whether the axis of each varied field is logarithmic.
    out: path of the picture.
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
  """Return colour and dash of the i-th line. The first 28 differ."""
  return dict(color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i // len(COLOURS) % len(DASHES)])


def _fit_at_ends(names: Sequence[str]) -> bool:
  """Return whether the names fit at the ends of their lines, within the panel."""
  return len(names) <= 6 and max(map(len, names)) <= 12


def _legend_below(axis: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
  """Draw a name per line below the panel. Wide names make the picture higher, never wider."""
  axis.legend(
    handles, names, fontsize=7, frameon=False, loc='upper center', bbox_to_anchor=(0.5, -0.2),
    borderaxespad=0, handlelength=3,
  )  # fmt: skip


def _label_ends(axis: Any, ends: Sequence[tuple[Band, str, str]]) -> None:
  """Write a name at the end of each line, moved where names would overlap."""
  low, high = axis.get_ylim()
  gap = (high - low) * 0.07
  order = sorted(range(len(ends)), key=lambda i: ends[i][0].center[-1])
  at = np.array([ends[i][0].center[-1] for i in order])
  for i in range(1, len(at)):
    at[i] = max(at[i], at[i - 1] + gap)
  at[-1] = min(at[-1], high)  # a name above the picture moves down, with the names it meets
  for i in reversed(range(len(at) - 1)):
    at[i] = min(at[i], at[i + 1] - gap)
  right = max(band.x[-1] for band, _, _ in ends)
  for i, y in zip(order, at, strict=True):
    _, text, color = ends[i]
    axis.annotate(
      text, (right, y), xytext=(5, 0), textcoords='offset points', va='center',
      fontsize=8, color=color, annotation_clip=False,
    )  # fmt: skip


def draw_aggregate(
  scores: Mapping[str, Sequence[np.ndarray]],
  unit: str,
  out: Path,
  efficiency: Mapping[str, Band] | None = None,
  x_label: str = '',
) -> dict[str, dict[str, Any]]:
  """Draw median, IQM and performance profiles with intervals, and return the numbers.

  Args:
    scores: scores [runs] of each task of each algorithm. All have the same order of tasks.
    unit: unit of the scores, in words.
    out: path of the picture.
    efficiency: the interquartile mean of algorithms while they learn, for a fourth panel.
    x_label: name of that panel's horizontal axis.
  """
  summary = {name: summarize_tasks(tasks) for name, tasks in scores.items()}
  order = list(scores)
  outside = max(map(len, order)) > 12 or len(order) > 4
  height = max(0.3 * (len(order) - 6), LEGEND_LINE * len(order) * outside, 0)
  figure, axes = _figure(1, 4 if efficiency else 3, 4.2, 3.2, extra=height)
  for axis, statistic in zip(axes[:2], ('iqm', 'median'), strict=True):
    _draw_intervals(axis, summary, statistic)
    ticks = [_escape(textwrap.fill(name, 24)) if axis is axes[0] else '' for name in order]
    axis.set_yticks(range(len(order)), ticks, fontsize=8)
  all_scores = np.concatenate([x for tasks in scores.values() for x in tasks])
  least, most = min(all_scores.min(), 0.0), all_scores.max()
  thresholds = np.linspace(least, most + 0.02 * ((most - least) or 1.0), 200)
  profiles = [_profile(tasks, thresholds) for tasks in scores.values()]
  _draw_bands(axes[2], profiles, 'performance profile', 'normalized score', 'share of runs above')
  for axis in axes[3:]:
    bands = [(efficiency or {}).get(name, NO_BAND) for name in order]
    _draw_bands(axis, bands, 'sample efficiency', x_label, 'interquartile mean')
  if outside:
    _legend_below(axes[2], axes[2].lines, list(map(_escape, order)))
  else:
    axes[2].legend(axes[2].lines, list(map(_escape, order)), fontsize=7.5, frameon=False)
  _save(figure, out, f'{unit}; bars and bands: 95% stratified bootstrap intervals')
  return summary


def _draw_intervals(axis: Any, summary: dict[str, dict[str, Any]], statistic: str) -> None:
  """Draw a statistic of each algorithm as a bar from low to high. The first one is at the top."""
  for i, numbers in enumerate(summary.values()):
    color, limits = line_style(i)['color'], numbers[f'{statistic}_interval'] or ()
    axis.plot(
      limits, [i] * len(limits), linewidth=7, alpha=0.35, solid_capstyle='butt', color=color
    )
    axis.plot([numbers[statistic]], [i], '|', markersize=14, markeredgewidth=2, color=color)
  axis.set_ylim(len(summary) - 0.3, -0.7)
  axis.set_title({'iqm': 'interquartile mean', 'median': 'median'}[statistic], fontsize=10)
  axis.set_xlabel('normalized score', fontsize=9)
  _clean_axis(axis)


def _profile(tasks: Sequence[np.ndarray], thresholds: np.ndarray) -> Band:
  def profile(drawn: Sequence[np.ndarray]) -> np.ndarray:
    return statistics.performance_profile(drawn, thresholds)

  low, high = statistics.interval(profile, tasks, resamples=statistics.CURVE_RESAMPLES)
  count = np.full(len(thresholds), sum(map(len, tasks)))
  return Band(thresholds, profile(tasks), low, high, count)


def _draw_bands(axis: Any, bands: Sequence[Band], title: str, x_label: str, y_label: str) -> None:
  """Draw a line with its band for each algorithm."""
  for i, band in enumerate(bands):
    axis.plot(band.x, band.center, linewidth=1.6, **line_style(i))
    color = line_style(i)['color']
    axis.fill_between(band.x, band.low, band.high, color=color, alpha=0.18, linewidth=0)
  axis.set_title(title, fontsize=10)
  axis.set_xlabel(x_label, fontsize=9)
  axis.set_ylabel(y_label, fontsize=9)
  _clean_axis(axis)


def summarize_tasks(tasks: Sequence[np.ndarray]) -> dict[str, Any]:
  """Return the aggregates of one algorithm's scores.

  Intervals are None if a task has one run: they are resampled within each task.
  """
  summary: dict[str, Any] = {'tasks': len(tasks), 'curves': sum(map(len, tasks))}
  several = min(map(len, tasks)) > 1
  for name, statistic in statistics.AGGREGATES.items():
    summary[name] = float(statistic(tasks))
    ends = list(statistics.interval(statistic, tasks)) if several else None
    summary[f'{name}_interval'] = ends
  return summary


def _figure(
  rows: int, columns: int, width: float, height: float, extra: float = 0.0
) -> tuple[Any, list[Any]]:
  """Make a figure of panels of `width` x `height` inches, and `extra` inches higher.

  No panel is visible yet.
  """
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
  """Escape text for matplotlib, which reads formulas between dollars and skips a leading _."""
  words = printable(words).replace('$', r'\$')
  return f' {words}' if words.startswith('_') else words


def _save(figure: Any, out: Path, note: str) -> None:
  """Write the figure with a note at its foot. Its content does not change its size."""
  figure.supxlabel(note, fontsize=7.5, color='#555555', x=0.01, ha='left')
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'Glyph')  # the font may lack a character
    try:
      content = io.BytesIO()
      figure.savefig(content, dpi=150, format=out.suffix[1:])
      write_whole(out, content.getvalue())
    except OSError as e:
      raise UsageError(f'--out {out} cannot be written: {e.strerror}') from e
    except ValueError as e:  # for example, an image with too many pixels
      raise UsageError(f'--out {out} cannot be drawn: {e}; plot fewer runs at once') from e
