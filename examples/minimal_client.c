/* An environment for a podrace learner in C, with nothing but its standard library and sockets.

   Written from docs/protocol.md alone. It is the walk of minimal_client.py: 7 places on a line, from the
   middle to either end, with a reward of 1 at the right one. It knows no TLS. It has one session, and ends with it:
   0 if the run is complete.

     cc -O2 -o minimal_client examples/minimal_client.c
     ./minimal_client 127.0.0.1 5555 4          # 4 environments
     ./minimal_client unix PATH 4                                                                         */

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HELLO = 1, ENTER, STEP, PING, BYE };
enum { WAIT = 65, WELCOME, START, ACTION, PONG, REFUSED, GONE, END };
enum { FIRST, MID, LAST, PLACES = 7, MOST = 64 };

static int stream, num, place[MOST], over[MOST], joined;
static double silence = 10.0;
static uint8_t in[1 << 20], frame[1 << 16], *const out = frame + 8; /* after the prefix */

static _Noreturn void fail(const char *why) { fprintf(stderr, "%s\n", why), exit(1); }

/* Bytes of this machine, which is taken to be little-endian, as the wire is. */
static uint8_t *put(uint8_t *at, const void *from, size_t n) {
  memcpy(at, from, n);
  return at + n;
}

/* msgpack, as much of it as is needed. */
static uint8_t *text(uint8_t *at, const char *s) {
  size_t n = strlen(s);
  *at++ = 0xd9, *at++ = (uint8_t)n;
  return put(at, s, n);
}

static uint8_t *eight(uint8_t *at, int kind, uint64_t n) {
  *at++ = (uint8_t)kind;
  for (int i = 7; i >= 0; i--) *at++ = (uint8_t)(n >> (8 * i));
  return at;
}

static uint8_t *whole(uint8_t *at, uint64_t n) { return eight(at, 0xcf, n); }

static uint8_t *unit(uint8_t *at, int x) { return eight(at, 0xcb, x ? 0x3ff0000000000000 : 0); } /* 0.0 or 1.0 */

static uint64_t big(const uint8_t *at, int n) { return n ? big(at, n - 1) << 8 | at[n - 1] : 0; }

/* Where the value at `at` ends; if it is a number, what it is. For the maps of numbers and strings that WELCOME has. */
static const uint8_t *value(const uint8_t *at, double *number) {
  int kind = *at++, n;
  if (kind < 0x80) return *number = kind, at;
  if (kind >= 0xa0 && kind < 0xc0) return at + (kind & 31);
  if (kind == 0xc0 || kind == 0xc2 || kind == 0xc3) return *number = kind == 0xc3, at;
  if (kind == 0xcb) return memcpy(number, (uint64_t[]){big(at, 8)}, 8), at + 8;
  if (kind >= 0xcc && kind <= 0xcf) return n = 1 << (kind - 0xcc), *number = (double)big(at, n), at + n;
  if (kind == 0xd9) return at + 1 + *at;
  if (kind == 0xda) return at + 2 + big(at, 2);
  fail("a value of a kind that this client does not know");
}

/* The number of a key in the only map of a header; -1 if it is not there. */
static double member(const uint8_t *head, const char *key) {
  const uint8_t *at = head + 1;
  int count = *at == 0xde ? (int)big(at + 1, 2) : *at & 15;
  at += *at == 0xde ? 3 : 1;
  while (count--) {
    const uint8_t *name = at + (*at == 0xd9 ? 2 : 1);
    double number = -1;
    at = value(at, &number);
    size_t n = (size_t)(at - name);
    at = value(at, &number);
    if (n == strlen(key) && !memcmp(name, key, n)) return number;
  }
  return -1;
}

/* Sends what is from `out` to `end`, of which so many bytes are the header. */
static void say(int kind, size_t head, const uint8_t *end) {
  uint32_t prefix[2] = {(uint32_t)(end - out), (uint32_t)kind | (uint32_t)head << 8};
  put(frame, prefix, 8);
  for (const uint8_t *at = frame; at < end;) {
    ssize_t n = send(stream, at, (size_t)(end - at), MSG_NOSIGNAL);
    if (n < 0) fail("the connection is lost");
    at += n;
  }
}

static void say_packed(int kind, const uint8_t *end) { say(kind, (size_t)(end - out), end); }

static void receive(uint8_t *into, size_t size) {
  struct pollfd ready = {stream, POLLIN, 0};
  for (int quiet = 0; size;) {
    if (poll(&ready, 1, (int)(250 * silence)) == 0) {
      if (++quiet > 8) fail("the learner is silent");
      out[0] = 0x91, out[1] = 0xc0;
      if (joined) say_packed(PING, out + 2);
      continue;
    }
    ssize_t n = recv(stream, into, size, 0);
    if (n <= 0) fail("the learner closed the connection");
    into += n, size -= (size_t)n, quiet = 0;
  }
}

