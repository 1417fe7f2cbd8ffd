"""A shared library with an environment: its functions, its declared arrays, and their checks."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from podrace.envs.host.infos import BYTES as INFO_BYTES
from podrace.envs.native.build import HERE
from podrace.errors import UsageError
from podrace.types import round_inward

ABI = 1  # PODRACE_ENV_ABI
DTYPES = ('uint8', 'int8', 'int32', 'float32', 'bool')  # by PODRACE_U8, ...
MOST_OBS, MOST_INFO = 64, 128  # of pool.c
LARGEST = 2**30  # bytes of an observation, an action or a state
TEXT = 1000  # bytes of an environment's error text
NEEDED = ('podrace_spec_of', 'podrace_create', 'podrace_reset', 'podrace_step', 'podrace_close')
RENDER_SIDE = 4096

Pointer, Int64, Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class ArrayStruct(ctypes.Structure):
  """`podrace_array` of podrace_env.h."""

  _fields_ = (
    ('name', ctypes.c_char_p), ('choices', ctypes.POINTER(Int32)), ('shape', Int64 * 8),
    ('low', ctypes.c_double), ('high', ctypes.c_double), ('dtype', Int32), ('ndim', Int32),
  )  # fmt: skip


class SpecStruct(ctypes.Structure):
  """`podrace_spec` of podrace_env.h."""

  _fields_ = (
    ('abi', Int32), ('num_obs', Int32), ('num_info', Int32), ('render_height', Int32),
    ('render_width', Int32), ('reserved', Int32), ('obs', ctypes.POINTER(ArrayStruct)),
    ('act', ctypes.POINTER(ArrayStruct)), ('info', ctypes.POINTER(ctypes.c_char_p)),
    ('obs_bytes', Int64), ('act_bytes', Int64), ('state_bytes', Int64),
  )  # fmt: skip


FUNCTIONS = ('create', 'reset', 'step', 'close', 'save', 'load', 'render')


class Functions(ctypes.Structure):
  """`functions` of pool.c: addresses; 0 of an optional function that is missing."""

  _fields_ = tuple((name, Pointer) for name in FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class ArraySpec:
  """One array that an environment declares."""

  name: str  # '': it is the only one
  dtype: str
  shape: tuple[int, ...]
  low: float
  high: float
  choices: tuple[int, ...]  # (): a Box or MultiBinary

  @property
  def bytes(self) -> int:
    """Size in bytes."""
    return math.prod(self.shape) * self.itemsize

  @property
  def itemsize(self) -> int:
    """Bytes of an element, and its alignment."""
    return np.dtype(self.dtype).itemsize

  def space(self) -> Any:
    """Return gymnasium's space."""
    from gymnasium import spaces

    if self.dtype == 'bool':
      return spaces.MultiBinary(self.shape[0] if len(self.shape) == 1 else self.shape)
    if self.choices and not self.shape:
      return spaces.Discrete(self.choices[0], dtype=np.int32)
    if self.choices:
      return spaces.MultiDiscrete(list(self.choices), dtype=np.int32)
    low, high = self.low, self.high
    if low == high == 0:
      kind = np.dtype(self.dtype).kind
      limits: Any = None if kind == 'f' else np.iinfo(self.dtype)
      low, high = (-math.inf, math.inf) if limits is None else (limits.min, limits.max)
    if self.dtype == 'float32':  # so that actions are within the bounds, which are doubles
      low, high = map(float, round_inward(np.array(low), np.array(high), np.float32))
    return spaces.Box(low, high, self.shape, np.dtype(self.dtype).type)


