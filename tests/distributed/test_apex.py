"""Acting, replay and learning in processes of their own: they learn, come, go, and end."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import until
from gymnasium import spaces
from processes import Podrace, as_users_have_it, cache, checkpoints, lines, summary
from shared_sebulba import shared_processes
from test_host_replay import CASES, Both, first_priority, starts_of
from test_protocol_page import entries, sent
from test_windows import World, settings

from podrace import cli, errors, tables, topology
from podrace.agents import value_based
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.architectures.sebulba import example_trajectory
from podrace.commands import act, configure
from podrace.distributed import acting as acting_process
from podrace.distributed import batches as feed
from podrace.distributed import learner as distributed_learner
from podrace.distributed import learner_client, parameters, publishing, run_identity, run_tables
from podrace.distributed import replay as service
from podrace.distributed.batches import Feed
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import link
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.server import ReplayServer
from podrace.distributed.run_identity import from_leaves, to_leaves
from podrace.envs.host import base as host
from podrace.envs.host.episodes import Totals
from podrace.errors import UsageError
from podrace.launch.engines.manifests import SERVER_FILES
from podrace.networks import ActorCritic
from podrace.replay.labels import TABLE
from podrace.replay.layout import named
from podrace.replay.streams import Streams
from podrace.run import build, loop
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import with_unrecorded
from podrace.settings.resolved import resolve
from podrace.system import signals
from podrace.system.options import Options
from podrace.types import ActorOutput, TimeStep, Trajectory

pytestmark = pytest.mark.usefixtures('shared_processes')

CATCH = [
  '--agent', 'dqn', '--num-envs', '32', '--unroll-length', '4', '--actor-threads', '1',
  '--agent.network.hidden', '32', '--agent.network.dueling', '--agent.n-step', '2',
  '--agent.learning-rate', '2e-3', '--agent.target-period', '50', '--agent.epsilon-ladder',
  '--agent.actor-priorities', '--agent.buffer.capacity', '8192',
  '--agent.buffer.batch-size', '64', '--agent.buffer.min-size', '512',
  '--agent.buffer.samples-per-insert', '8', '--agent.buffer.priority-exponent', '0.4',
]  # fmt: skip


class Places:
  """Addresses and directories of one run, and its processes."""

  def __init__(self, folder: Path, cache: Path) -> None:
    self.folder, self.cache = folder, cache
    self.replay, self.parameters = f'unix:{folder}/replay', f'unix:{folder}/parameters'
    self.run_dir = folder / 'run'
    self.started: list[Podrace] = []

  def start(self, *args: str) -> Podrace:
    log = self.folder / f'{len(self.started)}-{args[0]}.txt'
    self.started.append(Podrace(args, log, 1, self.cache))
    return self.started[-1]

  def serve(self, *args: str) -> Podrace:
    return self.start(
      'replay', '--listen', self.replay, '--dir', str(self.folder / 'tables'), *args
    )

  def learn(self, steps: int, *args: str) -> Podrace:
    return self.start(
      'train', 'catch', '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', *CATCH,
      '--connect-replay', self.replay, '--listen', self.parameters, '--total-steps', str(steps),
      '--log-every', '1280', '--run-dir', str(self.run_dir), *args,
    )  # fmt: skip

  def act(self, environments: int, *args: str) -> Podrace:
    return self.start(
      'act', 'catch', *CATCH, '--connect-replay', self.replay, '--params', self.parameters,
      '--local-envs', str(environments), *args,
    )  # fmt: skip

  def told(self) -> list[dict[str, Any]]:
    path = self.run_dir / 'metrics.jsonl'
    return lines(self.run_dir) if path.exists() else []

  def step_from(self, more: int) -> None:
    """Waits until so many steps have been made from now on."""
    now = max((x['step'] for x in self.told()), default=0)
    until(lambda: self.told() and self.told()[-1]['step'] >= now + more)


def in_background(call: Callable[[], Any]) -> tuple[list[BaseException], threading.Thread]:
  """Starts `call` in a thread. The list takes its exception."""
  ended: list[BaseException] = []

  def run() -> None:
    try:
      call()
    except BaseException as e:
      ended.append(e)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  return ended, thread


@pytest.fixture
def places(tmp_path: Path, cache: Path) -> Any:
  found = Places(tmp_path, cache)
  yield found
  for process in found.started:
    process.kill()


@pytest.mark.slow
def test_a_run_learns_although_an_actor_is_killed(places: Places) -> None:
  """A spare takes its place; another one hears that the run is complete."""
  server, learner = places.serve(), places.learn(14_000)
  one, two = places.act(16), places.act(16)
  one.says('acting in 16 environments')
  two.says('acting in 16 environments')
  assert sorted(re.findall(r'environments, (.*)', one.output + two.output)) == [
    '0 to 15 of 32',
    '16 to 31 of 32',
  ]
  spare = places.act(16)
  spare.says('a spare')
  places.step_from(3_840)
  one.kill()
  spare.says('acting in 16 environments')
  assert re.findall(r'environments, (.*)', spare.output) == re.findall(
    r'environments, (.*)', one.output
  )
  late = places.act(16)
  late.says('a spare')
  assert learner.wait() == 0, learner.output
  assert [late.wait(), spare.wait(), two.wait()] == [0, 0, 0]
  server.signal(signal.SIGTERM)
  assert server.wait() == 143
  told = places.told()
  returns = [x['episode_return'] for x in told[-3:] if x['episodes']]  # at the end; at random -0.6
  assert np.mean(returns) > 0.3, told[-3:]  # of which many explore with an epsilon of 0.4
  samples = told[-1]['replay_samples']
  assert abs(samples - 8 * (14_000 - 512)) < 8 * 256
  assert 2 in {x['acting_processes'] for x in told} <= {0, 1, 2}  # no spare among them


@pytest.mark.slow
def test_an_agent_that_plans_learns_in_other_processes(places: Places) -> None:
  ends = ['--connect-replay', places.replay]
  server = places.serve()
  learner = places.start(
    'train', 'muzero-catch', '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', *ends,
    '--listen', places.parameters, '--total-steps', '40_000', '--run-dir', str(places.run_dir),
  )  # fmt: skip
  actors = [
    places.start('act', 'muzero-catch', *ends, '--params', places.parameters, '--local-envs', '16')
    for _ in range(2)
  ]
  assert learner.wait() == 0, learner.output
  assert [actor.wait() for actor in actors] == [0, 0]
  server.signal(signal.SIGTERM)
  assert server.wait() == 143
  returns = [x['episode_return'] for x in places.told()[-10:] if x['episodes']]
  assert np.mean(returns) > 0.8, returns  # at random -0.6


@pytest.mark.slow
def test_steps_are_counted_once_somebody_has_made_them(places: Places) -> None:
  """As few as those before anything is learned: without acting processes there are none of them either."""
  server, learner = places.serve(), places.learn(384)
  learner.says('512 steps')
  learner.says('podrace act ')
  assert not places.told() and learner.process.is_alive()
  actor = places.act(32)
  assert [learner.wait(), actor.wait()] == [0, 0], learner.output
  assert json.loads((places.run_dir / 'summary.json').read_text())['step'] == 384
  assert places.told()[-1]['acting_processes'] == 1
  server.signal(signal.SIGTERM)
  assert server.wait() == 143


@pytest.mark.slow
@pytest.mark.parametrize('self_tuning', [False, True])
def test_impala_learns_from_a_queue_of_unrolls(
  self_tuning: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """All of it in one process, with two acting ends."""
  # However slow they are to see that it is over.
  monkeypatch.setattr(publishing, 'GOODBYE_SECONDS', 120.0)
  monkeypatch.setattr(link, 'METRICS_SECONDS', 0.2)
  network = ActorCritic(hidden=(64,), initializer='lecun', activation='relu')
  config = Config(
    Impala(network, learning_rate=1e-2, self_tuning=self_tuning),
    architecture='sebulba', num_envs=16, unroll_length=8,
    total_steps=26_000, log_every=5_120, lag='async', replay='service', devices=1, actor_threads=1,
  )  # fmt: skip
  replay, parameters = f'unix:{tmp_path}/replay', f'unix:{tmp_path}/parameters'
  ended: list[BaseException] = []

  def act() -> None:
    try:
      acting_process.Acting(resolve(config), acting_process.Options(addresses, 8)).run()
    except BaseException as e:
      ended.append(e)

  addresses = run_identity.Addresses((replay,), parameters)
  with ReplayServer(replay) as server:
    actors = [threading.Thread(target=act, daemon=True) for _ in range(2)]
    for actor in actors:
      actor.start()
    loop.train(config, tmp_path / 'run', addresses=addresses, quiet=True)
    for actor in actors:
      actor.join(120)
    assert [type(e) for e in ended] == [errors.RunFinished] * 2, ended
    table = server.tables['unrolls']
  told = lines(tmp_path / 'run')
  assert ('tuned_discount' in told[-1]) == self_tuning
  returns = [x['episode_return'] for x in told if x['episodes']]  # told a little later than made
  assert np.mean(returns[-2:]) > 0.3, told
  updates = told[-1]['step'] // 128
  assert all(x['policy_lag_max'] >= x['policy_lag_mean'] >= 0 for x in told)
  assert {x['unrolls_repeated'] for x in told} == {0}
  assert set(told[-1]) >= {
    'acting_steps_per_s', 'acting_write_share', 'acting_staleness_s', 'acting_resident_mb', 'acting_env_restarts',
    'acting_dropped_steps', 'learner_resident_mb', 'replay_resident_mb', 'replay_mb', 'replay_waiting_samplers',
  }  # fmt: skip
  assert max(x.get('acting_steps_per_s', 0) for x in told) > 0
  assert 0 < max(x.get('replay_inserts', 0) for x in told) <= table.contents.counts.inserts
  assert (
    16 * updates
    <= told[-1]['unrolls_taken']
    <= table.contents.counts.samples
    <= table.contents.counts.inserts
  )


def test_a_failing_service_has_the_run_saved(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  config, addresses = tiny(), addresses_in(tmp_path)
  batches, drawn = feed.Queued.batches, 0

  def failing(self: feed.Queued, samples: tables.Samples) -> Any:
    nonlocal drawn
    for draw in batches(self, samples):
      if drawn == 64:
        raise ArithmeticError
      drawn += 1
      yield draw

  monkeypatch.setattr(feed.Queued, 'batches', failing)
  acting = acting_process.Acting(resolve(config), acting_process.Options(addresses))

  def act() -> None:
    with contextlib.suppress(tables.Closed):  # at the end
      acting.run()

  actor = threading.Thread(target=act, daemon=True)
  with ReplayServer(addresses.replay[0]):
    actor.start()
    with pytest.raises(errors.RunError, match=r'(?s)ArithmeticError.* step 512'):
      loop.train(config, tmp_path / 'run', addresses=addresses, quiet=True)
    assert checkpoints(tmp_path / 'run')[-1] == 512
    acting.newest.close()
    actor.join(120)


def feed_of(batches: Callable[[Any], Any], episodes: Any = None) -> Feed:
  """A feed from a table whose samples are None."""
  samples = contextlib.nullcontext(itertools.repeat(None))
  table = SimpleNamespace(sampler=lambda size, ahead: samples)
  source = SimpleNamespace(table=table, size=1, ahead=1, prioritised=False, batches=batches)
  return Feed(source, episodes)  # type: ignore[arg-type]


def test_a_batch_just_before_a_failure_is_taken() -> None:
  go, calls = threading.Event(), 0

  def batches(sample: Any) -> Iterator[str]:
    go.wait()
    yield 'the last'
    raise ZeroDivisionError

  feed = feed_of(batches)

  def cancelled() -> bool:
    nonlocal calls
    calls += 1
    go.set()
    until(has_failed)
    return False

  def has_failed() -> bool:
    try:
      feed.check()
    except errors.ReplayFailed:
      return True
    return False

  assert feed.take(cancelled) == 'the last' and calls == 1  # type: ignore[comparison-overlap]
  assert feed.take(cancelled) is None
  with pytest.raises(errors.ReplayFailed, match='ZeroDivisionError'):
    feed.check()


def test_a_failure_ends_the_wait_for_a_batch() -> None:
  feed = feed_of(lambda sample: 1 / 0)
  assert feed.take(lambda: False) is None
  with pytest.raises(errors.ReplayFailed, match='ZeroDivisionError'):
    feed.check()


@pytest.mark.parametrize('closes', [False, True])
def test_a_closed_table_is_a_failure_unless_the_feed_is_closed(closes: bool) -> None:
  go = threading.Event()

  def batches(sample: Any) -> Iterator[str]:
    go.wait()
    raise tables.Closed

  feed = feed_of(batches)
  if closes:
    feed.close()
  go.set()
  end = time.monotonic() + 20  # a wait without an end would otherwise be one here, too
  assert feed.take(lambda: time.monotonic() > end) is None
  if closes:
    feed.check()
  else:
    with pytest.raises(errors.ReplayFailed):
      feed.check()


def test_an_unroll_is_learned_from_once() -> None:
  """Although a service that began again from a checkpoint has told of some of them before."""
  n, t = 4, 2
  example = Trajectory(
    TimeStep(np.zeros((t + 1, n, 3), np.float32), *[np.zeros((t + 1, n), np.float32)] * 3),
    ActorOutput(np.zeros((t, n), np.int32)), (), np.zeros(n, np.int32),
  )  # fmt: skip
  table = type('Table', (), {'last_size': 0})()
  queued = feed.Queued(table, example, topology.learner_mesh(1))

  def drawn(*ids: tuple[int, int]) -> list[int]:
    data = {}
    for k, x in named(example).items():
      one = np.moveaxis(x, 1, 0).shape[1:] if x.ndim > 1 else ()
      data[k] = np.zeros((len(ids), *one), x.dtype)
    for i, (source, number) in enumerate(ids):
      data['timesteps/observation'][i] = 10 * source + number + np.arange(3)[:, None] / 4
    source, number = np.array(ids).T
    data |= dict(source=source, number=number, version=number + 100, env_id=number.astype(np.int32))
    samples = tables.Samples(data, data, *[np.zeros(len(ids))] * 5)
    found = []
    for key, data in queued.batches(samples):
      assert key.tolist() == (np.asarray(data.env_id) + 100).tolist()
      seen = np.asarray(data.timesteps.observation)
      assert seen.shape == (t + 1, n, 3)
      np.testing.assert_array_equal(seen[1:] - seen[:-1], 0.25)
      found += seen[0, :, 0].astype(int).tolist()
    return found

  assert drawn((1, 0), (1, 1), (2, 0), (1, 2)) == [10, 11, 20, 12]
  assert drawn((1, 1), (2, 0), (1, 2), (1, 3)) == []  # three of them again
  assert drawn((2, 1), (1, 3), (2, 2), (3, 0)) == [13, 21, 22, 30]
  assert drawn(*((4, i) for i in range(9))) == [40, 41, 42, 43, 44, 45, 46, 47]
  assert queued.counts() == {'unrolls_taken': 21, 'unrolls_repeated': 4}


def test_a_signal_ends_the_wait_for_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """The service is there, and does not say anything of its tables."""
  addresses = addresses_in(tmp_path)
  with ReplayServer(addresses.replay[0]) as server:
    handle, end = server.handle, threading.Event()

    def silent(peer: Any, kind: Any, *args: Any) -> None:
      if kind is not replay_messages.TABLE:
        handle(peer, kind, *args)
      elif not end.is_set():  # it is being waited for
        end.set()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(server, 'handle', silent)
    with pytest.raises(errors.Stopped):
      loop.train(tiny(), tmp_path / 'run', addresses=addresses, quiet=True)
    assert end.is_set()


def addresses_in(folder: Path) -> run_identity.Addresses:
  return run_identity.Addresses((f'unix:{folder}/replay',), f'unix:{folder}/parameters')


def tiny(agent: Any = None, **more: Any) -> Config:
  return Config(
    agent or Impala(network=ActorCritic(hidden=(4,))), architecture='sebulba', num_envs=4, unroll_length=2,
    total_steps=10**6, lag='async', replay='service', devices=1, actor_threads=1, **more,
  )  # fmt: skip


def test_a_run_has_one_name(tmp_path: Path) -> None:
  folders = [tmp_path / 'one', tmp_path / 'again' / 'one']
  for folder in folders:
    folder.mkdir(parents=True)
  first, other = map(run_identity.run_name, folders)
  assert first.startswith('one-') and other.startswith('one-') and first != other
  assert run_identity.run_name(folders[0]) == first
  (folders[0] / 'name.json').write_text('[]')
  with pytest.raises(UsageError, match=r'name\.json'):
    run_identity.run_name(folders[0])


class Began(Exception):
  """The learner has come as far as this."""


def test_runs_do_not_meet_at_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  addresses, reports = addresses_in(tmp_path), []

  def began(*args: Any) -> None:
    with contextlib.closing(Asker(addresses.parameters, None, False)) as asker:
      reports.append(asker.ask())
    raise Began

  monkeypatch.setattr(distributed_learner.DistributedSource, 'start', began)

  def train(name: str) -> None:
    loop.train(tiny(), tmp_path / name, addresses=addresses, quiet=True)

  with ReplayServer(addresses.replay[0]) as server:
    for _ in range(2):  # then it is resumed
      with pytest.raises(Began):
        train('one')
    assert {served.settings['run'] for served in server.served.by_name.values()} == {
      run_identity.run_name(tmp_path / 'one')
    }
    assert [sent(x['program']) for x in reports] == [entries('`program` of parameters')] * 2
    with pytest.raises(service.Refused, match=r"'one-.*'two-"):
      train('two')


@pytest.mark.slow
def test_who_acts_is_of_the_learners_run(tmp_path: Path) -> None:
  config = tiny()
  addresses = addresses_in(tmp_path)
  with (
    ReplayServer(addresses.replay[0]),
    service.connect(addresses.replay) as client,
    parameters.Publisher(addresses.parameters, environments=4) as publisher,
  ):
    spec = host.make(config.env)
    agent = resolve(config).agent
    example = example_trajectory(agent, spec, 4, config.unroll_length)
    run_tables.unrolls_table(client, 4, example, spec.action_space, 'one-1')
    shapes = jax.jit(agent.init)(jax.random.key(0)).params
    acting = acting_process.Acting(resolve(config), acting_process.Options(addresses))

    def publish(version: int, name: str) -> None:
      told = json.dumps({**run_identity.record(config), run_identity.RUN: name}).encode()
      record = run_identity.RECORD, np.frombuffer(told, np.uint8)
      publisher.publish(version, [*to_leaves(shapes), record])

    publish(1, 'two-2')
    with pytest.raises(service.Refused, match=r"'one-1'.*'two-2'"):
      acting.run()
    publish(2, 'one-1')
    acting = acting_process.Acting(resolve(config), acting_process.Options(addresses))
    ended, thread = in_background(acting.run)
    until(lambda: ended or client.table('unrolls').info().waiting_inserts)
    publish(3, 'two-2')
    thread.join(120)
    assert len(ended) == 1 and isinstance(ended[0], UsageError), ended
    assert all(name in str(ended[0]) for name in ("'two-2'", "'one-1'"))


def test_a_learner_refuses_a_record_of_another_run(tmp_path: Path) -> None:
  config, addresses = tiny(), addresses_in(tmp_path)
  other = json.dumps(run_identity.record(dataclasses.replace(config, unroll_length=3)))
  learner = publishing.Publishing(addresses, config, 1.0, 'one-1', dict)
  reader = parameters.Parameters(addresses.parameters, record=other)
  refused = pytest.raises(service.Refused, match=r'--unroll-length: .* 2, .* 3')
  with contextlib.closing(learner), contextlib.closing(reader), refused:
    reader.get(60)


def test_a_spare_with_other_settings_is_refused_at_once(tmp_path: Path) -> None:
  config, addresses = tiny(), addresses_in(tmp_path)
  compare = functools.partial(run_identity.differences, run_identity.record(config))
  with parameters.Publisher(addresses.parameters, environments=4, differences=compare) as publisher:
    publisher.leases.held['another'] = range(4)
    other = dataclasses.replace(config, unroll_length=3)
    with pytest.raises(service.Refused, match=r'--unroll-length: .* 2, .* 3'):
      acting_process.Acting(resolve(other), acting_process.Options(addresses)).run()
    acting = acting_process.Acting(resolve(config), acting_process.Options(addresses))
    ended, thread = in_background(acting.run)
    until(lambda: ended or publisher.waited_for)
    assert not ended
    acting.newest.close()
    thread.join(60)


@pytest.mark.parametrize(
  'text', ['{', '7', '[' * 100 + ']' * 100, '{"agent": 1}', '{"env": {"a": 2}}']
)
def test_a_record_that_is_none_differs(text: str) -> None:
  assert run_identity.differences(run_identity.record(tiny()), text)


def test_a_process_moves_to_other_environments(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  """Though it waits to write, as nothing takes what is in the queue."""
  caplog.set_level(logging.INFO)
  config = tiny()
  addresses = addresses_in(tmp_path)
  options = acting_process.Options(addresses, 2)
  agent = resolve(config).agent
  told = json.dumps({**run_identity.record(config), run_identity.RUN: 'one-1'}).encode()
  leaves = [*to_leaves(jax.jit(agent.init)(jax.random.key(0)).params),
            (run_identity.RECORD, np.frombuffer(told, np.uint8))]  # fmt: skip
  with (
    ReplayServer(addresses.replay[0]),
    service.connect(addresses.replay) as client,
    parameters.Publisher(addresses.parameters, environments=4) as publisher,
  ):
    publisher.publish(1, leaves)
    ended, thread = in_background(
      lambda: acting_process.act_until_finished(resolve(config), options, learner_client.Ending())
    )
    until(lambda: ended or '0 to 1 of 4' in caplog.text)
    table = client.table('unrolls')
    until(lambda: ended or table.info().waiting_inserts)
    publisher.leases.held['another'] = range(2)
    (peer,) = publisher.peers
    publisher.listener.call(lambda: publisher.listener.tell_gone(peer, 'a test'))
    until(lambda: ended or '2 to 3 of 4' in caplog.text)
    seen: set[int] = set()
    for _ in range(100):
      if {2, 3} <= seen:
        break
      seen |= set(table.sample(4, at_least=1, timeout=60).data['env_id'].tolist())
    publisher.publish(2, [*leaves, (run_identity.FINISHED, np.ones(1, np.uint8))])
    thread.join(120)
  assert [type(e) for e in ended] == [errors.RunFinished], ended
  assert seen == {0, 1, 2, 3}


def test_a_run_that_is_complete_ends_a_process_that_waits_for_a_service(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  caplog.set_level(logging.INFO)
  config, addresses = tiny(), addresses_in(tmp_path)
  told = json.dumps({**run_identity.record(config), run_identity.RUN: 'one-1'}).encode()
  leaves = [*to_leaves(jax.jit(resolve(config).agent.init)(jax.random.key(0)).params),
            (run_identity.RECORD, np.frombuffer(told, np.uint8))]  # fmt: skip
  with parameters.Publisher(addresses.parameters, environments=4) as publisher:
    publisher.publish(1, leaves)
    ended, thread = in_background(
      acting_process.Acting(resolve(config), acting_process.Options(addresses)).run
    )
    until(lambda: ended or addresses.replay[0] in caplog.text)
    publisher.publish(2, [*leaves, (run_identity.FINISHED, np.ones(1, np.uint8))])
    thread.join(120)
  assert [type(e) for e in ended] == [errors.RunFinished], ended


def test_a_failing_publisher_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  looks, made = 0, list[parameters.Publisher]()

  def fail() -> None:
    raise ArithmeticError

  def noted(*args: Any, publisher: Any = parameters.Publisher) -> parameters.Publisher:
    made.append(publisher(*args))
    return made[-1]

  def look(self: publishing.Publishing) -> None:
    nonlocal looks
    if not looks:
      made[0].listener.call(fail)
    if made[0].failure:
      looks += 1
      assert looks < 3, 'it waits on'

  monkeypatch.setattr(parameters, 'Publisher', noted)
  monkeypatch.setattr(publishing.Publishing, 'warn_if_alone', look)
  addresses = addresses_in(tmp_path)
  with ReplayServer(addresses.replay[0]), pytest.raises(errors.RunError, match='ArithmeticError'):
    loop.train(tiny(), tmp_path / 'run', addresses=addresses, quiet=True)


def test_a_learner_that_waits_notices_that_its_directory_is_gone(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  looks, run_dir = 0, tmp_path / 'run'

  def look(self: publishing.Publishing) -> None:
    nonlocal looks
    looks += 1
    assert looks < 100, 'it waits on'
    shutil.rmtree(run_dir, ignore_errors=True)

  monkeypatch.setattr(distributed_learner, 'WAIT_SECONDS', 0.05)
  monkeypatch.setattr(publishing.Publishing, 'warn_if_alone', look)
  addresses = addresses_in(tmp_path)
  with ReplayServer(addresses.replay[0]), pytest.raises(errors.RunError, match='was removed'):
    loop.train(tiny(), run_dir, addresses=addresses, quiet=True)
  assert looks < 100


def test_a_learner_needs_all_keys_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def compiled(*args: Any) -> None:
    raise Began

  monkeypatch.setattr(distributed_learner.DistributedSource, 'open', compiled)
  keys = tmp_path / 'keys'
  net_keys.new_keys(keys)
  addresses = run_identity.Addresses(('tcp://127.0.0.1:9',), 'tcp://127.0.0.1:*', keys)
  with pytest.raises(Began):
    loop.train(tiny(), tmp_path / 'run', addresses=addresses, quiet=True)
  for name in {*SERVER_FILES, *net_keys.CLIENT_FILES}:
    (keys / name).rename(tmp_path / 'kept')
    with pytest.raises(errors.SecurityError, match=name):
      loop.train(tiny(), tmp_path / 'other', addresses=addresses, quiet=True)
    (tmp_path / 'kept').rename(keys / name)
  assert not (tmp_path / 'other').exists()


def test_learner_devices_are_those_that_learn(tmp_path: Path) -> None:
  config = Config(
    Impala(network=ActorCritic(hidden=(4,))), architecture='sebulba', num_envs=4, unroll_length=2,
    lag='async', replay='service', learner_devices='3,5',
  )  # fmt: skip
  mesh = build.build_learner(resolve(config)).mesh
  assert [d.id for d in mesh.devices.flat] == [3, 5]
  with pytest.raises(UsageError, match='podrace act'):
    build.build_learner(resolve(dataclasses.replace(config, actor_devices='0')))


def test_bad_listening_is_refused_at_once(
  tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  args = ['train', *CATCH, '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service',
          '--connect-replay', 'tcp://127.0.0.1:1', '--run-dir', str(tmp_path / 'run')]  # fmt: skip
  for listen, message in (
    (['unix:/x', '--peer-timeout', '0'], '--peer-timeout'),
    (['tcp://10.0.0.1:1'], '--keys'),
  ):
    with pytest.raises(SystemExit) as end:
      cli.main([*args, '--listen', *listen])
    told = capfd.readouterr().err
    assert end.value.code == 2 and message in told and 'compiling' not in told


@pytest.mark.parametrize(
  ('option', 'size', 'more', 'limit'),
  [
    ('--num-envs', '131072', ['--agent', 'impala'], '40329'),
    ('--num-envs', '40336', ['--agent', 'impala'], '40329'),  # 13 columns each
    ('--num-envs', '64', ['--agent', 'impala', '--devices', '3'], '3 devices'),
    ('--agent.buffer.batch-size', '131072',
     ['--agent.buffer.capacity', '131072', '--agent', 'dqn'], '65536'),
    ('--agent.buffer.batch-size', '47664',
     ['--agent.buffer.capacity', '131072', '--agent', 'r2d2', '--num-envs', '64'], '47662'),
    ('--agent.batch-size', '131072', ['--agent', 'muesli', '--agent.capacity', '200000'], 'at most'),
  ],
)  # fmt: skip
def test_a_batch_beyond_a_sample_is_refused(
  option: str,
  size: str,
  more: list[str],
  limit: str,
  tmp_path: Path,
  capfd: pytest.CaptureFixture[str],
) -> None:
  args = ['train', *more, option, size, '--architecture', 'sebulba', '--lag', 'async',
          '--replay', 'service', '--connect-replay', 'tcp://127.0.0.1:1',
          '--listen', f'unix:{tmp_path}/p', '--run-dir', str(tmp_path / 'run')]  # fmt: skip
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  error = capfd.readouterr().err
  assert end.value.code == 2 and f'{option} {size}' in error and limit in error, error
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_everybody_may_come_and_go(places: Places) -> None:
  learner = places.learn(10_000_000)
  learner.says(places.replay)
  server = places.serve('--checkpoint-every', '1')
  actors = [places.act(16), places.act(16, '--max-staleness', '3')]
  places.step_from(6_000)
  learner.signal(signal.SIGTERM)
  assert learner.wait() == 143, learner.output
  saved = checkpoints(places.run_dir)[-1]
  actors[1].says('stale')
  learner = places.learn(10_000_000)
  learner.says(f' step {saved:,}')
  places.step_from(3_000)
  until(lambda: list((places.folder / 'tables').iterdir()))
  server.kill()
  learner.says('session with')
  actors[0].says('session with')
  learner.process.join(3)  # by then all that it has is learned from, and it waits
  learner.signal(signal.SIGTERM)
  assert learner.wait(30) == 143, learner.output
  actors[0].signal(signal.SIGTERM)
  assert actors[0].wait(30) == 143, actors[0].output
  server = places.serve()
  server.says('listening at')
  learner = places.learn(10_000_000)
  actors[0] = places.act(16)
  places.step_from(3_000)
  learner.kill()
  learner = places.learn(10_000_000)
  places.step_from(3_000)
  for actor in actors:
    actor.signal(signal.SIGTERM)
    assert actor.wait() == 143, actor.output
  learner.signal(signal.SIGINT)
  assert learner.wait() == 130
  server.signal(signal.SIGTERM)
  assert server.wait() == 143


@pytest.mark.slow
def test_who_is_left_alone_gives_up_if_asked_to(places: Places) -> None:
  nobody = places.act(32, '--give-up-after', '0.5')
  assert nobody.wait() == 1
  nobody.says(places.parameters)
  places.serve()
  learner = places.learn(10_000_000)
  learner.says('`podrace act ')
  places.act(16).says('acting in 16 environments')
  actor = places.act(16, '--max-staleness', '1', '--give-up-after', '5')
  actor.says('acting in 16 environments')
  learner.kill()
  assert actor.wait() == 1
  actor.says(' 5 s ')


@pytest.mark.slow
def test_another_run_is_refused_and_both_sides_are_told(places: Places) -> None:
  places.serve()
  places.learn(10_000)
  other = places.act(16, '--agent.network.hidden', '64')
  assert other.wait() == 2
  assert re.search('--agent.network.hidden: .*32.* 64', other.output)
  other = places.act(16, '--env', 'podrace:memory')
  assert other.wait() == 2
  assert re.search('--env: .*podrace:catch.* podrace:memory', other.output)
  alone = places.act(32)
  alone.says('acting in 32 environments')
  alone.signal(signal.SIGINT)
  assert alone.wait() == 130, alone.output


@pytest.mark.slow
def test_an_environment_that_fails_ends_its_process_only(places: Places) -> None:
  env = ['--env', 'gymnasium:host_envs:Wrong-v0,what=raise']
  places.serve()
  learner = places.learn(1_000_000, *env)
  actor = places.act(16, *env)
  assert actor.wait() == 1, actor.output
  assert 'ZeroDivisionError' in actor.output
  assert learner.process.is_alive()


@pytest.mark.parametrize('highest', [9.0, pytest.param(None, marks=pytest.mark.slow)])
def test_new_windows_have_the_highest_priority_of_the_learner(
  highest: float | None, tmp_path: Path
) -> None:
  agent = DQN(buffer=settings(capacity=64, priority_exponent=1.0, min_size=16, batch_size=8))
  config, addresses = tiny(agent=agent), addresses_in(tmp_path)
  told = json.dumps({**run_identity.record(config), run_identity.RUN: 'one-1'}).encode()
  leaves = [*to_leaves(jax.jit(resolve(config).agent.init)(jax.random.key(0)).params),
            (run_identity.RECORD, np.frombuffer(told, np.uint8))]  # fmt: skip
  with (
    ReplayServer(addresses.replay[0]),
    service.connect(addresses.replay) as client,
    parameters.Publisher(addresses.parameters, environments=4) as publisher,
  ):
    more = [] if highest is None else [(run_identity.HIGHEST, np.array(highest))]
    publisher.publish(1, [*leaves, *more])
    acting = acting_process.Acting(resolve(config), acting_process.Options(addresses))
    ended, thread = in_background(acting.run)
    until(lambda: ended or TABLE in client.connections[0].sizes)
    assert client.table(TABLE).sample(1, timeout=60, peek=True).priority == [highest or 1.0]
    publisher.publish(2, [*leaves, (run_identity.HIGHEST, np.array(np.nan))])
    thread.join(120)
    assert len(ended) == 1 and isinstance(ended[0], UsageError), ended


def test_a_feed_knows_the_highest_priority() -> None:
  updated: list[float] = []
  table = SimpleNamespace(
    sampler=lambda size, ahead: contextlib.nullcontext(itertools.repeat(None)),
    update_priorities=lambda key, values: updated.extend(values),
  )
  source = SimpleNamespace(table=table, size=1, ahead=1, prioritised=True, batches=lambda _: [None])
  with contextlib.closing(Feed(source, None, 2.0)) as feed:  # type: ignore[arg-type]
    for priorities in ([1.0, 0.5], [7.0, np.nan], [3.0, 1.0]):
      feed.update(np.arange(2), jnp.array(priorities), lambda: False)
    until(lambda: updated[-1:] == [1.0])
    assert (updated, feed.highest) == ([1.0, 0.5, 3.0, 1.0], 3.0)


@pytest.mark.parametrize('case', ['n-step', 'stacked sequences'])
def test_windows_that_went_through_a_service(case: str) -> None:
  """Hold what the device's would, and have the same first priorities."""
  given: dict[str, Any] = dict(CASES[case])
  stack, kinds = given.get('stack', 0), given.pop('kinds', ('zeros',))
  world = World(7, stack=stack, kinds=kinds)
  buffer = settings(capacity=10_000, priority_exponent=1.0, batch_size=128)
  if case != 'n-step':
    given['initial_priority'] = first_priority
  with contextlib.closing(Both(world, buffer=buffer, **given)) as both:
    with ReplayServer('tcp://127.0.0.1:*') as server:
      client = service.connect(server.address)
      table = client.table(
        'windows', sampler=tables.prioritized(1.0), remover=tables.fifo(),
        rate_limiter=tables.min_size(1), max_size=1000,
        contents=run_tables.window_contents(both.layout, spaces.Discrete(5)),
      )  # fmt: skip
      write = lambda history: client.writer(history, rows_per_chunk=5)  # noqa: E731
      streams = Streams(both.layout, table, write)
      for unroll in range(6):
        trajectory = world.unroll()
        both.memory = both.remember(both.memory, trajectory)
        streams.add(jax.tree.map(jnp.asarray, trajectory), np.full(3, unroll))
      for env in range(3):
        streams.stream(env).writer.flush(timeout=20)
      found = table.sample(128, timeout=20)
      client.close()
    sample = both.decode({**found.data, 'weight': np.ones(128, np.float32)})
    starts = starts_of(world, sample)
    expected = both.window(both.memory, sample.trajectory.env_id, jnp.asarray(starts, jnp.int32))
    for x, y in zip(jax.tree.leaves(sample.trajectory), jax.tree.leaves(expected), strict=True):
      np.testing.assert_array_equal(x, y)
    tree = np.asarray(both.memory.tree[0]).reshape(-1)
    index = np.asarray(sample.trajectory.env_id) * both.w.starts + np.array(starts) // both.w.period
    np.testing.assert_allclose(found.priority, tree[index], rtol=1e-5)


