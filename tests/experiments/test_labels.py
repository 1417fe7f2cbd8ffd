"""Labels of lines: short, and no two of a panel alike; and pictures that have room for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_curves import make
from test_runs import called

from podrace.experiments import curves, scores
from podrace.experiments.labels import CAP, make_labels


def test_agents_are_told_apart_by_their_names(tmp_path: Path) -> None:
  a = make(tmp_path / 'a', [(10, 1.0)])
  b = make(tmp_path / 'b', [(10, 2.0)], name='dqn', n_step=3)
  groups, _ = curves.read([a, b], 'episode_return', 'steps')
  assert make_labels(groups) == ['ppo', 'dqn']
  alike = [curves.CurveGroup({'env': 'x'}, []) for _ in range(2)]
  assert make_labels(alike) == ['default', 'default']  # no setting can distinguish them


def many(folder: Path, n: int, **more: Any) -> list[curves.CurveGroup]:
  """Groups of one agent that differ in 15 settings each, and in the same environment."""
  for i in range(n):
    settings = {f'setting_of_the_agent_{k}': i + k / 7 for k in range(15)}
    make(folder / f'{i}', [(s, s * i) for s in range(0, 101, 5)], **settings, **more)
  groups, _ = curves.read(sorted(folder.iterdir()), 'episode_return', 'steps')
  return groups


def test_a_label_says_no_more_than_tells_a_panel_apart(tmp_path: Path) -> None:
  """Impala and PPO in Catch, PPO with settings of its own in CartPole, as their presets have them."""
  for name, env, settings in (
    ('impala', 'podrace:catch', dict(clip_rho=1.0, rmsprop_decay=0.99)),
    ('ppo', 'podrace:catch', dict(clip=0.2, epochs=4, entropy_cost=0.01)),
    ('ppo', 'gymnax:CartPole-v1', dict(clip=0.2, epochs=8, entropy_cost=0.0)),
  ):
    make(tmp_path / f'{name}-{env}', [(10, 1.0)], env=env, name=name, **settings)
  groups, _ = curves.read(sorted(tmp_path.iterdir()), 'episode_return', 'steps')
  assert [(g.env, x) for g, x in zip(groups, make_labels(groups), strict=True)] == [
    ('podrace:catch', 'impala'), ('gymnax:CartPole-v1', 'ppo'), ('podrace:catch', 'ppo'),
  ]  # fmt: skip
  make(tmp_path / 'z', [(10, 1.0)], clip=0.2, epochs=4, entropy_cost=0.02)
  groups, _ = curves.read(sorted(tmp_path.iterdir()), 'episode_return', 'steps')
  assert sorted(make_labels(groups)) == [
    'impala',
    'ppo',
    'ppo, entropy-cost 0.01',
    'ppo, entropy-cost 0.02',
  ]


def test_labels_are_short_and_never_shared(tmp_path: Path) -> None:
  groups = many(tmp_path / 'a', 5) + many(
    tmp_path / 'b', 3, name='my.own.module.of.agents:WithAVeryLongName' * 2
  )
  found = make_labels(groups)
  assert len(set(found)) == 8 and max(map(len, found)) <= CAP
  assert all(x.startswith('ppo, setting-of-the-agent-0 ') and x.endswith(', …') for x in found[:5])
  assert found[5:] == [f'{found[5][:-2]}#{n}' for n in (1, 2, 3)]


@pytest.mark.parametrize('seed', range(5))
def test_any_groups_are_told_apart(seed: int) -> None:
  rng = np.random.default_rng(seed)
  configs = [
    {'agent.name': f'a{rng.integers(2)}', 'env': f'e{rng.integers(2)}'}
    | {f'agent.{c * 12}': rng.choice([0.1, 0.10000001, 3.0]) for c in 'abcd' if rng.random() < 0.8}
    for _ in range(40)
  ]
  unique = [json.loads(x) for x in {json.dumps(c, sort_keys=True) for c in configs}]
  groups = [curves.CurveGroup(c, []) for c in unique]
  found = make_labels(groups)
  assert len({(g.env, x) for g, x in zip(groups, found, strict=True)}) == len(groups)
  assert max(map(len, found)) <= CAP


def test_a_sweep_in_one_program_is_named_after_its_agent() -> None:
  swept = {
    'agent.name': 'podrace.agents.population:Varied', 'agent.agent.class': 'podrace.agents.ppo:PPO',
    'agent.agent.clip': 0.2, 'agent.values': '[0.1, 0.2]',
  }  # fmt: skip
  one = curves.CurveGroup(swept, [])
  assert make_labels([one]) == ['ppo (sweep)']
  assert make_labels([one, curves.CurveGroup({'agent.name': 'ppo', 'agent.clip': 0.2}, [])]) == [
    'ppo (sweep)',
    'ppo',
  ]


@pytest.mark.parametrize('aggregate', [False, True])
@pytest.mark.filterwarnings('error::UserWarning')
def test_a_picture_is_as_wide_as_its_panels(
  tmp_path: Path, capsys: pytest.CaptureFixture[str], aggregate: bool
) -> None:
  many(tmp_path / 'runs/a', 8)
  many(tmp_path / 'runs/b', 8, env='gymnax:$X^_' if not aggregate else 'gymnax:Y')
  many(tmp_path / 'runs/c', 2, name='_mine:Агент', env='gymnax:Z')
  where = ['a', 'b'] if aggregate else ['a', 'b', 'c']
  args = [str(tmp_path / 'runs' / x) for x in where] + ['--aggregate'] * aggregate
  code, out, err = called(capsys, 'plot', *args, '--out', str(tmp_path / 'x.png'))
  assert code == 0 and 'Warning' not in err
  with Image.open(tmp_path / 'x.png') as image:
    width, height = image.size
  assert width == pytest.approx((3 * 4.2 if aggregate else 3 * 4.6) * 150, abs=1)
  assert 480 <= height < 900
  groups = json.loads(out)['groups']
  assert max(map(len, groups if aggregate else [g['label'] for g in groups])) <= CAP
  assert len(groups) == (8 if aggregate else 18)


def test_aggregates_need_no_labels_to_match(tmp_path: Path) -> None:
  """Configurations whose labels would be cut to the same words stay two."""
  long = 'a' * 100
  for env in ('ale:pong', 'ale:breakout'):
    for i, name in enumerate((f'm:{long}x', f'm:{long}y')):
      make(tmp_path / f'{env}-{i}', [(50, 1.0), (100, 2.0 + i)], env=env, name=name)
  groups, _ = curves.read(sorted(tmp_path.iterdir()), 'episode_return', 'steps')
  found = scores.aggregate(groups, '', tmp_path / 'x.png')
  assert [x['curves'] for x in found['groups'].values()] == [2, 2]


def test_a_label_leaves_out_settings_without_a_value(tmp_path: Path) -> None:
  make(tmp_path / 'a', [(10, 1.0)], init_from='', init_member=None)
  make(tmp_path / 'b', [(10, 1.0)], init_from='runs/a', init_member=2)
  groups, _ = curves.read(sorted(tmp_path.iterdir()), 'episode_return', 'steps')
  assert sorted(make_labels(groups)) == ['init-from runs/a, init-member 2', 'ppo']
