"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases."""

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
from podrace.system.files import WANDB, make_folder, open_new
from podrace.system.files.reading import read_bytes, read_json
from podrace.system.importing import why_not

SETTINGS = 10_000  # largest number of settings of a configuration
SETTING_NAME = 1000  # largest number of characters of a setting's name


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
