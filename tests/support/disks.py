"""Small disks for tests of full ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
  folder.mkdir()
  size = f'size={kilobytes}k'
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', size, 'none', folder], check=False)
  if mounted.returncode:
    pytest.skip('mounting a small tmpfs needs root, or user namespaces')
  try:
    yield
  finally:
    subprocess.run(['umount', '-l', folder], check=True)
