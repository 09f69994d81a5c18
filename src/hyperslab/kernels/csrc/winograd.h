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

enum { DEPTH, HEIGHT, WIDTH, KINDS = 4, TAPS = 3, ALL_KINDS = 64, ALL_TAPS = 27 };

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

#endif

#endif
