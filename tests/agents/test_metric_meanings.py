"""The meanings of metrics: complete for each agent, and read by the pages and the report."""

from __future__ import annotations

from typing import Any

import pytest
import rule_files

import podrace
from podrace.agents import AGENTS, metrics, value_moments
from podrace.fields import replace_paths
from podrace.run.build import build
from podrace.settings.agents import default_agent

WITH = {  # settings that add metrics, or that an agent needs
  'impala': {'self_tuning': True},
  'ppo': {'self_tuning': True},
  'muzero': {'consistency': 1.0, 'network.projection': 8},
  'disco': {'rule': rule_files.small(), 'network.predictions': rule_files.SIZES.predictions}
  | {'lifetime': rule_files.SIZES.lifetime},
  'lpg': {'rule': rule_files.small_lpg(), 'network.predictions': rule_files.LPG.predictions},
}


LONG = ('disco', 'intrinsic', 'muesli', 'muzero', 'r2d2', 'sac')  # that they take to build


def logged(name: str, **more: Any) -> set[str]:
  """The metrics that an agent logs, without those of each tuned setting."""
  agent = replace_paths(default_agent(name), WITH.get(name, {}) | more)
  env = 'gymnax:Pendulum-v1' if name in ('sac', 'd4pg', 'qtopt') else 'podrace:catch'
  config = podrace.configure(env=env, num_envs=8, unroll_length=32, devices=1, agent=agent)
  names: set[str] = set(build(config).shapes.log.sums)
  if moments := names & set(value_moments.NAMES):  # a line shows their quotient
    names = names - moments | {'explained_variance'}
  return {'tuned_NAME' if n.startswith('tuned_') else n for n in names}


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in AGENTS]
)
def test_each_metric_of_an_agent_has_a_meaning(name: str) -> None:
  """A new metric of an agent needs a row in podrace/agents/metrics.py."""
  names, meanings = logged(name), metrics.meanings_of(name).keys()
  missing = names - meanings
  assert not missing, f'podrace/agents/metrics.py has no row for {missing} of {name}'
  assert metrics.MOST_TELLING[name] in names
  assert not (meanings - names) & {'explained_variance'}


def test_a_metric_has_one_meaning_for_an_agent() -> None:
  for name in AGENTS:
    rows = metrics.rows_of(name)
    assert len({row.name for row in rows}) == len(rows), name
  assert all(set(row.agents) <= AGENTS.keys() for row in metrics.METRICS)
  assert all(row.meaning.endswith('.') for row in metrics.METRICS)
  assert metrics.meanings_of('mine') == {}
