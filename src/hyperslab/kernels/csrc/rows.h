/* Rows of numbers: read into float32, written from it, spread over tiles and taken from them.
 *
 * A row is a run of voxels in memory, each with its channels side by side; in contiguous memory
 * every channel is a block of its own and a voxel has one. All kernels work on rows of float32 that
 * stay in the processor's first cache, so that a loop is `for (i < n)` whatever type, format and
 * number of channels. Where the compiler does not turn such a loop into vectors there are intrinsics,
 * and beside them plain C of the same result. */
#ifndef HYPERSLAB_ROWS_H
#define HYPERSLAB_ROWS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDE 1
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
#else
#define WIDE 0
#endif

#define INLINE static inline __attribute__((always_inline))

enum { DEPTH, HEIGHT, WIDTH };
enum { FLOAT32, BFLOAT16, FLOAT16 };

static const int64_t size_of[] = {4, 2, 2};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* How many of a size hold n, and how much those hold. */
INLINE int64_t ratio_up(int64_t n, int64_t size) { return (n + size - 1) / size; }
INLINE int64_t up_to(int64_t n, int64_t size) { return ratio_up(n, size) * size; }

/* Rooms of one call, on lines of the cache and full of zeros; `failed`: one of them is missing. */
typedef struct {
    void *given[8];
    int count, failed;
} memory;

static void *zeros(memory *all, int64_t bytes)
{
    size_t whole = (size_t)up_to(bytes + 64, 64); /* whole vectors are read beyond the end */
    void *room = aligned_alloc(64, whole);
    if (room)
        memset(room, 0, whole);
    else
        all->failed = 1;
    return all->given[all->count++] = room;
}

static void free_rooms(memory *all)
{
    while (all->count)
        free(all->given[--all->count]);
}

/* float32 of the upper 16 bits is bfloat16; to the nearest, ties to even, NaN stays one. */
INLINE float from_bfloat16(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    uint32_t quiet = (word >> 16) | 0x40;
    return (uint16_t)((word & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* IEEE half precision by the processor where it has it, else bit by bit. */
INLINE float from_float16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t rest = bits & 0x7fff;
    uint32_t word;
    float value;
    if (rest >= 0x7c00) {
        word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
        word |= (rest > 0x7c00) ? 0x400000 : 0;
    } else if (rest >= 0x400) {
        word = sign | ((rest << 13) + 0x38000000);
    } else {
        value = (float)rest * 0x1p-24f;
        memcpy(&word, &value, 4);
        word |= sign;
    }
    memcpy(&value, &word, 4);
    return value;
}

INLINE uint16_t to_float16(float value)
{
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t sign = (word >> 16) & 0x8000;
    word &= 0x7fffffff;
    if (word > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (word >= 0x477ff000) /* 65520 and more become infinite */
        return (uint16_t)(sign | 0x7c00);
    if (word < 0x38800000) { /* subnormal: the sum rounds to multiples of 2**-24 */
        float size;
        memcpy(&size, &word, 4);
        size += 0.5f;
        memcpy(&word, &size, 4);
        return (uint16_t)(sign | (word - 0x3f000000));
    }
    return (uint16_t)(sign | ((word + 0xfff + ((word >> 13) & 1) - 0x38000000) >> 13));
}

static void widen(const void *source, int64_t type, float *restrict row, int64_t n)
{
    const uint16_t *restrict halves = source;
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; i++)
            row[i] = from_bfloat16(halves[i]);
        return;
    }
#if WIDE
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(row + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(halves + i))));
#endif
    for (; i < n; i++)
        row[i] = from_float16(halves[i]);
}

static void narrow(void *target, int64_t type, const float *restrict row, int64_t n)
{
    uint16_t *restrict halves = target;
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; i++)
            halves[i] = to_bfloat16(row[i]);
        return;
    }
