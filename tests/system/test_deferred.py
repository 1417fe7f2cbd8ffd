"""Imports without the plotting libraries that an environment's library imports."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

MAKE = """
import sys
import podrace
from podrace import envs
envs.make('gymnax:CartPole-v1')
heavy = ('matplotlib', 'seaborn', 'scipy', 'pandas')
print(sorted({m.split('.')[0] for m in sys.modules} & set(heavy)))
"""
DRAW = """
from podrace import envs
envs.make('gymnax:Pong-misc')
import sys
from gymnax.environments.misc import pong
import matplotlib.pyplot, matplotlib.colors
assert matplotlib.pyplot.subplots is pong.plt.subplots
assert isinstance(pong.colors.ListedColormap(['red']), matplotlib.colors.ListedColormap)
print(len(pong.sns.color_palette('cubehelix', 5)))
"""


def output_of(code: str, *path: pathlib.Path) -> str:
  command = [sys.executable, '-c', f'import sys; sys.path[:0] = {list(map(str, path))}\n{code}']
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert not done.returncode, done.stderr
  return done.stdout.strip()


def test_an_environment_of_gymnax_imports_no_plotting_library() -> None:
  assert output_of(MAKE) == '[]'


def test_a_deferred_library_is_imported_where_it_draws() -> None:
  assert output_of(DRAW) == '5'


@pytest.mark.parametrize(
  ('use', 'expected'),
  [
    ('import heavy.part as part\nfrom heavy import function', 'deferred'),
    ('import heavy\nprint("once")\nclass Mine(heavy.Base): pass', 'once\nonce\nimported'),
    ('import heavy\nLIMIT = heavy.LIMIT + 1', 'imported'),
  ],
)
def test_a_library_that_needs_it_at_once_is_imported_again(
  use: str, expected: str, tmp_path: pathlib.Path
) -> None:
  (tmp_path / 'heavy').mkdir()
  (tmp_path / 'heavy' / '__init__.py').write_text(
    'LIMIT = 3\ndef function(): return LIMIT\nclass Base: pass\n', encoding='utf-8'
  )
  (tmp_path / 'heavy' / 'part.py').write_text('VALUE = 7\n', encoding='utf-8')
  (tmp_path / 'light.py').write_text(f'{use}\ndef double(x): return 2 * x\n', encoding='utf-8')
  code = """
from podrace.system.deferred import import_without
light = import_without('light', 'heavy')
print('imported' if 'heavy' in sys.modules else 'deferred')
assert light.double(2) == 4
if hasattr(light, 'part'):
  assert (light.part.VALUE, light.function()) == (7, 3)
  import heavy
  assert heavy.LIMIT == 3
if hasattr(light, 'Mine'):
  import heavy
  assert issubclass(light.Mine, heavy.Base)
if hasattr(light, 'LIMIT'):
  assert light.LIMIT == 4
"""
  assert output_of(code, tmp_path) == expected


def test_the_error_of_a_missing_module_names_it() -> None:
  code = """
from podrace.system.deferred import import_without
try:
  import_without('no_such_library', 'matplotlib')
except ModuleNotFoundError as e:
  print(e.name)
"""
  assert output_of(code) == 'no_such_library'
