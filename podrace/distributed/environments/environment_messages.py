"""The messages between learners and environments, as in docs/protocol.md.

Nothing that comes in is trusted: any difference from the protocol is a WireError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from podrace.distributed.net import session_messages
from podrace.distributed.net.frame import Buffer, WireError, fixed, packed, short, split
from podrace.envs.spaces import MASK, leaves
from podrace.envs.timestep_rules import RULES
from podrace.types import LARGEST_OBSERVATION, TimeStep

SERVICE = 'podrace'
# Of a client.
ENTER = packed(2, 'ENTER', int, int, about='group, environments')
STEP = fixed(
  3, 'STEP', '<II', arrays=1, about='group, number; records and then the leaves of the observation'
)
# Of the learner.
START = packed(67, 'START', int, about='group')
ACTION = fixed(68, 'ACTION', '<II', arrays=1, about='group, number; actions')
OF_CLIENTS, OF_LEARNERS = (
  session_messages.of_clients(ENTER, STEP),
  session_messages.of_listeners(START, ACTION),
)

GROUPS = 256  # of one client
NUMBERS = 2**32  # of steps: 0 follows the last one
RECORD = np.dtype(
  [
    ('life', '<u4'),  # changes when the environment is restarted
    ('reward', '<f4'),  # for learning
    ('discount', '<f4'),
    ('score', '<f4'),  # the reward of the environment, unclipped
    ('step_type', 'u1'),  # FIRST, MID or LAST
    ('ended', 'u1'),  # 1: a whole game is over
    ('zero', '<u2'),
  ]
)
assert RECORD.itemsize == 20


# --- schemas


def schema(observation_space: Any, action_space: Any) -> dict[str, Any]:
  """Return the arrays on which both sides must agree, in types of msgpack."""
  return {
    'observation': [_leaf(path, space) for path, space in leaves(observation_space)],
    'action': _leaf('action', action_space),
  }


def _leaf(path: str, space: Any) -> list[Any]:
  kind = type(space).__name__
  limits: list[Any]
  if kind == 'Discrete':
    limits = [int(space.start), int(space.n)]
  elif kind == 'MultiDiscrete':
    limits = [int(x) for x in space.nvec.reshape(-1)]
  elif kind == 'Box' and space.low.size:
    limits = [float(f(x)) for x in (space.low, space.high) for f in (np.min, np.max)]
  else:
    limits = []
  dtype = np.dtype(space.dtype).newbyteorder('<').str
  return [path, dtype, list(space.shape), kind, limits]


def differences(learner: dict[str, Any], client: Any) -> list[str]:
  """Return a line for each array on which the two sides disagree."""
  expected, received = _by_path(learner), _by_path(client)
  if received is None:
    return [f'the environments sent no schema but {short(client)}']
  return [
    f'{path}: the learner has {_describe(expected.get(path))}, '
    f'the environments {_describe(received.get(path))}'
    for path in [*expected, *(p for p in received if p not in expected)]
    if expected.get(path) != received.get(path)
  ] or ([] if learner == client else ['the arrays come in another order'])


def _by_path(schema: Any) -> Any:
  try:
    arrays = [*schema['observation'], schema['action']]
    return {str(path): [dtype, shape, kind, limits] for path, dtype, shape, kind, limits in arrays}
  except (TypeError, KeyError, ValueError):
    return None


def _describe(leaf: Any) -> str:
  if leaf is None:
    return 'none'
  dtype, shape, kind, limits = leaf
  return f'{kind} {dtype} of shape {shape}, limits {limits}'


def _bounds(leaf: Any) -> tuple[Any, Any, str] | None:
  """Return the bounds of choices or booleans, and the text of an error; None for other arrays."""
  path, dtype, shape, kind, limits = leaf
  if kind == 'Discrete':
    start, n = limits
    return start, start + n - 1, f'{path}, expected {start} to {start + n - 1}'
  if kind == 'MultiDiscrete':
    return 0, np.array(limits).reshape(shape) - 1, f'{path}, expected 0 to less than {limits}'
  if kind == 'MultiBinary' or np.dtype(dtype).kind == 'b':
    return 0, 1, f'{path}, expected bytes of 0 and 1'
  return None


def _joined(frames: Sequence[Buffer], buffer: np.ndarray | None = None) -> Buffer:
  """Return frames one after the other; a single frame is not copied."""
  if len(frames) == 1:
    return frames[0]
  if buffer is None:
    return bytearray().join(frames)
  into, at = buffer.data, 0
  for frame in frames:
    into[at : (at := at + len(frame))] = frame
  return into[:at]


def is_bounded(x: np.ndarray, bound: float) -> bool:
  """Return whether all numbers are at most `bound` in size, which is false for NaN."""
  # As floats of Python: in float16 the bound would be infinite.
  return not x.size or (float(x.max()) <= bound and float(x.min()) >= -bound)


def not_bounded(what: str, x: np.ndarray, bound: float) -> WireError:
  """Return the error for numbers of which one is larger than `bound`."""
  if not np.isfinite(x).all():
    return WireError(f'{what} that is NaN or infinite')
  wrong = float(x[np.abs(x.astype(np.float64)) > bound][0])
  return WireError(f'{what} of {wrong:g}, expected at most {bound:g} in size: clip or scale it')


class Records:
  """The records of groups, as words: columns are faster than fields of a structured array."""

  __slots__ = ('words',)

  def __init__(self, words: np.ndarray) -> None:
    self.words = words  # [n, 5] u32

  @property
  def life(self) -> np.ndarray:
    """[n] u32, see RECORD."""
    return self.words[:, 0]

  @property
  def flags(self) -> np.ndarray:
    """[n] u32: the step type in the low 8 bits, and above it whether a game is over."""
    return self.words[:, 4]

  @property
  def kind(self) -> np.ndarray:
    """[n] u32: the step types."""
    return self.flags & 0xFF

  @property
  def numbers(self) -> np.ndarray:
    """[n, 3] f32: reward, discount, score."""
    return self.words[:, 1:4].view('<f4')


class Layout:
  """The layout of STEP and ACTION.

  Attributes:
    leaves: dtype and shape of each array of observations.
    action: dtype and shape of an action.
    environment_bytes, action_bytes: of an environment in a STEP and in an ACTION.
  """

  def __init__(self, schema: dict[str, Any]) -> None:
    self.leaves = [(np.dtype(d), tuple(shape)) for _, d, shape, _, _ in schema['observation']]
    self.action = np.dtype(schema['action'][1]), tuple(schema['action'][2])
    observations = [d.itemsize * math.prod(s) for d, s in self.leaves]
    self._bytes = RECORD.itemsize, *observations  # of an environment's arrays in a STEP
    self.action_bytes = self.action[0].itemsize * math.prod(self.action[1])
    bounds = [_bounds(leaf) for leaf in schema['observation']]
    self._checked = [
      (i, b) for i, b in enumerate(bounds) if b is not None or self.leaves[i][0].kind == 'f'
    ]
    paths = [leaf[0] for leaf in schema['observation']]
    self._mask = paths.index(f'observation/{MASK}') if f'observation/{MASK}' in paths else None
    *_, action_kind, limits = schema['action']
    bits = [2] * math.prod(self.action[1])
    self._choices = {'MultiDiscrete': limits, 'MultiBinary': bits}.get(action_kind, [])
    self.environment_bytes = sum(self._bytes)

  def arrays(self, body: Buffer, n: int) -> list[memoryview]:
    """Return the bytes of the records and of each observation array of n environments."""
    return split(body, (n * size for size in self._bytes))

  @staticmethod
  def records(steps: Sequence[Sequence[Buffer]]) -> Records:
    """Return the records of STEPs, one after the other."""
    return Records(np.frombuffer(_joined([arrays[0] for arrays in steps]), '<u4').reshape(-1, 5))

  def buffers(self, n: int) -> list[np.ndarray]:
    """Return memory for the observations of n environments."""
    return [np.empty(n * size, np.uint8) for size in self._bytes[1:]]

  def observations(
    self, steps: Sequence[Sequence[Buffer]], buffers: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Return the observation arrays [n, ...] of STEPs, one after the other.

    They are copied into `buffers`, unless there is only one STEP.
    """
    return [self._array(steps, i, buffer) for i, buffer in enumerate(buffers)]

  def _array(
    self, steps: Sequence[Sequence[Buffer]], leaf: int, buffer: np.ndarray | None = None
  ) -> np.ndarray:
    dtype, shape = self.leaves[leaf]
    n = sum([len(arrays[0]) for arrays in steps]) // RECORD.itemsize
    joined = _joined([arrays[1 + leaf] for arrays in steps], buffer)
    return np.frombuffer(joined, dtype).reshape(n, *shape)

  def check_observations(self, steps: Sequence[Sequence[Buffer]]) -> None:
    """Check that observations are bounded numbers, and choices within their range.

    Raises:
      WireError: naming the observation.
    """
    for leaf, bounds in self._checked:
      x = self._array(steps, leaf)
      if bounds is not None:
        self._check(x, *bounds)
      if x.dtype.kind == 'f' and not is_bounded(x, LARGEST_OBSERVATION):
        raise not_bounded('an observation', x, LARGEST_OBSERVATION)

  def check_masks(self, steps: Sequence[Sequence[Buffer]], records: Records) -> None:
    """Check that each action mask allows something wherever an agent acts or bootstraps.

    Raises:
      WireError: if a mask allows none.
    """
    if self._mask is None:
      return
    discount: Any = records.numbers[:, 1]
    kind: Any = records.kind
    timestep = TimeStep({MASK: self._array(steps, self._mask)}, discount, discount, kind)
    rule = RULES['mask']
    if np.count_nonzero(rule.is_broken(timestep, None, self._choices)):
      raise WireError(f'{rule.came}, expected {rule.expected}')

  @staticmethod
  def _check(x: np.ndarray, low: Any, high: Any, details: str) -> None:
    x = x.view(np.uint8) if x.dtype.kind == 'b' else x
    wrong = (x < low) | (x > high)
    if np.count_nonzero(wrong):
      raise WireError(f'{x[wrong][:3].tolist()} in {details}')

  def actions(self, data: Buffer, n: int) -> np.ndarray:
    """Return a copy of the actions [n, ...] in an ACTION.

    Raises:
      WireError: if their number differs.
    """
    if len(data) != n * self.action_bytes:
      raise WireError(f'{len(data)} bytes of actions, expected {n * self.action_bytes}')
    dtype, shape = self.action
    return np.frombuffer(bytes(data), dtype).reshape(n, *shape)
