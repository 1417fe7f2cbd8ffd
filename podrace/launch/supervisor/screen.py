"""The view of a program: the lines of its processes and, in a terminal, a table of them.

A thread prints. A reader that has stopped or is gone does not hold up any process. If too many
lines wait, further lines are left out of the view, and are in the logs.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from podrace.launch.supervisor.replica import Replica
from podrace.system.output import Lasting, print_text, printable
from podrace.system.threads import Worker

MOST = 10_000  # lines that wait to be printed
LAST = 1.0  # seconds to print the last lines
PAUSE = 0.25  # seconds between redraws of the table
COLOURING = re.compile(r'(\x1b\[[0-9;]*m)')
COLORS = ('cyan', 'green', 'magenta', 'yellow', 'blue', 'red')

Row = tuple[str, str, int, float | None, int | None]  # name, state, restarts, time of start, pid


class Screen:
  """Prints in a thread while it is entered. Its methods do not wait.

  Owner: the creator, which enters it.
  Ends when: it is left, at most LAST seconds later.

  Args:
    names: the names of all replicas.
  """

  def __init__(self, names: Sequence[str]) -> None:
    self._names, self._width = list(names), max(map(len, names))
    self.lines: queue.Queue[tuple[str, str] | None] = queue.Queue(MOST)
    self._left_out = 0
    self._rows: list[Row] = []
    self._out = Lasting(sys.stdout)

  def say(self, name: str, line: str) -> None:
    """Print a line of a process."""
    try:
      self.lines.put_nowait((name, line))
    except queue.Full:
      self._left_out += 1

  def look(self, replicas: list[Replica]) -> None:
    """Show the states of the replicas in the table."""
    self._rows = [
      (r.name, r.state, r.restarts, *((r.began, r.process.pid) if r.process else (None, None)))
      for r in replicas
    ]  # fmt: skip

  def __enter__(self) -> Screen:
    self._thread = Worker('screen', self._table if self._out.is_live else self._plain)
    return self

  def __exit__(self, *exc: object) -> None:
    with contextlib.suppress(queue.Full):
      self.lines.put(None, timeout=LAST)
    self._thread.wait(LAST)

  def _plain(self) -> None:
    while (entry := self.lines.get()) is not None:
      self._report_left_out()
      print_text(f'{entry[0]:<{self._width}} | {entry[1]}', file=self._out, flush=True)

  def _report_left_out(self) -> None:
    if self._left_out:
      print_text(
        f'... {self._left_out} lines were left out here; the logs have them', file=self._out
      )
      self._left_out = 0

  def _table(self) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=self._out)  # type: ignore[arg-type]
    colors = dict(zip(self._names, COLORS * len(self._names), strict=False))
    drawn = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
      while True:
        with contextlib.suppress(queue.Empty):
          if (entry := self.lines.get(timeout=PAUSE)) is None:
            return
          self._report_left_out()
          head = Text(f'{entry[0]:<{self._width}} | ', style=colors.get(entry[0], ''))
          console.print(head + parse_colours(entry[1]), soft_wrap=True)
        if time.monotonic() - drawn >= PAUSE:
          drawn = time.monotonic()
          live.update(table(self._rows, drawn), refresh=True)


def parse_colours(line: str) -> Text:
  """Return a line with its colours; other control sequences for a terminal are escaped."""
  parts = COLOURING.split(line)  # text and colour by turns
  return Text.from_ansi(''.join(x if i % 2 else printable(x) for i, x in enumerate(parts)))


def table(rows: list[Row], now: float) -> Table:
  """Return a table with a row for each process."""
  shown = Table(box=None, pad_edge=False, header_style='dim')
  for name in ('process', 'state', 'restarts', 'for', 'pid'):
    shown.add_column(name, justify='left' if name in ('process', 'state') else 'right')
  for name, state, restarts, since, pid in rows:
    lived = '' if since is None else f'{now - since:.0f} s'
    shown.add_row(name, state, str(restarts), lived, '' if pid is None else str(pid))
  return shown
