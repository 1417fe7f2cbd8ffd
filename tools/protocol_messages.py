"""Writes examples/protocol_messages.md, the tables of docs/protocol.md that the code declares.

    python tools/protocol_messages.py

Run it after a change of a message, a record, a report or a limit: a test compares the page with the code.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from podrace.distributed.environments import environment_messages, groups, slots
from podrace.distributed.environments.server import ENVIRONMENTS
from podrace.distributed.net import (
  connecting,
  connections,
  descriptors,
  frame,
  link,
  listener,
  process_metrics,
  reports,
  safe_text,
  session_messages,
  sessions,
  stream,
)
from podrace.distributed.net.frame import Kind
from podrace.distributed.parameters import parameter_messages, publisher
from podrace.distributed.replay import (
  checkpoints,
  insert_streams,
  inserting,
  replay_messages,
  sampling,
  served_tables,
  server,
  table_settings,
)
from podrace.envs.host import answer_timer
from podrace.tables.items import END_OF_KEYS

PATH = Path(__file__).parents[1] / 'examples' / 'protocol_messages.md'
EXAMPLES = Path(__file__).with_name('protocol_examples.txt')

TYPES = {
  int: 'integer', str: 'string', dict: 'map', list: 'array', bool: 'boolean', float: 'float', object: 'any',
}  # fmt: skip
OF_SERVICES: dict[str, tuple[dict[int, Kind], dict[int, Kind]]] = {
  'Remote environments': (environment_messages.OF_CLIENTS, environment_messages.OF_LEARNERS),
  'Replay': (replay_messages.OF_CLIENTS, replay_messages.OF_SERVICES),
  'Parameters': ({}, session_messages.of_listeners(parameter_messages.NEWEST)),
}
KINDS = {k.name: k for both in OF_SERVICES.values() for kinds in both for k in kinds.values()}
COMMON = {kind.name for kind in (*session_messages.OF_CLIENTS, *session_messages.OF_LISTENERS)}

RECORDS = {
  'STEP: the record of an environment': environment_messages.RECORD,
  'INSERT and SAMPLES: a chunk': replay_messages.CHUNK,
  'INSERT: an item': replay_messages.ITEM,
  'SAMPLES: an item': replay_messages.DRAWN,
  'INSERT and SAMPLES: a part': replay_messages.PART,
}

REPORTS: dict[str, dict[str, type]] = {
  'every service': reports.OF_ALL,
  'client of every service': reports.OF_CLIENT,
  'learner': reports.OF_LEARNER,
  'client of a learner': reports.OF_LEARNERS_CLIENT,
  'client of the replay service': dict.fromkeys(
    ('inserted', 'sampled', 'refused', 'waiting_inserts', 'waiting_samples', 'kept_bytes', 'unread_bytes'),
    int,
  ),
  'replay service': dict(tables=list, bytes=int, checkpoints=list),
  'parameters': dict(version=int, parameter_bytes=int, program=dict),
  '`program` of parameters': dict(steps=int, replay=list),
  'client of parameters': dict(role=str, first=int, environments=int, versions=int, bytes=int),
}  # fmt: skip

LIMITS: dict[str, list[tuple[str, Any]]] = {
  'Frames': [
    ('bytes of `size`, to any listener, without a session', session_messages.GUEST_BYTES),
    (
      'the same, to a learner',
      f'a STEP of all its slots and 64; at least {session_messages.GUEST_BYTES:,}',
    ),
    (
      'the same, to `podrace replay`: `largest` in WELCOME',
      f'{replay_messages.FRAME_BYTES:,}, or `--client-bytes` and '
      f'{replay_messages.MESSAGE_CHUNKS * replay_messages.CHUNK.itemsize + server.SLACK:,} if that is less',
    ),
    ('the same, to the listener of parameters', publisher.Publisher.largest),
    ('the same, to a client', connecting.LARGEST),
    ('bytes of `head`', frame.HEADER_BYTES),
    ('nested arrays and maps in a header', frame.DEPTH),
    ('an integer in a header', frame.NUMBER - 1),
  ],
  'Times, in seconds': [
    ('from connecting to HELLO or ASK, TLS included', connections.SILENT_SECONDS),
    ('silence of a connection after WAIT or ASK', connections.TALKING_SECONDS),
    ('`silence` of a session: by default (`--peer-timeout`)', session_messages.SILENCE),
    ('silence of a client before it sends PING, at most', '`silence` / 4'),
    ('silence of a listener before a client that sends PING connects anew', '2 * `silence`'),
    ('between WAIT and the next HELLO', link.HELLO_SECONDS),
    ('the same, over a Unix socket', connecting.UNIX_RETRY_SECONDS),
    ("between METRICS of podrace's clients", link.METRICS_SECONDS),
    (
      'from GONE to the end of the stream, unless the client closes it first',
      connections.ENDING_SECONDS,
    ),
    ('from BYE or REFUSED to the end of the stream, likewise', connections.SILENT_SECONDS),
    (
      "between attempts of podrace's clients to connect: times 0.5 to 1, at random",
      f'{connecting.BACKOFF[0]}, doubled up to {connecting.BACKOFF[1]:g}; over a Unix socket {connecting.UNIX_RETRY_SECONDS}',
    ),
    ('between looks of a listener at its clock', listener.TICK),
    ('age of a report', sessions.REPORT_SECONDS),
  ],
  'Sessions': [
    ('sessions of a listener; then WAIT', sessions.PEERS),
    (
      'connections without a session; then the one that was silent longest is cut',
      descriptors.GUESTS,
    ),
    ('frames that a client with a session has not read; then it is cut', sessions.BACKLOG),
    ('bytes of these in frames without arrays, likewise', stream.ANSWER_BYTES),
    (
      'frames that a client without a session has not read; then it is cut',
      connections.GUEST_BACKLOG,
    ),
    (
      'messages of a client that are handled before the next client',
      f'{connections.MESSAGES}, or {connections.MESSAGE_SECONDS * 1000:g} ms; without a session {connections.GUEST_MESSAGES}',
    ),
    ('characters of a string in HELLO', safe_text.STRING),
    (
      'strings in REFUSED, and characters of each',
      f'{safe_text.REASONS + 1}; about {safe_text.TEXT}',
    ),
    ('numbers in METRICS', process_metrics.MAX_METRICS),
    ('clients in a REPORT', listener.REPORTED),
    (
      'characters of `name` of a client there; of `env`',
      f'{safe_text.STRING + 20}; {safe_text.STRING}',
    ),
  ],
  'Remote environments': [
    ('number of a group', environment_messages.GROUPS - 1),
    ('environments of a client', ENVIRONMENTS),
    ('groups of all clients that wait for slots; then GONE', slots.WAITING),
    (
      'seconds from START or ACTION to STEP; then GONE',
      f"the learner's `--env-deadline` and {answer_timer.START_SECONDS:g}",
    ),
    ('restarts that a new `life` may count', groups.MAX_RESTARTS),
    ('timesteps over which `answer_ms` and `step_ms` go', groups.LATENCY_SAMPLES),
  ],
  'Replay': [
    ('tables', served_tables.TABLES),
    ('bytes of the settings of all tables, as JSON', served_tables.SETTINGS_BYTES),
    ('finite numbers of a rate limiter', int(table_settings.MOST_NUMBER)),
    ('tables in a REPORT; in `sizes`', f'{server.REPORTED}; {served_tables.SIZES}'),
    ('tables, specs and leaves of signatures that a session declares', inserting.DECLARATIONS),
    ('bytes of the signatures of a session, as JSON', inserting.DECLARED_BYTES),
    ('depth of a structure; nodes', f'{replay_messages.DEPTH}; {replay_messages.NODES:,}'),
    ('leaves of a signature', replay_messages.LEAVES),
    (
      'characters of a key and of `named NAME`; of the name of a leaf',
      f'{replay_messages.KEY_CHARACTERS}; {replay_messages.NAME_CHARACTERS:,}',
    ),
    ('bytes of a row', replay_messages.FRAME_BYTES),
    ('rows of a chunk whose rows have no bytes', replay_messages.ROWS),
    (
      'bytes of a packed chunk of several rows, unpacked',
      replay_messages.UNPACKED_CHUNK_BYTES,
    ),
    ('items of an INSERT', replay_messages.MESSAGE_ITEMS),
    ('new chunks of an INSERT; references', f'{replay_messages.MESSAGE_CHUNKS:,} each'),
    ('keys of an item', f'1 to {END_OF_KEYS - 1:,}'),
    ('keys of an UPDATE or DELETE', replay_messages.MESSAGE_KEYS),
    ('refused items of a stream that are remembered', insert_streams.REFUSED_ITEMS),
    ('streams that are remembered; the one that was silent longest goes first', inserting.STREAMS),
    ('SAMPLEs of a client without an answer', replay_messages.MOST_REQUESTS),
    ('`n` of a SAMPLE', replay_messages.MOST_ITEMS),
    ('bytes of the items of a SAMPLES', replay_messages.FRAME_BYTES),
    (
      'items times leaves of a SAMPLES; references',
      f'{replay_messages.MESSAGE_PARTS:,} each',
    ),
    (
      'samples that a client has not read; then it waits',
      f'{replay_messages.MOST_BYTES:,} bytes and one answer, or {replay_messages.MOST_UNREAD} answers',
    ),
    (
      'bytes of the samples that all clients have not read; then the client with the most is cut',
      sampling.UNREAD_BYTES,
    ),
    ('SAVEs that wait', checkpoints.SAVES),
  ],
  'Parameters': [
    ('leaves', publisher.MOST_LEAVES),
    ('bytes of all leaves', publisher.MOST_BYTES),
    ('old versions that are kept for clients that still read them', publisher.KEPT),
  ],
}


def text() -> str:
  """The page."""
  parts = [
    "# The protocol's messages",
    'Made by `python tools/protocol_messages.py` from the code of podrace/distributed. [The protocol](../docs/protocol.md) '
    'says what messages, fields and records mean.',
    '# Messages',
    *_message_tables(),
    '# Records',
    *_record_tables(),
    '# Reports',
    'Entries of the maps in REPORT, and of the value of INFO.',
    table(('map', 'entries'), _report_rows()),
    '# Limits',
    *_limit_tables(),
    '# Examples',
    'Each message is followed by its bytes in hexadecimal.',
    examples(EXAMPLES.read_text()),
  ]
  return '\n\n'.join(parts) + '\n'


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
  """Rows as a table of Markdown."""
  lines = [list(head), *([str(x) for x in row] for row in rows)]
  lines.insert(1, ['---'] * len(lines[0]))
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def _message_tables() -> Iterator[str]:
  sections = {'Sessions': (session_messages.OF_CLIENTS, session_messages.OF_LISTENERS)} | {
    name: tuple([k for k in kinds.values() if k.name not in COMMON] for kinds in both)
    for name, both in OF_SERVICES.items()
  }
  head = 'kind', 'number', 'sent by', 'header', 'fields', 'arrays'
  for name, both in sections.items():
    yield f'## {name}'
    senders = zip(('client', 'listener'), both, strict=True)
    yield table(head, (_message_row(k, by) for by, kinds in senders for k in kinds))


def _message_row(kind: Kind, sender: str) -> list[Any]:
  types = [TYPES[x] for x in kind.types] + ['array of sizes'] * (kind.arrays > 1)
  header = f'`[{", ".join(types)}]`' if kind.layout is None else 'u32, u32'
  fields, _, arrays = kind.about.partition('; ')
  return [
    kind.name,
    kind.number,
    sender,
    header,
    fields,
    f'{kind.arrays}: {arrays}' if arrays else 'none',
  ]


def _record_tables() -> Iterator[str]:
  for name, dtype in RECORDS.items():
    yield f'{name}, {dtype.itemsize} bytes:'
    yield table(('offset', 'bytes', 'type', 'field'), _record_rows(dtype))


def _record_rows(dtype: np.dtype) -> Iterator[list[Any]]:
  for name in dtype.names or ():
    kind, offset = (dtype.fields or {})[name][:2]
    yield [offset, kind.itemsize, f'{kind.kind}{8 * kind.itemsize}', f'`{name}`']


def _report_rows() -> Iterator[list[Any]]:
  info = replay_messages.OF_ANSWER[replay_messages.INFO]
  of_table = {entry: kind for entry, kind in info.items() if not entry.startswith('why')}
  tables = {'table of the replay service': of_table, 'INFO': info}
  for name, entries in (REPORTS | tables).items():
    shown = [f'`{entry}`: {TYPES[kind]}' for entry, kind in entries.items()]
    yield [name, ', '.join([*shown, *(['`max_bytes`: integer or null'] if name in tables else ())])]


def _limit_tables() -> Iterator[str]:
  for name, rows in LIMITS.items():
    yield f'## Limits: {name.lower()}'
    yield table(('limit', 'at most'), ([about, _number(value)] for about, value in rows))


def _number(value: Any) -> str:
  if isinstance(value, float):
    return f'{value:g}'
  return f'{value:,}' if isinstance(value, int) else value


def examples(source: str) -> str:
  """Examples with their bytes. The source has a line for each message, and its arrays below."""
  lines: list[str] = []
  blocks = [block.splitlines() for block in source.strip().split('\n\n')]
  for block in blocks:
    if block[0].startswith('#'):
      lines += [*block, '']
      continue
    lines.append('```')
    for first, *body in _messages(block):
      lines += [first, *_bytes(first, body)]
    lines += ['```', '']
  return '\n'.join(lines).strip()


def _messages(block: list[str]) -> Iterator[list[str]]:
  message: list[str] = []
  for line in block:
    if not line.startswith(' ') and message:
      yield message
      message = []
    message.append(line)
  yield message


def _bytes(first: str, body: list[str]) -> Iterator[str]:
  """The lines of a message: prefix and header, then its arrays as the source has them."""
  name, _, shown = first.partition(' ')
  kind, fields = KINDS[name], json.loads(shown)
  data = bytes.fromhex(''.join(line.partition('#')[0] for line in body))
  sizes = fields.pop() if kind.arrays > 1 else [len(data)]
  head = kind.pack(fields, frame.split(data, sizes) if kind.arrays else [])[0]
  assert math.fsum(sizes) == len(data)
  prefix = f'{head[:4].hex(" ")}  {head[4:5].hex()}  {head[5:8].hex(" ")}'
  if len(head) <= 32:
    yield f'  {prefix}   {head[8:].hex(" ")}'.rstrip()
  else:
    yield f'  {prefix}'
    yield from textwrap.wrap(head[8:].hex(' '), 50, initial_indent='  ', subsequent_indent='  ')
  yield from body


if __name__ == '__main__':
  PATH.write_text(text())
