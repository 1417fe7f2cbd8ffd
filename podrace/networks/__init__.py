"""Networks.

Agents need a `Network`, and planning agents a `Model`. The ones that ship are `ActorCritic`,
`QNetwork`, `Actor`, `Critic`, `ActionValue`, `Predictor`, `PolicyPredictor`, `Policy`,
`LifetimeNetwork`, and `LearnedModel`, a `Model`.

Only this folder imports flax. A network from Haiku, Equinox, NNX or by hand fits as well: see
examples/own_network.py.
"""

from podrace.networks.action_value import ActionValue
from podrace.networks.actor_critic import ActorCritic
from podrace.networks.continuous import Actor, Critic
from podrace.networks.layers import inside_loops, outside_loops
from podrace.networks.lifetime import LifetimeNetwork, Policy
from podrace.networks.observations import image_sides
from podrace.networks.planning import LearnedModel, Model, Prediction
from podrace.networks.policy_predictor import PolicyPrediction, PolicyPredictor
from podrace.networks.predictor import Predictions, Predictor
from podrace.networks.protocol import (
  Network,
  PolicyValue,
  is_recurrent,
  merge_time,
  reset_where,
  split_time,
  unroll_merged,
  unroll_steps,
)
from podrace.networks.q_network import QNetwork

__all__ = [
  'ActionValue',
  'Actor',
  'ActorCritic',
  'Critic',
  'LearnedModel',
  'LifetimeNetwork',
  'Model',
  'Network',
  'Policy',
  'PolicyPrediction',
  'PolicyPredictor',
  'PolicyValue',
  'Prediction',
  'Predictions',
  'Predictor',
  'QNetwork',
  'image_sides',
  'inside_loops',
  'is_recurrent',
  'merge_time',
  'outside_loops',
  'reset_where',
  'split_time',
  'unroll_merged',
  'unroll_steps',
]
