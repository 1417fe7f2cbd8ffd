"""IMPALA and DQN, which write down of all that they learn from whose it is and from where to where it goes.

A line of the file FAULTS_RECORD: the time, the environment, its first and its last timestep, and whether all
those in between are there once and in order. While there is a file FAULTS_RECORD.pause they pause as long as it says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from faults_numbers import read

from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala


def write(numbers: np.ndarray) -> None:
  """Of [T+1, B, 3] numbers of a batch."""
  who, count, whole = read(np.asarray(numbers))
  now, path = time.time(), Path(os.environ['FAULTS_RECORD'])
  with path.open('a') as file:
    for b in range(len(who)):
      file.write(f'{now:.3f} {who[b]} {count[0, b]} {count[-1, b]} {int(whole[b])}\n')
  with contextlib.suppress(OSError):  # a slow learner: its time for a batch, no waiting
    time.sleep(float(path.with_name(path.name + '.pause').read_text()))


@dataclasses.dataclass(frozen=True)
class Watched(Impala):
  """The same agent."""

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    """As IMPALA's."""
    jax.debug.callback(write, sample.trajectory.timesteps.observation[..., -3:])
    return super().learn(train, sample, key)


@dataclasses.dataclass(frozen=True)
class WatchedDQN(DQN):
  """The same agent."""

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    """As DQN's."""
    jax.debug.callback(write, sample.trajectory.timesteps.observation[..., -3:])
    return super().learn(train, sample, key)
