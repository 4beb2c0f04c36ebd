// What the library offers to other languages: plain C functions and structures, matched by kernels/cpu_library.py.
#pragma once

#include <cstdint>

constexpr int64_t kInterfaceVersion = 3;
constexpr int64_t kMostHeadDim = 512;

extern "C" {

enum ElementType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

enum Status : int64_t { kDone = 0, kNoMemory = 1, kOutOfRange = 2 };

// Weights are [rows, depth] with contiguous rows, of the model's element type; norms and biases are float32; biases may
// be null.
struct DecoderLayer {
    const float* attention_norm;
    const void* query;
    const float* query_bias;
    const float* query_norm;  // of each head, or null
    const void* key;
    const float* key_bias;
    const float* key_norm;
    const void* value;
    const float* value_bias;
    const void* output;
    const float* output_bias;
    const float* feed_forward_norm;
    const void* gate;
    const float* gate_bias;
    const void* up;
    const float* up_bias;
    const void* down;
    const float* down_bias;
    int64_t is_rotary;
    int64_t window;  // tokens back that a query sees, itself included; 0 is all
};

struct DecoderShape {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
    int64_t weight_type;
    int64_t kv_type;
    int64_t block_size, num_blocks;
    int64_t num_positions;   // rows of cosines and sines
    const float* cosines;    // [num_positions, head_dim / 2]
    const float* sines;
    const void* embedding;   // [vocabulary, hidden]
    const float* final_norm;
    const void* head;        // [vocabulary, hidden]
    const float* head_bias;
    float norm_epsilon, attention_scale, embedding_scale, residual_scale, logits_scale, unused;
};

// Integers are int64, arrays contiguous, as in engine/forward_batch.py.
struct DecoderBatch {
    int64_t num_tokens, num_sequences, num_logits, table_stride;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int64_t* block_tables;
    const int64_t* logits_rows;
    void* pool;     // [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]
    float* logits;  // [num_logits, vocabulary]
    int64_t* layers_done;  // may be null; counted up when a layer's K and V are in the pool
};

// Attention of a ragged batch over one layer of the pool; what is new must be in the pool already.
struct AttentionCall {
    int64_t num_tokens, num_sequences, heads, kv_heads, head_dim, block_size, num_blocks, num_layers, layer;
    int64_t table_stride, kv_type, window;
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int64_t* block_tables;
    const void* pool;
    const float* query;  // [num_tokens, heads, head_dim]
    float* output;       // [num_tokens, heads, head_dim]
    const float* sinks;  // [heads], or null
    float scale, soft_cap;
};

// [num_tokens, depth] times the transpose of [rows, depth].
struct ProductCall {
    int64_t num_tokens, rows, depth, weight_type;
    const float* tokens;
    const void* weights;
    const float* bias;  // [rows], or null
    float* output;      // [num_tokens, rows]
};

// How the token of one row is chosen; kernels/token_choice.py says what the words mean.
struct TokenChoice {
    const float* logits;  // [vocabulary]
    double top_p;         // 1 keeps all
    int64_t top_k;        // 0 keeps all
    uint64_t noise_key;   // its two words, the first one on top
    float scale;          // 1 / temperature, or 0 for the largest logit
    float least_score;    // -inf keeps all
    int64_t token;        // the result; -1 for a row with NaN, +inf, or nothing but -inf
};

// What is asked about one row, and below `top_logits` the answers.
struct TokenRank {
    const float* logits;  // [vocabulary]
    int64_t token;
    int64_t top;          // most likely tokens wanted
    int64_t* top_tokens;  // [top], of equals the lowest first
    float* top_logits;    // [top], descending
    int64_t total;        // of all weights, in units of 2^-40 of the largest; 0 for a row as above
    int64_t rank;         // of the token: 1 and the number of larger logits
    float largest, chosen;
};

}
