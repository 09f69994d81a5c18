/* Runs a function in parts on the threads of torch's OpenMP. They wait awake for a while after each
 * of torch's operators, so threads of another kind would share their cores with them. */
#include <stdint.h>
#include <string.h>

typedef struct {
    int (*function)(const void *);
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    int (*thread)(void), (*threads)(void); /* omp_get_thread_num, omp_get_num_threads */
    int64_t team, parts, words; /* threads that are asked for, and int64s of arguments */
    int64_t arguments[];        /* the function's, but for its last two: part and parts */
} work;

typedef struct {
    const work *k;
    int failed;
} started;

static void some_parts(void *data)
{
    started *s = data;
    const work *k = s->k;
    int64_t own[k->words + 2];
    memcpy(own, k->arguments, 8 * k->words);
    for (int64_t i = k->thread(); i < k->parts; i += k->threads()) {
        own[k->words] = i;
        own[k->words + 1] = k->parts;
        if (k->function(own))
            __atomic_store_n(&s->failed, 1, __ATOMIC_RELAXED);
    }
}

int hyperslab_in_parts(const work *k)
{
    started s = {k, 0};
    k->parallel(some_parts, &s, k->team, 0);
    return s.failed;
}
