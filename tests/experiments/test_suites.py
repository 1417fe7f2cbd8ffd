"""Suites: data, runs that go on, records, pages and comparisons."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Process, hide_library, until
from closed import closed_output
from disks import small_disk
from processes import as_users_have_it, cache, command, summary
from shared_programs import shared_programs
from shorthand import Capture, Patch, TempPaths, slow_after
from test_runs import called

from podrace import cli
from podrace.commands import configure
from podrace.errors import RunError, UsageError
from podrace.experiments import plot, statistics
from podrace.experiments.suites import suite as suites
from podrace.experiments.suites.kills import kill_repeatedly
from podrace.experiments.suites.records import check_hashes, read_records, thin, write_record
from podrace.experiments.suites.reproduce import (
  Estimate,
  Reproduction,
  Watch,
  check_settings,
  run_program,
)

ROOT = Path(__file__).parents[2]
TINY = """
title = 'Tiny'
about = 'Two tasks, two agents and two seeds'
scale = 'the worst is 0, the best 1'
seeds = 2
together = 2
episodes = 4
max_steps = 600
steps = 1_280
train = '--num-envs 8 --unroll-length 8 --log-every 320 --devices 1'

[tasks.catch]
env = 'podrace:catch'
low = -1
high = 1

[tasks.cartpole]
env = 'gymnax:CartPole-v1'
low = 0
high = 500

[agents.impala]
train = '--agent impala --agent.network.hidden 8'

[agents.ppo]
train = '--agent ppo --agent.minibatches 1 --agent.epochs 1 --agent.network.hidden 8'
acting = 'sampled'

[pairs.'catch/ppo']
together = 1

[[published]]
who = 'Nobody | all'
scores = { cartpole = '495.1 +- 6.9' }
protocol = 'none'
source = 'a test'
"""
PROGRAMS = [
  'cartpole.impala.0',
  'cartpole.ppo.0',
  'catch.impala.0',
  'catch.ppo.0',
  'catch.ppo.1',
]


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: TempPaths, cache: Path) -> Path:
  """A directory with the suite, its records and its runs."""
  folder = tmp_path_factory.mktemp('tiny')
  (folder / 'tiny.toml').write_text(TINY)
  for name in PROGRAMS[1:]:
    with pytest.raises(SystemExit) as end:
      cli.main(['reproduce', *arguments(folder, '--program', name)])
    assert end.value.code == 0
  out, err = io.StringIO(), io.StringIO()
  to_out, to_err = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
  with to_out, to_err, pytest.raises(SystemExit) as end:
    cli.main(['reproduce', *arguments(folder)])
  assert end.value.code == 0, err.getvalue()
  result = json.loads(out.getvalue().splitlines()[-1])
  assert (result['programs'], result['recorded']) == (5, 5)
  assert '1 of 1 programs done' in err.getvalue()
  return folder


@pytest.fixture(scope='module', autouse=True)
def parsed_once() -> Iterator[None]:
  """Reading the options of programs is most of a command's time, and they are few."""
  parse = functools.cache(configure.parse_words)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(configure, 'parse_words', lambda words, prog: parse(tuple(words), prog))
    yield


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: Patch) -> None:
  """No test here is about the intervals of a bootstrap, which has its own."""
  monkeypatch.setitem(statistics.interval.__kwdefaults__, 'resamples', 500)
  monkeypatch.setattr(statistics, 'CURVE_RESAMPLES', 200)


def arguments(folder: Path, *more: str) -> list[str]:
  places = ('--to', str(folder / 'records'), '--dir', str(folder / 'runs'))
  return [str(folder / 'tiny.toml'), *places, *more]


def copy(tiny: Path, tmp_path: Path) -> Path:
  """A copy that a test may change."""
  shutil.copytree(tiny, tmp_path / 'copy')
  return tmp_path / 'copy'


def records(folder: Path) -> dict[str, Any]:
  return {p.stem: json.loads(p.read_text()) for p in sorted((folder / 'records').glob('*.json'))}


# --- the data -------------------------------------------------------------------------------------


def test_the_suites_of_podrace_can_be_read() -> None:
  expected = {
    'atari-5', 'atari-pong', 'classic', 'control', 'exact', 'memory', 'minatar', 'minatar-gpu',
    'minatar-gymnax', 'presets',
  }  # fmt: skip
  assert set(suites.names()) == expected
  for name in suites.names():
    suite = suites.load(name)
    assert len({p.name for p in suite.programs}) == len(suite.programs)
    assert {p.task for p in suite.programs} == set(suite.tasks)
    assert {p.agent for p in suite.programs} == set(suite.agents)
  minatar = suites.load('minatar')
  assert minatar.tasks['breakout'].normalize(np.array([0.37, 57.7])).tolist() == [0, 1]
  (rdq,) = [p.scores for p in minatar.published if p.who == 'regularised dueling, 1e7 steps']
  assert rdq['breakout'] == '57.7 +- 1.5'
  assert all(t.high == float(rdq[n].split()[0]) for n, t in minatar.tasks.items())


FAST = ('atari-pong', 'memory')


@pytest.mark.parametrize('name', slow_after(1, *FAST, *sorted({*suites.names()} - {*FAST})))
def test_every_program_of_a_suite_is_a_command_of_train(name: str, capsys: Capture) -> None:
  """Each is parsed and its environment made; a program fails before it has a directory."""
  from podrace.commands.reproduce import _configure

  suite = suites.load(name)
  first = {(p.task, p.agent): p for p in suite.programs if p.first == 0}
  for program in first.values():
    config = _configure(suite, program)
    assert (config.env, config.total_steps) == (suite.tasks[program.task].env, program.steps)
    assert (config.seed, config.seeds) == (0, program.count)
    assert config.architecture == 'anakin' or program.count == 1


def test_settings_of_later_places_win_and_options_are_joined(tmp_path: Path) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY)
  programs = {p.name: p for p in suites.load(str(tmp_path / 'tiny.toml')).programs}
  assert sorted(programs) == PROGRAMS
  assert [p.count for _, p in sorted(programs.items())] == [2, 2, 2, 1, 1]
  assert programs['catch.ppo.1'].evaluation.acting == 'sampled'
  assert programs['catch.impala.0'].evaluation.acting == 'greedy'
  assert programs['catch.ppo.1'].command == [
    '--env', 'podrace:catch', '--total-steps', '1280', '--num-envs', '8', '--unroll-length', '8',
    '--log-every', '320', '--devices', '1', '--agent', 'ppo', '--agent.minibatches', '1',
    '--agent.epochs', '1', '--agent.network.hidden', '8', '--seed', '1',
  ]  # fmt: skip


