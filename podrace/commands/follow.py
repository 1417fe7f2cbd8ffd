"""podrace follow: show a run from another terminal while it trains."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

from podrace.commands.runs import age, size
from podrace.distributed.net.safe_text import plain
from podrace.errors import UsageError
from podrace.experiments import runs
from podrace.run import metrics, progress, run_end
from podrace.run.directory import is_policy, not_a_run
from podrace.system.files.schema import is_number
from podrace.system.options import Command, Option, Options
from podrace.system.output import Lasting, print_text

COMMAND = Command(
  'follow',
  'RUN [OPTIONS]',
  'show a run with small curves until it ends',
  (
    Option('--every', 'S', 'seconds between updates', 1),
    Option('--metrics', 'NAMES', 'metrics to plot, with commas', 'episode_return,steps_per_s,loss'),
    Option('--once', '', 'show it once'),
  ),
  'If the output is no terminal, it prints each line of metrics once, as text.',
)
BLOCKS = '▁▂▃▄▅▆▇█'
WIDTH = 60  # of a curve, in a wide terminal


def run(args: list[str]) -> int:
  """Show the run."""
  options = Options(args, COMMAND)
  path = Path(options.one_argument('run directory'))
  if not os.path.lexists(path / 'config.json') or is_policy(path):
    raise not_a_run(path)
  names = [n for n in options.text('--metrics').split(',') if n]
  every = options.number('--every')
  if not every:
    raise UsageError('--every must be more than 0 seconds')
  if Lasting(sys.stdout).is_live:
    _live(path, names, every, '--once' in options)
  else:
    _plain(path, names, every, '--once' in options)
  return 0


def _live(path: Path, names: list[str], every: float, once: bool) -> None:
  from rich.console import Console
  from rich.live import Live
  from rich.text import Text

  console = Console()
  with Live(console=console, auto_refresh=False) as live:
    for seen, lines in _looks(path, every, once):
      live.update(Text(render(seen, lines, names, console.width)), refresh=True)


def _plain(path: Path, names: list[str], every: float, once: bool) -> None:
  last = -1
  ended = None
  for seen, lines in _looks(path, every, once):
    ended = seen
    for line in lines[-1:] if once else lines:
      if line['step'] > last:
        values = [f'{n} {v}' for n in names if (v := value_text(line.get(n)))]
        print_text('  '.join([f'step {line["step"]:,}', *values]), flush=True)
        last = line['step']
  if ended is not None:
    print_text(title(ended), flush=True)


def _looks(path: Path, every: float, once: bool) -> Any:
  """Yield the state of a run and its metrics until the run has ended."""
  pause = threading.Event()
  while True:
    seen = runs.inspect_run(
      path
    )  # before the lines, so that they include the last one of an ended run
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(UsageError):  # a damaged line: show the numbers so far
      lines = metrics.read(path / 'metrics.jsonl', shown=True)
    yield seen, lines
    if once or seen.state != run_end.RUNNING:
      return
    pause.wait(every)


def title(seen: runs.Run) -> str:
  """Return a line about a run."""
  done = f'step {seen.step:,} of {seen.total_steps:,}' if seen.total_steps else ''
  why = f' ({plain(seen.why)})' if seen.why else ''
  path, agent, env = (plain(x) for x in (seen.path, seen.agent, seen.source))
  signs = ''.join(f', {plain(name)}' for name in seen.diagnostics)
  return f'{path}: {agent} in {env}, {seen.state}{why}, {done}{signs}'


def render(seen: runs.Run, lines: list[dict[str, Any]], names: list[str], columns: int = 80) -> str:
  """Return the text for a terminal with `columns` columns; curves fill the free width."""
  part = min(seen.step / seen.total_steps, 1) if seen.total_steps else 0
  left = seconds_left(seen, lines) if seen.state == run_end.RUNNING else None
  words = f' {part:.0%}' + ('' if left is None else f', {progress.format_duration(left)} left')
  room = max(1, min(WIDTH, columns - len(words)))
  head = [
    title(seen),
    f'{"█" * round(part * room):░<{room}}{words}',
    f'last line {age(seen.age_s)} ago, {size(seen.size)}',
    '',
  ]
  width = max(map(len, names), default=0)
  for name in map(plain, names):
    values = [line[name] for line in lines if is_number(line.get(name))]
    if values:
      last = value_text(values[-1])
      room = max(1, min(WIDTH, columns - width - len(last) - 4))
      head.append(f'{name:{width}}  {sparkline(values, room)}  {last}')
  return '\n'.join(head)


def seconds_left(seen: runs.Run, lines: list[dict[str, Any]]) -> float | None:
  """Return the time left by the steps between the first and the last line, None if unknown."""
  known = [(line['step'], line['wall_s']) for line in lines if is_number(line.get('wall_s'))]
  if not known or (steps := known[-1][0] - known[0][0]) <= 0:
    return None
  return float((seen.total_steps - seen.step) * (known[-1][1] - known[0][1]) / steps)


def value_text(value: Any) -> str:
  """Return a number with up to four digits; '' if it is no number."""
  if not is_number(value):
    return ''
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'


def sparkline(values: list[float], width: int = WIDTH) -> str:
  """Return a curve of at most `width` characters, each the mean of a part of the values."""
  values = [v for v in values if is_number(v)]
  if not values:
    return ''
  n = min(width, len(values))
  edges = [round(i * len(values) / n) for i in range(n + 1)]
  means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
  low, high = min(means), max(means)
  span = high - low or 1
  return ''.join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] for m in means)
