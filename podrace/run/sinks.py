"""Optional metrics sinks beside metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from podrace.errors import UsageError, unknown
from podrace.run.metrics import Line, Sink, read
from podrace.system.files import WANDB, make_folder, write_whole
from podrace.system.files.reading import read_bytes, read_json
from podrace.system.importing import why_not

SETTINGS = 10_000  # largest number of settings of a configuration
SETTING_NAME = 1000  # largest number of characters of a setting's name


class TensorBoard:
  """Event files in the run directory, written through tensorboardX.

  The writer may lose its newest events at a kill. A resumed run therefore writes all of
  metrics.jsonl again, and TensorBoard discards its earlier events.
  """

  def __init__(self, run_dir: Path) -> None:
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams

    folder = make_folder(run_dir / 'tensorboard')
    suffix = f'.{secrets.token_hex(8)}'  # an unguessable name, so no link can be waiting there
    self._writer = SummaryWriter(str(folder), purge_step=0, filename_suffix=suffix)
    config = read_config(run_dir)
    self._writer.add_text('config', f'```json\n{json.dumps(config, indent=2)}\n```', 0)
    for summary in hparams(flatten_config(config), {}):  # `add_hparams` would write another file
      self._writer.file_writer.add_summary(summary)
    for line in read(run_dir / 'metrics.jsonl'):
      self.write(line)

  def write(self, line: Line) -> None:
    """Write the scalars of a line."""
    for name, value in to_scalars(line).items():
      self._writer.add_scalar(name, value, line['step'])

  def close(self) -> None:
    """Close the event file."""
    self._writer.close()


class WandB:
  """Weights & Biases, which ignores steps that it has. Its environment variables apply."""

  def __init__(self, run_dir: Path) -> None:
    import wandb

    record = run_dir / 'wandb-id'  # the directory's name may not be unique
    if not os.path.lexists(record):
      write_whole(record, secrets.token_hex(8) + '\n')
    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'podrace'),
      id=_run_id(record),
      name=run_dir.absolute().name,
      dir=str(make_folder(run_dir / WANDB).parent),
      resume='allow',
      config=read_config(run_dir),
      allow_val_change=True,  # --override changes values
    )

  def write(self, line: Line) -> None:
    """Log the scalars of a line."""
    self._run.log(to_scalars(line), step=line['step'])

  def close(self) -> None:
    """Finish the run at Weights & Biases."""
    self._run.finish()


def _run_id(path: Path) -> str:
  """Read the id of a run at Weights & Biases.

  Raises:
    UsageError: if the file does not hold an id.
  """
  text = read_bytes(path, 100).decode(errors='replace').strip()
  if not re.fullmatch(r'[0-9A-Za-z_-]+', text):
    raise UsageError(f'{path} has {text!r}, expected an id of letters and digits: remove it')
  return text


def to_scalars(line: Line) -> dict[str, float]:
  """Return the numbers of a line by name. A list becomes NAME/0, NAME/1, ..., one per seed."""
  scalars: dict[str, Any] = {}
  for name, value in line.items():
    if isinstance(value, list):
      scalars |= {f'{name}/{i}': x for i, x in enumerate(value)}
    elif name != 'step':
      scalars[name] = value
  return {k: x for k, x in scalars.items() if isinstance(x, int | float)}


def read_config(run_dir: Path) -> dict[str, Any]:
  """Return a run's config.json, or {} if the file does not exist."""
  return read_json(run_dir / 'config.json') or {}


def flatten_config(tree: dict[str, Any]) -> dict[str, bool | int | float | str]:
  """Map the path of each setting, such as agent.network.hidden, to a value that all sinks accept.

  Raises:
    UsageError: if there are more than SETTINGS, or a path is longer than SETTING_NAME. A long name
      of an object would be repeated for each of its members.
  """
  settings: dict[str, bool | int | float | str] = {}
  for path, x in _settings(tree, ''):
    settings[path] = x if isinstance(x, bool | int | float | str) else json.dumps(x)
    if len(settings) > SETTINGS:
      raise UsageError(f'config.json has more than {SETTINGS:,} settings')
  return settings


def _settings(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
  for name, x in tree.items():
    if (length := len(prefix) + len(name)) > SETTING_NAME:
      raise UsageError(
        f'config.json has a setting with a name of {length:,} characters, expected at most '
        f'{SETTING_NAME:,}'
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
    UsageError: if a name is unknown, its library cannot be imported, or the run directory has a
      settings file for the sink, which may name a server that would get the user's key.
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
        f'{path} may send your metrics and your key to another server: remove it, or take '
        'environment variables such as WANDB_BASE_URL for your own settings'
      )
