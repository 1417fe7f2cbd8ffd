"""podrace runs: the runs under a directory."""

from __future__ import annotations

from pathlib import Path

from podrace.distributed.net.safe_text import plain
from podrace.errors import UsageError
from podrace.experiments.runs import Run, find, inspect_run
from podrace.run.run_end import STATES
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, print_text

COMMAND = Command(
  'runs',
  '[DIR] [OPTIONS]',
  'the runs under DIR, runs/ if it is not given; the one that wrote last comes last',
  (
    Option('--json', '', 'one JSON list, with all that is known of each'),
    Option('--state', 'NAME', f'those alone that are {", ".join(STATES[:-1])} or {STATES[-1]}', choices=STATES),
  ),
  """
A run is `killed` if it ended without a word: SIGKILL, out of memory, a power cut. `broken` is one of which
config.json, summary.json, end.json, metrics.jsonl or lock can't be read. `unknown` is one that is not finished, on a file
system without locks. `podrace train --run-dir RUN` goes on with one that did not finish.
""",
)  # fmt: skip

HEAD = ('run', 'agent', 'environment', 'step', 'done', 'return', 'steps/s', 'state', 'age', 'size')
PATH, NAME = 1000, 200  # characters of a cell, at most
NUMBERS = {3, 4, 5, 6, 8, 9}  # columns that end at the right


def run(args: list[str]) -> int:
  """Prints them."""
  options = Options(args, COMMAND)
  if len(options.arguments) > 1:
    raise UsageError(f'runs takes one directory, not {" ".join(options.arguments)}')
  state = options.text('--state')
  if '--state' in options and state not in STATES:
    raise UsageError(f'--state is {", ".join(STATES[:-1])} or {STATES[-1]}, not {state!r}')
  root = Path((options.arguments or ['runs'])[0])
  if not options.arguments and not root.exists():
    raise UsageError('there is no runs/ here: name the directory')
  found = sorted((inspect_run(path) for path in find(root)), key=lambda r: (-r.age_s, r.path))
  if state:
    found = [r for r in found if r.state == state]
  if '--json' in options:
    print_json([r.as_json() for r in found])
  elif not found:
    print_text(f'no {state} run under {root}' if state else f'no run under {root}')
  else:
    print_text(table([HEAD, *(row(r) for r in found)]))
  return 0


def row(r: Run) -> tuple[str, ...]:
  """A run's line; a long reason is cut."""
  state = f'{r.state}: {r.why}' if r.why else r.state
  returned = '' if r.episode_return is None else return_text(r.episode_return)
  return (
    plain(r.path, PATH),
    plain(f'{r.agent} (sweep)' if r.sweep else r.agent, NAME),
    plain(r.env, NAME),
    f'{r.step:,}',
    f'{min(r.step / r.total_steps, 1):.0%}' if r.total_steps else '',
    returned,
    '' if r.steps_per_s is None else f'{r.steps_per_s:,.0f}',
    plain(state if len(state) <= 60 else state[:57] + '...', 100),
    age(r.age_s),
    size(r.size),
  )


def return_text(value: float) -> str:
  """A return with two decimals; as 1e+20 where that would be long."""
  return f'{value:,.2f}' if abs(value) < 1e15 else f'{value:.4g}'


def table(rows: list[tuple[str, ...]]) -> str:
  """Columns as wide as their widest cell."""
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
  """As 12s, 5m, 3h, 2d."""
  for unit, length in (('d', 86400), ('h', 3600), ('m', 60)):
    if seconds >= length:
      return f'{seconds // length:.0f}{unit}'
  return f'{seconds:.0f}s'


def size(number: float) -> str:
  """As 12 KB, 3.4 MB."""
  units = ['TB', 'GB', 'MB', 'KB', 'B']
  while number >= 1000 and len(units) > 1:
    number /= 1000
    units.pop()
  return (
    f'{number:.0f} {units[-1]}'
    if units[-1] == 'B' or number >= 100
    else f'{number:.1f} {units[-1]}'
  )
