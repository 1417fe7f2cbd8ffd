"""podrace report: runs as one page."""

from __future__ import annotations

from pathlib import Path

from podrace.errors import UsageError
from podrace.experiments.runs import find
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, tell

COMMAND = Command(
  'report',
  'RUN... [OPTIONS]',
  'one HTML file of runs, or of all runs under directories: configuration, curves, scores, speed, faults, videos',
  (Option('--out', 'FILE', 'where it is written', 'report.html'),),
  """
The page needs no network. Runs that can't be read are named in it. The last line printed is JSON.
""",
)  # fmt: skip


def run(args: list[str]) -> int:
  """Writes the page."""
  options = Options(args, COMMAND)
  if not options.arguments:
    raise UsageError('report needs runs, or directories of runs: podrace report RUN...')
  out = Path(options.text('--out'))
  if out.suffix != '.html':
    raise UsageError(f'--out {out}: its name must end with .html')
  from podrace.experiments import report

  paths = list(dict.fromkeys(p for a in options.arguments for p in find(Path(a))))
  found = report.write_report(paths, out)
  for text in found['left_out']:
    tell(f'podrace report: left out: {text}')
  print_json(found)
  return 0
