"""The progress of a run in a terminal or a notebook."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO, cast

from podrace.run.metrics import Line
from podrace.system.output import Lasting, print_text, printable

LONGEST = 3.6e9  # seconds that are shown: a million hours


class Progress(Protocol):
  """Shows a person how far a run is."""

  def say(self, message: str) -> None:
    """A line that stays."""

  def progress(self, step: int, steps_per_s: float) -> None: ...
  def write(self, line: Line) -> None: ...
  def close(self) -> None: ...


def progress(total_steps: int, seeds: int = 1) -> Progress:
  """What suits the place: a notebook, a terminal, or a file."""
  if in_notebook():
    return Notebook(total_steps, seeds)
  return Terminal(total_steps, seeds)


def in_notebook() -> bool:
  """Whether this is the kernel of a notebook."""
  shell = sys.modules.get('IPython')
  found = shell.get_ipython() if shell else None
  return hasattr(found, 'kernel')


def duration(seconds: float) -> str:
  """h:mm:ss."""
  minutes, s = divmod(round(min(max(seconds, 0), LONGEST)), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{s:02d}'


class Terminal:
  """Progress: a live line on a terminal; elsewhere plain lines, one in two seconds at most."""

  def __init__(self, total_steps: int, seeds: int = 1, file: TextIO | None = None) -> None:
    self._file = Lasting(file or sys.stderr)
    self._total, self._seeds = total_steps, seeds
    self._live: Any = None  # begins with the first progress
    self._console: Any = None
    self._last: Line = {}
    self._printed = 0.0
    if self._file.isatty():
      from rich.console import Console

      self._console = Console(file=cast(Any, self._file))

  def say(self, message: str) -> None:
    """A line that stays."""
    if self._console:
      self._console.print(printable(message), highlight=False, markup=False, emoji=False)
    else:
      print_text(message, file=self._file, flush=True)

  def progress(self, step: int, steps_per_s: float) -> None:
    """How far the run is; only on a terminal."""
    if not self._console:
      return
    if not self._live:
      from rich.live import Live

      self._live = Live(console=self._console, refresh_per_second=4)
      self._live.start()
    self._live.update(self._text(step, steps_per_s))

  def write(self, line: Line) -> None:
    self._last = line
    if self._console:
      self.progress(line['step'], line['steps_per_s'])
    elif line['step'] >= self._total or time.monotonic() - self._printed > 2:
      self._printed = time.monotonic()
      print_text(self._text(line['step'], line['steps_per_s']), file=self._file, flush=True)

  def _text(self, step: int, steps_per_s: float) -> str:
    return progress_text(step, self._total, self._seeds, steps_per_s, self._last)

  def close(self) -> None:
    if self._live:
      self._live.stop()


class Notebook:
  """Progress in a notebook: one line under the cell, which changes twice a second at most."""

  def __init__(self, total_steps: int, seeds: int = 1) -> None:
    self._total, self._seeds = total_steps, seeds
    self._last: Line = {}
    self._shown: Any = None  # begins with the first progress
    self._when = 0.0
    self._text = ''

  def say(self, message: str) -> None:
    print_text(message, flush=True)  # not to stderr, which a notebook shows as an error

  def progress(self, step: int, steps_per_s: float) -> None:
    self._text = progress_text(step, self._total, self._seeds, steps_per_s, self._last)
    if time.monotonic() - self._when > 0.5:
      self._show()

  def write(self, line: Line) -> None:
    self._last = line
    self.progress(line['step'], line['steps_per_s'])

  def close(self) -> None:
    if self._text:
      self._show()

  def _show(self) -> None:
    from IPython.display import display

    self._when = time.monotonic()
    text = {'text/plain': self._text}
    if self._shown is None:
      self._shown = display(text, raw=True, display_id=True)
    else:
      self._shown.update(text, raw=True)


def progress_text(step: int, total: int, seeds: int, steps_per_s: float, last: Line) -> str:
  """A line for people; `last` is the newest of metrics, or empty."""
  left = (total - step) * seeds / steps_per_s if steps_per_s > 0 else 0
  text = f'step {step:,} of {total:,} ({step / total:.0%})'
  if last.get('episode_return') is not None:
    text += f'  return {last["episode_return"]:.2f}  length {last["episode_length"]:.1f}'
  return f'{text}  {steps_per_s:,.0f} steps/s  {duration(left)} left'
