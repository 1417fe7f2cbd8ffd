"""podrace label: compute the targets that a learner with a replay service learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrace.commands import stages
from podrace.system.options import Command

if TYPE_CHECKING:
  from podrace.distributed.stage import Duty

COMMAND = Command(
  'label',
  stages.USAGE,
  'label windows of a replay service with targets by the newest parameters of the learner, which '
  'learns from labels: `podrace train [PRESET] --agent.labels stage --connect-replay ... --listen '
  'ADDRESS`',
  stages.OPTIONS,
  stages.NOTES,
  others_pass=True,
  jax=True,
)


def run(args: list[str]) -> int:
  """Label until the run is complete."""
  return stages.run(COMMAND, args, _duty)


def _duty() -> Duty:
  from podrace.distributed.label import DUTY

  return DUTY
