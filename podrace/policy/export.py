"""Export of a run's policy to a directory that podrace.policy reads."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from podrace import distributions
from podrace.envs.spaces import MASK, map_leaves, number_encoding, seen
from podrace.errors import UsageError
from podrace.hooks import check_greedy, greedily, innermost
from podrace.networks import Actor, ActorCritic, QNetwork
from podrace.networks.observations import channels_first, is_pixels
from podrace.networks.recurrent_body import RecurrentBody
from podrace.policy import onnx
from podrace.policy.load import (
  CONFIG,
  GRAPH,
  PARAMS,
  POLICY,
  PROGRAM,
  VERSION,
  Policy,
  make_numpy_step,
)
from podrace.run.directory import load_config
from podrace.run.evaluate import eval_env
from podrace.run.saved_params import restore_params
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.settings.resolved import Resolved
from podrace.system.files import make_user_folder, move, new_folder, write_whole
from podrace.system.files import remove as remove_files
from podrace.system.files.schema import NEWEST
from podrace.system.process import undone_by_signals
from podrace.types import FIRST, MID, TimeStep
from podrace.version import __version__

NUMPY_NETWORKS = (ActorCritic, QNetwork, Actor)  # networks that podrace.policy has in NumPy
SAMPLES = 256  # observations in which a user's agent is compared with its network
PLATFORMS = ('cpu', 'cuda', 'tpu')


def export(
  run_dir: Path,
  folder: Path,
  member: int = 0,
  allow_code: Iterable[str] = (),
  checkpoint: str | int = NEWEST,
  config: Config | None = None,
) -> dict[str, Any]:
  """Write the policy of a run to a new directory, and return its description.

  Args:
    run_dir: directory of the run.
    folder: directory to create.
    member: index of the run's seed.
    allow_code: modules of the user that the run may import.
    checkpoint: newest, best or a step.
    config: configuration of the run. Default: the recorded one.

  Raises:
    UsageError: if there is no run or no checkpoint, or the directory exists.
  """
  config = config or load_config(run_dir, allow_code)
  if os.path.lexists(folder):
    raise UsageError(f'{folder} exists already: name a new directory')
  resolved = Resolved(config, run_dir).acting
  agent, env = innermost(resolved.agent), eval_env(resolved)
  if getattr(agent, 'simulations', 0):
    raise UsageError(
      f'{agent_name(agent)} acts by a search in a model, and export writes policies of one '
      'network only'
    )
  acting = _acting_network(agent)
  if getattr(acting, 'core', 'none') != 'none' and getattr(acting, 'previous_reward', False):
    raise UsageError(
      'this policy acts on the previous reward, which the user of an exported policy does not give '
      'it: train without previous_reward'
    )
  check_greedy(agent, 'export writes its best actions, without chance')
  if keys := [k for k in _keys(env.observation_space) if not isinstance(k, str)]:
    raise UsageError(
      f'{config.env}: its observation has the keys {keys}, and a policy names its inputs by texts: '
      'rename them in a wrapper, and train with it'
    )
  agent = greedily(agent)
  step, params, _ = restore_params(resolved, run_dir, checkpoint, member)
  with _without_draft(folder):
    return write_policy(folder, config, agent, env, params, step)


@contextlib.contextmanager
def _without_draft(folder: Path) -> Iterator[None]:
  """Remove the draft of `folder` at the end, unless it was moved, and at a signal."""
  remove = functools.partial(remove_files, draft_path(folder))
  with undone_by_signals(remove):
    try:
      yield
    finally:
      remove()


def draft_path(folder: Path) -> Path:
  """Return the path of the unfinished directory that becomes `folder`."""
  return folder.with_name(f'.{folder.name}.draft')


def write_policy(
  folder: Path, config: Config, agent: Any, env: Any, params: Any, step: int
) -> dict[str, Any]:
  """Write a bound agent's policy to a new directory, whole or not at all.

  Returns:
    The description that is in policy.json.
  """
  arrays = name_params(params)
  state = jax.eval_shape(agent.initial_state, jnp.zeros(1, jnp.int32))
  about: dict[str, Any] = {
    'version': VERSION,
    'podrace': __version__,
    'agent': agent_name(agent),
    'env': config.env,
    'step': step,
    'observation_space': describe_space(env.observation_space, _is_plain(agent)),
    'action': _describe_action(env.action_space, agent),
    'network': _describe_network(agent, env.observation_space),
    'state': [{'shape': list(x.shape[1:]), 'dtype': str(x.dtype)} for x in jax.tree.leaves(state)],
  }
  if (
    about['network']
    and ':' in about['agent']
    and not _acts_like_numpy(about, arrays, agent, env, params)
  ):
    about['network'] = None
  make_user_folder(folder.parent)
  draft = new_folder(draft_path(folder))
  from safetensors.numpy import save

  files = {
    PARAMS: save(arrays),
    CONFIG: (json.dumps(to_json(config), indent=2) + '\n').encode(),
    PROGRAM: _export_program(agent, env, params, state),
  }
  if not onnx.why_not(about):
    files[GRAPH] = onnx.build_graph(about, arrays)
  for name, data in files.items():
    write_whole(draft / name, data)
  about['sha256'] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
  write_whole(draft / POLICY, json.dumps(about, indent=2) + '\n')
  move(draft, folder)
  return about


def _acts_like_numpy(
  about: dict[str, Any], arrays: dict[str, np.ndarray], agent: Any, env: Any, params: Any
) -> bool:
  """Return whether a user's agent takes its network's best action in two steps of SAMPLES."""
  space = env.observation_space
  space.seed(0)
  policy = Policy(about, make_numpy_step(about, arrays))
  ids, state, agent_state = jnp.arange(SAMPLES, dtype=jnp.int32), None, None
  for step_type in (FIRST, MID):
    observation = jax.tree.map(
      lambda *x: np.stack(x), *[map_leaves(_sample_part, space, space.sample()) for _ in ids]
    )
    agent_state = agent.initial_state(ids) if agent_state is None else agent_state
    reward = jnp.zeros(SAMPLES)
    timestep = TimeStep(observation, reward, reward + 1, jnp.full(SAMPLES, step_type, jnp.int8))
    output, agent_state = agent.act(params, agent_state, timestep, jax.random.key(0))
    try:
      action, state = policy.act_many(observation, state)
    except (KeyError, ValueError, TypeError, IndexError):  # other parameter names, or another state
      return False
    if (
      action.shape != output.action.shape
      or np.mean(_differ(action, np.asarray(output.action))) > 0.01
    ):
      return False
  return True


def _sample_part(space: Any, x: Any) -> np.ndarray:
  """Convert part of a sampled observation to JAX's dtype. A mask allows all."""
  x = np.asarray(x, _dtype(space))
  return np.ones_like(x) if x.dtype == np.bool_ else x


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  if np.issubdtype(x.dtype, np.floating):
    return np.abs(x - y) > 1e-3 * (1 + np.abs(y))
  return x != y


