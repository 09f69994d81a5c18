/* The gradient of u of a step, from that of the result: what both passes of a backward pass share. */
#ifndef HYPERSLAB_GRADIENT_H
#define HYPERSLAB_GRADIENT_H

#include "chain.h"

enum { EVERYWHERE, FROM_X, FROM_BITS };
enum { PLAIN, SCALED, COMBINED, SUMMED };

#if WIDE

/* The gradient of a step and what becomes of it. */
typedef struct {
    void *target;
    int64_t y_type, stream, first_y;
    const void *x;
    int64_t x_type, first_x;
    const void *g;
    int64_t g_type, first_g;
    const int32_t *winner; /* or NULL */
    int32_t number;
    const float *m, *s, *t, *b, *c;
    double *sum, *product;
    int64_t period; /* a multiple of 16: numbers and sums are those of so many elements, in turn */
    const uint8_t *bits;
    int64_t first; /* bit */
    float slope;
    int activation;
} gradient_step;

/* Sums of sixteen elements in registers. */
typedef struct {
    __m512d sum[2], product[2];
} wide_sums;

INLINE wide_sums load_sums(const double *sum, const double *product)
{
    wide_sums all = {{_mm512_loadu_pd(sum), _mm512_loadu_pd(sum + 8)},
                     {_mm512_loadu_pd(product), _mm512_loadu_pd(product + 8)}};
    return all;
}

INLINE void store_sums(double *sum, double *product, const wide_sums *all)
{
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_pd(sum + 8 * half, all->sum[half]);
        _mm512_storeu_pd(product + 8 * half, all->product[half]);
    }
}

INLINE __m512d half_of(__m512 values, int half)
{
    return _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(values, 1) : _mm512_castps512_ps256(values));
}

INLINE void add_wide(wide_sums *all, __m512 d, __m512 x)
{
    for (int half = 0; half < 2; half++) {
        __m512d wide_d = half_of(d, half);
        all->sum[half] = _mm512_add_pd(all->sum[half], wide_d);
        all->product[half] = _mm512_fmadd_pd(wide_d, half_of(x, half), all->product[half]);
    }
}

/* The numbers of sixteen elements from `i` on, those that are read. */
INLINE wide_numbers numbers_at(const gradient_step *p, int64_t i, int known, int affine)
{
    wide_numbers q = {0};
    if (known == FROM_X)
        q = scales_at(p->m, p->s, p->t, i);
    else if (affine == COMBINED || affine == SUMMED)
        q.mean = _mm512_loadu_ps(p->m + i);
    if (affine == SCALED || affine == COMBINED)
        q.scale = _mm512_loadu_ps(p->s + i);
    if (affine == COMBINED) {
        q.slope = _mm512_loadu_ps(p->b + i);
        q.constant = _mm512_loadu_ps(p->c + i);
    }
    return q;
}

/* Sixteen elements from `j` on. */
INLINE void gradient_at(const gradient_step *p, int64_t j, const wide_numbers *q, int known,
                        int affine, int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                        int past_caches, wide_sums *all)
{
    __m512 d = load_wide(p->g, g_type, p->first_g + j), x = d;
    if (p->winner)
        d = _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p->winner + j),
                                                        _mm512_set1_epi32(p->number)),
                                d);
    if (known == FROM_X || affine == COMBINED || affine == SUMMED)
        x = load_wide(p->x, x_type, p->first_x + j);
    if (known == FROM_X) {
        __m512 u = normalised_wide(x, q);
        d = damped(d, passes_wide(u, activation), _mm512_set1_ps(p->slope), activation);
    }
    if (known == FROM_BITS) {
        uint16_t word;
        memcpy(&word, p->bits + (p->first + j) / 8, 2);
        d = damped(d, (__mmask16)word, _mm512_set1_ps(p->slope), activation);
    }
    if (affine == COMBINED || affine == SUMMED)
        x = _mm512_sub_ps(x, q->mean);
    if (affine == SUMMED) {
        add_wide(all, d, x);
        return;
    }
    if (affine != PLAIN)
        d = _mm512_mul_ps(d, q->scale);
    if (affine == COMBINED) {
        d = _mm512_add_ps(d, _mm512_mul_ps(x, q->slope));
        d = _mm512_add_ps(d, q->constant);
    }
    store_wide(p->target, y_type, p->first_y + j, d, past_caches);
}

/* Each vector has its own numbers and sums. */
INLINE int64_t gradient_plain(const gradient_step *p, int64_t n, int known, int affine,
                              int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                              int past_caches)
{
    wide_sums all = {0};
    for (int64_t i = 0, j = 0; j + 16 <= n; j += 16, i = i + 16 < p->period ? i + 16 : 0) {
        wide_numbers q = numbers_at(p, i, known, affine);
        if (affine == SUMMED)
            all = load_sums(p->sum + i, p->product + i);
        gradient_at(p, j, &q, known, affine, activation, g_type, x_type, y_type, past_caches, &all);
        if (affine == SUMMED)
            store_sums(p->sum + i, p->product + i, &all);
    }
    return n / 16 * 16;
}

