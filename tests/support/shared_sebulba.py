"""Programs of Sebulba that runs of one process share: tracing them is most of the time of a short run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from podrace.architectures.sebulba import ActingProgram, SebulbaDriver
from podrace.architectures.sebulba.learning import LearningProgram
from podrace.distributed import acting as acting_process
from podrace.envs.host.infos import Infos
from podrace.run import build

SHARED: dict[Any, Any] = {}


def shared_driver(*args: Any, **settings: Any) -> SebulbaDriver:
  """`build.sebulba`, with the programs of an earlier one that has the same agent, sizes and devices.

  Environments, threads, states and statistics are its own.
  """
  with sharing():
    return build.sebulba(*args, **settings)


@pytest.fixture(scope='module')
def shared_processes() -> Iterator[None]:
  """Acting and learning ends of runs with several processes share them as well, where tests have both in this one."""
  with sharing():
    yield


@contextlib.contextmanager
def sharing() -> Iterator[None]:
  """Whatever is built shares its programs with what was built before."""
  traced, check, learning = build.example_trajectory, ActingProgram.__post_init__, LearningProgram

  def example(agent: Any, spec: Any, *sizes: int) -> Any:
    key = 'example', type(agent), repr(agent), repr(spec.observation_space), sizes
    if key not in SHARED:
      SHARED[key] = traced(agent, spec, *sizes)
    return SHARED[key]

  def made(acting: ActingProgram) -> None:
    check(acting)
    share_acting(acting)

  def learned(*args: Any, **settings: Any) -> LearningProgram:
    return share_learning(learning(*args, **settings))

  with pytest.MonkeyPatch.context() as patch:
    for module in (build, acting_process):
      patch.setattr(module, 'example_trajectory', example)
    patch.setattr(ActingProgram, '__post_init__', made)
    patch.setattr(build, 'LearningProgram', learned)
    yield


def share_learning(learning: LearningProgram) -> LearningProgram:
  """An earlier program that is the same, if there is one and it learns from unrolls."""
  if learning.windows is not None:
    return learning
  agent, sizes = learning.agent, (learning.streams, learning.keeps_previous)
  key = type(agent), repr(agent), str(learning.example), learning.mesh, *sizes
  return SHARED.setdefault(key, learning)


def share_acting(acting: ActingProgram) -> None:
  """Gives it the programs of an earlier one, which are not compiled again for the same devices."""
  sizes = acting.envs_per_group, acting.unroll_length, acting.columns, len(acting.destinations)
  key: Any = type(acting.agent), repr(acting.agent), str(acting.example), sizes
  vars(acting)['programs'] = SHARED.setdefault(key, acting.programs)
  if acting.spec.jax is not None:
    key = *key, acting.spec.name
    steps = SHARED.setdefault(key, acting.jax_steps)
    vars(acting)['jax_steps'] = own = copy.copy(steps)
    own.infos = Infos()
  key, warm_up = (*key, acting.devices, acting.sizes, 'warm'), acting.warm_up

  stepping = [acting.programs.step if acting.ordered else acting.programs.step_some]
  stepping += [acting.jax_steps._step] if acting.spec.jax is not None else []

  def once() -> None:
    forgotten = not all(f._cache_size() for f in stepping)  # by `jax.clear_caches`
    if key not in SHARED or forgotten:
      warm_up()
      SHARED[key] = True

  vars(acting)['warm_up'] = once
