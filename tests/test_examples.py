"""The examples do what they say."""

from __future__ import annotations

import functools
import http.client
import importlib.util
import json
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import nbclient
import nbformat
import pytest
from children import STARTED
from shorthand import Patch
from test_export import made, observations

import podrace
from podrace.commands.templates import agent as template
from podrace.envs.contract import check
from podrace.policy import load_policy
from podrace.types import Agent

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'


@pytest.fixture
def compile_quickly(monkeypatch: Patch) -> None:
  """Most of the time here is compilation; what is computed stays the same up to rounding."""
  options = {'xla_backend_optimization_level': 0}
  monkeypatch.setattr(jax, 'jit', functools.partial(jax.jit, compiler_options=options))


def load(name: str) -> Any:
  spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.usefixtures('compile_quickly')
@pytest.mark.parametrize(
  'network', ['EquinoxNetwork', pytest.param('NnxNetwork', marks=pytest.mark.slow)]
)
def test_own_network(network: str) -> None:
  """Over 500 episodes of about 1 each: the standard error is below 0.02."""
  example = load('own_network')
  assert example.train(getattr(example, network)) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize('agent', ['DPG', 'NAME'])
def test_own_agents_learn_continuous_actions(agent: str) -> None:
  """DPG of the example, and the agent that `podrace init` writes."""
  example = load('own_agent')
  check(example.reach(), key=jax.random.key(0), steps=100)
  module = example if agent == 'DPG' else template
  assert example.train(getattr(module, agent)()) > 6.5


def test_own_pool() -> None:
  """Every episode ends with 1 or, late, with 0; random play arrives in most."""
  assert 0.1 < load('own_pool').train(20) <= 1.0


