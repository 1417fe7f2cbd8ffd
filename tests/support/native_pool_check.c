/* Checks pool.c and its header in C alone, for sanitizers: several threads step batches of tagged
 * environments, save, load and close them. Prints the number of timesteps that were checked. */
#define _POSIX_C_SOURCE 200809L
#include "pool.c"

#define ENVS 96
#define STEPS 400
#define OWNERS 3

typedef struct {
  uint64_t seed;
  uint32_t steps;
  int32_t last;
} tagged;

typedef struct {
  uint32_t tag[3]; /* seed, step, action */
  uint8_t mask[2];
} observation;

static void *make(const char *options, char *error, size_t n) {
  double x = 0;
  podrace_option known[] = {{"x", &x, 0, 1}};
  return podrace_options(options, known, 1, error, n) ? NULL : calloc(1, sizeof(tagged));
}

static void show(tagged *t, void *obs) {
  observation *o = obs;
  o->tag[0] = (uint32_t)t->seed, o->tag[1] = t->steps, o->tag[2] = (uint32_t)t->last;
  o->mask[0] = o->mask[1] = 1;
}

static void start(void *env, uint64_t seed, void *obs) {
  tagged *t = env;
  t->seed = seed, t->steps = 0, t->last = -1;
  show(t, obs);
}

static void go(void *env, const void *act, void *obs, podrace_result *r, float *info) {
  tagged *t = env;
  t->last = *(const int32_t *)act;
  t->steps++;
  r->reward = (float)t->steps;
  r->terminated = t->steps % 50 == 0 && t->seed % 2;
  r->truncated = t->steps % 50 == 0;
  info[0] = t->steps % 3 ? NAN : 1;
  podrace_rng rng;
  podrace_seed(&rng, t->seed);
  volatile uint32_t sum = 0; /* some work, uneven */
  uint64_t rounds = t->last < 0 ? 300000 : 20 + t->seed % 2000;
  for (uint64_t i = 0; i < rounds; i++) sum += podrace_random(&rng);
  show(t, obs);
}

static int64_t save(const void *env, void *bytes) {
  memcpy(bytes, env, sizeof(tagged));
  return sizeof(tagged);
}

static int load(void *env, const void *bytes, int64_t n) {
  memcpy(env, bytes, (size_t)n);
  return 0;
}

#define CHECK(x)                                                              \
  do {                                                                        \
    if (!(x)) {                                                               \
      fprintf(stderr, "line %d, %s is false\n", __LINE__, #x);                \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

static int64_t play(uint64_t first_seed, uint64_t *hash) {
  functions f = {make, start, go, free, save, load, NULL};
  part parts[] = {{0, 12}, {12, 2}};
  char error[100] = "";
  double sums[ENVS] = {0}, counts[ENVS] = {0};
  uint64_t seeds[ENVS];
  for (int i = 0; i < ENVS; i++) seeds[i] = first_seed + (uint64_t)i;
  CHECK(podrace_batch_open(&f, "check", "{\"y\": 1}", ENVS, 0, seeds, 1, 2, parts, 16, 4, 16, 1, sums, counts,
                           error, sizeof error) == NULL);
  CHECK(strstr(error, "no option y") != NULL);
  batch *b = podrace_batch_open(&f, "check", "{\"x\": 0.5}", ENVS, 0, seeds, 2, 2, parts, 16, 4,
                                sizeof(tagged), 1, sums, counts, error, sizeof error);
  CHECK(b != NULL);
  int32_t ids[ENVS], act[ENVS];
  static __thread uint32_t tags[ENVS][3];
  static __thread uint8_t masks[ENVS][2], states[ENVS * sizeof(tagged)], over[ENVS];
  float reward[ENVS], score[ENVS], discount[ENVS];
  int8_t type[ENVS];
  int64_t sizes[ENVS];
  uint64_t episodes[ENVS], kept[ENVS];
  uint32_t expected[ENVS];
  arrays a = {ids, (uint8_t *)act, {(uint8_t *)tags, masks[0]}, reward, score, discount, type};
  int64_t checked = 0;
  for (int t = 0; t < STEPS; t++) {
    for (int i = 0; i < ENVS; i++) ids[i] = ENVS - 1 - i, act[i] = t + i;
    CHECK(podrace_batch_send(b, ENVS, &a) == 0);
    CHECK(podrace_batch_recv(b) == 0);
    for (int i = 0; i < ENVS; i++, checked++) {
      int first = t == 0 || expected[i] == 50;
      expected[i] = first ? 0 : expected[i] + 1;
      CHECK(tags[i][1] == expected[i] && tags[i][2] == (first ? 0xFFFFFFFFu : (uint32_t)(t + i)));
      CHECK(type[i] == (first ? FIRST : expected[i] == 50 ? LAST : MID) && masks[i][1] == 1);
      CHECK(discount[i] == (expected[i] == 50 && tags[i][0] % 2 ? 0 : 1));
      *hash = mix(*hash ^ tags[i][0]);
    }
    if (t % 100 == 0) {
      CHECK(podrace_batch_save(b, states, sizes, episodes, kept, over) == -1);
      CHECK(podrace_batch_load(b, states, sizes, episodes, kept, over) == -1);
    }
  }
  CHECK(podrace_batch_recv(b) == 1);
  for (int i = 0; i < ENVS; i++) act[i] = -2; /* slow steps */
  CHECK(podrace_batch_send(b, ENVS, &a) == 0);
  struct timespec wait = {0, 1000};
  int taken = 0;
  for (int i = 0; i < 1000 && !taken; i++) { /* closed while another thread steps, if one does */
    nanosleep(&wait, NULL);
    pthread_mutex_lock(&lock);
    taken = b->first->taken > 0;
    pthread_mutex_unlock(&lock);
  }
  podrace_batch_close(b);
  return checked;
}

static int64_t checked[OWNERS];
static uint64_t hashes[OWNERS];

static void *own(void *number) {
  int i = *(int *)number;
  checked[i] = play(100, &hashes[i]);
  return NULL;
}

int main(void) {
  pthread_t threads[OWNERS];
  int numbers[OWNERS];
  for (int i = 0; i < OWNERS; i++) {
    numbers[i] = i;
    pthread_create(&threads[i], NULL, own, &numbers[i]);
  }
  int64_t total = 0;
  for (int i = 0; i < OWNERS; i++) {
    pthread_join(threads[i], NULL);
    total += checked[i];
    CHECK(hashes[i] == hashes[0] && hashes[i] != 0);
  }
  struct timespec wait = {0, 1000000};
  for (int i = 0; i < 10000 && podrace_pool_workers() > 0; i++) nanosleep(&wait, NULL);
  CHECK(podrace_pool_workers() == 0);
  printf("%lld\n", (long long)total);
  podrace_pool_ends();
  return 0;
}
