"""Sweeps: what they vary, one program for all settings, processes, Optuna, populations."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from children import Process, until
from closed import closed_output
from shorthand import Capture, slow_after
from test_runs import called

import podrace
from podrace import cli
from podrace.agents.population import Varied, with_values
from podrace.agents.ppo import PPO
from podrace.agents.r2d2 import R2D2
from podrace.commands import sweep as sweep_command
from podrace.envs.native.build import HERE
from podrace.errors import RunError, UsageError
from podrace.experiments import plot
from podrace.experiments.sweep import plan, processes, settings, together
from podrace.experiments.sweep.proposals import OptunaStudy
from podrace.experiments.sweep.settings import ChoiceSpace, RangeSpace
from podrace.networks import QNetwork
from podrace.policy.export import export
from podrace.replay import Buffer
from podrace.run.directory import is_running, load_config
from podrace.run.evaluate import evaluate
from podrace.run.saved_params import restore_params
from podrace.settings.record import from_json, to_json
from podrace.settings.resolved import Resolved, resolve
from podrace.system.locks import lock
from podrace.types import TrainState

SMALL: dict[str, Any] = dict(
  num_envs=8, unroll_length=16, total_steps=6_400, log_every=1_280, devices=1
)
OPTIONS = [
  '--num-envs', '8', '--unroll-length', '16', '--total-steps', '6400', '--log-every', '1280',
]  # fmt: skip


@pytest.fixture
def several_seeds() -> Iterator[None]:
  """For programs of several seeds: JAX takes the transpositions of vmap for uses of a key."""
  jax.config.update('jax_debug_key_reuse', False)
  yield
  jax.config.update('jax_debug_key_reuse', True)


def sweep(tmp_path: Path, capsys: Capture, *args: str, code: int = 0) -> Any:
  """The last line of a sweep's output, and what it said."""
  with pytest.raises(SystemExit) as end:
    cli.main(['sweep', *args, '--dir', str(tmp_path / 'sweep')])
  out, err = capsys.readouterr()
  assert end.value.code == code, err
  return (json.loads(out.splitlines()[-1]), err) if code == 0 else (None, err)


# --- what is varied -------------------------------------------------------------------------------


def test_what_is_varied() -> None:
  found = settings.parse(
    ['agent.learning_rate=1e-4,3e-4', '--num-envs=8..64', 'agent.clip=log:0.1..1']
  )
  assert found == {
    'agent.learning-rate': ChoiceSpace(('1e-4', '3e-4')),
    'num-envs': RangeSpace(8, 64, whole=True),
    'agent.clip': RangeSpace(0.1, 1.0, log=True),
  }


def test_options_of_an_environment_belong_to_its_name() -> None:
  names = ('catch', 'gymnax:Breakout-MinAtar,sticky=0.1,max_steps_in_episode=0', 'my/env.py,n=2')
  assert settings.parse([f'env={",".join(names)}']) == {'env': ChoiceSpace(names)}


@pytest.mark.parametrize(
  'texts, message',
  [
    ([], '--vary'), (['x'], r'--vary x.*FIELD=VALUES'), (['x=1', 'x=2'], '--vary x'),
    (['seed=1,2'], '--seed'), (['x=1..b'], 'expected two numbers'),
    (['x=2..1'], 'the lower one first'),
    (['x=log:0..1'], 'of more than 0, the lower one first'),
  ],
)  # fmt: skip
def test_what_cannot_be_varied(texts: list[str], message: str) -> None:
  with pytest.raises(UsageError, match=message):
    settings.parse(texts)


def test_a_range_of_a_number_with_a_fraction_has_fractions(
  tmp_path: Path, monkeypatch: Any
) -> None:
  taken: list[Any] = []

  def stop(sweep: Any, say: Any) -> Any:
    taken.append(sweep.spaces)
    raise RunError('seen')

  monkeypatch.setattr(plan, 'run_sweep', stop)
  vary = ['--vary', 'agent.discount=0..1', '--vary', 'num-envs=8..64']
  with pytest.raises(SystemExit):
    cli.main(['sweep', 'cartpole', *vary, '--method', 'random', '--dir', str(tmp_path / 'x')])
  assert taken == [{'agent.discount': RangeSpace(0, 1), 'num-envs': RangeSpace(8, 64, whole=True)}]


