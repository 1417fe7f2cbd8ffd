"""From a run to a policy that others can use: see podrace.policy."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
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
from podrace.hooks import can_be_greedy, greedily, innermost
from podrace.networks import Actor, ActorCritic, QNetwork
from podrace.networks.observations import channels_first, is_pixels
from podrace.policy import CONFIG, GRAPH, PARAMS, POLICY, PROGRAM, VERSION, Policy, numpy_step, onnx
from podrace.run.directory import load_config
from podrace.run.evaluate import evaluable, newest_params
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.system.files import make_user_folder, move, new_folder, write_whole
from podrace.system.files import remove as remove_files
from podrace.system.process import undone_by_signals
from podrace.types import FIRST, MID, TimeStep
from podrace.version import __version__

OURS = (ActorCritic, QNetwork, Actor)  # networks that podrace.policy has in NumPy
SAMPLES = 256  # observations that an agent of somebody's own is compared in
PLATFORMS = ('cpu', 'cuda', 'tpu')


def export(
  run_dir: Path, folder: Path, member: int = 0, allow_code: Iterable[str] = ()
) -> dict[str, Any]:
  """Writes the policy of a run's newest checkpoint to a new directory; returns its description.

  Args:
    member: which of the run's seeds.

  Raises:
    UsageError: if there is no run or no checkpoint, or the directory is there already.
  """
  config = load_config(run_dir, allow_code)
  if not 0 <= member < config.seeds:
    raise UsageError(f'--member {member}: the run has {config.seeds} seed(s), counted from 0')
  if os.path.lexists(folder):
    raise UsageError(f'{folder} exists already: name a new directory')
  agent, env = evaluable(config)
  agent = innermost(agent)
  if hasattr(getattr(agent, 'network', None), 'dynamics'):
    raise UsageError(
      f'{agent_name(agent)} acts by a search in a model, and export writes policies of one network only'
    )
  if can_be_greedy(agent):
    agent = greedily(agent)
  step, params, _ = newest_params(config, agent, run_dir)
  if config.seeds > 1:
    params = jax.tree.map(lambda x: x[member], params)
  remove = functools.partial(remove_files, draft_of(folder))
  with undone_by_signals(remove):
    return write(folder, config, agent, env, params, step)


def draft_of(folder: Path) -> Path:
  """The directory that becomes `folder` when it is whole."""
  return folder.with_name(f'.{folder.name}.draft')


def write(
  folder: Path, config: Config, agent: Any, env: Any, params: Any, step: int
) -> dict[str, Any]:
  """Writes a bound agent's policy to a new directory, whole or not at all; returns its description."""
  arrays = named(params)
  state = jax.eval_shape(agent.initial_state, jnp.zeros(1, jnp.int32))
  about: dict[str, Any] = {
    'version': VERSION,
    'podrace': __version__,
    'agent': agent_name(agent),
    'env': config.env,
    'step': step,
    'observation_space': described(env.observation_space, _is_plain(agent)),
    'action': _action(env.action_space, agent),
    'network': _network(agent, env.observation_space),
    'state': [{'shape': list(x.shape[1:]), 'dtype': str(x.dtype)} for x in jax.tree.leaves(state)],
  }
  if (
    about['network']
    and ':' in about['agent']
    and not _acts_alike(about, arrays, agent, env, params)
  ):
    about['network'] = None
  make_user_folder(folder.parent)
  draft = new_folder(draft_of(folder))
  from safetensors.numpy import save

  files = {
    PARAMS: save(arrays),
    CONFIG: (json.dumps(to_json(config), indent=2) + '\n').encode(),
    PROGRAM: _program(agent, env, params, state),
  }
  if not onnx.why_not(about):
    files[GRAPH] = onnx.graph(about, arrays)
  for name, data in files.items():
    write_whole(draft / name, data)
  about['sha256'] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
  write_whole(draft / POLICY, json.dumps(about, indent=2) + '\n')
  move(draft, folder)
  return about


