"""What podrace writes is its own: never through a link, never into something that is no file; and text is UTF-8."""

from __future__ import annotations

import ast
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import podrace
from podrace import files
from podrace.errors import UsageError

PACKAGE = Path(podrace.__file__).parent

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
    with pytest.raises(files.NotOwn, match='a FIFO'):
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
    with pytest.raises(files.NotOwn, match='expected a directory'):
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
      with pytest.raises(UsageError, match=f'--run-dir .*run: {name} there is a'):
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
  with pytest.raises(UsageError, match='too many levels'):
    files.check_folder(tmp_path, '--run-dir')
  subprocess.run(['rm', '-r', str(tmp_path / 'a')], check=True)  # pytest would recurse


def test_links_of_weights_and_biases_are_its_own(tmp_path: Path) -> None:
  (tmp_path / 'wandb' / 'run-1').mkdir(parents=True)
  (tmp_path / 'wandb' / 'latest-run').symlink_to('run-1')
  files.check_folder(tmp_path, '--run-dir')


# --- the source -------------------------------------------------------------------------------------

WRITERS = {  # by their last names, whatever they belong to
  'write_text', 'write_bytes', 'touch', 'mkdir', 'makedirs', 'symlink', 'symlink_to', 'hardlink_to', 'link', 'rename',
  'renames', 'truncate', 'copyfile', 'copy2', 'copytree', 'copyfileobj', 'move', 'savez', 'savez_compressed', 'savetxt',
  'tofile', 'savefig', 'imsave', 'memmap', 'SummaryWriter', 'JournalFileBackend', 'CheckpointManager', 'FileHandler',
  'RotatingFileHandler', 'ZipFile', 'TarFile', 'FileLock', 'FileIO', 'mkfifo', 'mknod', 'chmod', 'chown', 'lchown', 'save_file',
  'start_trace',
}  # fmt: skip
OF_MODULES = {
  'np': {'save'}, 'jnp': {'save', 'savez'}, 'shutil': {'copy', 'move'}, 'os': {'replace', 'rename', 'mkdir'}, 'wandb': {'init'},
  'image': {'save'}, 'first': {'save'}, 'figure': {'savefig'}, 'pickle': {'dump'}, 'json': {'dump'}, 'yaml': {'dump'},
}  # fmt: skip
FLAGS = {'O_WRONLY', 'O_RDWR', 'O_CREAT', 'O_APPEND', 'O_TRUNC'}

ALLOWED = {
  'output.py: os.open(os.devnull, os.O_RDWR)': 'the null device',
  "output.py: open(os.devnull, 'w', encoding='utf-8')": 'the null device',
  'launch/warm.py: os.open(os.devnull, os.O_WRONLY)': 'the null device',
  "process.py: Path('/proc/self/autogroup').write_text(f'{NICE}\\n', encoding='ascii')": "the kernel's",
  'envs/host/gymnasium.py: file.truncate(length)': 'memory',
  'checkpoint.py: ocp.CheckpointManager(self._directory, item_names=items, options=options)': 'the directory has just been checked; it makes new ones in it',
  'metrics.py: SummaryWriter(str(folder), purge_step=0, filename_suffix=suffix)': 'the directory has just been checked; nobody can guess the name of the file',
  'metrics.py: wandb.init(...)': 'a directory of its own, with links of its own',
  'sweep/plan.py: JournalFileBackend(str(journal), lock)': 'the file has just been checked',
  "watch.py: av.open(str(mp4), 'w')": 'in a new directory with a name that nobody can guess',
  'watch.py: first.save(self._gif, save_all=True, append_images=rest, duration=milliseconds, loop=0)': 'in a new directory with a name that nobody can guess',
  'plot.py: figure.savefig(content, dpi=150, format=out.suffix[1:])': 'memory',
  'net/keys.py: files.make_user_folder(directory).chmod(448)': 'a directory that the user names',
  'tables/inserts.py: contents.replace(item)': 'no file',
}  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Call]]:
  for path in sorted(PACKAGE.rglob('*.py')):
    name = path.relative_to(PACKAGE).as_posix()
    if name == 'files/__init__.py' or name.startswith('templates/'):
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Call):
        yield name, node


def last_name(call: ast.Call) -> tuple[str, str]:
  """The name of what is called, and of what it belongs to; '' where that is no name."""
  if isinstance(call.func, ast.Name):
    return '', call.func.id
  if isinstance(call.func, ast.Attribute):
    of = call.func.value
    return of.id if isinstance(of, ast.Name) else '.', call.func.attr
  return '', ''


def modes(call: ast.Call) -> list[ast.expr]:
  return [*call.args[:2], *(k.value for k in call.keywords if k.arg == 'mode')]


def is_mode(node: ast.expr) -> bool:
  return (
    isinstance(node, ast.Constant)
    and isinstance(node.value, str)
    and set(node.value) <= set('rwaxbt+')
  )


