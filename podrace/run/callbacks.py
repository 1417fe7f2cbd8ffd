"""Callbacks: a user's functions that are called with each line of a run's metrics."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol

from podrace.errors import EndTraining, RunError, UsageError
from podrace.learner import is_reserved
from podrace.run.metrics import Line
from podrace.settings.config import Config
from podrace.system.files import number
from podrace.types import TrainState


class Callback(Protocol):
  """Called with each line before it is written. Its result is added to the line.

  A resumed run calls it again for the lines after the checkpoint. So a callback with memory has
  `state() -> Any`, which returns its memory as JSON, and `restore(state)`, which takes it back.
  Each checkpoint keeps that memory. Attributes that change without these methods are an error,
  unless the callback has `exact = False`: then a resumed run need not be the same.

  A callback that changes the learned values has `transform(train, line) -> TrainState`, which is
  called after the line is written. To resume exactly, a callback must not depend on anything else,
  such as the time.

  Example:
    def stop_when_solved(line):
      if (line['episode_return'] or 0) > 0.99:
        raise podrace.errors.EndTraining('solved')

    podrace.train('catch', callbacks=[stop_when_solved])
  """

  def __call__(self, line: Line) -> Mapping[str, float] | None:
    """Return metrics to add to the line, or None."""
    ...


class Callbacks:
  """The callbacks of a run.

  Args:
    override: a resumed run may have other callbacks than before.
  """

  def __init__(self, callbacks: Sequence[Callback], override: bool = False) -> None:
    if not isinstance(callbacks, Iterable):
      raise UsageError(f'callbacks is {callbacks!r}, expected a sequence, as [{_name(callbacks)}]')
    callbacks = tuple(callbacks)
    for callback in callbacks:
      if not callable(callback):
        raise UsageError(f'{callback!r} is no callback: it cannot be called with a line of metrics')
      if hasattr(callback, 'state') != hasattr(callback, 'restore'):
        name = type(callback).__name__
        raise UsageError(
          f'{name} needs both state and restore, or neither: a resumed run uses both'
        )
    self._callbacks, self._override = callbacks, override
    self._before = [_attributes(c) for c in callbacks]
    self.ended = ''  # the reason of an early end

  def __call__(self, line: Line) -> Line:
    """Return the line with the callbacks' metrics.

    Raises:
      UsageError: if a metric's name is taken or its value is no number, or if a callback has memory
        that no checkpoint keeps.
    """
    metrics: Line = {}
    for callback in self._callbacks:
      try:
        added = callback({**line, **metrics}) or {}
      except EndTraining as e:
        self.ended = self.ended or str(e) or 'a callback ended it'
        added = e.metrics
      except SystemExit as e:
        raise RunError(
          f'{_name(callback)} called sys.exit: raise podrace.errors.EndTraining to end a run'
        ) from e
      if not (isinstance(added, Mapping) and all(isinstance(name, str) for name in added)):
        raise UsageError(
          f'{_name(callback)} returned {added!r:.100}, expected a dict of numbers by name, or None'
        )
      for name, value in added.items():
        if name in line or name in metrics or is_reserved(name):
          raise UsageError(f'a callback reports {name}, which is there already; take another name')
        try:
          metrics[name] = number(float(value))
        except (TypeError, ValueError) as e:
          raise UsageError(f'a callback reports {name} = {value!r}, expected a number') from e
    self._check_memories()
    return line | metrics

  def _check_memories(self) -> None:
    for callback, before in zip(self._callbacks, self._before, strict=True):
      if before is None:
        continue
      now = _attributes(callback) or {}
      changed = [
        k for k in sorted(now.keys() | before.keys()) if _differ(now.get(k), before.get(k))
      ]
      if changed:
        raise UsageError(
          f'{_name(callback)} changes its attribute {changed[0]}, which no checkpoint keeps: a '
          'resumed run would not be the same. Give it state and restore; or exact = False, if that '
          'may be so'
        )

  @property
  def _names(self) -> list[str]:
    return [_name(c) for c in self._callbacks]

  @property
  def transforms(self) -> list[Callable[[TrainState, Line], TrainState]]:
    """The `transform` methods of the callbacks that have one."""
    return [c.transform for c in self._callbacks if hasattr(c, 'transform')]

  def check(self, config: Config) -> None:
    """Raise UsageError if a run cannot save a callback's memory, or call its `transform`."""
    self.state()
    if not self.transforms:
      return
    if config.agree == 'gossip':
      raise UsageError(
        'a callback with transform changes one TrainState, and each device of --agree gossip has '
        'its own'
      )
    if config.architecture == 'sebulba':
      raise UsageError(
        'a callback with transform needs --architecture anakin: actors of sebulba may have taken '
        'the parameters before it changes them'
      )

  def state(self) -> Any:
    """Return the memory of all callbacks, as JSON."""
    states = []
    for callback in self._callbacks:
      try:
        states.append(callback.state() if hasattr(callback, 'state') else None)
        json.dumps(states[-1])
        if not _is_kept(states[-1]):
          raise ValueError('JSON has no NaN, and keys of a dict are texts')
      except Exception as e:
        raise UsageError(
          f'{_name(callback)}.state() failed, or returned no JSON: {type(e).__name__}: {e}'
        ) from e
    return {'ended': self.ended, 'states': states, 'names': self._names}

  def restore(self, saved: Any) -> None:
    """Take back the result of `state`.

    Raises:
      UsageError: if the run had other callbacks, and `override` is false.
    """
    before = saved.get('names')  # an older podrace kept none
    if before is not None and before != self._names and not self._override:
      raise UsageError(
        f'the run had the callbacks {", ".join(before) or "none"}, and now it has '
        f'{", ".join(self._names) or "none"}: give the same ones, or override=True (--override) to '
        'go on with these'
      )
    self.ended = saved['ended']
    states = list(zip(before or self._names, saved['states'], strict=False))
    for callback, name in zip(self._callbacks, self._names, strict=True):
      at = next((i for i, (n, _) in enumerate(states) if n == name), None)
      state = None if at is None else states.pop(at)[1]
      if state is not None and hasattr(callback, 'restore'):
        callback.restore(state)


def _name(callback: Any) -> str:
  """Return a function's name, or the name of an object's type."""
  return str(getattr(callback, '__qualname__', type(callback).__qualname__))


def _is_kept(state: Any) -> bool:
  """Return whether a checkpoint gives a state back as it is, apart from tuples."""
  if isinstance(state, dict):
    return all(isinstance(key, str) and _is_kept(x) for key, x in state.items())
  return all(map(_is_kept, state)) if isinstance(state, list | tuple) else bool(state == state)


def _attributes(callback: Any) -> dict[str, Any] | None:
  """Return attributes with their lengths, to detect changes; None if the attributes may change."""
  owner = getattr(callback, '__self__', callback)  # of a method
  if not hasattr(owner, '__dict__') or isinstance(owner, types.FunctionType | types.ModuleType):
    return None
  if hasattr(callback, 'state') or not getattr(owner, 'exact', True):
    return None
  return {k: (v, _length(v)) for k, v in vars(owner).items()}


def _length(value: Any) -> int:
  if hasattr(value, 'shape'):  # an array, perhaps of no axes
    return 0
  return len(value) if isinstance(value, Sized) else 0


def _differ(a: tuple[Any, int] | None, b: tuple[Any, int] | None) -> bool:
  if a is None or b is None or a[1] != b[1]:
    return a is not b
  same = a[0] is b[0]
  if not same and isinstance(a[0], int | float | str | None):
    same = bool(a[0] == b[0])
  return not same
