/* What the two kernels of direct convolution are told. */
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

#endif
