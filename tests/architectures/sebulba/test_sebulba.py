"""Sebulba does what Anakin does, whatever its threads' timing, and ends when it must."""

from __future__ import annotations

import dataclasses
import inspect
import random
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_files
from gymnasium import spaces
from shared_sebulba import shared_driver
from shorthand import Patch, slow_after

from podrace import topology
from podrace.agents.impala import Impala
from podrace.agents.intrinsic import Intrinsic
from podrace.agents.lpg import LPG
from podrace.agents.ppo import PPO
from podrace.agents.pqn import PQN
from podrace.architectures import sebulba as sebulba_
from podrace.architectures.anakin import Anakin
from podrace.architectures.sebulba import (
  ActingProgram,
  ActorFailed,
  Actors,
  SebulbaDriver,
  statistics,
)
from podrace.envs import make
from podrace.envs.host import base as host
from podrace.envs.host.jax import JaxPool, JaxSteps
from podrace.errors import RunError, UnknownName, UsageError
from podrace.experiments.bench import acting_program, advise, measure_inference, measure_threads
from podrace.networks import ActorCritic, LifetimeNetwork, PolicyPredictor, QNetwork
from podrace.replay import on_policy
from podrace.run import build
from podrace.settings.agents import bind
from podrace.topology import split_devices

SMALL = ActorCritic(hidden=(16,))
RECALLING = LifetimeNetwork(hidden=(8,), core_size=8)
AGENTS: dict[str, Any] = {
  'impala': Impala(network=SMALL),
  'ppo': PPO(network=SMALL, epochs=2, minibatches=2),
  'pqn': PQN(QNetwork(hidden=(16,), layer_norm=True), epochs=2, minibatches=2),
  'lpg': LPG(
    rule_files.small_lpg(),
    network=PolicyPredictor(hidden=(16,), predictions=rule_files.LPG.predictions),
  ),
  'intrinsic': Intrinsic(reward=RECALLING, value=RECALLING, episodes=2, period=3),
}
RECURRENT = {
  name: dataclasses.replace(a, network=dataclasses.replace(a.network, core='gru', core_size=8))
  for name, a in AGENTS.items()
  if name != 'intrinsic'  # it is always
}


def never() -> bool:
  return False


class Sebulba:
  """A Sebulba of the public builder, and the acting half if replay is not on the host."""

  def __init__(
    self, agent: Any, spec: Any, replay: Any, topology: Any, num_envs: int, length: int,
    threads: int = 2, host_replay: bool = False, build: Any = build.sebulba, **settings: Any,
  ) -> None:  # fmt: skip
    self.driver = build(
      agent, spec, replay, topology, num_envs, length, host_replay, threads=threads, **settings
    )
    self.learning, self.mesh, self.init, self.shapes = (
      self.driver.learning, self.driver.mesh, self.driver.init, self.driver.shapes,
    )  # fmt: skip

  @property
  def acting(self) -> ActingProgram:
    return acting_program(self.driver)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.acting, name)


def sebulba(
  agent: Any,
  env: str = 'podrace:catch',
  actors: str = '0',
  learners: str = '0',
  threads: int = 1,
  num_envs: int = 8,
  unroll_length: int = 4,
  spec: host.HostSpec | None = None,
  **settings: Any,
) -> Sebulba:
  spec = spec or host.make(env)
  settings = dict(lag='0', build=shared_driver) | settings
  return Sebulba(
    bind(agent, spec, 100), spec, on_policy(), split_devices(actors, learners),
    num_envs, unroll_length, threads, **settings,
  )  # fmt: skip


class Running:
  """A Sebulba under way; `advance` makes updates."""

  def __init__(self, program: Sebulba, seed: int = 0, driver: SebulbaDriver | None = None) -> None:
    self.program = program
    self.driver = driver or compiled(program)
    self.state = program.init(keys(seed))
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sebulba_.sources, 'Actors', self._make_actors)
      self.driver.start(self.state, keys(seed))

  def _make_actors(self, *args: Any) -> Actors:
    self.actors = Actors(*args)
    return self.actors

  def advance(self, updates: int) -> Any:
    while updates:  # a failure ends a call early, and is raised by the next one
      self.state, done = self.driver.advance(self.state, updates, never)
      updates -= done
    return self.state

  def __enter__(self) -> Running:
    return self

  def __exit__(self, *exc: object) -> None:
    self.driver.close()


