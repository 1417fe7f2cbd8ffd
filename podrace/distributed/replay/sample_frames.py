"""The arrays of SAMPLES: the items that were drawn, and their rows as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.replay_messages import DRAWN
from podrace.tables.chunks import AS_IS
from podrace.tables.items import Draws


def sample_frames(draws: Draws) -> list[Any]:
  """Return the five arrays: records of DRAWN, of PART, numbers of chunks, records of CHUNK, bytes.

  Chunks are sent as they are stored, without unpacking. Of an unpacked chunk only the needed rows
  are sent, if they are at most half of it.

  Raises:
    ValueError: the arrays are too large for a message.
  """
  items = draws.items
  drawn = np.empty(len(items), DRAWN)
  for name, column in zip(DRAWN.names[1:], zip(*draws.columns, strict=True), strict=True):  # type: ignore[index]
    drawn[name] = np.concatenate(column)
  drawn['key'] = [item.key for item in items]
  size = 0
  numbers: dict[int, int] = {}  # by the chunk's key
  parts, refs, chunks, data = list[Any](), list[int](), list[Any](), list[Any]()
  for leaf in range(len(items[0].parts)):  # column by column, as `stack_unpacked` needs them
    for item in items:
      needed, offset, rows = item.parts[leaf]
      array = needed[0].array
      if len(needed) == 1 and array is not None and 2 * rows <= needed[0].length:
        parts.append((1, 0, rows))
        refs.append(len(chunks))
        data.append(array[offset : offset + rows])
        chunks.append((0, rows, AS_IS, data[-1].nbytes))
        size += data[-1].nbytes
      else:
        parts.append((len(needed), offset, rows))
        for chunk in needed:
          number = numbers.get(chunk.key)
          if number is None:
            number = numbers[chunk.key] = len(chunks)
            stored, how = chunk.packed or (chunk.array, AS_IS)
            data.append(stored)
            chunks.append((0, chunk.length, how, chunk.nbytes))
            size += chunk.nbytes
          refs.append(number)
      # Checked for each item, because all of them may need far more memory.
      if size > replay_messages.FRAME_BYTES or len(refs) > replay_messages.MESSAGE_CHUNKS:
        raise ValueError(_too_large(len(items), size, len(refs)))
  return [drawn, *(np.array(x, '<u4') for x in (parts, refs, chunks)), b''.join(data)]


def _too_large(items: int, size: int, references: int) -> str:
  if size > replay_messages.FRAME_BYTES:
    excess, most = f'{size:,} bytes or more', replay_messages.FRAME_BYTES
  else:
    excess, most = f'{references:,} chunks or more', replay_messages.MESSAGE_CHUNKS
  return (
    f'{items} items of {excess}, of which a sample has at most {most:,}: ask for fewer at a time'
  )
