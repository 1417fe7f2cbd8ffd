"""Frames that wait to be sent over one connection."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from podrace.distributed.net.frame import Buffer

AT_ONCE = 64  # buffers for one call of the kernel


class SendQueue:
  """Frames that wait to be sent, as buffers that the kernel takes piece by piece.

  Attributes:
    answer_bytes: of the frames without arrays.
  """

  def __init__(self) -> None:
    self._buffers: collections.deque[memoryview] = collections.deque()
    self._counts: collections.deque[int] = collections.deque()  # buffers of each frame
    self._answers: collections.deque[int] = collections.deque()  # 0 for a frame with arrays
    self.answer_bytes = 0

  def __len__(self) -> int:
    return len(self._counts)

  def add(self, buffers: Sequence[Buffer], sent: int) -> None:
    """Add a frame. `sent` bytes of it have gone already, which is 0 unless the queue was empty."""
    self._buffers.extend(map(memoryview, buffers))
    self._counts.append(len(buffers))
    self._answers.append(len(buffers[0]) if len(buffers) == 1 else 0)
    self.answer_bytes += self._answers[-1]
    self.drop(sent)

  def next(self) -> list[memoryview]:
    """Return the buffers to send next."""
    return [self._buffers[i] for i in range(min(len(self._buffers), AT_ONCE))]

  def drop(self, sent: int) -> None:
    """Remove `sent` bytes from the front."""
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
    """Remove all frames."""
    self._buffers.clear()
    self._counts.clear()
    self._answers.clear()
    self.answer_bytes = 0
