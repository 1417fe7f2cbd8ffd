"""What goes over the wire, byte by byte as in docs/protocol.md: a msgpack header, then raw arrays.

Everything that comes in is somebody else's: what is not exactly as it should be is a WireError.
"""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from podrace.envs.spaces import leaves

VERSION = 1
NAME = 'podrace'

# What a client says, and what the server says: the first element of each header.
HELLO, ENTER, STEP, PING, BYE, ASK = 1, 2, 3, 4, 5, 6
WAIT, WELCOME, START, ACTION, PONG, REFUSED, GONE, END, REPORT = 65, 66, 67, 68, 69, 70, 71, 72, 73

HEADER_BYTES, REPORT_BYTES = 65536, 2**20  # at most
TEXT, LINES = 500, 60  # characters and lines of somebody else's text that are told
REASONS = 20  # for which somebody is refused, that are told
DEPTH = 100  # of lists and maps in a header, at most
GROUPS = 256  # of one client
STRING = 200  # characters of a string in a HELLO, at most
NUMBER = 2**63  # which the numbers in it are below
CONNECT_MS = 3000  # to make a connection; then it is tried anew, while TCP would wait ever longer
RECORD = np.dtype(
  [
    ('life', '<u4'),  # another one after the environment was restarted
    ('reward', '<f4'),  # as learned from
    ('discount', '<f4'),
    ('score', '<f4'),  # the reward as the environment has it
    ('step_type', 'u1'),  # FIRST, MID or LAST
    ('ended', 'u1'),  # 1: a whole game is over
    ('zero', '<u2'),
  ]
)
assert RECORD.itemsize == 20

Buffer = Any  # bytes, memoryview or a contiguous numpy array


class WireError(Exception):
  """A message that isn't one; says what came and what was expected."""


# --- headers --------------------------------------------------------------------------------------


def pack(*header: Any) -> bytes:
  """A header's bytes."""
  return msgpack.packb(header)


def unpack(data: Buffer, most: int = HEADER_BYTES) -> list[Any]:
  """A header: a list that begins with what kind of message it is.

  Raises:
    WireError: if it isn't one.
  """
  if len(data) > most:
    raise WireError(f'a header of {len(data)} bytes, at most {most}')
  try:
    header = msgpack.unpackb(data, strict_map_key=True)
  except Exception as e:  # msgpack has a dozen kinds, ValueError and RecursionError among them
    raise WireError(f'a header that is not msgpack ({type(e).__name__})') from None
  if not isinstance(header, list) or not header or type(header[0]) is not int:
    raise WireError('a header that is not a list which begins with a number')
  if len(data) > DEPTH and _is_deep(header):  # shorter ones can't be
    raise WireError(f'a header of more than {DEPTH} lists and maps within each other')
  return header


def _is_deep(x: Any) -> bool:
  """Whether so much is nested that what recurses, such as repr, may fail."""
  level = [x]
  for _ in range(DEPTH):
    level = [
      inner
      for outer in level
      if isinstance(outer, list | dict)
      for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]
    if not level:
      return False
  return True


def fields(header: list[Any], *kinds: type) -> list[Any]:
  """What follows a header's kind, if it is of these types; whole numbers are not negative."""
  found = header[1:]
  if len(found) != len(kinds):
    raise WireError(f'{len(found)} fields in a header of kind {header[0]}, expected {len(kinds)}')
  if (*map(type, found),) != kinds or any(x < 0 for x in found if type(x) is int):
    for x, kind in zip(found, kinds, strict=True):
      if type(x) is not kind or (isinstance(x, int) and x < 0):
        raise WireError(f'{_short(x)} in a header of kind {header[0]}, expected {kind.__name__}')
  return found


def _short(x: Any) -> str:
  text = repr(x)
  return text if len(text) <= 60 else text[:57] + '...'


def plain(text: Any, most: int = TEXT) -> str:
  """Somebody else's text, for a log, a terminal or a message: of bounded length, in one line.

  What terminals obey, or what would look like another line, is escaped.
  """
  text = str(text)
  told = ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
  more = f' ({len(text) - most:,} more)' if len(text) > most else ''
  return f'{told[:most]}...{more}' if more or len(told) > most else told


