"""What an agent may have besides its four functions, each looked for here and nowhere else.

The four are `podrace.types.Agent`. The others:

- `memory(num_envs, unroll_length, stack) -> Replay`: what it learns from. Without, it learns from
  the newest trajectory. `stack` is how many frames an observation of the environment is made of; 0
  if it is no stack.
- `greedy: bool = False`, a field: whether it takes its best action, for evaluation. Without, only
  `podrace eval --sample` can evaluate it.
- fields with `bind(observation_space, action_space)`, such as networks: they are bound before the
  run begins.
- `total_updates: int = 0` and `total_envs: int = 0`, fields: they are set to the run's, for
  schedules.
- `environment: Any = None`, a field: it is set to the `Environment`, or None of one that is not in
  JAX. For agents that try out actions by its rules.
- `advice(line) -> str`: a message for the user about a line of metrics, such as a setting that does
  not fit; '' if all is well. A run prints the first one.
- `opening() -> str`: what a run says of it when it begins; without, nothing.
- `gradient_steps`, a number: of each call of `learn`, for the log. Without, it is 1.
- `refresh(params, window, key) -> Trajectory`: windows [L + 1, B, ...] of its replay with newer
  targets in their `outputs`, by `params`; for `podrace reanalyse`. Without, its targets can't be
  refreshed.
- `searches`, a number: of each window that is refreshed, for the log. Without, it is the window's
  length.
- `warm_start(train, params) -> TrainState`: a new `TrainState` with the parameters of another run,
  for `--init-from`. Without, `params` takes the place of the new ones, and `rest` stays.
- `sharding_rules`, of its networks: tuples (pattern, axis) for `--model-devices`, see
  docs/model_axis.md.
- `agent`, a field: of an agent that wraps another one. That is bound, and made greedy, in its
  place.
- `settings: int` and `init_members(keys) -> TrainState`: how many settings of hyper-parameters it
  has, for runs of several seeds in one program, and the beginning of all members; each setting has
  the same seeds.
- `check_vma = False`: JAX does not prove that `learn` makes the same on all devices. For a `learn`
  with code that does not trace under that check, such as loops whose carries start from literals.

Importing this does not import jax.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from podrace.types import Replay, TrainState

FUNCTIONS = ('init', 'initial_state', 'act', 'learn')
BOUND = (
  'observation_space',
  'action_space',
  'environment',
  'total_updates',
  'total_envs',
)  # fields that a run sets; no record has them


def lacks(agent: Any) -> list[str]:
  """Those of the four functions that it does not have."""
  return [name for name in FUNCTIONS if not hasattr(agent, name)]


def learns_from_replay(agent: Any) -> bool:
  """Return whether the agent learns from replay."""
  return hasattr(agent, 'memory')


def memory(agent: Any, env: Any, num_envs: int, unroll_length: int) -> Replay:
  """What a bound agent learns from: its own replay, or else the newest trajectory."""
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
  given = f'num_envs {num_envs}, unroll_length {unroll_length}, stack {stack}'
  found = calling(agent, 'memory', given, *sizes)
  if not isinstance(found, Replay):
    refuse(agent, 'memory', describe(found), 'a Replay, as podrace.replay.windows(...) makes it')
  return found


def can_be_greedy(agent: Any) -> bool:
  """Return whether the agent can take its best action."""
  return hasattr(agent, 'greedy')


def greedily(agent: Any) -> Any:
  """The agent as it is evaluated: it takes its best action."""
  inner = wrapped(agent)
  if inner is not None:
    return dataclasses.replace(agent, agent=greedily(inner))
  return dataclasses.replace(agent, greedy=True)


def wrapped(agent: Any) -> Any:
  """The agent that this one wraps; None if it wraps none."""
  inner = getattr(agent, 'agent', None)
  return None if inner is None or lacks(inner) else inner


def innermost(agent: Any) -> Any:
  """The agent that acts, within all that wrap it."""
  inner = wrapped(agent)
  return agent if inner is None else innermost(inner)


def settings(agent: Any) -> int:
  """How many settings of its hyper-parameters it has, each for as many members of a run."""
  return getattr(agent, 'settings', 1)


def init_members(agent: Any, keys: Any) -> Any:
  """The `TrainState` of all members of a run, one after the other: batched LAPACK calls can block each other."""
  if hasattr(agent, 'init_members'):
    return agent.init_members(keys)
  import jax

  return jax.lax.map(agent.init, keys)


def gradient_steps(agent: Any) -> int:
  """Gradient steps in each call of `learn`."""
  return getattr(agent, 'gradient_steps', 1)


def can_refresh(agent: Any) -> bool:
  """Return whether the agent can refresh the targets in its replay."""
  return hasattr(agent, 'refresh') and learns_from_replay(agent)


def searches(agent: Any, length: int) -> int:
  """Searches of each window of that length that the agent refreshes."""
  return getattr(agent, 'searches', length)


def warm_start(agent: Any, train: TrainState, params: Any) -> TrainState:
  """A new run's `train` with the parameters of another run."""
  if hasattr(agent, 'warm_start'):
    found: TrainState = agent.warm_start(train, params)
    return found
  return train._replace(params=params)


def advice(agent: Any, line: dict[str, Any]) -> str:
  """The agent's message for the user about a line of metrics; '' if all is well."""
  inner = innermost(agent)
  return inner.advice(line) if hasattr(inner, 'advice') else ''


def opening(agent: Any) -> str:
  """What a run says of the agent when it begins; '' for nothing."""
  inner = innermost(agent)
  return inner.opening() if hasattr(inner, 'opening') else ''


def checks_vma(agent: Any) -> bool:
  """Whether JAX is to prove that what `learn` makes is the same on all devices."""
  return getattr(agent, 'check_vma', True)


def networks(agent: Any) -> dict[str, Any]:
  """The fields that have a `bind`."""
  fields = {f.name: getattr(agent, f.name) for f in dataclasses.fields(agent)}
  return {name: value for name, value in fields.items() if hasattr(value, 'bind')}


def sharding(agent: Any) -> tuple[tuple[str, int], ...]:
  """The rules of all its networks: a pattern of names of arrays, and the axis along which those are split."""
  rules = [
    getattr(network, 'sharding_rules', ()) for network in networks(innermost(agent)).values()
  ]
  return tuple(rule for own in rules for rule in own)


def bind(agent: Any, env: Any, total_updates: int, total_envs: int) -> Any:
  """`agent` for the spaces of `env` and the sizes of the run, where it has fields for them.

  Raises:
    ValueError: if a network can't be built for those spaces.
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
  """The network for these spaces."""
  from podrace.system.blame import calling, is_ours, refuse

  if is_ours(network):
    return network.bind(observation_space, action_space)
  given = f'the spaces {observation_space} and {action_space}'
  found = calling(network, 'bind', given, observation_space, action_space)
  if found is None:
    refuse(network, 'bind', 'None', 'the network for these spaces: dataclasses.replace(self, ...)')
  return found
