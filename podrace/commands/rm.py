"""podrace rm: deletes runs."""

from __future__ import annotations

import sys
from pathlib import Path

from podrace.commands.runs import size
from podrace.errors import UsageError
from podrace.experiments.runs import check_stopped, remove, size_of
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text

COMMAND = Command(
  'rm',
  'RUN... [OPTIONS]',
  'delete run directories, after showing what that frees and asking',
  (Option('--yes', '', 'do not ask'),),
  'A run that is still going is refused.',
)


def run(args: list[str]) -> int:
  """Asks, then deletes: all of them or none."""
  options = Options(args, COMMAND)
  paths = list(dict.fromkeys(Path(a) for a in options.arguments))
  if not paths:
    raise UsageError('rm needs the directories of runs: podrace rm RUN...')
  for path in paths:
    check_stopped(path)
  sizes = [size_of(str(path)) for path in paths]
  for path, bytes_ in zip(paths, sizes, strict=True):
    print_text(f'{size(bytes_):>9}  {path}')
  if '--yes' not in options and not _agreed(len(paths), sum(sizes)):
    print_text('nothing is deleted')
    return 1
  for path in paths:
    remove(path)
  print_text(f'freed {size(sum(sizes))}')
  return 0


def _agreed(count: int, bytes_: int) -> bool:
  if not sys.stdin.isatty():
    raise UsageError('there is no terminal to ask at: give --yes')
  what = 'this run' if count == 1 else f'these {count} runs'
  return input(f'delete {what} and free {size(bytes_)}? [y/N] ').strip().lower() in ('y', 'yes')