def label(text: Any) -> str:
  """Somebody else's name, as `plain`; in ASCII, so that lists of names have bounded bytes."""
  told = plain(str(text)[:STRING]).encode('ascii', 'backslashreplace').decode()
  return told if len(told) <= STRING else f'{told[: STRING - 3]}...'


def plain_lines(text: Any) -> str:
  """As `plain`, of what may have several lines; of too many, the last ones."""
  return '\n'.join(plain(line, 2 * TEXT) for line in str(text).split('\n')[-LINES:])


def plain_reasons(reasons: Sequence[Any]) -> list[str]:
  """Why somebody is refused, in bounded lines, and of those not too many."""
  more = [f'and {len(reasons) - REASONS:,} more'] if len(reasons) > REASONS else []
  return [*(plain(x) for x in reasons[:REASONS]), *more]


def checksum(frames: Iterable[Buffer]) -> int:
  """CRC-32 over all frames after the header, one after the other."""
  crc = 0
  for frame in frames:
    crc = zlib.crc32(frame, crc)
  return crc


# --- schemas ----------------------------------------------------------------------------------------


def schema(observation_space: Any, action_space: Any) -> dict[str, Any]:
  """What both sides must agree on, as msgpack has it."""
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
  elif kind == 'Box':
    limits = [float(f(x)) for x in (space.low, space.high) for f in (np.min, np.max)]
  else:
    limits = []
  dtype = np.dtype(space.dtype).newbyteorder('<').str
  return [path, dtype, list(space.shape), kind, limits]


def differences(learner: dict[str, Any], client: Any) -> list[str]:
  """A line for each array on which the two sides disagree."""
  mine, theirs = _by_path(learner), _by_path(client)
  if theirs is None:
    return [f'the environments sent no schema but {_short(client)}']
  return [
    f'{path}: the learner has {_told(mine.get(path))}, the environments {_told(theirs.get(path))}'
    for path in [*mine, *(p for p in theirs if p not in mine)]
    if mine.get(path) != theirs.get(path)
  ] or ([] if learner == client else ['the arrays come in another order'])


def _by_path(schema: Any) -> Any:
  try:
    every = [*schema['observation'], schema['action']]
    return {str(path): [dtype, shape, kind, limits] for path, dtype, shape, kind, limits in every}
  except (TypeError, KeyError, ValueError):
    return None


def _told(leaf: Any) -> str:
  if leaf is None:
    return 'none'
  dtype, shape, kind, limits = leaf
  return f'{kind} {dtype} of shape {shape}, limits {limits}'


def _bounds(leaf: Any) -> tuple[Any, Any, str] | None:
  """The least and the greatest that choices and booleans may be, and what they are; None for others."""
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
  """One after the other; of one no copy."""
  if len(frames) == 1:
    return frames[0]
  if buffer is None:
    return bytearray().join(frames)
  into, at = buffer.data, 0
  for frame in frames:
    into[at : (at := at + len(frame))] = frame
  return into[:at]


class Records:
  """Groups' records, as they came; columns of words are faster than fields of records."""

  __slots__ = ('flags', 'kind', 'life', 'numbers', 'words')

  def __init__(self, words: np.ndarray) -> None:
    self.words = words  # [n, 5] u32
    self.life, self.flags = words[:, 0], words[:, 4]  # [n]
    self.kind = self.flags & 0xFF  # [n] the step types
    self.numbers = words[:, 1:4].view('<f4')  # [n, 3] reward, discount, score


