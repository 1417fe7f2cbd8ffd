"""Locks of directories."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from podrace.run.directory import has_lock
from podrace.system import locks


def test_a_reader_that_looks_at_a_lock_does_not_refuse_its_owner(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  (tmp_path / 'lock').touch()
  reader = (tmp_path / 'lock').open()
  fcntl.flock(reader, fcntl.LOCK_SH)
  monkeypatch.setattr(locks.time, 'sleep', lambda seconds: reader.close())
  with locks.lock(tmp_path) as file:
    assert locks.is_locked(tmp_path, file) and has_lock(tmp_path)
    monkeypatch.undo()
    with pytest.raises(BlockingIOError):
      locks.lock(tmp_path)
  assert not has_lock(tmp_path)