def test_priorities_of_dqn_by_what_acting_saw() -> None:
  """By hand, of windows of 2 steps: two rewards, one that terminates, a step between episodes, a time limit."""
  agent = DQN(discount=0.5, n_step=2, actor_priorities=True)
  timesteps = TimeStep(
    (),
    jnp.array([[0, 0, 0, 0], [1, 2, 0, 1], [4, 8, 8, 8]], jnp.float32),
    jnp.array([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]], jnp.float32),
    jnp.array([[0, 1, 2, 1], [1, 2, 0, 2], [1, 0, 1, 0]], jnp.int8),
  )
  extras = value_based.ValueExtras(jnp.ones((2, 4)), jnp.array([[9.0] * 4, [4.0] * 4]))
  outputs = ActorOutput(jnp.zeros((2, 4), jnp.int32), extras)
  window = Trajectory(timesteps, outputs, (), jnp.arange(4))
  found = agent.initial_priority(window)
  # 1 + 4 / 2 + 4 / 4 - 1; 2 - 1, as the episode is over; none; 1 + 4 / 2 - 1, from where it was cut
  np.testing.assert_allclose(found, [3.0, 1.0, 0.0, 2.0], atol=1e-5)
  with pytest.raises(ValueError, match=r'actor_priorities .*n_step .* 2'):
    DQN(actor_priorities=True)


