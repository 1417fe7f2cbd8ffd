"""Optional members of an agent besides its four functions. No other module looks for them.

The four functions are in `podrace.types.Agent`. The optional members:

- `memory(num_envs, unroll_length, stack) -> Replay`: the replay to learn from. Without, the agent
  learns from the newest trajectory. `stack` is the number of frames in an observation; 0 if
  frames are not stacked.
- `greedy: bool = False`, a field: take the best action, for evaluation. Without, only
  `podrace eval --sample` can evaluate the agent.
- fields with `bind(observation_space, action_space)`, such as networks: they are bound before the
  run begins.
- `total_updates: int = 0` and `total_envs: int = 0`, fields: they are set to the run's, for
  schedules.
- `environment: Any = None`, a field: it is set to the `Environment`, or to None if that is not in
  JAX. For agents that try out actions by its rules.
- `opening() -> str`: a line that a run prints when it begins; without, nothing.
- `gradient_steps`, a number: of each call of `learn`, for the log. Without, it is 1.
- `refresh(params, window, key) -> Trajectory`: windows [L + 1, B, ...] of its replay with newer
  targets in their `outputs`, by `params`; for `podrace reanalyse` and `podrace label`. Without, its
  targets can't be refreshed.
- `labels`, a field: `stage` if a stage writes the targets by `refresh`, which `learn` only reads.
- `refusal() -> str`: the reason why `learn` made the loss infinite without an update, for the user.
- `replace=lambda action: action`, a fifth argument of `act`: a function from the agent's actions
  [B] to the actions that are taken, to which the extras and the state then belong. For agents with
  extras, so that they can learn from a log (`--log`) of other actions.
- `searches`, a number: of each window that is refreshed, for the log. Without, it is the window's
  length.
- `warm_start(train, params) -> TrainState`: a new `TrainState` with the parameters of another run,
  for `--init-from`. Without, `params` takes the place of the new ones, and `rest` stays.
- `sharding_rules`, of its networks: tuples (pattern, axis) for `--model-devices`, see
  docs/model_axis.md.
- `agent`, a field: the agent that this one wraps. The inner agent is bound, and made greedy.
- `settings: int` and `init_members(keys) -> TrainState`: the number of settings of
  hyper-parameters, for runs of several seeds in one program, and the first states of all members.
  Each setting has the same seeds.
- `diverged(train) -> bool array []`, with `settings`: whether a member learns nothing more, while
  the members of other settings go on. Without, the run ends if any parameter is not finite.
- `check_vma = False`: JAX does not prove that `learn` makes the same on all devices. For a `learn`
  with code that does not trace under that check, such as loops with literals as first carries.

Importing this does not import jax.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podrace.errors import UsageError

if TYPE_CHECKING:
  from podrace.types import ActorOutput, Array, Replay, TimeStep, TrainState

FUNCTIONS = ('init', 'initial_state', 'act', 'learn')
BOUND = (
  'observation_space',
  'action_space',
  'environment',
  'total_updates',
  'total_envs',
)  # fields that a run sets; no record has them
FIELDS = {  # optional members that must be fields, as they are set by `dataclasses.replace`
  'greedy': 'bool = False',
  'total_updates': 'int = 0',
  'total_envs': 'int = 0',
}


def lacks(agent: Any) -> list[str]:
  """Return the names of the four functions that the agent lacks."""
  return [name for name in FUNCTIONS if not hasattr(agent, name)]


def learns_from_replay(agent: Any) -> bool:
  """Return whether the agent learns from replay."""
  return hasattr(agent, 'memory')


def memory(agent: Any, env: Any, num_envs: int, unroll_length: int) -> Replay:
  """Return the replay of a bound agent: its own, or one that holds the newest trajectory only."""
  if learns_from_replay(agent):
    return _memory(agent, num_envs, unroll_length, getattr(env, 'frame_stack', 0))
  from podrace.replay.on_policy import on_policy

  return on_policy()


def _memory(agent: Any, num_envs: int, unroll_length: int, stack: int) -> Replay:
  from podrace.system.blame import calling, describe, is_ours, refuse
  from podrace.types import Replay

  sizes = (num_envs, unroll_length, stack)
  if is_ours(agent):
    ours: Replay = agent.memory(*sizes)
    return ours
  inputs = f'num_envs {num_envs}, unroll_length {unroll_length}, stack {stack}'
  result = calling(agent, 'memory', inputs, *sizes)
  if not isinstance(result, Replay):
    refuse(agent, 'memory', describe(result), 'a Replay, as podrace.replay.windows(...) makes it')
  return result


def can_be_greedy(agent: Any) -> bool:
  """Return whether the agent can take its best action."""
  return hasattr(innermost(agent), 'greedy')


def check_greedy(agent: Any, advice: str) -> None:
  """Raise UsageError, which ends with `advice`, if the agent cannot take its best action."""
  if not can_be_greedy(agent):
    raise UsageError(f'{type(agent).__name__} has no field greedy: {advice}')


def greedily(agent: Any) -> Any:
  """Return the agent for evaluation: it takes its best action."""
  inner = wrapped(agent)
  if inner is not None:
    return dataclasses.replace(agent, agent=greedily(inner))
  return dataclasses.replace(agent, greedy=True)


def wrapped(agent: Any) -> Any:
  """Return the agent that this one wraps; None if it wraps none."""
  inner = getattr(agent, 'agent', None)
  return None if inner is None or lacks(inner) else inner


def innermost(agent: Any) -> Any:
  """Return the innermost agent of all wrappers, which acts."""
  inner = wrapped(agent)
  return agent if inner is None else innermost(inner)


def settings(agent: Any) -> int:
  """Return the number of settings of hyper-parameters, each for an equal number of members."""
  return int(agent.settings) if hasattr(agent, 'init_members') else 1


def init_members(agent: Any, keys: Any) -> Any:
  """Return the `TrainState` of all members of a run.

  They are made one after the other, since batched LAPACK calls can deadlock.
  """
  if hasattr(agent, 'init_members'):
    return agent.init_members(keys)
  import jax

  return jax.lax.map(agent.init, keys)


def diverged(agent: Any) -> Callable[[TrainState], Array] | None:
  """Return the function that says whether a member has diverged, or None."""
  return getattr(agent, 'diverged', None)


def gradient_steps(agent: Any) -> int:
  """Return the number of gradient steps in each call of `learn`."""
  return getattr(agent, 'gradient_steps', 1)


def can_refresh(agent: Any) -> bool:
  """Return whether the agent can refresh the targets in its replay."""
  stored = getattr(agent, 'labels', 'stage') == 'stage'
  return hasattr(agent, 'refresh') and learns_from_replay(agent) and stored


def labels_elsewhere(agent: Any) -> bool:
  """Return whether a stage must write the targets that the agent learns from."""
  return getattr(innermost(agent), 'labels', 'learner') == 'stage'


def refusal(agent: Any) -> str:
  """Return the agent's reason for an infinite loss; '' if it has none."""
  inner = innermost(agent)
  return inner.refusal() if hasattr(inner, 'refusal') else ''


