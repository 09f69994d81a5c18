/* The gradient of u of a step, from that of the result: what both passes of a backward pass share. */
#ifndef HYPERSLAB_GRADIENT_H
#define HYPERSLAB_GRADIENT_H

#include "chain.h"
#include "wide_gradient.h"

/* A step of masks, all ones where the activation passes the gradient. */
static void read_bits(const uint8_t *bits, int64_t first, int64_t n, uint32_t *restrict mask)
{
    int64_t i = 0;
#if WIDE
    if (first % 8 == 0) {
        const uint8_t *from = bits + first / 8;
        for (; i + 16 <= n; i += 16) {
            uint16_t word;
            memcpy(&word, from + i / 8, 2);
            _mm512_storeu_si512(mask + i, _mm512_maskz_set1_epi32((__mmask16)word, -1));
        }
    }
#endif
    for (; i < n; i++)
        mask[i] = -(uint32_t)(bits[(first + i) / 8] >> (first + i) % 8 & 1);
}

/* The gradient of u from that of a. */
INLINE void gradient(float *restrict du, const float *restrict da, const float *restrict x,
                     const float *restrict m, const float *restrict s, const float *restrict t,
                     const uint32_t *restrict mask, int64_t n, float slope, int activation,
                     int known)
{
    for (int64_t i = 0; i < n; i++) {
        float otherwise = activation == RELU ? 0 : da[i] * slope;
        int passes;
        if (known == FROM_BITS) {
            passes = mask[i] != 0;
        } else {
            float u = (x[i] - m[i]) * s[i] + t[i];
            passes = activation == RELU ? !(u <= 0) : u > 0;
        }
        du[i] = passes ? da[i] : otherwise;
    }
}

static void gradient_any(float *du, const float *da, const float *x, const float *m, const float *s,
                         const float *t, const uint32_t *mask, int64_t n, float slope,
                         int activation, int known)
{
    if (known == FROM_X && activation == RELU)
        gradient(du, da, x, m, s, t, mask, n, slope, RELU, FROM_X);
    else if (known == FROM_X)
        gradient(du, da, x, m, s, t, mask, n, slope, LEAKY, FROM_X);
    else if (activation == RELU)
        gradient(du, da, x, m, s, t, mask, n, slope, RELU, FROM_BITS);
    else
        gradient(du, da, x, m, s, t, mask, n, slope, LEAKY, FROM_BITS);
}

/* To the winner of every tile its gradient, to others none. */
static void award(float *restrict da, const float *restrict g, const int32_t *restrict winner,
                  int32_t number, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        da[i] = winner[i] == number ? g[i] : 0;
}

/* Rooms that both kernels need. */
typedef struct {
    float *spread, *part, *lines; /* of a run */
    int32_t *winner, *number;
    float *loaded, *given, *da, *du, *m, *s, *t; /* of a step */
    uint32_t *mask;
    double *sum, *product; /* of a step, for sums */
} gradient_rooms;

static int prepare(store *all, gradient_rooms *r, const chain *k, const cursor *at, int64_t more)
{
    if (rooms(all, at, 5, 8 + more))
        return 1;
    r->spread = take_room(all, at->room);
    r->part = take_room(all, at->room);
    r->lines = take_room(all, at->room);
    r->winner = take_room(all, at->room);
    r->number = take_room(all, at->room);
    r->loaded = take_room(all, at->step);
    r->given = take_room(all, at->step);
    r->da = take_room(all, at->step);
    r->du = take_room(all, at->step);
    r->m = take_room(all, at->step);
    r->s = take_room(all, at->step);
    r->t = take_room(all, at->step);
    r->mask = take_room(all, at->step);
    if (k->maximum)
        for (int64_t i = 0; i < at->room; i++) {
            int64_t column = i / k->channels % k->pool_width;
            int64_t line = at->whole ? i / k->channels / k->width % k->pool_height : 0;
            r->number[i] = (int32_t)(line * k->pool_width + column);
        }
    return 0;
}

