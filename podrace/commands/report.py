"""podrace report: write runs as one page."""

from __future__ import annotations

from pathlib import Path

from podrace.errors import UsageError
from podrace.experiments.runs import find
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, tell

COMMAND = Command(
  'report',
  'RUN... [OPTIONS]',
  'write one HTML file about runs, or about all runs under directories: configuration, curves, '
  'scores, speed, faults, videos',
  (Option('--out', 'FILE', 'the file to write', 'report.html'),),
  """
The page needs no network, and lists unreadable runs. The last line printed is JSON.
""",
  foreign={'--out FILE': 'output html file output-file'},
)  # fmt: skip


def run(args: list[str]) -> int:
  """Write the page."""
  options = Options(args, COMMAND)
  if not options.arguments:
    raise UsageError('report needs runs, or directories of runs: podrace report RUN...')
  out = Path(options.text('--out'))
  if out.suffix != '.html':
    raise UsageError(f'--out {out}: its name must end with .html')
  from podrace.experiments import report

  paths = find(*options.arguments)
  result = report.write_report(paths, out)
  for text in result['left_out']:
    tell(f'podrace report: left out: {text}')
  print_json(result)
  return 0
