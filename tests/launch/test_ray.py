"""Programs on a cluster of Ray: four nodes on this machine, whose deaths are real."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import SUPPORT, Process, alive, until
from test_local import UNTIL, WAITS, node, pipe

from podrace.commands import launch as command
from podrace.distributed.net.keys import CLIENT_FILES
from podrace.errors import UsageError
from podrace.launch.engines import ray as engine
from podrace.launch.engines.manifests import SERVER_FILES
from podrace.launch.engines.ray_actor import Placed
from podrace.launch.program import Node, Program
from podrace.launch.supervisor.remote_child import ReplicaRequest

MEMORY = 200 * 2**20  # bytes of each node's object store
PID = 'import os; print("pid", os.getpid())\n'


@pytest.fixture(scope='module')
def cluster() -> Iterator[Any]:
  """A head without cores, and three nodes with one core each."""
  pytest.importorskip('ray', reason='no Ray: `make setup`, unless it has no wheel for this Python')
  from ray.cluster_utils import Cluster

  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('PYTHONPATH', os.pathsep.join((str(SUPPORT.parents[1]), str(SUPPORT))))
    head = dict(num_cpus=0, object_store_memory=MEMORY, include_dashboard=False)
    found = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
      found.add_node(num_cpus=1, object_store_memory=MEMORY)
    found.wait_for_nodes()
    patch.setenv('RAY_ADDRESS', found.address)
    yield found
    found.shutdown()


class OnRay(Process):
  """A program that is launched on the cluster."""

  def __init__(self, tmp_path: Path, *nodes: dict[str, Any]) -> None:
    directory, program = tmp_path / 'program', json.dumps(nodes)
    super().__init__(
      tmp_path / 'launched.txt', str(SUPPORT / 'launched.py'), str(directory), program, 'ray'
    )

  def pids(self, name: str) -> list[int]:
    return [int(x) for x in re.findall(rf'{name} +\| pid (\d+)', self.output)]

  def pid(self, name: str, times: int = 1) -> int:
    """Of a replica that has started so often."""
    until(lambda: len(self.pids(name)) >= times or self.process.poll() is not None)
    assert len(self.pids(name)) == times, self.output
    return self.pids(name)[-1]


def parent(pid: int) -> int:
  return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def node_of(cluster: Any, pid: int) -> Any:
  """The node on which a replica runs: its keeper's worker's raylet."""
  raylet = parent(parent(parent(pid)))
  raylets = {n.all_processes['raylet'][0].process.pid: n for n in cluster.list_all_nodes()}
  return raylets[raylet]


@pytest.mark.slow
def test_replicas_find_each_other_and_end_with_the_main_one(cluster: Any, tmp_path: Path) -> None:
  announces = (
    'import json, os, sys, signal; listen, file, keys = sys.argv[1:]\n'
    'print(listen, oct(os.stat(keys).st_mode), sorted(os.listdir(keys)))\n'
    'from podrace.distributed.net.announce import Announcement; from pathlib import Path\n'
    'Announcement(Path(file), "it").make("tcp://h:7"); signal.pause()'
  )
  asks = (
    'import sys\nfrom changes import changes\nfrom podrace.distributed.net.address import current\n'
    'for _ in changes(sys.argv[1].removeprefix("announced:")):\n'
    '  try: print("at", current(sys.argv[1])); break\n'
    '  except OSError: pass'
  )
  before = set(Path('/tmp').glob('podrace-*'))
  words = ('{listen}', '{announce}', '{keys}')
  serve = node('serve', PID + announces, *words, listens=['it'])
  with OnRay(tmp_path, serve, node('main', asks, '{serve}', main=True)) as launched:
    assert launched.wait() == 0, launched.output
    assert re.search(r'main +\| at tcp://h:7', launched.output)
    listed = r"tcp://[0-9.]+:0 0o40700 \['allowed_clients', 'authority.pem'"
    assert re.search(listed, launched.output)
    assert 'authority.key' not in launched.output
    assert not alive(launched.pid('serve'))
  until(lambda: set(Path('/tmp').glob('podrace-*')) <= before)
  assert (tmp_path / 'program' / 'logs' / 'main.log').read_text() == 'at tcp://h:7\n'


@pytest.mark.slow
def test_a_service_is_found_where_it_has_come_back(cluster: Any, tmp_path: Path) -> None:
  announces = (
    'import os, sys, signal\nfrom pathlib import Path\nfrom podrace.distributed.net.announce import Announcement\n'
    'Announcement(Path(sys.argv[1]), "it").make(f"tcp://h:{os.getpid()}"); signal.pause()'
  )
  asks = (
    'import sys\nfrom changes import changes\nfrom podrace.distributed.net.address import current\nseen = set()\n'
    'for _ in changes(sys.argv[1].removeprefix("announced:")):\n'
    '  try: now = current(sys.argv[1])\n'
    '  except OSError: continue\n'
    '  if now not in seen: print("at", now)\n'
    '  seen.add(now)\n'
    '  if len(seen) == 3: break'
  )
  serve = node('serve', PID + announces, '{announce}', listens=['it'])
  with OnRay(tmp_path, serve, node('main', asks, '{serve}', main=True)) as launched:
    for times in (1, 2):
      launched.says('| at tcp://', times)
      pid = launched.pid('serve', times)
      os.kill(pid if times == 1 else parent(parent(pid)), signal.SIGKILL)
    assert launched.wait() == 0, launched.output
    found = [int(x) for x in re.findall(r'at tcp://h:(\d+)', launched.output)]
    assert found == launched.pids('serve')


@pytest.mark.slow
def test_what_is_killed_is_started_again(cluster: Any, tmp_path: Path) -> None:
  nodes = (node('main', PID + WAITS, main=True), node('other', PID + WAITS))
  with OnRay(tmp_path, *nodes) as launched:
    os.kill(launched.pid('main'), signal.SIGKILL)
    launched.says('ended with 137')
    main, other = launched.pid('main', 2), launched.pid('other')
    os.kill(parent(parent(other)), signal.SIGKILL)  # the actor
    launched.says('lost')
    until(lambda: not alive(other))
    other = launched.pid('other', 2)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 143
    assert not alive(main) and not alive(other)


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(cluster: Any, tmp_path: Path) -> None:
  nodes = (node('main', PID + WAITS, main=True), node('other', PID + WAITS))
  with OnRay(tmp_path, *nodes) as launched:
    pids = [launched.pid('main'), launched.pid('other')]
    launched.kill()
    until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_a_machine_that_dies_is_replaced(cluster: Any, tmp_path: Path) -> None:
  go = pipe(tmp_path)
  main = node('main', PID + UNTIL, str(go), main=True)
  with OnRay(tmp_path, main, node('other', PID + WAITS)) as launched:
    launched.pid('other')
    first = launched.pid('main')
    there = node_of(cluster, first)
    cluster.remove_node(there, allow_graceful=False)
    again = launched.pid('main', 2)
    assert not alive(first)
    assert node_of(cluster, again) is not there
    go.write_text('')
    assert launched.wait() == 0
  cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
  cluster.wait_for_nodes()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('arrangement', 'line'),
  [(('impala', '--actors', '1'), r'act +\| .*complete'), (('learners', '--learners-insecure'), 'learner-1')],
)  # fmt: skip
def test_runs_on_ray(arrangement: tuple[str, ...], line: str, cluster: Any, tmp_path: Path) -> None:
  words = ('catch', '--as', *arrangement, '--on', 'ray', '--total-steps', '2000')
  at = ('--run-dir', str(tmp_path / 'run'))
  with Process(tmp_path / 'output', '-m', 'podrace', 'launch', *words, *at) as launch:
    assert launch.wait() == 0, launch.output
    assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['step'] >= 2000
    assert re.search(line, launch.output)


@pytest.mark.slow
def test_a_program_without_room_says_so(cluster: Any, tmp_path: Path) -> None:
  with OnRay(tmp_path, node('main', 'pass', cpus=5, main=True)) as launched:
    launched.says('5 CPU, 0 GPU; free: 3 CPU, 0 GPU')
    launched.signal(signal.SIGTERM)
    assert launched.wait(20) == 143


LAUNCH = ('catch', '--as', 'impala', '--on', 'ray')


def test_what_would_be_started_is_shown(tmp_path: Path, capsys: Any) -> None:
  more = ('--gpus', 'learner=1', '--cpus', 'learner=4')
  assert command.run([*LAUNCH, '--run-dir', str(tmp_path / 'run'), '--dry-run', *more]) == 0
  shown = capsys.readouterr().out
  assert "{'CPU': 4.0, 'GPU': 1.0}" in shown
  assert 'announced:/PODRACE-PRIVATE/announced/learner-0#params' in shown
  assert not (tmp_path / 'run').exists()


def test_without_ray_or_a_cluster_it_says_what_to_do(tmp_path: Path, monkeypatch: Any) -> None:
  words = [*LAUNCH, '--run-dir', str(tmp_path / 'run')]
  monkeypatch.setenv('RAY_ADDRESS', 'ray://h:10001')
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(UsageError, match=r"'podrace\[ray\]'"):
    command.run(words)
  monkeypatch.setitem(sys.modules, 'ray', pytest)
  with pytest.raises(UsageError, match='cluster'):
    command.run(words)
  assert not (tmp_path / 'run').exists()


def test_a_replica_gets_the_keys_that_it_uses(tmp_path: Path, monkeypatch: Any) -> None:
  serve = Node('serve', ('serve', '{announce}', '{keys}'), listens=('it',))
  main = Node('main', ('ask', '{serve}', '{keys}'), main=True)
  program, made = Program((serve, main, Node('other', ('true',)))), mock.Mock()
  monkeypatch.setattr(engine, 'Placed', made)
  actors = engine.Actors(program, tmp_path, None)
  actors.places(tmp_path)
  for one in program.nodes:
    actors.start(one, 0, one.command)
  given = [{Path(x).name for x in call.args[0].files} for call in made.call_args_list]
  assert given == [{*SERVER_FILES}, {*CLIENT_FILES}, set()]


def test_the_end_is_seen_where_ray_itself_is_lost(monkeypatch: Any) -> None:
  ray = pytest.importorskip('ray')
  for name in ('wait', 'kill'):
    monkeypatch.setattr(ray, name, mock.Mock(side_effect=ConnectionError('no cluster')))
  asked, ended = ReplicaRequest(['true'], {}, '/', '/PRIVATE', '', 0, {}, '/not/there'), mock.Mock()
  lost = mock.Mock()
  lost.return_value.tell.remote.side_effect = ConnectionError('no cluster')
  placed = Placed(asked, lost, mock.Mock(), ended)
  placed.signal(signal.SIGTERM)  # which raises nothing: other replicas have to hear theirs
  with placed.stdout as said:
    assert placed.wait() and placed.poll() == 1
    assert b'ConnectionError' in said.read()
  ended.assert_called_once_with(placed)


def test_a_bundle_is_not_empty() -> None:
  assert engine.bundle(Node('one', ('c',), cpus=0.0)) == {'CPU': 0.001}
  assert engine.bundle(Node('one', ('c',), gpus=2)) == {'CPU': 1.0, 'GPU': 2.0}
