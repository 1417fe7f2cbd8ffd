/* A pool of threads that steps batches of environments: one for all batches of a process.
 *
 * A batch is the environments of one owner (an actor thread), with a queue of jobs. A job is some of
 * these environments, their actions, and the arrays that their timesteps are written to. Threads
 * take chunks of the oldest job of a batch. The thread that waits for a job takes chunks of it too, so
 * with a budget of one thread all the work is done by it, and no other thread exists.
 *
 * One mutex guards all that is shared. A chunk takes about CHUNK_NS or longer, so the mutex is taken
 * rarely; waiting is by condition variables, never by spinning. Which thread takes a chunk has no
 * influence on results: an environment's seeds depend on its own number and episode only.
 *
 * Rows are not padded, as inference reads them. Chunks begin at multiples of LINE environments where
 * they are that large, so that no cache line is written by two threads; smaller chunks take so long
 * that a shared line is no cost.
 */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* on_exit */
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "podrace_env.h"

#define FIRST 0
#define MID 1
#define LAST 2
#define CHUNK_NS 20000.0 /* the least work of a chunk: waking a thread takes 5 to 20 us */
#define LINE 64          /* environments whose bytes fill whole cache lines, in any array */
#define STACK 4096       /* bytes of an observation that fit the stack */
#define MAX_OBS 64
#define NAME 300         /* bytes of an environment's name in messages */

typedef struct {
  void *(*create)(const char *, char *, size_t);
  void (*reset)(void *, uint64_t, void *);
  void (*step)(void *, const void *, void *, podrace_result *, float *);
  void (*close)(void *);
  int64_t (*save)(const void *, void *);
  int (*load)(void *, const void *, int64_t);
  void (*render)(const void *, uint8_t *);
} functions;

typedef struct {
  int64_t offset, bytes; /* of an array in an observation */
} part;

/* The arrays that a job reads and writes, each of n rows. */
typedef struct {
  const int32_t *ids;
  const uint8_t *act;
  uint8_t *obs[MAX_OBS];
  float *reward, *score, *discount;
  int8_t *step_type;
} arrays;

typedef struct job {
  struct job *next;
  arrays rows;
  int64_t n, chunk, taken, done;
} job;

typedef struct {
  void *env;
  uint64_t seed, episode; /* episode: the number of the next one */
  uint8_t over;           /* the next step begins an episode */
  uint8_t pad[39];
} slot; /* a cache line */

typedef struct batch {
  struct batch *next; /* of the batches with work */
  functions f;
  int64_t num_envs, obs_bytes, act_bytes, state_bytes;
  int32_t num_obs, num_info, threads;
  int queued; /* it is in the list of batches with work */
  part parts[MAX_OBS];
  slot *slots;
  void *memory; /* of the slots, not aligned */
  double *sums, *counts; /* [num_envs, num_info] of the numbers for the log */
  job *first, *last;     /* the queue */
  char name[NAME];
  double step_ns;        /* time of one environment's step: a moving mean */
  pthread_cond_t done;   /* no chunk of the oldest job is under way */
} batch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static batch *pending;            /* batches with chunks that no thread has taken */
static int budget, workers, idle; /* threads: all that may step, started, waiting for work */
static int running;               /* threads that are stepping, owners of batches included */
static _Thread_local const char *inside; /* the environment whose function this thread is in */
static int leaving; /* Python ends, or this is a process that an environment forked */

/* Mixes 64 bits (splitmix64, Steele et al. 2014). */
static uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/* --- stepping ------------------------------------------------------------------------------------- */