def writes(call: ast.Call) -> bool:
  """Whether a call writes to the file system other than by podrace.files."""
  of, name = last_name(call)
  if of == 'files':  # podrace.files, checked by the tests above
    return False
  if name == 'open' and of == 'os':
    return bool(FLAGS & {x.attr for x in ast.walk(call) if isinstance(x, ast.Attribute)})
  if name == 'open':
    unknown = [k for k in call.keywords if k.arg == 'mode' and not is_mode(k.value)]
    return bool(unknown) or any(is_mode(m) and set('wax+') & set(m.value) for m in modes(call))  # type: ignore[attr-defined]
  if name in OF_MODULES.get(of, ()):
    return True
  if name == 'replace' and of != 'dataclasses':  # of a path: one argument; of a text: two
    return len(call.args) == 1 and not call.keywords
  if name == 'move' and not of:  # imported from podrace.files
    return False
  return name in WRITERS


def shown(call: ast.Call) -> str:
  text = ast.unparse(call)
  return text if len(text) < 100 else f'{ast.unparse(call.func)}(...)'


PASSED_ON = {
  'write_text',
  'write_bytes',
  'touch',
  'mkdir',
  'makedirs',
  'symlink_to',
  'savez',
  'savefig',
  'rename',
  'copyfile',
}


def test_no_writer_is_passed_on() -> None:
  """As to `functools.partial`, which the search below would not see."""
  for path in sorted(PACKAGE.rglob('*.py')):
    tree = ast.parse(path.read_text(encoding='utf-8'))
    called = {id(x.func) for x in ast.walk(tree) if isinstance(x, ast.Call)}
    for node in ast.walk(tree):
      name = node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
      of_path = isinstance(node, ast.Attribute) and name in PASSED_ON
      assert id(node) in called or not (
        of_path or (name == 'open' and isinstance(node, ast.Name))
      ), path


def test_no_other_code_writes() -> None:
  """A new place goes through podrace.files; one that cannot is listed here, with the reason."""
  found = {f'{name}: {shown(call)}' for name, call in sources() if writes(call)}
  assert found - set(ALLOWED) == set()
  assert set(ALLOWED) - found == set(), 'is not there any more: remove it from the list'


def test_the_search_finds_each_way_of_writing() -> None:
  for text in (
    "open(p, 'w')", "open(p, mode='ab')", 'open(p, mode=m)', "p.open('a')", "p.open(mode='x')", "io.open(p, 'r+')", "p.write_text('')",
    'os.open(p, os.O_WRONLY)', 'os.open(p, os.O_RDONLY | os.O_CREAT)', 'np.savez(p)', 'np.save(p, x)', 'p.mkdir()', 'os.makedirs(p)',
    'shutil.copy(a, b)', 'os.replace(a, b)', 'a.rename(b)', 'a.replace(b)', 'figure.savefig(p)', "av.open(p, 'w')", "gzip.open(p, 'wb')",
    'a.symlink_to(b)', 'x.tofile(p)', 'shutil.move(a, b)',
  ):  # fmt: skip
    assert writes(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]
  for text in (
    'open(p)',
    "p.open('rb')",
    'x.open(stack, 3)',
    "s.replace('a', 'b')",
    'os.open(p, os.O_RDONLY)',
    'dataclasses.replace(x)',
  ):
    assert not writes(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]


# --- text -------------------------------------------------------------------------------------------


def lacks_encoding(call: ast.Call) -> bool:
  """Whether a call reads or writes text by the locale's encoding."""
  of, name = last_name(call)
  given = {k.arg for k in call.keywords}
  if of == 'files' or 'encoding' in given:
    return False
  if name in ('read_text', 'write_text'):
    return bool(of)  # the function of that name is podrace.files'
  if 'text' in given or 'universal_newlines' in given:
    return name in ('run', 'Popen', 'check_output', 'call', 'getoutput')
  if (name in ('open', 'fdopen') and of != 'os') or (of, name) == ('os', 'fdopen'):
    texts = [m.value for m in modes(call) if is_mode(m)]  # type: ignore[attr-defined]
    if any('b' in m for m in texts):
      return False
    return bool(texts) or not of or name == 'fdopen' or not (call.args or call.keywords)
  return (
    name in ('TextIOWrapper', 'NamedTemporaryFile', 'TemporaryFile', 'fromtextfile', 'getoutput')
    and not call.args
  )


def test_each_text_is_opened_with_its_encoding() -> None:
  """A locale that is not UTF-8 changes no file."""
  # Methods `open` of podrace's own, none of which opens text.
  own = {
    'self._actors.open()',
    'self._listener.open()',
    'self.network.open()',
    'self.source.open()',
  }
  found = {f'{name}: {shown(call)}' for name, call in sources() if lacks_encoding(call)}
  own |= {'places(program, directory).open()', 'Addresses(program, private, directory).open()'}
  left = {x for x in found if x.partition(': ')[2] not in own}
  of_bytes = {
    'envs/host/gymnasium.py: tempfile.TemporaryFile()',
    "watch.py: av.open(str(mp4), 'w')",
  }
  assert left == of_bytes


def test_the_search_finds_each_text() -> None:
  for text in (
    'open(p)', "open(p, 'w')", 'p.open()', "p.open('a')", 'p.read_text()', "p.write_text('')", 'os.fdopen(3)', "os.fdopen(3, 'w')",
    'subprocess.run(x, text=True)',
  ):  # fmt: skip
    assert lacks_encoding(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]
  for text in ("open(p, 'rb')", "p.open('r', encoding='utf-8')", "os.fdopen(3, 'rb')"):
    assert not lacks_encoding(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]
