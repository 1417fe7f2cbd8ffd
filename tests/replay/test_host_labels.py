"""A stage in the run's process: labels as the learner would compute them, in three tables."""
# ruff: noqa: F401 (fixtures of processes)

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from label_agent import Regression
from processes import Podrace, as_users_have_it, assert_same_run, cache, lines, podrace, summary
from test_sebulba import Running, Sebulba, jittery

from podrace import cli
from podrace.envs.host import base as host
from podrace.replay import Buffer
from podrace.settings.agents import bind
from podrace.topology import split_devices

BUFFER = Buffer(capacity=512, batch_size=16, min_size=96, samples_per_insert=2.0)  # 4 an update
AGENT = Regression(buffer=BUFFER)


def program(lag: str, labels: str = 'stage', learners: str = '0', threads: int = 1) -> Sebulba:
  spec = host.make('podrace:catch')
  agent = bind(dataclasses.replace(AGENT, labels=labels), spec, 100, 8)
  return Sebulba(
    agent, spec, agent.memory(8, 4), split_devices('0', learners), 8, 4, threads, lag=lag,
    host_replay=True,
  )  # fmt: skip


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
  told = logs[1]['host']
  assert told['labels_age_mean'] == told['labels_age_max'] == 0
  assert told['labels_online'] == told['labels_per_example'] == 1 and told['labels_per_s'] > 0
  assert not any(name.startswith('labels') for name in logs[0]['host'])
  assert told['replay_samples'] == logs[0]['host']['replay_samples'] == 16 * 4 * 18


@pytest.mark.parametrize('lag', ['1', 'async'])
def test_otherwise_they_are_one_update_old(lag: str) -> None:
  with Running(program(lag)) as run:
    run.advance(20)
    run.driver.source.replay.wait()
    counts = train_of(run).contents.counts
    assert (counts.inserts, counts.samples) == (16 * 4 * 19, 16 * 4 * 18)
    told = run.driver.read_log(run.state)[0]['host']
    assert told['labels_age_max'] == 1
    # The first update that learns has labels of its own parameters.
    assert told['labels_age_mean'] == pytest.approx(17 / 18)


@pytest.mark.slow
def test_timing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  found = []
  for seed in range(3):
    with monkeypatch.context() as patch:
      jittery(patch, seed)
      with Running(program('1', threads=2)) as run:
        found.append(jax.device_get(run.advance(20).train))
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, found[0], other)
