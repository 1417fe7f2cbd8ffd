"""The extras: each is enough for its purpose, alone in a new environment, and its lack is told."""

from __future__ import annotations

import importlib.abc
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import ROOT

from podrace.distributed import net
from podrace.envs.host import base as host
from podrace.envs.logs import writing
from podrace.experiments import plot
from podrace.experiments.sweep import proposals
from podrace.launch.engines import ray
from podrace.policy import onnx
from podrace.run import sinks
from podrace.run.video import film
from podrace.system.importing import LIBRARIES

DECLARED = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
GROUPS = {
  'cuda',
  'cuda12',
  'tpu',
  'envs',
  'docs',
  'dev',
}  # of other extras, for developers, or of several GB
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
  'logs': 'from pathlib import Path\nfrom podrace.envs.logs import writing; writing.check_target(Path("new"))',
  'onnx': 'from podrace.policy import onnx; assert not onnx.why_not({"network": {}}); import onnx.helper',
  'video': 'from podrace.run.video import film; film.check_libraries()',
  'tensorboard': 'from podrace.run import sinks; sinks.check_sinks(["tensorboard"])',
  'wandb': 'from podrace.run import sinks; sinks.check_sinks(["wandb"])',
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
  'logs': lambda: writing.check_target(Path('new')),
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


UV = str(Path(sys.executable).with_name('uv'))


def run(command: list[str], folder: Path) -> str:
  plain = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout


def new_environment(folder: Path, package: str) -> Path:
  """Returns the directory of commands of a new environment, in which `package` is installed."""
  run([UV, 'venv', '--quiet', '--python', sys.executable, 'env'], folder)
  pins = ['--quiet', '--constraint', str(ROOT / 'constraints.txt'), package]
  run([UV, 'pip', 'install', '--python', 'env/bin/python', *pins], folder)
  return folder / 'env' / 'bin'


@pytest.fixture(scope='module')
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
  """The sdist, and the wheel that is built from it."""
  folder = tmp_path_factory.mktemp('distributions')
  source = folder / 'source'  # a build in place would leave files there
  tracked = run(['git', '-C', str(ROOT), 'ls-files', '-z'], folder).split('\0')[:-1]
  for name in tracked:
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, source / name)
  run([UV, 'build', '--quiet', '--out-dir', str(folder), str(source)], folder)
  (sdist,), (wheel,) = folder.glob('*.tar.gz'), folder.glob('*.whl')
  return sdist, wheel


@pytest.mark.slow
def test_the_wheel_is_complete_and_has_only_podrace(distributions: tuple[Path, Path]) -> None:
  names = set(zipfile.ZipFile(distributions[1]).namelist())
  tracked = run(['git', '-C', str(ROOT), 'ls-files', 'podrace'], ROOT).split()
  assert set(tracked) == {name for name in names if not name.startswith('podrace-0.1.0.dist-info/')}


@pytest.mark.slow
@pytest.mark.parametrize('kind', [0, 1], ids=['sdist', 'wheel'])
def test_a_distribution_trains(kind: int, distributions: tuple[Path, Path], tmp_path: Path) -> None:
  commands = new_environment(tmp_path, f'podrace @ {distributions[kind].as_uri()}')
  run([str(commands / 'podrace'), 'train', '--total-steps', '20_000', '--run-dir', 'run'], tmp_path)
  assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['step'] >= 20_000
  run([str(commands / 'podrace'), 'init', 'agent', 'Mine'], tmp_path)
  run([str(commands / 'podrace'), 'report', 'run'], tmp_path)
  assert (tmp_path / 'my_agent.py').exists() or (tmp_path / 'mine.py').exists()


@pytest.mark.slow
@pytest.mark.parametrize('extra', PROGRAMS)
def test_an_extra_is_enough_in_a_new_environment(
  extra: str, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
  commands = new_environment(tmp_path, f'podrace[{extra}] @ {distributions[1].as_uri()}')
  run([str(commands / 'python'), '-c', PROGRAMS[extra]], tmp_path)


def test_the_dockerfile() -> None:
  """It copies files that exist and that .dockerignore lets through, and its extra is declared."""
  folder = ROOT / 'examples' / 'docker'
  text = (folder / 'Dockerfile').read_text().replace('\\\n', ' ')
  lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith('#')]
  words = {'FROM', 'ARG', 'WORKDIR', 'COPY', 'RUN', 'ENV', 'ENTRYPOINT', 'CMD'}
  assert lines[0][0] == 'FROM' and {word for word, _ in lines} <= words
  allowed = {
    line[1:] for line in (ROOT / '.dockerignore').read_text().splitlines() if line[0] == '!'
  }
  copied = {name for word, rest in lines if word == 'COPY' for name in rest.split()[:-1]}
  assert copied == allowed and all((ROOT / name).exists() for name in copied)
  (extras,) = (rest.partition('=')[2] for word, rest in lines if word == 'ARG')
  assert set(extras.split(',')) <= set(DECLARED)
  assert json.loads(next(rest for word, rest in lines if word == 'ENTRYPOINT')) == ['podrace']
