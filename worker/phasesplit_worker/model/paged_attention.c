/* Attention of one query token per sequence over a paged float32 KV cache, for one layer.
 *
 * Plain C so that any compiler builds it in about a second and any interpreter loads it: no Python
 * and no torch headers. The caller checks shapes; nothing here allocates or keeps state.
 *
 * kv: blocks of `block_stride` floats; this layer's keys lie `k_offset` and its values `v_offset`
 * floats into a block, each [block_size, kv_heads, head_dim].
 * query: rows of `query_stride` floats, [kv_heads, group, head_dim] each (group query heads share
 * one KV head). out: [num_sequences, kv_heads, group, head_dim], dense.
 * scratch: kv_heads * group * max(context_lengths) floats.
 */

#include <math.h>
#include <stdint.h>

/* exp for x <= 0, relative error below 2e-7; plain arithmetic, so that the compiler vectorises it. */
static inline float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float rounded = (float)(int32_t)(x * 1.44269504089f - 0.5f);
    const float r = (x - rounded * 0.693359375f) + rounded * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale;
    scale.bits = ((int32_t)rounded + 127) << 23;
    return p * scale.value;
}

static inline void softmax(float *scores, int64_t count) {
    float largest = -INFINITY;
    for (int64_t t = 0; t < count; t++) largest = scores[t] > largest ? scores[t] : largest;
    float sum = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        const float e = exp_nonpositive(scores[t] - largest);
        scores[t] = e;
        sum += e;
    }
    const float inverse = 1.0f / sum;
    for (int64_t t = 0; t < count; t++) scores[t] *= inverse;
}

/* One sequence. `head_dim` and `group` are constants wherever this is inlined below. */
static inline __attribute__((always_inline)) void attend(
    const float *restrict query, const float *restrict kv, int64_t block_stride, int64_t k_offset,
    int64_t v_offset, const int32_t *restrict block_table, int64_t context, float *restrict out,
    float *restrict scratch, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t block_size,
    float scale) {
    const int64_t row = kv_heads * head_dim;
    const int64_t num_blocks = (context + block_size - 1) / block_size;
    for (int64_t b = 0; b < num_blocks; b++) {
        const float *keys = kv + (int64_t)block_table[b] * block_stride + k_offset;
        const int64_t first = b * block_size;
        const int64_t count = context - first < block_size ? context - first : block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int64_t t = 0; t < count; t++) {
                const float *key = keys + t * row + h * head_dim;
                for (int64_t g = 0; g < group; g++) {
                    const float *q = query + (h * group + g) * head_dim;
                    float sum = 0.0f;
                    for (int64_t d = 0; d < head_dim; d++) sum += q[d] * key[d];
                    scratch[(h * group + g) * context + first + t] = sum * scale;
                }
            }
        }
    }
    for (int64_t h = 0; h < kv_heads * group; h++) softmax(scratch + h * context, context);
    for (int64_t i = 0; i < kv_heads * group * head_dim; i++) out[i] = 0.0f;
    for (int64_t b = 0; b < num_blocks; b++) {
        const float *values = kv + (int64_t)block_table[b] * block_stride + v_offset;
        const int64_t first = b * block_size;
        const int64_t count = context - first < block_size ? context - first : block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int64_t g = 0; g < group; g++) {
                const float *weights = scratch + (h * group + g) * context + first;
                float *restrict target = out + (h * group + g) * head_dim;
                for (int64_t t = 0; t < count; t++) {
                    const float *value = values + t * row + h * head_dim;
                    const float weight = weights[t];
                    for (int64_t d = 0; d < head_dim; d++) target[d] += weight * value[d];
                }
            }
        }
    }
}

#define ATTEND(GROUP, HEAD_DIM)                                                                    \
    attend(query + s * query_stride, kv, block_stride, k_offset, v_offset,                         \
           block_tables + s * max_blocks, context_lengths[s], out + s * out_stride, scratch,       \
           kv_heads, GROUP, HEAD_DIM, block_size, scale)

void phasesplit_paged_decode_f32(
    const float *query, int64_t query_stride, const float *kv, int64_t block_stride,
    int64_t k_offset, int64_t v_offset, const int32_t *block_tables, int64_t max_blocks,
    const int32_t *context_lengths, float *out, float *scratch, int64_t num_sequences,
    int64_t kv_heads, int64_t group, int64_t head_dim, int64_t block_size, float scale) {
    const int64_t out_stride = kv_heads * group * head_dim;
    for (int64_t s = 0; s < num_sequences; s++) {
        if (head_dim == 64 && group == 2) ATTEND(2, 64);
        else if (head_dim == 64 && group == 3) ATTEND(3, 64);
        else if (head_dim == 64 && group == 4) ATTEND(4, 64);
        else if (head_dim == 64) ATTEND(group, 64);
        else if (head_dim == 128) ATTEND(group, 128);
        else ATTEND(group, head_dim);
    }
}
