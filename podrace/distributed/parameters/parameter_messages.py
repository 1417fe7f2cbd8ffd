"""Messages between the publisher of parameters and its readers."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from podrace.distributed.net.frame import packed

SERVICE = 'podrace parameters'


NEWEST = packed(96, 'NEWEST', int, str, list, arrays=1)  # version, SHA-256, leaves; their bytes


class Published(NamedTuple):
  """One version."""

  version: int
  leaves: list[tuple[str, np.ndarray]]  # read-only
  sha256: str  # over paths, dtypes, shapes and bytes, in their order


def digest(leaves: list[Any], data: Any) -> str:
  """SHA-256 of leaves and of their bytes, in hexadecimal."""
  found = hashlib.sha256()
  for path, dtype, shape in leaves:
    found.update(f'{path}\0{dtype}\0{",".join(map(str, shape))}\0'.encode())
  found.update(data)
  return found.hexdigest()
