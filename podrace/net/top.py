"""`podrace top`: what the clients of a learner or a service do, in the terminal. Imports no JAX."""

from __future__ import annotations

import json
import selectors
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.net import address as addresses
from podrace.net import keys as net_keys
from podrace.net import session
from podrace.net.frame import Kind, WireError
from podrace.net.link import LARGEST, NOBODY, NOTHING_KNOWN, SAYS_NOTHING
from podrace.net.stream import Ended, Full, Stream, new_scratch, no_delay, why
from podrace.net.text import plain

ANSWER_SECONDS = 5.0  # that a learner has to answer
KINDS = session.of_listeners()
HEAD = ('client', 'environments', 'frames/s', 'answer p50 p99', 'step p50 p99', 'restarts', 'seen')


class Asker:
  """A connection that asks how things are, and has no session.

  Raises:
    SecurityError: for addresses or keys that can't be used.
  """

  def __init__(self, address: str, keys: Path | None, insecure: bool) -> None:
    addresses.check_address(address, keys, insecure, 'top')
    self._address = address
    self._context = None if keys is None else net_keys.client_context(keys)
    self._stream: Stream | None = None
    self._report: dict[str, Any] | None = None
    self._why = NOTHING_KNOWN

  def ask(self) -> dict[str, Any]:
    """The report of whoever listens there.

    Raises:
      TimeoutError: if there is no answer.
    """
    self._report = None
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
      try:
        self._ask(end)
      except (Ended, Full, OSError, WireError) as e:
        self._why = NOBODY if isinstance(e, ConnectionRefusedError | FileNotFoundError) else why(e)
        self.close()
        time.sleep(0.2)
      if self._report is not None:
        return self._report
    raise TimeoutError(f'no answer from {self._address} in {ANSWER_SECONDS:.0f} s: {self._why}')

  def _ask(self, end: float) -> None:
    if self._stream is None:
      socket = addresses.connect(self._address, ANSWER_SECONDS)
      no_delay(socket)
      nothing = lambda *args: None  # noqa: E731
      self._stream = Stream(
        socket, KINDS, self._hear, nothing, LARGEST, 8, new_scratch(), self._context
      )
      self._why = SAYS_NOTHING
    stream = self._stream
    with selectors.DefaultSelector() as selector:
      selector.register(stream, selectors.EVENT_READ)
      while not stream.shaken and stream.shake() and (left := end - time.monotonic()) > 0:
        selector.select(min(left, 0.05))
      stream.send(session.ASK)
      while self._report is None and (left := end - time.monotonic()) > 0:
        if stream.pending() or selector.select(left if stream.flush() else 0.01):
          stream.receive()

  def _hear(self, kind: Kind, fields: Sequence[Any], body: memoryview, sizes: Any) -> None:
    if kind is session.REPORT:
      self._report = fields[0]
    elif kind is session.GONE:
      raise Ended(plain(fields[0]))

  def close(self) -> None:
    if self._stream is not None:
      self._stream.close()
    self._stream = None


def _plain(text: Any) -> str:
  """Somebody else's text as text: neither rich's markup nor what terminals obey."""
  from rich.markup import escape

  return escape(plain(text))


def _counts(report: dict[str, Any]) -> str:
  return ', '.join(f'{_plain(k)} {v:,}' for k, v in sorted(report['counts'].items()))


def table(report: dict[str, Any], before: dict[str, int], seconds: float) -> Any:
  """A report as rich shows it; `before` is what was `counted` so many seconds ago."""
  from rich.table import Table

  if 'env' not in report:
    return service(report, before, seconds)
  taken = report['slots'] - report['free']
  title = f'{_plain(report["env"])}: {taken} of {report["slots"]} slots taken; {_counts(report)}'
  shown = Table(*HEAD, title=title)
  for c in report['clients']:
    rate = (c['frames'] - before.get(c['name'], c['frames'])) / seconds if seconds else 0.0
    shown.add_row(
      _plain(c['name']), f'{c["acting"]} of {c["environments"]}', f'{rate:,.0f}',
      '{:.1f} {:.1f} ms'.format(*c['answer_ms']), '{:.1f} {:.1f} ms'.format(*c['step_ms']),
      str(c['restarts']), f'{c["last_seen_s"]:.1f} s',
    )  # fmt: skip
  if report['more_clients']:
    shown.add_row(f'and {report["more_clients"]} more', *[''] * (len(HEAD) - 1))
  return shown


def service(report: dict[str, Any], before: dict[str, int], seconds: float) -> Any:
  """The report of `podrace replay` or of published parameters."""
  from rich.console import Group
  from rich.table import Table

  known = ('name', 'seconds', 'last_seen_s')
  columns = [k for c in report['clients'][:1] for k in c if k not in known]
  title = f'{_plain(report["service"])}: {_counts(report)}'
  clients = Table('client', *map(_plain, columns), 'seen', title=title)
  for c in report['clients']:
    clients.add_row(_plain(c['name']), *(f'{c[k]:,}' for k in columns), f'{c["last_seen_s"]:.1f} s')
  if report['more_clients']:
    clients.add_row(f'and {report["more_clients"]} more', *[''] * (len(columns) + 1))
  if 'version' in report:
    return Group(f'version {report["version"]}, {report["parameter_bytes"]:,} bytes', clients)
  shown = Table('table', 'items', 'MB', 'inserts/s', 'samples/s', 'waiting', 'limiter')
  for t in report['tables']:
    rates = [
      (t[k] - before.get(f'{t["name"]} {k}', t[k])) / seconds if seconds else 0.0
      for k in ('inserts', 'samples')
    ]
    shown.add_row(
      _plain(t['name']), f'{t["size"]:,} of {t["max_size"]:,}', f'{t["bytes"] / 1e6:,.1f}',
      *(f'{rate:,.0f}' for rate in rates),
      f'{t["waiting_inserts"]} inserts, {t["waiting_samplers"]} samplers', _plain(t['limiter']),
    )  # fmt: skip
  return Group(shown, clients)


def counted(report: dict[str, Any]) -> dict[str, int]:
  """What a report has of which rates are made, by name."""
  if 'env' not in report:
    kinds = ('inserts', 'samples')
    return {f'{t["name"]} {k}': t[k] for t in report.get('tables', []) for k in kinds}
  return {c['name']: c['frames'] for c in report['clients']}


def run(address: str, keys: Path | None, insecure: bool, once: bool, every: float) -> int:
  """`podrace top`: the exit code."""
  if every <= 0:
    raise ValueError(f'--every must be more than 0 seconds, not {every}')
  asker = Asker(address, keys, insecure)
  try:
    report = asker.ask()
    if once:
      print(json.dumps(report))
      return 0
    _live(asker, report, every)
  except TimeoutError as e:
    print(f'podrace top: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  finally:
    asker.close()
  return 0


def _live(asker: Asker, report: dict[str, Any], every: float) -> None:
  from rich.live import Live

  before, at = counted(report), time.monotonic()
  with Live(table(report, before, 0.0), auto_refresh=False) as live:
    while True:
      time.sleep(max(every, 0.1))
      report, now = asker.ask(), time.monotonic()
      live.update(table(report, before, now - at), refresh=True)
      before, at = counted(report), now
