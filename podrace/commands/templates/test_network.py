"""Tests of NAME: `python -m pytest test_FILE.py`."""

from FILE import Agent

from podrace.run.loop import train
from podrace.settings.config import Config


def test_an_agent_learns_catch_with_it(tmp_path):
  config = Config(
    agent=Agent(), env='podrace:catch', num_envs=64, unroll_length=16, total_steps=400_000
  )
  summary = train(config, tmp_path / 'run', quiet=True)
  assert summary['episode_return'] > 0.8  # random play: -0.6; the most: 1