def _acts_alike(
  about: dict[str, Any], arrays: dict[str, np.ndarray], agent: Any, env: Any, params: Any
) -> bool:
  """Whether an agent of somebody's own does what is best by its network, in SAMPLES observations and what follows."""
  space = env.observation_space
  space.seed(0)
  policy = Policy(about, numpy_step(about, arrays))
  ids, state, theirs = jnp.arange(SAMPLES, dtype=jnp.int32), None, None
  for step_type in (FIRST, MID):
    seen = jax.tree.map(
      lambda *x: np.stack(x), *[map_leaves(_sampled, space, space.sample()) for _ in ids]
    )
    theirs = agent.initial_state(ids) if theirs is None else theirs
    reward = jnp.zeros(SAMPLES)
    timestep = TimeStep(seen, reward, reward + 1, jnp.full(SAMPLES, step_type, jnp.int8))
    output, theirs = agent.act(params, theirs, timestep, jax.random.key(0))
    try:
      found, state = policy.act_many(seen, state)
    except (
      KeyError,
      ValueError,
      TypeError,
      IndexError,
    ):  # parameters by other names, a state of its own
      return False
    if (
      found.shape != output.action.shape
      or np.mean(_differ(found, np.asarray(output.action))) > 0.01
    ):
      return False
  return True


def _sampled(space: Any, x: Any) -> np.ndarray:
  """An observation's part as JAX has it; of a mask, all is allowed."""
  x = np.asarray(x, _dtype(space))
  return np.ones_like(x) if x.dtype == np.bool_ else x


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  if np.issubdtype(x.dtype, np.floating):
    return np.abs(x - y) > 1e-3 * (1 + np.abs(y))
  return x != y


def named(params: Any) -> dict[str, np.ndarray]:
  """Parameters by the names that podrace.policy knows; those that acting greedily does not need are left out."""
  return {
    name: np.ascontiguousarray(x)
    for name, x in zip(_names(params), jax.tree.leaves(params), strict=True)
    if name
  }


def _names(params: Any) -> list[str]:
  """A name for each leaf of an agent's parameters; '' for those that are left out."""
  found = []
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    parts = [str(getattr(p, 'key', getattr(p, 'name', getattr(p, 'idx', p)))) for p in path]
    if parts[0] == 'network':  # of Params of actor-critics and DQN
      parts = parts[1:]
    elif parts[0] in ('reward', 'epsilon') or parts[:2] == ['observation', 'seen']:
      parts = []
    found.append('/'.join(parts))
  return found


def _is_plain(agent: Any) -> bool:
  """Whether a network has the units of numbers of runs before `scaling`."""
  return getattr(_acting_network(agent), 'scaling', 'space') == 'plain'


def described(space: Any, plain: bool = False) -> dict[str, Any]:
  """A space as JSON, as podrace.policy reads it."""
  if isinstance(space, spaces.Dict):
    return {'dict': {k: described(v, plain) for k, v in space.items()}}
  if isinstance(space, spaces.Tuple):
    return {'tuple': [described(v, plain) for v in space]}
  dtype = str(_dtype(space))
  found: dict[str, Any] = {'kind': 'box', 'shape': list(space.shape), 'dtype': dtype}
  if isinstance(space, spaces.Discrete):
    return found | {'kind': 'discrete', 'n': int(space.n), 'start': int(space.start)}
  if isinstance(space, spaces.MultiDiscrete):
    return found | {
      'kind': 'multidiscrete',
      'n': space.nvec.tolist(),
      'start': space.start.tolist(),
    }
  if isinstance(space, spaces.MultiBinary):
    return found | {'pixels': False, 'channels_first': False, 'scale': 1.0, 'log': False}
  encoding = number_encoding(space, plain)
  return found | {
    'pixels': bool(is_pixels(space, plain)),
    'channels_first': bool(channels_first(space)),
    'scale': np.asarray(encoding.scale).tolist(),
    'log': np.asarray(encoding.log).tolist(),
    'low': _bound(space.low),
    'high': _bound(space.high),
  }


def _dtype(space: Any) -> np.dtype:
  """As JAX has it."""
  return jax.dtypes.canonicalize_dtype(space.dtype)


