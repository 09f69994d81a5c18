/* What the two kernels of direct convolution are told, and how both go over the input's planes. */
#ifndef HYPERSLAB_DIRECT_H
#define HYPERSLAB_DIRECT_H

#include "direct_rows.h"

enum { DEPTH, HEIGHT, WIDTH };

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