def name_params(params: Any) -> dict[str, np.ndarray]:
  """Return parameters by podrace.policy's names, without leaves that greedy acting ignores."""
  return {
    name: np.ascontiguousarray(x)
    for name, x in zip(_param_names(params), jax.tree.leaves(params), strict=True)
    if name
  }


def _param_names(params: Any) -> list[str]:
  """Return a name for each leaf of an agent's parameters, '' for a leaf that is left out."""
  names = []
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    parts = [str(getattr(p, 'key', getattr(p, 'name', getattr(p, 'idx', p)))) for p in path]
    if parts[0] == 'network':  # Params of actor-critics and DQN
      parts = parts[1:]
    elif parts[0] in ('reward', 'epsilon') or parts[:2] == ['observation', 'seen']:
      parts = []
    names.append('/'.join(parts))
  return names


def _is_plain(agent: Any) -> bool:
  """Return whether the network takes numbers without scaling, as runs before `scaling` do."""
  return getattr(_acting_network(agent), 'scaling', 'space') == 'plain'


def describe_space(space: Any, plain: bool = False) -> dict[str, Any]:
  """Describe a space as JSON, as podrace.policy reads it."""
  if isinstance(space, spaces.Dict):
    return {'dict': {k: describe_space(v, plain) for k, v in space.items()}}
  if isinstance(space, spaces.Tuple):
    return {'tuple': [describe_space(v, plain) for v in space]}
  dtype = str(_dtype(space))
  description: dict[str, Any] = {'kind': 'box', 'shape': list(space.shape), 'dtype': dtype}
  if isinstance(space, spaces.Discrete):
    return description | {'kind': 'discrete', 'n': int(space.n), 'start': int(space.start)}
  if isinstance(space, spaces.MultiDiscrete):
    return description | {
      'kind': 'multidiscrete',
      'n': space.nvec.tolist(),
      'start': space.start.tolist(),
    }
  if isinstance(space, spaces.MultiBinary):
    return description | {'pixels': False, 'scale': 1.0, 'log': False, 'n': 2}
  encoding = number_encoding(space, plain)
  return description | {
    'pixels': bool(is_pixels(space, plain)),
    'channels_first': bool(channels_first(space)),
    'scale': np.asarray(encoding.scale).tolist(),
    'log': np.asarray(encoding.log).tolist(),
    'low': _bound(space.low),
    'high': _bound(space.high),
  }


def _keys(space: Any) -> list[Any]:
  """Return the keys of all Dicts in a space."""
  is_dict = isinstance(space, spaces.Dict)
  parts = space.values() if is_dict else space if isinstance(space, spaces.Tuple) else ()
  return [*(space if is_dict else ()), *(key for part in parts for key in _keys(part))]


def _dtype(space: Any) -> np.dtype:
  """Return the dtype of a space in JAX."""
  return jax.dtypes.canonicalize_dtype(space.dtype)


