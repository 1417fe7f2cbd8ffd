"""Curves of runs: grouped, together, drawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shorthand import Capture
from test_runs import called

from podrace.errors import UsageError
from podrace.experiments import curves, plot, scores, statistics
from podrace.experiments.labels import make_labels
from podrace.run import metrics
from podrace.run.summary import final_return


def make(
  path: Path,
  points: list[tuple[int, Any]],
  env: str = 'podrace:catch',
  finished: bool = True,
  **agent: Any,
) -> Path:
  """A run directory with these (step, return)s."""
  path.mkdir(parents=True)
  settings = {'name': 'ppo', 'learning_rate': 1e-3} | {
    k: v for k, v in agent.items() if k != 'seed'
  }
  config = {
    'version': 1, 'agent': settings, 'env': env, 'architecture': 'anakin', 'total_steps': 100,
    'seed': agent.get('seed', 0), 'seeds': 1,
  }  # fmt: skip
  (path / 'config.json').write_text(json.dumps(config))
  lines = [
    {'step': s, 'wall_s': s / 10, 'steps_per_s': 10.0, 'gradient_steps': 3, 'episodes': 1}
    | ({'episode_return': y} if not isinstance(y, list) else {'episode_return_by_seed': y})
    for s, y in points
  ]
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  if finished:
    (path / 'summary.json').write_text('{}')
  return path


def test_runs_are_grouped_whatever_their_seeds(tmp_path: Path) -> None:
  a = make(tmp_path / 'a', [(10, 1.0)], seed=1)
  b = make(tmp_path / 'b', [(10, 2.0)], learning_rate=1e-4)
  c = make(tmp_path / 'c', [(10, 3.0)], seed=7)
  groups, wrong = curves.read([a, b, c], 'episode_return', 'steps')
  assert not wrong and [[c.y.tolist() for c in g.curves] for g in groups] == [
    [[1.0], [3.0]],
    [[2.0]],
  ]
  assert make_labels(groups) == ['learning-rate 0.001', 'learning-rate 0.0001']
  assert make_labels(groups[:1]) == ['ppo']


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
  names = dict(a='1', b='1', c='2', d='', e='')  # the hash of the last parameters; '': none yet
  returns = dict(e=2.0)
  paths = [
    make(tmp_path / name, [(10, returns.get(name, 1.0))], seed=3, finished=False) for name in names
  ]
  for path, sha256 in zip(paths, names.values(), strict=True):
    if sha256:
      (path / 'summary.json').write_text(json.dumps({'params_sha256': sha256}))
  ((group,), (message,)) = curves.read(paths, 'episode_return', 'steps')
  assert [c.run.name for c in group.curves] == ['a', 'c', 'd', 'e']
  assert str(paths[0]) in message and str(paths[1]) in message


def test_an_unfinished_run_and_its_copy_count_once(tmp_path: Path) -> None:
  paths = [make(tmp_path / 'a', [(10, 1.0)], seed=3, finished=False)]
  paths += [make(tmp_path / 'b', [(10, 1.0)], seed=4, finished=False)]
  shutil.copytree(paths[0], tmp_path / 'copy')
  lines = (tmp_path / 'copy/metrics.jsonl').read_text()
  (tmp_path / 'copy/metrics.jsonl').write_text(lines.replace('"wall_s": 1.0', '"wall_s": 2.0'))
  ((group,), (message,)) = curves.read([*paths, tmp_path / 'copy'], 'episode_return', 'steps')
  assert [c.run.name for c in group.curves] == ['a', 'b'] and 'copy' in message


def test_each_seed_of_a_run_is_a_curve(tmp_path: Path) -> None:
  a = make(tmp_path / 'a', [(10, [1.0, None]), (20, [2.0, 5.0]), (30, [3.0, 6.0])])
  ((group,), _) = curves.read([a], 'episode_return', 'steps')
  assert [c.x.tolist() for c in group.curves] == [[10, 20, 30], [20, 30]]
  assert [c.y.tolist() for c in group.curves] == [[1, 2, 3], [5, 6]]


def make_sweep(path: Path, env: str = 'podrace:catch') -> Path:
  """A sweep of two learning rates in one program, with two seeds each."""
  make(path, [(50, [0.0, 0.0, 0.0, 0.0]), (100, [1.0, 3.0, 5.0, None])], env=env)
  config = json.loads((path / 'config.json').read_text())
  inner = {'class': 'podrace.agents.ppo:PPO', 'learning_rate': 0.5, 'clip': 0.2}
  config['agent'] = {
    'name': 'podrace.agents.population:Varied', 'agent': inner,
    'fields': ['learning_rate', 'network.sigma'], 'values': [0.1, 1.0, 0.2, 1.0],
  }  # fmt: skip
  (path / 'config.json').write_text(json.dumps({**config, 'seeds': 4}))
  return path


def test_each_setting_of_a_sweep_in_one_program_is_a_line(tmp_path: Path, capsys: Capture) -> None:
  path = make_sweep(tmp_path / 'sweep/run')
  groups, _ = curves.read([path], 'episode_return', 'steps')
  assert [[c.y[-1] for c in g.curves] for g in groups] == [[1.0, 3.0], [5.0, 0.0]]
  assert make_labels(groups) == ['learning-rate 0.1', 'learning-rate 0.2']
  one = {k: v for k, v in groups[0].config.items() if k.startswith('agent.')}
  assert one == {
    'agent.name': 'ppo', 'agent.learning_rate': 0.1, 'agent.clip': 0.2, 'agent.network.sigma': 1.0,
  }  # fmt: skip
  alone = make(tmp_path / 'alone', [(100, 2.0)], **{k[6:]: v for k, v in one.items()})
  groups, _ = curves.read([path, alone], 'episode_return', 'steps')
  assert [len(g.curves) for g in groups] == [3, 2]
  lines = [line | {'loss': 1.0} for line in metrics.read(path / 'metrics.jsonl')]
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  assert curves.read([path], 'loss', 'steps')[0] == []  # the mean over both settings is of none
  (path / 'summary.json').unlink()
  err = called(capsys, 'plot', str(path), '--out', str(tmp_path / 'x.png'))[2]
  assert err.count('is not finished') == 1


def test_a_population_is_one_line(tmp_path: Path) -> None:
  path = make_sweep(tmp_path / 'sweep/run')
  (tmp_path / 'sweep/sweep.json').write_text('{"method": "pbt"}')
  (group,), _ = curves.read([path], 'episode_return', 'steps')
  assert len(group.curves) == 4 and make_labels([group]) == ['ppo (sweep)']


@pytest.mark.parametrize('seeds, values', [(3, [0.1, 1, 0.2, 1]), (4, []), (4, [1]), (4, 'x')])
def test_a_damaged_record_of_a_sweep_is_one_line(tmp_path: Path, seeds: int, values: Any) -> None:
  path = make_sweep(tmp_path / 'run')
  config = json.loads((path / 'config.json').read_text())
  config['agent']['values'] = values
  (path / 'config.json').write_text(json.dumps({**config, 'seeds': seeds}))
  assert [len(g.curves) for g in curves.read([path], 'episode_return', 'steps')[0]] == [4]


def test_the_return_of_a_log_has_a_panel_of_its_own(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  for name, env in (('a', ''), ('b', 'podrace:catch'), ('c', 'podrace:catch')):
    path = make(tmp_path / 'runs' / name, [(50, 0.0), (100, 1.0)], env=env)
    config = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(
      json.dumps(config | ({'log': 'mixed'} if name != 'c' else {}))
    )
  figures: list[Any] = []
  monkeypatch.setattr(plot, '_save', lambda figure, *_: figures.append(figure))
  args = [str(tmp_path / 'runs'), '--out', str(tmp_path / 'x.png')]
  groups = json.loads(called(capsys, 'plot', *args)[1])['groups']
  assert [g['env'] for g in groups] == ['log mixed', 'podrace:catch, log mixed', 'podrace:catch']
  assert [axis.get_ylabel() for axis in figures[0].axes] == [
    'episode return of the log', 'episode return of the log', 'episode return',
  ]  # fmt: skip
  code, _, err = called(capsys, 'plot', *args, '--aggregate')
  assert code == 2 and '--aggregate' in err and 'log mixed' in err


def test_the_last_value_of_a_seed_holds_to_the_end_of_its_run(tmp_path: Path) -> None:
  a = make(
    tmp_path / 'a', [(10, [1.0, 4.0]), (20, [None, 5.0]), (30, [3.0, None]), (40, [2.0, None])]
  )
  (group,), _ = curves.read([a], 'episode_return', 'steps')
  assert [c.x.tolist() for c in group.curves] == [[10, 30, 40], [10, 20, 40]]
  assert [c.y.tolist() for c in group.curves] == [[1, 3, 2], [4, 5, 5]]
  assert curves.make_band(group.curves).count.min() == 2


def test_final_means_have_an_interval(tmp_path: Path, capsys: Capture) -> None:
  for i in range(4):
    make(tmp_path / f'{i}', [(10, 0.0), (20, float(i))], seed=i)
  out = called(capsys, 'plot', str(tmp_path), '--out', str(tmp_path / 'x.png'))[1]
  (group,) = json.loads(out)['groups']
  assert sorted(group['final']) == [0, 1, 2, 3] and group['mean'] == 1.5
  assert group['interval'] == [0.5, 2.5]


def test_the_final_return_is_that_of_the_summary(tmp_path: Path, capsys: Capture) -> None:
  """Episodes weigh alike: one of 10, three of 2, in the last tenth."""
  ends = {95: (10.0, 1, [10.0, 4.0]), 100: (2.0, 3, [2.0, None])}
  for name, by_seed in (('one', False), ('two', True)):
    path = make(tmp_path / name, [(10, 0.0)], seeds=2)
    first = json.loads((path / 'metrics.jsonl').read_text())
    lines = [
      first | {'step': step, 'episode_return': mean, 'episodes': count}
      | ({'episode_return_by_seed': each, 'episodes_by_seed': [count, int(each[1] is not None)]} if by_seed else {})
      for step, (mean, count, each) in {10: (0.0, 1, [0.0, None]), **ends}.items()
    ]  # fmt: skip
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  for name, expected in (('one', [4.0]), ('two', [4.0, 4.0])):
    args = [str(tmp_path / name), '--out', str(tmp_path / 'x.png')]
    (group,) = json.loads(called(capsys, 'plot', *args)[1])['groups']
    assert group['final'] == expected and group['mean'] == 4.0
    summary = final_return(tmp_path / name / 'metrics.jsonl')
    assert (
      summary['episode_return'] == 4.0
      and summary.get('episode_return_by_seed', expected) == expected
    )


def test_runs_and_curves_are_counted(tmp_path: Path, capsys: Capture) -> None:
  make(tmp_path / 'a', [(10, [1.0, 2.0, 3.0]), (20, [2.0, 5.0, 1.0])])
  make(tmp_path / 'b', [(10, 1.0), (20, 2.0)], name='dqn')
  _, out, _ = called(capsys, 'plot', str(tmp_path), '--out', str(tmp_path / 'x.png'))
  found = json.loads(out.splitlines()[-1])
  assert (found['runs'], found['curves']) == (2, 4)


def test_positions(tmp_path: Path) -> None:
  a = make(tmp_path / 'a', [(10, 1.0), (20, 2.0)])
  for x, expected in (('steps', [10, 20]), ('wall', [1, 2]), ('gradient-steps', [3, 6])):
    ((group,), _) = curves.read([a], 'episode_return', x)  # type: ignore[arg-type]
    assert group.curves[0].x.tolist() == expected


def test_runs_that_have_nothing_to_show_are_named(tmp_path: Path) -> None:
  empty = make(tmp_path / 'empty', [])
  none = make(tmp_path / 'none', [(10, None)])
  torn = make(tmp_path / 'torn', [(10, 1.0), (20, 2.0)])
  (torn / 'metrics.jsonl').write_bytes((torn / 'metrics.jsonl').read_bytes() + b'\0\0')
  broken = make(tmp_path / 'broken', [(10, 1.0)])
  (broken / 'config.json').write_text('{')
  groups, wrong = curves.read([empty, none, torn, broken], 'episode_return', 'steps')
  assert [g.curves[0].y.tolist() for g in groups] == [[1.0, 2.0]]
  assert [
    str(tmp_path / n) in w for n, w in zip(('empty', 'none', 'broken'), wrong, strict=True)
  ] == [True] * 3
  _, wrong = curves.read([torn], 'entropy', 'steps')
  assert 'no value of entropy; it has' in wrong[0] and 'episode_return' in wrong[0]


def test_a_band_follows_each_curve_as_far_as_it_goes() -> None:
  x = np.arange(0.0, 101.0)
  found = curves.make_band([
    curves.RunCurve(x, x, Path('a')), curves.RunCurve(x[:51], x[:51] + 2, Path('b')),
  ])  # fmt: skip
  both = found.x <= 50
  np.testing.assert_allclose(found.center, np.where(both, found.x + 1, found.x))
  assert found.count.tolist() == np.where(both, 2, 1).tolist()
  np.testing.assert_allclose(
    (found.low[both], found.high[both]), (found.x[both], found.x[both] + 2)
  )
  assert np.isnan(found.low[~both]).all()


def test_the_end_of_a_curve_is_its_last_tenth() -> None:
  x = np.arange(1.0, 101.0)
  assert curves.final_mean(curves.RunCurve(x, np.where(x >= 90, x, 0.0), Path())) == 95.0


def test_human_normalised_scores() -> None:
  assert len(scores.ATARI) == 57
  assert scores.normalize_human('pong', -20.7) == 0 and scores.normalize_human('pong', 14.6) == 1
  assert (
    scores.atari_game('ale:pong,sticky=0.25') == 'pong' and scores.atari_game('ale:tetris') is None
  )
  assert scores.atari_game('gymnax:pong') is None


def test_five_games_predict_the_median_of_57(tmp_path: Path) -> None:
  assert scores.atari5(dict.fromkeys(scores.ATARI5, 0.0)) == 0
  # Rainbow's scores in them (Hessel et al. 2018, table 6); its median over 57 games is 2.23.
  rainbow = {'battle_zone': 62010.0, 'double_dunk': -0.3, 'name_this_game': 13136.0}
  rainbow |= {'phoenix': 108528.7, 'qbert': 33817.5}
  found = scores.atari5({k: scores.normalize_human(k, x) for k, x in rainbow.items()})
  assert found == pytest.approx(2.23, rel=0.15)
  for name, score in rainbow.items():
    make(tmp_path / name, [(50, 0.0), (100, score)], env=f'ale:{name}')
  groups, _ = curves.read(sorted(tmp_path.iterdir()), 'episode_return', 'steps')
  told = scores.aggregate(groups, '', tmp_path / 'x.png')
  assert told['groups']['ppo']['atari5'] == pytest.approx(found)


@pytest.mark.parametrize('suffix', ['png', 'svg', 'pdf'])
def test_a_picture_of_curves(tmp_path: Path, suffix: str, capsys: Capture) -> None:
  for seed in range(3):
    make(tmp_path / f'a{seed}', [(s, s + seed) for s in range(0, 101, 5)], seed=seed)
  make(tmp_path / 'b', [(s, -s) for s in range(0, 51, 5)], env='gymnax:X', finished=False)
  out = tmp_path / f'curves.{suffix}'
  code, printed, err = called(capsys, 'plot', str(tmp_path), '--out', str(out), '--center', 'iqm')
  assert code == 0 and str(tmp_path / 'b') in err and '50 (of 100 steps)' in err
  found = json.loads(printed.splitlines()[-1])
  assert (found['runs'], found['curves']) == (4, 4)
  assert [g['curves'] for g in found['groups']] == [3, 1]
  assert found['groups'][0]['final'] == [97.5, 98.5, 99.5]
  if suffix == 'png':
    image = np.asarray(Image.open(out).convert('RGB')).reshape(-1, 3)
    blue = np.all(image == (0, 0x72, 0xB2), axis=1)  # the line and its label, in both panels
    assert 500 < blue.sum() < len(image) / 10
  elif suffix == 'svg':
    assert '<svg' in out.read_text()


def test_a_picture_of_aggregates(tmp_path: Path, capsys: Capture) -> None:
  for seed in range(3):
    for env, low, high in (('ale:pong', -20.7, 14.6), ('ale:breakout', 1.7, 30.5)):
      for name, part in (('ppo', 0.5), ('dqn', 1.0)):
        value = low + (high - low) * (part + 0.01 * seed)
        make(
          tmp_path / f'{env}-{name}-{seed}', [(50, low), (100, value)], env=env, name=name,
          seed=seed,
        )  # fmt: skip
  out = tmp_path / 'scores.png'
  code, printed, _ = called(capsys, 'plot', str(tmp_path), '--aggregate', '--out', str(out))
  assert code == 0 and out.exists()
  found = json.loads(printed.splitlines()[-1])
  assert found['normalized'].startswith('human') and sorted(found['tasks']) == [
    'ale:breakout',
    'ale:pong',
  ]
  assert found['groups']['ppo']['iqm'] == pytest.approx(0.51) and found['groups']['dqn'][
    'mean'
  ] == pytest.approx(1.01)
  assert {'better': 'dqn', 'than': 'ppo', 'probability': 1.0} in found['probability_of_improvement']
  low, high = found['groups']['ppo']['mean_interval']
  assert 0.5 <= low < 0.51 < high <= 0.52


def test_scores_of_games_are_returns_alone(tmp_path: Path, capsys: Capture) -> None:
  for game in scores.ATARI5:
    for seed in range(2):
      make(tmp_path / f'{game}-{seed}', [(100 + seed, 1.0)], env=f'ale:{game}', seed=seed)
  units = {}
  for args in ((), ('--metric', 'wall_s'), ('--metric', 'wall_s', '--normalize', 'human')):
    out = ('--out', str(tmp_path / 'x.png'))
    code, printed, _ = called(capsys, 'plot', str(tmp_path), '--aggregate', *out, *args)
    if code == 0:
      found = json.loads(printed.splitlines()[-1])
      units[args] = (found['normalized'].partition('-')[0], 'atari5' in found['groups']['ppo'])
  assert list(units.values()) == [
    ('human', True),
    ('the lowest run of each task is 0, the highest 1', False),
    ('human', True),
  ]


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ((), 'plot needs runs'),
    (('--out', 'a.gif'), 'must end with .png, .svg, .pdf'),
    (('--x', 'frames'), '--x is steps or wall or gradient-steps'),
    (('--center', 'mode'), '--center'),
    (('--metric', 'nothing'), 'there is nothing to plot'),
    (('--aggregate', '--normalize', 'human'), 'podrace:catch'),
    (('--aggregate', '--normalize', 'z'), '--normalize'),
    (('--aggregate',), 'all runs have the same score'),
    (('--aggregate', '--center', 'median'), '--center'),
    (('--normalize', 'minmax'), '--aggregate'),
  ],
)
def test_what_plot_refuses(
  tmp_path: Path, capsys: Capture, args: tuple[str, ...], message: str
) -> None:
  make(tmp_path / 'a', [(10, 1.0)])
  where = () if not args else (str(tmp_path), '--out', str(tmp_path / 'x.png'))
  code, _, err = called(capsys, 'plot', *where, *args)
  assert code == 2 and message in err


def test_aggregates_need_the_same_tasks(tmp_path: Path) -> None:
  make(tmp_path / 'a', [(10, 1.0)], env='ale:pong')
  make(tmp_path / 'b', [(10, 1.0)], env='ale:breakout', name='dqn')
  groups, _ = curves.read([tmp_path / 'a', tmp_path / 'b'], 'episode_return', 'steps')
  with pytest.raises(UsageError, match=r'ppo.*ale:breakout'):
    scores.aggregate(groups, '', tmp_path / 'x.png')


def test_many_lines_are_all_different() -> None:
  styles = [json.dumps(plot.line_style(i)) for i in range(28)]
  assert len(set(styles)) == 28


def test_an_agent_without_a_curve_is_in_the_picture(tmp_path: Path, monkeypatch: Any) -> None:
  monkeypatch.setitem(statistics.interval.__kwdefaults__, 'resamples', 50)
  x = np.linspace(0, 1, 5)
  tasks = {name: [np.array([0.0, 1.0])] for name in ('a', 'b')}
  numbers = plot.draw_aggregate(tasks, '', tmp_path / 'x.png', {'a': curves.Band(x, x, x, x, x)})
  assert [*numbers] == ['a', 'b'] and Image.open(tmp_path / 'x.png').size[0] > 0
