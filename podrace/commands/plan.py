"""podrace plan: what a distributed run would make and cost, and what it would wait for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile, UsageError, unknown
from podrace.launch.capacity import ESTIMATES, Estimate, Machines, Rates
from podrace.system.files.reading import RECORD_BYTES, parse_json, read_bytes
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, print_text

COMMAND = Command(
  'plan',
  'RATES --as ARRANGEMENT [OPTIONS]',
  'what a distributed run would make and cost, and what it would wait for, by numbers of machines; RATES is '
  'what `podrace bench sebulba` printed on the machine of the learner',
  (
    Option('--as', 'ARRANGEMENT', 'seed: other machines have environments only; impala, apex: they act',
      choices=tuple(ESTIMATES)),
    Option('--acting', 'RATES', 'of a machine that acts, or has environments (default: as the learner\'s)'),
    Option('--machines', 'N,...', 'that act, or have environments', '1,2,4,8,16,32,64'),
    Option('--gbits', 'N', 'per second, into the learner\'s machine', 10.0),
    Option('--learner-price', 'DOLLARS', 'of an hour of its machine', 0.0),
    Option('--acting-price', 'DOLLARS', 'of an hour of each other machine', 0.0),
    Option('--steps', 'N', 'for which time and cost are shown', 1_000_000_000),
  ),
  'The last line printed is JSON, a list with an object for each number of machines.',
)  # fmt: skip


def run(args: list[str]) -> int:
  """Estimates."""
  options = Options(args, COMMAND)
  estimate = ESTIMATES.get(options.needed('--as'))
  if estimate is None:
    raise unknown('arrangement', options.text('--as'), ESTIMATES)
  path = Path(options.one_argument('file of rates'))
  counts = numbers(options.text('--machines'))
  if not (gbits := options.number('--gbits')):
    raise UsageError('--gbits must be more than 0')
  machines = Machines(1, gbits, options.number('--learner-price'), options.number('--acting-price'))
  learner = read(path)
  acting = read(options.path('--acting') or path)
  steps = options.whole('--steps')
  rows = []
  for n in counts:
    found = estimate(learner, acting, dataclasses.replace(machines, acting=n))
    rows.append(row(n, found, steps))
  show(rows, steps)
  print_json(rows)
  return 0


def read(path: Path) -> Rates:
  """The rates in a file, which is the last line of what `podrace bench sebulba` printed.

  Raises:
    UsageError: if it can't be read, or has none.
  """
  try:
    lines = read_bytes(path, RECORD_BYTES, follow=True).splitlines()
    found = parse_json(lines[-1])
  except FileNotFoundError as e:
    raise UsageError(f'{path} cannot be read: {e.strerror}') from e
  except UnreadableFile:
    raise
  except (ValueError, IndexError) as e:
    raise UsageError(
      f'{path}: its last line is no JSON; `podrace bench sebulba PRESET > {path.name}` writes rates'
    ) from e
  return Rates.from_bench(found)


def numbers(text: str) -> list[int]:
  """Numbers of machines, with commas in between."""
  parts = text.split(',')
  if not all(x.isascii() and x.isdigit() and int(x) for x in parts):
    raise UsageError(f'--machines takes numbers of at least 1, with commas, not {text!r}')
  return [int(x) for x in parts]


def row(machines: int, found: Estimate, steps: int) -> dict[str, Any]:
  """An estimate, for a script."""
  hours = found.hours(steps)
  return dict(
    machines=machines, steps_per_s=round(found.steps_per_s, 1), waits_for=found.waits_for,
    hours=round(hours, 3), dollars_per_hour=round(found.price, 2), dollars=round(hours * found.price, 2),
    limits={k: round(v, 1) for k, v in found.limits.items()},
  )  # fmt: skip


def show(rows: list[dict[str, Any]], steps: int) -> None:
  """A line for each number of machines."""
  print_text(f'{"machines":>8}  {"steps/s":>13}  {"waits for":<12}  {"hours":>9}  {"dollars":>10}')
  for r in rows:
    print_text(
      f'{r["machines"]:>8}  {r["steps_per_s"]:>13,.0f}  {r["waits_for"]:<12}  {r["hours"]:>9,.2f}  '
      f'{r["dollars"]:>10,.2f}'
    )
  print_text(f'hours and dollars for {steps:,} steps')
