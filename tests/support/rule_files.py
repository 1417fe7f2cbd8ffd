"""Rules for tests: a small one that is made up, and the released one where it lies beside the checkout."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path

import jax
import pytest

from podrace.agents.rules import disco as rules
from podrace.agents.rules import lpg, storage

SIZES = rules.Sizes(
  predictions=12, trajectory=8, lifetime=6, embedding=4, channels=5, pooled=2, policy=4, lifetime_embedding=3,
  lifetime_channels=4, lifetime_pooled=3, summary=5,
)  # fmt: skip
LPG = lpg.Sizes(predictions=5, trajectory=8, embedding=4)
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def small() -> str:
  """The file of an untrained rule of `SIZES`, one for each process."""
  return str(write(_temporary('rule')))


@functools.cache
def small_lpg() -> str:
  """As `small`, of LPG's kind and of the sizes `LPG`."""
  path = _temporary('lpg')
  storage.save(path, lpg.init(jax.random.key(0), LPG))
  return str(path)


def _temporary(name: str) -> Path:
  """A file of this process, which it takes along when it ends."""
  path = Path(tempfile.gettempdir()) / f'podrace-test-{name}-{os.getuid()}-{os.getpid()}.npz'
  atexit.register(path.unlink, missing_ok=True)
  return path


def write(path: Path, sizes: rules.Sizes = SIZES, seed: int = 0) -> Path:
  """Writes an untrained rule."""
  storage.save(path, rules.init(jax.random.key(seed), sizes))
  return path


def released() -> str:
  """The file of Disco103, or the test is skipped."""
  given = os.environ.get('PODRACE_DISCO_103')
  path = Path(given) if given else ROOT.parent / 'shared' / 'data' / 'disco_103.npz'
  if not path.exists():
    pytest.skip(
      f'{path} is not there: Disco103 is not part of podrace; PODRACE_DISCO_103 names its file, {rules.SOURCE}'
    )
  return str(path)
