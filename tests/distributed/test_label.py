"""Labelling processes: they fill the table that the learner learns from; they come, go, and end."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import until
from label_agent import Regression, go_first, write_catch_log
from label_run import AGENT, SIZE, Run, check_labels, check_numbers
from processes import Podrace, as_users_have_it, cache
from test_apex import Places, places

from podrace import cli
from podrace.distributed import replay, stage
from podrace.distributed.batches import Once
from podrace.distributed.net import link
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.replay.server import ReplayServer
from podrace.envs.logs.log_environment import FLAG
from podrace.replay import Buffer, windows
from podrace.replay.labels import Mix


@pytest.fixture(autouse=True)
def goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
  """This process does not give way, which would be for good."""
  monkeypatch.setattr(stage, 'give_way', lambda: None)


def test_the_learner_gets_each_label_once(
  tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Windows as acted, labelled by the parameters of the version that they name."""
  monkeypatch.setattr(link, 'METRICS_SECONDS', 0.1)
  caplog.set_level(logging.INFO)
  run = Run(tmp_path)
  address = run.addresses.replay[0]
  with run.publisher, ReplayServer(address) as server, replay.connect(address) as client:
    run.publish(3)
    run.act()
    run.label()
    table = run.train_table(client)
    samples = [table.sample(SIZE, timeout=120) for _ in range(4)]
    until(lambda: server.tables['train'].info().waiting_inserts)  # the queue is full
    assert len(server.tables['train']) == 2 * SIZE
    run.publish(9)
    while (newest := table.sample(SIZE, timeout=120)).data['version'][0] < 9:
      samples.append(newest)
    samples.append(newest)
    windows = server.tables['windows'].contents.counts
    train = server.tables['train'].contents.counts
    assert train.samples == SIZE * len(samples)
    # Draws in advance: two batches read, one computed, one written, and those of the queue.
    assert train.inserts <= windows.samples <= train.inserts + 6 * SIZE
    until(lambda: run.publisher.clients('label')[0].get('labels_per_s', 0) > 0)
    assert 'searches_per_s' not in run.publisher.clients('label')[0]
    run.end(10, 2)
  labels = [x.data for x in samples]
  assert list(check_numbers(labels).values()) == [SIZE * len(samples)]
  assert {3, 9} == {int(x) for data in labels for x in data['version']}
  for data in (labels[0], labels[-1]):
    check_labels(run, data)
  assert any('labelled' in r.getMessage() and 'labels/s' in r.getMessage() for r in caplog.records)


def test_labels_of_a_log_are_of_a_table_of_their_own(tmp_path: Path) -> None:
  """A quarter is online, and the limiter keeps samples_per_insert over all environments."""
  buffer = dataclasses.replace(Regression().buffer, online_share=0.25, min_size=128)
  run = Run(
    tmp_path, agent=Regression(noise=0.0, buffer=buffer), env='podrace:catch', log_share='1/2',
    log=str(write_catch_log(tmp_path / 'noise')),
  )  # fmt: skip
  address = run.addresses.replay[0]
  with run.publisher, ReplayServer(address) as server, replay.connect(address) as client:
    run.publish(3)
    run.act()
    run.label()
    table = run.train_table(client)
    labels = [table.sample(SIZE, timeout=120).data for _ in range(100)]
    counts = {k: t.contents.counts for k, t in server.tables.items()}
    limits = server.tables['windows'].rate_limiter.name
    run.end(4, 2)
  assert {'windows', 'offline', 'train'} <= set(counts)
  (made,) = check_numbers(labels).values()
  logged = np.concatenate([x['logged'] for x in labels])
  assert logged.mean() == 0.75 and made == 100 * SIZE
  for data in labels:
    np.testing.assert_array_equal(data['logged'], data['env_id'] % 2 == 0)
    np.testing.assert_array_equal(data['logged'], data[f'observation/{FLAG}'][:, 0] == 1)
  # The limiter counts 4 draws of a batch and wants 2 for each window, where 8 and 4 are nominal.
  assert 4 * 100 <= counts['windows'].samples <= 4 * 110
  assert limits.startswith('sample_to_insert_ratio(2, min_size=64,')
  assert counts['offline'].samples == 0  # peeks
  assert counts['windows'].inserts == pytest.approx(counts['offline'].inserts, abs=64)


@pytest.mark.parametrize(
  ('share', 'start', 'end'), [((1, 2), 0.01, 0.5), ((1, 4), 1.0, 0.2), ((3, 4), None, None)]
)
def test_counted_draws_keep_the_pace(
  share: tuple[int, int], start: float | None, end: float | None
) -> None:
  """Over many batches, whatever the share; no batch has fewer online windows than are counted."""
  steps = 1000 if end is not None else 0
  buffer = Buffer(online_share=start, online_share_end=end, online_share_steps=steps)
  w = windows(buffer, 1, 8, 4).windows
  mix = Mix(dataclasses.replace(w, logged=share))
  acting = 1 - share[0] / share[1]
  n = 4000
  online = [mix.online(32, i, i / 2) for i in range(n)]
  counted = [mix.counted(32, i) for i in range(n)]
  assert sum(counted) * mix.period == pytest.approx(32 * n * acting, rel=1e-3)
  assert all(c <= o + 1 for c, o in zip(counted, online, strict=True))
  shares = [acting if start is None else start + (end - start) * min(i / 2000, 1) for i in range(n)]
  assert sum(online) == pytest.approx(32 * sum(shares), rel=1e-2)