class Learning:
  """A learning program whose batches `learn` learns from."""

  def __init__(self, program: Any, learn: Any) -> None:
    self._program, self.learn = program, learn

  def __getattr__(self, name: str) -> Any:
    return getattr(self._program, name)


def compiled(program: Sebulba) -> SebulbaDriver:
  program.driver.compile()
  return program.driver


def keys(seed: int) -> Any:
  return jax.vmap(jax.random.key)(np.array([seed], np.uint32))


def leaves(tree: Any) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same(one: Any, other: Any) -> None:
  for x, y in zip(leaves(one), leaves(other), strict=True):
    np.testing.assert_array_equal(x, y)


def assert_close(one: Any, other: Any, **tolerance: float) -> None:
  for x, y in zip(leaves(one), leaves(other), strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


# --- the promise: the same as under Anakin ---------------------------------------------------------


def anakin_params(agent: Any, env: str, updates: int, devices: int) -> tuple[Any, dict[str, Any]]:
  pure = make(env)
  bound = bind(agent, pure, 100)
  anakin = Anakin(bound, pure, on_policy(), topology.learner_mesh(devices), 8, 4)
  state = anakin.run(anakin.init(keys(0)), jnp.int32(updates))
  summary, state = anakin.read_log(state)
  return state.train.params, jax.device_get(summary)


TUNING = dataclasses.replace(RECURRENT['impala'], self_tuning=True)
ALL = {
  **AGENTS,
  **{f'{k}, recurrent': v for k, v in RECURRENT.items()},
  'impala, recurrent, self-tuning': TUNING,
  **{
    f'{k}, popart': dataclasses.replace(AGENTS[k], normalize_values=True) for k in ('impala', 'ppo')
  },
}


@pytest.mark.parametrize(
  ('name', 'threads'),
  slow_after(1,
    ('impala', 1), ('ppo', 2), ('impala, recurrent', 2), ('ppo, recurrent', 1), ('impala', 2),
    ('ppo, popart', 2), ('impala, popart', 1), ('pqn', 1), ('pqn', 2), ('pqn, recurrent', 1),
    ('ppo', 1), ('impala, recurrent', 1), ('ppo, recurrent', 2), ('lpg', 1), ('intrinsic', 1),
    ('lpg, recurrent', 2), ('impala, recurrent, self-tuning', 2),
  ),
)  # fmt: skip
def test_the_same_as_anakin(name: str, threads: int) -> None:
  """One actor thread acts like Anakin's one device, two like two; to float rounding.

  The programs are others, so XLA rounds differently; a different action would show as 1e-3.
  """
  agent = ALL[name]
  if 'recurrent' in name and 'ppo' in name and threads == 2:
    agent = dataclasses.replace(agent, minibatches=1)
  params, summary = anakin_params(agent, 'podrace:catch', 12, threads)
  with Running(sebulba(agent, threads=threads)) as run:
    state = run.advance(12)
    told, _ = run.driver.read_log(state)
  assert_close(params, state.train.params, rtol=2e-4, atol=2e-6)
  for field in ('episodes', 'return_sum', 'return_deviation', 'length_sum'):
    assert told[field] == pytest.approx(float(summary[field])), field
  assert told['episodes'] > 0
  assert told['metrics']['loss'] == pytest.approx(float(summary['metrics']['loss']), rel=1e-3)


# --- lag and determinism ---------------------------------------------------------------------------


def nap(numbers: random.Random) -> None:
  threading.Event().wait(numbers.choice([0, 0, 0, 0.005, 0.02]))


class Jitter:
  """A pool that sleeps at random before it answers."""

  def __init__(self, pool: Any, seed: int) -> None:
    self._pool, self._random = pool, random.Random(seed)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._pool, name)

  def recv(self) -> Any:
    nap(self._random)
    return self._pool.recv()


