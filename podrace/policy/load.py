"""Exported policies that act without training code: with NumPy alone, ONNX Runtime or JAX.

`load_policy` runs no code of the directory. Parameters are safetensors, the description is JSON,
and an ONNX graph has only ONNX's own operations. The JAX program is an exception: use
`runtime='jax'` for trusted policies only (docs/security.md). Importing this imports neither jax nor
training code.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import PolicyError, UnreadableFile
from podrace.policy.network import (
  COVERED,
  STATES,
  Numpy,
  Params,
  PolicyNetwork,
  flatten_space,
)
from podrace.policy.observations import convert, flatten, map_parts, unflatten
from podrace.system.files.reading import read_bytes, read_json
from podrace.system.files.schema import (
  COUNT,
  LARGEST,
  POSITIVE,
  TEXT,
  Member,
  check_members,
  needed,
)
from podrace.system.importing import why_not

VERSION = 2
READ = (1, 2)  # version 1 lacks `log` of observations, and `centre` and `scale` of actions
POLICY, PARAMS, CONFIG = 'policy.json', 'params.safetensors', 'config.json'
PROGRAM, GRAPH = 'policy.jaxexport', 'policy.onnx'
RUNTIMES = ('numpy', 'jax', 'onnx')

FILE_BYTES = 2**32  # largest file, in bytes
SMALLEST = 1e-30  # smallest scale of an observation
ELEMENTS = 2**26  # most elements of all observations, actions and states together
DTYPES = ('bool', *(f'{k}{n}' for k in ('int', 'uint') for n in (8, 16, 32, 64)))
DTYPES += ('float16', 'bfloat16', 'float32', 'float64')
DESCRIPTION = {
  'agent': TEXT,
  'env': TEXT,
  'step': COUNT,
  'observation_space': Member('an object'),
  'action': Member('an object'),
  'state': Member('a list', each=Member('an object')),
  'network': Member('an object', null=True),
}  # members of policy.json
SPACE = {
  'kind': TEXT,
  'dtype': needed(TEXT),
  'shape': needed(Member('a list', each=Member('a whole number', 0, ELEMENTS))),
}
NETWORK = {
  'layers': needed(Member('a whole number', 0, 1000)),
  'core_size': needed(Member('a whole number', 0, 2**20)),
  'core': needed(TEXT),
  'torso': needed(TEXT),
  'floats': needed(Member('a list', each=COUNT)),
  'atoms': needed(Member('a whole number', 1, 2**20)),
}

# Arrays of observations [B, ...], state, which episodes begin [B] -> actions, next state.
Step = Callable[[list[np.ndarray], Any, np.ndarray], tuple[np.ndarray, Any]]


def load_policy(folder: Path | str, runtime: str = 'numpy') -> Policy:
  """Load a policy that `podrace export` wrote.

  Args:
    folder: directory of the policy.
    runtime: 'numpy' or 'onnx', which run podrace's own networks, or 'jax', which runs all. The last
      two need the packages onnxruntime and jax.

  Raises:
    PolicyError: if there is no policy, a file was changed, or the runtime cannot run it.
  """
  folder = Path(folder)
  if runtime not in RUNTIMES:
    raise PolicyError(f'runtime is {", ".join(map(repr, RUNTIMES))}, not {runtime!r}')
  about = _read_description(folder)
  files = {name: _read_verified(folder / name, digest) for name, digest in about['sha256'].items()}
  if runtime != 'jax' and about['network'] is None:
    raise PolicyError(f"only JAX runs {folder}: take runtime='jax'. {COVERED}")
  if runtime == 'onnx':
    return Policy(about, _make_onnx_step(about, _require_file(files, GRAPH, folder)))
  from safetensors.numpy import load

  try:
    params = load(_require_file(files, PARAMS, folder))
  except PolicyError:
    raise
  except Exception as e:  # SafetensorError, or KeyError for an unknown dtype
    raise PolicyError(f'{folder / PARAMS} holds no parameters: {type(e).__name__}: {e}') from e
  if runtime == 'jax':
    return Policy(about, _make_jax_step(about, params, _require_file(files, PROGRAM, folder)))
  return _check_fit(Policy(about, make_numpy_step(about, params)), folder)


def _read_description(folder: Path) -> dict[str, Any]:
  try:
    about = read_json(folder / POLICY)
  except UnreadableFile as e:
    raise PolicyError(f'{folder} holds no policy: {e}') from e
  if about is None:
    hint = ''
    if os.path.lexists(folder / 'checkpoints'):
      command = f'podrace export {shlex.quote(str(folder))} FOLDER'
      hint = f'; it is a run directory: write its policy by `{command}`'
    raise PolicyError(f'{folder} holds no policy: {POLICY} is not there{hint}')
  if not isinstance(about, dict) or about.get('version') not in READ:
    raise PolicyError(f'{folder / POLICY} is not a policy of version {" or ".join(map(str, READ))}')
  if lacking := {'agent', 'sha256', 'network', 'action', 'observation_space', 'state'} - set(about):
    raise PolicyError(f'{folder / POLICY} lacks {", ".join(sorted(lacking))}')
  hashes = about['sha256']
  if not isinstance(hashes, dict) or not set(hashes) <= {PARAMS, CONFIG, PROGRAM, GRAPH}:
    raise PolicyError(f'{folder / POLICY} names files that are of no policy')
  try:
    _check_description(about)
  except ValueError as e:
    raise PolicyError(f'{folder / POLICY} is not the description of a policy: it {e}') from e
  return about


def _check_description(about: dict[str, Any]) -> None:
  """Check that memory and a network can be made from a description.

  Raises:
    ValueError: if not.
  """
  check_members(about, DESCRIPTION)
  total = 0
  for space in (*flatten_space(about['observation_space']), *about['state'], about['action']):
    check_members(space, SPACE)
    _check_scale(space.get('scale', 1.0))
    if space['dtype'] not in DTYPES:
      raise ValueError(f'has a dtype other than {", ".join(DTYPES)}')
    counts = space['n'] if isinstance(space.get('n'), list) else [space.get('n', 1)]
    if any(map(POSITIVE.difference, counts)):
      raise ValueError('has an n other than whole numbers from 1')
    total += max(math.prod(space['shape']), sum(counts))
    if total > ELEMENTS:
      raise ValueError(f'has arrays of more than {ELEMENTS:,} elements')
  if about['network'] is not None:
    check_members(about['network'], NETWORK)


def _check_scale(scale: Any) -> None:
  """Raise ValueError unless `scale`, a number or lists of numbers, can divide."""
  try:
    numbers = np.asarray(scale, np.float64)
  except (TypeError, ValueError, OverflowError):
    numbers = np.zeros(())
  if not np.all((numbers >= SMALLEST) & (numbers <= LARGEST)):
    raise ValueError(f'has a scale other than numbers from {SMALLEST:g} to {LARGEST:g}')


def _check_fit(policy: Policy, folder: Path) -> Policy:
  """Act once, and refuse a description that does not fit its parameters."""
  about = policy.about
  try:
    zeros = (
      np.full((1, *x['shape']), x.get('start', 0), x['dtype'])
      for x in flatten_space(about['observation_space'])
    )
    with np.errstate(all='ignore'):
      policy.act_many(unflatten(about['observation_space'], zeros))
  except Exception as e:
    raise PolicyError(
      f'{folder}: {POLICY} does not fit {PARAMS}: {type(e).__name__}: {str(e)[:200]}'
    ) from e
  return policy


def _read_verified(path: Path, digest: str) -> bytes:
  """Read a file and check its SHA-256 digest."""
  try:
    data = read_bytes(path, FILE_BYTES)
  except FileNotFoundError as e:
    raise PolicyError(f'{path} cannot be read: {e.strerror}') from e
  except UnreadableFile as e:
    raise PolicyError(str(e)) from e
  if hashlib.sha256(data).hexdigest() != digest:
    raise PolicyError(f'{path} is not the file that was exported: its hash differs')
  return data


def _require_file(files: dict[str, bytes], name: str, folder: Path) -> bytes:
  """Return a file named in policy.json. A file without a digest there is never used."""
  if name not in files:
    hint = ": pip install 'podrace[onnx]' and export again" if name == GRAPH else ''
    raise PolicyError(f'{folder} was exported without {name}{hint}')
  return files[name]


class Policy:
  """The best actions of a trained agent.

  Example:
    policy = load_policy('policy')
    state = None  # of each new episode
    action, state = policy.act(observation, state)
  """

  def __init__(self, about: dict[str, Any], step: Step) -> None:
    self.about = about  # policy.json: agent, env, step, spaces
    self._step = step

  def act(self, observation: Any, state: Any = None) -> tuple[Any, Any]:
    """Return the action for one observation, and the state for the next call of the episode.

    Args:
      observation: observation as the environment gives it: an array, or a dict or tuple of arrays.
      state: None at the beginning of an episode, then the state that the last call returned.

    Raises:
      ValueError: if the observation does not fit its space.
    """
    action, after = self.act_many(map_parts(lambda x: np.asarray(x)[None], observation), state)
    return action[0], after

  def act_many(
    self, observations: Any, state: Any = None, first: Any = None
  ) -> tuple[np.ndarray, Any]:
    """Act for a batch of observations [B, ...].

    Args:
      observations: as in `act`, with a batch axis.
      state: None at the first call, then the state that the last call returned.
      first: [B] bool: the episodes that begin with these observations. Default: all if `state` is
        None, else none.

    Raises:
      ValueError: if the observations do not fit their space, or `first` does not fit the batch.
    """
    arrays = list(flatten(self.about['observation_space'], observations))
    specs = flatten_space(self.about['observation_space'])
    for spec, x in zip(specs, arrays, strict=True):
      if not x.ndim or x.shape[1:] != tuple(spec['shape']):
        came = f'an observation of shape {list(x.shape[1:])}' if x.ndim else 'a single number'
        raise ValueError(f'{came} came, expected {spec["shape"]}, after an axis of the batch')
    sizes = sorted({len(x) for x in arrays})
    if len(sizes) > 1 or sizes == [0]:
      raise ValueError(f'the parts have batches of {sizes}, expected the same size of at least 1')
    size = sizes[0]
    typed = [convert(x, spec) for spec, x in zip(specs, arrays, strict=True)]
    action, after = self._step(typed, state, _first(size, state, first))
    return self._in_space(action), after

  def _in_space(self, x: np.ndarray) -> np.ndarray:
    about = self.about['action']
    return x.astype(about['dtype']).reshape(len(x), *about['shape'])


def _first(size: int, state: Any, first: Any) -> np.ndarray:
  """Return which episodes of a batch begin, [size] bool."""
  begin = np.full(size, state is None) if first is None else np.asarray(first)
  if begin.shape != (size,) or begin.dtype != bool:
    came = f'{begin.dtype} of shape {list(begin.shape)}'
    raise ValueError(f'first is {came}, expected bool of shape [{size}]')
  if state is None and not begin.all():
    raise ValueError('first is False for an episode without a state: give the last state')
  return begin


# --- runtimes -------------------------------------------------------------------------------------


def make_numpy_step(about: dict[str, Any], params: Params) -> Step:
  """Return the step function of the NumPy runtime."""
  network = PolicyNetwork(about, params, Numpy())

  def step(arrays: list[np.ndarray], state: Any, first: np.ndarray) -> tuple[np.ndarray, Any]:
    return network.step(arrays, _core_state(about, state, first))

  return step


def _core_state(about: dict[str, Any], state: Any, first: np.ndarray) -> tuple[np.ndarray, ...]:
  """Return the core's state [B, core_size], zeros where an episode begins."""
  net = about['network']
  if state is None:
    zeros = np.zeros((len(first), net['core_size']), np.float32)
    return (zeros,) * STATES[net['core']]
  shape = len(first), net['core_size']
  _check_state(state if isinstance(state, tuple | list) else [state], [shape] * STATES[net['core']])
  if not first.any():
    return tuple(state)
  return tuple(np.where(first[:, None], np.float32(0), x) for x in state)


