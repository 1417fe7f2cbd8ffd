"""The meaning of each metric of an agent, for the documentation and the report.

A new metric of an agent gets a row here. A test trains each agent and names the rows that are
missing. A row of an agent that does not log the metric yet is allowed. Importing this imports no
agent.
"""

from __future__ import annotations

import dataclasses

from podrace.agents import AGENTS

POLICY_GRADIENT = ('impala', 'ppo')
VALUE_BASED = ('dqn', 'r2d2', 'pqn')
ACTOR_CRITIC = ('sac', 'd4pg')
MODEL_BASED = ('muzero', 'muesli')
RULES = ('disco', 'lpg')


@dataclasses.dataclass(frozen=True)
class MetricRow:
  """A metric, its meaning, and the agents that log it."""

  name: str
  meaning: str
  agents: tuple[str, ...]


METRICS = (
  MetricRow(
    'loss',
    'The loss whose gradient the optimiser takes.',
    tuple(x for x in AGENTS if x not in ACTOR_CRITIC),
  ),
  MetricRow(
    'loss',
    'Loss of the critics: half the squared error, summed over both. The policy has `actor_loss`.',
    ('sac',),
  ),
  MetricRow(
    'loss',
    'Loss of the critic: cross-entropy over the atoms. The policy has `actor_loss`.',
    ('d4pg',),
  ),
  # policies
  MetricRow(
    'entropy',
    'Entropy of the policy in nats. It falls from the logarithm of the number of actions towards 0 '
    'as the policy decides.',
    (*POLICY_GRADIENT, *MODEL_BASED, 'disco', 'bc'),
  ),
  MetricRow(
    'entropy',
    'Entropy of the policy in nats. It falls from the logarithm of the number of actions towards 0 '
    'as the policy decides. The step from the end of an episode to the next one counts as 0.',
    ('lpg', 'intrinsic'),
  ),
  MetricRow('entropy', 'Estimated entropy of the policy, from one action per state.', ('sac',)),
  MetricRow(
    'policy_loss',
    'Loss of the policy. Its size says little, as advantages have a mean near 0.',
    (*POLICY_GRADIENT, 'muesli', 'lpg', 'intrinsic'),
  ),
  MetricRow(
    'policy_loss', "Cross-entropy of the search's policies and the network's.", ('muzero',)
  ),
  MetricRow(
    'policy_loss',
    "Divergence of the policy from the rule's target. It does not fall to 0, as targets move.",
    ('disco',),
  ),
  MetricRow(
    'approx_kl',
    'Estimated divergence of the new policy from the acting one, the mean of ratio - 1 - log ratio '
    '(Schulman 2020).',
    POLICY_GRADIENT,
  ),
  MetricRow('clip_fraction', 'Share of steps whose ratio is outside of the clip.', ('ppo',)),
  MetricRow(
    'rho',
    'Mean importance ratio of the learning policy to the acting one. Near 1: no lag.',
    ('impala',),
  ),
  MetricRow(
    'rho',
    'Mean importance ratio, each clipped at 1. Far below 1: replay is old, or the learning rate '
    'too high.',
    ('muesli',),
  ),
  MetricRow(
    'actor_loss',
    "Loss of the policy: minus the critic's value of its actions.",
    ('d4pg',),
  ),
  MetricRow(
    'actor_loss',
    "Loss of the policy: temperature times log-density, minus the critics' value.",
    ('sac',),
  ),
  MetricRow('temperature', 'Weight of the entropy, alpha in the paper.', ('sac',)),
  MetricRow(
    'epsilon',
    'Share of random actions. Not logged with an epsilon for each environment.',
    ('dqn', 'pqn'),
  ),
  # values
  MetricRow('value', 'Mean predicted value of the actions taken.', ('dqn', 'qtopt')),
  MetricRow(
    'value',
    'Mean predicted value of the actions taken. The step from the end of an episode to the next '
    'one counts as 0.',
    ('pqn',),
  ),
  MetricRow('value', 'Mean predicted value of the actions taken, rescaled.', ('r2d2',)),
  MetricRow('value', "Mean value of the policy's own actions, by the smaller critic.", ('sac',)),
  MetricRow('value', "Mean value of the policy's own actions, by the critic.", ('d4pg',)),
  MetricRow('value', 'Mean predicted value of the states.', (*MODEL_BASED, 'disco')),
  MetricRow(
    'value_loss',
    'Half the mean squared error of the values.',
    (*POLICY_GRADIENT, 'intrinsic'),
  ),
  MetricRow(
    'value_loss',
    'Loss of the values: cross-entropy over the atoms, or half the squared error without atoms.',
    (*MODEL_BASED, 'disco'),
  ),
  MetricRow(
    'explained_variance',
    '1 minus the mean squared error of the values by the variance of the targets. 1: exact. 0 '
    'or less: no better than a constant.',
    (*POLICY_GRADIENT, *MODEL_BASED),
  ),
  MetricRow(
    'saturation',
    'Share of the numbers of actions that are within 1% of a bound. Near 1: the policy only '
    'switches between extremes.',
    (*POLICY_GRADIENT, *ACTOR_CRITIC),
  ),
  MetricRow(
    'advantage_std',
    'Size of advantages, a moving average, by which they are divided. It falls as values become '
    'right.',
    ('muesli', 'disco'),
  ),
  # models
  MetricRow('reward_loss', "Loss of the model's rewards.", MODEL_BASED),
  MetricRow('model_loss', "Cross-entropy of CMPO's policies and the model's.", ('muesli',)),
  MetricRow('cmpo_loss', "Cross-entropy of CMPO's policy and the network's.", ('muesli',)),
  MetricRow(
    'consistency_loss',
    'Distance of imagined hidden states from observed ones, with `--agent.consistency`.',
    ('muzero',),
  ),
  MetricRow(
    'outside_support',
    'Share of value targets beyond the ends of the atoms, where they are cut off.',
    ('d4pg', *MODEL_BASED, 'disco'),
  ),
  MetricRow(
    'outside_support',
    'Share of value targets beyond the ends of the atoms, with the head `categorical`.',
    ('dqn',),
  ),
  MetricRow(
    'outside_support',
    'Share of targets outside of `v-min` to `v-max` of the network, where they are cut off.',
    ('qtopt',),
  ),
  MetricRow('target_age', 'Age of the plans learned from, in gradient steps.', ('muzero',)),
  MetricRow('reanalysed', 'Share of the plans that are newer than their actions.', ('muzero',)),
  # learned rules and rewards
  MetricRow('y_loss', "Divergence of the prediction y from the rule's target.", RULES),
  MetricRow('z_loss', "Divergence of the prediction z from the rule's target.", ('disco',)),
  MetricRow('next_policy_loss', 'Divergence of the foreseen next policy.', ('disco',)),
  MetricRow('y_entropy', 'Entropy of the prediction y.', RULES),
  MetricRow('z_entropy', 'Entropy of the prediction z.', ('disco',)),
  MetricRow(
    'target_divergence', "Divergence of the rule's policy from the target network's.", ('disco',)
  ),
  MetricRow(
    'policy_target_square', 'Mean square of the targets, so how strongly the rule pushes.', ('lpg',)
  ),
  MetricRow('y_target_square', 'Mean square of the targets of y.', ('lpg',)),
  MetricRow('policy_target_square', "Square of the mean of the rule's policy logits.", ('disco',)),
  MetricRow('y_target_square', "Square of the mean of the rule's logits of y.", ('disco',)),
  MetricRow('z_target_square', "Square of the mean of the rule's logits of z.", ('disco',)),
  MetricRow('intrinsic_reward', 'Mean learned reward. Near -1 or 1: it is stuck.', ('intrinsic',)),
  MetricRow('intrinsic_square', 'Mean square of the learned reward.', ('intrinsic',)),
  MetricRow(
    'value_mean',
    'With `--agent.normalize-values`: the moving average of the value targets, in raw units.',
    POLICY_GRADIENT,
  ),
  MetricRow(
    'value_std',
    'With `--agent.normalize-values`: the deviation of the value targets. Values are in units of '
    'it, and so is the `value_loss`.',
    POLICY_GRADIENT,
  ),
  MetricRow(
    'action_error',
    'Share of the recorded actions that the policy would not have taken. With actions of numbers: '
    "mean distance of the policy's action from the recorded one.",
    ('bc',),
  ),
  # self-tuning
  MetricRow('outer_loss', 'With `--agent.self-tuning`: the outer loss.', POLICY_GRADIENT),
  MetricRow(
    'tuned_NAME',
    'With `--agent.self-tuning`: the present value of each setting of `--agent.tuning.fields`.',
    POLICY_GRADIENT,
  ),
)

MOST_TELLING = {  # agent -> its metric that the report shows first
  **dict.fromkeys((*POLICY_GRADIENT, 'muesli', *RULES), 'entropy'),
  **dict.fromkeys((*VALUE_BASED, *ACTOR_CRITIC, 'qtopt', 'muzero'), 'value'),
  'intrinsic': 'intrinsic_reward',
  'bc': 'action_error',
}


def rows_of(agent: str) -> list[MetricRow]:
  """Return the rows of an agent of AGENTS."""
  return [row for row in METRICS if agent in row.agents]


def meanings_of(agent: str) -> dict[str, str]:
  """Return the meaning of each metric of an agent; {} for an agent of the user."""
  return {row.name: row.meaning for row in rows_of(agent)}
