"""Environments in C: `c:PATH` of a .c file or a shared library, or one of podrace's by name.

An environment steps in this process. With `isolate=true` it steps in worker processes, which a
crash ends instead of the run. Other options go to the environment, as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from podrace.envs.env_names import full_name, nearest, read_options
from podrace.envs.host import worker as w
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.infos import Infos
from podrace.envs.host.worker_pool import WorkerPool
from podrace.envs.libraries import NATIVE_EXAMPLES
from podrace.envs.native.build import HERE, compile_library
from podrace.envs.native.library import EnvironmentLibrary, NativeSpec
from podrace.envs.native.pool import NativeInfos, NativePool, shared_pool
from podrace.envs.native.trial import run_trial
from podrace.envs.options import Value
from podrace.envs.spaces import leaves
from podrace.errors import UnknownName
from podrace.types import HostEnvironment

SUFFIXES = ('.c', '.so', '.dylib')
DEFAULTS: dict[str, Value] = dict(isolate=False)


def make(name: str, options: Mapping[str, Value]) -> HostSpec:
  """Return an environment by the path of its .c file or shared library.

  Raises:
    UnknownName: if there is no such file, or an option is no JSON.
    UsageError: if it does not compile, refuses an option, or its sizes disagree with its spaces.
  """
  label = full_name('c', name, options, DEFAULTS)
  path = locate(name)
  ours = {k: v for k, v in options.items() if k in DEFAULTS}
  isolate = read_options(f'c:{name}', ours, DEFAULTS)['isolate']
  text = options_text(name, options)
  library = f'c:{name}'
  make_pool: Callable[[PoolArgs], HostEnvironment]
  infos: Infos | NativeInfos
  shared = compiled(path, library)
  if isolate or name not in NATIVE_EXAMPLES:  # which may crash or exit
    spec = run_trial(library, shared, text)
  if isolate:
    infos = Infos()
    make_pool = functools.partial(_isolated_pool, label, spec, infos)
  else:
    opened, infos = EnvironmentLibrary(shared, library), NativeInfos()
    shared_pool(library)
    spec = opened.spec(text)
    make_pool = functools.partial(NativePool, opened, spec, text, infos)
  host = HostSpec(
    name=label,
    observation_space=spec.observation_space(),
    action_space=spec.action.space(),
    make=make_pool,
    metrics=infos.means,
  )
  if name in NATIVE_EXAMPLES:
    return host

  def try_out(deadline: float) -> None:
    run_trial(library, compiled(path, library), text, deadline)

  return dataclasses.replace(host, try_out=try_out)


def locate(name: str) -> Path:
  """Return the file of a name: a path, or an example that comes with podrace."""
  if name in NATIVE_EXAMPLES:
    return HERE / 'examples' / f'{name}.c'
  try:
    path = Path(name).expanduser()
    is_file = path.is_file()
  except (OSError, RuntimeError) as error:  # a name too long; ~NAME of no user
    raise UnknownName(f'c:{name}: {error}') from error
  if path.suffix not in SUFFIXES:
    raise UnknownName(
      f'c:{name} is no path of a .c or .so file{nearest(name, NATIVE_EXAMPLES)}; podrace itself '
      f'has {", ".join(f"c:{x}" for x in NATIVE_EXAMPLES)}'
    )
  if not is_file:
    raise UnknownName(f'c:{name}: there is no file {path.absolute()}')
  return path


def compiled(path: Path, name: str) -> Path:
  """Return the shared library of a file, which is compiled if it is in C."""
  return compile_library(path, name) if path.suffix == '.c' else path


def options_text(name: str, options: Mapping[str, Value]) -> bytes:
  """Return the environment's own options as a JSON object."""
  values = {k: v for k, v in options.items() if k not in DEFAULTS}
  try:
    return json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
  except ValueError as error:
    raise UnknownName(f'c:{name}: options are passed as JSON: {error}') from error


def _isolated_pool(label: str, spec: NativeSpec, infos: Infos, args: PoolArgs) -> WorkerPool:
  space = spec.observation_space()
  parts = [*leaves(space), (w.ACTION, spec.action.space())]
  fields: list[w.Field] = [(n, np.dtype(s.dtype).str, list(s.shape)) for n, s in parts]
  fields += [(w.REWARD, '<f4', []), (w.SCORE, '<f4', []), *w.ENDS]
  args = dataclasses.replace(args, saves=False)
  return WorkerPool(label, fields, space, args, infos, maker='podrace.envs.native.isolated')
