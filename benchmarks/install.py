"""Sizes of podrace's extras, and times of `make train` and of `make test`'s set-up from a fresh clone.

    .venv/bin/python benchmarks/install.py sizes
    .venv/bin/python benchmarks/install.py times --python python3.11 python3.12 python3.13

`sizes` installs every extra alone into a new environment and adds up its files. `times` clones the commit that is
checked out, and runs make there with empty caches of uv and pip and no compiled programs. It needs a package index.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import common

EXTRAS = tomllib.loads((common.ROOT / 'pyproject.toml').read_text())['project'][
  'optional-dependencies'
]


def megabytes(folder: Path) -> int:
  """Returns the size of a folder's files; hard links count once."""
  return int(subprocess.check_output(['du', '-sm', str(folder)], text=True).split()[0])


def install(extra: str) -> dict[str, Any]:
  """Installs podrace with an extra into a new environment."""
  package = f'{common.ROOT}[{extra}]' if extra else str(common.ROOT)
  with tempfile.TemporaryDirectory() as folder:
    env = Path(folder) / 'env'
    uv = str(Path(sys.executable).parent / 'uv')
    subprocess.run([uv, 'venv', '--quiet', '--python', sys.executable, str(env)], check=True)
    begin = time.monotonic()
    pins = ['--constraint', str(common.ROOT / 'constraints.txt')]
    subprocess.run(
      [uv, 'pip', 'install', '--quiet', '--python', str(env / 'bin' / 'python'), *pins, '--editable', package],
      cwd=common.ROOT, check=True,
    )  # fmt: skip
    return dict(megabytes=megabytes(env), cached_s=round(time.monotonic() - begin, 1))


def sizes(_: argparse.Namespace) -> dict[str, Any]:
  """Measures every extra alone; '' is podrace without extras."""
  result = {}
  for extra in ['', *EXTRAS]:
    result[extra] = install(extra)
    print(extra or 'podrace', result[extra], flush=True)
  return result


def make(target: str, python: str) -> dict[str, Any]:
  """Runs a target of make in a fresh clone, with empty caches, and measures its time."""
  with tempfile.TemporaryDirectory() as folder:
    clone = Path(folder) / 'podrace'
    subprocess.run(['git', 'clone', '--quiet', str(common.ROOT), str(clone)], check=True)
    environ = {k: v for k, v in os.environ.items() if k not in ('VIRTUAL_ENV', 'PYTHONPATH')}
    environ |= dict(HOME=folder, UV_CACHE_DIR=f'{folder}/uv', PIP_CACHE_DIR=f'{folder}/pip')
    environ |= dict(XDG_CACHE_HOME=f'{folder}/cache')
    begin = time.monotonic()
    command = ['make', target, f'PYTHON={python}', 'RUN_DIR=run']
    output = subprocess.check_output(command, cwd=clone, env=environ, text=True)
    row = dict(seconds=round(time.monotonic() - begin, 1), megabytes=megabytes(clone / '.venv'))
    if returns := re.findall(r'return (-?[\d.]+)', output):
      row['episode_return'] = float(returns[-1])
    script = 'import jax, sys; print(sys.version.split()[0], jax.__version__)'
    versions = subprocess.check_output([clone / '.venv/bin/python', '-c', script], text=True)
    return dict(zip(('python', 'jax'), versions.split(), strict=True)) | row


def times(args: argparse.Namespace) -> list[dict[str, Any]]:
  """Measures `make train` and the set-up of `make test` with each Python."""
  result = []
  for python in args.python:
    for target in ('train', 'setup'):
      runs = []
      for _ in range(args.repeats):
        runs.append(make(target, python))
        print(target, runs[-1], flush=True)
      median = statistics.median(run['seconds'] for run in runs)
      versions = dict(python=runs[0]['python'], jax=runs[0]['jax'])
      result.append(dict(target=target, **versions, median_s=median, runs=runs))
  return result


def main() -> None:
  """Measures and records."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('case', choices=['sizes', 'times'])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--python', nargs='+', default=['python3'], help='of the new environments')
  args = parser.parse_args()
  measure = dict(sizes=sizes, times=times)[args.case]
  common.record(f'install_{args.case}', measure(args))


if __name__ == '__main__':
  main()
