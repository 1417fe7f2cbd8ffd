"""Programs on Kubernetes: a JobSet (jobset.sigs.k8s.io).

It has a replicated job for each node, and a pod for each replica. Pods listen at one port, and find
each other by their names in DNS, which clients resolve again at each connection. Keys are a Secret.
Kubernetes restarts pods, so no process of podrace stays once the objects are made.

The manifest is built from dictionaries, not from a YAML template. Half of a pod depends on its node
(keys, volume, accelerators, port, replica number), so a template would need the same code to cut
parts out, and quoting besides.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrace.errors import UsageError
from podrace.launch.engines import manifests
from podrace.launch.engines.manifests import GRACE, PORT, Make
from podrace.launch.program import Announced, Node, Program, Reference, command, references
from podrace.launch.supervisor.local import BAD_USAGE
from podrace.system.options import Option, Options
from podrace.system.output import print_text

OPTIONS = (
  manifests.IMAGE,
  Option('--volume', 'CLAIM', 'PersistentVolumeClaim for the run directory, for kubernetes'),
  manifests.CPUS,
  manifests.GPUS,
  manifests.LEARNERS_INSECURE,
)
RESTARTS = 3  # of the whole set, each after too many failures of a node's pods
USER = 1000
SECONDS = 60.0  # deadline of kubectl
LONGEST = 63  # characters of a pod's name
KEYS, SECRET, ANNOUNCED = '/keys', '/secret', '/tmp/announced'
COPY = f'install -m 600 {SECRET}/* {KEYS}/'
INSTANCE, COMPONENT = 'app.kubernetes.io/instance', 'app.kubernetes.io/component'


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The environment of a program's pods.

  Attributes:
    name: the name of the JobSet.
    image: the container image.
    volume: the name of a PersistentVolumeClaim.
    directory: the run directory, within the volume.
  """

  name: str
  image: str
  volume: str
  directory: Path

  def __post_init__(self) -> None:
    if not self.directory.is_absolute() or len(self.directory.parts) < 3:
      raise UsageError(
        f'--run-dir {self.directory}: --on kubernetes mounts the volume at its parent directory; '
        'give an absolute path, as /runs/pong'
      )

  def host(self, node: Node, i: int, port: int = PORT) -> str:
    """Return the host name of a replica's pod with a port."""
    return f'{self.name}-{node.name}-{i}-0.{self.name}:{port}'


def launch(make: Make, options: Options) -> int:
  """Make the program's objects with kubectl, or print them with --dry-run.

  Returns the exit code.
  """
  name, directory = manifests.run_place(options)
  cluster = Cluster(name, options.needed('--image'), options.needed('--volume'), directory)
  program = manifests.with_resources(make(directory), options)
  manifest = jobset(program, cluster)
  if '--dry-run' in options:
    print_text(f'# A Secret {name}-keys with new keys is not shown.')
    print_text(manifests.text(manifest), end='')
    return 0
  kubectl = manifests.tool('kubectl', 'take --dry-run')
  with manifests.new_keys() as keys:
    text = manifests.text(secret(keys, cluster), manifest)
  # `apply` would change the keys of a running program, and keep a copy of them in an annotation.
  code = manifests.call(kubectl, 'create', '--filename', '-', content=text, timeout=SECONDS)
  print_text(next_lines(cluster, program))
  return 1 if code else 0


def next_lines(cluster: Cluster, program: Program) -> str:
  """Return commands for the next steps."""
  one = f'-l {INSTANCE}={cluster.name}'
  return f"""
kubectl get pods {one}
kubectl logs --follow --tail=-1 {one},{COMPONENT}={program.main.name}
kubectl delete jobset,secret {one}    # the volume keeps the run; then this command resumes it"""


def secret(keys: Path, cluster: Cluster) -> dict[str, Any]:
  """Return the Secret of a program's keys."""
  return {
    'apiVersion': 'v1',
    'kind': 'Secret',
    'metadata': {'name': f'{cluster.name}-keys', 'labels': {INSTANCE: cluster.name}},
    'immutable': True,
    'data': {p.name: base64.b64encode(p.read_bytes()).decode() for p in sorted(keys.iterdir())},
  }


def jobset(program: Program, cluster: Cluster) -> dict[str, Any]:
  """Return the JobSet of a program.

  Raises:
    UsageError: if a name is too long, or a node chooses its own address.
  """
  manifests.check_listeners(program, 'kubernetes')
  for n in program.nodes:
    pod = f'{cluster.name}-{n.name}-{n.replicas - 1}-0-abcde'
    if len(pod) > LONGEST:
      raise UsageError(
        f'--run-dir: {cluster.name} is too long by {len(pod) - LONGEST} for the name of a pod, '
        f'{pod}'
      )
  known = manifests.addresses(program, cluster.host)
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': {'name': cluster.name, 'labels': {INSTANCE: cluster.name}},
    'spec': {
      'network': {'enableDNSHostnames': True, 'publishNotReadyAddresses': True},
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': [program.main.name]},
      'failurePolicy': {
        'maxRestarts': RESTARTS,
        'rules': [
          {
            'name': 'badUsage',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
          }
        ],
      },
      'replicatedJobs': [_job(program, n, known, cluster) for n in program.order()],
    },
  }


