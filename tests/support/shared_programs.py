"""Runs of one process share the compiled program of one configuration, in modules that import the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from podrace.architectures.anakin import Anakin
from podrace.run import build


@pytest.fixture(scope='module', autouse=True)
def shared_programs() -> Iterator[None]:
  """Tracing and compiling are most of a short run's time. Replay is as the agent and the sizes are."""
  programs: dict[Any, Anakin] = {}

  def shared(agent: Any, env: Any, replay: Any, *sizes: Any) -> Anakin:
    key = type(agent), type(env), repr(agent), repr(env), *sizes
    if key not in programs:
      programs[key] = Anakin(agent, env, replay, *sizes)
    return programs[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build, 'Anakin', shared)
    yield
