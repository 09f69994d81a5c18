/* Normalise, activate and pool, in one pass over the block. */
#include "cubes.h"

INLINE void activate(float *restrict a, const float *restrict x, const float *restrict m,
                     const float *restrict s, const float *restrict t, int64_t n, float slope,
                     int activation, int scaled, int add)
{
    for (int64_t i = 0; i < n; i++) {
        float u = scaled ? (x[i] - m[i]) * s[i] + t[i] : x[i];
        if (activation == RELU)
            u = u <= 0 ? 0 : u;
        if (activation == LEAKY)
            u = u > 0 ? u : u * slope;
        a[i] = add ? a[i] + u : u;
    }
}

/* One bit an element: not (x <= 0) for relu, x > 0 for leaky relu. */
static void write_bits(const float *x, int64_t n, int activation, uint8_t *bits, int64_t first)
{
    int64_t i = 0;
    int relu = activation == RELU;
    if (first % 8 == 0) {
        uint8_t *to = bits + first / 8;
        for (; i + 8 <= n; i += 8) {
            unsigned byte = 0;
            for (int64_t j = 0; j < 8; j++)
                byte |= (unsigned)(relu ? !(x[i + j] <= 0) : x[i + j] > 0) << j;
            to[i / 8] = (uint8_t)byte;
        }
    }
    for (; i < n; i++) { /* into bytes that others write, too: they were cleared before */
        unsigned passes = relu ? !(x[i] <= 0) : x[i] > 0;
        bits[(first + i) / 8] |= (uint8_t)(passes << (first + i) % 8);
    }
}

/* A step and rooms for it. */
typedef struct {
    forward_step of;
    int64_t n;
    float *loaded, *a;
    uint16_t *halves;
} step;

INLINE void activate_step(const step *s, int activation, int scaled, int add)
{
    const forward_step *p = &s->of;
    int64_t done = 0;
#if WIDE
    done = activate_wide(p, s->n, activation, scaled, add);
#endif
    if (done == s->n)
        return;
    int64_t first = p->first + done, first_y = p->first_y + done, n = s->n - done;
    const float *x = read_row(p->x, p->x_type, first, n, s->loaded);
    float *y = row_to_write(p->target, p->y_type, p->stream, first_y, s->a);
    if (p->bits)
        write_bits(x, n, activation, p->bits, first);
    activate(y, x, p->m + done, p->s + done, p->t + done, n, p->slope, activation, scaled, add);
    write_row(p->target, p->y_type, p->stream, first_y, y, n, s->halves);
}

#define CASE(activation, scaled, add)                                                             \
    case (activation) * 4 + (scaled) * 2 + (add):                                                 \
        activate_step(s, activation, scaled, add);                                                \
        break;

static void activate_any(const chain *k, const step *s, int add)
{
    switch (activation_of(k) * 4 + (k->norm != NULL) * 2 + add) {
        CASE(IDENTITY, 0, 0) CASE(IDENTITY, 0, 1) CASE(IDENTITY, 1, 0) CASE(IDENTITY, 1, 1)
        CASE(RELU, 0, 0) CASE(RELU, 0, 1) CASE(RELU, 1, 0) CASE(RELU, 1, 1)
        CASE(LEAKY, 0, 0) CASE(LEAKY, 0, 1) CASE(LEAKY, 1, 0) CASE(LEAKY, 1, 1)
    }
}

/* Among k places: as if elements had come in order of their numbers, so that the first maximum and
 * the last NaN win. `who` is a number already, `row` becomes one. */
static void challenge_place(float *restrict best, int32_t *restrict who, const float *restrict a,
                            const int32_t *restrict row, int32_t k, int32_t place, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t number = row[i] * k + place;
        int later = number > who[i];
        int wins = (a[i] > best[i]) | ((a[i] == best[i]) & !later) |
                   ((a[i] != a[i]) & ((best[i] == best[i]) | later));
        best[i] = wins ? a[i] : best[i];
        who[i] = wins ? number : who[i];
    }
}

/* sum[v * inner + c] = sum over places of row[(v * k + place) * inner + c] */
static void fold_sum(const float *row, int64_t k, int64_t inner, int64_t voxels, float *sum,
                     float *restrict part)
{
    take(row, 0, k, inner, voxels, sum);
    for (int64_t place = 1; place < k; place++) {
        take(row, place, k, inner, voxels, part);
        for (int64_t i = 0; i < voxels * inner; i++)
            sum[i] += part[i];
    }
}

/* The same with maxima and their numbers. */
static void fold_maximum(const float *row, const int32_t *who, int64_t k, int64_t inner,
                         int64_t voxels, float *best, int32_t *won, float *part, int32_t *numbers)
{
    int64_t n = voxels * inner;
    take(row, 0, k, inner, voxels, best);
    take((const float *)who, 0, k, inner, voxels, (float *)won);
    for (int64_t i = 0; i < n; i++)
        won[i] *= (int32_t)k;
    for (int64_t place = 1; place < k; place++) {
        take(row, place, k, inner, voxels, part);
        take((const float *)who, place, k, inner, voxels, (float *)numbers);
        challenge_place(best, won, part, numbers, (int32_t)k, (int32_t)place, n);
    }
}

