/* Normalise, activate and pool, in one pass over the block. */
#include "chain.h"

#define TARGET 1024 /* elements of a row */

INLINE void activate(float *restrict a, const float *restrict x, const float *restrict s,
                     const float *restrict t, int64_t n, float slope, int activation, int scaled,
                     int add)
{
    for (int64_t i = 0; i < n; i++) {
        float u = scaled ? x[i] * s[i] + t[i] : x[i];
        if (activation == RELU)
            u = u <= 0 ? 0 : u;
        if (activation == LEAKY)
            u = u > 0 ? u : u * slope;
        a[i] = add ? a[i] + u : u;
    }
}

#define CASE(activation, scaled, add)                                                             \
    case (activation) * 4 + (scaled) * 2 + (add):                                                 \
        activate(a, x, s, t, n, slope, activation, scaled, add);                                  \
        break;

static void activate_any(float *a, const float *x, const float *s, const float *t, int64_t n,
                         float slope, int activation, int scaled, int add)
{
    switch (activation * 4 + scaled * 2 + add) {
        CASE(IDENTITY, 0, 0) CASE(IDENTITY, 0, 1) CASE(IDENTITY, 1, 0) CASE(IDENTITY, 1, 1)
        CASE(RELU, 0, 0) CASE(RELU, 0, 1) CASE(RELU, 1, 0) CASE(RELU, 1, 1)
        CASE(LEAKY, 0, 0) CASE(LEAKY, 0, 1) CASE(LEAKY, 1, 0) CASE(LEAKY, 1, 1)
    }
}

/* One bit an element: not (x <= 0) for relu, x > 0 for leaky relu. */
static void write_bits(const float *x, int64_t n, int activation, uint8_t *bits, int64_t first)
{
    int64_t i = 0;
    int relu = activation == RELU;
    if (first % 8 == 0) {
        uint8_t *to = bits + first / 8;
#if WIDE
        __m512 zero = _mm512_setzero_ps();
        for (; i + 16 <= n; i += 16) {
            __m512 values = _mm512_loadu_ps(x + i);
            __mmask16 mask = relu ? _mm512_cmp_ps_mask(values, zero, _CMP_NLE_UQ)
                                  : _mm512_cmp_ps_mask(values, zero, _CMP_GT_OQ);
            uint16_t word = (uint16_t)mask;
            memcpy(to + i / 8, &word, 2);
        }
#endif
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

/* Among the rows of a tile, at each place along the width: the maximum and its row. */
static void challenge(float *restrict best, int32_t *restrict who, const float *restrict a,
                      int32_t row, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int wins = (a[i] > best[i]) | (a[i] != a[i]);
        best[i] = wins ? a[i] : best[i];
        who[i] = wins ? row : who[i];
    }
}

/* Among the places along the width: as if elements had come row by row, so that the first maximum
 * and the last NaN win. */
static void challenge_place(float *restrict best, int32_t *restrict who, const float *restrict a,
                            const int32_t *restrict row, int32_t width, int32_t place, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t number = row[i] * width + place;
        int later = number > who[i];
        int wins = (a[i] > best[i]) | ((a[i] == best[i]) & !later) |
                   ((a[i] != a[i]) & ((best[i] == best[i]) | later));
        best[i] = wins ? a[i] : best[i];
        who[i] = wins ? number : who[i];
    }
}

static void add_row(float *restrict sum, const float *restrict part, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += part[i];
}

static void multiply(float *restrict row, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] *= factor;
}

int hyperslab_chain_forward(const chain *k)
{
    cursor at = begin(k, TARGET);
    if (at.left == 0)
        return 0;
    int64_t size = row_size(k, &at);
    int64_t stride = padded(size);
    float *room = rooms(9, size);
    if (!room)
        return 1;
    float *loaded = room, *s = room + stride, *t = room + 2 * stride, *sum = room + 3 * stride;
    float *a = room + 4 * stride, *out = room + 5 * stride, *part = room + 6 * stride;
    int32_t *who = (int32_t *)(room + 7 * stride), *won = (int32_t *)(room + 8 * stride);
    int activation = activation_of(k);
    int scaled = k->scale != NULL;
    int64_t width = k->pool_width, rows = k->pool_depth * k->pool_height;
    int pooled = k->maximum || rows * width > 1;
    float slope = (float)k->slope, inverse = 1.0f / (float)(rows * width);
    int64_t block = -1;
    for (; at.left; advance(&at)) {
        int64_t tiles = tiles_here(&at), n = tiles * width * k->channels;
        int64_t results = tiles * k->channels, first = result_of(k, &at);
        if (at.block != block) {
            repeat(k->scale, k, at.block, s, size);
            repeat(k->shift, k, at.block, t, size);
            block = at.block;
        }
        float *y = row_to_write(k->y, k->y_type, k->stream, first, out);
        for (int64_t row = 0; row < rows; row++) {
            int64_t from = row_of(k, &at, row / k->pool_height, row % k->pool_height);
            const float *x = read_row(k->x, k->x_type, from, n, loaded);
            if (k->bits)
                write_bits(x, n, activation, k->bits, from);
            float *to = !pooled ? y : k->maximum && row ? a : sum;
            activate_any(to, x, s, t, n, slope, activation, scaled, row && !k->maximum);
            if (k->maximum && row == 0)
                memset(who, 0, 4 * n);
            else if (k->maximum)
                challenge(sum, who, a, (int32_t)row, n);
        }
        if (pooled && !k->maximum) {
            take(sum, 0, width, k->channels, tiles, y);
            for (int64_t place = 1; place < width; place++) {
                take(sum, place, width, k->channels, tiles, part);
                add_row(y, part, results);
            }
            multiply(y, inverse, results);
        } else if (pooled) {
            take(sum, 0, width, k->channels, tiles, y);
            take((float *)who, 0, width, k->channels, tiles, (float *)won);
            for (int64_t i = 0; i < results; i++)
                won[i] *= (int32_t)width;
            for (int64_t place = 1; place < width; place++) {
                take(sum, place, width, k->channels, tiles, a);
                take((float *)who, place, width, k->channels, tiles, part);
                challenge_place(y, won, a, (int32_t *)part, (int32_t)width, (int32_t)place, results);
            }
            if (k->winners)
                for (int64_t i = 0; i < results; i++)
                    k->winners[first + i] = (uint8_t)won[i];
        }
        write_row(k->y, k->y_type, k->stream, first, y, results, (uint16_t *)part);
    }
    finish_stream(k->stream);
    free(room);
    return 0;
}