def test_a_trial_has_short_programs_and_records_of_its_own(
  tmp_path: Path, cache: Path, capsys: Capture
) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY)
  suite = suites.load(str(tmp_path / 'tiny.toml'), 640)
  assert suite.name == 'tiny-640' and {p.steps for p in suite.programs} == {640}
  assert {p.steps for p in suites.load(suite.source, 10**6).programs} == {1280}
  trial = arguments(tmp_path, '--steps', '640')
  assert called(capsys, 'reproduce', *trial, '--only', 'catch.ppo.1', '--jobs', '1')[0] == 0
  (record,) = records(tmp_path).values()
  assert (record['suite'], record['step']) == ('tiny-640', 640)
  code, _, err = called(capsys, 'reproduce', *arguments(tmp_path, '--only', 'catch.ppo.1'))
  assert code == 2 and 'tiny-640' in err
  page = tmp_path / 'page.md'
  places = ('--to', str(tmp_path / 'records'), '--page', str(page))
  assert called(capsys, 'reproduce', suite.source, '--steps', '640', *places)[0] == 0
  assert '640 steps' in page.read_text() and '--steps 640' in page.read_text()


BAD = [
  ("title = 'Tiny'", '', 'the file has no title'),
  ('seeds = 2', 'seeds = 0', 'the file has a seeds out of range'),
  ('seeds = 2', 'sseds = 2', "the file has 'sseds'"),
  ('steps = 1_280', '', 'catch/impala has no steps'),
  ('low = 0', 'low = 500', 'tasks.cartpole has low = high'),
  ("acting = 'sampled'", "acting = 'best'", "acting of catch/ppo is 'best'"),
  ("[pairs.'catch/ppo']", "[pairs.'catch/dqn']", "pairs has 'catch/dqn'"),
  ('{ cartpole', '{ pong', "published has a task 'pong'"),
  ("'495.1 +-", "'about 495.1 +-", "cartpole has the score 'about 495.1"),
  ("'495.1 +-", "'nan +-", "cartpole has the score 'nan"),
  ('--log-every 320', '--log-every -5', '--log-every'),
  ('--devices 1', '--devices 1 --seeds 3', 'train of catch/impala has --seeds'),
  ('--devices 1', '--devices 1 --total_steps=9', 'has --total-steps'),
  ('--devices 1', '--devices "1', 'train of catch/impala is'),
  ('low = -1', "low = -1\nagents = ['ppo', 'ppo']", 'tasks.catch.agents'),
  ('low = -1', 'low = -1\nagents = []', 'tasks.catch.agents'),
  ("env = 'podrace:catch'", '', 'tasks.catch has no env'),
  ('[tasks.catch]', "[tasks.'../x']", "'../x'"),
  ('[tasks.catch]', '[tasks.catch', 'tiny.toml: '),
  ('--agent.epochs 1', '--agent.epoch 1', '--agent.epoch'),
  ('podrace:catch', 'podrace:cath', 'nearest: catch'),
  ('seeds = 2', 'seeds = 20_000_000', 'the file has a seeds out of range'),
  ("[pairs.'catch/ppo']", "[pairs.'catch/ppo']\nevaluate = '--num-envs 4'", 'not of the agent'),
  ("acting = 'sampled'", "evaluate = '--agent.network.hidden 16'", '--agent.network'),
]


@pytest.mark.parametrize(('was', 'now', 'message'), BAD, ids=[b[2] for b in BAD])
def test_a_suite_that_is_wrong_is_refused(
  was: str, now: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY.replace(was, now, 1))
  code, out, err = called(capsys, 'reproduce', *arguments(tmp_path))
  assert (code, out) == (2, '') and message in err
  assert len(err.splitlines()) <= 3 and not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('name', ['...toml', 'classic.toml', 'a b.toml', 'a\nb.toml'])
def test_a_suite_cannot_have_the_directories_of_others(
  name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text(TINY)
  code, _, err = called(capsys, 'reproduce', name, '--again')
  assert code == 2 and '.toml' in err
  assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_file_of_a_suite_of_podrace_is_that_suite() -> None:
  path = Path(suites.__file__).parent / 'classic.toml'
  assert suites.load(str(path)).programs == suites.load('classic').programs


@pytest.mark.parametrize('content', ['{"a": 1}', '7', '["x"]', '[5, 5]', '[1, 2, 3]', '[-1]', '['])
def test_kills_that_never_were_are_not_counted(content: str, tmp_path: Path) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY.replace('[agents.impala]', '[agents.impala]\nkills = 2'))
  (program, *_) = suites.load(str(tmp_path / 'tiny.toml')).programs
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'kills.json').write_text(content)
  with pytest.raises(UsageError, match=r'kills\.json'):
    kill_repeatedly(program, tmp_path / 'run', lambda text: None)


@pytest.mark.slow
def test_an_environment_that_cannot_evaluate_is_named_before_training(
  tmp_path: Path, cache: Path
) -> None:
  text = TINY.replace(
    "env = 'podrace:catch'", "env = 'podrace:catch'\neval_env = 'gymnax:CartPole-v1'"
  )
  (tmp_path / 'tiny.toml').write_text(text)
  done = command('reproduce', *arguments(tmp_path, '--only', 'catch/impala', '--jobs', '1'))
  assert done.returncode == 2 and 'another observation space' in done.stderr.splitlines()[-1]
  assert not list((tmp_path / 'runs').glob('*/checkpoints'))


def test_an_evaluation_out_of_bounds_is_refused_before_training(
  tmp_path: Path, capsys: Capture
) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY.replace('max_steps = 600', 'max_steps = 3_000_000_000'))
  program = arguments(tmp_path, '--program', 'catch.impala.0')
  code, _, err = called(capsys, 'reproduce', *program)
  assert code == 2 and '--max-steps' in err
  assert not (tmp_path / 'runs/catch.impala.0').exists()


