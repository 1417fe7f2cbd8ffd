"""The log of a run: its lines of metrics, the sinks and callbacks that get them, and its clocks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from podrace.architectures.protocol import Part
from podrace.errors import UsageError
from podrace.run import metrics, progress, sinks
from podrace.run.callbacks import Callbacks
from podrace.run.diagnostics import Diagnostics
from podrace.run.summary import summarize
from podrace.settings import log_settings
from podrace.settings.config import Basics, Config
from podrace.system.blame import first_difference, label


@dataclasses.dataclass
class Clock:
  """Steps and seconds of a run, over all its lives."""

  busy_s: float = 0.0  # in the compiled program
  steps: int = 0  # that were made in `busy_s`

  def add(self, steps: int, seconds: float) -> None:
    """Count steps that took `seconds`."""
    self.steps += steps
    self.busy_s += seconds

  @property
  def rate(self) -> float:
    """Steps/s."""
    return self.steps / self.busy_s if self.busy_s else 0.0


class Log:
  """The metrics and clocks of a run. Of several processes, only the first writes files.

  Args:
    sinks: names of sinks, or sinks, which the caller closes.
    terminal: shows progress; None to show none.
  """

  def __init__(
    self,
    config: Basics,
    run_dir: Path,
    callbacks: Callbacks,
    sinks: tuple[str | metrics.Sink, ...],
    terminal: progress.Progress | None,
    warn: Callable[[str], None],
  ) -> None:
    self.config, self.run_dir, self.callbacks = config, run_dir, callbacks
    self.warn = warn
    warm = bool(getattr(config, 'init_from', ''))
    replays = isinstance(config, Config) and log_settings.replays_only(config)
    self.diagnostics = Diagnostics(config.agent, config.total_steps, warm, replays)
    self.given_sinks, self.terminal = sinks, terminal
    self.clock = Clock()
    self.since_line = Clock()  # since the last line of metrics
    self.wall_before = 0.0  # seconds, of earlier lives
    self.born = time.perf_counter()
    self.sinks: list[metrics.Sink] = []  # besides `lines`
    self.lines: metrics.JsonLines | None = None
    self.files: dict[str, metrics.JsonLines] = {}  # by name
    self.known: dict[str, tuple[int, int]] = {}  # `on_disk` at the checkpoint, by file
    self.missing: dict[str, int] = {}  # lines that were lost from each file between two lives
    # The line of the state, until it is written and the state is transformed. A checkpoint keeps
    # it, since a run that fails in between is saved: the next life does the rest.
    self.pending: metrics.Line | None = None

  def open(self, stack: contextlib.ExitStack, step: int) -> None:
    """Open the files, for lines after `step`."""
    self.lines = metrics.JsonLines(self.run_dir / 'metrics.jsonl', step)
    stack.callback(self.lines.close)
    self.check_lines('metrics.jsonl', self.lines)
    self.diagnostics.write(self.run_dir)
    for given in self.given_sinks:
      if isinstance(given, str):
        sink = sinks.SINKS[given](self.run_dir)
        stack.callback(sink.close)
        self.sinks.append(sink)
      else:
        self.sinks.append(given)
    if self.terminal:
      self.sinks.append(self.terminal)

  @property
  def wall_s(self) -> float:
    """Seconds of all lives of the run, without the time between them."""
    return self.wall_before + time.perf_counter() - self.born

  @property
  def parts(self) -> dict[str, Part]:
    """State that a checkpoint keeps, by its key in the meta."""
    return {
      'wall_s': Part(lambda: self.wall_s, self._setter('wall_before')),
      'clock': self._clock_part('clock'),
      'since_line': self._clock_part('since_line'),
      'lines': Part(self._count_lines, self._setter('known')),
      'missing_lines': Part(lambda: self.missing, self._setter('missing')),
      'pending': Part(lambda: self.pending, self._setter('pending')),
      'callbacks': Part(self.callbacks.state, self.callbacks.restore),
      'diagnostics': Part(self.diagnostics.save, self.diagnostics.restore),
    }

  def _setter(self, name: str) -> Callable[[Any], None]:
    return functools.partial(setattr, self, name)

  def _clock_part(self, name: str) -> Part:
    return Part(
      lambda: dataclasses.asdict(getattr(self, name)),
      lambda saved: setattr(self, name, Clock(**saved)),
    )

  def _count_lines(self) -> dict[str, Any]:
    """Count the lines of each file. Lines of metrics are on disk before the checkpoint is."""
    if self.lines:
      self.lines.sync()
    return {name: file.on_disk() for name, file in self.files.items()}

  def check_lines(self, name: str, file: metrics.JsonLines) -> None:
    """Warn if a file has fewer lines than when the checkpoint was made.

    The run goes on, as its state is whole. Its summary has the number of lines that are missing.
    """
    self.files[name] = file
    (known, step), missing = self.known.get(name, (0, 0)), self.missing.get(name, 0)
    lines = file.up_to(step)
    if lines < known:
      self.warn(
        f'{self.run_dir / name} has {lines:,} lines of the {known:,} up to step {step:,} that the '
        f'checkpoint knows of: {known - lines:,} are lost. The run goes on, with a gap in its '
        'curve; summary.json counts them as missing_lines. If there is a copy of the file, stop '
        'the run, put the copy in its place and start again'
      )
    self.missing = {**self.missing, name: max(0, known + missing - lines)}

  def add(self, steps: int, seconds: float) -> None:
    """Count steps that took `seconds`."""
    for clock in (self.clock, self.since_line):
      clock.add(steps, seconds)

  def progress(self, step: int) -> None:
    """Show how far the run is."""
    if self.terminal:
      self.terminal.progress(step, self.since_line.rate)

  def write(
    self,
    step: int,
    summary: dict[str, Any],
    state: Any,
    saving: Callable[[Any], contextlib.AbstractContextManager[None]],
  ) -> Any:
    """Write a line of metrics; returns the state, as callbacks change it.

    Args:
      step: of the line.
      summary: of `Architecture.read_log`.
      state: of the run.
      saving: makes the context in which the line is written, and sinks, callbacks and the agent's
        advice are called. If they fail, it saves the state that it is called with.
    """
    line: metrics.Line = {
      'step': step,
      'wall_s': round(self.wall_s, 3),
      'steps_per_s': round(self.since_line.rate, 1),
      **summarize(summary),
    }
    self.since_line = Clock()
    if not self.lines:
      return state
    failure: Exception | None = None
    try:
      line = self.callbacks(line)
    except Exception as e:  # raised below: a checkpoint of this update needs the line
      failure = e
    self.pending = line
    with saving(state):
      self.lines.write(line)
      if failure is not None:
        self.pending = None
        raise failure
      state = self._transformed(state, line)
    self.pending = None
    with saving(state):
      if messages := self.diagnostics.add(line):
        self.diagnostics.write(self.run_dir)
        for message in messages:
          self.warn(message)
      for sink in self.sinks:
        sink.write(line)
    return state

  def write_pending(self, state: Any) -> Any:
    """Do the rest for a line at which the life before failed; returns the state afterwards."""
    if self.pending is not None and self.lines:
      if not self.lines.has(self.pending['step']):
        self.lines.write(self.pending)
      state = self._transformed(state, self.pending)
    self.pending = None
    return state

  def _transformed(self, state: Any, line: metrics.Line) -> Any:
    for transform in self.callbacks.transforms:
      train = transform(state.train, line)
      if (difference := first_difference(train, state.train)) is not None:
        came, expected = difference
        name = label(getattr(transform, '__self__', transform), 'transform')
        raise UsageError(f'{name} returned a TrainState {came}, expected {expected}')
      train = jax.tree.map(  # the program donates it, so no two arrays may share a buffer
        lambda new, old: jax.device_put(new, old.sharding, may_alias=False), train, state.train
      )
      state = state._replace(train=train)
    return state
