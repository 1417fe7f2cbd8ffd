/* A grid world with a large observation: gather the crystals of a cave before the time is over.
 *
 * The observation is a Dict: a map [side, side, 3] of walls, crystals and the player; numbers [2], the
 * time that is left and the crystals that are left; and an action mask of steps that no wall blocks.
 * Options: side (8 to 96), crystals (at most, as those that are drawn onto a wall are left out), walls
 * (their share of the fields), max_steps. */
#include "podrace_env.h"

#define MAX_SIDE 96
#define CHANNELS 3
#define ACTIONS 4

enum { WALL = 1, CRYSTAL = 2 };

typedef struct {
  int32_t side, crystals, walls_percent, max_steps; /* options */
  int32_t y, x, placed, left, steps; /* placed: crystals of this episode */
  uint8_t fields[MAX_SIDE * MAX_SIDE];
} grid;

static const int moves[ACTIONS][2] = {{-1, 0}, {0, 1}, {1, 0}, {0, -1}};

static int read_options(const char *options, grid *g, char *error, size_t n) {
  double side = 48, crystals = 20, walls = 0.2, max_steps = 500;
  podrace_option known[] = {{"side", &side, 8, MAX_SIDE}, {"crystals", &crystals, 1, 1000},
                            {"walls", &walls, 0, 0.5}, {"max_steps", &max_steps, 1, 1e6}};
  if (podrace_options(options, known, 4, error, n)) return 1;
  g->side = (int32_t)side, g->crystals = (int32_t)crystals;
  g->walls_percent = (int32_t)(100 * walls + 0.5), g->max_steps = (int32_t)max_steps;
  return 0;
}

/* Returns sizeof(struct { float numbers[2]; uint8_t map[side * side * 3], mask[4]; }). */
static int64_t obs_bytes(int32_t side) {
  return (8 + side * side * CHANNELS + ACTIONS + 3) / 4 * 4;
}

const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n) {
  static const int32_t actions[] = {ACTIONS};
  static const char *const info[] = {"crystals_gathered"};
  static const podrace_array act = {.dtype = PODRACE_I32, .ndim = 0, .choices = actions};
  static podrace_array obs[3] = {
      {.name = "numbers", .dtype = PODRACE_F32, .ndim = 1, .shape = {2}, .low = 0, .high = 1},
      {.name = "map", .dtype = PODRACE_U8, .ndim = 3, .shape = {0, 0, CHANNELS}, .high = 1},
      {.name = "action_mask", .dtype = PODRACE_BOOL, .ndim = 1, .shape = {ACTIONS}}};
  static podrace_spec spec = {
      .abi = PODRACE_ENV_ABI, .num_obs = 3, .num_info = 1, .obs = obs, .act = &act, .info = info,
      .act_bytes = sizeof(int32_t), .state_bytes = sizeof(grid)};
  grid g;
  if (read_options(options, &g, error, n)) return NULL;
  obs[1].shape[0] = obs[1].shape[1] = g.side;
  spec.obs_bytes = obs_bytes(g.side);
  spec.render_height = spec.render_width = 4 * g.side;
  return &spec;
}

void *podrace_create(const char *options, char *error, size_t n) {
  grid *g = calloc(1, sizeof *g);
  if (g && read_options(options, g, error, n)) free(g), g = NULL;
  return g;
}

static int is_free(const grid *g, int y, int x) {
  return y >= 0 && y < g->side && x >= 0 && x < g->side && g->fields[y * g->side + x] != WALL;
}

static void observe(const grid *g, void *obs) {
  float *numbers = obs;
  uint8_t *map = (uint8_t *)obs + 8, *mask = map + g->side * g->side * CHANNELS;
  numbers[0] = 1 - (float)g->steps / (float)g->max_steps;
  numbers[1] = (float)g->left / (float)g->placed;
  for (int i = 0; i < g->side * g->side; i++) {
    map[CHANNELS * i] = g->fields[i] == WALL;
    map[CHANNELS * i + 1] = g->fields[i] == CRYSTAL;
    map[CHANNELS * i + 2] = 0;
  }
  map[CHANNELS * (g->y * g->side + g->x) + 2] = 1;
  int any = 0;
  for (int a = 0; a < ACTIONS; a++)
    any |= mask[a] = (uint8_t)is_free(g, g->y + moves[a][0], g->x + moves[a][1]);
  if (!any) mask[0] = 1; /* walled in: one step that does nothing */
}

