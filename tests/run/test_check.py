"""What is said of wrong agents and environments of one's own, before and while they run."""
# ruff: noqa: F401 (fixtures of processes)

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnasium import spaces
from jax import lax
from processes import as_users_have_it
from shorthand import Patch, slow_after

from podrace import errors
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.envs import check as check_env
from podrace.envs import contract
from podrace.envs.base import NextStepReset, restart, transition
from podrace.errors import UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer
from podrace.run import build, check_agent, loop
from podrace.run.evaluate import evaluate
from podrace.run.video import film
from podrace.settings.config import Config
from podrace.system import blame
from podrace.types import ActorOutput, Sample, TimeStep, TrainState

NETWORK = ActorCritic(hidden=(8,), initializer='lecun')
ARCHITECTURES = ['anakin', 'sebulba']


# --- environments: an episode of some steps, and what is wrong about it ---------------------------


class State(NamedTuple):
  time: Any  # [] i32


@dataclasses.dataclass(frozen=True)
class Steps:
  """Dynamics: it does not reset itself."""

  length: int = 10
  observation_space = spaces.Box(-1.0, 1.0, (3,), 'float32')
  action_space = spaces.Discrete(2)

  def reset(self, key: Any) -> Any:
    return State(jnp.int32(0)), restart(jnp.ones(3))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    time = state.time + 1
    return State(time), transition(jnp.ones(3), self.reward(time), False, time >= self.length)

  def reward(self, time: Any) -> Any:
    return 1.0


class NanReward(Steps):
  def reward(self, time: Any) -> Any:
    return jnp.where(time == self.length - 1, jnp.nan, 1.0)


