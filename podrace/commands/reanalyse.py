"""podrace reanalyse: compute newer targets for the contents of a replay service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrace.commands import stages
from podrace.system.options import Command

if TYPE_CHECKING:
  from podrace.distributed.stage import Duty

COMMAND = Command(
  'reanalyse',
  stages.USAGE,
  'search the states in a replay service again, with newer parameters of the learner, `podrace '
  'train [PRESET] --connect-replay ... --listen ADDRESS`',
  stages.OPTIONS,
  stages.NOTES,
  others_pass=True,
  jax=True,
)


def run(args: list[str]) -> int:
  """Reanalyse until the run is complete."""
  return stages.run(COMMAND, args, _duty)


def _duty() -> Duty:
  from podrace.distributed.reanalyse import DUTY

  return DUTY
