"""Scores over tasks: normalize, aggregate and compare them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import UsageError
from podrace.experiments import curves, plot, statistics
from podrace.experiments.curves import CurveGroup
from podrace.experiments.labels import make_labels

RETURN = 'episode_return'
# Scores of random play and of a professional human in 57 Atari games, with up to 30 no-ops at the
# start and at most 108,000 frames: the table of Wang et al. 2016 (arXiv 1511.06581), as in dqn_zoo.
ATARI = {
  'alien': (227.8, 7127.7), 'amidar': (5.8, 1719.5), 'assault': (222.4, 742.0),
  'asterix': (210.0, 8503.3), 'asteroids': (719.1, 47388.7), 'atlantis': (12850.0, 29028.1),
  'bank_heist': (14.2, 753.1), 'battle_zone': (2360.0, 37187.5), 'beam_rider': (363.9, 16926.5),
  'berzerk': (123.7, 2630.4), 'bowling': (23.1, 160.7), 'boxing': (0.1, 12.1),
  'breakout': (1.7, 30.5), 'centipede': (2090.9, 12017.0), 'chopper_command': (811.0, 7387.8),
  'crazy_climber': (10780.5, 35829.4), 'defender': (2874.5, 18688.9),
  'demon_attack': (152.1, 1971.0), 'double_dunk': (-18.6, -16.4), 'enduro': (0.0, 860.5),
  'fishing_derby': (-91.7, -38.7), 'freeway': (0.0, 29.6), 'frostbite': (65.2, 4334.7),
  'gopher': (257.6, 2412.5), 'gravitar': (173.0, 3351.4), 'hero': (1027.0, 30826.4),
  'ice_hockey': (-11.2, 0.9), 'jamesbond': (29.0, 302.8), 'kangaroo': (52.0, 3035.0),
  'krull': (1598.0, 2665.5), 'kung_fu_master': (258.5, 22736.3), 'montezuma_revenge': (0.0, 4753.3),
  'ms_pacman': (307.3, 6951.6), 'name_this_game': (2292.3, 8049.0), 'phoenix': (761.4, 7242.6),
  'pitfall': (-229.4, 6463.7), 'pong': (-20.7, 14.6), 'private_eye': (24.9, 69571.3),
  'qbert': (163.9, 13455.0), 'riverraid': (1338.5, 17118.0), 'road_runner': (11.5, 7845.0),
  'robotank': (2.2, 11.9), 'seaquest': (68.4, 42054.7), 'skiing': (-17098.1, -4336.9),
  'solaris': (1236.3, 12326.7), 'space_invaders': (148.0, 1668.7), 'star_gunner': (664.0, 10250.0),
  'surround': (-10.0, 6.5), 'tennis': (-23.8, -8.3), 'time_pilot': (3568.0, 5229.2),
  'tutankham': (11.4, 167.6), 'up_n_down': (533.4, 11693.2), 'venture': (0.0, 1187.5),
  'video_pinball': (16256.9, 17667.9), 'wizard_of_wor': (563.5, 4756.5),
  'yars_revenge': (3092.9, 54576.9), 'zaxxon': (32.5, 9173.3),
}  # fmt: skip


# Weights of log10(1 + percent of human) in five games that predict it for the median over all 57:
# Aitchison et al. 2022 (Atari-5, arXiv 2210.02019), by its authors' code and data (44 algorithms).
ATARI5 = {
  'battle_zone': 0.38198,
  'double_dunk': 0.06791,
  'name_this_game': 0.31080,
  'phoenix': 0.12413,
  'qbert': 0.08049,
}


def atari5(scores: dict[str, float]) -> float:
  """Predict the median over 57 games from the scores of five. Both are human-normalized."""
  logs = [w * np.log10(1 + 100 * max(scores[name], 0.0)) for name, w in ATARI5.items()]
  return float(10 ** sum(logs) - 1) / 100


def atari_game(env: str) -> str | None:
  """Return the Atari game of an environment's name, or None if it is not one of the 57."""
  library, _, rest = env.partition(':')
  name = rest.partition(',')[0]
  return name if library == 'ale' and name in ATARI else None


