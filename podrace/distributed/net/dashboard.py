"""`podrace top`: a learner or a service with its clients, in the terminal. Imports no JAX."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from podrace.distributed.net import address as addresses
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import reports, session_messages
from podrace.distributed.net.channel import ConnectionClosed
from podrace.distributed.net.connecting import ForeignKeys, Outage, Outgoing, describe_failure
from podrace.distributed.net.frame import Kind, WireError
from podrace.distributed.net.frame_reader import new_scratch, no_memory
from podrace.distributed.net.link import Refused, refusal
from podrace.distributed.net.loop import Loop
from podrace.distributed.net.safe_text import TEXT, plain
from podrace.distributed.net.stream import SendQueueFull
from podrace.system.output import Lasting, print_json, print_text

ANSWER_SECONDS = 5.0  # to get a report
KINDS = session_messages.of_listeners()
HEAD = (
  'client', 'environments', 'frames/s', 'answer p50 p99', 'step p50 p99', 'restarts', 'MB', 'seen',
)  # fmt: skip
RATES = ('inserts', 'samples')  # of a table
COLUMNS = 24  # of a table of clients, at most, as clients name their metrics


class Asker:
  """A connection without a session that asks for reports.

  Owner: the caller, which calls `close`.

  Raises:
    SecurityError: for an invalid address or keys.
  """

  def __init__(self, address: str, keys: Path | None, insecure: bool) -> None:
    addresses.check_address(address, keys, insecure, 'top')
    self._address = address
    self._context = None if keys is None else net_keys.client_context(keys)
    self._loop = Loop()
    self._connection: Outgoing | None = None
    self._report: dict[str, Any] | None = None
    self._outage = Outage('service', address, 0.0)

  def ask(self) -> dict[str, Any]:
    """Return the report of the service.

    Raises:
      Refused: if the service wants keys, and there are none, or has keys of another authority.
      TimeoutError: if no valid report comes within ANSWER_SECONDS.
    """
    self._report = None
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
      try:
        self._ask(end)
      except ForeignKeys as e:
        raise Refused(f'{self._address}: {e}') from None
      except (ConnectionClosed, SendQueueFull, OSError, WireError) as e:
        self._outage.failed(describe_failure(e))
        self._hang_up()
        time.sleep(0.2)
      if self._report is not None:
        return self._report
    raise TimeoutError(
      f'no answer from {self._address} in {ANSWER_SECONDS:.0f} s: {self._outage.why}'
    )

  def _ask(self, end: float) -> None:
    if self._connection is None:
      self._connection = Outgoing(
        self._loop, self._address, self._context, KINDS, self._hear, no_memory, new_scratch()
      )
      self._outage.stands()
    connection, stream = self._connection, self._connection.stream
    ask = stream.shaken
    while self._report is None and (left := end - time.monotonic()) > 0:
      if ask:
        stream.send(session_messages.ASK)
      connection.look_for_room()
      ask = False
      for _, events in self._loop.wait(left):
        ask = connection.serve(events)

  def _hear(self, kind: Kind, fields: Sequence[Any], body: memoryview, sizes: Any) -> None:
    if kind is session_messages.REPORT:
      self._report = reports.read(fields[0])
    elif kind is session_messages.REFUSED:
      raise refusal(self._address, fields[0])
    elif kind is session_messages.GONE:
      raise ConnectionClosed(plain(fields[0]))

  def _hang_up(self) -> None:
    if self._connection is not None:
      self._connection.close()
    self._connection = None

  def close(self) -> None:
    """Close the connection."""
    self._hang_up()
    self._loop.close()


def _plain(text: Any) -> str:
  """Escape rich's markup and terminal commands in text of a peer."""
  from rich.markup import escape

  return escape(plain(text))


def _counts(report: dict[str, Any]) -> str:
  return ', '.join(f'{_plain(k)} {v:,}' for k, v in sorted(report['counts'].items()))


def table(report: dict[str, Any], before: dict[str, int], seconds: float) -> Any:
  """Return a report as rich shows it.

  Args:
    report: of any service.
    before: `counters` of the report that came `seconds` ago.
    seconds: 0 if there is none.
  """
  from rich.table import Table

  if 'env' not in report:
    return service(report, before, seconds)
  taken = report['slots'] - report['free']
  title = f'{_plain(report["env"])}: {taken} of {report["slots"]} slots taken; {_counts(report)}'
  shown = Table(*HEAD, title=title)
  for c in report['clients']:
    shown.add_row(
      _plain(c['name']), f'{c["acting"]} of {c["environments"]}',
      _rate(c['name'], c['frames'], before, seconds),
      '{:.1f} {:.1f} ms'.format(*c['answer_ms']), '{:.1f} {:.1f} ms'.format(*c['step_ms']),
      str(c['restarts']), _number(c['metrics'].get('resident_mb')), f'{c["last_seen_s"]:.1f} s',
    )  # fmt: skip
  if report['more_clients']:
    shown.add_row(f'and {report["more_clients"]} more', *[''] * (len(HEAD) - 1))
  return shown


