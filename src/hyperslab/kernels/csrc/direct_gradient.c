/* The weight's gradient of a convolution of a volume with few channels, in bfloat16.
 *
 * Sums of 4 channels of the result by 6 pairs of a channel and a tap of the width are kept in
 * registers, each 16 sums of two voxels at a time, while some rows pass; then in memory until the
 * volume has passed. What was added up so in float32 goes to float64 before it is too much. */
#include "direct.h"

#if DIRECT

enum { OUT = 4, IN = 6, SUMS = OUT * IN, ROWS = 48, PASSED = 1 << 16 };

typedef struct {
    const direct *k;
    uint16_t *planes, *g;   /* lines of x, as many planes as the kernel is deep; of some rows of g */
    uint32_t *words, *g_words; /* of a row of each, with zeros at the end */
    __m512 *sums, *of_bias; /* by taps of depth and height, blocks of OUT and of IN */
    double *total;          /* as the weight; then of the bias */
    int64_t pitch, plane, g_pitch, out, in, rows;
} machine;

/* Channel and tap of the width of the place-th pair; the last one again where there are no more. */
INLINE int64_t offset_of(const machine *m, int64_t place)
{
    int64_t wide = m->k->kernel[WIDTH], pair = least(place, m->k->channels * wide - 1);
    return pair / wide * m->pitch + pair % wide;
}

INLINE void add_rows(const machine *m, const uint16_t *x, const uint16_t *g, int64_t count, int64_t block,
                     __m512 *kept)
{
    int64_t row = up_to(m->k->channels, 2) * m->pitch, step = m->out * OUT * m->g_pitch;
    int64_t at[IN];
    for (int i = 0; i < IN; i++)
        at[i] = offset_of(m, block * IN + i);
    __m512 sums[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++)
        sums[i] = kept[i];
    for (int64_t y = 0; y < count; y++, x += row, g += step)
        for (int64_t v = 0; v < m->g_pitch; v += VOXELS) {
            __m512i of_result[OUT];
#pragma GCC unroll 4
            for (int o = 0; o < OUT; o++)
                of_result[o] = _mm512_loadu_si512(g + o * m->g_pitch + v);
#pragma GCC unroll 6
            for (int i = 0; i < IN; i++) {
                __m512i voxels = _mm512_loadu_si512(x + at[i] + v);
#pragma GCC unroll 4
                for (int o = 0; o < OUT; o++)
                    sums[i * OUT + o] = add_pairs(sums[i * OUT + o], voxels, of_result[o]);
            }
        }
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++)
        kept[i] = sums[i];
}

/* Rows [from, to) of the result's plane `depth`. */
static void add_some_rows(const machine *m, int64_t depth, int64_t from, int64_t to)
{
    const direct *k = m->k;
    int64_t row = up_to(k->channels, 2) * m->pitch, step = m->out * OUT * m->g_pitch;
    __m512 *sums = m->sums;
    for (int64_t i = 0; i < k->kernel[DEPTH]; i++)
        for (int64_t j = 0; j < k->kernel[HEIGHT]; j++) {
            int64_t z = depth + i - k->padding[DEPTH], shift = j - k->padding[HEIGHT];
            int64_t first = most(from, -shift), end = least(to, k->extents[HEIGHT] - shift);
            if (z < 0 || z >= k->extents[DEPTH] || first >= end) {
                sums += m->out * m->in * SUMS;
                continue;
            }
            const uint16_t *x = m->planes + z % k->kernel[DEPTH] * m->plane + (first + shift) * row;
            for (int64_t o = 0; o < m->out; o++)
                for (int64_t n = 0; n < m->in; n++, sums += SUMS)
                    add_rows(m, x, m->g + (first - from) * step + o * OUT * m->g_pitch, end - first, n,
                             sums);
        }
}

static void turn_rows(const machine *m, const uint16_t *g, int64_t count)
{
    const direct *k = m->k;
    const __m512i one = _mm512_set1_epi32(0x3f803f80);
    uint16_t *to = m->g;
    for (int64_t y = 0; y < count; y++, to += m->out * OUT * m->g_pitch) {
        lines_of(g + y * k->results[WIDTH] * k->out_channels, k->results[WIDTH], k->out_channels,
                 m->g_words, to, m->g_pitch);
        if (k->of_bias)
            for (int64_t o = 0; o < k->out_channels; o++)
                for (int64_t v = 0; v < m->g_pitch; v += VOXELS)
                    m->of_bias[o] = add_pairs(m->of_bias[o],
                                              _mm512_loadu_si512(to + o * m->g_pitch + v), one);
    }
}