def test_a_sweep_succeeds_without_a_reader(tmp_path: Path, monkeypatch: Any) -> None:
  trial = {'settings': {'x': 1}, 'score': 1.0, 'scores': [1.0], 'state': 'finished', 'run': 'r'}
  result = {'best': trial, 'command': '', 'results': '', 'plot': None, 'trials': [trial]}
  monkeypatch.setattr(plan, 'run_sweep', lambda sweep, say: result)
  with closed_output(monkeypatch), pytest.raises(SystemExit) as end:
    cli.main(['sweep', 'catch', '--vary', 'agent.learning-rate=1e-3', '--dir', str(tmp_path / 'x')])
  assert end.value.code == 0


def test_a_grid_has_all_combinations() -> None:
  found = settings.make_grid(
    {'a': ChoiceSpace(('1', 'x')), 'b': ChoiceSpace(('1e-3', '2.5', '1e3'))}
  )
  assert found == [{'a': a, 'b': b} for a in (1, 'x') for b in (0.001, 2.5, 1000)]
  with pytest.raises(UsageError, match=r'a .*grid'):
    settings.make_grid({'a': RangeSpace(0, 1)})


def test_booleans_are_switches_of_train() -> None:
  spaces = settings.parse(['agent.self-tuning=true,false', 'eval-video=True,False'])
  assert settings.make_grid(spaces)[1] == {'agent.self-tuning': True, 'eval-video': False}
  words = [processes.make_arguments(['ppo'], setting)[2:] for setting in settings.make_grid(spaces)]
  assert words[0] == ['--agent.self-tuning', '--eval-video']
  assert words[3] == ['--agent.no-self-tuning', '--no-eval-video']
  assert sorted(settings.sample_options(spaces)) == sorted([words[0], words[3]])


def test_random_settings_fill_their_ranges() -> None:
  spaces = {
    'a': RangeSpace(1e-4, 1.0, log=True),
    'b': RangeSpace(1, 4, whole=True),
    'c': ChoiceSpace(('x', 'y')),
  }
  found = settings.draw_random(spaces, 4_000, seed=3)
  assert (
    found
    == settings.draw_random(spaces, 4_000, seed=3)
    != settings.draw_random(spaces, 4_000, seed=4)
  )
  logs = np.log10([s['a'] for s in found])
  assert logs.min() >= -4 and logs.max() <= 0 and abs(logs.mean() + 2) < 0.1
  assert {s['b'] for s in found} == {1, 2, 3, 4} and {s['c'] for s in found} == {'x', 'y'}


# --- one program ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_setting_is_what_it_is_alone(tmp_path: Path, several_seeds: None) -> None:
  """Two settings of two seeds: returns of all lines, and parameters up to rounding."""
  config = podrace.configure('cartpole', **SMALL, seeds=2)
  rates = (1e-3, 3e-2)
  agent = Varied(config.agent, ('learning_rate', 'entropy_cost'), (rates[0], 0.0, rates[1], 0.05))
  both = podrace.train(
    dataclasses.replace(config, agent=agent, seeds=4), tmp_path / 'both', quiet=True
  )
  for i, (rate, cost) in enumerate(zip(rates, (0.0, 0.05), strict=True)):
    alone = dataclasses.replace(
      config, agent=dataclasses.replace(config.agent, learning_rate=rate, entropy_cost=cost)
    )
    found = podrace.train(alone, tmp_path / f'{i}', quiet=True)
    for ours, theirs in zip(both.metrics, found.metrics, strict=True):
      part = ours['episode_return_by_seed'][2 * i : 2 * i + 2]
      np.testing.assert_allclose(
        np.array(part, float), np.array(theirs['episode_return_by_seed'], float), rtol=1e-5
      )
    ours, theirs = (_params(r.run_dir, r.config) for r in (both, found))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
      np.testing.assert_allclose(a[2 * i : 2 * i + 2], b, rtol=2e-3, atol=2e-5)
    assert not np.allclose(jax.tree.leaves(ours)[-1][0], jax.tree.leaves(ours)[-1][2])


def _params(run_dir: Path, config: Any) -> Any:
  from podrace.run.saved_params import restore_params

  return restore_params(resolve(config), run_dir)[1]


