"""Signs in the metrics of a run that it does not learn, for all agents in one table.

A check looks at the newest lines and at a few numbers over the whole run. It stays silent while the
return improves, so that a policy that has become deterministic because it is good raises no alarm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace import hooks
from podrace.run.learning_history import RECENT, Fall, History
from podrace.system.files import write_json
from podrace.system.files.reading import read_object
from podrace.system.files.schema import DIAGNOSES, DIAGNOSIS

FILE = 'diagnostics.json'  # in a run directory, from the first diagnosis on
PAGE = 'docs/tips.md'
MANY = 20  # lines of a run that is long enough to judge its learning
FEW_STEPS, MANY_STEPS = 100, 1000  # gradient steps before which little, or no target, has changed
OPTION = re.compile(r'--agent\.([a-z.-]*[a-z])')
SCHEMA = {'diagnostics': dataclasses.replace(DIAGNOSES, needed=True)}


def _has_support(agent: Any) -> bool:
  """Return whether values are within a range, as with atoms."""
  owner: Any = agent if hasattr(agent, 'v_min') else getattr(agent, 'network', None)
  ranged = getattr(owner, 'head', 'categorical') in ('categorical', 'sigmoid')
  return ranged and hasattr(owner, 'v_min')


def _diverges(history: History) -> bool:
  """Return whether values exceed the returns that were seen 10 times.

  A mean value is near the reward of a step times the number of steps that count. Before it has
  learned, a network with atoms may have any value between their ends.
  """
  highest = history.highest
  if 'reward_rate' not in highest:
    return False
  # After a time limit, values count rewards that returns do not have.
  steps = history.horizon if math.isfinite(history.horizon) else highest['episode_length']
  limit = 10 * (1 + steps * (highest['reward_rate'] + highest.get('entropy_reward', 0.0)))
  if _has_support(history.agent):
    limit = max(limit, 1.5 * abs(history.first.get('value', 0.0)))
  values = history.newest('value', 3)
  return bool(values) and all(abs(x) > limit for x in values)


def _is_short_sighted(history: History) -> bool:
  """Return whether fewer than 5 steps count, and episodes are three times as long."""
  steps = history.horizon
  return steps < 5 and history.lowest.get('episode_length', 0.0) > 3 * steps


def _has_small_replay(history: History) -> bool:
  """Return whether replay holds fewer steps than 10 batches have windows."""
  owner: Any = getattr(history.agent, 'buffer', history.agent)
  if not hasattr(owner, 'capacity') or not hasattr(owner, 'batch_size'):
    return False
  return bool(owner.capacity < 10 * owner.batch_size)


def _has_first_target(history: History) -> bool:
  """Return whether an agent that learns from a target network has never updated it."""
  agent = history.agent
  if getattr(agent, 'bootstrap', 'target') != 'target' and not getattr(agent, 'reanalyse', 0):
    return False  # MuZero does not use its target network
  return MANY_STEPS <= history.gradient_steps < getattr(agent, 'target_period', 0)


def _has_fallen(history: History) -> bool:
  """Return whether a seed has been without half of its gain for a fifth of the run."""
  step, least = history.lines[-1].get('step', 0.0), 0.2 * history.total_steps
  return any(fall.since is not None and step - fall.since >= least for fall in history.falls)


@dataclasses.dataclass(frozen=True)
class Check:
  """A sign of a failure.

  Attributes:
    name: stable identifier, for scripts.
    message: says what the metrics show and what to do.
    detect: returns whether the history shows it.
  """

  name: str
  message: str
  detect: Callable[[History], bool]


CHECKS = (
  Check(
    'no-episodes',
    'no episode has ended yet: raise --total-steps beyond the length of an episode; if episodes '
    'never end, give the environment a time limit that truncates',
    lambda h: h.progress >= 0.9 and h.count >= 5 and h.highest.get('episodes') == 0,
  ),
  Check(
    'one-step-episodes',
    'no episode is longer than one step: if the task has longer ones, look at the termination of '
    'the environment',
    lambda h: h.progress >= 0.1 and h.count >= 5 and h.highest.get('episode_length', 2) <= 1,
  ),
  Check(
    'constant-return',
    'all episodes have the same return, so there is nothing to learn from: look at the rewards, '
    'or explore more',
    lambda h: (
      not h.warm
      and h.progress >= 0.3
      and h.count >= MANY
      and 'episode_return' in h.first
      and h.lowest['episode_return'] == h.highest['episode_return']
      and h.highest.get('episode_return_std', 1) == 0
    ),
  ),
  Check(
    'return-fell',
    'for a fifth of the run the return, or that of a seed, has been nearer to its start than to '
    'its best: keep the best parameters by --eval-every, and lower --agent.learning-rate',
    lambda h: h.count >= MANY and not h.plays_itself and _has_fallen(h),
  ),
  Check(
    'return-below-start',
    'half of the run is over, and the return is lower than at the start: lower '
    '--agent.learning-rate',
    lambda h: (
      h.progress >= 0.5 and h.count >= MANY and h.gradient_steps >= FEW_STEPS and h.is_below_start
    ),
  ),
  Check(
    'returns-not-finite',
    'returns are not finite: look at the rewards of the environment',
    lambda h: h.stays('returns_not_finite', 3),
  ),
  Check(
    'no-gradient-steps',
    'half of the run is over and nothing was learned: replay holds fewer steps than '
    '--agent.buffer.min-size',
    lambda h: h.progress >= 0.5 and h.count >= 3 and h.highest.get('gradient_steps') == 0,
  ),
  Check(
    'loss-zero',
    'the loss is exactly 0 in 5 lines, so nothing is learned: look at the rewards; with '
    '--agent.recurrence.start episode, raise --agent.buffer.capacity until replay holds whole '
    'episodes of each environment',
    lambda h: h.gradient_steps >= FEW_STEPS and h.stays('loss', 5, 0.0, 0.0),
  ),
  Check(
    'entropy-collapsed',
    'the policy has become deterministic, and the return does not improve: lower the learning '
    'rate, or raise --agent.entropy-cost, if the agent has it',
    lambda h: h.stays('entropy', 3, -1e-6, 0.01) and h.lowest['entropy'] >= -1e-6 and h.stagnates,
  ),
  Check(
    'entropy-constant',
    'half of the run is over, the policy is still as random as at the start, and the return does '
    'not improve: raise '
    '--agent.learning-rate, or lower --agent.entropy-cost',
    lambda h: (
      h.progress >= 0.5
      and h.count >= MANY
      and h.gradient_steps >= FEW_STEPS
      and h.lowest.get('entropy', 0) > 0
      and h.lowest['entropy'] > 0.9 * h.highest['entropy']  # masked steps make it vary
      and h.stagnates
    ),
  ),
  Check(
    'updates-too-large',
    'approx_kl exceeds 1 in 3 lines, so each update changes the policy completely: lower '
    '--agent.learning-rate or --agent.epochs',
    lambda h: h.stays('approx_kl', 3, low=1.0),
  ),
  Check(
    'ratios-clipped',
    'more than 80% of the probability ratios are clipped in 5 lines: lower --agent.learning-rate '
    'or --agent.epochs',
    lambda h: h.stays('clip_fraction', 5, low=0.8),
  ),
  Check(
    'values-diverge',
    'values exceed the returns 10 times: lower --agent.learning-rate, or follow the target '
    'network more slowly',
    _diverges,
  ),
  Check(
    'values-outside-support',
    'targets of values are outside of v-min to v-max, and cut off at its ends: widen the range',
    # Of a good policy no target is. A bad one at the start may see returns that never come again.
    lambda h: h.stays('outside_support', 3, low=0.01 if h.progress >= 0.3 else 0.2),
  ),
  Check(
    'values-explain-nothing',
    'explained_variance is below 0 in 10 lines, so the values are worse than a constant, and the '
    'return does not improve: lower --agent.learning-rate, or scale the rewards',
    lambda h: (
      h.progress >= 0.3
      and h.count >= MANY
      and h.gradient_steps >= FEW_STEPS
      and h.stays('explained_variance', RECENT, high=0.0)
      and h.stagnates
    ),
  ),
  Check(
    'outputs-saturated',
    'more than 95% of the actions are at an end of their range, and the return does not improve: '
    'lower the learning rate of the policy, or scale observations and rewards',
    lambda h: h.stays('saturation', 5, low=0.95) and h.stagnates,
  ),
  Check(
    'short-sighted',
    'the discount counts few steps of an episode, and the return does not improve: raise '
    '--agent.discount',
    lambda h: h.progress >= 0.3 and h.count >= MANY and _is_short_sighted(h) and h.stagnates,
  ),
  Check(
    'replay-too-small',
    'replay holds fewer than 10 batches, and the return does not improve: raise '
    '--agent.buffer.capacity',
    lambda h: h.progress >= 0.5 and h.count >= MANY and _has_small_replay(h) and h.stagnates,
  ),
  Check(
    'target-never-updated',
    'half of the run is over, and the target network is as it began: lower --agent.target-period',
    lambda h: h.progress >= 0.5 and h.count >= MANY and _has_first_target(h),
  ),
  Check(
    'temperature-vanished',
    'the temperature is below 1e-4, and the return does not improve: raise --agent.target-entropy',
    lambda h: h.stays('temperature', 5, high=1e-4) and h.stagnates,
  ),
)


class Diagnostics:
  """Applies the checks to the lines of a run; each diagnosis is made once.

  Args:
    agent: the agent of the run.
    total_steps: of the run.
    warm: whether the run begins with learned parameters.
    replays: whether all returns come from a log, so that learning cannot change them.
  """

  def __init__(
    self, agent: Any, total_steps: int, warm: bool = False, replays: bool = False
  ) -> None:
    self._replays = replays
    self._history = History(hooks.innermost(agent), total_steps, warm)
    self.made: list[dict[str, Any]] = []  # DIAGNOSIS

  def add(self, line: dict[str, Any]) -> list[str]:
    """Return the messages of new diagnoses after a line of metrics."""
    if self._replays:
      line = {n: x for n, x in line.items() if not n.startswith(('episodes', 'episode_return'))}
    self._history.add(line)
    known = {entry['name'] for entry in self.made}
    new = [
      (check.name, check.message)
      for check in CHECKS
      if check.name not in known and check.detect(self._history)
    ]
    new = [(name, OPTION.sub(self._name_option, text)) for name, text in new]
    self.made += [dict(name=name, step=line['step'], message=text) for name, text in new]
    return [f'{text} ({PAGE})' for _, text in new]

  def _name_option(self, option: re.Match[str]) -> str:
    """Return an option of a message as the agent has it; in words if it has none."""
    agent, (*parts, last) = self._history.agent, option[1].split('.')
    field = last.replace('-', '_')
    if hasattr(functools.reduce(lambda x, part: getattr(x, part, None), parts, agent), field):
      return option[0]
    return f'--agent.{last}' if hasattr(agent, field) else f'the {last.replace("-", " ")}'

  def save(self) -> dict[str, Any]:
    """Return the state for a checkpoint, as JSON."""
    state = dataclasses.asdict(dataclasses.replace(self._history, agent=None))
    del state['agent'], state['total_steps'], state['warm']
    return {'history': state, 'made': list(self.made)}

  def restore(self, saved: dict[str, Any]) -> None:
    """Take the state of a checkpoint back."""
    for name, value in saved['history'].items():
      setattr(self._history, name, [Fall(**x) for x in value] if name == 'falls' else value)
    self.made = list(saved['made'])

  def write(self, run_dir: Path) -> None:
    """Write all diagnoses to the run directory, or remove the file if there is none."""
    if self.made:
      write_json(run_dir / FILE, {'diagnostics': self.made})
    else:
      (run_dir / FILE).unlink(missing_ok=True)


def read_diagnostics(run_dir: Path) -> list[dict[str, Any]]:
  """Return the diagnoses of a run.

  Raises:
    UnreadableFile: if the file is damaged.
  """
  record = read_object(run_dir / FILE, SCHEMA)
  entries = [] if record is None else record['diagnostics']
  return [{name: entry[name] for name in DIAGNOSIS} for entry in entries]