def _bound(x: np.ndarray) -> Any:
  """One number where all are alike; None where there is none."""
  if not np.size(x):
    return None
  values = sorted({float(v) for v in np.ravel(x)[:2]} | {float(np.min(x)), float(np.max(x))})
  return values[0] if len(values) == 1 and np.isfinite(values[0]) else None


def _action(space: Any, agent: Any) -> dict[str, Any]:
  found = {'shape': list(space.shape), 'dtype': str(_dtype(space))}
  network = _acting_network(agent)
  distribution = getattr(network, 'distribution', None)
  if isinstance(distribution, distributions.Categorical):
    return found | {'kind': 'categorical', 'n': distribution.num_actions}
  if isinstance(distribution, distributions.MultiCategorical):
    return found | {'kind': 'multicategorical', 'n': list(distribution.num_actions)}
  if isinstance(distribution, distributions.Normal):
    squash = isinstance(distribution, distributions.TanhNormal)
    box = {k: list(getattr(distribution, k)) for k in ('low', 'high', 'centre', 'scale')}
    return found | {'kind': 'box', 'squash': squash, **box}
  return found | {'kind': 'own'}


def _acting_network(agent: Any) -> Any:
  return getattr(agent, 'network', None) or getattr(agent, 'actor', None)


def _network(agent: Any, space: Any) -> dict[str, Any] | None:
  """What the NumPy runner has to know; None for a network that it does not have: not podrace's own, or a transformer."""
  network = _acting_network(agent)
  if type(network) not in OURS or network.image_torso == 'transformer':
    return None
  actor = isinstance(network, Actor)
  q = isinstance(network, QNetwork)
  paths = _paths(space)
  names = [path for path, _ in paths]
  shown = seen(dict(paths))
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
      if path in shown and jnp.issubdtype(s.dtype, jnp.floating)
    ],
    'inputs': [i for i, (path, s) in enumerate(paths) if path in shown and 0 not in s.shape],
    'mask': names.index(MASK) if MASK in names else None,
  }


def _paths(space: Any) -> list[tuple[str, Any]]:
  """Top-level names of the leaves, in JAX's order."""
  if not isinstance(space, spaces.Dict):
    return [('', space)]
  found = []
  for key in sorted(space):
    found += [
      (key, leaf)
      for leaf in jax.tree.leaves(
        map_leaves(lambda s: s, space[key]), is_leaf=lambda s: isinstance(s, spaces.Space)
      )
    ]
  return found


def _program(agent: Any, env: Any, params: Any, state: Any) -> bytes:
  """(parameters by name, state, observation [b, ...], first [b]) -> (action, state), for any b."""
  leaves, tree = jax.tree.flatten(params)
  names, state_tree = _names(params), jax.tree.structure(state)

  def act(given: dict[str, Any], state: Any, observation: Any, first: Any) -> Any:
    taken = [given[name] if name else x for name, x in zip(names, leaves, strict=True)]
    fresh = agent.initial_state(jnp.zeros(first.shape, jnp.int32))

    def select(new: Any, old: Any) -> Any:
      return jnp.where(first.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    before = jax.tree.map(select, fresh, jax.tree.unflatten(state_tree, state))
    zeros = jnp.zeros(first.shape)
    kind = jnp.where(first, 0, 1).astype(jnp.int8)
    timestep = TimeStep(observation, zeros, zeros + 1, kind)
    output, after = agent.act(jax.tree.unflatten(tree, taken), before, timestep, jax.random.key(0))
    return output.action, jax.tree.leaves(after)

  (b,) = jax.export.symbolic_shape('b')

  def shaped(x: Any) -> Any:
    return jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)

  def of_space(space: Any) -> Any:
    return jax.ShapeDtypeStruct((b, *space.shape), _dtype(space))

  given = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in named(params).items()}
  program = jax.export.export(jax.jit(act), platforms=PLATFORMS)(
    given,
    [shaped(x) for x in jax.tree.leaves(state)],
    map_leaves(of_space, env.observation_space),
    jax.ShapeDtypeStruct((b,), jnp.bool_),
  )
  return bytes(program.serialize())
