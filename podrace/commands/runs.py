"""podrace runs: list the runs under a directory."""

from __future__ import annotations

from pathlib import Path

from podrace.distributed.net.safe_text import plain
from podrace.errors import UsageError
from podrace.experiments.runs import Run, find, inspect_run
from podrace.run.run_end import RUNNING, STATES
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, print_text

COMMAND = Command(
  'runs',
  '[DIR] [OPTIONS]',
  'list the runs under DIR (default: runs/), sorted by the time of their last output',
  (
    Option('--json', '', 'print one JSON list with all properties of each run'),
    Option('--state', 'NAME', f'only runs that are {", ".join(STATES[:-1])} or {STATES[-1]}',
      choices=STATES),
  ),
  """
`killed`: the run ended without a record, by SIGKILL, out of memory or a power cut. `broken`:
config.json, summary.json, end.json, metrics.jsonl or lock cannot be read. `unknown`: an unfinished
run on a file system without locks. `podrace train --run-dir RUN` resumes an unfinished run.
""",
  foreign={
    '--json': 'format output',
    '--state': 'status filter',
    'podrace runs DIR, without an option': 'dir run-dir logdir',
  },
)  # fmt: skip

HEAD = ('run', 'agent', 'environment', 'step', 'done', 'return', 'steps/s', 'state', 'age', 'size')
PATH, NAME = 1000, 200  # limits of a cell, in characters
NUMBERS = {3, 4, 5, 6, 8, 9}  # columns aligned to the right


def run(args: list[str]) -> int:
  """Print the runs."""
  options = Options(args, COMMAND)
  if len(options.arguments) > 1:
    raise UsageError(f'runs takes one directory, not {" ".join(options.arguments)}')
  state = options.text('--state')
  if '--state' in options and state not in STATES:
    raise UsageError(f'--state is {", ".join(STATES[:-1])} or {STATES[-1]}, not {state!r}')
  root = Path((options.arguments or ['runs'])[0])
  if not options.arguments and not root.exists():
    raise UsageError('there is no runs/ here: name a directory')
  rows = sorted((inspect_run(path) for path in find(root)), key=lambda r: (-r.age_s, r.path))
  if state:
    rows = [r for r in rows if r.state == state]
  if '--json' in options:
    print_json([r.as_json() for r in rows])
  elif not rows:
    print_text(f'no {state} run under {root}' if state else f'no run under {root}')
  else:
    begun = [r for r in rows if r.step or r.episode_return is not None or r.state == RUNNING]
    if begun:
      print_text(table([HEAD, *(row(r) for r in begun)]))
    if ended := [r for r in rows if r not in begun]:
      print_text('\n' * bool(begun) + 'ended before their first checkpoint or line of metrics:')
      print_text(table([HEAD, *(row(r) for r in ended)]))
  return 0


def row(r: Run) -> tuple[str, ...]:
  """Return the cells of a run; a long reason is cut."""
  more = [f'+{len(r.diagnostics) - 1}'] if len(r.diagnostics) > 1 else []
  state = ', '.join([f'{r.state}: {r.why}' if r.why else r.state, *r.diagnostics[:1], *more])
  returned = '' if r.episode_return is None else return_text(r.episode_return)
  return (
    plain(r.path, PATH),
    plain(f'{r.agent} (sweep)' if r.sweep else r.agent, NAME),
    plain(r.source, NAME),
    f'{r.step:,}',
    f'{min(r.step / r.total_steps, 1):.0%}' if r.total_steps else '',
    returned,
    '' if r.steps_per_s is None else f'{r.steps_per_s:,.0f}',
    plain(state if len(state) <= 60 else state[:57] + '...', 100),
    age(r.age_s),
    size(r.size),
  )


def return_text(value: float) -> str:
  """Return a text with two decimals, or such as 1e+20 for a large value."""
  return f'{value:,.2f}' if abs(value) < 1e15 else f'{value:.4g}'


def table(rows: list[tuple[str, ...]]) -> str:
  """Return rows as text, with columns as wide as their widest cell."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for cells in rows:
    padded = [
      c.rjust(w) if i in NUMBERS else c.ljust(w)
      for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    ]
    lines.append('  '.join(padded).rstrip())
  return '\n'.join(lines)


def age(seconds: float) -> str:
  """Return a duration such as 12s, 5m, 3h, 2d."""
  for unit, length in (('d', 86400), ('h', 3600), ('m', 60)):
    if seconds >= length:
      return f'{seconds // length:.0f}{unit}'
  return f'{seconds:.0f}s'


def size(number: float) -> str:
  """Return a size such as 12 KB, 3.4 MB."""
  units = ['TB', 'GB', 'MB', 'KB', 'B']
  while number >= 1000 and len(units) > 1:
    number /= 1000
    units.pop()
  return (
    f'{number:.0f} {units[-1]}'
    if units[-1] == 'B' or number >= 100
    else f'{number:.1f} {units[-1]}'
  )