def normalize_human(name: str, score: Any) -> Any:
  """Scale a score so that random play is 0 and a human is 1."""
  low, high = ATARI[name]
  return (score - low) / (high - low)


def aggregate(
  groups: Sequence[CurveGroup], normalize: str, out: Path, metric: str = RETURN
) -> dict[str, Any]:
  """Draw the aggregates of configurations over tasks, and return the numbers.

  Args:
    groups: groups of curves.
    normalize: 'human', 'minmax', or '' for human if the scores are returns in Atari games, else
      minmax.
    out: path of the picture.
    metric: metric of the curves.

  Raises:
    UsageError: if a configuration lacks a task of another, or all runs of a task have one score.
  """
  if logs := [g.env for g in groups if g.log]:
    raise UsageError(
      f"--aggregate: the returns of {logs[0]} are of recorded episodes, expected an agent's; leave "
      'out these runs'
    )
  envs = list(dict.fromkeys(g.env for g in groups))
  without_env = [
    dataclasses.replace(g, config={k: v for k, v in g.config.items() if k != 'env'}) for g in groups
  ]
  names = make_labels(without_env)
  scores_by_name: dict[str, dict[str, np.ndarray]] = {}
  for g, name in zip(groups, names, strict=True):
    of_group = np.array([curves.final_mean(c) for c in g.curves])
    before = scores_by_name.setdefault(name, {}).get(g.env, np.array([]))
    scores_by_name[name][g.env] = np.concatenate([before, of_group])
  for name, tasks in scores_by_name.items():
    if lacks := [e for e in envs if e not in tasks]:
      raise UsageError(
        f'--aggregate: {name} has no run in {", ".join(lacks)}; all need the same tasks'
      )
  is_score = metric == RETURN or normalize == 'human'  # in the unit of ATARI
  unit, scaled = _normalize(scores_by_name, envs, normalize or ('' if is_score else 'minmax'))
  numbers = plot.draw_aggregate(scaled, unit, out)
  games = {game: e for e in envs if (game := atari_game(e))}
  if is_score and set(ATARI5) <= set(games):
    for name, tasks in scores_by_name.items():
      means = {g: normalize_human(g, tasks[e].mean()) for g, e in games.items()}
      numbers[name]['atari5'] = atari5(means)
  return {
    'normalized': unit,
    'tasks': envs,
    'groups': numbers,
    'probability_of_improvement': compare_pairs(scaled),
  }


def compare_pairs(scores: Mapping[str, Sequence[np.ndarray]]) -> list[dict[str, Any]]:
  """Return the probability that a run of one configuration beats one of another, for each pair."""
  return [
    {
      'better': a,
      'than': b,
      'probability': float(statistics.probability_of_improvement(scores[a], scores[b])),
    }
    for a, b in itertools.permutations(scores, 2)
  ]


def _normalize(
  scores_by_name: dict[str, dict[str, np.ndarray]], envs: list[str], normalize: str
) -> tuple[str, dict[str, list[np.ndarray]]]:
  """Return the unit, and the normalized scores [runs] of each task by configuration."""
  if normalize not in ('', 'human', 'minmax'):
    raise UsageError(f'--normalize is human or minmax, not {normalize!r}')
  other_envs = [e for e in envs if atari_game(e) is None]
  if normalize == 'human' and other_envs:
    raise UsageError(f'--normalize human: no human score is known of {", ".join(other_envs)}')
  if normalize == 'human' or (not normalize and not other_envs):
    scales = {e: ATARI[str(atari_game(e))] for e in envs}
    unit = 'human-normalized: random play is 0, a human 1'
  else:
    all_scores = {e: np.concatenate([tasks[e] for tasks in scores_by_name.values()]) for e in envs}
    scales = {e: (float(x.min()), float(x.max())) for e, x in all_scores.items()}
    unit = 'the lowest run of each task is 0, the highest 1'
    if flat := [e for e, (low, high) in scales.items() if low == high]:
      raise UsageError(f'--normalize minmax: all runs have the same score in {json.dumps(flat)}')
  return unit, {
    name: [(tasks[e] - scales[e][0]) / (scales[e][1] - scales[e][0]) for e in envs]
    for name, tasks in scores_by_name.items()
  }