#if WIDE
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((void *)(halves + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(row + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        halves[i] = to_float16(row[i]);
}

/* Elements [first, first + n) as float32: in place, or in `room`. */
INLINE const float *read_row(const void *source, int64_t type, int64_t first, int64_t n, float *room)
{
    const char *address = (const char *)source + first * size_of[type];
    if (type == FLOAT32)
        return (const float *)address;
    widen(address, type, room, n);
    return room;
}

/* Where to put elements [first, first + n) as float32 until `write_row`. */
INLINE float *row_to_write(void *target, int64_t type, int64_t stream, int64_t first, float *room)
{
    return type == FLOAT32 && !stream ? (float *)target + first : room;
}

/* Past the caches, which a large result would only empty. */
INLINE void stream_bytes(void *target, const void *source, int64_t n)
{
#if WIDE
    char *to = target;
    const char *from = source;
    int64_t ahead = (64 - ((uintptr_t)to & 63)) & 63;
    if (ahead > n)
        ahead = n;
    memcpy(to, from, ahead);
    int64_t i = ahead;
    for (; i + 64 <= n; i += 64)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
    memcpy(to + i, from + i, n - i);
#else
    memcpy(target, source, n);
#endif
}

INLINE void write_row(void *target, int64_t type, int64_t stream, int64_t first, const float *row,
                      int64_t n, uint16_t *halves)
{
    char *address = (char *)target + first * size_of[type];
    if (!stream) {
        if (type != FLOAT32)
            narrow(address, type, row, n);
    } else if (type == FLOAT32) {
        stream_bytes(address, row, 4 * n);
    } else {
        narrow(halves, type, row, n);
        stream_bytes(address, halves, 2 * n);
    }
}

INLINE void finish_stream(int64_t stream)
{
#if WIDE
    if (stream)
        _mm_sfence();
#endif
    (void)stream;
}

/* At each place the larger of two values, or the last NaN, and who has it. */
INLINE void compete(const float *restrict values, int32_t who, int64_t n, float *restrict best,
                    int32_t *restrict winner)
{
    for (int64_t i = 0; i < n; i++) {
        float value = values[i], old = best[i];
        int wins = (value > old) | (value != value);
        best[i] = wins ? value : old;
        winner[i] = wins ? who : winner[i];
    }
}

/* part[v * inner + c] = row[(v * k + place) * inner + c] for v < voxels, c < inner. */
static void take(const float *restrict row, int64_t place, int64_t k, int64_t inner, int64_t voxels,
                 float *restrict part)
{
    int64_t v = 0;
#if WIDE
    if (k == 2 && inner <= 8 && (inner & (inner - 1)) == 0) {
        int32_t from[16];
        for (int32_t i = 0; i < 16; i++)
            from[i] = (int32_t)((i / inner * 2 + place) * inner + i % inner);
        __m512i index = _mm512_loadu_si512(from);
        int64_t step = 16 / inner;
        for (; v + step <= voxels; v += step) {
            const float *at = row + v * 2 * inner;
            _mm512_storeu_ps(part + v * inner,
                             _mm512_permutex2var_ps(_mm512_loadu_ps(at), index,
                                                    _mm512_loadu_ps(at + 16)));
        }
    }
#endif
    for (; v < voxels; v++)
        for (int64_t c = 0; c < inner; c++)
            part[v * inner + c] = row[(v * k + place) * inner + c];
}

/* row[(v * k + place) * inner + c] = part[v * inner + c] for every place < k. */
static void spread(const float *restrict part, int64_t k, int64_t inner, int64_t voxels,
                   float *restrict row)
{
    int64_t v = 0;
#if WIDE
    if (k == 2 && inner <= 8 && (inner & (inner - 1)) == 0) {
        int32_t from[32];
        for (int32_t i = 0; i < 32; i++)
            from[i] = (int32_t)(i / (2 * inner) * inner + i % inner);
        __m512i low = _mm512_loadu_si512(from);
        __m512i high = _mm512_loadu_si512(from + 16);
        int64_t step = 16 / inner;
        for (; v + step <= voxels; v += step) {
            __m512 values = _mm512_loadu_ps(part + v * inner);
            float *at = row + v * 2 * inner;
            _mm512_storeu_ps(at, _mm512_permutexvar_ps(low, values));
            _mm512_storeu_ps(at + 16, _mm512_permutexvar_ps(high, values));
        }
    }
#endif
    for (; v < voxels; v++)
        for (int64_t place = 0; place < k; place++)
            for (int64_t c = 0; c < inner; c++)
                row[(v * k + place) * inner + c] = part[v * inner + c];
}

#endif
