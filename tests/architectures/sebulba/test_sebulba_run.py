"""Sebulba's runs as processes: what they survive, and how they end."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import collections
import functools
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import jax
import numpy as np
import pytest
from children import alive, until
from processes import (
  Podrace,
  as_users_have_it,
  cache,
  checkpoints,
  hang,
  lines,
  podrace,
  summary,
  tell_parameters,
)
from shorthand import Patch, slow_after
from test_many_processes import TOLERANCE, free_port, pair, parameters
from test_sebulba import SMALL, Learning, Running, over_in, sebulba

from podrace import cli
from podrace.agents.impala import Impala
from podrace.architectures.sebulba import ActorFailed
from podrace.architectures.sebulba.lockstep import Lockstep
from podrace.envs.host import ale, envpool, timesteps
from podrace.envs.host import base as host
from podrace.run.processes import SILENCE_SECONDS
from podrace.types import FIRST, LAST, Arrival

TINY = ['--architecture', 'sebulba', '--num-envs', '4', '--unroll-length', '8',
        '--agent.network.hidden', '16', '--actor-threads', '2', '--env-threads', '2']  # fmt: skip


def start(env: str, tmp_path: Path, cache: Path, *args: str) -> Podrace:
  run_dir = str(tmp_path / 'run')
  return Podrace(
    ['train', 'catch', '--env', env, *TINY, *args, '--run-dir', run_dir],
    tmp_path / 'log.txt', 1, cache,
  )  # fmt: skip


def watch(run: Running, look: Callable[[int, Any], None]) -> None:
  """Shows the learner's unrolls to `look`, with the number of the update that takes them."""
  take = run.actors.take

  def taken(update: int, *args: Any) -> Any:
    unrolls = take(update, *args)
    look(update, unrolls)
    return unrolls

  run.actors.take = taken


def numbered(unroll: Any) -> np.ndarray:
  """[T+1, N, 4]: the observations, for which there was done what they say."""
  (trajectory,) = unroll.parts
  steps, kinds = (
    np.asarray(x) for x in (trajectory.timesteps.observation, trajectory.timesteps.step_type)
  )
  free = kinds[1:] != FIRST  # these steps ignore the action
  np.testing.assert_array_equal(steps[1:, :, 3][free], np.asarray(trajectory.outputs.action)[free])
  np.testing.assert_array_equal(kinds[1:] == FIRST, kinds[:-1] == LAST)
  return steps


# --- 50 kills --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_killed_workers_lose_and_duplicate_nothing(monkeypatch: Patch) -> None:
  """Every unroll that is learned from is a piece of one life of one environment, without a gap.

  The environments number their steps, so pieces of the same life must follow each other; and the
  actor numbers the unrolls of each environment, of which a restart may cost one, and nothing else.
  """
  monkeypatch.setattr('podrace.envs.host.worker_pool.RESTARTS', 1000)
  spec = host.make('gymnasium:host_envs:Sequence-v0')
  program = sebulba(
    Impala(network=SMALL), spec=spec, num_envs=4, unroll_length=4, lag='1', env_threads=4
  )
  moments = random.Random(0)
  pieces: list[np.ndarray] = []
  serials: list[np.ndarray] = []  # [N] of each update

  def look(_: int, unrolls: Any) -> None:
    for unroll in unrolls:
      pieces.extend(np.moveaxis(numbered(unroll), 1, 0))
      serials.append(unroll.serial)

  # How often the actor began anew; a worker that is killed at its start restarts twice in one.
  begun_anew, restarted, restart = np.zeros(4, int), np.zeros(4, int), Lockstep.restart

  def restarting(actor: Lockstep, ids: np.ndarray) -> None:
    begun_anew[ids] += 1
    restart(actor, ids)

  monkeypatch.setattr(Lockstep, 'restart', restarting)
  with Running(program) as run:
    watch(run, look)
    (workers,) = run.actors.pools
    for _ in range(50):
      run.advance(moments.randint(1, 3))
      killed = moments.randrange(4)
      os.kill(workers.pids[killed], signal.SIGKILL)
      restarted[killed] += 1
      run.advance(1)
    run.advance(3)
    told, _ = run.driver.read_log(run.state)
  assert told['host']['env_restarts'] == 50
  # the environment that is restarted loses the steps of the unroll it was in, at most all of them
  assert 0 < told['host']['dropped_steps'] <= 50 * 4
  gaps = np.diff(np.stack(serials), axis=0)
  assert (gaps >= 1).all()
  missing = (gaps - 1).sum(axis=0)
  np.testing.assert_array_equal(missing, begun_anew)
  assert (begun_anew <= restarted).all() and begun_anew.sum() >= 45
  lives: dict[tuple[float, float], list[np.ndarray]] = {}
  for piece in pieces:
    assert len({(p, w) for p, w, *_ in piece.tolist()}) == 1  # of one life
    np.testing.assert_array_equal(np.diff(piece[:, 2]), 1)  # without a gap
    lives.setdefault((piece[0, 0], piece[0, 1]), []).append(piece)
  assert len(lives) >= 40
  for of_life in lives.values():
    assert of_life[0][0, 2] == 0  # from its beginning
    for one, following in itertools.pairwise(of_life):
      assert one[-1, 2] == following[0, 2]  # they overlap in one timestep, and nothing is missing


