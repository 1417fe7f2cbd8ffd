"""The errors whose messages are for the user."""

from __future__ import annotations


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
