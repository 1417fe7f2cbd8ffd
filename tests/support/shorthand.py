"""Short names for the types of fixtures."""

import pytest

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TempPaths = pytest.TempPathFactory
