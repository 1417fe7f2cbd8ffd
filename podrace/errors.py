"""The errors whose messages are for the user."""

from __future__ import annotations


class RunError(Exception):
  """The run can't go on; the message is for the user. The command line exits with 1."""


class UsageError(ValueError):
  """Bad usage or input; the message is for the user. The command line exits with 2."""
