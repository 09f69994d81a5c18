/* The gradient of a chain: its sums, and that of its input, each in one pass over the block. */
#include "chain.h"

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
                     const float *restrict s, const float *restrict t, const uint32_t *restrict mask,
                     int64_t n, float slope, int activation, int known)
{
    for (int64_t i = 0; i < n; i++) {
        float otherwise = activation == RELU ? 0 : da[i] * slope;
        int passes;
        if (known == FROM_BITS) {
            passes = mask[i] != 0;
        } else {
            float u = x[i] * s[i] + t[i];
            passes = activation == RELU ? !(u <= 0) : u > 0;
        }
        du[i] = passes ? da[i] : otherwise;
    }
}

static void gradient_any(float *du, const float *da, const float *x, const float *s, const float *t,
                         const uint32_t *mask, int64_t n, float slope, int activation, int known)
{
    if (known == FROM_X && activation == RELU)
        gradient(du, da, x, s, t, mask, n, slope, RELU, FROM_X);
    else if (known == FROM_X)
        gradient(du, da, x, s, t, mask, n, slope, LEAKY, FROM_X);
    else if (activation == RELU)
        gradient(du, da, x, s, t, mask, n, slope, RELU, FROM_BITS);
    else
        gradient(du, da, x, s, t, mask, n, slope, LEAKY, FROM_BITS);
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
    float *loaded, *da, *du, *s, *t; /* of a step */
    uint32_t *mask;
} gradient_rooms;

static int prepare(store *all, gradient_rooms *r, const chain *k, const cursor *at, int64_t more)
{
    if (rooms(all, at, 5, 6 + more))
        return 1;
    r->spread = take_room(all, at->room);
    r->part = take_room(all, at->room);
    r->lines = take_room(all, at->room);
    r->winner = take_room(all, at->room);
    r->number = take_room(all, at->room);
    r->loaded = take_room(all, at->step);
    r->da = take_room(all, at->step);
    r->du = take_room(all, at->step);
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

/* The gradients at every element of a row, and the winners but for the number of the row. */
static const float *spread_gradient(const chain *k, const cursor *at, const gradient_rooms *r)
{
    int64_t results = results_here(k, at), first = result_of(k, at), n = elements_here(k, at);
    int64_t elements = k->pool_depth * k->pool_height * k->pool_width;
    if (elements == 1 && !k->maximum && k->g_type == FLOAT32)
        return (const float *)k->g + first;
    const float *g = read_row(k->g, k->g_type, first, results, r->part);
    if (!k->maximum) {
        float inverse = 1.0f / (float)elements;
        for (int64_t i = 0; i < results; i++)
            r->part[i] = g[i] * inverse;
        g = r->part;
    }
    if (elements == 1 && !k->maximum)
        return g;
    spread_run(k, at, g, r->lines, r->spread);
    if (k->maximum) {
        int32_t *winner = (int32_t *)r->part;
        for (int64_t i = 0; i < results; i++)
            winner[i] = k->winners[first + i];
        spread_run(k, at, r->part, r->lines, (float *)r->winner);
        for (int64_t i = 0; i < n; i++)
            r->winner[i] -= r->number[i];
    }
    return r->spread;
}

/* A step: `i` elements after the beginning of a row's elements, `from` after that of the block. */
typedef struct {
    int64_t row, i, from, n;
    const float *g; /* at the first element of the row */
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
        .g = p->g + p->i,
        .winner = k->maximum ? r->winner + p->i : NULL,
        .number = (int32_t)(p->row * tile_in_row(k, at)),
        .x = k->x,
        .x_type = k->x_type,
        .first_x = p->from,
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
    const float *g = p->g + p->i + skip;
    int64_t n = p->n - skip;
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
    gradient_any(r->du + skip, g, x, r->s + skip, r->t + skip, r->mask, n, (float)k->slope,
                 activation_of(k), known);
    return r->du + skip;
}

static void accumulate(double *restrict sum, double *restrict product, const float *restrict du,
                       const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        sum[i] += (double)du[i];
        product[i] += (double)du[i] * (double)x[i];
    }
}

static void sum_step(const chain *k, const cursor *at, const gradient_rooms *r, const place *p,
                     double *sum, double *product)
{
    int64_t done = 0;
#if WIDE
    if (p->g) {
        gradient_step w = wide_step(k, at, r, p);
        w.sum = sum;
        w.product = product;
        done = gradient_wide_any(&w, p->n, known_by(k), SUMMED);
    }
#endif
    int64_t rest = p->n - done;
    if (rest == 0)
        return;
    const float *x = read_row(k->x, k->x_type, p->from + done, rest, r->loaded);
    const float *du = p->g ? gradient_from(k, at, r, p, done, x) : x;
    accumulate(sum + done, product + done, du, x, rest);
}

