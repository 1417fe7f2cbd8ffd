"""What an acting process and its learner must agree on, and how parameters travel."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podrace import errors
from podrace.distributed.net import keys
from podrace.distributed.net.address import check_address
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.listener import Listen
from podrace.distributed.net.safe_text import plain
from podrace.distributed.net.session_messages import SILENCE
from podrace.errors import UsageError
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import argument, changes, option, to_json
from podrace.system.files import write_json
from podrace.system.files.reading import read_json
from podrace.topology import on_host

RECORD, FINISHED = '.run', '.finished'  # what is published besides parameters
RUN = 'run'  # of the record: the name of the run, which its tables have, too
DIFFERENCES = 10  # that are listed, of another run
COMMON = ('agent', 'env', 'num_envs', 'unroll_length')  # what the two sides must agree on


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Where the others are."""

  replay: tuple[str, ...]  # of the service, or of its shards
  parameters: str  # where the learner publishes them
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = SILENCE  # of silence, after which the learner drops an acting process
  announce: Announcement | None = None  # of the learner, once it listens


def check(addresses: Addresses, listens: bool = True) -> None:
  """Raises SecurityError for addresses and keys with which a learner can't connect, or listen if it does."""
  a = addresses
  Listen(a.parameters, a.keys, a.insecure, a.peer_timeout)
  for address in a.replay:
    check_address(address, a.keys, a.insecure, '--connect-replay')
  if a.keys is not None:
    if listens:
      keys.server_context(a.keys)
      keys.Allowed(a.keys / keys.ALLOWED)
    try:
      keys.client_context(a.keys)
    except errors.SecurityError as e:
      raise errors.SecurityError(f'{e}; a learner is a client of its replay service') from e


def run_name(run_dir: Path) -> str:
  """The name of a run, made with its directory and kept there, so that a resumed run has the same.

  Raises:
    UsageError: if what is kept there is no name.
  """
  path = run_dir / 'name.json'
  if (name := read_json(path)) is None:
    name = f'{plain(run_dir.resolve().name)[:100]}-{os.urandom(4).hex()}'
    write_json(path, name)
  if not isinstance(name, str) or not 0 < len(name) <= 200 or plain(name) != name:
    raise UsageError(f'{path} is not the name of a run')
  return name


def record(config: Config) -> dict[str, Any]:
  """What the two sides must agree on."""
  return {k: v for k, v in to_json(config, whole=True).items() if k in COMMON}


def read_record(document: np.ndarray | None) -> tuple[str, dict[str, Any]]:
  """Reads the name of a learner's run and its `record`, as they are published; both are empty if nothing is.

  Raises:
    UsageError: if they are something else.
  """
  if document is None:
    return '', {}
  try:
    found = json.loads(document.tobytes())
  except (ValueError, RecursionError) as e:
    raise UsageError(f'the learner publishes no record of a run, but what is not JSON ({e})') from e
  if not isinstance(found, dict) or not isinstance(found.get(RUN, ''), str):
    raise UsageError(f'the learner publishes no record of a run, but {plain(repr(found)[:200])}')
  return found.pop(RUN, ''), found


def other_run(learner: dict[str, Any], here: dict[str, Any]) -> list[str]:
  """In what an acting process has another `record` than its learner, in a few lines."""
  agents = [x.get('agent') for x in (learner, here)]
  lines, names = [], [x.get('name') if isinstance(x, dict) else None for x in agents]
  if names[0] != names[1]:  # then its settings are others as well
    lines = [f'the learner runs {names[0]}, this process {names[1]}']
    learner, here = ({k: v for k, v in x.items() if k != 'agent'} for x in (learner, here))
  lines += [
    f'{option(path)}: the learner has {argument(a)}, this process {argument(b)}'
    for path, a, b in changes(learner, here)
  ]
  more = len(lines) - DIFFERENCES
  return [plain(x) for x in lines[:DIFFERENCES]] + ([f'and {more} more'] if more > 0 else [])


def act_command(config: Config, addresses: Addresses) -> str:
  """What starts an acting process for a learner: from the preset that is nearest to its config."""
  wanted, name = record(config), agent_name(config.agent)
  bases: dict[tuple[str, ...], Config] = {(preset,): make() for preset, make in PRESETS.items()}
  near = {given: base for given, base in bases.items() if agent_name(base.agent) == name}
  if not near:  # somebody's own, with the preset that there is without one
    agent = dataclasses.replace(config.agent, **_defaults(type(config.agent)))
    near = {('--agent', name): dataclasses.replace(bases['catch',], agent=agent)}
  different = {given: list(changes(record(base), wanted)) for given, base in near.items()}
  given = min(different, key=lambda x: len(different[x]))
  options = [f'{option(path)} {quoted(value)}' for path, _, value in different[given]]
  a = addresses
  where = f'--connect-replay {",".join(a.replay)} --params {a.parameters}'
  keys = ['--keys DIR'] if a.keys else ['--insecure'] if a.insecure else []
  return ' '.join(['podrace act', *given, *options, where, *keys])


def quoted(value: Any) -> str:
  """A record's value as a shell takes it."""
  return ' '.join(map(quoted, value)) if isinstance(value, list) else shlex.quote(str(value))


def _defaults(cls: Any) -> dict[str, Any]:
  fields = [f for f in dataclasses.fields(cls) if f.init]
  return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | {
    f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING
  }


def to_leaves(params: Any) -> list[tuple[str, np.ndarray]]:
  """Parameters as they are published."""
  found = jax.tree_util.tree_leaves_with_path(params)
  return [(jax.tree_util.keystr(path), on_host(x)) for path, x in found]


def from_leaves(like: Any, leaves: dict[str, np.ndarray]) -> Any:
  """Parameters of the shapes of `like`.

  Raises:
    UsageError: with both sides, if they are others.
  """
  paths = jax.tree_util.tree_leaves_with_path(like)
  expected = {jax.tree_util.keystr(path): x for path, x in paths}
  different = [
    f'{path}: the learner has {_kind(leaves.get(path))}, this process {_kind(expected.get(path))}'
    for path in {**expected, **leaves}
    if _kind(leaves.get(path)) != _kind(expected.get(path))
  ]
  if different:
    raise UsageError('the learner publishes other parameters:\n  ' + '\n  '.join(different))
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in expected])


def _kind(x: Any) -> str:
  return 'none' if x is None else f'{x.dtype}{list(x.shape)}'
