"""Diagnoses: each sign is named once, at the line that shows it; healthy runs have none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import podrace
from podrace import hooks
from podrace.agents import AGENTS
from podrace.agents.d4pg import D4PG
from podrace.agents.dqn import DQN
from podrace.agents.muzero import MuZero
from podrace.agents.ppo import PPO
from podrace.agents.sac import SAC
from podrace.errors import UnreadableFile
from podrace.experiments.report import collect_run
from podrace.experiments.runs import inspect_run
from podrace.replay import Buffer
from podrace.run.diagnostics import CHECKS, Diagnostics, read_diagnostics
from podrace.settings.agents import default_agent
from podrace.settings.validation import check_agent_options

LINES = 20
TOTAL = 1000

Curve = Any  # a number, or a function of the share of the run

HEALTHY: dict[str, Curve] = dict(
  episode_return=lambda x: -1 + 2 * x,
  episode_return_std=0.5,
  episode_length=9.0,
  episodes=100,
  gradient_steps=200,
  entropy=lambda x: 1.1 * (1 - x),
  approx_kl=0.01,
  clip_fraction=0.1,
  explained_variance=lambda x: x - 0.3,
  saturation=0.3,
  loss=0.3,
  value=lambda x: x,
  temperature=0.2,
)
FLAT = dict(episode_return=-1.0)

# Name of the sign -> metrics that show it, and the agent where it matters.
PLANTED: dict[str, tuple[dict[str, Curve], Any]] = {
  'no-episodes': (dict(episodes=0, episode_return=None, episode_length=None), PPO()),
  'one-step-episodes': (dict(episode_length=1.0), PPO()),
  'constant-return': (FLAT | dict(episode_return_std=0.0, entropy=lambda x: 1 - x / 2), PPO()),
  'return-fell': (
    dict(episode_return=lambda x: 20 + 800 * x if x < 0.6 else 60.0, explained_variance=0.5),
    PPO(),
  ),
  'return-below-start': (dict(episode_return=lambda x: 22 - 5 * x, explained_variance=0.5), DQN()),
  'returns-not-finite': (dict(episode_return=None), PPO()),
  'no-gradient-steps': (dict(gradient_steps=0), PPO()),
  'loss-zero': (dict(loss=0.0), DQN()),
  'entropy-collapsed': (FLAT | dict(entropy=lambda x: 1.1 if x < 0.1 else 0.0), PPO()),
  'entropy-constant': (FLAT | dict(entropy=math.log(3)), PPO()),
  'updates-too-large': (dict(approx_kl=467.0), PPO()),
  'ratios-clipped': (dict(clip_fraction=0.95), PPO()),
  'values-diverge': (dict(value=lambda x: 10 ** (8 * x)), PPO()),
  'values-outside-support': (dict(outside_support=0.02), D4PG()),
  'temperature-vanished': (FLAT | dict(temperature=1e-6), PPO()),
  'values-explain-nothing': (FLAT | dict(explained_variance=-0.5), PPO()),
  'outputs-saturated': (FLAT | dict(saturation=0.99), PPO()),
  'short-sighted': (FLAT, PPO(discount=0.5)),
  'replay-too-small': (FLAT, DQN(buffer=Buffer(capacity=300, batch_size=32, min_size=32))),
  'target-never-updated': ({}, DQN(target_period=10_000)),
}


def lines_of(curves: dict[str, Curve], n: int = LINES) -> list[dict[str, Any]]:
  shares = [(i + 1) / n for i in range(n)]
  return [
    {'step': int(x * TOTAL)} | {k: v(x) if callable(v) else v for k, v in curves.items()}
    for x in shares
  ]


def in_lines(chosen: Callable[[int], bool], returns: Curve) -> dict[str, Curve]:
  """Episodes that end in the chosen lines only."""

  def line(x: float) -> int:
    return round(x * LINES)

  return dict(
    episodes=lambda x: 5 if chosen(line(x)) else 0,
    episode_return=lambda x: returns(x) if chosen(line(x)) else None,
    entropy=1.0,
  )


def diagnose(curves: dict[str, Curve], agent: Any) -> list[str]:
  diagnostics = Diagnostics(agent, TOTAL)
  messages = [diagnostics.add(line) for line in lines_of(HEALTHY | curves)]
  assert sum(map(len, messages)) == len(diagnostics.made)
  return [entry['name'] for entry in diagnostics.made]


def test_episodes_of_one_step_may_be_meant() -> None:
  """A bandit has no others, so its message holds under a condition."""
  (check,) = (c for c in CHECKS if c.name == 'one-step-episodes')
  assert ': if ' in check.message


def test_every_check_has_a_planted_failure() -> None:
  assert set(PLANTED) == {check.name for check in CHECKS}


@pytest.mark.parametrize('name', PLANTED)
def test_a_planted_failure_is_named_once_and_alone(name: str) -> None:
  curves, agent = PLANTED[name]
  assert diagnose(curves, agent) == [name]


@pytest.mark.parametrize('name', AGENTS)
def test_a_message_names_options_that_the_agent_has(name: str) -> None:
  agent, messages = default_agent(name), {}
  for curves, _ in PLANTED.values():
    diagnostics = Diagnostics(agent, TOTAL)
    for line in lines_of(HEALTHY | curves):
      diagnostics.add(line)
    messages |= {entry['name']: entry['message'] for entry in diagnostics.made}
  named = re.findall(r'--agent[a-z.-]*[a-z]', ' '.join(messages.values()))
  check_agent_options(agent, named)
  least = '--agent.buffer.min-size' if hasattr(agent, 'buffer') else '--agent.min-size'
  if hooks.learns_from_replay(agent):
    assert least in messages['no-gradient-steps']


@pytest.mark.parametrize(
  'curves',
  [
    {},
    dict(entropy=0.0),  # solved within the first line's steps, and deterministic since
    dict(episode_return=lambda x: 1.0 if x > 0.1 else 0.9, entropy=0.0, episode_return_std=0.0),
    # Episodes that succeed end first: the first lines have no others.
    dict(
      episode_return=lambda x: 0.2 if 0.05 < x < 0.2 else 1.0,
      entropy=lambda x: 1.1 if x < 0.3 else 0.0,
    ),
    dict(
      episode_return=lambda x: 0.2 if 0.3 < x < 0.5 else 1.0,
      entropy=lambda x: 1.1 if x < 0.8 else 0.0,
    ),
    dict(episode_return=lambda x: 1.0 if x < 0.1 else 0.2 + 0.5 * x, episode_return_std=0.0),
    dict(entropy=lambda x: -3 * x),  # of continuous actions
    dict(episodes=lambda x: 0 if x < 0.2 else 3),
    dict(approx_kl=lambda x: 2.0 if x < 0.1 else 0.01),
    dict(value=500.0, episode_return=lambda x: 500 * x),
    dict(saturation=1.0),  # it improves by extreme actions
    dict(explained_variance=-0.5),  # likewise, in spite of its values
    FLAT | dict(entropy=lambda x: 1 - x / 2),  # a return that stays says nothing alone
    FLAT | in_lines(lambda line: line < 3, lambda x: 0.0),  # too few episodes to tell
    dict(episode_return=lambda x: 0.2 if 0.5 < x < 0.6 else 2 * x),  # a short fall
    dict(episode_return=lambda x: 1.0 if x < 0.6 else 0.4, episode_return_std=5.0),  # noise
    FLAT | in_lines(lambda line: line % 9 == 1, lambda x: 2 * x),  # in 3 lines, with long gaps
  ],
)
def test_a_healthy_run_has_no_diagnosis(curves: dict[str, Curve]) -> None:
  assert diagnose(curves, PPO()) == []


@pytest.mark.parametrize('discount', [1.0, -1.0])
@pytest.mark.parametrize(
  'name, returns',
  [
    ('return-below-start', lambda x: 0.9 - x),
    ('return-fell', PLANTED['return-fell'][0]['episode_return']),
  ],
)
def test_returns_against_oneself_are_no_sign(name: str, returns: Curve, discount: float) -> None:
  curves = dict(
    episode_return=returns, explained_variance=0.5, value=0.0, entropy=lambda x: 1 - x / 2
  )
  assert (name in diagnose(curves, MuZero(discount=discount))) == (discount > 0)


def test_a_seed_that_falls_is_named() -> None:
  def line(x: float) -> dict[str, Any]:
    return dict(episode_return_by_seed=[2 * x, 2 * x if x < 0.6 else -0.5, None])

  lines = [x | line(x['step'] / TOTAL) for x in lines_of(HEALTHY)]
  diagnostics = Diagnostics(PPO(), TOTAL)
  for each in lines:
    diagnostics.add(each)
  (entry,) = diagnostics.made
  assert entry['name'] == 'return-fell' and 800 <= entry['step'] <= TOTAL


@pytest.mark.parametrize(
  'curves, signs',
  [
    (dict(episode_return=500.0, episode_return_std=0.0, entropy=0.001), []),
    (dict(episode_return=500.0, episode_return_std=0.0, entropy=0.6), []),
    (
      dict(episode_return=lambda x: 500 - 100 * x, entropy=lambda x: 0.005 - 0.004 * x),
      ['entropy-collapsed', 'return-below-start'],
    ),
  ],
)
def test_a_run_that_begins_with_learned_parameters_need_not_improve(
  curves: dict[str, Curve], signs: list[str]
) -> None:
  diagnostics = Diagnostics(PPO(), TOTAL, warm=True)
  for line in lines_of(HEALTHY | curves):
    diagnostics.add(line)
  assert [entry['name'] for entry in diagnostics.made] == signs


def test_the_returns_of_a_log_are_no_sign() -> None:
  """A clone that has become as deterministic as its teacher is good."""
  curves = HEALTHY | dict(episode_return=20.0, episode_return_std=0.0, entropy=0.001)
  diagnostics = Diagnostics(PPO(), TOTAL, replays=True)
  assert not [text for line in lines_of(curves) for text in diagnostics.add(line)]
  assert diagnose(dict(episode_return=20.0, episode_return_std=0.0, entropy=0.001), PPO())


@pytest.mark.parametrize(
  'agent',
  [
    DQN(target_period=1500),  # updated before half of the run
    MuZero(target_period=10_000),  # its target network is not used
    DQN(buffer=Buffer(capacity=320, batch_size=32, min_size=32)),
    PPO(discount=0.8),
    MuZero(discount=-1.0),  # of two players
  ],
)
def test_settings_that_fit_raise_no_alarm(agent: Any) -> None:
  assert diagnose(FLAT | dict(entropy=lambda x: 1 - x / 2), agent) == []


@pytest.mark.parametrize(
  ('share', 'sign'),
  [
    (lambda x: 0.1 * (x < 0.25), False),  # by a bad policy, at the start
    (lambda x: 0.25 * (x < 0.2), True),
    (0.009, False),
    (lambda x: 0.0 if x < 0.5 else 0.011, True),
  ],
)
def test_targets_outside_of_the_support_are_a_sign_if_they_stay(share: Any, sign: bool) -> None:
  assert diagnose(HEALTHY | dict(outside_support=share), MuZero()) == (
    ['values-outside-support'] if sign else []
  )


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize(
  'agent, scale, curves',
  [
    (DQN(discount=0.99), 100, {}),  # rewards of 1 in each of 100 steps that count
    (DQN(discount=0.9), 10, {}),
    (DQN(discount=1.0), 9, {}),  # the length of an episode
    (SAC(discount=0.9), 40, dict(temperature=1.0, entropy=-3.0)),  # and 3 for entropy
  ],
)
def test_values_diverge_from_10_times_the_returns_on(
  agent: Any, scale: float, curves: dict[str, Curve], sign: int
) -> None:
  of_returns = dict(
    episode_return=9.0, episode_return_std=1e-6, temperature=None, entropy=lambda x: 1 - x / 2
  )
  for factor, expected in ((9.9, []), (10.1, ['values-diverge'])):
    values = dict(value=lambda x, v=factor * (1 + scale): sign * v)
    assert diagnose(FLAT | of_returns | curves | values, agent) == expected


def test_a_return_improves_beyond_its_noise() -> None:
  saturated = dict(saturation=0.99, episodes=4, episode_return=lambda x: -1.0 if x < 0.1 else -0.5)
  assert diagnose(saturated | dict(episode_return_std=1.0), PPO()) == ['outputs-saturated']
  assert diagnose(saturated | dict(episode_return_std=0.1), PPO()) == []


@pytest.mark.parametrize('split', range(1, LINES))
def test_a_resumed_run_has_the_same_diagnoses(split: int) -> None:
  curves, agent = PLANTED['entropy-collapsed']
  lines = lines_of(HEALTHY | curves)
  whole = Diagnostics(agent, TOTAL)
  for line in lines:
    whole.add(line)
  first, second = Diagnostics(agent, TOTAL), Diagnostics(agent, TOTAL)
  for line in lines[:split]:
    first.add(line)
  second.restore(json.loads(json.dumps(first.save())))
  for line in lines[split:]:
    second.add(line)
  assert second.made == whole.made


def test_a_run_that_collapses_says_so_everywhere(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  run = tmp_path / 'run'
  config = podrace.configure(
    'catch', total_steps=60_000, log_every=3_000, agent=dict(learning_rate=1.0), devices=1
  )
  result = podrace.train(config, run)
  (entry,) = result.summary['diagnostics']
  assert entry['name'] == 'entropy-collapsed' and 0 < entry['step'] < 60_000
  assert capsys.readouterr().err.count(entry['message']) == 1
  assert read_diagnostics(run) == [entry]
  assert inspect_run(run).diagnostics == ('entropy-collapsed',)
  assert collect_run(inspect_run(run))['diagnoses'] == [entry]


@pytest.mark.slow
def test_a_run_that_learns_has_no_file(tmp_path: Path) -> None:
  config = podrace.configure('catch', total_steps=300_000, log_every=10_000)
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  assert result.summary['episode_return'] > 0.8
  assert 'diagnostics' not in result.summary
  assert read_diagnostics(tmp_path / 'run') == []


@pytest.mark.parametrize(
  'record',
  [
    {},
    {'diagnostics': 3},
    {'diagnostics': [3]},
    {'diagnostics': [{'name': 'a', 'step': 1}]},
    {'diagnostics': [{'name': 'a', 'step': -1, 'message': 'm'}]},
  ],
)
def test_a_damaged_file_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
  (tmp_path / 'diagnostics.json').write_text(json.dumps(record))
  with pytest.raises(UnreadableFile, match=r'diagnostics\.json'):
    read_diagnostics(tmp_path)


def test_further_members_of_a_diagnosis_are_left_out(tmp_path: Path) -> None:
  entry = '{"name": "a", "step": 1, "message": "b", "more": NaN}'
  (tmp_path / 'diagnostics.json').write_text(f'{{"diagnostics": [{entry}]}}')
  assert read_diagnostics(tmp_path) == [{'name': 'a', 'step': 1, 'message': 'b'}]