class Gym(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    return jnp.ones(3), 1.0, False, False, {}


class Raises(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    return state, transition(jnp.ones(3) @ jnp.ones(4), 1.0, False, False)


class OtherState(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    return State(state.time + 0.5), restart(jnp.ones(3))


class OtherObservation(Steps):
  def reset(self, key: Any) -> Any:
    return State(jnp.int32(0)), restart(jnp.ones(4))


class IntegerReward(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    state, timestep = super().step(state, action, key)
    return state, timestep._replace(reward=jnp.int32(1))


class NotFirst(Steps):
  def reset(self, key: Any) -> Any:
    state, timestep = super().reset(key)
    return state, timestep._replace(step_type=jnp.int8(1))


class NanObservation(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    state, timestep = super().step(state, action, key)
    return state, timestep._replace(observation=timestep.observation * jnp.nan)


class NoSpace(Steps):
  action_space: Any = 2


@dataclasses.dataclass(frozen=True)
class OnlyFirst:
  """Resets itself without having said LAST."""

  inner: Any = Steps(5)
  observation_space = Steps.observation_space
  action_space = Steps.action_space

  def reset(self, key: Any) -> Any:
    return self.inner.reset(key)

  def step(self, state: Any, action: Any, key: Any) -> Any:
    return lax.cond(
      state.time >= 4, lambda: self.inner.reset(key), lambda: self.inner.step(state, action, key)
    )


class Box(Steps):
  action_space = spaces.Box(-1.0, 1.0, (2,), 'float32')


def wrapped(cls: str, length: int = 10) -> Any:
  return NextStepReset(globals()[cls](length))


def bare(cls: str, length: int = 10) -> Any:
  return globals()[cls](length) if cls != 'OnlyFirst' else OnlyFirst()


def config(
  architecture: str, agent: Any = None, env: str = 'test_check.wrapped,cls=Steps'
) -> Config:
  agent = agent or Impala(network=NETWORK)
  return Config(
    agent, f'python:{env}', architecture=architecture, num_envs=8, unroll_length=8,
    total_steps=2560, devices=1,
    **({'actor_threads': 1} if architecture == 'sebulba' else {}),
  )  # fmt: skip


def line(cls: Any, name: str) -> str:
  """Where a method is, as errors have it."""
  return f'{Path(__file__).name}:{inspect.getsourcelines(getattr(cls, name))[1]})'


WRONG = [
  ('bare,cls=Steps', Steps, 'step',
   r'returned LAST after LAST in step 11, expected FIRST: .*NextStepReset'),
  ('bare,cls=OnlyFirst', OnlyFirst, 'step', 'returned FIRST after MID in step 5, expected LAST first'),
  ('wrapped,cls=NanReward', NanReward, 'step', 'returned reward nan in step 9, expected a finite'),
  ('wrapped,cls=NanObservation', NanObservation, 'step', 'returned observation nan in step 1'),
  ('bare,cls=Gym', Gym, 'step',
   r'returned a tuple of 5: \(float32\[3\], 1.0, False, False, {}\), expected a pair \(state, Time'),
  ('bare,cls=OtherState', OtherState, 'step',
   r'returned the state time float32\[\], expected int32\[\], as `reset` returns it'),
  ('wrapped,cls=OtherObservation', OtherObservation, 'reset',
   r'returned observation float32\[4\], expected float32\[3\], as the space declares'),
  ('bare,cls=IntegerReward', IntegerReward, 'step',
   r'returned the reward int32\[\], expected float32\[\]'),
  ('bare,cls=NotFirst', NotFirst, 'reset', 'returned step_type MID, expected FIRST'),
]  # fmt: skip


@pytest.mark.parametrize('architecture', ARCHITECTURES)
@pytest.mark.parametrize(('env', 'cls', 'name', 'message'), WRONG, ids=[e for e, *_ in WRONG])
def test_a_wrong_environment(
  env: str, cls: Any, name: str, message: str, architecture: str
) -> None:
  with pytest.raises(UsageError, match=f'{cls.__name__}.{name}.*{message}') as told:
    build.build(config(architecture, env=f'test_check.{env}'))
  assert line(cls, name) in str(told.value)


def test_a_space_that_is_none() -> None:
  with pytest.raises(UsageError, match=r'NoSpace.action_space.*2.*gymnasium.spaces.Sp'):
    check_env.check_environment(NoSpace())


@pytest.mark.parametrize('architecture', ARCHITECTURES)
def test_an_environment_that_fails_says_where(architecture: str) -> None:
  with pytest.raises(UsageError) as told:
    build.build(config(architecture, env='test_check.bare,cls=Raises'))
  said = str(told.value)
  assert 'Raises.step' in said and line(Raises, 'step') in said
  assert f'File "{__file__}"' in said and 'jnp.ones(3) @ jnp.ones(4)' in said
  assert 'TypeError: dot_general' in said
  assert len(said.splitlines()) < 15 and 'site-packages' not in said


@pytest.mark.parametrize(
  ('env', 'message', 'architecture'),
  slow_after(2,
    ('bare,cls=Steps', r'Steps.step.*FIRST.*LAST.*NextStepReset', 'anakin'),
    ('wrapped,cls=NanReward', r'reward.*NaN', 'sebulba'),
    ('bare,cls=Steps', r'Steps.step.*FIRST.*LAST.*NextStepReset', 'sebulba'),
    ('wrapped,cls=NanReward', r'reward.*NaN', 'anakin'),
  ),
)  # fmt: skip
def test_episodes_that_are_longer_than_the_check(
  env: str, message: str, architecture: str, tmp_path: Path
) -> None:
  length = check_env.STEPS + 50
  with pytest.raises(errors.RunError, match=message) as told:
    loop.train(
      config(architecture, env=f'test_check.{env},length={length}'), tmp_path / 'run', quiet=True
    )
  assert 'loss' not in str(told.value)


@pytest.mark.slow
def test_seeds_are_watched_alike(tmp_path: Path) -> None:
  wrong = config('anakin', env=f'test_check.bare,cls=Steps,length={check_env.STEPS + 50}')
  with pytest.raises(errors.RunError, match=r'16.*test_check.Steps.step'):
    loop.train(dataclasses.replace(wrong, seeds=2), tmp_path / 'run', quiet=True)


@pytest.mark.parametrize(
  'look',
  [
    lambda run: evaluate(run, 4, allow_code=['test_check']),
    pytest.param(
      lambda run: film.watch(run, show=lambda frame: None, allow_code=['test_check'], out=None),
      marks=pytest.mark.slow,
    ),
  ],
  ids=['eval', 'watch'],
)
def test_an_environment_is_checked_before_it_is_played_in(
  look: Callable[[Path], Any], tmp_path: Path, monkeypatch: Patch
) -> None:
  loop.train(dataclasses.replace(config('anakin'), total_steps=64), tmp_path / 'run', quiet=True)
  monkeypatch.setattr(Steps, 'reward', NanReward.reward)
  with pytest.raises(UsageError, match=r'Steps.step'):
    look(tmp_path / 'run')


class Switches(Steps):
  """Turn on what is said; spaces as Gymnasium makes them, of i64 and i8."""

  observation_space = spaces.MultiDiscrete([3, 4])
  action_space = spaces.MultiBinary(2)

  def reset(self, key: Any) -> Any:
    return State(jnp.int32(0)), restart(jnp.array([2, 3]))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    reward = jnp.mean(action.astype(jnp.float32))
    over = state.time + 1 >= self.length
    return State(state.time + 1), transition(jnp.array([2, 0]), reward, False, over)


class KeptState(NamedTuple):
  time: Any
  action: Any  # [2] i32, as agents give it


class Kept(Steps):
  """Its state holds the action of two switches, of which the first must be on."""

  observation_space = spaces.Dict(
    action_mask=spaces.MultiBinary(4), x=spaces.Box(0, 1, (2,), np.float32)
  )
  action_space = spaces.MultiBinary(2)

  def see(self, action: Any) -> Any:
    mask = jnp.array([0, 1, 1, 1], jnp.int8)
    return {'action_mask': mask, 'x': action.astype(jnp.float32)}

  def reset(self, key: Any) -> Any:
    action = jnp.zeros(2, jnp.int32)
    return KeptState(jnp.int32(0), action), restart(self.see(action))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    time = state.time + 1
    return KeptState(time, action), transition(self.see(action), 1.0, False, time >= self.length)


def test_a_state_with_the_action_is_checked_as_agents_act() -> None:
  check_env.check_environment(wrapped('Kept'))


@pytest.mark.parametrize(
  'architecture', ['anakin', pytest.param('sebulba', marks=pytest.mark.slow)]
)
def test_switches_and_choices_of_gymnasiums_types(architecture: str, tmp_path: Path) -> None:
  contract.check(wrapped('Switches'), jax.random.key(0), steps=40)
  settings = config(architecture, Impala(network=NETWORK, learning_rate=0.02))
  settings = dataclasses.replace(
    settings, env='python:test_check.wrapped,cls=Switches', total_steps=12_800
  )
  assert (
    loop.train(settings, tmp_path / 'run', quiet=True)['episode_return'] > 7
  )  # of 10; 5 at random


@pytest.mark.slow
def test_switches_on_the_host_are_given_actions_of_their_space(tmp_path: Path) -> None:
  settings = config('sebulba', env='unused')
  settings = dataclasses.replace(settings, env='gymnasium:host_envs:Switches-v0', total_steps=640)
  assert loop.train(settings, tmp_path / 'run', quiet=True)['episodes'] > 0


# --- agents -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Good(Impala):
  network: Any = NETWORK


class NoPair(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    return super().act(params, state, timestep, key)[0]


class OneAction(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    return ActorOutput(jnp.int32(0)), state


class FloatAction(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    return ActorOutput(jnp.zeros(8)), state


class IntegersInABox(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    return ActorOutput(jnp.zeros((8, 2), jnp.int32)), state


class Extras(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    output, state = super().act(params, state, timestep, key)
    return output._replace(extras={'value': jnp.float32(1)}), state


class GrowingState(Good):
  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    output, state = super().act(params, state, timestep, key)
    return output, (state, timestep.reward)


class NoTrainState(Good):
  def init(self, key: Any) -> Any:
    return {'w': jnp.ones(3)}


class Two(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    return super().learn(train, sample, key)[:2]


class NoLoss(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, priority, _ = super().learn(train, sample, key)
    return train, priority, {'entropy': jnp.float32(0)}


class Vector(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, priority, metrics = super().learn(train, sample, key)
    return train, priority, {**metrics, 'errors': jnp.zeros(3)}


class Priority(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, _, metrics = super().learn(train, sample, key)
    return train, metrics['loss'], metrics


class OtherParams(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, priority, metrics = super().learn(train, sample, key)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), train.params)
    return train._replace(params=half), priority, metrics


class OwnMetric(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, priority, metrics = super().learn(train, sample, key)
    return train, priority, {**metrics, 'mine': jnp.mean(sample.trajectory.timesteps.reward)}


class NoSgd(Good):
  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    def loss(params: Any) -> Any:
      return jnp.mean(params['w'] * sample.trajectory.timesteps.reward.mean())

    grads = jax.grad(loss)(train.params)
    updates, rest = optax.sgd(0.1).update(grads, train.rest)
    params = optax.apply_updates(train.params, updates)
    return TrainState(params, rest), jnp.ones_like(sample.weight), {'loss': jnp.float32(0)}

  def init(self, key: Any) -> TrainState:
    params = {'w': jnp.ones(3)}
    return TrainState(params, optax.sgd(0.1).init(params))

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    return ActorOutput(jnp.zeros(timestep.reward.shape, jnp.int32)), state


class NoSgdUnchecked(NoSgd):
  check_vma = False


class Averaged(NoSgd):
  """Without sgd, but right."""

  check_vma = False

  def learn(self, train: TrainState, sample: Sample, key: Any) -> Any:
    train, priority, metrics = super().learn(train, sample, key)
    return lax.pmean(train, 'data'), priority, metrics


WRONG_AGENTS = [
  (NoPair, 'act', r'returned ActorOutput\(action=int32\[8\].*expected a pair \(ActorOutput, state'),
  (OneAction, 'act', r'returned the action int32\[\], expected int32\[8\]: Discrete\(2'),
  (FloatAction, 'act', r'returned the action float32\[8\], expected int32\[8\]: Discrete\(2'),
  (Extras, 'act', r"the extras \['value'\] float32\[\], expected arrays of \[8, ...\], one for each"),
  (GrowingState, 'act', r'the state .*expected .*as `initial_state` does'),
  (NoTrainState, 'init', r"returned {'w': float32\[3\]}, expected a TrainState\(params, rest\)"),
  (Two, 'learn', r'returned \(TrainState.*expected a triple \(TrainState, priority, metrics\)'),
  (NoLoss, 'learn', r"the metrics {'entropy': float32\[\]}, expected a dict with 'loss'"),
  (Vector, 'learn', r"the metric 'errors' float32\[3\], expected a scalar"),
  (Priority, 'learn', r'the priority float32\[\], expected float32\[8\]'),
  (OtherParams, 'learn', r'the TrainState params.*float16\[.*, expected float32\[.*, as given'),
  (OwnMetric, 'learn', r"another metric 'mine' on each device, expected the mean over the devices"),
  (NoSgd, 'learn', r'other params on each device: a step without `sgd`, expected the same on all'),
  (NoSgdUnchecked, 'learn', r'without `sgd`'),
]  # fmt: skip


@pytest.mark.parametrize(
  ('cls', 'name', 'message', 'architecture'),
  [
    pytest.param(
      cls, name, message, architecture, id=f'{cls.__name__}-{architecture}',
      # One check serves both architectures: two of Sebulba's cases tell that it is called.
      marks=pytest.mark.slow if architecture == 'sebulba' and cls not in (NoPair, NoSgd) else (),
    )
    for cls, name, message in WRONG_AGENTS
    for architecture in ARCHITECTURES
  ],
)  # fmt: skip
def test_a_wrong_agent(cls: Any, name: str, message: str, architecture: str) -> None:
  with pytest.raises(UsageError, match=f'{name} .*{message}') as told:
    build.build(config(architecture, cls()))
  assert f'test_check.{cls.__name__}.{name} (' in str(told.value)
  assert line(cls, name) in str(told.value)


@dataclasses.dataclass(frozen=True)
class OwnNetwork(ActorCritic):
  def step(self, params: Any, state: Any, timestep: TimeStep) -> Any:
    raise KeyError('no such layer')


def test_a_network_of_ones_own_is_checked_with_our_agent() -> None:
  with pytest.raises(UsageError, match='KeyError') as told:
    build.build(config('anakin', Impala(network=OwnNetwork(hidden=(8,)))))
  assert 'podrace.agents.impala.Impala.act' in str(told.value)
  assert f'File "{__file__}"' in str(told.value)


@dataclasses.dataclass(frozen=True)
class Replaying(DQN):
  pass


@pytest.mark.parametrize('architecture', slow_after(1, *ARCHITECTURES))
def test_good_ones_of_ones_own_pass(architecture: str) -> None:
  replaying = Replaying(network=QNetwork(hidden=(8,)), buffer=Buffer(1000, 16, 100))
  for agent in (Good(), Averaged(), replaying):
    build.build(config(architecture, agent))


def test_what_podrace_brings_is_not_looked_at_again(monkeypatch: Patch) -> None:
  def refuse(*args: Any) -> None:
    raise AssertionError('it was')

  monkeypatch.setattr(check_agent, 'calling', refuse)
  monkeypatch.setattr(contract, 'rollout', refuse)
  for agent in (Impala(network=NETWORK), PPO(network=NETWORK)):
    build.build(Config(agent, num_envs=8, unroll_length=8))
  with pytest.raises(AssertionError, match='it was'):
    build.build(Config(Good(), num_envs=8, unroll_length=8))


@pytest.mark.parametrize('architecture', ARCHITECTURES)
def test_integers_are_no_actions_of_a_box(architecture: str) -> None:
  expected = r'int32\[8.*2\].*float32\[8.*2\].*Box'
  with pytest.raises(UsageError, match=expected):
    build.build(config(architecture, IntegersInABox(), 'test_check.wrapped,cls=Box'))


# --- actions ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bold(Good):
  """Acts out of the space."""

  action: float = 2.0

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    output, state = super().act(params, state, timestep, key)
    return output._replace(action=jnp.full(output.action.shape, self.action)), state


@pytest.mark.parametrize('architecture', slow_after(1, *ARCHITECTURES))
@pytest.mark.parametrize('action', slow_after(1, 2.0, -1.5, math.nan))
def test_actions_out_of_their_space_are_refused(
  action: float, architecture: str, tmp_path: Path
) -> None:
  wrong = config(architecture, Bold(action=action), 'test_check.wrapped,cls=Box')
  with pytest.raises(errors.RunError, match=r'Box\(-1.0, 1.0, \(2,\), float32\)') as told:
    loop.train(wrong, tmp_path / 'run', quiet=True)
  said = str(told.value)
  assert f'{line(Bold, "act")} returned the action [{action}, ' in said
  assert ('squash' in said) != math.isnan(action) and 'Traceback' not in said


@pytest.mark.slow
def test_actions_at_the_bounds_are_in_the_space(tmp_path: Path) -> None:
  good = config('anakin', Bold(action=1.0), 'test_check.wrapped,cls=Box')
  loop.train(good, tmp_path / 'run', quiet=True)


# --- words ----------------------------------------------------------------------------------------


def test_descriptions_are_short() -> None:
  assert blame.describe({'a': (jnp.ones(3), [jnp.int32(0)])}) == "{'a': (float32[3], [int32[]])}"
  assert blame.describe(Steps()) == 'Steps' and blame.describe(None) == 'None'
  assert len(blame.describe([jnp.ones(3)] * 100)) <= blame.MOST_LETTERS
