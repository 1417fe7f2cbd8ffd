"""podrace plot: learning curves, and aggregates over tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podrace.errors import UsageError
from podrace.experiments.runs import find
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, tell

X = ('steps', 'wall', 'gradient-steps')
CENTERS = ('mean', 'median', 'iqm')
COMMAND = Command(
  'plot',
  'RUN... [OPTIONS]',
  'learning curves of runs, or of all runs under directories: a panel for each environment, a line for each '
  'configuration, whatever its seeds',
  (
    Option('--out', 'FILE', 'a .png, .svg or .pdf', 'curves.png'),
    Option('--metric', 'NAME', 'any key of metrics.jsonl', 'episode_return'),
    Option('--x', 'NAME', 'steps, wall or gradient-steps', 'steps', X),
    Option('--center', 'NAME', 'mean, median or iqm, the interquartile mean', 'mean', CENTERS),
    Option('--aggregate', '', 'the scores of all tasks instead: interquartile mean, median and performance '
      'profile; how likely one configuration is better than another; and of the games of Atari-5 the median of 57 that '
      'they predict. A score is the mean over the last tenth of a run'),
    Option('--normalise', 'NAME', 'of --aggregate: human (Atari, random play 0 and a human 1), or '
      'minmax (of each task, over the runs that are given); human where all tasks are Atari games, else minmax', choices=('human', 'minmax')),
  ),
  """
The band is a 95% bootstrap interval over the curves of a configuration (stratified by task with --aggregate). Runs
that are unfinished count as far as they go; those that have nothing to show are named. The last line printed is JSON.
""",
)  # fmt: skip


def run(args: list[str]) -> int:
  """Draws."""
  options = Options(args, COMMAND)
  if not options.arguments:
    raise UsageError('plot needs runs, or directories of runs: podrace plot RUN...')
  out = Path(options.text('--out'))
  x, center = options.text('--x'), options.text('--center')
  _check('--x', x, X)
  _check('--center', center, CENTERS)
  from podrace.experiments import curves, plot
  from podrace.experiments.labels import make_labels

  plot.check_out(out)
  paths = list(dict.fromkeys(p for a in options.arguments for p in find(Path(a))))
  groups, wrong = curves.read(paths, options.text('--metric'), x)  # type: ignore[arg-type]
  for text in wrong:
    tell(f'podrace plot: left out: {text}')
  if not groups:
    raise UsageError(f'there is nothing to plot under {", ".join(options.arguments)}')
  _name_unfinished(groups)
  found: dict[str, Any] = {'out': str(out)}
  found['runs'] = len({c.run for g in groups for c in g.curves})
  found['curves'] = sum(len(g.curves) for g in groups)
  if '--aggregate' in options:
    from podrace.experiments import scores

    found |= scores.aggregate(groups, options.text('--normalise'), out)
  else:
    plot.draw(groups, options.text('--metric'), x, center, out)  # type: ignore[arg-type]
    found['groups'] = [
      {
        'env': g.env,
        'label': label,
        'curves': len(g.curves),
        'final': [curves.final_mean(c) for c in g.curves],
      }
      for g, label in zip(groups, make_labels(groups), strict=True)
    ]
  print_json(found)
  return 0


def _check(name: str, came: str, known: tuple[str, ...]) -> None:
  if came not in known:
    raise UsageError(f'{name} is {" or ".join(known)}, not {came!r}')


def _name_unfinished(groups: list[Any]) -> None:
  for group in groups:
    total = group.config.get('total_steps', 0)
    for path in dict.fromkeys(c.run for c in group.curves):
      if not (path / 'summary.json').exists():
        last = max(c.x[-1] for c in group.curves if c.run == path)
        tell(f'podrace plot: {path} is not finished: it ends at {last:,.0f} (of {total:,} steps)')
