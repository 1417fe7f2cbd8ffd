"""Errors with messages for the user."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping


class RunError(Exception):
  """The run cannot continue; the message is for the user. The command line exits with 1."""


class UsageError(ValueError):
  """Bad usage or input; the message is for the user. The command line exits with 2."""


class UnreadableFile(UsageError):
  """A file of a run directory, a rule or a policy cannot be read, or has unexpected contents.

  Attributes:
    reason: the message without the path.
  """

  def __init__(self, path: object, reason: str) -> None:
    super().__init__(f'{path} {reason}')
    self.reason = reason


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
  """Return the error for an unknown name, with the nearest known names."""
  known = sorted(known)
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  hint = f'did you mean {" or ".join(near)}?' if near else f'there are {", ".join(known)}'
  return UsageError(f'unknown {kind} {name!r}: {hint}')


class CheckpointError(Exception):
  """A checkpoint could not be written or read; the message has its path and the reason."""


class UnknownName(ValueError):
  """The name of an environment, or an option in it, is unknown."""


class MissingExtra(ValueError):
  """The library of an environment is not installed."""


class PolicyError(ValueError):
  """The directory holds no policy, or a damaged policy; the message is for the user."""


class SecurityError(ValueError):
  """Keys or addresses are invalid; the message is for the user."""


class StaleParameters(TimeoutError):
  """The parameters are older than allowed, and no newer ones came in time."""


class TransportError(Exception):
  """A connection or a message between processes failed."""


class ReplayFailed(RunError):
  """The replay's thread ended with an exception; the message has its traceback."""


class EndTraining(Exception):
  """A callback ends the run: it saves, and counts as finished.

  Attributes:
    args: the reason, which summary.json records.
    metrics: the callback's values for the current line of metrics.
  """

  def __init__(self, reason: str = '', metrics: Mapping[str, float] | None = None) -> None:
    super().__init__(reason)
    self.metrics = metrics or {}


class Stopped(Exception):
  """A signal ended the run after saving.

  Attributes:
    signum: the number of the signal.
    unsaved: a description of data that could not be saved, or ''.
    kept: whether a run directory exists to resume from.
  """

  def __init__(self, signum: int, unsaved: str = '') -> None:
    name = signal.Signals(signum).name
    super().__init__(f'{name}: {unsaved}' if unsaved else name)
    self.signum, self.unsaved = signum, unsaved
    self.kept = True


class HostError(Exception):
  """An environment on the host broke its contract; the message names it and the field."""


class RunFinished(Exception):
  """The learner's run is complete."""


class EnvironmentsMoved(Exception):
  """The learner has lent this process other environments, from number `first` on."""

  def __init__(self, first: int) -> None:
    super().__init__(first)
    self.first = first