def _check_state(arrays: Sequence[Any], expected: list[tuple[int, ...]]) -> None:
  """Raise ValueError unless a state has arrays of the expected shapes."""
  if (came := [np.shape(x) for x in arrays]) != expected:
    raise ValueError(
      f'a state of shapes {came} came, expected {expected}: give the one that the last call with '
      'this batch returned, or None'
    )


def _make_onnx_step(about: dict[str, Any], graph: bytes) -> Step:
  try:
    import onnxruntime
  except Exception as e:
    raise PolicyError(why_not("runtime='onnx'", 'onnxruntime', e)) from e
  try:
    options = onnxruntime.SessionOptions()
    # errors are raised; the log would print unescaped names of the graph
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph, options, providers=['CPUExecutionProvider'])
  except Exception as e:  # ONNX Runtime's exceptions derive from Exception only
    raise PolicyError(f'{GRAPH} cannot be loaded: {type(e).__name__}: {str(e)[:200]}') from e
  names = [x.name for x in session.get_inputs()]

  def step(arrays: list[np.ndarray], state: Any, first: np.ndarray) -> tuple[np.ndarray, Any]:
    before = _core_state(about, state, first)
    action, *after = session.run(None, dict(zip(names, [*arrays, *before], strict=True)))
    return action, tuple(after)

  return step


def _make_jax_step(about: dict[str, Any], params: Params, serialized: bytes) -> Step:
  try:
    import jax
    from jax import export
  except ImportError as e:
    raise PolicyError(f"runtime='jax' needs jax: {e}") from e
  try:
    program = jax.jit(export.deserialize(bytearray(serialized)).call)
  except Exception as e:  # an error of flatbuffers or MLIR
    raise PolicyError(f'{PROGRAM} cannot be loaded: {type(e).__name__}: {str(e)[:200]}') from e
  on_device = jax.device_put(params)

  def step(arrays: list[np.ndarray], state: Any, first: np.ndarray) -> tuple[np.ndarray, Any]:
    shapes = [(len(first), *x['shape']) for x in about['state']]
    if state is None:
      state = [np.zeros(shape, x['dtype']) for shape, x in zip(shapes, about['state'], strict=True)]
    _check_state(jax.tree.leaves(state), shapes)
    observations = unflatten(about['observation_space'], iter(arrays))
    inputs = jax.device_put((state, observations, first))  # explicitly: see jax.transfer_guard
    action, after = program(on_device, *inputs)
    return np.asarray(jax.device_get(action)), after

  return step