def test_the_record_of_settings_makes_them_again() -> None:
  config = podrace.configure('catch', seeds=3)
  agent = Varied(config.agent, ('learning_rate',), (0.1, 0.2, 0.3))
  config = dataclasses.replace(config, agent=agent)
  assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
  'preset, names, why',
  slow_after(
    8,
    ('cartpole', ['agent.learning-rate', 'agent.lambda', 'agent.clip'], ''),
    ('cartpole', ['agent.clip-value'], 'the agent needs agent.clip-value when it is compiled'),
    ('cartpole', ['num-envs'], 'num-envs is no number with a fraction of the agent'),
    ('cartpole', ['agent.epochs'], 'agent.epochs is no number with a fraction'),
    ('d4pg-pendulum', ['agent.noise'], 'acting or replay reads agent.noise'),
    ('dqn-cartpole', ['agent.buffer.samples-per-insert'], 'replay reads'),
    ('dqn-cartpole', ['agent.buffer.priority-exponent'], 'replay reads'),
    ('sac-pendulum', ['agent.initial-temperature'], 'the agent needs agent.initial-temperature'),
    ('d4pg-pendulum', ['agent.critic-learning-rate'], ''),
    ('dqn-cartpole', ['agent.discount'], ''),
  ),
)
def test_which_settings_can_be_one_program(preset: str, names: list[str], why: str) -> None:
  config = podrace.configure(preset, devices=1)
  found = together.why_not(config, [dict.fromkeys(names, x) for x in (0.5, 0.25)])
  assert found.startswith(why) and bool(found) == bool(why)


def test_settings_of_a_gossip_sweep_are_apart() -> None:
  config = podrace.configure('catch', devices=2, agree='gossip')
  assert together.why_not(config, [{'agent.learning-rate': x} for x in (0.5, 0.25)])


def test_a_field_that_is_none_is_refused() -> None:
  with pytest.raises(UsageError, match=r'PPO.*learnin_rate'):
    together.why_not(podrace.configure('cartpole'), [{'agent.learnin-rate': 1.0}])


def test_values_that_the_agent_refuses_are_refused() -> None:
  with pytest.raises(UsageError, match='discount'):
    together.vary(podrace.configure('cartpole'), [{'agent.discount': 0.9}, {'agent.discount': 1.9}])


def test_a_value_within_a_part_of_the_agent() -> None:
  agent = PPO()
  found = with_values(agent, {'network.hidden': 3, 'clip': 0.5})
  assert (found.network.hidden, found.clip) == (3, 0.5)
  assert agent == PPO()


def test_a_sweep_in_one_program(tmp_path: Path, capsys: Capture, several_seeds: None) -> None:
  args = [
    'catch', '--vary', 'agent.learning-rate=1e-4,1e-2', '--seeds', '2', *OPTIONS, '--devices',
    '1',
  ]  # fmt: skip
  found, said = sweep(tmp_path, capsys, *args)
  assert '2 settings' in said and found['trials'] == 2
  rows = json.loads((tmp_path / 'sweep/results.json').read_text())
  assert [len(r['scores']) for r in rows] == [2, 2] and rows[0]['score'] >= rows[1]['score']
  assert found['command'].startswith('podrace train catch')
  best = rows[0]['settings']['agent.learning-rate']
  assert found['command'].endswith(f'--agent.learning-rate {best}')
  assert (tmp_path / 'sweep/sweep.png').stat().st_size > 5_000
  run_dir = Path(rows[0]['run'])
  assert evaluate(run_dir, 3, acting=('greedy',))['episodes'] == 12
  assert export(run_dir, tmp_path / 'policy', member=3)['agent'] == 'impala'
  assert podrace.load_policy(tmp_path / 'policy') is not None
  # Again: it is finished. With other values, it is another sweep.
  again, _ = sweep(tmp_path, capsys, *args)
  assert again == found
  args[2] = 'agent.learning-rate=1e-4,1e-3'
  _, said = sweep(tmp_path, capsys, *args, code=2)
  assert 'vary.agent.learning-rate.values' in said


