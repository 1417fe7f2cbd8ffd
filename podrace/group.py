"""The processes of one run, as one: what each has of a whole, and numbers of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

MOST = 4096  # bytes of a text that goes to all processes


def share(total: int) -> int:
  """How many of so many are this process's; rounded up where they do not divide."""
  return -(-total // jax.process_count())


def own_rows(x: jax.Array) -> np.ndarray:
  """What this process has of an array [n, ...] that is split over all processes' devices along its first axis."""
  if x.is_fully_addressable:
    return np.asarray(x)
  shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start)
  return np.concatenate([np.asarray(s.data) for s in shards])


def everyones(numbers: Sequence[float]) -> np.ndarray:
  """Each process's numbers [P, n] f64. All must ask at the same time, in the thread that learns."""
  own = np.asarray(numbers, np.float64)
  if jax.process_count() == 1:
    return own[None]
  # as bytes, since JAX has no doubles
  return np.asarray(multihost_utils.process_allgather(own.view(np.uint8))).view(np.float64)


def from_first(text: str) -> str:
  """The first process's text, of at most MOST bytes and without zeros; likewise."""
  if jax.process_count() == 1:
    return text
  own = np.frombuffer(text.encode().ljust(MOST, b'\0'), np.uint8)
  return bytes(np.asarray(multihost_utils.broadcast_one_to_all(own))).rstrip(b'\0').decode()
