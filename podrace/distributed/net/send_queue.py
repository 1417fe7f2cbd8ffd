"""The frames of one connection that its other end has not read yet."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from podrace.distributed.net.frame import Buffer

AT_ONCE = 64  # buffers that one call hands to the kernel


class SendQueue:
  """Frames that wait to be sent, in buffers, of which the kernel takes some bytes at a time.

  Attributes:
    answer_bytes: of the frames without arrays.
  """

  def __init__(self) -> None:
    self._buffers: collections.deque[memoryview] = collections.deque()
    self._counts: collections.deque[int] = collections.deque()  # buffers of each frame
    self._answers: collections.deque[int] = (
      collections.deque()
    )  # bytes of each frame without arrays, else 0
    self.answer_bytes = 0

  def __len__(self) -> int:
    return len(self._counts)

  def add(self, buffers: Sequence[Buffer], sent: int) -> None:
    """A frame, of which so many bytes have been sent already: none, unless it is the only one."""
    self._buffers.extend(map(memoryview, buffers))
    self._counts.append(len(buffers))
    self._answers.append(len(buffers[0]) if len(buffers) == 1 else 0)
    self.answer_bytes += self._answers[-1]
    self.took(sent)

  def next(self) -> list[memoryview]:
    """What is sent next."""
    return [self._buffers[i] for i in range(min(len(self._buffers), AT_ONCE))]

  def took(self, sent: int) -> None:
    """So many more bytes have been sent."""
    buffers, counts = self._buffers, self._counts
    while buffers and sent >= buffers[0].nbytes:
      sent -= buffers.popleft().nbytes
      counts[0] -= 1
      if not counts[0]:
        counts.popleft()
        self.answer_bytes -= self._answers.popleft()
    if sent:
      buffers[0] = buffers[0][sent:]

  def clear(self) -> None:
    """Nothing waits any more."""
    self._buffers.clear()
    self._counts.clear()
    self._answers.clear()
    self.answer_bytes = 0
