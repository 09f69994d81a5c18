/* Convolution of a volume with few channels, in bfloat16, without making columns.
 *
 * OneDNN's kernels work on 16 channels at a time, and with fewer on nothing for the rest. Here it is
 * 16 voxels of the result: two vectors of them by 8 channels are summed in registers, over the taps and
 * the pairs of channels, in float32. The rows that are read are turned once a plane; of a plane and
 * those next to it all rows wait in the second cache. */
#include "direct.h"

#if DIRECT

enum { BLOCK = 8, WIDTH_OF_BLOCK = 2 * LANES };

/* The words of the weight in the order in which they are read: blocks of 8 channels of the result,
 * taps of depth and height, pairs of channels, taps of the width, channels of the block. */
static void order_weight(const direct *k, uint32_t *to)
{
    int64_t taps = k->kernel[DEPTH] * k->kernel[HEIGHT] * k->kernel[WIDTH];
    int64_t wide = k->kernel[WIDTH], in = k->channels, out = k->out_channels;
    for (int64_t first = 0; first < out; first += BLOCK)
        for (int64_t row = 0; row < taps / wide; row++)
            for (int64_t c = 0; c < in; c += 2)
                for (int64_t t = 0; t < wide; t++)
                    for (int64_t o = first; o < first + BLOCK; o++) {
                        uint32_t word = 0;
                        int64_t tap = row * wide + t;
                        for (int64_t i = c; o < out && i < in && i < c + 2; i++) {
                            int64_t at = k->adjoint ? (i * out + o) * taps + taps - 1 - tap
                                                    : (o * in + i) * taps + tap;
                            word |= (uint32_t)k->other[at] << 16 * (i - c);
                        }
                        *to++ = word;
                    }
}

/* 16 voxels of up to 8 channels, rounded and written where `left` voxels have room. */
INLINE void write_voxels(const __m512 *sums, int64_t step, uint16_t *to, int64_t channels, int64_t count,
                         int64_t left)
{
    const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                             7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i v[4];
    for (int j = 0; j < 4; j++) {
        __m512bh both = _mm512_cvtne2ps_pbh(sums[(2 * j + 1) * step], sums[2 * j * step]);
        v[j] = _mm512_permutexvar_epi16(in_turn, (__m512i)both);
    }
    __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    uint16_t room[LANES * BLOCK];
    int whole = count == BLOCK && left >= LANES;
    uint16_t *at = whole ? to : room;
    int64_t next = whole ? channels : BLOCK;
    __m512i rows[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                       _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
    for (int i = 0; i < 4; i++) { /* voxels i, i + 4, i + 8, i + 12 */
        _mm_storeu_si128((void *)(at + next * i), _mm512_extracti32x4_epi32(rows[i], 0));
        _mm_storeu_si128((void *)(at + next * (i + 4)), _mm512_extracti32x4_epi32(rows[i], 1));
        _mm_storeu_si128((void *)(at + next * (i + 8)), _mm512_extracti32x4_epi32(rows[i], 2));
        _mm_storeu_si128((void *)(at + next * (i + 12)), _mm512_extracti32x4_epi32(rows[i], 3));
    }
    for (int64_t i = 0; !whole && i < least(left, LANES); i++)
        memcpy(to + i * channels, room + BLOCK * i, (size_t)(2 * count));
}

typedef struct {
    const direct *k;
    const uint32_t *weight;
    uint32_t *planes; /* as many as the kernel is deep, one after the other in turn */
    uint16_t *row;    /* of the result, where it goes past the caches */
    int64_t pairs, pitch, plane;
} machine;

/* 32 voxels of 8 channels: `at` is (sample's depth, height) of the result. */
INLINE void sum_block(const machine *m, int64_t depth, int64_t height, int64_t from, int64_t first,
                      uint16_t *to)
{
    const direct *k = m->k;
    int64_t wide = k->kernel[WIDTH], count = least(BLOCK, k->out_channels - first);
    int64_t steps = m->pairs * wide;
    const uint32_t *weight = m->weight + first * k->kernel[DEPTH] * k->kernel[HEIGHT] * steps;
    __m512 sums[2 * BLOCK];
    for (int o = 0; o < BLOCK; o++)
        sums[2 * o] = sums[2 * o + 1] =
            _mm512_set1_ps(k->bias && o < count ? from_bfloat16(k->bias[first + o]) : 0);
    for (int64_t i = 0; i < k->kernel[DEPTH]; i++)
        for (int64_t j = 0; j < k->kernel[HEIGHT]; j++, weight += steps * BLOCK) {
            int64_t z = depth + i - k->padding[DEPTH], y = height + j - k->padding[HEIGHT];
            if (z < 0 || z >= k->extents[DEPTH] || y < 0 || y >= k->extents[HEIGHT])
                continue;
            const uint32_t *row = m->planes + z % k->kernel[DEPTH] * m->plane + y * m->pairs * m->pitch;
            const uint32_t *words = weight;
            for (int64_t c = 0; c < m->pairs; c++)
                for (int64_t t = 0; t < wide; t++, words += BLOCK) {
                    const uint32_t *x = row + c * m->pitch + from + t;
                    __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + LANES);
#pragma GCC unroll 8
                    for (int o = 0; o < BLOCK; o++) {
                        __m512i w = _mm512_set1_epi32((int)words[o]);
                        sums[2 * o] = add_pairs(sums[2 * o], low, w);
                        sums[2 * o + 1] = add_pairs(sums[2 * o + 1], high, w);
                    }
                }
        }
    int64_t left = k->results[WIDTH] - from;
    write_voxels(sums, 2, to, k->out_channels, count, left);
    if (left > LANES)
        write_voxels(sums + 1, 2, to + LANES * k->out_channels, k->out_channels, count, left - LANES);
}