typedef struct {
    float *rows, *folded, *part;        /* of a run */
    int32_t *who, *folded_who, *won, *numbers;
    float *loaded, *m, *s, *t, *a, *out; /* of a step; out also of a run's results */
    uint16_t *halves;
} forward_rooms;

static int prepare(store *all, forward_rooms *r, const cursor *at)
{
    if (rooms(all, at, 8, 6))
        return 1;
    r->rows = take_room(all, at->room);
    r->folded = take_room(all, at->room);
    r->part = take_room(all, at->room);
    r->who = take_room(all, at->room);
    r->folded_who = take_room(all, at->room);
    r->won = take_room(all, at->room);
    r->numbers = take_room(all, at->room);
    r->out = take_room(all, at->room);
    r->loaded = take_room(all, at->step);
    r->m = take_room(all, at->step);
    r->s = take_room(all, at->step);
    r->t = take_room(all, at->step);
    r->a = take_room(all, at->step);
    r->halves = take_room(all, at->step);
    return 0;
}

/* Without pooling: step by step from x to the result. */
static void run_pointwise(const chain *k, const cursor *at, const forward_rooms *r)
{
    int64_t n = elements_here(k, at), from = row_of(k, at, 0);
    for (int64_t i = 0; i < n; i += at->step) {
        forward_step p = {k->y, k->y_type, k->stream, from + i, k->x, k->x_type, from + i,
                          r->m, r->s, r->t, at->period, (float)k->slope, k->bits};
        step s = {p, least(at->step, n - i), r->loaded, r->a, r->halves};
        activate_any(k, &s, 0);
    }
}

/* With pooling: rows are added up, or compared, and then the places of a tile in the row. */
static void run_pooled(const chain *k, const cursor *at, const forward_rooms *r)
{
    int64_t n = elements_here(k, at);
    for (int64_t row = 0; row < rows_of(k, at); row++) {
        int64_t from = row_of(k, at, row);
        for (int64_t i = 0; i < n; i += at->step) {
            int64_t here = least(at->step, n - i);
            int later = k->maximum && row;
            forward_step p = {later ? r->a : r->rows + i, FLOAT32, 0, 0, k->x, k->x_type, from + i,
                              r->m, r->s, r->t, at->period, (float)k->slope, k->bits};
            step s = {p, here, r->loaded, r->a, r->halves};
            activate_any(k, &s, row && !k->maximum);
            if (later)
                compete(r->a, (int32_t)row, here, r->rows + i, r->who + i);
        }
        if (k->maximum && row == 0)
            memset(r->who, 0, 4 * n);
    }
    int64_t first = result_of(k, at), results = results_here(k, at);
    int64_t tiles = lines_here(at) * tiles_here(at), line = k->width * k->channels;
    float *y = row_to_write(k->y, k->y_type, k->stream, first, r->out);
    int high = at->whole && k->pool_height > 1;
    const float *folded = high ? r->folded : r->rows;
    if (k->maximum) {
        if (high)
            fold_maximum(r->rows, r->who, k->pool_height, line, lines_here(at), r->folded,
                         r->folded_who, r->part, r->numbers);
        fold_maximum(folded, high ? r->folded_who : r->who, k->pool_width, k->channels, tiles, y,
                     r->won, r->part, r->numbers);
        if (k->winners)
            for (int64_t i = 0; i < results; i++)
                k->winners[first + i] = (uint8_t)r->won[i];
    } else {
        float inverse = 1.0f / (float)(k->pool_depth * k->pool_height * k->pool_width);
        if (high)
            fold_sum(r->rows, k->pool_height, line, lines_here(at), r->folded, r->part);
        fold_sum(folded, k->pool_width, k->channels, tiles, y, r->part);
        for (int64_t i = 0; i < results; i++)
            y[i] *= inverse;
    }
    write_row(k->y, k->y_type, k->stream, first, y, results, (uint16_t *)r->part);
}

int hyperslab_chain_forward(const chain *k)
{
    cursor at = begin(k);
    if (at.left == 0)
        return 0;
    store all;
    forward_rooms r;
    if (prepare(&all, &r, &at))
        return 1;
    int64_t step = least(at.step, at.room);
    int pooled = k->maximum || k->pool_depth * k->pool_height * k->pool_width > 1;
    for (int64_t block = -1; at.left; advance(&at)) {
        if (block < 0 || (at.block != block && k->scale_rows > 1))
            repeat_norm(k, at.block, r.m, r.s, r.t, step);
        block = at.block;
#if WIDE
        if (average_cubes(k, &at))
            continue;
#endif
        if (pooled)
            run_pooled(k, &at, &r);
        else
            run_pointwise(k, &at, &r);
    }
    finish_stream(k->stream);
    free(all.all);
    return 0;
}