# --- any order -------------------------------------------------------------------------------------


class Shuffled:
  """Environments that come back some at a time, in a random order; they number their steps."""

  watches_itself = False

  def __init__(self, num_envs: int, batch_size: int, seed: int, stuck: int = -1) -> None:
    self.num_envs, self.batch_size = num_envs, batch_size
    self._stuck = stuck  # an environment that is reset and never answers to an action
    self._random = np.random.default_rng(seed)
    self._steps = np.full(num_envs, -1)
    self._action = np.zeros(num_envs, np.float32)
    self._ready: list[int] = []
    self._stepper = timesteps.Stepper(num_envs)

  def reset(self) -> None:
    self._ready = list(range(self.num_envs))
    self._steps += 1

  def send(self, env_id: np.ndarray, action: Any) -> None:
    self._ready += [i for i in env_id.tolist() if i != self._stuck]
    self._steps[env_id] += 1
    self._action[env_id] = action

  def recv(self) -> Any:
    late = self._ready[: 2 * self.batch_size]  # as in real pools, nobody waits for ever
    chosen = self._random.permutation(late)[: self.batch_size]
    if self.batch_size == self.num_envs:
      chosen = np.sort(chosen)
    self._ready = [i for i in self._ready if i not in chosen]
    ids = chosen.astype(np.int32)
    observation = np.stack([ids, self._steps[ids], self._action[ids]], axis=1).astype(np.float32)
    over = self._steps[ids] % 6 == 5
    none = np.zeros(len(ids), bool)
    timestep: Any = self._stepper.timestep(
      ids, observation, self._steps[ids].astype(np.float32), over, none
    )
    return Arrival(ids, timestep, timestep.reward, over, np.zeros(len(ids), np.int32))

  def close(self) -> None: ...

  def kill(self) -> None: ...


def shuffled(
  batch_size: int, seed: int, stuck: int = -1, pool: type[Shuffled] = Shuffled, **settings: Any
) -> Any:
  """A Sebulba of them with a greedy agent."""
  from gymnasium import spaces

  spec = host.HostSpec(
    'shuffled', spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Discrete(5),
    lambda args: pool(args.num_envs, args.batch_size, seed, stuck),
  )  # fmt: skip
  return sebulba(
    Impala(network=SMALL, learning_rate=1e-30, greedy=True), spec=spec, num_envs=8, unroll_length=5,
    lag='async', batch_size=batch_size, **settings,
  )  # fmt: skip


def unrolls_of(batch_size: int, seed: int) -> dict[tuple[int, int], Any]:
  """(environment, its first step) -> the unroll."""
  program = shuffled(batch_size, seed)
  found = {}
  with Running(program) as run:
    for _ in range(12):
      for unroll in run.actors.take(0, lambda: False):
        (trajectory,) = jax.tree.map(np.asarray, unroll.parts)
        for i, env in enumerate(trajectory.env_id):
          part = jax.tree.map(lambda x, i=i: x[:, i], (trajectory.timesteps, trajectory.outputs))
          assert set(part[0].observation[:, 0]) == {float(env)}
          found[int(env), int(part[0].observation[0, 1])] = part
  return found