def jittery(monkeypatch: Patch, seed: int) -> None:
  from podrace.envs.host import jax as jax_pool

  plain = jax_pool.JaxPool
  count = iter(range(100))
  monkeypatch.setattr(
    jax_pool, 'JaxPool', lambda *args: Jitter(plain(*args), 100 * seed + next(count))
  )


def napping(monkeypatch: Patch, driver: SebulbaDriver, seed: int) -> None:
  """Has the learner sleep at random before it learns."""
  take, numbers = driver.source.take, random.Random(seed)

  def late(update: int, give_up: Any) -> Any:
    batch = take(update, give_up)
    nap(numbers)
    return batch

  monkeypatch.setattr(driver.source, 'take', late)


@pytest.mark.parametrize(('lag', 'seeds'), slow_after(1, ('1', 2), ('1', 5), ('0', 5)))
def test_timing_changes_nothing(lag: str, seeds: int, monkeypatch: Patch) -> None:
  program = sebulba(AGENTS['impala'], lag=lag, threads=2, actors='0,1', learners='2')
  driver = compiled(program)
  found = []
  for seed in range(seeds):
    with monkeypatch.context() as patch:
      jittery(patch, seed)
      napping(patch, driver, seed)
      with Running(program, driver=driver) as run:
        found.append(run.advance(6).train.params)
  for other in found[1:]:
    assert_same(found[0], other)


def lags(program: Sebulba, updates: int) -> tuple[float, int]:
  with Running(program) as run:
    told, _ = run.driver.read_log(run.advance(updates))
  return told['host']['policy_lag_mean'], told['host']['policy_lag_max']


def test_lag_is_what_it_is_set_to() -> None:
  assert lags(sebulba(AGENTS['impala'], lag='0'), 10) == (0.0, 0)
  mean, most = lags(sebulba(AGENTS['impala'], lag='1', threads=2, actors='0,1', learners='2'), 10)
  assert (mean, most) == (0.9, 1)  # the first unroll has no older parameters to act with


def test_a_version_that_is_gone_is_not_replaced() -> None:
  pipe, device = sebulba_.pipe.Pipe(groups=1, lag='1', max_lag=4), jax.devices()[0]
  for version in (5, 6):  # of a run that was resumed
    pipe.publish(version, {device: f'version {version}'})
  assert pipe.params(0, 5, device) == (5, 'version 5')  # there is no older one
  assert pipe.params(0, 7, device) == (6, 'version 6')
  pipe.publish(7, {device: 'version 7'})
  with pytest.raises(LookupError, match=r'unroll 6.*version 5.*\[6.*7\]'):
    pipe.params(0, 6, device)


@pytest.mark.parametrize('max_lag', slow_after(1, 3, 1, 2, 5))
def test_async_lag_is_bounded(max_lag: int, monkeypatch: Patch) -> None:
  jittery(monkeypatch, max_lag)
  devices: dict[str, Any] = dict(actors='0,1', learners='2', threads=2)
  _, most = lags(sebulba(AGENTS['impala'], lag='async', max_lag=max_lag, **devices), 20)
  assert most <= max_lag


@pytest.mark.slow
@pytest.mark.parametrize('lag', [pytest.param('1', marks=pytest.mark.slow), 'async'])
def test_waiting_for_the_learner_is_told_as_waiting(lag: str, monkeypatch: Patch) -> None:
  """Parameters are published before they are computed; who has taken them has waited for them."""
  computed: list[bool] = []
  taken: list[Any] = []
  take, use = sebulba_.lockstep.Lockstep.take_params, sebulba_.inference.Inference.use

  def noted(actor: Any) -> None:
    take(actor)
    computed.extend(x.is_ready() for x in jax.tree.leaves(taken[-1]))

  def used(inference: Any, version: int, params: Any) -> None:
    taken.append(params)
    use(inference, version, params)

  @dataclasses.dataclass(frozen=True)
  class Slow(Impala):
    def learn(self, train: Any, sample: Any, key: Any) -> Any:
      train, priority, metrics = super().learn(train, sample, key)
      x = jnp.ones((500, 500)) * metrics['loss']
      x = jax.lax.fori_loop(0, 40, lambda i, x: jnp.cos(x @ x), x)
      return train, priority, {**metrics, 'worked': x[0, 0]}

  monkeypatch.setattr(sebulba_.lockstep.Lockstep, 'take_params', noted)
  monkeypatch.setattr(sebulba_.inference.Inference, 'use', used)
  with Running(sebulba(Slow(network=SMALL), lag=lag)) as run:
    run.advance(6)
  assert len(computed) >= 6
  assert all(computed)


