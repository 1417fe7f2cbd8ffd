"""Commands in locales that are not UTF-8."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import environment
from test_planted import finished, theirs

from podrace.experiments import report

__all__ = ['finished', 'theirs']  # fixtures

# --- another locale ---------------------------------------------------------------------------------------

EACH = """
import locale, sys
from podrace import cli
assert locale.getpreferredencoding(False).replace('-', '').lower() != 'utf8'
for words in sys.argv[1:]:
  try:
    cli.main(words.split())
  except SystemExit as e:
    assert not e.code, (words, e.code)
"""
COMMANDS = [
  'report {run} --out {out}/report.html', 'plot {run} --out {out}/curves.png', 'runs {run}', 'train --help', 'list',
  'init env OfMine --dir {out}', 'keys new {out}/keys',
]  # fmt: skip
C = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


@pytest.mark.parametrize(
  'name',
  ['C', *(pytest.param(x, marks=pytest.mark.slow) for x in ('ja_JP.EUC-JP', 'zh_CN.GB18030'))],
)
def test_commands_in_a_locale_that_is_not_utf8(name: str, theirs: Path, tmp_path: Path) -> None:
  """In a directory whose name the locale lacks. The page is UTF-8 everywhere."""
  settings = {**C, 'LC_ALL': name, 'LOCPATH': str(tmp_path)}
  source, _, encoding = name.partition('.')
  if encoding:
    made = ['localedef', '-i', source, '-f', encoding, str(tmp_path / name)]
    if shutil.which('localedef') is None or subprocess.run(made, check=False).returncode:
      pytest.skip(f'{name} cannot be made here')
  run = theirs.rename(tmp_path / 'läuft')
  done = subprocess.run(
    [sys.executable, '-P', '-c', EACH, *(x.format(run=run, out=tmp_path) for x in COMMANDS)],
    env={**environment(), **settings}, capture_output=True, encoding='utf-8', errors='replace', check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  page = (tmp_path / 'report.html').read_text(encoding='utf-8')
  script = (report.PAGE / 'report.js').read_text(encoding='utf-8')
  assert script in page and not script.isascii()
  assert (tmp_path / 'of_mine.py').exists()


@pytest.mark.slow
def test_a_run_goes_on_without_a_utf8_locale(theirs: Path) -> None:
  done = subprocess.run(
    [sys.executable, '-P', '-c', EACH, f'train --run-dir {theirs} --total-steps 128 --override', f'eval {theirs}'],
    env={**environment(), **C}, capture_output=True, encoding='utf-8', check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