def test_late_episodes_count() -> None:
  counted = threading.Event()

  class Late:
    calls = 0

    def sample(self, *args: Any, **kwargs: Any) -> Any:
      self.calls += 1
      if self.calls > 1:
        counted.set()
        raise tables.Closed
      error = tables.RateLimited('one shard has not answered')
      totals = {'totals': np.array([[[2.0, 3.0, 5.0, 7.0]]])}
      nothing = np.zeros(1)
      error.taken = tables.Samples(totals, totals, *[nothing] * 5)
      raise error

  def closed(sample: Any) -> Any:
    raise tables.Closed

  feed = feed_of(closed, Late())
  assert counted.wait(600)
  assert feed.episodes() == Totals(2, 3.0, 5.0, 7)
  feed.close()


def test_differences_of_runs_are_told_in_a_few_lines() -> None:
  def differ(there: Any, here: Any, *parts: str) -> None:
    told = run_identity.describe_differences(there, here)
    assert len(told) == len(parts)
    assert all(re.search(part, line) for part, line in zip(parts, told, strict=True)), told

  there, here = (
    run_identity.record(dataclasses.replace(PRESETS[name](), num_envs=n, unroll_length=2))
    for name, n in (('r2d2-memory', 7), ('memory', 3))
  )
  differ(there, here, 'r2d2.* impala', '--num-envs: .* 7.* 3')
  impala = Impala(network=ActorCritic(hidden=(4, 4)))
  one = run_identity.record(Config(impala))
  two = run_identity.record(Config(dataclasses.replace(impala, lambda_=0.5)))
  two['agent']['optimizer'] = 'adam\x1b'
  differ(one, two, r'--agent.optimizer: .* adam, .* adam\\x1b', '--agent.lambda: .* 1.0.* 0.5')
  differ(one, one)
  many = {**one, 'agent': {'name': 'impala', **{f'x_{i}': i for i in range(20)}}}
  few = {**one, 'agent': {'name': 'impala'}}
  differ(many, few, *(f'--agent.x-{i}: .* {i}.* None' for i in range(10)), '10 more')
  rules = {**one, 'agent': {'name': 'impala', 'rules': [['a$', -1], ['b', 0]]}}
  differ(rules, few, r'--agent.rules: .* a\$ -1 b 0.* None')


