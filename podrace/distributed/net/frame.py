"""Frames as in docs/protocol.md: a prefix, a header, and arrays one after the other.

Nothing that comes in is trusted: any difference from the protocol is a WireError.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from podrace.errors import TransportError

VERSION = 2  # of the protocol
PREFIX = struct.Struct('<II')  # bytes that follow; kind + 256 * bytes of the header
HEADER_BYTES = 2**22  # at most
DEPTH = 100  # of nested lists and maps in a header, at most
NUMBER = 2**63  # bound of whole numbers in a header
DTYPE = re.compile(r'[<>|][biufc]\d{1,2}')  # of NumPy's numbers; it reads other text as Python

Buffer = Any  # bytes, a memoryview of bytes, or an array


class WireError(TransportError):
  """A message that breaks the protocol: the text has both sides."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
  """A kind of message, declared once by `fixed` or `packed`, and used by both ends.

  Attributes:
    number: in the prefix, 1 to 255.
    name: for error messages.
    types: of the fields; `object` for any.
    layout: of a header of fixed size; None for a list in msgpack.
    arrays: number of arrays after the header. If there is more than one, the last field of the
      header has their sizes.
    about: names of the fields, and after a semicolon of the arrays, for the documentation.
  """

  number: int
  name: str
  types: tuple[type, ...] = ()
  layout: struct.Struct | None = None
  arrays: int = 0
  about: str = ''

  def pack(self, fields: Sequence[Any], arrays: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers of a message, to be sent one after the other."""
    buffers = [x if type(x) in (bytes, memoryview) else flat(x) for x in arrays]
    sizes = [len(x) for x in buffers]
    if self.layout is not None:
      head = self.layout.pack(*fields)
    else:
      head = msgpack.packb([*fields, sizes] if self.arrays > 1 else fields)
    prefix = PREFIX.pack(len(head) + sum(sizes), self.number | len(head) << 8)
    return [prefix + head, *buffers]

  def header(self, head: Buffer, body: int) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the fields of a header, and the sizes of the arrays in the `body` bytes after it.

    Raises:
      WireError: if they differ from the declaration.
    """
    if self.layout is not None:
      if len(head) != self.layout.size:
        raise WireError(
          f'a {self.name} with a header of {len(head)} bytes, expected {self.layout.size}'
        )
      return self.layout.unpack(head), (body,)
    fields = unpack(head)
    if self.arrays <= 1:
      if body and not self.arrays:
        raise WireError(f'a {self.name} with {body} bytes after its header, expected none')
      check_fields(self.name, fields, self.types)
      return fields, (body,)
    sizes = fields.pop() if fields else None
    check_fields(self.name, fields, self.types)
    if (
      type(sizes) is not list
      or len(sizes) != self.arrays
      or any(type(n) is not int or n < 0 for n in sizes)
      or sum(sizes) != body
    ):
      raise WireError(
        f'a {self.name} whose last field is {short(sizes)}, expected the sizes of {self.arrays} '
        f'arrays that are {body} bytes together'
      )
    return fields, sizes


def fixed(number: int, name: str, layout: str, arrays: int = 0, about: str = '') -> Kind:
  """Return a kind with a header of fixed size, for frequent messages."""
  return Kind(number, name, (), struct.Struct(layout), arrays, about)


def packed(number: int, name: str, *types: type, arrays: int = 0, about: str = '') -> Kind:
  """Return a kind with a header in msgpack."""
  return Kind(number, name, types, None, arrays, about)


def numbered(*kinds: Kind) -> dict[int, Kind]:
  """Return kinds by their numbers, which must differ."""
  by_number = {kind.number: kind for kind in kinds}
  if len(by_number) < len(kinds) or not all(0 < n < 256 for n in by_number):
    raise ValueError(
      f'numbers of kinds {[k.number for k in kinds]}, expected different ones below 256'
    )
  return by_number


def split(body: Buffer, sizes: Iterable[int]) -> list[memoryview]:
  """Return the arrays of a body."""
  view, at, arrays = memoryview(body), 0, []
  for size in sizes:
    arrays.append(view[at : (at := at + size)])
  return arrays


def flat(x: Any) -> memoryview:
  """Return the bytes [n] u8 of an array, without a copy if it is contiguous."""
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


# --- headers in msgpack


def unpack(data: Buffer) -> list[Any]:
  """Return the list of a header.

  Raises:
    WireError: if it is no list in msgpack, or too large.
  """
  if len(data) > HEADER_BYTES:
    raise WireError(f'a header of {len(data)} bytes, at most {HEADER_BYTES}')
  try:
    fields = msgpack.unpackb(data, object_hook=_check_keys)
  except WireError:
    raise
  except Exception as e:  # a dozen classes, RecursionError among them
    raise WireError(f'a header that is not msgpack ({type(e).__name__})') from None
  if not isinstance(fields, list):
    raise WireError('a header that is not a list')
  if len(data) > DEPTH and _is_deep(fields):  # a shorter header cannot be
    raise WireError(f'a header of more than {DEPTH} lists and maps within each other')
  return fields


def _check_keys(x: dict[Any, Any]) -> dict[str, Any]:
  """Refuse a map with keys that are not strings, as JSON does."""
  for key in x:
    if type(key) is not str:
      raise WireError(f'a map with the key {short(key)}, expected strings')
  return x


def _is_deep(x: Any) -> bool:
  """Return whether lists and maps nest deeper than DEPTH, so that repr may fail."""
  level = [x]
  for _ in range(DEPTH):
    level = [
      inner
      for outer in level
      if isinstance(outer, list | dict)
      for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]
    if not level:
      return False
  return True


def check_fields(name: str, fields: Sequence[Any], types: Sequence[type]) -> None:
  """Refuse fields of other types, and negative whole numbers.

  Raises:
    WireError: naming the field.
  """
  if len(fields) != len(types):
    raise WireError(f'{len(fields)} fields in a {name}, expected {len(types)}')
  for x, kind in zip(fields, types, strict=True):
    if kind is not object and (type(x) is not kind or (type(x) is int and not 0 <= x < NUMBER)):
      raise WireError(f'{short(x)} in a {name}, expected {kind.__name__}')


def read_map(kind: str, details: Any, expected: dict[str, type]) -> dict[str, Any]:
  """Return the expected fields of a map.

  Args:
    kind: of map, for the error.
    details: the map.
    expected: types by field.

  Raises:
    WireError: a field is missing or has another type.
  """
  if type(details) is not dict:
    raise WireError(f'a {kind} that is no map')
  fields = {name: details.get(name) for name in expected}
  check_fields(kind, list(fields.values()), tuple(expected.values()))
  return fields


def short(x: Any) -> str:
  """Return at most 60 characters of a value that came from a peer."""
  text = repr(x)
  return text if len(text) <= 60 else text[:57] + '...'
