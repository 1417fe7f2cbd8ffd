"""A stage in the run's process: labels as the learner would compute them, in three tables."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import until
from label_agent import Regression, catch_log, write_catch_log
from processes import (
  Podrace,
  as_users_have_it,
  assert_same_run,
  cache,
  checkpoints,
  lines,
  podrace,
)
from shorthand import slow_after
from test_sebulba import Running, Sebulba, compiled, jittery, keys

from podrace import tables
from podrace.agents.logged import Logged
from podrace.envs.host import base as host
from podrace.envs.logs.log_pool import host_spec
from podrace.replay import Buffer
from podrace.settings.agents import bind
from podrace.topology import split_devices

BUFFER = Buffer(capacity=512, batch_size=16, min_size=96, samples_per_insert=2.0)  # 4 an update
AGENT = Regression(buffer=BUFFER)


def program(
  lag: str, labels: str = 'stage', learners: str = '0', threads: int = 1, **changes: Any
) -> Sebulba:
  spec = host.make('podrace:catch')
  agent = bind(dataclasses.replace(AGENT, labels=labels, **changes), spec, 100, 8)
  return Sebulba(
    agent, spec, agent.memory(8, 4), split_devices('0', learners), 8, 4, threads, lag=lag,
    host_replay=True,
  )  # fmt: skip


def with_log(share: tuple[int, int], lag: str = '1', **buffer: Any) -> Sebulba:
  """Catch, of which a share of the environments replays a log."""
  spec = host.make('podrace:catch')
  inner = dataclasses.replace(AGENT, buffer=dataclasses.replace(BUFFER, **buffer))
  agent = Logged(bind(inner, spec, 100, 8), share)
  spec = host_spec(catch_log(), share, spec)
  return Sebulba(
    agent, spec, agent.memory(8, 4), split_devices('0', '0'), 8, 4, lag=lag, host_replay=True
  )


def contents(table: tables.Table) -> dict[str, np.ndarray]:
  """The windows of a table."""
  with table.desk.running:
    items = [item for item in table.contents.items if item is not None]
  drawn = tables.items.Draws(items, [tuple(np.zeros(len(items)) for _ in range(4))])
  return drawn.read(table.store, items[0].signature.structure).data


def train_of(run: Running) -> Any:
  return run.driver.source.replay.labels.train.table


def test_at_lag_0_labels_are_the_learners() -> None:
  """The same windows, labels and parameters as without a stage, to rounding."""
  states, logs = [], []
  for labels in ('learner', 'stage'):
    with Running(program('0', labels)) as run:
      states.append(run.advance(20))
      logs.append(run.driver.read_log(states[-1])[0])
  a, b = (state.train.params for state in states)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)
  assert int(a.steps) == int(b.steps) == 4 * 18  # from the third update on
  assert logs[0]['metrics']['target'] == pytest.approx(logs[1]['metrics']['target'], rel=1e-5)
  line = logs[1]['host']
  assert line['labels_age_mean'] == line['labels_age_max'] == 0
  assert line['labels_online'] == line['labels_per_example'] == 1 and line['labels_per_s'] > 0
  assert not any(name.startswith('labels') for name in logs[0]['host'])
  assert line['replay_samples'] == logs[0]['host']['replay_samples'] == 16 * 4 * 18


@pytest.mark.slow
@pytest.mark.parametrize('lag', slow_after(1, 'async', '1'))
def test_otherwise_they_are_one_update_old(lag: str) -> None:
  with Running(program(lag, noise=0.0)) as run:
    params = jax.tree.map(jnp.copy, run.advance(19).train.params)
    run.advance(1)
    run.driver.source.replay.wait()
    counts = train_of(run).contents.counts
    assert (counts.inserts, counts.samples) == (16 * 4 * 19, 16 * 4 * 18)
    ahead = contents(train_of(run))
    assert (ahead['version'] == 19).all() and len(ahead['version']) == 64
    agent = run.program.learning.agent
    window = run.program.learning.replay.trajectory({k: jnp.asarray(x) for k, x in ahead.items()})
    expected = agent.label(params, window, jax.random.key(0))
    np.testing.assert_allclose(ahead['extras/label'][:, 0], expected, atol=1e-5)
    line = run.driver.read_log(run.state)[0]['host']
    assert line['labels_age_max'] == 1
    # The first update that learns has labels of its own parameters.
    assert line['labels_age_mean'] == pytest.approx(17 / 18)


@pytest.mark.slow
def test_labels_are_of_both_tables_by_the_share() -> None:
  """A schedule from a quarter to a half, over the first 20 updates."""
  run = with_log((1, 2), online_share=0.25, online_share_end=0.5, online_share_steps=640)
  with Running(run) as running:
    running.advance(30)
    replay = running.driver.source.replay
    replay.wait()
    assert set(replay.sources) == {'windows', 'offline'}
    online, offline = (contents(replay.sources[name]) for name in ('windows', 'offline'))
    assert {int(x) % 2 for x in online['env_id']} == {1}
    assert {int(x) % 2 for x in offline['env_id']} == {0}
    assert online['observation/recorded'].max() == 0  # only the log has actions
    assert all(len(t) <= 256 for t in replay.sources.values())  # half of the capacity each
    counts = {name: t.contents.counts.samples for name, t in replay.sources.items()}
    line = running.driver.read_log(running.state)[0]['host']
    ahead = contents(replay.labels.train.table)
  steps = 32 * np.arange(3, 32)  # at the end of each update that has labels, and the one ahead
  expected = 64 * (0.25 + 0.25 * np.minimum(steps / 640, 1)).sum()
  assert counts['windows'] == pytest.approx(expected, abs=len(steps) * 0.5)
  assert counts['windows'] + counts['offline'] == 64 * len(steps)
  share = (counts['windows'] - 32) / (64 * (len(steps) - 1))  # without the labels ahead
  assert line['labels_online'] == pytest.approx(share, abs=0.01)
  assert (ahead['logged'] == (ahead['env_id'] % 2 == 0)).all() and 0 < ahead['logged'].mean() < 1


def test_a_log_alone_is_offline() -> None:
  with Running(with_log((1, 1), '0')) as run:
    run.advance(10)
    assert set(run.driver.source.replay.sources) == {'offline'}
    line = run.driver.read_log(run.state)[0]['host']
  assert line['labels_online'] == 0 and line['replay_windows'] == 8 * 40


def test_the_tables_are_in_the_checkpoint(tmp_path: Path) -> None:
  """A run goes on from it with the labels that were made ahead, as if it had not ended."""
  with Running(with_log((1, 2), '1', online_share=0.25)) as run:
    source = run.driver.source
    state = run.advance(12)
    write = source.save(tmp_path / '12')
    record = write()
    ahead = contents(source.replay.labels.train.table)['extras/label']
    saved = jax.tree.map(jnp.copy, state)
    expected = jax.device_get(run.advance(8).train)
  other = with_log((1, 2), '1', online_share=0.25)
  driver = compiled(other)
  driver.source.restore(tmp_path / '12', record)
  restored = contents(driver.source.replay.labels.train.table)['extras/label']
  assert set(ahead.ravel().tolist()) == set(restored.ravel().tolist()) and len(ahead)
  driver.start(saved, keys(0))
  actual, made = driver.advance(saved, 8, lambda: False)
  driver.close()
  assert made == 8
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual.train), expected)


def test_labels_of_another_lag_are_used_up(tmp_path: Path) -> None:
  """With --override the lag may change from one under which labels are made ahead."""
  with Running(program('async')) as run:
    state = run.advance(12)
    record = run.driver.source.save(tmp_path / '12')()
    saved = jax.tree.map(jnp.copy, state)
  driver = compiled(program('0'))
  driver.source.restore(tmp_path / '12', record)
  driver.start(saved, keys(0))
  ages = []
  for updates in (1, 2):
    saved, _ = driver.advance(saved, updates, lambda: False)
    log, saved = driver.read_log(saved)
    ages.append(log['host']['labels_age_max'])
  driver.close()
  assert ages[0] > ages[1] == 0


@pytest.mark.slow
def test_timing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  actual = []
  for seed in range(3):
    with monkeypatch.context() as patch:
      jittery(patch, seed)
      with Running(program('1', threads=2)) as run:
        actual.append(jax.device_get(run.advance(20).train))
  for other in actual[1:]:
    jax.tree.map(np.testing.assert_array_equal, actual[0], other)


@pytest.mark.slow
def test_killed_runs_end_alike(tmp_path: Path, cache: Path) -> None:
  """With a log, so that a checkpoint has three tables; killed three times."""
  log = write_catch_log(tmp_path / 'noise')
  args = [
    'train', 'catch', '--agent', 'label_agent:Regression', '--architecture', 'sebulba', '--replay',
    'host', '--num-envs', '8', '--unroll-length', '4', '--actor-threads', '1', '--log', str(log),
    '--log-share', '1/2', '--agent.buffer.online-share', '0.25', '--total-steps', '6400',
    '--checkpoint-every', '640', '--log-every', '640',
  ]  # fmt: skip
  runs = [tmp_path / name for name in ('whole', 'killed')]
  code, output = podrace([*args, '--run-dir', str(runs[0])], tmp_path / 'whole.txt', 1, cache)
  assert code == 0, output
  for kill in range(3):
    process = Podrace([*args, '--run-dir', str(runs[1])], tmp_path / f'{kill}.txt', 1, cache)
    step = 640 * (2 * kill + 2)
    until(lambda: (runs[1] / 'checkpoints').is_dir() and checkpoints(runs[1])[-1:] >= [step])
    process.kill()
  code, output = podrace([*args, '--run-dir', str(runs[1])], tmp_path / 'last.txt', 1, cache)
  assert code == 0, output
  assert_same_run(*runs)
  assert lines(runs[1])[-1]['labels_online'] == 0.25
