"""Messages between the publisher of parameters and its readers."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from podrace.distributed.net.frame import packed

SERVICE = 'podrace parameters'
ACTING, REANALYSING, LABELLING = 'act', 'reanalyse', 'label'  # roles of readers
MOST_ENVIRONMENTS = 2**31  # of a run, because their numbers have 32 bits

NEWEST = packed(
  96, 'NEWEST', int, str, list, arrays=1, about="version, SHA-256, leaves; the leaves' bytes"
)


class Published(NamedTuple):
  """One version of the parameters."""

  version: int
  leaves: list[tuple[str, np.ndarray]]  # read-only
  sha256: str  # of all leaves' paths, dtypes and shapes, then of all bytes


def digest(leaves: list[Any], data: Any) -> str:
  """Return the SHA-256 of leaves [path, dtype, shape] and of their bytes, in hexadecimal."""
  sha256 = hashlib.sha256()
  for path, dtype, shape in leaves:
    sha256.update(f'{path}\0{dtype}\0{",".join(map(str, shape))}\0'.encode())
  sha256.update(data)
  return sha256.hexdigest()
