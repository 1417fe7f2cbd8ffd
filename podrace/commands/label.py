"""podrace label: compute the targets that a learner with a replay service learns from."""

from __future__ import annotations

from podrace.commands import stages

COMMAND = stages.command(
  'label',
  'label windows of a replay service with targets by the newest parameters of the learner, which '
  'learns from labels: `podrace train [PRESET] --agent.labels stage --connect-replay ... --listen '
  'ADDRESS`',
)


def run(args: list[str]) -> int:
  """Label until the run is complete."""
  return stages.run(COMMAND, args)
