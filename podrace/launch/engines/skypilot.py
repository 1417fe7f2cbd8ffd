"""Programs on machines of any cloud, by SkyPilot: one task on several machines of one kind.

The first machine has the main node and all nodes that listen, further machines have the rest. All
run the same shell script, which restarts processes that fail. SkyPilot copies the keys
(file_mounts).
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podrace.errors import UsageError, unknown
from podrace.launch.engines import manifests
from podrace.launch.engines.manifests import GRACE, PORT, Make
from podrace.launch.program import Announced, Backoff, Node, Program, Reference, parse, resolve
from podrace.system.files import write_whole
from podrace.system.options import Option, Options
from podrace.system.output import print_text
from podrace.system.process import scratch_directory

OPTIONS = (
  manifests.IMAGE,
  Option('--setup', 'COMMAND', 'command that installs podrace on a machine, for skypilot without '
    '--image'),
  Option('--machines', 'N', "number of machines with that of the learner, for skypilot", 2),
  Option('--resources', 'KEY=VALUE', "resource of each machine in the form of SkyPilot's YAML, "
    'such as accelerators=L4:1, cpus=16+ or infra=aws; may be repeated'),
)  # fmt: skip
RESOURCES = (
  'infra', 'accelerators', 'cpus', 'memory', 'instance_type', 'use_spot', 'disk_size', 'disk_tier',
  'network_tier',
)  # fmt: skip
CLIENTS = ('envs', 'act', 'reanalyse', 'label')  # commands of podrace that wait for a learner
GIVE_UP = 300  # seconds: clients end by themselves after the end of the first machine
HEAD = '"$head"'
RUN = """\
set +m # SkyPilot's shell is an interactive one, whose children are no group
cd ~ && umask 077
head=${{SKYPILOT_NODE_IPS%%$'\\n'*}}
mkdir -p {home}/announced
chmod 700 {home}/keys && chmod 600 {home}/keys/*

end() {{ # asks a process to end, and kills it if it does not
  kill $1 2>/dev/null
  {{ sleep {grace}; kill -KILL $1; }} &>/dev/null &
  wait $1
  kill $!
}}
keep() {{ # starts a command again until it fails {failures} times in a row, or its usage is bad
  local code began failures=0 pause=1
  trap 'end $!; exit 143' TERM
  while true; do
    began=$SECONDS
    "$@" & wait $!
    code=$?
    if ((code == 0 || code == 2)); then return $code; fi
    if ((SECONDS - began >= {healthy})); then failures=0 pause=1; fi
    ((failures += 1))
    if ((failures >= {failures})); then return 1; fi
    sleep $pause & wait $!
    ((pause = pause < 32 ? 2 * pause : 60))
  done
}}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' TERM
trap 'exit 1' USR1 # a process failed for good
main=
case $SKYPILOT_NODE_RANK in
{cases}
esac
wait $main # here, or where there is none, for all
"""


@dataclasses.dataclass(frozen=True)
class Cloud:
  """The machines of a program.

  Attributes:
    name: the name of the cluster.
    directory: the run directory, on the first machine.
    machines: the number of machines.
    image: a container image with podrace, '' for none.
    setup: a command that installs podrace, '' for none.
    resources: the resources of each machine, as SkyPilot's YAML has them.
  """

  name: str
  directory: Path
  machines: int
  image: str = ''
  setup: str = ''
  resources: tuple[tuple[str, Any], ...] = ()

  def __post_init__(self) -> None:
    if self.machines < 1:
      raise UsageError(f'--machines must be at least 1, not {self.machines}')
    if bool(self.image) == bool(self.setup):
      raise UsageError(
        '--on skypilot needs --image IMAGE with podrace in it, or --setup COMMAND to install it, '
        'not both'
      )

  @property
  def home(self) -> str:
    """A directory for keys and announcements, within the user's home."""
    return f'.podrace/{self.name}'


def launch(make: Make, options: Options) -> int:
  """Start the program with sky, or print its task with --dry-run; returns the exit code."""
  name, directory = manifests.run_place(options)
  cloud = Cloud(
    name, directory, options.whole('--machines'), options.text('--image'), options.text('--setup'),
    tuple(parse_resources(options.every('--resources'))),
  )  # fmt: skip
  program = make(directory)
  if '--dry-run' in options:
    print_text('# KEYS is a directory with new keys, which are not shown.')
    print_text(manifests.text(task(program, cloud, 'KEYS')), end='')
    return 0
  sky = manifests.tool('sky', 'take --dry-run')
  with manifests.new_keys() as keys, scratch_directory('podrace-') as scratch:
    file = scratch / 'task.yaml'
    write_whole(file, manifests.text(task(program, cloud, str(keys))))
    code = manifests.call(sky, 'launch', '--cluster', name, '--detach-run', str(file))
  print_text(f"""
sky logs {name}
sky status {name}
rsync -a {name}:{directory} .    # the run directory is on the first machine
sky down {name}""")
  return 1 if code else 0


def parse_resources(texts: list[str]) -> Iterator[tuple[str, Any]]:
  """Yield the key and the value of each KEY=VALUE, with the value as YAML has it.

  Raises:
    UsageError: for an unknown key, or a missing value.
  """
  import yaml

  for text in texts:
    key, _, value = text.partition('=')
    if key not in RESOURCES:
      raise unknown('resource', key, RESOURCES)
    try:
      parsed = yaml.safe_load(value)
    except yaml.YAMLError:
      parsed = None
    if not isinstance(parsed, str | int | float):
      raise UsageError(f'--resources {key}=VALUE takes a text or a number, not {value!r}')
    yield key, parsed


def task(program: Program, cloud: Cloud, keys: str) -> dict[str, Any]:
  """Return SkyPilot's task for a program; `keys` is a directory on this machine.

  Raises:
    UsageError: if a node chooses its own address.
  """
  image = {'image_id': f'docker:{cloud.image}'} if cloud.image else {}
  resources = dict(cloud.resources) | image
  return {
    'name': cloud.name,
    'num_nodes': cloud.machines,
    **({'resources': resources} if resources else {}),
    'file_mounts': {f'~/{cloud.home}/keys': keys},
    **({'setup': cloud.setup} if cloud.setup else {}),
    'run': script(program, cloud),
  }


def script(program: Program, cloud: Cloud) -> str:
  """Return the shell script of all machines."""
  manifests.check_listeners(program, 'skypilot')
  ports = {key: PORT + n for n, key in enumerate(_listeners(program))}
  known = manifests.addresses(program, lambda node, i: f'{HEAD}:{ports.get((node.name, i), 0)}')
  machines: list[list[str]] = [[] for _ in range(cloud.machines)]
  clients = 0
  for node in program.order():
    for i in range(node.replicas):
      machine = 0
      if not (node.listens or node.main):
        machine = 1 + clients % (cloud.machines - 1) if cloud.machines > 1 else 0
        clients += 1
      at = f'tcp://*:{ports.get((node.name, i), 0)}'
      words = _words(program, node, i, known, at, cloud)
      then = '& main=$!' if node.main else '|| kill -USR1 $$ &'
      machines[machine].append(f'  keep {words} {then}')
  cases = [f'{n})\n' + '\n'.join(x) + '\n  ;;' for n, x in enumerate(machines)]
  restart = program.main.restart or Backoff(failures=1)
  return RUN.format(
    home=cloud.home,
    grace=GRACE,
    failures=restart.failures,
    healthy=math.ceil(restart.healthy),
    cases='\n'.join(cases),
  )


def _listeners(program: Program) -> Iterator[tuple[str, int]]:
  return ((n.name, i) for n in program.nodes if n.listens for i in range(n.replicas))


def _words(program: Program, node: Node, i: int, known: Announced, at: str, cloud: Cloud) -> str:
  """Return a replica's command for the shell, which replaces the address of the first machine."""
  own = dict(
    listen=shlex.quote(at), announce=f'{cloud.home}/announced/{node.name}-{i}',
    dir=shlex.quote(str(cloud.directory)), keys=f'{cloud.home}/keys', replica=str(i),
    replicas=str(node.replicas),
  )  # fmt: skip

  def shell(piece: str | Reference) -> str:
    if isinstance(piece, str):
      return shlex.quote(piece)
    return own[piece.node] if piece.node in own else resolve(program, piece, known)

  words = [''.join(map(shell, parse(argument))) or "''" for argument in node.command]
  more = [f'--give-up-after {GIVE_UP}'] if _waits(node) else []
  # as on one machine: only the learner computes on accelerators
  return ' '.join(([] if node.gpus or node.main else ['env JAX_PLATFORMS=cpu']) + words + more)


def _waits(node: Node) -> bool:
  return node.command[0] == 'podrace' and node.command[1] in CLIENTS
