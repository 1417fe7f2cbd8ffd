"""JobSets of programs: what their pods run, know and may read; what is refused, and what is shown of keys."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_docs
import yaml

from podrace.commands import launch
from podrace.distributed.net import address, keys
from podrace.errors import UsageError
from podrace.launch.engines import kubernetes, manifests
from podrace.launch.engines.kubernetes import Cluster
from podrace.launch.program import Node, Program

CASES = {
  'seed': ('pong', '--actors', '4'),
  'impala': ('catch', '--actors', '4', '--seed', '3'),
  'apex': ('apex-pong', '--shards', '2', '--actors', '4', '--quiet'),
  'reanalyse': ('muzero-catch', '--reanalysers', '2'),
}
ON = ('--on', 'kubernetes', '--image', 'me/podrace:1', '--volume', 'disk', '--run-dir', '/runs/one')


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert launch.run([*arguments, '--dry-run']) == 0
  return capsys.readouterr().out


def manifest(capsys: pytest.CaptureFixture[str], preset: str, *arguments: str) -> dict[str, Any]:
  found: dict[str, Any] = yaml.safe_load(shown(capsys, preset, *ON, *arguments))
  return found


def jobs(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
  return {job['name']: job for job in found['spec']['replicatedJobs']}


def pod(job: dict[str, Any]) -> dict[str, Any]:
  return job['template']['spec']['template']['spec']


def container(job: dict[str, Any]) -> dict[str, Any]:
  (found,) = pod(job)['containers']
  return found


def started(job: dict[str, Any], i: int) -> list[str]:
  """The command of a replica, as Kubernetes resolves it."""
  one = container(job)
  values = {x['name']: x.get('value', str(i)) for x in one['env']}  # the others are its number
  put = lambda found: '$' if found[0] == '$$' else values[found[1]]  # noqa: E731
  return [re.sub(r'\$\$|\$\((\w+)\)', put, word) for word in one['command']]


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
  """No test may reach a cluster."""
  monkeypatch.setenv('PATH', '')


@pytest.fixture(params=CASES)
def arrangement(
  request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Iterator[dict[str, Any]]:
  yield manifest(capsys, *CASES[request.param], '--as', request.param)


def test_podrace_accepts_the_commands(
  arrangement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
  test_docs.stub(monkeypatch)
  for job in jobs(arrangement).values():
    for i in range(job['replicas']):
      first, *rest = started(job, i)
      assert first == 'podrace'
      test_docs.read(rest)


def test_each_address_is_a_pod_that_listens(arrangement: dict[str, Any]) -> None:
  assert arrangement['metadata']['name'] == 'one'
  listening = {
    f'tcp://one-{name}-{i}-0.one:{container(job)["ports"][0]["containerPort"]}'
    for name, job in jobs(arrangement).items()
    for i in range(job['replicas'])
    if 'ports' in container(job)
  }
  used = set()
  for job in jobs(arrangement).values():
    words = container(job)['command']
    for name in ('--connect', '--connect-replay', '--params'):
      if name in words:
        used |= set(words[words.index(name) + 1].split(','))
    if 'ports' in container(job):
      at = words[words.index('--listen') + 1]
      assert address.host_and_port(at) == ('*', str(container(job)['ports'][0]['containerPort']))
  assert used == listening


def test_the_end_of_the_learner_is_the_end(arrangement: dict[str, Any]) -> None:
  spec = arrangement['spec']
  assert spec['successPolicy'] == {'operator': 'All', 'targetReplicatedJobs': ['learner']}
  assert spec['failurePolicy']['rules'][0]['onJobFailureReasons'] == ['PodFailurePolicy']
  for name, job in jobs(arrangement).items():
    of_job = job['template']['spec']
    ignored, failed = of_job['podFailurePolicy']['rules']
    assert ignored['onPodConditions'][0]['type'] == 'DisruptionTarget'
    assert failed['onExitCodes'] == {'containerName': name, 'operator': 'In', 'values': [2]}
    # the API refuses a podFailurePolicy with any other
    assert pod(job)['restartPolicy'] == 'Never'
    assert (of_job['completions'], of_job['completionMode']) == (1, 'Indexed')


def test_a_pod_gets_the_keys_that_it_uses(arrangement: dict[str, Any]) -> None:
  for name, job in jobs(arrangement).items():
    volumes = {x['name']: x for x in pod(job)['volumes']}
    files = {x['key'] for x in volumes['secret']['secret']['items']}
    assert 'authority.key' not in files
    assert ('server.key' in files) == ('ports' in container(job))
    assert ('client.key' in files) == (name != 'replay' and (name != 'learner' or 'replay' in jobs(arrangement)))  # fmt: skip
    assert volumes['secret']['secret']['defaultMode'] == 0o400
    assert 'secret' not in {x['name'] for x in container(job)['volumeMounts']}
    assert '/keys' in {x['mountPath'] for x in container(job)['volumeMounts']}


def test_the_volume_is_where_the_run_is_kept(arrangement: dict[str, Any]) -> None:
  for name, job in jobs(arrangement).items():
    mounted = {x['name']: x['mountPath'] for x in container(job)['volumeMounts']}
    assert mounted.get('runs') == ('/runs' if name in ('learner', 'replay') else None)
    claims = [x['persistentVolumeClaim']['claimName'] for x in pod(job)['volumes'] if x['name'] == 'runs']  # fmt: skip
    assert claims == ['disk'] * len({'runs'} & set(mounted))


def test_pods_fit_the_strictest_profile(arrangement: dict[str, Any]) -> None:
  for job in jobs(arrangement).values():
    security = pod(job)['securityContext']
    assert security['runAsNonRoot'] and security['seccompProfile'] == {'type': 'RuntimeDefault'}
    for one in (*pod(job)['containers'], *pod(job)['initContainers']):
      assert one['securityContext'] == {
        'allowPrivilegeEscalation': False,
        'capabilities': {'drop': ['ALL']},
      }


def test_accelerators_are_the_learners(arrangement: dict[str, Any]) -> None:
  for name, job in jobs(arrangement).items():
    environ = {x['name']: x.get('value') for x in container(job)['env']}
    assert environ.get('JAX_PLATFORMS') == (None if name == 'learner' else 'cpu')


def test_replicas_know_their_number(capsys: pytest.CaptureFixture[str]) -> None:
  found = jobs(manifest(capsys, 'apex-pong', '--as', 'apex', '--shards', '4'))['replay']
  assert found['replicas'] == 4
  assert any(word.endswith('/replay-3') for word in started(found, 3))
  (number,) = (x for x in container(found)['env'] if x['name'] == 'REPLICA')
  assert number['valueFrom']['fieldRef']['fieldPath'].endswith("['jobset.sigs.k8s.io/job-index']")


def test_learners_meet_at_the_first_ones_pod(capsys: pytest.CaptureFixture[str]) -> None:
  several = ('--as', 'learners', '--learners', '2', '--learners-insecure')
  found = jobs(manifest(capsys, 'catch', *several))
  assert list(found) == ['learner', 'learner-1']
  for job in found.values():
    words = started(job, 0)
    assert words[words.index('--coordinator') + 1] == 'one-learner-0-0.one:5554'


def test_dollars_and_braces_stay_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
  odd = '/$(HOME)$${x}'
  found = jobs(manifest(capsys, 'catch', '--as', 'impala', '--run-dir', f'{odd}/one'))
  assert started(found['learner'], 0)[-1] == f'{odd}/one'
  assert f'{odd}/one/replay-0' in started(found['replay'], 0)
  for name in ('learner', 'replay'):
    assert odd in {x['mountPath'] for x in container(found[name])['volumeMounts']}


def test_cores_and_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
  options = ('--gpus', 'learner=2', '--cpus', 'learner=12', '--cpus', 'envs=3')
  found = jobs(manifest(capsys, 'pong', '--as', 'seed', *options))
  assert container(found['learner'])['resources'] == {
    'requests': {'cpu': '12'},
    'limits': {'nvidia.com/gpu': 2},
  }
  assert container(found['envs'])['resources'] == {'requests': {'cpu': '3'}}
  environs = {n: {x['name'] for x in container(job)['env']} for n, job in found.items()}
  assert 'JAX_PLATFORMS' in environs['envs'] and 'JAX_PLATFORMS' not in environs['learner']


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (('--on', 'kubernetes'), '--run-dir'),
    (('--on', 'kubernetes', '--run-dir', '/runs/one'), '--image'),
    (('--on', 'kubernetes', '--run-dir', '/runs/one', '--image', 'x'), '--volume'),
    ((*ON, '--run-dir', 'runs/one'), '/runs/pong'),
    ((*ON, '--run-dir', '/one'), '/runs/pong'),
    ((*ON, '--run-dir', '/runs/One'), "'One'"),
    ((*ON, '--gpus', '1'), '--gpus'),
    ((*ON, '--gpus', 'learner=-1'), "'-1'"),
    ((*ON, '--setup', 'true'), '--setup'),
    (('--image', 'x'), '--image'),
  ],
)
def test_bad_usage_of_kubernetes(arguments: tuple[str, ...], said: str) -> None:
  with pytest.raises(UsageError) as e:
    launch.run(['catch', '--as', 'impala', *arguments])
  assert said in str(e.value)


def test_a_name_that_is_too_long_for_a_pod() -> None:
  for length, refused in ((22, False), (23, True)):
    nodes = (Node('a' * 30, ('x',), main=True),)
    cluster = Cluster('b' * length, 'me/podrace', 'disk', Path('/runs/one'))
    with pytest.raises(UsageError, match=' 1 ') if refused else contextlib.nullcontext():
      kubernetes.jobset(Program(nodes), cluster)


def test_no_kubectl() -> None:
  with pytest.raises(UsageError, match='kubectl'):
    launch.run(['catch', '--as', 'impala', *ON])


KUBECTL = """#!/bin/sh
printf '%s\\n' "$@" > {}/arguments
/bin/cat > {}/given
exit {}
"""


@pytest.mark.parametrize('code', [0, 5])
def test_what_kubectl_is_given(
  code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  kubectl = tmp_path / 'kubectl'
  kubectl.write_text(KUBECTL.format(tmp_path, tmp_path, code))
  kubectl.chmod(0o700)
  monkeypatch.setenv('PATH', str(tmp_path))
  assert launch.run(['catch', '--as', 'impala', *ON]) == (1 if code else 0)
  assert (tmp_path / 'arguments').read_text().split() == ['create', '--filename', '-']
  secret, found = yaml.safe_load_all((tmp_path / 'given').read_text())
  label = f'app.kubernetes.io/instance={found["metadata"]["name"]}'
  assert label in capsys.readouterr().out
  volume = next(x for x in pod(jobs(found)['learner'])['volumes'] if x['name'] == 'secret')
  assert volume['secret']['secretName'] == secret['metadata']['name']
  assert {x['key'] for x in volume['secret']['items']} == set(secret['data'])
  for name, text in secret['data'].items():
    (tmp_path / name).write_bytes(base64.b64decode(text))
    (tmp_path / name).chmod(0o600)
  keys.server_context(tmp_path)
  keys.client_context(tmp_path)
  assert len(keys.Allowed(tmp_path / keys.ALLOWED)) == 1


def test_keys_are_made_for_nothing_that_is_only_shown(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(manifests, 'new_keys', None)
  assert 'PRIVATE' not in json.dumps(manifest(capsys, 'catch', '--as', 'impala'))


def test_keys_of_a_program_are_private_and_then_gone() -> None:
  with manifests.new_keys() as directory:
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in directory.iterdir()} == {*manifests.SERVER_FILES, *keys.CLIENT_FILES}
  assert not directory.exists()
