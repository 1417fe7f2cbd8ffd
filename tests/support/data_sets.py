"""Minari data sets, recorded by Minari's own collector in Gymnasium's environments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

Rule = Callable[[Any, np.random.Generator], Any]  # an observation to an action


def collected(
  home: Path,
  name: str,
  env: gymnasium.Env,
  episodes: int,
  rule: Rule | None = None,
  steps: int = 10**6,
) -> tuple[Path, list[dict[str, Any]]]:
  """Record episodes; returns the directory of the data set, and the results of the environment.

  An episode is cut after `steps`. Without a rule, actions are samples of the space.
  """
  import minari

  seen: list[dict[str, Any]] = []
  with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter('ignore')
    patch.setitem(os.environ, 'MINARI_DATASETS_PATH', str(home))
    collector = minari.DataCollector(env)
    collector.action_space.seed(0)
    rng = np.random.default_rng(0)
    for seed in range(episodes):
      observation, _ = collector.reset(seed=seed)
      episode: dict[str, Any] = dict(observations=[observation], actions=[], rewards=[])
      over = False
      while not over:
        action = rule(observation, rng) if rule else collector.action_space.sample()
        observation, reward, terminated, truncated, _ = collector.step(action)
        episode['observations'].append(observation)
        episode['actions'].append(action)
        episode['rewards'].append(reward)
        episode['terminated'] = terminated
        over = terminated or truncated or len(episode['rewards']) == steps
      seen.append(episode)
    collector.create_dataset(
      dataset_id=name,
      algorithm_name='test',
      author='podrace',
      author_email='a@b.c',
      code_permalink='none',
    )
    collector.close()
  return home / name, seen


def balance(observation: Any, rng: np.random.Generator) -> int:
  """CartPole: push towards the side where the pole will be."""
  del rng
  return int(observation[2] + 0.5 * observation[3] > 0)