static void hello(void) {
  char host[100] = "";
  gethostname(host, sizeof host - 1);
  uint8_t *at = put(out, "\x91\x88", 2);
  at = text(text(at, "name"), "podrace"), at = whole(text(at, "version"), 2);
  at = whole(text(at, "client"), (uint64_t)time(NULL) << 22 | (uint64_t)getpid());
  at = text(text(at, "host"), host), at = whole(text(at, "pid"), (uint64_t)getpid());
  at = text(text(at, "env"), "minimal:walk"), at = text(text(at, "podrace"), "none");
  at = text(at, "schema"), *at++ = 0x82;
  at = text(at, "observation"), *at++ = 0x91, *at++ = 0x95;
  at = text(text(at, "observation"), "<f4"), *at++ = 0x91, *at++ = PLACES;
  at = text(at, "Box"), *at++ = 0x94, at = unit(unit(unit(unit(at, 0), 0), 1), 1);
  at = text(at, "action"), *at++ = 0x95;
  at = text(text(at, "action"), "<i4"), *at++ = 0x90;
  at = text(at, "Discrete"), *at++ = 0x92, *at++ = 0, *at++ = 2;
  say_packed(HELLO, at);
}

static void step(uint32_t seq, const int32_t *action) {
  uint32_t head[2] = {0, seq};
  uint8_t *record = put(out, head, 8), *place_at = record + 20 * num;
  for (int i = 0; i < num; i++) {
    int first = over[i];
    place[i] = first ? PLACES / 2 : place[i] + (action[i] == 1 ? 1 : -1);
    over[i] = !first && (place[i] == 0 || place[i] == PLACES - 1);
    float reward = over[i] && place[i] ? 1 : 0, fields[4] = {0, reward, over[i] ? 0 : 1, reward};
    uint8_t flags[4] = {first ? FIRST : over[i] ? LAST : MID, (uint8_t)over[i], 0, 0};
    record = put(put(record, fields, 16), flags, 4);
    for (int k = 0; k < PLACES; k++) {
      float x = k == place[i];
      place_at = put(place_at, &x, 4);
    }
  }
  say(STEP, 8, place_at);
}

static void dial(const char *host, const char *port) {
  struct sockaddr_un local = {.sun_family = AF_UNIX};
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
  int on = 1, failed = 1;
  if (!strcmp(host, "unix")) {
    snprintf(local.sun_path, sizeof local.sun_path, "%s", port);
    stream = socket(AF_UNIX, SOCK_STREAM, 0);
    failed = connect(stream, (struct sockaddr *)&local, sizeof local);
  } else if (!getaddrinfo(host, port, &hints, &found)) {
    stream = socket(found->ai_family, SOCK_STREAM, 0);
    failed = connect(stream, found->ai_addr, found->ai_addrlen);
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  if (failed) fail("nobody listens there");
}

int main(int count, char **args) {
  int32_t action[MOST] = {0};
  if (count != 4) fail("usage: minimal_client HOST PORT ENVIRONMENTS, or unix PATH ENVIRONMENTS");
  dial(args[1], args[2]);
  hello();
  for (uint32_t prefix[2], seq = 0;;) {
    receive((uint8_t *)prefix, 8);
    if (prefix[0] > sizeof in) fail("a frame that is too large");
    receive(in, prefix[0]);
    int kind = prefix[1] & 0xff;
    if (kind == ACTION) {
      put((uint8_t *)action, in + 8, 4 * (size_t)num);
      step(++seq, action);
    } else if (kind == WAIT) {
      sleep(1), hello();
    } else if (kind == WELCOME) {
      int largest = (int)member(in, "largest_group"), wanted = atoi(args[3]);
      silence = member(in, "silence"), joined = 1;
      num = wanted < largest ? wanted : largest, num = num < MOST ? num : MOST;
      uint8_t entry[3] = {0x92, 0, (uint8_t)num};
      say_packed(ENTER, put(out, entry, 3));
    } else if (kind == START) {
      for (int i = 0; i < num; i++) over[i] = 1;
      step(seq = 0, action);
    } else if (kind == END) {
      out[0] = 0x91;
      say_packed(BYE, text(out + 1, "the learner has ended"));
      return in[1] == 0xc3 ? 0 : 1;
    } else if (kind == REFUSED || kind == GONE) {
      fprintf(stderr, "%.*s\n", (int)prefix[0], in);
      return 2;
    }
  }
}
