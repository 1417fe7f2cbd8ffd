"""The progress of a run in a terminal or a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, cast

from podrace.run.metrics import Line
from podrace.system.output import Lasting, print_text, printable

LONGEST = 3.6e9  # longest duration displayed, in seconds: a million hours


class Progress(Protocol):
  """Display of a run's progress."""

  def say(self, message: str) -> None:
    """Print a message that stays."""

  def progress(self, step: int, steps_per_s: float) -> None:
    """Show the current step and speed."""

  def write(self, line: Line) -> None:
    """Show a line of metrics."""

  def close(self) -> None:
    """End the display."""


def make_progress(total_steps: int, of: str = '') -> Progress:
  """Return the display for this place: a notebook, a terminal, or a file.

  Args:
    total_steps: environment steps of the run, of each seed.
    of: words after the return, such as ` of the log`.
  """
  display = Notebook if is_notebook() else Terminal
  return display(total_steps, of=of)


def is_notebook() -> bool:
  """Return whether this process is the kernel of a notebook."""
  shell = sys.modules.get('IPython')
  kernel_shell = shell.get_ipython() if shell else None
  return hasattr(kernel_shell, 'kernel')


def format_duration(seconds: float) -> str:
  """Return seconds as h:mm:ss."""
  minutes, s = divmod(round(min(max(seconds, 0), LONGEST)), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{s:02d}'


class Remaining:
  """The time left, by the steps since the first display of this process.

  The first call of a program takes longer than the rest, as parts of it are compiled then.
  """

  def __init__(self, total_steps: int) -> None:
    self._total = total_steps
    self._first: tuple[int, float] | None = None  # step and time of the first display

  def seconds(self, step: int) -> float | None:
    """Return the seconds left at a step, None if they are not known yet."""
    first, began = self._first = self._first or (step, time.monotonic())
    if step >= self._total:
      return 0.0
    done = step - first
    return (self._total - step) * (time.monotonic() - began) / done if done > 0 else None


class Terminal:
  """Progress as a live line on a terminal, else as plain lines at most every two seconds."""

  def __init__(self, total_steps: int, file: TextIO | None = None, of: str = '') -> None:
    self._file = Lasting(file or sys.stderr)
    self._total, self._remaining, self._of = total_steps, Remaining(total_steps), of
    self._live: Any = None  # created at the first progress
    self._console: Any = None
    self._last: Line = {}
    self._printed = 0.0
    if self._file.is_live:
      from rich.console import Console

      self._console = Console(file=cast(Any, self._file))

  def say(self, message: str) -> None:
    """Print a message that stays."""
    if self._console:
      self._console.print(printable(message), highlight=False, markup=False, emoji=False)
    else:
      print_text(message, file=self._file, flush=True)

  def progress(self, step: int, steps_per_s: float) -> None:
    """Show the current step and speed, on a terminal only."""
    self._remaining.seconds(step)  # also without a console, as its first call counts
    if not self._console:
      return
    if not self._live:
      from rich.live import Live

      self._live = Live(console=self._console, refresh_per_second=4)
      self._live.start()
    self._live.update(self._text(step, steps_per_s))

  def write(self, line: Line) -> None:
    """Show a line of metrics."""
    self._last = line
    if self._console:
      self.progress(line['step'], line['steps_per_s'])
    elif line['step'] >= self._total or time.monotonic() - self._printed > 2:
      self._printed = time.monotonic()
      print_text(self._text(line['step'], line['steps_per_s']), file=self._file, flush=True)

  def _text(self, step: int, steps_per_s: float) -> str:
    left = self._remaining.seconds(step)
    return format_progress(step, self._total, steps_per_s, left, self._last, self._of)

  def close(self) -> None:
    """End the live line."""
    if self._live:
      self._live.stop()


class Notebook:
  """Progress in a notebook: one line under the cell, updated at most twice a second."""

  def __init__(self, total_steps: int, of: str = '') -> None:
    self._total, self._remaining, self._of = total_steps, Remaining(total_steps), of
    self._last: Line = {}
    self._shown: Any = None  # created at the first progress
    self._when = 0.0
    self._text = ''

  def say(self, message: str) -> None:
    """Print a message that stays."""
    print_text(message, flush=True)  # a notebook shows stderr as an error

  def progress(self, step: int, steps_per_s: float) -> None:
    """Show the current step and speed."""
    left = self._remaining.seconds(step)
    self._text = format_progress(step, self._total, steps_per_s, left, self._last, self._of)
    if time.monotonic() - self._when > 0.5:
      self._show()

  def write(self, line: Line) -> None:
    """Show a line of metrics."""
    self._last = line
    self.progress(line['step'], line['steps_per_s'])

  def close(self) -> None:
    """Show the last line."""
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


def format_return(line: Mapping[str, Any]) -> str:
  """Return the return in a line of metrics or a summary, and with several seeds its range."""
  by_seed = [x for x in line.get('episode_return_by_seed', ()) if x is not None]
  text = f'return {line["episode_return"]:.2f}'
  return text + (f' ({min(by_seed):.2f} to {max(by_seed):.2f})' if len(by_seed) > 1 else '')


def format_progress(
  step: int, total: int, steps_per_s: float, left: float | None, last: Line, of: str = ''
) -> str:
  """Return the progress in one line of text.

  Args:
    step: environment steps done, of each seed.
    total: environment steps of the run, of each seed.
    steps_per_s: steps per second of all seeds together.
    left: seconds left, None if they are not known yet.
    last: newest line of metrics, or {}.
    of: words after the return.
  """
  text = f'step {step:,} of {total:,} ({step / total:.0%})'
  if last.get('episode_return') is not None:
    text += f'  {format_return(last)}{of}  length {last["episode_length"]:.1f}'
  text += f'  {steps_per_s:,.0f} steps/s'
  return text if left is None else f'{text}  {format_duration(left)} left'