static void plane_of_results(const machine *m, int64_t depth, uint16_t *to)
{
    const direct *k = m->k;
    int64_t line = k->results[WIDTH] * k->out_channels;
    for (int64_t height = 0; height < k->results[HEIGHT]; height++, to += line) {
        uint16_t *row = k->stream ? m->row : to;
        for (int64_t from = 0; from < k->results[WIDTH]; from += WIDTH_OF_BLOCK)
            for (int64_t first = 0; first < k->out_channels; first += BLOCK)
                sum_block(m, depth, height, from, first, row + from * k->out_channels + first);
        if (k->stream)
            stream_bytes(to, row, 2 * line);
    }
}

static void words_of_row(const void *of, const uint16_t *x, int64_t place)
{
    const machine *m = of;
    const direct *k = m->k;
    uint32_t *to = m->planes + place * m->pairs * m->pitch + k->padding[WIDTH];
    words_of(x, k->extents[WIDTH], k->channels, to, m->pitch);
}

static void sum_part(const machine *m)
{
    const direct *k = m->k;
    int64_t slice = k->results[HEIGHT] * k->results[WIDTH] * k->out_channels;
    int64_t end = first_of_part(k, k->part + 1);
    progress turned = {.sample = NO_SAMPLE};
    for (int64_t i = first_of_part(k, k->part); i < end; i++) {
        turn_planes(k, i, &turned, words_of_row, m);
        plane_of_results(m, i % k->results[DEPTH], (uint16_t *)k->result + i * slice);
    }
}

int hyperslab_direct_forward(const direct *k)
{
    int64_t pairs = (k->channels + 1) / 2;
    int64_t reach = up_to(k->results[WIDTH], WIDTH_OF_BLOCK) + k->kernel[WIDTH] - 1;
    int64_t pitch = up_to(most(reach, k->padding[WIDTH] + k->extents[WIDTH]), LANES) + LANES;
    int64_t taps = k->kernel[DEPTH] * k->kernel[HEIGHT] * k->kernel[WIDTH];
    machine m = {k, NULL, NULL, NULL, pairs, pitch, k->extents[HEIGHT] * pairs * pitch};
    memory all = {0};
    uint32_t *weight = zeros(&all, 4 * up_to(k->out_channels, BLOCK) * pairs * taps);
    m.planes = zeros(&all, 4 * k->kernel[DEPTH] * m.plane);
    m.row = zeros(&all, 2 * k->results[WIDTH] * k->out_channels);
    if (!all.failed) {
        order_weight(k, weight);
        m.weight = weight;
        sum_part(&m);
        finish_stream(k->stream);
    }
    free_rooms(&all);
    return all.failed;
}

#endif
