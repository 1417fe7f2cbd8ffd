"""podrace rm: delete runs."""

from __future__ import annotations

import sys
from pathlib import Path

from podrace.commands.runs import size
from podrace.errors import UsageError
from podrace.experiments.runs import check_removable, remove, size_of
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text

COMMAND = Command(
  'rm',
  'RUN... [OPTIONS]',
  'delete run directories, after showing their size and a question',
  (Option('--yes', '', 'do not ask'),),
  'A running run is refused.',
)


def run(args: list[str]) -> int:
  """Ask, then delete all of the runs or none."""
  options = Options(args, COMMAND)
  paths = [Path(a) for a in options.arguments]
  if not paths:
    raise UsageError('rm needs the directories of runs: podrace rm RUN...')
  for path in paths:
    check_removable(path)
  paths = list({path.resolve(): path for path in paths}.values())  # two names of one run
  sizes = [size_of(str(path)) for path in paths]
  for path, bytes_ in zip(paths, sizes, strict=True):
    print_text(f'{size(bytes_):>9}  {path}')
  if '--yes' not in options and not _ask(len(paths), sum(sizes)):
    print_text('nothing is deleted')
    return 1
  for path in paths:
    remove(path)
  print_text(f'freed {size(sum(sizes))}')
  return 0


def _ask(count: int, bytes_: int) -> bool:
  if not sys.stdin.isatty():
    raise UsageError('standard input is no terminal for the question: add --yes')
  subject = 'this run' if count == 1 else f'these {count} runs'
  try:
    answer = input(f'delete {subject} and free {size(bytes_)}? [y/N] ')
  except EOFError:  # Ctrl-D
    return False
  return answer.strip().lower() in ('y', 'yes')