static void step_one(batch *b, const arrays *a, int64_t row, void *obs, float *info) {
  slot *s = &b->slots[a->ids[row]];
  if (s->over) {
    b->f.reset(s->env, mix(s->seed ^ mix(s->episode)), obs);
    s->episode++;
    s->over = 0;
    a->reward[row] = a->score[row] = 0;
    a->discount[row] = 1;
    a->step_type[row] = FIRST;
    return;
  }
  podrace_result r;
  memset(&r, 0, sizeof r);
  r.score = NAN;
  for (int32_t k = 0; k < b->num_info; k++) info[k] = NAN;
  b->f.step(s->env, a->act + row * b->act_bytes, obs, &r, info);
  s->over = r.terminated || r.truncated;
  a->reward[row] = r.reward;
  a->score[row] = isnan(r.score) ? r.reward : r.score;
  a->discount[row] = r.terminated ? 0 : 1;
  a->step_type[row] = s->over ? LAST : MID;
  int64_t at = (int64_t)a->ids[row] * b->num_info;
  for (int32_t k = 0; k < b->num_info; k++)
    if (isfinite(info[k])) b->sums[at + k] += info[k], b->counts[at + k] += 1;
}

static void step_rows(batch *b, const arrays *a, int64_t from, int64_t to) {
  _Alignas(64) uint8_t near[STACK];
  float info[128];
  if (b->num_obs == 1) { /* written where it is read */
    for (int64_t i = from; i < to; i++) step_one(b, a, i, a->obs[0] + i * b->obs_bytes, info);
    return;
  }
  uint8_t *row = near;
  if (b->obs_bytes > STACK && (row = aligned_alloc(64, (size_t)((b->obs_bytes + 63) & ~63LL))) == NULL)
    abort();
  for (int64_t i = from; i < to; i++) {
    step_one(b, a, i, row, info);
    for (int32_t k = 0; k < b->num_obs; k++)
      memcpy(a->obs[k] + i * b->parts[k].bytes, row + b->parts[k].offset, (size_t)b->parts[k].bytes);
  }
  if (row != near) free(row);
}

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* --- the queue; all functions here need the lock ---------------------------------------------------- */

static int has_chunk(const batch *b) { return b->first && b->first->taken < b->first->n; }

static void unqueue(batch *b) {
  batch **p = &pending;
  while (*p && *p != b) p = &(*p)->next;
  if (*p) *p = b->next;
  b->queued = 0;
}

static void enqueue(batch *b) {
  batch **p = &pending;
  while (*p) p = &(*p)->next;
  *p = b;
  b->next = NULL;
  b->queued = 1;
}

/* Takes a chunk of a batch's oldest job and steps it, without the lock meanwhile. */
static void take_chunk(batch *b) {
  job *j = b->first;
  int64_t from = j->taken, to = from + j->chunk < j->n ? from + j->chunk : j->n;
  j->taken = to;
  if (to == j->n && b->queued) unqueue(b);
  running++;
  pthread_mutex_unlock(&lock);
  double start = now_ns();
  inside = b->name;
  step_rows(b, &j->rows, from, to);
  inside = NULL;
  double each = (now_ns() - start) / (double)(to - from);
  pthread_mutex_lock(&lock);
  running--;
  b->step_ns = b->step_ns > 0 ? 0.9 * b->step_ns + 0.1 * each : each;
  j->done += to - from;
  if (j->done == j->taken) pthread_cond_broadcast(&b->done); /* its owner receives, or closes */
}

static void *work_on(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  while (workers < budget) { /* else this thread is one too many */
    if (pending && running < budget) {
      take_chunk(pending);
    } else {
      idle++;
      pthread_cond_wait(&work, &lock);
      idle--;
    }
  }
  workers--;
  pthread_mutex_unlock(&lock);
  return NULL;
}

/* Starts threads as far as the budget goes: the thread that waits for a job is one of it. */
static void start_workers(void) {
  while (workers < budget - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work_on, NULL)) return; /* the owners step alone */
    pthread_detach(thread);
    workers++;
  }
}

/* Makes the oldest job of a batch available to all threads, if it is worth waking one. */
static void offer(batch *b) {
  job *j = b->first;
  double step = b->step_ns > 0 ? b->step_ns : CHUNK_NS;
  double least = CHUNK_NS / step, fair = (double)j->n / (4.0 * (budget > 1 ? budget : 1));
  int64_t chunk = (int64_t)(least > fair ? least : fair) + 1;
  if (budget <= 1) chunk = j->n;
  if (chunk > LINE) chunk = (chunk + LINE - 1) / LINE * LINE;
  j->chunk = chunk < j->n ? chunk : j->n;
  if (budget <= 1 || step * (double)j->n < 2 * CHUNK_NS) return;
  if (!b->queued) enqueue(b);
  int64_t chunks = (j->n + j->chunk - 1) / j->chunk;
  for (int64_t i = 0; i < chunks && i < idle; i++) pthread_cond_signal(&work);
}

