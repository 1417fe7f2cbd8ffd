"""The newest metrics over HTTP: what is said, and readers that are slow, dead or many."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Process, until
from processes import lines
from shorthand import Patch

from podrace.errors import SecurityError, UsageError
from podrace.run import prometheus
from podrace.run.prometheus import Endpoint, check_listen_address
from podrace.run.prometheus import render_metrics as exposed

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{seed="\d+"\})? (\S+)')
LINE = {'step': 10, 'loss': 0.1, 'episode_return': None, 'info_a/b c': 1e300, 'info_a_b c': 2.0,
        'episode_return_by_seed': [1.5, None, -2.0], 'note': 'text'}  # fmt: skip


def samples(text: str) -> dict[str, float]:
  """Of an exposition, whose form is checked: each metric has its type first, and once."""
  found: dict[str, float] = {}
  typed: list[str] = []
  assert text.endswith('\n') or not text
  for row in text.splitlines():
    if row.startswith('# TYPE '):
      typed.append(row.removeprefix('# TYPE ').removesuffix(' gauge'))
      continue
    if row.startswith('# HELP '):
      continue
    sample = SAMPLE.fullmatch(row)
    assert sample and sample[1] == typed[-1], row
    name = sample[1] + (sample[2] or '')
    assert name not in found
    found[name] = float(sample[3])
  assert len(set(typed)) == len(typed)
  return found


def test_a_line_as_prometheus_reads_it() -> None:
  assert samples(exposed(LINE, 1234.5).decode()) == {
    'podrace_step': 10, 'podrace_loss': 0.1, 'podrace_info_a_b_c': 1e300,
    'podrace_episode_return_by_seed{seed="0"}': 1.5, 'podrace_episode_return_by_seed{seed="2"}': -2,
    'podrace_written_timestamp_seconds': 1234.5,
  }  # fmt: skip


@pytest.mark.parametrize(
  'where', ['', '9100', 'a:', ':1', 'a:b', '1.2.3.4:70000', 'tcp://a:1', 'a b:1', 'unix:/x']
)
def test_what_is_no_address(where: str) -> None:
  with pytest.raises(UsageError, match='HOST:PORT'):
    check_listen_address(where, True)


def test_other_machines_must_be_asked_for() -> None:
  for where in ('127.0.0.1:9100', 'localhost:9100', '[::1]:9100'):
    assert check_listen_address(where, False) == f'tcp://{where}'
  for where in ('0.0.0.0:9100', '*:9100', '10.0.0.1:9100', 'gpu1:9100', '[::]:9100'):
    assert check_listen_address(where, True)
    with pytest.raises(UsageError, match='--metrics-insecure'):
      check_listen_address(where, False)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
  made = Endpoint('tcp://127.0.0.1:*')
  yield made
  made.close()


def connect(endpoint: Endpoint) -> socket.socket:
  return socket.create_connection(('127.0.0.1', int(endpoint.address.rpartition(':')[2])), 10)


def get(endpoint: Endpoint, path: str = '/metrics') -> tuple[int, str]:
  port = int(endpoint.address.rpartition(':')[2])
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=20)
  connection.request('GET', path)
  answer = connection.getresponse()
  found = answer.status, answer.read().decode()
  if answer.status == 200:
    assert answer.getheader('Content-Type') == 'text/plain; version=0.0.4; charset=utf-8'
  connection.close()
  return found


def test_the_newest_line_is_there(endpoint: Endpoint) -> None:
  assert get(endpoint) == (200, '')
  endpoint.write(LINE)
  endpoint.write(LINE | {'step': 11})
  status, text = get(endpoint)
  found = samples(text)
  assert status == 200 and found['podrace_step'] == 11
  assert abs(found['podrace_written_timestamp_seconds'] - time.time()) < 60
  assert get(endpoint, '/')[0] == 404 and get(endpoint, '/metrics/../x')[0] == 404


def test_what_is_no_request_is_refused_and_the_next_is_served(endpoint: Endpoint) -> None:
  endpoint.write(LINE)
  for said in (b'', b'\0\xff\r\n\r\n', b'POST /metrics HTTP/1.1\r\n\r\n', b'GET ' + b'x' * 100_000):
    with connect(endpoint) as other:
      other.sendall(said)
    assert get(endpoint)[0] == 200


def stall(endpoint: Endpoint, kind: str) -> socket.socket:
  stalled = connect(endpoint)
  if kind == 'reads nothing':
    stalled.sendall(b'GET /metrics HTTP/1.0\r\n\r\n')
  if kind == 'drips':
    stalled.sendall(b'G')
  return stalled


@pytest.mark.parametrize('kind', ['silent', 'drips', 'reads nothing'])
def test_readers_that_stall_delay_no_other_and_are_ended(
  kind: str, endpoint: Endpoint, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(prometheus, 'SECONDS', 3600.0)
  endpoint.text = b'x' * 30_000_000  # more than anything between the two holds
  stalled = [stall(endpoint, kind) for _ in range(prometheus.READERS // 2)]
  endpoint.write(LINE | {'step': 12})  # returns
  for _ in range(3):
    status, text = get(endpoint)
    assert status == 200 and samples(text)['podrace_step'] == 12
  for one in stalled:
    one.close()


@pytest.mark.parametrize('kind', ['silent', 'drips', 'reads nothing'])
def test_a_reader_that_stalls_is_ended(kind: str, endpoint: Endpoint, monkeypatch: Patch) -> None:
  monkeypatch.setattr(prometheus, 'SECONDS', 2.0)  # enough for a reader that does not stall
  endpoint.text = b'x' * 30_000_000
  with stall(endpoint, kind) as stalled:
    assert get(endpoint, '/')[0] == 404  # the one before has been accepted
    until(lambda: not endpoint._readers)
    if kind != 'reads nothing':
      with contextlib.suppress(ConnectionResetError):
        assert stalled.recv(1000) == b''
  assert get(endpoint, '/')[0] == 404


def test_the_oldest_reader_goes_where_there_are_too_many(
  endpoint: Endpoint, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(prometheus, 'SECONDS', 3600.0)
  silent = [connect(endpoint) for _ in range(prometheus.READERS)]
  assert get(endpoint) == (200, '')
  assert silent[0].recv(1) == b''
  silent[-1].sendall(b'GET /metrics HTTP/1.0\r\n\r\n')
  assert b'200' in silent[-1].recv(100)
  for one in silent:
    one.close()


def test_it_ends_while_somebody_reads(endpoint: Endpoint) -> None:
  with connect(endpoint):
    get_one = Endpoint('tcp://127.0.0.1:*')
    get_one.close()
  with pytest.raises(OSError):
    connect(get_one)


def test_an_address_that_is_taken(endpoint: Endpoint) -> None:
  with pytest.raises(SecurityError, match='listen'):
    Endpoint(endpoint.address)


@pytest.mark.slow
def test_a_run_is_scraped(tmp_path: Path) -> None:
  command = ['-m', 'podrace.cli', 'train', 'catch', '--num-envs', '8', '--unroll-length', '4',
    '--agent.network.hidden', '8', '--total-steps', '100_000_000', '--log-every', '32_000',
    '--run-dir', str(tmp_path / 'run')]  # fmt: skip
  with Process(tmp_path / 'log', *command, '--metrics-listen', '127.0.0.1:*') as run:
    run.says('metrics are at http://127.0.0.1:')
    port = int(re.search(r'metrics are at http://127.0.0.1:(\d+)/metrics', run.output)[1])  # type: ignore[index]

    def scraped() -> dict[str, float]:
      connection = http.client.HTTPConnection('127.0.0.1', port, timeout=20)
      connection.request('GET', '/metrics')
      return samples(connection.getresponse().read().decode())

    until(lambda: scraped().get('podrace_step', 0) > 0)
    found = scraped()
    assert found['podrace_step'] in {x['step'] for x in lines(tmp_path / 'run')}
    assert found['podrace_steps_per_s'] > 0
