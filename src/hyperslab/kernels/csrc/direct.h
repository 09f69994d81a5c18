/* What the two kernels of direct convolution are told, and how both go over the input's planes. */
#ifndef HYPERSLAB_DIRECT_H
#define HYPERSLAB_DIRECT_H

#include "rows.h"

#if WIDE && defined(__AVX512BF16__)
#define DIRECT 1
#else
#define DIRECT 0
#endif

/* Volumes (samples, depth, height, width, channels) of bfloat16: the input, and the result or its
 * gradient. Windows go in steps of one and begin at -padding. */
typedef struct {
    const uint16_t *x;
    const uint16_t *other;  /* forward: the weight; weight's gradient: the result's gradient */
    const uint16_t *bias;   /* or none */
    void *result;           /* forward: bfloat16; weight's gradient: float32, a part each */
    float *of_bias;         /* or none: its gradient, a part each */
    int64_t samples, channels, out_channels;
    int64_t extents[3], results[3], kernel[3], padding[3];
    int64_t adjoint;        /* forward: channels change places and the kernel is turned round */
    int64_t stream;         /* forward: the result past the caches */
    int64_t part, parts;
} direct;

INLINE int64_t first_of_part(const direct *k, int64_t part)
{
    return k->samples * k->results[DEPTH] * part / k->parts;
}

#if DIRECT

/* Rows are turned so that 16 voxels of a channel, or of a pair, lie side by side: a row along the
 * width becomes one line a pair of channels, a voxel four bytes ("words"), or one line a channel
 * ("lines"), each with zeros on either side. */
enum { LANES = 16, VOXELS = 32 };

/* Adds to 16 sums the products of 16 pairs each. */
INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* The even or the odd words of 32. */
INLINE __m512i every_other(__m512i low, __m512i high, int odd)
{
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(odd)), high);
}

/* n vectors of voxels with n words each become n vectors of one word each; n is 1, 2, 4 or 8. */
INLINE void unzip(__m512i *v, int64_t n)
{
    __m512i w[8];
    for (int64_t step = 1; step < n; step *= 2) {
        /* halves: even words of every two vectors first, then the odd ones */
        for (int64_t i = 0; i < n / 2; i++) {
            w[i] = every_other(v[2 * i], v[2 * i + 1], 0);
            w[n / 2 + i] = every_other(v[2 * i], v[2 * i + 1], 1);
        }
        for (int64_t i = 0; i < n; i++)
            v[i] = w[i];
    }
}

INLINE void words_of_known(const uint16_t *x, int64_t width, int64_t pairs, uint32_t *to, int64_t pitch)
{
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        __m512i v[8];
        for (int64_t k = 0; k < pairs; k++)
            v[k] = _mm512_loadu_si512(x + 2 * (i * pairs + k * LANES));
        unzip(v, pairs);
        for (int64_t k = 0; k < pairs; k++)
            _mm512_storeu_si512(to + k * pitch + i, v[k]);
    }
    for (; i < width; i++)
        for (int64_t k = 0; k < pairs; k++)
            memcpy(to + k * pitch + i, x + 2 * (i * pairs + k), 4);
}

/* to[k * pitch + i]: channels 2 k and 2 k + 1 of voxel i; zero where there is no second. */
static void words_of(const uint16_t *x, int64_t width, int64_t channels, uint32_t *to, int64_t pitch)
{
#define KNOWN(channels)                                                                           \
    case channels:                                                                                \
        words_of_known(x, width, channels / 2, to, pitch);                                        \
        return;
    switch (channels) {
        KNOWN(2) KNOWN(4) KNOWN(8) KNOWN(16)
    }
#undef KNOWN
    for (int64_t i = 0; i < width; i++)
        for (int64_t c = 0; c < channels; c += 2) {
            uint32_t second = c + 1 < channels ? x[i * channels + c + 1] : 0;
            to[c / 2 * pitch + i] = x[i * channels + c] | second << 16;
        }
}

/* to[c * pitch + i]: channel c of voxel i, of an even number of channels; zeros up to a multiple of
 * VOXELS. `words` has room for the words of such a row and zeros at the end of each of its lines. */
static void lines_of(const uint16_t *x, int64_t width, int64_t channels, uint32_t *words, uint16_t *to,
                     int64_t pitch)
{
    int64_t whole = up_to(width, VOXELS);
    uint16_t order[64];
    for (int i = 0; i < 32; i++) {
        order[i] = (uint16_t)(2 * i);
        order[32 + i] = (uint16_t)(2 * i + 1);
    }
    __m512i first = _mm512_loadu_si512(order), second = _mm512_loadu_si512(order + 32);
    words_of(x, width, channels, words, whole);
    for (int64_t k = 0; k < (channels + 1) / 2; k++)
        for (int64_t i = 0; i < whole; i += VOXELS) {
            __m512i low = _mm512_loadu_si512(words + k * whole + i);
            __m512i high = _mm512_loadu_si512(words + k * whole + i + LANES);
            uint16_t *at = to + 2 * k * pitch + i;
            _mm512_storeu_si512(at, _mm512_permutex2var_epi16(low, first, high));
            _mm512_storeu_si512(at + pitch, _mm512_permutex2var_epi16(low, second, high));
        }
}

/* How far a kernel has turned the input: the planes before `turned` of one sample. It keeps as many
 * planes as the kernel is deep; plane z lies where z modulo that says. */
typedef struct {
    int64_t sample, turned;
} progress;

enum { NO_SAMPLE = -1 };

/* Puts a row of the input where the `place`-th row of the planes that are kept lies. */
typedef void turn_row(const void *machine, const uint16_t *row, int64_t place);

/* Turns the planes that the result's plane `i` reads, but for those that have been for one before it. */
INLINE void turn_planes(const direct *k, int64_t i, progress *p, turn_row *turn, const void *machine)
{
    int64_t height = k->extents[HEIGHT], row = k->extents[WIDTH] * k->channels;
    int64_t sample = i / k->results[DEPTH], before = i % k->results[DEPTH] - k->padding[DEPTH];
    if (sample != p->sample) {
        p->sample = sample;
        p->turned = most(0, before);
    }
    for (; p->turned < least(before + k->kernel[DEPTH], k->extents[DEPTH]); p->turned++) {
        const uint16_t *x = k->x + (sample * k->extents[DEPTH] + p->turned) * height * row;
        int64_t first = p->turned % k->kernel[DEPTH] * height;
        for (int64_t y = 0; y < height; y++)
            turn(machine, x + y * row, first + y);
    }
}

#endif

#endif