@pytest.mark.parametrize(
  ('updates', 'least'), [(20, -1.0), pytest.param(250, 0.8, marks=pytest.mark.slow)]
)
def test_the_whole_of_sebulba_learns_catch(
  updates: int, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
  """Random play has -0.6 or so; the lag is what the file says."""
  assert load('sebulba').main(updates) >= least
  assert 'policy lag 1.0' in capsys.readouterr().out


# --- a served policy ------------------------------------------------------------------------------


class Served:
  """`examples/serve_policy.py` of a recurrent policy, in a process of its own."""

  def __init__(self, folder: pathlib.Path) -> None:
    _, env, _ = made('r2d2', folder / 'policy')
    self.policy = load_policy(folder / 'policy')
    self.observations = [x[0] for x in observations(env.observation_space, 40, 1)]
    script = [sys.executable, str(EXAMPLES / 'serve_policy.py'), str(folder / 'policy')]
    self.process = subprocess.Popen(
      [*script, '--port', '0', '--clients', '2'], stdout=subprocess.PIPE, text=True
    )
    STARTED.append(self.process)
    assert self.process.stdout
    self.address = self.process.stdout.readline().rpartition('/')[2].strip()
    assert self.address.startswith('127.0.0.1:')

  def ask(self, method: str, body: str = '', length: int | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(self.address, timeout=60)
    headers = {} if length is None else {'Content-Length': str(length)}
    connection.request(method, '/act', body, headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found

  def act(self, client: str, observation: Any, **more: Any) -> Any:
    request = {'client': client, 'observation': observation.tolist(), **more}
    code, answer = self.ask('POST', json.dumps(request))
    assert code == 200, answer
    return answer['action']

  def expected(self, observations: list[Any]) -> list[int]:
    """The actions of one episode."""
    state, found = None, []
    for x in observations:
      action, state = self.policy.act(x, state)
      found.append(int(action))
    return found

  def telling(self, before: list[Any]) -> Any:
    """An observation for which the action after these is another one than at the beginning of an episode."""
    for x in self.observations:
      if self.expected([*before, x])[-1] != self.expected([x])[0]:
        return x
    raise AssertionError('the state does not matter')


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Served]:
  made_one = Served(tmp_path)
  yield made_one
  made_one.process.kill()
  made_one.process.communicate()


def test_a_served_policy(served: Served) -> None:
  a, b = served.observations[:20], served.observations[20:]
  # Two clients at once, each with its own state.
  both = [(served.act('a', x), served.act('b', y)) for x, y in zip(a, b, strict=True)]
  assert both == list(zip(served.expected(a), served.expected(b), strict=True))
  x = served.telling(a)
  assert served.act('a', x) == served.expected([*a, x])[-1]
  x = served.telling([*a, x])
  assert served.act('a', x, first=True) == served.expected([x])[0]
  # A third client: `b`, the one that was here least recently, is forgotten, and `a` is not.
  served.act('c', a[0])
  y = served.telling([x])
  assert served.act('a', y) == served.expected([x, y])[-1]
  y = served.telling(b)
  assert served.act('b', y) == served.expected([y])[0]
  assert served.ask('GET') == (200, served.policy.about)
  maps = pathlib.Path(f'/proc/{served.process.pid}/maps')
  assert not maps.exists() or 'jaxlib' not in maps.read_text()


def test_what_a_served_policy_refuses(served: Served) -> None:
  for body, message in (
    ('no JSON', 'JSONDecodeError'),
    ('{"client": "a"}', "KeyError: 'observation'"),
    ('{"client": "a", "observation": [1, 2]}', r'shape [2] came, expected [5]'),
    ('{"client": "a", "observation": ["x"]}', 'ValueError'),
    ('[3]', 'TypeError'),
    ('{"client": 3, "observation": [1, 2, 3, 4, 5]}', 'client is a text'),
    ('{"client": "%s", "observation": [1]}' % ('a' * 201), 'client is a text'),
    ('{"client": "a", "observation": [true, false, true, true, "1"]}', 'ValueError'),
    ('[' * 200_000, 'RecursionError'),
  ):
    code, answer = served.ask('POST', body)
    assert code == 400 and message in answer['error'], answer
  for length in (2**30, -1):
    code, answer = served.ask('POST', '', length=length)
    assert code == 413 and 'at most' in answer['error']
  assert served.act('a', served.observations[0]) == served.expected(served.observations[:1])[0]


# --- notebooks ------------------------------------------------------------------------------------


def outputs_of(name: str, folder: pathlib.Path, monkeypatch: Patch) -> list[Any]:
  """All outputs of a notebook, which a kernel of its own has run; what is committed has none."""
  notebook = nbformat.read(EXAMPLES / name, as_version=4)
  nbformat.validate(notebook)
  cells = [c for c in notebook.cells if c.cell_type == 'code']
  assert all(not c.outputs and c.execution_count is None for c in cells)
  monkeypatch.setenv('PYTHONPATH', str(EXAMPLES.parent))
  monkeypatch.delenv('JAX_NUM_CPU_DEVICES')
  monkeypatch.delenv('MPLBACKEND', raising=False)  # envpool sets it where it is imported
  where = {'metadata': {'path': str(folder)}}
  nbclient.NotebookClient(notebook, kernel_name='python3', resources=where, timeout=300).execute()
  return [output for c in cells for output in c.outputs]


def text(outputs: list[Any]) -> str:
  return '\n'.join(o.get('text') or o.get('data', {}).get('text/plain', '') for o in outputs)


@pytest.mark.slow
def test_the_notebook_that_trains_and_looks(tmp_path: pathlib.Path, monkeypatch: Patch) -> None:
  outputs = outputs_of('train_and_look.ipynb', tmp_path, monkeypatch)
  shown = [o.data for o in outputs if o.output_type == 'display_data']
  progress, picture = shown  # one line that has changed to its last
  assert progress['text/plain'].startswith('step 400,384 of 400,384 (100%)  return ')
  assert 'image/png' in picture
  found = text(outputs)
  assert 'compiled in' in found and "'episode_return_mean': 1.0" in found
  assert [o for o in outputs if o.get('name') == 'stderr'] == []
  assert "'right'" in found  # where nothing else catches the ball


@pytest.mark.slow
def test_the_notebook_of_callbacks(tmp_path: pathlib.Path, monkeypatch: Patch) -> None:
  found = text(outputs_of('callbacks.ipynb', tmp_path, monkeypatch))
  assert 'an interruption' in found and 'resuming at step' in found
  assert 'ended: no better return than' in found and 'the same parameters: True' in found


@pytest.mark.parametrize('architecture', ['anakin', 'sebulba'])
def test_the_smallest_agent_runs(
  architecture: str, tmp_path: pathlib.Path, monkeypatch: Patch
) -> None:
  """The example of `podrace.types.Agent` has no parameters."""
  text = textwrap.dedent((Agent.__doc__ or '').partition('Example:')[2].lstrip('\n'))
  (tmp_path / 'smallest.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  config = podrace.configure(
    agent='smallest:Random', architecture=architecture, num_envs=8, unroll_length=8, total_steps=640,
    devices=1,
  )  # fmt: skip
  assert podrace.train(config, tmp_path / 'run', quiet=True).summary['step'] == 640