static void repeat_norm(const chain *k, int64_t block, const gradient_rooms *r, int64_t n)
{
    repeat(k->norm, MEAN, k, block, r->m, n);
    repeat(k->norm, SCALE, k, block, r->s, n);
    repeat(k->norm, SHIFT, k, block, r->t, n);
}

/* Values of the results of a run at every element of one of its rows. */
static void spread_run(const chain *k, const cursor *at, const float *results, float *lines,
                       float *row)
{
    int64_t tiles = lines_here(at) * tiles_here(at);
    int high = at->whole && k->pool_height > 1;
    spread(results, k->pool_width, k->channels, tiles, high ? lines : row);
    if (high)
        spread(lines, k->pool_height, k->width * k->channels, lines_here(at), row);
}

/* Numbers of some type in memory, from element `first` on. */
typedef struct {
    const void *values;
    int64_t type, first;
} source;

/* The gradients at every element of a row, and the winners but for the number of the row. */
static source spread_gradient(const chain *k, const cursor *at, const gradient_rooms *r)
{
    int64_t results = results_here(k, at), first = result_of(k, at), n = elements_here(k, at);
    int64_t elements = k->pool_depth * k->pool_height * k->pool_width;
    source given = {k->g, k->g_type, first}, made = {r->spread, FLOAT32, 0};
    if (elements == 1 && !k->maximum)
        return given;
    const float *g = read_row(k->g, k->g_type, first, results, r->part);
    if (!k->maximum) {
        float inverse = 1.0f / (float)elements;
        for (int64_t i = 0; i < results; i++)
            r->part[i] = g[i] * inverse;
        g = r->part;
    }
    spread_run(k, at, g, r->lines, r->spread);
    if (k->maximum) {
        int32_t *winner = (int32_t *)r->part;
        for (int64_t i = 0; i < results; i++)
            winner[i] = k->winners[first + i];
        spread_run(k, at, r->part, r->lines, (float *)r->winner);
        for (int64_t i = 0; i < n; i++)
            r->winner[i] -= r->number[i];
    }
    return made;
}

/* A step: `i` elements after the beginning of a row's elements, `from` after that of the block. */
typedef struct {
    int64_t row, i, from, n;
    const source *g; /* at the first element of the row; NULL: there is none */
} place;

INLINE int known_by(const chain *k)
{
    return activation_of(k) == IDENTITY ? EVERYWHERE : k->bits ? FROM_BITS : FROM_X;
}

#if WIDE
/* A step for `gradient_wide_any`, but for what becomes of it. */
static gradient_step wide_step(const chain *k, const cursor *at, const gradient_rooms *r,
                               const place *p)
{
    gradient_step w = {
        .g = p->g ? p->g->values : NULL,
        .g_type = p->g ? p->g->type : FLOAT32,
        .first_g = p->g ? p->g->first + p->i : 0,
        .winner = k->maximum ? r->winner + p->i : NULL,
        .number = (int32_t)(p->row * tile_in_row(k, at)),
        .x = k->x,
        .x_type = k->x_type,
        .first_x = p->from,
        .m = r->m,
        .period = at->period,
        .s = r->s,
        .t = r->t,
        .bits = k->bits,
        .first = p->from,
        .slope = (float)k->slope,
        .activation = activation_of(k),
    };
    return w;
}
#endif

/* du from element `skip` of a step on, at which x is given. */
static const float *gradient_from(const chain *k, const cursor *at, const gradient_rooms *r,
                                  const place *p, int64_t skip, const float *x)
{
    int64_t n = p->n - skip;
    const float *g = read_row(p->g->values, p->g->type, p->g->first + p->i + skip, n, r->given);
    if (k->maximum) {
        int32_t number = (int32_t)(p->row * tile_in_row(k, at));
        award(r->da + skip, g, r->winner + p->i + skip, number, n);
        g = r->da + skip;
    }
    int known = known_by(k);
    if (known == EVERYWHERE)
        return g;
    if (known == FROM_BITS)
        read_bits(k->bits, p->from + skip, n, r->mask);
    gradient_any(r->du + skip, g, x, r->m + skip, r->s + skip, r->t + skip, r->mask, n,
                 (float)k->slope, activation_of(k), known);
    return r->du + skip;
}

#endif
