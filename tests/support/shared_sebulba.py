"""Programs of Sebulba that runs of one process share: tracing them is most of the time of a short run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from podrace.architectures.sebulba import SebulbaDriver
from podrace.envs.host.infos import Infos
from podrace.experiments.bench import acting_program
from podrace.run import build

SHARED: dict[Any, Any] = {}


def shared_driver(agent: Any, spec: Any, *args: Any, **settings: Any) -> SebulbaDriver:
  """`build.sebulba`, with the programs of an earlier one that has the same agent, sizes and devices.

  Environments, threads, states and statistics are its own.
  """
  of_agent = type(agent), repr(agent)
  traced = build.example_trajectory

  def example(agent: Any, spec: Any, *sizes: int) -> Any:
    key = 'example', of_agent, repr(spec.observation_space), sizes
    if key not in SHARED:
      SHARED[key] = traced(agent, spec, *sizes)
    return SHARED[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build, 'example_trajectory', example)
    driver = build.sebulba(agent, spec, *args, **settings)
  learning, acting = driver.learning, acting_program(driver)
  key = of_agent, str(learning.example), learning.mesh, learning.streams, learning.keeps_previous
  driver = SebulbaDriver(SHARED.setdefault(key, learning), driver.source, driver.source.publish)
  share_acting(acting, of_agent)
  return driver


def share_acting(acting: Any, of_agent: Any) -> None:
  """Gives it the programs of an earlier one; those that were compiled for its devices are not compiled again."""
  sizes = acting.envs_per_group, acting.unroll_length, acting.columns, len(acting.destinations)
  key = of_agent, str(acting.example), sizes
  vars(acting)['programs'] = SHARED.setdefault(key, acting.programs)
  if acting.spec.jax is not None:
    key = *key, acting.spec.name
    steps = SHARED.setdefault(key, acting.jax_steps)
    vars(acting)['jax_steps'] = own = copy.copy(steps)
    own.infos = Infos()
  key, warm_up = (*key, acting.devices, acting.sizes, 'warm'), acting.warm_up

  def once() -> None:
    if key not in SHARED:
      warm_up()
      SHARED[key] = True

  vars(acting)['warm_up'] = once