def service(report: dict[str, Any], before: dict[str, int], seconds: float) -> Any:
  """Return the report of `podrace replay`, or of a learner that publishes parameters."""
  from rich.console import Group

  title = f'{_plain(report["service"])}: {_counts(report)}; {report["resident_mb"]:,.0f} MB'
  clients = _clients(report, title)
  replay = [_tables(r, where, before, seconds) for where, r in _services(report)]
  if 'version' not in report:
    return Group(*replay, clients)
  steps = report['program'].get('steps', 0)
  head = (
    f'version {report["version"]}, {report["parameter_bytes"]:,} bytes; '
    f'{steps:,} steps, {_rate("steps", steps, before, seconds)} steps/s'
  )
  if missing := report['program'].get('missing'):
    head += f'; missing: {_plain(", ".join(missing))}'
  return Group(head, clients, *replay)


def _clients(report: dict[str, Any], title: str) -> Any:
  """Return a table of the clients, with their metrics."""
  from rich.table import Table

  common = ('name', 'seconds', 'last_seen_s', 'metrics')
  rows = [{k: x for k, x in c.items() if k not in common} | c['metrics'] for c in report['clients']]
  columns = list(dict.fromkeys(k for row in rows for k in row))[:COLUMNS]
  shown = Table('client', *map(_plain, columns), 'seen', title=title)
  for c, row in zip(report['clients'], rows, strict=True):
    shown.add_row(
      _plain(c['name']), *(_number(row.get(k)) for k in columns), f'{c["last_seen_s"]:.1f} s'
    )
  if report['more_clients']:
    shown.add_row(f'and {report["more_clients"]} more', *[''] * (len(columns) + 1))
  return shown


def _tables(report: dict[str, Any], where: str, before: dict[str, int], seconds: float) -> Any:
  """Return the tables of a replay service; `where` names the shard."""
  from rich.table import Table

  title = f'{_plain(report["service"])} {where}: {report["resident_mb"]:,.0f} MB'
  shown = Table('table', 'items', 'MB', 'inserts/s', 'samples/s', 'waiting', 'limiter', title=title)
  for t in report['tables']:
    shown.add_row(
      _plain(t['name']), f'{t["size"]:,} of {t["max_size"]:,}', f'{t["bytes"] / 1e6:,.1f}',
      *(_rate(f'{where} {t["name"]} {k}', t[k], before, seconds) for k in RATES),
      f'{t["waiting_inserts"]} inserts, {t["waiting_samplers"]} samplers', _plain(t['limiter']),
    )  # fmt: skip
  return shown


def _number(x: Any) -> str:
  """Return a readable number, or other text unchanged."""
  if isinstance(x, float):
    return f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'
  return f'{x:,}' if isinstance(x, int) else _plain(x or '')


def _rate(name: str, now: int, before: dict[str, int], seconds: float) -> str:
  return f'{(now - before.get(name, now)) / seconds if seconds else 0.0:,.0f}'


def _services(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
  """Return names and reports of a learner's shards; for a replay service, its own report."""
  if 'version' not in report:
    return [('', report)]
  return [(f'shard {i}', shard) for i, shard in enumerate(report['program'].get('replay', []))]


def counters(report: dict[str, Any]) -> dict[str, int]:
  """Return the counts of a report that are shown as rates, by name."""
  if 'env' in report:
    return {c['name']: c['frames'] for c in report['clients']}
  counts = {'steps': report['program'].get('steps', 0)} if 'version' in report else {}
  for where, shard in _services(report):
    counts |= {f'{where} {t["name"]} {k}': t[k] for t in shard['tables'] for k in RATES}
  return counts


def run(address: str, keys: Path | None, insecure: bool, once: bool, every: float) -> int:
  """Run `podrace top`; return the exit code."""
  asker = Asker(address, keys, insecure)
  try:
    if Lasting(sys.stdout).is_live and not once:
      _live(asker, every)
    print_json(asker.ask())
    while not once:
      sys.stdout.flush()
      time.sleep(max(every, 0.1))
      print_json(asker.ask())
  except TimeoutError as e:
    print_text(f'podrace top: {plain(e, 4 * TEXT)}', file=sys.stderr)
    return 1
  finally:
    asker.close()
  return 0


def _live(asker: Asker, every: float) -> NoReturn:
  from rich.live import Live

  report = asker.ask()
  before, at = counters(report), time.monotonic()
  with Live(table(report, before, 0.0), auto_refresh=False) as live:
    while True:
      time.sleep(max(every, 0.1))
      report, now = asker.ask(), time.monotonic()
      live.update(table(report, before, now - at), refresh=True)
      before, at = counters(report), now