@dataclasses.dataclass(frozen=True)
class NativeSpec:
  """The spaces and sizes of an environment, checked."""

  observation: tuple[ArraySpec, ...]
  action: ArraySpec
  info: tuple[str, ...]
  obs_bytes: int
  act_bytes: int
  state_bytes: int
  render: tuple[int, int]  # height and width; (0, 0): none

  def offsets(self) -> list[int]:
    """Return the offset of each array of an observation, as in a C struct."""
    return layout(self.observation)[0]

  def observation_space(self) -> Any:
    """Return gymnasium's space: of the only array, or a Dict."""
    from gymnasium import spaces

    if not self.observation[0].name:
      return self.observation[0].space()
    return spaces.Dict({a.name: a.space() for a in self.observation})

  def to_json(self) -> dict[str, Any]:
    """Return a record for `from_json`."""
    return dataclasses.asdict(self)

  @staticmethod
  def from_json(record: Mapping[str, Any]) -> NativeSpec:
    """Return the specification that another process has read and checked."""

    def array(x: Mapping[str, Any]) -> ArraySpec:
      return ArraySpec(**{**x, 'shape': tuple(x['shape']), 'choices': tuple(x['choices'])})

    return NativeSpec(
      **{
        **record,
        'observation': tuple(array(x) for x in record['observation']),
        'action': array(record['action']),
        'info': tuple(record['info']),
        'render': tuple(record['render']),
      }
    )


