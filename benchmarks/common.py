"""Shared parts of the benchmarks: arguments, result files, processes, peers and statistics.

A benchmark writes `benchmarks/results/NAME.json`. Every number in the README comes from such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATH = os.pathsep.join([str(ROOT), str(ROOT / 'benchmarks')])  # PYTHONPATH of processes
RESULTS = pathlib.Path(os.environ.get('BENCHMARK_RESULTS') or ROOT / 'benchmarks' / 'results')
PODRACE = (sys.executable, '-m', 'podrace')
PACKAGES = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'flax', 'optax', 'gymnax', 'brax', 'jumanji', 'navix', 'craftax', 'envpool',
            'ale-py', 'gymnasium', 'podrace')  # fmt: skip


def arguments(doc: str | None, cases: Iterable[str] = (), **options: Any) -> argparse.Namespace:
  """Parses the command line: names of cases (none: all), and options.

  An option is NAME=default or NAME=(default, help). `--worker` is for processes that a
  benchmark starts itself.
  """
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
  if names := list(cases):
    parser.add_argument('cases', nargs='*', metavar='CASE', help=f'none: all. {"; ".join(names)}')
  parser.add_argument('--worker', nargs='*', help=argparse.SUPPRESS)
  for name, option in options.items():
    default, text = option if isinstance(option, tuple) else (option, None)
    flag = f'--{name.replace("_", "-")}'
    if default is False:
      parser.add_argument(flag, action='store_true', help=text)
    elif isinstance(default, list):
      parser.add_argument(flag, nargs='+', type=type(default[0]), default=default, help=text)
    else:
      parser.add_argument(flag, type=type(default), default=default, help=text)
  args = parser.parse_args()
  if names:
    if unknown := set(args.cases) - set(names):
      parser.error(f'no case {", ".join(sorted(unknown))}, only {"; ".join(names)}')
    args.cases = args.cases or names
  return args


def record(
  name: str, results: Any, peer: dict[str, Any] | None = None, earlier: dict[str, Any] | None = None
) -> None:
  """Writes results/NAME.json: the results with their machine, versions, commit and command.

  `earlier` has the same of cases that another command measured.
  """
  RESULTS.mkdir(parents=True, exist_ok=True)
  path = RESULTS / f'{name}.json'
  document = dict(name=name, **origin(), machine=machine(), versions=versions(), peer_versions=peer, results=results)  # fmt: skip
  if earlier:
    document['earlier'] = earlier
  path.write_text(json.dumps(document, indent=1) + '\n')
  print(f'wrote {portable(str(path))}', flush=True)


def known(name: str) -> dict[str, Any]:
  """Returns the results that results/NAME.json has; none if there is no file."""
  path = RESULTS / f'{name}.json'
  return json.loads(path.read_text())['results'] if path.exists() else {}


def keep(
  name: str, case: str, result: Any, order: Iterable[str] = (), peer: dict[str, Any] | None = None
) -> dict[str, Any]:
  """Adds the result of a case to the other cases in results/NAME.json. Returns all results.

  Cases that were measured on another machine or commit keep them, under `earlier`.
  """
  results = known(name) | {case: result}
  if keys := list(order):
    results = {key: results[key] for key in keys if key in results}
  record(name, results, peer, _earlier(name, set(results) - {case}))
  return results


def _earlier(name: str, cases: set[str]) -> dict[str, Any]:
  """Returns machine, versions and commit of cases in results/NAME.json that differ from the present."""
  path = RESULTS / f'{name}.json'
  if not path.exists():
    return {}
  document = json.loads(path.read_text())
  labels = dict(machine=_steady(document['machine']), versions=document['versions'], commit=document['commit'])  # fmt: skip
  now = dict(machine=_steady(machine()), versions=versions(), commit=commit())
  each = {case: document.get('earlier', {}).get(case, labels) for case in sorted(cases)}
  return {case: label for case, label in each.items() if label != now}


def _steady(about: dict[str, Any]) -> dict[str, Any]:
  """Returns the part of `machine` that stays: not its load, nor the devices of a process."""
  return {k: v for k, v in about.items() if k not in ('load_1min', 'devices')}


def child_environ(**environ: str) -> dict[str, str]:
  """Returns the environment of a process that finds this checkout before its PYTHONPATH.

  It takes memory of a GPU as it needs it, so that several processes fit one.
  """
  path = os.pathsep.join(filter(None, [PATH, os.environ.get('PYTHONPATH', '')]))
  shared = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  return {**shared, **os.environ, 'PYTHONPATH': path, **environ}


def origin() -> dict[str, Any]:
  """Returns date, command and commit, for a file or for one of its cases."""
  return dict(
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    command=' '.join(['python', os.path.relpath(sys.argv[0], ROOT), *map(portable, sys.argv[1:])]),
    commit=commit(),
  )


def portable(argument: str) -> str:
  """Shortens an absolute path, also behind NAME=, to its last part."""
  name, is_given, path = argument.rpartition('=')
  return f'{name}{is_given}.../{pathlib.Path(path).name}' if os.path.isabs(path) else argument


def head(checkout: pathlib.Path = ROOT) -> str:
  """Returns the commit that is checked out."""
  git = ['git', '-C', str(checkout), 'rev-parse', 'HEAD']
  return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def commit() -> dict[str, Any]:
  """Returns the commit, and whether podrace/ or benchmarks/*.py differ from it.

  BENCHMARK_COMMIT is the commit of a copy of the tree that has no history.
  """
  if known := os.environ.get('BENCHMARK_COMMIT'):
    return dict(hash=known, dirty=False)
  git = ['git', 'status', '--porcelain', '--', 'podrace', 'benchmarks/*.py']
  changed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
  return dict(hash=head(), dirty=bool(changed.strip()))


def machine() -> dict[str, Any]:
  """Returns CPU, usable cores, memory, load, and JAX's devices if JAX is in use."""
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
  about: dict[str, Any] = dict(
    cpu=cpu_model(),
    cores=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    memory_gib=round(memory, 1),
    load_1min=round(os.getloadavg()[0], 2),
    system=platform.platform(),
  )
  if 'jax' in sys.modules:
    import jax

    about['devices'] = [f'{d.platform}:{d.device_kind}' for d in jax.devices()]
  return about


def cpu_model() -> str:
  """Returns the processor's name with family and model, as virtual machines shorten the name."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return platform.processor()
  pairs = (line.split(':', 1) for line in reversed(lines) if ':' in line)
  fields = {key.strip(): value.strip() for key, value in pairs}
  return (
    f'{fields.get("model name", "?")} family {fields.get("cpu family")} model {fields.get("model")}'
  )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
  """Returns the versions of Python and of the packages that are installed."""
  installed = {'python': platform.python_version()}
  for package in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      installed[package] = importlib.metadata.version(package)
  return installed


def pyplot(**settings: Any) -> Any:
  """Returns matplotlib.pyplot, which draws to files that have equal bytes each time."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  look = {'svg.hashsalt': 'podrace', 'axes.spines.top': False, 'axes.spines.right': False}
  matplotlib.rcParams.update(look | settings)
  return plt


def run(command: Sequence[str], **environ: str) -> str:
  """Runs a process and returns its output; raises with its errors if it fails."""
  env = child_environ(**environ)
  done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
  if done.returncode:
    raise RuntimeError(f'{command} ended with {done.returncode}:\n{done.stderr[-3000:]}')
  return done.stdout


def last_json(command: Sequence[str], **environ: str) -> Any:
  """Returns the JSON of the last line that a process prints."""
  return json.loads(run(command, **environ).splitlines()[-1])


def podrace(*args: Any) -> str:
  """Runs `podrace ARGS` and returns its output."""
  return run([*PODRACE, *map(str, args)])


def evaluate_run(run_dir: pathlib.Path, *args: Any) -> dict[str, Any]:
  """Returns the line of JSON that ends `podrace eval RUN_DIR ARGS`."""
  return json.loads(podrace('eval', run_dir, *args).splitlines()[-1])


def start_podrace(log: pathlib.Path, *args: Any) -> subprocess.Popen[bytes]:
  """Starts `podrace ARGS` with its output in a file."""
  command = [*PODRACE, *map(str, args)]
  env = child_environ()
  return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log.open('a'), stderr=subprocess.STDOUT)  # fmt: skip


def read_json(path: pathlib.Path) -> Any:
  """Returns the contents of a JSON file."""
  return json.loads(path.read_text())


def metrics(run_dir: pathlib.Path, name: str = 'metrics.jsonl') -> list[dict[str, Any]]:
  """Returns the complete lines of a run's metrics, also while it writes them."""
  path = run_dir / name
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith('\n')]


def summary_of(run_dir: pathlib.Path) -> dict[str, Any]:
  """Returns the summary of a run that has ended."""
  return read_json(run_dir / 'summary.json')


def stop(process: subprocess.Popen[Any], signum: int = signal.SIGTERM) -> int:
  """Sends a signal and waits for the end. Returns the exit code."""
  process.send_signal(signum)
  return process.wait()


def free_port() -> int:
  """Returns a port of this machine at which nothing listened just now."""
  with socket.create_server(('127.0.0.1', 0)) as listening:
    port: int = listening.getsockname()[1]
    return port


class Worker:
  """A process that answers each line of JSON with a line of JSON, and sleeps in between.

  Owner: the caller, by `close` or `with`. Ends when its input closes. Raises RuntimeError if it dies.
  """

  def __init__(self, command: Sequence[str], **environ: str):
    self.command = list(command)
    env = child_environ(PYTHONUNBUFFERED='1') | environ
    self.process = subprocess.Popen(
      self.command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

  def ask(self, **request: Any) -> Any:
    """Sends a request and waits for its answer."""
    assert self.process.stdin is not None
    self.process.stdin.write(json.dumps(request) + '\n')
    self.process.stdin.flush()
    return self.read()

  def read(self) -> Any:
    """Waits for an answer, such as the first line of a server that was not asked for it."""
    assert self.process.stdout is not None
    if not (line := self.process.stdout.readline()):
      raise RuntimeError(f'{self.command} ended with {self.process.wait()}; its error is above')
    return json.loads(line)

  def close(self) -> None:
    assert self.process.stdin is not None
    self.process.stdin.close()
    self.process.wait()

  def __enter__(self) -> Worker:
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()


def requests() -> Iterator[dict[str, Any]]:
  """In a worker: yields the requests, one by one."""
  for line in sys.stdin:
    yield json.loads(line)


def answer(**reply: Any) -> None:
  """In a worker: answers the request at hand."""
  print(json.dumps(reply), flush=True)


def serve(packages: Sequence[str] = PACKAGES, **handlers: Callable[..., dict[str, Any]]) -> None:
  """In a worker: answers each request by the function that `do` names, and `versions`."""
  handlers.setdefault('versions', lambda: versions(packages))
  for request in requests():
    answer(**handlers[request.pop('do')](**request))


PEERS = {  # packages of the virtual environment of each
  'rejax': ('rejax==0.1.3', 'gymnax<1'),  # unpacks 5 values of `env.step`; gymnax 1.0 gives 6
  'purejaxrl': ('gymnax<1', 'distrax', 'brax', 'navix'),  # its imports, for CartPole as well
  'flashbax': ('flashbax==0.1.3',),
  'torch': ('torch==2.13.0', 'stable-baselines3', 'gymnasium', 'ale-py', 'opencv-python-headless'),
  'sf': ('sample-factory==2.1.1', 'torch==2.15.0', 'gymnasium<1.0', 'ale-py', 'opencv-python'),
  'groove': ('jax==0.4.13', 'jaxlib==0.4.13', 'flax==0.6.11', 'optax==0.1.5', 'gymnax==0.0.6',
             'evosax==0.1.4', 'wandb==0.15.9', 'matplotlib==3.7.1', 'numpy<1.25', 'scipy<1.12'),  # as it names them
  'groove-new': ('flax', 'optax', 'gymnax<1', 'chex', 'rich', 'six'),
  'pufferlib': ('pufferlib==3.0.0',),
  'reverb': ('dm-reverb[tensorflow]==0.14.0', 'lz4==4.4.5', 'zstandard==0.25.0'),
}  # fmt: skip
OUR_JAX = ('rejax', 'purejaxrl', 'flashbax', 'groove-new')  # are compared under the same JAX


def peer(name: str) -> str:
  """Returns the Python of a peer's virtual environment, build/bench-NAME. Makes it if it is missing."""
  place = ROOT / 'build' / f'bench-{name}'
  python, installed = str(place / 'bin' / 'python'), place / 'installed'
  packages = list(PEERS[name])
  if name in OUR_JAX:
    packages.append(f'jax=={importlib.metadata.version("jax")}')
  text = ' '.join(packages)
  if not installed.exists() or installed.read_text() != text:
    subprocess.run([sys.executable, '-m', 'venv', str(place)], check=True)
    pip = [python, '-m', 'pip', 'install', '--quiet']
    if subprocess.run([*pip, *packages], check=False).returncode:
      print(f'{text} do not install together: taking the newest jax that does', flush=True)
      subprocess.run([*pip, *PEERS[name]], check=True)
    installed.write_text(text)
  return python


def pins(python: str, *names: str) -> dict[str, str]:
  """Returns the versions of packages in a virtual environment."""
  lines = run([python, '-m', 'pip', 'freeze']).split()
  pairs = ((k.replace('_', '-'), v) for k, _, v in (line.partition('==') for line in lines))
  return {k: v for k, v in pairs if k in names}


def versus(
  sides: dict[str, list[str]], rounds: int, setup: dict[str, Any], run: dict[str, Any],
  then: Callable[[dict[str, Any]], None] = lambda answer: None,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
  """Asks workers to set up and to run; `then` gets each answer.

  Each side has a new process in each round, the sides in turn.
  """
  answers: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
  for i in range(rounds):
    for side in list(sides)[:: 1 - 2 * (i % 2)]:
      with Worker(sides[side]) as worker:
        answers[side].append(worker.ask(do='setup', **setup) | worker.ask(do='run', seed=i, **run))
        then(answers[side][-1])
  return answers


def against_fastest(
  name: str, ours: Sequence[float], theirs: dict[str, list[float]]
) -> dict[str, Any]:
  """Compares the median of a rate with that of the fastest setting of the peers."""
  medians = {k: statistics.median(v) for k, v in theirs.items()}
  fastest = max(medians, key=lambda k: medians[k])
  ratio = statistics.median(ours) / medians[fastest]
  print(f'{name}: podrace {statistics.median(ours):,.0f}/s, {fastest} {medians[fastest]:,.0f}/s; {ratio:.2f}x', flush=True)  # fmt: skip
  return dict(podrace=summary(ours), peers=summaries(theirs), ratio_to_fastest=ratio)


def summary(values: Sequence[float]) -> dict[str, Any]:
  """Returns the median, and the range and number of its values."""
  return dict(median=statistics.median(values), min=min(values), max=max(values), n=len(values))


def summaries(values: Mapping[Any, Sequence[float]]) -> dict[Any, dict[str, Any]]:
  """Returns the summary of each list."""
  return {key: summary(each) for key, each in values.items()}


def columns(rows: Sequence[dict[str, Any]], *keys: str) -> dict[str, dict[str, Any]]:
  """Returns the summaries of numbers that stand under the same keys in all rows."""
  return {key: summary([row[key] for row in rows]) for key in keys or rows[0]}


def pair_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
  """Returns the median of the ratios of pairs."""
  return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
