"""podrace plan: estimate the speed, the cost and the bottleneck of a distributed run."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile, UsageError, unknown
from podrace.launch.capacity import ESTIMATES, Estimate, Machines, Rates
from podrace.system.files.reading import RECORD_BYTES, parse_json, read_bytes
from podrace.system.options import Command, Option, Options, parse_whole
from podrace.system.output import print_json, print_text

COMMAND = Command(
  'plan',
  'RATES --as ARRANGEMENT [OPTIONS]',
  'estimate the speed, the cost and the bottleneck of a distributed run, by number of machines; '
  'RATES is the output of `podrace bench sebulba` on the machine of the learner',
  (
    Option('--as', 'ARRANGEMENT', 'arrangement of the run; seed: the acting machines only step '
      'environments; impala, apex: '
      'they also act', choices=tuple(ESTIMATES)),
    Option('--acting', 'RATES', "output of `podrace bench sebulba` on an acting machine (default: "
      "the learner's)"),
    Option('--machines', 'N,...', 'numbers of acting machines', '1,2,4,8,16,32,64'),
    Option('--gbits', 'N', "gigabits per second into the learner's machine", 10.0),
    Option('--learner-price', 'DOLLARS', "price of an hour of the learner's machine", 0.0),
    Option('--acting-price', 'DOLLARS', 'price of an hour of each acting machine', 0.0),
    Option('--steps', 'N', 'environment steps for which time and cost are shown', 1_000_000_000),
  ),
  'The last line printed is JSON, a list with an object for each number of machines.',
)  # fmt: skip


def run(args: list[str]) -> int:
  """Print the estimates."""
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
    result = estimate(learner, acting, dataclasses.replace(machines, acting=n))
    rows.append(row(n, result, steps))
  show(rows, steps)
  print_json(rows)
  return 0


def read(path: Path) -> Rates:
  """Return the rates in the last line of a file with the output of `podrace bench sebulba`.

  Raises:
    UsageError: if the file cannot be read, or has no rates.
  """
  command = f'podrace bench sebulba PRESET > {shlex.quote(str(path))}'
  try:
    lines = read_bytes(path, RECORD_BYTES, follow=True).splitlines()
    record = parse_json(lines[-1])
  except FileNotFoundError as e:
    raise UsageError(f'{path} is no file of rates, which `{command}` writes: {e.strerror}') from e
  except UnreadableFile:
    raise
  except (ValueError, IndexError) as e:
    raise UsageError(f'{path}: its last line is no JSON; `{command}` writes rates') from e
  return Rates.from_bench(record)


def numbers(text: str) -> list[int]:
  """Return the numbers of machines in a list with commas."""
  counts = [parse_whole('--machines', x) for x in text.split(',')]
  if not all(counts):
    raise UsageError(f'--machines takes numbers of at least 1, with commas, not {text!r}')
  return counts


def row(machines: int, estimate: Estimate, steps: int) -> dict[str, Any]:
  """Return an estimate as JSON."""
  hours = estimate.hours(steps)
  return dict(
    machines=machines, steps_per_s=round(estimate.steps_per_s, 1), waits_for=estimate.waits_for,
    hours=round(hours, 3), dollars_per_hour=round(estimate.price, 2),
    dollars=round(hours * estimate.price, 2),
    limits={k: round(v, 1) for k, v in estimate.limits.items()},
  )  # fmt: skip


def show(rows: list[dict[str, Any]], steps: int) -> None:
  """Print a line for each number of machines."""
  print_text(f'{"machines":>8}  {"steps/s":>13}  {"waits for":<12}  {"hours":>9}  {"dollars":>10}')
  for r in rows:
    print_text(
      f'{r["machines"]:>8}  {r["steps_per_s"]:>13,.0f}  {r["waits_for"]:<12}  {r["hours"]:>9,.2f}  '
      f'{r["dollars"]:>10,.2f}'
    )
  print_text(f'hours and dollars for {steps:,} steps')
