"""The spaces in a Minari data set, which are JSON. Nothing in them names code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrace.envs.host.spaces import in_jax
from podrace.envs.spaces import bounds, convert, leaves
from podrace.errors import UnknownName, UsageError
from podrace.system.files.reading import parse_json

# Errors of NumPy and gymnasium for records that are no spaces.
_FAULTS = (
  AttributeError, AssertionError, LookupError, OverflowError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
LARGEST = 2**26  # numbers of one observation or action
KINDS = 'biuf'  # of NumPy's dtypes: bool, integers and floats
SPACES = 'observation_space', 'action_space'  # members of a record of both spaces


def spaces_in(record: Mapping[str, Any]) -> tuple[Any, Any]:
  """Return the observation space and the action space of a data set's metadata.

  Raises:
    UsageError: if a space is none of numbers, or actions have no bounds.
  """
  observation_space, action_space = (_read_space(record.get(name), name) for name in SPACES)
  if bounds(action_space) is None:
    raise UsageError(f'its action_space is {action_space}, expected Box, Discrete or MultiDiscrete')
  return observation_space, action_space


def _read_space(text: Any, name: str) -> Any:
  """Return the space that a data set has as JSON, with the types that JAX has."""
  if not isinstance(text, str):
    raise UsageError(f'it has no {name}, as minari 0.5 writes one')
  try:
    space = _space(parse_json(text.encode()))
    check_keys(space)
    return convert(in_jax, space)
  except (UsageError, UnknownName) as e:
    raise UsageError(f'its {name} {e}') from e
  except _FAULTS as e:
    raise UsageError(f'its {name} cannot be read: {type(e).__name__}: {e}'[:300]) from e


def _space(record: Any) -> Any:
  from gymnasium import spaces

  kind = record['type']
  if kind == 'Dict':
    return spaces.Dict({key: _space(part) for key, part in record['subspaces'].items()})
  if kind == 'Tuple':
    return spaces.Tuple([_space(part) for part in record['subspaces']])
  if kind == 'Discrete':
    return spaces.Discrete(int(record['n']), start=int(record['start']))
  if kind == 'MultiDiscrete':
    nvec, start = (np.array(record[k], np.int64) for k in ('nvec', 'start'))
    return spaces.MultiDiscrete(nvec, start=start)
  if kind == 'MultiBinary':
    return spaces.MultiBinary(record['n'])
  if kind != 'Box':
    raise UsageError(f'is {str(kind)[:40]!r}; Box, Discrete, MultiDiscrete, Dict ... can be read')
  dtype = np.dtype(str(record['dtype']))
  if dtype.kind not in KINDS:
    raise UsageError(f'is of {dtype}, expected numbers')
  low, high = (np.array(record[k], dtype) for k in ('low', 'high'))
  shape = tuple(record['shape'])
  if low.shape != shape or high.shape != shape or low.size > LARGEST:
    raise UsageError(f'has bounds {low.shape} and {high.shape} for a shape of {shape}'[:300])
  if np.any(np.isnan(low) | np.isnan(high)) if dtype.kind == 'f' else False:
    raise UsageError('has NaN as a bound')
  return spaces.Box(low, high, shape, dtype.type)


def check_keys(space: Any) -> None:
  """Raise UsageError for a key of a Dict that cannot be a name in HDF5."""
  if isinstance(space, Mapping):
    for key in space:
      if not isinstance(key, str) or not key or '/' in key or key == '.':
        raise UsageError(f'has the key {key!r}, which HDF5 has no place for')
  if isinstance(space, Mapping | Sequence):
    for part in space.values() if isinstance(space, Mapping) else space:
      check_keys(part)


def check_spaces(log: Any, env: Any, name: str) -> None:
  """Raise UsageError if an environment has other spaces than a log.

  The bounds of observations may differ, as no agent reads them. Actions must mean the same.
  """
  for kind, bounded in (('observation', False), ('action', True)):
    recorded, own = (getattr(x, f'{kind}_space') for x in (log, env))
    own = convert(in_jax, own)
    if _describe(recorded, bounded) != _describe(own, bounded):
      raise UsageError(
        f'--log {log.name} has another {kind} space than --env {name}: {recorded}, not {own}'
      )


def _describe(space: Any, bounded: bool) -> list[Any]:
  described: list[Any] = []
  for path, leaf in leaves(space):
    about: tuple[Any, ...] = (path, leaf.shape, np.dtype(leaf.dtype).str)
    if hasattr(leaf, 'low') and bounded:
      about += (leaf.low.tolist(), leaf.high.tolist())
    if (choices := getattr(leaf, 'nvec', getattr(leaf, 'n', None))) is not None:
      about += (type(leaf).__name__, np.asarray(choices).tolist())
    described.append(about)
  return described
