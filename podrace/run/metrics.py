"""Where a run's numbers go: metrics.jsonl always, the terminal, and other sinks on request."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from podrace.errors import UnreadableFile, UsageError
from podrace.settings.config import unknown
from podrace.system.files import WANDB, make_folder, open_append, open_new, write_whole
from podrace.system.files.reading import RECORD_BYTES, parse_json, read_bytes, read_json
from podrace.system.files.schema import LINE, check_members, is_number
from podrace.system.importing import why_not
from podrace.system.output import Lasting, print_text, printable

Line = dict[str, Any]

FILE_BYTES = 2**32  # largest metrics.jsonl of a run that goes on
LONGEST = 3.6e9  # seconds that are shown: a million hours
SHOWN_BYTES, SHOWN_LINES = 2**27, 500_000  # largest of one that is shown: a few seconds
SHOWN_NAMES, SHOWN_VALUES = (
  1000,
  2**24,
)  # of one that is shown: names, and numbers of all lines together
SETTINGS, SETTING_NAME = 10_000, 1000  # settings of a configuration, and characters of a name

log = logging.getLogger('podrace.run.metrics')


class Sink(Protocol):
  """Takes the lines of metrics.jsonl."""

  def write(self, line: Line) -> None: ...
  def close(self) -> None: ...


class JsonLines:
  """metrics.jsonl: one object a line, each step once, also across interruptions."""

  def __init__(self, path: Path, resumed_at: int) -> None:
    """Drops what an interrupted run wrote after the checkpoint that it goes on from."""
    kept = [line for line in read(path) if line['step'] <= resumed_at]
    write_whole(path, ''.join(json.dumps(line) + '\n' for line in kept))
    self._file = open_append(path)
    self._steps = [line['step'] for line in kept]
    self._synced = len(kept)

  def write(self, line: Line) -> None:
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    self._steps.append(line['step'])

  def sync(self) -> None:
    """Returns when the lines are on disk."""
    written = len(self._steps)
    os.fsync(self._file.fileno())
    self._synced = written

  def on_disk(self) -> tuple[int, int]:
    """The number of lines that outlive a power cut, and the step of the last of them."""
    return self._synced, self._steps[self._synced - 1] if self._synced else 0

  def up_to(self, step: int) -> int:
    """The number of lines up to `step`."""
    return sum(s <= step for s in self._steps)

  def close(self) -> None:
    self._file.close()


def read(path: Path, shown: bool = False) -> list[Line]:
  """The lines of a metrics.jsonl, but for what a kill or a power cut left behind the last whole one.

  Args:
    path: of the file.
    shown: it may be another user's, and is read to be shown: a very large one is refused, and the lines have
      their numbers and lists of numbers only.

  Raises:
    UsageError: if it is no regular file, too long, or a line before the last whole one is damaged.
  """
  try:
    # A run that goes on puts a file of its own in the place of a link: it only reads there.
    data = read_bytes(path, SHOWN_BYTES if shown else FILE_BYTES, follow=not shown)
  except FileNotFoundError:
    return []
  if shown and (count := data.count(b'\n')) > SHOWN_LINES:
    raise UnreadableFile(path, f'has {count:,} lines, expected at most {SHOWN_LINES:,}')
  whole = data.split(b'\n')[:-1]  # no newline behind it: the run died while writing it
  found = _parse_shown(path, whole) if shown else [_parse(line) for line in whole]
  last = len(found)
  while last and isinstance(found[last - 1], str):
    last -= 1
  if last < len(found):
    log.warning('%s, line %d, %s: it and what follows is left out', path, last + 1, found[last])
  for number, line in enumerate(found[:last], start=1):
    if isinstance(line, str):
      raise UsageError(f'{path}, line {number}, {line}: mend or remove it')
  return cast(list[Line], found[:last])


def _parse(line: bytes) -> Line | str:
  """A line, or what is wrong with it."""
  try:
    found = parse_json(line, finite=True)
  except ValueError as e:
    return str(e)
  if not isinstance(found, dict) or not isinstance(found.get('step'), int):
    return 'is no line of metrics: it has no step'
  try:
    check_members(found, LINE)
  except ValueError as e:
    return f'is no line of metrics: it {e}'
  return cast(Line, found)


def _parse_shown(path: Path, whole: Sequence[bytes]) -> list[Line | str]:
  """Parse each line, with its numbers and lists of numbers only.

  Raises:
    UnreadableFile: if a line is longer than a record, or there are more than SHOWN_NAMES or SHOWN_VALUES.
  """
  found: list[Line | str] = []
  names: dict[str, str] = {}  # all lines share the text of a name
  values = 0
  for number, text in enumerate(whole, start=1):
    if len(text) > RECORD_BYTES:
      raise UnreadableFile(
        path, f'has {len(text):,} bytes in line {number}, expected at most {RECORD_BYTES:,}'
      )
    line = _parse(text)
    if isinstance(line, str):
      found.append(line)
      continue
    kept = {names.setdefault(name, name): x for name, x in line.items() if _is_shown(x)}
    values += sum(len(x) if isinstance(x, list) else 1 for x in kept.values())
    if len(names) > SHOWN_NAMES:
      raise UnreadableFile(path, f'has more than {SHOWN_NAMES:,} names of metrics')
    if values > SHOWN_VALUES:
      raise UnreadableFile(path, f'has more than {SHOWN_VALUES:,} numbers')
    found.append(kept)
  return found


def _is_shown(x: Any) -> bool:
  if isinstance(x, list):
    return all(v is None or is_number(v) for v in x)
  return is_number(x)


class TensorBoard:
  """Event files in the run directory, through tensorboardX.

  Its writer may lose what it was given last. So a resumed run tells everything again, out of
  metrics.jsonl, and TensorBoard forgets what it had.
  """

  def __init__(self, run_dir: Path) -> None:
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams

    folder = make_folder(run_dir / 'tensorboard')
    suffix = f'.{secrets.token_hex(8)}'  # a name that nobody can guess, and so no link can have
    self._writer = SummaryWriter(str(folder), purge_step=0, filename_suffix=suffix)
    config = configuration(run_dir)
    self._writer.add_text('config', f'```json\n{json.dumps(config, indent=2)}\n```', 0)
    for summary in hparams(flat(config), {}):  # into this file: `add_hparams` would make another
      self._writer.file_writer.add_summary(summary)
    for line in read(run_dir / 'metrics.jsonl'):
      self.write(line)

  def write(self, line: Line) -> None:
    for name, value in numbers(line).items():
      self._writer.add_scalar(name, value, line['step'])

  def close(self) -> None:
    self._writer.close()


class WandB:
  """Weights & Biases, which ignores steps that it has; its environment variables apply."""

  def __init__(self, run_dir: Path) -> None:
    import wandb

    record = run_dir / 'wandb-id'  # not the directory's name, which another run may have as well
    if not os.path.lexists(record):
      with open_new(record) as file:
        file.write(secrets.token_hex(8) + '\n')
    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'podrace'),
      id=_run_id(record),
      name=run_dir.absolute().name,
      dir=str(make_folder(run_dir / WANDB).parent),
      resume='allow',
      config=configuration(run_dir),
      allow_val_change=True,  # as by --override
    )

  def write(self, line: Line) -> None:
    self._run.log(numbers(line), step=line['step'])

  def close(self) -> None:
    self._run.finish()


def _run_id(path: Path) -> str:
  """Return the id of a run at Weights & Biases; raises UsageError if the file holds none."""
  text = read_bytes(path, 100).decode(errors='replace').strip()
  if not re.fullmatch(r'[0-9A-Za-z_-]+', text):
    raise UsageError(f'{path} has {text!r}, expected an id of letters and digits: remove it')
  return text


def number(x: Any) -> float | None:
  """`x`, or None where it is not finite, which JSON has no word for."""
  return float(x) if math.isfinite(x) else None


def numbers(line: Line) -> dict[str, float]:
  """The numbers in a line, by name; those of a list, of each seed, as NAME/0, NAME/1, ...

  What has no value is left out.
  """
  found: dict[str, Any] = {}
  for name, value in line.items():
    if isinstance(value, list):
      found |= {f'{name}/{i}': x for i, x in enumerate(value)}
    elif name != 'step':
      found[name] = value
  return {k: x for k, x in found.items() if isinstance(x, int | float)}


def configuration(run_dir: Path) -> dict[str, Any]:
  """What config.json records of a run; empty if it is not there."""
  return read_json(run_dir / 'config.json') or {}


def flat(tree: dict[str, Any]) -> dict[str, bool | int | float | str]:
  """Return the values of a configuration by their paths, such as agent.network.hidden, in types that every sink knows.

  Raises:
    UsageError: if there are more than SETTINGS, or a path is longer than SETTING_NAME. A long name of an object would
      be there again for each of its members.
  """
  found: dict[str, bool | int | float | str] = {}
  for path, x in _settings(tree, ''):
    found[path] = x if isinstance(x, bool | int | float | str) else json.dumps(x)
    if len(found) > SETTINGS:
      raise UsageError(f'config.json has more than {SETTINGS:,} settings')
  return found


def _settings(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
  for name, x in tree.items():
    if (length := len(prefix) + len(name)) > SETTING_NAME:
      raise UsageError(
        f'config.json has a setting with a name of {length:,} characters, expected at most {SETTING_NAME:,}'
      )
    if isinstance(x, dict):
      yield from _settings(x, f'{prefix}{name}.')
    else:
      yield prefix + name, x


SINKS: dict[str, Callable[[Path], Sink]] = {'tensorboard': TensorBoard, 'wandb': WandB}
LIBRARIES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}


def check_sinks(sinks: Sequence[str | Sink], run_dir: Path | None = None) -> None:
  """Check the sinks of a run.

  Raises:
    UsageError: if there is no sink of a name, its library cannot be imported, or the run directory has settings for it,
      which may name a server that gets the user's key.
  """
  for name in sinks:
    if not isinstance(name, str):
      continue
    if name not in SINKS:
      raise unknown('sink', name, SINKS)
    try:
      importlib.import_module(LIBRARIES.get(name, 'podrace'))
    except Exception as e:
      raise UsageError(why_not(f'sink {name!r}', name, e)) from e
    if name == WANDB and run_dir and os.path.lexists(path := run_dir / WANDB / 'settings'):
      raise UsageError(
        f'{path} may send your metrics and your key to another server: remove it, or take environment variables '
        'such as WANDB_BASE_URL for your own settings'
      )


# --- progress -----------------------------------------------------------------------------------


class Progress(Protocol):
  """Shows a person how far a run is."""

  def say(self, message: str) -> None:
    """A line that stays."""

  def progress(self, step: int, steps_per_s: float) -> None: ...
  def write(self, line: Line) -> None: ...
  def close(self) -> None: ...


def progress(total_steps: int, seeds: int = 1) -> Progress:
  """What suits the place: a notebook, a terminal, or a file."""
  if in_notebook():
    return Notebook(total_steps, seeds)
  return Terminal(total_steps, seeds)


def in_notebook() -> bool:
  """Whether this is the kernel of a notebook."""
  shell = sys.modules.get('IPython')
  found = shell.get_ipython() if shell else None
  return hasattr(found, 'kernel')


def duration(seconds: float) -> str:
  """h:mm:ss."""
  minutes, s = divmod(round(min(max(seconds, 0), LONGEST)), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{s:02d}'


class Terminal:
  """Progress: a live line on a terminal; elsewhere plain lines, one in two seconds at most."""

  def __init__(self, total_steps: int, seeds: int = 1, file: TextIO | None = None) -> None:
    self._file = Lasting(file or sys.stderr)
    self._total, self._seeds = total_steps, seeds
    self._live: Any = None  # begins with the first progress
    self._console: Any = None
    self._last: Line = {}
    self._printed = 0.0
    if self._file.isatty():
      from rich.console import Console

      self._console = Console(file=cast(Any, self._file))

  def say(self, message: str) -> None:
    """A line that stays."""
    if self._console:
      self._console.print(printable(message), highlight=False, markup=False, emoji=False)
    else:
      print_text(message, file=self._file, flush=True)

  def progress(self, step: int, steps_per_s: float) -> None:
    """How far the run is; only on a terminal."""
    if not self._console:
      return
    if not self._live:
      from rich.live import Live

      self._live = Live(console=self._console, refresh_per_second=4)
      self._live.start()
    self._live.update(self._text(step, steps_per_s))

  def write(self, line: Line) -> None:
    self._last = line
    if self._console:
      self.progress(line['step'], line['steps_per_s'])
    elif line['step'] >= self._total or time.monotonic() - self._printed > 2:
      self._printed = time.monotonic()
      print_text(self._text(line['step'], line['steps_per_s']), file=self._file, flush=True)

  def _text(self, step: int, steps_per_s: float) -> str:
    return progress_text(step, self._total, self._seeds, steps_per_s, self._last)

  def close(self) -> None:
    if self._live:
      self._live.stop()


class Notebook:
  """Progress in a notebook: one line under the cell, which changes twice a second at most."""

  def __init__(self, total_steps: int, seeds: int = 1) -> None:
    self._total, self._seeds = total_steps, seeds
    self._last: Line = {}
    self._shown: Any = None  # begins with the first progress
    self._when = 0.0
    self._text = ''

  def say(self, message: str) -> None:
    print_text(message, flush=True)  # not to stderr, which a notebook shows as an error

  def progress(self, step: int, steps_per_s: float) -> None:
    self._text = progress_text(step, self._total, self._seeds, steps_per_s, self._last)
    if time.monotonic() - self._when > 0.5:
      self._show()

  def write(self, line: Line) -> None:
    self._last = line
    self.progress(line['step'], line['steps_per_s'])

  def close(self) -> None:
    if self._text:
      self._show()

  def _show(self) -> None:
    from IPython.display import display

    self._when = time.monotonic()
    text = {'text/plain': self._text}
    if self._shown is None:
      self._shown = display(text, raw=True, display_id=True)
    else:
      self._shown.update(text, raw=True)


def progress_text(step: int, total: int, seeds: int, steps_per_s: float, last: Line) -> str:
  """A line for people; `last` is the newest of metrics, or empty."""
  left = (total - step) * seeds / steps_per_s if steps_per_s > 0 else 0
  text = f'step {step:,} of {total:,} ({step / total:.0%})'
  if last.get('episode_return') is not None:
    text += f'  return {last["episode_return"]:.2f}  length {last["episode_length"]:.1f}'
  return f'{text}  {steps_per_s:,.0f} steps/s  {duration(left)} left'
