"""Sebulba with environments that come, go and straggle: what is learned from, and from whom."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import numpy as np
import peers
import pytest
from gymnasium import spaces
from peers import ANY, Raw
from test_sebulba import AGENTS, RECURRENT, SMALL, Running, never, sebulba

from podrace.agents.impala import Impala
from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.server import Server
from podrace.distributed.net import session_messages
from podrace.distributed.net.listener import Listen
from podrace.envs.host import base as host
from podrace.envs.host import timesteps
from podrace.run import build
from podrace.types import FIRST, LAST, MID, Arrival


class Coming:
  """A pool of which any number is there; they number their steps, and tell their lives.

  `speed` are the probabilities with which environments return; 0: never there. A life ends with
  probability `deaths` at each step.
  """

  watches_itself = True

  def __init__(self, args: host.PoolArgs, speed: Any, deaths: float, seed: int) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self.speed, self._deaths = np.resize(speed, args.num_envs), deaths
    self._random = np.random.default_rng(seed)
    self._asked = np.zeros(args.num_envs, bool)
    self._steps = np.full(args.num_envs, -1)
    self._life = np.zeros(args.num_envs, np.int64)
    self._action = np.zeros(args.num_envs, np.float32)
    self._stepper = timesteps.Stepper(args.num_envs)

  def reset(self) -> None:
    self._asked[:] = True

  def send(self, env_id: np.ndarray, action: Any) -> None:
    assert not self._asked[env_id].any()
    self._asked[env_id] = True
    self._action[env_id] = action

  def recv(self) -> Any:
    ready = self._asked & (self._random.random(self.num_envs) < self.speed)
    ids = self._random.permutation(np.flatnonzero(ready)).astype(np.int32)
    self._asked[ids] = False
    self._steps[ids] += 1
    died = ids[(self._random.random(len(ids)) < self._deaths) & (self._steps[ids] > 0)]
    self._life[died] += 1
    self._steps[died] = 0
    self._stepper.reopen(died)
    steps = self._steps[ids]
    observation = np.stack([ids, self._life[ids], steps, self._action[ids]], axis=1)
    none = np.zeros(len(ids), bool)
    timestep: Any = self._stepper.timestep(
      ids, observation.astype(np.float32), steps.astype(np.float32), steps % 6 == 5, none
    )
    return Arrival(ids, timestep, timestep.reward, timestep.last, self._life[ids])

  def close(self) -> None: ...

  def kill(self) -> None: ...


def coming(speed: Any, deaths: float) -> host.HostSpec:
  seeds = itertools.count()
  return host.HostSpec(
    'coming', spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(5),
    lambda args: Coming(args, speed, deaths, next(seeds)), comes_and_goes=True,
  )  # fmt: skip


def program(speed: Any = 1.0, deaths: float = 0.0, **settings: Any) -> Any:
  settings = {'num_envs': 8, 'unroll_length': 5, 'lag': 'async', **settings}
  agent = settings.pop('agent', Impala(network=SMALL))
  return sebulba(agent, spec=coming(speed, deaths), **settings)


def noted(run: Any) -> list[Any]:
  """What is learned from, from now on: (version, update, environment, observations, actions, kinds)."""
  pieces: list[Any] = []
  take = run.actors.take

  def taking(update: int, give_up: Any) -> Any:
    unrolls = take(update, give_up)
    for unroll in unrolls or ():
      (trajectory,) = jax.tree.map(np.asarray, unroll.parts)
      for i, env in enumerate(trajectory.env_id):
        pieces.append((
          unroll.version, update, int(env), trajectory.timesteps.observation[:, i],
          trajectory.outputs.action[:, i], trajectory.timesteps.step_type[:, i],
        ))  # fmt: skip
    return unrolls

  run.actors.take = taking
  return pieces


def assert_pieces_of_lives(pieces: list[Any], per_thread: int) -> None:
  """Each is a piece of one life without a gap, with the actions that were done; none comes twice."""
  seen = set()
  for _, _, env, steps, actions, kinds in pieces:
    assert (steps[:, 0] == env % per_thread).all() and (steps[:, 1] == steps[0, 1]).all()
    np.testing.assert_array_equal(np.diff(steps[:, 2]), 1)
    np.testing.assert_array_equal(steps[1:, 3], actions)
    np.testing.assert_array_equal(kinds[1:] == FIRST, kinds[:-1] == LAST)
    key = (env, int(steps[0, 1]), int(steps[0, 2]))
    assert key not in seen
    seen.add(key)


@pytest.mark.parametrize('threads', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stragglers_and_the_dead_hold_nobody_up(threads: int) -> None:
  """One environment of eight is ten times slower than the others, and one never comes."""
  speeds = [1, 1, 0.8, 0.9, 1, 0.1, 1, 0]
  with Running(program(speeds, num_envs=8 * threads, threads=threads)) as run:
    pieces = noted(run)
    run.advance(30)
    told, _ = run.driver.read_log(run.state)
  assert_pieces_of_lives(pieces, 8)
  assert len(pieces) == 30 * 8 * threads
  counts = np.bincount([p[2] % 8 for p in pieces], minlength=8)
  assert counts[7] == 0 and counts[:5].min() > 30 and told['host']['policy_lag_max'] <= 4


@pytest.mark.slow
def test_one_environment_fills_the_batches_alone() -> None:
  with Running(program([0, 0, 0, 1, 0, 0, 0, 0], max_lag=1)) as run:
    pieces = noted(run)
    run.advance(5)
  assert_pieces_of_lives(pieces, 8)
  assert [p[2] for p in pieces] == [3] * 40


@pytest.mark.slow
def test_a_thread_without_environments_does_not_hold_up_the_other() -> None:
  """Two threads: the second's environments die out, with half of a trajectory finished."""
  with Running(program(1.0, num_envs=16, threads=2)) as run:
    run.advance(3)
    run.actors.pools[1].speed[:] = 0
    pieces = noted(run)
    run.advance(20)
  assert_pieces_of_lives(pieces, 8)
  assert {p[2] // 8 for p in pieces[-8 * 10 :]} == {0}


@pytest.mark.parametrize(
  'max_lag', [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_deaths_lose_partial_unrolls_only_and_lag_is_bounded(max_lag: int) -> None:
  speeds = [1, 1, 0.5, 0.3, 1, 0.2, 1, 0.05]
  with Running(program(speeds, 0.02, max_lag=max_lag, num_envs=16, threads=2)) as run:
    pieces = noted(run)
    run.advance(30)
    told, _ = run.driver.read_log(run.state)
  assert_pieces_of_lives(pieces, 8)
  assert told['host']['env_restarts'] > 20
  assert told['host']['dropped_steps'] >= told['host']['env_restarts'] / 2
  assert all(update - version <= max_lag for version, update, *_ in pieces)
  assert told['host']['policy_lag_max'] <= max_lag


def come_and_go(address: str, stop: threading.Event) -> None:
  """Clients whose groups have one size after the other, so that each batch has just that."""
  for size in itertools.cycle([1, 2, 3, 5, 8]):
    with Raw(address) as raw:
      raw.join_as()
      raw.enter(size)
      for seq in range(60):
        raw.step(size, seq, FIRST if seq == 0 else MID)
        while (heard := raw.hear(0.2)) is None:
          if stop.is_set():
            return
        assert heard[0] is environment_messages.ACTION and list(heard[1]) == [0, seq]
      raw.say(session_messages.BYE, 'enough')


def test_whatever_comes_together_nothing_is_compiled_in_the_run() -> None:
  """Sizes are padded to a few, whose programs are compiled before; clients come over the network."""
  compiled: list[str] = []

  def note(event: str, seconds: float, **_: Any) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  server = Server(Listen(ANY), 8, max_wait=0.001)
  spec = server.spec(peers.spec())
  own = build.sebulba  # whose programs nothing has compiled
  it = sebulba(
    Impala(network=SMALL), spec=spec, num_envs=8, unroll_length=5, lag='async', build=own
  )
  assert it.sizes == (1, 2, 4, 8)
  stop = threading.Event()
  with server, Running(it) as run:
    jax.monitoring.register_event_duration_secs_listener(note)
    client = threading.Thread(target=come_and_go, args=(server.address, stop))
    client.start()
    try:
      (pool,) = run.actors.pools
      while not (seen := {1, 2, 3, 5, 8} <= set(pool.batches)) and client.is_alive():
        run.state, _ = run.driver.advance(run.state, 1, lambda: not client.is_alive())
      assert seen and not compiled
      jax.jit(lambda x: x + 123)(np.float32(1))  # so much for the listener
      assert len(compiled) == 1
    finally:
      stop.set()
      client.join()


@pytest.mark.parametrize(
  'agent',
  [
    pytest.param(AGENTS['ppo'], id='ppo'),
    pytest.param(RECURRENT['impala'], id='recurrent', marks=pytest.mark.slow),
  ],
)
def test_every_agent_learns_from_them(agent: Any) -> None:
  with Running(program([1, 0.5], 0.01, unroll_length=4, agent=agent)) as run:
    before = jax.device_get(run.state.train.params)
    state = run.advance(4)
    told, _ = run.driver.read_log(state)
  assert np.isfinite(told['metrics']['loss'])
  changed = jax.tree.map(lambda x, y: np.any(x != y), before, jax.device_get(state.train.params))
  assert any(jax.tree.leaves(changed))


def test_lag_must_be_async() -> None:
  with pytest.raises(ValueError, match=r'coming.* --lag async'):
    program(lag='1')


assert never
