"""podrace reanalyse: compute newer targets for the contents of a replay service."""

from __future__ import annotations

from podrace.commands import stages

COMMAND = stages.command(
  'reanalyse',
  'search the states in a replay service again, with newer parameters of the learner, `podrace '
  'train [PRESET] --connect-replay ... --listen ADDRESS`',
)


def run(args: list[str]) -> int:
  """Reanalyse until the run is complete."""
  return stages.run(COMMAND, args)
