/* What a normalisation makes of its sums: a few numbers for each channel, in double precision.
 *
 * Legend: rows of channels, 1 or one for each sample; `pool` neighbouring channels share their
 * statistics, so that a row has channels / pool sums. A part is (rows, channels). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define NOISE 0x1p-48 /* what rounding leaves of parts of equal means */

typedef struct {
    const double *sums;         /* (3, rows, channels / pool), as channel_sums has them */
    const float *weight, *bias; /* (channels), or NULL */
    float *norm;                /* 3 parts: mean, scale, shift */
    double *moments;            /* 4 parts: mean, biased variance, invstd, scale */
    int64_t rows, channels, pool;
    double count, eps;
} normalisation;

int hyperslab_normalisation(const normalisation *k)
{
    int64_t n = k->rows * k->channels, groups = n / k->pool;
    for (int64_t i = 0; i < n; i++) {
        int64_t c = i % k->channels;
        double mean = k->sums[i / k->pool] / k->count;
        double square = k->sums[groups + i / k->pool] / k->count;
        double between = square - mean * mean; /* of the means of parts */
        double around = k->sums[2 * groups + i / k->pool] / k->count;
        double var = (between <= NOISE * square ? 0 : between) + around;
        double invstd = 1 / sqrt(var + k->eps);
        double scale = k->weight ? invstd * (double)k->weight[c] : invstd;
        float rounded = (float)mean;
        double shift = ((double)rounded - mean) * scale;
        k->norm[i] = rounded;
        k->norm[n + i] = (float)scale;
        k->norm[2 * n + i] = (float)(k->bias ? (double)k->bias[c] + shift : shift);
        k->moments[i] = mean;
        k->moments[n + i] = var;
        k->moments[2 * n + i] = invstd;
        k->moments[3 * n + i] = scale;
    }
    return 0;
}

typedef struct {
    const double *moments; /* of one row */
    float *running[2];     /* (channels): mean and variance */
    int64_t channels;
    double momentum, unbiased; /* times the biased variance */
} running_statistics;

int hyperslab_running_statistics(const running_statistics *k)
{
    float m = (float)k->momentum;
    for (int64_t i = 0; i < 2 * k->channels; i++) { /* as torch's lerp_ has it */
        float *at = k->running[i / k->channels] + i % k->channels;
        float to = (float)k->moments[i] * (i < k->channels ? 1 : (float)k->unbiased), step = to - *at;
        *at = m < 0.5f ? fmaf(m, step, *at) : fmaf(m - 1, step, to);
    }
    return 0;
}

typedef struct {
    const double *sums;    /* 2 parts: of du and du * (x - mean) */
    const float *norm;
    const double *moments;
    float *weight, *bias;  /* (channels): their gradients */
    double *shared;        /* (2, rows, channels / pool): what all ranks add up */
    int64_t rows, channels, pool;
} parameter_gradients;

int hyperslab_parameter_gradients(const parameter_gradients *k)
{
    int64_t n = k->rows * k->channels, groups = n / k->pool;
    const double *mean = k->moments, *invstd = k->moments + 2 * n, *scale = k->moments + 3 * n;
    memset(k->shared, 0, 16 * groups);
    for (int64_t c = 0; c < k->channels; c++) {
        double of_weight = 0, of_bias = 0;
        for (int64_t i = c; i < n; i += k->channels) {
            double du = k->sums[i];
            double beside = mean[i] - (double)k->norm[i];
            double xhat = (k->sums[n + i] - du * beside) * invstd[i];
            of_bias += du;
            of_weight += xhat;
            k->shared[i / k->pool] += du * scale[i];
            k->shared[groups + i / k->pool] += xhat * scale[i];
        }
        k->weight[c] = (float)of_weight;
        k->bias[c] = (float)of_bias;
    }
    return 0;
}

typedef struct {
    const double *shared; /* (2, rows, channels / pool), of all ranks */
    const float *norm;
    const double *moments;
    float *through; /* 2 parts: b, c */
    int64_t rows, channels, pool;
    double count;
} way_through;

int hyperslab_through_statistics(const way_through *k)
{
    int64_t n = k->rows * k->channels, groups = n / k->pool;
    const double *mean = k->moments, *invstd = k->moments + 2 * n;
    for (int64_t i = 0; i < n; i++) {
        double b = k->shared[groups + i / k->pool] / -k->count * invstd[i];
        double c = k->shared[i / k->pool] / -k->count;
        k->through[i] = (float)b;
        k->through[n + i] = (float)(c - b * (mean[i] - (double)k->norm[i]));
    }
    return 0;
}
