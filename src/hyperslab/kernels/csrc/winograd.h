/* Winograd's minimal filtering along one axis, and what its kernel is told.
 *
 * Two numbers g of the result's gradient and the four numbers x that they meet give three numbers of
 * the weight's gradient, dw[t] = x[t] g[0] + x[t + 1] g[1], by four products in place of six:
 *
 *     m0 = (x0 - x2) g0, m1 = (x1 + x2) (g0 + g1), m2 = (x2 - x1) (g0 - g1), m3 = (x1 - x3) g1
 *     dw[0] = m0 + (m1 + m2) / 2, dw[1] = (m1 - m2) / 2, dw[2] = (m1 + m2) / 2 - m3
 *
 * (S. Winograd, Arithmetic Complexity of Computations, 1980: F(3, 2), with the points 0, 1, -1 and
 * infinity.) Along three axes that is 64 products in place of 216. What becomes of m is linear, so
 * products of all tiles are summed first, each of its 64 kinds as a product of two matrices. */
#ifndef HYPERSLAB_WINOGRAD_H
#define HYPERSLAB_WINOGRAD_H

#include "vectors.h"

enum { KINDS = 4, TAPS = 3, ALL_KINDS = 64, ALL_TAPS = 27 };

/* Volumes (samples, depth, height, width, channels) of float32 or bfloat16. Windows of three voxels
 * along each axis go in steps of one and begin at -padding. */
typedef struct {
    const void *x, *g;
    float *weight; /* a part each: (out_channels, channels, 3, 3, 3) */
    float *bias;   /* a part each, or none */
    int64_t type, samples, channels, out_channels;
    int64_t extents[3], results[3], padding[3];
    int64_t part, parts;
} winograd;

/* The two of four, or of two, that make a kind; `second` may be none. */
typedef struct {
    int first, second, minus;
} combination;

enum { NONE = -1 };

static const combination kinds_of_x[KINDS] = {{0, 2, 1}, {1, 2, 0}, {2, 1, 1}, {1, 3, 1}};
static const combination kinds_of_g[KINDS] = {{0, NONE, 0}, {0, 1, 0}, {0, 1, 1}, {1, NONE, 0}};

#if VECTORS

INLINE vector combined(vector a, vector b, int minus) { return minus ? subtract(a, b) : add(a, b); }

/* Four kinds of sums, `step` vectors apart, into three taps. */
INLINE void taps_of(const vector *m, int64_t step, vector *taps, int64_t taps_step)
{
    vector half = scaled(add(m[step], m[2 * step]), 0.5f);
    taps[0] = add(m[0], half);
    taps[taps_step] = scaled(subtract(m[step], m[2 * step]), 0.5f);
    taps[2 * taps_step] = subtract(half, m[3 * step]);
}

/* The tiles of two volumes, kind by kind, as the panels of products of matrices.
 *
 * A tile is two voxels of g along each axis. For each kind along the depth planes are combined; for
 * each along the height rows of these, and along the width voxels, which are written as panels: LANES
 * channels of a tile after those of the one before it. */
enum { ROWS = LANES / 2 }; /* channels of x whose sums are in registers, with two vectors of g's each */

typedef struct {
    const winograd *k;
    int64_t in, out, halves;       /* vectors of a voxel's channels; blocks of ROWS of x's */
    int64_t tiles, rows, pairs;    /* along the width, height and depth */
    int64_t strip, planes, panel;  /* rows and pairs of planes at a time; numbers of a panel */
    float *x_rows, *g_rows;        /* combined planes: row, voxel, channel */
    float *x_panels, *g_panels;    /* kind along the width, vector of channels, tile, channel */
    float *sums;                   /* kind, half, vector of g's channels, ROWS, LANES */
    float *taps;                   /* tap, then as the sums */
    double *bias;
} machine;

INLINE int64_t sums_of_a_kind(const machine *m) { return m->halves * m->out * ROWS * LANES; }

INLINE void combine_as(int64_t type, const void *a, const void *b, int minus, int64_t channels,
                       int64_t voxels, float *to)
{
    for (int64_t v = 0; v < voxels; v++)
        for (int64_t c = 0; c < channels; c += LANES, to += LANES) {
            int64_t at = v * channels + c;
            vector sum = a ? some_of(a, type, at, channels - c) : zero();
            if (b)
                sum = combined(sum, some_of(b, type, at, channels - c), minus);
            store(to, sum);
        }
}

