"""Sebulba: environments on the host; some devices act, others learn.

Hessel et al. 2021 (arXiv 2104.06272). Actor threads step pools of environments and ask the agent
for actions on an actor device, where the unroll is assembled; finished unrolls are split along the
batch and go device to device to the learners. One learner thread, the caller's, makes the updates
and publishes the parameters by version. Queues carry handles.

Which version an unroll is acted with is a setting, `lag`:
- '0': unroll k with version k; acting and learning alternate.
- '1': unroll k with version k - 1; they overlap, and still nothing depends on who is faster.
- 'async': with the newest there is, at most `max_lag` updates old when it is learned from.

Environments that return in any order, or come and go, are always 'async': a trajectory is made of
whichever unrolls are finished first, so that nobody waits for a straggler; an unroll that began
more than `max_lag` updates ago is dropped.
"""

from podrace.architectures.sebulba.acting import ActingProgram, example_trajectory
from podrace.architectures.sebulba.actors import Actors
from podrace.architectures.sebulba.any_order import AnyOrder
from podrace.architectures.sebulba.device_programs import Acting, Carry, Programs
from podrace.architectures.sebulba.driver import SebulbaDriver
from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.learning import Batch, LearningProgram, State
from podrace.architectures.sebulba.lockstep import Lockstep
from podrace.architectures.sebulba.pipe import ActorFailed, Closed, Lag, Pipe, Snapshot, Unroll
from podrace.architectures.sebulba.sources import ActorSource, HostReplaySource, Source
from podrace.architectures.sebulba.statistics import Statistics
from podrace.architectures.sebulba.thread import ActorThread

__all__ = [
  'Acting',
  'ActingProgram',
  'ActorFailed',
  'ActorSource',
  'ActorThread',
  'Actors',
  'AnyOrder',
  'Batch',
  'Carry',
  'Closed',
  'HostReplaySource',
  'Inference',
  'Lag',
  'LearningProgram',
  'Lockstep',
  'Pipe',
  'Programs',
  'SebulbaDriver',
  'Snapshot',
  'Source',
  'State',
  'Statistics',
  'Unroll',
  'example_trajectory',
]
