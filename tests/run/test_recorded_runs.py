"""Runs recorded by an earlier version load, evaluate and resume: modules may move, records stay.

tests/data/recorded_runs.tar.gz holds five run directories, made at commit 58baa04 on one device. Each records class paths
in its config.json:

  catch     IMPALA on Catch under Anakin
  sebulba   DQN on Catch under Sebulba, with replay
  sweep     a sweep in one program; the agent of sweep/run is `podrace.agents.population:Varied`
  discover  meta-training of LPG; its rule's sizes are a `podrace.agents.rules.lpg:Sizes`
  lpg       LPG with the rule of `discover`, from rule.npz
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from processes import podrace
from shorthand import Capture

from podrace import cli

DATA = Path(__file__).parents[1] / 'data' / 'recorded_runs.tar.gz'
TRAINED = {'catch': 4096, 'sebulba': 2016, 'lpg': 4000, 'sweep/run': 4096}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """Unpack the recorded runs into the working directory."""
  with tarfile.open(DATA) as archive:
    archive.extractall(tmp_path, filter='data')
  monkeypatch.chdir(tmp_path)
  return tmp_path


def exit_code(*words: str) -> int | str | None:
  try:
    cli.main(list(words))
  except SystemExit as e:
    return e.code
  return 0


@pytest.mark.parametrize(
  'name',
  [pytest.param(n, marks=pytest.mark.slow) if n in ('catch', 'sebulba') else n for n in TRAINED],
)
def test_a_recorded_run_is_evaluated(name: str, runs: Path, capsys: Capture) -> None:
  assert not exit_code('eval', name, '--episodes', '2')
  result = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert result['step'] == TRAINED[name] and -1 <= result['episode_return_mean'] <= 1


@pytest.mark.parametrize(
  'name', ['catch', *(pytest.param(x, marks=pytest.mark.slow) for x in ('sebulba', 'lpg'))]
)
def test_a_recorded_run_is_resumed(name: str, runs: Path) -> None:
  config = json.loads((runs / name / 'config.json').read_text())
  words = ['train', '--run-dir', name, '--quiet', '--devices', '1']
  metrics = (runs / name / 'metrics.jsonl').read_text()
  assert not exit_code(*words, '--override', '--total-steps', str(config['total_steps'] + 1000))
  summary = json.loads((runs / name / 'summary.json').read_text())
  assert summary['step'] >= config['total_steps'] + 1000
  assert (runs / name / 'metrics.jsonl').read_text().startswith(metrics)


def test_a_recorded_run_is_finished(runs: Path) -> None:
  small = ['--total-steps', '4000', '--num-envs', '8', '--agent.network.hidden', '8']
  assert not exit_code('train', 'catch', *small, '--run-dir', 'catch', '--quiet')
  record = json.loads((runs / 'catch' / 'config.json').read_text())
  assert 'scaling' not in record['agent']['network']


def test_a_recorded_meta_training_is_finished(runs: Path) -> None:
  before = (runs / 'discover' / 'rule.npz').read_bytes()
  words = ['discover', '--quiet', '--run-dir', str(runs / 'discover')]
  code, output = podrace(words, runs / 'log')
  assert code == 0, output
  assert (runs / 'discover' / 'rule.npz').read_bytes() == before


def test_recorded_runs_are_listed(runs: Path, capsys: Capture) -> None:
  assert not exit_code('runs', str(runs), '--json')
  rows = json.loads(capsys.readouterr().out)
  assert {r['state'] for r in rows} == {'finished'} and len(rows) >= 5


SMALL = ('--total-steps', '4000', '--num-envs', '8', '--agent.network.hidden', '8')
PLAIN = '--agent.network.scaling plain'


def test_acting_processes_of_a_recorded_run_have_the_networks_that_it_began_with(
  runs: Path, capsys: Capture
) -> None:
  launch = ['launch', 'catch', '--as', 'impala', '--actors', '1', *SMALL, '--dry-run', '--run-dir']
  for run_dir, times in (('catch', 2), ('new', 0)):  # the learner and the acting process
    assert not exit_code(*launch, run_dir)
    assert capsys.readouterr().out.count(PLAIN) == times


def test_a_recorded_sweep_goes_on(runs: Path, capsys: Capture) -> None:
  record = (runs / 'sweep' / 'sweep.json').read_text()
  vary = ['--vary', 'agent.learning-rate=log:1e-4..1e-2', '--method', 'random', '--trials', '2']
  assert not exit_code('sweep', 'catch', *SMALL, *vary, '--dir', 'sweep')
  result = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert result['trials'] == 2 and PLAIN in result['command']
  assert (runs / 'sweep' / 'sweep.json').read_text() == record


def test_a_run_does_not_begin_with_parameters_that_were_learned_in_other_units(
  runs: Path, capsys: Capture
) -> None:
  train = ['train', 'catch', *SMALL, '--devices', '1', '--init-from', 'catch', '--quiet']
  train += ['--run-dir', 'new']
  assert exit_code(*train) == 2
  assert PLAIN in capsys.readouterr().err and not (runs / 'new').exists()
  assert not exit_code(*train, *PLAIN.split())