def replaces_actions(agent: Any) -> bool:
  """Return whether `act` takes a function that replaces the actions."""
  return 'replace' in inspect.signature(innermost(agent).act).parameters


def act_with(
  agent: Any,
  params: Any,
  state: Any,
  timestep: TimeStep,
  key: Array,
  replace: Callable[[Array], Array],
) -> tuple[ActorOutput, Any]:
  """Act, and let `replace` change the actions, of which the agent's state then tells."""
  if replaces_actions(agent):
    result: tuple[ActorOutput, Any] = agent.act(params, state, timestep, key, replace)
    return result
  output, state = agent.act(params, state, timestep, key)
  return output._replace(action=replace(output.action)), state


def searches(agent: Any, length: int) -> int:
  """Return the number of searches in each refreshed window of that length."""
  return getattr(agent, 'searches', length)


def warm_start(agent: Any, train: TrainState, params: Any) -> TrainState:
  """Return a new run's `train` with the parameters of another run."""
  if hasattr(agent, 'warm_start'):
    result: TrainState = agent.warm_start(train, params)
    return result
  return train._replace(params=params)


def opening(agent: Any) -> str:
  """Return the line that a run prints about the agent when it begins; '' for nothing."""
  inner = innermost(agent)
  return inner.opening() if hasattr(inner, 'opening') else ''


def checks_vma(agent: Any) -> bool:
  """Return whether JAX is to prove that `learn` makes the same on all devices."""
  return getattr(agent, 'check_vma', True)


def networks(agent: Any) -> dict[str, Any]:
  """Return the fields that have a `bind`."""
  fields = {f.name: getattr(agent, f.name) for f in dataclasses.fields(agent)}
  return {name: value for name, value in fields.items() if hasattr(value, 'bind')}


def sharding(agent: Any) -> tuple[tuple[str, int], ...]:
  """Return the sharding rules of all networks: patterns of array names, and the axis to split."""
  rules = [
    getattr(network, 'sharding_rules', ()) for network in networks(innermost(agent)).values()
  ]
  return tuple(rule for own in rules for rule in own)


def bind(agent: Any, env: Any, total_updates: int, total_envs: int) -> Any:
  """Bind an agent to the spaces of `env` and the sizes of the run, where it has fields for them.

  Raises:
    ValueError: if a network can't be built for these spaces.
  """
  inner = wrapped(agent)
  if inner is not None:
    return dataclasses.replace(agent, agent=bind(inner, env, total_updates, total_envs))
  bound = {
    name: _bound(network, env.observation_space, env.action_space)
    for name, network in networks(agent).items()
  }
  fields = {f.name for f in dataclasses.fields(agent)}
  pure = getattr(env, 'jax', None) if hasattr(env, 'jax') else env  # a HostSpec has its own
  of_run = dict(total_updates=total_updates, total_envs=total_envs, environment=pure)
  return dataclasses.replace(agent, **bound, **{k: v for k, v in of_run.items() if k in fields})


def _bound(network: Any, observation_space: Any, action_space: Any) -> Any:
  """Return the network for these spaces."""
  from podrace.system.blame import calling, is_ours, refuse

  if is_ours(network):
    return network.bind(observation_space, action_space)
  inputs = f'the spaces {observation_space} and {action_space}'
  result = calling(network, 'bind', inputs, observation_space, action_space)
  if result is None:
    refuse(network, 'bind', 'None', 'the network for these spaces: dataclasses.replace(self, ...)')
  return result
