"""The errors whose messages are for the user."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping


class RunError(Exception):
  """The run can't go on; the message is for the user. The command line exits with 1."""


class UsageError(ValueError):
  """Bad usage or input; the message is for the user. The command line exits with 2."""


class UnreadableFile(UsageError):
  """A file of a run directory, a rule or a policy is not as expected.

  Attributes:
    reason: the message without the path.
  """

  def __init__(self, path: object, reason: str) -> None:
    super().__init__(f'{path} {reason}')
    self.reason = reason


def unknown(kind: str, came: str, known: Iterable[str]) -> UsageError:
  """The error for a name that isn't one, with the nearest that are."""
  known = sorted(known)
  near = difflib.get_close_matches(came, known, n=3, cutoff=0.5)
  hint = f'did you mean {" or ".join(near)}?' if near else f'there are {", ".join(known)}'
  return UsageError(f'unknown {kind} {came!r}: {hint}')


class CheckpointError(Exception):
  """A checkpoint could not be written or read; the message says which and why."""


class UnknownName(ValueError):
  """The name of an environment, or an option of it, that nothing answers to."""


class MissingExtra(ValueError):
  """An environment whose library is not installed."""


class PolicyError(ValueError):
  """The directory holds no policy, or a damaged one; the message is for the user."""


class SecurityError(ValueError):
  """Keys or addresses that can't be right; the message is for the user."""


class StaleParameters(TimeoutError):
  """The parameters are older than allowed, and no newer ones came in time."""


class TransportError(Exception):
  """A connection or a message between processes failed."""


class ReplayFailed(RunError):
  """The replay's thread ended with an exception; the message has its traceback."""


class EndTraining(Exception):
  """Raised by a callback: the run saves, and is finished. Its text is the reason, in summary.json.

  `metrics` are what the callback would have returned for this line.
  """

  def __init__(self, reason: str = '', metrics: Mapping[str, float] | None = None) -> None:
    super().__init__(reason)
    self.metrics = metrics or {}


class Stopped(Exception):
  """A signal ended the run; all that there was to save is saved, but for what `unsaved` names."""

  def __init__(self, signum: int, unsaved: str = '') -> None:
    name = signal.Signals(signum).name
    super().__init__(f'{name}: {unsaved}' if unsaved else name)
    self.signum, self.unsaved = signum, unsaved
    self.kept = True  # whether there is a run directory to go on with


class HostError(Exception):
  """An environment on the host did what none may do; the message names it and the field."""


class SignalReceived(BaseException):
  """A signal came, which ends all waits of a process that works for a learner."""


class RunFinished(Exception):
  """The learner's run is complete."""


class EnvironmentsMoved(Exception):
  """The learner has lent this process other environments, from number `first` on."""

  def __init__(self, first: int) -> None:
    super().__init__(first)
    self.first = first