/* --- functions that Python calls ------------------------------------------------------------------- */

#ifdef __GLIBC__
/* The exit of a forked child: destructors of libraries would wait for threads that only its parent has. */
static void end_child(int status, void *unused) {
  (void)unused;
  fflush(NULL);
  _exit(status);
}
#endif

static void in_child(void) { /* after a fork no other thread exists */
  pthread_mutex_init(&lock, NULL);
  pthread_cond_init(&work, NULL);
  pending = NULL;
  workers = idle = running = 0, inside = NULL;
  budget = 1, leaving = 1; /* an environment may fork, and its child exit */
#ifdef __GLIBC__
  on_exit(end_child, NULL); /* registered last, it comes first */
#endif
}

/* An environment that calls exit would end the run as if it were complete. */
static void at_exit(void) {
  if (leaving && !inside) return;
  char text[NAME + 64];
  int n = snprintf(text, sizeof text, "podrace: %s called exit, which it must not: return from the function\n",
                   inside ? inside : "a thread of native code");
  ssize_t written = write(STDERR_FILENO, text, n < (int)sizeof text ? (size_t)n : sizeof text - 1);
  (void)written;
  _exit(1);
}

/* Lets the process exit. Python calls it as it ends; a call of exit by native code comes without it. */
PODRACE_EXPORT void podrace_pool_ends(void) { leaving = 1; }

static void register_handlers(void) {
  pthread_atfork(NULL, NULL, in_child);
  atexit(at_exit);
}

PODRACE_EXPORT void podrace_batch_close(batch *b) {
  if (b == NULL) return;
  pthread_mutex_lock(&lock);
  if (b->queued) unqueue(b);
  while (b->first && b->first->done < b->first->taken) pthread_cond_wait(&b->done, &lock);
  budget -= b->threads;
  pthread_cond_broadcast(&work); /* threads that are too many end */
  pthread_mutex_unlock(&lock);
  while (b->first) {
    job *j = b->first;
    b->first = j->next;
    free(j);
  }
  inside = b->name;
  for (int64_t i = 0; b->slots && i < b->num_envs; i++)
    if (b->slots[i].env) b->f.close(b->slots[i].env);
  inside = NULL;
  pthread_cond_destroy(&b->done);
  free(b->memory);
  free(b);
}

/* Makes the environments [num_envs] of a batch. Returns NULL, with a text in `error` [size], if one
 * cannot be made. `first` is the number of the first one. `sums` and `counts` [num_envs, num_info] stay the caller's. */
PODRACE_EXPORT batch *podrace_batch_open(const functions *f, const char *name, const char *options, int64_t num_envs,
                                         int64_t first, const uint64_t *seeds, int32_t threads,
                                         int32_t num_obs, const part *parts, int64_t obs_bytes, int64_t act_bytes,
                                         int64_t state_bytes, int32_t num_info, double *sums,
                                         double *counts, char *error, size_t size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, register_handlers);
  batch *b = calloc(1, sizeof *b);
  if (b == NULL) return snprintf(error, size, "there is no memory left"), NULL;
  b->f = *f;
  snprintf(b->name, sizeof b->name, "%s", name);
  b->num_envs = num_envs, b->num_obs = num_obs, b->num_info = num_info;
  b->obs_bytes = obs_bytes, b->act_bytes = act_bytes, b->state_bytes = state_bytes;
  b->sums = sums, b->counts = counts;
  memcpy(b->parts, parts, (size_t)num_obs * sizeof *parts);
  pthread_cond_init(&b->done, NULL);
  b->memory = calloc((size_t)num_envs + 1, sizeof(slot));
  if (b->memory == NULL) {
    snprintf(error, size, "there is no memory left");
    podrace_batch_close(b);
    return NULL;
  }
  b->slots = (slot *)(((uintptr_t)b->memory + 63) & ~(uintptr_t)63);
  for (int64_t i = 0; i < num_envs; i++) {
    b->slots[i].seed = mix(seeds[i] ^ mix((uint64_t)(first + i)));
    b->slots[i].over = 1;
    inside = b->name;
    b->slots[i].env = f->create(options, error, size);
    inside = NULL;
    if (b->slots[i].env == NULL) {
      podrace_batch_close(b);
      return NULL;
    }
  }
  pthread_mutex_lock(&lock);
  b->threads = threads;
  budget += threads;
  start_workers();
  pthread_mutex_unlock(&lock);
  return b;
}

