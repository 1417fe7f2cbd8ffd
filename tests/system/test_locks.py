"""Locks of directories."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from podrace.errors import RunError, UsageError
from podrace.launch.supervisor.local import lock_logs
from podrace.run.directory import has_lock, locked
from podrace.run.opening import open_directory
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


@pytest.mark.parametrize('hold', [locked, open_directory, lock_logs])
@pytest.mark.parametrize(
  ('problem', 'kind'),
  [('ENOSPC', RunError), ('EDQUOT', RunError), ('EIO', RunError), ('EROFS', UsageError)],
)
def test_a_full_disk_is_a_failure_and_a_wrong_path_is_bad_usage(
  hold, problem: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """`podrace launch` starts a program again after exit code 1, and not after 2."""

  def fail(path: Path) -> None:
    raise OSError(getattr(errno, problem), os.strerror(getattr(errno, problem)), str(path))

  monkeypatch.setattr(locks, 'open_lock', fail)
  folder = tmp_path / 'run' / 'logs'
  folder.mkdir(parents=True)
  with pytest.raises(kind, match='cannot be written to'), hold(folder):
    pass
