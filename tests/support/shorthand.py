"""Short names for the types of fixtures."""

from typing import Any

import pytest

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TempPaths = pytest.TempPathFactory


def slow_after(fast: int, *cases: Any) -> list[Any]:
  """Cases of a parametrized test; all after the first `fast` run in `make test-all` only."""
  slow = [c if isinstance(c, tuple) else (c,) for c in cases[fast:]]
  return [*cases[:fast], *(pytest.param(*c, marks=pytest.mark.slow) for c in slow)]
