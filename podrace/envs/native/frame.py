"""The memory of a job: ids and actions for environments in C, and their timesteps."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from podrace.envs.native.library import MOST_OBS, NativeSpec, Pointer
from podrace.envs.spaces import leaves

LINE = 64  # bytes of a cache line


class Arrays(ctypes.Structure):
  """`arrays` of pool.c."""

  _fields_ = (
    ('ids', Pointer), ('act', Pointer), ('obs', Pointer * MOST_OBS), ('reward', Pointer),
    ('score', Pointer), ('discount', Pointer), ('step_type', Pointer),
  )  # fmt: skip


class Frame:
  """The arrays of one job: ids and actions for the environments, and their timesteps.

  The timesteps are read where they are written. A frame is used again when nothing else refers to
  its memory: an arrival, a view of it, or a device array that JAX has not copied.
  """

  def __init__(self, spec: NativeSpec, space: Any, n: int) -> None:
    fields = [
      ('ids', np.dtype(np.int32), ()),
      ('act', np.dtype(spec.action.dtype), spec.action.shape),
    ]
    fields += [(f'obs/{i}', x.dtype, x.shape) for i, (_, x) in enumerate(leaves(space))]
    fields += [(k, np.dtype(np.float32), ()) for k in ('reward', 'score', 'discount')]
    fields += [('step_type', np.dtype(np.int8), ())]
    offsets, end = [], 0
    for _, dtype, shape in fields:
      offsets.append(end)
      end += -(-n * dtype.itemsize * int(np.prod(shape, dtype=np.int64)) // LINE) * LINE
    self._memory = np.zeros(end + LINE, np.uint8)
    start = -self._memory.ctypes.data % LINE
    self.arrays = Arrays()
    views = {}
    for (name, dtype, shape), at in zip(fields, offsets, strict=True):
      size = n * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
      at += start
      views[name] = self._memory[at : at + size].view(dtype).reshape(n, *shape)
      address = views[name].ctypes.data
      if name.startswith('obs/'):
        self.arrays.obs[int(name[4:])] = address
      else:
        setattr(self.arrays, name, address)
    self.pointer = ctypes.addressof(self.arrays)
    self.ids, self.act = views.pop('ids'), views.pop('act')
    self.reward, self.score, self.discount, self.step_type = (
      views.pop(k) for k in ('reward', 'score', 'discount', 'step_type')
    )
    self.observation = list(views.values())
    self.sent: np.ndarray | None = None  # ids of the job
    self._shared = [*self.observation, self.reward, self.score, self.discount, self.step_type]
    del views
    self._count = self._references()

  def _references(self) -> list[int]:
    # Views of views refer to the memory itself, as NumPy shortens such chains.
    return [sys.getrefcount(self._memory), *map(sys.getrefcount, self._shared)]

  @property
  def is_free(self) -> bool:
    """Whether nothing else refers to its memory."""
    return self.sent is None and self._references() == self._count
