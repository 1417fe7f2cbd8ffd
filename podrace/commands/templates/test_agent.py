"""Tests of NAME: `python -m pytest test_FILE.py`."""

from FILE import NAME

from podrace.run.loop import train
from podrace.settings.config import Config


def test_it_learns_catch(tmp_path):
  config = Config(
    agent=NAME(), env='podrace:catch', num_envs=64, unroll_length=16, total_steps=500_000
  )
  summary = train(config, tmp_path / 'run', quiet=True)
  assert summary['episode_return'] > 0.8  # random play: -0.6; the most: 1


def test_it_runs_under_both_architectures(tmp_path):
  for architecture in ('anakin', 'sebulba'):
    config = Config(
      agent=NAME(),
      architecture=architecture,
      num_envs=8,
      unroll_length=8,
      total_steps=640,
      devices=1,
    )
    assert train(config, tmp_path / architecture, quiet=True)['step'] == 640