void podrace_reset(void *env, uint64_t seed, void *obs) {
  grid *g = env;
  podrace_rng rng;
  podrace_seed(&rng, seed);
  for (int i = 0; i < g->side * g->side; i++)
    g->fields[i] = podrace_below(&rng, 100) < (uint32_t)g->walls_percent ? WALL : 0;
  g->y = (int32_t)podrace_below(&rng, (uint32_t)g->side);
  g->x = (int32_t)podrace_below(&rng, (uint32_t)g->side);
  g->fields[g->y * g->side + g->x] = 0;
  g->placed = 0;
  uint32_t size = (uint32_t)(g->side * g->side), player = (uint32_t)(g->y * g->side + g->x);
  for (int i = 0; i < g->crystals; i++) {
    uint32_t at = podrace_below(&rng, size);
    if (g->fields[at] == 0 && at != player) g->fields[at] = CRYSTAL, g->placed++;
  }
  if (g->placed == 0) /* all draws met walls or the player: one takes the place of a wall */
    g->fields[(player + 1 + podrace_below(&rng, size - 1)) % size] = CRYSTAL, g->placed = 1;
  g->left = g->placed;
  g->steps = 0;
  observe(g, obs);
}

void podrace_step(void *env, const void *act, void *obs, podrace_result *result, float *info) {
  grid *g = env;
  const int *move = moves[*(const int32_t *)act & 3];
  if (is_free(g, g->y + move[0], g->x + move[1])) g->y += move[0], g->x += move[1];
  uint8_t *field = &g->fields[g->y * g->side + g->x];
  if (*field == CRYSTAL) *field = 0, g->left--, result->reward = 1;
  result->terminated = g->left == 0;
  result->truncated = ++g->steps >= g->max_steps;
  if (result->terminated || result->truncated) info[0] = (float)(g->placed - g->left);
  observe(g, obs);
}

int64_t podrace_save(const void *env, void *bytes) {
  memcpy(bytes, env, sizeof(grid));
  return sizeof(grid);
}

int podrace_load(void *env, const void *bytes, int64_t n) {
  grid *g = env, saved;
  if (n != sizeof saved) return 1;
  memcpy(&saved, bytes, sizeof saved);
  if (saved.side != g->side || saved.crystals != g->crystals || saved.max_steps != g->max_steps ||
      saved.walls_percent != g->walls_percent)
    return 1;
  if (saved.y < 0 || saved.y >= g->side || saved.x < 0 || saved.x >= g->side || saved.left < 0 ||
      saved.left > saved.placed || saved.placed < 1 || saved.placed > g->crystals || saved.steps < 0 || saved.steps > g->max_steps)
    return 1;
  for (int i = 0; i < g->side * g->side; i++)
    if (saved.fields[i] > CRYSTAL) return 1;
  *g = saved;
  return 0;
}

void podrace_render(const void *env, uint8_t *rgb) {
  const grid *g = env;
  int side = 4 * g->side;
  for (int y = 0; y < side; y++)
    for (int x = 0; x < side; x++) {
      uint8_t *p = rgb + 3 * (y * side + x), field = g->fields[y / 4 * g->side + x / 4];
      int here = y / 4 == g->y && x / 4 == g->x;
      p[0] = here ? 220 : field == WALL ? 70 : field == CRYSTAL ? 60 : 245;
      p[1] = here ? 60 : field == WALL ? 70 : field == CRYSTAL ? 170 : 245;
      p[2] = here ? 60 : field == WALL ? 70 : field == CRYSTAL ? 220 : 245;
    }
}

void podrace_close(void *env) { free(env); }