def test_statistics_of_several_processes_are_doubles(monkeypatch: Patch) -> None:
  totals = dict(count=3, return_sum=1e7 + 0.1, return_square=1e14 + 1, length_sum=2**24 + 1)
  told = statistics.Statistics(totals, unrolls=2, lag_max=1, restarts=5, seconds={'env': 1.0})

  def gather(x: Any) -> Any:
    return np.stack([np.asarray(jnp.asarray(x))] * 2)  # what JAX does to it

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(topology.multihost_utils, 'process_allgather', gather)
  both = told.over_processes()
  assert both.episodes == {k: 2 * x for k, x in totals.items()}
  assert (both.unrolls, both.lag_max, both.restarts) == (4, 1, 10)


# --- learning --------------------------------------------------------------------------------------

LEARNERS = {
  'impala': (Impala(network=ActorCritic(hidden=(64,), initializer='lecun', activation='relu'),
                    learning_rate=3e-3), 250),
  'ppo': (PPO(network=ActorCritic(hidden=(64,)), learning_rate=3e-3, anneal_learning_rate=False,
              epochs=4, minibatches=2), 120),
}  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'devices', 'lag'),
  slow_after(0,
    ('impala', 1, '1'), ('ppo', 8, 'async'), ('impala', 1, '0'), ('impala', 1, 'async'),
    ('impala', 8, '0'), ('impala', 8, '1'), ('impala', 8, 'async'), ('ppo', 1, '0'),
    ('ppo', 1, '1'), ('ppo', 1, 'async'), ('ppo', 8, '0'), ('ppo', 8, '1'),
  ),
)  # fmt: skip
def test_learns_catch(name: str, devices: int, lag: str) -> None:
  agent, updates = LEARNERS[name]
  actors, learners = ('0', '0') if devices == 1 else ('0,1', '2,3,4,5,6,7')
  program = sebulba(
    agent, actors=actors, learners=learners, threads=2,
    num_envs=96, unroll_length=18, lag=lag,
  )  # fmt: skip
  with Running(program) as run:
    run.driver.read_log(run.advance(updates))
    run.driver.read_log(run.state)
    told, _ = run.driver.read_log(run.advance(8))
  assert told['episodes'] >= 900
  assert told['return_sum'] / told['episodes'] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(('ends', 'value'), [('Truncated', 10.0), ('Terminated', 2.26)])
@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_time_limits_are_bootstrapped(name: str, ends: str, value: float) -> None:
  """A reward of 1 for ever is worth 1 / (1 - 0.9); for 4 steps at most 2.26, the mean of the
  3.44, 2.71, 1.9 and 1 of four states that look the same."""
  agent = dataclasses.replace(AGENTS[name], discount=0.9, learning_rate=0.02, entropy_cost=0.0)
  program = sebulba(agent, f'gymnasium:host_envs:{ends}-v0', num_envs=4, unroll_length=20)
  with Running(program) as run:
    params = run.advance(120).train.params
  output, _ = program.agent.network.step(params.network, (), first_of(program.example))
  np.testing.assert_allclose(output.value, value, rtol=0.15)


def first_of(timestep: Any) -> Any:
  observation: Any = np.ones_like(timestep.observation)
  return timestep._replace(observation=observation)


# --- across devices --------------------------------------------------------------------------------


