"""Sebulba: environments on the host, actor devices and learner devices.

Hessel et al. 2021 (arXiv 2104.06272). Actor threads step pools of environments, the groups of a
thread in turn: one steps while the device acts for another. The agent acts on an actor device,
where the unroll is assembled. Finished unrolls are split along the batch and move from device to
device to the learners. One learner thread, the caller's, makes the updates and publishes the
parameters by version. Queues carry handles.

The setting `lag` chooses the version of the parameters for an unroll:

- '0': unroll k with version k. Acting and learning alternate.
- '1': unroll k with version k - 1. They overlap, and results do not depend on speed.
- 'async': the newest version, at most `max_lag` updates old when the learner uses the unroll.

Environments that return in any order, or connect and disconnect, are always 'async'. A trajectory
consists of the unrolls that finish first, so that none waits for a straggler. An unroll that began
more than `max_lag` updates ago is dropped.
"""

from podrace.architectures.sebulba.acting import (
  ActingProgram,
  example_trajectory,
  make_program,
)
from podrace.architectures.sebulba.actors import Actors
from podrace.architectures.sebulba.driver import SebulbaDriver
from podrace.architectures.sebulba.learning import Batch, LearningProgram, State
from podrace.architectures.sebulba.pipe import ActorFailed, Unroll
from podrace.architectures.sebulba.sources import ActorSource, HostReplaySource

__all__ = [
  'ActingProgram',
  'ActorFailed',
  'ActorSource',
  'Actors',
  'Batch',
  'HostReplaySource',
  'LearningProgram',
  'SebulbaDriver',
  'State',
  'Unroll',
  'example_trajectory',
  'make_program',
]