class Layout:
  """Arrays of a group of environments, as frames and back."""

  def __init__(self, schema: dict[str, Any]) -> None:
    self.leaves = [(np.dtype(d), tuple(shape)) for _, d, shape, _, _ in schema['observation']]
    self.action = np.dtype(schema['action'][1]), tuple(schema['action'][2])
    self._bytes = [d.itemsize * int(np.prod(s, dtype=np.int64)) for d, s in self.leaves]
    self.action_bytes = self.action[0].itemsize * int(np.prod(self.action[1], dtype=np.int64))
    self._frame_bytes = [RECORD.itemsize, *self._bytes]
    bounds = [_bounds(leaf) for leaf in schema['observation']]
    self._checked = [
      (i, b) for i, b in enumerate(bounds) if b is not None or self.leaves[i][0].kind == 'f'
    ]
    self.largest = max([RECORD.itemsize, self.action_bytes, *self._bytes])  # of one environment
    self.observation_bytes = sum(self._bytes)

  def check(self, frames: Sequence[Buffer], n: int, crc: int) -> None:
    """Whether these are a STEP's frames of n environments, as they were sent.

    Raises:
      WireError: if they aren't.
    """
    if len(frames) != 1 + len(self.leaves):
      raise WireError(f'{len(frames)} frames after the header, expected {1 + len(self.leaves)}')
    for frame, size in zip(frames, self._frame_bytes, strict=True):
      if len(frame) != n * size:
        raise WireError(f'a frame of {len(frame)} bytes, expected {n * size}')
    if (came := checksum(frames)) != crc:
      raise WireError(f'frames with the checksum {came:08x}, the header says {crc:08x}')

  @staticmethod
  def records(steps: Sequence[Sequence[Buffer]]) -> Records:
    """Those of several STEPs, one after the other."""
    return Records(np.frombuffer(_joined([frames[0] for frames in steps]), '<u4').reshape(-1, 5))

  def buffers(self, n: int) -> list[np.ndarray]:
    """Memory for the observations of n environments."""
    return [np.empty(n * size, np.uint8) for size in self._bytes]

  def observations(
    self, steps: Sequence[Sequence[Buffer]], buffers: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Arrays [n, ...] of several STEPs, one after the other, in these buffers; of one where they are."""
    return [self._array(steps, i, buffer) for i, buffer in enumerate(buffers)]

  def _array(
    self, steps: Sequence[Sequence[Buffer]], leaf: int, buffer: np.ndarray | None = None
  ) -> np.ndarray:
    dtype, shape = self.leaves[leaf]
    n = sum([len(frames[0]) for frames in steps]) // RECORD.itemsize
    joined = _joined([frames[1 + leaf] for frames in steps], buffer)
    return np.frombuffer(joined, dtype).reshape(n, *shape)

  def check_observations(self, steps: Sequence[Sequence[Buffer]]) -> None:
    """Whether observations are numbers, and choices those that there are.

    Raises:
      WireError: if one of them isn't.
    """
    for leaf, bounds in self._checked:
      x = self._array(steps, leaf)
      if bounds is not None:
        self._check(x, *bounds)
      if x.dtype.kind == 'f' and not np.isfinite(x).all():
        raise WireError('an observation that is NaN or infinite')

  @staticmethod
  def _check(x: np.ndarray, low: Any, high: Any, told: str) -> None:
    x = x.view(np.uint8) if x.dtype.kind == 'b' else x
    wrong = (x < low) | (x > high)
    if np.count_nonzero(wrong):
      raise WireError(f'{x[wrong][:3].tolist()} in {told}')

  def actions(self, frames: Sequence[Buffer], n: int, crc: int) -> np.ndarray:
    """The actions [n, ...] in an ACTION's frames."""
    if len(frames) != 1 or len(frames[0]) != n * self.action_bytes:
      sizes = [len(f) for f in frames]
      raise WireError(f'frames of {sizes} bytes for actions, expected [{n * self.action_bytes}]')
    if checksum(frames) != crc:
      raise WireError('actions with another checksum than the header says')
    dtype, shape = self.action
    return np.frombuffer(frames[0], dtype).reshape(n, *shape)


# --- waking up who waits on a socket ----------------------------------------------------------------


class Wake:
  """Lets other threads end a poll."""

  def __init__(self) -> None:
    self._read, self._write = socket.socketpair()
    self._read.setblocking(False)
    self._write.setblocking(False)
    self._signalled = False

  def fileno(self) -> int:
    return self._read.fileno()

  def set(self) -> None:
    """Ends the poll; what the caller has appended to a queue before is seen after it."""
    if not self._signalled:
      self._signalled = True
      with contextlib.suppress(OSError):  # it is awake, or closed
        self._write.send(b'.')

  def clear(self) -> None:
    """Before the queues are looked at."""
    with contextlib.suppress(OSError):  # nothing there
      self._read.recv(64)
    self._signalled = False

  def close(self) -> None:
    self._read.close()
    self._write.close()