def test_collectives() -> None:
  """Two devices act, six learn: one all-reduce for each gradient step, no all-gather."""
  program = sebulba(AGENTS['impala'], actors='0,1', learners='2,3,4,5,6,7', threads=1, num_envs=12)
  learning = program.learning
  s, i = learning.shapes, jax.ShapeDtypeStruct((), jnp.int32)
  state = s.train.params, s.train.rest, s.memory, s.log, s.key, s.update
  text = learning.jitted.lower(*state, i, learning.batch).compile().as_text()
  assert text.count(' all-reduce(') + text.count(' all-reduce-start(') == 1
  assert 'all-gather' not in text
  assert 'all-to-all' not in text


class Moves:
  """What the actors ship and the learner publishes, as `jax.device_put` is given and gives it."""

  def __init__(self, monkeypatch: Patch) -> None:
    self.shipped: list[Any] = []
    self.published: list[Any] = []
    self._put, self._get = jax.device_put, jax.device_get
    monkeypatch.setattr(jax, 'device_put', self.device_put)
    monkeypatch.setattr(jax, 'device_get', self.device_get)
    for module in (
      sebulba_.unrolls, sebulba_.lockstep, sebulba_.inference, sebulba_.group, sebulba_.actors,
      sebulba_.learning,
    ):  # fmt: skip
      monkeypatch.setattr(module, 'np', self)

  def __getattr__(self, name: str) -> Any:
    return getattr(np, name)

  def device_put(self, x: Any, device: Any = None) -> Any:
    y = self._put(x, device)
    caller = inspect.currentframe().f_back.f_code.co_qualname  # type: ignore[union-attr]
    if caller.startswith('move_parts'):
      self.shipped += jax.tree.leaves((x, y))
    if caller.startswith('Actors.publish'):
      self.published += jax.tree.leaves((x, y))
    return y

  def device_get(self, x: Any) -> Any:
    self._unread(x)
    return self._get(x)

  def asarray(self, x: Any, *args: Any) -> Any:
    self._unread(x)
    return np.asarray(x, *args)

  def _unread(self, x: Any) -> None:
    moved = {id(y) for y in [*self.shipped, *self.published]}
    assert not any(id(y) in moved for y in jax.tree.leaves(x)), 'what was moved is read'


def test_nothing_goes_through_the_host(monkeypatch: Patch) -> None:
  """From actor to learner devices and back, arrays are moved by `device_put` and never read."""
  program = sebulba(AGENTS['impala'], actors='0', learners='2,3', threads=1, lag='async')
  actors, learners = set(program.devices), set(program.destinations)
  driver = compiled(program)
  moves = Moves(monkeypatch)
  with Running(program, driver=driver) as run:
    run.advance(2)
    unrolls = run.actors.take(2, never)
    # another library's arrays, or ours that are nowhere in particular, came from the host
    for arrays in (moves.shipped, moves.published):
      assert arrays
      assert all(isinstance(x, jax.Array) and x.committed for x in arrays)
      assert {d for x in arrays for d in x.devices()} <= actors | learners
    parts = jax.tree.leaves([u.parts for u in unrolls])
    assert {d for x in parts for d in x.devices()} == learners
    with (  # of which the CPU's arrays know nothing
      jax.transfer_guard_device_to_host('disallow'),
      jax.transfer_guard_host_to_device('disallow'),
    ):
      monkeypatch.setattr(run.actors, 'take', lambda *args: unrolls)
      joined = run.driver.source.take(2, never).data
    assert all(x.sharding.mesh == program.mesh for x in jax.tree.leaves(joined))


# --- failures --------------------------------------------------------------------------------------


class Sick:
  """A pool that does something wrong at its n-th answer."""

  def __init__(self, pool: Any, at: int, wrong: Any) -> None:
    self._pool, self._at, self._wrong, self._count = pool, at, wrong, 0

  def __getattr__(self, name: str) -> Any:
    return getattr(self._pool, name)

  def recv(self) -> Any:
    self._count += 1
    arrival = self._pool.recv()
    return self._wrong(arrival) if self._count == self._at else arrival


