"""What `podrace launch` gives to Kubernetes and SkyPilot, by their own schemas; and its pods, as processes here.

    python tests/endurance/manifests.py schemas --python VENV/bin/python --crd jobset.x-k8s.io_jobsets.yaml
    python tests/endurance/manifests.py pods

`schemas` checks the manifests of every arrangement with the Python of another environment (peer_manifests.py says what
that needs). The CRD is config/components/crd/bases/... of github.com/kubernetes-sigs/jobset. Unknown fields are errors.
Manifests that are spoiled in one place each must be refused, else the check is none. Not evaluated: rules in CEL and
the webhooks of JobSet; that SkyPilot knows the accelerator, for which it asks the network.

`pods` takes the part of Kubernetes for one JobSet: it copies keys as the init container does, runs each pod's command
with the addresses of pods in 127.0.1.0/24 for their names, ends the learner once with SIGKILL and once with SIGTERM, and
starts again what failed. It must end as the JobSet does, with the learner. No network, volume or cluster is tried.

Writes benchmarks/results/manifests.json; the case that is not run keeps what the file has of it.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / 'benchmarks'))

sys.path.append(str(Path(__file__).resolve().parents[1] / 'support'))

import common
import yaml
from children import until

from podrace.launch.engines import kubernetes, manifests

RUNS = {
  'seed': ('pong', '--as', 'seed'),
  'impala': ('catch', '--as', 'impala', '--actors', '4'),
  'apex': ('apex-pong', '--as', 'apex', '--shards', '2'),
  'reanalyse': ('muzero-catch', '--as', 'reanalyse'),
}
IMAGE = ('--image', 'example/podrace:1')
ON = {
  'jobset': ('--on', 'kubernetes', '--volume', 'disk', '--run-dir', '/runs/one', '--gpus', 'learner=1', *IMAGE),
  'task': ('--on', 'skypilot', '--run-dir', 'runs/one', '--resources', 'accelerators=L4:1', *IMAGE),
}  # fmt: skip
WAITED = 300.0  # seconds, at most
CLUSTER = kubernetes.Cluster('one', IMAGE[1], 'disk', Path('/runs/one'))


def manifest(*arguments: str) -> Any:
  """As --dry-run prints it."""
  command = (sys.executable, '-m', 'podrace', 'launch', *arguments, '--dry-run')
  said = subprocess.run(command, env={**os.environ, 'PYTHONPATH': common.PATH}, check=True, capture_output=True)  # fmt: skip
  return yaml.safe_load(said.stdout)


# --- schemas ----------------------------------------------------------------------------------------


def pod(jobset: Any) -> Any:
  return jobset['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']


SPOILED: dict[str, tuple[str, Callable[[Any], Any]]] = {
  'jobset: an unknown field': ('jobset', lambda d: d['spec'].update(sucessPolicy={})),
  'jobset: an unknown action': ('jobset', lambda d: d['spec']['failurePolicy']['rules'][0].update(action='Stop')),
  'jobset: replicas as text': ('jobset', lambda d: d['spec']['replicatedJobs'][0].update(replicas='2')),
  'jobset: an unknown field of a pod': ('jobset', lambda d: pod(d).update(gracePeriod=60)),
  'jobset: a command as text': ('jobset', lambda d: pod(d)['containers'][0].update(command='podrace')),
  'jobset: a number in the environment': ('jobset', lambda d: pod(d)['containers'][0]['env'][0].update(value=1)),
  'secret: a number': ('secret', lambda d: d['data'].update(x=1)),
  'task: an unknown field': ('task', lambda d: d.update(nodes=2)),
  'task: machines as text': ('task', lambda d: d.update(num_nodes='two')),
  'task: an unknown resource': ('task', lambda d: d['resources'].update(gpus=1)),
  'task: keys that are not there': ('task', lambda d: d['file_mounts'].update({'~/x': '/no/such'})),
}  # fmt: skip


def schemas(python: str, crd: str) -> dict[str, Any]:
  """Errors of all manifests by the engines' schemas; of the spoiled ones there must be some."""
  with manifests.new_keys() as keys:
    documents = {'secret': dict(kind='secret', document=kubernetes.secret(keys, CLUSTER))}
    for kind, on in ON.items():
      for name, arguments in RUNS.items():
        found = manifest(*arguments, *on)
        if kind == 'task':
          found['file_mounts'] = {x: str(keys) for x in found['file_mounts']}
        documents[f'{kind}: {name}'] = dict(kind=kind, document=found)
    for name, (kind, spoil) in SPOILED.items():
      one = next(x['document'] for x in documents.values() if x['kind'] == kind)
      spoiled = copy.deepcopy(one)
      spoil(spoiled)
      documents[f'spoiled {name}'] = dict(kind=kind, document=spoiled)
    found = checked(python, crd, documents)
  wrong = {n: e for n, e in found['errors'].items() if bool(e) != n.startswith('spoiled')}
  print('wrong:', wrong or 'nothing', flush=True)
  return found | dict(wrong=wrong) | common.origin()


