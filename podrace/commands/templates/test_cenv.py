"""Tests of NAME: `python -m pytest test_FILE.py`."""

from pathlib import Path

from podrace.agents.ppo import PPO
from podrace.envs.host import base
from podrace.run.loop import train
from podrace.settings.config import Config

ENV = f'c:{Path(__file__).parent / "FILE.c"}'


def test_it_keeps_the_contract():
  """Equal seeds make equal bytes, in any order; a saved state goes on where it was."""
  base.make(ENV).try_out(60.0)


def test_an_agent_learns_it(tmp_path):
  config = Config(
    agent=PPO(),
    env=ENV,
    architecture='sebulba',
    num_envs=64,
    unroll_length=32,
    total_steps=200_000,
    devices=1,
  )
  summary = train(config, tmp_path / 'run', quiet=True)
  assert summary['episode_return'] > 0.9  # it arrives