/* Two rows, either of which may be missing, as one: every voxel has whole vectors of channels. */
static void combine(int64_t type, const void *a, const void *b, int minus, int64_t channels,
                    int64_t voxels, float *to)
{
    if (type == FLOAT32)
        combine_as(FLOAT32, a, b, minus, channels, voxels, to);
    else
        combine_as(BFLOAT16, a, b, minus, channels, voxels, to);
}

/* A volume, and of its rows those that a strip of tiles reads. */
typedef struct {
    const char *at; /* the sample */
    int64_t type, channels, vectors;
    const int64_t *extents;
    int64_t plane, row, rows;   /* the first ones */
    int64_t lead, voxels;       /* zeros before a row; what it has with them and those after it */
} slab;

static const char *row_of(const slab *s, int which, int64_t y)
{
    int64_t z = s->plane + which;
    if (which == NONE || z < 0 || z >= s->extents[DEPTH] || y < 0 || y >= s->extents[HEIGHT])
        return NULL;
    int64_t row = s->extents[WIDTH] * s->channels * size_of[s->type];
    return s->at + (z * s->extents[HEIGHT] + y) * row;
}

static void combine_planes(const slab *s, combination kind, float *to)
{
    int64_t inside = least(s->extents[WIDTH], s->voxels - s->lead), voxel = s->vectors * LANES;
    for (int64_t y = s->row; y < s->row + s->rows; y++, to += s->voxels * voxel) {
        const char *a = row_of(s, kind.first, y), *b = row_of(s, kind.second, y);
        memset(to, 0, (size_t)(4 * s->lead * voxel));
        combine(s->type, a, b, kind.minus, s->channels, inside, to + s->lead * voxel);
        memset(to + (s->lead + inside) * voxel, 0, (size_t)(4 * (s->voxels - s->lead - inside) * voxel));
    }
}

/* One kind of four rows of x, in tiles along the width: their four kinds, `step` numbers apart. */
INLINE void write_x(const machine *m, const float *rows, combination kind, float *to, int64_t step)
{
    int64_t voxel = m->in * LANES, row = (2 * m->tiles + 2) * voxel;
    for (int64_t c = 0; c < m->in; c++, to += m->panel) {
        const float *a = rows + kind.first * row + c * LANES, *b = rows + kind.second * row + c * LANES;
        vector x0 = combined(load(a), load(b), kind.minus);
        vector x1 = combined(load(a + voxel), load(b + voxel), kind.minus);
        for (int64_t t = 0; t < m->tiles; t++) {
            a += 2 * voxel;
            b += 2 * voxel;
            vector x2 = combined(load(a), load(b), kind.minus);
            vector x3 = combined(load(a + voxel), load(b + voxel), kind.minus);
            float *at = to + t * LANES;
            store(at, subtract(x0, x2));
            store(at + step, add(x1, x2));
            store(at + 2 * step, subtract(x2, x1));
            store(at + 3 * step, subtract(x1, x3));
            x0 = x2;
            x1 = x3;
        }
    }
}

/* The same of two rows of g. */
INLINE void write_g(const machine *m, const float *rows, combination kind, float *to, int64_t step)
{
    int64_t voxel = m->out * LANES, row = 2 * m->tiles * voxel;
    for (int64_t c = 0; c < m->out; c++, to += m->panel) {
        const float *a = rows + kind.first * row + c * LANES, *b = rows + kind.second * row + c * LANES;
        for (int64_t t = 0; t < m->tiles; t++, a += 2 * voxel, b += 2 * voxel) {
            vector g0 = load(a), g1 = load(a + voxel);
            if (kind.second != NONE) {
                g0 = combined(g0, load(b), kind.minus);
                g1 = combined(g1, load(b + voxel), kind.minus);
            }
            float *at = to + t * LANES;
            store(at, g0);
            store(at + step, add(g0, g1));
            store(at + 2 * step, subtract(g0, g1));
            store(at + 3 * step, g1);
        }
    }
}

#endif

#endif