static void lines_of_row(const void *of, const uint16_t *x, int64_t place)
{
    const machine *m = of;
    const direct *k = m->k;
    uint16_t *to = m->planes + place * up_to(k->channels, 2) * m->pitch + k->padding[WIDTH];
    lines_of(x, k->extents[WIDTH], k->channels, m->words, to, m->pitch);
}

/* What was summed up in float32 into the totals. */
static void settle(const machine *m)
{
    const direct *k = m->k;
    int64_t rows = k->kernel[DEPTH] * k->kernel[HEIGHT], wide = k->kernel[WIDTH];
    int64_t pairs = k->channels * wide, of_row = m->out * m->in * SUMS;
    for (int64_t o = 0; o < k->out_channels; o++) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t p = 0; p < pairs; p++) {
                int64_t block = (o / OUT * m->in + p / IN) * SUMS + p % IN * OUT + o % OUT;
                m->total[((o * k->channels + p / wide) * rows + r) * wide + p % wide] +=
                    _mm512_reduce_add_ps(m->sums[r * of_row + block]);
            }
        m->total[k->out_channels * pairs * rows + o] += _mm512_reduce_add_ps(m->of_bias[o]);
    }
    memset(m->sums, 0, (size_t)(64 * rows * of_row));
    memset(m->of_bias, 0, (size_t)(64 * k->out_channels));
}

static void sum_part(const machine *m)
{
    const direct *k = m->k;
    int64_t line = k->results[WIDTH] * k->out_channels;
    int64_t passed = 0, end = first_of_part(k, k->part + 1);
    progress turned = {.sample = NO_SAMPLE};
    for (int64_t i = first_of_part(k, k->part); i < end; i++) {
        turn_planes(k, i, &turned, lines_of_row, m);
        for (int64_t from = 0; from < k->results[HEIGHT]; from += m->rows) {
            int64_t to = least(from + m->rows, k->results[HEIGHT]);
            turn_rows(m, k->other + (i * k->results[HEIGHT] + from) * line, to - from);
            add_some_rows(m, i % k->results[DEPTH], from, to);
        }
        passed += k->results[HEIGHT] * m->g_pitch;
        if (passed >= PASSED * VOXELS || i + 1 == end) {
            settle(m);
            passed = 0;
        }
    }
}

static void write_part(const machine *m)
{
    const direct *k = m->k;
    int64_t n = k->kernel[DEPTH] * k->kernel[HEIGHT] * k->kernel[WIDTH] * k->channels * k->out_channels;
    float *to = (float *)k->result + k->part * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)m->total[i];
    if (k->of_bias)
        for (int64_t o = 0; o < k->out_channels; o++)
            k->of_bias[k->part * k->out_channels + o] = (float)m->total[n + o];
}

int hyperslab_direct_gradient(const direct *k)
{
    int64_t wide = k->kernel[WIDTH], rows = k->kernel[DEPTH] * k->kernel[HEIGHT];
    int64_t channels = up_to(k->channels, 2);
    memory all = {0};
    machine m = {.k = k};
    m.g_pitch = up_to(k->results[WIDTH], VOXELS);
    m.pitch = up_to(most(m.g_pitch + wide, k->padding[WIDTH] + up_to(k->extents[WIDTH], VOXELS)), VOXELS);
    m.plane = k->extents[HEIGHT] * channels * m.pitch;
    m.out = ratio_up(k->out_channels, OUT);
    m.in = ratio_up(k->channels * wide, IN);
    m.rows = most(1, ROWS * VOXELS / m.g_pitch);
    m.planes = zeros(&all, 2 * k->kernel[DEPTH] * m.plane);
    m.g = zeros(&all, 2 * m.rows * m.out * OUT * m.g_pitch);
    m.words = zeros(&all, 2 * channels * up_to(k->extents[WIDTH], VOXELS));
    m.g_words = zeros(&all, 2 * up_to(k->out_channels, 2) * m.g_pitch);
    m.sums = zeros(&all, 64 * rows * m.out * m.in * SUMS);
    m.of_bias = zeros(&all, 64 * k->out_channels);
    m.total = zeros(&all, 8 * (rows * wide * k->channels * k->out_channels + k->out_channels));
    if (!all.failed) {
        sum_part(&m);
        write_part(&m);
    }
    free_rooms(&all);
    return all.failed;
}

#endif
