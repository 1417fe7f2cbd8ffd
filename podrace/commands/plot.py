"""podrace plot: draw learning curves, and aggregates over tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrace.errors import UsageError
from podrace.experiments.runs import find
from podrace.experiments.suites.suite import RECORDS
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, tell

if TYPE_CHECKING:
  from podrace.experiments.curves import RunCurve
  from podrace.experiments.suites.suite import Suite

X = ('steps', 'wall', 'gradient-steps')
CENTERS = ('mean', 'median', 'iqm')
USED = {  # options besides --out, by the option that chooses the picture; '': curves
  '--suite': {'--records'}, '--aggregate': {'--metric', '--x', '--normalize'},
  '': {'--metric', '--x', '--center'},
}  # fmt: skip
COMMAND = Command(
  'plot',
  'RUN... [OPTIONS]',
  'draw learning curves of runs, or of all runs under directories: a panel for each environment, a '
  'line for each configuration over all its seeds',
  (
    Option('--out', 'FILE', 'picture to write: a .png, .svg or .pdf', 'curves.png'),
    Option('--metric', 'NAME', 'metric to draw: any key of metrics.jsonl', 'episode_return'),
    Option('--x', 'NAME', 'horizontal axis: steps, wall (time) or gradient-steps', 'steps', X),
    Option('--center', 'NAME', 'line over the seeds: mean, median or iqm, the interquartile '
      'mean', 'mean', CENTERS),
    Option('--aggregate', '', 'draw scores over all tasks instead: interquartile mean, median, '
      'performance profile and probability of improvement; for the games of Atari-5 also the '
      'predicted median of 57 games. A score is the mean return in the last tenth of a run'),
    Option('--normalize', 'NAME', 'for --aggregate: human (Atari: random play is 0, a human 1) or '
      'minmax (of each task, over the runs); default: human for returns of Atari games alone, else '
      'minmax',
      choices=('human', 'minmax')),
    Option('--suite', 'NAME', 'compare the runs with the records and the published scores of a '
      'suite of `podrace reproduce`, over the tasks that all the runs have'),
    Option('--records', 'DIR', 'for --suite: directory of its records, or one with a directory for '
      f'each suite (default: {RECORDS}, here or in the checkout of podrace)'),
  ),
  """
The band is a 95% bootstrap interval over the curves of a configuration (with --aggregate stratified
by task). Unfinished runs count up to their last line; runs without data are listed. The last line
printed is JSON.
""",
  foreign={
    '--metric NAME': 'metrics y key value',
    '--out FILE': 'output save file output-file',
    '--x': 'xaxis x-axis',
    '--normalize': 'normalise',
  },
)  # fmt: skip


def run(args: list[str]) -> int:
  """Draw the picture."""
  options = Options(args, COMMAND)
  if not options.arguments:
    raise UsageError('plot needs runs, or directories of runs: podrace plot RUN...')
  kind = next((name for name in USED if name in options), '')
  if unused := sorted({*options.names} - USED[kind] - {kind, '--out'}):
    if kind:
      raise UsageError(f'{kind} does not use {", ".join(unused)}: leave out {unused[0]}')
    user = '--suite' if unused[0] in USED['--suite'] else '--aggregate'
    raise UsageError(f'{unused[0]} is for {user}: add that, or leave it out')
  out = Path(options.text('--out'))
  x, center = options.text('--x'), options.text('--center')
  _check('--x', x, X)
  _check('--center', center, CENTERS)
  from podrace.experiments import curves, plot
  from podrace.experiments.labels import make_labels

  plot.check_out(out)
  paths = find(*options.arguments)
  groups, wrong = curves.read(paths, options.text('--metric'), x)  # type: ignore[arg-type]
  for text in wrong:
    tell(f'podrace plot: left out: {text}')
  if not groups:
    raise UsageError(f'there is nothing to plot under {", ".join(options.arguments)}')
  _name_unfinished(groups)
  result: dict[str, Any] = {'out': str(out)}
  result['runs'] = len({c.run for g in groups for c in g.curves})
  result['curves'] = sum(len(g.curves) for g in groups)
  if kind == '--suite':
    result |= _compare(options, groups, out)
  elif kind == '--aggregate':
    from podrace.experiments import scores

    result |= scores.aggregate(groups, options.text('--normalize'), out, options.text('--metric'))
  else:
    plot.draw(groups, options.text('--metric'), x, center, out)  # type: ignore[arg-type]
    result['groups'] = [
      {
        'env': g.env,
        'label': label,
        'curves': len(g.curves),
        **_final(g.curves),
      }
      for g, label in zip(groups, make_labels(groups), strict=True)
    ]
  print_json(result)
  return 0


def _compare(options: Options, groups: list[Any], out: Path) -> dict[str, Any]:
  from podrace.commands.reproduce import check_recorded
  from podrace.experiments.suites.compare import compare
  from podrace.experiments.suites.records import read_records
  from podrace.experiments.suites.suite import load

  suite = load(options.text('--suite'))
  folder = _records(options.path('--records'), suite)
  check_recorded(suite, folder)
  result, lines = compare(suite, folder, groups, out)
  if not read_records(folder, suite):
    tell(f'podrace plot: {folder} has no records of {suite.name}: --records names their directory')
  for line in lines:
    tell(line)
  return result


def _records(chosen: Path | None, suite: Suite) -> Path:
  """Return the directory of the suite's records: `chosen`, one in it, or the default."""
  from podrace.commands.reproduce import default_records
  from podrace.experiments.suites.records import read_records

  if chosen is None:
    return default_records(suite)
  for place in (chosen, chosen / suite.name):
    if read_records(place, suite):
      return place
  raise UsageError(f'--records {chosen} has no records of {suite.name}')


def _final(each: Sequence[RunCurve]) -> dict[str, Any]:
  """Return the means of the last tenth of curves, their mean, and its 95% bootstrap interval."""
  import numpy as np

  from podrace.experiments import curves, statistics

  final = [curves.final_mean(c) for c in each]
  result: dict[str, Any] = {'final': final, 'mean': sum(final) / len(final)}
  if len(final) > 1:
    ends = statistics.interval(statistics.mean, [np.array(final)])
    result['interval'] = [float(end) for end in ends]
  return result


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
  if value not in known:
    raise UsageError(f'{name} is {" or ".join(known)}, not {value!r}')


def _name_unfinished(groups: list[Any]) -> None:
  each = [(c, group.config.get('total_steps', 0)) for group in groups for c in group.curves]
  for path, total in {c.run: total for c, total in each}.items():
    if not (path / 'summary.json').exists():
      last = max(c.x[-1] for c, _ in each if c.run == path)
      tell(f'podrace plot: {path} is not finished: it ends at {last:,.0f} (of {total:,} steps)')