def _bound(x: np.ndarray) -> Any:
  """Return the only value of a bound, or None if it varies, is infinite or empty."""
  if not np.size(x):
    return None
  values = sorted({float(v) for v in np.ravel(x)[:2]} | {float(np.min(x)), float(np.max(x))})
  return values[0] if len(values) == 1 and np.isfinite(values[0]) else None


def _describe_action(space: Any, agent: Any) -> dict[str, Any]:
  description = {'shape': list(space.shape), 'dtype': str(_dtype(space))}
  network = _acting_network(agent)
  distribution = getattr(network, 'distribution', None)
  if isinstance(distribution, distributions.Categorical):
    return description | {'kind': 'categorical', 'n': distribution.num_actions}
  if isinstance(distribution, distributions.MultiCategorical):
    return description | {'kind': 'multicategorical', 'n': list(distribution.num_actions)}
  if isinstance(distribution, distributions.Normal):
    squash = isinstance(distribution, distributions.TanhNormal)
    box = {k: list(getattr(distribution, k)) for k in ('low', 'high', 'centre', 'scale')}
    return description | {'kind': 'box', 'squash': squash, **box}
  return description | {'kind': 'own'}


def _acting_network(agent: Any) -> Any:
  return getattr(agent, 'network', None) or getattr(agent, 'actor', None)


def _describe_network(agent: Any, space: Any) -> dict[str, Any] | None:
  """Describe the network for the NumPy runtime, or return None if that cannot run it."""
  network = _acting_network(agent)
  if type(network) not in NUMPY_NETWORKS or 'transformer' in (network.image_torso, network.core):
    return None
  if not _has_plain_core(network):
    return None
  actor = isinstance(network, Actor)
  q = isinstance(network, QNetwork)
  paths = _leaf_paths(space)
  names = [path for path, _ in paths]
  visible = seen(dict(paths))
  return {
    'torso': network.image_torso,
    'torso_name': 'Torso_0' if actor else 'torso',
    'layers': len(network.hidden),
    'activation': network.activation,
    'core': network.core,
    'core_size': network.core_size,
    'core_name': 'rnn',
    'head': 'actor' if actor else 'q' if q else 'policy',
    'head_name': 'Dense_0' if actor else 'policy_head',
    'atoms': network.atoms if q else 1,
    'dueling': q and network.dueling,
    'support': np.asarray(network.support).tolist() if q and network.categorical else None,
    'floats': [
      i
      for i, (path, s) in enumerate(paths)
      if path in visible and jnp.issubdtype(s.dtype, jnp.floating)
    ],
    'inputs': [i for i, (path, s) in enumerate(paths) if path in visible and 0 not in s.shape],
    'mask': names.index(MASK) if MASK in names else None,
  }


def _has_plain_core(network: Any) -> bool:
  """Return whether the network has no core, or one between torso and head, for observations."""
  if network.core == 'none' or not isinstance(network, RecurrentBody):
    return True
  return not (isinstance(network, Actor) or network.previous_action or network.shortcut)


def _leaf_paths(space: Any) -> list[tuple[str, Any]]:
  """Return the top-level name and space of each leaf, in JAX's order."""
  named = jax.tree_util.tree_leaves_with_path(map_leaves(lambda s: s, space))
  is_dict = isinstance(space, spaces.Dict)
  return [(path[0].key if is_dict else '', leaf) for path, leaf in named]


def _export_program(agent: Any, env: Any, params: Any, state: Any) -> bytes:
  """Serialize (params by name, state, observation [b, ...], first [b]) -> (action, state).

  The batch size b is symbolic.
  """
  leaves, tree = jax.tree.flatten(params)
  names, state_tree = _param_names(params), jax.tree.structure(state)

  def act(params_by_name: dict[str, Any], state: Any, observation: Any, first: Any) -> Any:
    chosen = [params_by_name[name] if name else x for name, x in zip(names, leaves, strict=True)]
    fresh = agent.initial_state(jnp.zeros(first.shape, jnp.int32))

    def select(new: Any, old: Any) -> Any:
      return jnp.where(first.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    before = jax.tree.map(select, fresh, jax.tree.unflatten(state_tree, state))
    zeros = jnp.zeros(first.shape)
    kind = jnp.where(first, 0, 1).astype(jnp.int8)
    timestep = TimeStep(observation, zeros, zeros + 1, kind)
    output, after = agent.act(jax.tree.unflatten(tree, chosen), before, timestep, jax.random.key(0))
    return output.action, jax.tree.leaves(after)

  (b,) = jax.export.symbolic_shape('b')

  def batched(x: Any) -> Any:
    return jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)

  def batched_space(space: Any) -> Any:
    return jax.ShapeDtypeStruct((b, *space.shape), _dtype(space))

  specs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in name_params(params).items()}
  program = jax.export.export(jax.jit(act), platforms=PLATFORMS)(
    specs,
    [batched(x) for x in jax.tree.leaves(state)],
    map_leaves(batched_space, env.observation_space),
    jax.ShapeDtypeStruct((b,), jnp.bool_),
  )
  return bytes(program.serialize())
