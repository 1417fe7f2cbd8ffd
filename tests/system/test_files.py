"""What podrace writes is its own: never through a link, never into something that is no file; and text is UTF-8."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from podrace.errors import UsageError
from podrace.system import files

# --- each way of writing, and each thing that may have the name -------------------------------------


def link(path: Path, outside: Path) -> None:
  path.symlink_to(outside / 'file')


def dangling(path: Path, outside: Path) -> None:
  path.symlink_to(outside / 'new')


def folder_link(path: Path, outside: Path) -> None:
  path.symlink_to(outside)


def link_to_itself(path: Path, outside: Path) -> None:
  path.symlink_to(path)


def device_link(path: Path, outside: Path) -> None:
  path.symlink_to('/dev/zero')


def fifo(path: Path, outside: Path) -> None:
  os.mkfifo(path)


def fifo_link(path: Path, outside: Path) -> None:
  os.mkfifo(outside / 'fifo')
  path.symlink_to(outside / 'fifo')


def unix_socket(path: Path, outside: Path) -> None:
  with socket.socket(socket.AF_UNIX) as it:
    it.bind(str(path))


def hard_link(path: Path, outside: Path) -> None:
  os.link(outside / 'file', path)


def folder(path: Path, outside: Path) -> None:
  path.mkdir()


PLANTS = [
  link, dangling, folder_link, link_to_itself, device_link, fifo, fifo_link, unix_socket, hard_link, folder,
]  # fmt: skip
LINKS = (link, dangling, folder_link, link_to_itself, device_link, fifo_link)
Plant = Callable[[Path, Path], None]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
  found = tmp_path / 'outside'
  found.mkdir()
  (found / 'file').write_text('mine')
  return found


def check_untouched(outside: Path) -> None:
  assert (outside / 'file').read_text() == 'mine'
  assert {p.name for p in outside.iterdir()} <= {'file', 'fifo'}


@pytest.mark.parametrize('plant', PLANTS)
def test_a_file_is_replaced(plant: Plant, tmp_path: Path, outside: Path) -> None:
  """Whatever has its name, or that of its draft; a directory there is an error of its own."""
  for name in ('a', 'a.new'):
    plant(tmp_path / name, outside)
    if plant is folder:
      with pytest.raises(OSError) as error:
        files.write_whole(tmp_path / 'a', 'x')
      assert error.value.errno in (errno.EISDIR, errno.EPERM)
      files.remove(tmp_path / name)
      assert not (tmp_path / 'a.new').exists()
      continue
    files.write_whole(tmp_path / 'a', 'x')
    assert (tmp_path / 'a').read_text() == 'x' and not (tmp_path / 'a').is_symlink()
    (tmp_path / 'a').unlink()
    (outside / 'fifo').unlink(missing_ok=True)
  check_untouched(outside)


@pytest.mark.parametrize('plant', PLANTS)
def test_adding_to_a_file_needs_one_of_our_own(plant: Plant, tmp_path: Path, outside: Path) -> None:
  plant(tmp_path / 'a', outside)
  for opening in (files.open_append, files.open_lock):
    if (plant, opening) == (hard_link, files.open_lock):
      continue  # nothing is written to a lock
    with pytest.raises(IsADirectoryError if plant is folder else files.NotOwn) as error:
      opening(tmp_path / 'a')
    if plant is folder:
      continue
    assert isinstance(error.value, OSError) and isinstance(error.value, UsageError)
    assert str(tmp_path / 'a') in str(error.value)
  check_untouched(outside)


def test_a_fifo_that_has_a_reader_is_refused_as_well(tmp_path: Path) -> None:
  os.mkfifo(tmp_path / 'a')
  reader = os.open(tmp_path / 'a', os.O_RDONLY | os.O_NONBLOCK)
  try:
    with pytest.raises(files.NotOwn, match='FIFO'):
      files.open_append(tmp_path / 'a')
    assert os.read(reader, 1) == b''
  finally:
    os.close(reader)


def test_adding_to_a_file(tmp_path: Path) -> None:
  for text in ('é\n', '漢\n'):
    with files.open_append(tmp_path / 'a') as file:
      file.write(text)
  assert (tmp_path / 'a').read_bytes() == 'é\n漢\n'.encode()


@pytest.mark.parametrize('plant', PLANTS)
def test_a_new_file_replaces_nothing(plant: Plant, tmp_path: Path, outside: Path) -> None:
  plant(tmp_path / 'a', outside)
  with pytest.raises(FileExistsError):
    files.create(tmp_path / 'a')
  if plant is not folder:
    files.write_arrays(tmp_path / 'a', {'x': np.arange(3)})
    with np.load(tmp_path / 'a', allow_pickle=False) as found:
      assert found['x'].tolist() == [0, 1, 2]
  check_untouched(outside)


@pytest.mark.parametrize('plant', PLANTS)
def test_a_folder_is_no_link(plant: Plant, tmp_path: Path, outside: Path) -> None:
  plant(tmp_path / 'a', outside)
  if plant is folder:
    assert files.make_folder(tmp_path / 'a').is_dir()
  else:
    with pytest.raises(files.NotOwn, match=str(tmp_path / 'a')):
      files.make_folder(tmp_path / 'a')
  (tmp_path / 'b').mkdir()
  with pytest.raises(FileExistsError):
    files.move(tmp_path / 'b', tmp_path / 'a')
  assert not list(files.new_folder(tmp_path / 'a').iterdir())
  assert not (tmp_path / 'a').is_symlink()
  check_untouched(outside)


def test_what_is_in_a_linked_folder_is_not_removed(tmp_path: Path, outside: Path) -> None:
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'b').symlink_to(outside)
  files.remove(tmp_path / 'a')
  files.remove(tmp_path / 'a')  # which is not there
  check_untouched(outside)
  assert outside.exists() and not (tmp_path / 'a').exists()


@pytest.mark.parametrize('plant', PLANTS)
@pytest.mark.parametrize('name', ['a', 'b/c/d/a'])
def test_a_whole_directory_is_checked(
  plant: Plant, name: str, tmp_path: Path, outside: Path
) -> None:
  """Links to files are replaced when they are written, and so are no reason."""
  path = tmp_path / 'run' / name
  path.parent.mkdir(parents=True)
  plant(path, outside)
  refused = plant in (folder_link, device_link, fifo, fifo_link)
  for links in (False, True):
    if refused and not (links and plant is folder_link):
      with pytest.raises(UsageError, match=f'--run-dir .*run: {name} '):
        files.check_folder(tmp_path / 'run', '--run-dir', links)
    else:
      files.check_folder(tmp_path / 'run', '--run-dir', links)
  (tmp_path / 'linked').symlink_to(tmp_path / 'run')  # the user's own
  if refused:
    with pytest.raises(UsageError):
      files.check_folder(tmp_path / 'linked', '--run-dir')


def test_a_directory_of_any_depth_and_none_are_checked(tmp_path: Path) -> None:
  files.check_folder(tmp_path / 'none', '--run-dir')
  here = os.open(tmp_path, os.O_RDONLY)
  for _ in range(1_200):  # more than Python's rmtree takes
    os.mkdir('a', dir_fd=here)
    below = os.open('a', os.O_RDONLY, dir_fd=here)
    os.close(here)
    here = below
  os.close(here)
  with pytest.raises(UsageError, match='levels'):
    files.check_folder(tmp_path, '--run-dir')
  subprocess.run(['rm', '-r', str(tmp_path / 'a')], check=True)  # pytest would recurse


def test_links_of_weights_and_biases_are_its_own(tmp_path: Path) -> None:
  (tmp_path / 'wandb' / 'run-1').mkdir(parents=True)
  (tmp_path / 'wandb' / 'latest-run').symlink_to('run-1')
  files.check_folder(tmp_path, '--run-dir')


@pytest.mark.parametrize('before', ['old', None])
def test_a_full_disk_leaves_what_was_there_and_is_named(
  before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = tmp_path / 'file'
  if before is not None:
    path.write_text(before)

  def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space left') as failure:
    files.write_whole(path, 'new')
  assert failure.value.filename == str(path)
  assert [p.read_text() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_directory_that_cannot_be_synced_is_named(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError) as failure:
    files.sync(tmp_path)
  assert failure.value.filename == str(tmp_path) and failure.value.errno == errno.EIO


def test_a_file_that_is_not_written_leaves_no_draft(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  with pytest.raises(UsageError, match='UTF-8'):
    files.write_whole(tmp_path / 'file', 'init_from = "r\udcff"')

  def interrupt(descriptor: int) -> None:
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'fsync', interrupt)
  with pytest.raises(KeyboardInterrupt):
    files.write_whole(tmp_path / 'file', 'new')
  assert not list(tmp_path.iterdir())
