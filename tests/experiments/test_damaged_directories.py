"""Run directories of strangers: whatever is in one, all commands go on with the others, and no terminal obeys it."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damages import CONFIG, DAMAGES, ESCAPES, NAMES, line, make
from shorthand import Capture, Patch, slow_after
from test_runs import called

import podrace
from podrace.commands import follow
from podrace.errors import UsageError
from podrace.experiments import curves, labels, runs
from podrace.run import metrics, run_end
from podrace.run.directory import load_any, read_summary
from podrace.run.summary import final_return
from podrace.system.child import python

SLUG = str.maketrans(' :,', '---')
HANGS = 600  # seconds, after which a call that waits for ever is ended
GOOD = ('a good run', 'z good run')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  """A directory with two good runs."""
  for name in GOOD:
    make(tmp_path / 'runs' / name)
  return tmp_path / 'runs'


@contextlib.contextmanager
def ends() -> Iterator[None]:
  """Ends what hangs, with a failure."""

  def fail(signum: int, frame: Any) -> None:
    raise AssertionError('it hangs')

  before = signal.signal(signal.SIGALRM, fail)
  signal.alarm(HANGS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def unprintable(text: str) -> list[str]:
  """The characters of an output that a terminal obeys, or that no reader sees."""
  hidden = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
  return [
    c for c in text if c not in '\n\t' and (unicodedata.category(c) in hidden or c == '\u034f')
  ]


def tried(capsys: Capture, *args: str) -> tuple[int, str]:
  """Exit code and stdout of a command; nothing that it prints is a command to a terminal, or a traceback."""
  with ends():
    code, out, err = called(capsys, *args)
  assert not unprintable(out + err), (args, unprintable(out + err))
  assert 'Traceback' not in out + err and code in (0, 2), (args, code, err)
  return code, out


def fail_on_constants(name: str) -> None:
  raise AssertionError(f'{name} is no JSON')


def data_of(page: Path) -> Any:
  """The data in a report, as a browser reads it."""
  text = page.read_text(encoding='utf-8')
  assert text.count('<script') == 2 and text.count('</script>') == 2
  data = text.partition('id="data">')[2].partition('</script>')[0]
  return json.loads(data, parse_constant=fail_on_constants)


@pytest.fixture(scope='module')
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
  """A run directory with each damage, all beside the good runs."""
  folder = tmp_path_factory.mktemp('all')
  for name in GOOD:
    make(folder / name)
  paths = {name: folder / f'{name.translate(SLUG)}' for name in DAMAGES}
  for name, path in paths.items():
    DAMAGES[name](make(path))
  yield paths
  subprocess.run(
    ['rm', '-rf', str(folder)], check=True
  )  # Python's cannot remove what is nested deep


def test_damaged_runs_are_rows_beside_the_others(damaged: dict[str, Path], capsys: Capture) -> None:
  folder = damaged['none'].parent
  code, out = tried(capsys, 'runs', str(folder))
  assert code == 0 and len(out.splitlines()) == 1 + len(GOOD) + len(damaged) + 3  # two tables
  code, out = tried(capsys, 'runs', str(folder), '--json')
  listed = json.loads(out, parse_constant=fail_on_constants)
  states = {Path(run['path']): run['state'] for run in listed}
  assert code == 0 and set(states) == {*damaged.values(), *(folder / name for name in GOOD)}
  assert set(states.values()) <= set(run_end.STATES)
  assert {states[folder / name] for name in (*GOOD, 'none')} == {'finished'}


@pytest.mark.slow
def test_damaged_runs_are_followed(damaged: dict[str, Path], capsys: Capture) -> None:
  for path in damaged.values():
    tried(capsys, 'follow', str(path), '--once', '--metrics', 'episode_return,loss,steps_per_s')


def test_the_live_view_of_damaged_runs(damaged: dict[str, Path]) -> None:
  for path in damaged.values():
    with ends(), contextlib.suppress(UsageError):
      lines = metrics.read(path / 'metrics.jsonl', shown=True)
      assert not unprintable(
        follow.render(runs.inspect_run(path), lines, ['loss', 'episode_return'])
      )


def test_a_report_has_what_can_be_read(
  damaged: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
  page = tmp_path / 'report.html'
  code, _ = tried(capsys, 'report', str(damaged['none'].parent), '--out', str(page))
  data = data_of(page)
  assert code == 0 and {*GOOD, 'none'} <= {run['name'] for run in data['runs']}
  assert len(data['runs']) + len(data['left_out']) == len(damaged) + len(GOOD)


@pytest.mark.parametrize('x', ['steps', 'wall', 'gradient-steps'])
def test_curves_of_what_can_be_read(damaged: dict[str, Path], x: curves.X) -> None:
  for metric in ('episode_return', 'loss'):
    with ends():
      groups, wrong = curves.read(runs.find(damaged['none'].parent), metric, x)
      assert len(labels.make_labels(groups)) == len(groups)
    drawn = {curve.run for group in groups for curve in group.curves}
    assert damaged['none'] in drawn and len(drawn) + len(wrong) == len(damaged) + len(GOOD)


DRAWN = [
  name for name in DAMAGES
  if name.startswith(('metrics', 'config.json: env', 'config.json: agent name', 'config.json: name of'))
]  # fmt: skip


@pytest.mark.parametrize('part', range(4))
def test_pictures_of_what_can_be_read(
  part: int, damaged: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
  out = tmp_path / 'curves.svg'
  paths = [str(damaged[name]) for name in DRAWN[part::4]]
  metric = ('episode_return', 'loss')[part % 2]
  code, _ = tried(
    capsys, 'plot', *paths, str(damaged['none']), '--metric', metric, '--out', str(out)
  )
  text = out.read_bytes().decode()
  assert code == 0 and not unprintable(text) and '<script' not in text and '<img' not in text


BROKEN = [
  *(f'{file}: {node}' for file in ('config.json', 'summary.json', 'metrics.jsonl', 'lock') for node in
    ('a pipe', 'a socket', 'a directory', 'a link to an endless device', 'a link to nothing', 'a link to a file')),
  *(f'{file}: {content}' for file in ('config.json', 'summary.json') for content in
    ('empty', 'list', 'deep lists', 'a NUL', 'not UTF-8', 'a mark of byte order', 'a name twice', 'long')),
  *(f'config.json: {member} {kind}' for member in ('total_steps', 'num_envs') for kind in
    ('negative', 'zero', 'text', 'long', '4,000 digits', 'NaN', 'infinite')),
  *(f'summary.json: step {kind}' for kind in ('negative', 'text', 'half', 'NaN')),
  'config.json: a sparse file', 'config.json: 1e999', 'config.json: agent name number', 'config.json: env object',
  'end.json: state number', 'end.json: state escapes', 'end.json: why list', 'summary.json: ended number',
  'summary.json: episode_return NaN', 'summary.json: steps_per_s text', 'logs: a pipe as lock',
]  # fmt: skip


def test_a_broken_run_says_why_in_its_row(folder: Path, capsys: Capture) -> None:
  for i, name in enumerate(BROKEN):
    DAMAGES[name](make(folder / f'{i:03d}'))
  code, out = tried(capsys, 'runs', str(folder), '--json', '--state', 'broken')
  shown = {Path(run['path']).name: run['why'] for run in json.loads(out)}
  assert code == 0 and [x for i, x in enumerate(BROKEN) if f'{i:03d}' not in shown] == []
  for i, name in enumerate(BROKEN):
    assert name.partition(':')[0].removesuffix('s') in shown[f'{i:03d}'], name


def test_a_run_that_goes_on_reads_its_files_or_refuses(damaged: dict[str, Path]) -> None:
  for name, path in damaged.items():
    with ends(), contextlib.suppress(UsageError):  # some are no damage to it
      load_any(path)
    with ends(), contextlib.suppress(UsageError):
      read_summary(path / 'summary.json', lambda text: None)
    if name not in ('metrics.jsonl: many lines', 'metrics.jsonl: empty lines'):  # it reads all
      with ends(), contextlib.suppress(UsageError):
        final_return(path / 'metrics.jsonl')


@pytest.mark.parametrize(
  'name', ['config.json: a pipe', 'config.json: deep lists', 'config.json: env number', 'config.json: a link to an endless device'],
)  # fmt: skip
@pytest.mark.parametrize(
  'command', ['eval DIR', 'export DIR OUT', 'watch DIR', 'train --run-dir DIR', 'discover --run-dir DIR'],
)  # fmt: skip
def test_commands_refuse_it_with_exit_code_2(
  name: str, command: str, tmp_path: Path, capsys: Capture
) -> None:
  bad = make(tmp_path / 'bad')
  DAMAGES[name](bad)
  words = [{'DIR': str(bad), 'OUT': str(tmp_path / 'out')}.get(w, w) for w in command.split()]
  assert tried(capsys, *words)[0] == 2
  assert not (tmp_path / 'out').exists()


# --- terminals ------------------------------------------------------------------------------------


def hostile(path: Path) -> Path:
  """A run whose texts are commands to a terminal."""
  make(path)
  config = {
    **CONFIG,
    'env': f'podrace:{ESCAPES}',
    'architecture': ESCAPES,
    'agent': {'name': ESCAPES, ESCAPES: ESCAPES},
  }
  (path / 'config.json').write_text(json.dumps(config))
  (path / 'summary.json').unlink()
  (path / 'end.json').write_text(json.dumps({'state': 'failed', 'why': f'{ESCAPES}\nsecond line'}))
  return path


@pytest.mark.parametrize('name', NAMES)
def test_no_name_of_a_directory_is_a_command_to_a_terminal(
  name: str, tmp_path: Path, capsys: Capture
) -> None:
  run = hostile(tmp_path / name)
  tried(capsys, 'runs', str(run))
  tried(capsys, 'follow', str(run), '--once')
  tried(capsys, 'report', f'{run}-missing')
  assert tried(capsys, 'rm', str(run), '--yes')[0] == 0 and not run.exists()


def test_no_text_of_a_directory_is_a_command_to_a_terminal(
  tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  name = NAMES[0]
  run = hostile(tmp_path / 'runs' / name)
  given = f'./runs/{name}'
  (tmp_path / 'runs' / f'{name[:100]}-broken').mkdir()
  (tmp_path / 'runs' / f'{name[:100]}-broken' / 'config.json').write_text(ESCAPES)
  for args in (
    ('runs', './runs'), ('runs', './runs', '--json'), ('runs', given, '--state', ESCAPES), ('follow', given, '--once'),
    ('follow', given, '--once', '--metrics', f'loss,{ESCAPES}'), ('report', './runs'), ('report', f'{given}-missing'),
    ('plot', './runs', '--out', 'a.svg'), ('plot', './runs', '--out', 'a.svg', '--metric', ESCAPES),
    ('plot', './runs', '--aggregate', '--out', 'a.svg'), ('plot', f'{given}-missing'),
    ('eval', given), ('watch', given), ('export', given, 'out'), ('train', '--run-dir', given),
    ('train', '--init-from', given), ('launch', '--run-dir', given), ('sweep', '--dir', given), ('discover', '--run-dir', given),
    ('eval', f'{given}-missing'), ('rm', f'{given}-missing'), ('rm', given, '--yes'),
    (ESCAPES,), ('train', ESCAPES), ('train', f'--{ESCAPES}'), ('runs', f'--{ESCAPES}'), ('train', '--env', ESCAPES),
    ('plan', given, '--as', ESCAPES), ('plan', given, '--as', 'seed'), ('top', ESCAPES), ('init', 'agent', ESCAPES),
  ):  # fmt: skip
    tried(capsys, *args)
  assert not run.exists()


def test_rows_stay_rows(tmp_path: Path, capsys: Capture) -> None:
  for i, name in enumerate(NAMES):
    hostile(tmp_path / name)
    assert len(tried(capsys, 'runs', str(tmp_path))[1].splitlines()) == i + 2
  rows = tried(capsys, 'runs', str(tmp_path))[1].splitlines()
  assert all(len(row) < 1500 for row in rows)


def test_no_warning_is_a_command_to_a_terminal(tmp_path: Path) -> None:
  """In a process of its own, where no test takes what is logged."""
  run = hostile(tmp_path / NAMES[0])
  with (run / 'metrics.jsonl').open('a') as file:
    file.write('no JSON\n')
  report = [
    sys.executable, '-P', '-m', 'podrace', 'report', str(tmp_path), '--out',
    str(tmp_path / 'r.html'),
  ]  # fmt: skip
  done = subprocess.run(report, capture_output=True, check=True, timeout=HANGS)
  assert b'line 11' in done.stderr and not unprintable((done.stdout + done.stderr).decode())


def test_nothing_is_printed_but_by_print_text() -> None:
  """`print` leaves what terminals obey as it is; what a child's program text has is no call."""
  package = Path(podrace.__file__).parent
  calls = [
    f'{path.relative_to(package)}:{node.lineno}'
    for path in package.rglob('*.py')
    if 'print' in (text := path.read_text(encoding='utf-8'))  # parsing the others takes a second
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print'
  ]
  assert calls == []