def test_acting_processes_hear_of_older_units() -> None:
  """config.json leaves the setting out."""
  new = Config(Impala())
  older = with_unrecorded(new, {'agent': {'network': {}}})
  (line,) = run_identity.describe_differences(*map(run_identity.record, (older, new)))
  assert re.match('--agent.network.scaling: .* plain.* space', line)
  command = run_identity.worker_command('act', older, run_identity.Addresses(('unix:r',), 'unix:p'))
  assert '--agent.network.scaling plain' in command


@dataclasses.dataclass(frozen=True)
class OwnImpala(Impala):
  """Somebody's own."""

  boldness: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
  'config',
  [
    PRESETS['r2d2-remote-memory'](),
    dataclasses.replace(
      PRESETS['catch'](), num_envs=8, seed=3,
      agent=dataclasses.replace(PRESETS['catch']().agent, lambda_=0.5, network=ActorCritic(
        hidden=(3, 4), sharding=(('Dense_0/kernel$', -1), ('a b', -2)),
      )),
    ),
    Config(DQN(actor_priorities=True, n_step=2), env='gymnasium:CartPole-v1,a=b'),
    Config(OwnImpala(boldness=(5, 6, 7), discount=0.5), unroll_length=3),
  ],
  ids=lambda config: type(config.agent).__name__,
)  # fmt: skip
def test_the_command_that_starts_acting_does(config: Config) -> None:
  addresses = run_identity.Addresses(('unix:/a', 'unix:/b'), 'unix:/c', insecure=True)
  podrace, command, *args = shlex.split(run_identity.worker_command('act', config, addresses))
  assert (podrace, command) == ('podrace', 'act')
  preset = configure.take_preset(args)
  options = Options(args, act.COMMAND)
  assert options.text('--connect-replay') == 'unix:/a,unix:/b' and '--insecure' in options
  assert options.text('--params') == 'unix:/c'
  made = configure.parse(configure.base_config(preset, None, options), options.arguments)
  assert run_identity.record(made) == run_identity.record(config)