def explode(arrival: Any) -> Any:
  raise ZeroDivisionError('the game broke')


def test_of_several_processes_none_ends_a_call_early(monkeypatch: Patch) -> None:
  """It would ask the others what to do next while they wait for its gradients."""
  from podrace.envs.host import jax as jax_pool

  plain = jax_pool.JaxPool
  monkeypatch.setattr(jax_pool, 'JaxPool', lambda *args: Sick(plain(*args), 20, explode))
  with Running(sebulba(AGENTS['impala'])) as run:
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(ActorFailed, match='the game broke'):
      run.driver.advance(run.state, 50, never)


def observing(change: Any) -> Any:
  def wrong(arrival: Any) -> Any:
    timestep = arrival.timestep
    return arrival._replace(timestep=timestep._replace(observation=change(timestep.observation)))

  return wrong


def nan_in_row_3(x: np.ndarray) -> np.ndarray:
  x = x.copy()
  x[3, 0, 0] = np.nan
  return x


@pytest.mark.parametrize(
  ('wrong', 'message'),
  slow_after(2,
    (explode, 'ZeroDivisionError'),
    (observing(nan_in_row_3), r'observation.*environment \[3\].*NaN'),
    (observing(lambda x: x[:, :9]), r'observation.*\(9.*5\).*\(10.*5\)'),
    (observing(lambda x: x.astype(np.float64)), r'observation.*float64.*float32'),
    (lambda a: a._replace(timestep=a.timestep._replace(reward=a.timestep.reward * np.inf)), r'reward.*NaN'),
  ),
)  # fmt: skip
def test_what_an_environment_does_wrong_is_told(
  wrong: Any, message: str, monkeypatch: Patch
) -> None:
  from podrace.envs.host import jax as jax_pool

  plain = jax_pool.JaxPool
  monkeypatch.setattr(jax_pool, 'JaxPool', lambda *args: Sick(plain(*args), 20, wrong))
  with Running(sebulba(AGENTS['impala'])) as run, pytest.raises(ActorFailed, match=message):
    run.advance(50)


def test_an_action_outside_of_the_space_is_told() -> None:
  @dataclasses.dataclass(frozen=True)
  class Wild(Impala):
    def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
      output, state = super().act(params, state, timestep, key)
      return output._replace(action=output.action + 7), state

  told = pytest.raises(ActorFailed, match=r'Wild.act.*Discrete\(3')
  program = sebulba(Wild(network=SMALL))
  with Running(program, driver=program.driver) as run, told:  # before anything is learned
    run.advance(5)


def test_a_pool_whose_actor_can_not_be_is_closed(monkeypatch: Patch) -> None:
  from podrace.envs.host import jax as jax_pool

  closed: list[Any] = []
  monkeypatch.setattr(jax_pool.JaxPool, 'close', lambda pool: closed.append(pool))
  program = sebulba(AGENTS['impala'], threads=2)
  spec = dataclasses.replace(program.spec, action_space=spaces.Text(3))
  state = program.init(keys(0))
  with pytest.raises(UnknownName, match=r'Box.*Text'):
    acting = dataclasses.replace(program.acting, spec=spec)
    Actors(acting, {0: state.train.params}, state.key, jax.random.key(0))
  assert len(closed) == 1


def test_environments_that_hang_are_noticed(monkeypatch: Patch) -> None:
  from podrace.envs.host import jax as jax_pool

  plain = jax_pool.JaxPool
  forever = threading.Event()

  def hang(arrival: Any) -> Any:
    forever.wait(30)
    return arrival

  monkeypatch.setattr(jax_pool, 'JaxPool', lambda *args: Sick(plain(*args), 20, hang))
  with Running(sebulba(AGENTS['impala'], deadline=0.2)) as run:
    with pytest.raises(ActorFailed, match='thread 0'):
      run.advance(50)
    forever.set()


