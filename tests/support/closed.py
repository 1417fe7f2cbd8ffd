"""Standard output without a reader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def closed_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Make standard output a pipe without a reader."""
  read, write = os.pipe()
  os.close(read)
  with os.fdopen(write, 'w', buffering=1) as stream, monkeypatch.context() as patch:
    patch.setattr('sys.stdout', stream)
    yield
    with contextlib.suppress(OSError):
      stream.close()