def test_a_preset_as_it_is_needs_no_options() -> None:
  addresses = run_identity.Addresses(('unix:/a',), 'unix:/c', keys=Path('here'))
  assert run_identity.worker_command('act', PRESETS['apex-pong'](), addresses) == (
    'podrace act apex-pong --connect-replay unix:/a --params unix:/c --keys DIR'
  )


def test_who_waits_for_acting_processes_says_so_now_and_then(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  acting, now = 0, 100.0
  publisher = SimpleNamespace(
    clients=lambda role: acting * (role == parameters.ACTING), reachable='tcp://127.0.0.1:7'
  )
  monkeypatch.setattr(parameters, 'Publisher', lambda *args: publisher)
  addresses = run_identity.Addresses(('unix:/a',), 'tcp://127.0.0.1:*')
  learner = publishing.Publishing(addresses, PRESETS['apex-pong'](), 0.0, 'one-1', dict)
  monkeypatch.setattr(publishing.time, 'monotonic', lambda: now)

  def times() -> int:
    learner.warn_if_alone()
    told = [r for r in caplog.records if r.levelname == 'WARNING']
    assert all('--params tcp://127.0.0.1:7`' in r.getMessage() for r in told)
    return len(told)

  assert times() == 1 and times() == 1
  now += 31
  assert times() == 2
  acting = 1
  now += 31
  assert times() == 2
  acting = 0
  assert times() == 3


def test_parameters_as_leaves() -> None:
  params = {'a': [jnp.arange(3.0)], 'b': jnp.ones((2, 2), jnp.bfloat16)}
  leaves = dict(to_leaves(params))
  again = from_leaves(jax.eval_shape(lambda: params), leaves)
  jax.tree.map(np.testing.assert_array_equal, again, params)
  other = {'a': [jnp.arange(4.0)], 'c': jnp.ones(1)}
  with pytest.raises(UsageError) as error:
    from_leaves(jax.eval_shape(lambda: other), leaves)
  for path, there, here in (
    ("['a'][0]", 'float32[3]', 'float32[4]'),
    ("['c']", 'none', 'float32[1]'),
    ("['b']", 'bfloat16[2, 2]', 'none'),
  ):
    (line,) = [x for x in str(error.value).splitlines() if f'{path}: ' in x]
    assert 0 < line.index(there) < line.rindex(here)


ENDS = ['--connect-replay', 'tcp://127.0.0.1:1', '--params', 'tcp://127.0.0.1:2']
SOON = [*ENDS, '--give-up-after', '0.1']


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['act', 'catch'], '--connect-replay'),
    (['act', 'catch', *ENDS[:2]], '--params'),
    (['act', *CATCH, *ENDS, '--local-envs', '0'], '--local-envs'),
    (['act', *CATCH, '--connect-replay', 'foo', *ENDS[2:]], '--connect-replay'),
    (['act', *CATCH, *ENDS[:2], '--params', 'bar'], "'bar'"),
    (['act', *CATCH, *ENDS, '--actor-threads', '2', '--local-envs', '5'], '--local-envs 5'),
    (['act', *CATCH, *ENDS, '--local-envs', '33'], '--num-envs 32'),
    (['act', *CATCH, *ENDS, '--local-envs', 'half'], "'half'"),
    (['act', *CATCH, '--connect-replay', 'tcp://10.0.0.1:1', *ENDS[2:]], '--keys'),
    (['act', 'cach', *ENDS], "'cach'"),
    (['act', '--agent', 'impalla', *ENDS], "'impalla'"),
    (['act', '--env', 'podrace:cach', *ENDS], 'nearest: catch'),
    (['act', '--num-envs', '0', *ENDS], '--num-envs'),
    (['act', '--lag', '1', *SOON], '--lag async'),
    (['act', '--architecture=anakin', *SOON], '--architecture sebulba'),
    (['act', '--replay', 'host', *SOON], '--replay service'),
    (['act', '--total-steps', '1000', *SOON], '--total-steps'),
    (['act', '--log_every=7', *SOON], '--log-every'),
    (['act', '--checkpoint-every', '7', *SOON], '--checkpoint-every'),
    (['act', 'r2d2-remote-memory', '--max-lag', '7', *SOON], '--max-lag'),
    (['act', '--max-staleness', 'nan', *ENDS], '--max-staleness'),
    (['act', '--give-up-after', '-1', *ENDS], '--give-up-after'),
    (['train', 'apex-pong', *ENDS[:2]], '--listen'),
    (['train', 'r2d2-remote-memory'], '--connect-replay'),
    (['train', 'r2d2-remote-memory', '--lag', '1'], '--lag async'),
  ],
)
def test_bad_usage_is_2(
  args: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  more = ['--run-dir', str(tmp_path / 'run')] if args[0] == 'train' else []
  with pytest.raises(SystemExit) as end:
    cli.main([*args, *more])
  assert end.value.code == 2
  assert message in capfd.readouterr().err