def test_a_label_that_comes_again_is_dropped() -> None:
  """As after a restart of the service from a checkpoint."""
  once, actual = Once(4), []
  for numbers in ([0, 1, 2], [3, 4, 1], [4, 5, 6, 7]):
    rows = dict(source=np.full(len(numbers), 9), number=np.array(numbers))
    actual += [x for batch in once.batches(rows) for x in batch['number'].tolist()]
  assert actual == list(range(8))
  assert (once.taken, once.repeated) == (10, 2)


# --- processes --------------------------------------------------------------------------------------


def start(places: Places, command: str, *args: str) -> Podrace:
  """One of the run's processes."""
  where = ['--params', places.parameters]
  if command == 'train':
    where = ['--listen', places.parameters, '--run-dir', str(places.run_dir)]
    args = (*LEARNER, *args)
  words = [command, *AGENT, '--connect-replay', places.replay, *where, *args]
  log = places.folder / f'{len(places.started)}-{command}.txt'
  places.started.append(Podrace(words, log, 1, places.cache, go_first))
  return places.started[-1]


LEARNER = (
  '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', '--log-every', '64',
)  # fmt: skip


@pytest.mark.slow
def test_the_learner_waits_for_labels_and_says_so(places: Places) -> None:
  """Until a labelling process comes; three come and go, and one stays to the end."""
  steps = 12_800
  server, learner = places.serve(), start(places, 'train', '--total-steps', str(steps))
  actor = start(places, 'act')
  learner.says('no labelling process is connected; waiting for labels of `podrace label ')
  asker = Asker(places.parameters, None, False)
  with contextlib.closing(asker):
    until(lambda: asker.ask()['program']['missing'] == ['label'])
    # All at once: the learner is not done before the slowest of them is there.
    labelling = [start(places, 'label', '--batch-size', str(size)) for size in (8, 16, 16)]
    for process, size in zip(labelling, (8, 16, 16), strict=True):
      process.says(f'labelling {size} windows at a time')
    until(lambda: asker.ask()['program']['missing'] == [])
  places.step_from(64)
  labelling[0].kill()
  labelling[1].signal(signal.SIGTERM)
  assert labelling[1].wait() == 143, labelling[1].output
  assert [learner.wait(), actor.wait(), labelling[2].wait()] == [0, 0, 0], learner.output
  line = places.told()[-1]
  assert line['acting_processes'] == line['labelling_processes'] == 1
  assert line['labels_repeated'] == 0 and line['labels_online'] == 1
  updates = steps // 32
  assert line['labels_taken'] == pytest.approx(32 * 4 * updates, rel=0.1)
  assert 0 <= line['labels_age_mean'] <= line['labels_age_max'] < updates
  assert 0.9 < line['labels_per_example'] < 1.2
  assert 'labels/s' in labelling[2].output
  server.signal(signal.SIGTERM)
  assert server.wait() == 143


# --- bad input --------------------------------------------------------------------------------------

ENDS = ['--connect-replay', 'tcp://127.0.0.1:1', '--params', 'tcp://127.0.0.1:2']
STAGE = ['qtopt-grasp', '--agent.labels', 'stage']


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['label', *STAGE], '--connect-replay'),
    (['label', 'qtopt-grasp', *ENDS], '--agent.labels stage'),
    (['label', 'dqn-cartpole', *ENDS], 'dqn'),
    (['label', *STAGE, *ENDS, '--batch-size', '0'], '--batch-size'),
    (['label', *STAGE, *ENDS, '--total-steps', '9'], '--total-steps'),
    (['label', *STAGE, *ENDS, '--log-share', '1/2'], '--log'),
    (['reanalyse', *STAGE, *ENDS], 'podrace label'),
    (['train', *STAGE], 'anakin'),
    (['train', *STAGE, '--architecture', 'sebulba'], '--replay host'),
    (
      ['train', *STAGE, '--architecture', 'sebulba', '--replay', 'host',
       '--agent.buffer.priority-exponent', '1'],
      '--agent.buffer.priority-exponent',
    ),
    (['launch', 'dqn-cartpole', '--as', 'qtopt', '--dry-run'], '--agent qtopt'),
    (['launch', *STAGE[:2], 'learner', '--as', 'qtopt', '--dry-run'], '--agent.labels stage'),
    (['launch', *STAGE, '--as', 'qtopt', '--labellers', '0', '--dry-run'], '--labellers'),
  ],
)  # fmt: skip
def test_bad_usage_is_2(
  args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
  capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  text = capfd.readouterr().err
  assert end.value.code == 2 and message in text and len(text.strip().splitlines()) == 1
  assert not list(tmp_path.iterdir())