def test_a_file_nested_too_deep_is_refused(tmp_path: Path, capsys: Capture) -> None:
  (tmp_path / 'tiny.toml').write_text('a = ' + '[' * 5_000)
  assert called(capsys, 'reproduce', *arguments(tmp_path))[0] == 2
  assert called(capsys, 'train', '--config', str(tmp_path / 'tiny.toml'))[0] == 2
  (tmp_path / 'tiny.toml').write_text('seed = ' + '1' * 5_001)
  assert called(capsys, 'train', '--config', str(tmp_path / 'tiny.toml'))[0] == 2


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['clasic'], "unknown suite 'clasic': did you mean classic"),
    ([], 'reproduce takes one suite'),
    (['none.toml'], 'none.toml does not exist'),
    (['classic', '--only', 'pong/*'], '--only pong/*: classic has cartpole/ppo'),
    (['classic', '--program', 'x'], '--program x: classic has no such program'),
    (['classic', '--seeds', '0'], '--seeds must be at least 1'),
    (['classic', '--jobs', '0'], '--jobs must be at least 1'),
    (['classic', '--steps', '0'], '--steps must be at least 1'),
    (['classic', '--again'], str(ROOT / suites.RECORDS / 'classic')),
    (['classic', '--to', '/dev/null'], '--to /dev/null'),
    (['classic', '--to', 'x', '--page', 'x.md'], 'x has no record of classic'),
    (['classic', '--page', 'x.html'], '--page x.html'),
    (['classic', '--page', '/dev/null/x.md'], '--page /dev/null'),
    (['classic', '--page', '/'], '--page /'),
    (['classic', '--page', 'x.md', '--only', 'cartpole/ppo'], '--only'),
    (['classic', '--page', 'x.md', '--list'], '--list'),
    (['classic', '--list', '--again', '--to', 'x'], '--again'),
    (['--list', '--seeds', '1'], '--seeds'),
    (['classic', '--task', 'x'], '--only TASK/AGENT'),
  ],
)
def test_bad_usage(
  args: list[str], message: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  code, out, err = called(capsys, 'reproduce', *args)
  assert (code, out) == (2, '') and message in err and len(err.splitlines()) == 1
  assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named_before_anything_runs(
  tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  hide_library(monkeypatch, 'brax')
  code, out, err = called(capsys, 'reproduce', 'control')
  assert (code, out) == (2, '') and len(err.splitlines()) == 1
  assert "pip install 'podrace[brax]'" in err and '--only' in err
  assert not list(tmp_path.iterdir())


def test_the_list_names_suites_with_their_hours(capsys: Capture) -> None:
  code, out, _ = called(capsys, 'reproduce', '--list')
  assert code == 0
  for name in suites.names():
    suite = suites.load(name)
    _, _, rest = out.partition(f'{name:16}{suite.about}')
    runs = sum(p.count for p in suite.programs)
    assert f'{runs} runs; {suite.seconds / 7200:.1f} h on two cores' in rest.splitlines()[1]


# --- runs and records -----------------------------------------------------------------------------


def test_the_list_of_a_suite_has_the_progress_of_its_programs(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  for name in ('catch.ppo.0', 'catch.ppo.1'):
    (folder / 'records' / f'{name}.json').unlink()
  shutil.rmtree(folder / 'runs' / 'catch.ppo.1')
  listed = [*arguments(folder), '--list', '--only', 'catch/*']
  code, out, _ = called(capsys, 'reproduce', *listed)
  steps = summary(folder / 'runs' / 'catch.ppo.0')['step']
  lines = {line.split()[0]: line for line in out.splitlines()}
  assert code == 0 and sorted(lines) == PROGRAMS[2:]
  assert f'{steps:,} of {steps:,}' in lines['catch.ppo.0']
  assert 'not begun' in lines['catch.ppo.1'] and 'recorded' in lines['catch.impala.0']


def test_each_program_has_a_record(tiny: Path) -> None:
  every = records(tiny)
  assert sorted(every) == PROGRAMS
  for name, record in every.items():
    ended = summary(tiny / 'runs' / name)
    assert record['params_sha256'] == ended['params_sha256'] and record['step'] == 1_280
    training = ended.get('episode_return_by_seed') or [ended['episode_return']]
    np.testing.assert_allclose(record['training'], training, rtol=1e-5)
    seeds = record['seeds']
    assert len(record['evaluated']) == len(seeds) == record['config']['seeds']
    curve = record['curve']
    assert curve['step'] == [320, 640, 960, 1280]
    assert [len(row) for row in curve['returns']] == [4] * len(seeds)
    assert re.match(r'[0-9a-f]{40}|version ', record['commit'])
    assert record['machine']['cores'] >= 1 and record['machine']['python']
    assert (tiny / 'records' / f'{name}.json').stat().st_size < 5_000
  assert [every[f'catch.ppo.{i}']['seeds'] for i in range(2)] == [[0], [1]]
  hashes = {r['params_sha256'] for r in every.values()}
  assert len(hashes) == 5


def test_an_evaluation_is_that_of_the_eval_command(tiny: Path, capsys: Capture) -> None:
  for name, way in (('catch.impala.0', '--greedy'), ('catch.ppo.1', '--sample')):
    record = records(tiny)[name]
    seed = str(1_000_000 + record['seeds'][0])
    run = str(tiny / 'runs' / name)
    code, out, _ = called(capsys, 'eval', run, way, '--episodes', '4', '--seed', seed)
    result = json.loads(out.splitlines()[-1])
    means = result.get('episode_return_mean_by_seed') or [result['episode_return_mean']]
    assert code == 0 and record['evaluated'] == means


def test_a_recorded_suite_is_not_trained_again(tiny: Path, capsys: Capture) -> None:
  before = {p: p.stat().st_mtime_ns for p in tiny.rglob('*.json')}
  code, out, err = called(capsys, 'reproduce', *arguments(tiny))
  assert code == 0 and '5 of 5 programs are recorded' in err
  assert json.loads(out)['recorded'] == 5
  assert {p: p.stat().st_mtime_ns for p in tiny.rglob('*.json')} == before


def test_a_recorded_suite_succeeds_without_a_reader(tiny: Path, monkeypatch: Patch) -> None:
  with closed_output(monkeypatch), pytest.raises(SystemExit) as end:
    cli.main(['reproduce', *arguments(tiny)])
  assert end.value.code == 0


def test_other_settings_are_named_and_not_mixed(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  changed = TINY.replace('--agent ppo', '--agent ppo --agent.learning-rate 3e-3', 1)
  (folder / 'tiny.toml').write_text(changed.replace('episodes = 4', 'episodes = 5', 1))
  before = records(folder)
  code, out, err = called(capsys, 'reproduce', *arguments(folder))
  assert (code, out) == (2, '') and records(folder) == before
  assert (
    'config.agent.learning_rate: 0.001 -> 0.003' in err and 'evaluation.episodes: 4 -> 5' in err
  )
  assert before['catch.ppo.0']['commit'][:20] in err and '--again' in err
  # without a record, the run that was begun has other settings
  (folder / 'records' / 'catch.ppo.0.json').unlink()
  code, _, err = called(
    capsys, 'reproduce', *arguments(folder, '--only', 'catch/ppo', '--seeds', '1')
  )
  assert code == 2 and 'agent.learning_rate: 0.001 -> 0.003' in err and 'runs/catch.ppo.0' in err


@pytest.mark.parametrize(
  ('was', 'now', 'tasks'),
  [
    ('--agent ppo', '--agent ppo --agent.learning-rate 3e-3', ['catch', 'cartpole']),
    ('gymnax:CartPole-v1', 'gymnax:Nowhere', ['catch']),
  ],
)
def test_records_of_other_settings_are_left_out_of_the_scores(
  was: str, now: str, tasks: list[str], tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  (folder / 'tiny.toml').write_text(TINY.replace(was, now, 1))
  code, out, err = called(capsys, 'reproduce', *arguments(folder, '--only', 'catch/impala'))
  assert code == 0 and 'cartpole.ppo.0' in err
  scores = json.loads(out)['scores']
  assert {*scores} == {*tasks} and all('impala' in agents for agents in scores.values())
  assert ('ppo' in scores['catch']) == (tasks == ['catch'])


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: Capture) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY)
  args = [str(tmp_path / 'tiny.toml'), '--to', '/proc/x', '--dir', str(tmp_path / 'runs')]
  code, _, err = called(capsys, 'reproduce', *args)
  assert code in (1, 2) and '/proc/x' in err.splitlines()[-1]
  assert not list((tmp_path / 'runs').glob('*'))


@pytest.mark.parametrize(
  ('was', 'now', 'only'),
  [('--num-envs 8', '--num-envs 16', ''), ("[pairs.'catch/ppo']\ntogether = 1", '', 'together')],
)
def test_again_discards_what_no_run_can_change(
  was: str, now: str, only: str, tiny: Path, tmp_path: Path
) -> None:
  folder = copy(tiny, tmp_path)
  (folder / 'tiny.toml').write_text(TINY.replace(was, now))
  suite = suites.load(str(folder / 'tiny.toml'))
  programs = [p for p in suite.programs if p.name == 'catch.ppo.0']
  if not only:  # begun, and not recorded
    (folder / 'records/catch.ppo.0.json').unlink()
  configs = {p.name: configure.parse_words(p.command, 'test') for p in programs}
  plan = Reproduction(suite, programs, configs, folder / 'runs', folder / 'records', 1, False)
  with pytest.raises(UsageError, match='num_envs: 8 -> 16' if not only else 'seeds: '):
    check_settings(plan, lambda text: None)
  check_settings(dataclasses.replace(plan, again=True), lambda text: None)
  assert not (folder / 'runs/catch.ppo.0').exists()
  assert not (folder / 'records/catch.ppo.0.json').exists()


def test_again_discards_a_damaged_record_and_no_other_suite_s(tiny: Path, tmp_path: Path) -> None:
  folder = copy(tiny, tmp_path)
  suite = suites.load(str(folder / 'tiny.toml'))
  programs = [p for p in suite.programs if p.name == 'catch.ppo.0']
  configs = {p.name: configure.parse_words(p.command, 'test') for p in programs}
  plan = Reproduction(suite, programs, configs, folder / 'runs', folder / 'records', 1, False)
  path, again = folder / 'records/catch.ppo.0.json', dataclasses.replace(plan, again=True)
  record = json.loads(path.read_text())
  path.write_text(json.dumps(record | {'suite': 'other'}))
  with pytest.raises(UsageError, match='other'):
    check_settings(again, lambda text: None)
  path.write_text(json.dumps(record | {'training': [None, None]}))
  with pytest.raises(UsageError, match='--again'):
    check_settings(plan, lambda text: None)
  assert path.exists() and (folder / 'runs/catch.ppo.0').exists()
  check_settings(again, lambda text: None)
  assert not path.exists() and not (folder / 'runs/catch.ppo.0').exists()


def test_again_discards_a_run_whose_settings_cannot_be_read(tmp_path: Path) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY)
  suite = suites.load(str(tmp_path / 'tiny.toml'))
  programs = [p for p in suite.programs if p.name == 'catch.ppo.0']
  configs = {p.name: configure.parse_words(p.command, 'test') for p in programs}
  plan = Reproduction(suite, programs, configs, tmp_path / 'runs', tmp_path / 'records', 1, False)
  record = tmp_path / 'runs/catch.ppo.0/config.json'
  record.parent.mkdir(parents=True)
  record.write_text('{')
  with pytest.raises(UsageError, match='--again') as e:
    check_settings(plan, lambda text: None)
  assert str(record) in str(e.value) and record.exists()
  again = dataclasses.replace(plan, again=True)
  check_settings(again, lambda text: None)
  assert not record.parent.exists()
  record.parent.mkdir()  # of a program that ended before its run began
  (tmp_path / 'records').mkdir()
  (tmp_path / 'records/catch.ppo.0.json').write_text('{')
  check_settings(again, lambda text: None)
  assert not (tmp_path / 'records/catch.ppo.0.json').exists()


@pytest.mark.slow
def test_again_trains_what_has_changed(tiny: Path, tmp_path: Path, cache: Path) -> None:
  folder = copy(tiny, tmp_path)
  (folder / 'tiny.toml').write_text(
    TINY.replace('--agent ppo', '--agent ppo --agent.learning-rate 3e-3', 1)
  )
  before = records(folder)
  only = ('--only', 'catch/ppo', '--seeds', '1', '--again')
  done = command('reproduce', *arguments(folder, *only))
  assert done.returncode == 0, done.stderr
  after = records(folder)
  assert after['catch.ppo.0']['config']['agent']['learning_rate'] == 3e-3
  assert after['catch.ppo.0']['params_sha256'] != before['catch.ppo.0']['params_sha256']
  assert {k: v for k, v in after.items() if k != 'catch.ppo.0'} == {
    k: v for k, v in before.items() if k != 'catch.ppo.0'
  }


def test_another_commit_with_the_same_settings_is_named(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  path = folder / 'records' / 'catch.ppo.0.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'commit': 'c0ffee' * 6}))
  code, _, err = called(capsys, 'reproduce', *arguments(folder))
  assert code == 0
  assert '1 programs were recorded by another commit, c0ffeec0ffeec0ffeec0' in err


@pytest.mark.parametrize(
  ('content', 'message'),
  slow_after(3,
    ('{', 'is not JSON'), ({'task': 'cartpole'}, 'of another program'),
    ({'curve': {'step': [2, 1], 'returns': [[1.0, 2.0]]}}, 'ascend'), ('{}', 'has no suite'),
    ({'training': ['x']}, 'training'), ({'training': [1.0, 2.0]}, '1 seeds'),
    ({'killed_at': None}, 'killed_at'), ({'killed_at': ['x']}, 'killed_at'),
    ({'curve': {'step': [1], 'returns': 3}}, 'curve'),
    ({'curve': {'step': [1], 'returns': []}}, '1 seeds'),
    ({'curve': {'step': [1, 2], 'returns': [[1.0]]}}, 'lengths'),
  ),
)  # fmt: skip
def test_a_damaged_record_is_named(
  content: Any, message: str, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  path = folder / 'records' / 'catch.ppo.0.json'
  record = json.loads(path.read_text())
  path.write_text(content if isinstance(content, str) else json.dumps(record | content))
  for more in ((), ('--page', str(tmp_path / 'x.md'))):
    code, _, err = called(capsys, 'reproduce', *arguments(folder, *more))
    assert code == 2 and 'catch.ppo.0.json' in err and message in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_it_goes_on_after_a_kill_and_ends_with_the_same_parameters(
  tiny: Path, tmp_path: Path, cache: Path
) -> None:
  """The children of a killed one train on: the next one waits for them, or starts them again."""
  (tmp_path / 'tiny.toml').write_text(TINY)
  args = arguments(tmp_path, '--only', 'catch/ppo')
  environment = {k: v for k, v in os.environ.items() if k == 'JAX_NUM_CPU_DEVICES'}
  os.environ.pop('JAX_NUM_CPU_DEVICES', None)
  try:
    with Process(tmp_path / 'log', '-m', 'podrace', 'reproduce', *args) as process:
      until(lambda: list((tmp_path / 'runs').glob('*/config.json')))
      process.kill()
  finally:
    os.environ.update(environment)
  done = command('reproduce', *args)
  assert done.returncode == 0, done.stderr
  known = records(tiny)
  for name, record in records(tmp_path).items():
    assert record['params_sha256'] == known[name]['params_sha256'], name
    assert (
      record['curve'] == known[name]['curve'] and record['evaluated'] == known[name]['evaluated']
    )
  assert len(records(tmp_path)) == 2


@pytest.mark.slow
def test_a_signal_ends_it_and_its_children(tmp_path: Path, cache: Path) -> None:
  from podrace.run.directory import is_running

  (tmp_path / 'tiny.toml').write_text(TINY)
  with Process(tmp_path / 'log', '-m', 'podrace', 'reproduce', *arguments(tmp_path)) as process:
    until(lambda: list((tmp_path / 'runs').glob('*/lock')))
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.output
  assert not any(is_running(p) for p in (tmp_path / 'runs').iterdir())
  assert '--dir' in process.output


def test_the_evaluation_of_a_program_does_not_read_its_code_again(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  (tmp_path / 'tiny.toml').write_text(TINY)
  suite = suites.load(str(tmp_path / 'tiny.toml'))
  program = suite.programs[0]
  config = configure.parse_words(program.command, 'test')
  own = dataclasses.replace(config, eval_env='gymnasium:host_envs:Own-v0')
  plan = Reproduction(suite, [program], {program.name: own}, tmp_path, tmp_path, 1, False)
  configs: list[Any] = []

  def evaluate(*args: Any, config: Any, **options: Any) -> Any:
    configs.append(config)
    raise RunError('that is all')

  monkeypatch.setattr('podrace.run.loop.train', lambda config, run_dir: run_dir.mkdir())
  monkeypatch.setattr('podrace.run.evaluate.evaluate', evaluate)
  with pytest.raises(RunError, match='that is all'):
    run_program(plan, program, lambda config, words: config, lambda text: None)
  assert configs == [own]


@pytest.mark.slow
def test_a_program_that_fails_is_named_after_the_others(tmp_path: Path, cache: Path) -> None:
  """An episode longer than max_steps ends the evaluation."""
  (tmp_path / 'tiny.toml').write_text(TINY.replace('max_steps = 600', 'max_steps = 9', 1))
  done = command('reproduce', *arguments(tmp_path, '--only', '*/impala', '--jobs', '1'))
  assert done.returncode == 1 and sorted(records(tmp_path)) == ['catch.impala.0']
  last = done.stderr.splitlines()[-2:]
  assert last[0].endswith('1 of 2 programs of tiny failed:')
  assert last[1].startswith('cartpole.impala.0 ended with 1: podrace: ') and '9 steps' in last[1]


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting a small tmpfs needs root')
def test_a_full_disk_is_named(tiny: Path, tmp_path: Path) -> None:
  suite = suites.load(str(tiny / 'tiny.toml'))
  with small_disk(tmp_path / 'disk', 4):
    with pytest.raises(RunError, match=r'catch\.impala\.0\.json cannot be written: No space left'):
      write_record(tmp_path / 'disk', suite.programs[0], {'x': 'y' * 9_000})
    assert not list((tmp_path / 'disk').glob('*.json'))


# --- killed programs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_programs_end_with_the_parameters_of_the_undisturbed(
  tmp_path: Path, cache: Path, capsys: Capture
) -> None:
  text = TINY.replace('[agents.impala]', '[agents.whole]').replace(
    '[agents.ppo]', '[agents.killed]\nkills = 2'
  )
  text = text.replace('--agent ppo --agent.minibatches 1 --agent.epochs 1', '--agent impala')
  text = text.replace("[pairs.'catch/ppo']", "[pairs.'catch/killed']\nseeds = 1")
  text = text.replace('scale', "compare = 'hashes'\nscale").replace(
    'steps = 1_280', 'steps = 400_000'
  )
  text = text.replace(
    'low = -1', "low = -1\nseeds = 1\ntogether = 1\ntrain = '--checkpoint-every 20_000'"
  )
  (tmp_path / 'tiny.toml').write_text(text.replace("acting = 'sampled'", ''))
  done = command('reproduce', *arguments(tmp_path, '--only', 'catch/*'))
  whole, killed = (records(tmp_path)[f'catch.{agent}.0'] for agent in ('whole', 'killed'))
  # It may end before the second kill, which the command does not pass over.
  assert done.returncode == (len(killed['killed_at']) < 2), done.stderr
  assert whole['params_sha256'] == killed['params_sha256']
  assert whole['curve'] == killed['curve'] and whole['evaluated'] == killed['evaluated']
  assert whole['killed_at'] == [] and 1 <= len(killed['killed_at']) <= 2
  output = (tmp_path / 'runs/catch.killed.0/output.txt').read_text()
  assert output.count('compiled in') == len(killed['killed_at']) + 1  # each life
  page = tmp_path / 'x.md'
  assert called(capsys, 'reproduce', *arguments(tmp_path, '--page', str(page)))[0] == 0
  assert f'| {whole["params_sha256"][:16]} | yes |' in page.read_text()
  assert not (tmp_path / 'x-aggregate.png').exists()  # scores are not the question
  path = tmp_path / 'records/catch.killed.0.json'
  path.write_text(json.dumps(killed | {'params_sha256': '0' * 64}))
  assert called(capsys, 'reproduce', *arguments(tmp_path, '--page', str(page)))[0] == 0
  assert f'| {whole["params_sha256"][:16]} | **no** |' in page.read_text()


@pytest.mark.slow
def test_a_kill_comes_after_a_step_that_no_earlier_child_has_reached(
  tmp_path: Path, cache: Path
) -> None:
  """The lines of a killed child are there when the next begins, beyond all of its targets."""
  text = TINY.replace('[agents.impala]', '[agents.impala]\nkills = 2').replace('1_280', '400_000')
  (tmp_path / 'tiny.toml').write_text(text.replace('together = 2', 'together = 1'))
  suite = suites.load(str(tmp_path / 'tiny.toml'))
  program = next(p for p in suite.programs if p.name == 'catch.impala.0')
  program = dataclasses.replace(program, words=(*program.words, '--checkpoint-every', '20_000'))
  run_dir = tmp_path / 'run'
  run_dir.mkdir()
  (run_dir / 'metrics.jsonl').write_text('{"step": 390000}\n')
  killed_at = kill_repeatedly(program, run_dir, lambda text: None)
  # a new run discards the planted line, and is killed at most once before its end
  assert len(killed_at) <= 1 and all(step > 390_000 for step in killed_at)
  assert (run_dir / 'config.json').exists() and (run_dir / 'checkpoints').is_dir()


@pytest.mark.parametrize('recorded', [True, False])
def test_a_program_that_another_process_has_recorded_has_not_failed(
  recorded: bool, tiny: Path, tmp_path: Path
) -> None:
  folder = copy(tiny, tmp_path)
  suite = suites.load(str(folder / 'tiny.toml'))
  plan = Reproduction(suite, suite.programs, {}, folder / 'runs', folder / 'records', 1, False)
  program = next(p for p in suite.programs if p.name == 'catch.ppo.0')
  if not recorded:
    (folder / 'records/catch.ppo.0.json').unlink()
  watch = Watch(plan, {plan.run_dir(program): program}, lambda text: None)
  watch.end(plan.run_dir(program), 2)
  assert [x.partition(' ')[0] for x in watch.failed] == ([] if recorded else ['catch.ppo.0'])


# --- pages and comparisons ------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('hashes', 'same'),
  slow_after(
    2,
    ({'whole.0': 'a', 'whole.1': 'b', 'killed.0': 'a', 'killed.1': 'b'}, 'yes'),
    ({'whole.0': 'a', 'whole.1': 'b', 'killed.0': 'a', 'killed.1': 'x'}, '**no**'),
    ({'whole.0': 'a', 'whole.1': 'b', 'killed.0': 'a'}, 'yes'),
    ({'whole.0': 'a', 'whole.1': 'b', 'killed.0': 'x', 'killed.1': 'b'}, '**no**'),
  ),
)
def test_hashes_are_compared_within_a_seed(
  hashes: dict[str, str], same: str, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  text = TINY.replace('impala]', 'whole]').replace('agents.ppo]', 'agents.killed]')
  ppo = '--agent ppo --agent.minibatches 1 --agent.epochs 1'
  text = text.replace("--agent impala --agent.network.hidden 8'", f"{ppo} --agent.network.hidden 8'\nacting = 'sampled'")  # fmt: skip
  text = text.replace(
    "[pairs.'catch/ppo']", "[pairs.'catch/whole']\ntogether = 1\n[pairs.'catch/killed']"
  )
  (tmp_path / 'tiny.toml').write_text(text.replace('scale', "compare = 'hashes'\nscale", 1))
  (tmp_path / 'records').mkdir()
  for name, digest in hashes.items():
    agent, seed = name.split('.')
    record = records(tiny)[f'catch.ppo.{seed}']
    changes = {'agent': agent, 'seeds': [int(seed)], 'params_sha256': digest * 64}
    (tmp_path / f'records/catch.{name}.json').write_text(json.dumps(record | changes))
  args = arguments(tmp_path, '--page', str(tmp_path / 'x.md'))
  assert called(capsys, 'reproduce', *args)[0] == 0
  assert f'| {"a" * 16} | {same} |' in (tmp_path / 'x.md').read_text()
  suite = suites.load(str(tmp_path / 'tiny.toml'))
  recorded = read_records(tmp_path / 'records', suite)
  with contextlib.nullcontext() if same == 'yes' else pytest.raises(RunError, match='catch'):
    check_hashes(suite, recorded)
  killed = dataclasses.replace(suite.programs[0], kills=3)
  with pytest.raises(RunError, match=rf'{killed.name} was killed 0 times of 3'):
    check_hashes(dataclasses.replace(suite, programs=(killed,)), recorded)


def test_a_page_of_one_agent_whose_tasks_share_an_environment(
  tiny: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  """Each task has its own row and panel, and there is nothing to compare."""
  panels: list[str] = []
  draw = plot.draw

  def drawn(groups: Any, *args: Any) -> Any:
    panels.extend(group.env for group in groups)
    return draw(groups, *args)

  monkeypatch.setattr(plot, 'draw', drawn)
  text = TINY[: TINY.index('[agents.ppo]')].replace(
    "[tasks.cartpole]\nenv = 'gymnax:CartPole-v1'", "[tasks.again]\nenv = 'podrace:catch'"
  )
  (tmp_path / 'tiny.toml').write_text(text)
  (tmp_path / 'records').mkdir()
  for task in ('catch', 'again'):
    record = records(tiny)['catch.impala.0'] | {'task': task, 'commit': 'version 0.1.0'}
    (tmp_path / f'records/{task}.impala.0.json').write_text(json.dumps(record))
  page = tmp_path / 'page' / 'x.md'
  assert called(capsys, 'reproduce', *arguments(tmp_path, '--page', str(page)))[0] == 0
  assert sorted(p.name for p in page.parent.iterdir()) == ['x-curves.png', 'x.md']
  rows = [x for x in page.read_text().splitlines() if x.startswith(('| catch |', '| again |'))]
  assert len(rows) == 2 and panels == ['catch', 'again']
  assert '| version 0.1.0 |' in page.read_text()


def test_a_page_names_the_agents_that_have_not_run(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder, texts = copy(tiny, tmp_path), []
  for lacking in ((), ('catch.ppo.1',), ('catch.ppo.0', 'cartpole.ppo.0')):
    for name in lacking:
      (folder / f'records/{name}.json').unlink()
    page = tmp_path / 'x.md'
    assert called(capsys, 'reproduce', *arguments(folder, '--page', str(page)))[0] == 0
    texts.append('catch by ppo, cartpole by ppo' in page.read_text())
  assert texts == [False, False, True]


def test_a_page_of_records_without_scores_or_curves(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  without = {'catch.impala.0'}, set(PROGRAMS)  # of one agent, of all
  for names, pictures in zip(without, (2, 0), strict=True):
    for name in names:
      record = records(folder)[name]
      curve = {
        k: [[None] * len(y) for y in x] if k == 'returns' else x for k, x in record['curve'].items()
      }
      record |= {'curve': curve, 'evaluated': [None] * len(record['evaluated'])}
      (folder / f'records/{name}.json').write_text(json.dumps(record))
    page = tmp_path / f'{len(names)}.md'
    assert called(capsys, 'reproduce', *arguments(folder, '--page', str(page)))[0] == 0
    assert page.read_text().count('![') == pictures
    assert '| impala | 0.' not in page.read_text()


def test_a_page_names_the_seeds_that_have_a_score(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  record = records(folder)['catch.impala.0']
  record['evaluated'][0] = None
  (folder / 'records/catch.impala.0.json').write_text(json.dumps(record))
  page = tmp_path / 'x.md'
  assert called(capsys, 'reproduce', *arguments(folder, '--page', str(page)))[0] == 0
  (row,) = [x for x in page.read_text().splitlines() if x.startswith('| catch | impala |')]
  cells = [x.strip() for x in row.split('|')]
  assert cells[3] == '2' and '1 of 2' in cells[5] and ' of ' not in cells[6]


def test_a_run_counts_in_each_task_of_its_environment(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  again = "[tasks.again]\nenv = 'podrace:catch'\nlow = -1\nhigh = 1\n\n[agents.impala]"
  (tmp_path / 'tiny.toml').write_text(TINY.replace('[agents.impala]', again))
  code, printed, _ = called(
    capsys, 'plot', str(tiny / 'runs/catch.ppo.0'), '--suite', str(tmp_path / 'tiny.toml'),
    '--records', str(tiny / 'records'), '--out', str(tmp_path / 'x.png'),
  )  # fmt: skip
  assert code == 0 and json.loads(printed)['tasks'] == ['catch', 'again']


def test_a_page_has_the_recorded_numbers(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
  page = tmp_path / 'results' / 'tiny.md'
  code, out, _ = called(capsys, 'reproduce', *arguments(tiny, '--page', str(page)))
  assert code == 0 and json.loads(out) == {'page': str(page), 'recorded': 5, 'programs': 5}
  text = page.read_text()
  every = records(tiny)
  for task, agent in (('catch', 'impala'), ('cartpole', 'ppo')):
    record = every[f'{task}.{agent}.0']
    (row,) = re.findall(
      rf'^\| {task} \| {agent} \| 2 \| 1,280 \| (\S+) \[.* \| (\S+) \[', text, re.M
    )
    assert row == tuple(f'{np.mean(record[k]):.2f}' for k in ('evaluated', 'training'))
  assert '| Nobody \\| all | 495.1 +- 6.9 | none | a test |' in text
  training = np.mean(every['cartpole.ppo.0']['training'])
  assert f'| **ppo, here** | {training:.2f} | training, last tenth | this page |' in text
  scaled = [(np.array(every[f'{t}.impala.0']['evaluated']) - low) / width
            for t, low, width in (('catch', -1, 2), ('cartpole', 0, 500))]  # fmt: skip
  # of four scores the interquartile mean is that of the middle two
  iqm = np.sort(np.concatenate(scaled))[1:3].mean()
  assert re.search(rf'^\| impala \| {iqm:.3f} \[', text, re.M)
  pictures = re.findall(r'!\[[^]]*\]\(([^)]*)\)', text)
  assert len(pictures) == 2
  for name in pictures:
    assert (page.parent / name).read_bytes()[:4] == b'\x89PNG'
  assert 'podrace train --env podrace:catch' in text and every['catch.ppo.0']['commit'][:12] in text


def test_runs_are_compared_with_a_suite(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
  runs = [str(tiny / 'runs' / name) for name in ('catch.ppo.0', 'catch.ppo.1', 'cartpole.ppo.0')]
  args = ('--suite', str(tiny / 'tiny.toml'), '--records', str(tiny / 'records'))
  out = tmp_path / 'x.png'
  code, printed, err = called(capsys, 'plot', *runs, *args, '--out', str(out))
  result = json.loads(printed)
  assert code == 0 and out.exists() and result['tasks'] == ['catch', 'cartpole']
  assert list(result['groups']) == ['yours: ppo', 'impala', 'ppo']
  for name in ('iqm', 'mean', 'optimality_gap'):  # they are the recorded runs
    assert result['groups']['yours: ppo'][name] == pytest.approx(
      result['groups']['ppo'][name], rel=0.05
    )
  chances = {
    (p['better'], p['than']): p['probability'] for p in result['probability_of_improvement']
  }
  assert set(chances) == {('yours: ppo', 'impala'), ('yours: ppo', 'ppo')}
  assert result['published'][0]['scores'] == {'cartpole': '495.1 +- 6.9'}
  assert 'published, Nobody | all: 495.1 +- 6.9 (none)' in err
  code, printed, _ = called(capsys, 'plot', runs[0], *args, '--out', str(out))
  assert code == 0 and json.loads(printed)['tasks'] == ['catch']
  args = ('--suite', str(tiny / 'tiny.toml'), '--records', str(tmp_path / 'none'))
  code, printed, err = called(capsys, 'plot', runs[0], *args, '--out', str(out))
  assert (code, printed) == (2, '') and '--records' in err and str(tmp_path / 'none') in err
  args = ('--suite', 'exact', '--records', str(tmp_path))
  assert called(capsys, 'plot', runs[0], *args, '--out', str(out))[0] == 2


@pytest.mark.parametrize(
  ('suite', 'env', 'agents', 'place'),
  slow_after(
    1,
    ('atari-pong', 'ale:pong,size=60', {'dqn'}, 'checkout'),  # of 3 programs, and 53 of classic
    ('classic', 'gymnax:CartPole-v1', {'ppo', 'pqn'}, 'checkout'),
    ('classic', 'gymnax:CartPole-v1', {'ppo', 'pqn'}, 'every suite'),
  ),
)
def test_records_of_the_checkout_and_of_all_suites_are_used(
  suite: str,
  env: str,
  agents: set[str],
  place: str,
  tiny: Path,
  tmp_path: Path,
  capsys: Capture,
  monkeypatch: Patch,
) -> None:
  """The settings of each program are compared with its record's."""
  shutil.copytree(tiny / 'runs' / 'cartpole.ppo.0', tmp_path / 'run')
  config = tmp_path / 'run' / 'config.json'
  config.write_text(json.dumps(json.loads(config.read_text()) | {'env': env}))
  run, out = str(tmp_path / 'run'), str(tmp_path / 'x.png')
  more = () if place == 'checkout' else ('--records', str(ROOT / suites.RECORDS))
  monkeypatch.chdir(tmp_path)
  code, printed, err = called(capsys, 'plot', run, '--suite', suite, *more, '--out', out)
  assert code == 0 and {'yours: ppo', *agents} <= set(json.loads(printed)['groups']), err


def test_reproduce_lists_the_records_that_plot_reads(
  tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  args = ('reproduce', 'classic', '--list', '--only', 'cartpole.ppo.0', '--only', 'pendulum/ppo')
  code, out, err = called(capsys, *args)
  assert code == 0 and str(ROOT / suites.RECORDS / 'classic') in err
  rows = [line.split() for line in out.splitlines()]
  assert [(row[0], row[-1]) for row in rows] == [
    ('cartpole.ppo.0', 'recorded'), ('pendulum.ppo.0', 'recorded'), ('pendulum.ppo.5', 'recorded'),
  ]  # fmt: skip
  record = tmp_path / suites.RECORDS / 'classic/cartpole.ppo.5.json'  # the first of one's own
  record.parent.mkdir(parents=True)
  record.write_text('{}')
  _, out, err = called(capsys, *args)
  assert str(ROOT) not in err and 'recorded' not in out


def test_scores_of_runs_are_those_of_their_records(
  tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  run, out = str(tiny / 'runs/catch.ppo.0'), str(tmp_path / 'x.png')
  args = ('--suite', str(tiny / 'tiny.toml'), '--records', str(tiny / 'records'), '--out', out)
  _, printed, _ = called(capsys, 'plot', run, *args)
  result = json.loads(printed)
  yours, recorded = result['groups']['yours: ppo'], records(tiny)['catch.ppo.0']
  assert yours['mean'] == pytest.approx((recorded['training'][0] + 1) / 2, abs=1e-6)
  assert yours['mean_interval'] is None and yours['iqm_interval'] is None  # of one run
  assert len(result['groups']['ppo']['mean_interval']) == 2
  assert result['steps'] == {name: {'catch': 1280} for name in ('yours: ppo', 'impala', 'ppo')}


@pytest.mark.parametrize(
  'was_now',
  [
    ('steps = 1_280', 'steps = 9_999'),
    pytest.param(('episodes = 4', 'episodes = 9'), marks=pytest.mark.slow),
  ],
)
def test_records_of_other_settings_are_in_no_page_or_comparison(
  was_now: tuple[str, str], tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder = copy(tiny, tmp_path)
  (folder / 'tiny.toml').write_text(TINY.replace(*was_now))
  page, out = tmp_path / 'x.md', tmp_path / 'x.png'
  suite = ('--suite', str(folder / 'tiny.toml'), '--records', str(folder / 'records'))
  for words in (
    ('reproduce', *arguments(folder, '--page', str(page))),
    ('plot', str(folder / 'runs/catch.ppo.0'), *suite, '--out', str(out)),
  ):
    code, printed, err = called(capsys, *words)
    assert (code, printed) == (2, '') and was_now[0].partition(' ')[0] in err
  assert not page.exists() and not out.exists()


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('--suite', 'minatar'), 'no task is in all configurations of your runs, which are in podrace:catch'),
    (('--suite', 'nope'), "unknown suite 'nope'"),
    (('--suite', 'classic', '--aggregate'), 'leave out --aggregate'),
  ],
)  # fmt: skip
def test_comparisons_that_cannot_be(
  args: tuple[str, ...], message: str, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
  run, out = str(tiny / 'runs' / 'catch.ppo.0'), str(tmp_path / 'x.png')
  code, _, err = called(capsys, 'plot', run, *args, '--out', out)
  *notices, error = err.splitlines()
  assert code == 2 and message in error
  assert all(' commit, ' in notice for notice in notices)  # of records


# --- numbers --------------------------------------------------------------------------------------


def test_a_thinned_curve_weighs_episodes_alike() -> None:
  lines = [
    {'step': i, 'episode_return': float(i), 'episodes': 1 + i % 2} for i in range(1, 201)
  ] + [{'step': 201, 'episode_return': None, 'episodes': 0}]
  curve = thin(lines, 1)
  assert len(curve['step']) == 100 and curve['step'][-1] == 201
  # lines 1 to 3 have 2, 1 and 2 episodes
  assert curve['step'][0] == 3 and curve['returns'][0][0] == pytest.approx((2 + 2 + 6) / 5)
  both = thin([{'step': 5, 'episode_return_by_seed': [1.0, None], 'episodes_by_seed': [3, 0]}], 2)
  assert both == {'step': [5], 'returns': [[1.0], [None]]}
  assert thin([], 2) == {'step': [], 'returns': [[], []]}


def test_the_time_left_is_that_of_this_machine() -> None:
  programs = [p for p in suites.load('classic').programs if p.agent == 'ppo'][:4]
  estimate = Estimate(programs, jobs=2)
  seconds = programs[0].seconds
  assert estimate.seconds_left() == pytest.approx(4 * seconds / 2)
  half = programs[0].steps // 2
  estimate.update(programs[0], {'step': half, 'wall_s': seconds})  # twice as slow as estimated
  assert estimate.seconds_left() == pytest.approx(2 * 3.5 * seconds / 2)
  assert f'0 of 4 programs done, {programs[0].name} 50%' == estimate.describe()
  estimate.end(programs[0].name)
  assert estimate.describe() == '1 of 4 programs done'