def checked(python: str, crd: str, documents: Any) -> Any:
  with tempfile.TemporaryDirectory() as home:
    environ = {**os.environ, 'HOME': home, 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1'}
    environ.pop('PYTHONPATH', None)
    said = subprocess.run(
      (python, str(Path(__file__).with_name('peer_manifests.py'))), check=True, stdout=subprocess.PIPE,
      input=json.dumps(dict(crd=crd, documents=documents)).encode(), env=environ,
    )  # fmt: skip
  return json.loads(said.stdout.splitlines()[-1])


# --- pods -------------------------------------------------------------------------------------------


class Pods:
  """A JobSet's pods, as processes whose files and addresses are this machine's."""

  def __init__(self, jobset: Any, secret: Any, root: Path) -> None:
    self.root, self.secret = root, secret
    self.jobs = {x['name']: x for x in jobset['spec']['replicatedJobs']}
    self.names = [(n, i) for n, job in self.jobs.items() for i in range(job['replicas'])]
    self.hosts = {f'one-{n}-{i}-0.one': f'127.0.1.{k + 1}' for k, (n, i) in enumerate(self.names)}
    self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    self.restarts: dict[str, int] = dict.fromkeys(self.jobs, 0)

  def spec(self, name: str) -> Any:
    return self.jobs[name]['template']['spec']['template']['spec']

  def start(self, name: str, i: int) -> None:
    spec = self.spec(name)
    (container,) = spec['containers']
    home = self.root / f'{name}-{i}'
    self.copy_keys(spec, home)
    environ = {x['name']: x.get('value', str(i)) for x in container['env']}
    words = [self.here(self.resolved(w, environ), name, i, home) for w in container['command']]
    with (self.root / f'{name}-{i}.log').open('ab') as log:
      self.processes[name, i] = subprocess.Popen(
        [sys.executable, '-P', '-m', *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        env={**os.environ, **environ, 'HOME': str(home), 'PYTHONPATH': common.PATH},
      )  # fmt: skip

  def copy_keys(self, spec: Any, home: Path) -> None:
    """The Secret, with its modes, and what the init container makes of it."""
    mounted, keys = home / 'secret', home / 'keys'
    for directory in (mounted, keys, home / 'tmp'):
      directory.mkdir(parents=True, exist_ok=True)
    (volume,) = (x['secret'] for x in spec['volumes'] if x['name'] == 'secret')
    for item in volume['items']:
      path = mounted / item['path']
      path.unlink(missing_ok=True)
      path.write_bytes(base64.b64decode(self.secret['data'][item['key']]))
      path.chmod(volume['defaultMode'] | 0o040)  # as with fsGroup
    (init,) = spec['initContainers']
    shell, flag, line = init['command']
    line = line.replace('/secret', str(mounted)).replace('/keys', str(keys))
    subprocess.run([shell, flag, line], check=True)

  def resolved(self, word: str, environ: dict[str, str]) -> str:
    put = lambda found: '$' if found[0] == '$$' else environ[found[1]]  # noqa: E731
    return re.sub(r'\$\$|\$\((\w+)\)', put, word)

  def here(self, word: str, name: str, i: int, home: Path) -> str:
    for host, address in self.hosts.items():
      word = word.replace(f'{host}:', f'{address}:')
    word = word.replace('tcp://*:', f'tcp://{self.hosts[f"one-{name}-{i}-0.one"]}:')
    for path, to in (('/keys', home), ('/tmp/announced', home), ('/runs/one', self.root)):
      if word.startswith(path):
        word = f'{to}/{word.removeprefix("/")}'
    return word

  def look(self) -> int | None:
    """Starts again what failed; the code with which the learner ended for good."""
    for (name, i), process in self.processes.items():
      if (code := process.poll()) is None:
        continue
      if name == 'learner' and code in (0, 2):
        return code
      if code not in (0, 2):
        self.restarts[name] += 1
        self.start(name, i)
    return None

  def steps(self) -> int:
    path = self.root / 'runs' / 'one' / 'metrics.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])['step'] if lines else 0

  def end(self) -> dict[str, int]:
    """SIGTERM, as where a JobSet is complete; the exit codes."""
    for process in self.processes.values():
      process.terminate()
    return {f'{n}-{i}': p.wait(60) for (n, i), p in self.processes.items()}


def pods() -> dict[str, Any]:
  """IMPALA on Catch, whose learner is killed, and then asked to end, as if its machine were taken away."""
  arguments = ('catch', '--as', 'impala', '--total-steps', '200000', '--checkpoint-every', '10000', '--log-every', '2048')  # fmt: skip
  jobset = manifest(*arguments, *ON['jobset'])
  with manifests.new_keys() as keys:
    secret = kubernetes.secret(keys, CLUSTER)
  with tempfile.TemporaryDirectory(prefix='podrace-pods-') as root:
    found = Pods(jobset, secret, Path(root))
    for name, i in found.names:
      found.start(name, i)
    try:
      code = driven(found)
    finally:
      codes = found.end()
    summary = json.loads((Path(root) / 'runs' / 'one' / 'summary.json').read_text())
  result = dict(
    learner=code, restarts=found.restarts, codes=codes, step=summary['step'],
    episode_return=summary['episode_return'],
  )  # fmt: skip
  print(result, flush=True)
  return result | common.origin()


def driven(pods: Pods) -> int:
  """Until the learner is complete; its code."""
  seen = 0
  for fault in (signal.SIGKILL, signal.SIGTERM):
    until(lambda: pods.look() is not None or pods.steps() > seen + 20_000, WAITED)
    pods.processes['learner', 0].send_signal(fault)
    pods.processes['learner', 0].wait()
    seen = pods.steps()
  return until(lambda: [code] if (code := pods.look()) is not None else None, WAITED)[0]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('case', choices=('schemas', 'pods'))
  parser.add_argument('--python', help='of an environment with what peer_manifests.py needs')
  parser.add_argument('--crd', help="JobSet's")
  args = parser.parse_args()
  path = common.RESULTS / 'manifests.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  if args.case == 'schemas' and not (args.python and args.crd):
    parser.error('schemas needs --python and --crd')
  results[args.case] = schemas(args.python, args.crd) if args.case == 'schemas' else pods()
  common.record('manifests', results)


if __name__ == '__main__':
  main()
