"""Actor threads go on from a checkpoint's folder to the bit, or begin anew and say why."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shorthand import Patch, slow_after
from test_sebulba import RECURRENT, SMALL, Running, compiled, keys, never, over_in, sebulba

from podrace.agents.impala import Impala
from podrace.architectures.hashes import params_sha256
from podrace.architectures.sebulba import (
  ActingProgram,
  ActorFailed,
  SebulbaDriver,
  saved_actors,
)
from podrace.architectures.sebulba.saved_actors import FILE
from podrace.envs.host import base as host
from podrace.envs.host.envpool import EnvPool
from podrace.envs.host.worker_pool import WorkerPool
from podrace.errors import CheckpointError

Saved = tuple[Any, dict[str, Any], str]  # a state, its record, and the parameters later on

CASES: dict[str, tuple[str, dict[str, Any]]] = {
  'gymnasium': ('gymnasium:CartPole-v1', dict(lag='1', threads=2, env_threads=2)),
  'envpool': ('envpool:CartPole-v1', dict(lag='1', threads=2, env_threads=1)),
  'jax': ('podrace:catch', dict(lag='1', threads=2)),
  'atari': ('ale:breakout', dict(lag='0', env_threads=2)),
}


@pytest.fixture(autouse=True)
def in_a_file(monkeypatch: Patch) -> None:
  """Environments in JAX too, as in a run of several processes."""
  monkeypatch.setattr(ActingProgram, 'saves_actors', False)


def made(case: str, **settings: Any) -> Any:
  env, own = CASES[case]
  return sebulba(RECURRENT['impala'], env, **{**own, **settings})


def run_on(driver: SebulbaDriver, state: Any, updates: int) -> Any:
  while updates:
    state, done = driver.advance(state, updates, never)
    updates -= done
  return state


def saved_at(program: Any, folder: Path, before: int = 9, after: int = 9) -> Saved:
  """A run that is saved on its way."""
  with Running(program) as run:
    run.advance(before)
    write = run.driver.saved_replay.save(folder)
    copy = jax.tree.map(jnp.copy, run.state)
    run.advance(after)
    return copy, write(), params_sha256(run.state.train.params)


def resumed(program: Any, folder: Path, state: Any, record: Any, updates: int = 9) -> str:
  return resumed_by(compiled(program), folder, state, record, updates)


def resumed_by(driver: SebulbaDriver, folder: Path, state: Any, record: Any, updates: int) -> str:
  driver.saved_replay.restore(folder, record)
  driver.start(state, keys(0))
  try:
    return params_sha256(run_on(driver, state, updates).train.params)
  finally:
    driver.close()


@pytest.mark.parametrize('case', slow_after(2, *CASES))
def test_actors_go_on_to_the_bit(
  case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  state, record, expected = saved_at(made(case), tmp_path / '9')
  assert record['actors']['groups'] == CASES[case][1].get('threads', 1)
  with caplog.at_level(logging.WARNING):
    assert resumed(made(case), tmp_path / '9', state, record) == expected
  assert 'anew' not in caplog.text


def test_without_their_states_they_begin_anew_and_say_so(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  state, record, expected = saved_at(made('envpool'), tmp_path / '9')
  other_groups = {**record, 'actors': {**record['actors'], 'groups': 3}}
  none_kept = {**record, 'actors': {'groups': 0, 'life': 0}}
  driver = compiled(made('envpool'))
  for less in (None, {}, other_groups, none_kept, {**record, 'processes': 2}):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      copy = jax.tree.map(jnp.copy, state)
      assert resumed_by(driver, tmp_path / '9', copy, less, 3) != expected
    assert caplog.text.count('anew') == 1


@pytest.mark.slow
def test_environments_that_return_other_rewards_begin_anew(
  tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
  state, record, expected = saved_at(made('gymnasium'), tmp_path / '9')
  restore = WorkerPool.restore

  def with_other_rewards(self: WorkerPool, saved: Any, on_step: Any) -> Any:
    arrival = restore(self, saved, on_step)
    reward = arrival.timestep.reward + 1
    return arrival._replace(timestep=arrival.timestep._replace(reward=reward))

  monkeypatch.setattr(WorkerPool, 'restore', with_other_rewards)
  assert resumed(made('gymnasium'), tmp_path / '9', state, record, 3) != expected
  assert caplog.text.count('rewards') == 2 and 'anew' in caplog.text


@pytest.mark.slow
def test_environments_that_hang_while_they_are_replayed_are_noticed(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  state, record, _ = saved_at(made('envpool'), tmp_path / '9')
  forever, count = threading.Event(), itertools.count()
  recv = EnvPool.recv

  def hang(self: EnvPool) -> Any:
    if next(count) == 5:
      forever.wait(30)
    return recv(self)

  monkeypatch.setattr(EnvPool, 'recv', hang)
  program = made('envpool', deadline=0.2)
  driver = compiled(program)
  driver.saved_replay.restore(tmp_path / '9', record)
  driver.start(state, keys(0))
  try:
    with pytest.raises(ActorFailed, match='thread 0'):
      driver.advance(state, 1, over_in(20))
  finally:
    forever.set()
    driver.close()


@pytest.mark.slow
def test_states_beyond_the_largest_file_are_left_out(
  tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
  monkeypatch.setattr(saved_actors, 'BYTES', 100)
  state, record, expected = saved_at(made('gymnasium'), tmp_path / '9')
  assert record['actors']['groups'] == 0 and 'are not saved' in caplog.text
  assert resumed(made('gymnasium'), tmp_path / '9', state, record, 3) != expected


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
  _, record, _ = saved_at(made('envpool'), tmp_path / '9', after=0)
  file = tmp_path / '9' / FILE
  whole = file.read_bytes()
  driver = compiled(made('envpool'))

  def refused(record: Any = record) -> None:
    with pytest.raises(CheckpointError, match='damaged'):
      driver.saved_replay.restore(tmp_path / '9', record)
    assert driver.saved_replay.states == ()

  for content in (whole[:-1], whole + b'x', whole[:100] + b'~' + whole[101:], b''):
    file.write_bytes(content)
    refused()
  file.write_bytes(whole)
  for wrong in (
    dict(bytes=-1),
    dict(bytes='x'),
    dict(bytes=2**40),
    dict(life=None),
    dict(sha256=1),
  ):
    refused({**record, 'actors': {**record['actors'], **wrong}})
  driver.saved_replay.restore(tmp_path / '9', record)
  assert len(driver.saved_replay.states) == 2
  other = made('envpool', num_envs=16).driver.saved_replay  # a whole file, of other shapes
  other.restore(tmp_path / '9', record)
  assert other.states == () and 'expected' in other.reason
  file.unlink()
  refused()


def test_an_environment_that_does_not_return_to_its_state_begins_anew(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  """It observes its process's id: the check before a run would have found it."""
  spec = host.make('gymnasium:host_envs:Sequence-v0')
  settings = dict(spec=spec, lag='1', env_threads=1)
  program = sebulba(Impala(network=SMALL), **settings)
  state, record, _ = saved_at(program, tmp_path / '9', after=0)
  with caplog.at_level(logging.WARNING):
    resumed(sebulba(Impala(network=SMALL), **settings), tmp_path / '9', state, record, 1)
  assert caplog.text.count('anew') == 1 and 'observations' in caplog.text


def test_after_a_restart_keys_and_serials_go_on(tmp_path: Path) -> None:
  """An unroll with a restart uses keys of the next one, which is then not acted with them again."""
  spec = host.make('gymnasium:CartPole-v1')
  settings = dict(spec=spec, lag='0', env_threads=2, num_envs=4)
  with Running(sebulba(Impala(network=SMALL), **settings)) as run:
    run.advance(2)
    (pool,) = run.actors.pools
    pool.workers[1].process.kill()
    run.advance(3)
    write = run.driver.saved_replay.save(tmp_path / '5')
    (state,) = run.driver.saved_replay.states
    copy = jax.tree.map(jnp.copy, run.state)
    run.advance(5)
    expected, record = params_sha256(run.state.train.params), write()
  assert state.serial.max() > state.serial.min() >= 5
  assert state.keys[0] >= 5 and np.ptp(state.environment['seeding']) == 1
  assert (
    resumed(sebulba(Impala(network=SMALL), **settings), tmp_path / '5', copy, record, 5) == expected
  )
