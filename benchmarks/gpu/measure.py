"""Measure podrace on one GPU within a given time, the most valuable items first.

    python benchmarks/gpu/measure.py [GROUP ...] [--budget SECONDS] [--ahead SECONDS] [--tiny]
    python benchmarks/gpu/measure.py --merge FOLDER

First the smoke tests run and programs are compiled, several at once (`--ahead`). Then the groups are measured one after
the other, each in a process and a time limit of its own. results.json is written after each item, in $OUT and in
--state, from which a second call continues. An item that fails, hangs or crashes leaves the other items alone.

`--merge` puts results.json of FOLDER into benchmarks/results/gpu.json, with the card of each result.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from child import child
from groups import FIRST, groups
from session import PATH, ROOT, TINY

HERE = pathlib.Path(__file__).resolve()


class Measuring:
  """One call: its time, its results, and where they go."""

  def __init__(self, budget: float, state: pathlib.Path, out: pathlib.Path) -> None:
    self.began, self.budget, self.state, self.out = time.monotonic(), budget, state, out
    state.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    path = state / 'results.json'
    known = json.loads(path.read_text()) if path.exists() else {}
    self.results: dict[str, Any] = known.get('results', {})
    self.timeline: list[Any] = known.get('timeline', [])
    self.compiled = {k: v for x in self.timeline for k, v in x.get('ahead', {}).items()}
    self.about = about()
    self.environ = dict(
      os.environ,
      PYTHONPATH=os.pathsep.join([*PATH, os.environ.get('PYTHONPATH', '')]),
      PYTHONUNBUFFERED='1',
      GPU_STATE=str(state),
      BENCHMARK_COMMIT=self.about['commit'],
      JAX_COMPILATION_CACHE_DIR=str(state / 'programs'),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
      JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
      XLA_PYTHON_CLIENT_PREALLOCATE='false',  # several processes share the card
      TF_CPP_MIN_LOG_LEVEL='1',
    )

  @property
  def left(self) -> float:
    return self.budget - (time.monotonic() - self.began)

  def save(self) -> None:
    document = (
      json.dumps(dict(self.about, timeline=self.timeline, results=self.results), indent=1) + '\n'
    )
    for folder in {self.state, self.out}:
      (folder / 'results.json.new').write_text(document)
      (folder / 'results.json.new').replace(folder / 'results.json')

  def log(self, text: str) -> None:
    print(f'[{time.monotonic() - self.began:5.0f} s] {text}', flush=True)

  def launch(
    self,
    name: str,
    only: tuple[str, ...] = (),
    ahead: bool = False,
    trace: bool = True,
    limit: float = 0,
  ) -> Any:
    flags = groups()[name].flags
    environ = self.environ | (
      dict(XLA_FLAGS=f'{os.environ.get("XLA_FLAGS", "")} {flags}'.strip()) if flags else {}
    )
    path = pathlib.Path(tempfile.mkstemp(prefix='found-', dir=self.state)[1])
    command = [
      sys.executable,
      str(HERE),
      '--child',
      name,
      '--found',
      str(path),
      '--budget',
      str(limit),
      *only,
    ]
    command += ['--tiny'] * TINY + ['--as-ahead'] * ahead + ['--no-trace'] * (not trace)
    log = (self.out / 'log.txt').open('a')
    print(f'--- {name} {only} {"ahead" if ahead else ""}', file=log, flush=True)
    process = subprocess.Popen(
      command, env=environ, cwd=ROOT, stdout=log, stderr=log, process_group=0
    )
    return process, path

  def found(self, path: pathlib.Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
      if line.endswith('\n'):
        told |= json.loads(line)
    return told

  def end(self, process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()

  def ahead(self, names: list[str], seconds: float) -> None:
    """The smoke tests, and programs compiled, all at once."""
    tasks = [
      (n, item)
      for n in names
      if groups()[n].ahead
      for item in groups()[n].items
      if item not in self.results
    ]
    began, running, compiled = time.monotonic(), {}, {}
    if 'smoke' in names and 'smoke' not in self.results:
      running['smoke'] = (*self.launch('smoke', limit=seconds), 'smoke')  # has 60 s more
    at_once = 2 if TINY else max(2, (os.cpu_count() or 4) - 2)
    waiting = list(tasks)
    while running or waiting:
      while waiting and len(running) < at_once and time.monotonic() < began + seconds:
        name, item = waiting.pop(0)
        running[item] = (*self.launch(name, (item,), ahead=True, limit=seconds), name)
      late = time.monotonic() > began + seconds
      if late:
        waiting = []
      for item, (process, path, _) in list(running.items()):
        more = 60 if item == 'smoke' else 0
        if process.poll() is None and time.monotonic() < min(
          began + seconds + more, self.began + self.budget - 5
        ):
          continue
        code = process.poll()
        self.end(process)
        found = self.found(path).get(item)
        took = round(time.monotonic() - began, 1)
        if item == 'smoke':
          self.results['smoke'] = found or dict(
            error=f'exit code {code}, or more than {seconds:.0f} s'
          )
          self.told('smoke')
        else:
          compiled[item] = dict(
            until_s=took,
            exit=code,
            **{k: v for k, v in (found or {}).items() if k in ('compile_s', 'error')},
          )
        del running[item]
      self.save()
      time.sleep(0.2)
    self.compiled |= compiled
    self.timeline.append(
      dict(ahead=compiled, at_once=at_once, took_s=round(time.monotonic() - began, 1))
    )
    self.log(
      f'compiled {sum(x["exit"] == 0 for x in compiled.values())} of {len(tasks)}, {at_once} at once'
    )
    self.save()

  def measure(self, name: str, trace: bool = True) -> None:
    group = groups()[name]
    missing = tuple(i for i in group.items if i not in self.results or 'error' in self.results[i])
    if name == 'pong':
      missing = tuple(group.items)  # goes on
    limit = min(group.limit * (15 if TINY else 1), self.left - 4)  # a CPU may be busy
    if not missing:
      return
    if limit < 12:
      self.log(f'{name}: no time left')
      return
    began = time.monotonic()
    process, path = self.launch(name, missing, trace=trace, limit=limit)
    while process.poll() is None and time.monotonic() < began + limit:
      time.sleep(0.1)
    code = process.poll()
    self.end(process)
    found = self.found(path)
    for item in missing:
      if said := found.get(item):
        ahead = self.compiled.get(item, {})
        if ahead.get('compile_s') and 'compile_s' in said:  # these came from what was kept
          said = said | dict(compile_s=ahead['compile_s'], load_s=said['compile_s'])
        self.results[item] = said | dict(
          flags=group.flags, date=time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime())
        )
      elif item not in self.results:
        self.results[item] = dict(
          error='not within its time' if code is None else f'exit code {code}'
        )
      self.told(item)
    self.timeline.append({name: round(time.monotonic() - began, 1)})
    self.save()
    lost = [i for i in missing if i not in found]
    if lost and code not in (None, 0) and trace:  # a crash, perhaps of the profiler
      for item in lost:
        self.results.pop(item, None)
      self.measure(name, trace=False)

  def told(self, item: str) -> None:
    try:
      said = json.dumps(brief(self.results[item]))
    except Exception as e:  # results.json has it all the same
      said = f'cannot be told in short: {type(e).__name__}: {e}'
    self.log(f'{item}: {said}')


def brief(found: dict[str, Any]) -> dict[str, Any]:
  """What fits a line."""
  if 'error' in found:
    return dict(error=found['error'][-300:])
  rates = found.get('rates', {}) | {
    k: v for k, v in found.items() if k in ('steps_per_s', 'added', 'sampled')
  }
  if (
    isinstance(each := rates.get('steps_per_s'), dict) and 'median' not in each
  ):  # of several things
    rates |= rates.pop('steps_per_s')
  told = {k: round(v['median'] if isinstance(v, dict) else v) for k, v in rates.items() if v}
  keys = ('same_again', 'same_after_kill', 'same_compiled_anew', 'ordered_same_again', 'ordered_same_compiled_anew',
          'ordered_as_plain', 'update_ms', 'products_share', 'reached', 'last_return', 'best_return', 'wall_s',
          'copy_tb_per_s', 'matmul_bfloat16_tflop_per_s', 'matmul_float32_tflop_per_s', 'call_us', 'kernel_us', 'loop_us',
          'model_tflop_per_s', 'combined_over_environment', 'gb_sampled_per_s', 'episode_return_mean', 'compile_s')  # fmt: skip
  told |= {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items() if k in keys}
  told |= {k: v.get('episode_return', v.get('error')) for k, v in found.get('runs', {}).items()}
  kernels = found.get('kernels', {})
  if 'error' in kernels:
    told['kernels'] = kernels['error'][-120:]
  elif kernels:
    device = kernels['device']
    told |= dict(
      ms=round(kernels['update_ms'], 3), kernels_by_program=kernels['program']['by_program']
    )
    told |= {
      k: round(v, 2) if isinstance(v, float) else v
      for k, v in device.items()
      if k in ('kernels', 'busy_share', 'error')
    }
  return told


def about() -> dict[str, Any]:
  """The card, the machine, versions, the commit. Without JAX: this process leaves the card alone."""
  query = 'name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit'
  with contextlib.suppress(OSError, subprocess.TimeoutExpired):
    said = subprocess.run(
      ['nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader'],
      capture_output=True,
      text=True,
      timeout=20,
    )
    gpu = dict(zip(query.split(','), said.stdout.strip().split(', '), strict=False))
  known = HERE.parent / 'commit'
  versions = dict(python=sys.version.split()[0])
  for name in (
    'jax',
    'jaxlib',
    'jax-cuda13-plugin',
    'flax',
    'optax',
    'orbax-checkpoint',
    'numpy',
    'gymnax',
    'gymnasium',
    'ale-py',
    'mctx',
    'tyro',
  ):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  import common

  machine = common.machine()
  return dict(
    date=time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime()),
    gpu=locals().get('gpu', {}), machine=machine, versions=versions, tiny=TINY,
    commit=known.read_text().strip() if known.exists() else 'unknown',
  )  # fmt: skip


def merge(folder: pathlib.Path) -> None:
  """Puts results into benchmarks/results/gpu.json; of another card than the file's, under `NAME, CARD`."""
  new = json.loads((folder / 'results.json').read_text())
  path = ROOT / 'benchmarks' / 'results' / 'gpu.json'
  old = json.loads(path.read_text())
  card = new['gpu'].get('name') or 'CPU'
  same = old['machine'].get('devices') == [f'gpu:{card}']
  commit = dict(hash=new['commit'].split()[0], dirty=new['commit'].endswith('dirty'))
  kept = 0
  for name, found in new['results'].items():
    if 'error' in found:
      continue
    name = name if same else f'{name}, {card}'
    before = old['results'].get(name, {})
    compile_s = {k: v for k, v in before.items() if k.startswith('compile_s')}
    found = compile_s | found
    old['results'][name] = found | dict(
      date=found.get('date', new['date']), commit=commit, card=card, driver=new['gpu'].get('driver_version'),
      command='python benchmarks/gpu/measure.py', machine=new['machine'], versions=new['versions'],
    )  # fmt: skip
    kept += 1
  path.write_text(json.dumps(old, indent=1) + '\n')
  print(
    f'{kept} results of {card} are in {path.relative_to(ROOT)}; not in it: {[k for k, v in new["results"].items() if "error" in v]}'
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument(
    'groups', nargs='*', help=f'of {list(groups())}; none: all but pong, in this order'
  )
  parser.add_argument('--budget', type=float, default=540.0, help='seconds for all')
  parser.add_argument(
    '--ahead',
    type=float,
    default=150.0,
    help='of these, for the smoke tests and compiling; 0: neither',
  )
  parser.add_argument('--tiny', action='store_true', help='tiny sizes, on a CPU')
  parser.add_argument('--state', type=pathlib.Path, default=pathlib.Path('/tmp/podrace-gpu'))
  parser.add_argument(
    '--out',
    type=pathlib.Path,
    default=pathlib.Path(os.environ.get('OUT') or '/tmp/podrace-gpu-out'),
  )
  parser.add_argument('--merge', type=pathlib.Path, metavar='FOLDER')
  parser.add_argument('--child', help=argparse.SUPPRESS)
  parser.add_argument('--found', type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument('--as-ahead', action='store_true', help=argparse.SUPPRESS)
  parser.add_argument('--no-trace', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.merge:
    return merge(args.merge)
  if args.child:
    return child(args.child, args.groups, args.as_ahead, not args.no_trace, args.found, args.budget)
  names = args.groups or list(FIRST)
  if wrong := set(names) - set(groups()):
    sys.exit(f'no groups: {", ".join(wrong)}; there are {", ".join(groups())}')
  every = Measuring(args.budget, args.state, args.out)
  every.log(
    json.dumps(
      dict(gpu=every.about['gpu'], commit=every.about['commit'], versions=every.about['versions'])
    )
  )
  every.save()
  if args.ahead:
    every.ahead(names, min(args.ahead, every.left))
  for name in names:
    if name != 'smoke' or not args.ahead:
      try:
        every.measure(name)
      except Exception as e:  # the other groups go on
        every.log(f'{name}: {type(e).__name__}: {e}')
        every.save()
  every.log(
    f'done; without a result: {[i for n in names for i in groups()[n].items if "error" in every.results.get(i, {"error": 1})]}'
  )
  return None


if __name__ == '__main__':
  main()