@pytest.mark.slow
def test_out_of_order_gives_the_same_unrolls() -> None:
  lockstep = unrolls_of(8, 0)
  assert len(lockstep) == 96
  for seed in range(3):
    shuffled = unrolls_of(2, seed)
    common = lockstep.keys() & shuffled.keys()
    assert len(common) >= 60
    for key in common:
      for x, y in zip(jax.tree.leaves(lockstep[key]), jax.tree.leaves(shuffled[key]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_no_key_acts_twice_in_any_order(monkeypatch: Patch) -> None:
  """Two of eight environments at a time: four calls for each step of an unroll."""
  used: list[bytes] = []
  program = shuffled(2, 0, actors='0', learners='1')
  step_some = program.programs.step_some

  def noted(params: Any, carry: Any, keys: Any, numbers: Any, observation: Any) -> Any:
    used.append(np.asarray(keys)[numbers[3, 0]].tobytes())
    return step_some(params, carry, keys, numbers, observation)

  with Running(program) as run:
    monkeypatch.setattr(program.programs, 'step_some', noted)
    run.advance(10)
  assert len(used) > 100
  assert len(set(used)) == len(used)


@pytest.mark.slow
def test_lag_is_told_of_every_unroll_in_any_order() -> None:
  """A trajectory's are of several versions: those that its environments began with."""
  lags: list[np.ndarray] = []
  with Running(shuffled(2, 0, max_lag=8)) as run:
    watch(run, lambda update, unrolls: lags.extend(update - u.versions for u in unrolls))
    told, _ = run.driver.read_log(run.advance(40))
  assert any(len(set(x)) > 1 for x in lags)
  assert told['host']['policy_lag_mean'] == pytest.approx(np.mean(lags))
  assert told['host']['policy_lag_max'] == np.max(lags) <= 8


@pytest.mark.parametrize('batch_size', [pytest.param(2, marks=pytest.mark.slow), 8])
def test_acting_goes_on_while_an_update_is_computed(batch_size: int) -> None:
  """The learner's device ends no update before environments have been acted for."""
  permits, came = threading.Semaphore(0), threading.Semaphore(0)
  some = 8  # arrivals: if all environments are in each, another unroll begins in them
  went_on: list[bool] = []

  class Rationed(Shuffled):
    """Comes back only as often as `permits` says."""

    def recv(self) -> Any:
      assert permits.acquire(timeout=60)
      came.release()
      return super().recv()

  def more(_: Any) -> np.float32:
    while came.acquire(blocking=False):
      pass
    permits.release(some)
    went_on.append(all(came.acquire(timeout=20) for _ in range(some)))
    return np.float32(0)

  @jax.jit
  def when_they_have(params: Any) -> Any:
    first = jax.tree.leaves(params)[0].reshape(-1)[0]
    zero = jax.pure_callback(more, jax.ShapeDtypeStruct((), np.float32), first)
    return jax.tree.map(lambda x: x + zero, params)

  def no() -> bool:  # asked while the learner waits for a batch
    permits.release()
    return False

  program = shuffled(batch_size, 0, pool=Rationed, actors='0', learners='1')
  with Running(program) as run:
    learning = run.driver.learning

    def slowly(state: Any, batch: Any) -> Any:
      state, priority = learning.learn(state, batch)
      train = state.train._replace(params=when_they_have(state.train.params))
      return state._replace(train=train), priority

    run.driver.learning = Learning(learning, slowly)  # type: ignore[assignment]
    for _ in range(2):
      run.state, done = run.driver.advance(run.state, 1, no)
      assert done == 1
    permits.release(1000)
  assert went_on == [True, True]


@pytest.mark.slow
def test_one_environment_that_hangs_among_many_is_noticed() -> None:
  """The others go on, and always some of them are there."""
  with Running(shuffled(2, 0, stuck=5, deadline=0.5)) as run:
    over = over_in(120)
    with pytest.raises(ActorFailed, match='thread 0'):
      while not over():
        run.advance(1)


@pytest.mark.slow
def test_killed_workers_lose_and_duplicate_nothing_in_any_order(monkeypatch: Patch) -> None:
  """Whoever comes back first: each unroll is a piece of one life, and pieces follow each other."""
  monkeypatch.setattr('podrace.envs.host.worker_pool.RESTARTS', 1000)
  spec = host.make('gymnasium:host_envs:Sequence-v0')
  program = sebulba(
    Impala(network=SMALL), spec=spec, num_envs=4, unroll_length=4, lag='async', env_threads=4,
    batch_size=2, max_lag=100,
  )  # fmt: skip
  moments, lives, kills, counts = random.Random(0), {}, 20, collections.Counter[str]()

  def look(_: int, unrolls: Any) -> None:
    counts.update(restarts=sum(u.restarts for u in unrolls))
    for piece in itertools.chain(*(np.moveaxis(numbered(u), 1, 0) for u in unrolls)):
      assert len({(p, w) for p, w, *_ in piece.tolist()}) == 1
      np.testing.assert_array_equal(np.diff(piece[:, 2]), 1)
      lives.setdefault((piece[0, 0], piece[0, 1]), []).append(piece)

  with Running(program) as run:
    watch(run, look)
    (workers,) = run.actors.pools
    for killed in range(1, kills + 1):
      run.advance(moments.randint(1, 4))
      os.kill(moments.choice(workers.pids), signal.SIGKILL)
      until(lambda n=killed: counts['restarts'] == n or not run.advance(1))
    run.advance(3)
    told, _ = run.driver.read_log(run.state)
  assert told['host']['env_restarts'] == kills
  assert 0 < told['host']['dropped_steps'] <= kills * 4
  assert len(lives) >= kills // 2
  for of_life in lives.values():
    assert of_life[0][0, 2] == 0
    for one, following in itertools.pairwise(of_life):
      assert one[-1, 2] == following[0, 2]


# --- environments in C++ ---------------------------------------------------------------------------

IN_C = ['train', 'catch', '--architecture', 'sebulba', '--num-envs', '4', '--unroll-length', '4',
        '--agent.network.torso', 'mlp', '--agent.network.hidden', '4', '--actor-threads', '1',
        '--env-threads', '2', '--log-every', '16', '--devices', '1']  # fmt: skip
ANY_ORDER = ['--lag', 'async', '--env-batch-size', '2']


@pytest.mark.parametrize(
  ('env', 'order', 'resumed'),
  slow_after(1,
    ('envpool:CartPole-v1', ANY_ORDER, True), ('ale:pong', ANY_ORDER, True), ('ale:pong', [], False),
    ('envpool:CartPole-v1', [], True), ('envpool:CartPole-v1', ANY_ORDER, False),
  ),
)  # fmt: skip
def test_environments_in_c_are_learned_from(
  env: str, order: list[str], resumed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  run_dir = tmp_path / 'run'

  def train(steps: int, *more: str) -> str:
    with pytest.raises(SystemExit) as end:
      cli.main([*IN_C, *order, '--env', env, '--total-steps', str(steps), *more,
                '--run-dir', str(run_dir)])  # fmt: skip
    told = capfd.readouterr()
    assert end.value.code == 0, told.err
    assert summary(run_dir)['step'] == steps
    return told.out + told.err

  train(48)
  if resumed:
    before = summary(run_dir)['params_sha256']
    assert 'resuming at step 48' in train(80, '--override')
    assert summary(run_dir)['params_sha256'] != before
  found = lines(run_dir)
  assert [x['step'] for x in found] == list(range(16, 16 * len(found) + 1, 16))
  assert all(np.isfinite(x['loss']) and x['policy_lag_max'] <= 4 for x in found)
  assert len({x['loss'] for x in found}) == len(found)


# --- how runs end ----------------------------------------------------------------------------------


def test_an_exception_in_an_environment_ends_the_run_with_a_checkpoint(
  tmp_path: Path, cache: Path
) -> None:
  one = start('gymnasium:host_envs:Wrong-v0,what=raise', tmp_path, cache)
  assert one.wait() == 1, one.output
  assert 'ZeroDivisionError' in one.output
  assert 'saved at step' in one.output
  assert checkpoints(tmp_path / 'run')


@pytest.mark.parametrize(
  'env', [pytest.param('ale:pong', marks=pytest.mark.slow), 'envpool:CartPole-v1']
)
def test_a_hang_in_c_ends_the_run_with_a_checkpoint(env: str, tmp_path: Path, cache: Path) -> None:
  """The thread can't be killed, and keeps the process from nothing."""
  library = {'ale:pong': ale.AtariPool, 'envpool:CartPole-v1': envpool.EnvPool}[env]
  args = [*IN_C, '--env', env, '--env-deadline', '1', '--run-dir', str(tmp_path / 'run')]
  before = functools.partial(hang, library, 30)
  one = Podrace(args, tmp_path / 'log.txt', 1, cache, before)
  assert one.wait() == 1, one.output
  assert f'{env}: environments of actor thread 0' in one.output
  (saved,) = checkpoints(tmp_path / 'run')
  assert saved > 0 and f'saved at step {saved}' in one.output


@pytest.mark.parametrize(
  ('signum', 'code'),
  [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_signals_save_while_actors_are_busy(
  signum: int, code: int, tmp_path: Path, cache: Path
) -> None:
  """Each step of these environments takes a twentieth of a second, an update eight."""
  one = start('gymnasium:host_envs:Sequence-v0,slow=0.05', tmp_path, cache, '--log-every', '32')
  one.says('step 32 of')
  one.signal(signum)
  assert one.wait(30) == code, one.output
  (*_, saved) = checkpoints(tmp_path / 'run')
  assert saved >= 32
  again = start('gymnasium:host_envs:Sequence-v0,slow=0.05', tmp_path, cache, '--log-every', '32')
  again.says(f'resuming at step {saved:,}')
  until(lambda: lines(tmp_path / 'run')[-1]['step'] >= saved + 32 or not again.process.is_alive())
  again.signal(signal.SIGTERM)
  assert again.wait(30) == 143
  steps = [line['step'] for line in lines(tmp_path / 'run')]
  assert steps == list(range(32, steps[-1] + 1, 32))


def test_no_worker_outlives_a_killed_run(tmp_path: Path, cache: Path) -> None:
  one = start('gymnasium:host_envs:Sequence-v0,slow=0.01', tmp_path, cache, '--log-every', '32')
  one.says('step 32 of')
  children = [int(p) for p in os.popen(f'pgrep -P {one.process.pid}').read().split()]
  assert len(children) >= 2
  one.kill()
  until(lambda: not any(alive(pid) for pid in children), 30)


# --- several processes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_stop_and_go_on_as_one(tmp_path: Path, cache: Path) -> None:
  """Each with an actor of its own; a signal to one of them saves the run, and ends both."""
  run_dir = tmp_path / 'run'

  def both(steps: int, *more: str) -> list[Podrace]:
    args = [
      'train', 'catch', '--architecture', 'sebulba', '--num-envs', '8', '--unroll-length', '4',
      '--agent.network.hidden', '8', '--actor-threads', '1', '--total-steps', str(steps), *more,
      '--log-every', '320', '--coordinator', f'127.0.0.1:{free_port()}', '--num-processes', '2',
      '--run-dir', str(run_dir),
    ]  # fmt: skip
    return [
      Podrace([*args, '--process-id', str(i)], tmp_path / f'{steps}-{i}', 1, cache, tell_parameters)
      for i in range(2)
    ]

  one, other = both(64_000_000)
  one.says('\nstep ')
  other.signal(signal.SIGTERM)
  assert [one.wait(), other.wait()] == [143, 143], one.output + other.output
  (*_, stopped) = checkpoints(run_dir)
  end = (stopped // 320 + 2) * 320
  one, other = both(end, '--override')
  assert [one.wait(), other.wait()] == [0, 0], one.output + other.output
  assert f'resuming at step {stopped:,}' in one.output
  told = f'parameters {summary(run_dir)["params_sha256"]}'
  assert told in one.output and told in other.output
  assert [line['step'] for line in lines(run_dir)] == list(range(320, end + 1, 320))


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path, cache: Path, pair: Any) -> None:
  """Each with actors of its own; equal parameters, and those of one process with both's actors."""
  args = ['--architecture', 'sebulba', '--actor-threads', '1', '--total-steps', '3200']
  split = ['--actor-devices', '0', '--learner-devices', '1']
  both = pair(tmp_path / 'two', *args, *split)
  assert [p.wait() for p in both] == [0, 0], both[0].output + both[1].output
  assert both[0].parameters == both[1].parameters == summary(tmp_path / 'two')['params_sha256']
  code, output = podrace(
    [*both[0].popen.args[3 : 3 + 14], *args, '--run-dir', str(tmp_path / 'one'),
     '--actor-devices', '0,1', '--learner-devices', '2,3'],
    tmp_path / 'one.txt', 4, cache,
  )  # fmt: skip
  assert code == 0, output
  (step, params), (step_alone, params_alone) = (
    parameters(tmp_path / name) for name in ('two', 'one')
  )
  assert step == step_alone == 3200
  for one, other in zip(params, params_alone, strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)
  two = lines(tmp_path / 'two')
  assert sum(x['episodes'] for x in two) == sum(x['episodes'] for x in lines(tmp_path / 'one'))


@pytest.mark.slow
def test_a_failure_in_one_of_two_processes_ends_both(
  tmp_path: Path, pair: Any, monkeypatch: Patch
) -> None:
  """In the middle of a call, whose updates the other one goes on with."""
  monkeypatch.setenv('PYTHONPATH', children.environment()['PYTHONPATH'])
  env = f'gymnasium:host_envs:Wrong-v0,what=raise,at=403,once={tmp_path / "once"}'
  both = pair(
    tmp_path / 'run', '--architecture', 'sebulba', '--env', env, '--total-steps', '64000',
    '--actor-devices', '0', '--learner-devices', '1', '--env-threads', '2',
  )  # fmt: skip
  children.until(lambda: any(p.popen.poll() is not None for p in both), 600)
  codes = [p.wait(6 * SILENCE_SECONDS) for p in both]
  assert all(code not in (0, 2) for code in codes), both[0].output + both[1].output
  failed = [code for code, p in zip(codes, both, strict=True) if 'the game broke' in p.output]
  assert failed == [1]  # the other may be ended by JAX
