"""podrace sweep: train with many settings, in one program or in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podrace.commands import configure, mistakes
from podrace.commands.shared_options import AGENT, ALLOW_CODE
from podrace.errors import UsageError
from podrace.run.directory import check_directory
from podrace.run.new_directory import name_run
from podrace.system.options import Command, Option, Options
from podrace.system.output import lasting_results, print_json, results_alone, tell

METHODS = ('grid', 'random', 'tpe', 'pbt')

COMMAND = Command(
  'sweep',
  '[PRESET] --vary FIELD=VALUES ... [OPTIONS]',
  'train with many settings and show the best: a table, a picture, a command',
  (
    Option('--vary', 'FIELD=VALUES', 'an option of `podrace train` and its values: '
      'agent.learning-rate=1e-4,1e-3 (a list), =1e-4..1e-2 (a range), =log:1e-4..1e-2 (a '
      'logarithmic range); may be repeated'),
    Option('--method', 'NAME', 'choice of settings: grid (all combinations), random, tpe '
      '(proposals of Optuna), or pbt '
      '(population-based training: the worst members copy the best)', 'grid', METHODS),
    Option('--trials', 'N', 'number of settings; a grid has all', 16),
    Option('--prune', '', 'for tpe: end bad trials early (Optuna, successive halving)'),
    Option('--every', 'STEPS', 'for pbt: steps between copies; 0: a twentieth of the run', 0),
    Option('--jobs', 'N', 'parallel processes, if the settings do not fit one program', 1),
    Option('--processes', '', 'one process for each setting, even if one program could train all'),
    Option('--dir', 'DIR', 'directory of the sweep (default sweeps/PRESET); started again with the '
      'same one, the sweep resumes'),
    AGENT,
    ALLOW_CODE,
  ),
  """
All other options are settings of `podrace train`; --seeds S trains each setting with S seeds. On
Anakin, one program trains all settings if they are numbers of the agent. The last line printed is
JSON.
""",
  others_pass=True,
  jax=True,
  foreign={
    '--trials': 'n-trials num-trials num-samples n-samples max-trials',
    '--method': 'sampler search-alg strategy scheduler algorithm',
    '--prune': 'pruner early-stop',
    '--jobs': 'n-jobs workers parallel max-concurrent-trials',
    '--vary FIELD=VALUES': 'search-space space param params grid',
    '--dir DIR': 'study-name storage run-dir output',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Run the sweep."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  if '--run-dir' in [a.partition('=')[0] for a in options.arguments]:
    raise UsageError('a sweep has --dir, and a run directory of its own for each of its runs')
  method, trials = options.text('--method'), options.whole('--trials')
  if method not in METHODS:
    raise UsageError(f'--method is {", ".join(METHODS)}, not {method!r}')
  if trials < 1 or options.whole('--jobs') < 1:
    raise UsageError('--trials and --jobs must be at least 1')
  for option, methods in (
    ('--prune', ('tpe',)),
    ('--every', ('pbt',)),
    ('--trials', METHODS[1:]),
  ):
    if option in options and method not in methods:
      raise UsageError(f'{option} is for --method {" or ".join(methods)}, not {method}')
  from podrace.experiments.sweep import plan, settings

  spaces = settings.parse(options.every('--vary'))
  if '--dir' in options:
    check_directory(Path(options.text('--dir')), '--dir')
  config = configure.parse_config(preset, options, 'podrace sweep')
  fractions = {name[2:] for name, x in mistakes.options_of(config) if isinstance(x, float)}
  spaces = settings.with_fractions(spaces, fractions)
  logs = options.passed('--log-every') is not None
  if method == 'pbt' and logs and config.log_every != options.whole('--every'):
    raise UsageError(
      f'--log-every {config.log_every}: a population logs at each of its changes; give --every'
    )
  for sample in settings.sample_options(spaces):  # refuse a bad value before anything is written
    configure.parse(config, sample, 'podrace sweep')
  folder = options.path('--dir') or Path('sweeps') / name_run(preset, config.env, config.log)
  words = [*([preset] if preset else []), *options.arguments]
  if '--agent' in options:
    words += ['--agent', options.text('--agent')]
  words += [x for module in options.every('--allow-code') for x in ('--allow-code', module)]
  sweep = plan.Sweep(
    folder, config, words, spaces, method, trials, options.whole('--every'),
    '--prune' in options, options.whole('--jobs'), '--processes' in options,
  )  # fmt: skip
  result = plan.run_sweep(sweep, tell)
  _show(result)
  print_json({**result, 'trials': len(result['trials'])}, lasting_results())
  return 0


def _show(result: dict[str, Any]) -> None:
  """Print the table of a sweep, best first."""
  from podrace.experiments.sweep import settings

  rows = result['trials']
  names = list(rows[0]['settings'])
  seeds = max(len(row['scores']) for row in rows)
  of_seeds = ['lowest', 'highest', '--member'] if seeds > 1 else []
  table = [[*names, 'return', *of_seeds, 'state']]
  for row in rows[:20]:
    values = [settings.format_value(row['settings'][n]) for n in names]
    value = '' if row['score'] is None else f'{row["score"]:.2f}'
    table.append([*values, value, *(_describe_seeds(row) if seeds > 1 else []), row['state']])
  widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
  for line in table:
    tell('  '.join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)))
  if len(rows) > 20:
    tell(f'and {len(rows) - 20} more, in {result["results"]}')
  for name in settings.at_ends([row['settings'] for row in rows]):
    value = settings.format_value(rows[0]['settings'][name])
    tell(f'{name} {value} is at the end of the values that were tried: try values beyond it')
  if result.get('plot'):
    tell(f'picture: {result["plot"]}')
  tell(f'the best: {result["command"]}')


def _describe_seeds(row: dict[str, Any]) -> list[str]:
  """Return the lowest and the highest return of a setting's seeds, and their members of the run."""
  known = [x for x in row['scores'] if x is not None] if row['score'] is not None else []
  ends = [f'{end(known):.2f}' if known else '' for end in (min, max)]
  first = row.get('member', 0)
  return [*ends, f'{first}-{first + len(row["scores"]) - 1}']
