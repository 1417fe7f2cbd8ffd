"""podrace init: write a file to start from, and its test."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from pathlib import Path

from podrace.errors import UsageError
from podrace.system.files import UTF8, write_whole
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text

HEADER = Path(__file__).parents[1] / 'envs' / 'native'  # directory of podrace_env.h
TEMPLATES = Path(__file__).parent / 'templates'
KINDS = {
  'agent': 'podrace train --agent {file}:{name}',
  'env': 'podrace train --env python:{file}.make',
  'network': 'podrace train --agent {file}:Agent',
  'cenv': 'podrace train --env c:{file}.c --architecture sebulba',
}
SUFFIXES = {'cenv': '.c'}  # of the file that is no Python
COMMAND = Command(
  'init',
  'agent|env|network|cenv NAME [OPTIONS]',
  'write a working file and its test to start from: an agent, an environment in JAX, a network, or '
  'an environment in C (cenv)',
  (Option('--dir', 'DIR', 'directory of the files', '.'),),
  'NAME is the name of the class: for MyAgent the files are my_agent.py and test_my_agent.py, for '
  'an environment in C my_agent.c and test_my_agent.py.',
)


def run(args: list[str]) -> int:
  """Write both files, or none."""
  options = Options(args, COMMAND)
  if len(options.arguments) != 2 or options.arguments[0] not in KINDS:
    words = ' '.join(options.arguments) or 'nothing'
    raise UsageError(f'init takes agent, env, network or cenv, and a name: not {words}')
  kind, word = options.arguments
  name, file = class_and_file(word)
  folder = Path(options.text('--dir'))
  if not folder.is_dir():
    raise UsageError(f'--dir {folder} is no directory')
  suffix = SUFFIXES.get(kind, '.py')
  targets = {
    folder / f'{file}{suffix}': f'{kind}{suffix}',
    folder / f'test_{file}.py': f'test_{kind}.py',
  }
  if existing := [str(path) for path in targets if os.path.lexists(path)]:
    raise UsageError(f'{" and ".join(existing)} exists already: give another name')
  if importlib.util.find_spec(file) is not None:
    raise UsageError(
      f'there is a module {file} already, which {file}.py would hide: give another name'
    )
  texts = {
    path: _fill((TEMPLATES / template).read_text(encoding=UTF8), file, name)
    for path, template in targets.items()
  }
  try:
    for path, text in texts.items():
      write_whole(path, text)
  except OSError:
    for path in targets:
      path.unlink(missing_ok=True)
    raise
  for path in targets:
    print_text(f'wrote {path}')
  enter = '' if folder.samefile('.') else f'cd {shlex.quote(str(folder))} && '
  print_text(f'train: {enter}{KINDS[kind].format(file=file, name=name)}')
  print_text(f'test:  {enter}python -m pytest test_{file}.py')
  return 0


def _fill(text: str, file: str, name: str) -> str:
  """Return a template with its names."""
  text = re.sub(r'FILE(?=[.:_ ])', file, text).replace('NAME', name)
  return text.replace('HEADER', str(HEADER))


def class_and_file(word: str) -> tuple[str, str]:
  """Return MyAgent and my_agent for either of the two.

  Raises:
    UsageError: if it is no name in Python.
  """
  name = ''.join(part[:1].upper() + part[1:] for part in word.split('_'))
  file = re.sub(r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name).lower()
  if not word.isidentifier() or {word, file} & {*keyword.kwlist} or word.startswith('_'):
    raise UsageError(
      f'{word!r} is no name for a class and its module: take letters, digits and _, and no word of '
      'Python'
    )
  return name, file