def test_a_population(tmp_path: Path, capsys: Capture, several_seeds: None) -> None:
  args = [
    'catch', '--vary', 'agent.learning-rate=log:1e-5..1e-1', '--method', 'pbt', '--trials', '4',
    '--vary', 'agent.entropy-cost=0.1,0.2',
  ]  # fmt: skip
  found, _ = sweep(tmp_path, capsys, *args, *OPTIONS, '--every', '1280', '--devices', '1')
  history = json.loads((tmp_path / 'sweep/population.json').read_text())
  assert [h['step'] for h in history] == [1_280, 2_560, 3_840, 5_120, 6_400]
  values = [np.array(h['values']['learning_rate']) for h in history]
  for before, after, h in zip(values, values[1:], history[1:], strict=False):
    (to,), (source,) = h['to'], h['from']
    allowed = [min(max(before[source] * f, 1e-5), 1e-1) for f in (0.8, 1.25)]
    assert np.isclose(after[to], allowed, rtol=1e-3).any()
    others = np.arange(4) != to
    np.testing.assert_allclose(after[others], before[others])
  costs = np.array([h['values']['entropy_cost'] for h in history], np.float32)
  assert (np.float32(0.1) <= costs).all() and (costs <= np.float32(0.2)).all()
  rows = json.loads((tmp_path / 'sweep/results.json').read_text())
  for name, last in (('learning-rate', values[-1]), ('entropy-cost', costs[-1])):
    assert {np.float32(r['settings'][f'agent.{name}']) for r in rows} == {*np.float32(last)}
  results = (tmp_path / 'sweep/results.json').read_text()
  (tmp_path / 'sweep/results.json').unlink()  # as after a kill just before it was written
  sweep(tmp_path, capsys, *args, *OPTIONS, '--every', '1280', '--devices', '1')
  assert (tmp_path / 'sweep/results.json').read_text() == results
  assert 'podrace export' in found['command'] and '--member' in found['command']


def test_a_setting_that_diverges_ends_alone(
  tmp_path: Path, capsys: Capture, several_seeds: None
) -> None:
  args = ['catch', '--vary', 'agent.learning-rate=1e-3,1e30', '--seeds', '2', *OPTIONS]
  found, said = sweep(tmp_path, capsys, *args, '--devices', '1')
  assert 'setting 1 has diverged' in said
  good, bad = json.loads((tmp_path / 'sweep/results.json').read_text())
  assert (good['state'], good['settings']) == ('finished', {'agent.learning-rate': 1e-3})
  assert (bad['state'], bad['score']) == ('diverged', None)
  run = tmp_path / 'sweep' / 'run'
  params = restore_params(Resolved(load_config(run), run), run, 'newest', bad['member']).params
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  alone = podrace.configure('catch', **SMALL | dict(agent={'learning_rate': 1e-3}, seeds=2))
  result = podrace.train(alone, tmp_path / 'alone', quiet=True)
  np.testing.assert_allclose(result.summary['episode_return_by_seed'], good['scores'], atol=0.1)
  again, _ = sweep(tmp_path, capsys, *args, '--devices', '1')
  assert again == found


def test_a_sweep_in_which_no_episode_ended_writes_its_results(
  tmp_path: Path, capsys: Capture, several_seeds: None
) -> None:
  args = ['catch', '--vary', 'agent.learning-rate=1e-3,1e-2', *OPTIONS[:2], '--seeds', '2']
  short = ['--unroll-length', '4', '--total-steps', '32', '--devices', '1']
  _, said = sweep(tmp_path, capsys, *args, *short, code=1)
  assert 'results.json' in said and 'output.txt' not in said
  rows = json.loads((tmp_path / 'sweep/results.json').read_text())
  assert [row['scores'] for row in rows] == [[None, None], [None, None]]
  assert [row['state'] for row in rows] == ['finished', 'finished']


def test_settings_that_all_diverge_end_the_sweep(
  tmp_path: Path, capsys: Capture, several_seeds: None
) -> None:
  args = ['catch', '--vary', 'agent.learning-rate=1e29,1e30', *OPTIONS]
  _, said = sweep(tmp_path, capsys, *args, '--devices', '1', code=1)
  assert 'NaN' in said


