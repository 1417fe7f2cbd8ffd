"""metrics.jsonl, the other sinks, and the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import until
from shorthand import Patch

from podrace.errors import UsageError
from podrace.run import metrics, progress, sinks
from podrace.system import files


def line(step: int, **more: object) -> dict:
  plain = {
    'step': step, 'wall_s': 0.5, 'steps_per_s': 10.0, 'episode_return': 1.0,
    'episode_length': 9.0,
  }  # fmt: skip
  return {**plain, **more}


# --- metrics.jsonl ------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
  file = tmp_path / 'metrics.jsonl'
  file.write_text('{"step": 1}\n{"step": 2}\n{"st')
  assert metrics.read(file) == [{'step': 1}, {'step': 2}]
  file.write_text('{"step": 1}\n{"step": 2}')  # whole, but who can tell
  assert metrics.read(file) == [{'step': 1}]
  file.write_text('')
  assert metrics.read(file) == []
  assert metrics.read(tmp_path / 'none.jsonl') == []


def test_a_line_without_room_raises_once(tmp_path: Path) -> None:
  """The next life drops the part of it that was written."""
  file = metrics.JsonLines(tmp_path / 'm', 0)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
  try:
    file.write({'step': 1})
    with pytest.raises(OSError):
      file.write({'step': 2, 'long': 'x' * 100})
    file.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert (tmp_path / 'm').stat().st_size == 100
  again = metrics.JsonLines(tmp_path / 'm', 2)
  assert again.has(1) and not again.has(2)
  again.close()


def test_a_garbled_line_names_the_file(tmp_path: Path) -> None:
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
  with pytest.raises(UsageError, match=r'metrics\.jsonl.*line 2.*JSON'):
    metrics.read(tmp_path / 'metrics.jsonl')


@pytest.mark.parametrize('tail', [b'\0' * 900, b'\0\0\n\0\n', b'\xff\xfe\n\x80', b'nonsense\n'])
def test_a_damaged_end_is_left_out_and_said(
  tail: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
  lines = metrics.JsonLines(path, 2)
  lines.write(line(3))
  lines.close()
  assert metrics.read(path) == [{'step': 1}, {'step': 2}, line(3)]
  assert ('metrics.jsonl, line 3' in caplog.text) == (b'\n' in tail)


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
  lines = metrics.JsonLines(tmp_path / 'metrics.jsonl', 0)
  for step in (1, 2, 3):
    lines.write(line(step))
  lines.sync()
  lines.close()
  resumed = metrics.JsonLines(tmp_path / 'metrics.jsonl', 2)
  resumed.write(line(3, loss=0.5))
  resumed.close()
  found = metrics.read(tmp_path / 'metrics.jsonl')
  assert found == [line(1), line(2), line(3, loss=0.5)]


def test_a_number_that_json_has_no_word_for() -> None:
  assert files.number(float('nan')) is None
  assert files.number(float('-inf')) is None
  assert files.number(1) == 1.0
  given = line(1, episode_return=None, loss=0.25)
  assert set(sinks.to_scalars(given)) == {'wall_s', 'steps_per_s', 'episode_length', 'loss'}


def test_sinks_have_each_seeds_return() -> None:
  found = sinks.to_scalars(line(1, episode_return_by_seed=[0.5, None, 2.0]))
  names = {k: x for k, x in found.items() if '/' in k}
  assert names == {'episode_return_by_seed/0': 0.5, 'episode_return_by_seed/2': 2.0}


CONFIG = {
  'agent': {'name': 'x', 'learning_rate': 0.25, 'hidden': [1, 2]},
  'seed': 3,
  'greedy': False,
}


def test_tensorboard_has_the_configuration(tmp_path: Path) -> None:
  event_accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  pytest.importorskip('tensorboardX')
  from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  sinks.TensorBoard(tmp_path).close()
  events = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  events.Reload()
  (text,) = events.Tensors('config/text_summary')
  assert b'"learning_rate": 0.25' in text.tensor_proto.string_val[0]
  content = events.SummaryMetadata('_hparams_/session_start_info').plugin_data.content
  found = HParamsPluginData.FromString(content).session_start_info.hparams
  assert found['agent.learning_rate'].number_value == 0.25
  assert found['agent.hidden'].string_value == '[1, 2]'


# --- other sinks --------------------------------------------------------------------------------


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
  event_accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  pytest.importorskip('tensorboardX')
  lines = metrics.JsonLines(tmp_path / 'metrics.jsonl', 0)
  first = sinks.TensorBoard(tmp_path)
  for step in (10, 20, 30):
    for sink in (lines, first):
      sink.write(line(step, loss=1.0))
  second = int(time.time())  # which is in a file's name
  until(lambda: int(time.time()) > second)
  lines = metrics.JsonLines(tmp_path / 'metrics.jsonl', 20)  # it was killed, `first` not closed
  resumed = sinks.TensorBoard(tmp_path)
  for step in (30, 40):
    for sink in (lines, resumed):
      sink.write(line(step, loss=2.0))
  resumed.close()
  events = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  events.Reload()
  found = [(e.step, e.value) for e in events.Scalars('loss')]
  assert found == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
  assert 'episode_return' in events.Tags()['scalars']
  first.close()


def test_wandb_offline(tmp_path: Path, monkeypatch: Patch) -> None:
  wandb = pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  sink = sinks.WandB(tmp_path)
  assert wandb.run.config['agent']['learning_rate'] == 0.25
  sink.write(line(10, loss=1.0, nothing=None))
  sink.close()
  (found,) = tmp_path.glob('wandb/offline-run-*/run-*.wandb')
  name = (tmp_path / 'wandb-id').read_text().strip()
  assert len(name) == 16 and found.name == f'run-{name}.wandb'
  sinks.WandB(tmp_path).close()  # a resumed run is the same one
  assert (tmp_path / 'wandb-id').read_text().strip() == name


@pytest.mark.parametrize(('name', 'module'), [('tensorboard', 'tensorboardX'), ('wandb', 'wandb')])
def test_a_sink_that_is_not_installed_says_what_to_install(
  name: str, module: str, monkeypatch: Patch
) -> None:
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(UsageError, match=rf"pip install 'podrace\[{name}\]'"):
    sinks.check_sinks([name])


# --- the terminal -------------------------------------------------------------------------------


def test_the_time_left_begins_after_the_first_call(monkeypatch: Patch) -> None:
  """The first call compiles: 10 steps took 100 s, and the next 40 steps take 20 s."""
  now = 100.0
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now)
  remaining = progress.Remaining(100)
  assert remaining.seconds(10) is None
  now = 120.0
  assert remaining.seconds(50) == 25.0 and remaining.seconds(100) == 0.0
  assert progress.Remaining(100).seconds(100) == 0.0  # a run of one line


@pytest.mark.parametrize('is_terminal', [False, True])
def test_plain_lines_where_no_line_can_change(monkeypatch: Patch, is_terminal: bool) -> None:
  file = io.StringIO()
  monkeypatch.setattr(file, 'isatty', lambda: is_terminal, raising=False)
  monkeypatch.setenv('TERM', 'dumb')
  terminal = progress.Terminal(100, file=file)
  terminal.say('compiling')
  terminal.progress(5, 10.0)  # only where it can be overwritten
  for step in range(10, 110, 10):
    terminal.write(line(step))
  terminal.close()
  said = file.getvalue().splitlines()
  assert said[0] == 'compiling'
  assert said[1].startswith('step 10 of 100 (10%)  return 1.00  length 9.0  10 steps/s')
  assert said[-1].startswith('step 100 of 100 (100%)') and said[-1].endswith('0:00:00 left')
  assert len(said) == 3  # the first, the last, and between them one in two seconds at most
  assert '\x1b' not in file.getvalue()


class Screen:
  """A pseudo-terminal, and what was written to it."""

  def __init__(self) -> None:
    self._outer, self._inner = pty.openpty()
    os.set_blocking(self._outer, False)
    self.file = os.fdopen(self._inner, 'w')
    self.raw = ''

  def shown(self) -> str:
    """All text up to now, without colours."""
    self.file.flush()
    with contextlib.suppress(BlockingIOError):
      while True:
        self.raw += os.read(self._outer, 65536).decode()
    return re.sub(r'\x1b\[[0-9;]*m', '', self.raw)

  def close(self) -> None:
    self.file.close()
    os.close(self._outer)


@pytest.fixture
def screen(monkeypatch: Patch) -> Iterator[Screen]:
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('COLUMNS', '120')
  screen = Screen()
  yield screen
  screen.close()


def test_live_progress_on_a_terminal(screen: Screen) -> None:
  terminal = progress.Terminal(100, file=screen.file)
  terminal.say('compiling [bold]')
  assert 'compiling [bold]' in screen.shown()
  terminal.progress(5, 10.0)
  until(lambda: 'step 5 of 100 (5%)' in screen.shown())
  terminal.say('between')
  terminal.write(line(100))
  terminal.close()
  assert 'between' in screen.shown()
  assert 'step 100 of 100 (100%)  return 1.00' in screen.shown()
  assert screen.raw.count('\x1b[?25l') == screen.raw.count('\x1b[?25h') == 1  # the cursor is back
  assert screen.raw.endswith('\n\x1b[?25h')


def test_nothing_to_tell_shows_nothing(screen: Screen) -> None:
  progress.Terminal(100, file=screen.file).close()
  assert screen.shown() == ''


def test_durations() -> None:
  assert progress.format_duration(0) == '0:00:00'
  assert progress.format_duration(3725.4) == '1:02:05'
  assert progress.format_duration(-3) == '0:00:00'


def test_lines_survive_without_close(tmp_path: Path) -> None:
  lines = metrics.JsonLines(tmp_path / 'metrics.jsonl', 0)
  lines.write(line(1))
  until(lambda: (tmp_path / 'metrics.jsonl').read_text())
  assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == line(1)
  lines.close()


@pytest.mark.parametrize('line', ['[1]', '{"loss": 1}', '3'])
def test_what_is_no_line_of_metrics(line: str, tmp_path: Path) -> None:
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
  with pytest.raises(UsageError, match='line 2'):
    metrics.read(path)


def test_the_progress_has_the_range_of_the_seeds() -> None:
  one = line(5, episode_return=2.0)
  assert 'return 2.00  length 9.0' in progress.format_progress(5, 10, 1.0, None, one)
  of_log = progress.format_progress(5, 10, 1.0, None, one, ' of the log')
  assert 'return 2.00 of the log  length 9.0' in of_log
  for by_seed in ([1.0, 3.0], [3.0, None, 1.0]):
    text = progress.format_progress(5, 10, 1.0, None, one | {'episode_return_by_seed': by_seed})
    assert 'return 2.00 (1.00 to 3.00)  length 9.0' in text
  assert progress.format_return(one | {'episode_return_by_seed': [2.0, None]}) == 'return 2.00'
