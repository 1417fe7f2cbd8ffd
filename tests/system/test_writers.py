"""The source of podrace: only podrace.system.files writes, and each text is opened with its encoding."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import podrace

PACKAGE = Path(podrace.__file__).parent

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
  'system/output.py: os.open(os.devnull, os.O_RDWR)': 'the null device',
  "system/scheduling.py: Path('/proc/self/autogroup').write_text(f'{NICE}\\n', encoding='ascii')": "the kernel's",
  'envs/host/worker_process.py: file.truncate(length)': 'memory',
  "system/output.py: open(kept, 'w', encoding=out.encoding, errors=out.errors, buffering=1, closefd=False)": 'standard output',
  "run/checkpoint/__init__.py: ocp.CheckpointManager(str(self._plain.path), item_names=(*ITEMS, 'meta'), options=options)": 'the directory has just been checked; it makes new ones in it',
  'run/checkpoint/stored.py: link.symlink_to(entry)': 'in a new directory with a name that nobody can guess',
  'system/files/reading.py: zipfile.ZipFile(file)': 'it only reads',
  'run/sinks.py: SummaryWriter(str(folder), purge_step=0, filename_suffix=suffix)': 'the directory has just been checked; nobody can guess the name of the file',
  'run/sinks.py: wandb.init(...)': 'a directory of its own, with links of its own',
  'experiments/sweep/proposals.py: JournalFileBackend(str(journal), lock)': 'the file has just been checked',
  "run/video/film.py: av.open(str(mp4.absolute()), 'w')": 'in a new directory with a name that nobody can guess',
  'run/video/film.py: first.save(self._gif, save_all=True, append_images=rest, duration=milliseconds, loop=0)': 'in a new directory with a name that nobody can guess',
  'experiments/plot.py: figure.savefig(content, dpi=150, format=out.suffix[1:])': 'memory',
  'distributed/net/keys.py: files.make_user_folder(directory).chmod(448)': 'a directory that the user names',
  'envs/native/build.py: path.rename(library)': 'in a directory of the user alone',
  'tables/inserts.py: contents.replace(item)': 'no file',
}  # fmt: skip


@functools.cache
def all_nodes() -> dict[Path, list[ast.AST]]:
  """The nodes of each file of the package."""
  paths = sorted(PACKAGE.rglob('*.py'))
  return {p: list(ast.walk(ast.parse(p.read_text(encoding='utf-8')))) for p in paths}


@functools.cache
def sources() -> list[tuple[str, ast.Call]]:
  """Each call in the package, with the name of its file."""
  calls = []
  for path, nodes in all_nodes().items():
    name = path.relative_to(PACKAGE).as_posix()
    if name != 'system/files/__init__.py' and not name.startswith('commands/templates/'):
      calls += [(name, node) for node in nodes if isinstance(node, ast.Call)]
  return calls


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
  """Whether a call writes to the file system other than by podrace.system.files."""
  of, name = last_name(call)
  if of == 'files':  # podrace.system.files, checked by the tests above
    return False
  if name == 'open' and of == 'os':
    return bool(FLAGS & {x.attr for x in ast.walk(call) if isinstance(x, ast.Attribute)})
  if name == 'open':
    unknown = [k for k in call.keywords if k.arg == 'mode' and not is_mode(k.value)]
    return bool(unknown) or any(is_mode(m) and set('wax+') & set(m.value) for m in modes(call))  # type: ignore[attr-defined]
  if name in OF_MODULES.get(of, ()):
    return True
  if name == 'replace' and of not in ('dataclasses', ''):  # of a path: one argument; of a text: two
    return len(call.args) == 1 and not call.keywords
  if name == 'move' and not of:  # imported from podrace.system.files
    return False
  return name in WRITERS


def shown(call: ast.Call) -> str:
  text = ast.unparse(call)
  return text if len(text) < 100 else f'{ast.unparse(call.func)}(...)'


PASSED_ON = {
  'write_text', 'write_bytes', 'touch', 'mkdir', 'makedirs', 'symlink_to', 'savez', 'savefig',
  'rename', 'copyfile',
}  # fmt: skip


def test_no_writer_is_passed_on() -> None:
  """As to `functools.partial`, which the search below would not see."""
  for path, nodes in all_nodes().items():
    called = {id(x.func) for x in nodes if isinstance(x, ast.Call)}
    for node in nodes:
      name = node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
      of_path = isinstance(node, ast.Attribute) and name in PASSED_ON
      assert id(node) in called or not (
        of_path or (name == 'open' and isinstance(node, ast.Name))
      ), path


def test_no_other_code_writes() -> None:
  """A new place goes through podrace.system.files; one that cannot is listed here, with the reason."""
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
    'open(p)', "p.open('rb')", 'x.open(stack, 3)', "s.replace('a', 'b')",
    'os.open(p, os.O_RDONLY)', 'dataclasses.replace(x)',
  ):  # fmt: skip
    assert not writes(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]


# --- text -------------------------------------------------------------------------------------------


def lacks_encoding(call: ast.Call) -> bool:
  """Whether a call reads or writes text by the locale's encoding."""
  of, name = last_name(call)
  given = {k.arg for k in call.keywords}
  if of == 'files' or 'encoding' in given:
    return False
  if name in ('read_text', 'write_text'):
    return bool(of)  # the function of that name is podrace.system.files'
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
  own = {f'{x}.open()' for x in ('self._actors', 'self._listener', 'self.network', 'self.source')}
  own |= {'places(program, directory).open()', 'Addresses(program, private, directory).open()'}
  found = {f'{name}: {shown(call)}' for name, call in sources() if lacks_encoding(call)}
  left = {x for x in found if x.partition(': ')[2] not in own}
  of_bytes = {
    'envs/host/worker_process.py: tempfile.TemporaryFile()',
    "run/video/film.py: av.open(str(mp4.absolute()), 'w')",
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
