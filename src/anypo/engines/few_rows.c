/* Products of few rows with a large matrix, y = x w^T (+, * y), at the rate at which memory gives the weights.

   Weights lie in panels of 16 outputs, [outputs/16][D][16], so that each thread reads one stream; rows lie side by side, [D][16], so that one weight
   vector meets all of them while it is in a register. Each output is one chain of multiply-adds in the order of d, whatever the number of rows. */

#define LANES 16
#define AHEAD 4096 /* bytes between what is multiplied and what is fetched from memory */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int places __attribute__((vector_size(4 * LANES)));
enum { STORE, ADD, MULTIPLY };

/* `rows` is a constant where this is inlined: the sums stay in registers. */
static inline __attribute__((always_inline)) void panel(const int rows, const float *x, const float *w, long D, lanes *sum) {
    for (int r = 0; r < rows; r++) sum[r] = (lanes){0};
#pragma GCC unroll 4
    for (long d = 0; d < D; d++) {
        lanes weight = *(const lanes *)(w + d * LANES);
        __builtin_prefetch((const char *)(w + d * LANES) + AHEAD, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sum[r] += x[d * LANES + r] * weight;
    }
}

/* to[d][r] = from[r][d] for 16 rows of `stride` numbers and 16 columns: halves, quarters, pairs and neighbours change places. */
#define EXCHANGE(S, LOW, HIGH)                                                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < LANES; r++) if (!(r & S)) {   \
        lanes low = __builtin_shuffle(line[r], line[r + S], (places)LOW);      \
        line[r + S] = __builtin_shuffle(line[r], line[r + S], (places)HIGH);   \
        line[r] = low;                                                         \
    }
#define PLACES(...) {__VA_ARGS__}
static inline __attribute__((always_inline)) void square(const float *from, long stride, float *to) {
    lanes line[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) line[r] = *(const lanes *)(from + r * stride);
    EXCHANGE(8, PLACES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), PLACES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    EXCHANGE(4, PLACES(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), PLACES(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(2, PLACES(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), PLACES(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(1, PLACES(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), PLACES(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
    for (int d = 0; d < LANES; d++) *(lanes *)(to + d * LANES) = line[d];
}

/* to[d][r] = from[r][d] for `rows` <= 16 rows of D numbers, the missing rows zero. */
static void side_by_side(const float *from, long rows, long D, float *to) {
    long d = 0;
    if (rows == LANES)
        for (; d + LANES <= D; d += LANES) square(from + d, D, to + d * LANES);
    for (; d < D; d++)
        for (long r = 0; r < LANES; r++) to[d * LANES + r] = r < rows ? from[r * D + d] : 0;
}

static long tile(long rows, long t) { return rows - t * LANES < LANES ? rows - t * LANES : LANES; }

/* w [E][D] -> panels [ceil(E/16)][D][16], the last one filled up with zeros. */
void anypo_pack(const float *w, float *panels, long D, long E) {
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (E + LANES - 1) / LANES; p++) side_by_side(w + p * LANES * D, tile(E, p), D, panels + p * D * LANES);
}

/* y [n][E] = x [n][D] w^T + bias, or added to y, or multiplied with y. `space` [ceil(n/16)][D][16] holds the rows side by side. */
void anypo_product(const float *x, const float *panels, const float *bias, float *y, float *space, long n, long D, long E, int what) {
    long tiles = (n + LANES - 1) / LANES;
    for (long t = 0; t < tiles; t++) side_by_side(x + t * LANES * D, tile(n, t), D, space + t * D * LANES);
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (E + LANES - 1) / LANES; p++) {
        long first = p * LANES, outputs = tile(E, p);
        for (long t = 0; t < tiles; t++) {
            lanes sum[LANES];
            long rows = tile(n, t);
            const float *side = space + t * D * LANES, *w = panels + p * D * LANES;
            if (rows <= 4) panel(4, side, w, D, sum);
            else if (rows <= 8) panel(8, side, w, D, sum);
            else panel(16, side, w, D, sum);
            for (long r = 0; r < rows; r++) {
                float *out = y + (t * LANES + r) * E + first;
                for (long e = 0; e < outputs; e++) {
                    float value = sum[r][e] + (bias ? bias[first + e] : 0);
                    out[e] = what == ADD ? out[e] + value : what == MULTIPLY ? out[e] * value : value;
                }
            }
        }
    }
}
