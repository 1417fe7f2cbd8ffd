"""A terminal's view of a program: what its processes say, and below it what each of them does."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podrace.launch.local import Replica

COLORS = ('cyan', 'green', 'magenta', 'yellow', 'blue', 'red')
PAUSE = 0.1  # seconds between pictures


class View:
  """Lines, each with the name of its process, over a table of all processes. Enter it."""

  def __init__(self, width: int) -> None:
    self._width = width  # of the longest name
    self._console = Console()
    self._live = Live(console=self._console, auto_refresh=False, transient=True)
    self._colors: dict[str, str] = {}
    self._drawn = 0.0

  def __enter__(self) -> View:
    self._live.start()
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self._live.stop()

  def say(self, name: str, line: str) -> None:
    """A line of a process."""
    color = self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])
    head = Text(f'{name:<{self._width}} | ', style=color)
    self._console.print(head + Text.from_ansi(line), soft_wrap=True)

  def look(self, replicas: list[Replica]) -> None:
    """The processes, unless they were shown just now."""
    now = time.monotonic()
    if now - self._drawn >= PAUSE:
      self._drawn = now
      self._live.update(table(replicas, now), refresh=True)


def table(replicas: list[Replica], now: float) -> Table:
  """A row for each process."""
  shown = Table(box=None, pad_edge=False, header_style='dim')
  for name in ('process', 'state', 'restarts', 'for', 'pid'):
    shown.add_column(name, justify='left' if name in ('process', 'state') else 'right')
  for r in replicas:
    pid = str(r.process.pid) if r.process else ''
    lived = f'{now - r.began:.0f} s' if r.process else ''
    shown.add_row(r.name, r.state, str(r.restarts), lived, pid)
  return shown