def layout(arrays: Iterable[ArraySpec]) -> tuple[list[int], int]:
  """Return the offsets of the members of a C struct, and its size."""
  offsets, end, largest = [], 0, 1
  for a in arrays:
    offsets.append(-(-end // a.itemsize) * a.itemsize)
    end, largest = offsets[-1] + a.bytes, max(largest, a.itemsize)
  return offsets, -(-end // largest) * largest


class EnvironmentLibrary:
  """An open library.

  Args:
    path: of the shared library.
    name: of the environment, for messages.

  Raises:
    UsageError: if it cannot be loaded, or lacks a function.
  """

  def __init__(self, path: Path, name: str) -> None:
    self.name = name
    try:
      self._lib = ctypes.CDLL(str(path.absolute()))
    except OSError as error:
      raise UsageError(f'{name} is no library that can be loaded: {error}') from error
    if missing := [x for x in NEEDED if not hasattr(self._lib, x)]:
      raise UsageError(
        f'{name} does not export {", ".join(missing)}; podrace_env.h declares them ({HERE})'
      )
    self._lib.podrace_spec_of.restype = ctypes.POINTER(SpecStruct)
    self._lib.podrace_spec_of.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)

  def spec(self, options: bytes) -> NativeSpec:
    """Return the environment's specification with these options, a JSON object.

    Raises:
      UsageError: if the environment refuses an option, or its specification is inconsistent.
    """
    error = ctypes.create_string_buffer(TEXT)
    pointer = self._lib.podrace_spec_of(options, error, TEXT)
    if not pointer:
      raise UsageError(f'{self.name}: {text_of(error)}')
    if (abi := pointer.contents.abi) != ABI:
      raise UsageError(
        f'{self.name} has version {abi} of the interface, expected {ABI}: compile it with '
        f'{HERE / "podrace_env.h"}'
      )
    try:
      spec = read_spec(pointer.contents)
    except ValueError as e:
      raise UsageError(f'{self.name}: {e}') from e
    optional = dict(
      podrace_save=spec.state_bytes, podrace_load=spec.state_bytes, podrace_render=spec.render[0]
    )
    for function, is_needed in optional.items():
      if is_needed and not hasattr(self._lib, function):
        raise UsageError(f'{self.name} declares state_bytes or render_height without {function}')
    return spec

  def functions(self) -> Functions:
    """Return the addresses of the functions."""

    def address(name: str) -> Any:
      function = getattr(self._lib, f'podrace_{name}', None)
      return None if function is None else ctypes.cast(function, Pointer).value

    return Functions(*(address(name) for name in FUNCTIONS))


def text_of(buffer: Any) -> str:
  """Return an environment's error text."""
  return buffer.value.decode(errors='replace') or 'it failed, without an error text'


def read_spec(s: SpecStruct) -> NativeSpec:
  """Copy a specification from C, and check it.

  Raises:
    ValueError: if it is inconsistent.
  """
  if not 1 <= s.num_obs <= MOST_OBS or not s.obs or not s.act:
    raise ValueError(f'num_obs is {s.num_obs}, expected 1 to {MOST_OBS}, with `obs` and `act`')
  if not 0 <= s.num_info <= MOST_INFO or (s.num_info and not s.info):
    raise ValueError(f'num_info is {s.num_info}, expected 0 to {MOST_INFO}, with `info`')
  observation = tuple(_read_array(s.obs[i], f'obs[{i}]') for i in range(s.num_obs))
  names = [a.name for a in observation]
  if (s.num_obs > 1 and not all(names)) or len(set(names)) < len(names):
    raise ValueError(f'the names of observations are {names}, expected distinct ones')
  info = tuple((s.info[i] or b'').decode(errors='replace') for i in range(s.num_info))
  if len(set(info)) < len(info) or not all(re.fullmatch(r'[\w./-]+', x) for x in info):
    raise ValueError(f'info has the names {list(info)}, expected distinct words')
  if len(json.dumps(info)) > INFO_BYTES:
    raise ValueError(
      f'info has names of {len(json.dumps(info))} bytes, expected {INFO_BYTES} at most'
    )
  sides: tuple[int, int] = s.render_height, s.render_width
  if not all(0 <= x <= RENDER_SIDE for x in sides) or (sides[0] > 0) != (sides[1] > 0):
    raise ValueError(f'a picture has {sides} pixels, expected at most {RENDER_SIDE} a side')
  action = _read_array(s.act[0], 'act')
  spec = NativeSpec(observation, action, info, s.obs_bytes, s.act_bytes, s.state_bytes, sides)
  sizes = dict(obs_bytes=layout(observation)[1], act_bytes=action.bytes)
  for field, expected in sizes.items():
    if (came := getattr(spec, field)) != expected:
      raise ValueError(f'{field} is {came}, but the declared arrays have {expected} bytes')
  if not 0 <= spec.state_bytes <= LARGEST:
    raise ValueError(f'state_bytes is {spec.state_bytes}, expected 0 to {LARGEST}')
  return spec


def _read_array(a: ArrayStruct, where: str) -> ArraySpec:
  if not 0 <= a.dtype < len(DTYPES):
    raise ValueError(f'{where} has dtype {a.dtype}, expected 0 to {len(DTYPES) - 1}')
  if not 0 <= a.ndim <= 8:
    raise ValueError(f'{where} has ndim {a.ndim}, expected 0 to 8')
  shape, dtype = tuple(a.shape[: a.ndim]), DTYPES[a.dtype]
  if not all(x > 0 for x in shape) or math.prod(shape) * np.dtype(dtype).itemsize > LARGEST:
    raise ValueError(f'{where} has shape {shape}, expected sides from 1, {LARGEST} bytes at most')
  if not a.low <= a.high:
    raise ValueError(f'{where} is bounded by {a.low:g} and {a.high:g}')
  kind = np.dtype(dtype).kind
  if kind in 'iuf':
    limits: Any = np.finfo(dtype) if kind == 'f' else np.iinfo(dtype)
    infinite = (-math.inf, math.inf) if kind == 'f' else ()
    if not all(limits.min <= x <= limits.max or x in infinite for x in (a.low, a.high)):
      raise ValueError(
        f'{where} is bounded by {a.low:g} and {a.high:g}, expected bounds that {dtype} can hold'
      )
  choices: tuple[int, ...] = ()
  if a.choices:
    if dtype != 'int32' or len(shape) > 1:
      raise ValueError(
        f'{where} has choices and is {dtype}{shape}, expected PODRACE_I32, ndim 0 or 1'
      )
    choices = tuple(a.choices[i] for i in range(math.prod(shape)))
    if min(choices) < 1:
      raise ValueError(f'{where} has choices {choices}, expected at least 1 each')
  if dtype == 'bool' and not shape:
    raise ValueError(f'{where} is PODRACE_BOOL of ndim 0, expected ndim 1 or more')
  name = (a.name or b'').decode(errors='replace')
  return ArraySpec(name, dtype, shape, a.low, a.high, choices)