/* Add the sums of a step's elements to those of its channels, and begin again. */
static void flush(const chain *k, int64_t block, double *sum, double *product, int64_t n)
{
    int64_t count = k->scale_rows * k->channels;
    double *to = k->sums + 2 * count * k->part + block % k->scale_rows * k->channels;
    double *to_product = to + count;
    for (int64_t i = 0; i < n; i += k->channels)
        for (int64_t c = 0; c < k->channels; c++) {
            to[c] += sum[i + c];
            to_product[c] += product[i + c];
        }
    memset(sum, 0, 8 * n);
    memset(product, 0, 8 * n);
}

/* Sums of du and du * x, which begin at zero; without g of x and x * x. */
int hyperslab_chain_sums(const chain *k)
{
    cursor at = begin(k);
    if (at.left == 0)
        return 0;
    store all;
    gradient_rooms r;
    if (prepare(&all, &r, k, &at, 4))
        return 1;
    int64_t step = min_of(at.step, at.room), block = at.block;
    double *sum = take_room(&all, 2 * at.step), *product = take_room(&all, 2 * at.step);
    memset(sum, 0, 8 * step);
    memset(product, 0, 8 * step);
    repeat(k->scale, k, block, r.s, step);
    repeat(k->shift, k, block, r.t, step);
    for (; at.left; advance(&at)) {
        if (at.block != block && k->scale_rows > 1) {
            flush(k, block, sum, product, step);
            repeat(k->scale, k, at.block, r.s, step);
            repeat(k->shift, k, at.block, r.t, step);
        }
        block = at.block;
        int64_t n = elements_here(k, &at);
        const float *g = k->g ? spread_gradient(k, &at, &r) : NULL;
        for (int64_t row = 0; row < rows_of(k, &at); row++) {
            int64_t from = row_of(k, &at, row);
            for (int64_t i = 0; i < n; i += at.step) {
                place p = {row, i, from + i, min_of(at.step, n - i), g};
                sum_step(k, &at, &r, &p, sum, product);
            }
        }
    }
    flush(k, block, sum, product, step);
    free(all.all);
    return 0;
}

static void scale_row(float *restrict dx, const float *restrict du, const float *restrict s,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dx[i] = du[i] * s[i];
}

static void combine_rows(float *restrict dx, const float *restrict du, const float *restrict s,
                         const float *restrict x, const float *restrict b, const float *restrict c,
                         int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dx[i] = du[i] * s[i] + x[i] * b[i] + c[i];
}

/* One row of a run. */
static void write_gradient(const chain *k, const cursor *at, const gradient_rooms *r, const float *g,
                           int64_t row, const float *b, const float *c, float *out, uint16_t *halves)
{
    int64_t n = elements_here(k, at), from = row_of(k, at, row);
    for (int64_t i = 0; i < n; i += at->step) {
        place p = {row, i, from + i, min_of(at->step, n - i), g};
        int64_t done = 0;
#if WIDE
        gradient_step w = wide_step(k, at, r, &p);
        w.target = k->y;
        w.y_type = k->y_type;
        w.stream = k->stream;
        w.first_y = p.from;
        w.b = b;
        w.c = c;
        done = gradient_wide_any(&w, p.n, known_by(k), k->b ? COMBINED : k->scale ? SCALED : PLAIN);
#endif
        int64_t first = p.from + done, rest = p.n - done;
        if (rest == 0)
            continue;
        const float *x = k->x ? read_row(k->x, k->x_type, first, rest, r->loaded) : NULL;
        const float *du = gradient_from(k, at, r, &p, done, x);
        float *dx = row_to_write(k->y, k->y_type, k->stream, first, out);
        const float *result = dx;
        if (k->b)
            combine_rows(dx, du, r->s + done, x, b + done, c + done, rest);
        else if (k->scale)
            scale_row(dx, du, r->s + done, rest);
        else if (dx == out)
            result = du;
        else
            memcpy(dx, du, 4 * rest);
        write_row(k->y, k->y_type, k->stream, first, result, rest, halves);
    }
}

int hyperslab_chain_backward(const chain *k)
{
    cursor at = begin(k);
    if (at.left == 0)
        return 0;
    store all;
    gradient_rooms r;
    if (prepare(&all, &r, k, &at, 4))
        return 1;
    int64_t step = min_of(at.step, at.room);
    float *b = take_room(&all, at.step), *c = take_room(&all, at.step);
    float *out = take_room(&all, at.step);
    uint16_t *halves = take_room(&all, at.step);
    for (int64_t block = -1; at.left; advance(&at)) {
        if (block < 0 || (at.block != block && k->scale_rows > 1)) {
            repeat(k->scale, k, at.block, r.s, step);
            repeat(k->shift, k, at.block, r.t, step);
            repeat(k->b, k, at.block, b, step);
            repeat(k->c, k, at.block, c, step);
        }
        block = at.block;
        const float *g = spread_gradient(k, &at, &r);
        for (int64_t row = 0; row < rows_of(k, &at); row++)
            write_gradient(k, &at, &r, g, row, b, c, out, halves);
    }
    finish_stream(k->stream);
    free(all.all);
    return 0;
}
