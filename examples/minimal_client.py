"""An environment for a podrace learner in plain Python, pyzmq and msgpack, without podrace or numpy.

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
import zlib

import msgpack
import zmq

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
    self.address, self.num_envs = address, num_envs
    self.context = zmq.Context()

  def connect(self):
    self.socket = self.context.socket(zmq.DEALER)
    self.socket.linger = 500
    self.socket.connect(self.address)
    self.nonce = random.getrandbits(32)
    self.session, self.silence, self.heard, self.said = None, 5.0, time.monotonic(), 0.0

  def say(self, *header, frames=()):
    self.socket.send_multipart([msgpack.packb(header), *frames])

  def run(self):
    """Until the learner says that the run is complete."""
    complete = False
    while not complete:
      self.connect()
      complete = self.life()
      self.socket.close()
    self.context.term()

  def life(self):
    """One session; True if the run is complete, False if the session was lost."""
    while time.monotonic() - self.heard < 3 * self.silence:
      self.keep_alive()
      if not self.socket.poll(int(self.silence * 100)):
        continue
      packed, *frames = self.socket.recv_multipart()
      self.heard = time.monotonic()
      kind, *fields = msgpack.unpackb(packed)
      if kind == WELCOME and self.session is None:
        self.session, self.silence = fields[0], fields[1]['silence']
        self.say(ENTER, self.session, 0, min(self.num_envs, fields[1]['largest_group']))
        self.num = min(self.num_envs, fields[1]['largest_group'])
      elif kind == START:
        self.environments, self.seq = [Walk() for _ in range(self.num)], 0
        self.step([0] * self.num)
      elif kind == ACTION:
        _, _, seq, checksum = fields
        if seq != self.seq or zlib.crc32(frames[0]) != checksum:
          raise SystemExit(f'an answer to {seq}, expected {self.seq}')
        self.seq += 1
        self.step(struct.unpack(f'<{self.num}i', frames[0]))
      elif kind == REFUSED:
        raise SystemExit('\n'.join(fields[0]))
      elif kind == GONE:
        print('session ended:', fields[1], flush=True)
        return False
      elif kind == END:
        self.say(BYE, self.session or 0, 'the learner has ended')
        return fields[0]
    return False

  def keep_alive(self):
    if time.monotonic() - self.said < self.silence / 4:
      return
    self.said = time.monotonic()
    if self.session is None:
      self.say(HELLO, {
        'name': 'podrace', 'version': 1, 'nonce': self.nonce, 'host': socket.gethostname(),
        'pid': os.getpid(), 'env': 'minimal:walk', 'podrace': 'none', 'schema': SCHEMA,
      })  # fmt: skip
    else:
      self.say(PING, self.session)

  def step(self, actions):
    records, observations = b'', b''
    for environment, action in zip(self.environments, actions, strict=True):
      reward, discount, kind, observation = environment.step(action)
      records += struct.pack('<IfffBBH', 0, reward, discount, reward, kind, kind == LAST, 0)
      observations += observation
    checksum = zlib.crc32(observations, zlib.crc32(records))
    self.say(STEP, self.session, 0, self.seq, checksum, frames=[records, observations])


if __name__ == '__main__':
  if sys.argv[1] == '--schema':
    print(json.dumps(SCHEMA, indent=1))
  else:
    Client(sys.argv[1], 4).run()
