"""Runs and evaluations of one process share compiled programs, in modules that import the fixture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures.anakin import Anakin
from podrace.run import build, evaluate

check_run, compile_episodes = build.check_run, evaluate._compile_episodes


def describe(x: Any) -> tuple[type, str]:
  """Return what a program depends on of an agent or environment.

  Only a learning rate that falls over the run depends on the number of updates. Environments of
  gymnax are described by their names and parameters, which stand beside them.
  """
  text = re.sub(r'<gymnax\.[\w.]+ object at 0x[0-9a-f]+>', '', repr(x))
  if isinstance(x, Impala | PPO) and not x.anneal_learning_rate:
    text = re.sub(r'\btotal_updates=\d+', '', text)
  return type(x), text


@pytest.fixture(scope='module', autouse=True)
def shared_programs() -> Iterator[None]:
  """Tracing and compiling are most of a short run's time. Replay is as the agent and the sizes are."""
  programs: dict[Any, Anakin] = {}
  episodes: dict[Any, Any] = {}
  checked: set[Any] = set()

  def shared(agent: Any, env: Any, replay: Any, *sizes: Any) -> Anakin:
    key = describe(agent), describe(env), *sizes
    if key not in programs:
      programs[key] = Anakin(agent, env, replay, *sizes)
    return programs[key]

  def check_once(agent: Any, env: Any, *parts: Any) -> None:
    key = describe(agent), describe(env), *parts[1:]
    if key not in checked:
      check_run(agent, env, *parts)
      checked.add(key)

  def shared_episodes(agent: Any, env: Any, *sizes: int) -> Any:
    key = describe(agent), describe(env), *sizes
    if key not in episodes:  # keeps agent and env: an address in their text is of no others
      episodes[key] = compile_episodes(agent, env, *sizes), agent, env
    return episodes[key][0]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build, 'Anakin', shared)
    patch.setattr(build, 'check_run', check_once)
    patch.setattr(evaluate, '_compile_episodes', shared_episodes)
    yield
