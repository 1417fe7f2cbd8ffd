"""What is said of wrong parts of an agent: what it is bound by, what it remembers, what it learns nothing from."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from podrace.agents import AGENTS
from podrace.agents.impala import Impala
from podrace.errors import RunError, UsageError
from podrace.networks import ActorCritic
from podrace.replay import Buffer, windows
from podrace.run import build, loop
from podrace.settings.agents import default_agent
from podrace.settings.config import Config
from podrace.system import blame
from podrace.types import Sample, TrainState

NETWORK = ActorCritic(hidden=(8,), initializer='lecun')


def config(agent: Any, total_steps: int = 2560) -> Config:
  return Config(agent, num_envs=8, unroll_length=8, total_steps=total_steps, devices=1)


@dataclasses.dataclass(frozen=True)
class Good(Impala):
  network: Any = NETWORK


@dataclasses.dataclass(frozen=True)
class Bindless(ActorCritic):
  def bind(self, observation_space: Any, action_space: Any) -> Any:
    return None


@dataclasses.dataclass(frozen=True)
class Raises(ActorCritic):
  def bind(self, observation_space: Any, action_space: Any) -> Any:
    return action_space.low


@dataclasses.dataclass(frozen=True)
class Remembers(Good):
  buffer: Buffer = Buffer(capacity=1000, min_size=100, batch_size=16)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Any:
    return windows(self.buffer, 8, num_envs, unroll_length, keep_state=True, stack=stack)


class Forgets(Remembers):
  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Any:
    windows(self.buffer, 8, num_envs, unroll_length, stack=stack)


class OtherArguments(Remembers):
  def memory(self, num_envs: int) -> Any:  # type: ignore[override]
    return None


def line(cls: Any, name: str) -> str:
  """Where a method is, as errors have it."""
  return f'{Path(__file__).name}:{inspect.getsourcelines(getattr(cls, name))[1]})'


WRONG = [
  (Good(network=Bindless()), Bindless, 'bind', 'returned None, expected the network for these'),
  (Good(network=Raises()), Raises, 'bind', "AttributeError: 'Discrete' object has no attribute 'l"),
  (Forgets(), Forgets, 'memory', 'returned None, expected a Replay, as podrace.replay.windows'),
  (OtherArguments(), OtherArguments, 'memory', 'num_envs 8, unroll_length 8, stack 0'),
]


@pytest.mark.parametrize(('agent', 'cls', 'name', 'message'), WRONG, ids=[c for _, c, *_ in WRONG])
def test_bind_and_memory(agent: Any, cls: Any, name: str, message: str) -> None:
  with pytest.raises(UsageError) as told:
    build.build(config(agent))
  said = str(told.value)
  assert message in said and f'test_check_agent.{cls.__name__}.{name} (' in said
  assert line(cls, name) in said
  assert 'hooks.py' not in said and 'build.py' not in said


@dataclasses.dataclass(frozen=True)
class NoMemory(Good):
  buffer: Buffer = Buffer()


def test_a_buffer_that_nothing_is_put_into() -> None:
  with pytest.raises(UsageError, match=r'NoMemory.*Buffer `buffer`'):
    build.build(config(NoMemory()))


def test_what_is_lost_is_named_by_its_path() -> None:
  before = TrainState({'w': jnp.ones(3)}, {'opt': jnp.ones(2), 'target': {'w': jnp.ones(3)}})
  after = before._replace(rest={'opt': jnp.ones(2)})
  expected = "in which rest['target'] is missing", 'one that has it'
  assert blame.first_difference(after, before) == expected
  assert blame.first_difference(before, after) == ("with rest['target']", 'one without it')
  assert blame.first_difference(before._replace(rest=()), before) == (
    'in which rest is missing',
    'one that has it',
  )


@dataclasses.dataclass(frozen=True)
class Tells(Good):
  """Reports further metrics, and has a number of Python in its state."""

  metrics: tuple[tuple[Any, Any], ...] = ()

  def init(self, key: Any) -> TrainState:
    train = super().init(key)
    return train._replace(rest=(train.rest, 0))

  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    inner = train._replace(rest=train.rest[0])
    after, priority, metrics = super().learn(inner, sample, key)
    return after._replace(rest=(after.rest, 1)), priority, metrics | dict(self.metrics)


@pytest.mark.parametrize('architecture', ['anakin', 'sebulba'])
def test_numbers_of_python_are_metrics_and_state(architecture: str) -> None:
  metrics = (('lr', 1e-3), ('epochs', 4), ('masked', True), ('loss', 0))
  build.build(dataclasses.replace(config(Tells(metrics=metrics)), architecture=architecture))


@pytest.mark.parametrize(
  'metric',
  [('lr', None), ('parts', {'a': 1.0}), ('parts', [1.0]), (3, 1.0), ('step', 1.0), ('info_x', 1.0)],
)
def test_a_wrong_metric_names_learn(metric: tuple[Any, Any]) -> None:
  with pytest.raises(UsageError, match=rf'{metric[0]}.*, expected') as told:
    build.build(config(Tells(metrics=(metric,))))
  assert 'test_check_agent.Tells.learn (' in str(told.value)
  assert line(Tells, 'learn') in str(told.value)


class Idle(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    after, priority, metrics = super().learn(train, sample, key)
    return after._replace(params=train.params), priority, metrics


def test_params_that_stay_are_told(caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING, 'podrace'):
    build.build(config(Good()))
    assert not caplog.records
    build.build(config(Idle()))
  said = caplog.records[0].getMessage()
  assert line(Idle, 'learn') in said


@pytest.mark.slow
def test_a_run_that_ends_before_it_learns(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  loop.train(config(Remembers(), total_steps=64), tmp_path / 'short', quiet=True)
  said = capsys.readouterr().err
  assert 'min_size 100' in said and 'step 128' in said
  assert 'step 64' in said
  loop.train(config(Remembers(), total_steps=128), tmp_path / 'enough', quiet=True)
  assert 'learns nothing' not in capsys.readouterr().err


def test_a_run_that_ends_before_its_first_window_is_told_so() -> None:
  said: list[str] = []
  replay = windows(Buffer(capacity=1000, min_size=1, batch_size=1), 64, 8, 8)
  for steps in (448, 512):
    loop.warn_if_too_short(
      config(Remembers(), steps), SimpleNamespace(windows=replay.windows), said.append
    )
  assert len(said) == 1 and re.search(r'min_size 1\b.*\b64 .*step 512.*step 448', said[0])


class Diverges(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    after, priority, metrics = super().learn(train, sample, key)
    return after, priority, metrics | {'loss': metrics['loss'] + jnp.nan}


@pytest.mark.slow
def test_a_loss_that_is_nan_names_learn(tmp_path: Path) -> None:
  with pytest.raises(RunError, match=r'NaN.*step 64') as told:
    loop.train(config(Diverges()), tmp_path / 'run', quiet=True)
  assert line(Diverges, 'learn') in str(told.value)
  assert 'learning rate' in str(told.value)


@pytest.mark.parametrize('name', AGENTS)
def test_our_agents_and_their_parts_are_ours(name: str):
  """Otherwise each run would trace them once more, and their errors would be the user's."""
  agent = default_agent(name)
  parts = [getattr(agent, field.name) for field in dataclasses.fields(agent)]
  foreign = [x for x in (agent, *parts) if dataclasses.is_dataclass(x) and not blame.is_ours(x)]
  assert foreign == []
  assert all(blame.inner(x) is x for x in parts)