def _job(program: Program, node: Node, known: Announced, cluster: Cluster) -> dict[str, Any]:
  """Return the replicated job of a node; a job has one pod, so each replica has its own name."""
  rules = [  # the loss of a machine is no failure of the node
    {'action': 'Ignore', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]},
    {
      'action': 'FailJob',
      'onExitCodes': {'containerName': node.name, 'operator': 'In', 'values': [BAD_USAGE]},
    },
  ]
  labels = {INSTANCE: cluster.name, COMPONENT: node.name}
  return {
    'name': node.name,
    'replicas': node.replicas,
    'template': {
      'spec': {
        'parallelism': 1,
        'completions': 1,
        'completionMode': 'Indexed',
        'backoffLimit': 0 if node.restart is None else node.restart.failures,
        'podFailurePolicy': {'rules': rules},
        'template': {
          'metadata': {'labels': labels},
          'spec': _pod(program, node, known, cluster),
        },
      }
    },
  }


def _pod(program: Program, node: Node, known: Announced, cluster: Cluster) -> dict[str, Any]:
  words = _words(program, node, known, cluster)
  volumes: list[Mapping[str, Any]] = []
  mounts: list[Mapping[str, Any]] = []
  pod: dict[str, Any] = {}
  if files := manifests.files_of_keys(node):
    items = [{'key': x, 'path': x} for x in files]
    of_keys = {'name': 'keys', 'mountPath': KEYS}
    volumes += [
      {
        'name': 'secret',
        'secret': {'secretName': f'{cluster.name}-keys', 'items': items, 'defaultMode': 0o400},
      },
      {'name': 'keys', 'emptyDir': {'medium': 'Memory'}},
    ]  # fmt: skip
    mounts.append(of_keys)
    pod['initContainers'] = [_copying(cluster, of_keys)]
  if any(_escaped(str(cluster.directory)) in word for word in words):
    volumes.append({'name': 'runs', 'persistentVolumeClaim': {'claimName': cluster.volume}})
    mounts.append({'name': 'runs', 'mountPath': str(cluster.directory.parent)})
  return {
    'restartPolicy': 'Never',  # the job makes another pod, where there is room
    'terminationGracePeriodSeconds': GRACE,
    'automountServiceAccountToken': False,
    'enableServiceLinks': False,
    'securityContext': {
      'runAsNonRoot': True, 'runAsUser': USER, 'runAsGroup': USER, 'fsGroup': USER,
      'fsGroupChangePolicy': 'OnRootMismatch', 'seccompProfile': {'type': 'RuntimeDefault'},
    },
    **pod,
    'containers': [_container(node, words, mounts, cluster)],
    'volumes': volumes,
  }  # fmt: skip


def _copying(cluster: Cluster, of_keys: Mapping[str, Any]) -> dict[str, Any]:
  """Return a container that copies keys into memory.

  The pod's group can read the files of a Secret, and podrace refuses such files.
  """
  return {
    'name': 'keys',
    'image': cluster.image,
    'command': ['sh', '-c', COPY],
    'volumeMounts': [{'name': 'secret', 'mountPath': SECRET, 'readOnly': True}, of_keys],
    'securityContext': _confined(),
  }


def _container(
  node: Node, words: tuple[str, ...], mounts: list[Mapping[str, Any]], cluster: Cluster
) -> dict[str, Any]:
  environ: list[Mapping[str, Any]] = [
    {'name': 'HOME', 'value': '/tmp'},
    {'name': 'PYTHONUNBUFFERED', 'value': '1'},
  ]
  if not node.gpus and not node.main:
    environ.append({'name': 'JAX_PLATFORMS', 'value': 'cpu'})
  if Reference('replica') in references(node):
    number = {'fieldPath': "metadata.labels['jobset.sigs.k8s.io/job-index']"}
    environ.append({'name': 'REPLICA', 'valueFrom': {'fieldRef': number}})
  limits = {'limits': {'nvidia.com/gpu': node.gpus}} if node.gpus else {}
  return {
    'name': node.name,
    'image': cluster.image,
    'command': list(words),
    'env': environ,
    'resources': {'requests': {'cpu': f'{node.cpus:g}'}, **limits},
    **({'ports': [{'containerPort': PORT}]} if node.listens else {}),
    'volumeMounts': mounts,
    'securityContext': _confined(),
  }


def _confined() -> dict[str, Any]:
  return {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}}


def _words(program: Program, node: Node, known: Announced, cluster: Cluster) -> tuple[str, ...]:
  """Return the command of all replicas, in which Kubernetes replaces $(REPLICA)."""
  escaped = dataclasses.replace(node, command=tuple(map(_escaped, node.command)))
  own = dict(
    listen=f'tcp://*:{PORT}', announce=ANNOUNCED, keys=KEYS, dir=_escaped(str(cluster.directory)),
    replica='$(REPLICA)', replicas=str(node.replicas),
    coordinator=cluster.host(program.main, 0, manifests.COORDINATOR),
  )  # fmt: skip
  return command(program, escaped, known, own)


def _escaped(text: str) -> str:
  """Escape text, in which Kubernetes replaces $(NAME)."""
  return text.replace('$', '$$')
