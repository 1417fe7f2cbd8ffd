"""An environment for a podrace learner in plain Python and msgpack, without podrace or numpy.

Written from docs/protocol.md alone, as a client in another language would be. Its environment walks on
a line of 7 places: it begins in the middle and ends at either end, with a reward of 1 at the right one. The
learner must have the same spaces, as `python examples/minimal_client.py --schema` prints them.

    python examples/minimal_client.py tcp://127.0.0.1:5555
"""

import json
import os
import random
import socket
import struct
import sys
import time

import msgpack

HELLO, ENTER, STEP, PING, BYE = 1, 2, 3, 4, 5
WAIT, WELCOME, START, ACTION, PONG, REFUSED, GONE, END = 65, 66, 67, 68, 69, 70, 71, 72
FIRST, MID, LAST = 0, 1, 2
PLACES = 7
SCHEMA = {
  'observation': [['observation', '<f4', [PLACES], 'Box', [0.0, 0.0, 1.0, 1.0]]],
  'action': ['action', '<i4', [], 'Discrete', [0, 2]],
}


class Walk:
  """The environment: `step` gives the fields of a record, and an observation."""

  def __init__(self):
    self.place, self.over = PLACES // 2, True

  def step(self, action):
    if self.over:  # a new episode, whatever the action
      self.place, self.over = PLACES // 2, False
      return 0.0, 1.0, FIRST, self.observation()
    self.place += 1 if action == 1 else -1
    self.over = self.place in (0, PLACES - 1)
    reward = 1.0 if self.place == PLACES - 1 else 0.0
    return reward, 0.0 if self.over else 1.0, LAST if self.over else MID, self.observation()

  def observation(self):
    return struct.pack(f'<{PLACES}f', *(float(i == self.place) for i in range(PLACES)))


class Client:
  """One connection, one group of environments."""

  def __init__(self, address, num_envs):
    host, port = address.removeprefix('tcp://').rsplit(':', 1)
    self.host, self.num_envs = (host, int(port)), num_envs
    self.number = random.getrandbits(62)

  def run(self):
    """Until the learner says that the run is complete."""
    complete = False
    while not complete:
      try:
        with socket.create_connection(self.host) as self.socket:
          complete = self.life()
      except OSError as e:
        print('the connection is lost:', e, flush=True)
      time.sleep(0.0 if complete else 1.0)

  def say(self, kind, *fields):
    self.send(kind, msgpack.packb(fields))

  def send(self, kind, head, arrays=b''):
    self.socket.sendall(
      struct.pack('<II', len(head) + len(arrays), kind | len(head) << 8) + head + arrays
    )

  def receive(self, size):
    """So many bytes; while there are none it says that it is alive."""
    data = b''
    while len(data) < size:
      self.socket.settimeout(self.silence / 4)
      try:
        more = self.socket.recv(size - len(data))
      except TimeoutError:
        if time.monotonic() - self.heard > 2 * self.silence:
          raise
        if self.joined:
          self.say(PING, None)
        continue
      if not more:
        raise ConnectionError('the learner closed it')
      data, self.heard = data + more, time.monotonic()
    return data

  def hello(self):
    self.say(HELLO, {
      'name': 'podrace', 'version': 2, 'client': self.number, 'host': socket.gethostname(),
      'pid': os.getpid(), 'env': 'minimal:walk', 'podrace': 'none', 'schema': SCHEMA,
    })  # fmt: skip

  def life(self):
    """One session; True if the run is complete, False if the session was lost."""
    self.joined, self.silence, self.heard = False, 10.0, time.monotonic()
    self.hello()
    while True:
      size, word = struct.unpack('<II', self.receive(8))
      payload = self.receive(size)
      kind, head, data = word & 0xFF, payload[: word >> 8], payload[word >> 8 :]
      if kind == ACTION:
        _, seq = struct.unpack('<II', head)
        if seq != self.seq:
          raise SystemExit(f'an answer to {seq}, expected {self.seq}')
        self.seq += 1
        self.step(struct.unpack(f'<{self.num}i', data))
        continue
      fields = msgpack.unpackb(head)
      if kind == WAIT:
        time.sleep(1.0)
        self.hello()
      elif kind == WELCOME:
        self.joined, self.silence = True, fields[0]['silence']
        self.num = min(self.num_envs, fields[0]['largest_group'])
        self.say(ENTER, 0, self.num)
      elif kind == START:
        self.environments, self.seq = [Walk() for _ in range(self.num)], 0
        self.step([0] * self.num)
      elif kind == REFUSED:
        raise SystemExit('\n'.join(fields[0]))
      elif kind == GONE:
        print('session ended:', fields[0], flush=True)
        return False
      elif kind == END:
        self.say(BYE, 'the learner has ended')
        return fields[0]

  def step(self, actions):
    records, observations = b'', b''
    for environment, action in zip(self.environments, actions, strict=True):
      reward, discount, kind, observation = environment.step(action)
      records += struct.pack('<IfffBBH', 0, reward, discount, reward, kind, kind == LAST, 0)
      observations += observation
    self.send(STEP, struct.pack('<II', 0, self.seq), records + observations)


if __name__ == '__main__':
  if sys.argv[1] == '--schema':
    print(json.dumps(SCHEMA, indent=1))
  else:
    Client(sys.argv[1], 4).run()