def test_settings_of_which_each_has_a_seed_that_diverged_end_the_sweep(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  trained = [[1.0, -1.0], [1.0, -1.0]], [True, True]
  monkeypatch.setattr(together, 'why_not', lambda config, tried: '')
  monkeypatch.setattr(together, 'train', lambda *args, **options: trained)
  args = ['catch', '--vary', 'agent.learning-rate=1e-3,1e30', '--seeds', '2', *OPTIONS]
  _, said = sweep(tmp_path, capsys, *args, code=1)
  assert 'results.json' in said and 'output.txt' not in said  # one program has none


def test_a_member_that_has_diverged_is_the_worst(tmp_path: Path) -> None:
  spaces: Any = {'agent.learning-rate': RangeSpace(0.1, 10.0)}
  population = together.Population(spaces, 1, tmp_path / 'population.json')
  rest = together_rest(np.array([1.0, 2.0, np.nan, np.nan], np.float32))
  train = TrainState({'w': jax.numpy.arange(4.0)}, rest)
  line = {'step': 5, 'episode_return_by_seed': [3.0, 1.0, 9.0, 8.0]}
  after = population.transform(train, line)
  np.testing.assert_array_equal(after.params['w'], [0, 1, 0, 3])
  assert json.loads((tmp_path / 'population.json').read_text())[0]['values'] == {
    'learning_rate': [1.0, 2.0, pytest.approx(float(after.rest.values['learning_rate'][2])), None]
  }


def test_the_directory_of_a_file_s_environment_is_in_sweeps(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
  folders = []

  def stop(sweep: Any, say: Any) -> Any:
    folders.append(sweep.folder)
    raise UsageError('planted')

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('podrace.experiments.sweep.plan.run_sweep', stop)
  (tmp_path / 'own.c').write_text((HERE / 'examples' / 'cartpole.c').read_text())
  rates = ('--vary', 'agent.learning-rate=1e-3,1e-2')
  with pytest.raises(UsageError, match='planted'):
    called(capsys, 'sweep', '--env', f'c:{tmp_path / "own.c"}', '--agent', 'ppo', *rates)
  assert [x.parent for x in folders] == [Path('sweeps')]


def test_a_population_takes_over_from_the_best(tmp_path: Path) -> None:
  spaces: Any = {'agent.learning-rate': RangeSpace(0.1, 10.0)}
  population = together.Population(spaces, 1, tmp_path / 'population.json')
  rest = together_rest(np.array([1.0, 2.0, 3.0, 9.0], np.float32))
  train = TrainState({'w': jax.numpy.arange(4.0)}, rest)
  line = {'step': 5, 'episode_return_by_seed': [3.0, None, 1.0, 7.0]}
  after = population.transform(train, line)
  np.testing.assert_array_equal(
    after.params['w'], [0, 3, 2, 3]
  )  # the one without a return is the worst
  new = np.asarray(after.rest.values['learning_rate'])
  assert np.isclose(new[1], 9 * 0.8) or new[1] == 10.0
  np.testing.assert_array_equal(new[[0, 2, 3]], [1, 3, 9])
  np.testing.assert_array_equal(after.rest.rest, [0, 3, 2, 3])


def test_a_population_takes_over_from_members_with_a_return_only(tmp_path: Path) -> None:
  """Of eight, two are replaced. One is alive, so the second of the best quarter has diverged."""
  values = np.full(8, np.nan, np.float32)
  values[5] = 1.0
  train = TrainState({'w': jax.numpy.arange(8.0)}, together_rest(values))
  for step in range(8):
    population = together.Population(
      {'agent.learning-rate': RangeSpace(0.1, 10.0)}, 1, tmp_path / 'population.json'
    )
    after = population.transform(train, {'step': step, 'episode_return_by_seed': [2.0] * 8})
    np.testing.assert_array_equal(after.params['w'], [5, 5, 2, 3, 4, 5, 6, 7])


def together_rest(values: np.ndarray) -> Any:
  from podrace.agents.population import VariedRest

  return VariedRest({'learning_rate': jax.numpy.asarray(values)}, jax.numpy.arange(len(values)))


def test_a_population_of_what_is_no_program_is_refused(tmp_path: Path, capsys: Capture) -> None:
  args = ['catch', '--vary', 'num-envs=8..16', '--method', 'pbt', *OPTIONS[2:-2]]
  _, said = sweep(tmp_path, capsys, *args, code=2)
  assert '--method pbt' in said and 'num-envs' in said


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_in_processes_goes_on_after_a_kill(tmp_path: Path, capsys: Capture) -> None:
  args = [
    'catch', '--vary', 'agent.network.hidden=8 8,16', *OPTIONS, '--jobs', '2', '--devices', '1',
  ]  # fmt: skip
  folder = tmp_path / 'sweep'
  with Process(tmp_path / 'log', '-m', 'podrace', 'sweep', *args, '--dir', str(folder)) as process:
    until(lambda: (folder / '0000/config.json').exists())
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert not any(is_running(p) for p in folder.glob('0*')), 'its trials have ended'
  found, said = sweep(tmp_path, capsys, *args)
  assert 'each of 2 settings' in said and found['trials'] == 2
  rows = json.loads((folder / 'results.json').read_text())
  assert {r['settings']['agent.network.hidden'] for r in rows} == {'8 8', 16}
  assert all(r['state'] == 'finished' for r in rows)
  record = json.loads((folder / '0000/config.json').read_text())
  assert record['agent']['network']['hidden'] == [8, 8]


@pytest.mark.slow
def test_trials_that_fail_are_named(tmp_path: Path, capsys: Capture) -> None:
  args = ['catch', '--vary', 'env=podrace:catch,podrace:cach', *OPTIONS, '--devices', '1']
  sweep(tmp_path, capsys, *args)
  rows = json.loads((tmp_path / 'sweep/results.json').read_text())
  assert [r['state'] for r in rows] == ['finished', 'failed, exit code 2']
  assert "'cach'" in (Path(rows[1]['run']) / 'output.txt').read_text()


@pytest.mark.slow
def test_optuna_proposes_and_goes_on(tmp_path: Path, capsys: Capture) -> None:
  args = [
    'catch', '--vary', 'agent.learning-rate=log:1e-4..1e-1', '--method', 'tpe', '--trials', '3',
  ]  # fmt: skip
  found, _ = sweep(tmp_path, capsys, *args, '--prune', '--jobs', '2', *OPTIONS, '--devices', '1')
  assert found['trials'] == 3
  rows = json.loads((tmp_path / 'sweep/results.json').read_text())
  assert all(1e-4 <= r['settings']['agent.learning-rate'] <= 1e-1 for r in rows)
  assert rows[0]['state'] == 'finished'
  again, _ = sweep(tmp_path, capsys, *args, '--prune', '--jobs', '2', *OPTIONS, '--devices', '1')
  assert again == found


def test_a_sweep_that_goes_on_proposes_other_settings(tmp_path: Path) -> None:
  spaces: Any = {'agent.learning-rate': RangeSpace(0.1, 10.0)}
  seen = []
  for count in (3, 6):
    proposals = OptunaStudy(tmp_path, spaces, count, 0, False)
    for path, setting in proposals.settings():
      seen.append(setting['agent.learning-rate'])
      path.mkdir()
      (path / 'summary.json').write_text('{"step": 1, "episode_return": 1.0, "steps_per_s": 1.0}')
      proposals.finish(path, 0)
  assert len(set(seen)) == 6


def test_a_line_that_was_cut_costs_no_other_trial(tmp_path: Path) -> None:
  """A kill or a full disk may cut the last line of Optuna's journal."""
  spaces: Any = {'agent.learning-rate': RangeSpace(0.1, 10.0)}
  proposals = OptunaStudy(tmp_path, spaces, 3, 0, False)
  first, _ = zip(proposals.settings(), range(2), strict=False)
  journal = tmp_path / 'study.log'
  journal.write_bytes(journal.read_bytes()[:-9])
  again = [list(OptunaStudy(tmp_path, spaces, 3, 0, False).settings()) for _ in range(2)]
  assert again[0] == again[1] and len(again[0]) == 3 and again[0][0] == first[0]


def test_a_journal_that_cannot_be_written_ends_the_sweep(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  proposals = OptunaStudy(tmp_path, {'a.b': RangeSpace(0.1, 10.0)}, 1, 0, False)
  ((path, _),) = proposals.settings()

  def fail(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(RunError, match=str(tmp_path / 'study.log')):
    proposals.finish(path, 1)
  with pytest.raises(RunError, match=str(tmp_path / 'other' / 'study.log')):
    (tmp_path / 'other').mkdir()
    OptunaStudy(tmp_path / 'other', {'a.b': RangeSpace(0.1, 10.0)}, 1, 0, False)


def test_two_sweeps_in_one_directory_are_refused(tmp_path: Path) -> None:
  sweep: Any = SimpleNamespace(folder=tmp_path, options=[], jobs=1)
  with lock(tmp_path), pytest.raises(UsageError, match=str(tmp_path)):
    plan._train_in_processes(sweep, [{'a.b': 1.0}], lambda text: None)
  assert not (tmp_path / '0000').exists()


def test_a_sweep_on_a_file_system_without_locks_is_refused(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(*args: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr('podrace.system.locks.fcntl.flock', fail)
  sweep: Any = SimpleNamespace(folder=tmp_path, options=[], jobs=1)
  with pytest.raises(UsageError, match=str(tmp_path)):
    plan._train_in_processes(sweep, [{'a.b': 1.0}], lambda text: None)


def test_a_trial_that_fails_is_tried_again_by_the_next_sweep(tmp_path: Path) -> None:
  spaces: Any = {'agent.learning-rate': RangeSpace(0.1, 10.0)}
  proposals = OptunaStudy(tmp_path, spaces, 2, 0, False)
  (first, setting), (second, _) = proposals.settings()
  proposals.finish(first, 137)
  proposals.finish(second, 1)
  states = [r['state'] for r in proposals.results()]
  assert states == ['failed, exit code 137', 'failed, exit code 1']
  again = list(OptunaStudy(tmp_path, spaces, 2, 0, False).settings())
  assert again[0] == (first, setting) and [path for path, _ in again] == [first, second]


@pytest.mark.parametrize(
  'args, message',
  [
    (['catch'], '--vary'),
    (['catch', '--vary', 'x=1', '--method', 'best'], '--method'),
    (['catch', '--vary', 'agent=ppo,impala'], '--vary agent'),
    (['catch', '--vary', 'x=1', '--prune'], '--method tpe'),
    (['catch', '--vary', 'x=1', '--trials', '3'], 'not grid'),
    (['catch', '--vary', 'x=1', '--every', '3', '--method', 'random'], '--method pbt'),
    (
      ['catch', '--vary', 'agent.discount=0.9..1', '--method', 'pbt', '--log-every', '3'],
      '--every',
    ),
    (['catch', '--vary', 'x=1', '--run-dir', 'y'], '--dir'),
    (['catch', '--vary', 'agent.x=1'], '--agent.x'),
    (['catch', '--vary', 'agent.learning-rate=1,a'], "'a'"),
    (['catch', '--vary', 'agent.network.activation=tanh,tan'], "'tan'"),
    (['catch', '--vary', 'agent.discount=0.9,2'], 'discount'),
    (['catch', '--vary', 'agent.discount=0.9..0.99', '--method', 'grid'], 'is a range'),
  ],
)
def test_what_a_sweep_refuses(
  args: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
  _, said = sweep(tmp_path, capsys, *args, code=2)
  assert message in said
  assert not (tmp_path / 'sweep').exists(), 'what is refused leaves nothing'


def test_a_sweep_waits_for_what_a_killed_one_left_behind(tmp_path: Path) -> None:
  """An orphan trains on in a directory; when it has ended, the sweep goes on there."""
  path = tmp_path / '0000'
  path.mkdir()
  orphan = subprocess.Popen(
    [sys.executable, '-c', 'import sys\nfrom pathlib import Path\nfrom podrace.system.locks import lock\n'
     'f = lock(Path(sys.argv[1])); print("held", flush=True); sys.stdin.read()\n'
     '(Path(sys.argv[1]) / "summary.json").write_text("{}")', str(path)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  assert orphan.stdin and orphan.stdout and orphan.stdout.readline() == 'held\n'
  said: list[str] = []
  codes: list[int] = []

  def say(text: str) -> None:
    said.append(text)
    assert orphan.stdin
    orphan.stdin.close()  # it ends now, and not before

  processes.run_trials([(path, ['train'])], 1, lambda path, code: codes.append(code), say=say)
  orphan.wait()
  orphan.stdout.close()
  assert codes == [0] and len(said) == 1 and 'is still training' in said[0]


def test_a_trial_whose_directory_was_in_use_begins_again(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The process of a killed sweep has the directory only after the new trial has begun."""
  uses, codes = iter([False, True, True, False]), iter([2, 0])
  ends: list[tuple[Path, int]] = []

  class Trained(processes.Trial):
    def __init__(self, command: list[str], run_dir: Path) -> None:
      self.command, self.run_dir, self.ends_by = command, run_dir, np.inf
      self.code_ = next(codes)

    code = property(lambda self: self.code_)
    new_lines = terminate = finish = lambda self, *args: iter(())

  monkeypatch.setattr(processes, 'Trial', Trained)
  monkeypatch.setattr(processes, 'is_running', lambda path: next(uses))
  monkeypatch.setattr(processes, 'POLL', 0.0)
  trials = [(tmp_path / 'one', ['train'])]
  processes.run_trials(trials, 1, lambda *end: ends.append(end), finished=lambda path: False)
  assert ends == [(tmp_path / 'one', 0)] and next(codes, None) is None


def test_the_begin_and_the_end_of_each_process_are_shown(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The second of three settings fails, and the third has been trained before."""
  codes = iter([0, 1])

  class Trained(processes.Trial):
    def __init__(self, command: list[str], run_dir: Path) -> None:
      self.command, self.run_dir, self.ends_by = command, run_dir, np.inf
      self.code_ = next(codes)
      run_dir.mkdir()
      if self.code_ == 0:
        write_summary(run_dir, 2.5)

    code = property(lambda self: self.code_)
    new_lines = terminate = finish = lambda self, *args: iter(())

  def write_summary(path: Path, score: float) -> None:
    (path / 'summary.json').write_text(json.dumps({'step': 1, 'episode_return': score}))

  (tmp_path / '0002').mkdir()
  write_summary(tmp_path / '0002', 7.25)
  monkeypatch.setattr(processes, 'Trial', Trained)
  monkeypatch.setattr(processes, 'POLL', 0.0)
  said: list[str] = []
  sweep: Any = SimpleNamespace(folder=tmp_path, options=[], jobs=1)
  plan._train_in_processes(sweep, [{'a.b': 10.0**-i} for i in range(3)], said.append)
  outputs = [str(tmp_path / f'{i:04d}/output.txt') for i in range(3)]
  parts = [
    ('a.b 1:', 'begins', 0), ('a.b 1:', 'finished, return 2.50', 0), ('a.b 0.1:', 'begins', 1),
    ('a.b 0.1:', 'exit code 1, no return', 1), ('a.b 0.01:', 'finished, return 7.25', 2),
  ]  # fmt: skip
  assert len(said) == len(parts)
  for text, (setting, state, i) in zip(said, parts, strict=True):
    assert text.startswith(setting) and state in text and outputs[i] in text


def test_the_table_of_a_sweep_shows_its_seeds(capsys: Capture) -> None:
  rows = [
    {'settings': {'a': 0.1, 'b': 2, 'c': 'x'}, 'score': 2.0, 'scores': [1.0, 3.0], 'member': 2},
    {'settings': {'a': 0.01, 'b': 1, 'c': 'y'}, 'score': 0.5, 'scores': [None, 0.5], 'member': 0},
    {'settings': {'a': 0.1, 'b': 3, 'c': 'x'}, 'score': None, 'scores': [9.0, 0.0], 'member': 4},
  ]  # fmt: skip
  result = {'trials': [{**r, 'state': 'ended'} for r in rows], 'command': 'x', 'results': ''}
  sweep_command._show(result)
  head, *lines, end, _ = capsys.readouterr().err.splitlines()
  assert head.split() == ['a', 'b', 'c', 'return', 'lowest', 'highest', '--member', 'state']
  assert [line.split() for line in lines[:2]] == [
    ['0.1', '2', 'x', '2.00', '1.00', '3.00', '2-3', 'ended'],
    ['0.01', '1', 'y', '0.50', '0.50', '0.50', '0-1', 'ended'],
  ]
  assert lines[2].split() == ['0.1', '3', 'x', '4-5', 'ended']
  assert end.startswith('a 0.1 ')  # b 2 is between 1 and 3, which diverged


@pytest.mark.parametrize(
  'values, ends',
  [([1, 2, 3], ['a']), ([2, 1, 3], []), ([3, 2], ['a']), ([1], []), (['y', 'x'], [])],
)
def test_the_best_value_at_an_end(values: list[Any], ends: list[str]) -> None:
  assert settings.at_ends([{'a': x} for x in values]) == ends


def test_a_picture_that_cannot_be_drawn_does_not_end_a_sweep(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
  def no_backend(path: Path) -> None:
    raise UsageError('no such backend')

  monkeypatch.setattr(plot, 'check_out', no_backend)
  sweep: Any = SimpleNamespace(folder=tmp_path, spaces={})
  assert plan._draw(sweep, []) is None
  assert 'no such backend' in capsys.readouterr().err


@pytest.mark.parametrize('log', ['', 'log'])
@pytest.mark.parametrize('path', ['agent.discount', 'agent.epsilon-base'])
def test_first_priorities_and_acting_are_of_all_members(
  path: str, log: str, tmp_path: Path, capsys: Capture
) -> None:
  """R2D2 computes priorities of new windows by them, with a log as well."""
  of_log = {}
  if log:
    of_log = dict(log=str(tmp_path / 'log'), log_share='1/2')
    to = '--to', of_log['log']
    assert called(capsys, 'record', 'catch', '--random', '--episodes', '4', *to)[0] == 0
  buffer = Buffer(capacity=2_000, min_size=64, batch_size=8, priority_exponent=0.9)
  agent = R2D2(QNetwork(core='lstm', core_size=8, hidden=(8,)), buffer, sequence=10, burn_in=2)
  config = podrace.configure(
    'catch', agent=agent, num_envs=4, unroll_length=10, total_steps=400, devices=1,
    **of_log,
  )  # fmt: skip
  assert path in together.why_not(config, [{path: 0.1}, {path: 0.2}])
