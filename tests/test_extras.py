"""The extras: each is enough for its purpose, alone in a new environment, and its lack is told."""

from __future__ import annotations

import importlib.abc
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import ROOT

from podrace.distributed import net
from podrace.envs.host import base as host
from podrace.experiments import plot
from podrace.experiments.sweep import proposals
from podrace.launch.engines import ray
from podrace.policy import onnx
from podrace.run import sinks
from podrace.run.video import film
from podrace.system.importing import LIBRARIES

DECLARED = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
GROUPS = {'cuda', 'envs', 'docs', 'dev'}  # of other extras, for developers, or of several GB
ENVS = {
  'gymnax': ('gymnax:CartPole-v1', 'gymnax:Breakout-MinAtar', 'gymnax:Reacher-misc'),
  'brax': ('brax:inverted_pendulum',), 'jumanji': ('jumanji:Snake-v1',),
  'navix': ('navix:Navix-Empty-5x5-v0',), 'craftax': ('craftax:Craftax-Classic-Symbolic-v1',),
  'pgx': ('pgx:tic_tac_toe',), 'ale': ('ale:pong',), 'envpool': ('envpool:CartPole-v1',),
}  # fmt: skip
# What an extra is for, as a program.
PROGRAMS = {
  'remote': 'from podrace.distributed import net; net.require(); from podrace import cli; cli.main(["keys", "new", "keys"])',
  'ray': 'import ray\nfrom ray.util import placement_group, remove_placement_group',
  'plot': 'from pathlib import Path\nfrom podrace.experiments import plot\nplot.check_out(Path("a.png")); plot._figure(1, 1, 4, 3)',
  'sweep': 'from podrace.experiments.sweep import proposals; import optuna; proposals.check_optuna(); optuna.create_study()',
  'onnx': 'from podrace.policy import onnx; assert not onnx.why_not({"network": {}}); import onnx.helper',
  'video': 'from podrace.run.video import film; film.check_libraries()',
  'tensorboard': 'from podrace.run import metrics; sinks.check_sinks(["tensorboard"])',
  'wandb': 'from podrace.run import metrics; sinks.check_sinks(["wandb"])',
} | {
  extra: 'from podrace.envs.host import base\n' + '\n'.join(f'base.make({name!r})' for name in names)
  for extra, names in ENVS.items()
}  # fmt: skip


def of_ray() -> None:
  with ray.cluster():
    pass


def of_onnx() -> None:
  if reason := onnx.why_not({'network': {}}):
    raise ValueError(reason)


USES: dict[str, Callable[[], Any]] = {
  'remote': net.require,
  'ray': of_ray,
  'plot': lambda: plot.check_out(Path('a.png')),
  'sweep': proposals.check_optuna,
  'onnx': of_onnx,
  'video': film.check_libraries,
  'tensorboard': lambda: sinks.check_sinks(['tensorboard']),
  'wandb': lambda: sinks.check_sinks(['wandb']),
} | {extra: lambda name=names[0]: host.make(name) for extra, names in ENVS.items()}


def test_every_extra_is_tested() -> None:
  assert set(PROGRAMS) == set(USES) == set(DECLARED) - GROUPS


class Failing(importlib.abc.MetaPathFinder):
  """A module that is there, and whose import fails."""

  def __init__(self, name: str, error: Exception) -> None:
    self.name, self.error = name, error

  def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
    if name == self.name:
      raise self.error


@pytest.mark.parametrize('extra', USES)
@pytest.mark.parametrize(
  ('error', 'is_installed'),
  [
    (None, False),
    (ModuleNotFoundError("No module named 'six'", name='six'), True),
    (ImportError('libGL.so.1: no such file'), True),
    (AttributeError("module 'jax' has no attribute 'core'"), True),
  ],
)
def test_a_library_that_cannot_be_imported(
  extra: str, error: Exception | None, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  (library, *_) = LIBRARIES.get(extra, (extra,))
  for name in list(sys.modules):
    if name.partition('.')[0] == library or (name.rpartition('.')[2] == extra and 'envs' in name):
      monkeypatch.delitem(sys.modules, name)
  missing = error or ModuleNotFoundError(f'No module named {library!r}', name=library)
  monkeypatch.setattr(sys, 'meta_path', [Failing(library, missing), *sys.meta_path])
  with pytest.raises(ValueError) as failure:
    USES[extra]()
  message = str(failure.value)
  assert f"pip install {'--upgrade ' * is_installed}'podrace[{extra}]'" in message
  assert str(missing) in message and (f"needs the extra '{extra}'" in message) != is_installed


@pytest.mark.slow
@pytest.mark.parametrize('extra', PROGRAMS)
def test_an_extra_is_enough_in_a_new_environment(extra: str, tmp_path: Path) -> None:
  source, env = tmp_path / 'source', tmp_path / 'env'
  source.mkdir()  # building in place would leave things there
  names = ['pyproject.toml', 'README.md', 'LICENSE', 'podrace']
  subprocess.run(['cp', '-r', *(str(ROOT / n) for n in names), str(source)], check=True)
  python, package = str(env / 'bin' / 'python'), f'podrace[{extra}] @ {source.as_uri()}'
  pins = ['--quiet', '--constraint', str(ROOT / 'constraints.txt'), package]
  if uv := shutil.which('uv'):
    make, install = [uv, 'venv', '--quiet', '--python', sys.executable], [uv, 'pip', 'install', '--python', python]  # fmt: skip
  else:
    make, install = [sys.executable, '-m', 'venv'], [python, '-m', 'pip', 'install']
  subprocess.run([*make, str(env)], check=True)
  subprocess.run([*install, *pins], check=True)
  plain = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  done = subprocess.run(
    [python, '-c', PROGRAMS[extra]], cwd=tmp_path, env=plain, capture_output=True, text=True, check=False
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
