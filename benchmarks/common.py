"""What the benchmarks share: a record of where and when, timing, agents on environments, workers.

A benchmark writes `benchmarks/results/NAME.json`; every number in the README comes from there.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATH = os.pathsep.join(
  [str(ROOT), str(ROOT / 'benchmarks')]
)  # of processes: podrace, and these modules
RESULTS = ROOT / 'benchmarks' / 'results'
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'gymnax', 'brax', 'jumanji', 'navix', 'craftax', 'envpool',
            'ale-py', 'gymnasium', 'podrace')  # fmt: skip


# --- the record -------------------------------------------------------------------------------


def record(name: str, results: Any, peer: dict[str, str] | None = None) -> None:
  """Writes results/NAME.json: the results, and all that somebody needs to doubt them."""
  RESULTS.mkdir(parents=True, exist_ok=True)
  path = RESULTS / f'{name}.json'
  document = dict(
    name=name,
    **origin(),
    machine=machine(),
    versions=versions(),
    peer_versions=peer,
    results=results,
  )
  path.write_text(json.dumps(document, indent=1) + '\n')
  print(f'wrote {path.relative_to(ROOT)}', flush=True)


def origin() -> dict[str, Any]:
  """When, by which command and of which commit; also for parts of a file that come from several runs."""
  return dict(
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    command=' '.join(['python', os.path.relpath(sys.argv[0], ROOT), *map(portable, sys.argv[1:])]),
    commit=commit(),
  )


def portable(argument: str) -> str:
  """A path of this machine, also behind NAME=, by its last part, which is all that it says to others."""
  name, is_given, path = argument.rpartition('=')
  return f'{name}{is_given}.../{pathlib.Path(path).name}' if os.path.isabs(path) else argument


def commit() -> dict[str, Any]:
  """The commit that is checked out, and whether podrace/ or benchmarks/*.py differ from it.

  Where the tree is a copy without its history, BENCHMARK_COMMIT says what it is a copy of.
  """
  if known := os.environ.get('BENCHMARK_COMMIT'):
    return dict(hash=known, dirty=False)

  def git(*args: str) -> str:
    return subprocess.run(
      ['git', *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()

  changed = git('status', '--porcelain', '--', 'podrace', 'benchmarks/*.py')
  return dict(hash=git('rev-parse', 'HEAD'), dirty=bool(changed))


def machine() -> dict[str, Any]:
  """CPU, cores this process may use, memory, load, and JAX's devices if JAX is in use."""
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
  found = dict(
    cpu=cpu_model(),
    cores=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    memory_gib=round(memory, 1),
    load_1min=round(os.getloadavg()[0], 2),
    system=platform.platform(),
  )
  if 'jax' in sys.modules:
    import jax

    found['devices'] = [f'{d.platform}:{d.device_kind}' for d in jax.devices()]
  return found


def cpu_model() -> str:
  """The processor's name with its family and model, as virtual machines shorten the name."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return platform.processor()
  fields = dict(
    (part.strip() for part in line.split(':', 1)) for line in reversed(lines) if ':' in line
  )
  return (
    f'{fields.get("model name", "?")} family {fields.get("cpu family")} model {fields.get("model")}'
  )


def versions(
  packages: Sequence[str] = PACKAGES,
) -> dict[str, str]:
  """Python's and the packages' versions; those that aren't installed are left out."""
  found = {'python': platform.python_version()}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


# --- peers ------------------------------------------------------------------------------------

PEERS = {  # what is installed in the virtual environment of each
  'rejax': ('rejax==0.1.3', 'gymnax<1'),  # unpacks 5 values of `env.step`; gymnax 1.0 gives 6
  'purejaxrl': ('gymnax<1', 'distrax', 'brax', 'navix'),  # what it imports, for CartPole as well
  'flashbax': ('flashbax==0.1.3',),
  'torch': ('torch==2.13.0', 'stable-baselines3', 'gymnasium', 'ale-py', 'opencv-python-headless'),
  'sf': ('sample-factory==2.1.1', 'torch==2.15.0', 'gymnasium<1.0', 'ale-py', 'opencv-python'),
  'groove': ('jax==0.4.13', 'jaxlib==0.4.13', 'flax==0.6.11', 'optax==0.1.5', 'gymnax==0.0.6',
             'evosax==0.1.4', 'wandb==0.15.9', 'matplotlib==3.7.1', 'numpy<1.25', 'scipy<1.12'),  # as it names them
  'groove-new': ('flax', 'optax', 'gymnax<1', 'chex', 'rich', 'six'),
  'reverb': ('dm-reverb[tensorflow]==0.14.0', 'lz4==4.4.5', 'zstandard==0.25.0'),
}  # fmt: skip
OUR_JAX = ('rejax', 'purejaxrl', 'flashbax', 'groove-new')  # that are compared under the same JAX


def peer(name: str) -> str:
  """The Python of a peer's virtual environment, build/bench-NAME, which is made if it is missing."""
  place = ROOT / 'build' / f'bench-{name}'
  python, installed = str(place / 'bin' / 'python'), place / 'installed'
  packages = list(PEERS[name])
  if name in OUR_JAX:
    packages.append(f'jax=={importlib.metadata.version("jax")}')
  told = ' '.join(packages)
  if not installed.exists() or installed.read_text() != told:
    subprocess.run([sys.executable, '-m', 'venv', str(place)], check=True)
    pip = [python, '-m', 'pip', 'install', '--quiet']
    if subprocess.run([*pip, *packages], check=False).returncode:
      print(f'{told} do not install together: taking the newest jax that does', flush=True)
      subprocess.run([*pip, *PEERS[name]], check=True)
    installed.write_text(told)
  return python


def pins(python: str, *names: str) -> dict[str, str]:
  """The versions of packages in a virtual environment."""
  freeze = [python, '-m', 'pip', 'freeze']
  told = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.split()
  found = ((k.replace('_', '-'), v) for k, _, v in (pin.partition('==') for pin in told))
  return {k: v for k, v in found if k in names}


def last_json(command: Sequence[str], **environment: str) -> Any:
  """What a process prints on its last line."""
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': PATH, **environment},
  )  # fmt: skip
  if done.returncode:
    raise RuntimeError(f'{command} failed:\n{done.stderr}')
  return json.loads(done.stdout.splitlines()[-1])


# --- timing -----------------------------------------------------------------------------------


def summary(values: Sequence[float]) -> dict[str, Any]:
  """The median with what it is the median of."""
  return dict(median=statistics.median(values), min=min(values), max=max(values), n=len(values))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
  """Seconds until everything that `call` returns is computed, and what it returns."""
  import jax

  start = time.perf_counter()
  result = jax.block_until_ready(call())
  return time.perf_counter() - start, result


def repeat(call: Callable[[], Any], repeats: int = 5) -> list[float]:
  """Seconds of each of `repeats` runs, after one that isn't counted."""
  timed(call)
  return [timed(call)[0] for _ in range(repeats)]


def interleave(calls: dict[str, Callable[[], Any]], repeats: int = 5) -> dict[str, list[float]]:
  """Seconds of `repeats` runs of each, taken in turn, so that a busy moment hits all alike."""
  for call in calls.values():
    timed(call)
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(repeats):
    for name, call in calls.items():
      seconds[name].append(timed(call)[0])
  return seconds


def updates_for(
  call: Callable[[int], float], seconds: float, least: int = 1, most: int = 1_000_000
) -> int:
  """How many updates take about `seconds`; `call(n)` runs n of them and returns its seconds."""
  n = least
  while (took := call(n)) < seconds / 4 and n < most:
    n = min(n * 4, most)
  return max(least, min(most, round(n * seconds / took)))


# --- podrace ----------------------------------------------------------------------------------


def bind(agent: Any, env: Any, total_updates: int) -> Any:
  """The agent with its network built for the environment, for a run of that many updates."""
  network = agent.network.bind(env.observation_space, env.action_space)
  return dataclasses.replace(agent, network=network, total_updates=total_updates)


@dataclasses.dataclass
class Run:
  """An agent under Anakin, compiled, with its state; `seconds(n)` makes n updates."""

  runner: Any
  state: Any
  run: Any
  compile_s: dict[str, float]

  @property
  def steps_per_update(self) -> int:
    return self.runner.num_envs * self.runner.unroll_length

  def seconds(self, updates: int) -> float:
    import jax.numpy as jnp

    n = jnp.int32(updates)
    took, self.state = timed(lambda: self.run(self.state, n))
    return took

  def reset(self, seed: int) -> None:
    """Begins anew, from another seed."""
    import jax

    self.state = jax.block_until_ready(self.runner.init(jax.random.split(jax.random.key(seed), 1)))


def start(agent: Any, env: Any, num_envs: int, unroll_length: int, seed: int = 0) -> Run:
  """Compiles a run of a bound agent on all devices, and makes its state."""
  import jax
  import jax.numpy as jnp

  from podrace import topology
  from podrace.architectures import anakin
  from podrace.replay import on_policy

  mesh = topology.learner_mesh()
  own = hasattr(agent, 'memory')
  replay = agent.memory(num_envs, unroll_length) if own else on_policy()
  runner = anakin.Anakin(agent, env, replay, mesh, num_envs, unroll_length)
  keys = jax.random.split(jax.random.key(seed), 1)
  begin = time.perf_counter()
  init = runner.init.lower(keys).compile()
  init_s = time.perf_counter() - begin
  state = jax.block_until_ready(init(keys))
  begin = time.perf_counter()
  run = runner.run.lower(state, jnp.int32(1)).compile()
  return Run(runner, state, run, dict(init=init_s, train=time.perf_counter() - begin))


# --- workers ----------------------------------------------------------------------------------


def free_port() -> int:
  """A port of this machine that nobody listened at just now."""
  with socket.create_server(('127.0.0.1', 0)) as found:
    port: int = found.getsockname()[1]
    return port


class Worker:
  """A process that answers one JSON line with one JSON line, and sleeps in between."""

  def __init__(self, command: Sequence[str], **environ: str):
    self.command = list(command)
    self.process = subprocess.Popen(
      self.command,
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': PATH, 'PYTHONUNBUFFERED': '1', **environ},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def ask(self, **request: Any) -> Any:
    """Sends a request and waits for its answer; raises if the worker has died."""
    assert self.process.stdin and self.process.stdout
    self.process.stdin.write(json.dumps(request) + '\n')
    self.process.stdin.flush()
    line = self.process.stdout.readline()
    if not line:
      raise RuntimeError(f'{self.command} ended with {self.process.wait()}; its error is above')
    return json.loads(line)

  def __enter__(self) -> Worker:
    return self

  def __exit__(self, *error: Any) -> None:
    self.process.stdin.close()
    self.process.wait()


def requests() -> Iterator[dict[str, Any]]:
  """In a worker: the requests, one by one."""
  for line in sys.stdin:
    yield json.loads(line)


def answer(**reply: Any) -> None:
  """In a worker: the answer to the request at hand."""
  print(json.dumps(reply), flush=True)
