"""What a script does at each line of a run's metrics: metrics of its own, an early end, other learned values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from podrace.errors import UsageError
from podrace.learner import is_reserved
from podrace.metrics import Line, number
from podrace.types import TrainState


class EndTraining(Exception):
  """Raised by a callback: the run saves, and is finished. Its text is the reason, in summary.json."""


class Callback(Protocol):
  """Called with each line before it is written; what it returns is added to the line.

  A resumed run calls it again for the lines after the checkpoint. So a callback that remembers something has
  `state() -> Any`, which returns that as JSON, and `restore(state)`, which takes it back: it is saved with each
  checkpoint. A callback that changes what is learned has `transform(train, line) -> TrainState`, called after
  the line is written. To resume exactly, none of them may depend on anything else, such as the time.
  """

  def __call__(self, line: Line) -> Mapping[str, float] | None: ...


class Callbacks:
  """The callbacks of a run."""

  def __init__(self, callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
      if not callable(callback):
        raise UsageError(f'{callback!r} is no callback: it cannot be called with a line of metrics')
      if hasattr(callback, 'state') != hasattr(callback, 'restore'):
        name = type(callback).__name__
        raise UsageError(
          f'{name} needs both state and restore, or neither: a resumed run uses both'
        )
    self._callbacks = callbacks
    self.ended = ''  # why the run ends early

  def __call__(self, line: Line) -> Line:
    """The line with their metrics.

    Raises:
      UsageError: if a metric has a name that is taken, or no number.
    """
    found: Line = {}
    for callback in self._callbacks:
      try:
        added = callback({**line, **found}) or {}
      except EndTraining as e:
        self.ended = self.ended or str(e) or 'a callback ended it'
        continue
      for name, value in added.items():
        if name in line or name in found or is_reserved(name):
          raise UsageError(f'a callback reports {name}, which is there already; take another name')
        try:
          found[name] = number(float(value))
        except (TypeError, ValueError) as e:
          raise UsageError(f'a callback reports {name} = {value!r}, expected a number') from e
    return line | found

  @property
  def transforms(self) -> list[Callable[[TrainState, Line], TrainState]]:
    return [c.transform for c in self._callbacks if hasattr(c, 'transform')]

  def state(self) -> Any:
    """What they remember, as JSON."""
    states = [c.state() if hasattr(c, 'state') else None for c in self._callbacks]
    try:
      json.dumps(states, allow_nan=False)
    except (TypeError, ValueError) as e:
      raise UsageError(f'the state of a callback is no JSON: {e}') from e
    return {'ended': self.ended, 'states': states}

  def restore(self, found: Any) -> None:
    """Takes back what `state` returned; callbacks that were not there then begin anew."""
    self.ended = found['ended']
    for callback, state in zip(self._callbacks, found['states'], strict=False):
      if state is not None and hasattr(callback, 'restore'):
        callback.restore(state)
