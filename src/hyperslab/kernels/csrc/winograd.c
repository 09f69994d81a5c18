/* The weight's gradient of a convolution with windows of 3 x 3 x 3 voxels, see winograd.h: the panels
 * of x times those of g, kind by kind, and what the sums say of the weight. */
#include "winograd.h"

#if VECTORS

enum {
    FEWEST = 32, /* tiles at a time */
    MOST = 256,
    PANELS = 1 << 14, /* numbers of a kind's panels that stay in the second cache */
    PASSED = 1 << 14  /* tiles after which sums become taps, so that no sum is one of too many */
};

/* Adds to `wide` blocks of sums what `count` tiles bring, each sum of which begins at zero. */
INLINE void multiply_block(const float *x, const float *g, int64_t panel, int64_t count, int wide,
                           float *sums)
{
    vector s[2 * ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < wide * ROWS; i++)
        s[i] = zero();
    for (int64_t t = 0; t < count; t++, x += LANES, g += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                s[j * ROWS + i] = add_product(s[j * ROWS + i], x[i], load(g + j * panel));
#pragma GCC unroll 16
    for (int i = 0; i < wide * ROWS; i++)
        store(sums + i * LANES, add(load(sums + i * LANES), s[i]));
}

static void multiply(const machine *m, const float *x, const float *g, int64_t count, float *sums)
{
    for (int64_t o = 0; o < m->out; o += 2)
        for (int64_t h = 0; h < m->halves; h++) {
            const float *rows = x + h / 2 * m->panel + h % 2 * ROWS, *columns = g + o * m->panel;
            float *to = sums + (h * m->out + o) * ROWS * LANES;
            for (int64_t t = 0; t < count; t += MOST, rows += MOST * LANES, columns += MOST * LANES) {
                int64_t tiles = least(MOST, count - t); /* one row may have more */
                if (o + 1 < m->out)
                    multiply_block(rows, columns, m->panel, tiles, 2, to);
                else
                    multiply_block(rows, columns, m->panel, tiles, 1, to);
            }
        }
}

/* The sum of g_rows, in one kind of which every voxel is once. */
static void add_bias(const machine *m, int64_t voxels)
{
    float some[LANES] __attribute__((aligned(64)));
    for (int64_t c = 0; c < m->out; c++)
        for (int64_t first = 0; first < voxels; first += MOST) {
            vector sum = zero();
            for (int64_t v = first; v < least(first + MOST, voxels); v++)
                sum = add(sum, load(m->g_rows + (v * m->out + c) * LANES));
            store(some, sum);
            for (int i = 0; i < LANES; i++)
                m->bias[c * LANES + i] += some[i];
        }
}

/* Rows [y, y + rows) of tiles of pairs [i, i + planes) of planes, of one kind along the depth. */
static void add_strip(const machine *m, int64_t i, int64_t planes, int64_t y, int64_t rows, int depth)
{
    const winograd *k = m->k;
    int64_t x_row = (2 * m->tiles + 2) * m->in * LANES, g_row = 2 * m->tiles * m->out * LANES;
    int64_t x_slab = (2 * rows + 2) * x_row, g_slab = 2 * rows * g_row;
    for (int64_t p = 0; p < planes; p++) {
        int64_t sample = (i + p) / m->pairs, z = 2 * ((i + p) % m->pairs);
        int64_t x_size = k->extents[DEPTH] * k->extents[HEIGHT] * k->extents[WIDTH] * k->channels;
        int64_t g_size = k->results[DEPTH] * k->results[HEIGHT] * k->results[WIDTH] * k->out_channels;
        int64_t size = size_of[k->type];
        slab x = {(const char *)k->x + sample * x_size * size, k->type, k->channels, m->in, k->extents,
                  z - k->padding[DEPTH], 2 * y - k->padding[HEIGHT], 2 * rows + 2, k->padding[WIDTH],
                  2 * m->tiles + 2};
        slab g = {(const char *)k->g + sample * g_size * size, k->type, k->out_channels, m->out,
                  k->results, z, 2 * y, 2 * rows, 0, 2 * m->tiles};
        combine_planes(&x, kinds_of_x[depth], m->x_rows + p * x_slab);
        combine_planes(&g, kinds_of_g[depth], m->g_rows + p * g_slab);
    }
    if (k->bias && depth == 1)
        add_bias(m, planes * 2 * rows * 2 * m->tiles);
    int64_t x_step = m->in * m->panel, g_step = m->out * m->panel;
    for (int height = 0; height < KINDS; height++) {
        for (int64_t p = 0; p < planes; p++)
            for (int64_t r = 0; r < rows; r++) {
                int64_t at = (p * rows + r) * m->tiles * LANES;
                write_x(m, m->x_rows + p * x_slab + 2 * r * x_row, kinds_of_x[height], m->x_panels + at,
                        x_step);
                write_g(m, m->g_rows + p * g_slab + 2 * r * g_row, kinds_of_g[height], m->g_panels + at,
                        g_step);
            }
        for (int width = 0; width < KINDS; width++) {
            int64_t kind = (depth * KINDS + height) * KINDS + width;
            multiply(m, m->x_panels + width * x_step, m->g_panels + width * g_step,
                     planes * rows * m->tiles, m->sums + kind * sums_of_a_kind(m));
        }
    }
}

/* What was summed up so far, as taps. */
static void settle(const machine *m)
{
    int64_t n = sums_of_a_kind(m);
    for (int64_t i = 0; i < n; i += LANES) {
        vector of_width[TAPS * KINDS * KINDS], of_height[TAPS * TAPS * KINDS], taps[ALL_TAPS];
        vector kinds[ALL_KINDS];
        for (int kind = 0; kind < ALL_KINDS; kind++)
            kinds[kind] = load(m->sums + kind * n + i);
        for (int j = 0; j < KINDS * KINDS; j++)
            taps_of(kinds + j, KINDS * KINDS, of_width + j, KINDS * KINDS);
        for (int j = 0; j < TAPS; j++)
            for (int l = 0; l < KINDS; l++)
                taps_of(of_width + j * KINDS * KINDS + l, KINDS, of_height + j * TAPS * KINDS + l, KINDS);
        for (int j = 0; j < TAPS * TAPS; j++)
            taps_of(of_height + j * KINDS, 1, taps + j * TAPS, 1);
        for (int tap = 0; tap < ALL_TAPS; tap++)
            store(m->taps + tap * n + i, add(load(m->taps + tap * n + i), taps[tap]));
    }
    memset(m->sums, 0, (size_t)(4 * ALL_KINDS * n));
}

static void sum_part(const machine *m)
{
    const winograd *k = m->k;
    int64_t all = k->samples * m->pairs, passed = 0;
    int64_t first = all * k->part / k->parts, end = all * (k->part + 1) / k->parts;
    for (int64_t i = first; i < end; i += m->planes) {
        int64_t planes = least(m->planes, end - i);
        for (int depth = 0; depth < KINDS; depth++)
            for (int64_t y = 0; y < m->rows; y += m->strip) {
                int64_t rows = least(m->strip, m->rows - y);
                add_strip(m, i, planes, y, rows, depth);
                passed += planes * rows * m->tiles;
                if (passed >= KINDS * PASSED) { /* each kind along the depth has a part of it */
                    settle(m);
                    passed = 0;
                }
            }
    }
    settle(m);
}

static void write_part(const machine *m)
{
    const winograd *k = m->k;
    float *to = k->weight + k->part * k->out_channels * k->channels * ALL_TAPS;
    for (int64_t o = 0; o < k->out_channels; o++)
        for (int64_t c = 0; c < k->channels; c++) {
            int64_t at = ((c / ROWS * m->out + o / LANES) * ROWS + c % ROWS) * LANES + o % LANES;
            for (int tap = 0; tap < ALL_TAPS; tap++)
                *to++ = m->taps[tap * sums_of_a_kind(m) + at];
        }
    if (k->bias)
        for (int64_t o = 0; o < k->out_channels; o++)
            k->bias[k->part * k->out_channels + o] = (float)m->bias[o];
}

static void measure_out(machine *m)
{
    const winograd *k = m->k;
    m->in = ratio_up(k->channels, LANES);
    m->out = ratio_up(k->out_channels, LANES);
    m->halves = ratio_up(k->channels, ROWS);
    m->tiles = ratio_up(k->results[WIDTH], 2);
    m->rows = ratio_up(k->results[HEIGHT], 2);
    m->pairs = ratio_up(k->results[DEPTH], 2);
    int64_t channels = 16 * (ratio_up(k->channels, 16) + ratio_up(k->out_channels, 16)); /* any LANES */
    int64_t at_once = most(FEWEST, least(MOST, PANELS / channels));
    m->strip = least(m->rows, most(1, at_once / m->tiles));
    m->planes = most(1, at_once / (m->rows * m->tiles));
    m->panel = m->planes * m->strip * m->tiles * LANES;
}

int hyperslab_winograd_gradient(const winograd *k)
{
    memory all = {0};
    machine m = {.k = k};
    measure_out(&m);
    int64_t x_row = (2 * m.tiles + 2) * m.in * LANES, g_row = 2 * m.tiles * m.out * LANES;
    m.x_rows = zeros(&all, 4 * m.planes * (2 * m.strip + 2) * x_row);
    m.g_rows = zeros(&all, 4 * m.planes * 2 * m.strip * g_row);
    m.x_panels = zeros(&all, 4 * KINDS * m.in * m.panel);
    m.g_panels = zeros(&all, 4 * KINDS * m.out * m.panel);
    m.sums = zeros(&all, 4 * ALL_KINDS * sums_of_a_kind(&m));
    m.taps = zeros(&all, 4 * ALL_TAPS * sums_of_a_kind(&m));
    m.bias = zeros(&all, 8 * m.out * LANES);
    if (!all.failed) {
        sum_part(&m);
        write_part(&m);
    }
    free_rooms(&all);
    return all.failed;
}

#endif