/* Adds a job of n environments. Its arrays are in use until it was received. Returns 0, or 1 if there
 * is no memory left. */
PODRACE_EXPORT int podrace_batch_send(batch *b, int64_t n, const arrays *rows) {
  job *j = calloc(1, sizeof *j);
  if (j == NULL) return 1;
  j->rows = *rows;
  j->n = n;
  pthread_mutex_lock(&lock);
  if (b->first) b->last->next = j;
  else b->first = j;
  b->last = j;
  if (b->first == j) offer(b);
  pthread_mutex_unlock(&lock);
  return 0;
}

/* Waits until the oldest job is done, and takes its chunks meanwhile. Returns 0, or 1 without a job. */
PODRACE_EXPORT int podrace_batch_recv(batch *b) {
  pthread_mutex_lock(&lock);
  job *j = b->first;
  if (j == NULL) return pthread_mutex_unlock(&lock), 1;
  while (has_chunk(b)) take_chunk(b);
  while (j->done < j->n) pthread_cond_wait(&b->done, &lock);
  b->first = j->next;
  if (b->first) offer(b);
  if (pending && running < budget && idle) pthread_cond_signal(&work);
  pthread_mutex_unlock(&lock);
  free(j);
  return 0;
}

/* The functions below are for a batch without jobs. */

/* Makes the next step of each environment begin an episode. */
PODRACE_EXPORT void podrace_batch_reset(batch *b) {
  for (int64_t i = 0; i < b->num_envs; i++) b->slots[i].over = 1;
}

/* Writes states [num_envs, state_bytes], episodes [num_envs] and flags [num_envs] of environments that
 * are between episodes. Returns -1, or the number of an environment whose size is out of range. */
PODRACE_EXPORT int64_t podrace_batch_save(batch *b, uint8_t *states, int64_t *sizes,
                                          uint64_t *episodes, uint64_t *seeds, uint8_t *over) {
  for (int64_t i = 0; i < b->num_envs; i++) {
    slot *s = &b->slots[i];
    inside = b->name;
    sizes[i] = b->f.save(s->env, states + i * b->state_bytes);
    inside = NULL;
    if (sizes[i] < 0 || sizes[i] > b->state_bytes) return i;
    episodes[i] = s->episode, seeds[i] = s->seed, over[i] = s->over;
  }
  return -1;
}

/* Restores what podrace_batch_save wrote. Returns -1, or the number of an environment that refused. */
PODRACE_EXPORT int64_t podrace_batch_load(batch *b, const uint8_t *states, const int64_t *sizes,
                                          const uint64_t *episodes, const uint64_t *seeds,
                                          const uint8_t *over) {
  for (int64_t i = 0; i < b->num_envs; i++) {
    slot *s = &b->slots[i];
    inside = b->name;
    int refused = b->f.load(s->env, states + i * b->state_bytes, sizes[i]);
    inside = NULL;
    if (refused) return i;
    s->episode = episodes[i], s->seed = seeds[i], s->over = over[i];
  }
  return -1;
}

PODRACE_EXPORT void podrace_batch_render(batch *b, int64_t i, uint8_t *rgb) {
  inside = b->name;
  b->f.render(b->slots[i].env, rgb);
  inside = NULL;
}

/* Returns the threads that the pool has started. */
PODRACE_EXPORT int podrace_pool_workers(void) {
  pthread_mutex_lock(&lock);
  int n = workers;
  pthread_mutex_unlock(&lock);
  return n;
}