/* With so many `vectors` of numbers and sums; 0: each vector has its own. */
INLINE int64_t gradient_types(const gradient_step *step, int64_t n, int known, int affine,
                              int activation, int64_t g_type, int64_t x_type, int64_t y_type,
                              int vectors)
{
    const gradient_step p = *step; /* so that it is known not to change */
    if (known == FROM_BITS && p.first % 8)
        return 0;
    int past_caches = p.stream && can_stream(p.target, y_type, p.first_y);
    if (!vectors)
        return gradient_plain(&p, n, known, affine, activation, g_type, x_type, y_type,
                              past_caches);
    wide_numbers q[VECTORS];
    wide_sums all[VECTORS];
    for (int v = 0; v < vectors; v++) {
        q[v] = numbers_at(&p, 16 * v, known, affine);
        if (affine == SUMMED)
            all[v] = load_sums(p.sum + 16 * v, p.product + 16 * v);
    }
    int64_t i = 0;
#define DO(j, v)                                                                                  \
    gradient_at(&p, j, q + (v), known, affine, activation, g_type, x_type, y_type, past_caches,   \
                all + (v))
    FOR_VECTORS(vectors, i, n, DO)
#undef DO
    if (affine == SUMMED)
        for (int v = 0; v < vectors; v++)
            store_sums(p.sum + 16 * v, p.product + 16 * v, all + v);
    return i;
}

INLINE void around_at(const gradient_step *p, int64_t j, __m512 pivot, int64_t x_type,
                      wide_sums *all)
{
    __m512 x = load_wide(p->x, x_type, p->first_x + j);
    for (int half = 0; half < 2; half++) {
        __m512d d = _mm512_sub_pd(half_of(x, half), half_of(pivot, half));
        all->sum[half] = _mm512_add_pd(all->sum[half], d);
        all->product[half] = _mm512_fmadd_pd(d, d, all->product[half]);
    }
}

/* Sums of x - m and of its squares. */
INLINE int64_t around_types(const gradient_step *step, int64_t n, int64_t x_type, int vectors)
{
    const gradient_step p = *step;
    wide_sums all[VECTORS];
    int64_t i = 0;
    if (!vectors) {
        for (int64_t of = 0; i + 16 <= n; i += 16, of = of + 16 < p.period ? of + 16 : 0) {
            all[0] = load_sums(p.sum + of, p.product + of);
            around_at(&p, i, _mm512_loadu_ps(p.m + of), x_type, all);
            store_sums(p.sum + of, p.product + of, all);
        }
        return i;
    }
    for (int v = 0; v < vectors; v++)
        all[v] = load_sums(p.sum + 16 * v, p.product + 16 * v);
#define DO(j, v) around_at(&p, j, _mm512_loadu_ps(p.m + 16 * (v)), x_type, all + (v))
    FOR_VECTORS(vectors, i, n, DO)
#undef DO
    for (int v = 0; v < vectors; v++)
        store_sums(p.sum + 16 * v, p.product + 16 * v, all + v);
    return i;
}

INLINE int64_t around_wide(const gradient_step *p, int64_t n)
{
    int few = p->period == 16 * VECTORS;
    if (p->x_type == FLOAT32)
        return few ? around_types(p, n, FLOAT32, VECTORS) : around_types(p, n, FLOAT32, 0);
    if (p->x_type == BFLOAT16)
        return few ? around_types(p, n, BFLOAT16, VECTORS) : around_types(p, n, BFLOAT16, 0);
    return around_types(p, n, FLOAT16, 0);
}

INLINE int64_t gradient_wide(const gradient_step *p, int64_t n, int known, int affine,
                             int activation)
{
    int64_t y_type = affine == SUMMED ? p->x_type : p->y_type; /* nothing is written */
    int reads_x = known == FROM_X || affine == COMBINED || affine == SUMMED;
    int64_t x_type = reads_x ? p->x_type : p->g_type;
    int same = p->g_type == x_type && x_type == y_type;
    int few = affine != PLAIN && p->period == 16 * VECTORS;
#define CALL(of_g, of_x, of_y, vectors)                                                           \
    gradient_types(p, n, known, affine, activation, of_g, of_x, of_y, vectors)
    if (same && few && x_type == FLOAT32)
        return CALL(FLOAT32, FLOAT32, FLOAT32, VECTORS);
    if (same && few && x_type == BFLOAT16)
        return CALL(BFLOAT16, BFLOAT16, BFLOAT16, VECTORS);
    if (same && x_type == FLOAT32)
        return CALL(FLOAT32, FLOAT32, FLOAT32, 0);
    if (same && x_type == BFLOAT16)
        return CALL(BFLOAT16, BFLOAT16, BFLOAT16, 0);
    return CALL(p->g_type, x_type, y_type, 0);
#undef CALL
}

#define WAY(known, affine, activation)                                                            \
    case ((known) * 4 + (affine)) * 3 + (activation):                                             \
        return gradient_wide(p, n, known, affine, activation);

static int64_t gradient_wide_any(const gradient_step *p, int64_t n, int known, int affine)
{
    switch ((known * 4 + affine) * 3 + p->activation) {
        WAY(EVERYWHERE, PLAIN, IDENTITY)
        WAY(EVERYWHERE, SCALED, IDENTITY)
        WAY(EVERYWHERE, COMBINED, IDENTITY)
        WAY(FROM_X, SCALED, RELU)
        WAY(FROM_X, SCALED, LEAKY)
        WAY(FROM_X, COMBINED, RELU)
        WAY(FROM_X, COMBINED, LEAKY)
        WAY(FROM_BITS, PLAIN, RELU)
        WAY(FROM_BITS, PLAIN, LEAKY)
    }
    return 0;
}

/* The sums instead. */
static int64_t sums_wide_any(const gradient_step *p, int64_t n, int known)
{
    switch ((known * 4 + SUMMED) * 3 + p->activation) {
        WAY(EVERYWHERE, SUMMED, IDENTITY)
        WAY(FROM_X, SUMMED, RELU)
        WAY(FROM_X, SUMMED, LEAKY)
    }
    return 0;
}

#endif

/* A step of masks, all ones where the activation passes the gradient. */
static void read_bits(const uint8_t *bits, int64_t first, int64_t n, uint32_t *restrict mask)
{
    for (int64_t i = 0; i < n; i++)
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
