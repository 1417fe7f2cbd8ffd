"""Serves an exported policy over HTTP on this machine, with NumPy alone.

    podrace export RUN policy
    python examples/serve_policy.py policy --port 8000

    curl localhost:8000/act -d '{"client": "a", "observation": [0.1, 0, 0, 0], "first": true}'
    {"action": 1}

`first` begins an episode. The server keeps the recurrent states of the newest `--clients` clients; any other client
begins anew. `GET /` answers with policy.json, which has the spaces.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.server
import json
import threading
from typing import Any

import numpy as np

import podrace

LONGEST = 16 * 2**20  # bytes of a request
NAME = 200  # characters of the name of a client


class States:
  """The recurrent states of the clients that were here last."""

  def __init__(self, most: int) -> None:
    self._most, self._lock = most, threading.Lock()
    self._states: collections.OrderedDict[str, Any] = collections.OrderedDict()

  def take(self, client: str) -> Any:
    with self._lock:
      return self._states.get(client)

  def put(self, client: str, state: Any) -> None:
    with self._lock:
      self._states[client] = state
      self._states.move_to_end(client)
      while len(self._states) > self._most:
        self._states.popitem(last=False)


def arrays(space: Any, x: Any) -> Any:
  """An observation out of JSON, as the policy takes it."""
  if 'dict' in space:
    return {k: arrays(s, x[k]) for k, s in space['dict'].items()}
  if 'tuple' in space:
    return tuple(arrays(s, y) for s, y in zip(space['tuple'], x, strict=True))
  found = np.asarray(x)
  if found.dtype.kind not in 'iufb':
    raise ValueError(f'{found.dtype} came, expected {space["dtype"]}')
  same = found.astype(space['dtype'])
  if same.dtype.kind != 'f' and not np.array_equal(found, same):
    raise ValueError(f'{found.tolist()} came, which is no {space["dtype"]}')
  return same


class Handler(http.server.BaseHTTPRequestHandler):
  policy: Any
  states: States
  timeout = 10  # seconds, for a client that says nothing

  def do_GET(self) -> None:
    self.answer(200, self.policy.about)

  def do_POST(self) -> None:
    try:
      length = int(self.headers.get('Content-Length') or 0)
      if not 0 <= length <= LONGEST:
        return self.answer(413, {'error': f'a request has at most {LONGEST} bytes, not {length}'})
      request = json.loads(self.rfile.read(length))
      client, first = request['client'], request.get('first', False)
      if not isinstance(client, str) or len(client) > NAME:
        raise ValueError(f'client is a text of at most {NAME} characters')
      observation = arrays(self.policy.about['observation_space'], request['observation'])
      state = None if first else self.states.take(client)
      action, state = self.policy.act(observation, state)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
      return self.answer(400, {'error': f'{type(e).__name__}: {e}'})
    self.states.put(client, state)
    return self.answer(200, {'action': action.tolist()})

  def answer(self, code: int, content: Any) -> None:
    body = json.dumps(content).encode() + b'\n'
    self.send_response(code)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *args: Any) -> None:
    """Says nothing about each request."""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('policy', help='the directory that podrace export wrote')
  parser.add_argument('--port', type=int, default=8000, help='0 takes a free one')
  parser.add_argument('--clients', type=int, default=1000, help='whose states are kept')
  args = parser.parse_args()
  try:
    Handler.policy = podrace.load_policy(args.policy)
  except ValueError as e:
    parser.error(str(e))
  Handler.states = States(args.clients)
  with http.server.ThreadingHTTPServer(('127.0.0.1', args.port), Handler) as server:
    print(f'serving {args.policy} at http://127.0.0.1:{server.server_port}', flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      server.serve_forever()


if __name__ == '__main__':
  main()