# --- file systems without locks -------------------------------------------------------------------


# --- products: each part is within its bound --------------------------------------------------------


def _long_name(path: Path) -> None:
  members = {**CONFIG, 'k' * 2_000_000: {f'{i:x}': 1 for i in range(150_000)}}
  (path / 'config.json').write_text(json.dumps(members, separators=(',', ':')))


def _long_name_of_empty_objects(path: Path) -> None:
  members = {**CONFIG, 'k' * 2_000_000: {f'{i:x}': {} for i in range(150_000)}}
  (path / 'config.json').write_text(json.dumps(members, separators=(',', ':')))


def _many_settings(path: Path) -> None:
  (path / 'config.json').write_text(json.dumps({**CONFIG, **{f's{i}': i for i in range(10_001)}}))


def _new_names_in_each_line(path: Path) -> None:
  rows = (line(s, **{f'm{s * 20_000 + i}': 0 for i in range(20_000)}) for s in range(1, 51))
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def _a_line_of_empty_objects(path: Path) -> None:
  text = '{"step": 1, "episode_return": 1, "x": [' + '{},' * 10_000_000 + '1]}\n'
  (path / 'metrics.jsonl').write_text(text)


def _many_seeds_once(path: Path) -> None:
  text = '{"step": 1, "episode_return_by_seed": [' + '1,' * 1_000_000 + '1]}\n'
  text += ''.join(f'{{"step": {s}}}\n' for s in range(2, 100_000))
  (path / 'metrics.jsonl').write_text(text)


