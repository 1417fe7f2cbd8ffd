"""podrace sweep: a run for each of many settings, in one program or in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podrace.commands import configure
from podrace.commands.shared_options import AGENT, ALLOW_CODE
from podrace.errors import UsageError
from podrace.run.directory import check_directory
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

METHODS = ('grid', 'random', 'tpe', 'pbt')

COMMAND = Command(
  'sweep',
  '[PRESET] --vary FIELD=VALUES ... [OPTIONS]',
  'trains with many settings, and says which is best: a table, a picture, a command',
  (
    Option('--vary', 'FIELD=VALUES', 'an option of `podrace train` and its values: agent.learning-rate=1e-4,1e-3 '
      '(these), =1e-4..1e-2 (a range), =log:1e-4..1e-2 (likewise, in logarithms); may be repeated'),
    Option('--method', 'NAME', 'grid (all combinations), random, tpe (Optuna proposes the next), or pbt '
      '(population-based training: the worst take over from the best as they learn)', 'grid', METHODS),
    Option('--trials', 'N', 'how many settings; of a grid, all', 16),
    Option('--prune', '', 'of tpe: ends trials that do badly early (Optuna, successive halving)'),
    Option('--every', 'STEPS', 'of pbt: steps between its changes; 0: a twentieth of the run', 0),
    Option('--jobs', 'N', 'processes at a time, where the settings do not fit one program', 1),
    Option('--processes', '', 'a process for each setting, also where one program could have all'),
    Option('--dir', 'DIR', 'where the sweep is kept (default sweeps/PRESET); started again, it goes on'),
    AGENT,
    ALLOW_CODE,
  ),
  """
All other options are those of `podrace train`; --seeds S trains each setting with S seeds. On Anakin, settings that
are numbers of the agent are one program. The last line printed is JSON.
""",
  others_pass=True,
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Sweeps."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  if '--run-dir' in [a.partition('=')[0] for a in options.arguments]:
    raise UsageError('a sweep has --dir, and a run directory of its own for each of its runs')
  method, trials = options.text('--method'), options.whole('--trials')
  if method not in METHODS:
    raise UsageError(f'--method is {", ".join(METHODS)}, not {method!r}')
  if trials < 1 or options.whole('--jobs') < 1:
    raise UsageError('--trials and --jobs must be at least 1')
  if '--prune' in options and method != 'tpe':
    raise UsageError(f'--prune is for --method tpe, not {method}')
  from podrace.experiments.sweep import plan, settings

  spaces = settings.parse(options.every('--vary'))
  if '--dir' in options:
    check_directory(Path(options.text('--dir')), '--dir')
  config = configure.parse_config(preset, options, 'podrace sweep')
  for sample in settings.samples(spaces):  # before anything is written
    configure.parse(config, sample, 'podrace sweep')
  folder = options.path('--dir') or Path('sweeps') / (preset or config.env.partition(':')[2])
  given = [*([preset] if preset else []), *options.arguments]
  if '--agent' in options:
    given += ['--agent', options.text('--agent')]
  given += [x for module in options.every('--allow-code') for x in ('--allow-code', module)]
  sweep = plan.Sweep(
    folder, config, given, spaces, method, trials, options.whole('--every'),
    '--prune' in options, options.whole('--jobs'), '--processes' in options,
  )  # fmt: skip
  found = plan.carry_out(sweep, tell)
  _show(found)
  print_json({**found, 'trials': len(found['trials'])})
  return 0


def _show(found: dict[str, Any]) -> None:
  """The table of a sweep, best first."""
  rows = found['trials']
  names = list(rows[0]['settings'])
  table = [[*names, 'return', 'state']]
  for row in rows[:20]:
    value = '' if row['score'] is None else f'{row["score"]:.2f}'
    table.append([*(_short(row['settings'][n]) for n in names), value, row['state']])
  widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
  for line in table:
    tell('  '.join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)))
  if len(rows) > 20:
    tell(f'and {len(rows) - 20} more, in {found["results"]}')
  if found.get('plot'):
    tell(f'picture: {found["plot"]}')
  tell(f'the best: {found["command"]}')


def _short(value: Any) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)