@pytest.mark.slow
def test_environments_that_hang_while_they_reset_are_noticed(monkeypatch: Patch) -> None:
  from podrace.envs.host import jax as jax_pool

  forever = threading.Event()
  program = sebulba(AGENTS['impala'], deadline=0.2)
  driver = compiled(program)
  monkeypatch.setattr(jax_pool.JaxPool, 'reset', lambda pool: forever.wait(30))
  with Running(program, driver=driver) as run:
    with pytest.raises(ActorFailed, match='thread 0'):
      run.driver.advance(run.state, 1, over_in(20))
    forever.set()


def test_every_pool_of_stuck_threads_is_killed_although_none_can_be(monkeypatch: Patch) -> None:
  from podrace.envs.host import jax as jax_pool

  forever, killed = threading.Event(), list[Any]()

  def kill(pool: Any) -> None:
    killed.append(pool)
    raise OSError('it cannot be killed')

  program = sebulba(AGENTS['impala'], threads=2, groups=2)
  driver = compiled(program)
  monkeypatch.setattr(jax_pool.JaxPool, 'reset', lambda pool: forever.wait(30))
  monkeypatch.setattr(jax_pool.JaxPool, 'kill', kill)
  with Running(program, driver=driver) as run:
    with monkeypatch.context() as patch, pytest.raises(OSError, match='it cannot be killed'):
      patch.setattr('podrace.architectures.sebulba.actors.CLOSE_SECONDS', 0.1)
      run.actors.close()
    assert killed == run.actors.pools[::-1]
    forever.set()


def over_in(seconds: float) -> Any:
  """For `give_up`."""
  end = time.monotonic() + seconds
  return lambda: time.monotonic() > end


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (dict(num_envs=9, threads=2), r'--num-envs 9.*2.*8.*10.*2'),
    (dict(actors='0', learners='1,2,3', num_envs=8), r'6.*9.*3 learner'),
    (dict(batch_size=3), r'--env-batch-size 3.*8'),
    (dict(batch_size=4, spec='gymnasium:CartPole-v1'), r'--lag async.*0'),
    (dict(batch_size=4), 'podrace:catch comes in order only'),
    (dict(batch_size=4, lag='async'), 'podrace:catch comes in order only'),
    (dict(actors='0,9'), r'--actor-devices 0,9.*device 9.*8.*JAX_NUM_CPU_DEVICES=10'),
    (dict(actors='0,9', learners='3,11'), r'device 9.*8.*JAX_NUM_CPU_DEVICES=12'),
    (dict(actors='0,0'), 'device'),
    (dict(learners='x'), r"--learner-devices.*0,1.*'x'"),
  ],
)
def test_sizes_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
  if 'spec' in settings:
    settings = {**settings, 'spec': host.make(settings['spec'])}
  with pytest.raises(ValueError, match=message):
    sebulba(AGENTS['impala'], **settings)