PRODUCTS = {
  _long_name: ('a name of 2,000,000 characters, expected at most 1,000', ''),
  _long_name_of_empty_objects: ('a name of 2,000,000 characters, expected at most 1,000', ''),
  _many_settings: ('more than 10,000 settings', ''),
  _new_names_in_each_line: ('more than 1,000 names of metrics', ''),
  _a_line_of_empty_objects: ('bytes in line 1, expected at most 4,194,304', ''),
  _many_seeds_once: ('99,999 lines of up to 1,000,001 seeds', 'plot'),
}
MEMORY = 3 * 2**30  # bytes of addresses of a command, of which the libraries take most


@pytest.mark.parametrize(
  ('damage', 'command'),
  slow_after(2,
    (_long_name_of_empty_objects, 'report'), (_many_settings, 'plot'), (_new_names_in_each_line, 'report'),
    (_many_seeds_once, 'plot'), (_long_name, 'report'), (_many_settings, 'report'), (_a_line_of_empty_objects, 'report'),
    *((damage, 'report' if only else 'plot') for damage, (_, only) in PRODUCTS.items() if damage is not _many_settings),
  ),
)  # fmt: skip
def test_products_of_sizes_within_their_bounds_take_no_memory(
  damage: Callable[[Path], None], command: str, tmp_path: Path
) -> None:
  reason, only = PRODUCTS[damage]
  damage(make(tmp_path / 'bad'))
  make(tmp_path / 'good')
  out = tmp_path / {'report': 'report.html', 'plot': 'curves.svg'}[command]
  done = subprocess.run(
    [*python('-m', 'podrace'), command, 'bad', 'good', '--out', str(out)],
    cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    env={**os.environ, 'OPENBLAS_NUM_THREADS': '1'},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  assert 'Traceback' not in done.stderr
  if only in ('', command):
    assert 'bad' in done.stderr and reason in done.stderr
    assert json.loads(done.stdout)['runs'] == 1


def test_lines_that_are_shown_have_numbers_only(tmp_path: Path) -> None:
  path = tmp_path / 'metrics.jsonl'
  whole = line(
    1, seeds=[1.5, None], word='a', there=True, nothing=None, mixed=[1, {}], large=10**200
  )
  path.write_text(json.dumps(whole) + '\n')
  shown = {k: whole[k] for k in whole if k not in ('word', 'there', 'nothing', 'mixed', 'large')}
  assert metrics.read(path, shown=True) == [shown]
  assert metrics.read(path) == [whole]


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(
  number: int, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
  unfinished = make(folder / 'unfinished')
  (unfinished / 'summary.json').unlink()

  def flock(file: Any, operation: int) -> None:
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(fcntl, 'flock', flock)
  code, out = tried(capsys, 'runs', str(folder), '--json')
  states = {Path(run['path']).name: run['state'] for run in json.loads(out)}
  assert code == 0 and states == {**dict.fromkeys(GOOD, 'finished'), 'unfinished': 'unknown'}
  assert tried(capsys, 'follow', str(unfinished), '--every', '0.01')[0] == 0
  assert tried(capsys, 'rm', str(unfinished), '--yes')[0] == 2 and unfinished.exists()
  code, _, err = called(
    capsys, 'train', 'catch', '--run-dir', str(folder / 'new'), '--total-steps', '64'
  )
  assert code == 2 and 'flock' in err and os.strerror(number) in err
