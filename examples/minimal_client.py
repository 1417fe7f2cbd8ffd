"""An environment for a podrace learner in plain Python and msgpack, without podrace or numpy.

Written from docs/protocol.md alone, as a client in another language would be. Its environment walks on
a line of 7 places: it begins in the middle and ends at either end, with a reward of 1 at the right one. The
learner must have the same spaces, as `python examples/minimal_client.py --schema` prints them.

    python examples/minimal_client.py tcp://127.0.0.1:5555          # or unix:PATH
    python examples/minimal_client.py tcp://10.0.0.1:5555 KEYS      # a client's directory of keys
"""

import json
import os
import random
import socket
import ssl
import struct
import sys
import time

import msgpack

HELLO, ENTER, STEP, PING, BYE = 1, 2, 3, 4, 5
WAIT, WELCOME, START, ACTION, PONG, REFUSED, GONE, END = 65, 66, 67, 68, 69, 70, 71, 72
FIRST, MID, LAST = 0, 1, 2
PLACES, MIDDLE = 7, 3
NUM_ENVS = 4
SCHEMA = {
  'observation': [['observation', '<f4', [PLACES], 'Box', [0.0, 0.0, 1.0, 1.0]]],
  'action': ['action', '<i4', [], 'Discrete', [0, 2]],
}


def walk(place, action):
  """The environment: a place and an action to the next place, reward, discount and step type."""
  if place in (None, 0, PLACES - 1):  # a new episode, whatever the action
    return MIDDLE, 0.0, 1.0, FIRST
  place += 1 if action == 1 else -1
  over = place in (0, PLACES - 1)
  return place, float(place == PLACES - 1), 0.0 if over else 1.0, LAST if over else MID


def connect(address, keys):
  """A socket, under TLS if there are keys."""
  if address.startswith('unix:'):
    found = socket.socket(socket.AF_UNIX)
    found.connect(address.removeprefix('unix:'))
  else:
    host, _, port = address.removeprefix('tcp://').rpartition(':')
    found = socket.create_connection((host.strip('[]'), int(port)))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  if keys is None:
    return found
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.minimum_version, context.check_hostname = ssl.TLSVersion.TLSv1_3, False
  context.load_verify_locations(f'{keys}/authority.pem')
  context.load_cert_chain(f'{keys}/client.pem', f'{keys}/client.key')
  return context.wrap_socket(found)


class Session:
  """A connection with one group of environments."""

  def __init__(self, stream, number):
    self.stream, self.number, self.silence = stream, number, None  # seconds, from WELCOME on

  def send(self, kind, head, arrays=b''):
    prefix = struct.pack('<II', len(head) + len(arrays), kind | len(head) << 8)
    self.stream.sendall(prefix + head + arrays)

  def say(self, kind, *fields):
    self.send(kind, msgpack.packb(fields))

  def receive(self, size):
    """Receives `size` bytes. Sends PING while none arrive; a long silence is a TimeoutError."""
    data, quiet = b'', 0
    while len(data) < size:
      self.stream.settimeout((self.silence or 10.0) / 4)
      try:
        more = self.stream.recv(size - len(data))
      except TimeoutError:
        quiet += 1
        if quiet > 8:
          raise
        if self.silence:
          self.say(PING, None)
        continue
      if not more:
        raise ConnectionError('the learner closed it')
      data, quiet = data + more, 0
    return data

  def hear(self):
    """The next message: its kind, fields and array."""
    size, word = struct.unpack('<II', self.receive(8))
    kind, head, payload = word & 0xFF, word >> 8, self.receive(size)
    unpack = struct.Struct('<II').unpack if kind == ACTION else msgpack.unpackb
    return kind, unpack(payload[:head]), payload[head:]

  def hello(self):
    self.say(HELLO, {
      'name': 'podrace', 'version': 2, 'client': self.number, 'host': socket.gethostname()[:200],
      'pid': os.getpid(), 'podrace': 'none', 'env': 'minimal:walk', 'schema': SCHEMA,
    })  # fmt: skip

  def run(self):
    """Until it ends; whether the run is complete."""
    self.hello()
    while True:
      kind, fields, array = self.hear()
      if kind == ACTION:
        self.step(fields[1] + 1, struct.unpack(f'<{len(self.places)}i', array))
      elif kind == WAIT:
        time.sleep(1.0)
        self.hello()
      elif kind == WELCOME:
        self.silence = fields[0]['silence']
        self.places = [None] * min(NUM_ENVS, fields[0]['largest_group'])
        self.say(ENTER, 0, len(self.places))
      elif kind == START:
        self.step(0, [0] * len(self.places))
      elif kind == REFUSED:
        raise SystemExit('\n'.join(fields[0]))
      elif kind == GONE:
        raise ConnectionError(fields[0])
      elif kind == END:
        self.say(BYE, 'the learner has ended')
        return fields[0]

  def step(self, number, actions):
    records, observations = b'', b''
    for i, action in enumerate(actions):
      place, reward, discount, kind = walk(self.places[i], action)
      self.places[i] = place
      records += struct.pack('<IfffBBH', 0, reward, discount, reward, kind, kind == LAST, 0)
      observations += struct.pack(f'<{PLACES}f', *(float(k == place) for k in range(PLACES)))
    self.send(STEP, struct.pack('<II', 0, number), records + observations)


def main(address, keys=None):
  number, complete = random.getrandbits(62), False
  while not complete:
    try:
      with connect(address, keys) as stream:
        complete = Session(stream, number).run()
    except OSError as e:
      print('session ended:', e, flush=True)
    if not complete:
      time.sleep(random.uniform(0.5, 1.0))


if __name__ == '__main__':
  if sys.argv[1] == '--schema':
    print(json.dumps(SCHEMA, indent=1))
  else:
    main(*sys.argv[1:])
