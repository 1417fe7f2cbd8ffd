"""Exported policies, to be used without training code: NumPy alone, or JAX's exported program.

`load_policy` executes nothing that it finds: parameters are safetensors, the description is JSON.
Importing this imports neither jax nor anything else of podrace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
POLICY, PARAMS, CONFIG, PROGRAM = (
  'policy.json',
  'params.safetensors',
  'config.json',
  'policy.jaxexport',
)
MASKED = -1e9  # the logit of an action that the environment forbids

Floats = np.ndarray
Params = dict[str, np.ndarray]


class PolicyError(ValueError):
  """The directory holds no policy, or a damaged one; the message is for the user."""


def load_policy(folder: Path | str, runtime: str = 'numpy') -> Policy:
  """The policy that `podrace export` wrote.

  Args:
    runtime: 'numpy', which has podrace's own networks; or 'jax', which has all, and needs jax.

  Raises:
    PolicyError: if there is none, if a file is not the one that was written, or if the runtime can't run it.
  """
  folder = Path(folder)
  try:
    about = json.loads((folder / POLICY).read_bytes())
  except (OSError, ValueError) as e:
    raise PolicyError(f'{folder} holds no policy: {e}') from e
  if not isinstance(about, dict) or about.get('version') != VERSION:
    raise PolicyError(f'{folder / POLICY} is not a policy of version {VERSION}')
  for name, digest in about['sha256'].items():
    if _sha256(folder / name) != digest:
      raise PolicyError(f'{folder / name} is not the file that was exported: its hash differs')
  from safetensors.numpy import load_file

  params = load_file(folder / PARAMS)
  if runtime == 'jax':
    return Policy(about, _jax_step(about, params, folder))
  if runtime != 'numpy':
    raise PolicyError(f"runtime is 'numpy' or 'jax', not {runtime!r}")
  if about['network'] is None:
    raise PolicyError(
      f"{about['agent']} has a network of its own, which NumPy can't run: take runtime='jax'"
    )
  return Policy(about, _Network(about, params).step)


def _sha256(path: Path) -> str:
  try:
    return hashlib.sha256(path.read_bytes()).hexdigest()
  except OSError as e:
    raise PolicyError(f'{path} cannot be read: {e.strerror}') from e


class Policy:
  """The best actions of a trained agent."""

  def __init__(self, about: dict[str, Any], step: Callable[..., Any]) -> None:
    self.about = about  # policy.json: agent, env, step, spaces
    self._step = step

  def act(self, observation: Any, state: Any = None) -> tuple[Any, Any]:
    """The action for one observation, and the state for the next call of the episode.

    Args:
      observation: as the environment gives it: an array, a dict or a tuple of arrays.
      state: None at the beginning of an episode; then what the last call returned.

    Raises:
      ValueError: if the observation is not as the space declares.
    """
    action, after = self.act_many(_map(lambda x: np.asarray(x)[None], observation), state)
    return action[0], after

  def act_many(self, observations: Any, state: Any = None) -> tuple[np.ndarray, Any]:
    """The same for a batch, [B, ...]; all episodes begin where `state` is None."""
    arrays = list(_values(self.about['observation_space'], observations))
    specs = list(_leaves(self.about['observation_space']))
    size = len(arrays[0])
    for spec, x in zip(specs, arrays, strict=True):
      if x.shape != (size, *spec['shape']):
        raise ValueError(
          f'an observation of shape {list(x.shape[1:])} came, expected {spec["shape"]}'
        )
    action, after = self._step(observations, state, size)
    return self._in_space(action), after

  def _in_space(self, x: np.ndarray) -> np.ndarray:
    about = self.about['action']
    return x.astype(about['dtype']).reshape(len(x), *about['shape'])


def _jax_step(about: dict[str, Any], params: Params, folder: Path) -> Callable[..., Any]:
  try:
    import jax
    from jax import export
  except ImportError as e:
    raise PolicyError(f"runtime='jax' needs jax: {e}") from e
  try:
    program = export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
  except OSError as e:
    raise PolicyError(f'{folder} was exported without a JAX program: {e}') from e

  def step(observations: Any, state: Any, size: int) -> tuple[np.ndarray, Any]:
    first = np.full(size, state is None)
    if state is None:
      state = [np.zeros((size, *x['shape']), x['dtype']) for x in about['state']]
    typed = _map_space(about['observation_space'], observations)
    action, after = program.call(params, state, typed, first)
    return np.asarray(jax.device_get(action)), after

  return step


# --- spaces ---------------------------------------------------------------------------------------


def _leaves(space: Any) -> Iterator[dict[str, Any]]:
  """The arrays of a described space; dicts in the order of their keys, as JAX has them."""
  if 'dict' in space:
    for key in sorted(space['dict']):
      yield from _leaves(space['dict'][key])
  elif 'tuple' in space:
    for part in space['tuple']:
      yield from _leaves(part)
  else:
    yield space


def _values(space: Any, x: Any) -> Iterator[np.ndarray]:
  if 'dict' in space:
    if not isinstance(x, dict) or sorted(x) != sorted(space['dict']):
      came = sorted(x) if isinstance(x, dict) else type(x).__name__
      raise ValueError(f'an observation with {sorted(space["dict"])} was expected, not {came}')
    for key in sorted(space['dict']):
      yield from _values(space['dict'][key], x[key])
  elif 'tuple' in space:
    for part, y in zip(space['tuple'], x, strict=True):
      yield from _values(part, y)
  else:
    yield np.asarray(x)


def _map(f: Callable[[Any], Any], x: Any) -> Any:
  if isinstance(x, dict):
    return {k: _map(f, y) for k, y in x.items()}
  return tuple(_map(f, y) for y in x) if isinstance(x, tuple) else f(x)


def _map_space(space: Any, x: Any) -> Any:
  """The observation in the types that the space declares."""
  if 'dict' in space:
    return {k: _map_space(s, x[k]) for k, s in space['dict'].items()}
  if 'tuple' in space:
    return tuple(_map_space(s, y) for s, y in zip(space['tuple'], x, strict=True))
  return np.asarray(x, space['dtype'])


def _as_floats(spec: dict[str, Any], x: np.ndarray) -> np.ndarray:
  """As podrace.networks.observations."""
  kind = spec['kind']
  if kind == 'discrete':
    return _one_hot(x - spec['start'], spec['n'])
  if kind == 'multidiscrete':
    parts = [
      _one_hot(x[..., i] - s, n)
      for i, (s, n) in enumerate(zip(spec['start'], spec['n'], strict=True))
    ]
    return np.concatenate(parts, axis=-1)
  if spec['pixels']:
    return np.moveaxis(x, -3, -1) if spec['channels_first'] else x
  return x.astype(np.float32) / np.float32(spec['scale'])


def _one_hot(x: np.ndarray, n: int) -> np.ndarray:
  return (x[..., None] == np.arange(n)).astype(np.float32)


# --- the network ----------------------------------------------------------------------------------


class _Network:
  """podrace's own networks: torso, core, heads; and the best action."""

  def __init__(self, about: dict[str, Any], params: Params) -> None:
    self._about, self._net, self._params = about, about['network'], params
    activations: dict[str, Callable[[Floats], Floats]] = {'tanh': np.tanh, 'relu': _relu}
    self._act = activations[self._net['activation']]

  def step(self, observations: Any, state: Any, size: int) -> tuple[np.ndarray, Any]:
    """Actions [B, ...] and the core's state."""
    space = self._about['observation_space']
    mask = None
    arrays = dict(enumerate(_values(space, observations)))
    specs = dict(enumerate(_leaves(space)))
    if self._net['mask'] is not None:
      i = self._net['mask']
      mask = arrays.pop(i).reshape(size, -1) != 0
      specs.pop(i)
    inputs = [_as_floats(specs[i], self._standardised(i, x)) for i, x in arrays.items()]
    x = self._torso(inputs)
    if self._net['core'] != 'none':
      x, state = self._core(x, state)
    else:
      state = ()
    return self._action(x, mask), state

  def _standardised(self, i: int, x: np.ndarray) -> np.ndarray:
    if i not in self._net['floats'] or 'observation/mean/0' not in self._params:
      return x
    n = self._net['floats'].index(i)
    mean, var = (self._params[f'observation/{what}/{n}'] for what in ('mean', 'var'))
    scale = 1 / np.sqrt(var + np.float32(1e-8))
    return np.clip((x - mean) * scale, -10.0, 10.0).astype(np.float32)

  def _dense(self, name: str, x: Floats) -> Floats:
    out: Floats = x @ self._params[f'{name}/kernel'] + self._params[f'{name}/bias']
    return out

  def _torso(self, inputs: list[np.ndarray]) -> Floats:
    kind, name = self._net['torso'], self._net['torso_name']
    features, images = [], 0
    for x in inputs:
      if x.ndim == 4 and kind != 'mlp':
        x = self._image(kind, f'{name}/{IMAGES[kind]}_{images}', _unit(x))
        images += 1
      features.append(_unit(x).reshape(len(x), -1))
    out = np.concatenate(features, axis=-1)
    for i in range(self._net['layers']):
      out = self._act(self._dense(f'{name}/Mlp_0/Dense_{i}', out))
    return out

  def _image(self, kind: str, name: str, x: Floats) -> Floats:
    if kind == 'impala-deep':
      return self._residual(name, x)
    for i, stride in enumerate(STRIDES[kind]):
      x = _relu(self._conv(f'{name}/Conv_{i}', x, stride))
    return x

  def _residual(self, name: str, x: Floats) -> Floats:
    n = 0

    def conv(y: Floats) -> Floats:
      nonlocal n
      n += 1
      return self._conv(f'{name}/Conv_{n - 1}', y, 1, same=True)

    for _ in range(3):
      x = _max_pool(conv(x))
      for _ in range(2):
        y = conv(_relu(x))
        x = x + conv(_relu(y))
    return _relu(x)

  def _conv(self, name: str, x: Floats, stride: int, same: bool = False) -> Floats:
    kernel, bias = self._params[f'{name}/kernel'], self._params[f'{name}/bias']
    height, width, channels, features = kernel.shape
    if same:
      x = _padded(x, height, stride, 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(x, (height, width), axis=(1, 2))
    windows = windows[:, ::stride, ::stride]  # [B, H, W, C, h, w]
    patches = np.moveaxis(windows, 3, -1).reshape(*windows.shape[:3], height * width * channels)
    return patches @ kernel.reshape(-1, features) + bias

  def _core(self, x: Floats, state: Any) -> tuple[Floats, Any]:
    kind, size = self._net['core'], self._net['core_size']
    name = self._net['core_name']
    if state is None:
      state = (np.zeros((len(x), size), np.float32),) * {'gru': 1, 'lstm': 2}[kind]
    x = self._dense(f'{name}/input', x)
    h = state[0] @ self._params[f'{name}/recurrent']
    bias = self._params[f'{name}/bias']
    if kind == 'gru':
      (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x, 3, -1), np.split(h, 3, -1)
      r, z = _sigmoid(x_r + h_r), _sigmoid(x_z + h_z)
      n = np.tanh(x_n + r * (h_n + bias))
      after: tuple[Floats, ...] = ((1 - z) * n + z * state[0],)
    else:
      i, f, g, o = np.split(x + h, 4, -1)
      c = _sigmoid(f + 1.0) * state[1] + _sigmoid(i) * np.tanh(g + bias)
      after = (_sigmoid(o) * np.tanh(c), c)
    return after[0], after

  def _action(self, x: Floats, mask: np.ndarray | None) -> np.ndarray:
    head, action = self._net['head'], self._about['action']
    if head == 'q':
      return self._values(x, mask).argmax(-1)
    out = self._dense(self._net['head_name'], x)
    if mask is not None:
      out = np.where(mask, out, np.float32(MASKED))
    if action['kind'] == 'categorical':
      return out.argmax(-1)
    if action['kind'] == 'multicategorical':
      ends = np.cumsum(action['n'])[:-1]
      return np.stack([part.argmax(-1) for part in np.split(out, ends, -1)], -1)
    count = int(np.prod(action['shape']))
    return _in_box(out[:, :count], action)

  def _values(self, x: Floats, mask: np.ndarray | None) -> Floats:
    q = self._stream('advantage', x).reshape(len(x), -1, self._net['atoms'])
    if self._net['dueling']:
      q = q - q.mean(1, keepdims=True) + self._stream('value', x)[:, None]
    if mask is not None:
      q = np.where(mask[..., None], q, np.float32(MASKED))
    if self._net['support'] is not None:
      e = np.exp(q - q.max(-1, keepdims=True))
      return (e / e.sum(-1, keepdims=True) * np.array(self._net['support'], np.float32)).sum(-1)
    found: Floats = q.mean(-1)
    return found

  def _stream(self, name: str, x: Floats) -> Floats:
    if f'{name}_hidden/kernel' in self._params:
      x = _relu(self._dense(f'{name}_hidden', x))
    return self._dense(f'{name}_head', x)


IMAGES = {
  'nature': 'Nature',
  'impala': 'ImpalaShallow',
  'impala-deep': 'ImpalaDeep',
  'grid': 'Grid',
}
STRIDES = {'nature': (4, 2, 1), 'impala': (4, 2), 'grid': (1,)}  # of the convolutions


def _in_box(x: Floats, action: dict[str, Any]) -> Floats:
  low, high = np.array(action['low'], np.float32), np.array(action['high'], np.float32)
  if action['squash']:
    x = low + np.float32(0.5) * (np.clip(np.tanh(x), -1.0, 1.0) + 1.0) * (high - low)
  return np.clip(x, low, high)


def _relu(x: Floats) -> Floats:
  return np.maximum(x, np.float32(0))


def _sigmoid(x: Floats) -> Floats:
  found: Floats = 0.5 * (np.tanh(0.5 * x) + 1)  # without overflow
  return found


def _unit(x: np.ndarray) -> Floats:
  return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x


def _padded(x: Floats, window: int, stride: int, value: float) -> Floats:
  """As 'SAME' has it."""
  sides = []
  for size in x.shape[1:3]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    sides.append((total // 2, total - total // 2))
  return np.pad(x, [(0, 0), *sides, (0, 0)], constant_values=value)


def _max_pool(x: Floats) -> Floats:
  x = _padded(x, 3, 2, -np.inf)
  windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2]
  found: Floats = windows.max((-1, -2))
  return found
