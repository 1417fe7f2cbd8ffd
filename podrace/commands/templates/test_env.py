"""Tests of NAME: `python -m pytest test_FILE.py`."""

import jax
from FILE import make

from podrace.agents.ppo import PPO
from podrace.envs.contract import check
from podrace.run.loop import train
from podrace.settings.config import Config


def test_it_keeps_the_contract():
  check(make(), jax.random.key(0), steps=200)


def test_an_agent_learns_it(tmp_path):
  config = Config(
    agent=PPO(), env='python:FILE.make', num_envs=64, unroll_length=32, total_steps=200_000
  )
  summary = train(config, tmp_path / 'run', quiet=True)
  assert summary['episode_return'] > 0.9  # it arrives