def test_environments_in_jax_need_the_cpu(monkeypatch: Patch) -> None:
  """Which JAX has not where it was told of accelerators only."""
  spec = host.make('podrace:catch')
  local_devices = jax.local_devices

  def no_cpu(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    if backend == 'cpu':
      raise RuntimeError("Unknown backend cpu. Available backends are ['cuda']")
    return local_devices(*args, backend=backend, **kwargs)

  monkeypatch.setattr(jax, 'local_devices', no_cpu)
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  for lag in ('1', 'async'):
    with pytest.raises(UsageError, match=r'=cuda.*JAX_PLATFORMS=cuda,cpu'):
      sebulba(AGENTS['impala'], spec=spec, lag=lag)


def test_environments_in_jax_are_given_nothing_from_other_devices() -> None:
  steps = JaxSteps(make('podrace:catch'), 2, 4)
  pool = JaxPool(steps, jax.random.key(0), lambda number: jax.random.key(1))
  step, given = steps.step, []
  steps.step = lambda *args: given.extend(jax.tree.leaves(args)) or step(*args)
  with jax.default_device(jax.devices()[3]):  # an actor thread's
    pool.reset()
    pool.recv()
    pool.send(np.arange(2), np.zeros(2, np.int32))
    pool.recv()
  assert {d for x in given if isinstance(x, jax.Array) for d in x.devices()} == {jax.devices()[0]}


def test_devices_by_default() -> None:
  every = split_devices()
  assert [d.id for d in every.actors] == [0, 1]
  assert [d.id for d in every.learners.devices.flat] == [2, 3, 4, 5, 6, 7]
  alone = split_devices(num_devices=1)
  assert [d.id for d in alone.actors] == [d.id for d in alone.learners.devices.flat] == [0]


@pytest.mark.parametrize(
  ('given', 'actors', 'learners'),
  [
    (dict(learners='0,1'), [2, 3, 4, 5, 6, 7], [0, 1]),
    (dict(learners='0,1', num_devices=4), [2, 3], [0, 1]),
    (dict(learners='0,1,2,3,4,5,6'), [7], [0, 1, 2, 3, 4, 5, 6]),
    (dict(actors='6'), [6], [0, 1, 2, 3, 4, 5, 7]),
    (dict(learners='0', num_devices=1), [0], [0]),
    (dict(actors='0', num_devices=1), [0], [0]),
    (dict(actors='0,1', learners='0,1'), [0, 1], [0, 1]),
  ],
)
def test_devices_where_some_are_chosen(
  given: dict[str, Any], actors: list[int], learners: list[int]
) -> None:
  found = split_devices(**given)
  assert [d.id for d in found.actors] == actors
  assert [d.id for d in found.learners.devices.flat] == learners


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (dict(actors='5', num_devices=2), r'--actor-devices 5.*device 5.*2.*--devices 2.*0$'),
    (dict(actors='0', learners='2', num_devices=2), r'--learner-devices 2.*device 2.*2'),
    (dict(actors='0,1', num_devices=2), r'--actor-devices 0,1.*2'),
    (dict(learners='1,0', num_devices=2), r'--learner-devices 1,0.*2'),
  ],
)
def test_devices_that_cannot_be(given: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    split_devices(**given)


def test_processes_with_other_numbers_of_devices(monkeypatch: Patch) -> None:
  class Device(NamedTuple):
    process_index: int

  monkeypatch.setattr(jax, 'devices', lambda: [Device(0)] * 8 + [Device(1)] * 4)
  with pytest.raises(ValueError, match=r'device 7.*8.*4'):
    split_devices()


def test_steps_are_compiled_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
  own = build.sebulba  # whose programs nothing has compiled
  program = sebulba(AGENTS['impala'], actors='0', learners='1', threads=2, build=own)
  driver = compiled(program)
  jax.config.update('jax_log_compiles', True)  # in all threads
  try:
    measure_inference(program, program.init(keys(0)), 0.1)
    with Running(program, driver=driver) as run:
      run.advance(2)
  finally:
    jax.config.update('jax_log_compiles', False)
  compiled_late = [x for x in caplog.messages if 'XLA compilation of jit' in x]
  assert compiled_late and not any('jit(step)' in x for x in compiled_late)


def test_bench_tells_where_threads_do_not_pay() -> None:
  slow, fast = dict(combined=1.0, parallel=2.0), dict(combined=2.0, parallel=1.0)
  one, two = (sebulba(AGENTS['impala'], threads=n) for n in (1, 2))
  assert 'try --actor-threads 1' in advise(two, slow)
  assert not advise(two, fast) and not advise(one, slow)


def test_bench_waits_for_nobody_for_ever(monkeypatch: Patch) -> None:
  monkeypatch.setattr('podrace.experiments.bench.PATIENCE', 0.3)
  for calls in (0, 1):  # it hangs at first, or later on
    forever, answers = threading.Event(), iter([1] * calls)
    with pytest.raises(RunError, match='has not answered'):
      measure_threads([lambda: 1, lambda: next(answers, 0) or forever.wait(60)], 0.1)
    forever.set()


def test_bench_tells_what_a_stage_raises() -> None:
  def explode() -> int:
    raise ZeroDivisionError('the game broke')

  with pytest.raises(ZeroDivisionError, match='the game broke'):
    measure_threads([lambda: 1, explode], 0.1)
