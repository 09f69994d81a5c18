/* The gradient of a chain: its sums, and that of its input, each in one pass over the block. */
#include "chain.h"

#define TARGET 1024 /* elements of a row */

enum { EVERYWHERE, FROM_X, FROM_BITS };

/* A row of masks, all ones where the activation passes the gradient. */
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

/* The gradient of u at a row from that of a. */
INLINE void gradient(float *restrict du, const float *restrict da, const float *restrict x,
                     const float *restrict s, const float *restrict t, const uint32_t *restrict mask,
                     int64_t n, float slope, int activation, int known)
{
    for (int64_t i = 0; i < n; i++) {
        float otherwise = activation == RELU ? 0 : da[i] * slope;
        int passes = 1;
        if (known == FROM_BITS)
            passes = mask[i] != 0;
        if (known == FROM_X) {
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

/* To the winner of every tile its gradient, to others none; `number` of the row's elements. */
static void award(float *restrict da, const float *restrict g, const int32_t *restrict winner,
                  const int32_t *restrict number, int32_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        da[i] = winner[i] == first + number[i] ? g[i] : 0;
}

/* Rows that both kernels need. */
typedef struct {
    float *room;
    float *loaded, *spread_g, *da, *du, *s, *t, *part;
    int32_t *winner, *number;
    uint32_t *mask;
    float *own; /* for the kernel itself */
    int64_t stride;
} gradient_rooms;

static int prepare(gradient_rooms *r, const chain *k, int64_t size, int64_t own)
{
    r->stride = padded(size);
    r->room = rooms(10 + own, size);
    if (!r->room)
        return 1;
    float *next = r->room;
    float **all[] = {&r->loaded, &r->spread_g, &r->da, &r->du, &r->s, &r->t, &r->part};
    for (int i = 0; i < 7; i++, next += r->stride)
        *all[i] = next;
    r->winner = (int32_t *)next;
    r->number = (int32_t *)(next + r->stride);
    r->mask = (uint32_t *)(next + 2 * r->stride);
    r->own = next + 3 * r->stride;
    if (k->maximum)
        for (int64_t i = 0; i < size; i++)
            r->number[i] = (int32_t)(i / k->channels % k->pool_width);
    return 0;
}

/* The gradients and winners of a piece's tiles, at every place along the width. */
static const float *spread_gradient(const chain *k, const cursor *at, const gradient_rooms *r)
{
    int64_t tiles = tiles_here(at), results = tiles * k->channels, first = result_of(k, at);
    int64_t elements = k->pool_depth * k->pool_height * k->pool_width;
    const float *g = read_row(k->g, k->g_type, first, results, r->part);
    if (elements == 1 && !k->maximum)
        return g;
    if (!k->maximum) {
        float inverse = 1.0f / (float)elements;
        for (int64_t i = 0; i < results; i++)
            r->part[i] = g[i] * inverse;
        g = r->part;
    }
    spread(g, k->pool_width, k->channels, tiles, r->spread_g);
    if (k->maximum) {
        int32_t *number = (int32_t *)r->part;
        for (int64_t i = 0; i < results; i++)
            number[i] = k->winners[first + i];
        spread(r->part, k->pool_width, k->channels, tiles, (float *)r->winner);
    }
    return r->spread_g;
}

/* du at one row of a piece. */
static const float *gradient_of_row(const chain *k, const gradient_rooms *r, const float *g,
                                    const float *x, int64_t row, int64_t from, int64_t n)
{
    int activation = activation_of(k);
    if (k->maximum) {
        award(r->da, g, r->winner, r->number, (int32_t)(row * k->pool_width), n);
        g = r->da;
    }
    if (activation == IDENTITY)
        return g;
    if (k->bits)
        read_bits(k->bits, from, n, r->mask);
    gradient_any(r->du, g, x, r->s, r->t, r->mask, n, (float)k->slope, activation,
                 k->bits ? FROM_BITS : FROM_X);
    return r->du;
}

static void accumulate(double *restrict sum, double *restrict product, const float *restrict du,
                       const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        sum[i] += (double)du[i];
        product[i] += (double)du[i] * (double)x[i];
    }
}

/* Add the sums of a row's elements to those of its channels, and begin again. */
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
    cursor at = begin(k, TARGET / 2);
    if (at.left == 0)
        return 0;
    int64_t size = row_size(k, &at);
    gradient_rooms r;
    if (prepare(&r, k, size, 4))
        return 1;
    double *sum = (double *)r.own, *product = (double *)(r.own + 2 * r.stride);
    memset(sum, 0, 16 * r.stride);
    int64_t block = at.block;
    repeat(k->scale, k, block, r.s, size);
    repeat(k->shift, k, block, r.t, size);
    for (; at.left; advance(&at)) {
        if (at.block != block) {
            if (k->scale_rows > 1) {
                flush(k, block, sum, product, size);
                repeat(k->scale, k, at.block, r.s, size);
                repeat(k->shift, k, at.block, r.t, size);
            }
            block = at.block;
        }
        int64_t n = tiles_here(&at) * k->pool_width * k->channels;
        const float *g = k->g ? spread_gradient(k, &at, &r) : NULL;
        for (int64_t row = 0; row < k->pool_depth * k->pool_height; row++) {
            int64_t from = row_of(k, &at, row / k->pool_height, row % k->pool_height);
            const float *x = read_row(k->x, k->x_type, from, n, r.loaded);
            const float *du = g ? gradient_of_row(k, &r, g, x, row, from, n) : x;
            accumulate(sum, product, du, x, n);
        }
    }
    flush(k, block, sum, product, size);
    free(r.room);
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

int hyperslab_chain_backward(const chain *k)
{
    cursor at = begin(k, TARGET);
    if (at.left == 0)
        return 0;
    int64_t size = row_size(k, &at);
    gradient_rooms r;
    if (prepare(&r, k, size, 4))
        return 1;
    float *b = r.own, *c = b + r.stride, *out = c + r.stride, *halves = out + r.stride;
    int64_t block = -1;
    for (; at.left; advance(&at)) {
        if (at.block != block) {
            block = at.block;
            repeat(k->scale, k, block, r.s, size);
            repeat(k->shift, k, block, r.t, size);
            repeat(k->b, k, block, b, size);
            repeat(k->c, k, block, c, size);
        }
        int64_t n = tiles_here(&at) * k->pool_width * k->channels;
        const float *g = spread_gradient(k, &at, &r);
        for (int64_t row = 0; row < k->pool_depth * k->pool_height; row++) {
            int64_t from = row_of(k, &at, row / k->pool_height, row % k->pool_height);
            const float *x = k->x ? read_row(k->x, k->x_type, from, n, r.loaded) : NULL;
            const float *du = gradient_of_row(k, &r, g, x, row, from, n);
            float *dx = row_to_write(k->y, k->y_type, k->stream, from, out);
            if (k->b)
                combine_rows(dx, du, r.s, x, b, c, n);
            else if (k->scale)
                scale_row(dx, du, r.s, n);
            else if (dx == out)
                dx = (float *)du;
            else
                memcpy(dx, du, 4 * n);
            write_row(k->y, k->y_type, k->stream, from, dx, n, (uint16_t *)halves);
        }
    }
    finish_stream(k->stream);
    free(r.room);
    return 0;
}
